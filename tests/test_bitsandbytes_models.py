"""Whole programs on bitsandbytes with halfbyte on: compiled layers, transformers, PEFT, and unmodified scripts."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import halfbyte
from halfbyte import reference
from halfbyte.cli import app
from halfbyte.formats import PackedWeight, get_format
from halfbyte.integrations import bitsandbytes as switch
from halfbyte.kernels.cpu import library

bnb = pytest.importorskip("bitsandbytes")
transformers = pytest.importorskip("transformers")
from bitsandbytes_samples import TINY_LAYERS, in_float64, load_4bit, tiny_llama  # noqa: E402

pytestmark = [
    pytest.mark.skipif(library() is None, reason="no library of CPU kernels here"),
    pytest.mark.usefixtures("bitsandbytes_off"),
]

SCRIPT = """
import sys
import bitsandbytes as bnb, torch
from torch._dynamo.utils import counters
torch.manual_seed(0)
layer = bnb.nn.Linear4bit(64, 96, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4").to("cpu")
x = torch.randn(2, 64, dtype=torch.bfloat16)
call = torch.compile(layer, fullgraph=True) if sys.argv[1:] == ["compiled"] else layer
with torch.inference_mode():
    print(call(x).double().abs().sum().item(), counters["inductor"]["fxgraph_cache_hit"], __name__)
"""


def run(*words, **environment):
    """Standard output and error of a Python process."""
    quiet = {key: value for key, value in os.environ.items() if not key.startswith("HALFBYTE")}
    done = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, env=quiet | environment)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def layer_of(n=96, k=128):
    torch.manual_seed(0)
    layer = bnb.nn.Linear4bit(k, n, compute_dtype=torch.bfloat16, quant_type="nf4", compress_statistics=False)
    return layer.to(torch.bfloat16).to("cpu")


def exact_of(layer, x):
    state = layer.weight.quant_state
    parts = {"codes": layer.weight.data.view(-1), "absmax": state.absmax}
    return reference.linear(x, PackedWeight(get_format("nf4-64"), tuple(state.shape), parts), layer.bias)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_compiled_in_one_graph(before, training):
    """Compiled before the switch is on, or after: the graph's calls are reached."""
    torch.compiler.reset()
    layer = layer_of().train(training)
    layer.support_avx512bf16_for_cpu = False  # bitsandbytes cannot compile its repacking
    x = torch.randn(3, 128, dtype=torch.bfloat16)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        if before:
            compiled(x)
            assert switch.status().hits == 0
        with switch.enabled():
            out = compiled(x)
            reference.assert_within_contract(out, exact_of(layer, x))
        hits = switch.status().hits
        assert hits > 0
        assert switch.status().misses == 0
        compiled(x)
        assert switch.status().hits == hits


def test_compiled_where_bitsandbytes_would_repack():
    torch.compiler.reset()
    layer = layer_of().eval()
    layer.support_avx512bf16_for_cpu = True
    x = torch.randn(3, 128, dtype=torch.bfloat16)
    with switch.enabled(), torch.no_grad():
        out = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
        reference.assert_within_contract(out, exact_of(layer, x))
    assert switch.status().hits == 1
    assert switch.status().misses == 0


@pytest.mark.skipif(not bnb.functional.has_avx512bf16(), reason="bitsandbytes repacks with AVX-512 BF16 only")
def test_compiled_with_the_repacking_in_its_graph():
    """On and off twice: bitsandbytes' compiled code repacks, halfbyte's puts the weight back and is reached."""
    torch.compiler.reset()
    layer = layer_of().eval()
    x = torch.randn(3, 128, dtype=torch.bfloat16)
    compiled = torch.compile(layer, backend="aot_eager")
    with torch.no_grad():
        theirs = compiled(x)
        for turn in (1, 2):
            assert layer.weight.quant_state.packing_format_for_cpu
            with switch.enabled():
                reference.assert_within_contract(compiled(x), exact_of(layer, x))
            assert switch.status().hits == turn
            assert switch.status().misses == 0
            assert torch.equal(compiled(x), theirs)


def test_unmodified_script_and_a_warm_compile_cache(tmp_path):
    """What a process without halfbyte has compiled, `python -m halfbyte.run` takes from the cache and still serves."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    plain, _ = run(script, "compiled", **cache)
    out, log = run("-m", "halfbyte.run", "--status", script, "compiled", **cache)
    assert plain.split()[1:] == ["0", "__main__"]
    assert out.split()[1:] == ["1", "__main__"]
    assert abs(float(out.split()[0]) / float(plain.split()[0]) - 1) < 0.01
    assert "on; 1 calls served, 0 passed on" in log
    assert "gemm_4bit by cpu_linear: M 2-8: 1" in log
    assert "is served by halfbyte's cpu_linear" in log


def test_environment_variables(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import halfbyte\n" + SCRIPT)
    _, log = run(script, HALFBYTE_BITSANDBYTES="1", HALFBYTE_STATUS="1")
    assert "on; 1 calls served, 0 passed on" in log


def test_status_command(monkeypatch):
    def printed(*words):
        result = CliRunner().invoke(app, ["status", *words])
        assert result.exit_code == 0, result.output
        return result.output

    monkeypatch.setenv("HALFBYTE_BITSANDBYTES", "1")
    switch.follow_environment()
    report = json.loads(printed("--json"))
    assert report["enabled"] is True
    assert report["versions"]["bitsandbytes"] == bnb.__version__
    assert report["versions"]["torch"] == torch.__version__
    switch.disable()
    assert json.loads(printed("--json"))["enabled"] is False


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("dense"))


def test_transformers_generates(checkpoint):
    """No other change to the program; every 4-bit layer of every step is served, and the bytes stay."""
    tokens = torch.tensor([[1, 2, 3, 4]])
    with switch.enabled():
        model = load_4bit(checkpoint)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        out = model.generate(tokens, max_new_tokens=5, min_new_tokens=5, do_sample=False)
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, before[name]), name
    assert out.shape == (1, 9)
    assert switch.status().fallbacks == {}
    assert switch.status().served == {"gemm_4bit": {"cpu_linear": {"2-8": 14, "1": 4 * 14}}}


PROMPT = torch.tensor([[1, 2, 3, 4]])
GREEDY = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}


def without_repacking(model):
    """bitsandbytes cannot compile its repacking, and raises where K is no multiple of the block."""
    for module in model.modules():
        if hasattr(module, switch.GATE):
            setattr(module, switch.GATE, False)
    return model


@pytest.mark.parametrize("optimized", [False, True], ids=["switch", "optimize"])
def test_static_cache_and_compile(checkpoint, optimized):
    """Compiled before halfbyte comes, and then after: every step of the compiled code is served.

    The model's forward is compiled by hand, since transformers compiles no quantised model of bitsandbytes by itself.
    """
    torch.compiler.reset()
    model = without_repacking(load_4bit(checkpoint))
    plain = model.forward
    options = {"cache_implementation": "static", **GREEDY}
    model.forward = torch.compile(plain, backend="aot_eager")
    model.generate(PROMPT, **options)
    assert switch.status().hits == 0
    with switch.enabled():
        model.forward, compiled_forward = plain, model.forward
        eager = model.generate(PROMPT, **GREEDY)
        model.forward = compiled_forward
        if optimized:
            halfbyte.optimize(model)
        switch.reset_counters()
        compiled = model.generate(PROMPT, **options)
    assert torch.equal(compiled, eager)
    assert switch.status().fallbacks == {}
    operator = "linear" if optimized else "gemm_4bit"
    assert switch.status().served == {operator: {"cpu_linear": {"2-8": TINY_LAYERS, "1": 4 * TINY_LAYERS}}}


def test_continuous_batching(checkpoint):
    """generate_batch makes the tokens that generate makes, in a thread of its own."""
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8]]
    model = load_4bit(checkpoint)
    model.generation_config.eos_token_id = None
    settings = transformers.ContinuousBatchingConfig(num_blocks=16, page_size=32, max_batch_tokens=64)
    greedy = transformers.GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=-1, pad_token_id=0)
    with switch.enabled():
        alone = [model.generate(torch.tensor([each]), **GREEDY)[0, len(each) :].tolist() for each in prompts]
        switch.reset_counters()
        results = model.generate_batch(
            prompts, generation_config=greedy, continuous_batching_config=settings, warmup=False
        )
    assert [results[key].generated_tokens for key in sorted(results)] == alone
    assert switch.status().fallbacks == {}
    assert switch.status().hits >= 5 * TINY_LAYERS


@pytest.mark.parametrize("nested", [False, True])
def test_prequantised_checkpoints_and_device_map_auto(checkpoint, nested, tmp_path):
    """Written by bitsandbytes, loaded before and after the switch; an optimised model is saved as by bitsandbytes."""
    source = load_4bit(checkpoint, nested)
    source.save_pretrained(tmp_path / "theirs")
    saved = load_file(tmp_path / "theirs" / "model.safetensors")
    before = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", device_map="auto")
    with switch.enabled():
        after = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", device_map="auto")
        tokens = [model.generate(PROMPT, **GREEDY) for model in (before, after)]
        assert halfbyte.optimize(after) == halfbyte.optimize(source) == TINY_LAYERS
        tokens.append(after.generate(PROMPT, **GREEDY))
    assert all(torch.equal(each, tokens[0]) for each in tokens)
    assert switch.status().fallbacks == {}
    launches = TINY_LAYERS if nested else TINY_LAYERS // 7 * 4  # q, k and v in one, and gate and up
    assert switch.status().hits == 5 * (2 * TINY_LAYERS + launches)
    source.save_pretrained(tmp_path / "ours")  # transformers cannot save one that it loaded prequantised
    again = load_file(tmp_path / "ours" / "model.safetensors")
    assert again.keys() == saved.keys()
    assert all(torch.equal(again[key], saved[key]) for key in saved)
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("ours", "theirs")]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]
    assert halfbyte.restore(after) == TINY_LAYERS


def test_qlora_training_step(checkpoint):
    """Loss and gradients of A and B against float64: halfbyte is no further off than bitsandbytes."""
    peft = pytest.importorskip("peft")
    tokens = torch.randint(96, (2, 12), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(load_4bit(checkpoint, nested=False), lora).train()
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)

    def step(which):
        which.zero_grad()
        loss = which(input_ids=tokens, labels=tokens).loss
        loss.backward()
        grads = {name: p.grad.double() for name, p in which.named_parameters() if "lora_" in name}
        return loss.detach().double(), grads

    theirs = step(model)
    with switch.enabled():
        ours = step(model)
    assert switch.status().served["gemm_4bit"]["cpu_linear"]["9-64"] == 14
    reasons = switch.status().fallbacks["dequantize_4bit"]
    assert list(reasons) == ["bitsandbytes' own kernel decodes to 16 bits with the same values, and faster"]
    exact = step(in_float64(model))
    assert abs(ours[0] - exact[0]) <= abs(theirs[0] - exact[0]) + 1e-3
    assert ours[1].keys() == exact[1].keys()
    errors = {
        kind: [
            sum(reference.relative_error(grads[name], exact[1][name]) for name in exact[1] if kind in name)
            for grads in (ours[1], theirs[1])
        ]
        for kind in ("lora_A", "lora_B")
    }
    for kind, (our_error, their_error) in errors.items():
        assert 0 < our_error <= 1.05 * their_error, (kind, our_error, their_error)
