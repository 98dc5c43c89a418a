"""Launcher of cuda/codebook_gemm.cu: many rows of bf16 x times a 4-bit codebook weight, on sm_90a.

Weights are decoded to fp16 on their way to the tensor cores, as often as there are tiles of x, and never lie in memory
as fp16. A call lays x out (cuda/codebook_gemm_x.cu), multiplies, and where K is cut adds the segments' sums
(cuda/codebook_gemm_y.cu); each kernel starts while the one before it ends.

All that a call holds is one piece of memory of PyTorch's allocator, of WORKSPACE bytes at most for any M.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from math import ceil
from typing import Any

import torch
from torch import Tensor

from ..formats import BlockFormat, PackedWeight
from . import codebook, fallback, nvrtc, registry
from . import codebook_mma as mma
from .adapters import expand_with_torch
from .launch import Launch, Launcher
from .registry import Expand, Kernel, Problem, register

STEM, X_STEM, Y_STEM = "codebook_gemm", "codebook_gemm_x", "codebook_gemm_y"
ARCH = "sm_90a"
MIN_M = 65  # rows of x; fewer are for kernels whose bits do not depend on M
VARIANT_MIN_M = 33  # where the process has given that up, see registry.BATCH_INVARIANT
UNIT, TEAM = codebook.UNIT, codebook.TEAM
X_THREADS, Y_THREADS = 128, 256
X_BLOCKS = Y_BLOCKS = 8  # a multiprocessor
IMAGE_BYTES, SUM_BYTES = 128 << 20, 64 << 20  # of x in fp16, and of segments' sums, at once
WORKSPACE = IMAGE_BYTES + SUM_BYTES + (1 << 20)
MOST_SEGMENTS = 8
# from times on an H200: clocks a second, of a tile beside its k, and of adding segments; bytes a clock of their sums,
# written and read again; seconds of laying x out, and of an element of it
CLOCK, ITEM_CLOCKS, SPLIT_CLOCKS, SUM_BYTES_A_CLOCK = 1.75e9, 4000, 4000, 6600
X_SECONDS, X_ELEMENT_SECONDS = 4e-6, 1.5e-12


@dataclass(frozen=True)
class Tile:
    """A tile's shape, and what of a configuration goes with it; codebook_gemm.cu says what the macros mean.

    clocks: of 64 k of a tile, on an H200.
    """

    ROW_GROUPS: int
    COLUMNS: int
    CODE_SLOTS: int
    X_SLOTS: int
    TABLE_PITCH: int
    PRODUCER_REGISTERS: int
    CONSUMER_REGISTERS: int
    clocks: int

    @property
    def rows(self) -> int:
        """Rows of W."""
        return 64 * self.ROW_GROUPS

    @property
    def threads(self) -> int:
        """Warpgroups that multiply, and one that copies and converts scales."""
        return 128 * (self.ROW_GROUPS + 1)

    def shared_bytes(self, block: int) -> int:
        """Dynamic shared memory: table, rings, powers of two of the rows of W, nested map, barriers."""
        stage = self.rows * (128 + 4 * TEAM * UNIT // block + 4) + 24
        slots = self.CODE_SLOTS * stage + self.X_SLOTS * (self.COLUMNS * 128 + 16)
        return 256 * self.TABLE_PITCH + slots + 1024


NARROW = Tile(4, 64, 3, 4, 256, 64, 104, clocks=930)
MIDDLE = Tile(4, 128, 2, 4, 256, 32, 112, clocks=1400)
WIDE = Tile(2, 256, 2, 4, 128, 72, 216, clocks=1400)
TILES = (NARROW, MIDDLE, WIDE)
OF_COLUMNS = {tile.COLUMNS: tile for tile in TILES}


class _Maps(ctypes.Structure):
    _fields_ = (("codes", codebook.TensorMap), ("scales", codebook.TensorMap))


class _Problem(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("x_stride", ctypes.c_longlong),
        ("m", ctypes.c_int),
        ("n", ctypes.c_int),
        ("k", ctypes.c_int),
        ("bias_is_fp32", ctypes.c_int),
        ("bias_stride", ctypes.c_longlong),
        ("x_powers", ctypes.c_void_p),
        ("units", ctypes.c_int),
        ("segments", ctypes.c_int),
    )


@dataclass(frozen=True)
class Cut:
    """How a call is cut: its tiles, rows of x in a chunk, units (64 k) in a segment of K, and segments."""

    tile: Tile
    chunk: int
    units: int
    segments: int


def reason_against(problem: Problem) -> str | None:
    """Why this kernel cannot serve a problem, or None."""
    if problem.arch != ARCH:
        return f"is for {ARCH}, not for {problem.arch}"
    least = MIN_M if registry.BATCH_INVARIANT else VARIANT_MIN_M
    if problem.m < least:
        may = f"HALFBYTE_BATCH_INVARIANT=0 allows it from {VARIANT_MIN_M} on"
        fewer = f"; bits depend on M here: {may}" if registry.BATCH_INVARIANT else ""
        return f"is for M from {least} on, got {problem.m}{fewer}"
    if problem.dtype != torch.bfloat16:
        return "rounds weights to fp16, which bf16 outputs can bear and others cannot"
    if problem.k * WIDE.COLUMNS * 2 > IMAGE_BYTES:
        return f"holds {WIDE.COLUMNS} rows of x at once, which must fit {IMAGE_BYTES >> 20} MiB, got K = {problem.k}"
    return mma.reason_against(replace(problem, m=1))


def cut(m: int, n: int, k: int, multiprocessors: int) -> Cut:
    """The tiles and segments with the fewest predicted clocks of those whose sums fit.

    Of m rounded up to whole narrow tiles, as a server brings another m each step: some memory more, the same tiles.
    """
    return _cut(ceil(m / NARROW.COLUMNS) * NARROW.COLUMNS, n, k, multiprocessors)


@lru_cache(maxsize=4096)
def _cut(m: int, n: int, k: int, multiprocessors: int) -> Cut:
    tiles = (NARROW,) if m <= NARROW.COLUMNS else (MIDDLE,) if m <= MIDDLE.COLUMNS else (MIDDLE, WIDE)
    found = [each for tile in tiles for each in _cuts(tile, m, n, k)]
    return min(found, key=lambda each: _clocks(each, m, n, multiprocessors))


def _cuts(tile: Tile, m: int, n: int, k: int) -> Iterator[Cut]:
    """All legal ones with such tiles."""
    most = IMAGE_BYTES // (2 * k) // tile.COLUMNS * tile.COLUMNS
    chunk = min(m, ceil(ceil(m / ceil(m / most)) / tile.COLUMNS) * tile.COLUMNS)
    units = k // UNIT
    for each in {ceil(units / count / TEAM) * TEAM for count in range(1, MOST_SEGMENTS + 1)}:
        cut = Cut(tile, chunk, each, ceil(units / each))
        if cut.segments == 1 or _sizes(cut, n, k)[1] <= SUM_BYTES:
            yield cut


def _clocks(each: Cut, m: int, n: int, multiprocessors: int) -> float:
    items = ceil(each.chunk / each.tile.COLUMNS) * ceil(n / each.tile.rows) * each.segments
    passes = ceil(items / multiprocessors)
    sums = SPLIT_CLOCKS + 8 * each.segments * each.chunk * n / SUM_BYTES_A_CLOCK if each.segments > 1 else 0
    return ceil(m / each.chunk) * (passes * (each.units * each.tile.clocks + ITEM_CLOCKS) + sums)


def predicted_seconds(problem: Problem) -> float:
    """By `_clocks`, plus laying x out."""
    each = cut(problem.m, problem.n, problem.k, mma.MULTIPROCESSORS)
    laying_out = ceil(problem.m / each.chunk) * X_SECONDS + problem.m * problem.k * X_ELEMENT_SECONDS
    return _clocks(each, problem.m, problem.n, mma.MULTIPROCESSORS) / CLOCK + laying_out


def describe(problem: Problem) -> str:
    """How a problem is cut, in words."""
    each = cut(problem.m, problem.n, problem.k, mma.MULTIPROCESSORS)
    segments = f", K in {each.segments} segments" if each.segments > 1 else ""
    chunks = f", {each.chunk} rows of x at once" if each.chunk < problem.m else ""
    held = workspace_bytes(each, problem.n, problem.k)
    tile = f"tiles of {each.tile.rows} rows of W and {each.tile.COLUMNS} of x"
    return f"{tile}{segments}{chunks}, {held:,} bytes of workspace"


def workspace_bytes(each: Cut, n: int, k: int) -> int:
    """What a call holds."""
    return sum(_sizes(each, n, k))


@lru_cache(maxsize=4096)
def _sizes(each: Cut, n: int, k: int) -> tuple[int, int, int]:
    """Bytes of the image of x, of segments' sums, and of the powers of two of x's rows; all multiples of 256."""
    image = ceil(each.chunk / each.tile.COLUMNS) * each.tile.COLUMNS * k * 2
    of_tiles = ceil(n / each.tile.rows) * each.tile.rows * ceil(each.chunk / 8) * 8
    sums = 4 * each.segments * of_tiles if each.segments > 1 else 0
    return image, sums, ceil(4 * each.segments * each.chunk / 256) * 256


def macros(stem: str, tile: Tile, format: BlockFormat, copied: bool) -> dict[str, int]:
    """What a kernel of these is compiled with; its source says what each means. copied: whether scales are."""
    block = min(format.blocksize, UNIT)
    if stem == X_STEM:
        return {"COLUMNS": tile.COLUMNS, "BLOCK": block, "OVERLAP": 1, "THREADS": X_THREADS}
    if stem == Y_STEM:
        return {"ROW_GROUPS": tile.ROW_GROUPS, "OVERLAP": 1}
    of_format = {
        "BLOCK": block,
        "SCALE_KIND": codebook.known_kind(format),
        "SCALE_COPIED": int(copied),
        "HIGH_FIRST": int(codebook.layout_of(format).high_first),
    }
    return {name: value for name, value in asdict(tile).items() if name.isupper()} | of_format | {"OVERLAP": 1}


def bind(weight: PackedWeight, dtype: torch.dtype, m: int, variant: tuple[str, int]) -> Launch:
    """Compile or find one of the three kernels, by its stem, for the tile of so many columns; not inside capture."""
    stem, tile = variant[0], OF_COLUMNS[variant[1]]
    device = weight.device.index
    multiprocessors = codebook.device_of(device)[1]
    n, k = weight.shape
    copied, block = codebook.copies_scales(weight, ARCH), min(weight.format.blocksize, UNIT)
    arguments: tuple[ctypes.Structure, ...] = (_Problem(n=n, k=k),)
    blocks, threads, shared_bytes = multiprocessors, tile.threads, 0
    if stem == STEM:
        shared_bytes = tile.shared_bytes(block)
        maps = _Maps(codes=codebook.tensor_map(weight.codes, n, k // 2, tile.rows, 128))
        if copied:
            maps.scales = codebook.tensor_map(weight.parts["absmax"], n, k // block, tile.rows, TEAM * UNIT // block)
        arguments = (maps, codebook.table_of(weight.format.codebook, 1), codebook.scales_of(weight), *arguments)
    elif stem == X_STEM:
        blocks, threads = X_BLOCKS * multiprocessors, X_THREADS
    else:
        blocks, threads = Y_BLOCKS * multiprocessors, Y_THREADS
    return Launch(
        nvrtc.load(stem, ARCH, macros(stem, tile, weight.format, copied), device, shared_bytes),
        arguments,
        blocks=blocks,
        threads=threads,
        shared_bytes=shared_bytes,
        early=True,
        alignment=codebook.ALIGNMENT,
        rows=m,
        name=stem,
    )


def run(x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor) -> None:
    """See registry.Run; bias may also be fp32 [M, N]. Weights at odd addresses go to the fallback."""
    launcher = Launcher.of(STEM, weight)
    if not launcher.readable or launcher.addresses[0] % codebook.ALIGNMENT:
        fallback.run(x, weight, bias, out)
        return
    if (x.data_ptr() | x.stride(0) * x.element_size()) % codebook.ALIGNMENT or x.stride(1) != 1:
        x = x.clone(memory_format=torch.contiguous_format)
    n, k = weight.shape
    multiply(launcher, x, weight, bias, out, cut(x.shape[0], n, k, codebook.device_of(launcher.index)[1]))


def multiply(launcher: Launcher, x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor, each: Cut) -> None:
    """`run`, cut as it is told."""
    (n, k), rows, columns = weight.shape, x.shape[0], each.tile.COLUMNS
    stream = launcher.stream()
    early = launcher.settled(stream)
    image_bytes, sum_bytes, power_bytes = _sizes(each, n, k)
    workspace = torch.empty(image_bytes + sum_bytes + power_bytes, dtype=torch.uint8, device=x.device)
    image = workspace.data_ptr()
    sums, powers = image + image_bytes, image + image_bytes + sum_bytes
    of_k = {"units": each.units, "segments": each.segments, "x_powers": powers}
    lay_out, product, add = (launcher.get(bind, weight, x.dtype, 1, (stem, columns)) for stem in (X_STEM, STEM, Y_STEM))
    for first in range(0, rows, each.chunk):
        m = min(each.chunk, rows - first)
        address, stride = x.data_ptr() + first * x.stride(0) * x.element_size(), x.stride(0)
        end: dict[str, Any] = {"out": out.data_ptr() + first * n * out.element_size(), "bias": None}
        if bias is not None:
            of_row = n if bias.dim() == 2 else 0
            end["bias"] = bias.data_ptr() + first * of_row * bias.element_size()
            end |= {"bias_stride": of_row, "bias_is_fp32": int(bias.dtype == torch.float32)}
        lay_out.start(stream, early=True, x=address, x_stride=stride, out=image, m=m, **of_k)
        if each.segments == 1:
            product.start(stream, early=early or first > 0, x=image, m=m, **of_k, **end)
        else:
            product.start(stream, early=early or first > 0, x=image, m=m, out=sums, bias=None, **of_k)
            add.start(stream, early=True, x=sums, m=m, **of_k, **end)


def run_adapters(x: Tensor, weight: PackedWeight, bias: Tensor | None, expand: Expand, out: Tensor) -> None:
    """See registry.RunAdapters: what they add is made by torch, then added like a bias of each row's own."""
    run(x, weight, expand_with_torch(expand, bias, out.shape[1]), out)


register(
    Kernel(
        name=STEM,
        backend="cuda",
        about="Hopper's tensor cores on 4-bit codebook weights decoded on their way, for more than 64 rows of bf16 x",
        supports=reason_against,
        cost=predicted_seconds,
        run=run,
        run_adapters=run_adapters,
        describe=describe,
    )
)
