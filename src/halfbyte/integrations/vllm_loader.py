"""What halfbyte adds to vLLM's loader of bitsandbytes models: its kernels, and checkpoints split for several ranks.

vLLM's own loader goes on reading the files and naming the weights; `Loading` is put before it. vLLM refuses a model
that is already quantised where there are several tensor-parallel ranks, since its way of splitting quantises anew.
Here each rank takes its rows or columns of the packed weight (`checkpoints.split`), with the values that one rank has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoints.split import split_columns, split_rows
from ..formats import PackedWeight
from ..ops import check_weight
from . import bitsandbytes as switch
from . import vllm_layers, vllm_lora, vllm_report
from .vllm import VARIABLE, logger

MS = (1, 2, 4, 8, 16, 32, 64)  # rows of x that layers are got ready for where no CUDA graphs are captured
SHOWN_MS = (1, 8, 64, 2048)  # whose kernels the log names
DTYPE = torch.bfloat16  # vLLM casts activations of 4-bit layers to it


@dataclass(frozen=True)
class Cut:
    """How a weight is shared out: along N ("rows") or K ("columns"), this rank's number, and how many there are.

    fused: several of vLLM's shards lie in one tensor on disk, which its layer cannot take in shares.
    """

    along: str
    rank: int
    ranks: int
    fused: bool = False

    def take(self, weight: PackedWeight, name: str) -> PackedWeight:
        """This rank's share. Raises ValueError, naming layer, shape, ranks and blocksize, where there is none."""
        if self.fused:
            raise ValueError(
                f"{name}: several layers lie in one quantised tensor {list(weight.shape)}, which cannot be split over "
                f"{self.ranks} tensor-parallel ranks here; use --pipeline-parallel-size, or a checkpoint with a tensor "
                "for each"
            )
        split = split_rows if self.along == "rows" else split_columns
        return split(weight, self.rank, self.ranks, name)


