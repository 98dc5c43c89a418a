"""compute-sanitizer's memcheck and racecheck over a few small random problems of every CUDA kernel.

    python tests/gpu/sanitize.py [--seconds 100] [kernel ...]

For each kernel: a format of each kind that it reads, in all its dtypes, and adapters where it adds them. Each is run
alone first, which compiles what it needs, then under both tools. Controls must be reported, so that it is known that
the tools look at all: of memcheck a bias that is too short, for each kernel; of racecheck a kernel with a race.
Everything is tiny, as racecheck makes a launch thousands of times slower, and every outcome is printed as it comes.

racecheck cannot follow three things, which it therefore gets in another form: an arrival of one lane for its warp
(every_lane.py); blocks of a cluster that wait for each other's reads of shared memory by mbarriers (configurations
without clusters, so what clusters share is not checked for races); and a multiply of cuBLAS's, in whose place it gets
torch's operations.

Status 0: all clean; 1: a tool found something, or a run failed or did not end in time; 2: there is no
compute-sanitizer, or it does not work on this machine.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

sys.path[:0] = [str(Path(__file__).parents[1])]

import torch  # noqa: E402
from every_lane import rewritten  # noqa: E402
from walk import ARCH, DEVICE, DTYPES, KERNELS, PRESENT, fitting, serves  # noqa: E402

import kernel_fuzz  # noqa: E402
from halfbyte import reference  # noqa: E402
from halfbyte.adapters import Adapter, linear_with_adapters  # noqa: E402
from halfbyte.counters import counts  # noqa: E402
from halfbyte.formats import WordLayout, get_format  # noqa: E402
from halfbyte.kernels import Kernel, Problem, codebook_prefill, nvrtc  # noqa: E402
from halfbyte.kernels.launch import Launch  # noqa: E402
from halfbyte.plan import plan  # noqa: E402
from kernel_samples import random_weight, seeded  # noqa: E402

SECONDS = 100.0
FINISHED = "all problems done"
FOUND = 9  # the tools' exit status if they found something
TOOLS = ("memcheck", "racecheck")
ADAPTERS, CONTROL, SHRINK = "adapters", "control", "adapters_shrink"  # SHRINK: a kernel's name, too
# (N, K): rows that fill no tile and K that fills no stage; K that a cluster shares; where the two need more rows
SHAPES, TALL = ((136, 320), (72, 6144)), (2056, 320)
FIXED = "codebook_mma"  # a kernel whose clusters are no choice: N and K decide them
MS = (1, 5, 16, 24, 40, 130)
RACE = """
struct Call { void* x; void* bias; int* out; long long x_stride; int m, bias_is_fp32; };

extern "C" __global__ void race(const Call call) {
    __shared__ int numbers[THREADS];
    numbers[threadIdx.x] = threadIdx.x;
    call.out[threadIdx.x] = numbers[THREADS - 1 - threadIdx.x];  // another warp's, without a barrier
}
"""


@dataclass(frozen=True)
class Outcome:
    """How one run went.

    part: a format's key, ADAPTERS or CONTROL. what: "alone" or a tool. verdict: "clean", "found something", "failed",
    "not supported" or "no time left".
    """

    kernel: str
    part: str
    what: str
    verdict: str
    seconds: float
    output: str

    @property
    def good(self) -> bool:
        return self.verdict == ("found something" if self.part == CONTROL else "clean")

    def line(self) -> str:
        expected = ", as it must" if self.part == CONTROL and self.good else ""
        words = f"{self.kernel:16} {self.part:16} {self.what:10} {self.verdict}{expected}"
        return f"{words}, {self.seconds:.0f} s" if self.seconds else words


# ---- compute-sanitizer


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
    words = [str(find()), "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "1000"]
    words += ["--kernel-name", f"kns={name}"]
    return words + (["--report-api-errors", "no"] if tool == "memcheck" else [])


def verdict(what: str, status: int, output: str) -> str:
    """What a run's exit status and output say. what: "alone" or a tool."""
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


