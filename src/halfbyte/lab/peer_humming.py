"""humming (package humming-kernels) as a peer: the GPU kernels that vLLM multiplies int4 weights with.

It has no codebooks, so the weight is quantised again, by humming itself, to symmetric int4 with the same block and one
scale of x's dtype a block; its rows are of format int4, and their error is against what it then holds. Which of its
kernels serves an M is left to its own heuristics, as for its users. The first call on a shape compiles all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..formats import PackedWeight

Layer = Callable[[Tensor], Tensor]

PACKAGE = "humming-kernels"
BLOCKS = (32, 64, 128)
TILE = 128  # N and K in multiples of it need no padding
_last: list[tuple[PackedWeight, torch.dtype, Any, dict[str, Tensor]]] = []  # copies of one weight are quantised once


def supports(weight: PackedWeight) -> bool:
    """Weights on a GPU whose blocks it has as well, of whole tiles."""
    n, k = weight.shape
    return weight.device.type == "cuda" and weight.format.blocksize in BLOCKS and n % TILE == 0 and k % TILE == 0


def format_key(weight: PackedWeight) -> str:
    """What a row of this peer calls its format."""
    return f"int4-{weight.format.blocksize}"


def weight_bytes(weight: PackedWeight, dtype: torch.dtype) -> int:
    """Codes and scales, read once."""
    n, k = weight.shape
    return n * k // 2 + n * k // weight.format.blocksize * dtype.itemsize


def values(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """The weight that it multiplies with, float64 [N, K]."""
    schema, tensors = _quantised(weight, dtype)
    dense: Tensor = schema.dequant_tensors(tensors)
    return dense.double()


def build(weight: PackedWeight, dtype: torch.dtype) -> Layer:
    """A layer of its own kind. Raises ValueError for fp32 activations, which it does not take."""
    from humming.layer import HummingLayer

    schema, tensors = _quantised(weight, dtype)
    n, k = weight.shape
    with torch.cuda.device(weight.device):
        layer = HummingLayer(shape_n=n, shape_k=k, weight_config=schema, torch_dtype=dtype).to(weight.device)
        layer.load_from_tensors(tensors)
        layer.transform()
    return layer  # type: ignore[no-any-return]


def _quantised(weight: PackedWeight, dtype: torch.dtype) -> tuple[Any, dict[str, Tensor]]:
    """Its description of the format, and codes and scales before it reorders them for its kernels."""
    if dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"humming takes fp16 and bf16 activations, not {dtype}")
    for known, type, schema, tensors in _last:
        if known is weight and type == dtype:
            return schema, tensors
    from humming.schema import BaseWeightSchema, HummingWeightSchema

    config = {"quant_method": "humming", "dtype": "int4", "group_size": weight.format.blocksize}
    schema = BaseWeightSchema.from_config(config)
    with torch.cuda.device(weight.device):
        tensors = HummingWeightSchema.quant_tensor(weight.dequantize(torch.float32), schema, dtype)
    _last[:] = [(weight, dtype, schema, tensors)]
    return schema, tensors
