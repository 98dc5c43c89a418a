"""How codebook_wgmma cuts a weight and adds its sums, modelled from its source: as codebook_mma does, for any M."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from math import ceil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from halfbyte.formats import PackedWeight, get_format, quantize
from halfbyte.kernels import Problem, codebook, codebook_mma, codebook_wgmma, nvrtc
from halfbyte.kernels.codebook_wgmma import CHUNK, IMAGE_STEM, MAX_M, TEAM, UNIT, Config
from halfbyte.kernels.launch import Launcher
from halfbyte.plan import plan
from kernel_samples import KEYS, multiples

BF16 = torch.bfloat16
NF4 = get_format("nf4")
NS = (16, 300, 1000, 65536, 151936)
KS = (64, 576, 1024, 1088, 2048, 4096, 5120, 14336, 32768)
MULTIPROCESSORS = 132
Chains = dict[tuple[int, int, int], list[int]]  # units of K by rank, piece (there a team) and chain (there a warp)


def all_configurations(n: int, k: int, m: int = 16) -> list[Config]:
    side = not codebook.copies_fp32(NF4, k, codebook_wgmma.ARCH)
    return list(codebook_wgmma.configurations(NF4, BF16, m, n, k, MULTIPROCESSORS, side))


def of_mma(n: int, k: int, m: int = 1) -> Chains:
    """share_of and multiply_pass of codebook_mma.cu: the units of each warp of each block of a cluster, in order."""
    config, grid = codebook_mma.configure(NF4, BF16, m, n, k, codebook_wgmma.ARCH, MULTIPROCESSORS)
    chains: Chains = {}
    for rank in range(config.SPLIT):
        begin = rank * grid.units
        end = min(k // UNIT, begin + grid.units)
        stages = ceil((end - begin) / 16) * 4 if begin < end else 0
        run = stages // 4 * TEAM
        for warp in range(16):
            first = begin + warp // TEAM * run + warp % TEAM
            units = range(first, first + stages // 4 * TEAM, TEAM)
            chains[rank, warp // TEAM, warp % TEAM] = [unit for unit in units if unit < end]
    return chains


def pieces_of(config: Config) -> int:
    return 4 * config.RANKS // config.CLUSTER


def of_wgmma(config: Config, k: int, units: int) -> Chains:
    """piece_of of codebook_wgmma.cu: the units of each chain of each piece of each block of a cluster, in order."""
    chains: Chains = {}
    for block in range(config.CLUSTER):
        for piece in range(pieces_of(config)):
            number = block * pieces_of(config) + piece
            begin = number // 4 * units
            end = min(k // UNIT, begin + units)
            run = (end - begin + 15) // 16 * TEAM
            first = begin + number % 4 * run
            stages = max(0, -(-(min(end, first + run) - first) // TEAM))
            for chain in range(TEAM):
                walked = [first + TEAM * stage + chain for stage in range(stages)]
                # of a unit beyond K, codes, scales and x are zeros
                chains[number // 4, number % 4, chain] = [unit for unit in walked if unit < k // UNIT]
    return chains


@dataclass(frozen=True)
class Turn:
    """Turn of codebook_wgmma_walk.cuh: what a block does with a piece, in stages of all tiles."""

    block: int
    last: bool
    piece: int
    begin: int
    end: int
    begun: bool
    whole: bool


def turns_of(share: codebook_wgmma.Shares, block: int) -> list[Turn]:
    def begin_of(block: int) -> int:
        return block * share.each + min(block, share.longer)

    def piece_with(stage: int) -> int:
        return stage * share.inverse >> 32

    first, last = begin_of(block), begin_of(block + 1) - 1
    count = piece_with(last) - piece_with(first) + 1
    turns = []
    for turn in range(count):
        piece = piece_with(first) + (count - 1 if turn == 0 else 0 if turn == count - 1 else turn)
        begin, end = max(piece * share.run, first), min((piece + 1) * share.run, last + 1)
        begun, whole = begin > piece * share.run, end == (piece + 1) * share.run
        turns.append(Turn(block, turn == count - 1, piece, begin, end, begun, whole))
    return turns


def of_spread(config: Config, k: int, blocks: int, share: codebook_wgmma.Shares) -> list[Chains]:
    """The units of each chain of each piece of each tile, as blocks take them and hand them over."""
    pieces: dict[int, list[Turn]] = {}
    for block in range(blocks):
        turns = turns_of(share, block)
        assert all(turn.whole for turn in turns[1:]), "chains are handed over before anything else"
        assert not any(turn.begun for turn in turns[:-1]), "others' chains are gone on with at the end"
        assert not any(turn.begun and not turn.whole for turn in turns), "no one waits for whom waits"
        for turn in turns:
            pieces.setdefault(turn.piece, []).append(turn)
    tiles: list[Chains] = [{} for _ in range(share.tiles)]
    for piece, turns in pieces.items():
        turns.sort(key=lambda turn: turn.begin)
        assert [turn.begun for turn in turns] == [False, *(True for _ in turns[1:])]
        assert [turn.whole for turn in turns] == [*(False for _ in turns[1:]), True]
        assert all(after.block == before.block + 1 for before, after in pairwise(turns))
        stages = [stage for turn in turns for stage in range(turn.begin, turn.end)]
        tile, number = divmod(piece, pieces_of(config))
        first = tile * pieces_of(config) * share.run
        for chain in range(TEAM):
            walked = [(stage - first) * TEAM + chain for stage in stages]
            tiles[tile][number // 4, number % 4, chain] = [unit for unit in walked if unit < k // UNIT]
    return tiles


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches can be made without a GPU, and not be launched."""
    monkeypatch.setattr(nvrtc, "load", lambda *arguments: 0)
    monkeypatch.setattr(nvrtc, "function", lambda kernel: 0)
    monkeypatch.setattr(codebook, "tensor_map", lambda *arguments: codebook.TensorMap())


