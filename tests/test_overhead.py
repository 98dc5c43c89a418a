"""The suites of single calls: what a call costs the host, and bitsandbytes' protocol of 16 cases."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from halfbyte import cli
from halfbyte.integrations import bitsandbytes
from halfbyte.lab import bench_cli, nf4_16
from halfbyte.lab.measure import Timing
from halfbyte.lab.overhead import bench_overhead
from halfbyte.lab.report.rows import read_rows
from halfbyte.lab.rows import Environment, Row, append

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


PEER = "bitsandbytes 1.0"
HERE = Environment("Some GPU", "sm_90a", "580.1", "2.11.0", "abc", "2026-11-30T09:00:00+00:00")


def case(
    key: nf4_16.Key,
    ours_us: float = 10,
    theirs_us: float = 20,
    peer: str = PEER,
    calls: int = nf4_16.CALLS,
    **changed: Any,
) -> nf4_16.Case:
    n, k, nested, dtype = key

    def row(kernel: str, us: float) -> dict[str, Any]:
        made = Row(
            suite="nf4-16-case", environment=HERE, kernel=kernel, format="nf4-64", nested=nested, dtype=dtype, M=1, N=n,
            K=k, timing=Timing(us, us, us), bytes=2304, ceiling_tb_per_s=0.0, error=0.0, rounding_limit=0.0,
        )  # fmt: skip
        return {**made.record(), "batches": nf4_16.BATCHES, "calls": calls, **changed}

    return nf4_16.Case(row("halfbyte codebook_mma", ours_us), row(f"{peer} gemm_4bit", theirs_us))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[nf4_16.Key]:
    """A pretended GPU on which cases take no time; which were measured."""
    measured: list[nf4_16.Key] = []

    def cases(batches: int, calls: int, done: Sequence[nf4_16.Case] = ()) -> Iterator[nf4_16.Case]:
        for key in nf4_16.CASES:
            if key not in {each.key for each in done}:
                if len(measured) == 14:
                    raise KeyboardInterrupt
                measured.append(key)
                yield case(key, calls=calls)

    monkeypatch.setattr(nf4_16, "_required", lambda: (CPU, PEER))
    monkeypatch.setattr(nf4_16.Environment, "of", staticmethod(lambda device: HERE))
    monkeypatch.setattr(nf4_16, "cases", cases)
    return measured


def bench(*words: str) -> list[dict[str, Any]]:
    out = Path(words[-1])
    cli.app(["bench", "nf4-16", *words[:-1], "--out", str(out)], standalone_mode=False)
    return [json.loads(text) for text in out.read_text().splitlines()]


def test_the_score_is_the_geometric_mean_of_the_cases() -> None:
    results = [case(key, 10, 20 if key[2] else 80) for key in nf4_16.CASES]
    record = nf4_16.record(results)
    assert (record["suite"], record["cases"], record["commit"]) == ("nf4-16", 16, "abc")
    assert math.isclose(float(str(record["geomean_speedup"])), 4.0)
    assert (record["kernel"], record["peer"]) == ("halfbyte codebook_mma", "bitsandbytes 1.0 gemm_4bit")
    with pytest.raises(ValueError, match="1 of the 16 cases of nf4-16 are missing"):
        nf4_16.record([*results[1:], results[1]])


def test_sixteen_cases() -> None:
    assert len(set(nf4_16.CASES)) == 16


def test_an_interrupted_run_keeps_its_cases_and_another_goes_on(
    gpu: list[nf4_16.Key], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = str(tmp_path / "rows.jsonl")
    notices: list[str] = []
    monkeypatch.setattr(bench_cli.notices, "print", lambda text, **how: notices.append(text))
    assert CliRunner().invoke(cli.app, ["bench", "nf4-16", "--out", out]).exit_code == 130
    rows = [json.loads(text) for text in Path(out).read_text().splitlines()]
    assert [row["suite"] for row in rows] == ["nf4-16-case"] * 28, "no score of fourteen"
    assert notices[-1] == "2 cases are missing; --resume goes on with them"
    gpu.clear()
    rows = bench("--resume", out)
    assert gpu == nf4_16.CASES[14:]
    assert [row["suite"] for row in rows] == ["nf4-16-case"] * 32 + ["nf4-16"]
    assert (rows[-1]["cases"], rows[-1]["geomean_speedup"]) == (16, pytest.approx(2))
    assert len(read_rows([Path(out)])) == 33
    gpu.clear()
    assert len(bench("--resume", out)) == 34, "the score alone is written anew"
    assert gpu == []
    with pytest.raises(ValueError, match="name it with --out"):
        cli.app(["bench", "nf4-16", "--resume"], standalone_mode=False)


@pytest.mark.parametrize(
    "other",
    [
        {"commit": "abd"}, {"device": "Another GPU"}, {"driver": "581"}, {"torch": "2.12.0"}, {"batches": 3},
        {"calls": 100}, {"peer": "bitsandbytes 1.1"},
    ],
)  # fmt: skip
def test_cases_of_other_circumstances_are_measured_again(
    other: dict[str, Any], gpu: list[nf4_16.Key], tmp_path: Path
) -> None:
    path, keys = tmp_path / "rows.jsonl", nf4_16.CASES
    assert nf4_16.done_in(path) == []
    for each in (case(keys[0], **other), case(keys[1], ours_us=9), case(keys[1], ours_us=8)):
        append(path, [each.ours, each.theirs])
    assert [each.key for each in nf4_16.done_in(path)] == [keys[1]]
    assert nf4_16.done_in(path)[0].ours["us"] == 8, "the newest"


def test_cases_of_changed_source_are_measured_again(
    gpu: list[nf4_16.Key], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dirty = case(nf4_16.CASES[0], commit="abc+")
    append(tmp_path / "rows.jsonl", [dirty.ours, dirty.theirs])
    monkeypatch.setattr(nf4_16.Environment, "of", staticmethod(lambda device: replace(HERE, commit="abc+")))
    assert nf4_16.done_in(tmp_path / "rows.jsonl") == []


def test_without_a_gpu_the_protocol_says_so(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match="needs a CUDA GPU"):
        next(nf4_16.cases())
    with pytest.raises(ValueError, match="needs a CUDA GPU"):
        nf4_16.done_in(tmp_path / "rows.jsonl")


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
