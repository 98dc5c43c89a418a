"""The numerics contract (DESIGN.md, section 2) for every CUDA kernel and every format that it serves."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from walk import ALL, ARCH, DEVICE, DTYPES, KERNELS, activations, apply, fitting, rows_of, serves, some, weight_of

import halfbyte
from halfbyte import reference
from halfbyte.formats import PackedWeight, get_format
from halfbyte.kernels import Kernel, Problem
from halfbyte.plan import plan
from kernel_fuzz import keys_of, takes_strict

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
# Few pairs of dtype and M each: all may be kernels of their own, which take a second or two to compile.
PAIRS = {
    (130, 576): ((BF16, 1), (FP16, 8), (BF16, 16), (FP32, 3), (FP16, 130), (BF16, 150)),
    (4096, 4096): ((FP16, 1), (BF16, 8), (FP16, 37), (FP32, 1), (BF16, 300)),
}
LONG = {(1000, 1536): BF16, (4096, 4096): FP16, (512, 14336): FP32}
PROBES = ((BF16, 1, 8), (FP16, 8), (FP32, 1))
SEEN_ON = "sm_90a"


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_serves_some_formats_here(name: str) -> None:
    if not keys_of(KERNELS[name], ARCH) and ARCH != SEEN_ON:
        pytest.skip(f"{name} serves nothing on {ARCH}")
    assert keys_of(KERNELS[name], ARCH)


@pytest.mark.parametrize("shape", PAIRS, ids=str)
@pytest.mark.parametrize(("name", "key"), ALL)
def test_error(name: str, key: str, shape: tuple[int, int]) -> None:
    kernel, (n, k) = KERNELS[name], fitting(key, *shape)
    weight = weight_of(key, n, k)
    dense = weight.dequantize(torch.float64).t()
    pairs = [(dtype, m) for dtype, m in PAIRS[shape] if serves(kernel, key, dtype, m, n, k)]
    assert pairs
    for number, (dtype, m) in enumerate(pairs):
        x = activations(m, k, dtype)
        bias = torch.randn(n, device=DEVICE).to(dtype) if number % 2 else None
        y = x.double() @ dense + (0 if bias is None else bias.double())
        for strict in (False, True)[: 1 + (takes_strict(kernel) and number < 2)]:
            label = f"{name} {key} {n} × {k} {dtype} M={m} strict={strict}"
            reference.assert_within_contract(apply(kernel, x, weight, bias, strict), y, label)


@pytest.mark.parametrize(("name", "key"), ALL)
def test_single_weights(name: str, key: str) -> None:
    """Weights read back one by one: nothing off by more than one, and in strict mode 99 % equal."""
    kernel, (n, k) = KERNELS[name], fitting(key, 192, 256)
    weight = weight_of(key, n, k)
    swapped = reference.swap_nibbles(weight)
    columns = list(range(0, k, max(1, k // 50)))
    probes = [(dtype, m) for dtype, *ms in PROBES for m in rows_of(kernel, key, dtype, n, k, *ms)]
    assert probes
    for dtype, m in probes:
        for strict in (False, True)[: 1 + takes_strict(kernel)]:
            layer = partial(in_chunks, kernel, m, strict)
            probe = reference.one_hot_probe(lambda x: layer(x, weight), weight, dtype, columns)  # noqa: B023
            wrong = reference.one_hot_probe(lambda x: layer(x, swapped), weight, dtype, columns)  # noqa: B023
            label = f"{name} {key} {dtype} M={m} strict={strict}: {probe}"
            if dtype == torch.float32:  # a table of 21 bits or more: not to the bit
                assert probe.worst_ulp <= 8 or weight.format.offset is not None, label  # where a difference may cancel
            elif strict:
                assert probe.within_contract(dtype), label
            else:
                assert probe.worst_ulp <= 1, label
            assert wrong.worst_ulp > 16, f"{label}: swapped nibbles are not noticed: {wrong}"


def in_chunks(kernel: Kernel, m: int, strict: bool, x: Tensor, weight: PackedWeight) -> Tensor:
    """The kernel's answer, `m` rows at a time; the last are filled up with zeros."""
    filled = torch.nn.functional.pad(x, (0, 0, 0, -len(x) % m))
    return torch.cat([apply(kernel, rows, weight, strict=strict) for rows in filled.split(m)])[: len(x)]


@pytest.mark.parametrize("exponent", [-100, -60, -14, 60, 100])
@pytest.mark.parametrize(("name", "key"), [case for case in ALL if case[1] in ("nf4-64", "mxfp4", "q4_0", "q4_1")])
def test_extreme_activations(name: str, key: str, exponent: int) -> None:
    """bf16 and fp32 far beyond fp16's range neither overflow nor vanish; fp16 only where the exact result does."""
    kernel, (n, k) = KERNELS[name], fitting(key, 256, 512)
    weight = weight_of(key, n, k)
    for dtype in DTYPES:
        scale = 2.0 ** (10 if exponent > 0 else -12) if dtype == torch.float16 else 2.0**exponent
        rows = rows_of(kernel, key, dtype, n, k, 1, 4)
        x = (activations(max(rows, default=1), k, torch.float32) * scale).to(dtype)
        x = torch.where(torch.isfinite(x), x, 0)
        for m in rows:
            y = reference.linear(x[:m], weight)
            reference.assert_within_contract(apply(kernel, x[:m], weight), y, f"{name} {key} {dtype} 2^{exponent}")


