"""The contract's functions must accept what is right and reject what is not: tests everywhere rely on them."""

from __future__ import annotations

import math

import pytest
import torch

from halfbyte import reference
from halfbyte.formats import PackedWeight, WordLayout, get_format, quantize
from halfbyte.reference import Adapter, assert_within_contract, one_hot_probe, swap_nibbles

HALVES = (torch.float16, torch.bfloat16)
DTYPES = (torch.float32, *HALVES)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def word_weight(key: str, n: int = 16, k: int = 64) -> PackedWeight:
    format = get_format(key)
    generator = torch.Generator().manual_seed(1)
    parts = {}
    for name, part in format.parts(n, k).items():
        if part.dtypes[0] == torch.int32:
            parts[name] = torch.randint(-(2**31), 2**31, part.shape, generator=generator).int()
        else:
            parts[name] = (torch.rand(part.shape, generator=generator) + 0.1).to(part.dtypes[0])
    return PackedWeight(format, (n, k), parts)


def weights() -> list[PackedWeight]:
    keys = ("nf4-64", "nf4-64-nested", "fp4-32", "q4_0", "q4_1", "iq4_nl", "mxfp4", "mxfp4_gguf")
    return [quantize(normal(16, 64), key) for key in keys] + [word_weight("gptq-32"), word_weight("awq-64")]


@pytest.mark.parametrize("weight", weights(), ids=lambda weight: weight.format.key)
def test_linear_is_the_definition(weight: PackedWeight) -> None:
    """Against a plain loop over outputs and inputs in Python's floats."""
    x, bias = normal(2, 64, seed=1), normal(16, seed=2)
    values = weight.dequantize(torch.float64)
    y = reference.linear(x, weight, bias)
    assert y.dtype == torch.float64
    for row in range(2):
        for column in range(16):
            terms = [float(x[row, k]) * float(values[column, k]) for k in range(64)]
            assert math.isclose(float(y[row, column]), math.fsum([*terms, float(bias[column])]), rel_tol=1e-12)


