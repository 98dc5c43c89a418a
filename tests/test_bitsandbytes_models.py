"""Whole programs on bitsandbytes with halfbyte on: compiled layers, transformers, PEFT, and unmodified scripts."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from halfbyte import reference
from halfbyte.cli import app
from halfbyte.formats import PackedWeight, get_format
from halfbyte.integrations import bitsandbytes as switch
from halfbyte.kernels.cpu import library

bnb = pytest.importorskip("bitsandbytes")
transformers = pytest.importorskip("transformers")
from bitsandbytes_samples import in_float64, load_4bit, tiny_llama  # noqa: E402

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
