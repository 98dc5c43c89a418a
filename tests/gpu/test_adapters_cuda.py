"""Adapters on a GPU: the contract, the base's bits, and a CUDA graph replayed with another mix and other adapters."""

from __future__ import annotations

import pytest
import torch

import halfbyte
from halfbyte import reference
from halfbyte.adapters import Adapter, AdapterPool, linear_with_adapters, shrink
from halfbyte.formats import quantize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
N, K, SLOTS = 1024, 1536, 6
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def weight_of(key: str = "nf4-64"):
    return quantize(torch.randn(N, K, generator=seeded(0)), key).to("cuda")


def make(rank: int, seed: int, dtype: torch.dtype) -> Adapter:
    generator = seeded(seed)
    a, b = torch.randn(rank, K, generator=generator) / K**0.5, torch.randn(N, rank, generator=generator) * 0.5
    return Adapter(a.to("cuda", dtype), b.to("cuda", dtype), (K / rank) ** 0.5)


@pytest.mark.parametrize("a_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_mix(dtype, a_dtype):
    listed = [make(rank, rank, a_dtype) for rank in (16, 1, 64, 256, 7)]
    bias = torch.randn(N, generator=seeded(1)).to("cuda", dtype)
    for key in ("nf4-64", "nf4-64-nested", "q4_1"):
        weight = weight_of(key)
        for m in (1, 2, 16, 33, 64, 200):
            x = torch.randn(m, K, generator=seeded(m)).to("cuda", dtype)
            index = torch.randint(-1, len(listed), (m,), generator=seeded(m)).to("cuda")
            out = linear_with_adapters(x, weight, bias, listed, index)
            y = reference.linear(x, weight, bias, listed, index)
            reference.assert_within_contract(out, y, f"{key} {dtype} {a_dtype} M={m}")
            plain = halfbyte.linear(x, weight, bias)
            assert torch.equal(out[index < 0], plain[index < 0])
            assert torch.equal(linear_with_adapters(x, weight, bias, listed, torch.full_like(index, -1)), plain)
            if m > 64:  # a row's bits may depend on their number then
                continue
            order = torch.randperm(m, generator=seeded(2)).to("cuda")
            assert torch.equal(linear_with_adapters(x[order], weight, bias, listed, index[order]), out[order])
            others = torch.where(torch.arange(m, device="cuda") == m // 2, index, (index + 2) % len(listed))
            mixed = linear_with_adapters(x, weight, bias, listed, others)
            assert torch.equal(mixed[m // 2], out[m // 2])


@pytest.mark.parametrize("m", [1, 16, 64])
def test_a_graph_is_replayed_with_another_mix(m):
    """The index, scales, and the adapters themselves change between replays; nothing is captured again."""
    weight = weight_of()
    pool = AdapterPool(K, {"q": N}, slots=SLOTS, ranks=256, max_rank=64, dtype=torch.bfloat16, device="cuda")
    held = {}
    for seed, rank in enumerate((16, 64, 3)):
        adapter = make(rank, seed, torch.bfloat16)
        held[pool.add({"q": adapter})] = adapter
    layer = pool.layer("q")
    x = torch.randn(m, K, generator=seeded(1)).to("cuda", torch.bfloat16)
    index = torch.full((m,), -1, dtype=torch.int32, device="cuda")

    def run():
        return linear_with_adapters(x, weight, None, layer, index, shrunk=shrink(x, pool, index))

    stream = torch.cuda.Stream()
    with torch.inference_mode(), torch.cuda.stream(stream):
        run()  # compiles
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = run()

        def check(label):
            index.copy_(torch.randint(-1, SLOTS, (m,), generator=seeded(len(label))))
            graph.replay()
            nothing = Adapter(torch.zeros(1, K, device="cuda"), torch.zeros(N, 1, device="cuda"))
            listed = [held.get(slot, nothing) for slot in range(SLOTS)]
            reference.assert_within_contract(out, reference.linear(x, weight, None, listed, index), label)
            assert torch.equal(out, run()), label

        check("as captured")
        pool.replace(1, make(48, 9, torch.bfloat16))
        held[1] = make(48, 9, torch.bfloat16)
        check("one replaced by another rank")
        pool.remove(0)
        del held[0]
        check("one removed")
        for seed in (10, 11, 12):
            held[pool.add({"q": make(60, seed, torch.bfloat16)})] = make(60, seed, torch.bfloat16)
        check("three added, which closes the memory up")
        pool.set_scaling(2, -0.5)
        held[2] = Adapter(held[2].a, held[2].b, -0.5)
        check("another scale")
