"""Adapters on a GPU: the contract, the base's bits, and a CUDA graph replayed with another mix and other adapters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import halfbyte
from halfbyte import reference
from halfbyte.adapters import Adapter, AdapterPool, linear_with_adapters, pack, shrink
from halfbyte.counters import counts
from halfbyte.device import arch_of
from halfbyte.formats import quantize
from halfbyte.kernels import Problem
from halfbyte.plan import plan

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


def misaligned(tensor: Tensor) -> Tensor:
    """The same numbers at an address that no 16-byte load can take."""
    memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    view = memory[1:].view(tensor.shape)
    view.copy_(tensor)
    return view


@pytest.mark.parametrize("m", [1, 5, 8, 9, 16, 17, 33, 64, 65, 200])
@pytest.mark.parametrize(
    ("dtype", "a_dtype"), [(torch.bfloat16,) * 2, (torch.float16,) * 2, (torch.bfloat16, torch.float32)]
)
def test_shrink_alone(dtype, a_dtype, m):
    """fp32 sums of exact products; zeros where there is no adapter; bits that neither rows nor addresses change."""
    for k in (64, 1536, 32768):
        generator = seeded(k)
        ranks = (16, 3, 40, 1, 256)
        listed = [
            Adapter(
                (torch.randn(r, k, generator=generator) / k**0.5).to("cuda", a_dtype),
                torch.zeros(8, r, device="cuda", dtype=a_dtype),
            )
            for r in ranks
        ]
        x = torch.randn(m, k, generator=generator).to("cuda", dtype)
        index = torch.randint(-1, len(ranks) + 1, (m,), generator=generator).to(
            "cuda", torch.int32
        )  # one too many: none
        packed = pack(listed, 8, k)
        h = shrink(x, packed, index)
        assert h.shape == (m, 256)
        for row, slot in enumerate(index.tolist()):
            rank = ranks[slot] if 0 <= slot < len(ranks) else 0
            assert not h[row, rank:].any()
            if rank:
                exact = listed[slot].a.double() @ x[row].double()
                terms = listed[slot].a.double().abs() @ x[row].double().abs()
                assert ((h[row, :rank].double() - exact).abs() <= 2e-6 * terms).all(), (k, row, rank)
        order = torch.randperm(m, generator=seeded(3)).to("cuda")
        assert torch.equal(shrink(x[order], packed, index[order]), h[order])
        alone = torch.full_like(index, 2)
        assert torch.equal(shrink(x, listed_set(listed[2], k)), shrink(x, packed, alone)[:, :40])
        assert torch.equal(shrink(misaligned(x), packed, index), h), "16-byte loads or not"
        assert torch.equal(shrink(x[:1], packed, index[:1]), h[:1]), "however many rows there are"
        if m > 1:
            wide = torch.zeros(m, k + 24, dtype=dtype, device="cuda")
            wide[:, :k] = x
            assert torch.equal(shrink(wide[:, :k], packed, index), h), "rows with a stride"


def listed_set(adapter: Adapter, k: int):
    return pack([adapter], adapter.b.shape[0], k)


@pytest.mark.skipif(
    not torch.cuda.is_available() or arch_of(torch.device("cuda")) != "sm_90a", reason="needs an H100 or H200"
)
@pytest.mark.parametrize("m", [1, 8, 9, 32, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_kernels_fold_them(dtype, m):
    """One pass, as the counters say; the same bits from a list, a pool, at any address, and for one adapter alone."""
    n = 4096  # so that fp16 x is served by codebook_wgmma, too
    weight = quantize(torch.randn(n, K, generator=seeded(0)), "nf4-64").to("cuda")
    generator = seeded(m)
    listed = [
        Adapter(
            (torch.randn(r, K, generator=generator) / K**0.5).to("cuda", dtype),
            (torch.randn(n, r, generator=generator) * 0.5).to("cuda", dtype),
            0.5 + r,
        )
        for r in (16, 7, 64)
    ]
    pool = AdapterPool(K, n, slots=8, ranks=256, max_rank=64, dtype=dtype, device="cuda")
    slots = torch.tensor([pool.add(each) for each in listed])
    x = torch.randn(m, K, generator=generator).to("cuda", dtype)
    index = torch.randint(-1, 3, (m,), generator=generator)
    counts.reset()
    out = linear_with_adapters(x, weight, None, listed, index.to("cuda"))
    (label,) = counts.totals()[0]["linear_adapters"]
    planned = plan(Problem(weight.format, dtype, m, n, K, "sm_90a")).kernel.name
    assert label == planned
    assert planned in ("codebook_mma", "codebook_wgmma")
    reference.assert_within_contract(out, reference.linear(x, weight, None, listed, index))
    in_pool = torch.where(index < 0, -1, slots[index.clamp(0)]).to("cuda")
    assert torch.equal(linear_with_adapters(x, weight, None, pool, in_pool), out), "padded ranks, other places"
    moved = [Adapter(misaligned(each.a), misaligned(each.b), each.scaling) for each in listed]
    assert torch.equal(linear_with_adapters(x, weight, None, moved, index.to("cuda")), out), "number by number"
    for slot, each in enumerate(listed):
        mine = (index == slot).to("cuda")
        assert torch.equal(linear_with_adapters(x, weight, None, each)[mine], out[mine])
        assert torch.equal(
            linear_with_adapters(x, weight, None, [Adapter(misaligned(each.a), misaligned(each.b), each.scaling)])[
                mine
            ],
            out[mine],
        )
    for row in range(m):
        assert torch.equal(
            linear_with_adapters(x[row : row + 1], weight, None, listed, index[row : row + 1].to("cuda")),
            out[row : row + 1],
        )


def test_many_adapters_over_many_rows():
    """Each row another of 64, more rows than one launch of shrink compares."""
    pool = AdapterPool.random(K, {"q": N, "v": 512}, [16] * 64, dtype=torch.bfloat16, device="cuda")
    weights = {"q": weight_of(), "v": quantize(torch.randn(512, K, generator=seeded(1)), "nf4-64").to("cuda")}
    for m in (64, 150):
        x = torch.randn(m, K, generator=seeded(m)).to("cuda", torch.bfloat16)
        index = torch.randperm(m, generator=seeded(2)).to("cuda") % 64
        h = shrink(x, pool, index)
        for name, weight in weights.items():
            layer = pool.layer(name)
            out = linear_with_adapters(x, weight, None, layer, index, shrunk=h)
            assert torch.equal(out, linear_with_adapters(x, weight, None, layer, index)), "shrunk here or before"
            listed = []
            for slot in range(64):
                column, rank, first, stride = layer.table[slot].tolist()
                start = int(layer.spans[slot, 0]) + column
                n = layer.out_features
                b = layer.b[first * n : (first + stride) * n].view(n, stride)[:, :rank]
                listed.append(Adapter(layer.a[start : start + rank], b, float(layer.scalings[slot])))
            reference.assert_within_contract(out, reference.linear(x, weight, None, listed, index), f"{name} M={m}")


@pytest.mark.parametrize("m", [1, 3, 8, 16, 40])
def test_graphs_on_two_streams_wait_for_their_rows(m):
    """Layers behind each other, the first behind a slow kernel: none may read the rows of the replay before."""
    size, replays = 1024, 40
    weight = quantize(torch.randn(size, size, generator=seeded(0)) / size**0.5, "nf4-64").to("cuda")
    pool = AdapterPool.random(size, size, [16, 16, 64, 16], dtype=torch.bfloat16, device="cuda")
    index = (torch.arange(m) % 5 - 1).to("cuda", torch.int32)

    def layers(x: Tensor) -> Tensor:
        for _ in range(4):
            x = linear_with_adapters(x, weight, None, pool.layer(), index)
        return x

    rows = torch.randn(2, replays, m, size, generator=seeded(m)).to("cuda", torch.bfloat16)
    wanted = [[layers(x).clone() for x in each] for each in rows]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    sources, outs, graphs = [], [], []
    for stream in streams:
        source = torch.zeros(m, size, dtype=torch.bfloat16, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(graph, stream=stream):
            torch.cuda._sleep(20_000)
            out = layers(source * 1)
        sources.append(source), outs.append(out), graphs.append(graph)
    found = torch.empty_like(rows)
    for replay in range(replays):
        for number, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                sources[number].copy_(rows[number, replay])
                graphs[number].replay()
                found[number, replay].copy_(outs[number])
    torch.cuda.synchronize()
    for number in range(2):
        for replay in range(replays):
            assert torch.equal(found[number, replay], wanted[number][replay]), (number, replay)
