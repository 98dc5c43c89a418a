"""y = x Wᵀ straight from packed bytes on a CPU: the C++ kernels of cpu/, one multiply up to M = 64.

Beyond that bf16 goes 128 rows at a time over AMX where the processor has it (from M = 5 on where
HALFBYTE_BATCH_INVARIANT=0 allows it); else the library decodes tiles of rows, fast, and torch multiplies them. The
dense matrix is never whole.
"""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache

import torch
from torch import Tensor

from ..formats import BlockFormat, PackedWeight, RecordLayout
from ..formats.codecs import (
    AbsmaxScale,
    E4M3Scale,
    E8M0Scale,
    GroupScale,
    GroupZero,
    KQuant,
    NestedScale,
    RecordHalf,
)
from . import registry
from .adapters import DTYPE_NUMBERS, expand_on_cpu
from .cpu import Library, library
from .cpu.launch import CpuLaunch
from .cpu.loading import CallStruct, WeightStruct
from .registry import DTYPES, Expand, Kernel, Problem, register

DIRECT_M = 64  # rows of x that the kernels multiply themselves
TILE_VALUES = 1 << 22  # decoded values held at once beyond that
AMX_M = 128  # rows of x that AMX multiplies from one decode
AMX_LEAST_M = 5  # rows from which AMX is faster than AVX-512, where a row's bits may depend on their number
AMX_FROM = ("avx512vnni", "avx512", "amx")  # the instruction sets that leave many rows to AMX
CACHED_WEIGHTS = 4096


def run(x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor) -> None:
    """See registry.Run."""
    loaded = _loaded()
    multiply(loaded, loaded.isa, x, weight, bias, out)


def run_adapters(x: Tensor, weight: PackedWeight, bias: Tensor | None, expand: Expand, out: Tensor) -> None:
    """See registry.RunAdapters: what adapters add is, with the bias, a bias of each row's own."""
    loaded = _loaded()
    rows = expand_on_cpu(loaded, loaded.isa, expand, bias, out.shape[1])
    multiply(loaded, loaded.isa, x, weight, rows, out)
    index = expand.index
    m, k = x.shape
    if index is None or m <= DIRECT_M or _takes_amx(loaded, loaded.isa, m, x.dtype, weight.format, k) or not _splits(x):
        return
    plain = index < 0
    if bool(plain.any()):  # their bits are those of the other way to multiply many rows
        base = torch.empty_like(out)
        multiply(loaded, loaded.isa, x, weight, bias, base)
        out[plain] = base[plain]


