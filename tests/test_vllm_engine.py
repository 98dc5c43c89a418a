"""The benchmark of vLLM's engine, but for the engine: the model that it makes, the order of asking, and the rows."""

from __future__ import annotations

import json
import select
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import engine
import engine_profile

ABOUT = {"halfbyte": "1", "bitsandbytes": "2", "vllm": "3", "device": "none"}


def test_what_it_makes_is_a_model_with_adapters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    sizes = {"HIDDEN": 64, "MLP": 96, "HEADS": 4, "KV_HEADS": 2, "HEAD": 16, "VOCABULARY": 320}
    for name, size in sizes.items():
        monkeypatch.setattr(engine, name, size)
    engine.make(tmp_path, layers=2, adapters=2, rank=4)
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = torch.tensor([[5, 6, 7]])
    answers = []
    with torch.no_grad():
        answers.append(model(ids).logits)
        for i in range(2):
            adapted = PeftModel.from_pretrained(model, tmp_path / "adapters" / str(i))
            answers.append(adapted(ids).logits)
            model = adapted.unload()
    for i, answer in enumerate(answers):
        assert all(float((answer - other).norm() / answer.norm()) > 0.01 for other in answers[:i])


class FakeChild:
    """An engine that takes as long as it is told to."""

    def __init__(self, arm: str, seconds: list[float], tokens: list[int], log: list[str]) -> None:
        self.arm, self.adapters, self.name, self.log = arm, 8, f"{arm}-8", log
        self.seconds, self.tokens = seconds, tokens

    def ask(self, do: str, **words: Any) -> Any:
        if do == "time":
            if words["prompt"] == engine.FIRST or not words["adapted"]:
                return 0.5 if self.arm == engine.PLAIN else 0.25
            if words["tokens"] != engine.SHORT:
                self.log.append(self.arm)
                return self.seconds.pop(0)
        if do == "answers":
            return [{"tokens": self.tokens, "logprobs": [-1.0 - 0.5 * (self.arm == engine.OURS)] * len(self.tokens)}]
        return {"served": {}} if do == "counters" else 0.0


def test_rows_have_medians_noise_and_answers(tmp_path: Path) -> None:
    (tmp_path / "adapters" / "0").mkdir(parents=True)
    (tmp_path / "adapters" / "0" / "adapter_config.json").write_text(json.dumps({"r": 16}))
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 8}))
    settings = engine.Settings(tmp_path, tmp_path / "rows", [], [4], 32, 1, [4], [], 10, False)
    log: list[str] = []
    pair: Any = {
        engine.PLAIN: FakeChild(engine.PLAIN, [2.0, 2.5], [1, 2, 3], log),
        engine.OURS: FakeChild(engine.OURS, [1.0, 1.0], [1, 2, 4], log),
    }
    plain, ours, *first, plain_bare, ours_bare = engine.measure(settings, pair, ABOUT)
    assert log == [engine.PLAIN, engine.OURS, engine.OURS, engine.PLAIN]
    assert plain["runs"] == [64.0, 51.2]
    assert plain["tokens_per_s"] == pytest.approx(57.6)
    assert plain["spread"] == pytest.approx(12.8 / 57.6)
    assert plain["tpot_ms"] == pytest.approx(4 / 57.6 * 1e3)
    assert ours["tokens_per_s"] == 128.0
    assert ours["step_ms"] == pytest.approx(1e3 / (32 - engine.SHORT))
    assert (plain["kernel"], ours["kernel"]) == ("bitsandbytes 2", "halfbyte 1")
    assert (ours["layers"], ours["adapters"], ours["rank"], ours["users"]) == (8, 8, 16, 4)
    assert "ttft_ms" not in ours
    assert [(row["users"], row["prompt_tokens"], row["new_tokens"], row["ttft_ms"]) for row in first] == [
        (1, 2048, 1, 500.0),
        (1, 2048, 1, 250.0),
    ]
    assert [len(row["runs"]) for row in first] == [6, 6]
    assert [row.get("adapters_in_use") for row in (ours, *first, plain_bare)] == [None, None, None, 0]
    assert (ours_bare["adapters"], ours_bare["adapters_in_use"], ours_bare["tokens_per_s"]) == (8, 0, 4 * 32 / 0.25)
    assert (plain["answers_differing"], plain["answers_logprobs"]) == (0.0, 0.0)
    assert (ours["answers_first"], ours["answers_differing"], ours["answers_logprobs"]) == (2, 1.0, 0.5)


