"""`halfbyte verify`: every packed layer of a checkpoint against the float64 reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from .. import reference
from ..checkpoints import Checkpoint
from ..formats import PackedWeight
from ..ops import linear

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class LayerReport:
    """How one layer does. Errors are relative 2-norms to float64.

    over_limit: worst error over the rounding limit, of bf16 and fp16; the contract allows 1.1.
    error_fp32: error of fp32 outputs; the contract allows 5e-6.
    one_hot_ok: whether single weights read back through one-hot activations as the contract demands, in all dtypes.
    swap_detected: whether the same checks fail for the weight with the nibbles of every byte swapped.
    """

    name: str
    format: str
    shape: tuple[int, int]
    over_limit: float
    error_fp32: float
    one_hot_ok: bool
    swap_detected: bool

    @property
    def ok(self) -> bool:
        within = self.over_limit <= reference.FACTOR and self.error_fp32 <= reference.FP32_LIMIT
        return within and self.one_hot_ok and self.swap_detected


def verify(checkpoint: Checkpoint, m: int = 3, columns: int = 16, seed: int = 0) -> Iterator[LayerReport]:
    """A report for each packed layer, through the operator that models use.

    m: rows of random activations. columns: how many of the weight's columns the one-hot probes read.
    """
    generator = torch.Generator().manual_seed(seed)
    for entry in checkpoint.entries():
        if entry.packed:
            weight = checkpoint.load(entry.name)
            assert isinstance(weight, PackedWeight)
            yield verify_layer(entry.name, weight, m, columns, generator)


def verify_layer(name: str, weight: PackedWeight, m: int, columns: int, generator: torch.Generator) -> LayerReport:
    """See `verify`."""
    k = weight.shape[1]
    x = torch.randn(m, k, generator=generator)
    chosen = torch.randperm(k, generator=generator)[:columns].tolist()
    over_limit = max(_error(weight, x.to(dtype)) for dtype in HALVES.values())
    return LayerReport(
        name=name,
        format=weight.format.key,
        shape=weight.shape,
        over_limit=over_limit,
        error_fp32=_error(weight, x),
        one_hot_ok=all(_probe(weight, weight, dtype, chosen) for dtype in (torch.float32, *HALVES.values())),
        swap_detected=_swap_detected(weight, x, chosen),
    )


def _error(weight: PackedWeight, x: torch.Tensor) -> float:
    """Relative error of the operator; over the rounding limit for 16-bit x."""
    y = reference.linear(x, weight)
    error = reference.relative_error(linear(x, weight), y)
    return error if x.dtype == torch.float32 else error / reference.rounding_limit(y, x.dtype)


def _probe(weight: PackedWeight, truth: PackedWeight, dtype: torch.dtype, columns: Sequence[int]) -> bool:
    probe = reference.one_hot_probe(lambda x: linear(x, weight), truth, dtype, columns)
    return probe.within_contract(dtype)


def _swap_detected(weight: PackedWeight, x: torch.Tensor, columns: Sequence[int]) -> bool:
    swapped = reference.swap_nibbles(weight)
    y = reference.linear(x, weight)
    noticed = reference.relative_error(linear(x, swapped), y) > reference.FP32_LIMIT
    return noticed and not _probe(swapped, weight, torch.float32, columns)


def summary(reports: Sequence[LayerReport]) -> dict[str, Any]:
    """What `halfbyte verify --json` prints."""
    return {
        "layers_checked": len(reports),
        "all_within_contract": bool(reports) and all(report.ok for report in reports),
        "worst_over_limit": max((report.over_limit for report in reports), default=None),
        "worst_error_fp32": max((report.error_fp32 for report in reports), default=None),
        "one_hot_ok": all(report.one_hot_ok for report in reports),
        "swapped_nibbles_detected": bool(reports) and all(report.swap_detected for report in reports),
        "layers": [asdict(report) | {"ok": report.ok} for report in reports],
    }
