"""A file mapped into memory, read only within its bounds, and the one way JSON files are read."""

from __future__ import annotations

import json
import mmap
import os
import stat
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import CheckpointError

MAX_JSON_BYTES = 100 << 20  # as safetensors' own limit for a header


class MappedFile:
    """The bytes of a regular file. Tensors are views of a private mapping: written to, they never change the file.

    One mapping a file, not one a tensor: each mapping that Python makes holds a file descriptor.
    Raises CheckpointError for what is not a regular, readable file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):  # before opening: a pipe would block
                raise CheckpointError(path, "file", "is not a regular file")
            with open(path, "rb") as file:
                self.size = os.fstat(file.fileno()).st_size
                self._map = _map(file.fileno(), self.size) if self.size else None
        except OSError as error:
            raise CheckpointError(path, "file", f"cannot be opened: {error.strerror or error}") from error

    def read(self, start: int, length: int, what: str) -> bytes:
        """A copy of `length` bytes; CheckpointError naming `what` where they are not all inside the file."""
        if start < 0 or length < 0 or start + length > self.size:
            raise CheckpointError(
                self.path, what, f"needs bytes {start} to {start + length}, the file ends at {self.size}"
            )
        return self._map[start : start + length] if self._map is not None and length else b""

    def tensor(self, start: int, length: int, what: str) -> Tensor:
        """uint8 [length], a view of the file; CheckpointError where it is not all inside."""
        if start < 0 or length < 0 or start + length > self.size:
            raise CheckpointError(
                self.path, what, f"needs bytes {start} to {start + length}, the file ends at {self.size}"
            )
        if length == 0 or self._map is None:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._map, dtype=torch.uint8, count=length, offset=start)

    def release(self, start: int, length: int) -> None:
        """Drop the pages that lie wholly inside the range from this process' memory."""
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (start + length) // mmap.PAGESIZE * mmap.PAGESIZE
        if self._map is not None and first < last and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)


def _map(descriptor: int, size: int) -> mmap.mmap:
    if sys.platform == "win32":
        return mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)
    # Writable, because writing to a read-only tensor would end the process; without reserve, because Linux else
    # refuses a writable private mapping larger than the memory. The constant has a name from Python 3.13 on only.
    no_reserve = 0x4000 if sys.platform == "linux" else 0
    return mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE | no_reserve, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def parse_json(data: bytes, file: Path, what: str) -> dict[str, Any]:
    """A JSON object; CheckpointError for anything else, duplicate keys included."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("an object has the same key twice")
        return found

    try:
        value = json.loads(data.decode(), object_pairs_hook=unique)  # bytes would let it guess UTF-16
    except (ValueError, RecursionError) as error:  # ValueError: bad UTF-8, bad JSON, integers of 4,300 digits
        raise CheckpointError(file, what, f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(file, what, "must be a JSON object")
    return value


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of at most 100 MiB."""
    file = MappedFile(path)
    if file.size > MAX_JSON_BYTES:
        raise CheckpointError(path, "file", f"{file.size} bytes of JSON; at most {MAX_JSON_BYTES} are read")
    return parse_json(file.read(0, file.size, "file"), path, "file")
