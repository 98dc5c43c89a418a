"""LoRA adapters in vLLM, folded into the pass over the base weight.

vLLM's own LoRA layers run the base layer, round, and add what adapters add with two kernels of their own. `Folding`
goes before them where the base layer is in 4 bits: it only runs the base layer, whose operator (`vllm_layers`) finds
the adapters with the parameter. vLLM goes on loading adapters into its stacked tensors and saying which token has
which; both stay where they are, so that CUDA graphs hold. A step without adapters is what it is without LoRA.

What is not folded is added by vLLM's kernels, and counted with the reason: long prompts, kernels that take no adapters.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..adapter_ops import start_shrink
from ..counters import bucket, counts
from ..kernels import Kernel
from ..kernels.registry import Expand
from . import bitsandbytes as switch
from . import vllm_layers
from .vllm import logger
from .vllm_layers import ADAPTERS, Layer, layer_of

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
    reason = None
    if vllm_config.lora_config.fully_sharded_loras:
        reason = "they are fully sharded over the ranks"
    elif not isinstance(vllm_config.additional_config, dict):
        reason = "vLLM's additional_config is not a dictionary"
    if reason is not None:
        counts.passed(vllm_layers.ADDED, reason)
        logger.warning("halfbyte leaves adapters to vLLM's kernels: %s", reason)
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
    logger.info("halfbyte folds adapters into the pass over 4-bit weights, in kernels that can")


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
        """As vLLM's, but a layer of several shards has one A and one B, of which vLLM's tensors for each are views.

        A x of all shards is then one multiply, and B [N, shards * rank], zeros but for each shard's rows and columns,
        goes with a single weight of all rows.
        """
        super().create_lora_weights(max_loras, lora_config, model_config)  # type: ignore[misc]
        stacked: tuple[tuple[Tensor, ...], ...] = (self.lora_a_stacked, self.lora_b_stacked)  # type: ignore[has-type]
        self.a, self.b = (parts[0] for parts in stacked)
        count = len(stacked[0])
        if count == 1:
            return
        slots, _, rank, k = self.a.shape
        heights = [part.shape[2] for part in stacked[1]]
        self.a = self.a.new_zeros(slots, 1, count * rank, k)
        self.b = self.b.new_zeros(slots, 1, sum(heights), count * rank)
        self.lora_a_stacked = torch.split(self.a, rank, 2)
        rows = torch.split(self.b, heights, 2)
        self.lora_b_stacked = tuple(part[..., i * rank : (i + 1) * rank] for i, part in enumerate(rows))

    def set_mapping(self, punica_wrapper: Any) -> None:
        """As vLLM's; the operator then has the adapters."""
        super().set_mapping(punica_wrapper)  # type: ignore[misc]
        keep_current(punica_wrapper)
        weight = self.base_layer.weight  # type: ignore[attr-defined]
        # vLLM's GPU kernels take contiguous tensors; those for CPUs gather B for each token, zeros and all
        merged = self.a.device.type == "cuda"
        slices = ((self.a,), (self.b,)) if merged else (self.lora_a_stacked, self.lora_b_stacked)
        adapters = Adapters.of(self.a, self.b, punica_wrapper, slices)
        setattr(weight, ADAPTERS, adapters)
        if weight.device.type == "cuda":
            adapters.prepare(layer_of(weight, weight.bnb_shard_offsets), _sizes)

    def apply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The base layer; vLLM's method would add the adapters to what it returns."""
        base = self.base_layer  # type: ignore[attr-defined]
        result: Tensor = base.quant_method.apply(base, x, bias)
        return result


def keep_current(punica: Any) -> None:
    """Have vLLM's mapping of tokens on a GPU say so when none has an adapter.

    vLLM leaves that of an earlier step in place, as its own kernels look at another list. A CUDA graph that was
    captured with adapters, and may be the only one, would go on applying them.
    """
    meta = getattr(punica, "token_mapping_meta", None)
    if meta is None or "prepare_tensors" in vars(meta):
        return
    prepare = meta.prepare_tensors

    def prepare_tensors(mapping: Tensor) -> None:
        prepare(mapping)
        if meta.no_lora_flag_cpu.item():
            meta.token_lora_mapping.fill_(-1)

    meta.prepare_tensors = prepare_tensors


