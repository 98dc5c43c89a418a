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
import math
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import DispatchKeySet

from .. import __version__
from ..counters import bucket, counts, logger
from ..formats.table import BNB_BLOCKSIZES, FP4, NF4
from ..kernels import Kernel
from ..kernels.cpu import library
from ..kernels.cpu_decode import decode
from ..kernels.registry import DTYPES
from ..ops import CheckedWeight, Memo, check_weight, linear_op

VARIABLE = "HALFBYTE_BITSANDBYTES"  # "1": on as soon as halfbyte is imported
STATUS_VARIABLE = "HALFBYTE_STATUS"  # "1": print the counters when the process ends
# On a GPU bitsandbytes' own dequantize_4bit stays: halfbyte has no faster way to write a dense matrix there.
OPERATORS = {"CPU": ("gemm_4bit", "gemv_4bit", "dequantize_4bit"), "CUDA": ("gemm_4bit", "gemv_4bit")}
OUR_BACKENDS = ("cpu", "cuda")  # whose kernels take bitsandbytes' place; Triton's and torch's may be slower than it
SERVED_ROWS = 64  # of x; beyond, bitsandbytes multiplies a decoded weight, which may be faster
LARGE_LAYER = 1 << 23  # weights, on a CPU
# rows of x up to which codebook_gemm is faster than that, by benchmarks/results/h200-layer.jsonl; more for the largest
GEMM_ROWS, GEMM_ROWS_LARGEST, LARGEST = 256, 512, 1 << 27
GATE = "support_avx512bf16_for_cpu"  # the attribute of Linear4bit that says whether to repack on this CPU
_FORMATS = {
    (family, blocksize, nested): f"{family}-{blocksize}" + ("-nested" if nested else "")
    for family in ("nf4", "fp4")
    for blocksize in BNB_BLOCKSIZES
    for nested in (False, True)
}

_lock = threading.RLock()
_active: _Switch | None = None
# Every implementation that was ever put in place. torch frees one that is taken back, though another thread may have
# looked it up and now wait for the interpreter's lock to enter it; it is not freed while a handle of it is held.
_placed: list[Any] = []


@dataclass(frozen=True)
class Status:
    """What the switch has done in this process since the counters were last at zero.

    served: operator -> kernel -> rows of x ("0", "1", "2-8", "9-64", "65+"; "weight": it was decoded) -> calls. The
    operators "linear" and, with LoRA, "linear_adapters" are halfbyte's own: QuantLinear, and what `halfbyte.optimize`
    put in place.
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


class Unserved(Exception):
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
    """Give the operators back to bitsandbytes, as they were. Does nothing where it is off already.

    Other threads may be calling them: each call is served by halfbyte or by bitsandbytes.
    """
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
    return Status(_active is not None, *counts.totals())


def reset_counters() -> None:
    """Set all counters to zero."""
    counts.reset()


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
                    replace(self.library, operator, key, partial(_serve, operator, servers[operator], original))
            if library() is not None:
                self.stop_repacking()
        except BaseException:
            self.close()
            raise

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
                put_back(module)

    def close(self) -> None:
        if self.gated:
            delattr(self.linear_class, GATE)
        for module, gate in self.gates.items():
            module.__dict__[GATE] = gate
        self.library._destroy()


def replace(library: Any, operator: str, key: str, implementation: Callable[..., Any]) -> None:
    """Have the dispatcher call implementation(keyset, *arguments) for an operator on a device while `library` lasts.

    It may end while other threads call the operator.
    """
    with warnings.catch_warnings():  # torch warns that it overrides a kernel, which is the point
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        library.impl(operator, implementation, key, with_keyset=True, allow_override=True)
    _placed.append(torch.library.get_kernel(f"{library.ns}::{operator}", key))


def put_back(module: Any) -> None:
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
    except (Unserved, TypeError, ValueError) as error:  # the last two: halfbyte's own checks refused an argument
        counts.passed(operator, str(error))
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
        return _multiply("gemm_4bit", x, [codes, absmax], shape, blocksize, quant_type, bias)
    if absmax_code is None or absmax_offset is None:
        raise Unserved("nested scales without absmax_code or absmax_offset")
    tensors = [codes, absmax_8bit, absmax, absmax_code, absmax_offset]
    return _multiply("gemm_4bit", x, tensors, shape, blocksize, quant_type, bias)


def _gemv(x: Tensor, codes: Tensor, shape: Sequence[int], absmax: Tensor, table: Tensor, blocksize: int) -> Tensor:
    """bitsandbytes::gemv_4bit, for any number of rows: on some CPUs it is what Linear4bit calls for all of them."""
    if absmax.dim() == 2:
        raise Unserved("the weight was repacked by bitsandbytes while halfbyte was off")
    return _multiply("gemv_4bit", x, [codes, absmax], shape, blocksize, _family(table), None)


class _Layer(NamedTuple):
    """A weight as bitsandbytes' arguments described it."""

    weight: CheckedWeight
    family: str
    blocksize: int
    shape: Sequence[int]


