"""Which kernel serves a problem, and why."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from .kernels import Kernel, Problem, kernels
from .tune import Entry, entry_for


@dataclass(frozen=True)
class Plan:
    """A problem's kernel, its predicted seconds, and why the others were not taken.

    tuned: what was measured of the kernel's configuration, where that is in a table; else the kernel takes the best
    predicted.
    """

    problem: Problem
    kernel: Kernel
    seconds: float
    others: tuple[tuple[str, str], ...]
    tuned: Entry | None = None


@lru_cache(maxsize=4096)
def plan(problem: Problem) -> Plan:
    """The supported kernel with the least predicted cost, in its tuned configuration where it has one.

    Tuning chooses among one kernel's configurations and never between kernels, so it changes no bit of a result.
    """
    candidates: list[tuple[float, Kernel]] = []
    others: list[tuple[str, str]] = []
    for kernel in kernels():
        reason = kernel.supports(problem)
        if reason is None:
            candidates.append((kernel.cost(problem), kernel))
        else:
            others.append((kernel.name, reason))
    candidates.sort(key=lambda candidate: candidate[0])
    seconds, chosen = candidates[0]  # the fallback serves everything
    others += [(kernel.name, f"predicted {cost * 1e6:.0f} µs") for cost, kernel in candidates[1:]]
    tuned = entry_for(problem, chosen)
    return Plan(problem, chosen if tuned is None else chosen.configured(tuned.settings), seconds, tuple(others), tuned)
