"""LoRA adapters in vLLM, folded into the pass over the base weight.

vLLM's own LoRA layers run the base layer, round, and add what adapters add with two kernels of their own. `Folding`
goes before them where the base layer is in 4 bits: it only runs the base layer, whose operator (`vllm_layers`) finds
the adapters with the parameter. vLLM goes on loading adapters into its stacked tensors and saying which token has
which; both stay where they are, so that CUDA graphs hold. A step without adapters is what it is without LoRA.

What is not folded is added by vLLM's kernels, and counted with the reason: long prompts, kernels that take no adapters.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..adapter_ops import shrink_op
from ..counters import bucket, counts
from ..kernels.registry import Expand
from . import bitsandbytes as switch
from . import vllm_layers
from .vllm import logger
from .vllm_layers import ADAPTERS, Shard, layer_of, shards_of

DTYPE = torch.bfloat16  # of A and B, and what vLLM casts activations of 4-bit layers to
PLAIN_LAYERS = (
    "ColumnParallelLinear", "MergedColumnParallelLinear", "QKVParallelLinear", "RowParallelLinear", "ReplicatedLinear",
)  # fmt: skip
COMPILED = "halfbyte_adapters"  # in vLLM's additional_config, which tells caches of compiled code apart

_original: tuple[type, ...] | None = None  # vLLM's LoRA layers, while ours stand among them
_sizes: tuple[int, ...] = ()


def enable(vllm_config: Any, sizes: Iterable[int]) -> None:
    """Have the model that is being loaded fold its adapters; called before vLLM makes its LoRA layers.

    sizes: rows of x for which kernels are to be ready before CUDA graphs are captured. Does nothing without LoRA.
    """
    global _original, _sizes
    disable()
    if vllm_config.lora_config is None:
        return
    if not isinstance(vllm_config.additional_config, dict):
        logger.warning("halfbyte folds no adapters: vLLM's additional_config is not a dictionary")
        return
    # Code compiled with our layers leaves the adapters to the operator, code compiled without adds them itself: neither
    # may be found in vLLM's caches by the other.
    vllm_config.additional_config[COMPILED] = 1
    from vllm.lora import utils
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

    _sizes = tuple(sizes)
    classes: list[type] = []
    for each in utils._all_lora_classes:
        if issubclass(each, BaseLinearLayerWithLoRA) and "Sharded" not in each.__name__:
            classes.append(type(f"Halfbyte{each.__name__}", (Folding, each), {}))
        classes.append(each)
    _original, utils._all_lora_classes = utils._all_lora_classes, tuple(classes)


def disable() -> None:
    """Leave LoRA layers that vLLM makes from now on to vLLM."""
    global _original
    if _original is not None:
        from vllm.lora import utils

        utils._all_lora_classes, _original = _original, None


def reason_against(base: Any, lora_config: Any) -> str | None:
    """Why adapters of a 4-bit layer are not folded, or None."""
    if type(base).__name__ not in PLAIN_LAYERS:
        return f"{type(base).__name__} may do more than multiply"
    if lora_config.lora_dtype != DTYPE:
        return f"adapters in {lora_config.lora_dtype}, where activations are cast to {DTYPE}"
    if lora_config.fully_sharded_loras and base.tp_size > 1:
        return "fully sharded adapters"
    return None


class Folding:
    """Goes before a LoRA layer of vLLM's; see the module."""

    @classmethod
    def can_replace_layer(
        cls, source_layer: nn.Module, lora_config: Any, packed_modules_list: list[str], model_config: Any = None
    ) -> bool:
        """As vLLM's, for 4-bit layers whose adapters can be folded."""
        fits = super().can_replace_layer(  # type: ignore[misc]
            source_layer=source_layer,
            lora_config=lora_config,
            packed_modules_list=packed_modules_list,
            model_config=model_config,
        )
        if not fits or not is_4bit(getattr(source_layer, "weight", None)):
            return False
        reason = reason_against(source_layer, lora_config)
        if reason is not None:
            counts.passed(vllm_layers.ADDED, reason)
        return reason is None

    def create_lora_weights(self, max_loras: int, lora_config: Any, model_config: Any = None) -> None:
        """As vLLM's, but A of shards that share x lie side by side, so that one pass makes all of an adapter's A x."""
        super().create_lora_weights(max_loras, lora_config, model_config)  # type: ignore[misc]
        stacked: tuple[Tensor, ...] = self.lora_a_stacked  # type: ignore[has-type]
        self.a = stacked[0]
        if len(stacked) > 1:
            slots, _, rank, k = self.a.shape
            self.a = self.a.new_zeros(slots, len(stacked), rank, k)
            self.lora_a_stacked = tuple(self.a[:, i : i + 1] for i in range(len(stacked)))

    def set_mapping(self, punica_wrapper: Any) -> None:
        """As vLLM's; the operator then has the adapters."""
        super().set_mapping(punica_wrapper)  # type: ignore[misc]
        weight = self.base_layer.weight  # type: ignore[attr-defined]
        adapters = Adapters.of(weight, self.a, self.lora_b_stacked, punica_wrapper)  # type: ignore[attr-defined]
        setattr(weight, ADAPTERS, adapters)
        if weight.device.type == "cuda":
            adapters.prepare(_sizes)

    def apply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The base layer; vLLM's method would add the adapters to what it returns."""
        base = self.base_layer  # type: ignore[attr-defined]
        result: Tensor = base.quant_method.apply(base, x, bias)
        return result


def is_4bit(weight: Any) -> bool:
    """Whether a parameter is one that vLLM's operator for 4 bits is called with."""
    states = getattr(weight, "bnb_quant_state", None)
    return (
        isinstance(states, dict)
        and hasattr(weight, "bnb_shard_offsets")
        and all(hasattr(state, "quant_type") for state in states.values())
    )