def test_linear_in_chunks_and_leading_dimensions(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = quantize(normal(33, 96), "nf4-64")
    x = normal(2, 3, 96, seed=1)
    whole = reference.linear(x, weight)
    assert whole.shape == (2, 3, 33)
    monkeypatch.setattr(reference, "CHUNK_VALUES", 5 * 96)
    torch.testing.assert_close(reference.linear(x, weight), whole, rtol=1e-14, atol=1e-14)
    assert reference.linear(x[:0], weight).shape == (0, 3, 33)
    assert reference.linear(x[0, 0], weight).shape == (33,)


def test_adapters_with_index() -> None:
    weight = quantize(normal(24, 64), "nf4-64")
    x = normal(5, 64, seed=1)
    adapters = [Adapter(normal(r, 64, seed=r), normal(24, r, seed=r + 9), scaling=0.5 * r) for r in (2, 4)]
    plain = reference.linear(x, weight)

    def added(row: int, adapter: Adapter) -> torch.Tensor:
        return adapter.scaling * (adapter.b.double() @ (adapter.a.double() @ x[row].double()))

    index = torch.tensor([1, -1, 0, 1, 0])
    y = reference.linear(x, weight, None, adapters, index)
    for row, chosen in enumerate(index.tolist()):
        wanted = plain[row] if chosen < 0 else plain[row] + added(row, adapters[chosen])
        torch.testing.assert_close(y[row], wanted, rtol=1e-12, atol=1e-12)
    assert torch.equal(y[1], plain[1])
    every = reference.linear(x, weight, None, adapters[:1])
    torch.testing.assert_close(every[3], plain[3] + added(3, adapters[0]), rtol=1e-12, atol=1e-12)
    batched = reference.linear(x.view(5, 1, 64), weight, None, adapters, index.view(5, 1))
    assert torch.equal(batched.view(5, 24), y)


@pytest.mark.parametrize("dtype", DTYPES)
def test_contract_accepts_rounding_and_rejects_twice_the_limit(dtype: torch.dtype) -> None:
    y = normal(8, 512).double()
    assert_within_contract(y.to(dtype), y)
    limit = reference.error_limit(y, dtype)
    noise = normal(8, 512, seed=1).double()
    noise *= float(y.norm()) / float(noise.norm())
    assert_within_contract((y + 0.3 * limit * noise).to(dtype), y)
    with pytest.raises(AssertionError, match=r"layer: relative error .* times the limit .*worst at \("):
        assert_within_contract((y + 2 * limit * noise).to(dtype), y, "layer")


@pytest.mark.parametrize("dtype", HALVES)
def test_limit_is_the_rounding_limit(dtype: torch.dtype) -> None:
    """Some 2^-12 (fp16) and 2^-9 (bf16) over sqrt(3), from the mean square of a rounding error."""
    y = normal(64, 512).double()
    bits = {torch.float16: 11, torch.bfloat16: 8}[dtype]
    assert 0.25 * 2**-bits < reference.rounding_limit(y, dtype) < 0.6 * 2**-bits
    assert reference.error_limit(y, dtype) == pytest.approx(1.1 * reference.rounding_limit(y, dtype))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_contract_rejects_values_that_are_not_finite(value: float) -> None:
    y = normal(4, 8).double()
    out = y.float()
    out[2, 5] = value
    with pytest.raises(AssertionError, match=r"1 of 32 outputs .* first at \[\(2, 5\)\]"):
        assert_within_contract(out, y)


def test_contract_allows_overflow_only_where_it_must() -> None:
    y = torch.tensor([[1e6, 2.0]], dtype=torch.float64)
    assert_within_contract(y.half(), y)
    with pytest.raises(AssertionError, match="NaN or infinite"):
        assert_within_contract(torch.tensor([[math.inf, math.inf]]).half(), y)
    with pytest.raises(AssertionError, match="NaN or infinite"):
        assert_within_contract(torch.tensor([[math.nan, 2.0]]).half(), y)
    with pytest.raises(AssertionError, match=r"worst at \(0, 1\)"):  # the others are held to the limit all the same
        assert_within_contract(torch.tensor([[math.inf, 2.5]]).half(), y)


def test_contract_edge_cases() -> None:
    assert_within_contract(torch.empty(0, 4), torch.empty(0, 4, dtype=torch.float64))
    zero = torch.zeros(2, 4, dtype=torch.float64)
    assert_within_contract(zero.half(), zero)
    with pytest.raises(AssertionError, match="is inf times the limit"):
        assert_within_contract(zero.half() + 1, zero)
    with pytest.raises(AssertionError, match="shape"):
        assert_within_contract(zero.half()[:1], zero)
    assert_within_contract(zero.float() + 1e-9, zero, slack=1e-8)


@pytest.mark.parametrize("weight", weights(), ids=lambda weight: weight.format.key)
@pytest.mark.parametrize("dtype", DTYPES)
def test_swapped_nibbles_are_noticed(weight: PackedWeight, dtype: torch.dtype) -> None:
    """By the contract and by one-hot probes, in every format and type; the right weight passes both."""
    swapped = swap_nibbles(weight)
    x = normal(4, 64, seed=3).to(dtype)
    y = reference.linear(x, weight)
    assert_within_contract(y.to(dtype), y)
    with pytest.raises(AssertionError, match="times the limit"):
        assert_within_contract(reference.linear(x, swapped).to(dtype), y)

    def layer(of: PackedWeight):  # type: ignore[no-untyped-def]
        return lambda rows: reference.linear(rows, of).to(dtype)

    right, wrong = one_hot_probe(layer(weight), weight, dtype), one_hot_probe(layer(swapped), weight, dtype)
    assert right == reference.Probe(equal=1.0, worst_ulp=0)
    assert right.within_contract(dtype)
    assert not wrong.within_contract(dtype)
    assert wrong.equal < 0.5


@pytest.mark.parametrize("weight", weights(), ids=lambda weight: weight.format.key)
def test_swapping_twice_restores(weight: PackedWeight) -> None:
    swapped = swap_nibbles(weight)
    assert torch.equal(swap_nibbles(swapped).codes, weight.codes)
    assert torch.equal(swapped.scales(), weight.scales())
    if not isinstance(weight.format.layout, WordLayout):
        assert torch.equal(swapped.unpack()[:, 0::1].sort().values, weight.unpack().sort().values)


def test_swap_of_an_odd_count() -> None:
    weight = quantize(normal(3, 5), "nf4-64")
    assert not torch.equal(swap_nibbles(weight).unpack(), weight.unpack())


def test_probe_sees_one_wrong_weight() -> None:
    weight = quantize(normal(8, 64), "nf4-64")

    def layer(rows: torch.Tensor) -> torch.Tensor:
        values = weight.dequantize().clone()
        values[3, 7] = values[3, 7].nextafter(torch.tensor(math.inf))
        return rows @ values.t()

    probe = one_hot_probe(layer, weight, torch.float32)
    assert probe.worst_ulp == 1
    assert probe.equal == 511 / 512
    assert not probe.within_contract(torch.float32)
    assert probe.within_contract(torch.bfloat16)
    assert one_hot_probe(layer, weight, torch.float32, columns=[6, 8]).worst_ulp == 0
    assert not reference.Probe(equal=0.98, worst_ulp=1).within_contract(torch.float16)
    assert not reference.Probe(equal=0.999, worst_ulp=2).within_contract(torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ulp_distance(dtype: torch.dtype) -> None:
    one = torch.tensor([1.0, -1.0, 0.0, 0.0], dtype=dtype)
    up = one.nextafter(torch.full_like(one, math.inf))
    assert reference.ulp_distance(one, up).tolist() == [1, 1, 1, 1]
    assert reference.ulp_distance(-one, one)[2:].tolist() == [0, 0]
    tiny = torch.tensor([0.0], dtype=dtype).nextafter(torch.tensor([1.0], dtype=dtype))
    assert reference.ulp_distance(tiny, -tiny).tolist() == [2]


def test_relative_error() -> None:
    y = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert reference.relative_error(y + torch.tensor([0.0, 0.5]), y) == pytest.approx(0.1)
    assert reference.relative_error(torch.zeros(2), torch.zeros(2)) == 0
    assert reference.relative_error(torch.ones(2), torch.zeros(2)) == math.inf
    assert math.isnan(reference.relative_error(torch.tensor([math.nan]), torch.ones(1)))
