"""Launcher of cuda/codebook_wgmma.cu: 9 rows of x and more times a 4-bit codebook weight, on sm_90a.

A call lays x out for the tensor cores (cuda/codebook_wgmma_x.cu), in memory of PyTorch's allocator, then multiplies;
the second kernel fetches weights while the first is at work. Rows of x have the bits that codebook_mma gives them: K is
cut as there, whatever the configuration here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from math import ceil, sqrt

import torch
from torch import Tensor

from ..formats import BlockFormat, PackedWeight
from . import adapters_expand, codebook, fallback, nvrtc
from . import codebook_mma as mma
from .adapters_shrink import NO_SIGNAL, Image
from .launch import Launch, Launcher, part
from .registry import Configuration, Expand, Kernel, Problem, Settings, register

STEM, IMAGE_STEM = "codebook_wgmma", "codebook_wgmma_x"
ARCH = "sm_90a"
MIN_M, MAX_M, CHUNK = 9, 8192, 64  # rows of x: that this kernel takes, and of one launch
UNIT, TEAM = codebook.UNIT, codebook.TEAM
ROOM = (227 << 10) - 1024  # dynamic shared memory; the table begins 1024 bytes in
# registers of threads that copy, and of those that multiply, by warpgroups; they share what all begin with
REGISTERS = {2: (96, 200), 3: (80, 144), 4: (64, 104)}
BY_SIDE_WARPS, AT_THE_END = 1, 2  # ADAPTERS
MANY_ADAPTERS = 16
MOST_SUMS = {2: (40, 232), 4: (32, 112)}  # where they keep 128 and 64 sums a thread
MOST_MEMORY = 48 << 20  # bytes of a call, where stages are spread and sums meet in memory
MOST_TURNS = 8  # of a block there


@dataclass(frozen=True)
class Config:
    """The kernel's macros; codebook_wgmma.cu says what each means."""

    ROW_GROUPS: int
    UNIT_GROUPS: int
    COLUMNS: int
    STAGES: int
    CLUSTER: int
    RANKS: int
    X_TYPE: int
    BLOCK: int
    SCALE_KIND: int
    SCALE_SIDE: int
    HIGH_FIRST: int
    OVERLAP: int
    PRODUCER_REGISTERS: int
    CONSUMER_REGISTERS: int
    SPREAD: int = 0
    TABLE_PITCH: int = 128
    ADAPTERS: int = 0

    @property
    def threads(self) -> int:
        """Warpgroups that multiply, and one that copies and decodes scales."""
        return 128 * (self.ROW_GROUPS * self.UNIT_GROUPS + 1)

    @property
    def rows(self) -> int:
        """Rows of W in a tile."""
        return 64 * self.ROW_GROUPS

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: table, ring, sums of pieces and those passed on, nested map, barriers, adapters."""
        stage_blocks = TEAM * UNIT // self.BLOCK
        unscale = 16 * self.COLUMNS + 16 if self.X_TYPE == 1 else 0
        slot = self.rows * (128 + 4 * stage_blocks) + 512 * self.COLUMNS + unscale
        pieces = 0 if self.SPREAD else 4 * self.RANKS // self.CLUSTER
        sums = self.rows * self.COLUMNS * 4 * ((pieces if pieces <= 2 else pieces // 4) + self.UNIT_GROUPS - 1)
        base = (
            256 * self.TABLE_PITCH + self.STAGES * slot + sums + 1024 * (self.SCALE_KIND == 1) + 16 * (self.STAGES + 1)
        )
        base += 128 * self.SPREAD
        if not self.ADAPTERS:
            return base
        columns = self.COLUMNS // self.CLUSTER
        if self.ADAPTERS == AT_THE_END:
            return base + adapters_expand.listed_bytes(columns)
        warps, pair = (1, 1) if self.SCALE_SIDE else (3, 2 if self.PRODUCER_REGISTERS >= 64 else 1)
        return base + adapters_expand.shared_bytes(self.rows, columns, pair, warps)


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
        ("units", ctypes.c_int),
        ("expand", adapters_expand.ExpandStruct),
    )


def reason_against(problem: Problem) -> str | None:
    """Why this kernel cannot serve a problem, or None."""
    if problem.arch != ARCH:
        return f"is for {ARCH}, not for {problem.arch}"
    if not MIN_M <= problem.m <= MAX_M:
        return f"is for M from {MIN_M} to {MAX_M}, got {problem.m}"
    if problem.dtype == torch.float32:
        return "multiplies fp16 and bf16 activations, got fp32"
    if codebook.finer(problem.format, problem.dtype, problem.n, strict=False):
        fine = f"fp16 outputs of fewer than {codebook.FEW_ROWS} rows of W, or of blocks of more than {UNIT}"
        return f"has one table; {fine}, take codebook_mma's finer one"
    return mma.reason_against(replace(problem, m=1))


def columns(m: int) -> int:
    """Rows of x that a launch for m of them holds."""
    return 16 if m <= 16 else 32 if m <= 32 else 64


# weights that a multiprocessor decodes and multiplies in a clock, for 16, 32 and 64 rows of x, by (ROW_GROUPS,
# UNIT_GROUPS): from times on an H200
RATES = {
    (4, 1): (23.7, 18.6),
    (3, 1): (22.7, 17.9),
    (2, 2): (20.8, 16.8),
    (2, 1): (19.2, 15.6, 10.5),
    (1, 4): (18.9, 14.8, 8.0),
    (1, 2): (17.6, 14.0, 9.3),
}


def clusters_at_once(size: int, multiprocessors: int) -> int:
    """Clusters of so many blocks, a block a multiprocessor, that a GPU runs at a time.

    An H200's 132 multiprocessors run 66 of two, 30 of four and 15 of eight: larger ones do not fill its processing
    clusters.
    """
    return multiprocessors // size if size <= 2 else multiprocessors * 10 // 11 // size


def predicted_clocks(config: Config, n: int, k: int, multiprocessors: int) -> float:
    """Clocks of a launch: what the busiest multiprocessor does, and what passes, turns and launches cost.

    The constants are fitted to 240 times on an H200, of 16 weights and 16, 32 and 64 rows of x: off by 6 % in the mean.
    """
    rate = RATES[config.ROW_GROUPS, config.UNIT_GROUPS][(16, 32, 64).index(config.COLUMNS)]
    sums = config.rows * config.COLUMNS  # of a tile
    if config.SPREAD:
        blocks, share = _shares(config, n, k, multiprocessors)
        whole = share.longer == 0 and share.each % share.run == 0  # pieces, so that no chains are handed over
        turns = share.each // share.run if whole else most_turns(share)
        stages = ceil(share.tiles * stages_of(k) / blocks)
        return stages * config.rows * TEAM * UNIT / rate + 10000 + (0.4 * turns + 0.5 * (not whole)) * sums
    passes = ceil(ceil(n / config.rows) / clusters_at_once(config.CLUSTER, multiprocessors))
    a_pass = (1600 if config.CLUSTER == 1 else 5500) + 0.7 * sums / sqrt(config.CLUSTER)
    return passes * (config.rows * k / config.CLUSTER / rate + a_pass) + 6000 + 6500 * (config.CLUSTER == 8)


class Shares(ctypes.Structure):
    """How the stages of all tiles are spread over blocks; see codebook_wgmma_walk.cuh."""

    _fields_ = (
        ("each", ctypes.c_int),
        ("longer", ctypes.c_int),
        ("run", ctypes.c_int),
        ("inverse", ctypes.c_uint),
        ("tiles", ctypes.c_int),
    )

    each: int
    longer: int
    run: int
    inverse: int
    tiles: int


@lru_cache(maxsize=4096)
def shares(rows: int, n: int, k: int, ranks: int, multiprocessors: int) -> tuple[int, Shares] | None:
    """How many blocks a weight [n, k] in such tiles gets, and what each takes; None if pieces differ or are a stage."""
    stages, tiles = stages_of(k), ceil(n / rows)
    run = stages // (4 * ranks)
    if run < 2 or stages % (4 * ranks) or (ranks > 1 and rank_units(n, k, ranks, multiprocessors) != 4 * run * TEAM):
        return None
    blocks = min(multiprocessors, tiles * 4 * ranks)  # no share is shorter than a piece
    each, longer = divmod(tiles * stages, blocks)
    return blocks, Shares(each, longer, run, -(-(1 << 32) // run), tiles)


def most_turns(share: Shares) -> int:
    """Pieces of a block, whole or in part, at most."""
    return (share.each + (share.longer > 0) - 2) // share.run + 2


def rank_units(n: int, k: int, ranks: int, multiprocessors: int) -> int:
    """Units of K of a rank, as codebook_mma cuts it."""
    return mma.cut(n, k, 1, ranks, multiprocessors)[2].units


def counters(n: int, multiprocessors: int) -> int:
    """That stand behind the image: of each tile, and of each block, whatever the configuration."""
    return ceil(n / 64) + multiprocessors


def call_bytes(config: Config, n: int, k: int, multiprocessors: int) -> int:
    """Bytes that a call of a launch takes: x's image, counters, and where stages are spread, sums and chains."""
    size = stages_of(k) * (config.COLUMNS * (512 + 16) + 16) + 4 * counters(n, multiprocessors)
    if config.SPREAD:
        blocks, share = _shares(config, n, k, multiprocessors)
        sums = share.tiles * 4 * config.RANKS + 4 * blocks
        size = ceil(size / 256) * 256 + 4 * config.rows * config.COLUMNS * sums
    return size