def is_4bit(weight: Any) -> bool:
    """Whether a parameter is one that vLLM's operator for 4 bits is called with."""
    states = getattr(weight, "bnb_quant_state", None)
    return (
        isinstance(states, dict)
        and hasattr(weight, "bnb_shard_offsets")
        and all(hasattr(state, "quant_type") for state in states.values())
    )


@dataclass(frozen=True, eq=False)
class Adapters:
    """A layer's adapters as vLLM stacks them, and as halfbyte's operators take them.

    a: [slots, 1, rank, K], b: [slots, 1, N, rank]. slices: the same for vLLM's kernels, A and B by shards or whole.
    spans, table and scalings, those of `AdapterSet`, are made once: each slot has the full rank, an adapter of a
    smaller one zeros.
    """

    punica: Any
    a: Tensor
    b: Tensor
    slices: tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
    spans: Tensor
    table: Tensor
    scalings: Tensor

    @classmethod
    def of(cls, a: Tensor, b: Tensor, punica: Any, slices: tuple[tuple[Tensor, ...], tuple[Tensor, ...]]) -> Adapters:
        slots, _, rank, _ = a.shape
        first = torch.arange(slots, dtype=torch.int32, device=a.device) * rank
        full = torch.full_like(first, rank)
        table = torch.stack([torch.zeros_like(first), full, first, full], 1)
        scalings = torch.ones(slots, device=a.device)  # vLLM has them in B
        return cls(punica, a, b, slices, torch.stack([first, full], 1), table, scalings)

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
        used = (index >= 0) & (index < self.a.shape[0])
        return torch.where(used, index, -1).to(torch.int32) if used.any() else None

    def multiply(self, layer: Layer, x: Tensor, index: Tensor, out: Tensor) -> None:
        """Write the layer of x [M, K], each row with its adapter, to contiguous `out` [M, N] of x's dtype.

        Raises Unserved, TypeError or ValueError where halfbyte does not; `out` may hold anything then.
        """
        kernel = self._run(layer, x, index, out)
        counts.serve(vllm_layers.OPERATOR, f"{kernel.name} with adapters", bucket(x.shape[0]))

    def _run(self, layer: Layer, x: Tensor, index: Tensor, out: Tensor) -> Kernel:
        if len(layer.shards) > 1:
            raise switch.Unserved("a layer of shards that take a launch each")
        m = x.shape[0]
        if m > switch.SERVED_ROWS:  # kernels for so many have adapters added by torch
            raise switch.Unserved(f"M {bucket(m)}: vLLM's kernels add them in little of a long step's time")
        layer.check(x, out)
        weight = layer.shards[0].weight
        kernel = layer.kernel(x.dtype, m)
        if kernel.run_adapters is None:
            raise switch.Unserved(f"{kernel.name} folds no adapters")
        rows = x if x.stride(1) == 1 else x.contiguous()
        rank, k = self.a.shape[2:]
        shrunk, shrink = start_shrink(rows, self.a.view(-1, k), self.spans, index, rank)
        expand = Expand(shrunk, self.b.view(-1), self.table, self.scalings, index, shrink)
        reason = kernel.run_adapters(rows, weight.packed, None, expand, out)
        if reason is not None:
            raise switch.Unserved(reason)
        return kernel

    def add(self, x: Tensor, out: Tensor) -> None:
        """Add the adapters to a base layer's `out` with vLLM's kernels."""
        a, b = self.slices
        self.punica.add_lora_linear(out, x, a, b, 1.0, tuple(part.shape[2] for part in b))

    def prepare(self, layer: Layer, ms: Iterable[int]) -> None:
        """Compile and load what `multiply` will need for each of these numbers of rows; nothing is counted."""
        n, k = layer.shape

        def call(m: int) -> None:
            x = torch.zeros(m, k, dtype=DTYPE, device=self.a.device)
            with suppress(switch.Unserved):
                self._run(layer, x, x.new_zeros(m, dtype=torch.int32), x.new_empty(m, n))

        vllm_layers.side_by_side(call, ms, self.a.device)
