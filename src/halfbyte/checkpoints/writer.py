"""Writing safetensors as a stream: a tensor goes to disk when it arrives, none is kept.

safetensors' own writer wants all tensors of a file at once. The format is 8 bytes length, a JSON header, the data; the
header may end in spaces, so room for it is left in front and filled in when the file's last tensor is known. Readers
need no change; tests load the result with safetensors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from ..formats import PackedWeight
from .bitsandbytes import FAMILIES, pack_state
from .errors import CheckpointError
from .huggingface import INDEX, SINGLE
from .own import pack_own
from .safetensors_file import SAFETENSORS_NAMES

HEADER_ROOM = (
    1 << 19
)  # bytes for a file's length field and header: some 4,000 tensors; a fuller file is followed by one more
MAX_SHARD_BYTES = 5_000_000_000  # as Hugging Face's save_pretrained
TEMPORARY = ".halfbyte-writing-"
METADATA = {"format": "pt"}  # transformers refuses a file without it


def write_safetensors(
    directory: str | os.PathLike[str],
    tensors: Iterable[tuple[str, Tensor | PackedWeight]],
    *,
    dtype: str = "bfloat16",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    metadata: Mapping[str, str] = METADATA,
) -> list[Path]:
    """Write named tensors to `directory` as model.safetensors, or as model-00001-of-0000n.safetensors and their index.

    A PackedWeight in nf4 or fp4 becomes bitsandbytes' tensors (`dtype` is what their quant_state says the weight was
    before), in another format halfbyte's own (own.py).
    Files are written under temporary names and renamed when all are complete, the index last. Holds one tensor at a
    time (and those of odd size until their file ends). Returns the weight files' paths.

    Raises CheckpointError where the directory already holds weights or a name comes twice, ValueError for a dtype that
    safetensors files do not hold.
    """
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    if any(target.glob("*.safetensors")) or (target / INDEX).exists():
        raise CheckpointError(target, "destination", "already holds weights; write to an empty directory")
    for left in target.glob(TEMPORARY + "*"):
        left.unlink()  # of a run that crashed
    shards: list[_Shard] = []
    seen: set[str] = set()
    try:
        for name, tensor in tensors:
            pieces = _pieces(name, tensor, dtype)
            if twice := seen & pieces.keys() or pieces.keys() & {"__metadata__"}:
                raise CheckpointError(target, min(twice), "is written twice, or is a name that the format reserves")
            seen |= pieces.keys()
            if not shards or not shards[-1].has_room(pieces, max_shard_bytes):
                if shards:
                    shards[-1].finish()
                shards.append(_Shard(target / f"{TEMPORARY}{len(shards)}", metadata))
            for piece, data in pieces.items():
                shards[-1].add(piece, data)
            del tensor, pieces, data  # before the next one is made
        if not shards:
            shards.append(_Shard(target / f"{TEMPORARY}0", metadata))
        shards[-1].finish()
        return _publish(target, shards)
    except BaseException:
        for shard in shards:
            shard.abandon()
        raise


def _pieces(name: str, tensor: Tensor | PackedWeight, dtype: str) -> dict[str, Tensor]:
    if not isinstance(tensor, PackedWeight):
        return {name: tensor}
    return pack_state(tensor, name, dtype) if tensor.format.name in FAMILIES else pack_own(tensor, name)


class _Shard:
    """One safetensors file being written."""

    def __init__(self, path: Path, metadata: Mapping[str, str]) -> None:
        self.path = path
        self.header: dict[str, Any] = {"__metadata__": dict(metadata)}
        self.header_bytes = len(json.dumps(self.header)) + 8
        self.size = 0  # data bytes, those waiting included
        self._written = 0
        self._waiting: list[tuple[str, Tensor]] = []
        self._file: IO[bytes] | None = open(path, "wb")  # noqa: SIM115 (closed by finish or abandon)
        self._file.seek(HEADER_ROOM)

    def has_room(self, tensors: Mapping[str, Tensor], max_bytes: int) -> bool:
        """Whether the tensors of one weight, which stay together, still fit; an empty shard takes any."""
        if len(self.header) == 1:
            return True
        header = self.header_bytes + sum(_header_bytes(name, tensor) for name, tensor in tensors.items())
        return header <= HEADER_ROOM and self.size + sum(tensor.nbytes for tensor in tensors.values()) <= max_bytes

    def add(self, name: str, tensor: Tensor) -> None:
        """Write a tensor now, or at the end where its size would leave the next one unaligned."""
        self.header_bytes += _header_bytes(name, tensor)
        if self.header_bytes > HEADER_ROOM:
            raise CheckpointError(self.path.parent, name[:80], "its name or shape is too long for a file's header")
        self.header[name] = None  # keeps the order of arrival
        self.size += tensor.nbytes
        if tensor.nbytes % 8:
            self._waiting.append((name, tensor))
        else:
            self._write(name, tensor)

    def finish(self) -> None:
        """Write what waits, widest types first so that all are aligned, then the header; close."""
        for name, tensor in sorted(self._waiting, key=lambda item: -item[1].element_size()):
            self._write(name, tensor)
        self._waiting.clear()
        assert self._file is not None
        header = json.dumps(self.header, separators=(",", ":")).encode()
        self._file.seek(0)
        self._file.write((HEADER_ROOM - 8).to_bytes(8, "little") + header.ljust(HEADER_ROOM - 8))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None

    def abandon(self) -> None:
        """Close and remove the file."""
        if self._file is not None:
            self._file.close()
        self.path.unlink(missing_ok=True)

    def _write(self, name: str, tensor: Tensor) -> None:
        assert self._file is not None
        self.header[name] = {
            "dtype": _dtype(name, tensor),
            "shape": list(tensor.shape),
            "data_offsets": [self._written, self._written + tensor.nbytes],
        }
        self._written += tensor.nbytes
        if tensor.nbytes:
            self._file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _dtype(name: str, tensor: Tensor) -> str:
    if tensor.dtype not in SAFETENSORS_NAMES:
        raise ValueError(f"write_safetensors: '{name}' has dtype {tensor.dtype}, which safetensors files do not hold")
    return SAFETENSORS_NAMES[tensor.dtype]


def _header_bytes(name: str, tensor: Tensor) -> int:
    """At most what a tensor adds to the header: its fields, offsets of 20 digits."""
    return len(json.dumps(name)) + len(str(list(tensor.shape))) + 100


def _publish(target: Path, shards: list[_Shard]) -> list[Path]:
    """Rename the finished files to their final names, then the index, so that an index never names a missing file."""
    if len(shards) == 1:
        os.replace(shards[0].path, target / SINGLE)
        return [target / SINGLE]
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    index = {
        "metadata": {"total_size": sum(shard.size for shard in shards)},
        "weight_map": {
            tensor: name
            for shard, name in zip(shards, names, strict=True)
            for tensor in shard.header
            if tensor != "__metadata__"
        },
    }
    temporary = target / f"{TEMPORARY}index"
    temporary.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    for shard, name in zip(shards, names, strict=True):
        os.replace(shard.path, target / name)
    os.replace(temporary, target / INDEX)
    return [target / name for name in names]
