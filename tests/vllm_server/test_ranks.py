"""A prequantised checkpoint on two tensor-parallel ranks, where vLLM alone raises; with an adapter.

Where there are GPUs, on two of them.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from server import GPU, clean_environment
from vllm_model import ADAPTERS, LAYERS, MERGED, Answers

from halfbyte import open_checkpoint

NOISE = 0.05
PROMPTS = [[5, 6, 7, 8, 9], list(range(40, 70))]
ROWS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@pytest.fixture(scope="module", params=["eager", "graphs"])
def mode(request: pytest.FixtureRequest) -> str:
    """Layer by layer, or compiled and in CUDA graphs."""
    if request.param == "graphs" and not GPU:
        pytest.skip("needs two CUDA devices")
    if GPU and torch.cuda.device_count() < 2:
        pytest.skip("needs a second CUDA device")
    return request.param


@pytest.fixture(scope="module")
def result(mode: str, python: str, model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    script = Path(__file__).with_name("ranks.py")
    # one core for each rank; by itself vLLM wants a NUMA node for each
    environment = clean_environment() | {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    options: dict[str, Any] = {"enforce_eager": mode == "eager"}
    if GPU:
        options |= {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 1 << 30}
    done = subprocess.run(
        [python, script, model, json.dumps(PROMPTS), model / ADAPTERS[0], json.dumps(options)],
        cwd=tmp_path_factory.mktemp("ranks"),
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert lines, (done.stdout + done.stderr)[-6000:]
    return json.loads(lines[0].removeprefix("RESULT "))


def digest(values: Any) -> str:
    return hashlib.sha256(values.contiguous().numpy().tobytes()).hexdigest()


def test_every_weight_has_the_values_of_one_rank(result: dict[str, Any], model: Path) -> None:
    """Bit for bit: the checkpoint's fp32 values, cut by rows or columns."""
    checkpoint = open_checkpoint(model)
    expected: list[dict[str, list[str]]] = [{}, {}]
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for merged, block in (("qkv_proj", "self_attn"), ("gate_up_proj", "mlp")):
            parts = [checkpoint.load(f"{prefix}.{block}.{name}.weight").dequantize() for name in ROWS[merged]]
            for rank in range(2):
                expected[rank][f"{prefix}.{block}.{merged}.weight"] = [digest(part.chunk(2)[rank]) for part in parts]
        for name, block in (("o_proj", "self_attn"), ("down_proj", "mlp")):
            values = checkpoint.load(f"{prefix}.{block}.{name}.weight").dequantize()
            for rank in range(2):
                expected[rank][f"{prefix}.{block}.{name}.weight"] = [digest(values.chunk(2, dim=1)[rank])]
    assert [rank["layers"] for rank in result["ranks"]] == expected


def test_answers_are_those_of_float64(result: dict[str, Any], answers: Answers) -> None:
    """Of the base, and of an adapter, whose A or B the ranks share."""
    asked = [(name, prompt) for name in ("base", ADAPTERS[0]) for prompt in PROMPTS]
    for (name, prompt), one in zip(asked, result["completions"], strict=True):
        assert answers.distance(name, prompt, one["tokens"], one["logprobs"]) < NOISE


def test_every_multiply_of_both_ranks_was_ours(result: dict[str, Any], mode: str) -> None:
    """In graphs a call counts when it is captured, for 1, 2, 4 and 8 rows at least."""
    for rank in result["ranks"]:
        assert rank["passed"] == 0
        assert rank["served"] >= LAYERS * MERGED * (16 if mode == "eager" else 4)
