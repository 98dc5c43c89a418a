"""Single layers of bitsandbytes, on any device: their weight as the reference knows it, and a step of training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halfbyte.formats import PackedWeight, get_format


def packed_of(codes: Tensor, state: Any) -> PackedWeight:
    """The weight as halfbyte's reference knows it, in copies of bitsandbytes' tensors."""
    key = f"{state.quant_type}-{state.blocksize}" + ("-nested" if state.nested else "")
    parts = {"codes": codes.detach().clone().view(-1).view(torch.uint8), "absmax": state.absmax.clone()}
    if state.nested:
        parts |= {"nested_absmax": state.state2.absmax.clone(), "nested_quant_map": state.state2.code.clone()}
        parts["nested_offset"] = state.offset.float().clone()
    return PackedWeight(get_format(key), tuple(state.shape), parts)


def weight_of(layer: Any) -> PackedWeight:
    """The weight of a Linear4bit."""
    return packed_of(layer.weight, layer.weight.quant_state)


def training_step(layer: Any, start: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The layer's output for `start`, and the gradients of `start` and of the bias that `upstream` leads to."""
    x = start.clone().requires_grad_()
    layer.bias.grad = None
    out = layer(x)
    out.backward(upstream)
    return out.detach(), x.grad, layer.bias.grad.clone()
