"""Every configuration that tuning may choose gives the kernel's own bits: a table changes how fast calls are."""

from __future__ import annotations

import pytest
import torch
from walk import ARCH, KERNELS, activations, apply, fitting, serves, some, weight_of

from halfbyte.formats import get_format
from halfbyte.kernels import Problem

TUNABLE = [(name, key) for name, key in some(3) if KERNELS[name].configurations]
SHAPES = ((1040, 4096), (5120, 1024))  # rows that fill no tile, K that clusters share; the reverse
ROWS = (1, 8, 16, 37)
MOST = 8  # configurations of a problem, spread over all: each compiles for a second


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("name", "key"), TUNABLE)
def test_a_configuration_changes_no_bit(name: str, key: str, shape: tuple[int, int]) -> None:
    kernel, (n, k) = KERNELS[name], fitting(key, *shape)
    weight, dtype = weight_of(key, n, k), torch.bfloat16
    served = [m for m in ROWS if serves(kernel, key, dtype, m, n, k)]
    assert served
    for m in served:
        x = activations(m, k, dtype)
        own = apply(kernel, x, weight)
        assert kernel.configurations is not None
        choices = kernel.configurations(Problem(get_format(key), dtype, m, n, k, ARCH))
        for choice in choices[:: -(-len(choices) // MOST)]:
            out = apply(kernel.configured(choice.settings), x, weight)
            assert torch.equal(out, own), f"{name} {key} {n} × {k} M={m}: {choice.settings}"
