"""GGUF files for transformers, with their 4-bit tensors left packed.

Config, tokenizer, names and the changes that each architecture needs come from transformers' own GGUF support. It
changes dense arrays; for a packed matrix, the same code is run on the numbers of the rows instead, and where it only
reorders them (llama's query and key rows) so do we, on whole packed rows, which is exact. A matrix that it changes in
any other way is decoded first.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import quants
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from ...checkpoints import Checkpoint, Entry, open_checkpoint
from ...checkpoints.gguf_file import PLAIN
from ...checkpoints.gguf_header import read_header
from ...checkpoints.mapped import MappedFile
from ...formats import PackedWeight
from .build import build_model

logger = logging.getLogger(__name__)
ROPE = "rope_freqs.weight"  # in the config for transformers
EXPERT = re.compile(r"(.+)\[\d+\]")  # a checkpoint's entry for one expert of a fused tensor


def load_gguf(path: Path, dtype: torch.dtype, **options: Any) -> tuple[Any, Any]:
    """See `load`. Raises ValueError for an architecture that transformers does not read from GGUF."""
    checkpoint = open_checkpoint(path)
    origin = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    config = AutoConfig.from_pretrained(**origin)
    tokenizer = AutoTokenizer.from_pretrained(**origin)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    packed, dense = _Reader(path, checkpoint, skeleton).read_all()
    return build_model(path, config, packed, dense, dtype, **options), tokenizer


class _Reader:
    """Turns the tensors of a GGUF file into those of a transformers model."""

    def __init__(self, path: Path, checkpoint: Checkpoint, skeleton: Any) -> None:
        self.path = path
        self.checkpoint = checkpoint
        architecture = checkpoint.metadata["general.architecture"]
        self.processor: Any = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=skeleton.config.to_dict())
        self.entries: dict[str, list[Entry]] = {}  # by the file's own names: several for fused experts
        for entry in checkpoint.entries():
            self.entries.setdefault(_fused_name(entry.name), []).append(entry)
        self.names = _names(skeleton, self.processor, set(self.entries))
        self.linears = {f"{name}.weight" for name, module in skeleton.named_modules() if isinstance(module, nn.Linear)}
        file = MappedFile(path)
        self.file, self.infos = file, read_header(file).tensors
        self.packed: dict[str, PackedWeight] = {}
        self.dense: dict[str, Tensor] = {}

    def read_all(self) -> tuple[dict[str, PackedWeight], dict[str, Tensor]]:
        """Model's name -> weight: those that stay packed, and the others."""
        decoded = []
        for gguf_name, entries in self.entries.items():
            weight: PackedWeight | Tensor
            weight = self.checkpoint.load(gguf_name) if _single_packed(entries) else self.read_dense(gguf_name)
            if isinstance(weight, PackedWeight):
                name = self.names.get(gguf_name)
                rows = self.row_order(gguf_name, weight.shape[0]) if name in self.linears else None
                if rows is not None and name is not None:
                    self.packed[name] = take_rows(weight, rows)
                    continue
                weight = weight.dequantize()
            if entries[0].packed:
                decoded.append(gguf_name)
            self.change(gguf_name, weight)
        if decoded:
            logger.warning(f"halfbyte decodes 4-bit tensors that are not the weight of a Linear layer: {decoded}")
        if lost := [name for name in self.entries if not _has_place(name, self.names)]:
            logger.warning(f"halfbyte: transformers has no place in this model for {lost}")
        return self.packed, self.dense

    def read_dense(self, gguf_name: str) -> Tensor:
        """A tensor's values: plain numbers as they are, other types in fp32, fused experts as one stack."""
        info = self.infos[gguf_name]
        entries = self.entries[gguf_name]
        if entries[0].packed or info.type in PLAIN:
            parts = [self.checkpoint.load(entry.name) for entry in entries]
            values = [part.dequantize() if isinstance(part, PackedWeight) else part for part in parts]
            return torch.stack(values) if entries[0].packed else values[0]
        rows = self.file.tensor(info.start, info.nbytes, gguf_name).view(int(np.prod(info.shape[:-1])), -1)
        try:
            return torch.from_numpy(quants.dequantize(rows.numpy(), info.type)).view(info.shape)
        except NotImplementedError:
            dense = self.checkpoint.load(gguf_name)  # raises, with the type and what to do
            assert isinstance(dense, Tensor)
            return dense

    def row_order(self, gguf_name: str, n: int) -> Tensor | None:
        """Where transformers takes each row of a matrix from; None if it does more than reorder rows."""
        rows = np.arange(n).reshape(n, 1)
        try:
            changed = self.processor.process(weights=rows, name=gguf_name)
        except (ValueError, IndexError, KeyError, TypeError):
            return None
        if changed.name != gguf_name or changed.weights.shape != rows.shape:
            return None
        order = changed.weights.reshape(-1)
        return torch.from_numpy(order.copy()) if np.array_equal(np.sort(order), rows.reshape(-1)) else None

    def change(self, gguf_name: str, weight: Tensor) -> None:
        """Run transformers' code for a dense tensor and keep what it names; parts of fused ones it keeps by itself."""
        changed = self.processor.process(
            weights=weight.float().numpy(),
            name=gguf_name,
            tensor_key_mapping=self.names,
            parsed_parameters={"tensors": self.dense},
        )
        if changed.name in self.names:
            self.dense[self.names[changed.name]] = torch.from_numpy(np.ascontiguousarray(changed.weights))


def _names(skeleton: Any, processor: Any, wanted: set[str]) -> dict[str, str]:
    """GGUF's name -> the model's, by transformers' map.

    transformers rebuilds gguf's tables for each submodule, for models whose own names match nothing: 7 s for 30 layers.
    So the model alone is asked first.
    """
    names: dict[str, str] = get_gguf_hf_weights_map(_Childless(skeleton), processor)
    if all(_has_place(name, names) for name in wanted):
        return names
    return dict(get_gguf_hf_weights_map(skeleton, processor))


def _has_place(gguf_name: str, names: Mapping[str, str]) -> bool:
    """Whether the model has a parameter for a tensor; fused experts are without ".weight" in transformers' map."""
    return gguf_name in names or gguf_name.removesuffix(".weight") in names or gguf_name == ROPE


class _Childless:
    """What the map reads of a model, without its submodules."""

    def __init__(self, model: Any) -> None:
        self.config = model.config
        self.state_dict = model.state_dict

    def named_children(self) -> list[tuple[str, nn.Module]]:
        return []


def _single_packed(entries: Sequence[Entry]) -> bool:
    """Whether a tensor is one packed matrix, not a stack of them."""
    return len(entries) == 1 and entries[0].packed and not EXPERT.fullmatch(entries[0].name)


def _fused_name(entry: str) -> str:
    """ "blk.0.ffn_up_exps.weight" of "blk.0.ffn_up_exps.weight[7]"."""
    match = EXPERT.fullmatch(entry)
    return match[1] if match else entry


def take_rows(weight: PackedWeight, rows: Tensor) -> PackedWeight:
    """The weight with its rows in another order; GGUF's rows are whole records, so that nothing is decoded."""
    if torch.equal(rows, torch.arange(weight.shape[0])):
        return weight
    assert list(weight.parts) == ["codes"]
    return PackedWeight(weight.format, weight.shape, {"codes": weight.codes[rows]})
