"""The ladder's kernels on a GPU: right, repeatable, in graphs; and the suite that measures them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from halfbyte import reference
from halfbyte.lab import ladder_launch
from halfbyte.lab.cli import lab_app
from halfbyte.lab.ladder import Point, bench
from halfbyte.lab.ladder_rungs import RUNGS, Rung, get_rung
from halfbyte.lab.ladder_weights import PlanarQ4, exact_dense, exact_q4, quantize_q4

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# (N, K): less than a round of the loops; rows that leave a warp's pair alone; the layers of a model; x of 96 KB
SHAPES = ((5, 32), (3, 96), (1001, 2080), (4096, 4096), (14336, 4096), (300, 49152), (70000, 512))
all_rungs = pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.stem)


def operands(rung: Rung, n: int, k: int) -> tuple[PlanarQ4 | Tensor, Tensor, Tensor]:
    """The weight in a rung's format, x [K] with one large value, and the exact y, float64 [N]."""
    generator = torch.Generator("cuda").manual_seed(n + k)
    dense = torch.randn(n, k, device="cuda", generator=generator).half()
    x = torch.randn(k, device="cuda", generator=generator).half()
    x[k // 3] = 100
    if not rung.q4:
        return dense, x, exact_dense(x, dense)
    weight = quantize_q4(dense)
    return weight, x, exact_q4(x, weight)


def apply(rung: Rung, weight: PlanarQ4 | Tensor, x: Tensor) -> Tensor:
    y = x.new_full((weight.shape[0],), float("nan"))
    ladder_launch.bind(rung, weight, x, y)()
    return y


@all_rungs
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_contract_and_the_same_bits_again(rung: Rung, shape: tuple[int, int]) -> None:
    if reason := ladder_launch.reason_against(rung, shape[1], torch.device("cuda", 0)):
        pytest.skip(reason)
    weight, x, exact = operands(rung, *shape)
    y = apply(rung, weight, x)
    reference.assert_within_contract(y, exact, f"{rung.stem} {shape}")
    for _ in range(3):
        assert torch.equal(apply(rung, weight, x), y)


@pytest.mark.parametrize("rung", [rung for rung in RUNGS if rung.q4], ids=lambda rung: rung.stem)
def test_swapped_nibbles_are_noticed(rung: Rung) -> None:
    weight, x, exact = operands(rung, 256, 1024)
    assert isinstance(weight, PlanarQ4)
    swapped = PlanarQ4(weight.codes >> 4 | weight.codes << 4, weight.scales)
    with pytest.raises(AssertionError, match="relative error"):
        reference.assert_within_contract(apply(rung, swapped, x), exact)


@all_rungs
def test_graphs_see_new_activations(rung: Rung) -> None:
    weight, x, exact = operands(rung, 512, 2048)
    y = torch.empty(512, dtype=torch.float16, device="cuda")
    call = ladder_launch.bind(rung, weight, x, y)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for factor in (1, 2, -1):
        y.fill_(float("nan"))
        kept = x.clone()
        x.mul_(factor)
        graph.replay()
        torch.cuda.synchronize()
        reference.assert_within_contract(y, factor * exact, rung.stem)
        x.copy_(kept)


def test_what_cannot_run_says_why() -> None:
    device = torch.device("cuda", 0)
    assert "multiples of 32" in str(ladder_launch.reason_against(get_rung("q4_wide"), 48, device))
    assert "shared memory" in str(ladder_launch.reason_against(get_rung("q4_rows"), 1 << 18, device))
    weight, x, _ = operands(get_rung("q4_wide"), 8, 64)
    with pytest.raises(ValueError, match="16-byte boundary"):
        ladder_launch.bind(get_rung("q4_wide"), weight, torch.cat((x, x))[1:65], torch.empty_like(x[:8]))


def test_the_suite_measures_what_is_right() -> None:
    chosen = [Point("square", 1024, 1024, True), Point("l2", 512, 4096, False)]
    found = list(bench(chosen, torch.device("cuda"), seconds_each=0.005))
    assert [rows[0]["cache"] for rows in found] == ["cold", "warm"]
    for rows in found:
        assert {row["rung"] for row in rows} == {*(rung.stem for rung in RUNGS), "cublas", "library"}
        for row in rows:
            assert row["suite"] == "ladder"
            assert 0 < row["us_p20"] <= row["us"] <= row["us_p80"]
            if row["rung"] != "cublas":
                assert row["error"] <= reference.FACTOR * row["rounding_limit"], row["kernel"]
            assert row["bytes"] == row["N"] * row["K"] * (2 if row["format"] == "fp16" else 0.5625)
    late = list(bench(chosen, torch.device("cuda"), 0.005, within_s=-1, on_note=(notes := []).append))
    assert len(late) == 1
    assert "1 points left out" in notes[0]


def test_the_command_writes_rows_as_it_goes(tmp_path: Path) -> None:
    out = tmp_path / "ladder.jsonl"
    options = ["--sweeps", "l2", "--seconds", "0.002", "--within", "1", "--out", str(out)]
    result = CliRunner().invoke(lab_app, ["ladder", *options])
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["sweep"] for row in rows} == {"l2"}
    assert "worst error" in result.output
