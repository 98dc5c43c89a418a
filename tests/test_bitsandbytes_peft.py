"""PEFT's adapters over bitsandbytes' layers on halfbyte: by the switch, and in layers that `optimize` put in place.

In fp32, so that a wrong adapter, row or scale cannot hide behind the rounding of activations between the layers.
"""

from __future__ import annotations

import contextlib

import pytest
import torch

import halfbyte
from halfbyte import reference
from halfbyte.integrations import bitsandbytes as switch
from halfbyte.kernels.cpu import library

pytest.importorskip("bitsandbytes")
pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
from bitsandbytes_samples import TINY_LAYERS, in_float64, load_4bit, tiny_llama  # noqa: E402

pytestmark = [
    pytest.mark.skipif(library() is None, reason="no library of CPU kernels here"),
    pytest.mark.usefixtures("bitsandbytes_off"),
    pytest.mark.filterwarnings("ignore:Merge lora module", "ignore:Unmerge lora module"),
]
LIMIT = 2e-5  # of the whole model; a layer's is 5e-6
TOKENS = torch.randint(96, (3, 12), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("dense"), intermediate=192)  # bitsandbytes decodes 160 wrongly to fp32


@pytest.fixture(scope="module")
def adapters(checkpoint, tmp_path_factory):
    """Two adapters as PEFT saves them, of different ranks and targets."""
    paths = {}
    for number, (name, targets) in enumerate({"one": "all-linear", "two": ["q_proj", "up_proj", "down_proj"]}.items()):
        config = peft.LoraConfig(r=4 * (number + 1), lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM")
        model = peft.get_peft_model(load_4bit(checkpoint), config)
        generator = torch.Generator().manual_seed(number)
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        paths[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(paths[name])
    return paths


def loaded(checkpoint, adapters, optimized=False):
    """A model with adapter "one"; "two" is loaded after halfbyte took over."""
    base = load_4bit(checkpoint, dtype=torch.float32)
    for module in base.modules():
        if hasattr(module, switch.GATE):
            setattr(module, switch.GATE, False)  # bitsandbytes would repack its weights and round their scales
    model = peft.PeftModel.from_pretrained(base, adapters["one"], adapter_name="one").eval()
    if optimized:
        assert halfbyte.optimize(model) == TINY_LAYERS
    model.load_adapter(adapters["two"], "two")
    return model.requires_grad_(False)


def states(model):
    """Every way to use two adapters, as (name, what to put around a call, keywords of the call)."""
    for names in ("one", "two", ["one", "two"]):
        model.base_model.set_adapter(names)
        yield str(names), contextlib.nullcontext, {}
    yield "disabled", model.disable_adapter, {}
    yield "each row its own", contextlib.nullcontext, {"adapter_names": ["two", "__base__", "one"]}


@pytest.mark.parametrize("optimized", [False, True], ids=["switch", "optimize"])
def test_switched_stacked_disabled_and_mixed(checkpoint, adapters, optimized):
    """Each time as in float64 and as with bitsandbytes, and all that is expected is served."""
    plain, model = loaded(checkpoint, adapters), loaded(checkpoint, adapters, optimized)
    exact_model = in_float64(plain)
    seen = []
    with torch.inference_mode():
        for (name, around, words), *others in zip(states(model), states(plain), states(exact_model), strict=True):
            with around(), switch.enabled():
                switch.reset_counters()
                ours = model(input_ids=TOKENS, **words).logits
                assert switch.status().fallbacks == {}, name
                served = switch.status().served
                operators = {"linear", "linear_adapters"} if optimized else {"gemm_4bit"}
                assert served.keys() <= operators, name
                assert sum(each["cpu_linear"]["9-64"] for each in served.values()) == TINY_LAYERS, name
            with others[0][1]():
                theirs = plain(input_ids=TOKENS, **words).logits
            with others[1][1]():
                exact = exact_model(input_ids=TOKENS, **words).logits
            assert reference.relative_error(ours, exact) < LIMIT, name
            assert reference.relative_error(theirs, exact) < LIMIT, name
            assert all(reference.relative_error(ours, other) > 100 * LIMIT for other in seen)
            seen.append(ours)
    assert len(seen) == 5


@pytest.mark.parametrize("optimized", [False, True], ids=["switch", "optimize"])
def test_merged_and_unmerged(checkpoint, adapters, optimized):
    """The same bytes as bitsandbytes writes by itself, and they are served afterwards."""
    plain, model = loaded(checkpoint, adapters), loaded(checkpoint, adapters, optimized)

    def weights(of):
        bases = {name: module for name, module in of.named_modules() if name.endswith("base_layer")}
        return {name: module.weight.data.clone() for name, module in bases.items()}

    before = weights(model)
    for change in ("merge_adapter", "unmerge_adapter"):
        getattr(plain, change)()
        with switch.enabled():
            getattr(model, change)()
            with torch.inference_mode():
                switch.reset_counters()
                logits = model(input_ids=TOKENS).logits
                assert switch.status().misses == 0
                assert switch.status().hits == TINY_LAYERS
        theirs, ours = weights(plain), weights(model)
        assert len(ours) == TINY_LAYERS
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        if change == "merge_adapter":
            assert not all(torch.equal(ours[name], before[name]) for name in ours)
        with torch.inference_mode():
            exact = in_float64(plain)(input_ids=TOKENS).logits
        assert reference.relative_error(logits, exact) < LIMIT
    if optimized:
        assert halfbyte.restore(model) == TINY_LAYERS


@pytest.mark.parametrize("optimized", [False, True], ids=["switch", "optimize"])
def test_gradients_of_the_adapters(checkpoint, adapters, optimized):
    """Loss and gradients of A and B as in float64, and as with bitsandbytes."""

    def step(model):
        model.base_model.set_adapter("one")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name and ".one." in name)
        loss = model.train()(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        return loss.detach(), {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}

    plain, model = loaded(checkpoint, adapters), loaded(checkpoint, adapters, optimized)
    exact_loss, exact = step(in_float64(plain))
    their_loss, theirs = step(plain)
    with switch.enabled():
        loss, ours = step(model)
    assert switch.status().hits >= TINY_LAYERS
    assert abs(loss - exact_loss) < LIMIT * exact_loss
    assert len(ours) == 2 * TINY_LAYERS
    assert ours.keys() == theirs.keys() == exact.keys()
    for name in exact:
        assert reference.relative_error(ours[name], exact[name]) < 5 * LIMIT, name
        assert reference.relative_error(theirs[name], exact[name]) < 5 * LIMIT, name
    assert abs(their_loss - exact_loss) < LIMIT * exact_loss


def test_a_new_adapter_over_optimised_layers(checkpoint):
    """PEFT finds bitsandbytes' layers in them, and wraps them as such."""
    model = load_4bit(checkpoint)
    halfbyte.optimize(model)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    kinds = {type(module) for module in wrapped.modules() if hasattr(module, "base_layer")}
    assert kinds == {peft.tuners.lora.Linear4bit}
    with torch.inference_mode():
        wrapped.eval()(input_ids=TOKENS)
    assert switch.status().served["linear"]["cpu_linear"]["9-64"] == TINY_LAYERS
    assert halfbyte.restore(wrapped) == TINY_LAYERS
