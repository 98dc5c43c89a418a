"""Which numbers of rows share a plan: a server's prompts have any, and planning takes long beside a launch."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from halfbyte import plan as planning
from halfbyte.formats import get_format
from halfbyte.kernels import Problem
from halfbyte.plan import EXACT_ROWS, plan, planned_rows

BF16 = torch.bfloat16
MOST = 16384  # tokens of a step, vLLM's default on large GPUs


@pytest.fixture(autouse=True)
def _planned_anew() -> Iterator[None]:
    plan.cache_clear()
    yield
    plan.cache_clear()


def problem(m: int, arch: str = "sm_90a", n: int = 65536, k: int = 5120) -> Problem:
    return Problem(get_format("nf4-64"), BF16, m, n, k, arch)


def test_few_rows_are_planned_each_by_itself_and_many_as_a_little_more() -> None:
    assert [planned_rows(m) for m in range(EXACT_ROWS + 1)] == list(range(EXACT_ROWS + 1))
    rows = [planned_rows(m) for m in range(EXACT_ROWS + 1, MOST + 1)]
    assert rows == sorted(rows)
    assert all(m <= planned <= max(1.25 * m, m + 63) for m, planned in enumerate(rows, EXACT_ROWS + 1))
    assert len(set(rows)) < 40
    assert {planned_rows(1 << i) for i in range(15)} == {1 << i for i in range(15)}  # which tuning and benchmarks use


def test_a_step_of_a_new_length_costs_no_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    kernel = SimpleNamespace(
        name="one", supports=lambda problem: None, cost=lambda problem: asked.append(problem.m) or 1
    )
    monkeypatch.setattr(planning, "kernels", lambda: [kernel])
    monkeypatch.setattr(planning, "entry_for", lambda problem, kernel: None)
    for m in range(65, 2049):
        assert plan(problem(m)).kernel is kernel
    assert asked == sorted(set(map(planned_rows, range(65, 2049))))
    assert len(asked) < 30


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "cpu"])
@pytest.mark.parametrize("shape", [(65536, 5120), (5120, 32768), (96, 512)], ids=str)
def test_the_kernel_of_the_plan_serves_the_rows_that_there_are(arch: str, shape: tuple[int, int]) -> None:
    for m in (*range(60, 200, 3), 1000, 2049, 8191, 8192, 8193, 16000):
        asked = problem(m, arch, *shape)
        assert plan(asked).kernel.supports(asked) is None
