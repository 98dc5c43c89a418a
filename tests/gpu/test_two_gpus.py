"""Work on the second GPU while the first one is current, and on both at once: the first's bits, its settings untouched.

A kernel is loaded, and its configuration for a call remembered, for each device; what one has must never be launched on
the other. Both are GPUs of one kind, so every answer has the same bits.
"""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor
from walk import DEVICE, activations, weight_of

import halfbyte
from halfbyte import reference
from halfbyte.adapters import Adapter, AdapterPool, linear_with_adapters, shrink
from halfbyte.formats import PackedWeight

FIRST, SECOND = torch.device("cuda:0"), torch.device("cuda:1")
BF16 = torch.bfloat16
N, K, RANK = 1024, 1536, 16
ROWS = (1, 3, 8, 16, 64, 130, 600)
pytestmark = [
    pytest.mark.skipif(DEVICE.type != "cuda", reason="about CUDA"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def adapters(device: torch.device) -> list[Adapter]:
    generator = torch.Generator().manual_seed(0)
    return [
        Adapter(
            (torch.randn(RANK, K, generator=generator) / K**0.5).to(device, BF16),
            torch.randn(N, RANK, generator=generator).to(device, BF16),
            0.5,
        )
        for _ in range(3)
    ]


def slots(m: int) -> Tensor:
    """Each row's adapter, -1 for none."""
    return (torch.arange(m) % 4 - 1).to(torch.int32)


@pytest.mark.parametrize("m", ROWS)
def test_adapters_on_the_second(m: int) -> None:
    weight, x, index = weight_of("nf4-64", N, K), activations(m, K, BF16), slots(m)
    wanted = linear_with_adapters(x, weight, None, adapters(FIRST), index.to(FIRST))
    y = reference.linear(x, weight, None, adapters(FIRST), index.to(FIRST))
    reference.assert_within_contract(wanted, y, f"M={m} on the first")
    there, x_there, listed = weight.to(SECOND), x.to(SECOND), adapters(SECOND)
    assert torch.cuda.current_device() == 0
    out = linear_with_adapters(x_there, there, None, listed, index.to(SECOND))
    assert out.device == SECOND
    assert torch.equal(out.cpu(), wanted.cpu())
    again = linear_with_adapters(x, weight, None, adapters(FIRST), index.to(FIRST))
    assert torch.equal(again, wanted)
    assert torch.cuda.current_device() == 0


def test_a_pool_on_the_second_in_a_graph_with_another_mix() -> None:
    m = 16
    weight, x = weight_of("nf4-64", N, K).to(SECOND), activations(m, K, BF16).to(SECOND)
    pool = AdapterPool(K, {"layer": N}, slots=3, ranks=3 * RANK, max_rank=RANK, dtype=BF16, device=SECOND)
    placed = torch.tensor([pool.add({"layer": adapter}) for adapter in adapters(SECOND)], dtype=torch.int32)
    index = torch.full((m,), -1, dtype=torch.int32, device=SECOND)

    def call() -> Tensor:
        return linear_with_adapters(x, weight, None, pool.layer("layer"), index, shrunk=shrink(x, pool, index))

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(SECOND), torch.cuda.graph(graph):
        out = call()
    for turn in range(3):
        chosen = slots(m).roll(turn)
        index.copy_(torch.where(chosen < 0, chosen, placed[chosen.clamp(min=0).long()]))
        out.fill_(torch.nan)
        graph.replay()
        y = reference.linear(x, weight, None, adapters(SECOND), chosen.to(SECOND))
        reference.assert_within_contract(out, y, f"turn {turn}")
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("m", ROWS)
def test_bitsandbytes_layers_on_both(m: int) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    from halfbyte.integrations import bitsandbytes as switch

    dense = torch.randn(N, K, generator=torch.Generator().manual_seed(0)) * 0.02
    x = activations(m, K, BF16)
    layers = []
    for device in (FIRST, SECOND):
        layer = bnb.nn.Linear4bit(K, N, bias=False, compute_dtype=BF16, compress_statistics=True, quant_type="nf4")
        layer.weight.data.copy_(dense)
        layers.append(layer.to(device).eval())
    with torch.no_grad(), switch.enabled():
        switch.reset_counters()
        here, there, *again = (layer(x.to(layer.weight.device)) for layer in layers * 2)
        served = switch.status()
    assert all(torch.equal(one, other) for one, other in zip((here, there), again, strict=True))
    assert torch.equal(here.cpu(), there.cpu())
    assert (here.device, there.device) == (FIRST, SECOND)
    if m <= 64:
        assert (served.hits, served.misses) == (4, 0)
    assert torch.cuda.current_device() == 0


def test_two_threads_a_gpu_each() -> None:
    """Calls that are known, from two threads that never wait for each other."""
    weights: list[PackedWeight] = [weight_of("nf4-64", N, K).to(device) for device in (FIRST, SECOND)]
    xs = {m: activations(m, K, BF16) for m in (1, 16)}
    wanted = {m: halfbyte.linear(x, weights[0]).cpu() for m, x in xs.items()}
    wrong: list[str] = []
    start = threading.Barrier(2)

    def work(which: int, device: torch.device) -> None:
        inputs = {m: x.to(device) for m, x in xs.items()}
        start.wait()
        for turn in range(100):
            for m, x in inputs.items():
                out = halfbyte.linear(x, weights[which])
                if not torch.equal(out.cpu(), wanted[m]):
                    wrong.append(f"{device}, M = {m}, turn {turn}")

    threads = [threading.Thread(target=work, args=pair) for pair in enumerate((FIRST, SECOND))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_x_and_weight_on_different_gpus_are_refused() -> None:
    weight, x = weight_of("nf4-64", N, K), activations(2, K, BF16)
    with pytest.raises(ValueError, match="cuda:1"):
        halfbyte.linear(x.to(SECOND), weight)
    with pytest.raises(ValueError, match="cuda:1"):
        halfbyte.linear(x, weight.to(SECOND))