def configurations(
    format: BlockFormat, dtype: torch.dtype, m: int, n: int, k: int, multiprocessors: int, side: bool
) -> Iterator[Config]:
    """All configurations for m rows of x (at most CHUNK) that fit."""
    block = min(format.blocksize, UNIT)
    ranks = mma.best_split(n, k, ARCH, multiprocessors)
    for row_groups, unit_groups, producer, consumer in _sizes(columns(m), block, side):
        for cluster in (0, 1, 2, 4, 8):
            config = Config(
                ROW_GROUPS=row_groups,
                UNIT_GROUPS=unit_groups,
                COLUMNS=columns(m),
                STAGES=8,
                CLUSTER=max(1, cluster),
                RANKS=ranks,
                X_TYPE=codebook.X_TYPES[dtype],
                BLOCK=block,
                SCALE_KIND=codebook.known_kind(format),
                SCALE_SIDE=int(side),
                HIGH_FIRST=int(codebook.layout_of(format).high_first),
                OVERLAP=1,
                PRODUCER_REGISTERS=producer,
                CONSUMER_REGISTERS=consumer,
                SPREAD=int(cluster == 0),
            )
            if cluster > 4 * ranks or (config.SPREAD and not _spreads(config, n, k, multiprocessors)):
                continue
            if config.CLUSTER == 1 and not config.SPREAD and (row_groups, columns(m)) == (4, 16) and not side:
                config = replace(config, TABLE_PITCH=256)  # worth a slot of the ring there
            config = _with_stages(config)
            if config.STAGES > 1:
                yield config


