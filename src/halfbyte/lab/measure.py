"""The one clock: calls of several candidates, interleaved, each on weights that no cache holds.

A candidate is a list of calls that do the same work on different copies of its weights; enough copies that, when the
clock comes round to a copy again, the last-level cache has been filled with other data three times.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

CALL = Callable[[], object]
COLD_FACTOR = 3  # bytes of all copies of a candidate's weights, over the last-level cache
CEILING_BYTES = {"cpu": 1 << 30, "cuda": 4 << 30}


@dataclass(frozen=True)
class Timing:
    """Microseconds a call: median, and the 20th and 80th percentile."""

    us: float
    us_p20: float
    us_p80: float

    @staticmethod
    def of(seconds: Sequence[float]) -> Timing:
        micro = sorted(1e6 * value for value in seconds)
        fifth = statistics.quantiles(micro, n=5) if len(micro) > 1 else [micro[0]] * 4
        return Timing(statistics.median(micro), fifth[0], fifth[3])


def copies_needed(weight_bytes: int, cache_bytes: int) -> int:
    """Copies of a weight to rotate over, so that each is read from memory; one where there is no cache to exceed."""
    return max(1, -(-COLD_FACTOR * cache_bytes // weight_bytes))


def interleave(candidates: Mapping[str, Sequence[CALL]], budget_s: float, device: torch.device) -> dict[str, Timing]:
    """Time every candidate in turn, call by call (on a GPU graph by graph), for about `budget_s` seconds in all.

    Warms each candidate up on all its copies first. Raises ValueError for a candidate without calls.
    """
    if any(not calls for calls in candidates.values()):
        raise ValueError("interleave: a candidate has no calls")
    if device.type == "cuda":
        return _interleave_cuda(candidates, budget_s)
    for calls in candidates.values():
        for call in calls:
            call()
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    deadline = time.perf_counter() + budget_s
    turn = 0
    while turn < 5 or time.perf_counter() < deadline:
        for name, calls in candidates.items():
            call = calls[turn % len(calls)]
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
        turn += 1
    return {name: Timing.of(values) for name, values in seconds.items()}


def _interleave_cuda(candidates: Mapping[str, Sequence[CALL]], budget_s: float) -> dict[str, Timing]:
    """One CUDA graph a candidate, holding a call on each copy; replays in turn between events."""
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    for name, calls in candidates.items():
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(side):
            for call in calls:
                call()
        side.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for call in calls:
                call()
        graphs[name].replay()
    torch.cuda.synchronize()
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    deadline = time.perf_counter() + budget_s
    turn = 0
    while turn < 5 or time.perf_counter() < deadline:
        for name, graph in graphs.items():
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            seconds[name].append(begin.elapsed_time(end) / 1e3 / len(candidates[name]))
        turn += 1
    return {name: Timing.of(values) for name, values in seconds.items()}


def read_ceiling(device: torch.device, repeats: int = 7) -> float:
    """Bytes a second of a plain read of memory, the best of `repeats`: a sum over 1 GiB (CPU) or 4 GiB (GPU)."""
    size = CEILING_BYTES[device.type]
    buffer = torch.ones(size // 4, dtype=torch.float32, device=device)
    best = float("inf")
    for _ in range(repeats):
        _synchronise(device)
        start = time.perf_counter()
        buffer.sum()
        _synchronise(device)
        best = min(best, time.perf_counter() - start)
    return size / best


def copy_ceiling(device: torch.device, repeats: int = 7) -> float:
    """Bytes a second of a copy in memory, counting bytes read plus bytes written, the best of `repeats`."""
    size = CEILING_BYTES[device.type] // 2
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(repeats):
        _synchronise(device)
        start = time.perf_counter()
        target.copy_(source)
        _synchronise(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size / best


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_rss_bytes() -> int:
    """The largest resident memory this process has had.

    Linux's own counter for the process, as getrusage's starts from what the parent held when it forked.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
