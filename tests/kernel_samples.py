"""Random packed weights of any format, made from bytes, not by a quantiser, so that every code and scale occurs."""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.formats import PackedWeight, RecordLayout, get_format

KEYS = (
    *("nf4-32", "nf4-64", "nf4-64-nested", "nf4-128", "nf4-256-nested", "nf4-512", "nf4-1024", "nf4-2048"),
    *("nf4-4096-nested", "fp4-32-nested", "fp4-64", "fp4-4096", "q4_0", "q4_1", "iq4_nl", "q4_k", "mxfp4"),
    *("mxfp4_gguf", "nvfp4", "gptq-32", "gptq-128", "gptq_v2-64", "gptq_v2-40", "awq-32", "awq-128"),
)
FP32_SUMS = 3e-7  # what sums in fp32 lose at most in these tests, of the sum of magnitudes


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def strided(m: int, k: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """x [M, K] whose rows are NaN-separated views at an odd element."""
    wide = torch.full((m, k + 5), torch.nan, dtype=dtype)
    wide[:, 3 : 3 + k] = torch.randn(m, k, generator=generator).to(dtype)
    return wide[:, 3 : 3 + k]


def slack(x: Tensor, dense: Tensor) -> float:
    """What fp32 sums of x [M, K] times float64 weights [N, K] may lose in norm where outputs cancel."""
    return FP32_SUMS * float((x.double().abs() @ dense.abs().t()).norm())


def multiples(key: str) -> tuple[int, int]:
    """What N and K must be multiples of."""
    format = get_format(key)
    if key.startswith(("gptq", "awq")):
        return 8, format.blocksize
    if not format.by_row:
        return 1, 1
    assert isinstance(format.layout, RecordLayout)
    return 1, max(format.blocksize, format.layout.elements)


def random_weight(key: str, n: int, k: int, generator: torch.Generator, exact: bool = False) -> PackedWeight:
    """A weight of random codes and scales.

    exact: scales and offsets are small whole numbers, codes stand for multiples of a half, so that sums with small
    whole numbers are exact in any order.
    """
    format = get_format(key)
    parts: dict[str, Tensor] = {}
    for name, part in format.parts(n, k).items():
        dtype = part.dtypes[int(torch.randint(len(part.dtypes), (), generator=generator))]
        if dtype == torch.int32:
            parts[name] = torch.randint(-(2**31), 2**31, part.shape, dtype=torch.int64, generator=generator).int()
        elif dtype == torch.uint8:
            parts[name] = torch.randint(0, 256, part.shape, dtype=dtype, generator=generator)
        else:
            values = torch.ones(part.shape) if exact else torch.rand(part.shape, generator=generator) * 0.1 + 0.01
            parts[name] = values.to(dtype)
    if key.startswith("mxfp4"):
        exponents = torch.randint(127 if exact else 115, 130, (n * k // 32,), generator=generator)
        _set_exponents(parts, key, exponents)
    elif isinstance(format.layout, RecordLayout) and format.layout.elements > 2:
        _set_halves(parts["codes"].view(-1, format.layout.bytes), 2 if format.offset else 1, generator, exact)
    if exact and format.nested:
        parts["nested_quant_map"] = torch.ones(256)
    if exact and not format.by_row:
        # codes of values that are whole numbers: -1, 0, 1 in NF4; 0, 1, -1 in FP4
        whole = torch.tensor([0, 7, 15] if format.name == "nf4" else [0, 3, 11])
        chosen = whole[torch.randint(3, (2, parts["codes"].numel()), generator=generator)]
        parts["codes"] = (chosen[0] * 16 + chosen[1]).to(torch.uint8)
    return PackedWeight(format, (n, k), parts)


def _set_exponents(parts: dict[str, Tensor], key: str, exponents: Tensor) -> None:
    if key == "mxfp4":
        parts["scales"] = exponents.to(torch.uint8).view(parts["scales"].shape)
    else:
        parts["codes"].view(-1, 17)[:, 0] = exponents.to(torch.uint8)


def _set_halves(records: Tensor, halves: int, generator: torch.Generator, exact: bool) -> None:
    shape = (records.shape[0], halves)
    values = torch.ones(shape) if exact else torch.rand(shape, generator=generator) * 0.1 - 0.02
    records[:, : 2 * halves] = values.half().view(torch.uint8).view(-1, 2 * halves)