def weight_without_memory(n: int, k: int) -> PackedWeight:
    parts = {
        name: torch.empty(part.shape, dtype=part.dtypes[0], device="meta") for name, part in NF4.parts(n, k).items()
    }
    return PackedWeight(NF4, (n, k), parts)


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("n", NS)
@pytest.mark.usefixtures("bound")
def test_every_row_and_unit_is_someones_once_and_pieces_are_teams(n: int, k: int) -> None:
    wanted = of_mma(n, k)
    assert sorted(unit for chain in wanted.values() for unit in chain) == list(range(k // UNIT))
    assert all(of_mma(n, k, m) == wanted for m in (2, 8, 16))
    weight = weight_without_memory(n, k)
    spread: set[tuple[int, int]] = set()
    for m in (9, 32, 64):
        configs = all_configurations(n, k, m)
        assert configs
        assert len({config.RANKS for config in configs}) == 1
        for config in configs:
            launch = codebook_wgmma.launch(weight, config, 0, MULTIPROCESSORS)
            blocks = launch.record.config.grid[0]
            assert blocks <= MULTIPROCESSORS
            if config.SPREAD:
                share = launch._arguments[-2]
                tiles_of_chains = of_spread(config, k, blocks, share)
                assert len(tiles_of_chains) == ceil(n / config.rows)
                assert all(chains == wanted for chains in tiles_of_chains)
                sizes = {sum(turn.end - turn.begin for turn in turns_of(share, block)) for block in range(blocks)}
                assert max(sizes) - min(sizes) <= 1, "blocks have as much to do"
                spread.add((n, k))
                continue
            assert of_wgmma(config, k, launch._call.units) == wanted
            clusters, rest = divmod(blocks, config.CLUSTER)
            assert rest == 0
            tiles = [tile for cluster in range(clusters) for tile in range(cluster, ceil(n / config.rows), clusters)]
            assert sorted(tiles) == list(range(ceil(n / config.rows)))
            assert clusters <= len(tiles), "no cluster has nothing to do"
    assert spread or (n, k) not in ((1000, 32768), (300, 4096)), "where pieces are alike"


def row_of(g: int) -> int:
    return 2 * g if g < 4 else 2 * g - 7


def distinct(configs: list[Config], *names: str) -> list[Config]:
    return list({tuple(getattr(config, name) for name in names): config for config in configs}.values())


def assert_spread_sums_are_read_where_they_were_put(config: Config) -> None:
    """store4 in add_chains, and finish_tile: four sums of a thread at a time."""
    sums = config.COLUMNS // 2
    put = {}
    for row_group in range(config.ROW_GROUPS):
        for thread in range(128):
            for i in range(sums):
                warp, g, q = thread // 32, thread % 32 // 4, thread % 4
                row = 64 * row_group + 16 * warp + row_of(g) + 8 * (i >> 1 & 1)
                place = (row_group * sums + i // 4 * 4) * 128 + 4 * thread + i % 4
                put[row, 8 * (i // 4) + 2 * q + (i & 1)] = place
    read = {}
    for quad in range(config.rows * config.COLUMNS // 4):
        thread = quad & 127
        lane = thread & 31
        column = quad // 128 % (sums // 4) * 8 + 2 * (lane & 3)
        row = quad // 128 // (sums // 4) * 64 + thread // 32 * 16 + row_of(lane >> 2)
        for c in range(4):
            read[row + c // 2 * 8, column + c % 2] = 4 * quad + c
    assert read == put
    assert sorted(put.values()) == list(range(config.rows * config.COLUMNS))


@pytest.mark.parametrize("m", [16, 32, 64])
def test_every_output_is_read_where_its_sum_was_put(m: int) -> None:
    """sum_at, as add_chains and as finish of codebook_wgmma.cu use it."""
    for config in distinct(all_configurations(5120, 32768, m), "ROW_GROUPS", "COLUMNS", "CLUSTER", "SPREAD"):
        rows, columns = config.rows, config.COLUMNS
        if config.SPREAD:
            assert_spread_sums_are_read_where_they_were_put(config)
            continue

        def sum_at(row_group: int, i: int, thread: int, columns: int = columns) -> int:
            return (row_group * (columns // 2) + i) * 128 + thread % 128

        put = {}
        for row_group in range(config.ROW_GROUPS):
            for thread in range(128):
                for i in range(columns // 2):  # a thread's part of the accumulators of wgmma m64nNk16
                    warp, g, q = thread // 32, thread % 32 // 4, thread % 4
                    row = 64 * row_group + 16 * warp + row_of(g) + 8 * (i >> 1 & 1)
                    put[row, 8 * (i // 4) + 2 * q + (i & 1)] = sum_at(row_group, i, thread)
        outputs = rows * columns // config.CLUSTER
        assert outputs * config.CLUSTER == rows * columns
        read = {}
        for i in range(rows * columns):
            row, column = i % rows, i // rows
            in8 = row & 7
            g = (in8 + 7) // 2 if in8 & 1 else in8 // 2
            lane_of = (row >> 4 & 3) * 32 + g * 4 + (column >> 1 & 3)
            read[row, column] = sum_at(row // 64, column // 8 * 4 + (row >> 3 & 1) * 2 + (column & 1), lane_of)
        assert read == put
        assert sorted(put.values()) == list(range(rows * columns))


def fold(parts: list[Tensor]) -> Tensor:
    return reduce(torch.add, parts)


def added_by_mma(sums: Tensor) -> Tensor:
    """reduce_and_store of codebook_mma.cu on the sums [ranks, teams, warps, …] of its warps."""
    zero = torch.zeros_like(sums[0, 0, 0])
    return fold([fold([zero, *(fold(list(team)) for team in rank)]) for rank in sums])


def added_by_wgmma(config: Config, sums: Tensor) -> Tensor:
    """add_chains and finish (finish_tile) of codebook_wgmma.cu on the sums [ranks, pieces, chains, …] of warpgroups."""
    each_group = 4 // config.UNIT_GROUPS
    pieces = pieces_of(config)
    kept = []  # entries of the cluster's blocks, one after another
    for block in range(config.CLUSTER):
        entries: dict[int, Tensor] = {}
        for piece in range(pieces):
            chains = list(sums.flatten(0, 1)[block * pieces + piece])
            groups = [chains[i : i + each_group] for i in range(0, 4, each_group)]
            *passed, last = groups
            total = fold([*(fold(group) for group in passed), *last])
            entry = piece if pieces <= 2 or config.SPREAD else piece // 4
            entries[entry] = entries[entry] + total if entry in entries else total
        kept += [entries[entry] for entry in sorted(entries)]
    each = len(kept) // config.RANKS
    zero = torch.zeros_like(kept[0])
    return fold([fold([zero, *kept[rank * each : (rank + 1) * each]]) for rank in range(config.RANKS)])


@pytest.mark.parametrize("shape", [(5120, 32768), (65536, 5120), (1000, 4096), (16384, 16384)], ids=str)
def test_sums_are_added_in_the_order_of_codebook_mma(shape: tuple[int, int]) -> None:
    seen = set()
    for config in (config for m in (16, 64) for config in all_configurations(*shape, m)):
        seed = torch.Generator().manual_seed(config.CLUSTER)
        sums = torch.randn(config.RANKS, 4, 4, 4096, generator=seed)
        wanted = added_by_mma(sums)
        assert torch.equal(added_by_wgmma(config, sums), wanted)
        assert not torch.equal(sums.flatten(0, 2).sum(0), wanted), "another order gives other bits"
        seen.add((config.UNIT_GROUPS, config.CLUSTER, config.SPREAD))
    assert len(seen) >= 9
    assert any(spread for *_, spread in seen) == (shape != (65536, 5120)), "there a block would have too many turns"


def test_ranks_are_those_of_codebook_mma_and_do_not_depend_on_m() -> None:
    several = set()
    for n in NS:
        for k in KS:
            ranks = {config.RANKS for m in (9, 16, 17, 32, 33, 64) for config in all_configurations(n, k, m)}
            splits = {
                codebook_mma.configure(NF4, BF16, m, n, k, codebook_wgmma.ARCH, MULTIPROCESSORS)[0].SPLIT
                for m in (1, 2, 8, 16)
            }
            assert ranks == splits
            several |= ranks
    assert several == {1, 2}


def test_the_planner_keeps_to_kernels_of_equal_bits_for_all_m() -> None:
    """Up to 64 rows of x, a problem goes to one kernel, or to these two."""
    pair = {codebook_mma.STEM, codebook_wgmma.STEM}
    taken: Counter[str] = Counter()
    for key in KEYS:
        rows, columns = multiples(key)
        for dtype in (torch.float16, BF16, torch.float32):
            for n, k in ((1040, 4096), (4096, 4096), (65536, 5120), (16, 64), (300, 576)):
                shape = (ceil(n / rows) * rows, ceil(k / max(64, columns)) * max(64, columns))
                names = {
                    plan(Problem(get_format(key), dtype, m, *shape, codebook_wgmma.ARCH)).kernel.name
                    for m in (1, 2, 8, 9, 16, 17, 32, 33, 64)
                }
                assert len(names) == 1 or names == pair, f"{key} {dtype} {shape}: {names}"
                taken.update(names)
    if nvrtc.missing() is None:
        assert taken[codebook_wgmma.STEM]


# ---- its launcher


class Launches:
    """Stands for the device: what was launched, with which image."""

    def __init__(self) -> None:
        self.made: list[tuple[str, int, bool]] = []  # kernel, rows of x, early
        self.images: list[Tensor] = []

    def bind(self, weight: PackedWeight, dtype: torch.dtype, m: int, variant: object = None) -> Any:
        laying = variant == IMAGE_STEM

        size = codebook_wgmma.stages_of(weight.shape[1]) * (codebook_wgmma.columns(m) * (512 + 16) + 16)

        def launch(
            x: Tensor, bias: Tensor | None, out: Tensor, stream: int, early: bool = False, fields: Any = None
        ) -> None:
            image = out if laying else x
            assert image.numel() >= size
            assert image.data_ptr() % 16 == 0
            assert x.shape[0] == out.shape[0]
            if laying:
                assert (x.data_ptr() | x.stride(0) * x.element_size()) % 16 == 0
                self.images.append(image)
            else:
                assert image is self.images[-1], "what was laid out is what is multiplied"
                out.fill_(1)
            self.made.append(("x" if laying else "multiply", x.shape[0], early))

        launch.record = SimpleNamespace(image_bytes=size)  # type: ignore[attr-defined]
        return launch


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Launches:
    launches = Launches()
    monkeypatch.setattr(codebook_wgmma, "bind", launches.bind)
    monkeypatch.setattr(Launcher, "_shared", OrderedDict())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return launches


def multiplied(weight: PackedWeight, x: Tensor) -> None:
    out = torch.zeros(x.shape[0], weight.shape[0], dtype=x.dtype)
    codebook_wgmma.run(x, weight, None, out)
    assert (out == 1).all()


def test_x_is_laid_out_before_each_multiply_of_at_most_a_chunk(device: Launches) -> None:
    weight = quantize(torch.randn(64, 576), "nf4")
    multiplied(weight, torch.randn(MAX_M - 7, 576, dtype=BF16))
    rows = [min(CHUNK, MAX_M - 7 - first) for first in range(0, MAX_M - 7, CHUNK)]
    assert device.made == [
        launch for number, m in enumerate(rows) for launch in (("x", m, True), ("multiply", m, number > 0))
    ], "laying x out reads no weight, so it starts early always; the first multiply of a weight does not"
    device.made.clear()
    multiplied(weight, torch.randn(16, 576, dtype=BF16))
    assert device.made == [("x", 16, True), ("multiply", 16, True)], "the weight has stayed as it was"
    weight.codes.copy_(weight.codes.clone())
    device.made.clear()
    multiplied(weight, torch.randn(16, 576, dtype=BF16))
    assert device.made == [("x", 16, True), ("multiply", 16, False)], "it has been written"


def test_x_of_any_strides_is_taken_and_an_unaligned_weight_goes_to_the_fallback(device: Launches) -> None:
    weight = quantize(torch.randn(64, 256), "nf4")
    wide = torch.randn(32, 300, dtype=BF16)
    for x in (
        wide[:, 1:257],
        wide[:, :256],
        wide[::2, 8:264],
        torch.randn(256, 16, dtype=BF16).t(),
        wide[:1, :256].expand(9, 256),
    ):
        multiplied(weight, x)
    assert [m for what, m, _ in device.made if what == "multiply"] == [32, 32, 16, 16, 9]
    memory = torch.zeros(weight.codes.numel() + 1, dtype=torch.uint8)
    odd = PackedWeight(weight.format, weight.shape, {**weight.parts, "codes": memory[1:].copy_(weight.codes)})
    x, out = torch.randn(16, 256), torch.zeros(16, 64)
    codebook_wgmma.run(x, odd, None, out)
    torch.testing.assert_close(out, x @ weight.dequantize().t())
