"""bitsandbytes' 4-bit operators on halfbyte's kernels, for programs that stay as they are.

    import halfbyte.integrations.bitsandbytes as switch
    switch.enable()         # every caller of the 4-bit operators: models made before and after, compiled code too
    print(switch.status())  # what served how many calls, and what was passed on to bitsandbytes, with the reason
    switch.disable()

The operators' registered implementations are replaced in torch's dispatcher, below autograd, which is the one place
that all callers pass: modules, functions, compiled graphs, servers. Replacing Python attributes reaches none that was
compiled. What halfbyte cannot serve is passed on to the implementation that was there before, and counted.
"""

from __future__ import annotations

import atexit
import copy
import gc
import logging
import os
import sys
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKeySet
from torch.utils.weak import WeakIdKeyDictionary

from .. import __version__
from ..device import arch_of
from ..formats import PackedWeight, get_format
from ..formats.table import BNB_BLOCKSIZES, FP4, NF4
from ..kernels import Problem
from ..kernels.cpu import library
from ..kernels.cpu_decode import decode
from ..kernels.registry import DTYPES
from ..ops import linear_on_tensors, linear_op
from ..plan import plan

VARIABLE = "HALFBYTE_BITSANDBYTES"  # "1": on as soon as halfbyte is imported
STATUS_VARIABLE = "HALFBYTE_STATUS"  # "1": print the counters when the process ends
# On a GPU bitsandbytes' own dequantize_4bit stays: halfbyte has no faster way to write a dense matrix there.
OPERATORS = {"CPU": ("gemm_4bit", "gemv_4bit", "dequantize_4bit"), "CUDA": ("gemm_4bit", "gemv_4bit")}
GATE = "support_avx512bf16_for_cpu"  # the attribute of Linear4bit that says whether to repack on this CPU
_FORMATS = {
    (family, blocksize, nested): f"{family}-{blocksize}" + ("-nested" if nested else "")
    for family in ("nf4", "fp4")
    for blocksize in BNB_BLOCKSIZES
    for nested in (False, True)
}

logger = logging.getLogger("halfbyte")
_lock = threading.RLock()
_active: _Switch | None = None


@dataclass(frozen=True)
class Status:
    """What the switch has done in this process since the counters were last at zero.

    served: operator -> kernel -> rows of x ("0", "1", "2-8", "9-64", "65+"; "weight": it was decoded) -> calls.
    fallbacks: operator -> reason -> calls that bitsandbytes' own implementation served.
    A CUDA graph's replay runs no Python: its calls are counted once, when it is captured.
    """

    enabled: bool
    served: dict[str, dict[str, dict[str, int]]]
    fallbacks: dict[str, dict[str, int]]

    @property
    def hits(self) -> int:
        """Calls served by halfbyte."""
        return sum(
            count for by_kernel in self.served.values() for rows in by_kernel.values() for count in rows.values()
        )

    @property
    def misses(self) -> int:
        """Calls passed on to bitsandbytes."""
        return sum(count for reasons in self.fallbacks.values() for count in reasons.values())

    def __str__(self) -> str:
        lines = [
            f"halfbyte for bitsandbytes: {'on' if self.enabled else 'off'}; {self.hits:,} calls served, "
            f"{self.misses:,} passed on"
        ]
        for operator, by_kernel in self.served.items():
            for kernel, rows in by_kernel.items():
                counts = ", ".join(f"M {bucket}: {count:,}" for bucket, count in rows.items())
                lines.append(f"  {operator} by {kernel}: {counts.replace('M weight', 'weights')}")
        for operator, reasons in self.fallbacks.items():
            lines += [f"  {operator} passed on: {count:,} × {reason}" for reason, count in reasons.items()]
        return "\n".join(lines)


