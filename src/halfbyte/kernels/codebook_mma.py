"""Launcher of cuda/codebook_mma.cu: up to 64 rows of x times a 4-bit codebook weight, from the checkpoint's layout.

A call costs a few comparisons, a dictionary look-up and one launch: what depends on the weight (tensor maps, scale
pointers, grid) is bound once and kept with it for as long as its addresses stay. Nothing is allocated on the device, so
calls on any number of streams, in graphs or outside, share nothing but the weight.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from ..formats import BlockFormat, PackedWeight, RecordLayout
from . import adapters_expand, codebook, fallback, nvrtc
from .adapters_shrink import NO_SIGNAL
from .launch import Launch, Launcher, part
from .registry import Configuration, Expand, Kernel, Problem, Settings, register

STEM = "codebook_mma"
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100")  # it compiles for
SEEN_RIGHT = ("sm_90a",)  # its answers were checked on; elsewhere the fallback serves until they are
MULTIPROCESSORS = 132  # of an H200: what is planned for where no card is asked
CLUSTERS = ("sm_90a", "sm_100")
CLUSTER_WEIGHTS = 40000  # what a cluster's meeting costs, in weights that could be read meanwhile
MAX_M = 64
MAX_K = 1 << 29
SHARED_LIMIT = {"sm_80": 164 << 10, "sm_86": 100 << 10, "sm_89": 100 << 10}  # of a multiprocessor; else 228 KiB
RESERVED = 1024  # of it, for each block
TEAMS, WARPS = 4, 16  # as in the kernel
SIDE_STAGES = 8  # at most, see `with_stages`


@dataclass(frozen=True)
class Config:
    """The kernel's macros; codebook_mma.cu says what each means."""

    TILES: int
    LAST: int
    GROUPS: int
    X_ROWS: int
    STAGES: int
    EARLY: int
    SPLIT: int
    X_TYPE: int
    TERMS: int
    BLOCK: int
    SCALE_KIND: int
    SCALE_SIDE: int
    HIGH_FIRST: int
    OVERLAP: int
    RESIDENT: int
    ADAPTERS: int = 0

    @property
    def threads(self) -> int:
        """Sixteen warps multiply; one copies, one or two decode scales, one works adapters out where there are any."""
        sides = 0 if not self.SCALE_SIDE else 2 if self.RESIDENT == 1 else 1
        return 32 * (WARPS + 1 + sides + self.ADAPTERS)

    @property
    def rows(self) -> int:
        return 16 * self.TILES

    @property
    def stage_blocks(self) -> int:
        """Scale blocks of a row in a stage."""
        return codebook.TEAM * codebook.UNIT // self.BLOCK

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: table, ring, sums, the cluster's sums, x, nested map, barriers, adapters."""
        scale_stages = self.STAGES * self.RESIDENT if self.SCALE_SIDE else self.STAGES
        ring = self.rows * (self.STAGES * 128 + scale_stages * 4 * self.stage_blocks)
        barriers = 16 * (self.STAGES + 3 + (scale_stages if self.SCALE_SIDE else 0))
        sums = (WARPS if self.X_ROWS == 1 else 4) * self.X_ROWS * (self.rows + 4) * 4
        peers = (self.SPLIT - 1) * self.GROUPS * self.X_ROWS * self.rows * 4
        staged = self.X_TYPE == 2 or self.GROUPS > 1
        least = 1 if staged else 2 if self.TILES > 6 and self.X_ROWS == 1 else 4  # rows of x in units, brought at once
        x_rows = self.GROUPS * max(least, self.X_ROWS)
        x = WARPS * x_rows * (codebook.UNIT * (4 if self.X_TYPE == 2 else 2) + 16)
        nested = 1024 if self.SCALE_KIND == 1 else 0
        pair = 2 if self.RESIDENT == 1 else 1
        added = adapters_expand.shared_bytes(self.rows, self.GROUPS * self.X_ROWS, pair) if self.ADAPTERS else 0
        return self.TERMS * 32768 + ring + sums + peers + x + nested + barriers + added


@dataclass(frozen=True)
class Grid:
    """How a weight is cut: `clusters` of SPLIT blocks share its 16-row tiles; each block takes `units` of K."""

    clusters: int
    units: int


