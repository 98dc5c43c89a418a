"""A model and its tokenizer from a directory or a GGUF file."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ...checkpoints import open_checkpoint
from ...formats import PackedWeight
from .build import build_model
from .config import HalfbyteConfig
from .gguf import load_gguf

WORD_METHODS = ("gptq", "awq")


def read_config(path: str | PathLike[str], **options: Any) -> Any:
    """A directory's transformers config, with a bitsandbytes 4-bit checkpoint handed over to halfbyte.

    For `AutoModel.from_pretrained(path, config=read_config(path))`. options: as for AutoConfig.from_pretrained.
    Raises ValueError for a bitsandbytes checkpoint that is not 4-bit.
    """
    config = AutoConfig.from_pretrained(path, **options)
    quantization = getattr(config, "quantization_config", None)
    if isinstance(quantization, dict) and quantization.get("quant_method", "bitsandbytes") == "bitsandbytes":
        config.quantization_config = HalfbyteConfig.from_bitsandbytes(quantization).own_dict()
    return config


def load(path: str | PathLike[str], *, dtype: torch.dtype | None = None, **options: Any) -> tuple[Any, Any]:
    """(model, tokenizer) of a causal language model; its 4-bit layers are QuantLinear.

    path: a directory, dense or in bitsandbytes', halfbyte's, GPTQ's or AWQ's 4-bit format, or a GGUF file, whose 4-bit
    tensors stay packed. dtype: of everything else and of activations; by default the checkpoint's, bf16 for GGUF.
    options: as for `from_pretrained` (device_map, attn_implementation, ..., quantization_config for a dense directory).

    Raises CheckpointError or ValueError for files that halfbyte cannot read, what transformers raises for others.
    """
    if Path(path).is_file():
        return load_gguf(Path(path), dtype or torch.bfloat16, **options)
    tokenizer = AutoTokenizer.from_pretrained(path)
    config = options.pop("config", None) or read_config(path)
    quantization = getattr(config, "quantization_config", None)
    if isinstance(quantization, dict) and quantization.get("quant_method") in WORD_METHODS:
        return _load_words(Path(path), config, dtype or "auto", **options), tokenizer
    model = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=dtype or "auto", **options)
    return model, tokenizer


def _load_words(path: Path, config: Any, dtype: torch.dtype | str, **options: Any) -> Any:
    """A GPTQ or AWQ directory."""
    packed: dict[str, PackedWeight] = {}
    dense: dict[str, Tensor] = {}
    checkpoint = open_checkpoint(path)
    for entry in checkpoint.entries():
        weight = checkpoint.load(entry.name)
        if isinstance(weight, PackedWeight):
            packed[entry.name] = weight
        else:
            dense[entry.name] = weight
    return build_model(path, config, packed, dense, dtype, **options)
