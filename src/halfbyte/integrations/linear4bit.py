"""bitsandbytes' Linear4bit as a QuantLinear, on the memory that it has: what `halfbyte.optimize` makes of each.

The switch (`halfbyte.integrations.bitsandbytes`) leaves bitsandbytes' modules as they are, and so the Python that
they run at each call: checks, casts that mostly change nothing, a look at the CPU. Here the module itself changes its
class, to one that is a QuantLinear and still a Linear4bit: object, parameters, hooks and names stay, so that PEFT and
transformers go on finding what they look for, and the state is saved as bitsandbytes saves it.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import Any

import torch
from bitsandbytes.nn import Linear4bit, LinearFP4, LinearNF4, Params4bit
from torch import Tensor, nn

from ..device import arch_of
from ..formats import PackedWeight, get_format
from ..kernels import Problem, shortcut
from ..kernels.registry import DTYPES
from ..nn import Operands, QuantLinear
from ..ops import linear_op
from ..plan import plan
from .bitsandbytes import OUR_BACKENDS, SERVED_ROWS, decoding_is_faster, format_key, put_back, raw_parts
from .join import Joined, joins

KNOWN = (Linear4bit, LinearNF4, LinearFP4)  # their forward is the one that is replaced
MOST_ROWS = 1 << 20  # no more rows of x than these are asked about
shortcut.trust(Params4bit)  # its __torch_function__ cares for torch.chunk and torch.split


class QuantLinear4bit(QuantLinear, Linear4bit):  # type: ignore[misc]
    """A `Linear4bit` on halfbyte's operator; `optimize` makes them, there is no other way to one.

    forward: x [..., in_features] -> [..., out_features] of x's dtype, computed in `compute_dtype` as in bitsandbytes;
    without a cast where x has it. What halfbyte would not do faster, bitsandbytes' own forward computes: calls that
    need a gradient (its backward pass decodes the weight fast), and more rows than a kernel takes.

    `weight` is bitsandbytes' `Params4bit`, and all that is known of the weight is read from it at each call, so that
    others may replace it, as PEFT does when it merges an adapter.
    """

    _apply = nn.Module._apply  # Params4bit moves its scales along with it, and never casts them
    _save_to_state_dict = Linear4bit._save_to_state_dict
    _load_from_state_dict = nn.Module._load_from_state_dict
    extra_repr = nn.Linear.extra_repr
    support_avx512bf16_for_cpu = property(lambda self: False, lambda self, value: None)  # never repack

    def __init__(self) -> None:
        raise TypeError("QuantLinear4bit: halfbyte.optimize(model) makes these out of bitsandbytes' Linear4bit")

    def forward(self, x: Tensor) -> Tensor:
        operands = self.operands(x)
        if operands is None:
            return Linear4bit.forward(self, x)  # type: ignore[no-any-return]
        dtype, parts, bias, key, n, k = operands
        if x.dtype == dtype:
            out: Tensor = linear_op(x, parts, bias, key, n, k)
            return out
        out = linear_op(x.to(dtype), parts, bias, key, n, k)
        return out.to(x.dtype)

    def operands(self, x: Tensor) -> Operands | None:
        weight: Any = self._parameters["weight"]
        dtype: Any = self.compute_dtype
        state: Any = getattr(weight, "quant_state", None)
        if state is None or dtype is None or (torch.is_grad_enabled() and (x.requires_grad or self._bias_learns)):
            return None
        key = format_key(state)
        n, k = state.shape
        if key is None or x.numel() > most_rows(key, dtype, n, k, x.device) * k:
            return None
        bias: Any = self._parameters["bias"]
        if bias is not None and bias.dtype != dtype:
            bias = bias.to(dtype)
        return dtype, raw_parts(weight, state), bias, key, n, k

    def _part_list(self) -> list[Tensor]:
        weight: Any = self._parameters["weight"]  # `getattr` would take ten times as long
        return raw_parts(weight, weight.quant_state)

    @property
    def _state(self) -> Any:
        """bitsandbytes' QuantState of the weight."""
        weight: Any = self.weight
        return weight.quant_state

    @property
    def _bias_learns(self) -> bool:
        return self.bias is not None and self.bias.requires_grad

    @property
    def packed(self) -> PackedWeight:
        """The weight, on this layer's memory."""
        state = self._state
        key = format_key(state)
        if key is None:
            raise ValueError(f"QuantLinear4bit: halfbyte has no format for {state.quant_type} in {state.blocksize}s")
        format = get_format(key)
        parts = raw_parts(self.weight, state)
        parts[0] = parts[0].detach().view(-1)
        return PackedWeight(format, tuple(state.shape), dict(zip(format.parts(*state.shape), parts, strict=True)))

    @property
    def weight_dtype(self) -> torch.dtype:  # type: ignore[override]
        """The weight's dtype before quantisation."""
        dtype: torch.dtype = self._state.dtype
        return dtype

    @property
    def _format_key(self) -> str:  # type: ignore[override]
        return self.packed.format.key

    def adopt(self, weight: PackedWeight) -> None:
        raise TypeError("QuantLinear4bit: its weight is bitsandbytes'; call halfbyte.restore(model) to replace layers")