class Runs:
    """Runs, each in a process of its own, all of which end at a deadline."""

    def __init__(self, seconds: float) -> None:
        self.deadline = time.monotonic() + seconds
        self._lock = Lock()
        self._live: set[subprocess.Popen[str]] = set()

    def run(self, kernel: str, part: str, what: str) -> Outcome:
        start = time.monotonic()
        if start >= self.deadline:
            return Outcome(kernel, part, what, "no time left", 0.0, "")
        child = [sys.executable, str(Path(__file__).resolve()), "--child", part, kernel, what]
        process = subprocess.Popen(
            child if what == "alone" else command(what, kernel) + child,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # the tool and what it runs are ended together
            env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},  # each tensor an allocation with ends to check
        )
        with self._lock:
            self._live.add(process)
        try:
            output, _ = process.communicate(timeout=self.deadline - start)
            found = verdict(what, process.returncode, output)
        except subprocess.TimeoutExpired:
            self._end(process)
            output, found = process.communicate()[0], "no time left"
        finally:
            with self._lock:
                self._live.discard(process)
        return Outcome(kernel, part, what, found, time.monotonic() - start, output)

    def stop(self) -> None:
        """End what still runs, and begin nothing more."""
        self.deadline = 0.0
        with self._lock:
            for process in self._live:
                self._end(process)

    @staticmethod
    def _end(process: subprocess.Popen[str]) -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def examine(self, kernel: str, part: str) -> Iterator[Outcome]:
        """A kernel's runs on one part; those under the tools only where it is right without."""
        if part == CONTROL:
            yield self.run(kernel, part, "racecheck" if kernel == "race" else "memcheck")
            return
        alone = self.run(kernel, part, "alone")
        yield alone
        if alone.good:
            yield from (self.run(kernel, part, tool) for tool in TOOLS)


# ---- what is run


def parts_of(kernel: Kernel) -> dict[str, str]:
    """A format of each kind (layout, scales, offsets) that a kernel reads, of blocks of 64 weights if there are."""
    found: dict[str, list[str]] = {}
    for key in kernel_fuzz.keys_of(kernel, ARCH):
        format = get_format(key)
        layout = format.layout
        unit = layout.axis if isinstance(layout, WordLayout) else str(layout.elements)
        kind = " ".join((unit, type(format.scale).__name__, type(format.offset).__name__))
        found.setdefault(kind, []).append(key)
    return {kind: min(keys, key=lambda key: abs(get_format(key).blocksize - 64)) for kind, keys in found.items()}


def chosen_parts(names: list[str]) -> list[tuple[str, str]]:
    """(kernel, part) of the kernels named, or of all. Raises ValueError for an unknown name."""
    known = [*KERNELS, SHRINK]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no kernel '{unknown[0]}'; there are {', '.join(known)}")
    found = [("race", CONTROL)]
    for name in names or known:
        keys = parts_of(KERNELS[name]).values() if name in KERNELS else ()
        found += [(name, key) for key in keys]
        if name in KERNELS:
            found.append((name, CONTROL))
        if name == SHRINK or shape_with_adapters(name) is not None:
            found.append((name, ADAPTERS))
    return found


def groups_of(kernel: Kernel, key: str, clusters: bool = True) -> Iterator[kernel_fuzz.Group]:
    """A small weight for each dtype, with one problem; M, bias, strides and strict mode go round.

    clusters: else none where blocks of a cluster must share K.
    """
    turn = list(parts_of(kernel).values()).index(key)
    for number, dtype in enumerate(DTYPES, turn):
        for shape in (SHAPES[number % 2 if clusters or kernel.name != FIXED else 0], TALL):
            n, k = fitting(key, *shape)
            ms = [m for m in MS if serves(kernel, key, dtype, m, n, k)]
            if ms:
                break
        else:
            continue
        case = kernel_fuzz.Case(
            seed=number,
            number=1,
            dtype=dtype,
            m=ms[(turn + number) % len(ms)],
            stride=(0, 8, 1)[number % 3],
            offset=0,
            bias=(dtype, torch.float32, None)[number % 3],
            bias_offset=0,
            magnitude=1.0,
            strict=bool(number % 2) and kernel_fuzz.takes_strict(kernel),
        )
        yield kernel_fuzz.Group(kernel.name, key, number, n, k, shift=0, exact=False, cases=(case,))


