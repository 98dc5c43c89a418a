"""codebook_mma on the layers that it was made for, which the tests of all kernels are too small for."""

from __future__ import annotations

import pytest
import torch
from walk import DEVICE, activations, apply, weight_of

from halfbyte import reference
from halfbyte.kernels import codebook_mma
from kernel_fuzz import kernel_named

pytestmark = pytest.mark.skipif(DEVICE.type != "cuda", reason="about CUDA")
SHAPES = (
    *((16384, 16384), (65536, 5120), (5120, 32768)),
    *((4096, 14336), (14336, 4096), (12288, 4096), (4096, 4096)),
)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("key", ["nf4-64", "nf4-64-nested"])
def test_large_layers(key: str, shape: tuple[int, int]) -> None:
    """Many tiles and passes: within the contract, and a row's bits are the same alone and among eight."""
    kernel, (n, k) = kernel_named(codebook_mma.STEM), shape
    weight = weight_of(key, n, k)
    for dtype in (torch.bfloat16, torch.float16):
        x = activations(8, k, dtype)
        y = reference.linear(x, weight)
        out = apply(kernel, x, weight)
        reference.assert_within_contract(out, y, f"{key} {shape} {dtype}")
        for m in (1, 2, 4):
            assert torch.equal(apply(kernel, x[:m], weight), out[:m]), f"{dtype} M={m}"
        strict = apply(kernel, x, weight, strict=True)
        reference.assert_within_contract(strict, y, f"{key} {shape} {dtype} strict")