class Loading:
    """Goes before a BitsAndBytesModelLoader of vLLM's; see the module."""

    _sizes: tuple[int, ...] = ()
    _config: Any = None
    _cuts: dict[str, Cut]

    def load_model(self, vllm_config: Any, model_config: Any, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's. Remembers for which batches it will capture CUDA graphs, and whether there will be adapters."""
        self._sizes = tuple(vllm_config.compilation_config.cudagraph_capture_sizes or ())
        self._config = vllm_config
        return super().load_model(vllm_config, model_config, *args, **kwargs)  # type: ignore[misc]

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """As vLLM's, with halfbyte's operators on, and its kernels compiled for every layer before graphs are captured.

        Raises ValueError for a model with 4-bit experts, and where a weight cannot be split over the ranks.
        """
        refuse_experts(model)
        try:
            vllm_layers.enable()
        except (ImportError, RuntimeError) as error:
            logger.warning("halfbyte does not serve this model: %s", error)
            super().load_weights(model, model_config)  # type: ignore[misc]
            return
        super().load_weights(model, model_config)  # type: ignore[misc]
        layers = find_layers(model)
        if not layers:
            return  # bitsandbytes' 8-bit format, for example
        for layer in layers.values():
            if layer.shards[0].weight.device.type == "cuda":
                layer.prepare(self._sizes or MS, DTYPE)
        for line in describe(layers):
            logger.info("%s", line)
        if self._config is not None:
            vllm_lora.enable(self._config, self._sizes or MS)
        vllm_report.start()

    def _verify_model_compatibility(self, model: nn.Module, model_config: Any) -> None:
        """As vLLM's, but for its refusal of quantised models on several ranks."""
        from vllm.distributed import get_tensor_model_parallel_world_size

        self._cuts = {}
        try:
            super()._verify_model_compatibility(model, model_config)  # type: ignore[misc]
        except ValueError:
            quantization = getattr(model_config.hf_config, "quantization_config", None) or {}
            eight = quantization.get("load_in_8bit", False)
            if eight or not self.pre_quant or get_tensor_model_parallel_world_size() == 1:  # type: ignore[attr-defined]
                raise
            self.load_8bit = False
        else:
            return
        from vllm.model_executor.utils import get_packed_modules_mapping

        self._cuts = find_cuts(model, get_packed_modules_mapping(model))

    def _quantized_4bit_generator(self, *args: Any) -> Iterator[tuple[str, Tensor]]:
        """As vLLM's: (name in the file, codes), having put the weight's QuantState in the last argument.

        Both are this rank's share. Nested offsets stay in fp32: vLLM loads under the model's dtype as torch's default,
        and bitsandbytes would round them to that.
        """
        states: dict[str, Any] = args[-1]
        items = super()._quantized_4bit_generator(*args)  # type: ignore[misc]
        while True:
            with default_dtype(torch.float32):
                item = next(items, None)
            if item is None:
                return
            name, tensor = item
            latest = next(reversed(states), "")  # this weight's, or an earlier one's, whose cut is used up
            cut = self._cuts.pop(latest.removesuffix(".weight"), None)
            yield name, tensor if cut is None else share(cut, tensor, states[latest], latest)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """torch's default dtype, for a block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def share(cut: Cut, codes: Tensor, state: Any, name: str) -> Tensor:
    """A rank's codes [bytes, 1] of a weight of bitsandbytes; its QuantState then describes that share."""
    key = switch.format_key(state)
    if key is None:
        raise ValueError(f"{name}: halfbyte has no format for {state.quant_type} in blocks of {state.blocksize}")
    device = state.absmax.device
    parts = switch.raw_parts(codes.to(device), state)
    mine = cut.take(check_weight(parts[0], parts, key, *state.shape).packed, name)
    state.absmax, state.shape = mine.parts["absmax"], torch.Size(mine.shape)
    state.nested, state.offset, state.state2 = False, None, None
    return mine.codes.view(-1, 1)


def find_cuts(model: nn.Module, packed: dict[str, list[str]]) -> dict[str, Cut]:
    """For each weight that ranks share, under its module's name in the checkpoint, how it is cut.

    packed: vLLM's merged modules, as {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}.
    """
    from vllm.model_executor.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear

    cuts: dict[str, Cut] = {}
    for name, module in model.named_modules():
        ranks = getattr(module, "tp_size", 1)
        if ranks == 1 or not isinstance(module, ColumnParallelLinear | RowParallelLinear):
            continue
        if isinstance(module, RowParallelLinear):
            cuts[name] = Cut("columns", module.tp_rank, ranks)
            continue
        cuts[name] = Cut("rows", module.tp_rank, ranks, fused=len(getattr(module, "output_sizes", (0,))) > 1)
        for own, pieces in packed.items():
            if pieces == [own] or not f".{name}".endswith(f".{own}"):
                continue
            for index, piece in enumerate(pieces):
                # with more ranks than key-value heads, several ranks have the same one
                copies = module.num_kv_head_replicas if isinstance(module, QKVParallelLinear) and index else 1
                cuts[name.removesuffix(own) + piece] = Cut("rows", module.tp_rank // copies, ranks // copies)
    return cuts


def refuse_experts(model: nn.Module) -> None:
    """Raise ValueError for a model with 4-bit experts: there is no kernel for them, here or in vLLM."""
    names = [
        name
        for name, module in model.named_modules()
        if type(getattr(module, "quant_method", None)).__name__ == "BitsAndBytesMoEMethod"
    ]
    if names:
        raise ValueError(
            f"halfbyte has no kernel for mixture-of-experts layers in 4 bits ({len(names)} of them, the first is "
            f"{names[0]}). vLLM itself would decode all experts to 16 bits in every step: {VARIABLE}=1 has it do so, "
            "without halfbyte"
        )


def find_layers(model: nn.Module) -> dict[str, vllm_layers.Layer]:
    """Every 4-bit layer that vLLM's operator will be called with, by its name, ready to be used."""
    layers = {}
    for name, parameter in model.named_parameters():
        states, offsets = getattr(parameter, "bnb_quant_state", None), getattr(parameter, "bnb_shard_offsets", None)
        if isinstance(states, dict) and offsets is not None and all(hasattr(s, "quant_type") for s in states.values()):
            try:
                layers[name.removesuffix(".weight")] = vllm_layers.layer_of(parameter, offsets)
            except (switch.Unserved, TypeError, ValueError) as error:
                logger.warning("halfbyte leaves %s to bitsandbytes: %s", name, error)
    return layers


def describe(layers: dict[str, vllm_layers.Layer]) -> list[str]:
    """Which kernels serve which layers, a line for each kind of layer."""
    kinds: Counter[str] = Counter()
    for name, layer in layers.items():
        by_kernel: dict[str, list[str]] = {}
        for m in SHOWN_MS:
            try:
                kernel = layer.kernel(DTYPE, m).name
            except switch.Unserved:
                kernel = "bitsandbytes"
            by_kernel.setdefault(kernel, []).append(str(m))
        kernels = ", ".join(f"{kernel} for M = {', '.join(ms)}" for kernel, ms in by_kernel.items())
        launches = "one launch" if len(layer.shards) == 1 else f"{len(layer.shards)} launches"
        merged = "" if layer.pieces == 1 else f", {layer.pieces} shards in {launches}"
        n, k = layer.shape
        kinds[f"{name.rpartition('.')[2]} [{n}, {k}] {layer.key}{merged}: {kernels}"] += 1
    return [f"halfbyte serves {count} × {kind}" for kind, count in kinds.items()]
