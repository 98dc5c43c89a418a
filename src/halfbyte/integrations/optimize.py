"""`halfbyte.optimize(model)`: bitsandbytes' layers as QuantLinear, and PEFT's LoRA in their pass; `restore` undoes it.

halfbyte.optimize(model)   # how many layers run on halfbyte now
halfbyte.restore(model)    # the very same layers as before
"""

from __future__ import annotations

import logging
import sys
from collections import Counter

from torch import nn

from ..nn import QuantLinear
from .join import JoinedLinear, join, separate

logger = logging.getLogger("halfbyte")


def optimize(model: nn.Module) -> int:
    """Run the 4-bit layers of `model` on halfbyte, LoRA included, in place; returns how many layers do so now.

    Every 4-bit layer of bitsandbytes becomes a QuantLinear (`linear4bit.py`), also below PEFT's adapters, every LoRA
    layer of PEFT over a QuantLinear adds its adapters within that layer's pass (`peft.py`), and QuantLinears of one
    input (q, k and v; gate and up) share a launch where their bytes can lie side by side (`join.py`): those are copied
    into one buffer and become views of it. Nothing else is copied. A weight that bitsandbytes repacked for its AVX-512
    kernels is put back into the checkpoint's layout: its codes exactly, its scales as the bf16 numbers left of them.
    Layers of classes that others derived, and layers without a quantised weight (on the meta device, offloaded), stay
    as they are; the log says so. Call it again after layers were added, moved or copied. No forward pass may run in
    another thread meanwhile, and CUDA graphs recorded before have to be recorded again.

    Raises ValueError where the model has no layer that can be optimised.
    """
    left: Counter[str] = Counter()
    count = 0
    if "bitsandbytes" in sys.modules:  # else nobody can have made a layer of it
        from .linear4bit import take_over

        count += take_over(model, left)
    if "peft" in sys.modules:
        from .peft import fold

        count += fold(model, left)
    count += sum(isinstance(layer, JoinedLinear) for layer in join(model))  # those of bitsandbytes are counted already
    for reason, number in left.items():
        logger.warning("optimize: %d layers stay as they are: %s", number, reason)
    if not count:
        why = (
            "; ".join(left)
            or "it has no bitsandbytes.nn.Linear4bit, no LoRA over a QuantLinear, and no QuantLinears of one input"
        )
        raise ValueError(f"optimize: nothing to do in this model: {why}")
    return count


def restore(model: nn.Module) -> int:
    """Undo `optimize`: the same objects are of their own classes again. Returns how many layers; 0 if none was."""
    count = sum(type(layer) is QuantLinear for layer in separate(model))
    if "peft" in sys.modules:
        from .peft import unfold

        count += unfold(model)
    if "bitsandbytes" in sys.modules:
        from .linear4bit import give_back

        count += give_back(model)
    return count