def multiply(
    loaded: Library, isa: int, x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor, threads: int = 0
) -> None:
    """out [M, N] = x [M, K] times the weight's transpose, plus bias, on one instruction set of the library.

    bias: [N], or contiguous fp32 [M, N]. threads: 0 for torch's number. Raises MemoryError where scratch memory ran
    out.
    """
    m = x.shape[0]
    if m == 0:
        return
    threads = threads or torch.get_num_threads()
    if _takes_amx(loaded, isa, m, x.dtype, weight.format, weight.shape[1]):
        step = -(-m // -(-m // AMX_M) // 16) * 16  # even shares, in whole tiles of 16 rows
        for start in range(0, m, step):
            rows = slice(start, start + step)
            mine = bias if bias is None or bias.dim() == 1 else bias[rows]
            _multiply_direct(loaded, loaded.isas["amx"], x[rows], weight, mine, out[rows], threads)
    elif m <= DIRECT_M:
        _multiply_direct(loaded, isa, x, weight, bias, out, threads)
    else:
        _multiply_tiles(loaded, isa, x, weight, bias, out, threads)


def _multiply_direct(
    loaded: Library, isa: int, x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor, threads: int
) -> None:
    """One call of the library."""
    m = x.shape[0]
    call = CallStruct(
        x.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        m,
        x.stride(0),
        out.stride(0),
        DTYPE_NUMBERS[x.dtype],
        0 if bias is None else DTYPE_NUMBERS[bias.dtype],
        threads,
        0 if bias is None or bias.dim() == 1 else bias.stride(0),
    )
    if loaded.linear(isa, ctypes.byref(weight_struct(weight)), ctypes.byref(call)):
        raise MemoryError(f"no memory for the activations of a layer [{out.shape[1]}, {x.shape[1]}] with M = {m}")


def launch(weight: PackedWeight, dtype: torch.dtype, m: int) -> CpuLaunch | None:
    """The call of the library with which `run` serves m rows of x; None where it takes several, or torch's help."""
    loaded = _loaded()
    isa = loaded.isa
    if _takes_amx(loaded, isa, m, dtype, weight.format, weight.shape[1]):
        isa = loaded.isas["amx"]
    if m > (DIRECT_M if isa == loaded.isa else AMX_M):
        return None
    name = f"a layer {list(weight.shape)} with M = {m}"
    return CpuLaunch(loaded, isa, weight_struct(weight), DTYPE_NUMBERS[dtype], name)


_STRUCTS: dict[tuple[object, ...], tuple[BlockFormat, WeightStruct]] = {}


def weight_struct(weight: PackedWeight) -> WeightStruct:
    """The C struct of a weight; kept by its parts' addresses, shape, dtypes and format, all compared by value."""
    parts = weight.parts
    kind = parts["scales"].dtype if "scales" in parts else None
    key = (weight.shape, weight.format.key, kind, *[part.data_ptr() for part in parts.values()])
    found = _STRUCTS.get(key)
    if found is not None and (found[0] is weight.format or found[0] == weight.format):
        return found[1]
    struct = WeightStruct.from_buffer_copy(_format_struct(weight.format))
    struct.n, struct.k = weight.shape
    addresses = {name: part.data_ptr() for name, part in parts.items()}
    struct.codes = addresses[weight.format.layout.part]
    struct.scales = addresses.get("scales", addresses.get("absmax"))
    struct.second = addresses.get("nested_absmax")
    struct.map = addresses.get("nested_quant_map")
    struct.constant = addresses.get("nested_offset", addresses.get("global_scale"))
    struct.zeros = addresses.get("qzeros")
    if isinstance(weight.format.scale, GroupScale):
        struct.scale_dtype = DTYPE_NUMBERS[parts["scales"].dtype]
    if len(_STRUCTS) >= CACHED_WEIGHTS:
        _STRUCTS.clear()
    _STRUCTS[key] = (weight.format, struct)
    return struct


@lru_cache(maxsize=256)
def _format_struct(format: BlockFormat) -> WeightStruct:
    """The fields that a format decides. Raises TypeError for a layout or codec that the library does not know."""
    struct = WeightStruct()
    struct.codebook[:] = format.codebook
    struct.blocksize = format.blocksize
    layout = format.layout
    if isinstance(layout, RecordLayout):
        struct.layout = 0
        struct.elements, struct.record_bytes = layout.elements, layout.bytes
        struct.record_start, struct.span, struct.high_first = layout.start, layout.span, layout.high_first
    else:
        struct.layout = 1 if layout.axis == "K" else 2
        struct.order[:] = layout.order
    _set_scale(struct, format)
    _set_offset(struct, format)
    if (struct.layout != 0) != (struct.scale_kind == 7):
        raise TypeError(f"{format.key}: words and group scales go together")
    return struct


def _set_scale(struct: WeightStruct, format: BlockFormat) -> None:
    scale = format.scale
    if isinstance(scale, AbsmaxScale):
        struct.scale_kind = 0
    elif isinstance(scale, NestedScale):
        struct.scale_kind = 1
    elif isinstance(scale, RecordHalf):
        struct.scale_kind, struct.scale_start = 2, scale.start
    elif isinstance(scale, KQuant):
        struct.scale_kind = 3
    elif isinstance(scale, E8M0Scale):
        struct.scale_kind = 5 if scale.record_bytes else 4
    elif isinstance(scale, E4M3Scale):
        struct.scale_kind = 6
    elif isinstance(scale, GroupScale):
        struct.scale_kind = 7
    else:
        raise TypeError(f"{format.key}: the CPU kernels do not know the scale {type(scale).__name__}")


def _set_offset(struct: WeightStruct, format: BlockFormat) -> None:
    offset = format.offset
    if offset is None:
        struct.offset_kind = 0
    elif isinstance(offset, RecordHalf):
        struct.offset_kind, struct.offset_start = 1, offset.start
    elif isinstance(offset, KQuant) and isinstance(format.scale, KQuant):
        struct.offset_kind = 2
    elif isinstance(offset, GroupZero):
        struct.offset_kind, struct.zero_plus_one = 3, offset.plus_one
        struct.zero_order[:] = offset.order
    else:
        raise TypeError(f"{format.key}: the CPU kernels do not know the offset {type(offset).__name__}")


def _takes_amx(loaded: Library, isa: int, m: int, dtype: torch.dtype, format: BlockFormat, k: int) -> bool:
    """Whether rows go over AMX: many, or from AMX_LEAST_M on where their bits may depend on their number."""
    least = DIRECT_M + 1 if registry.BATCH_INVARIANT else AMX_LEAST_M
    return m >= least and _amx_serves(loaded, isa, dtype, format, k)


def _amx_serves(loaded: Library, isa: int, dtype: torch.dtype, format: BlockFormat, k: int) -> bool:
    """Whether AMX can stand in for an instruction set: for the AVX-512 kernels, with what tiles.hpp knows."""
    return (
        dtype == torch.bfloat16
        and isinstance(format.layout, RecordLayout)
        and format.blocksize % 32 == 0
        and k % 32 == 0
        and "amx" in loaded.isas
        and loaded.compiled[isa] in AMX_FROM
    )


def instruction_set(problem: Problem) -> str:
    """Name of the instruction set that multiplies a problem, as HALFBYTE_CPU_ISA calls it."""
    loaded = _loaded()
    amx = _takes_amx(loaded, loaded.isa, problem.m, problem.dtype, problem.format, problem.k)
    return "amx" if amx else loaded.isa_name


def describe(problem: Problem) -> str:
    """How a problem is multiplied here, in words."""
    isa, loaded = instruction_set(problem), _loaded()
    words = f"{isa}, {torch.get_num_threads()} threads"
    if isa == "amx":
        return words
    if problem.m > DIRECT_M:
        return f"{words}: tiles decoded by the library, multiplied by torch"
    if problem.m >= AMX_LEAST_M and _amx_serves(loaded, loaded.isa, problem.dtype, problem.format, problem.k):
        return f"{words}; HALFBYTE_BATCH_INVARIANT=0 would let amx serve M = {AMX_LEAST_M} to {DIRECT_M}, faster"
    return words


def _loaded() -> Library:
    loaded = library()
    assert loaded is not None  # supports() said so
    return loaded


def _multiply_tiles(
    loaded: Library, isa: int, x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor, threads: int
) -> None:
    """Large M: tiles of rows of the weight decoded by the library, multiplied by torch."""
    if (bias is None or bias.dim() == 1) and _splits(x):
        _multiply_split_tiles(loaded, isa, x, weight, bias, out, threads)
        return
    n, k = weight.shape
    wide = x.float()
    rows = _tile_rows(k)
    tile = torch.empty(min(rows, n), k)
    for start in range(0, n, rows):
        stop = min(n, start + rows)
        _decode(loaded, isa, weight, start, tile[: stop - start], threads)
        y = wide @ tile[: stop - start].t()
        if bias is not None:
            y += bias[..., start:stop]
        out[:, start:stop] = y


def _multiply_split_tiles(
    loaded: Library, isa: int, x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor, threads: int
) -> None:
    """bf16: each weight as a bf16 and the bf16 of what it leaves, [x, x] times [first, rest], one sum in fp32.

    The bias, as three terms, is three more columns, so that outputs are rounded once.
    """
    n, k = weight.shape
    extra = 0 if bias is None else 3
    doubled = torch.cat([x, x, x.new_ones(x.shape[0], extra)], dim=1)
    rows = _tile_rows(2 * k)
    tile = torch.empty(min(rows, n), 2 * k + extra, dtype=torch.bfloat16)
    for start in range(0, n, rows):
        stop = min(n, start + rows)
        used = tile[: stop - start]
        _decode(loaded, isa, weight, start, used, threads)
        if bias is not None:
            rest = bias[start:stop].float()
            for column in range(2 * k, 2 * k + extra):
                used[:, column] = rest
                rest = rest - used[:, column].float()
        out[:, start:stop] = doubled @ used.t()


def _decode(loaded: Library, isa: int, weight: PackedWeight, start: int, tile: Tensor, threads: int) -> None:
    """Rows of the weight from `start` on into `tile`: fp32 [rows, K], or two bf16 terms [rows, at least 2K]."""
    split = tile.dtype == torch.bfloat16
    struct = ctypes.byref(weight_struct(weight))
    if loaded.decode(isa, struct, start, tile.shape[0], tile.data_ptr(), tile.stride(0), split, threads):
        raise MemoryError(f"no memory to decode rows of a layer {list(weight.shape)}")


def _tile_rows(columns: int) -> int:
    return max(16, TILE_VALUES // columns // 16 * 16)


def _splits(x: Tensor) -> bool:
    """Whether many rows are multiplied by two bf16 terms a weight; their one rounding leaves no place for adapters."""
    return x.dtype == torch.bfloat16 and _fast_bf16() and _ordinary(x)


def _ordinary(x: Tensor) -> bool:
    """Whether bf16 multiplies keep the contract: they flush subnormal sums, and infinity times two terms is NaN."""
    largest = x.abs().amax(dim=1).float()
    return bool(((largest == 0) | ((largest > 1e-10) & (largest < torch.inf))).all())


@cache
def _fast_bf16() -> bool:
    """Whether torch multiplies bf16 more than twice as fast as fp32 here: on AMX."""
    supported = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return bool(supported and supported())


def supports(problem: Problem) -> str | None:
    """The reason why the CPU kernels cannot serve a problem, or None."""
    if problem.arch != "cpu":
        return f"runs on CPUs, not on {problem.arch}"
    if problem.dtype not in DTYPES:
        return f"activations must be one of {', '.join(map(str, DTYPES))}, got {problem.dtype}"
    try:
        _format_struct(problem.format)
    except TypeError as error:
        return str(error)
    loaded = library()
    if loaded is None:
        return "the library of CPU kernels is not installed (no C++ compiler at install time)"
    _ = loaded.isa  # an instruction set asked for and not available is an error, not a reason to run another kernel
    return None


def cost(problem: Problem) -> float:
    """Reading the codes at 10 GB/s, and 20 ps a weight and row of x; the same again to decode and store for large M."""
    rows = min(problem.m, DIRECT_M)
    return 5e-6 + problem.n * problem.k * (0.05e-9 + 0.02e-9 * rows)


register(
    Kernel(
        name="cpu_linear",
        backend="cpu",
        about="kernels from packed bytes: AVX-512, AVX2, NEON, portable C++; beyond M = 64 AMX, or tiles and torch",
        describe=describe,
        supports=supports,
        cost=cost,
        run=run,
        launch=launch,
        run_adapters=run_adapters,
        batch_invariant_to=DIRECT_M if registry.BATCH_INVARIANT else AMX_LEAST_M - 1,
    )
)