def problems(name: str, key: str, racecheck: bool) -> None:
    """Run a kernel's problems, and judge their answers on the CPU, where no tool looks."""
    cpu, count = torch.device("cpu"), 0
    for group in groups_of(KERNELS[name], key, clusters=not racecheck):
        weight, (case,) = kernel_fuzz.make_weight(group, DEVICE), group.cases
        kernel = without_clusters(KERNELS[name], group) if racecheck else KERNELS[name]
        x, bias = kernel_fuzz.make_inputs(group, case, DEVICE)
        out = torch.full((case.m, group.n), torch.nan, dtype=case.dtype).to(DEVICE)
        kernel.run(x, weight, bias, out, **({"strict": True} if case.strict else {}))
        here = kernel_fuzz.make_weight(group, cpu)
        dense, inputs = kernel_fuzz.Dense.of(here), kernel_fuzz.make_inputs(group, case, cpu)
        kernel_fuzz.judge(KERNELS[name], group, case, here, dense, inputs, out.cpu())
        print(kernel_fuzz.describe(group, case))
        count += 1
    assert count
    print(FINISHED)


def without_clusters(kernel: Kernel, group: kernel_fuzz.Group) -> Kernel:
    """The kernel in a configuration whose blocks share nothing, where it has a choice."""
    (case,) = group.cases
    problem = Problem(get_format(group.key), case.dtype, case.m, group.n, group.k, ARCH)
    choices = kernel.configurations(problem) if kernel.configurations else []
    alone = [choice.settings for choice in choices if dict(choice.settings).get("CLUSTER") == 1]
    return kernel.configured(alone[0]) if alone else kernel


def what_racecheck_follows() -> None:
    """Give this process's kernels the form that racecheck can follow."""
    source = nvrtc._source
    nvrtc._source = lambda stem: rewritten(source(stem))

    def add_up(x: torch.Tensor, w: torch.Tensor, sums: torch.Tensor) -> None:
        for row in range(len(x)):
            sums[row] = (x[row].float() * w.float()).sum(1)

    codebook_prefill.add_up = add_up


def shape_with_adapters(name: str) -> tuple[int, int, int] | None:
    """Some small (M, N, K) that the planner gives to a kernel which adds adapters to its outputs; else None."""
    if name not in KERNELS or KERNELS[name].run_adapters is None:
        return None
    format = get_format("nf4-64-nested")
    tried = ((m, n, 320) for n in (136, 2056) for m in (3, 24, 130))  # no clusters
    return next(
        (each for each in tried if plan(Problem(format, torch.bfloat16, *each, ARCH)).kernel.name == name), None
    )


def adapters(name: str) -> None:
    """A layer whose rows take two adapters or none, served by the kernel; of SHRINK any."""
    m, n, k = shape_with_adapters(name) or (5, 136, 320)
    weight, dtype = random_weight("nf4-64-nested", n, k, seeded(0)), torch.bfloat16
    x = torch.randn(m, k, generator=seeded(1)).to(dtype)
    listed = [
        Adapter(
            torch.randn(rank, k, generator=seeded(rank)).to(dtype) / 32,
            torch.randn(n, rank, generator=seeded(n)).to(dtype),
            0.5,
        )
        for rank in (16, 7)
    ]
    index = torch.arange(m) % 3 - 1
    there = [Adapter(each.a.to(DEVICE), each.b.to(DEVICE), each.scaling) for each in listed]
    out = linear_with_adapters(x.to(DEVICE), weight.to(DEVICE), None, there, index.to(DEVICE))
    served = set(counts.totals()[0]["linear_adapters"])
    assert name in (SHRINK, *served), f"{name} was to serve M = {m}, [{n}, {k}], but {served} did"
    reference.assert_within_contract(out.cpu(), reference.linear(x, weight, None, listed, index))
    print(FINISHED)


