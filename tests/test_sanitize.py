"""The script that runs the sanitizers: what it runs, how it ends, what it says. The tools and the GPU are pretended."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from threading import Thread
from types import ModuleType

import pytest
import torch

from halfbyte.formats import get_format
from halfbyte.kernels import Problem, codebook_mma, codebook_wgmma, nvrtc
from halfbyte.lab import sass

TESTS = Path(__file__).parent
SCRIPT = TESTS / "gpu" / "sanitize.py"
# Stands in for compute-sanitizer and for Python: the words end with "--child", a part and a kernel.
PRETENDED = r"""#!/bin/sh
tool=alone
[ "$1" = --tool ] && tool=$2
while [ "$1" != --child ]; do shift; done
case "$tool $2 $3" in
"racecheck control race") echo "RACECHECK SUMMARY: ${RACES:-2} hazards displayed (2 errors, 0 warnings)"; exit 9 ;;
"memcheck control "*) [ "$4" = memcheck ] && echo "ERROR SUMMARY: 12 errors"; exit 9 ;;
"$FAULTY") echo "RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"; exit 9 ;;
"$WRONG") echo "AssertionError: 3 of 136 outputs are wrong"; exit 1 ;;
"$HANGS") sleep 600 & echo $! > "$PIDS.new"; mv "$PIDS.new" "$PIDS"; wait ;;
esac
echo "all problems done"
echo "ERROR SUMMARY: 0 errors"
"""
Run = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def sanitize(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(TESTS / "gpu")
    return importlib.import_module("sanitize")


@pytest.fixture
def run(
    sanitize: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Runs the script with pretended tools; (status, lines)."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(PRETENDED)
    tool.chmod(0o755)
    monkeypatch.setattr(sanitize, "PRESENT", True)
    monkeypatch.setattr(sanitize, "find", lambda: str(tool))
    monkeypatch.setattr(sanitize.sys, "executable", str(tool))

    def main(*words: str, **environment: str) -> tuple[int, list[str]]:
        for name, value in {
            "FAULTY": "-",
            "WRONG": "-",
            "HANGS": "-",
            "PIDS": str(tmp_path / "pids"),
            **environment,
        }.items():
            monkeypatch.setenv(name, value)
        status = sanitize.main(list(words))
        return status, capsys.readouterr().out.splitlines()

    return main


def ended(pids: Path) -> bool:
    """Whether the process noted there is no more, or is but not yet waited for.

    A killed process closes its pipes, which ends the waiting for it, a moment before it ends.
    """
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{int(pids.read_text())}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state.rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.01)
    return False


def test_every_cuda_kernel_is_examined_in_each_kind_of_format(sanitize: ModuleType) -> None:
    parts = sanitize.chosen_parts([])
    for name, kernel in sanitize.KERNELS.items():
        keys = list(sanitize.parts_of(kernel).values())
        assert {"nf4-64", "nf4-64-nested", "mxfp4"} <= set(keys)
        groups = [group for key in keys for group in sanitize.groups_of(kernel, key)]
        assert {group.key for group in groups} == set(keys)
        wanted = {
            dtype
            for dtype in sanitize.DTYPES
            if any(sanitize.serves(kernel, "nf4-64", dtype, m, 4096, 1024) for m in sanitize.MS)
        }
        assert {case.dtype for group in groups for case in group.cases} == wanted
        assert {case.bias for group in groups for case in group.cases} >= {None, torch.float32}
        assert [part for which, part in parts if which == name and part not in ("control", "adapters")] == keys
        assert (name, "control") in parts
    assert {("race", "control"), ("adapters_shrink", "adapters")} <= set(parts)
    assert ("codebook_mma", "adapters") in parts
    assert len(set(parts)) == len(parts)
    with pytest.raises(ValueError, match=r"no kernel 'codebook'; there are .*codebook_mma"):
        sanitize.chosen_parts(["codebook"])


def test_all_clean(run: Run) -> None:
    status, lines = run("codebook_mma")
    assert status == 0
    assert [line.split(",")[0].split() for line in sorted(lines[1:-1])] == [
        ["codebook_mma", "adapters", "alone", "clean"],
        ["codebook_mma", "adapters", "memcheck", "clean"],
        ["codebook_mma", "adapters", "racecheck", "clean"],
        ["codebook_mma", "control", "memcheck", "found", "something"],
        *(
            ["codebook_mma", key, what, "clean"]
            for key in ("mxfp4", "nf4-64", "nf4-64-nested")
            for what in ("alone", "memcheck", "racecheck")
        ),
        ["race", "control", "racecheck", "found", "something"],
    ]
    assert lines[-1] == "14 of 14 runs as they must be"


@pytest.mark.parametrize(
    ("environment", "said", "runs"),
    [
        ({"FAULTY": "racecheck nf4-64-nested codebook_mma"}, "nf4-64-nested    racecheck  found something", 14),
        ({"FAULTY": "memcheck adapters codebook_mma"}, "adapters         memcheck   found something", 14),
        ({"WRONG": "alone mxfp4 codebook_mma"}, "mxfp4            alone      failed", 12),  # and under no tool
        ({"WRONG": "racecheck mxfp4 codebook_mma"}, "mxfp4            racecheck  failed", 14),
    ],
)
def test_what_is_wrong_is_named_with_its_output(environment: dict[str, str], said: str, runs: int, run: Run) -> None:
    status, lines = run("codebook_mma", **environment)
    assert status == 1
    assert sum(said in line for line in lines) == 2, "as it came, and with its output at the end"
    assert any("hazard displayed" in line or "outputs are wrong" in line for line in lines)
    assert lines[-1] == f"{runs - 1} of {runs} runs as they must be"


def test_what_went_wrong_is_kept_whole(run: Run, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    run("--logs", str(logs), "codebook_mma", FAULTY="racecheck mxfp4 codebook_mma")
    assert [path.name for path in logs.iterdir()] == ["codebook_mma mxfp4 racecheck.log"]
    assert "hazard displayed" in next(logs.iterdir()).read_text()


def test_a_tool_that_sees_no_race_proves_nothing(run: Run, tmp_path: Path) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(tool.read_text().replace("; exit 9 ;;", "; exit 0 ;;", 1))
    status, lines = run("codebook_mma", RACES="0")
    assert status == 1
    assert any(line.startswith("race             control          racecheck  failed") for line in lines)


def test_it_ends_in_time_with_what_it_has(run: Run, tmp_path: Path) -> None:
    status, lines = run("--seconds", "3", "codebook_mma", HANGS="memcheck mxfp4 codebook_mma")
    assert status == 1
    assert any("mxfp4            alone      clean" in line for line in lines)
    assert any("mxfp4            memcheck   no time left, 3 s" in line for line in lines)
    assert any(line.endswith("mxfp4            racecheck  no time left") for line in lines)
    assert any("nf4-64           racecheck  clean" in line for line in lines)
    assert ended(tmp_path / "pids"), "what the tool ran was ended with it"


def test_an_interruption_ends_all_runs(run: Run, tmp_path: Path) -> None:
    def interrupt() -> None:
        while not (tmp_path / "pids").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    previous = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        Thread(target=interrupt).start()
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            run("codebook_mma", HANGS="alone nf4-64 codebook_mma")
        assert time.monotonic() - start < 30
    finally:
        signal.signal(signal.SIGINT, previous)
    assert ended(tmp_path / "pids")


@pytest.mark.parametrize(
    ("part", "name", "what"),
    [
        ("nf4-64-nested", "cpu_linear", "memcheck"),
        ("awq-32", "cpu_linear", "racecheck"),
        ("adapters", "cpu_linear", "alone"),
        ("adapters", "adapters_shrink", "racecheck"),
    ],
)
def test_what_runs_inside_is_judged(part: str, name: str, what: str) -> None:
    """The CPU kernel in place of a CUDA one."""
    done = subprocess.run(
        [sys.executable, SCRIPT, "--child", part, name, what],
        env={**os.environ, "HALFBYTE_TEST_DEVICE": "cpu"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["all problems done"]), done.stderr


@pytest.mark.skipif(nvrtc.missing() is not None, reason=str(nvrtc.missing()))
def test_the_racing_kernel_compiles(sanitize: ModuleType) -> None:
    assert nvrtc.compile("race", "sm_90a", {"THREADS": 64}, sanitize.RACE)
    offsets = [getattr(sanitize._Call, name).offset for name in ("x", "bias", "out", "x_stride", "m", "bias_is_fp32")]
    assert offsets == [0, 8, 16, 24, 32, 36]


@pytest.fixture
def every_lane(sanitize: ModuleType) -> ModuleType:
    return importlib.import_module("every_lane")


@pytest.mark.skipif(nvrtc.missing() is not None, reason=str(nvrtc.missing()))
@pytest.mark.parametrize("m", [3, 24])
def test_kernels_compile_with_every_lane_arriving(m: int, every_lane: ModuleType, sanitize: ModuleType) -> None:
    """As racecheck gets them: no lane arrives for others, and nothing but arrivals has changed in the machine code."""
    found = Problem(get_format("nf4-64-nested"), torch.bfloat16, m, 136, 320, "sm_90a")
    if m == 3:
        stem, macros = codebook_mma.STEM, asdict(codebook_mma._planned(found)[0])
    else:
        stem = codebook_wgmma.STEM
        macros = asdict(codebook_wgmma.configure(found.format, found.dtype, m, found.n, found.k, 132, True))
    source = nvrtc._source(stem)
    changed = every_lane.rewritten(source)
    assert changed.count("every_lane_arrives(") > 2
    assert "== 0) barrier_arrive(" not in changed.replace("thread == 0", "")
    own, other = (
        sass.count(sass.disassemble(nvrtc.compile(stem, "sm_90a", macros, text)).main_loop())
        for text in (source, changed)
    )
    for name in ("HMMA", "HGMMA", "LDS", "LDS.64", "LDS.128"):
        assert own[name] == other[name]


def test_the_changed_barriers_are_consistent(every_lane: ModuleType) -> None:
    """All counts are multiplied by what an arrival is worth; a source without such barriers stays as it is."""
    changed = every_lane.rewritten(nvrtc._source(codebook_mma.STEM))
    worth = [line for line in changed.splitlines() if "mbarrier.arrive" in line and "cp.async" not in line]
    alone = [line for line in worth if "[%0], 32;" not in line]
    assert len(worth) - len(alone) == 3, "a thread's own, with bytes to come, and at another block's barrier"
    assert len(alone) == 1, "every lane's"
    assert '"r"(32 * arrivals)' in changed
    gemv = nvrtc._source("codebook_gemv")
    assert every_lane.rewritten(gemv) == gemv


def test_barriers_in_other_words_are_noticed(every_lane: ModuleType) -> None:
    source = nvrtc._source(codebook_mma.STEM)
    for was, becomes in (
        ("mbarrier.init.shared.b64", "mbarrier.init.shared::cta.b64"),
        ("barrier_wait(u32", "wait(u32"),
    ):
        with pytest.raises(ValueError, match="every_lane"):
            every_lane.rewritten(source.replace(was, becomes))


def test_racecheck_gets_no_clusters(sanitize: ModuleType) -> None:
    seen = set()
    for kernel in sanitize.KERNELS.values():
        for key in sanitize.parts_of(kernel).values():
            for group in sanitize.groups_of(kernel, key, clusters=False):
                chosen = sanitize.without_clusters(kernel, group)
                (case,) = group.cases
                problem = Problem(get_format(key), case.dtype, case.m, group.n, group.k, "sm_90a")
                if chosen.describe is not None:
                    assert "share K" not in chosen.describe(problem), (kernel.name, group)
                    seen.add(kernel.name)
    assert {"codebook_mma", "codebook_wgmma"} <= seen
