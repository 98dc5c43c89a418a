"""vLLM's OpenAI server as these tests start it, and what they read from it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from vllm_process import Server

BOOT_S = 240
TOKENS = 16
# Batches of at most 64 rows, so that on a CPU no 4-bit multiply is one that bitsandbytes does faster.
ARGUMENTS = (
    "--max-model-len", "128", "--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--shutdown-timeout", "20",
)  # fmt: skip
GPU = torch.cuda.is_available()
if GPU:  # several servers share one; and a replayed graph's calls would not be counted
    ARGUMENTS += ("--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(1 << 30), "--enforce-eager")
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
PATH = "HALFBYTE_VLLM_PATH"  # the PYTHONPATH of vLLM's Python, where it needs one
DROPPED = ("PYTHONPATH", "VIRTUAL_ENV", "PROMETHEUS_MULTIPROC_DIR", "HALFBYTE_DISABLE", "HALFBYTE_BITSANDBYTES")


@dataclass(frozen=True)
class Completion:
    """A prompt, the tokens that the server added, and their logprobs."""

    model: str
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


def start(python: str, model: Path, work: Path, *arguments: str, **environment: str) -> Server:
    return Server(python, model, [*ARGUMENTS, *arguments], clean_environment() | environment, work / "log.txt")


def complete_all(server: Server, requests: Sequence[tuple[str, list[int]]]) -> list[Completion]:
    """All at the same time, so that the server batches base and adapters together."""

    def complete(request: tuple[str, list[int]]) -> Completion:
        return Completion(*request, *server.complete(*request, TOKENS))

    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(complete, requests))


def metrics(server: Server) -> dict[str, float]:
    """halfbyte's, by their names and labels."""
    found = re.findall(r"^(halfbyte_\w+_total\{.*\}) (\S+)$", server.ask("/metrics"), re.MULTILINE)
    return {name: float(value) for name, value in found}


def clean_environment() -> dict[str, str]:
    """This process's, without what would reach into the other environment, plus ENVIRONMENT."""
    kept = {key: value for key, value in os.environ.items() if key not in DROPPED}
    return kept | ENVIRONMENT | ({"PYTHONPATH": os.environ[PATH]} if PATH in os.environ else {})


def served(log: str) -> tuple[int, int]:
    """(calls served, calls passed on), from the last such line of a log."""
    found = re.findall(r"halfbyte for bitsandbytes: on; ([\d,]+) calls served, ([\d,]+) passed on", log)
    assert found, log[-6000:]
    return int(found[-1][0].replace(",", "")), int(found[-1][1].replace(",", ""))