def _shares(config: Config, n: int, k: int, multiprocessors: int) -> tuple[int, Shares]:
    found = shares(config.rows, n, k, config.RANKS, multiprocessors)
    assert found is not None, "such a configuration is not offered"
    return found


def _spreads(config: Config, n: int, k: int, multiprocessors: int) -> bool:
    """Whether stages can be spread: pieces are alike, and what meets in memory is not too much."""
    found = shares(config.rows, n, k, config.RANKS, multiprocessors)
    if found is None or call_bytes(config, n, k, multiprocessors) > MOST_MEMORY:
        return False
    return most_turns(found[1]) <= MOST_TURNS


def _sizes(columns: int, block: int, side: bool) -> Iterator[tuple[int, int, int, int]]:
    """ROW_GROUPS, UNIT_GROUPS and registers, of threads that copy and that multiply, where the registers do."""
    for row_groups, unit_groups in ((4, 1), (3, 1), (2, 2), (1, 4), (2, 1), (1, 2)):
        warpgroups = row_groups * unit_groups
        sums = columns // 2 * 4 // unit_groups  # of a thread
        if columns == 64 and warpgroups > 2 and (unit_groups < 4 or block == 32):
            continue
        if columns == 32 and warpgroups == 4 and row_groups > 1 and (block == 32 or (sums == 64 and side)):
            continue
        most = sums > 64 or (sums == 64 and warpgroups == 4)
        yield row_groups, unit_groups, *(MOST_SUMS if most else REGISTERS)[warpgroups]