class _Counts:
    """Counters of calls, safe to raise from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        with self._lock:
            self._served: Counter[tuple[str, str, str]] = Counter()
            self._passed: Counter[tuple[str, str]] = Counter()
            self._silent = True

    def serve(self, operator: str, kernel: str, bucket: str) -> None:
        with self._lock:
            self._served[operator, kernel, bucket] += 1
            first, self._silent = self._silent, False
        if first:
            logger.info("bitsandbytes::%s is served by halfbyte's %s", operator, kernel)

    def passed(self, operator: str, reason: str) -> None:
        with self._lock:
            self._passed[operator, reason] += 1

    def status(self, enabled: bool) -> Status:
        served: dict[str, dict[str, dict[str, int]]] = {}
        fallbacks: dict[str, dict[str, int]] = {}
        with self._lock:
            for (operator, kernel, bucket), count in self._served.items():
                served.setdefault(operator, {}).setdefault(kernel, {})[bucket] = count
            for (operator, reason), count in self._passed.items():
                fallbacks.setdefault(operator, {})[reason] = count
        return Status(enabled, served, fallbacks)


_counts = _Counts()


class _Unserved(Exception):
    """A call that goes to bitsandbytes; the message is the reason that `status` shows."""


def enable() -> None:
    """Serve bitsandbytes' 4-bit operators in this process from now on. Does nothing where it is on already.

    It may come before or after models are built, run or compiled. Weights that bitsandbytes has repacked for its own
    AVX-512 kernels are put back into the checkpoint's layout, so no forward pass may run in another thread meanwhile.

    Raises ModuleNotFoundError without bitsandbytes, RuntimeError where bitsandbytes or torch is too old.
    """
    global _active
    with _lock:
        if _active is None:
            _active = _Switch()


def disable() -> None:
    """Give the operators back to bitsandbytes, as they were. Does nothing where it is off already."""
    global _active
    with _lock:
        if _active is not None:
            _active.close()
            _active = None


@contextmanager
def enabled() -> Iterator[None]:
    """`enable()` for a block; afterwards on or off, as before it."""
    with _lock:
        before = _active is not None
        enable()
    try:
        yield
    finally:
        if not before:
            disable()


def status() -> Status:
    """Whether it is on, and the counters; `print(status())` is for people."""
    return _counts.status(_active is not None)


def reset_counters() -> None:
    """Set all counters to zero."""
    _counts.reset()


def environment() -> dict[str, Any]:
    """What decides here, for `halfbyte status`: {"enabled": bool, "versions": {package: version}, "facts": {…}}.

    "enabled" is whether HALFBYTE_BITSANDBYTES=1 turned it on in this very process.
    """
    versions = {"halfbyte": __version__, "torch": torch.__version__}
    for package in ("bitsandbytes", "transformers", "peft"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    loaded = library()
    facts = {
        VARIABLE: os.environ.get(VARIABLE, "not set"),
        "CPU kernels": loaded.isa_name if loaded else "not installed",
        "GPU": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "can pass calls on": "yes" if hasattr(torch.library, "get_kernel") else "no: torch is older than 2.9",
    }
    return {"enabled": _active is not None, "versions": versions, "facts": facts}


def follow_environment() -> None:
    """Do what HALFBYTE_BITSANDBYTES=1 and HALFBYTE_STATUS=1 ask for; `import halfbyte` calls this where one is set.

    Where it cannot be switched on, it says so in the log: a variable of the shell must not break programs without need
    for it.
    """
    if os.environ.get(VARIABLE) == "1":
        try:
            enable()
        except (ImportError, RuntimeError) as error:
            logger.warning("%s=1 has no effect: %s", VARIABLE, error)
    if os.environ.get(STATUS_VARIABLE) == "1":
        report_at_exit()


@lru_cache(maxsize=1)
def report_at_exit() -> None:
    """Print the counters on standard error when the process ends, and the log's lines until then."""
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler())
        logger.setLevel(logging.INFO)
    atexit.register(lambda: print(status(), file=sys.stderr))


class _Switch:
    """The replaced implementations; they last until `close`."""

    def __init__(self) -> None:
        import bitsandbytes
        from bitsandbytes.nn import Linear4bit

        if not hasattr(torch.ops.bitsandbytes, "gemm_4bit"):
            raise RuntimeError(
                f"bitsandbytes {bitsandbytes.__version__} has no operator gemm_4bit; install 0.50 or newer"
            )
        if not hasattr(torch.library, "get_kernel"):
            raise RuntimeError(
                f"torch {torch.__version__} cannot hand out an operator's implementation (torch.library.get_kernel), "
                "so calls could not be passed on; install torch 2.9 or newer"
            )
        self.linear_class: Any = Linear4bit
        self.library: Any = torch.library.Library("bitsandbytes", "IMPL")  # type: ignore[no-untyped-call]
        servers: dict[str, Callable[..., Tensor]] = {
            "gemm_4bit": _gemm,
            "gemv_4bit": _gemv,
            "dequantize_4bit": _dequantize,
        }
        self.gated = False
        self.gates: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # module -> what its GATE was
        try:
            for key, operators in OPERATORS.items():
                for operator in operators:
                    original = torch.library.get_kernel(f"bitsandbytes::{operator}", key)
                    self.replace(operator, key, partial(_serve, operator, servers[operator], original))
            if library() is not None:
                self.stop_repacking()
        except BaseException:
            self.close()
            raise

    def replace(self, operator: str, key: str, implementation: Callable[..., Tensor]) -> None:
        with warnings.catch_warnings():  # torch warns that it overrides a kernel, which is the point
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            self.library.impl(operator, implementation, key, with_keyset=True, allow_override=True)

    def stop_repacking(self) -> None:
        """Keep Linear4bit in eval on the checkpoint's bytes.

        With AVX-512 BF16 its `forward` repacks the weight in Python, rounds the scales to bf16 and drops their nested
        form; no operator is involved, so the dispatcher cannot help. What decides is an attribute of each module,
        `support_avx512bf16_for_cpu`. A property of that name on the class comes before the modules' own attributes, so
        that modules made from now on do not repack either; deleting it undoes that. Modules made before get the
        attribute set as well, until `close`: code compiled for them, which has the repacking in its graph, is guarded
        by it.
        """

        def assign(module: Any, value: Any) -> None:
            self.gates.pop(module, None)
            module.__dict__[GATE] = value

        setattr(self.linear_class, GATE, property(lambda module: False, assign))
        self.gated = True
        for module in gc.get_objects():
            if issubclass(type(module), self.linear_class):
                if module.__dict__.get(GATE):
                    self.gates[module] = module.__dict__[GATE]
                    module.__dict__[GATE] = False
                _put_back(module)

    def close(self) -> None:
        if self.gated:
            delattr(self.linear_class, GATE)
        for module, gate in self.gates.items():
            module.__dict__[GATE] = gate
        self.library._destroy()


