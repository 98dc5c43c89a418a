"""Loads the shared library of CPU kernels with ctypes and mirrors its C structs (abi.hpp)."""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from threading import Lock

import torch

NAME = "halfbyte_cpu.so"
ABI_VERSION = 2
ISA_VARIABLE = "HALFBYTE_CPU_ISA"


class WeightStruct(ctypes.Structure):
    """HbWeight: a packed weight as pointers into its parts and what they mean."""

    _fields_ = (
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("second", ctypes.c_void_p),
        ("map", ctypes.c_void_p),
        ("constant", ctypes.c_void_p),
        ("zeros", ctypes.c_void_p),
        ("codebook", ctypes.c_float * 16),
        ("order", ctypes.c_int32 * 8),
        ("zero_order", ctypes.c_int32 * 8),
        ("layout", ctypes.c_int32),
        ("elements", ctypes.c_int32),
        ("record_bytes", ctypes.c_int32),
        ("record_start", ctypes.c_int32),
        ("span", ctypes.c_int32),
        ("high_first", ctypes.c_int32),
        ("blocksize", ctypes.c_int32),
        ("scale_kind", ctypes.c_int32),
        ("scale_start", ctypes.c_int32),
        ("scale_dtype", ctypes.c_int32),
        ("offset_kind", ctypes.c_int32),
        ("offset_start", ctypes.c_int32),
        ("zero_plus_one", ctypes.c_int32),
    )


class CallStruct(ctypes.Structure):
    """HbCall: one multiply."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("m", ctypes.c_int64),
        ("x_stride", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
        ("bias_dtype", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("bias_stride", ctypes.c_int64),
    )


class ShrinkStruct(ctypes.Structure):
    """HbShrink: what adapters make of x."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("a", ctypes.c_void_p),
        ("spans", ctypes.c_void_p),
        ("index", ctypes.c_void_p),
        ("h", ctypes.c_void_p),
        ("m", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("x_stride", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("slots", ctypes.c_int64),
        ("rows_of_a", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
        ("a_dtype", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    )


class ExpandStruct(ctypes.Structure):
    """HbExpand: what adapters add to the outputs."""

    _fields_ = (
        ("h", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("scalings", ctypes.c_void_p),
        ("index", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("m", ctypes.c_int64),
        ("n", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("slots", ctypes.c_int64),
        ("elements_of_b", ctypes.c_int64),
        ("b_dtype", ctypes.c_int32),
        ("bias_dtype", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    )


STRUCTS = (WeightStruct, CallStruct, ShrinkStruct, ExpandStruct)


class Library:
    """The loaded library. Raises OSError where the file cannot be loaded or is of another version of halfbyte."""

    def __init__(self, path: Path) -> None:
        self.path = path
        handle = ctypes.CDLL(str(path))
        handle.hb_isa_name.restype = ctypes.c_char_p
        handle.hb_set_gomp.argtypes = (ctypes.c_void_p,)
        handle.hb_set_gomp.restype = None
        handle.hb_linear.argtypes = (ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)
        handle.hb_decode.argtypes = (
            *(ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64),
            *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_int32),
        )
        handle.hb_shrink.argtypes = handle.hb_expand.argtypes = (ctypes.c_int32, ctypes.c_void_p)
        if handle.hb_abi_version() != ABI_VERSION or any(
            handle.hb_struct_bytes(i) != ctypes.sizeof(struct) for i, struct in enumerate(STRUCTS)
        ):
            raise OSError(f"{path} was built from another version of halfbyte; rebuild it")
        gomp = _gomp_parallel()
        if gomp is not None:
            handle.hb_set_gomp(gomp)
        self.shares_torch_threads = gomp is not None
        self.linear = handle.hb_linear
        self.decode = handle.hb_decode
        self.shrink = handle.hb_shrink
        self.expand = handle.hb_expand
        names = [handle.hb_isa_name(i).decode() for i in range(handle.hb_isa_count())]
        self.isas = {name: i for i, name in enumerate(names) if handle.hb_isa_available(i)}
        self.compiled: tuple[str, ...] = tuple(names)

    @cached_property
    def isa(self) -> int:
        """The instruction set to use: the first that this processor has, or what HALFBYTE_CPU_ISA asks for.

        Raises RuntimeError where the one asked for is unknown or this processor lacks it.
        """
        wanted = os.environ.get(ISA_VARIABLE)
        if not wanted:
            return min(self.isas.values())
        if wanted not in self.isas:
            why = "this processor does not have it" if wanted in self.compiled else "this build does not know it"
            raise RuntimeError(f"{ISA_VARIABLE}={wanted}: {why}; available here: {', '.join(self.isas)}")
        return self.isas[wanted]

    @property
    def isa_name(self) -> str:
        """The name of `isa`."""
        return str(self.compiled[self.isa])


_LOCK = Lock()
_LOADED: list[Library | None] = []


def library() -> Library | None:
    """The library, loaded on first use; None, after one warning, where there is none (a pure Python install)."""
    if _LOADED:
        return _LOADED[0]
    with _LOCK:
        if not _LOADED:
            _LOADED.append(_load(_candidates()))
    return _LOADED[0]


def _candidates() -> list[Path]:
    """Where the library may be: beside this file, or in the other folder that an editable install adds to the path."""
    from . import __path__ as folders

    return [Path(folder) / NAME for folder in folders]


def _load(paths: Iterable[Path]) -> Library | None:
    causes = []
    for path in paths:
        if not path.exists():
            causes.append(f"no {path.name} in {path.parent}")
            continue
        try:
            return Library(path)
        except (OSError, AttributeError) as error:
            causes.append(str(error))
    warnings.warn(
        "halfbyte runs without its CPU kernels and computes with torch, many times slower "
        f"({'; '.join(causes)}). Reinstall it where a C++17 compiler is present.",
        RuntimeWarning,
        stacklevel=3,
    )
    return None


def _gomp_parallel() -> int | None:
    """Address of GOMP_parallel in the OpenMP runtime that torch loaded, so that both share one pool of threads."""
    bundled = sorted((Path(torch.__file__).parent / "lib").glob("lib*omp*"))
    for name in (*map(str, bundled), None):
        try:
            return ctypes.cast(ctypes.CDLL(name).GOMP_parallel, ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
    return None
