"""CUDA C++ compiled on first use by NVRTC, kept on disk, loaded once a process.

A compiled kernel's name on disk is a hash of its source, its options and the compiler's version, so that nothing stale
is ever found. Entries are written beside their place and renamed into it: any number of processes may compile the same
kernel at once, and a reader sees a whole entry or none. An entry carries a checksum; a damaged one is rebuilt.
Threads of a process compile different kernels side by side, and each kernel once.

The folder is $HALFBYTE_CACHE, or halfbyte/kernels under $XDG_CACHE_HOME or ~/.cache. Where it cannot be written, a
folder of this user's under the temporary one serves, with a notice.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import threading
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

SOURCES = Path(__file__).parent / "cuda"
MAGIC = b"halfbyte cubin 1\n"
DIGEST_BYTES = 32

_lock = threading.Lock()
_importing = threading.Lock()  # cuda-core's first import fails where two threads are at it
_cubins: dict[str, bytes] = {}
_turns: dict[str, threading.Lock] = {}  # for threads that want one and the same kernel
_kernels: dict[tuple[str, int], Any] = {}


class CompileError(RuntimeError):
    """NVRTC refused a kernel; the message holds its log."""


def missing() -> str | None:
    """Why kernels cannot be compiled here: the reason in words, or None."""
    try:
        import cuda.bindings.nvrtc
        import cuda.core  # noqa: F401
    except (ImportError, RuntimeError) as error:
        return f"needs cuda-core, cuda-bindings and nvidia-cuda-nvrtc (pip install 'halfbyte[cuda]'): {error}"
    return None


def compile(stem: str, arch: str, macros: Mapping[str, int], source: str | None = None) -> bytes:
    """The cubin of cuda/<stem>.cu for `arch` ("sm_90a") with macros defined; from memory, disk or the compiler.

    source: CUDA C++ to compile in place of that file.

    Raises CompileError with the compiler's log, and ImportError where the CUDA packages are missing.
    """
    source = source or _source(stem)
    key = _key(source, arch, macros)
    with _lock:
        turn = _turns.setdefault(key, threading.Lock())
    with turn:
        cubin = _cubins.get(key)
        if cubin is None:
            path = cache_folder() / f"{stem}-{arch}-{key[:24]}.cubin"
            cubin = _read(path)
            if cubin is None:
                cubin = _compile(source, stem, arch, macros)
                _publish(path, cubin)
            _cubins[key] = cubin
        return cubin


def load(
    stem: str, arch: str, macros: Mapping[str, int], device: int, shared_bytes: int, source: str | None = None
) -> Any:
    """The kernel `stem` (an extern "C" function), ready to be launched on CUDA device `device`: a CUkernel.

    shared_bytes: dynamic shared memory it will be given.

    Raises RuntimeError inside graph capture where the kernel is not loaded yet, as loading is not allowed there.
    """
    key = (_key(source or _source(stem), arch, macros), device)
    with _lock:
        kernel = _kernels.get(key)
    if kernel is not None:
        return kernel
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{stem} is not loaded yet and cannot be inside CUDA graph capture: call halfbyte.prepare(model), or run "
            "the layer once with this M, before capturing"
        )
    from cuda.bindings import driver

    cubin = compile(stem, arch, macros, source)
    library = check(driver.cuLibraryLoadData(cubin, [], [], 0, [], [], 0))
    kernel = check(driver.cuLibraryGetKernel(library, stem.encode()))
    limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    check(driver.cuKernelSetAttribute(limit, shared_bytes, kernel, check(driver.cuDeviceGet(device))))
    with _lock:
        return _kernels.setdefault(key, kernel)


def function(kernel: Any) -> int:
    """A loaded kernel in the current context: launching that spares the driver a look-up at each launch."""
    from cuda.bindings import driver

    return int(check(driver.cuKernelGetFunction(kernel)))


def check(result: tuple[Any, ...]) -> Any:
    """The value of a CUDA binding's result. Raises RuntimeError with the error's name where it failed."""
    if int(result[0]) != 0:
        raise RuntimeError(f"CUDA: {result[0].name}")
    return result[1] if len(result) > 1 else None


@cache
def cache_folder() -> Path:
    """The folder of compiled kernels, made if need be; the temporary one where the usual one cannot be written."""
    wanted = os.environ.get("HALFBYTE_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(wanted or Path(base) / "halfbyte" / "kernels").expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
        fallback = Path(tempfile.gettempdir()) / f"halfbyte-{user}"
        fallback.mkdir(mode=0o700, exist_ok=True)
        if hasattr(os, "getuid") and fallback.stat().st_uid != os.getuid():  # another user's: would run their code
            fallback = Path(tempfile.mkdtemp(prefix="halfbyte-"))
        warnings.warn(
            f"halfbyte cannot write {folder} ({error.strerror}); compiled kernels are kept in {fallback}. "
            "Set HALFBYTE_CACHE to a folder that can be written.",
            stacklevel=2,
        )
        return fallback


@cache
def _source(stem: str) -> str:
    """The text of cuda/<stem>.cu with the files beside it that it includes, so that one hash covers all."""
    text = (SOURCES / f"{stem}.cu").read_text()
    return re.sub(r'^#include "([\w.]+)"\n', lambda found: (SOURCES / found[1]).read_text(), text, flags=re.MULTILINE)


@cache
def _compiler_version() -> str:
    from cuda.bindings import nvrtc

    error, major, minor = nvrtc.nvrtcVersion()
    if int(error) != 0:
        raise RuntimeError(f"NVRTC: {error.name}")
    return f"nvrtc {major}.{minor}"


def _key(source: str, arch: str, macros: Mapping[str, int]) -> str:
    parts = (source, arch, _compiler_version(), *(f"{name}={macros[name]}" for name in sorted(macros)))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _compile(source: str, stem: str, arch: str, macros: Mapping[str, int]) -> bytes:
    with _importing:
        from cuda.core import Program, ProgramOptions

    defines = [(name, str(value)) for name, value in sorted(macros.items())]
    options = ProgramOptions(name=f"{stem}.cu", arch=arch, std="c++17", define_macro=defines)
    try:
        return bytes(Program(source, "c++", options).compile("cubin").code)
    except Exception as error:  # cuda-core raises its own type, with NVRTC's log in the message
        raise CompileError(f"{stem}.cu for {arch} with {dict(macros)}: {error}") from error


def _publish(path: Path, cubin: bytes) -> None:
    """Write an entry whole or not at all. A full or vanished disk costs the next process a compilation, no more."""
    try:
        handle, beside = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(MAGIC + hashlib.sha256(cubin).digest() + cubin)
            os.replace(beside, path)
        except BaseException:
            Path(beside).unlink(missing_ok=True)
            raise
    except OSError as error:
        warnings.warn(f"halfbyte could not keep a compiled kernel in {path.parent}: {error}", stacklevel=2)


def _read(path: Path) -> bytes | None:
    """The cubin of an entry; None where there is none or it is damaged."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    head = len(MAGIC) + DIGEST_BYTES
    cubin = data[head:]
    whole = data.startswith(MAGIC) and data[len(MAGIC) : head] == hashlib.sha256(cubin).digest()
    return cubin if whole and cubin else None
