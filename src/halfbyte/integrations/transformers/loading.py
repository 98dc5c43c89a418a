"""A model and its tokenizer from a directory or a GGUF file."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from .config import HalfbyteConfig
from .gguf import load_gguf


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

    path: a directory, dense or in bitsandbytes' or halfbyte's 4-bit format, or a GGUF file, whose 4-bit tensors stay
    packed. dtype: of everything else and of activations; by default the checkpoint's, bf16 for GGUF. options: as for
    `from_pretrained` (device_map, attn_implementation, ..., quantization_config for a dense directory).

    Raises CheckpointError or ValueError for files that halfbyte cannot read, what transformers raises for others.
    """
    if Path(path).is_file():
        return load_gguf(Path(path), dtype or torch.bfloat16, **options)
    tokenizer = AutoTokenizer.from_pretrained(path)
    options.setdefault("config", read_config(path))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype or "auto", **options)
    return model, tokenizer
