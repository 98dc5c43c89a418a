"""compute-sanitizer's memcheck and racecheck over some small random problems of every CUDA kernel.

    python tests/gpu/sanitize.py [kernel ...]

For each kernel: the problems alone (which compiles what they need), then under both tools, and with them a control: a
bias that is too short, which memcheck must report, so that it is known to look at this kernel. Status 0: all clean; 1:
a tool found something, or a run failed; 2: there is no compute-sanitizer, or it does not work on this machine.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

from walk import ARCH, DEVICE, KERNELS, PRESENT, activations, apply, fitting, rows_of, weight_of  # noqa: E402

import kernel_fuzz  # noqa: E402

TIMEOUT_S = 150
FORMATS, COMPILE = 4, 16  # of each kernel: formats, and compilations, of which a configuration may need two
PROBLEMS = 100
FINISHED = "all problems done"
FOUND = 9  # the tools' exit status if they found something
TOOLS = ("memcheck", "racecheck")


@dataclass(frozen=True)
class Outcome:
    """How one run went. verdict: "clean", "found something", "failed" or "not supported"."""

    kernel: str
    what: str
    verdict: str
    output: str

    @property
    def good(self) -> bool:
        return self.verdict == ("found something" if self.what == "control" else "clean")


def find() -> str | None:
    """compute-sanitizer on PATH, in a CUDA toolkit's folder, or in a wheel of this Python."""
    if found := shutil.which("compute-sanitizer"):
        return found
    return next((str(path) for path in _places() if path.is_file() and os.access(path, os.X_OK)), None)


def _places() -> Iterator[Path]:
    toolkits = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    toolkits += [Path("/usr/local/cuda"), *sorted(Path("/usr/local").glob("cuda-*"), reverse=True)]
    toolkits += sorted(Path(sysconfig.get_path("purelib"), "nvidia").glob("cu*"), reverse=True)
    for toolkit in toolkits:
        yield toolkit / "bin" / "compute-sanitizer"
        yield toolkit / "compute-sanitizer" / "compute-sanitizer"


def command(tool: str, name: str) -> list[str]:
    """The tool's own words before a command, looking at the kernels whose name contains `name`."""
    words = [str(find()), "--tool", tool, "--error-exitcode", str(FOUND), "--kernel-name", f"kns={name}"]
    return words + (["--report-api-errors", "no"] if tool == "memcheck" else [])


def run(name: str, what: str) -> Outcome:
    """One run in a process of its own: "alone", a tool, or "control"."""
    part, tool = ("control", "memcheck") if what == "control" else ("problems", what)
    child = [sys.executable, str(Path(__file__).resolve()), "--child", part, name]
    words = child if what == "alone" else command(tool, name) + child
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # each tensor an allocation with ends to check
    try:
        done = subprocess.run(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_S, env=environment
        )
    except subprocess.TimeoutExpired as error:
        output = (error.output or b"").decode(errors="replace")
        return Outcome(name, what, "failed", f"{output}\nno end after {TIMEOUT_S} s")
    return Outcome(name, what, verdict(what, done.returncode, done.stdout), done.stdout)


def verdict(what: str, status: int, output: str) -> str:
    """What a run's exit status and output say."""
    if re.search("Device not supported|not supported on this|Unable to find injection library", output):
        return "not supported"
    if what == "alone":
        return "clean" if status == 0 and FINISHED in output else "failed"
    hazards = re.search(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (\d+)", output)
    if hazards is None:
        return "failed"
    if status == FOUND or int(hazards[1]):
        return "found something"
    return "clean" if status == 0 and FINISHED in output else "failed"


def problems(name: str) -> None:
    """Some formats' problems of one seed, judged as in the fuzz."""
    kernel = KERNELS[name]
    kernel_fuzz.HANG_S = TIMEOUT_S
    keys = kernel_fuzz.keys_of(kernel, ARCH)
    for key in keys[:: -(-len(keys) // FORMATS)]:
        with kernel_fuzz.compilations(COMPILE // FORMATS):
            count, failures = kernel_fuzz.run_seeds(kernel, key, range(100), DEVICE, enough=PROBLEMS // FORMATS)
        if failures:
            raise SystemExit("\n".join(failures))
        print(f"{name} {key}: {count} problems")
    print(FINISHED)


def control(name: str) -> None:
    """Give the kernel a bias of 4 numbers where it reads as many as the weight has rows."""
    import torch

    key = kernel_fuzz.keys_of(KERNELS[name], ARCH)[0]
    n, k = fitting(key, 2048, 256)
    x = activations(rows_of(KERNELS[name], key, torch.bfloat16, n, k, 1)[0], k, torch.bfloat16)
    apply(KERNELS[name], x, weight_of(key, n, k), torch.zeros(4, dtype=torch.bfloat16, device=DEVICE))
    torch.cuda.synchronize()


def examine(name: str) -> list[Outcome]:
    """All runs of a kernel; those under the tools only where it is right without."""
    alone = run(name, "alone")
    if not alone.good:
        return [alone]
    with ThreadPoolExecutor(len(TOOLS) + 1) as pool:
        return [alone, *pool.map(partial(run, name), (*TOOLS, "control"))]


def main(names: list[str]) -> int:
    if not PRESENT or find() is None:
        print("no CUDA device" if not PRESENT else "no compute-sanitizer on PATH, in a CUDA toolkit or in a wheel")
        return 2
    print(f"{find()} on {ARCH}")
    chosen = names or list(KERNELS)
    with ThreadPoolExecutor(len(chosen)) as pool:
        outcomes = [outcome for each in pool.map(examine, chosen) for outcome in each]
    for outcome in outcomes:
        if not outcome.good:
            print(f"--- {outcome.kernel}, {outcome.what}\n{outcome.output[-4000:]}")
    for outcome in outcomes:
        expected = ", as it must" if outcome.what == "control" and outcome.good else ""
        print(f"{outcome.kernel:16} {outcome.what:10} {outcome.verdict}{expected}")
    if any(outcome.verdict == "not supported" for outcome in outcomes):
        return 2
    return int(not all(outcome.good for outcome in outcomes))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        {"problems": problems, "control": control}[sys.argv[2]](sys.argv[3])
    else:
        raise SystemExit(main(sys.argv[1:]))