def _put_back(module: Any) -> None:
    """Undo bitsandbytes' repacking of one Linear4bit: codes exactly, scales as the bf16 numbers that they became.

    bitsandbytes' own inverse would quantise nested scales anew, and leaves the others transposed: only the codes are
    taken from it. The scales are then plain fp32, so repacking again gives the same bytes.
    """
    from bitsandbytes.functional import _convert_weight_packed_for_cpu_inverse

    weight = module.weight
    state: Any = getattr(weight, "quant_state", None)
    if not getattr(state, "packing_format_for_cpu", False):
        return
    scratch = copy.copy(state)
    scratch.original_nested = False
    weight.data, _ = _convert_weight_packed_for_cpu_inverse(weight.data, scratch)
    state.absmax = state.absmax.t().float().reshape(-1)
    state.state2 = state.offset = None
    state.dtype = state.original_dtype
    state.packing_format_for_cpu = False


def _serve(operator: str, server: Callable[..., Tensor], original: Any, keyset: DispatchKeySet, *args: Any) -> Tensor:
    """The implementation that the dispatcher calls: halfbyte's, or else the one that was there."""
    try:
        return server(*args)
    except (_Unserved, TypeError, ValueError) as error:  # the last two: halfbyte's own checks refused an argument
        _counts.passed(operator, str(error))
    result: Tensor = original.call_boxed(keyset, *args)
    return result


def _gemm(
    x: Tensor,
    codes: Tensor,
    shape: Sequence[int],
    absmax: Tensor,
    blocksize: int,
    quant_type: str,
    bias: Tensor | None = None,
    absmax_8bit: Tensor | None = None,
    absmax_code: Tensor | None = None,
    absmax_offset: Tensor | None = None,
) -> Tensor:
    """bitsandbytes::gemm_4bit. Nested scales: `absmax` is their second level, `absmax_8bit` the first."""
    if absmax_8bit is None:
        scales = [_flat_scales(absmax)]
    elif absmax_code is None or absmax_offset is None:
        raise _Unserved("nested scales without absmax_code or absmax_offset")
    else:
        scales = [absmax_8bit, _flat_scales(absmax), absmax_code, _scalar(absmax_offset)]
    return _multiply("gemm_4bit", x, codes, shape, scales, blocksize, quant_type, bias)


def _gemv(x: Tensor, codes: Tensor, shape: Sequence[int], absmax: Tensor, table: Tensor, blocksize: int) -> Tensor:
    """bitsandbytes::gemv_4bit, for any number of rows: on some CPUs it is what Linear4bit calls for all of them."""
    if absmax.dim() == 2:
        raise _Unserved("the weight was repacked by bitsandbytes while halfbyte was off")
    return _multiply("gemv_4bit", x, codes, shape, [_flat_scales(absmax)], blocksize, _family(table), None)


