"""The suites of single calls: what a call costs the host, and bitsandbytes' protocol of 16 cases."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from halfbyte import cli
from halfbyte.integrations import bitsandbytes
from halfbyte.lab import nf4_16
from halfbyte.lab.measure import Timing
from halfbyte.lab.overhead import bench_overhead
from halfbyte.lab.rows import Environment, Row

CPU = torch.device("cpu")
OURS = ["halfbyte linear, torch.ops", "halfbyte linear", "halfbyte QuantLinear"]


def test_every_candidate_has_a_row_and_the_right_answer() -> None:
    pytest.importorskip("bitsandbytes")
    rows = list(bench_overhead(["nf4-64", "q4_0"], "fp32", CPU, m=2, seconds_each=0.01, shape=(32, 64)))
    nf4, q4 = rows[:8], rows[8:]
    assert [row.kernel for row in nf4[:3]] == [row.kernel for row in q4[:3]] == OURS
    theirs = [row.kernel.split(" ", 2)[2] for row in nf4[3:5]]
    assert theirs == ["gemm_4bit, torch.ops", "Linear4bit"]
    assert [row.format for row in nf4] == ["nf4-64"] * 5 + ["fp32"] + ["nf4-64"] * 2
    served = [row.kernel for row in nf4[6:]]
    assert served == [f"halfbyte for {row.kernel}" for row in nf4[3:5]]
    assert not bitsandbytes.status().enabled
    assert len(q4) == 4  # bitsandbytes has no Q4_0
    for row in rows:
        assert (row.suite, row.M, row.N, row.K) == ("overhead", 2, 32, 64)
        assert 0 < row.timing.us_p20 <= row.timing.us <= row.timing.us_p80
        assert row.error < (5e-6 if row.kernel in OURS or row.kernel in served else 2e-2)
    assert nf4[0].bytes == 32 * 64 // 2 + 32 * 4
    assert nf4[5].bytes == 32 * 64 * 4


def test_the_command_appends_its_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    cli.app(
        ["bench", "overhead", "--formats", "mxfp4", "--device", "cpu", "--seconds", "0.01", "--out", str(out)],
        standalone_mode=False,
    )
    rows = [json.loads(text) for text in out.read_text().splitlines()]
    assert [row["kernel"] for row in rows[:3]] == OURS
    assert {row["suite"] for row in rows} == {"overhead"}
    assert "a whole call" in capsys.readouterr().out


def case(ours_us: float, theirs_us: float) -> nf4_16.Case:
    def row(kernel: str, us: float) -> Row:
        return Row(
            suite="nf4-16-case", environment=Environment.of(CPU), kernel=kernel, format="nf4-64", nested=False,
            dtype="bf16", M=1, N=64, K=64, timing=Timing(us, us, us), bytes=2304, ceiling_tb_per_s=0.0, error=0.0,
            rounding_limit=0.0,
        )  # fmt: skip

    return nf4_16.Case(row("halfbyte codebook_mma", ours_us), row("bitsandbytes 1.0 gemm_4bit", theirs_us))


def test_the_score_is_the_geometric_mean_of_the_cases() -> None:
    record = nf4_16.record([case(10, 20), case(10, 80)])
    assert record["suite"] == "nf4-16"
    assert math.isclose(float(str(record["geomean_speedup"])), 4.0)
    assert (record["kernel"], record["peer"]) == ("halfbyte codebook_mma", "bitsandbytes 1.0 gemm_4bit")


def test_sixteen_cases() -> None:
    assert len(set(nf4_16.CASES)) == 16


def test_without_a_gpu_the_protocol_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match="needs a CUDA GPU"):
        next(nf4_16.cases())


def test_batches_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: events that count the calls between them as milliseconds."""
    seen: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = 0

        def record(self) -> None:
            self.at = len(seen)

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: Event) -> float:
            return (end.at - self.at) * 0.002

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    operators = {name: lambda name=name: seen.append(name) for name in "ab"}
    timings = nf4_16._timings(operators, batches=3, calls=5)  # type: ignore[arg-type]
    assert seen == ["a"] * nf4_16.WARMUP + ["b"] * nf4_16.WARMUP + (["a"] * 5 + ["b"] * 5) * 3
    assert timings["a"].us == pytest.approx(2.0)
