"""The kernel of last resort: decode some rows of the weight to fp32, let torch multiply, repeat."""

from __future__ import annotations

from torch import Tensor

from ..formats import PackedWeight
from .adapters import expand_with_torch
from .registry import Expand, Kernel, Problem, register

CHUNK_VALUES = 1 << 22  # decoded values held at once: 16 MiB of fp32


def run(x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor) -> None:
    """See registry.Run; bias may also be fp32 [M, N]."""
    n, k = weight.shape
    wide = x.float()
    step = max(1, CHUNK_VALUES // k)
    for start in range(0, n, step):
        rows = slice(start, min(n, start + step))
        y = wide @ weight.dequantize(rows=rows).t()
        out[:, rows] = y if bias is None else y + bias[..., rows].float()


def run_adapters(x: Tensor, weight: PackedWeight, bias: Tensor | None, expand: Expand, out: Tensor) -> None:
    """See registry.RunAdapters."""
    run(x, weight, expand_with_torch(expand, bias, out.shape[1]), out)


def cost(problem: Problem) -> float:
    """A dozen torch operations, and some 2 ns a weight on a CPU; on a GPU passes over memory, then fp32's rate."""
    each = 2e-9 if problem.arch == "cpu" else 5e-11 + problem.m * 2 / 5e13
    return 2e-4 + problem.n * problem.k * each


register(
    Kernel(
        name="torch_dequantize",
        backend="torch",
        about="decode rows to fp32 with torch, multiply with torch; every format, any device",
        supports=lambda problem: None,
        cost=cost,
        run=run,
        run_adapters=run_adapters,
    )
)
