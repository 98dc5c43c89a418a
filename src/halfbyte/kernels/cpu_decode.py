"""A whole 4-bit weight as a dense matrix on a CPU, by the C++ library: what a backward pass of others multiplies by."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ..formats import PackedWeight
from .cpu import library
from .cpu_linear import weight_struct

TILE_VALUES = 1 << 22  # fp32 values held at once on the way to 16 bits: 16 MiB


def decode(weight: PackedWeight, out: Tensor) -> None:
    """Write the weight to contiguous `out` [N, K] in fp32, bf16 or fp16: products in fp32, then rounded to its dtype.

    Those are bitsandbytes' numbers. `PackedWeight.dequantize` rounds once, in float64 and torch.

    Raises RuntimeError without the library of CPU kernels, MemoryError where scratch memory ran out.
    """
    loaded = library()
    if loaded is None:
        raise RuntimeError("decode: the library of CPU kernels is not installed (no C++ compiler at install time)")
    n, k = weight.shape
    direct = out.dtype == torch.float32
    rows = n if direct else max(16, TILE_VALUES // k)
    tile = out if direct else torch.empty(min(rows, n), k)
    struct = ctypes.byref(weight_struct(weight))
    for start in range(0, n, rows):
        stop = min(n, start + rows)
        pointer, stride, split = tile.data_ptr(), tile.stride(0), False
        if loaded.decode(loaded.isa, struct, start, stop - start, pointer, stride, split, torch.get_num_threads()):
            raise MemoryError(f"no memory to decode a layer {list(weight.shape)}")
        if not direct:
            out[start:stop] = tile[: stop - start]