def test_an_arm_that_did_not_start_leaves_the_other_its_rows(tmp_path: Path) -> None:
    (tmp_path / "adapters" / "0").mkdir(parents=True)
    (tmp_path / "adapters" / "0" / "adapter_config.json").write_text(json.dumps({"r": 16}))
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 8}))
    settings = engine.Settings(tmp_path, tmp_path / "rows", [], [4], 32, 1, [4], [], 10, False)
    ours: Any = FakeChild(engine.OURS, [1.0, 2.0], [1], [])
    row, first, bare = engine.measure(settings, {engine.OURS: ours}, ABOUT)
    assert bare["adapters_in_use"] == 0
    assert first["ttft_ms"] == 250.0
    assert row["runs"] == [128.0, 64.0]
    assert "answers_first" not in row


@pytest.mark.parametrize(("users", "sizes"), [(1, [1]), (16, [1, 2, 4, 8, 16]), (24, [1, 2, 4, 8, 16, 24])])
def test_graphs_are_captured_for_few_sizes_and_the_most_users(users: int, sizes: list[int]) -> None:
    assert engine.graph_sizes(users) == sizes


def test_a_trace_holds_what_ran_on_the_gpu_in_order() -> None:
    def event(name: str, start: float, end: float, device: DeviceType = DeviceType.CUDA) -> SimpleNamespace:
        return SimpleNamespace(name=name, device_type=device, time_range=SimpleNamespace(start=start, end=end))

    events = [event("b", 14, 20), event("a", 10, 12), event("launch", 0, 90, DeviceType.CPU), event("c", 19, 24)]
    worker = SimpleNamespace(halfbyte_trace=SimpleNamespace(events=lambda: events, __exit__=lambda *error: None))
    assert engine.stop_trace(worker) == [["a", 10, 12], ["b", 14, 20], ["c", 19, 24]]
    assert not vars(worker)


def test_a_decode_step_is_told_from_prompts_and_gaps() -> None:
    kernels = [["prompt", 0, 500], [engine_profile.SAMPLER, 500, 505]]
    for i in range(6):
        start = 600 + 100 * i
        kernels += [["a", start, start + 40], ["b", start + 30, start + 60], ["a", start + 70, start + 80]]
        kernels.append([f"void {engine_profile.SAMPLER}<1>", start + 80, start + 85])
    kernels += [["a", 1200, 1201], [engine_profile.SAMPLER, 1300, 1301]]  # fewer users
    found = engine.decode_steps(kernels, 4)
    assert (found["step_us"], found["covered_us"], found["busy_us"]) == (100, 75, 85)
    assert [(each["kernel"][:1], each["calls"], each["us"]) for each in found["kernels"]] == [
        ("a", 2, 50), ("b", 1, 30), ("v", 1, 5),
    ]  # fmt: skip
    with pytest.raises(RuntimeError, match="8 calls of"):
        engine.decode_steps(kernels, 7)


def test_a_step_is_what_more_tokens_take() -> None:
    assert engine.step_ms([0.5, 0.52, 0.48], [0.26, 0.25, 0.3], 8 + 24) == pytest.approx(10.0)


def test_the_host_is_watched_while_it_works() -> None:
    worker = SimpleNamespace()
    before = sys.getswitchinterval()
    engine.start_watch(worker)

    def busy() -> None:
        end = time.perf_counter() + 0.3
        while time.perf_counter() < end:
            pass

    busy()
    found = engine.shares(engine.stop_watch(worker))
    assert not vars(worker)
    assert sys.getswitchinterval() == before
    name = "test_vllm_engine.py:busy"
    assert found["looks"] > 20
    assert found["within"][name] > 0.9
    assert found["itself"][name] > 0.9
    caller = "test_vllm_engine.py:test_the_host_is_watched_while_it_works"
    assert found["within"][caller] > 0.9
    assert found["itself"].get(caller, 0.0) < 0.1