@lru_cache(maxsize=4096)
def configure(
    format: BlockFormat,
    dtype: torch.dtype,
    m: int,
    n: int,
    k: int,
    multiprocessors: int,
    side: bool,
    settings: Settings | None = None,
    adapters: int = 0,
) -> Config:
    """The configuration with these settings for m rows of x, at most CHUNK; else that with the fewest predicted clocks.

    Settings that do not fit here (other multiprocessors, scales that cannot be copied) give way; with adapters also
    those that spread stages, where what adapters add to sums in memory costs more than that gains.
    """
    found = list(configurations(format, dtype, m, n, k, multiprocessors, side))
    if adapters:
        found = [with_adapters(config, adapters) for config in found]
        found = [config for config in found if config.STAGES > 1]
    chosen = [config for config in found if _settings(config) == settings and not (adapters and config.SPREAD)]

    def clocks(config: Config) -> float:
        adding = 8000 + 320 * config.COLUMNS if adapters and config.SPREAD else 0  # from times on an H200
        return predicted_clocks(config, n, k, multiprocessors) + adding

    return min(chosen or found, key=clocks)


def _settings(config: Config) -> Settings:
    names = ("CLUSTER", "ROW_GROUPS", *(("SPREAD",) if config.SPREAD else ()), "UNIT_GROUPS")
    return tuple((name, getattr(config, name)) for name in names)


def choices(problem: Problem) -> list[Configuration]:
    """See registry.Kernel: `configurations` for its tuner."""
    n, k, m = problem.n, problem.k, min(problem.m, CHUNK)
    side = not codebook.copies_fp32(problem.format, k, ARCH)
    found = configurations(problem.format, problem.dtype, m, n, k, mma.MULTIPROCESSORS, side)
    chunks = ceil(problem.m / CHUNK)
    listed = [
        Configuration(_settings(config), chunks * predicted_clocks(config, n, k, mma.MULTIPROCESSORS) / 1.98e9)
        for config in found
    ]
    return sorted(listed, key=lambda each: each.seconds)


def describe(problem: Problem, settings: Settings | None = None) -> str:
    """The configuration for a problem, in words."""
    format, m = problem.format, min(problem.m, CHUNK)
    side = not codebook.copies_fp32(format, problem.k, ARCH)
    config = configure(format, problem.dtype, m, problem.n, problem.k, mma.MULTIPROCESSORS, side, settings)
    split = f"clusters of {config.CLUSTER} blocks that share K, " if config.CLUSTER > 1 else ""
    split = "K of all tiles spread evenly over blocks, " if config.SPREAD else split
    return (
        f"{split}tiles of {config.rows} rows for {config.COLUMNS} rows of x, "
        f"{config.ROW_GROUPS * config.UNIT_GROUPS} warpgroups, a ring of {config.STAGES} slots, "
        f"{config.shared_bytes:,} bytes of shared memory"
    )


def predicted_seconds(problem: Problem) -> float:
    """By `predicted_clocks` at an H200's 1.98 GHz, for as many launches as there are chunks of x."""
    return choices(problem)[0].seconds


