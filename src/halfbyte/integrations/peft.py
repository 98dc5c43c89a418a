"""PEFT's LoRA layers over 4-bit layers on halfbyte: what the adapters add joins the base's pass, rounded once with it.

`halfbyte.optimize(model)` gives each such layer another class, derived from its own, whose `forward` calls
`halfbyte.adapters` where that computes what PEFT would, from the very tensors that PEFT keeps: nothing is copied or
remembered, so loading, training, switching and scaling adapters are seen at once. For everything else it calls PEFT's
own `forward`, and counts that with the reason (`halfbyte.integrations.bitsandbytes.status()` shows it).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from peft.tuners import lora
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from ..adapter_ops import linear_adapters_op, shrink_op
from ..adapters import MAX_RANK, Adapter, pack, row_index
from ..counters import counts
from ..kernels.registry import DTYPES
from ..nn import QuantLinear

OPERATOR = "lora"  # under which calls that PEFT computes are counted
BASE = "__base__"  # PEFT's name for rows without an adapter


class _Folded:
    """The forward of a LoRA layer that adds its adapters in the base layer's pass; before PEFT's class in the bases."""

    base_layer: nn.Module
    lora_A: nn.ModuleDict
    lora_B: nn.ModuleDict

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        layer: Any = self
        names = kwargs.get("adapter_names")
        if names is not None:
            layer._check_forward_args(x, *args, **kwargs)
        used = [] if layer.disable_adapters or layer.merged else _used(layer, names)
        if used:
            folded = _folded(layer, used, names, x, args, kwargs)
            if isinstance(folded, Tensor):
                return folded
            if not torch.compiler.is_compiling():
                counts.passed(OPERATOR, folded)
        out: Tensor = super().forward(x, *args, **kwargs)  # type: ignore[misc]
        return out


class FoldedLinear(_Folded, lora.Linear):  # type: ignore[misc]
    """PEFT's LoRA over a QuantLinear."""


_CLASSES: dict[type, type] = {lora.Linear: FoldedLinear}
if hasattr(lora, "Linear4bit"):

    class FoldedLinear4bit(_Folded, lora.Linear4bit):  # type: ignore[misc]
        """PEFT's LoRA over bitsandbytes' Linear4bit."""

    _CLASSES[lora.Linear4bit] = FoldedLinear4bit


def fold(model: nn.Module, left: Counter[str]) -> int:
    """Make PEFT's LoRA layers over QuantLinear fold their adapters; returns how many layers that are no bitsandbytes'
    run on halfbyte for it (those of bitsandbytes are counted where they are taken over).

    left: counts the reasons of those that stay as they are; calls of other kinds of adapters are counted as passed on.
    """
    count = 0
    for module in model.modules():
        base = getattr(module, "base_layer", None)
        if not isinstance(module, BaseTunerLayer) or not isinstance(base, QuantLinear):
            continue
        kind = type(module)
        if "forward" in module.__dict__:
            left["their forward was replaced, by a hook of accelerate's for example"] += 1
            continue
        if kind in _CLASSES:
            module.__dict__["_halfbyte_was"] = kind
            module.__class__ = _CLASSES[kind]
        elif not isinstance(module, _Folded):
            left[f"PEFT's {kind.__name__} has a forward of its own"] += 1
            if _count_other not in module._forward_pre_hooks.values():
                module.register_forward_pre_hook(_count_other)
            continue
        count += not isinstance(base, _linear4bit())
    return count


def unfold(model: nn.Module) -> int:
    """Undo `fold`; returns the same number."""
    count = 0
    for module in model.modules():
        for number, hook in list(module._forward_pre_hooks.items()):
            if hook is _count_other:
                del module._forward_pre_hooks[number]
        if isinstance(module, _Folded):
            count += not isinstance(module.base_layer, _linear4bit())
            module.__class__ = module.__dict__.pop("_halfbyte_was")
    return count


def _linear4bit() -> type | tuple[()]:
    """bitsandbytes' class, or nothing where it is not installed."""
    try:
        from bitsandbytes.nn import Linear4bit
    except ImportError:
        return ()
    kind: type = Linear4bit
    return kind


def _count_other(module: nn.Module, args: Any) -> None:
    if not torch.compiler.is_compiling():
        counts.passed(OPERATOR, f"{type(module).__module__}.{type(module).__name__} is not folded")


def _used(layer: Any, names: Sequence[str] | None) -> list[str]:
    """The adapters of this layer that a call uses, in order; [] where the base layer is all there is to compute."""
    wanted = layer.active_adapters if names is None else dict.fromkeys(names)
    held = layer._modules["lora_A"]._modules
    return [name for name in wanted if name != BASE and name in held]


