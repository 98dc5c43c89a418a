"""The 16-case protocol of bitsandbytes' NF4 single-token work: operators called in a row, timed by events.

Four shapes, fp16 and bf16, plain and nested statistics, M = 1; each case 100 warm-up calls, then 30 batches of 10,000
calls between CUDA events, ours and bitsandbytes' by turns; a case's time is its median batch, the score the geometric
mean of bitsandbytes' time over ours. Both are called as models call them, through torch.ops, so the host's share is in
it; one copy of the weight, so caches that are large enough hold it. That is 9.6 million calls: three to four minutes.

The score needs all cases. They are rows of their own, written as they are measured, so a run that broke off keeps what
it has and another goes on with the rest.
"""

from __future__ import annotations

import gc
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..device import arch_of
from ..formats import PackedWeight, quantize
from ..kernels import Problem
from ..ops import linear_op
from ..plan import plan
from .linear import DTYPE_NAMES
from .measure import Timing
from .peers import bnb_operator, installed
from .rows import Environment, Row

SHAPES = ((4096, 14336), (14336, 4096), (12288, 4096), (4096, 4096))
CASES = [(n, k, nested, dtype) for n, k in SHAPES for nested in (False, True) for dtype in ("fp16", "bf16")]
WARMUP, BATCHES, CALLS = 100, 30, 10_000


SUITE, CASE_SUITE = "nf4-16", "nf4-16-case"
Key = tuple[int, int, bool, str]  # N, K, nested, dtype
Record = dict[str, Any]
SAME = ("device", "arch", "driver", "torch", "commit")  # of a run that goes on with another's cases


@dataclass(frozen=True)
class Case:
    """One case: both operators' rows of suite CASE_SUITE, which also hold how many `batches` of how many `calls`."""

    ours: Record
    theirs: Record

    @property
    def key(self) -> Key:
        row = self.ours
        return row["N"], row["K"], row["nested"], row["dtype"]

    @property
    def speedup(self) -> float:
        return float(self.theirs["us"] / self.ours["us"])


def cases(batches: int = BATCHES, calls: int = CALLS, done: Sequence[Case] = ()) -> Iterator[Case]:
    """Measure every case that is not done on the current GPU, one after another.

    Raises ValueError where there is no GPU, no bitsandbytes, or where its operators run on halfbyte.
    """
    device, peer = _required()
    environment = Environment.of(device)
    held = {case.key for case in done}
    for n, k, nested, name in CASES:
        if (n, k, nested, name) in held:
            continue
        weight = quantize(torch.randn(n, k, device=device), "nf4-64-nested" if nested else "nf4-64")
        dtype = DTYPE_NAMES[name]
        x = torch.randn(1, k, device=device).to(dtype)
        operators = _operators(weight, x, peer)
        y = reference.linear(x, weight)
        with torch.inference_mode():
            errors = {which: reference.relative_error(call(), y) for which, call in operators.items()}
            timings = _timings(operators, batches, calls)
        rows = [
            Row(
                suite=CASE_SUITE,
                environment=environment,
                kernel=which,
                format=weight.format.key,
                nested=nested,
                dtype=name,
                M=1,
                N=n,
                K=k,
                timing=timings[which],
                bytes=weight.nbytes,
                ceiling_tb_per_s=0.0,
                error=errors[which],
                rounding_limit=reference.rounding_limit(y, dtype),
            )
            for which in operators
        ]
        yield Case(*({**row.record(), "batches": batches, "calls": calls} for row in rows))


def done_in(path: Path, batches: int = BATCHES, calls: int = CALLS) -> list[Case]:
    """The cases of a result file that a run here and now need not measure again, the newest of each.

    Those are of the same machine, driver, torch, commit and bitsandbytes, and as many batches and calls; none where the
    source has changes that are in no commit. Raises ValueError as `cases` does.
    """
    device, peer = _required()
    now = asdict(Environment.of(device))
    if now["commit"].endswith("+") or not path.exists():
        return []
    wanted = {**{name: now[name] for name in SAME}, "suite": CASE_SUITE, "batches": batches, "calls": calls}
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    rows = [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]
    found = {}
    for ours, theirs in pairwise(rows):  # a case's two rows are written together
        case = Case(ours, theirs)
        if ours["kernel"].startswith("halfbyte ") and theirs["kernel"].startswith(f"{peer} "):
            found[case.key] = case
    return [found[key] for key in CASES if key in found]


def record(results: Sequence[Case]) -> dict[str, object]:
    """The suite's one row, of all cases. Raises ValueError where some are missing: it would be another score."""
    missing = set(CASES) - {case.key for case in results}
    if missing:
        raise ValueError(f"{len(missing)} of the {len(CASES)} cases of nf4-16 are missing, so there is no score")
    first = results[0].ours
    return {
        "suite": SUITE,
        **{name: first[name] for name in SAME},
        "date": max(case.ours["date"] for case in results),
        "kernel": first["kernel"],
        "peer": results[0].theirs["kernel"],
        "geomean_speedup": math.exp(statistics.fmean(math.log(case.speedup) for case in results)),
        "cases": len(results),
    }


def _required() -> tuple[torch.device, str]:
    """The current GPU, and the peer with its version. Raises ValueError where one is missing."""
    if not torch.cuda.is_available():
        raise ValueError("bench nf4-16 needs a CUDA GPU; torch sees none")
    peer = installed("bitsandbytes")
    if peer is None:
        raise ValueError("bench nf4-16 measures against bitsandbytes, which is not installed: pip install bitsandbytes")
    return torch.device("cuda", torch.cuda.current_device()), peer


def _operators(weight: PackedWeight, x: Tensor, peer: str) -> dict[str, Callable[[], Tensor]]:
    """A call of our operator and one of bitsandbytes', under the names of their rows."""
    n, k = weight.shape
    key, parts = weight.format.key, list(weight.parts.values())
    kernel = plan(Problem(weight.format, x.dtype, 1, n, k, arch_of(x.device))).kernel.name
    theirs = bnb_operator(weight)
    return {
        f"halfbyte {kernel}": lambda: linear_op(x, parts, None, key, n, k),
        f"{peer} gemm_4bit": lambda: theirs(x),
    }


def _timings(operators: Mapping[str, Callable[[], Tensor]], batches: int, calls: int) -> dict[str, Timing]:
    """Batches of calls in turn, each between events on the current stream."""
    for call in operators.values():
        for _ in range(WARMUP):
            call()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    seconds: dict[str, list[float]] = {name: [] for name in operators}
    gc.collect()
    gc.disable()  # a collection would fall into one batch or another
    try:
        for _ in range(batches):
            for name, call in operators.items():
                begin.record()
                for _ in range(calls):
                    call()
                end.record()
                end.synchronize()
                seconds[name].append(begin.elapsed_time(end) / 1e3 / calls)
    finally:
        gc.enable()
    return {name: Timing.of(values) for name, values in seconds.items()}
