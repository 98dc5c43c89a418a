"""Adapters and base weights to try them on."""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.adapters import Adapter
from halfbyte.formats import PackedWeight, quantize
from kernel_samples import seeded, slack

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
N, K = 72, 128


def make_adapter(
    rank: int, generator: torch.Generator, dtype=torch.float32, n: int = N, k: int = K, size: float = 0.5
) -> Adapter:
    """One whose effect is `size` of what the base makes of a row, so that no test can overlook it."""
    a = torch.randn(rank, k, generator=generator) / k**0.5
    b = torch.randn(n, rank, generator=generator) * size
    return Adapter(a.to(dtype), b.to(dtype), k**0.5 / rank**0.5)


def base(key: str = "nf4-64", n: int = N, k: int = K, seed: int = 0) -> PackedWeight:
    return quantize(torch.randn(n, k, generator=seeded(seed)), key)


def allowed(x: Tensor, weight: PackedWeight, listed: list[Adapter]) -> float:
    """What fp32 sums may lose where outputs cancel: of the base and of both multiplies of the adapters."""
    lost = slack(x.reshape(-1, x.shape[-1]), weight.dequantize(torch.float64))
    for each in listed:
        through = x.reshape(-1, x.shape[-1]).double().abs() @ each.a.double().abs().t()
        lost += 1e-6 * abs(each.scaling) * float((through @ each.b.double().abs().t()).norm())
    return lost
