"""QuantLinear: a linear layer on 4-bit bytes, whose state_dict is bitsandbytes' where the format is."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .checkpoints import pack_state, unpack_state
from .checkpoints.own import LABEL, pack_own, unpack_own
from .formats import BlockFormat, PackedWeight, get_format, quantize
from .kernels.registry import DTYPES
from .ops import forget_weight, linear_op

BNB_FAMILIES = ("nf4", "fp4")
DECODE_MS = (1, 2, 4, 8)  # rows that `prepare` gets ready for by default
Operands = tuple[torch.dtype, list[Tensor], Tensor | None, str, int, int]


class QuantLinear(nn.Linear):
    """`torch.nn.Linear` whose weight is a checkpoint's 4-bit bytes; they are read in place.

    in_features, out_features: K and N. bias: whether there is one; an ordinary parameter. format: a key such as "nf4",
    "nf4-64-nested" or "q4_0". dtype: of the bias, and what a bitsandbytes checkpoint records as the weight's dtype
    before quantisation (torch's default dtype if None). The weight starts as bytes of zero; `from_linear` and
    `from_packed` make layers with a weight.

    forward: x [..., in_features] in fp32, bf16 or fp16 -> [..., out_features] of x's dtype.

    State: nf4 and fp4 have bitsandbytes' keys (`weight`, `weight.absmax`, `weight.quant_map`, nested ones,
    `weight.quant_state.bitsandbytes__nf4`), and read codes that were stored as fp16, bf16 or fp32. Other formats have
    `weight` (the codes), `weight.<part>` for what else `BlockFormat.parts` names, and `weight.halfbyte`: the bytes of
    {"format": "q4_0", "shape": [N, K]}. On the meta device the state has `weight` and `bias` only: the rest is made
    when there is a weight. `.to(dtype)`, `.half()` and the like move scales but never cast them.

    It is an nn.Linear so that PEFT and others that look for one wrap it; `weight` holds packed bytes, as in
    bitsandbytes' Linear4bit.

    Raises ValueError for an unknown format or a shape that it cannot hold.
    """

    weight: nn.Parameter

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        format: str = "nf4",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would allocate the dense weight
        self.in_features = in_features
        self.out_features = out_features
        self.weight_dtype = dtype or torch.get_default_dtype()
        if self.weight_dtype not in DTYPES:
            raise TypeError(f"QuantLinear: dtype must be float32, bfloat16 or float16, got {self.weight_dtype}")
        chosen = get_format(format)
        chosen.check_shape(out_features, in_features)
        self._set_format(chosen)
        for name, part in chosen.parts(out_features, in_features).items():
            self._set_part(name, torch.zeros(part.shape, dtype=part.dtypes[0], device=device))
        values = torch.zeros(out_features, device=device, dtype=dtype) if bias else None
        self.register_parameter("bias", None if values is None else nn.Parameter(values))

    @classmethod
    def from_packed(
        cls, weight: PackedWeight, bias: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> QuantLinear:
        """A layer on the memory of `weight` and `bias` (fp32, bf16 or fp16 [N]); nothing is copied.

        dtype: what the weight was before quantisation; the bias's dtype, or torch's default, if None.
        """
        if dtype is None and bias is not None:
            dtype = bias.dtype
        n, k = weight.shape
        layer = cls(k, n, bias=False, format=weight.format.key, device="meta", dtype=dtype)
        layer.adopt(weight)
        if bias is not None:
            layer.register_parameter("bias", bias if isinstance(bias, nn.Parameter) else nn.Parameter(bias))
        return layer

    @classmethod
    def from_linear(cls, linear: nn.Linear, format: str = "nf4") -> QuantLinear:
        """Quantise a dense layer; the bias is shared, not copied."""
        layer = cls.from_packed(quantize(linear.weight.detach(), format), linear.bias, linear.weight.dtype)
        return layer.train(linear.training)

    @property
    def format(self) -> BlockFormat:
        """What the bytes mean."""
        return get_format(self._format_key)

    @property
    def packed(self) -> PackedWeight:
        """The weight, on this layer's memory."""
        parts = dict(zip(self.format.parts(*self._shape), self._part_list(), strict=True))
        if self._column:
            parts[self.format.layout.part] = self.weight.view(-1)
        return PackedWeight(self.format, self._shape, parts)

    def adopt(self, weight: PackedWeight) -> None:
        """Take over the memory of a weight of this layer's shape, and its format with it."""
        if weight.shape != self._shape:
            raise ValueError(f"QuantLinear of shape {list(self._shape)} got a weight of shape {list(weight.shape)}")
        for name in self._buffer_names:
            del self._buffers[name]
        self._set_format(weight.format)
        for name, part in weight.parts.items():
            self._set_part(name, part)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight's true values rounded once to `dtype` (by default what it was before), [N, K]."""
        return self.packed.dequantize(dtype or self.weight_dtype)

    def forward(self, x: Tensor) -> Tensor:
        bias: Tensor | None = self._parameters["bias"]  # `getattr` would take five times as long
        if bias is not None and bias.dtype != x.dtype and bias.dtype != torch.float32:
            bias = bias.float()  # exact; the operator adds it before its one rounding
        result: Tensor = linear_op(x, self._part_list(), bias, self._format_key, self.out_features, self.in_features)
        return result

    def operands(self, x: Tensor) -> Operands | None:
        """What an operator takes to compute this layer for x: the dtype of x to compute in, parts, bias, format, N, K.

        None where `forward` has to be called.
        """
        bias: Tensor | None = self.bias
        if bias is not None and bias.dtype != x.dtype and bias.dtype != torch.float32:
            bias = bias.float()
        return x.dtype, self._part_list(), bias, self._format_key, self.out_features, self.in_features

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, format={self._format_key}"

    @property
    def _shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    def _set_format(self, format: BlockFormat) -> None:
        self._format_key = format.key  # the key alone is pickled: a format's description may grow
        self._column = format.name in BNB_FAMILIES  # bitsandbytes keeps codes as [bytes, 1]
        self._buffer_names = tuple(name for name in format.parts(*self._shape) if name != format.layout.part)

    def _set_part(self, name: str, part: Tensor) -> None:
        """Codes become the parameter `weight`, the others buffers.

        The buffers are persistent only in name, because transformers overwrites the others after loading: what is saved
        and loaded, and under which keys, is up to `_save_to_state_dict` and `_load_from_state_dict`.
        """
        if name == self.format.layout.part:
            codes = part.view(-1, 1) if self._column else part
            self.register_parameter("weight", nn.Parameter(codes, requires_grad=False))
        else:
            self.register_buffer(name, part)

    def _part_list(self) -> list[Tensor]:
        """The parts in the format's order, codes first, the very tensors of this module: the operator knows them again.

        Codes that bitsandbytes keeps as a column are one here, too.
        """
        weight: Any = self._parameters["weight"]
        others: dict[str, Any] = self._buffers
        return [weight, *[others[name] for name in self._buffer_names]]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantLinear:
        """Casts reach the bias only: a scale that was rounded once is lost."""
        parts = (self.weight, *self._buffers.values())
        forget_weight(self._part_list())

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if moved.dtype != tensor.dtype and any(tensor is part for part in parts):
                return tensor.to(moved.device)
            return moved

        super()._apply(move, recurse)  # type: ignore[no-untyped-call]
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        name = prefix + "weight"
        destination[name] = self.weight if keep_vars else self.weight.detach()
        if self.bias is not None:
            destination[prefix + "bias"] = self.bias if keep_vars else self.bias.detach()
        if self.weight.is_meta:
            return
        if self._column:
            tensors = pack_state(self.packed, name, str(self.weight_dtype).removeprefix("torch."))
            destination.update((key, tensor) for key, tensor in tensors.items() if key != name)
        else:
            destination.update((key, tensor) for key, tensor in pack_own(self.packed, name).items() if key != name)

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Read the weight's group of tensors, then let torch copy or assign them under this module's own names."""
        mine = {key: tensor for key, tensor in state_dict.items() if key.startswith(prefix)}
        name = prefix + "weight"
        local = {prefix + "bias": mine[prefix + "bias"]} if prefix + "bias" in mine else {}
        if name not in mine:
            missing_keys.append(name)
        elif self.weight.is_meta and not local_metadata.get("assign_to_params_buffers", False):
            error_msgs.append(f"{name}: the layer is on the meta device; load with load_state_dict(..., assign=True)")
            return
        else:
            try:
                weight = read_weight(mine, name, "state dict")
                if weight.format.key != self._format_key or weight.shape != self._shape:
                    raise ValueError(
                        f"{name}: this layer is {self._format_key} {list(self._shape)}, the state dict holds "
                        f"{weight.format.key} {list(weight.shape)}; build the layer with that format and shape"
                    )
            except (ValueError, TypeError) as error:
                error_msgs.append(str(error))
                return
            self.weight_dtype = stored_dtype(mine, name) or self.weight_dtype
            local |= {prefix + part: weight.parts[part] for part in self._buffer_names}
            local[name] = weight.codes.view(self.weight.shape)
        ignored: list[str] = []  # torch would call the weight missing once for each part
        super()._load_from_state_dict(local, prefix, local_metadata, strict, ignored, unexpected_keys, error_msgs)
        missing_keys.extend(key for key in ignored if key == prefix + "bias")
        if strict:
            unexpected_keys.extend(key for key in mine if not (key in local or key.startswith(name + ".")))


def read_weight(tensors: dict[str, Tensor], name: str, where: str) -> PackedWeight:
    """The packed weight that a QuantLinear or bitsandbytes saved as `name` and `name.*`; its parts are views.

    where: the file, for messages. Raises CheckpointError or another ValueError or TypeError with the cause.
    """
    members = {key: tensor for key, tensor in tensors.items() if key.startswith(name + ".")}
    if not members:
        weight = tensors[name]
        raise ValueError(
            f"{where}: {name}: is {weight.dtype} {list(weight.shape)} without scales, not a 4-bit weight; "
            "QuantLinear.from_linear quantises a dense layer"
        )
    if name + LABEL in members:
        return unpack_own(tensors, name, where)
    return unpack_state(tensors, name, where)


def stored_dtype(tensors: dict[str, Tensor], name: str) -> torch.dtype | None:
    """What bitsandbytes recorded as the dtype before quantisation; None for weights in halfbyte's own scheme."""
    for family in BNB_FAMILIES:
        state = tensors.get(f"{name}.quant_state.bitsandbytes__{family}")
        if state is not None:
            dtype = getattr(torch, json.loads(bytes(state.tolist()))["dtype"])
            assert isinstance(dtype, torch.dtype)  # unpack_state checked the name
            return dtype
    return None


