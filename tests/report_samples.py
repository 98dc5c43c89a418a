"""Rows, a proof and a page for the tests of `halfbyte report`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from halfbyte.checkpoints import quantize_checkpoint
from halfbyte.lab.prove import Settings, prove
from halfbyte.lab.report import write_report
from halfbyte.lab.report.rows import Row, default_files

RESULTS = default_files(Path(__file__).parents[1] / "benchmarks" / "results")


def row(**changes: Any) -> Row:
    """A row of the linear suite."""
    return {
        "suite": "linear", "device": "NVIDIA H200", "arch": "sm_90a", "driver": "1", "torch": "2", "commit": "abc",
        "date": "2026-01-01T00:00:00+00:00", "kernel": "halfbyte codebook_mma", "format": "nf4-64", "nested": False,
        "dtype": "bf16", "M": 1, "N": 128, "K": 256, "bytes": 18432, "us": 4.0, "us_p20": 3.0, "us_p80": 5.0,
        "tb_per_s": 18432 / 4e6, "ceiling_tb_per_s": 4.0, "error": 0.001, "rounding_limit": 0.001, "adapters": 0,
        "rank": 0,
    } | changes  # fmt: skip


def ladder_row(**changes: Any) -> Row:
    extra = {"suite": "ladder", "dtype": "fp16", "rung": "ladder_fp16", "sweep": "l2", "cache": "cold"}
    return row(**extra | {"l2_bytes": 50 * 2**20, "copy_tb_per_s": 3.5} | changes)


def ladder() -> list[Row]:
    """Rows of two kernels across an L2."""
    return [
        ladder_row(rung=rung, cache=cache, N=n, K=4096, bytes=2 * n * 4096, us=n / 100, tb_per_s=rate)
        for rung, rate in (("ladder_fp16", 3.0), ("cublas", 2.5))
        for cache in ("cold", "warm")
        for n in (512, 2048, 8192, 32768)
    ]


def write_rows(file: Path, *rows: object) -> Path:
    file.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in rows))
    return file


def make_proof(folder: Path) -> Path:
    """A proof of two small layers, with their speed; folder/proof.json."""
    (folder / "dense").mkdir()
    generator = torch.Generator().manual_seed(0)
    weights = {f"layers.{i}.proj.weight": torch.randn(96, 128, generator=generator) for i in range(2)}
    save_file(weights, folder / "dense" / "model.safetensors", {"format": "pt"})
    (folder / "dense" / "config.json").write_text("{}")
    quantize_checkpoint(folder / "dense", folder / "packed", "nf4-64")
    settings = Settings(path=folder / "packed", against=("dense",), ms=(1, 2), seconds=0.002, warm=True, model=False)
    prove(settings, folder / "proof.json")
    return folder / "proof.json"


def make_report(folder: Path) -> Path:
    """A page of the repository's rows, rows of a ladder, and a proof; folder/report.html."""
    out = folder / "report.html"
    write_report(out, [*RESULTS, write_rows(folder / "ladder.jsonl", *ladder())], [make_proof(folder)])
    return out


def code_bytes(key: str) -> list[int]:
    """Where the bytes that the explorer shows are, by docs/formats.md."""
    if key.startswith("gptq"):
        return [32 * word + j for word in range(16) for j in range(4)]
    if key.startswith("awq"):
        return [4 * word + j for word in range(16) for j in range(4)]
    start, count = {"q4_0": (2, 16), "q4_1": (4, 16), "iq4_nl": (2, 16), "mxfp4_gguf": (1, 16), "q4_k": (16, 128),
                    "mxfp4": (0, 16), "nvfp4": (0, 8)}.get(key, (0, 32))  # fmt: skip
    return list(range(start, start + count))
