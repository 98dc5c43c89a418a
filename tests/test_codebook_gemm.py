"""codebook_gemm without a GPU: its arithmetic (in torch), how it cuts a call, what it launches, its machine code."""

from __future__ import annotations

import ctypes
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from halfbyte import reference
from halfbyte.formats import BlockFormat, PackedWeight, get_format, quantize
from halfbyte.kernels import Problem, codebook, nvrtc, registry
from halfbyte.kernels import codebook_gemm as gemm
from halfbyte.kernels import codebook_prefill as prefill
from halfbyte.lab import sass
from halfbyte.plan import plan

BF16, FP16 = torch.bfloat16, torch.float16
NF4 = get_format("nf4-64")
SHAPES = ((6144, 5120), (5120, 4096), (65536, 5120), (5120, 32768), (4096, 14336), (1000, 64))
compiled = pytest.mark.skipif(nvrtc.missing() is not None, reason=str(nvrtc.missing()))
FORMATS = ("nf4-64", "nf4-64-nested", "nf4-32", "nf4-128", "nf4-32-nested", "fp4-64", "mxfp4")


def weights_as_decoded(weight: PackedWeight) -> Tensor:
    """Of a weight with plain scales: entry, scale and product each rounded to fp16, in float64."""
    factor = codebook.table_factor(weight.format.codebook)
    table = (torch.tensor(weight.format.codebook, dtype=torch.float64) * factor).half()
    codes, n, k = weight.parts["codes"].long(), *weight.shape
    entries = table[torch.stack((codes >> 4, codes & 15), -1).flatten()].view(n, k)
    absmax = weight.parts["absmax"].view(n, -1)
    power = absmax[:, : 256 // weight.format.blocksize].amax(1, keepdim=True).log2().floor().exp2() / 2
    scale = (absmax / power).half().repeat_interleave(weight.format.blocksize, 1)
    return (entries * scale).double() * power.double() / factor


@pytest.mark.parametrize("mean", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("key", ["nf4-64", "nf4-32", "fp4-64"])
def test_weights_rounded_so_keep_the_contract_in_bf16(key: str, mean: float) -> None:
    torch.manual_seed(0)
    weight = quantize(torch.randn(1024, 4096) * 0.02, key)
    x = (torch.randn(64, 4096) + mean).to(BF16)
    y = reference.linear(x, weight)
    out = (x.double() @ weights_as_decoded(weight).T).to(BF16)
    reference.assert_within_contract(out, y, key)
    for row in range(0, 64, 8):
        reference.assert_within_contract(out[row : row + 1], y[row : row + 1], f"{key} row {row}")


def test_the_same_in_fp16_would_not_and_is_refused() -> None:
    torch.manual_seed(0)
    weight = quantize(torch.randn(1024, 4096) * 0.02, "nf4-64")
    x = torch.randn(64, 4096).to(FP16)
    y, out = reference.linear(x, weight), (x.double() @ weights_as_decoded(weight).T).to(FP16)
    assert reference.relative_error(out, y) > 1.1 * reference.rounding_limit(y, FP16)
    reason = gemm.reason_against(Problem(NF4, FP16, 128, 4096, 4096, "sm_90a"))
    assert reason is not None
    assert "fp16" in reason


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"arch": "sm_100"}, "sm_90a"),
        ({"m": 64}, "65"),
        ({"dtype": torch.float32}, "bf16"),
        ({"k": 4096 + 32}, "64"),
        ({"k": 1 << 20}, "MiB"),
        ({"format": get_format("q4_k")}, "q4_k"),
    ],
)
def test_what_it_does_not_serve_has_a_reason(changed: dict[str, Any], word: str) -> None:
    problem = Problem(NF4, BF16, 128, 4096, 4096, "sm_90a")
    assert gemm.reason_against(problem) is None
    reason = gemm.reason_against(replace(problem, **changed))
    assert reason is not None
    assert word in reason


def test_fewer_rows_only_where_a_process_gives_up_invariance(monkeypatch: pytest.MonkeyPatch) -> None:
    few = Problem(NF4, BF16, 64, 4096, 4096, "sm_90a")
    reason = gemm.reason_against(few)
    assert reason is not None
    assert "HALFBYTE_BATCH_INVARIANT" in reason
    monkeypatch.setattr(registry, "BATCH_INVARIANT", False)
    assert gemm.reason_against(few) is None
    assert gemm.cut(64, 4096, 4096, 132).tile is gemm.NARROW
    assert gemm.reason_against(replace(few, m=32)) is not None


def test_the_planner_takes_it_from_65_rows_on() -> None:
    for shape in SHAPES[:5]:
        assert plan(Problem(NF4, BF16, 128, *shape, "sm_90a")).kernel.name == gemm.STEM
        assert plan(Problem(NF4, BF16, 64, *shape, "sm_90a")).kernel.name != gemm.STEM
        assert plan(Problem(NF4, FP16, 128, *shape, "sm_90a")).kernel.name != gemm.STEM
    assert plan(Problem(NF4, BF16, 2048, 5120, 32768, "sm_90a")).kernel.name == prefill.STEM, "measured faster there"


