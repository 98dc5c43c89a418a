"""codebook_gemv on a GPU: the numerics contract for every format, single weights, invariance, odd views, graphs."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from torch import Tensor

from halfbyte import reference
from halfbyte.device import arch_of
from halfbyte.formats import PackedWeight
from halfbyte.kernels import codebook_gemv, nvrtc
from halfbyte.kernels.codebook_gemv import Config

sys.path.insert(0, str(Path(__file__).parents[1]))
from gemv_on_cpu import moved
from kernel_samples import KEYS, multiples, random_weight, seeded, slack, strided

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
ROUNDS = ((1, BF16), (8, FP16), (19, FP32))
LARGE = ("nf4-64", "nf4-64-nested", "q4_k", "gptq-128", "awq-128")
INVARIANT = ("nf4-64-nested", "q4_0", "q4_k", "nvfp4", "gptq_v2-40", "awq-32")
BYTES = ("nf4-64", "q4_0", "q4_1", "q4_k", "mxfp4", "mxfp4_gguf", "nvfp4", "gptq-32", "awq-32")


def shapes(key: str) -> tuple[tuple[int, int], ...]:
    """One tile and less; many rounds of the ring, with odd ends where the format has them."""
    rows, columns = multiples(key)
    if rows > 1:
        return (8, columns), (200, 5120 // columns * columns)
    if columns > 1:
        return (3, columns), (77, 4352 // columns * columns)
    return (5, 77), (77, 4352), (77, 4333)


def configs(arch: str) -> Iterator[Config]:
    """Those of most calls below."""
    for key in KEYS:
        for n, k in shapes(key):
            weight = moved(random_weight(key, n, k, seeded(0)), 0)
            for m, dtype in (*ROUNDS, (3, FP32)):
                yield codebook_gemv.configure(weight, dtype, min(m, 8), arch)
    for key in LARGE:
        weight = moved(random_weight(key, 17024, 4096, seeded(2)), 0)
        for m in (1, 8):
            yield codebook_gemv.configure(weight, BF16, m, arch)
    for key in INVARIANT:
        weight = moved(random_weight(key, *invariant_shape(key), seeded(7)), 0)
        for m in (1, 2, 4, 8):
            for dtype in (BF16, FP32):
                yield codebook_gemv.configure(weight, dtype, m, arch)
    for key in BYTES:
        for by in steps(key):
            weight = moved(random_weight(key, *shapes(key)[1], seeded(9)), by)
            yield codebook_gemv.configure(weight, BF16, 2, arch)


def compile_one(arguments: tuple[str, Config]) -> None:
    nvrtc.compile(codebook_gemv.STEM, arguments[0], asdict(arguments[1]))


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """All cores compile what one would take minutes for."""
    arch = arch_of(torch.device("cuda"))
    wanted = [(arch, config) for config in dict.fromkeys(configs(arch))]
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        list(pool.map(compile_one, wanted, chunksize=2))


def invariant_shape(key: str) -> tuple[int, int]:
    return 1024, 4608 if key == "q4_k" else 4480


def steps(key: str) -> tuple[int, ...]:
    """By how many bytes the codes are moved."""
    return (4, 8) if key.startswith(("gptq", "awq")) else (1, 2, 4, 8)


def apply(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    out = torch.full((x.shape[0], weight.shape[0]), torch.nan, dtype=x.dtype, device="cuda")
    codebook_gemv.run(x, weight, bias, out)
    return out


def check(x: Tensor, weight: PackedWeight, bias: Tensor | None = None, label: str = "") -> None:
    y = reference.linear(x, weight, bias)
    allowed = slack(x, weight.dequantize(torch.float64))
    reference.assert_within_contract(apply(x, weight, bias), y, f"{weight.format.key} {weight.shape} {label}", allowed)


@pytest.mark.parametrize("key", KEYS)
def test_contract(key: str) -> None:
    for n, k in shapes(key):
        weight = random_weight(key, n, k, seeded(0)).to("cuda")
        for m, dtype in ROUNDS:
            x = torch.randn(m, k, generator=seeded(m)).to("cuda", dtype)
            bias = None if m == 8 else torch.randn(n, generator=seeded(1)).to("cuda", FP32 if m == 1 else dtype)
            check(x, weight, bias, f"M={m} {dtype}")


@pytest.mark.parametrize("key", LARGE)
def test_large_layers(key: str) -> None:
    weight = random_weight(key, 17024, 4096, seeded(2)).to("cuda")
    for m in (1, 8):
        x = torch.randn(m, 4096, generator=seeded(3)).to("cuda", BF16)
        reference.assert_within_contract(apply(x, weight), reference.linear(x, weight), f"{key} M={m}")


@pytest.mark.parametrize("key", KEYS)
def test_single_weights(key: str) -> None:
    n, k = shapes(key)[0]
    weight = random_weight(key, n, k, seeded(4)).to("cuda")
    columns = random.Random(key).sample(range(k), min(24, k))
    for dtype in (FP16, FP32):
        probe = reference.one_hot_probe(lambda x: apply(x, weight), weight, dtype, columns)
        assert probe.within_contract(dtype), f"{dtype}: {probe}"
    swapped = reference.swap_nibbles(weight)
    probe = reference.one_hot_probe(lambda x: apply(x, swapped), weight, FP32, columns)
    assert not probe.within_contract(FP32)


@pytest.mark.parametrize("key", KEYS)
def test_exact_where_sums_are_exact(key: str) -> None:
    n, k = shapes(key)[-1]
    weight = random_weight(key, n, k, seeded(5), exact=True).to("cuda")
    x = torch.randint(-2, 3, (7, k), generator=seeded(6)).float().to("cuda")
    assert torch.equal(apply(x, weight), reference.linear(x, weight).float())


@pytest.mark.parametrize("key", INVARIANT)
def test_invariant_and_deterministic(key: str) -> None:
    n, k = invariant_shape(key)
    weight = random_weight(key, n, k, seeded(7)).to("cuda")
    for dtype in (BF16, FP32):
        x = torch.randn(64, k, generator=seeded(8)).to("cuda", dtype)
        alone = torch.cat([apply(x[i : i + 1], weight) for i in range(4)])
        for m in (2, 3, 4, 7, 8, 9, 64):
            for _ in range(3):
                assert torch.equal(apply(x[:m], weight)[:4], alone[:m])


@pytest.mark.parametrize("key", BYTES)
def test_weights_at_any_address(key: str) -> None:
    n, k = shapes(key)[1]
    weight = random_weight(key, n, k, seeded(9)).to("cuda")
    codes = weight.codes
    size = codes.numel() * codes.element_size()
    for by in steps(key):
        view = torch.empty(size + by, dtype=torch.uint8, device="cuda")[by:].view(codes.dtype).view(codes.shape)
        view.copy_(codes)
        moved = PackedWeight(weight.format, weight.shape, {**weight.parts, weight.format.layout.part: view})
        check(torch.randn(2, k, generator=seeded(by)).to("cuda", BF16), moved, label=f"by {by}")


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32])
def test_x_with_any_stride_and_address(dtype: torch.dtype) -> None:
    weight = random_weight("nf4-64", 65, 2302, seeded(10)).to("cuda")
    wide = strided(5, 2302, dtype, seeded(11))
    buffer = torch.full((5, 2307), torch.nan, dtype=dtype, device="cuda")
    buffer[:, 3:2305] = wide.to("cuda")
    check(buffer[:, 3:2305], weight)
    check(torch.randn(1, 2302, generator=seeded(12)).to("cuda", dtype).expand(3, -1), weight)


def test_numbers_beyond_fp16() -> None:
    weight = random_weight("iq4_nl", 64, 1024, seeded(13)).to("cuda")
    for scale in (1e-30, 1e30, 1e36):
        check((torch.randn(2, 1024, generator=seeded(14)) * scale).to("cuda", BF16), weight)


def test_graph_replays_with_new_inputs_and_new_weights() -> None:
    weight = random_weight("q4_0", 512, 2048, seeded(15)).to("cuda")
    x = torch.randn(3, 2048, generator=seeded(16)).to("cuda", BF16)
    out = apply(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            codebook_gemv.run(x, weight, None, out)
    for seed in (17, 18):
        x.copy_(torch.randn(3, 2048, generator=seeded(seed)))
        weight.codes.copy_(random_weight("q4_0", 512, 2048, seeded(seed)).codes)
        out.fill_(torch.nan)
        graph.replay()
        reference.assert_within_contract(out, reference.linear(x, weight), f"replay {seed}")


def test_the_device_is_one_that_the_kernel_declares() -> None:
    assert arch_of(torch.device("cuda")) in codebook_gemv.ARCHITECTURES
