"""The OpenAI server on a prequantised checkpoint with two adapters."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from server import BOOT_S, GPU, Completion, Server, complete_all, metrics, served, start
from vllm_model import ADAPTERS, LAYERS, MERGED, RANK, VOCABULARY, Answers

NOISE = 0.05  # of a logprob: what bf16 activations leave of it
EFFECT = 0.3  # what another adapter changes, at least


@pytest.fixture(scope="module")
def server(python: str, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    work = tmp_path_factory.mktemp("adapters")
    folder = work / "metrics"
    folder.mkdir()
    modules = [f"{name}={model / name}" for name in ADAPTERS]
    # As many slots as adapters: vLLM's own kernels on CPUs would take the last one for tokens without an adapter where
    # others in the batch have one (they index with -1).
    lora = ["--enable-lora", "--max-loras", "2", "--max-lora-rank", str(RANK), "--lora-modules", *modules]
    environment = {"PROMETHEUS_MULTIPROC_DIR": str(folder), "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    with start(python, model, work, *lora, **environment) as server:
        server.wait(BOOT_S)
        yield server


@pytest.fixture(scope="module")
def completions(server: Server) -> list[Completion]:
    """Base and adapters, four prompts each, at the same time."""
    generator = random.Random(0)
    prompts = [[generator.randrange(3, VOCABULARY) for _ in range(length)] for length in (3, 9, 17, 30)]
    return complete_all(server, [(name, prompt) for prompt in prompts for name in ("base", *ADAPTERS)])


def test_answers_are_those_of_each_model(completions: list[Completion], answers: Answers) -> None:
    """By float64's logprobs; the control is that the other models' are far away."""
    for one in completions:
        assert answers.distance(one.model, one.prompt, one.tokens, one.logprobs) < NOISE, one
        for other in {"base", *ADAPTERS} - {one.model}:
            assert answers.distance(other, one.prompt, one.tokens, one.logprobs) > EFFECT, (one, other)


def test_every_multiply_was_ours(server: Server, completions: list[Completion]) -> None:
    time.sleep(5)  # metrics follow within seconds
    found = metrics(server)
    assert not [name for name in found if "passed_on" in name]
    assert all('operator="apply_bnb_4bit"' in name for name in found)
    calls = sum(found.values())
    assert calls % (LAYERS * MERGED) == 0  # every layer of every step
    longest = max(len(one.tokens) for one in completions)
    assert calls >= LAYERS * MERGED * longest
    assert [name for name in found if 'rows="9-64"' in name], "no batch of several users, or prompt"
    folded = sum(count for name, count in found.items() if ' with adapters"' in name)
    assert folded >= LAYERS * MERGED * longest


def test_adapters_come_and_go(server: Server, model: Path, answers: Answers) -> None:
    """Unloaded and loaded again under another name, into the slot of the first, while the server runs."""
    prompt = list(range(30, 47))
    server.ask("/v1/unload_lora_adapter", {"lora_name": "a"})
    server.ask("/v1/load_lora_adapter", {"lora_name": "again", "lora_path": str(model / "b")})
    server.ask("/v1/load_lora_adapter", {"lora_name": "a2", "lora_path": str(model / "a")})
    requests = [(name, prompt) for name in ("base", "again", "a2", "b")]
    for one, exact in zip(complete_all(server, requests), ("base", "b", "a", "b"), strict=True):
        assert answers.distance(exact, one.prompt, one.tokens, one.logprobs) < NOISE, one


def test_the_log_says_what_serves_and_what_was_served(server: Server, completions: list[Completion]) -> None:
    """The last test of this server: it is stopped."""
    time.sleep(5)
    counted = sum(metrics(server).values())
    server.stop()
    kernel = "codebook_mma" if GPU else "cpu_linear"
    assert f"halfbyte serves 2 × qkv_proj [512, 256] nf4-64, 3 shards in one launch: {kernel} for M = 1" in server.log
    assert "halfbyte serves 2 × gate_up_proj [1024, 256] nf4-64, 2 shards in one launch" in server.log
    assert served(server.log) == (counted, 0)
