"""The serve suite: systems that do not share what they run, rows that say what was measured."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from halfbyte.integrations import bitsandbytes as switch
from halfbyte.kernels.cpu import library

pytest.importorskip("bitsandbytes")
pytest.importorskip("transformers")
from halfbyte.cli import app
from halfbyte.lab import generate

pytestmark = [
    pytest.mark.skipif(library() is None, reason="no library of CPU kernels here"),
    pytest.mark.usefixtures("bitsandbytes_off"),
]
CPU = torch.device("cpu")


def test_rows(tmp_path):
    words = (
        "bench generate --model tiny --users 1,4 --prompt 5 --tokens 6 --rounds 1 --nested --no-compile --device cpu"
    )
    result = CliRunner().invoke(
        app, [*words.split(), "--arms", "switch,optimize", "--out", str(tmp_path / "rows.jsonl"), "--json"]
    )
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [(row["users"], row["kernel"]) for row in rows] == [
        (users, name)
        for users in (1, 4)
        for name in (
            "bitsandbytes 0.50.2",
            "bitsandbytes 0.50.2 again",
            "halfbyte cpu_linear",
            "halfbyte cpu_linear optimize",
        )
    ]
    for row in rows:
        assert row["suite"] == "serve"
        assert {"device", "arch", "driver", "torch", "commit", "date", "spread", "engine"} <= row.keys()
        assert (row["format"], row["nested"], row["dtype"]) == ("nf4-64-nested", True, "bf16")
        assert (row["prompt_tokens"], row["new_tokens"], row["layers"], row["compiled"]) == (5, 6, 2, False)
        assert 0 < row["tpot_ms"] * 5 < 1e3 * 6 * row["users"] / row["tokens_per_s"]  # the rest is the prompt
        assert row["tokens_per_s"] > 0
    assert [row["speedup"] for row in rows if row["kernel"] == "bitsandbytes 0.50.2"] == [1.0, 1.0]
    assert not switch.status().enabled


def test_ours_shares_no_model_and_only_it_is_served():
    model = generate.build("tiny", CPU, torch.bfloat16, nested=False)
    arms = generate.make_arms(model, ["switch"])
    assert arms[0].model is arms[1].model, "the noise is that of the very same system"
    assert arms[2].model is not arms[0].model
    assert [arm.on for arm in arms] == [False, False, True]
    ids = torch.arange(8).view(2, 4)
    runs = []
    for arm in arms:
        switch.reset_counters()
        runs.append(arm.run(ids, 5, generate._options(generate.Settings(compiled=False), CPU)))
        assert bool(switch.status().hits) == arm.on
    assert [run.tokens.shape for run in runs] == [(2, 9)] * 3
    assert torch.equal(runs[0].tokens, runs[1].tokens)
    assert all(0 < run.prompt_s < run.seconds for run in runs)


def test_arms_share_no_compiled_code():
    """What was compiled for one arm, and captured in a CUDA graph, must not serve another."""
    from torch._dynamo.testing import CompileCounter

    torch.compiler.reset()
    model = generate.build("tiny", CPU, torch.bfloat16, nested=False, layers=1).train()  # in eval it would repack
    ids, frames = torch.arange(4).view(1, 4), []
    counter = CompileCounter()
    with torch.no_grad():
        for each in [generate.twin(model), generate.twin(model)]:
            for _ in range(2):
                torch.compile(each.forward, backend=counter)(ids, use_cache=False)
            frames.append(counter.frame_count)
    assert 0 < frames[0] < frames[1]


def test_an_arm_compiles_once():
    """Not again, and then for caches of any length, when a run is longer than the warm-up before it."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    model = generate.build("tiny", CPU, torch.bfloat16, nested=False, layers=1)
    options = generate._options(generate.Settings(), CPU)
    options["compile_config"].backend = "eager"
    arm = generate.make_arms(model)[2]
    kept = []
    graphs = []
    for _ in range(2):
        counters.clear()
        arm.run(torch.arange(4).view(1, 4), generate.WARM_TOKENS + 5, options)
        graphs.append(counters["stats"]["unique_graphs"])
        kept.append(list(arm.caches.values()))
    assert graphs == [1, 0]
    assert len(kept[0]) == 1
    assert kept[0][0] is kept[1][0], "a recorded CUDA graph stays good for its memory only"


def test_arms_keep_their_code_without_guards_on_modules():
    torch.compiler.reset()
    model = generate.build("tiny", CPU, torch.bfloat16, nested=False, layers=1)
    options = generate._options(generate.Settings(), CPU)
    options["compile_config"].backend = "eager"
    arms, ids, tokens = generate.make_arms(model), torch.arange(4).view(1, 4), 6
    steps = tokens + generate.WARM_TOKENS
    for _ in range(2):
        for arm, calls in zip(arms, (0, 0, 7 * steps, 4 * steps), strict=True):
            switch.reset_counters()
            arm.run(ids, tokens, options)
            assert switch.status().hits == calls, arm.name


@pytest.mark.parametrize("guards", [False, True])
def test_guards_on_modules_are_left_out_unless_asked_for(guards):
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    torch.compiler.reset()
    model = generate.build("tiny", CPU, torch.bfloat16, nested=False, layers=1)
    options = generate._options(generate.Settings(guards=guards), CPU)
    options["compile_config"].backend = "eager"
    arm = generate.make_arms(model)[2]
    arm.run(torch.arange(4).view(1, 4), 3, options)
    (entry,) = _debug_get_cache_entry_list(type(model).forward.__code__)
    assert ("q_proj" in str(entry.guard_manager)) == guards


def test_an_unknown_arm_is_an_error():
    model = generate.build("tiny", CPU, torch.bfloat16, nested=False, layers=1)
    with pytest.raises(ValueError, match="unknown arm 'magic'; known: switch, optimize"):
        generate.make_arms(model, ["magic"])


def test_nothing_to_compare_is_an_error(monkeypatch):
    monkeypatch.setattr(switch, "SERVED_ROWS", -1)
    settings = generate.Settings("tiny", users=(1,), prompt=3, tokens=3, rounds=1, compiled=False)
    with pytest.raises(ValueError, match=r"halfbyte served no call of 1 rows"):
        list(generate.bench_generate(settings, CPU, torch.bfloat16))
    with pytest.raises(ValueError, match=r"unknown shape 'huge'; known: llama-3-8b"):
        generate.build("huge", CPU, torch.bfloat16, nested=False)


def test_the_shapes_of_llama_3_8b():
    """Its linear layers hold 6.98 thousand million weights; built without their memory."""
    with torch.device("meta"):
        from transformers import LlamaConfig, LlamaForCausalLM

        model = LlamaForCausalLM(LlamaConfig(**generate.SHAPES["llama-3-8b"]))
    layers = [module for module in model.model.modules() if type(module) is torch.nn.Linear]
    assert len(layers) == 224
    assert sum(layer.weight.numel() for layer in layers) == 32 * 218_103_808
