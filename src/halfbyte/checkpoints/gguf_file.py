"""GGUF files: 4-bit matrices stay packed, as views of the mapped file; what is not 4 bits becomes a tensor.

| in the file | loaded as |
| --- | --- |
| Q4_0, Q4_1, IQ4_NL, Q4_K, MXFP4, a matrix | PackedWeight [N, K] |
| the same in 3 dimensions (fused experts) | one entry and one PackedWeight an expert: "blk.0.ffn_up_exps.weight[7]" |
| F32, F16, BF16, F64, I8 to I64 | as they are |
| every other type that gguf can dequantise, and 4-bit vectors | bf16, rounded once from gguf's fp32 values |
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from gguf import quants
from gguf.constants import GGMLQuantizationType as Type
from torch import Tensor

from ..formats import PackedWeight, get_format
from .base import Checkpoint, Entry
from .errors import CheckpointError
from .gguf_header import TensorInfo, read_header
from .mapped import MappedFile
from .own import scales_are_finite

PACKED = {Type.Q4_0: "q4_0", Type.Q4_1: "q4_1", Type.IQ4_NL: "iq4_nl", Type.Q4_K: "q4_k", Type.MXFP4: "mxfp4_gguf"}
PLAIN = {
    Type.F32: ("fp32", torch.float32),
    Type.F16: ("fp16", torch.float16),
    Type.BF16: ("bf16", torch.bfloat16),
    Type.F64: ("fp64", torch.float64),
    Type.I8: ("int8", torch.int8),
    Type.I16: ("int16", torch.int16),
    Type.I32: ("int32", torch.int32),
    Type.I64: ("int64", torch.int64),
}
MAX_EXPERTS = 1 << 14  # beyond it a 3-D tensor is dequantised whole: a list of experts must not outgrow the file
CHUNK_VALUES = 1 << 22  # values dequantised at once: 16 MiB of fp32


class GGUFCheckpoint(Checkpoint):
    """See Checkpoint; opened by `open_checkpoint`. `metadata` is the header's key-value pairs; there is no config."""

    kind = "gguf"
    config = None

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = MappedFile(path)
        header = read_header(self._file)
        self.metadata = header.metadata
        parts = header.metadata.get("split.count", 1)
        if isinstance(parts, int) and parts > 1:
            raise CheckpointError(
                path, "split.count", f"this is one of {parts} parts of a model; join them with llama-gguf-split --merge"
            )
        self._infos: dict[str, TensorInfo] = {}
        for info in header.tensors.values():
            for single in _experts(info):
                if single.name in self._infos:
                    raise CheckpointError(path, single.name, "is there twice")
                self._infos[single.name] = single

    def entries(self) -> list[Entry]:
        return [
            Entry(info.name, _format(info), info.shape, info.nbytes, packed=_is_packed(info))
            for info in self._infos.values()
        ]

    def load(self, name: str) -> PackedWeight | Tensor:
        if name not in self._infos:
            raise self.unknown(name)
        info = self._infos[name]
        data = self._file.tensor(info.start, info.nbytes, name)
        if info.type in PLAIN:
            dtype = PLAIN[info.type][1]
            aligned = data.clone() if info.start % dtype.itemsize else data  # an alignment below 8 is legal
            return aligned.view(dtype).view(info.shape)
        if not _is_packed(info):
            return self._dequantize(info, data)
        n, k = info.shape
        format = get_format(PACKED[info.type])
        weight = PackedWeight(format, (n, k), {"codes": data.view(format.parts(n, k)["codes"].shape)})
        if not scales_are_finite(weight):
            raise CheckpointError(self.path, name, "holds NaN or infinite scales; the file is damaged, get it again")
        return weight

    def release(self, name: str) -> None:
        info = self._infos[name]
        self._file.release(info.start, info.nbytes)

    def _dequantize(self, info: TensorInfo, data: Tensor) -> Tensor:
        """bf16 of the tensor's shape, some rows at a time: gguf's fp32 values need twice the memory."""
        rows = data.view(math.prod(info.shape[:-1]), -1)
        out = torch.empty(rows.shape[0], info.shape[-1], dtype=torch.bfloat16)
        step = max(1, CHUNK_VALUES // info.shape[-1])
        try:
            with np.errstate(all="ignore"):  # damaged scales overflow; the values then are what the file says
                for start in range(0, rows.shape[0], step):
                    values = quants.dequantize(rows[start : start + step].numpy(), info.type)
                    out[start : start + step] = torch.from_numpy(values)
        except NotImplementedError as error:
            raise CheckpointError(
                self.path, info.name, f"gguf cannot dequantise type {info.type.name}; convert the model to another type"
            ) from error
        return out.view(info.shape)


def _is_packed(info: TensorInfo) -> bool:
    return info.type in PACKED and len(info.shape) == 2


def _format(info: TensorInfo) -> str:
    if info.type in PLAIN:
        return PLAIN[info.type][0]
    return PACKED.get(info.type) or str(info.type.name).lower()


def _experts(info: TensorInfo) -> list[TensorInfo]:
    """A fused 4-bit tensor [experts, N, K] as one matrix an expert; anything else as it is."""
    if info.type not in PACKED or len(info.shape) != 3 or info.shape[0] > MAX_EXPERTS:
        return [info]
    each = info.nbytes // info.shape[0]
    return [
        replace(info, name=f"{info.name}[{i}]", shape=info.shape[1:], start=info.start + i * each, nbytes=each)
        for i in range(info.shape[0])
    ]