_layers: Memo[_Layer] = Memo()


def _layer(x: Tensor, tensors: list[Tensor], shape: Sequence[int], blocksize: int, family: str) -> CheckedWeight:
    """The weight in bitsandbytes' tensors: its codes in any dtype and shape, then its scales in halfbyte's order.

    Scales that must be widened are copies, good for this call only; all others stay where they are.
    """
    known = _layers.find(tensors)
    if known is not None and known.shape == shape and known.blocksize == blocksize and known.family == family:
        return known.weight
    nested = len(tensors) > 2
    key = _FORMATS.get((family, blocksize, nested))
    if key is None or len(shape) != 2:
        raise Unserved(f"arguments that bitsandbytes does not define: {family}-{blocksize}, shape {list(shape)}")
    codes, scales = _octets(tensors[0]), tensors[1:]
    if nested:
        parts = [codes, scales[0], flat_scales(scales[1]), scales[2], scalar(scales[3])]
    else:
        parts = [codes, flat_scales(scales[0])]
    weight = check_weight(x, parts, key, *shape)
    if all(scale.dtype == part.dtype for scale, part in zip(scales, parts[1:], strict=True)):
        _layers.keep(tensors, _Layer(weight, family, blocksize, shape))
    return weight


def _multiply(
    operator: str,
    x: Tensor,
    tensors: list[Tensor],
    shape: Sequence[int],
    blocksize: int,
    family: str,
    bias: Tensor | None,
) -> Tensor:
    weight = _layer(x, tensors, shape, blocksize, family)
    if bias is not None and bias.dtype != x.dtype:
        raise Unserved("a bias of another dtype than x")  # halfbyte takes fp32; bitsandbytes raises
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)  # as torch's own multiply inside bitsandbytes' code would
        x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
    m = x.numel() // max(1, shape[1])
    kernel_for(weight, x.dtype, m)
    if x.requires_grad and torch.is_grad_enabled():  # not from MatMul4Bit, which has its own backward
        packed = weight.packed
        out: Tensor = linear_op(x, list(packed.parts.values()), bias, packed.format.key, *packed.shape)
        return out
    return weight.multiply(x, bias, operator)


def kernel_for(weight: CheckedWeight, dtype: torch.dtype, m: int) -> Kernel:
    """The kernel for m rows of x of a dtype; raises Unserved where bitsandbytes is faster, or halfbyte has none."""
    kernel = weight.kernel(dtype, m)
    if kernel.backend not in OUR_BACKENDS:
        key = weight.packed.format.key
        raise Unserved(f"no kernel for {key} with x in {dtype}, M {bucket(m)}, on {weight.device.type}")
    if m > SERVED_ROWS and decoding_is_faster(kernel, dtype, m, weight.packed.shape):
        raise Unserved(f"M {bucket(m)} in {dtype}: bitsandbytes decodes the weight and multiplies, which is faster")
    return kernel


def decoding_is_faster(kernel: Kernel, dtype: torch.dtype, m: int, shape: Sequence[int]) -> bool:
    """Whether more than SERVED_ROWS rows are done sooner if bitsandbytes decodes the weight for torch.

    On a CPU halfbyte does the same, with two bf16 numbers a weight: that is exact and twice the work. In fp32 it
    decodes faster, which is what counts for large layers. On a GPU codebook_gemm decodes weights on their way, which is
    faster for hundreds of rows; for thousands bitsandbytes is, which rounds weights to bf16.
    """
    if kernel.backend == "cuda":
        most = GEMM_ROWS_LARGEST if math.prod(shape) >= LARGEST else GEMM_ROWS
        return kernel.name != "codebook_gemm" or m > most
    return kernel.backend == "cpu" and (dtype != torch.float32 or math.prod(shape) < LARGE_LAYER)


