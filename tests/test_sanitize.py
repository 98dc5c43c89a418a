"""The script that runs the sanitizers: what it runs, how it ends, what it says. The tools and the GPU are pretended."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from types import ModuleType

import pytest
import torch

from halfbyte.kernels import nvrtc

TESTS = Path(__file__).parent
SCRIPT = TESTS / "gpu" / "sanitize.py"
# Stands in for compute-sanitizer and for Python: the words end with "--child", a part and a kernel.
PRETENDED = r"""#!/bin/sh
tool=alone
[ "$1" = --tool ] && tool=$2
while [ "$1" != --child ]; do shift; done
case "$tool $2 $3" in
"racecheck control race") echo "RACECHECK SUMMARY: ${RACES:-2} hazards displayed (2 errors, 0 warnings)"; exit 9 ;;
"memcheck control "*) echo "ERROR SUMMARY: 12 errors"; exit 9 ;;
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
    """Whether the process noted there is no more, or is but not yet waited for."""
    state = Path(f"/proc/{int(pids.read_text())}/stat")
    return not state.exists() or state.read_text().split()[2] == "Z"


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

    Thread(target=interrupt).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run("codebook_mma", HANGS="alone nf4-64 codebook_mma")
    assert time.monotonic() - start < 30
    assert ended(tmp_path / "pids")


@pytest.mark.parametrize(
    ("part", "name"), [("nf4-64-nested", "cpu_linear"), ("adapters", "cpu_linear"), ("adapters", "adapters_shrink")]
)
def test_what_runs_inside_is_judged(part: str, name: str) -> None:
    """The CPU kernel in place of a CUDA one."""
    done = subprocess.run(
        [sys.executable, SCRIPT, "--child", part, name],
        env={**os.environ, "HALFBYTE_TEST_DEVICE": "cpu"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["all problems done"]), done.stderr


@pytest.mark.skipif(nvrtc.missing() is not None, reason=str(nvrtc.missing()))
def test_the_racing_kernel_compiles(sanitize: ModuleType) -> None:
    assert nvrtc.compile("race", "sm_90a", {"THREADS": 64}, sanitize.RACE)
    offsets = [getattr(sanitize._Call, name).offset for name in ("x", "bias", "out", "x_stride", "m", "bias_is_fp32")]
    assert offsets == [0, 8, 16, 24, 32, 36]
