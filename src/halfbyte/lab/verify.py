"""Layers against float64: what `halfbyte verify` and `halfbyte prove` measure of each packed weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..checkpoints import Checkpoint
from ..formats import PackedWeight
from ..ops import linear
from .linear import DTYPE_NAMES as DTYPES

Layer = Callable[[Tensor], Tensor]
GPU_FP32_ULP = 8  # of a weight that its table keeps to at least 21 bits


@dataclass(frozen=True)
class Exactness:
    """How far one implementation of a layer is from float64, by the dtype of x ("fp32", "bf16", "fp16").

    error: relative 2-norm over random rows. over_limit: that over the rounding limit of the dtype, 16-bit ones only.
    equal, worst_ulp: what one-hot rows read back: the share of weights that are bit for bit the true value rounded
    once, and the largest distance from it in units in the last place.
    """

    error: dict[str, float]
    over_limit: dict[str, float]
    equal: dict[str, float]
    worst_ulp: dict[str, int]

    @property
    def worst_over_limit(self) -> float:
        return max(self.over_limit.values(), default=0.0)

    @property
    def error_fp32(self) -> float:
        return self.error.get("fp32", 0.0)

    def one_hot_ok(self, weight: PackedWeight) -> bool:
        """On a CPU the whole contract; on a GPU its default mode: 16-bit weights at most one unit off.

        There fp32 comes from a table of 21 bits or more: a few units off, or more where an offset cancels the product.
        """
        for name, worst in self.worst_ulp.items():
            dtype = DTYPES[name]
            if weight.device.type == "cpu":
                ok = reference.Probe(self.equal[name], worst).within_contract(dtype)
            elif dtype == torch.float32:
                ok = worst <= GPU_FP32_ULP or weight.format.offset is not None
            else:
                ok = worst <= 1
            if not ok:
                return False
        return True


@dataclass(frozen=True)
class Truth:
    """What float64 says of one weight [N, K]: its product with random rows, and some of its columns.

    x: by dtype's name, [m, K] of that dtype, the same random numbers rounded. y: float64 [m, N] of each. columns:
    which columns one-hot rows read. values: float64 [columns, N], those columns' true values.
    """

    x: Mapping[str, Tensor]
    y: Mapping[str, Tensor]
    columns: Sequence[int]
    values: Tensor

    @staticmethod
    def of(weight: PackedWeight, m: int, columns: int, seed: int) -> Truth:
        """Decodes the weight once: the one-hot rows ride along with the random ones, and pick values exactly."""
        k = weight.shape[1]
        generator = torch.Generator().manual_seed(seed)
        random = torch.randn(m, k, generator=generator)
        chosen = torch.randperm(k, generator=generator)[:columns].tolist()
        x = {name: random.to(dtype).to(weight.device) for name, dtype in DTYPES.items()}
        rows = [*(each.double() for each in x.values()), one_hot(chosen, k, torch.float64, weight.device)]
        results = reference.linear(torch.cat(rows), weight)
        *y, values = torch.split(results, [m] * len(x) + [len(chosen)])
        return Truth(x, dict(zip(x, y, strict=True)), chosen, values)

    def check(self, layer: Layer, dtypes: Sequence[str] = tuple(DTYPES)) -> Exactness:
        """Hold a layer (without bias) against this."""
        error = {name: reference.relative_error(layer(self.x[name]), self.y[name]) for name in dtypes}
        limit = {name: reference.rounding_limit(self.y[name], DTYPES[name]) for name in dtypes}
        probes = {name: self.probe(layer, name) for name in dtypes}
        return Exactness(
            error=error,
            over_limit={name: _over(error[name], limit[name]) for name in dtypes if name != "fp32"},
            equal={name: probe.equal for name, probe in probes.items()},
            worst_ulp={name: probe.worst_ulp for name, probe in probes.items()},
        )

    def probe(self, layer: Layer, dtype: str) -> reference.Probe:
        """Read the chosen columns back through the layer."""
        x = one_hot(self.columns, self.x[dtype].shape[1], DTYPES[dtype], self.values.device)
        distance = reference.ulp_distance(layer(x), self.values.to(DTYPES[dtype]))
        return reference.Probe(equal=float((distance == 0).double().mean()), worst_ulp=int(distance.max()))

    def notices_swap(self, weight: PackedWeight) -> bool | None:
        """Whether both checks fail for the weight with the nibbles of every byte swapped; None if that changes nothing.

        (Nothing changes in a weight whose codes are all the same.)
        """
        swapped = reference.swap_nibbles(weight)
        if torch.equal(swapped.codes, weight.codes):
            return None
        off = reference.relative_error(linear(self.x["fp32"], swapped), self.y["fp32"]) > reference.FP32_LIMIT
        return off and self.probe(lambda x: linear(x, swapped), "fp32").worst_ulp > 0


def one_hot(columns: Sequence[int], k: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[columns, k], a 1 in each row."""
    rows = torch.zeros(len(columns), k, dtype=dtype, device=device)
    rows[torch.arange(len(columns)), torch.tensor(columns, dtype=torch.int64)] = 1
    return rows


