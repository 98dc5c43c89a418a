"""The kernel on a GPU: the numerics contract, single weights read back, determinism, graphs and streams."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from halfbyte import reference
from halfbyte.formats import PackedWeight, get_format, quantize
from halfbyte.kernels import codebook_mma

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FORMATS = ("nf4", "nf4-64-nested", "nf4-32", "fp4-32-nested", "fp4-128", "nf4-4096-nested", "mxfp4")
SHAPES = ((16, 64), (130, 576), (1000, 1536), (4096, 4096), (300, 2880))
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def packed(key: str, n: int, k: int, seed: int = 0) -> PackedWeight:
    generator = torch.Generator().manual_seed(seed)
    return quantize(torch.randn(n, k, generator=generator), key).to("cuda")


def activations(m: int, k: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=generator)
    x[:, k // 3] *= 100  # as activations of real models have
    return x.to("cuda", dtype)


def apply(x: Tensor, weight: PackedWeight, bias: Tensor | None = None, strict: bool = False) -> Tensor:
    out = torch.full((x.shape[0], weight.shape[0]), float("nan"), dtype=x.dtype, device="cuda")
    codebook_mma.run(x, weight, bias, out, strict)
    return out


@pytest.mark.parametrize(("key", "shape", "dtype"), list(product(FORMATS, SHAPES, DTYPES)), ids=str)
def test_contract(key: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    n, k = shape
    weight = packed(key, n, k)
    for m in (1, 2, 3, 8, 16, 37):
        x = activations(m, k, dtype)
        bias = torch.randn(n, device="cuda").to(dtype) if m % 2 else None
        y = reference.linear(x, weight, bias)
        reference.assert_within_contract(apply(x, weight, bias), y, f"{key} {shape} {dtype} M={m}")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("key", ["nf4", "nf4-64-nested", "fp4-32", "mxfp4"])
def test_single_weights(key: str, dtype: torch.dtype) -> None:
    weight = packed(key, 192, 256)
    columns = list(range(0, 256, 5))
    default = reference.one_hot_probe(lambda x: apply(x, weight), weight, dtype, columns)
    assert default.worst_ulp <= 1
    strict = reference.one_hot_probe(lambda x: apply(x, weight, strict=True), weight, dtype, columns)
    assert strict.within_contract(dtype)
    swapped = reference.swap_nibbles(weight)
    assert not reference.one_hot_probe(lambda x: apply(x, swapped), weight, dtype, columns).within_contract(dtype)


@pytest.mark.parametrize("shape", [(1000, 1536), (4096, 4096), (14336, 4096), (4096, 14336)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_invariant_and_deterministic(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = packed("nf4", *shape)
    x = activations(64, shape[1], dtype)
    alone = torch.cat([apply(x[i : i + 1], weight) for i in range(4)])
    for m in (2, 3, 4, 7, 8, 9, 16, 33, 64):
        for _ in range(3):
            assert torch.equal(apply(x[:m], weight)[:4], alone[:m])


def test_strided_unaligned_and_extreme_inputs() -> None:
    weight = packed("nf4", 256, 512)
    wide = activations(4, 1024, torch.bfloat16)
    y = reference.linear(wide[:, 256:768], weight)
    reference.assert_within_contract(apply(wide[:, 256:768], weight), y, "strided")
    reference.assert_within_contract(apply(wide[:, 3:515], weight), reference.linear(wide[:, 3:515], weight), "odd")
    for scale in (1e-30, 1e-4, 1e30):  # far beyond fp16
        x = (activations(2, 512, torch.float32) * scale).bfloat16()
        reference.assert_within_contract(apply(x, weight), reference.linear(x, weight), f"scale {scale}")
    shifted = torch.empty(weight.codes.numel() + 1, dtype=torch.uint8, device="cuda")[1:]
    view = PackedWeight(weight.format, weight.shape, {**weight.parts, "codes": shifted.copy_(weight.codes)})
    x = activations(2, 512, torch.bfloat16)
    reference.assert_within_contract(apply(x, view), reference.linear(x, weight), "unaligned weight")


def test_graph_replays_with_new_inputs_and_new_weights() -> None:
    weight, x = packed("nf4", 4096, 4096), activations(3, 4096, torch.bfloat16)
    out = torch.empty(3, 4096, dtype=torch.bfloat16, device="cuda")
    codebook_mma.run(x, weight, None, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            codebook_mma.run(x, weight, None, out)
    for seed in (5, 6):
        x.copy_(activations(3, 4096, torch.bfloat16, seed))
        weight.codes.copy_(packed("nf4", 4096, 4096, seed).codes)
        out.fill_(float("nan"))
        graph.replay()
        reference.assert_within_contract(out, reference.linear(x, weight), f"replay {seed}")


def test_two_streams() -> None:
    weights = [packed("nf4", 4096, 4096, seed) for seed in (1, 2)]
    xs = [activations(2, 4096, torch.bfloat16, seed) for seed in (1, 2)]
    expected = [apply(x, weight) for x, weight in zip(xs, weights, strict=True)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    outs: list[list[Tensor]] = [[], []]
    for _ in range(20):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                outs[i].append(apply(xs[i], weights[i]))
    torch.cuda.synchronize()
    for i in range(2):
        assert all(torch.equal(out, expected[i]) for out in outs[i])


def test_fuzz() -> None:
    """Random problems with small whole numbers, where every sum is exact, and the line that reproduces a failure."""
    generator = torch.Generator().manual_seed(20261129)

    def pick(*choices: int) -> int:
        return choices[int(torch.randint(len(choices), (1,), generator=generator))]

    form = get_format("mxfp4")
    for number in range(300):
        n, k, m = pick(1, 7, 16, 100, 513), 64 * pick(1, 2, 3, 5, 9, 17, 33), pick(1, 2, 3, 5, 8, 9, 16, 20)
        seed = number
        torch.manual_seed(seed)
        parts = {
            "codes": torch.randint(0, 256, (n * k // 2,), dtype=torch.uint8, device="cuda"),
            "scales": torch.randint(126, 129, (n, k // 32), dtype=torch.uint8, device="cuda"),
        }
        weight = PackedWeight(form, (n, k), parts)
        x = torch.randint(-3, 4, (m, k), device="cuda").float()
        expected = reference.linear(x, weight).float()
        assert torch.equal(apply(x, weight), expected), f"fuzz mxfp4 N={n} K={k} M={m} seed={seed}"
