"""Layers of one input in one launch on a GPU: exact, in CUDA graphs, compiled, and in transformers' generate."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import halfbyte
from halfbyte import reference
from halfbyte.integrations import bitsandbytes as switch
from halfbyte.integrations.join import Joined

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE, K, SIZES = "cuda", 2048, (2048, 512, 512)
TIME_LIMIT_S = 120.0


class Attention(nn.Module):
    def __init__(self, dtype: torch.dtype, bias: bool):
        super().__init__()
        for seed, (name, n) in enumerate(zip(("q_proj", "k_proj", "v_proj"), SIZES, strict=True)):
            torch.manual_seed(seed)
            layer = nn.Linear(K, n, bias=bias, dtype=dtype, device=DEVICE).requires_grad_(False)
            setattr(self, name, halfbyte.QuantLinear.from_linear(layer, "nf4"))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1)


def rand(m: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(m, K, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def hits() -> int:
    count = switch.status().hits
    switch.reset_counters()
    return count


def check(model: nn.Module, x: Tensor, out: Tensor) -> None:
    for layer, part in zip(model.children(), out.split(SIZES, dim=-1), strict=True):
        reference.assert_within_contract(part, reference.linear(x, layer.packed, layer.bias))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_eager_captured_and_compiled(dtype, bias):
    torch.compiler.reset()
    model = Attention(dtype, bias)
    weights = sum(part.nbytes for layer in model.children() for part in layer.packed.parts.values())
    before = torch.cuda.memory_allocated()
    assert halfbyte.optimize(model) == 3
    assert torch.cuda.memory_allocated() <= before + 4096 < before + weights, "a second copy"
    halfbyte.prepare(model, ms=(1, 16))
    with torch.inference_mode():
        for m in (1, 5, 16, 64):
            hits()
            x = rand(m, dtype, m)
            check(model, x, model(x))
            assert hits() == 1
        for m in (1, 16):
            x = rand(m, dtype)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = model(x)
            x.copy_(rand(m, dtype, 3))
            graph.replay()
            assert torch.equal(out, model(x))
        compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
        for seed in range(4):
            x = rand(16, dtype, seed)
            assert torch.equal(compiled(x), model(x))
    assert halfbyte.restore(model) == 3
    with torch.inference_mode():
        check(model, x, model(x))


def test_generate_with_a_kept_cache():
    """Compiled code of transformers: the tokens of a model whose layers are called one by one."""
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("transformers")
    from halfbyte.lab import generate

    torch.compiler.reset()
    model = generate.build("tiny", torch.device(DEVICE), torch.bfloat16, nested=False)
    ids = torch.arange(8, device=DEVICE).view(2, 4)
    options, tokens = generate._options(generate.Settings(), torch.device(DEVICE)), []
    for joined in (True, False):
        (_, _, arm) = generate.make_arms(model, ["optimize"])
        layers = [layer for layer in arm.model.modules() if isinstance(layer, Joined)]
        assert len(layers) == 2 * 5
        if not joined:
            for layer in layers:
                if isinstance(layer, Joined):  # not set apart with another yet
                    layer.__dict__["_halfbyte_join"][0].split()
        tokens.append([arm.run(ids, 8, options).tokens for _ in range(3)])
        assert all(torch.equal(each, tokens[-1][0]) for each in tokens[-1])
    assert torch.equal(tokens[0][0][:, :8], tokens[1][0][:, :8])  # later on logits of random weights may tie