def bind(
    weight: PackedWeight, dtype: torch.dtype, m: int, variant: str | Settings | None = None, adapters: int = 0
) -> Launch:
    """Compile or find the kernel for a weight on a GPU and m rows of x, at most CHUNK; not inside graph capture.

    variant: IMAGE_STEM for laying x out; else settings of the multiply, or None. adapters: whether they add to the
    outputs.
    """
    device = weight.device.index
    multiprocessors = codebook.device_of(device)[1]
    n, k = weight.shape
    side = not codebook.copies_scales(weight, ARCH)
    settings = variant if isinstance(variant, tuple) else None
    config = configure(weight.format, dtype, m, n, k, multiprocessors, side, settings, adapters)
    if variant == IMAGE_STEM:
        return launch_image(config, n, k, device, multiprocessors)
    return launch(weight, config, device, multiprocessors)


def with_adapters(config: Config, adapters: int) -> Config:
    """The configuration with adapters, for whose part the ring makes room."""
    if config.SPREAD or config.COLUMNS == 32:  # at 32, side warps leave the ring too little room
        adapters = AT_THE_END
    return _with_stages(replace(config, ADAPTERS=adapters, TABLE_PITCH=128))


def _with_stages(config: Config) -> Config:
    """The configuration with as many slots, eight at most, as fit; with one where two do not."""
    config = replace(config, STAGES=8)
    while config.shared_bytes > ROOM and config.STAGES > 1:
        config = replace(config, STAGES=config.STAGES - 1)
    return config


def launch_image(config: Config, n: int, k: int, device: int, multiprocessors: int) -> Launch:
    """The kernel that lays x out."""
    macros = image_macros(config)
    return Launch(
        nvrtc.load(IMAGE_STEM, ARCH, macros, device, 0),
        (_Problem(n=counters(n, multiprocessors), k=k),),
        blocks=min(multiprocessors, TEAM * stages_of(k)),
        threads=64,
        shared_bytes=0,
        early=True,
        alignment=codebook.ALIGNMENT,
        rows=config.COLUMNS,
        name=f"{IMAGE_STEM} {macros}",
    )


def image_macros(config: Config) -> dict[str, int]:
    """Those of the kernel that lays x out."""
    return {name: getattr(config, name) for name in ("COLUMNS", "BLOCK", "X_TYPE", "OVERLAP")}


