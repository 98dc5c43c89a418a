"""The ladder's format, planar Q4: quantising, decoding, and y = W x in float64. The kernels are held to this."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .ladder_rungs import BLOCK, CODE_BYTES

ZERO = 8  # the code of a weight of 0
CHUNK_VALUES = 1 << 24  # values decoded at once: 128 MiB of float64


@dataclass(frozen=True, eq=False)
class PlanarQ4:
    """A matrix [N, K] in the ladder's format: weight = scale * (code - 8), 32 weights to a scale.

    codes: uint8 [N, K / 2], element 2j in the low four bits of byte j. scales: fp16 [N, K / 32].
    """

    codes: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], 2 * self.codes.shape[1]

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def clone(self) -> PlanarQ4:
        """A copy in memory of its own."""
        return PlanarQ4(self.codes.clone(), self.scales.clone())

    def decode(self, rows: slice) -> Tensor:
        """float64 [rows, K]: exactly what the bytes mean."""
        codes = self.codes[rows]
        values = torch.stack((codes & 15, codes >> 4), dim=-1).reshape(codes.shape[0], -1, BLOCK)
        return ((values.double() - ZERO) * self.scales[rows].double().unsqueeze(-1)).reshape(codes.shape[0], -1)


def quantize_q4(weight: Tensor) -> PlanarQ4:
    """A matrix [N, K] of finite fp32 or fp16 values to planar Q4; in each block the largest magnitude becomes code 0.

    Raises ValueError where K is not a multiple of 32.
    """
    if weight.dim() != 2 or weight.shape[1] % BLOCK:
        raise ValueError(f"planar Q4 needs a matrix with K in multiples of {BLOCK}, got shape {list(weight.shape)}")
    codes, scales = [], []
    for rows in _chunks(*weight.shape):
        blocks = weight[rows].float().view(-1, weight.shape[1] // BLOCK, BLOCK)
        largest = blocks.gather(2, blocks.abs().argmax(2, keepdim=True))
        scale = (largest / -ZERO).half()
        steps = torch.where(scale == 0, 0, blocks / scale.float())
        values = (steps.round() + ZERO).clamp(0, 15).to(torch.uint8)
        pairs = values.view(*values.shape[:2], CODE_BYTES, 2)
        codes.append((pairs[..., 0] | pairs[..., 1] << 4).flatten(1))
        scales.append(scale.squeeze(2))
    return PlanarQ4(torch.cat(codes), torch.cat(scales))


def exact_q4(x: Tensor, weight: PlanarQ4) -> Tensor:
    """float64 [N]: x [K] times the matrix that the bytes mean."""
    return torch.cat([weight.decode(rows) @ x.double() for rows in _chunks(*weight.shape)])


def exact_dense(x: Tensor, weight: Tensor) -> Tensor:
    """float64 [N]: x [K] times a dense matrix [N, K]."""
    return torch.cat([weight[rows].double() @ x.double() for rows in _chunks(*weight.shape)])


def _chunks(n: int, k: int) -> Iterator[slice]:
    """Rows, as many at a time as CHUNK_VALUES holds."""
    step = max(1, CHUNK_VALUES // k)
    return (slice(first, min(n, first + step)) for first in range(0, n, step))