@pytest.mark.parametrize("shape", LONG, ids=str)
@pytest.mark.parametrize(("name", "key"), some(4))
def test_rows_are_batch_invariant(name: str, key: str, shape: tuple[int, int]) -> None:
    """A row has the same bits run after run, alone, inside any batch, and wherever in the batch it is.

    A kernel for many rows is asked for the fewest that it takes instead of one.
    """
    kernel, (n, k) = KERNELS[name], fitting(key, *shape)
    weight = weight_of(key, n, k)
    dtype, limit = LONG[shape], min(kernel.batch_invariant_to, 64)
    ms = [m for m in (1, 2, 3, 4, 7, 8, 9, 16, 33, 64) if m <= limit and serves(kernel, key, dtype, m, n, k)]
    if not ms:
        pytest.skip(f"{name} does not take {dtype} in {key}")
    fewest, rows = ms[0], ms[-1]
    for strict in (False, True)[: 1 + takes_strict(kernel)]:
        x = activations(rows, k, dtype)
        x[-1] *= 1000 if dtype != torch.float16 else 1  # what one row holds is no matter to the others
        alone = torch.cat([apply(kernel, x.roll(-i, 0)[:fewest], weight, strict=strict)[:1] for i in range(rows)])
        for _ in range(10):
            assert torch.equal(apply(kernel, x[:fewest], weight, strict=strict), alone[:fewest]), f"M={fewest} again"
        for m in ms[1:]:
            for turn in (0, 1, m - 1):
                out = apply(kernel, x[:m].roll(turn, 0), weight, strict=strict)
                assert torch.equal(out, alone[:m].roll(turn, 0)), f"M={m} rolled by {turn} strict={strict}"
            again = [apply(kernel, x[:m], weight, strict=strict) for _ in range(5)]
            assert all(torch.equal(out, alone[:m]) for out in again), f"M={m} again"


# (24600, 1088) goes from one kernel to the next between M = 8 and 16, (4096, 4096) later
ACROSS = {(24600, 1088): BF16, (4096, 4096): FP16, (1040, 1536): BF16}


@pytest.mark.parametrize("shape", ACROSS, ids=str)
@pytest.mark.parametrize("key", ["nf4-64", "nf4-32", "nf4-64-nested", "fp4-4096", "mxfp4", "q4_0"])
def test_rows_are_batch_invariant_across_kernels(key: str, shape: tuple[int, int]) -> None:
    """Through the operator, which takes another kernel for more rows: a row alone has its bits among up to 64."""
    (n, k), dtype = fitting(key, *shape), ACROSS[shape]
    ms = [m for m in (1, 8, 9, 16, 33, 64) if DEVICE.type == "cuda" or invariant_here(key, dtype, m, n, k)]
    assert len(ms) > 1
    weight, bias = weight_of(key, n, k), torch.randn(n, device=DEVICE)
    x = activations(ms[-1], k, dtype)
    x[1::5] *= 2.0**-20 if dtype == torch.bfloat16 else 2.0**-6  # rows and units whose power of two is another
    x[2::5, : k // 2] = 0
    alone = torch.cat([halfbyte.linear(row, weight, bias) for row in x.split(1)])
    for m in ms:
        for turn in (0, m // 2, 1):
            out = halfbyte.linear(x[:m].roll(turn, 0), weight, bias)
            assert torch.equal(out, alone[:m].roll(turn, 0)), f"{key} {n} × {k} {dtype} M={m} rolled by {turn}"


def invariant_here(key: str, dtype: torch.dtype, m: int, n: int, k: int) -> bool:
    """Whether the kernel that one row of x goes to promises the same bits for m."""
    first, kernel = (plan(Problem(get_format(key), dtype, each, n, k, ARCH)).kernel for each in (1, m))
    return first is kernel and m <= kernel.batch_invariant_to


@pytest.mark.skipif(DEVICE.type != "cuda", reason="takes a GPU's memory")
@pytest.mark.parametrize(("name", "key"), some(3))
def test_more_weights_than_32_bits_count(name: str, key: str) -> None:
    """A matrix of which each row is repeated 33 times, at a distance that is no power of two."""
    kernel, (n, k), times = KERNELS[name], fitting(key, 4160, 32768), 33
    base = weight_of(key, n, k)
    wanted = base.format.parts(times * n, k)
    repeats = {
        name: [large // small for large, small in zip(wanted[name].shape, part.shape, strict=True)]
        for name, part in base.parts.items()
    }
    parts = {name: part.repeat(repeats[name]) if part.dim() else part for name, part in base.parts.items()}
    weight = PackedWeight(base.format, (times * n, k), parts)
    assert times * n * k > 2**32
    for m in rows_of(kernel, key, torch.bfloat16, times * n, k, 1, 8):
        x = activations(m, k, torch.bfloat16)
        y = reference.linear(x, base).repeat(1, times)
        reference.assert_within_contract(apply(kernel, x, weight), y, f"{name} {key} M={m}")