def launch(weight: PackedWeight, config: Config, device: int, multiprocessors: int) -> Launch:
    """The kernel in one configuration, bound to a weight."""
    n, k = weight.shape
    maps = _Maps(codes=codebook.tensor_map(weight.codes, n, k // 2, config.rows, 128))
    if not config.SCALE_SIDE:
        blocks = TEAM * UNIT // config.BLOCK
        maps.scales = codebook.tensor_map(weight.parts["absmax"], n, k // config.BLOCK, config.rows, blocks)
    units = rank_units(n, k, config.RANKS, multiprocessors)
    tiles = ceil(n / config.rows)
    blocks = config.CLUSTER * min(tiles, max(1, clusters_at_once(config.CLUSTER, multiprocessors)))
    spread: tuple[Shares, ...] = ()
    if config.SPREAD:
        blocks, share = _shares(config, n, k, multiprocessors)
        spread = (share,)
    made = Launch(
        nvrtc.load(STEM, ARCH, asdict(config), device, config.shared_bytes),
        (
            maps,
            codebook.table_of(weight.format.codebook, 1),
            codebook.scales_of(weight),
            *spread,
            _Problem(n=n, k=k, units=units),
        ),
        blocks=blocks,
        threads=config.threads,
        shared_bytes=config.shared_bytes,
        early=True,
        alignment=1,
        rows=config.COLUMNS,
        name=f"{STEM} {config}",
    )
    made.record.image_bytes = call_bytes(config, n, k, multiprocessors)
    return made


def stages_of(k: int) -> int:
    """Stages of 256 weights of a row."""
    return ceil(k / (TEAM * UNIT))


def image_for(x: Tensor, multiply: Launch) -> Tensor:
    """Memory for the image of x [m, k] and what else a launch takes; of m rows, so that it finds m in its shape."""
    size = multiply.record.image_bytes
    return torch.empty((x.shape[0], ceil(size / x.shape[0] / 16) * 16), dtype=torch.uint8, device=x.device)


def launcher_of(weight: PackedWeight) -> Launcher | None:
    """The weight's launcher; None where the kernel cannot take its addresses (views that are not aligned)."""
    launcher = Launcher.of(STEM, weight)
    return launcher if launcher.readable and launcher.addresses[0] % codebook.ALIGNMENT == 0 else None


def launch_for(weight: PackedWeight, dtype: torch.dtype, m: int, settings: Settings | None = None) -> Launch | None:
    """See registry.Kernel."""
    launcher = launcher_of(weight)
    if launcher is None or m > CHUNK:
        return None
    multiply = launcher.get(bind, weight, dtype, m, settings)
    multiply.reads_image(launcher.get(bind, weight, dtype, m, IMAGE_STEM), multiply.record.image_bytes)
    return multiply


def run(x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor, settings: Settings | None = None) -> None:
    """See registry.Run. Weights at odd addresses (views that are not 16-byte aligned) go to the fallback."""
    launcher = launcher_of(weight)
    if launcher is None:
        fallback.run(x, weight, bias, out)
        return
    _launch(launcher, x, weight, bias, None, out, settings)


def run_adapters(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, expand: Expand, out: Tensor, settings: Settings | None = None
) -> str | None:
    """See registry.RunAdapters."""
    launcher = launcher_of(weight)
    if launcher is None:
        return "the weight's address is not aligned"
    reason = adapters_expand.reason_against(expand)
    if reason is None:
        _launch(launcher, x, weight, bias, expand, out, settings)
    return reason


_bind_with_adapters = adapters_expand.binder(bind)  # the variant's first is ADAPTERS


def _way(expand: Expand) -> int:
    """ADAPTERS for what there may be: side warps are slow where each has a row or two, but have the time."""
    return AT_THE_END if expand.table.shape[0] > MANY_ADAPTERS else BY_SIDE_WARPS


def _launch(
    launcher: Launcher,
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    expand: Expand | None,
    out: Tensor,
    settings: Settings | None,
) -> None:
    shrink = None if expand is None else expand.shrink
    if (x.data_ptr() | x.stride(0) * x.element_size()) % codebook.ALIGNMENT or x.stride(1) != 1:
        if shrink is not None:
            shrink.launch()
            shrink = None
        x = x.clone(memory_format=torch.contiguous_format)
    stream = launcher.stream()
    early = launcher.settled(stream)
    for first in range(0, x.shape[0], CHUNK):
        rows = slice(first, min(x.shape[0], first + CHUNK))
        these = part(x, rows)
        if expand is None:
            multiply = launcher.get(bind, weight, x.dtype, these.shape[0], settings)
        else:
            multiply = launcher.get(_bind_with_adapters, weight, x.dtype, these.shape[0], (_way(expand), settings))
        image = image_for(these, multiply)
        signal = NO_SIGNAL
        if shrink is not None and first == 0:
            block = min(weight.format.blocksize, UNIT)
            cleared = counters(weight.shape[0], codebook.device_of(launcher.index)[1])
            signal = shrink.launch(Image(image.data_ptr(), columns(these.shape[0]), block, cleared))
        else:
            lay_out = launcher.get(bind, weight, x.dtype, these.shape[0], IMAGE_STEM)
            lay_out(these, None, image, stream, True)
        fields = None if expand is None else adapters_expand.fields_of(expand, first, signal)
        multiply(image, bias, part(out, rows), stream, early or first > 0, fields)


register(
    Kernel(
        name=STEM,
        backend="cuda",
        about="Hopper's tensor cores on 4-bit codebook weights in place, for 9 rows of x and more",
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
