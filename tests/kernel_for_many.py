"""A kernel for 9 to 100 rows of x that runs anywhere, so that tests of all kernels are tried on one that takes no few.

HALFBYTE_TEST_DEVICE=cpu pytest -p kernel_for_many tests/gpu
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.formats import PackedWeight
from halfbyte.kernels import Kernel, Problem
from halfbyte.kernels.registry import register

NAME, MIN_M, MAX_M = "for_many", 9, 100
FORMATS = ("nf4-64", "mxfp4", "q4_0")


def reason_against(problem: Problem) -> str | None:
    if not MIN_M <= problem.m <= MAX_M:
        return f"is for M from {MIN_M} to {MAX_M}, got {problem.m}"
    if problem.format.key not in FORMATS:
        return f"is for {', '.join(FORMATS)}, got {problem.format.key}"
    if problem.dtype == torch.float32:
        return "multiplies fp16 and bf16 activations, got fp32"
    return None


def run(x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor) -> None:
    """Row by row, so that a row's bits are its own."""
    assert MIN_M <= x.shape[0] <= MAX_M, "called for what it does not serve"
    dense = weight.dequantize(torch.float64)
    y = torch.stack([dense @ row for row in x.double()])
    out.copy_(y if bias is None else y + bias.double())


register(
    Kernel(
        name=NAME,
        backend="cpu",
        about="float64, for tests",
        supports=reason_against,
        cost=lambda problem: 1.0,
        run=run,
        batch_invariant_to=MAX_M,
    )
)
