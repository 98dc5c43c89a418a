"""Which kernel serves a problem, and why."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from .kernels import Kernel, Problem, kernels
from .tune import Entry, entry_for

EXACT_ROWS = 64  # of x, up to which each number is planned by itself


@dataclass(frozen=True)
class Plan:
    """A problem's kernel, its predicted seconds, and why the others were not taken.

    problem: what was asked, with `planned_rows` of x. tuned: what was measured of the kernel's configuration, where
    that is in a table; else the kernel takes the best predicted.
    """

    problem: Problem
    kernel: Kernel
    seconds: float
    others: tuple[tuple[str, str], ...]
    tuned: Entry | None = None


def planned_rows(m: int) -> int:
    """The rows of x that m of them are planned as: m itself up to EXACT_ROWS, then rounded up, by a quarter at most.

    A server's steps with prompts have another number of tokens each time, and planning takes a millisecond.
    """
    if m <= EXACT_ROWS:
        return m
    step = max(EXACT_ROWS, 1 << ((m - 1).bit_length() - 3))
    return -(-m // step) * step


@lru_cache(maxsize=4096)
def plan(problem: Problem) -> Plan:
    """The supported kernel with the least predicted cost, in its tuned configuration where it has one.

    Tuning chooses among one kernel's configurations and never between kernels, so it changes no bit of a result.
    """
    rows = planned_rows(problem.m)
    if rows != problem.m:
        return plan(replace(problem, m=rows))
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