def _dequantize(
    codes: Tensor, absmax: Tensor, blocksize: int, quant_type: str, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """bitsandbytes::dequantize_4bit on a CPU, with bitsandbytes' values: fp32 products, then rounded to `dtype`.

    What bitsandbytes has a C++ kernel for, it keeps where that was measured faster: 16-bit results of even K and blocks
    below 2048. The others it computes in compiled torch.
    """
    if dtype != torch.float32 and blocksize < 2048 and len(shape) > 1 and shape[-1] % 2 == 0:
        raise Unserved("bitsandbytes' own kernel decodes to 16 bits with the same values, and faster")
    if len(shape) < 2:
        raise Unserved("a shape of fewer than two dimensions")  # bitsandbytes returns [1, n] or [n], depending on n
    if dtype not in DTYPES:
        raise Unserved(f"arguments that bitsandbytes does not define: {quant_type}-{blocksize} to {dtype}")
    if library() is None:
        raise Unserved("the library of CPU kernels is not installed")
    k = shape[-1]
    matrix = shape if len(shape) == 2 else [math.prod(shape[:-1]), k]
    weight = _layer(codes, [codes, absmax], matrix, blocksize, quant_type)
    out = torch.empty(shape, dtype=dtype)
    decode(weight.packed, out if matrix is shape else out.view(matrix))
    counts.serve("dequantize_4bit", "cpu_decode", "weight")
    return out


def format_key(state: Any) -> str | None:
    """halfbyte's format of a weight that a QuantState of bitsandbytes describes, or None."""
    nested = state.nested
    if nested and state.state2.blocksize != 256:
        return None
    return _FORMATS.get((state.quant_type, state.blocksize, nested))


def raw_parts(codes: Tensor, state: Any) -> list[Tensor]:
    """The tensors of a weight of bitsandbytes in halfbyte's order: its very own, where their dtypes allow that."""
    with torch._C.DisableTorchFunctionSubclass():  # else Params4bit makes a look at its dtype five times as long
        if codes.dtype != torch.uint8:
            codes = _octets(codes.detach())
    if not state.nested:
        return [codes, flat_scales(state.absmax)]
    outer = state.state2
    return [codes, state.absmax, flat_scales(outer.absmax), outer.code, scalar(state.offset)]


def _octets(codes: Tensor) -> Tensor:
    """The codes as uint8 [bytes], whatever they are stored as; a view."""
    if not codes.is_contiguous():
        raise Unserved("codes that are not contiguous")
    flat = codes.view(-1)
    return flat if flat.dtype == torch.uint8 else flat.view(torch.uint8)


def flat_scales(absmax: Tensor) -> Tensor:
    """fp32 [blocks]. A model-wide cast leaves 16-bit numbers: widening them is exact."""
    if absmax.dtype == torch.float16 or absmax.dtype == torch.bfloat16:
        absmax = absmax.float()
    return absmax if absmax.dim() == 1 else absmax.reshape(-1)


def scalar(offset: Tensor) -> Tensor:
    """The nested offset as fp32 without dimensions, as torch would take it in bitsandbytes' own sum."""
    if offset.dtype != torch.float32 and offset.is_floating_point():
        offset = offset.float()
    return offset if offset.dim() == 0 or offset.numel() != 1 else offset.reshape(())


_families: Memo[tuple[int, str]] = Memo()  # codebook -> (its version, family)


def _family(table: Tensor) -> str:
    """Whether a codebook is NF4's or FP4's; remembered for each tensor, as reading it on a GPU waits for the GPU."""
    changes = -1 if table.is_inference() else table._version
    known = _families.find([table])
    if known is not None and changes >= 0 and known[0] == changes:
        return known[1]
    if table.is_cuda and torch.cuda.is_current_stream_capturing():
        raise Unserved("a codebook first seen while a CUDA graph is captured")  # reading it would end the capture
    family = {NF4: "nf4", FP4: "fp4"}.get(tuple(table.tolist()))
    if family is None:
        raise Unserved("a codebook that is neither NF4's nor FP4's")
    _families.keep([table], (changes, family))
    return family
