"""halfbyte's quantiser for transformers: swaps Linear for QuantLinear and fills it as weights are loaded."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.base import HfQuantizer, get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module

from ...checkpoints.bitsandbytes import SIDE_TENSORS
from ...checkpoints.own import LABEL
from ...formats import FAMILIES, get_format, quantize
from ...nn import QuantLinear, read_weight, stored_dtype
from .config import METHOD, HalfbyteConfig

logger = logging.getLogger(__name__)


def _side_suffixes() -> tuple[str, ...]:
    """All that may follow a packed weight's name: bitsandbytes' tensors, halfbyte's own, the parts of any format."""
    parts = {
        f".{name}"
        for family in FAMILIES
        for name in get_format(family).parts(1024, 1024)
        if name != get_format(family).layout.part
    }
    return (*dict.fromkeys((*SIDE_TENSORS, LABEL, *sorted(parts))),)


@register_quantizer(METHOD)
class HalfbyteQuantizer(HfQuantizer):  # type: ignore[misc]
    """See HalfbyteConfig. A dense checkpoint is quantised as it is loaded, a packed one adopted as it is.

    In a packed checkpoint each layer's own tensors say whether it is packed and how; the config only has to exist.
    """

    requires_calibration = False
    quantization_config: HalfbyteConfig

    def __init__(self, quantization_config: HalfbyteConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.pending: set[str] = set()  # weights of layers that were swapped in and have no bytes yet
        self.transposed: set[str] = set()  # those that a dense checkpoint stores as [K, N]

    @property
    def quantized_element_size(self) -> float:
        """Bytes of codes and scales for each byte of codes."""
        return 1.125

    @property
    def is_trainable(self) -> bool:
        """Adapters on top can be trained; the 4-bit weights cannot."""
        return True

    @property
    def is_compileable(self) -> bool:
        return True

    def is_serializable(self) -> bool:
        return True

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        device_map = kwargs.get("device_map")
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise ValueError("halfbyte: 4-bit layers cannot be offloaded to disk; leave 'disk' out of device_map")

    def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: Any) -> bool:
        module_name, _, name = param_name.rpartition(".")
        return name == "weight" and isinstance(model.get_submodule(module_name), QuantLinear)

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        """Tensors of packed layers are never cast; `Unpack` casts what turns out to be dense."""
        packed = any(isinstance(operation, Unpack) for operation in getattr(converter, "operations", ()))
        return None if packed else super().get_new_dtype(converter, param, dtype)

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        tied = {name.removesuffix(".weight") for pair in model.all_tied_weights_keys.items() for name in pair}
        skip = sorted(tied) if self.pre_quantized else self._skip(model, tied)
        unfit = []
        for name, module in list(model.named_modules()):
            if type(module) not in (nn.Linear, Conv1D) or not should_convert_module(name, skip):
                continue
            k, n = module.weight.shape if isinstance(module, Conv1D) else (module.in_features, module.out_features)
            try:
                # a packed checkpoint brings each layer's format along; any shape fits nf4 until then
                layer = QuantLinear(
                    k, n, module.bias is not None, "nf4" if self.pre_quantized else self.quantization_config.format,
                    "meta", module.weight.dtype,
                )  # fmt: skip
            except ValueError as error:
                unfit.append(f"{name} ({error})")
                continue
            layer.__dict__["_is_hf_initialized"] = True  # else transformers draws random numbers into uint8
            model.set_submodule(name, layer)
            self.pending.add(f"{name}.weight")
            if isinstance(module, Conv1D):
                self.transposed.add(f"{name}.weight")
        if unfit:
            logger.warning(f"halfbyte leaves {len(unfit)} layers dense, whose shape does not fit: {'; '.join(unfit)}")
        if experts := _fused(model.named_modules()):
            logger.warning(f"halfbyte leaves fused expert tensors dense, it packs Linear layers only: {experts}")
        if not self.pending:
            logger.warning("halfbyte found no Linear layer to hold in 4 bits in this model")

    def _skip(self, model: Any, tied: set[str]) -> list[str]:
        """Patterns of layers that are not to be quantised."""
        config = self.quantization_config
        default = set(get_keys_to_not_convert(model))
        if config.head:
            head = model.get_output_embeddings()
            names = {name for name, module in model.named_modules() if module is head and head is not None}
            if names & tied:
                logger.warning(f"halfbyte leaves {sorted(names)} dense although asked for: tied to the embeddings")
            default -= names - tied
        return sorted(default | set(config.skip) | set(model._keep_in_fp32_modules or ()))

    def get_quantize_ops(self) -> Pack:
        return Pack(self)

    def update_weight_conversions(self, weight_conversions: list[Any], model: nn.Module) -> list[Any]:
        """For packed checkpoints: gather each weight's tensors. By layers' last names ("q_proj"), as a pattern for each
        layer would be matched against every key."""
        if not self.pre_quantized:
            return weight_conversions
        leaves = sorted({name.split(".")[-2] for name in self.pending})
        suffixes = ("", *_side_suffixes())
        own = [
            WeightConverter([f"{leaf}.weight{suffix}" for suffix in suffixes], f"{leaf}.weight", [Unpack(self)])
            for leaf in leaves
        ]
        return [*weight_conversions, *own]

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if self.pending:
            raise ValueError(
                f"halfbyte: the checkpoint has no weight for {sorted(self.pending)}; leave them dense with `skip` "
                "if they are to be trained from scratch"
            )
        for module in model.modules():
            bias = module.bias if isinstance(module, QuantLinear) else None
            if bias is not None and not getattr(bias, "_is_hf_initialized", False):
                nn.init.zeros_(bias)  # absent in the checkpoint; transformers' own initialisation skips these layers
        # these were for loading; saving writes the layers' own state
        model._weight_conversions = [
            conversion
            for conversion in getattr(model, "_weight_conversions", None) or ()
            if not any(isinstance(operation, Unpack) for operation in getattr(conversion, "operations", ()))
        ]
        self._describe(model)
        return model

    def _describe(self, model: Any) -> None:
        """Write down in the config what the model turned out to be."""
        layers = [module for module in model.modules() if isinstance(module, QuantLinear)]
        if self.pre_quantized and layers:
            self.quantization_config.format = Counter(layer.format.key for layer in layers).most_common(1)[0][0]
        self.quantization_config.dense_modules = [
            name for name, module in model.named_modules() if type(module) in (nn.Linear, Conv1D)
        ]
        self.quantization_config.compute_dtype = str(model.dtype).removeprefix("torch.")

    def get_state_dict_and_metadata(self, model: Any) -> tuple[None, dict[str, str]]:
        """Called before saving: the model may have been cast or changed since it was loaded."""
        self._describe(model)
        return None, {}

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        for name, module in list(model.named_modules()):
            if isinstance(module, QuantLinear):
                dense = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
                dense.weight = nn.Parameter(module.dequantize(dtype), requires_grad=False)
                dense.register_parameter("bias", module.bias)
                model.set_submodule(name, dense.train(module.training))
        return model


