"""`halfbyte quantize`: a model's directory or a GGUF file into a 4-bit checkpoint."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from ..checkpoints.convert import DEFAULT_SKIP, Progress, Summary, quantize_checkpoint


def quantize_model(
    source: Path,
    target: Path,
    format: str,
    extra_skip: Sequence[str] = (),
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Summary:
    """Write `source` to the directory `target` with its Linear weights in `format` (a key such as "nf4-64-nested").

    A GGUF file is first written as dense bf16 safetensors beside the target, by transformers, and removed afterwards.
    Raises what `quantize_checkpoint` and `export_gguf` raise.
    """
    skip = (*DEFAULT_SKIP, *extra_skip)
    if source.is_dir():
        return quantize_checkpoint(source, target, format, skip=skip, overwrite=overwrite, progress=progress)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".halfbyte-dense-") as folder:
        dense = export_gguf(source, Path(folder) / "model")
        return quantize_checkpoint(dense, target, format, skip=skip, overwrite=overwrite, progress=progress)


def export_gguf(source: Path, target: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write the model in a GGUF file as a dense transformers directory with config and tokenizer; returns `target`.

    Raises FileNotFoundError where there is no such file, ValueError where transformers cannot read its architecture.
    """
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not source.is_file():
        raise FileNotFoundError(f"no such file: {source}")
    origin = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    options = {"dtype": dtype}
    if hasattr(transformers, "GgufConfig"):  # newer releases would keep the weights packed, which they cannot save
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**origin, **options)
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(**origin).save_pretrained(target)
    return target