def test_a_profile_without_steps_still_has_the_host(tmp_path: Path) -> None:
    """Another runner of vLLM's has another sampler; what is shown then says so."""
    answers = {engine.stop_watch: [(("a.py:f", "a.py:g"), 3), (("a.py:g",), 1)], engine.stop_trace: [["k", 0, 1]]}
    llm = SimpleNamespace(
        collective_rpc=lambda function: [answers.get(function)], generate=lambda *arguments, **named: None
    )
    asked = SimpleNamespace(llm=llm, _generate=lambda *arguments: None)
    found = engine.Engine.profile(asked, 16)
    assert found["host"]["within"] == {"a.py:g": 1.0, "a.py:f": 0.75}
    assert found["host"]["itself"] == {"a.py:f": 0.75, "a.py:g": 0.25}
    shown = list(engine.describe("halfbyte-0", found))
    assert "0 calls of" in shown[0]
    assert "a.py:f 75%" in shown[-1]


def test_ranks_are_told_from_the_arm_and_have_rows_of_their_own(tmp_path: Path) -> None:
    assert engine.engines("plain-0,halfbyte@2-8") == [("plain", 0), ("halfbyte@2", 8)]
    with pytest.raises(ValueError, match="not other-0"):
        engine.engines("other-0")
    (tmp_path / "adapters" / "0").mkdir(parents=True)
    (tmp_path / "adapters" / "0" / "adapter_config.json").write_text(json.dumps({"r": 16}))
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 8}))
    settings = engine.Settings(tmp_path, tmp_path / "rows", [], [4], 32, 1, [], [], 10, False)
    pair: Any = {
        engine.PLAIN: FakeChild(engine.PLAIN, [2.0, 2.0], [1, 2, 3], []),
        "halfbyte@2": FakeChild("halfbyte@2", [0.5, 0.5], [1, 5, 3], []),
    }
    plain, ours, *_ = engine.measure(settings, pair, ABOUT)
    assert (plain["engine"], ours["engine"]) == ("vllm 3 LLM", "vllm 3 LLM, 2 ranks")
    assert (ours["kernel"], ours["tokens_per_s"]) == ("halfbyte 1", 256.0)
    assert (ours["answers_first"], ours["answers_differing"]) == (1, 1.0)
    assert "batch_invariant" not in ours
    variant: Any = FakeChild(engine.VARIANT, [0.25, 0.25], [1], [])
    row, *_ = engine.measure(settings, {engine.VARIANT: variant}, ABOUT)
    assert (row["kernel"], row["batch_invariant"], row["tokens_per_s"]) == ("halfbyte 1", False, 512.0)


ENGINE = """
import json, os, sys, time
arm, answers = sys.argv[sys.argv.index("--arm") + 1], int(sys.argv[sys.argv.index("--answers") + 1])
if arm == "halfbyte":
    time.sleep(600)
if os.fork() == 0:  # as vLLM's own process
    time.sleep(600)
out = os.fdopen(answers, "w")
print(json.dumps({"ready_s": 1.0, "imported_s": 0.5}), file=out, flush=True)
for line in sys.stdin:
    words = json.loads(line)
    value = {"time": 0.25, "answers": [], "counters": {}}.get(words["do"], {"error": "no such thing"})
    print(json.dumps(value), file=out, flush=True)
"""


def test_an_engine_that_is_late_costs_its_own_rows_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 8}))
    (tmp_path / "engine.py").write_text(ENGINE)
    monkeypatch.setattr(engine, "__file__", str(tmp_path / "engine.py"))
    monkeypatch.setattr(engine, "about", lambda: ABOUT)
    monkeypatch.setattr(engine.signal, "signal", lambda *arguments: None)
    started: list[engine.Child] = []
    begin = engine.Child.__init__

    def remember(self: engine.Child, *arguments: Any) -> None:
        begin(self, *arguments)
        started.append(self)

    monkeypatch.setattr(engine.Child, "__init__", remember)
    rows = tmp_path / "rows.jsonl"
    engines = [(engine.OURS, 0), (engine.PLAIN, 0)]
    settings = engine.Settings(tmp_path, rows, engines, [1, 4], 32, 1, [4], [4], 2, False)
    engine.run(settings)
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [(row["kernel"], row["users"], row["new_tokens"]) for row in found] == [
        ("bitsandbytes 2", 1, 32),
        ("bitsandbytes 2", 4, 32),
        ("bitsandbytes 2", 1, 1),
    ]
    shown = capsys.readouterr().out
    assert "the engine plain-0 cannot profile:\nno such thing" in shown
    assert "halfbyte-0: did not start" in shown
    assert "plain-0: ready after 1 s" in shown
    for child in started:
        assert select.select([child.answers], [], [], 10)[0]  # nobody is left who could write to it
        assert child.answers.read() == ""