@dataclass(frozen=True)
class Slice:
    """Rows start..stop of a layer's output, their weight, and their adapters: flat B, and their table of `Expand`."""

    shard: Shard
    b: Tensor
    table: Tensor


@dataclass(frozen=True, eq=False)
class Adapters:
    """A layer's adapters as vLLM stacks them, and as halfbyte's operators take them.

    stacked_a: [slots, shards, rank, K], stacked_b: of each shard [slots, 1, N, rank]. spans, scalings and the slices'
    tables are made once: every slot has the full rank, an adapter of a smaller one zeros. address: where the weight's
    codes were, to notice one that was loaded anew.
    """

    address: int
    punica: Any
    stacked_a: Tensor
    stacked_b: tuple[Tensor, ...]
    spans: Tensor
    scalings: Tensor
    slices: tuple[Slice, ...]

    @classmethod
    def of(cls, weight: Any, a: Tensor, b: tuple[Tensor, ...], punica: Any) -> Adapters:
        """For a 4-bit parameter. Where its shards are not those of the adapters there are no slices."""
        slots, count, rank, _ = a.shape
        numbers = torch.arange(slots, dtype=torch.int32, device=a.device)
        full = torch.full_like(numbers, rank)
        shards = shards_of(weight, weight.bnb_shard_offsets)
        if count == 1:  # one B for all rows
            shards = layer_of(weight, weight.bnb_shard_offsets).shards
        slices = [
            Slice(shard, each.view(-1), torch.stack([full * i, full, numbers * rank, full], 1))
            for i, (shard, each) in enumerate(zip(shards, b, strict=False))
            if shard.stop - shard.start == each.shape[2]
        ]
        whole = len(slices) == len(shards) == count
        spans = torch.stack([numbers * (count * rank), full * count], 1)
        scalings = torch.ones(slots, device=a.device)  # vLLM has them in B
        return cls(weight.data_ptr(), punica, a, b, spans, scalings, tuple(slices) if whole else ())

    def index(self, m: int) -> Tensor | None:
        """int32 [m]: the slot of each of this step's tokens, -1 for none; None where no token has an adapter.

        Looks at nothing on a GPU: vLLM says on the host, and with every graph that it captures, whether there are any.
        """
        meta = getattr(self.punica, "token_mapping_meta", None)
        if meta is not None:
            if meta.no_lora_flag_cpu.item():
                return None
            known: Tensor = meta.token_lora_mapping[:m]
            return known
        index = self.punica._token_lora_indices[:m]  # beyond this step's tokens anything may be in it
        used = (index >= 0) & (index < self.spans.shape[0])
        return torch.where(used, index, -1).to(torch.int32) if used.any() else None

    def multiply(self, weight: Tensor, x: Tensor, index: Tensor, out: Tensor) -> None:
        """Write a parameter's layer of x [M, K], each row with its adapter, to contiguous `out` [M, N] of its dtype.

        Raises Unserved, TypeError or ValueError where halfbyte does not; `out` may hold anything then.
        """
        if weight.data_ptr() != self.address:
            raise switch.Unserved("the weight was loaded anew")
        name = self._run(x, index, out)
        counts.serve(vllm_layers.OPERATOR, f"{name} with adapters", bucket(x.shape[0]))

    def _run(self, x: Tensor, index: Tensor, out: Tensor) -> str:
        if not self.slices:
            raise switch.Unserved("adapters of other shards than the layer's")
        m = x.shape[0]
        for each in self.slices:
            kernel = switch.kernel_for(each.shard.weight, x.dtype, m)
            if kernel.run_adapters is None:
                raise switch.Unserved(f"{kernel.name} folds no adapters")
        rows = x if x.stride(1) == 1 else x.contiguous()
        count, rank, k = self.stacked_a.shape[1:]
        shrunk = shrink_op(rows, self.stacked_a.view(-1, k), self.spans, index, count * rank)
        for each in self.slices:
            weight, target = each.shard.weight, out[:, each.shard.start : each.shard.stop]
            kernel = switch.kernel_for(weight, x.dtype, m)
            gaps = not target.is_contiguous() and kernel.backend != "cpu"
            whole = torch.empty_like(target, memory_format=torch.contiguous_format) if gaps else target
            expand = Expand(shrunk, each.b, each.table, self.scalings, index)
            assert kernel.run_adapters is not None
            reason = kernel.run_adapters(rows, weight.packed, None, expand, whole)
            if reason is not None:
                raise switch.Unserved(reason)
            if gaps:
                target.copy_(whole)
        return kernel.name

    def add(self, x: Tensor, out: Tensor) -> None:
        """Add the adapters to a base layer's `out` with vLLM's kernels."""
        slots, count, rank, k = self.stacked_a.shape
        shrunk = torch.zeros(1, x.shape[0], count * rank, device=x.device)
        self.punica.add_shrink(shrunk, x, (self.stacked_a.view(slots, 1, count * rank, k),), 1.0)
        pieces = shrunk.view(-1, count, rank).transpose(0, 1).contiguous()
        self.punica.add_expand(out, pieces, self.stacked_b, tuple(each.shape[2] for each in self.stacked_b))

    def prepare(self, ms: Iterable[int]) -> None:
        """Compile and load what `multiply` will need for each of these numbers of rows; nothing is counted."""
        k = self.stacked_a.shape[3]
        n = sum(each.shape[2] for each in self.stacked_b)
        for m in ms:
            x = torch.zeros(m, k, dtype=DTYPE, device=self.stacked_a.device)
            try:
                self._run(x, x.new_zeros(m, dtype=torch.int32), x.new_empty(m, n))
            except switch.Unserved:
                continue
