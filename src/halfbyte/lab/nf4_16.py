"""The 16-case protocol of bitsandbytes' NF4 single-token work: operators called in a row, timed by events.

Four shapes, fp16 and bf16, plain and nested statistics, M = 1; each case 100 warm-up calls, then 30 batches of 10,000
calls between CUDA events; a case's time is its median batch, the score the geometric mean of bitsandbytes' time over
ours. Both are called as models call them, through torch.ops, so the host's share is in it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version

import torch

from ..formats import quantize
from ..ops import linear
from .peers import bnb_operator
from .rows import Environment

SHAPES = ((4096, 14336), (14336, 4096), (12288, 4096), (4096, 4096))
WARMUP, BATCHES, CALLS = 100, 30, 10_000


@dataclass(frozen=True)
class Case:
    """One case, with the median microseconds a call of both operators."""

    N: int
    K: int
    dtype: str
    nested: bool
    ours_us: float
    bitsandbytes_us: float


def cases(batches: int = BATCHES, calls: int = CALLS) -> Iterator[Case]:
    """Measure every case on the current GPU. Raises ValueError where there is none."""
    if not torch.cuda.is_available():
        raise ValueError("bench nf4-16 needs a CUDA GPU; torch sees none")
    for n, k in SHAPES:
        for nested in (False, True):
            weight = quantize(torch.randn(n, k, device="cuda"), "nf4-64-nested" if nested else "nf4-64")
            for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
                x = torch.randn(1, k, device="cuda").to(dtype)
                theirs = bnb_operator(weight, x)
                ours = _median_us(lambda x=x, weight=weight: linear(x, weight), batches, calls)  # type: ignore[misc]
                yield Case(n, k, name, nested, ours, _median_us(theirs, batches, calls))


def record(results: list[Case]) -> dict[str, object]:
    """The suite's one row."""
    ratios = [math.log(case.bitsandbytes_us / case.ours_us) for case in results]
    return {
        "suite": "nf4-16",
        **asdict(Environment.of(torch.device("cuda"))),
        "peer": f"bitsandbytes {version('bitsandbytes')}",
        "geomean_speedup": math.exp(statistics.fmean(ratios)),
        "cases": [asdict(case) for case in results],
    }


def _median_us(call: Callable[[], object], batches: int, calls: int) -> float:
    """Median over batches of the microseconds a call, between events on the current stream."""
    with torch.inference_mode():
        for _ in range(WARMUP):
            call()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        times: list[float] = []
        for _ in range(batches):
            begin.record()
            for _ in range(calls):
                call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)