def _over(error: float, limit: float) -> float:
    """error / limit; where rounding costs nothing (a weight of zeros), nothing may be lost."""
    return error / limit if limit else float("inf") if error else 0.0


@dataclass(frozen=True)
class LayerReport:
    """How one layer does. Errors are relative 2-norms to float64.

    over_limit: worst error over the rounding limit, of bf16 and fp16; the contract allows 1.1.
    error_fp32: error of fp32 outputs; the contract allows 5e-6.
    one_hot_ok: whether single weights read back through one-hot activations as the contract demands, in all dtypes.
    swap_detected: whether the same checks fail for the weight with the nibbles of every byte swapped; None where that
    changes nothing.
    """

    name: str
    format: str
    shape: tuple[int, int]
    over_limit: float
    error_fp32: float
    one_hot_ok: bool
    swap_detected: bool | None

    @property
    def ok(self) -> bool:
        within = self.over_limit <= reference.FACTOR and self.error_fp32 <= reference.FP32_LIMIT
        return within and self.one_hot_ok and self.swap_detected is not False

    @staticmethod
    def of(name: str, weight: PackedWeight, exactness: Exactness, swap_detected: bool | None) -> LayerReport:
        return LayerReport(
            name=name,
            format=weight.format.key,
            shape=weight.shape,
            over_limit=exactness.worst_over_limit,
            error_fp32=exactness.error_fp32,
            one_hot_ok=exactness.one_hot_ok(weight),
            swap_detected=swap_detected,
        )


def packed_names(checkpoint: Checkpoint) -> list[str]:
    """The names of the packed weights, in the order of the file."""
    return [entry.name for entry in checkpoint.entries() if entry.packed]


def packed_layers(
    checkpoint: Checkpoint, names: Sequence[str], device: torch.device
) -> Iterator[tuple[str, PackedWeight]]:
    """Packed weights on a device, one at a time: the file's pages are given back before the next one is read."""
    for name in names:
        weight = checkpoint.load(name)
        assert isinstance(weight, PackedWeight)
        yield name, weight.to(device)
        del weight
        checkpoint.release(name)


def verify(
    checkpoint: Checkpoint, m: int = 3, columns: int = 16, seed: int = 0, device: str = "cpu"
) -> Iterator[LayerReport]:
    """A report for each packed layer, through the operator that models use.

    m: rows of random activations. columns: how many of the weight's columns the one-hot probes read.
    """
    layers = packed_layers(checkpoint, packed_names(checkpoint), torch.device(device))
    for number, (name, weight) in enumerate(layers):
        truth = Truth.of(weight, m, columns, seed + number)
        exactness = truth.check(lambda x, weight=weight: linear(x, weight))  # type: ignore[misc]
        yield LayerReport.of(name, weight, exactness, truth.notices_swap(weight))


def summary(reports: Sequence[LayerReport]) -> dict[str, Any]:
    """What `halfbyte verify --json` prints."""
    swaps = [report.swap_detected for report in reports]
    return {
        "layers_checked": len(reports),
        "all_within_contract": bool(reports) and all(report.ok for report in reports),
        "worst_over_limit": max((report.over_limit for report in reports), default=None),
        "worst_error_fp32": max((report.error_fp32 for report in reports), default=None),
        "one_hot_ok": all(report.one_hot_ok for report in reports),
        "swapped_nibbles_detected": True in swaps and False not in swaps,
        "layers": [asdict(report) | {"ok": report.ok} for report in reports],
    }
