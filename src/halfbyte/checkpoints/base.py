"""What a checkpoint is to the rest of the library: a list of entries, each loaded by its name."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ..formats import PackedWeight
from .errors import CheckpointError


@dataclass(frozen=True)
class Entry:
    """One logical tensor of a checkpoint.

    name: "model.layers.0.mlp.up_proj.weight"; the side tensors of a quantised weight are no entries of their own.
    format: a format key ("nf4-64-nested", "q4_1"), a dtype ("bf16", "fp32") or another type of the file ("q6_k").
    shape: logical. nbytes: on disk, side tensors included. packed: whether `load` gives a PackedWeight.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    nbytes: int
    packed: bool

    @property
    def bits_per_weight(self) -> float:
        """Bits on disk a weight; 0 for an empty tensor."""
        count = math.prod(self.shape)
        return self.nbytes * 8 / count if count else 0.0


class Checkpoint(ABC):
    """An opened checkpoint. Tensors that it loads are views of the mapped file: nothing is read before it is used.

    path: what was opened. kind: "dense", "bitsandbytes", "gptq", "awq", "halfbyte" or "gguf". config: config.json's
    content where there is one. metadata: the file's own key-value pairs (safetensors' __metadata__, GGUF's header).
    """

    path: Path
    kind: str
    config: dict[str, Any] | None
    metadata: Mapping[str, Any]

    @abstractmethod
    def entries(self) -> list[Entry]:
        """All logical tensors, in the order of the file. Raises CheckpointError for one that cannot be described."""

    @abstractmethod
    def load(self, name: str) -> PackedWeight | Tensor:
        """The weight of an entry: a PackedWeight where `packed`, else a tensor.

        Raises CheckpointError where the name is unknown or its bytes are not what they claim to be.
        """

    @abstractmethod
    def release(self, name: str) -> None:
        """Give the memory of an entry's pages back; what was loaded stays valid and is read again when next used.

        For code that walks a model larger than the memory. In-place changes to what `load` returned are lost.
        """

    def unknown(self, name: str) -> CheckpointError:
        """The error for a name that is no entry."""
        return CheckpointError(self.path, name, "no such tensor in this checkpoint; entries() lists them")
