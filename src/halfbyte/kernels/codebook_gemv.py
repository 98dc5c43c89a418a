"""Launcher of cuda/codebook_gemv.cu: a few rows of x times a 4-bit weight of any format, layout, shape and address.

What depends on the weight alone (macros, pointers, grid) is bound once and kept with it (launch.py).
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import asdict, dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from ..device import arch_of
from ..formats import BlockFormat, PackedWeight, WordLayout
from ..formats.codecs import (
    AbsmaxScale,
    Codec,
    E4M3Scale,
    E8M0Scale,
    GroupScale,
    GroupZero,
    KQuant,
    NestedScale,
    RecordHalf,
)
from . import fallback, nvrtc
from .launch import Launch, Launcher, part
from .registry import Kernel, Problem, register

STEM = "codebook_gemv"
# Shared memory that a block may have; in the same order as the architectures it compiles for.
SHARED_LIMIT = {
    "sm_75": 64 << 10,
    "sm_80": 163 << 10,
    "sm_86": 99 << 10,
    "sm_89": 99 << 10,
    "sm_90a": 227 << 10,
    "sm_100": 227 << 10,
    "sm_120": 99 << 10,
}
ARCHITECTURES = tuple(SHARED_LIMIT)
NO_ASYNC_COPIES = ("sm_75",)
HOISTING = ("sm_100", "sm_120")  # the compiler moves more loads ahead there, and spills for want of registers
MAX_M, MAX_ROWS = 64, 8  # of x in a call; in a launch
MAX_SIZE = 1 << 30  # of N and of K
SMALL_GRID = 264  # blocks below which sixteen warps share K: two for each of an H200's 132 multiprocessors
X_TYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
TABLE_BYTES, PIECE_BYTES, LANE_ROWS = 2048, 16, 4  # as in the kernel

PLANAR, RECORD32, SUPERBLOCK, WORDS_K, WORDS_N = range(5)
ABSMAX, NESTED, E8M0, E4M3, HALF, HALF_MIN, RECORD_E8M0, KQUANT, GROUP_FP16, GROUP_BF16 = range(10)


@dataclass(frozen=True)
class Config:
    """The kernel's macros; codebook_gemv.cu says what each means."""

    LAYOUT: int
    RECORD: int
    CODE_START: int
    GRAIN: int
    READ: int
    EDGES: int
    PIECE: int
    STRADDLE: int
    HIGH_FIRST: int
    SCALE: int
    SUBS: int
    ZERO_BASE: int
    X_TYPE: int
    M_ROWS: int = 1
    WARPS: int = 8
    STAGES: int = 3
    RESIDENT: int = 1

    @property
    def chunks(self) -> int:
        """Of 32 weights, that a warp takes of each row at a time."""
        return {SUPERBLOCK: 8, WORDS_N: 2}.get(self.LAYOUT, 4)

    @property
    def heavy(self) -> bool:
        """Whether finding scales takes so many registers that a block has a multiprocessor for itself."""
        return bool(self.STRADDLE) or self.SUBS == 4

    @property
    def tile_rows(self) -> int:
        """Rows of W that a block owns."""
        return LANE_ROWS * 32 // self.chunks

    @property
    def threads(self) -> int:
        return 32 * self.WARPS

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: the table (aligned inside), and each warp's tiles and part of x."""
        if self.LAYOUT == WORDS_K:
            tile = 2048
        elif self.LAYOUT == WORDS_N:
            tile = 2 * (32 * 32 + 32)
        else:
            run = self.chunks * self.RECORD + self.STRADDLE
            pieces = -(-(PIECE_BYTES - self.GRAIN + run) // PIECE_BYTES)
            tile = self.tile_rows * PIECE_BYTES * (10 if self.LAYOUT == SUPERBLOCK else pieces | 1)
        return 2 * TABLE_BYTES + self.WARPS * (self.STAGES * tile + self.M_ROWS * self.chunks * 36 * 4)


class _Problem(ctypes.Structure):
    _fields_ = (
        ("codes", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("zeros", ctypes.c_void_p),
        ("outer", ctypes.c_void_p),
        ("map", ctypes.c_void_p),
        ("constant", ctypes.c_void_p),
        ("code_bytes", ctypes.c_longlong),
        ("x_stride", ctypes.c_longlong),
        ("m", ctypes.c_int),
        ("n", ctypes.c_int),
        ("k", ctypes.c_int),
        ("block_shift", ctypes.c_int),
        ("group", ctypes.c_int),
        ("bias_is_fp32", ctypes.c_int),
        ("x_in_quads", ctypes.c_int),
        ("codebook", ctypes.c_float * 16),
    )


# ---- what it can do


def layout_kind(format: BlockFormat) -> int | None:
    """The kernel's LAYOUT of a format, or None where it has none."""
    layout = format.layout
    if isinstance(layout, WordLayout):
        return WORDS_K if layout.axis == "K" else WORDS_N
    kinds = {(2, 2): PLANAR, (32, 32): RECORD32, (256, 64): SUPERBLOCK}
    return kinds.get((layout.elements, layout.span))


def scale_kind(format: BlockFormat) -> int | None:
    """The kernel's SCALE of a format (GROUP_FP16 also for bf16 scales), or None where it has none."""
    scale, offset = format.scale, format.offset
    if isinstance(scale, GroupScale) and isinstance(offset, GroupZero):
        return GROUP_FP16
    if isinstance(scale, KQuant) and isinstance(offset, KQuant):
        return KQUANT
    if isinstance(scale, RecordHalf) and scale.start == 0:
        if offset is None:
            return HALF
        return HALF_MIN if isinstance(offset, RecordHalf) and offset.start == 2 else None
    if offset is not None:
        return None
    if isinstance(scale, E8M0Scale):
        return RECORD_E8M0 if scale.record_bytes else E8M0
    kinds: dict[type[Codec], int] = {AbsmaxScale: ABSMAX, NestedScale: NESTED, E4M3Scale: E4M3}
    return kinds.get(type(scale))


def reason_against(problem: Problem) -> str | None:
    """Why this kernel cannot serve a problem, or None."""
    if problem.arch not in ARCHITECTURES:
        return f"compiles for {', '.join(ARCHITECTURES)}, not for {problem.arch}"
    if problem.m > MAX_M:
        return f"is for M up to {MAX_M}, got {problem.m}"
    if max(problem.n, problem.k) > MAX_SIZE:
        return f"counts rows and columns up to 2^30, got N = {problem.n}, K = {problem.k}"
    if layout_kind(problem.format) is None or scale_kind(problem.format) is None:
        return f"does not know the codes or the scales of {problem.format.key}"
    return nvrtc.missing()


def predicted_seconds(problem: Problem) -> float:
    """Launches of up to eight rows of x: each 4 µs, and its instructions at 0.6 of an H200's issue rate.

    The instructions are those of the SASS (docs/codebook-gemv.md). No device has confirmed the rate yet.
    """
    seconds = 0.0
    for first in range(0, problem.m, MAX_ROWS):
        rows = 1 << (min(MAX_ROWS, problem.m - first) - 1).bit_length()
        instructions = 5.8 + 1.35 * rows  # a lane's, for each weight
        seconds += 4e-6 + problem.n * problem.k * instructions / (0.6 * 132 * 128 * 1.8e9)
    return seconds


# ---- configuration


@lru_cache(maxsize=4096)
def warps(n: int, k: int, config: Config, arch: str) -> int:
    """Warps of a block, which share K. Does not look at M, as it decides the order of summation."""
    tile_k = 32 * config.chunks
    small = -(-n // config.tile_rows) < SMALL_GRID and SHARED_LIMIT[arch] > 128 << 10
    wanted = 16 if small and k >= 32 * tile_k and not config.heavy else 8
    while wanted > 1 and (wanted // 2) * tile_k >= k:
        wanted //= 2
    return wanted


def describe(weight: PackedWeight, dtype: torch.dtype) -> Config:
    """The macros that a weight's format, shape and addresses decide, for x of `dtype`.

    Raises ValueError for a format that the kernel cannot read.
    """
    format, (n, k) = weight.format, weight.shape
    layout, scale = layout_kind(format), scale_kind(format)
    if layout is None or scale is None:
        raise ValueError(f"{STEM} does not read {format.key}")
    if scale == GROUP_FP16 and weight.parts["scales"].dtype == torch.bfloat16:
        scale = GROUP_BF16
    address = weight.codes.data_ptr()
    straddle = layout == PLANAR and k % 32 != 0 and not format.by_row
    common = {"LAYOUT": layout, "SCALE": scale, "X_TYPE": X_TYPES[dtype], "STRADDLE": int(straddle)}
    if isinstance(format.layout, WordLayout):
        whole = address % 16 == 0 and (layout == WORDS_K or n % 32 == 0)
        return Config(
            **common,
            RECORD=16,
            CODE_START=0,
            GRAIN=16,
            READ=16,
            EDGES=0,
            PIECE=16 if whole else 4,
            HIGH_FIRST=0,
            SUBS=1 if format.blocksize % 32 == 0 else 4,
            ZERO_BASE=int(isinstance(format.offset, GroupZero) and format.offset.plus_one),
        )
    record = 16 if layout == PLANAR else format.layout.bytes * 32 // format.layout.elements
    tile = 4 * record if layout != SUPERBLOCK else 8 * record
    odd = layout == PLANAR and k % 2 == 1
    grain = 1 if odd else math.gcd(16, address, k * record // 32, tile)
    chunk = 16 if layout == SUPERBLOCK else record
    read = math.gcd(grain, chunk, format.layout.start)
    return Config(
        **common,
        RECORD=record,
        CODE_START=format.layout.start,
        GRAIN=grain,
        READ=1 if straddle or read < 4 else 4 if read < 16 else 16,
        EDGES=int(address % 16 != 0 or weight.codes.numel() % 16 != 0),
        PIECE=16,
        HIGH_FIRST=int(format.layout.high_first),
        SUBS=2 if straddle or scale in (E4M3, KQUANT) else 1,
        ZERO_BASE=0,
    )


def configure(weight: PackedWeight, dtype: torch.dtype, m: int, arch: str) -> Config:
    """The configuration for a launch of up to m rows of x; see `fit`."""
    config = describe(weight, dtype)
    return fit(replace(config, WARPS=warps(*weight.shape, config, arch)), m, arch)


def fit(config: Config, m: int, arch: str) -> Config:
    """`config` with as many rows of x in a launch, up to m, as registers and shared memory hold, and with its ring."""
    for rows in (8, 4, 2, 1):
        if rows >= 2 * m or (rows == 8 and config.WARPS > 8 and arch in HOISTING):
            continue
        alone = config.WARPS > 8 or config.heavy or config.EDGES or (rows > 1 and arch in HOISTING)
        resident = 1 if alone else 3 if rows == 1 else 2
        for stages in (1,) if arch in NO_ASYNC_COPIES else (3, 2):
            candidate = replace(config, M_ROWS=rows, STAGES=stages, RESIDENT=resident)
            if candidate.shared_bytes <= SHARED_LIMIT[arch]:
                return candidate
    raise ValueError(f"{STEM}: no configuration fits the shared memory of {arch}")


def parameters(weight: PackedWeight, quads: bool) -> _Problem:
    """The kernel's argument, but for what `launch.call_fields` are. quads: as in `bind`."""
    parts, (n, k) = weight.parts, weight.shape
    result = _Problem(codes=weight.codes.data_ptr(), n=n, k=k, group=weight.format.blocksize, x_in_quads=quads)
    result.code_bytes = weight.codes.numel() * weight.codes.element_size()
    result.block_shift = weight.format.blocksize.bit_length() - 1
    result.codebook = (ctypes.c_float * 16)(*weight.format.codebook)
    fields = {
        "scales": ("absmax", "scales"),
        "zeros": ("qzeros",),
        "outer": ("nested_absmax",),
        "map": ("nested_quant_map",),
        "constant": ("nested_offset", "global_scale"),
    }
    for field, names in fields.items():
        for name in names:
            if name in parts:
                setattr(result, field, parts[name].data_ptr())
    return result


# ---- launch


def bind(weight: PackedWeight, dtype: torch.dtype, m: int, quads: bool) -> Launch:
    """The kernel for a weight on a GPU and up to m rows of x in a launch; compiled on first use, not inside capture.

    quads: whether rows of x lie at multiples of four elements.
    """
    arch = arch_of(weight.device)
    config = configure(weight, dtype, m, arch)
    return Launch(
        nvrtc.load(STEM, arch, asdict(config), weight.device.index, config.shared_bytes),
        [parameters(weight, quads)],
        blocks=-(-weight.shape[0] // config.tile_rows),
        threads=config.threads,
        shared_bytes=config.shared_bytes,
        early=False,
        alignment=dtype.itemsize * (4 if quads else 1),
        rows=config.M_ROWS,
        name=f"{STEM} {config}",
    )


def in_quads(x: Tensor) -> bool:
    """Whether rows of x lie at multiples of four elements."""
    return x.data_ptr() % (4 * x.element_size()) == 0 and x.stride(0) % 4 == 0


def launch_for(weight: PackedWeight, dtype: torch.dtype, m: int) -> Launch | None:
    """See registry.Kernel."""
    launcher = Launcher.of(STEM, weight)
    if not launcher.readable or m > MAX_ROWS:
        return None
    launch = launcher.get(bind, weight, dtype, m, True)
    return launch if m <= launch.rows else None


def run(x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor) -> None:
    """See registry.Run. Words and numbers at addresses that no load can take go to the fallback."""
    launcher = Launcher.of(STEM, weight)
    if not launcher.readable:
        fallback.run(x, weight, bias, out)
        return
    if x.stride(1) != 1:
        x = x.contiguous()
    quads, stream = in_quads(x), launcher.stream()
    first, m = 0, x.shape[0]
    while first < m:
        launch = launcher.get(bind, weight, x.dtype, min(MAX_ROWS, m - first), quads)
        rows = slice(first, first + launch.rows)
        launch(part(x, rows), bias, part(out, rows), stream)
        first = rows.stop


register(
    Kernel(
        name=STEM,
        backend="cuda",
        about="every 4-bit format, layout, shape and address, for few rows of x; fp32 arithmetic",
        supports=reason_against,
        cost=predicted_seconds,
        run=run,
        batch_invariant_to=MAX_M,
        launch=launch_for,
    )
)
