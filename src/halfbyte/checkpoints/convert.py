"""A dense Hugging Face model -> the same model with its Linear weights in bitsandbytes' NF4 or FP4 form.

What counts as a Linear weight is decided by name and shape: a floating-point matrix called `….weight` whose module's
name matches no pattern of `skip`. A pattern of m dotted parts is compared with the last m parts of the module's name,
part by part, with * and ? as in a shell: "lm_head" matches "lm_head" and "model.lm_head", "mlp.gate" matches
"model.layers.0.mlp.gate" and not "model.layers.0.mlp.gate_proj".
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..formats import BlockFormat, PackedWeight, get_format, quantize
from .base import Checkpoint
from .bitsandbytes import FAMILIES, pack_state
from .errors import CheckpointError
from .huggingface import HuggingFaceCheckpoint
from .staging import check_target, staged_directory
from .writer import MAX_SHARD_BYTES, write_safetensors

# Heads that turn hidden states into answers; embeddings and position tables; norms; routers of mixtures of experts, and
# single experts, because transformers 5 fuses them into one dense 3-D tensor on loading and has no 4-bit form of it.
DEFAULT_SKIP = (
    "lm_head", "embed_out", "output", "score", "classifier", "qa_outputs",
    "*embed*", "wte", "wpe", "shared", "relative_attention_bias",
    "gate", "router", "shared_expert_gate", "experts.*.*",
    "*norm*", "ln_*",
)  # fmt: skip
# GPT-2 and its relatives keep Conv1D weights as [in, out]: quantised as they are, blocks would run across outputs.
CONV1D_MODELS = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
COPIED = (".json", ".model", ".txt", ".jinja", ".tiktoken", ".py", ".md")  # tokenizer, generation, remote code, card
COPIED_NAMES = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY")
FLOATS = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}

# name of the tensor just written, how many so far, of how many (None where that is not known)
Progress = Callable[[str, int, int | None], None]


@dataclass
class Summary:
    """What a conversion did.

    quantized: names of the weights now in 4 bits. left: matrices (and fused 3-D tensors) that stay dense, with the
    reason. dense: number of all tensors that stay dense, vectors included. bytes_before, bytes_after: of the tensors.
    """

    format: str
    quantized: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    dense: int = 0
    bytes_before: int = 0
    bytes_after: int = 0


def quantize_checkpoint(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    format: str = "nf4-64",
    skip: Sequence[str] = DEFAULT_SKIP,
    progress: Progress | None = None,
    *,
    overwrite: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Summary:
    """Quantise a Hugging Face model directory (dense safetensors) to another directory.

    The result loads with transformers and bitsandbytes; tokenizer and generation files are copied. Holds one dense
    tensor at a time; `dst` appears only when it is complete.

    Raises CheckpointError where src is no dense model directory, dst is src, contains it, or is not empty without
    `overwrite`, or a weight holds NaN or infinity; ValueError for another format than nf4 and fp4.
    """
    source, target = Path(src).resolve(), Path(dst).resolve()
    if source == target or target in source.parents:
        raise CheckpointError(dst, "destination", f"is the source {source}, or contains it; give another directory")
    if not source.is_dir():
        raise CheckpointError(src, "source", "is not a model directory (config.json and safetensors)")
    check_target(target, overwrite)  # before the work, not after it
    checkpoint = HuggingFaceCheckpoint(source)
    if checkpoint.config is None:
        raise CheckpointError(source, "config.json", "not found; it is needed to load the converted model")
    if checkpoint.kind != "dense" or "quantization_config" in checkpoint.config:
        raise CheckpointError(source, "source", f"is quantised already ({checkpoint.kind}); start from a dense model")
    return quantize_tensors(
        _walk(checkpoint),
        checkpoint.config,
        target,
        format,
        skip,
        progress,
        total=len(checkpoint.entries()),
        extras=lambda stage: _copy_files(source, stage),
        overwrite=overwrite,
        max_shard_bytes=max_shard_bytes,
    )


def quantize_tensors(
    tensors: Iterable[tuple[str, Tensor]],
    config: Mapping[str, Any],
    dst: str | os.PathLike[str],
    format: str = "nf4-64",
    skip: Sequence[str] = DEFAULT_SKIP,
    progress: Progress | None = None,
    *,
    total: int | None = None,
    extras: Callable[[Path], None] | None = None,
    overwrite: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Summary:
    """Quantise a model given as named tensors (Hugging Face's names) and its config.json.

    total: number of tensors, for `progress`. extras: is given the directory being written and adds files to it
    (tokenizer, licence). Otherwise as `quantize_checkpoint`.
    """
    chosen = get_format(format)
    if chosen.name not in FAMILIES:
        raise ValueError(f"quantize: checkpoints are written as nf4 or fp4, not as '{format}'")
    if config.get("model_type") in CONV1D_MODELS:
        raise CheckpointError(
            dst, "model_type", f"'{config['model_type']}' keeps transposed Conv1D weights, which are not supported"
        )
    summary = Summary(chosen.key)
    with staged_directory(dst, overwrite) as stage:
        pieces = _convert(tensors, chosen, skip, summary, progress, total, str(dst))
        write_safetensors(stage, pieces, max_shard_bytes=max_shard_bytes)
        changed = {**config, "quantization_config": _quantization_config(config, chosen, summary)}
        (stage / "config.json").write_text(json.dumps(changed, indent=2) + "\n", encoding="utf-8")
        if extras is not None:
            extras(stage)
    return summary


def _walk(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """Each tensor of a dense checkpoint; its pages are given back when the next one is asked for."""
    for entry in checkpoint.entries():
        tensor = checkpoint.load(entry.name)
        assert isinstance(tensor, Tensor)
        yield entry.name, tensor
        del tensor
        checkpoint.release(entry.name)


def _convert(
    tensors: Iterable[tuple[str, Tensor]],
    format: BlockFormat,
    skip: Sequence[str],
    summary: Summary,
    progress: Progress | None,
    total: int | None,
    where: str,
) -> Iterator[tuple[str, Tensor]]:
    """The tensors to write, filling `summary` on the way."""
    for name, tensor in tensors:
        summary.bytes_before += tensor.nbytes
        reason = why_dense(name, tensor, skip)
        if reason is None:
            pieces = pack_state(_quantize(name, tensor, format, where), name, FLOATS[tensor.dtype])
            summary.quantized.append(name)
        else:
            pieces = {name: tensor}
            summary.dense += 1
            if tensor.dim() > 1:
                summary.left[name] = reason
        for piece, data in pieces.items():
            summary.bytes_after += data.nbytes
            yield piece, data
        del tensor, pieces, data  # before the next one is made
        if progress is not None:
            progress(name, len(summary.quantized) + summary.dense, total)


def why_dense(name: str, tensor: Tensor, skip: Sequence[str] = DEFAULT_SKIP) -> str | None:
    """Why a tensor is no Linear weight to quantise, in words; None where it is one."""
    if tensor.dim() >= 3:
        return f"{tensor.dim()}-D, not a matrix" + (" (fused experts)" if "expert" in name else "")
    if tensor.dim() < 2:
        return "not a matrix"
    if not name.endswith(".weight"):
        return "not named '.weight', so not a Linear layer's"
    if tensor.dtype not in FLOATS:
        return f"its dtype is {tensor.dtype}, not float32, float16 or bfloat16"
    if tensor.numel() == 0:
        return "empty"
    for pattern in skip:
        if _matches(name.removesuffix(".weight"), pattern):
            return f"skipped by name ('{pattern}')"
    return None


def _matches(module: str, pattern: str) -> bool:
    wanted = pattern.split(".")
    parts = module.split(".")[-len(wanted) :]
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _quantize(name: str, tensor: Tensor, format: BlockFormat, where: str) -> PackedWeight:
    try:
        return quantize(tensor, format)
    except ValueError as error:
        raise CheckpointError(where, name, str(error)) from error


def _quantization_config(config: Mapping[str, Any], format: BlockFormat, summary: Summary) -> dict[str, Any]:
    """What transformers 5 writes for load_in_4bit (BitsAndBytesConfig.to_dict).

    Every matrix left dense is listed in llm_int8_skip_modules: without a list transformers would make 4-bit layers of
    routers, with one it skips nothing else, so lm_head (a tied one has no tensor of its own) is always in it.
    """
    compute = config.get("dtype") or config.get("torch_dtype")
    modules = [name.removesuffix(".weight") for name in summary.left if name.endswith(".weight")]
    skipped = [re.sub(r"\.experts\.\d+\..*", ".experts", module) for module in modules]  # once a layer, not an expert
    return {
        "_load_in_4bit": True,
        "_load_in_8bit": False,
        "bnb_4bit_compute_dtype": compute if compute in FLOATS.values() else "bfloat16",
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_quant_type": format.name,
        "bnb_4bit_use_double_quant": format.nested,
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": list(dict.fromkeys(["lm_head", *skipped])),
        "llm_int8_threshold": 6.0,
        "load_in_4bit": True,
        "load_in_8bit": False,
        "quant_method": "bitsandbytes",
    }


def _copy_files(source: Path, stage: Path) -> None:
    """Everything beside the weights that a user of the model needs: by suffix, links followed."""
    for file in sorted(source.iterdir()):
        index = file.name.endswith(".index.json")
        wanted = file.suffix in COPIED or file.name.upper().startswith(COPIED_NAMES)
        if wanted and not index and file.name != "config.json" and not file.name.startswith(".") and file.is_file():
            shutil.copyfile(file, stage / file.name)
