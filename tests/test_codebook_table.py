"""The fp16 table of the CUDA kernels: what its rounding alone does to a layer's outputs, computed in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from halfbyte import reference
from halfbyte.formats import PackedWeight, get_format, quantize
from halfbyte.kernels import codebook

FP16, BF16 = torch.float16, torch.bfloat16


def as_decoded(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """W [N, K] in float64 with the entries that a kernel's table holds."""
    terms = 2 if codebook.finer(weight.format, dtype, weight.shape[0], strict=False) else 1
    table = codebook.table_of(weight.format.codebook, terms)
    high, low = (
        torch.tensor(list(bits), dtype=torch.int32).to(torch.int16).view(FP16).double()
        for bits in (table.high, table.low)
    )
    entries = (high + (low / 2048 if terms == 2 else 0)) * table.inverse
    exact = torch.tensor(weight.format.codebook, dtype=torch.float64)
    values = weight.dequantize(torch.float64)
    scales = weight.parts["absmax"].double().repeat_interleave(weight.format.blocksize).view(weight.shape)
    codes = (values / scales).unsqueeze(-1).sub(exact).abs().argmin(-1)
    return entries[codes] * scales


@pytest.mark.parametrize("blocksize", [32, 64, 256, 1024])
@pytest.mark.parametrize(("dtype", "mean"), [(BF16, 0.0), (BF16, 0.3), (BF16, 1.0), (FP16, 0.0)], ids=str)
def test_rounding_stays_in_the_contract(blocksize: int, dtype: torch.dtype, mean: float) -> None:
    """Activations with a mean, too: whatever errors of entries have in common adds up over K."""
    generator = torch.Generator().manual_seed(blocksize)
    weight = quantize(torch.randn(2048, 1024, generator=generator), get_format(f"nf4-{blocksize}").key)
    x = (torch.randn(4, 1024, generator=generator) + mean).to(dtype)
    y = reference.linear(x, weight)
    limit = reference.rounding_limit(y, dtype)
    out = (x.double() @ as_decoded(weight, dtype).T).to(dtype)
    assert reference.relative_error(out, y) <= 1.1 * limit