def control(name: str) -> None:
    """Give the kernel a bias of 4 numbers where it reads as many as the weight has rows."""
    if name == "race":
        race()
        return
    group = next(groups_of(KERNELS[name], next(iter(parts_of(KERNELS[name]).values()))))
    x, _ = kernel_fuzz.make_inputs(group, group.cases[0], DEVICE)
    out = torch.empty(x.shape[0], group.n, dtype=x.dtype, device=DEVICE)
    bias = torch.zeros(4, dtype=x.dtype).to(DEVICE)
    KERNELS[name].run(x, kernel_fuzz.make_weight(group, DEVICE), bias, out)
    kernel_fuzz.synchronise(DEVICE)


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "bias", "out")),
        ("x_stride", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("m", "bias_is_fp32")),
    )


def race() -> None:
    """A kernel that reads what another warp writes."""
    threads = 64
    x, out = (torch.zeros(1, threads, dtype=torch.int32).to(DEVICE) for _ in range(2))
    kernel = nvrtc.load("race", ARCH, {"THREADS": threads}, torch.cuda.current_device(), 0, RACE)
    launch = Launch(kernel, (_Call(),), 1, threads, shared_bytes=0, early=False, alignment=1, rows=1, name="race")
    launch(x, None, out, torch.cuda.current_stream().cuda_stream)
    kernel_fuzz.synchronise(DEVICE)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="end by then; what is missing is named")
    parser.add_argument("--logs", type=Path, help="a folder for what each run that is not as it must be has said")
    parser.add_argument("kernel", nargs="*", help="kernels to examine; all by default")
    arguments = parser.parse_args(words)
    if not PRESENT or find() is None:
        print("no CUDA device" if not PRESENT else "no compute-sanitizer on PATH, in a CUDA toolkit or in a wheel")
        return 2
    parts = chosen_parts(arguments.kernel)
    print(f"{find()} on {ARCH}, {len(parts)} parts, {arguments.seconds:.0f} s at most", flush=True)
    runs, outcomes, lock = Runs(arguments.seconds), list[Outcome](), Lock()

    def examine(part: tuple[str, str]) -> None:
        for outcome in runs.examine(*part):
            with lock:
                outcomes.append(outcome)
                print(outcome.line(), flush=True)

    with ThreadPoolExecutor(2 * (os.cpu_count() or 1)) as pool:
        try:
            list(pool.map(examine, parts))
        finally:
            runs.stop()
    for outcome in outcomes:
        if not outcome.good:
            print(f"--- {outcome.line()}\n{outcome.output[-4000:]}")
            if arguments.logs and outcome.output:
                arguments.logs.mkdir(parents=True, exist_ok=True)
                path = arguments.logs / f"{outcome.kernel} {outcome.part} {outcome.what}.log"
                path.write_text(outcome.output)
    good = sum(outcome.good for outcome in outcomes)
    print(f"{good} of {len(outcomes)} runs as they must be")
    if any(outcome.verdict == "not supported" for outcome in outcomes):
        return 2
    return int(good < len(outcomes))


def child(part: str, name: str, what: str) -> None:
    """What a run does: a format's key, ADAPTERS or CONTROL."""
    torch.set_num_threads(1)  # many runs share the processor
    if what == "racecheck":
        what_racecheck_follows()
    others: dict[str, Callable[[str], None]] = {ADAPTERS: adapters, CONTROL: control}
    if part in others:
        others[part](name)
    else:
        problems(name, part, what == "racecheck")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:5])
    else:
        raise SystemExit(main(sys.argv[1:]))