class Pack(ConversionOps):  # type: ignore[misc]
    """Quantise one dense weight as it is loaded."""

    def __init__(self, quantizer: HalfbyteQuantizer) -> None:
        self.quantizer = quantizer

    def convert(self, input_dict: Mapping[str, Any], *, model: nn.Module, **kwargs: Any) -> dict[str, Tensor]:
        packed: dict[str, Tensor] = {}
        for name, value in input_dict.items():
            dense = _single(value)
            if name in self.quantizer.transposed:
                dense = dense.t()
            layer = _layer(model, name)
            layer.adopt(quantize(dense.contiguous(), layer.format))
            self.quantizer.pending.discard(name)
            packed[name] = _loaded(layer.weight)
        return packed


class Unpack(ConversionOps):  # type: ignore[misc]
    """Give the tensors of one packed weight to their layer, or put a dense layer back where the weight is dense."""

    def __init__(self, quantizer: HalfbyteQuantizer) -> None:
        self.quantizer = quantizer

    def __deepcopy__(self, memo: object) -> Unpack:
        return self  # the loader copies a converter for every weight; all of them report to one quantiser

    def convert(
        self, input_dict: Mapping[str, Any], *, model: Any, full_layer_name: str, **kwargs: Any
    ) -> dict[str, Tensor]:
        tensors = {}
        for pattern, value in input_dict.items():
            tensors[full_layer_name + pattern.partition(".weight")[2]] = _single(value)
        module = model.get_submodule(full_layer_name.rpartition(".")[0])
        if not isinstance(module, QuantLinear):  # shares its last name with a layer that is packed
            return {full_layer_name: tensors[full_layer_name].to(module.weight.dtype)}
        self.quantizer.pending.discard(full_layer_name)
        if len(tensors) == 1 and full_layer_name in tensors:
            return {full_layer_name: _keep_dense(model, full_layer_name, tensors[full_layer_name])}
        module.adopt(read_weight(tensors, full_layer_name, model.config.name_or_path or "checkpoint"))
        module.weight_dtype = stored_dtype(tensors, full_layer_name) or module.weight_dtype
        return {full_layer_name: _loaded(module.weight)}


def _layer(model: nn.Module, weight_name: str) -> QuantLinear:
    layer = model.get_submodule(weight_name.rpartition(".")[0])
    assert isinstance(layer, QuantLinear)
    return layer


def _keep_dense(model: Any, weight_name: str, weight: Tensor) -> Tensor:
    """Undo the swap of a layer; returns its weight in the model's dtype."""
    layer = _layer(model, weight_name)
    if not weight.is_floating_point():
        raise ValueError(
            f"{weight_name} is {weight.dtype} and has no scales beside it: not a weight that halfbyte reads"
        )
    dense = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta", dtype=layer.weight_dtype)
    dense.register_parameter("bias", layer.bias)
    model.set_submodule(weight_name.rpartition(".")[0], dense)
    return weight.to(layer.weight_dtype)


def _single(value: Any) -> Tensor:
    """The loader gives a tensor, or a list of one."""
    tensor = value[0] if isinstance(value, list) else value
    assert isinstance(tensor, Tensor)
    return tensor


def _loaded(parameter: nn.Parameter) -> nn.Parameter:
    parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    return parameter


def _fused(modules: Iterable[tuple[str, nn.Module]]) -> str:
    """Three-dimensional parameters other than convolutions', counted: "layers.*.mlp.experts.down_proj (x 30)"."""
    counts: Counter[str] = Counter()
    for name, module in modules:
        for parameter_name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() == 3 and not isinstance(module, nn.modules.conv._ConvNd):
                counts[re.sub(r"\.\d+\.", ".*.", f"{name}.{parameter_name}")] += 1
    return ", ".join(f"{name} (x {count})" for name, count in counts.items())
