"""4-bit checkpoints as files: read into PackedWeight and written back. Nothing is ever unpickled.

`open_checkpoint` maps a file or directory and lists its tensors; `load` makes one of them a PackedWeight whose parts
are views of the file. `quantize_checkpoint` converts, `write_safetensors` writes.
"""

from __future__ import annotations

import os
from pathlib import Path

from .base import Checkpoint, Entry
from .bitsandbytes import pack_state, unpack_state
from .convert import DEFAULT_SKIP, Summary, quantize_checkpoint, quantize_tensors
from .errors import CheckpointError
from .gguf_file import GGUFCheckpoint
from .gguf_header import MAGIC
from .huggingface import HuggingFaceCheckpoint
from .staging import staged_directory
from .writer import write_safetensors

__all__ = [
    "DEFAULT_SKIP",
    "Checkpoint",
    "CheckpointError",
    "Entry",
    "Summary",
    "open_checkpoint",
    "pack_state",
    "quantize_checkpoint",
    "quantize_tensors",
    "staged_directory",
    "unpack_state",
    "write_safetensors",
]


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a .safetensors file, a Hugging Face model directory, or a .gguf file.

    Reads headers only, however large the model. What a file is, its first bytes decide, not its name.

    Raises CheckpointError, naming file, tensor and cause, for whatever cannot be read as it is.
    """
    target = Path(path)
    if target.is_dir():
        return HuggingFaceCheckpoint(target)
    if not target.is_file():
        raise CheckpointError(target, "file", "no such file or directory")
    with open(target, "rb") as file:
        magic = file.read(8)
    if magic.startswith(MAGIC):
        return GGUFCheckpoint(target)
    if magic.startswith((b"PK\x03\x04", b"\x80")):
        raise CheckpointError(
            target, "file", "is a PyTorch pickle, which can run code and is never read: save the model as safetensors"
        )
    return HuggingFaceCheckpoint(target)
