"""vLLM's merged 4-bit layers on a GPU, without vLLM: its parameter, and what halfbyte's operator does with it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

bnb = pytest.importorskip("bitsandbytes.functional")

import vllm_stub  # noqa: E402
from halfbyte import reference  # noqa: E402
from halfbyte.integrations import bitsandbytes as switch  # noqa: E402
from halfbyte.integrations.vllm_layers import Layer, layer_of  # noqa: E402
from halfbyte.integrations.vllm_lora import Adapters  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16 = torch.bfloat16
K, HEIGHTS = 1024, (1024, 256, 256)


def made() -> tuple[Tensor, list[Tensor]]:
    """A parameter as vLLM leaves it, and each shard's weight in bf16 as bitsandbytes decodes it."""
    generator = torch.Generator().manual_seed(0)
    dense = [torch.randn(n, K, generator=generator).to("cuda", BF16) for n in HEIGHTS]
    shards = [bnb.quantize_4bit(each, quant_type="nf4", compress_statistics=False) for each in dense]
    return vllm_stub.parameter(shards), [bnb.dequantize_4bit(*shard) for shard in shards]


def activations(m: int) -> Tensor:
    x = torch.randn(m, K, generator=torch.Generator().manual_seed(1))
    x[:, K // 3] *= 100
    return x.to("cuda", BF16)


@pytest.mark.parametrize("m", [1, 8, 17, 64, 130])
def test_a_merged_layer_is_exact(m: int) -> None:
    weight, _ = made()
    layer, x = layer_of(weight, weight.bnb_shard_offsets), activations(m)
    assert len(layer.shards) == 1
    out = torch.full((m, sum(HEIGHTS)), torch.nan, dtype=BF16, device="cuda")
    layer.multiply(x, out)
    reference.assert_within_contract(out, reference.linear(x, layer.shards[0].weight.packed), f"M={m}")


@pytest.mark.parametrize("m", [300, 2048])
def test_many_rows_are_bitsandbytes_values_in_place(m: int) -> None:
    weight, dense = made()
    layer, x = layer_of(weight, weight.bnb_shard_offsets), activations(m)
    with pytest.raises(switch.Unserved, match="which is faster"):
        layer.kernel(BF16, m)
    out = torch.full((m, sum(HEIGHTS)), torch.nan, dtype=BF16, device="cuda")
    layer.multiply_decoded(weight, x, out)  # cuBLAS takes its workspace
    out.fill_(torch.nan)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    layer.multiply_decoded(weight, x, out)
    largest = max(each.numel() for each in dense) * 2
    assert torch.cuda.max_memory_allocated() - before < largest + (1 << 20), "a copy of a result"
    y = torch.cat([x.double() @ each.double().t() for each in dense], 1)
    reference.assert_within_contract(out, y, f"M={m}")


SLOTS, RANK = 3, 16


class Meta:
    """What vLLM has of the tokens' adapters on a GPU."""

    def __init__(self, m: int) -> None:
        self.no_lora_flag_cpu = torch.tensor([False])
        self.token_lora_mapping = torch.full((m + 7,), -1, dtype=torch.int32, device="cuda")


def adapters_of(m: int) -> tuple[Adapters, Meta]:
    """Merged as `Folding.create_lora_weights` has them: B is zero beside each shard's rows and columns."""
    generator, count = torch.Generator().manual_seed(2), len(HEIGHTS)
    a = torch.randn(SLOTS, 1, count * RANK, K, generator=generator) / K**0.5
    b = torch.zeros(SLOTS, 1, sum(HEIGHTS), count * RANK)
    start = 0
    for i, n in enumerate(HEIGHTS):
        b[:, 0, start : start + n, i * RANK : (i + 1) * RANK] = torch.randn(SLOTS, n, RANK, generator=generator)
        start += n
    a, b, meta = a.to("cuda", BF16), b.to("cuda", BF16), Meta(m)
    return Adapters.of(a, b, SimpleNamespace(token_mapping_meta=meta), ((a,), (b,))), meta


def exact(layer: Layer, adapters: Adapters, slots: Tensor, x: Tensor) -> Tensor:
    y = reference.linear(x, layer.shards[0].weight.packed)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            y[row] += adapters.b[slot, 0].double() @ (adapters.a[slot, 0].double() @ x[row].double())
    return y


@pytest.mark.parametrize("m", [1, 8, 16, 64])
def test_adapters_of_merged_layers_in_a_graph_with_any_mix(m: int) -> None:
    weight, _ = made()
    layer, x = layer_of(weight, weight.bnb_shard_offsets), activations(m)
    adapters, meta = adapters_of(m)
    index = adapters.index(m)
    assert index is not None
    out = torch.full((m, sum(HEIGHTS)), torch.nan, dtype=BF16, device="cuda")
    adapters.multiply(layer, x, index, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        adapters.multiply(layer, x, index, out)
    plain = torch.empty_like(out)
    layer.multiply(x, plain)
    for slots in (torch.arange(m) % 4 - 1, torch.full((m,), 2), torch.full((m,), -1)):
        meta.token_lora_mapping[:m] = slots.to("cuda", torch.int32)
        out.fill_(torch.nan)
        graph.replay()
        reference.assert_within_contract(out, exact(layer, adapters, slots, x), f"M={m}")
        assert torch.equal(out[slots < 0], plain[slots < 0])  # without an adapter a row has the base's bits
    meta.no_lora_flag_cpu[0] = True
    assert adapters.index(m) is None