class _Maps(ctypes.Structure):
    _fields_ = (("codes", codebook.TensorMap * 3), ("scales", codebook.TensorMap * 3))


class _Problem(ctypes.Structure):
    _fields_ = (
        ("codes", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("x_stride", ctypes.c_longlong),
        ("m", ctypes.c_int),
        ("n", ctypes.c_int),
        ("k", ctypes.c_int),
        ("bias_is_fp32", ctypes.c_int),
        ("tiles", ctypes.c_int),
        ("larger", ctypes.c_int),
        ("units", ctypes.c_int),
        ("expand", adapters_expand.ExpandStruct),
    )


def reason_against(problem: Problem) -> str | None:
    """Why this kernel cannot serve a problem, or None."""
    format, layout = problem.format, problem.format.layout
    if problem.arch not in ARCHITECTURES:
        return f"compiles for {', '.join(ARCHITECTURES)}, not for {problem.arch}"
    if problem.arch not in SEEN_RIGHT:
        return f"compiles for {problem.arch} but has been held against the reference on {', '.join(SEEN_RIGHT)} only"
    if problem.m > MAX_M:
        return f"is for M up to {MAX_M}, got {problem.m}"
    if not isinstance(layout, RecordLayout) or layout.elements != 2:
        return f"reads planar codes, two to a byte; {format.key} has another layout"
    if codebook.scale_kind(format) is None:
        return f"reads fp32, nested and E8M0 scales without offsets; {format.key} has others"
    if format.blocksize < 32 or format.blocksize & (format.blocksize - 1):
        return f"needs a power of two of at least 32 weights a scale, {format.key} has {format.blocksize}"
    if problem.k % codebook.UNIT:
        return f"needs K in multiples of {codebook.UNIT}, got K = {problem.k}"
    if problem.k >= MAX_K:
        return f"counts the bytes of a row of x in 31 bits: K below {MAX_K:,}, got {problem.k:,}"
    try:
        _planned(problem)
    except ValueError as error:
        return str(error)
    return nvrtc.missing()


def _planned(problem: Problem, settings: Settings | None = None) -> tuple[Config, Grid]:
    """The configuration for a problem whose weight is aligned, on a card with an H200's multiprocessors."""
    format, k, arch = problem.format, problem.k, problem.arch
    m = max(1, min(problem.m, _chunk(arch)))
    side = not codebook.copies_fp32(format, k, arch)
    return configure(format, problem.dtype, m, problem.n, k, arch, MULTIPROCESSORS, side=side, settings=settings)


def choices(problem: Problem) -> list[Configuration]:
    """See registry.Kernel: `configurations` for its tuner. A unit costs 61 instructions of a warp beside its tiles."""
    format, k, arch = problem.format, problem.k, problem.arch
    m = max(1, min(problem.m, _chunk(arch)))
    side = not codebook.copies_fp32(format, k, arch)
    found = configurations(format, problem.dtype, m, problem.n, k, arch, MULTIPROCESSORS, side=side)
    pieces = problem.n / 16 * k / codebook.UNIT
    seconds = predicted_seconds(problem)

    def predicted(config: Config) -> float:
        """More than `predicted_seconds` by what fewer tiles a pass, and a whole multiprocessor to a block, cost."""
        instructions = pieces * 61 * (1 / config.TILES - 1 / 8)
        return seconds + instructions / (4 * MULTIPROCESSORS * 1.98e9) + (1e-6 if config.RESIDENT == 1 else 0)

    return [Configuration(settings_of(config), predicted(config)) for config, _ in found]


def describe(problem: Problem, settings: Settings | None = None) -> str:
    """The configuration for a problem, in words."""
    config, grid = _planned(problem, settings)
    passes = f"passes of {config.TILES} x 16 rows" + (f", the last of {config.LAST}" * (config.LAST < config.TILES))
    split = f", {config.SPLIT} of which share K" if config.SPLIT > 1 else ""
    return (
        f"{grid.clusters * config.SPLIT} blocks of {config.threads} threads{split}, "
        f"{config.RESIDENT} to a multiprocessor; "
        f"{passes}, a ring of {config.STAGES} slots, {config.shared_bytes:,} bytes of shared memory"
    )


def _chunk(arch: str) -> int:
    """Rows of x that one launch takes."""
    return 8 if arch in SHARED_LIMIT else 16


def predicted_seconds(problem: Problem) -> float:
    """Bytes at nine tenths of an H200's read rate and what a launch costs; beyond 8 rows of x, 16 at a third of it."""
    bits = 4 + 32 / problem.format.blocksize
    seconds = problem.n * problem.k * bits / 8 / 4.1e12
    if problem.m <= 8:
        return 3e-6 + seconds * (1 + (problem.m - 1) / 50)
    return _ceil_div(problem.m, 16) * (3e-6 + 3 * seconds)


def _ceil_div(value: int, by: int) -> int:
    return -(-value // by)


@lru_cache(maxsize=4096)
def cut(n: int, k: int, most: int, split: int, multiprocessors: int) -> tuple[int, int, Grid]:
    """(TILES, LAST, grid): how a weight [n, k] is shared by clusters of `split` blocks, one block a multiprocessor.

    most: the most 16-row tiles that a pass may hold. Slabs differ by a tile at most. The larger take passes of TILES
    tiles and a last one of LAST; the last of the smaller takes one less.
    """
    clusters = multiprocessors // split
    slab = _ceil_div(_ceil_div(n, 16), clusters)
    tiles = min(most, slab)
    units = _ceil_div(_ceil_div(k, codebook.UNIT), split)
    return (
        tiles,
        slab - (_ceil_div(slab, tiles) - 1) * tiles,
        Grid(clusters, _ceil_div(units, codebook.TEAM) * codebook.TEAM),
    )


@lru_cache(maxsize=4096)
def best_split(n: int, k: int, arch: str, multiprocessors: int) -> int:
    """Blocks of a cluster that share K: what gives the busiest block the least to do.

    Does not look at M or at the configuration otherwise, as it decides the order of summation.
    """
    if arch not in CLUSTERS:
        return 1

    def work(split: int) -> float:
        grid = cut(n, k, 8, split, multiprocessors)[2]
        rows = 16 * _ceil_div(_ceil_div(n, 16), grid.clusters)
        return rows * grid.units * codebook.UNIT + (CLUSTER_WEIGHTS * _ceil_div(rows, 64) if split > 1 else 0)

    return 2 if k > 2 * codebook.TEAM * codebook.UNIT and work(2) < work(1) else 1


def configure(
    format: BlockFormat,
    dtype: torch.dtype,
    m: int,
    n: int,
    k: int,
    arch: str,
    multiprocessors: int,
    strict: bool = False,
    side: bool = False,
    settings: Settings | None = None,
) -> tuple[Config, Grid]:
    """The configuration and the grid for the rows of x of one launch (`_chunk`), of a problem this kernel supports.

    side: whether the scales cannot be copied as they are (see `codebook.copies_scales`). settings: of the configuration
    that is wanted, which gives way to the first where it does not fit here.
    """
    found = list(configurations(format, dtype, m, n, k, arch, multiprocessors, strict, side))
    if not found:
        raise ValueError(f"{STEM}: no configuration fits the {room(arch, 1)} bytes of shared memory of {arch}")
    return next((each for each in found if settings_of(each[0]) == settings), found[0])


def settings_of(config: Config) -> Settings:
    """What tuning chooses: neither decides an order of summation."""
    return ("RESIDENT", config.RESIDENT), ("TILES", config.TILES)


def configurations(
    format: BlockFormat,
    dtype: torch.dtype,
    m: int,
    n: int,
    k: int,
    arch: str,
    multiprocessors: int,
    strict: bool = False,
    side: bool = False,
) -> Iterator[tuple[Config, Grid]]:
    """All that `configure` may choose, the better first."""
    terms = 2 if codebook.finer(format, dtype, n, strict) else 1
    split = best_split(n, k, arch, multiprocessors)
    block = min(format.blocksize, codebook.UNIT)
    slab = _ceil_div(_ceil_div(n, 16), multiprocessors // split)
    for resident, most in _sizes(arch, m, slab, block, dtype, terms):
        for limit in range(min(most, slab), 0, -1):
            tiles, last, grid = cut(n, k, limit, split, multiprocessors)
            config = Config(
                TILES=tiles,
                LAST=last,
                GROUPS=_ceil_div(m, 8),
                X_ROWS=min(8, 1 << (m - 1).bit_length()),
                STAGES=4,
                EARLY=_early(slab, tiles, grid.units, resident, m),
                SPLIT=split,
                X_TYPE=codebook.X_TYPES[dtype],
                TERMS=terms,
                BLOCK=block,
                SCALE_KIND=codebook.known_kind(format),
                SCALE_SIDE=int(side),
                HIGH_FIRST=int(codebook.layout_of(format).high_first),
                OVERLAP=int(arch in codebook.BULK_COPY),
                RESIDENT=resident,
            )
            config = with_stages(config, room(arch, resident))
            if config.shared_bytes <= room(arch, resident) and (config.STAGES > TEAMS or limit == 1):
                yield config, grid


def room(arch: str, resident: int) -> int:
    """Bytes of dynamic shared memory of a block, of which `resident` fit a multiprocessor."""
    return SHARED_LIMIT.get(arch, 228 << 10) // resident - RESERVED


def _early(slab: int, tiles: int, units: int, resident: int, m: int) -> int:
    """Slots of the ring that are sent for before x.

    All of them would be up to 26 MB, behind which x, in the L2, waits 6 us. By trials on an H200: three for layers of
    which a block has little, where x must come soon; for others a little more, as memory stands still meanwhile.
    """
    if resident == 2:
        return 8
    stages = _ceil_div(slab, tiles) * _ceil_div(units, codebook.TEAM)
    return 3 if stages <= 48 or m > 4 else 5


def _sizes(arch: str, m: int, slab: int, block: int, dtype: torch.dtype, terms: int) -> list[tuple[int, int]]:
    """(RESIDENT, most TILES that registers hold), the better first; slab: 16-row tiles of a cluster.

    Half a multiprocessor for small layers, where the next launch's copies hide what a launch costs; its registers hold
    too few tiles for large ones.
    """
    if dtype == torch.float32 or m > 8:
        return [(1, 2)]
    if terms == 2:
        return [(1, 3)]
    if slab <= 2 and m <= 4:
        return [(2, slab), (1, slab)]
    return [(1, (4 if block == 32 and m == 1 else 8) if arch == "sm_90a" else 3)]


def with_stages(config: Config, room: int) -> Config:
    """The configuration with as many stages, 4 to 32 in whole rounds of teams, as fit `room` bytes of shared memory.

    At most 8 where side warps read scales and a block has a multiprocessor to itself: they read few bytes of each
    line, again and again, and what shared memory leaves is the cache of these lines.
    """
    stages = SIDE_STAGES if config.SCALE_SIDE and config.RESIDENT == 1 else 32
    while stages > TEAMS and replace(config, STAGES=stages).shared_bytes > room:
        stages -= TEAMS
    return replace(config, STAGES=stages)


def with_adapters(config: Config, arch: str) -> Config:
    """The configuration with adapters, for whose part the ring makes room.

    It does so for a block of adapters_shrink beside, too, where two rounds of teams are left.
    """
    config, space = replace(config, ADAPTERS=1), room(arch, config.RESIDENT)
    beside = with_stages(config, space - adapters_expand.BESIDE // config.RESIDENT)
    return beside if beside.STAGES > TEAMS else with_stages(config, space)


def _arguments(weight: PackedWeight, config: Config, grid: Grid, arch: str) -> tuple[ctypes.Structure, ...]:
    """The kernel's arguments for a weight; what a call brings is filled in later."""
    n, k = weight.shape
    maps = _Maps()
    for kind, tiles in enumerate((config.TILES, config.LAST, config.LAST - 1)):
        if arch in codebook.BULK_COPY and tiles:
            maps.codes[kind] = codebook.tensor_map(weight.codes, n, k // 2, 16 * tiles, 128)
        if not config.SCALE_SIDE and tiles:
            absmax = weight.parts["absmax"]
            maps.scales[kind] = codebook.tensor_map(absmax, n, k // config.BLOCK, 16 * tiles, config.stage_blocks)
    tiles, larger = divmod(_ceil_div(n, 16), grid.clusters)
    problem = _Problem(codes=weight.codes.data_ptr(), n=n, k=k, tiles=tiles, larger=larger, units=grid.units)
    return maps, codebook.table_of(weight.format.codebook, config.TERMS), codebook.scales_of(weight), problem


def bind(
    weight: PackedWeight, dtype: torch.dtype, m: int, variant: bool | Settings = False, adapters: bool = False
) -> Launch:
    """Compile or find the kernel for a weight on a GPU and m rows of x, at most `_chunk`; not inside graph capture.

    variant: whether strict; or settings. adapters: whether they add to the outputs.
    """
    strict, settings = (False, variant) if isinstance(variant, tuple) else (variant, None)
    device = weight.device.index
    arch, multiprocessors = codebook.device_of(device)
    n, k = weight.shape
    side = not codebook.copies_scales(weight, arch)
    config, grid = configure(weight.format, dtype, m, n, k, arch, multiprocessors, strict, side, settings)
    if adapters:
        config = with_adapters(config, arch)
    return Launch(
        nvrtc.load(STEM, arch, asdict(config), device, config.shared_bytes),
        _arguments(weight, config, grid, arch),
        blocks=grid.clusters * config.SPLIT,
        threads=config.threads,
        shared_bytes=config.shared_bytes,
        early=bool(config.OVERLAP),
        alignment=codebook.ALIGNMENT,
        rows=config.GROUPS * config.X_ROWS,
        name=f"{STEM} {config}",
    )


def launcher_of(weight: PackedWeight) -> Launcher | None:
    """The weight's launcher; None where the kernel cannot take its addresses (views that are not aligned)."""
    launcher = Launcher.of(STEM, weight)
    return launcher if launcher.readable and launcher.addresses[0] % codebook.ALIGNMENT == 0 else None


def launch_for(weight: PackedWeight, dtype: torch.dtype, m: int, settings: Settings | None = None) -> Launch | None:
    """See registry.Kernel."""
    launcher = launcher_of(weight)
    if launcher is None or m > _chunk(codebook.device_of(launcher.index)[0]):
        return None
    return launcher.get(bind, weight, dtype, m, settings or False)


def run(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    out: Tensor,
    strict: bool = False,
    settings: Settings | None = None,
) -> None:
    """See registry.Run. Weights at odd addresses (views that are not 16-byte aligned) go to the fallback."""
    launcher = launcher_of(weight)
    if launcher is None:
        fallback.run(x, weight, bias, out)
        return
    _launch(launcher, x, weight, bias, None, out, strict or settings or False)


def run_adapters(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    expand: Expand,
    out: Tensor,
    settings: Settings | None = None,
) -> str | None:
    """See registry.RunAdapters."""
    launcher = launcher_of(weight)
    if launcher is None:
        return "the weight's address is not aligned"
    reason = adapters_expand.reason_against(expand)
    if reason is None:
        _launch(launcher, x, weight, bias, expand, out, settings or False)
    return reason


_bind_with_adapters = adapters_expand.binder(bind)


def _launch(
    launcher: Launcher,
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    expand: Expand | None,
    out: Tensor,
    variant: bool | Settings,
) -> None:
    m = x.shape[0]
    row = x.stride(0) * x.element_size() if m > 1 else 0
    if (x.data_ptr() | row) % codebook.ALIGNMENT or x.stride(1) != 1:
        x = x.clone(memory_format=torch.contiguous_format)
    stream = launcher.stream()
    early = launcher.settled(stream)
    chunk = _chunk(codebook.device_of(launcher.index)[0])
    for first in range(0, m, chunk):
        rows = slice(first, min(m, first + chunk))
        size, fields = rows.stop - rows.start, None
        if expand is None:
            launch = launcher.get(bind, weight, x.dtype, size, variant)
        else:
            launch = launcher.get(_bind_with_adapters, weight, x.dtype, size, ("adapters", variant))
            signal = expand.shrink.launch() if expand.shrink and first == 0 else NO_SIGNAL
            fields = adapters_expand.fields_of(expand, first, signal)
        launch(part(x, rows), bias, part(out, rows), stream, early or first > 0, fields)


register(
    Kernel(
        name=STEM,
        backend="cuda",
        about="tensor cores on 4-bit codebook weights in place, for few rows of x",
        supports=reason_against,
        cost=predicted_seconds,
        run=run,
        batch_invariant_to=MAX_M,
        describe=describe,
        launch=launch_for,
        run_adapters=run_adapters,
        configurations=choices,
    )
)