def prepare(
    model: nn.Module,
    ms: Sequence[int] = DECODE_MS,
    dtype: torch.dtype | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Compile, load and bind the kernels of every QuantLinear of `model`; returns how many calls it took.

    Kernels are compiled on first use, which a CUDA graph's capture does not allow, and each layer's launch is bound to
    its memory: so each layer is called once with zeros for every M in `ms`, the numbers of rows that will be captured.
    So is each LoRA layer of PEFT over one, with the adapters that are active: kernels that add them are others.
    dtype: of the activations; by default each layer's own. progress: is told calls done and calls in all.

    Call it again after layers moved to other memory. Raises ValueError for an M below 1, or while a graph is captured.
    """
    if any(m < 1 for m in ms):
        raise ValueError(f"prepare: ms must be numbers of rows from 1 up, got {list(ms)}")
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise ValueError("prepare: a CUDA graph is being captured; call it before the capture")
    bases = ((module, getattr(module, "base_layer", module)) for module in model.modules())
    layers = [(module, base) for module, base in bases if isinstance(base, QuantLinear)]
    total = len(layers) * len(ms)
    done = 0
    with torch.inference_mode():
        for m in ms:
            zeros: dict[Any, Tensor] = {}  # one x for all that it fits: some layers share a launch for one input
            for layer, base in layers:
                what = base.in_features, dtype or base.weight_dtype, base.weight.device
                if what not in zeros:
                    zeros[what] = torch.zeros(m, what[0], dtype=what[1], device=what[2])
                layer(zeros[what])
                done += 1
                if progress is not None:
                    progress(done, total)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return total