class JoinedLinear4bit(Joined, QuantLinear4bit):
    """A QuantLinear4bit that shares a launch with others of the same input (`join.py`)."""


joins(QuantLinear4bit, JoinedLinear4bit)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def most_rows(key: str, dtype: torch.dtype, n: int, k: int, device: torch.device) -> int:
    """Rows of x up to which halfbyte serves a layer [n, k]; beyond, bitsandbytes is faster, or there is no kernel."""
    return _most_rows(key, dtype, n, k, device)


@lru_cache(maxsize=4096)
def _most_rows(key: str, dtype: torch.dtype, n: int, k: int, device: torch.device) -> int:
    if dtype not in DTYPES:
        return 0

    def serves(m: int) -> bool:
        kernel = plan(Problem(get_format(key), dtype, m, n, k, arch_of(device))).kernel
        return kernel.backend in OUR_BACKENDS and (m <= SERVED_ROWS or not decoding_is_faster(kernel, dtype, m, (n, k)))

    fewest, most = 0, MOST_ROWS
    if serves(most):
        return most
    while most - fewest > 1:  # kernels serve up to some number of rows
        middle = (fewest + most) // 2
        fewest, most = (middle, most) if serves(middle) else (fewest, middle)
    return fewest


def take_over(model: nn.Module, left: Counter[str]) -> int:
    """Make every 4-bit layer of bitsandbytes in `model` a QuantLinear4bit; returns how many there are now.

    left: counts the reasons of those that stay as they are.
    """
    count = 0
    for module in model.modules():
        if not isinstance(module, Linear4bit):
            continue
        if not isinstance(module, QuantLinear4bit):
            reason = _reason_against(module)
            if reason is not None:
                left[reason] += 1
                continue
            put_back(module)
            module.__dict__["_halfbyte_was"] = type(module)
            module.__class__ = QuantLinear4bit
        count += 1
    return count


def give_back(model: nn.Module) -> int:
    """Undo `take_over`; returns how many there were."""
    count = 0
    for module in model.modules():
        if isinstance(module, QuantLinear4bit):
            module.__class__ = module.__dict__.pop("_halfbyte_was")
            count += 1
    return count


def _reason_against(module: Any) -> str | None:
    """Why a Linear4bit cannot be optimised, or None."""
    if type(module) not in KNOWN:
        return f"{type(module).__name__} may have a forward of its own"
    weight = module.weight
    state = getattr(weight, "quant_state", None)
    if state is None or weight.is_meta or not weight.bnb_quantized:
        return "their weights are not quantised, or not in memory"
    if "forward" in module.__dict__:
        return "their forward was replaced, by a hook of accelerate's for example"
    if len(state.shape) != 2 or tuple(state.shape) != (module.out_features, module.in_features):
        return f"a weight of shape {list(state.shape)}"
    return None