def _multiply(
    operator: str,
    x: Tensor,
    codes: Tensor,
    shape: Sequence[int],
    scales: list[Tensor],
    blocksize: int,
    family: str,
    bias: Tensor | None,
) -> Tensor:
    key = _FORMATS.get((family, blocksize, len(scales) > 1))
    if key is None or len(shape) != 2 or x.dim() == 0:
        raise _Unserved(f"arguments that bitsandbytes does not define: {family}-{blocksize}, shape {list(shape)}")
    if bias is not None and bias.dtype != x.dtype:
        raise _Unserved("a bias of another dtype than x")  # halfbyte takes fp32; bitsandbytes raises
    n, k = shape
    m = x.numel() // max(1, k)
    kernel = _kernel_name(key, x.dtype, m, n, k, x.device)
    if kernel is None:
        raise _Unserved(f"no kernel for {key} with x in {x.dtype}, M {_bucket(m)}, on {x.device.type}")
    # The dispatcher's second round is worth its microseconds only where autograd or autocast have something to do.
    plain = not (torch.is_grad_enabled() and x.requires_grad) and not torch.is_autocast_enabled(x.device.type)
    out = (linear_on_tensors if plain else linear_op)(x, [_octets(codes), *scales], bias, key, n, k)
    _counts.serve(operator, kernel, _bucket(m))
    return out


def _bucket(m: int) -> str:
    if m < 2:
        return str(m)
    return "2-8" if m <= 8 else "9-64" if m <= 64 else "65+"


def _dequantize(
    codes: Tensor, absmax: Tensor, blocksize: int, quant_type: str, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """bitsandbytes::dequantize_4bit on a CPU, with bitsandbytes' values: fp32 products, then rounded to `dtype`.

    What bitsandbytes has a C++ kernel for, it keeps where that was measured faster: 16-bit results of even K and blocks
    below 2048. The others it computes in compiled torch.
    """
    if dtype != torch.float32 and blocksize < 2048 and len(shape) > 1 and shape[-1] % 2 == 0:
        raise _Unserved("bitsandbytes' own kernel decodes to 16 bits with the same values, and faster")
    key = _FORMATS.get((quant_type, blocksize, False))
    if key is None or dtype not in DTYPES:
        raise _Unserved(f"arguments that bitsandbytes does not define: {quant_type}-{blocksize} to {dtype}")
    if len(shape) < 2:
        raise _Unserved("a shape of fewer than two dimensions")  # bitsandbytes returns [1, n] or [n], depending on n
    if library() is None:
        raise _Unserved("the library of CPU kernels is not installed")
    k = shape[-1]
    out = torch.empty(shape, dtype=dtype)
    matrix = out.view(-1, k) if k else out
    weight = PackedWeight(
        get_format(key), (matrix.shape[0], k), {"codes": _octets(codes), "absmax": _flat_scales(absmax)}
    )
    decode(weight, matrix)
    _counts.serve("dequantize_4bit", "cpu_decode", "weight")
    return out


@lru_cache(maxsize=4096)
def _kernel_name(key: str, dtype: torch.dtype, m: int, n: int, k: int, device: torch.device) -> str | None:
    """The kernel that is planned for a problem; None where that is plain torch: bitsandbytes' own is no slower."""
    kernel = plan(Problem(get_format(key), dtype, m, n, k, arch_of(device))).kernel
    return None if kernel.backend == "torch" else kernel.name


def _octets(codes: Tensor) -> Tensor:
    """The codes as uint8 [bytes], whatever they are stored as; a view."""
    if not codes.is_contiguous():
        raise _Unserved("codes that are not contiguous")
    flat = codes.view(-1)
    return flat if flat.dtype == torch.uint8 else flat.view(torch.uint8)


def _flat_scales(absmax: Tensor) -> Tensor:
    """fp32 [blocks]. A model-wide cast leaves 16-bit numbers: widening them is exact."""
    if absmax.dtype == torch.float16 or absmax.dtype == torch.bfloat16:
        absmax = absmax.float()
    return absmax if absmax.dim() == 1 else absmax.reshape(-1)


def _scalar(offset: Tensor) -> Tensor:
    """The nested offset as fp32 without dimensions, as torch would take it in bitsandbytes' own sum."""
    if offset.dtype != torch.float32 and offset.is_floating_point():
        offset = offset.float()
    return offset if offset.dim() == 0 or offset.numel() != 1 else offset.reshape(())


_families: Any = WeakIdKeyDictionary()  # codebook -> (its version, family)


def _family(table: Tensor) -> str:
    """Whether a codebook is NF4's or FP4's; remembered for each tensor, as reading it on a GPU waits for the GPU."""
    changes = -1 if table.is_inference() else table._version
    known = _families.get(table)
    if known is not None and changes >= 0 and known[0] == changes:
        return str(known[1])
    if table.is_cuda and torch.cuda.is_current_stream_capturing():
        raise _Unserved("a codebook first seen while a CUDA graph is captured")  # reading it would end the capture
    family = {NF4: "nf4", FP4: "fp4"}.get(tuple(table.tolist()))
    if family is None:
        raise _Unserved("a codebook that is neither NF4's nor FP4's")
    _families[table] = (changes, family)
    return family
