"""`halfbyte.optimize` and `restore`: bitsandbytes' layers as QuantLinear on their own memory, and back."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn

import halfbyte
from halfbyte import reference
from halfbyte.integrations import bitsandbytes as switch
from halfbyte.kernels.cpu import library

bnb = pytest.importorskip("bitsandbytes")
from halfbyte.integrations.linear4bit import most_rows  # noqa: E402

pytestmark = [
    pytest.mark.skipif(library() is None, reason="no library of CPU kernels here"),
    pytest.mark.usefixtures("bitsandbytes_off"),
]
N, K = 96, 128
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layer_of(kind=None, bias=True, dtype=torch.bfloat16, nested=True, storage=torch.uint8, **options):
    kind = kind or bnb.nn.LinearNF4
    layer = kind(
        K, N, bias=bias, compute_dtype=dtype, compress_statistics=nested, quant_storage=storage, **options
    )  # fmt: skip
    with torch.no_grad():
        layer.weight.data.copy_(rand(N, K, seed=1))
        if bias:
            layer.bias.copy_(rand(N, seed=2))
    return layer.to(dtype).to("cpu").eval()


def octets(state) -> dict[str, bytes]:
    return {key: bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist()) for key, tensor in state.items()}


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_outputs_memory_and_state(dtype, nested, storage):
    """Within the contract, on the same memory, saved as before; `restore` gives back class and objects."""
    layer = layer_of(dtype=dtype, nested=nested, storage=storage)
    model, twin = nn.Sequential(layer), nn.Sequential(copy.deepcopy(layer)).train()  # in eval it would repack
    objects = (layer, layer.weight, layer.bias, layer.weight.quant_state, layer.weight.quant_state.absmax)
    address, names = layer.weight.data_ptr(), [name for name, _ in model.named_modules()]
    assert halfbyte.optimize(model) == 1
    assert halfbyte.optimize(model) == 1
    assert isinstance(layer, halfbyte.QuantLinear)
    assert layer.packed.codes.data_ptr() == address
    with torch.inference_mode():
        for m in (1, 5, 64):
            x = rand(m, K, dtype=dtype, seed=m)
            reference.assert_within_contract(model(x), reference.linear(x, layer.packed, layer.bias), f"M = {m}")
    assert octets(model.state_dict()) == octets(twin.state_dict())
    assert switch.status().served == {"linear": {"cpu_linear": {"1": 1, "2-8": 1, "9-64": 1}}}
    assert halfbyte.restore(model) == 1
    assert halfbyte.restore(model) == 0
    assert type(layer) is bnb.nn.LinearNF4
    assert "_halfbyte_was" not in vars(layer)
    after = (model[0], layer.weight, layer.bias, layer.weight.quant_state, layer.weight.quant_state.absmax)
    assert all(one is other for one, other in zip(objects, after, strict=True))
    assert layer.weight.data_ptr() == address
    assert names == [name for name, _ in model.named_modules()]
    x = rand(2, K, dtype=dtype)
    assert torch.equal(model.train()(x), twin(x))


@pytest.mark.parametrize("nested", [False, True])
def test_weights_that_bitsandbytes_repacked(nested):
    layer = layer_of(nested=nested, bias=False)
    codes = layer.weight.data.clone()
    layer.weight.data, state = bnb.functional._convert_weight_packed_for_cpu(
        layer.weight.data, layer.weight.quant_state
    )
    scales = state.absmax.t().float().reshape(-1)
    assert halfbyte.optimize(nn.Sequential(layer)) == 1
    assert torch.equal(layer.weight.data, codes)
    assert torch.equal(layer.packed.parts["absmax"], scales)
    x = rand(3, K, dtype=torch.bfloat16)
    with torch.inference_mode():
        reference.assert_within_contract(layer(x), reference.linear(x, layer.packed))


def test_it_never_repacks_and_restore_lets_it():
    layer = layer_of()
    layer.__dict__["support_avx512bf16_for_cpu"] = True
    model = nn.Sequential(layer)
    halfbyte.optimize(model)
    x = rand(200, K, dtype=torch.bfloat16)  # so many rows that bitsandbytes computes them
    with torch.inference_mode():
        model(x)
        model(x[:1])
    assert not getattr(layer.weight.quant_state, "packing_format_for_cpu", False)
    halfbyte.restore(model)
    assert layer.support_avx512bf16_for_cpu is True


def test_no_cast_where_x_has_the_compute_dtype(monkeypatch):
    model = nn.Sequential(layer_of(dtype=torch.bfloat16))
    halfbyte.optimize(model)
    narrow, wide, casts = rand(2, K, dtype=torch.bfloat16), rand(2, K), []
    to = Tensor.to
    monkeypatch.setattr(Tensor, "to", lambda self, *args, **kwargs: casts.append(args) or to(self, *args, **kwargs))
    with torch.inference_mode():
        out = model(narrow)
        assert not casts
        cast = model(wide)
    assert casts == [(torch.bfloat16,), (torch.float32,)]
    assert cast.dtype == torch.float32
    assert torch.equal(cast, out.float())


def test_more_rows_than_halfbyte_does_faster_go_to_bitsandbytes():
    layer = layer_of()
    model, twin = nn.Sequential(layer), copy.deepcopy(layer).train()
    halfbyte.optimize(model)
    assert most_rows("nf4-64-nested", torch.bfloat16, N, K, torch.device("cpu")) == 64
    assert most_rows("nf4-64", torch.float32, 4096, 4096, torch.device("cpu")) >= 1 << 20
    x = rand(65, K, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(model(x), twin(x))
        with switch.enabled():
            assert torch.equal(model(x), twin(x))
    (reason,) = switch.status().fallbacks["gemm_4bit"]
    assert "M 65+" in reason
    assert "faster" in reason


def test_gradients_are_those_of_bitsandbytes():
    layer = layer_of()
    twin = copy.deepcopy(layer).train()
    halfbyte.optimize(nn.Sequential(layer))
    grads = []
    for each in (layer, twin):
        x = rand(5, K, dtype=torch.bfloat16).requires_grad_()
        each.bias.requires_grad_()
        each(x).backward(rand(5, N, dtype=torch.bfloat16, seed=3))
        grads.append((x.grad, each.bias.grad))
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)
    x = rand(5, K, dtype=torch.bfloat16)
    assert layer(x).requires_grad  # the bias alone learns


def test_a_weight_that_others_replace_is_seen():
    """As PEFT does when it merges: a new Params4bit with a state of its own."""
    layer = layer_of(bias=False)
    halfbyte.optimize(nn.Sequential(layer))
    x = rand(2, K, dtype=torch.bfloat16)
    with torch.inference_mode():
        first = layer(x)
    layer.weight = bnb.nn.Params4bit(rand(N, K, seed=7), quant_type="nf4").to("cpu")
    with torch.inference_mode():
        out = layer(x)
    assert not torch.equal(out, first)
    reference.assert_within_contract(out, reference.linear(x, layer.packed))
    layer.weight.data.copy_(layer.weight.data.flip(0))
    with torch.inference_mode():
        reference.assert_within_contract(layer(x), reference.linear(x, layer.packed))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_whole(backend):
    torch.compiler.reset()
    model = nn.Sequential(layer_of(), nn.GELU())
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    halfbyte.optimize(model)
    x = rand(3, K, dtype=torch.bfloat16)
    with torch.no_grad():
        hits = switch.status().hits
        assert torch.allclose(compiled(x), model(x), rtol=1e-2, atol=1e-2)
        assert switch.status().hits == hits + 2
        halfbyte.restore(model)
        model.train()
        compiled(x)  # compiled anew for bitsandbytes' class
        assert switch.status().hits == hits + 2


def test_copies_pickles_and_checkpoints():
    model = nn.Sequential(layer_of())
    halfbyte.optimize(model)
    x = rand(2, K, dtype=torch.bfloat16)
    with torch.inference_mode():
        wanted = model(x)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(twin(x), wanted)
            halfbyte.restore(twin)
            assert type(twin[0]) is bnb.nn.LinearNF4
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    fresh = halfbyte.QuantLinear(K, N, format="nf4-64-nested")
    fresh.load_state_dict({key.removeprefix("0."): value for key, value in torch.load(file).items()})
    with torch.inference_mode():
        assert torch.equal(fresh.bfloat16()(x), wanted)


def test_what_stays_as_it_is(caplog):
    class Own(bnb.nn.Linear4bit):
        pass

    hooked = layer_of()
    hooked.forward = hooked.forward
    lost = bnb.nn.Linear4bit(K, N)  # never quantised
    model = nn.Sequential(layer_of(), layer_of(Own, quant_type="nf4"), hooked, lost, nn.Linear(K, N))
    kinds = [type(module) for module in model]
    assert halfbyte.optimize(model) == 1
    assert "1 layers stay as they are: Own may have a forward of its own" in caplog.text
    assert "hook of accelerate" in caplog.text
    assert "not quantised" in caplog.text
    assert [type(module) for module in model][1:] == kinds[1:]
    halfbyte.restore(model)
    assert [type(module) for module in model] == kinds
    for nothing in (nn.Sequential(nn.Linear(4, 4)), nn.Sequential(hooked)):
        with pytest.raises(ValueError, match="nothing to do in this model"):
            halfbyte.optimize(nothing)


def test_hooks_and_the_root_of_the_model():
    layer = layer_of()
    seen = []
    layer.register_forward_hook(lambda module, args, out: seen.append(type(module)))
    assert halfbyte.optimize(layer) == 1
    with torch.inference_mode():
        layer(rand(1, K, dtype=torch.bfloat16))
    assert issubclass(seen[0], halfbyte.QuantLinear)
    assert halfbyte.prepare(layer, ms=(1, 2)) == 2


def test_together_with_the_switch():
    """Either order, and what the switch does to modules' attributes is undone for optimised ones, too."""
    layer = layer_of()
    gate = layer.support_avx512bf16_for_cpu
    model = nn.Sequential(layer)
    x = rand(1, K, dtype=torch.bfloat16)
    with torch.inference_mode():
        with switch.enabled():
            halfbyte.optimize(model)
            model(x)
        model(x)
        with switch.enabled():
            halfbyte.restore(model)
            model(x)
    assert layer.support_avx512bf16_for_cpu == gate
    assert switch.status().served == {"linear": {"cpu_linear": {"1": 2}}, "gemm_4bit": {"cpu_linear": {"1": 1}}}
    with pytest.raises(TypeError, match=r"halfbyte\.optimize\(model\) makes these"):
        halfbyte.integrations.linear4bit.QuantLinear4bit()
