"""What a decode step of vLLM's engine is made of: the GPU's kernels, and where the thread that launches them is.

`start_…` and `stop_…` run in the engine's process; `worker` is vLLM's.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

TRACED = 16  # decode steps of a profile of the GPU
SAMPLED = 128  # of one of the host
SAMPLE_S = 0.001  # between two looks at it
SWITCH_S = 1e-4  # after which Python passes its lock on, so that looks are not only where it is let go of anyhow
SAMPLER = "_gumbel_sample_kernel"  # vLLM's, once a step, for greedy requests too


def start_trace(worker: Any) -> None:
    """Have the GPU's kernels recorded."""
    from torch.profiler import ProfilerActivity, profile

    worker.halfbyte_trace = profile(activities=[ProfilerActivity.CUDA])
    worker.halfbyte_trace.__enter__()


def stop_trace(worker: Any) -> list[list[Any]]:
    """[name's beginning, start, end in microseconds] of what ran on the GPU since `start_trace`, in order of starts."""
    from torch.autograd import DeviceType

    trace = worker.__dict__.pop("halfbyte_trace")
    trace.__exit__(None, None, None)
    found = [event for event in trace.events() if event.device_type == DeviceType.CUDA]
    return sorted(
        ([each.name[:120], each.time_range.start, each.time_range.end] for each in found), key=lambda each: each[1]
    )


def start_watch(worker: Any) -> None:
    """Look every SAMPLE_S at where this process's main thread is, which schedules and launches."""
    main, stop, seen = threading.main_thread().ident, threading.Event(), Counter[tuple[str, ...]]()

    def watch() -> None:
        while not stop.wait(SAMPLE_S):
            frame, names = sys._current_frames().get(main or 0), []
            while frame is not None:
                names.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}")
                frame = frame.f_back
            seen[tuple(names)] += 1

    thread = threading.Thread(target=watch, daemon=True)
    worker.halfbyte_watch = (stop, thread, seen, sys.getswitchinterval())
    sys.setswitchinterval(SWITCH_S)
    thread.start()


def stop_watch(worker: Any) -> list[tuple[tuple[str, ...], int]]:
    """[(functions, the innermost first), how often] since `start_watch`."""
    stop, thread, seen, interval = worker.__dict__.pop("halfbyte_watch")
    stop.set()
    thread.join()
    sys.setswitchinterval(interval)
    return list(seen.items())


def shares(seen: Sequence[tuple[Sequence[str], int]]) -> dict[str, Any]:
    """For each function the part of all looks in which the thread was in it (`within`), and in none that it called."""
    total = sum(count for _, count in seen) or 1
    within, itself = Counter[str](), Counter[str]()
    for names, count in seen:
        within.update(dict.fromkeys(names, count))
        itself[names[0]] += count

    def parts(counted: Counter[str]) -> dict[str, float]:
        return {name: count / total for name, count in counted.most_common(60)}

    return {"looks": total, "within": parts(within), "itself": parts(itself)}


def decode_steps(kernels: Sequence[Sequence[Any]], steps: int) -> dict[str, Any]:
    """What a decode step is made of: the mean of `steps` steps that have no prompts, by the kernel that ends each.

    step_us: from step to step; covered_us: of that with a kernel at work; busy_us: the sum of all kernels' times.
    Raises RuntimeError where there are not so many.
    """
    ends = [i for i, (name, _, _) in enumerate(kernels) if SAMPLER in name]
    if len(ends) < steps + 2:
        raise RuntimeError(f"{len(ends)} calls of {SAMPLER} in a trace, for {steps} steps")
    first, last = ends[-steps - 2], ends[-2]  # the last step may be of fewer users
    chosen = kernels[first + 1 : last + 1]
    covered, latest = 0.0, kernels[first][2]
    by_name: dict[str, list[float]] = {}
    for name, start, end in chosen:
        covered += max(0.0, end - max(start, latest))
        latest = max(latest, end)
        calls, us = by_name.get(name, (0, 0.0))
        by_name[name] = [calls + 1, us + end - start]
    listed = [{"kernel": name, "calls": n / steps, "us": us / steps} for name, (n, us) in by_name.items()]
    listed.sort(key=lambda each: -each["us"])
    return {
        "step_us": (kernels[last][2] - kernels[first][2]) / steps,
        "covered_us": covered / steps,
        "busy_us": sum(each["us"] for each in listed),
        "kernels": listed[:40],
    }


def describe(name: str, trace: Mapping[str, Any]) -> Iterator[str]:
    """A trace for people."""
    if "error" in trace:
        yield f"{name}, {trace['users']} users: {trace['error']}"
    else:
        step, covered, busy = (f"{trace[each] / 1e3:.3f}" for each in ("step_us", "covered_us", "busy_us"))
        yield f"{name}, {trace['users']} users: {step} ms a step, {covered} with a kernel at work, sum {busy}"
    for each in trace["kernels"][:14]:
        yield f"  {each['us']:8.1f} us  {each['calls']:5.1f} ×  {each['kernel'][:80]}"
    for kind in ("within", "itself"):
        most = list(trace["host"][kind].items())[:24]
        yield f"  host, {kind}: " + ", ".join(f"{name} {part:.0%}" for name, part in most)
