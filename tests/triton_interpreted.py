"""triton_linear under Triton's interpreter, which must be asked for before triton is imported.

test_triton_linear.py runs this file in a process of its own:

    TRITON_INTERPRET=1 pytest tests/triton_interpreted.py
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from halfbyte import ops, reference
from halfbyte.formats import PackedWeight, get_format
from halfbyte.formats.table import BNB_BLOCKSIZES
from halfbyte.kernels import Problem, kernels, triton_linear
from halfbyte.plan import plan
from kernel_samples import KEYS, multiples, random_weight, seeded, strided

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, FP16, FP32)
ALL_KEYS = tuple(dict.fromkeys((*KEYS, *(f"{name}-{size}" for name in ("nf4", "fp4") for size in BNB_BLOCKSIZES))))
EVERY_PATH = ("nf4-64-nested", "q4_1", "iq4_nl", "q4_k", "mxfp4", "mxfp4_gguf", "nvfp4", "gptq_v2-40", "awq-32")

pytestmark = pytest.mark.skipif(not triton_linear.interpreted(), reason="needs TRITON_INTERPRET=1")


def apply(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """The kernel's answer, written over NaN."""
    out = torch.full((x.shape[0], weight.shape[0]), torch.nan, dtype=x.dtype)
    triton_linear.run(x, weight, bias, out)
    return out


