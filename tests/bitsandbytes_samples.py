"""Models on bitsandbytes' layers that several test files share."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from halfbyte.integrations.bitsandbytes import format_key, raw_parts
from halfbyte.ops import check_weight

TINY_LAYERS = 14  # 4-bit layers of `tiny_llama`


def tiny_llama(target: Path, intermediate: int = 160) -> Path:
    """A dense checkpoint of a small Llama with random weights; 160 is no multiple of NF4's blocks of 64."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=intermediate, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=96, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(target)
    return target


def load_4bit(path: Path, nested: bool = True, device_map: Any = "cpu", dtype: torch.dtype = torch.bfloat16) -> Any:
    """A dense checkpoint, quantised to NF4 by bitsandbytes as transformers loads it."""
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=nested, bnb_4bit_compute_dtype=dtype
    )  # fmt: skip
    return AutoModelForCausalLM.from_pretrained(path, quantization_config=config, dtype=dtype, device_map=device_map)


def in_float64(model: Any) -> Any:
    """The same model, PEFT's adapters included, with its 4-bit layers decoded and everything in float64."""
    import bitsandbytes as bnb

    exact = copy.deepcopy(model)
    for parent in exact.modules():
        for name, child in parent.named_children():
            if isinstance(child, bnb.nn.Linear4bit):
                state = child.weight.quant_state
                n, k = state.shape
                packed = check_weight(child.weight, raw_parts(child.weight, state), format_key(state), n, k).packed
                dense = nn.Linear(k, n, bias=child.bias is not None, device="meta")
                dense.weight = nn.Parameter(packed.dequantize(torch.float64), requires_grad=False)
                dense.bias = child.bias
                setattr(parent, name, dense)
    return exact.double()