def _folded(
    layer: Any, used: list[str], names: Sequence[str] | None, x: Tensor, args: Any, kwargs: Any
) -> Tensor | str:
    """The layer's output, or the reason why PEFT has to compute it."""
    if args or any(value is not None for key, value in kwargs.items() if key != "adapter_names"):
        return "arguments beyond x and adapter_names"
    plain = []
    for name in used:
        found = _plain(layer, name, x)
        if isinstance(found, str):
            return found
        plain.append(found)
    base = layer._modules["base_layer"]
    reason = _reason_of_base(base, x)
    if reason is not None:
        return reason
    operands = base.operands(x)
    if operands is None:
        return "the base layer is bitsandbytes' here: a gradient is needed, or many rows, which it does faster"
    dtype, parts, bias, key, n, k = operands
    if x.dtype != dtype != torch.float32:
        return f"x in {x.dtype} is computed in {dtype}: the adapters would get a rounded x"
    if names is None:
        if sum(each.rank for each in plain) > MAX_RANK:
            return f"several adapters of more than {MAX_RANK} ranks together"
        adapters, index = pack(plain if len(plain) == 1 else [_sum(plain)], n, k), None
    else:
        adapters = pack(plain, n, k)
        slots = tuple(used.index(name) if name in used else -1 for name in names)
        index = row_index(_slots(slots, x.device), x)
    wide = x if x.dtype == dtype else x.to(dtype)
    shrunk = shrink_op(wide, adapters.a, adapters.spans, index, adapters.width)
    tensors = (shrunk, adapters.b, adapters.table, adapters.scalings, index)
    out: Tensor = linear_adapters_op(wide, parts, bias, key, n, k, *tensors)
    return out if x.dtype == dtype else out.to(x.dtype)


def _plain(layer: Any, name: str, x: Tensor) -> Adapter | str:
    """An adapter on PEFT's own tensors, or why its part is more than s B A x, or is needed with its gradients.

    Modules and parameters are looked up in their dictionaries: `getattr` would take five times as long.
    """
    if name in layer.lora_variant:
        return f"a variant of LoRA: {type(layer.lora_variant[name]).__name__}"
    modules = layer._modules
    dropout = modules["lora_dropout"]._modules[name]
    if dropout.training and not isinstance(dropout, nn.Identity):
        return "LoRA dropout in training"
    weights = []
    for kind in ("lora_A", "lora_B"):
        part = modules[kind]._modules[name]
        if type(part) is not nn.Linear or part._forward_hooks or part._forward_pre_hooks:
            return f"a {type(part).__name__} with a forward or hooks of its own in the adapter"
        if part._parameters["bias"] is not None:
            return "LoRA with a bias"
        weight: Any = part._parameters["weight"]
        if weight.dtype not in DTYPES or weight.device != x.device:
            return f"adapters in {weight.dtype} on {weight.device} with x on {x.device}"
        weights.append(weight)
    a, b = weights
    if torch.is_grad_enabled() and (x.requires_grad or a.requires_grad or b.requires_grad):
        return "gradients: they stay PEFT's"
    if a.shape[0] > MAX_RANK:
        return f"a rank of more than {MAX_RANK}"
    return Adapter(a, b, layer.scaling[name])


def _sum(stacked: Sequence[Adapter]) -> Adapter:
    """Several adapters that all apply to the same rows, as one."""
    a = torch.cat([each.a.float() for each in stacked])
    b = torch.cat([each.scaling * each.b.float() for each in stacked], dim=1)
    return Adapter(a, b)


@lru_cache(maxsize=256)
def _slots_now(slots: tuple[int, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(slots, dtype=torch.int32, device=device)


def _slots(slots: tuple[int, ...], device: torch.device) -> Tensor:
    """int32 [batch]; the same for all layers of a step, so that it is copied to the device once."""
    if torch.compiler.is_compiling():
        return torch.tensor(slots, dtype=torch.int32, device=device)
    return _slots_now(slots, device)


def _reason_of_base(base: Any, x: Tensor) -> str | None:
    if not isinstance(base, QuantLinear):
        return f"its base layer is a {type(base).__name__}, no QuantLinear"
    if base._forward_hooks or base._forward_pre_hooks or "forward" in base.__dict__:
        return "hooks on its base layer, which must be called for them"
    if torch.is_autocast_enabled(x.device.type):
        return "autocast"
    return None
