"""The clock and the rows."""

import json
import subprocess
import sys
import time

import pytest
import torch

from halfbyte.lab import measure
from halfbyte.lab.measure import (
    GRAPH_CALLS,
    QUEUED_CALLS,
    Timing,
    copies_needed,
    host_time,
    interleave,
    peak_rss_bytes,
    read_ceiling,
)
from halfbyte.lab.rows import Environment, Row, append

CPU = torch.device("cpu")


def test_timing_is_median_and_fifths():
    timing = Timing.of([i / 1e6 for i in range(1, 102)])
    assert timing.us == pytest.approx(51)
    assert timing.us_p20 == pytest.approx(21, abs=1)
    assert timing.us_p80 == pytest.approx(81, abs=1)


def test_interleave_takes_turns_and_rotates_copies():
    seen = []
    candidates = {name: [lambda tag=(name, i): seen.append(tag) for i in range(3)] for name in "ab"}
    interleave(candidates, 0.0, CPU)
    warmup, timed = seen[:6], seen[6:]
    assert warmup == [(name, i) for name in "ab" for i in range(3)]
    assert timed == [(name, turn % 3) for turn in range(5) for name in "ab"]


def test_interleave_sees_which_is_slower():
    timings = interleave({"slow": [lambda: time.sleep(2e-3)], "fast": [lambda: None]}, 0.1, CPU)
    assert timings["slow"].us > 2000 > 100 > timings["fast"].us


def test_interleave_refuses_a_candidate_without_calls():
    with pytest.raises(ValueError, match="no calls"):
        interleave({"a": []}, 0.1, CPU)


@pytest.mark.parametrize(("copies", "rounds"), [(1, GRAPH_CALLS), (3, 7), (40, 1)])
def test_a_graph_holds_enough_calls_and_a_call_is_its_share(monkeypatch, copies, rounds):
    """Without a GPU: a graph that takes a second for each call that it was given."""

    class Graph:
        def __init__(self, seconds):
            self.seconds = seconds

        def replay(self):
            return self.seconds

    made = []
    monkeypatch.setattr(measure, "_device_seconds", lambda replay: replay())
    monkeypatch.setattr(measure, "_captured", lambda calls, rounds: made.append(rounds) or Graph(len(calls) * rounds))
    timings = measure._interleave_cuda({"a": [lambda: None] * copies}, 0.0)
    assert made == [rounds]
    assert timings["a"].us == pytest.approx(1e6)


def test_host_time_calls_in_rows_and_by_turns():
    seen = []
    host_time({name: lambda name=name: seen.append(name) for name in "ab"}, 0.0, CPU)
    row = [["a"] * QUEUED_CALLS, ["b"] * QUEUED_CALLS]
    assert seen == [each for _ in range(6) for name in row for each in name]  # once to warm up, five times


def test_host_time_is_a_time_a_call():
    timings = host_time({"slow": lambda: time.sleep(1e-4), "fast": lambda: None}, 0.0, CPU)
    assert timings["slow"].us > 100 > 20 > timings["fast"].us


CASES = [(100, 1000, 30), (999, 1000, 4), (10**9, 1000, 1), (100, 0, 1)]


@pytest.mark.parametrize(("weight", "cache", "copies"), CASES)
def test_copies_exceed_the_cache_three_times(weight, cache, copies):
    assert copies_needed(weight, cache) == copies


def test_read_ceiling_is_a_plausible_bandwidth():
    assert 1e9 < read_ceiling(CPU, repeats=2) < 1e13


def test_peak_memory_is_this_process_not_its_parent():
    ballast = torch.ones(1 << 28)  # 1 GiB that a child must not be charged for
    code = "from halfbyte.lab.measure import peak_rss_bytes; print(peak_rss_bytes())"
    child = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert peak_rss_bytes() > ballast.nbytes > child > 50 << 20


def test_rows_are_flat_and_appended(tmp_path):
    row = Row(
        suite="linear", environment=Environment.of(CPU), kernel="halfbyte x", format="nf4-64", nested=False,
        dtype="bf16", M=1, N=64, K=128, timing=Timing(10.0, 9.0, 11.0), bytes=4608, ceiling_tb_per_s=0.03,
        error=1e-3, rounding_limit=1e-3,
    )  # fmt: skip
    path = tmp_path / "deep" / "rows.jsonl"
    append(path, [row.record()])
    append(path, [row.record()])
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert first == second
    wanted = (
        "suite device arch driver torch commit date kernel format nested dtype M N K adapters rank us us_p20 us_p80 "
        "bytes tb_per_s ceiling_tb_per_s error rounding_limit"
    )
    assert set(first) == set(wanted.split())
    assert first["tb_per_s"] == pytest.approx(4608 / 10e-6 / 1e12)