def check(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> None:
    """The contract; beyond it, what sums in fp32 may lose where a handful of outputs cancels."""
    dense = weight.dequantize(torch.float64)
    slack = 3e-7 * float((x.double().abs() @ dense.abs().t()).norm())
    y = reference.linear(x, weight, bias)
    reference.assert_within_contract(apply(x, weight, bias), y, f"{weight.format.key} {list(weight.shape)}", slack)


def small_shape(key: str, n: int = 9, k: int = 150) -> tuple[int, int]:
    """Rows that fill no tile, columns that are no multiple of a tile where the format allows."""
    rows, columns = multiples(key)
    return math.ceil(n / rows) * rows, columns * max(1, k // columns)


@pytest.mark.parametrize("key", ALL_KEYS)
def test_contract(key: str) -> None:
    weight = random_weight(key, *small_shape(key), seeded(0))
    n, k = weight.shape
    check(strided(1, k, BF16, seeded(1)), weight, torch.randn(n, generator=seeded(2)))
    check(strided(3, k, FP16 if weight.format.nested else FP32, seeded(1)), weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [2, 33, 65])
def test_rows_of_x(m: int, dtype: torch.dtype) -> None:
    weight = random_weight("nf4-64", 9, 77, seeded(m))
    check(torch.randn(m, 77, generator=seeded(1)).to(dtype), weight, torch.randn(9, generator=seeded(2)).to(dtype))


@pytest.mark.parametrize("key", EVERY_PATH)
def test_many_rows_of_x(key: str) -> None:
    """The tiles through tl.dot read every kind of code and scale, too."""
    n, k = small_shape(key, n=67)
    check(strided(66, k, BF16, seeded(1)), random_weight(key, n, k, seeded(0)), torch.randn(n, generator=seeded(2)))


@pytest.mark.parametrize("m", [1, 65])
def test_many_tiles_of_k(m: int) -> None:
    """K beyond what many_rows adds up in one sum."""
    weight = random_weight("nf4-64", 8, 1063, seeded(0))
    check(torch.randn(m, 1063, generator=seeded(1)), weight)


@pytest.mark.parametrize("k", [1, 31, 33, 128, 257])
@pytest.mark.parametrize("key", ["nf4-32", "fp4-64-nested"])
def test_blocks_and_bytes_straddle_rows(key: str, k: int) -> None:
    check(torch.randn(2, k, generator=seeded(k)), random_weight(key, 9, k, seeded(1)))


def test_bits_do_not_depend_on_m() -> None:
    weight = random_weight("nf4-64-nested", 8, 200, seeded(0))
    x = torch.randn(64, 200, generator=seeded(1)).bfloat16()
    whole = apply(x, weight)
    assert torch.equal(whole, apply(x, weight))
    for first, last in ((0, 1), (5, 7), (9, 13), (20, 28), (31, 64)):
        assert torch.equal(apply(x[first:last], weight), whole[first:last])


def test_few_rows_add_up_in_the_order_that_is_written() -> None:
    """Column c of each tile into sum c with one rounding an addition, then neighbours: as torch does it here."""
    weight = random_weight("nf4-64", 3, 300, seeded(0))
    x = torch.randn(1, 300, generator=seeded(1))
    terms = torch.zeros(3, 384)
    terms[:, :300] = weight.dequantize() * x
    sums = torch.zeros(3, 128)
    for tile in terms.split(128, dim=1):
        sums = sums + tile
    while sums.shape[1] > 1:
        sums = sums[:, 0::2] + sums[:, 1::2]
    assert torch.equal(apply(x, weight), sums.t())


@pytest.mark.parametrize("key", [*EVERY_PATH, "fp4-64", "q4_0"])
def test_one_hot_rows_read_weights_back(key: str) -> None:
    n, k = small_shape(key)
    weight = random_weight(key, n, k, seeded(0))
    columns = torch.randperm(k, generator=seeded(1))[:8].tolist()
    swapped = reference.swap_nibbles(weight)
    for dtype in DTYPES:
        probe = reference.one_hot_probe(lambda x: apply(x, weight), weight, dtype, columns)
        assert probe.within_contract(dtype), (dtype, probe)
        control = reference.one_hot_probe(lambda x: apply(x, swapped), weight, dtype, columns)
        assert not control.within_contract(dtype), "swapped nibbles went unnoticed"


@pytest.mark.parametrize("key", ["nf4-64", "q4_1", "gptq-32"])
def test_swapped_nibbles_break_the_contract(key: str) -> None:
    n, k = small_shape(key)
    weight = random_weight(key, n, k, seeded(0))
    x = torch.randn(4, k, generator=seeded(1)).bfloat16()
    with pytest.raises(AssertionError, match="times the limit"):
        reference.assert_within_contract(apply(x, reference.swap_nibbles(weight)), reference.linear(x, weight))


@pytest.mark.parametrize("key", ["nf4-64", "q4_0", "gptq-32"])
def test_numbers_of_64_bits(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What layers of 2^31 weights need, on a small one."""
    monkeypatch.setattr(triton_linear, "WIDE_FROM", 1)
    n, k = small_shape(key)
    for m in (2, 65):
        check(torch.randn(m, k, generator=seeded(1)), random_weight(key, n, k, seeded(0)))


@pytest.mark.parametrize(("key", "by"), [("nf4-64", 1), ("q4_1", 1), ("q4_k", 3), ("mxfp4_gguf", 5)])
def test_bytes_at_odd_addresses(key: str, by: int) -> None:
    n, k = small_shape(key)
    weight = random_weight(key, n, k, seeded(0))
    buffer = torch.zeros(weight.codes.numel() + by, dtype=torch.uint8)
    moved = buffer[by:].view(weight.codes.shape).copy_(weight.codes)
    weight = PackedWeight(weight.format, weight.shape, {**weight.parts, "codes": moved})
    assert weight.codes.data_ptr() % 2
    check(torch.randn(2, k, generator=seeded(1)).half(), weight)


def test_extremes() -> None:
    """Results that overflow do, others do not; halves round to even; NaN and infinities stay what they are."""
    ones = PackedWeight(
        get_format("nf4-64"), (1, 2), {"codes": torch.tensor([0xFF], dtype=torch.uint8), "absmax": torch.ones(1)}
    )
    for dtype in DTYPES:
        top = torch.finfo(dtype).max
        x = torch.tensor([[top, 0], [top, top], [-top, -top], [torch.inf, 1], [torch.nan, 1], [0, 0]], dtype=dtype)
        expected = (x.double() @ torch.ones(2, 1, dtype=torch.float64)).to(dtype)
        torch.testing.assert_close(apply(x, ones), expected, rtol=0, atol=0, equal_nan=True)
    x = torch.tensor([[256, 1], [258, 1], [256, 1.5], [-256, -3]], dtype=BF16)  # bf16 has steps of 2 there
    assert apply(x, ones).flatten().tolist() == [256, 260, 258, -260]
    small = torch.tensor([[2.0**-133, 0], [-(2.0**-126), 2.0**-133]], dtype=BF16)  # below the normal numbers
    assert torch.equal(apply(small, ones), small.float().sum(1, keepdim=True).bfloat16())


def test_special_scales() -> None:
    """E8M0's smallest and its NaN, each of E4M3's 256 numbers."""
    weight = random_weight("mxfp4", 3, 32, seeded(0))
    weight.parts["scales"].copy_(torch.tensor([[0], [1], [255]]))
    out = apply(torch.eye(32), weight)
    torch.testing.assert_close(out, weight.dequantize().t(), rtol=0, atol=0, equal_nan=True)
    weight = random_weight("nvfp4", 256, 16, seeded(0))
    weight.parts["scales"].copy_(torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(256, 1))
    out = apply(torch.eye(16)[:2], weight)
    torch.testing.assert_close(out, weight.dequantize().t()[:2], rtol=0, atol=0, equal_nan=True)
    assert out.isnan().any(dim=0).sum() == 2


def test_the_operator_takes_it_where_it_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """halfbyte.linear with this kernel: leading dimensions, gradients of x."""
    kernel = next(each for each in kernels() if each.name == "triton_linear")
    monkeypatch.setattr(ops, "_kernel", lambda *arguments: kernel)
    weight = random_weight("nf4-64", 10, 64, seeded(0))
    x = torch.randn(2, 3, 64, generator=seeded(1), requires_grad=True)
    out = ops.linear(x, weight)
    reference.assert_within_contract(out.detach(), reference.linear(x.detach(), weight))
    out.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad[0, 0], weight.dequantize().sum(0))


def test_the_plan_does_not_choose_the_interpreter() -> None:
    problem = Problem(get_format("nf4"), BF16, 4, 64, 64)
    for m in (4, 400):
        found = plan(replace(problem, m=m))
        assert found.kernel.name != "triton_linear"
        assert "triton_linear" in dict(found.others)
