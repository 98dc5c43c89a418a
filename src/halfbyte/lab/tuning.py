"""Measures a kernel's configurations for `halfbyte.tune`, by the one clock and on weights that no cache holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import lru_cache
from math import inf

import torch
from torch import Tensor

from ..device import cache_bytes
from ..formats import PackedWeight, get_format, quantize
from ..kernels import Kernel, Problem, kernels
from ..kernels.registry import DTYPE_NAMES
from ..plan import plan
from ..tune import Entry, Stamp, bucket, tune
from .linear import OnFailure
from .measure import CALL, copies_needed, interleave, reraise
from .peers import clone
from .rows import Environment


def problems_of(
    shapes: Sequence[tuple[int, int]], formats: Sequence[str], ms: Sequence[int], dtype_name: str, arch: str
) -> list[Problem]:
    """A problem for each shape (N, K), format and bucket of M, each once, those of a weight in a row."""
    found: dict[Problem, None] = {}
    for n, k in shapes:
        for key in formats:
            for m in ms:
                found[Problem(get_format(key), DTYPE_NAMES[dtype_name], bucket(m), n, k, arch)] = None
    return list(found)


def tune_on(
    problems: Sequence[Problem],
    device: torch.device,
    seconds_each: float,
    most: int,
    again: bool,
    on_failure: OnFailure = reraise,
) -> Iterator[tuple[Problem, Entry | None]]:
    """`halfbyte.tune.tune` of the planned kernels on a device. seconds_each: time spent on each configuration.

    on_failure: told of a configuration that fails or gives other bits, by its kernel and words; it is then left out.
    """
    environment = asdict(Environment.of(device))
    stamp = Stamp(**{name: environment[name] for name in Stamp.__dataclass_fields__})

    def measure(problem: Problem, configured: Sequence[Kernel]) -> list[float]:
        return seconds_of(problem, configured, device, seconds_each, on_failure)

    yield from tune([(problem, _planned(problem)) for problem in problems], measure, stamp, most, again)


def _planned(problem: Problem) -> Kernel:
    """The planned kernel as it is registered: without what a table chose for it."""
    name = plan(problem).kernel.name
    return next(kernel for kernel in kernels() if kernel.name == name)


def seconds_of(
    problem: Problem,
    configured: Sequence[Kernel],
    device: torch.device,
    seconds_each: float,
    on_failure: OnFailure = reraise,
) -> list[float]:
    """Seconds a call of each kernel on a problem, cold, in turn.

    One that raises, or whose bits are not the first one's (settings must not touch the order of summation), is handed
    to `on_failure`, and counts as infinitely slow if that returns. A failure of the first is raised.
    """
    copies = _copies(replace(problem, m=1), device)
    x = torch.randn(problem.m, problem.k, device=device).to(problem.dtype)
    out = torch.empty(problem.m, problem.n, dtype=problem.dtype, device=device)
    expected: list[Tensor] = []

    def failed(name: str, error: Exception) -> None:
        number, kernel = int(name), configured[int(name)]
        if number == 0:
            raise error
        words = kernel.describe(problem) if kernel.describe else f"configuration {number}"
        on_failure(f"{kernel.name}, {problem.n} × {problem.k}, M = {problem.m}: {words}", error)

    calls: dict[str, list[CALL]] = {}
    for number, kernel in enumerate(configured):
        try:
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                kernel.run(x, copies[0], None, out)
            if not expected:
                expected.append(out.clone())
            elif not torch.equal(out, expected[0]):
                raise ValueError("it gives other bits than the kernel's own choice, so it is a fault of the kernel")
            calls[str(number)] = [_call(kernel, x, weight, out) for weight in copies]
        except Exception as error:
            failed(str(number), error)
    timings = interleave(calls, seconds_each * len(calls), device, failed)
    return [timings[name].us / 1e6 if name in timings else inf for name in map(str, range(len(configured)))]


def _call(kernel: Kernel, x: Tensor, weight: PackedWeight, out: Tensor) -> CALL:
    return lambda: kernel.run(x, weight, None, out)


@lru_cache(maxsize=1)
def _copies(problem: Problem, device: torch.device) -> list[PackedWeight]:
    """Copies of a weight to rotate over; kept for the next M."""
    weight = quantize(torch.randn(problem.n, problem.k, device=device), problem.format.key)
    return [clone(weight) for _ in range(copies_needed(weight.nbytes, cache_bytes(device)))]