@pytest.mark.parametrize("m", [65, 128, 129, 300, 2048, 100_000])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_cuts_are_whole_and_within_the_workspace(m: int, n: int, k: int) -> None:
    each = gemm.cut(m, n, k, 132)
    units = k // 64
    assert gemm.workspace_bytes(each, n, k) <= gemm.WORKSPACE
    assert each.segments * each.units >= units > (each.segments - 1) * each.units, "no segment is empty"
    assert each.units % gemm.TEAM == 0, "segments begin with a stage"
    assert each.chunk >= m or each.chunk % each.tile.COLUMNS == 0
    assert each == gemm.cut(-(-m // 64) * 64, n, k, 132), "decided once for all of them"
    assert str(each.tile.rows) in gemm.describe(Problem(NF4, BF16, m, n, k, "sm_90a"))


class Recorded:
    """What a launch was started with."""

    def __init__(self, stem: str, calls: list[dict[str, Any]]) -> None:
        self.stem, self.calls = stem, calls

    def start(self, stream: int, early: bool = False, **fields: Any) -> None:
        self.calls.append({"stem": self.stem, "early": early, **fields})


class Launches:
    """Stands for launch.Launcher."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def stream(self) -> int:
        return 0

    def settled(self, stream: int) -> bool:
        return True

    def get(self, bind: Any, weight: PackedWeight, dtype: torch.dtype, m: int, variant: tuple[str, int]) -> Recorded:
        return Recorded(variant[0], self.calls)


@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("bias_rows", [0, 1, 200])
def test_launches_hand_memory_on_chunk_after_chunk(segments: int, bias_rows: int) -> None:
    weight, x, out = (
        quantize(torch.randn(96, 512), "nf4-64"),
        torch.randn(200, 512).to(BF16),
        torch.empty(200, 96, dtype=BF16),
    )
    bias = None if bias_rows == 0 else torch.randn(96) if bias_rows == 1 else torch.randn(200, 96)
    launches = Launches()
    gemm.multiply(launches, x, weight, bias, out, gemm.Cut(gemm.MIDDLE, 128, 8 // segments, segments))  # type: ignore[arg-type]
    stems = [gemm.X_STEM, gemm.STEM, *([gemm.Y_STEM] if segments > 1 else [])]
    assert [call["stem"] for call in launches.calls] == 2 * stems
    for first, calls in ((0, launches.calls[: len(stems)]), (128, launches.calls[len(stems) :])):
        assert {call["m"] for call in calls} == {128 if first == 0 else 72}
        assert calls[0]["x"] == x[first:].data_ptr()
        for before, after in pairwise(calls):
            assert before["out"] == after["x"]
        assert calls[-1]["out"] == out[first:].data_ptr()
        assert all(call.get("bias") is None for call in calls[:-1])
        if bias is not None:
            assert calls[-1]["bias"] == (bias[first:] if bias_rows == 200 else bias).data_ptr()
            assert calls[-1]["bias_stride"] == (96 if bias_rows == 200 else 0)
            assert calls[-1]["bias_is_fp32"] == 1
    assert all(call["early"] for call in launches.calls)


# ---- machine code


def code_of(stem: str, tile: gemm.Tile, format: BlockFormat) -> sass.Sass:
    copied = codebook.copies_fp32(format, 4096, gemm.ARCH)
    return sass.disassemble(nvrtc.compile(stem, gemm.ARCH, gemm.macros(stem, tile, format, copied)))


@compiled
@pytest.mark.parametrize("tile", gemm.TILES, ids=lambda tile: f"{tile.rows}x{tile.COLUMNS}")
@pytest.mark.parametrize("key", FORMATS)
def test_multiplies_are_not_serialised(key: str, tile: gemm.Tile) -> None:
    """The assembler waits for each wgmma by itself where it cannot follow what is in flight: half the speed."""
    format = get_format(key)
    code = code_of(gemm.STEM, tile, format)
    found = Counter(sass.opcode(each) for each in map(str, code.instructions))
    assert sum(count for name, count in found.items() if name.startswith("HGMMA")) == 16
    assert found["WARPGROUP.DEPBAR.LE"] == 7
    loop = [str(each) for each in code.main_loop()]
    assert not [each for each in loop if "LDL" in each or "STL" in each]
    # side warps of the tile of 128 rows of x have 32 registers: a few numbers do not fit where scales are not copied
    few = 6 if tile is gemm.MIDDLE and (format.nested or key == "mxfp4") else 0
    assert len(code.local_memory()) <= 2 * few
    block = min(format.blocksize, gemm.UNIT)
    assert tile.shared_bytes(block) <= (227 << 10) - 1024


@compiled
@pytest.mark.parametrize("tile", gemm.TILES, ids=lambda tile: f"{tile.rows}x{tile.COLUMNS}")
def test_its_neighbours_keep_nothing_in_local_memory(tile: gemm.Tile) -> None:
    lay_out, add = (code_of(stem, tile, NF4) for stem in (gemm.X_STEM, gemm.Y_STEM))
    assert not lay_out.local_memory()
    assert not add.local_memory()
    assert any("LDG.E.128" in str(each) for each in lay_out.instructions)
    assert any("LDG.E.128" in str(each) for each in add.instructions)


def test_arguments_are_laid_out_as_in_the_source() -> None:
    assert ctypes.sizeof(gemm._Maps) == 256
    assert ctypes.sizeof(gemm._Problem) == 72
    assert gemm._Problem.bias_stride.offset == 48
    assert gemm._Problem.units.offset == 64


def test_registers_are_what_a_block_begins_with() -> None:
    """setmaxnreg only moves registers: what warpgroups have in the end is what all began with."""
    for tile in gemm.TILES:
        begin = 65536 // tile.threads // 8 * 8 * tile.threads
        assert begin >= 128 * (tile.PRODUCER_REGISTERS + tile.ROW_GROUPS * tile.CONSUMER_REGISTERS)
