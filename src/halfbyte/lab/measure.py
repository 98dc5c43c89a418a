"""The one clock: calls of several candidates, interleaved, each on weights that no cache holds.

A candidate is a list of calls that do the same work on different copies of its weights; enough copies that, when the
clock comes round to a copy again, the last-level cache has been filled with other data three times.

On a GPU the calls are a CUDA graph between two events. Graph and events are enqueued while the device still spins, so
that the host's share in a launch falls before the first event; what a call costs the host is `host_time`'s business.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

T = TypeVar("T")
CALL = Callable[[], object]
COLD_FACTOR = 3  # bytes of all copies of a candidate's weights, over the last-level cache
GRAPH_CALLS = 20  # at least so many in a graph, so that its start is no part of a call's time
SPIN_CYCLES = 400_000  # 0.2 ms at 2 GHz: longer than enqueuing a graph takes
QUEUED_CALLS = 100  # enqueued in a row before the host waits: the device's queue holds a thousand launches
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


def reraise(name: str, error: Exception) -> None:
    """What `interleave` does about a candidate that fails, unless told otherwise."""
    raise error


def interleave(
    candidates: Mapping[str, Sequence[CALL]],
    budget_s: float,
    device: torch.device,
    on_failure: Callable[[str, Exception], None] = reraise,
) -> dict[str, Timing]:
    """Time every candidate in turn, call by call (on a GPU graph by graph), for about `budget_s` seconds in all.

    Warms each candidate up on all its copies first. One that fails then is handed to `on_failure` with its error, and
    left out if that returns. Raises ValueError for a candidate without calls.
    """
    if any(not calls for calls in candidates.values()):
        raise ValueError("interleave: a candidate has no calls")
    if device.type == "cuda":
        with torch.cuda.device(device):
            return _interleave_cuda(candidates, budget_s, on_failure)
    ready = _each(candidates, _warmed, on_failure)
    seconds: dict[str, list[float]] = {name: [] for name in ready}
    deadline = time.perf_counter() + budget_s
    turn = 0
    while turn < 5 or time.perf_counter() < deadline:
        for name, calls in ready.items():
            call = calls[turn % len(calls)]
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
        turn += 1
    return {name: Timing.of(values) for name, values in seconds.items()}


def _each(
    candidates: Mapping[str, Sequence[CALL]],
    prepare: Callable[[Sequence[CALL]], T],
    on_failure: Callable[[str, Exception], None],
) -> dict[str, T]:
    """What `prepare` makes of each candidate's calls, without those that failed."""
    ready = {}
    for name, calls in candidates.items():
        try:
            ready[name] = prepare(calls)
        except Exception as error:  # whatever a peer may raise
            on_failure(name, error)
    return ready


def _warmed(calls: Sequence[CALL]) -> Sequence[CALL]:
    for call in calls:
        call()
    return calls


def _interleave_cuda(
    candidates: Mapping[str, Sequence[CALL]],
    budget_s: float,
    on_failure: Callable[[str, Exception], None] = reraise,
) -> dict[str, Timing]:
    """One CUDA graph a candidate, holding as many calls on each copy; replays in turn between events."""
    rounds = {name: -(-GRAPH_CALLS // len(calls)) for name, calls in candidates.items()}
    graphs = _each(candidates, lambda calls: _captured(calls, -(-GRAPH_CALLS // len(calls))), on_failure)
    seconds: dict[str, list[float]] = {name: [] for name in graphs}
    deadline = time.perf_counter() + budget_s
    turn = 0
    while turn < 5 or time.perf_counter() < deadline:
        for name, graph in graphs.items():
            seconds[name].append(_device_seconds(graph.replay) / len(candidates[name]) / rounds[name])
        turn += 1
    return {name: Timing.of(values) for name, values in seconds.items()}


def _captured(calls: Sequence[CALL], rounds: int) -> torch.cuda.CUDAGraph:
    """A graph of all calls, `rounds` times over, that has been replayed once."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def _device_seconds(enqueue: CALL) -> float:
    """Seconds that the current GPU takes for what `enqueue` puts on the current stream."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda._sleep(SPIN_CYCLES)  # type: ignore[no-untyped-call]
    begin.record()
    enqueue()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def host_time(candidates: Mapping[str, CALL], budget_s: float, device: torch.device) -> dict[str, Timing]:
    """What a call costs the host: candidates in turn, some calls in a row each, for about `budget_s` seconds in all.

    On a GPU the device is waited for between the rows of calls, not inside them, and their launches fit its queue: so
    this is the time to enqueue, as long as the calls do not wait themselves. On a CPU it is the whole call.
    """
    for call in candidates.values():
        for _ in range(QUEUED_CALLS):
            call()
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    deadline = time.perf_counter() + budget_s
    collecting = gc.isenabled()
    gc.disable()
    try:
        turn = 0
        while turn < 5 or time.perf_counter() < deadline:
            for name, call in candidates.items():
                _synchronise(device)
                start = time.perf_counter()
                for _ in range(QUEUED_CALLS):
                    call()
                seconds[name].append((time.perf_counter() - start) / QUEUED_CALLS)
            turn += 1
    finally:
        if collecting:
            gc.enable()
    _synchronise(device)
    return {name: Timing.of(values) for name, values in seconds.items()}


def read_ceiling(device: torch.device, repeats: int = 7) -> float:
    """Bytes a second of a plain read of memory, the best of `repeats`: a sum over 1 GiB (CPU) or 4 GiB (GPU)."""
    size = CEILING_BYTES[device.type]
    buffer = torch.ones(size // 4, dtype=torch.float32, device=device)
    return size / min(_seconds(buffer.sum, device) for _ in range(repeats))


def copy_ceiling(device: torch.device, repeats: int = 7) -> float:
    """Bytes a second of a copy in memory, counting bytes read plus bytes written, the best of `repeats`."""
    size = CEILING_BYTES[device.type] // 2
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * size / min(_seconds(lambda: target.copy_(source), device) for _ in range(repeats))


def _seconds(call: CALL, device: torch.device) -> float:
    """Seconds of one call: between events on a GPU, by the wall clock on a CPU."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            return _device_seconds(call)
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


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
