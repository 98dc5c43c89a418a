"""LoRA adapters as PEFT saves them: adapter_config.json beside adapter_model.safetensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ..checkpoints import CheckpointError
from ..checkpoints.mapped import read_json
from ..checkpoints.safetensors_file import SafetensorsFile
from ..reference import Adapter

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."


@dataclass(frozen=True)
class AdapterFile:
    """An adapter of a whole model.

    layers: the weight that each part adds to ("model.layers.0.mlp.up_proj.weight") -> its LoRA matrices.
    """

    path: Path
    layers: Mapping[str, Adapter]

    @property
    def ranks(self) -> list[int]:
        """The different ranks, in order."""
        return sorted({adapter.a.shape[0] for adapter in self.layers.values()})


def read_adapter(folder: Path) -> AdapterFile:
    """Read a PEFT adapter's directory; its tensors are views of the file.

    Raises CheckpointError for files that are missing or damaged, and for what is more than LoRA (DoRA, other PEFT
    types), whose effect on a layer is not the sum that this project computes.
    """
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise CheckpointError(folder, name, "not found; an adapter is a directory as PEFT's save_pretrained writes")
    config = read_json(folder / CONFIG)
    if config.get("peft_type") != "LORA":
        raise CheckpointError(folder / CONFIG, "peft_type", f"is {config.get('peft_type')!r}; only LORA is read")
    if config.get("use_dora"):
        raise CheckpointError(folder / CONFIG, "use_dora", "DoRA rescales the weight's rows; only plain LoRA is read")
    tensors = SafetensorsFile(folder / WEIGHTS)
    layers = {}
    for name in tensors:
        if not name.endswith(".lora_A.weight"):
            continue
        module = name.removesuffix(".lora_A.weight")
        a, b = tensors[name], _other(tensors, module, folder)
        if a.dim() != 2 or b.dim() != 2 or b.shape[1] != a.shape[0]:
            raise CheckpointError(
                folder / WEIGHTS, module, f"A {list(a.shape)} and B {list(b.shape)} are not [r, K] and [N, r]"
            )
        module = module.removeprefix(PREFIX)
        layers[f"{module}.weight"] = Adapter(a, b, _scaling(config, module, a.shape[0], folder))
    if not layers:
        raise CheckpointError(folder / WEIGHTS, "lora_A", "no LoRA matrices of linear layers in it")
    return AdapterFile(folder, layers)


def _other(tensors: SafetensorsFile, module: str, folder: Path) -> Tensor:
    name = f"{module}.lora_B.weight"
    if name not in tensors:
        raise CheckpointError(folder / WEIGHTS, name, "missing, though its lora_A is there")
    return tensors[name]


def _scaling(config: Mapping[str, Any], module: str, rank: int, folder: Path) -> float:
    """lora_alpha / r, or / sqrt(r) with rank-stabilised LoRA; alpha_pattern may set alpha for some modules (PEFT)."""
    alpha = config.get("lora_alpha")
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            alpha = value
            break
    if not isinstance(alpha, (int, float)):
        raise CheckpointError(folder / CONFIG, "lora_alpha", f"must be a number, got {alpha!r}")
    return float(alpha) / (rank**0.5 if config.get("use_rslora") else rank)
