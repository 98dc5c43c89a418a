"""The header of a GGUF file, read within bounds.

gguf's own GGUFReader believes what a file says: it loops over the claimed counts and lengths, multiplies dimensions
in 64 bits, and meets the end of the file as an IndexError somewhere. So this walk is our own; types, sizes and the
dequantisers are gguf's. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from .errors import CheckpointError
from .mapped import MappedFile

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMS = 4  # ggml's GGML_MAX_DIMS
MAX_ARRAY_DEPTH = 4  # arrays in arrays; llama.cpp writes none
MAX_ELEMENTS = 1 << 62
STRING, ARRAY, BOOL = 8, 9, 7
SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"), 1: np.dtype("<i1"), 2: np.dtype("<u2"), 3: np.dtype("<i2"), 4: np.dtype("<u4"),
    5: np.dtype("<i4"), 6: np.dtype("<f4"), 7: np.dtype("?"), 10: np.dtype("<u8"), 11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}  # fmt: skip
# the fewest bytes that a key-value pair, a tensor's description and an array's element can take: bounds every count
MIN_PAIR, MIN_TENSOR = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8
MIN_ELEMENT = {STRING: 8, ARRAY: 12} | {code: dtype.itemsize for code, dtype in SCALARS.items()}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: its ggml type, shape (outermost first, as in numpy), first byte in the file, bytes."""

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    """Metadata (numbers, booleans, strings; arrays as numpy arrays or lists of strings) and the tensors in order."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read_header(file: MappedFile) -> Header:
    """The header of a GGUF file; CheckpointError where anything in it is malformed or points outside the file."""
    return _Walk(file).header()


class _Walk:
    """A position in the file that only moves forward, and never past its end."""

    def __init__(self, file: MappedFile) -> None:
        self.file = file
        self.position = 0
        self.what = "header"

    def fail(self, cause: str) -> NoReturn:
        raise CheckpointError(self.file.path, self.what, cause)

    def take(self, length: int) -> bytes:
        data = self.file.read(self.position, length, self.what)
        self.position += length
        return data

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def u64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def count(self, minimum: int, of: str) -> int:
        """A claimed number of things, each at least `minimum` bytes, that can still fit into the file."""
        claimed = self.u64()
        if claimed > (self.file.size - self.position) // minimum:
            self.fail(f"claims {claimed} {of}, more than the rest of the file can hold")
        return claimed

    def name(self, of: str) -> str:
        data = self.take(self.count(1, "bytes of " + of))
        try:
            return data.decode()
        except UnicodeDecodeError:
            self.fail(f"its {of} is not UTF-8")

    def header(self) -> Header:
        if self.take(4) != MAGIC:
            self.fail("does not start with 'GGUF'")
        version = self.u32()
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            self.fail(f"version {version} is none of 2 and 3" + (" (a big-endian file)" if swapped else ""))
        tensor_count = self.count(MIN_TENSOR, "tensors")
        pair_count = self.count(MIN_PAIR, "key-value pairs")
        metadata: dict[str, Any] = {}
        for number in range(pair_count):
            self.what = f"key-value pair {number}"
            key = self.name("key")
            self.what = f"key '{key[:80]}'"
            if key in metadata:
                self.fail("is there twice")
            metadata[key] = self.value(self.u32())
        alignment = self.alignment(metadata)
        tensors = self.tensors(tensor_count, alignment)
        self.what = "tensor data"
        data_start = -(-self.position // alignment) * alignment
        return Header(metadata, self.place(tensors, data_start))

    def value(self, code: int, depth: int = 0) -> Any:
        if code in SCALARS:
            return self.scalars(code, 1)[0].item()
        if code == STRING:
            # metadata is text for people and tokenizers; a token that is not UTF-8 must not make a model unreadable
            return self.take(self.count(1, "bytes of text")).decode(errors="replace")
        if code != ARRAY:
            self.fail(f"unknown value type {code}")
        if depth == MAX_ARRAY_DEPTH:
            self.fail(f"arrays nested more than {MAX_ARRAY_DEPTH} deep")
        inner = self.u32()
        if inner not in MIN_ELEMENT:
            self.fail(f"unknown array type {inner}")
        count = self.count(MIN_ELEMENT[inner], "array elements")
        if inner in SCALARS:
            return self.scalars(inner, count)
        return [self.value(inner, depth + 1) for _ in range(count)]

    def scalars(self, code: int, count: int) -> np.ndarray[Any, np.dtype[Any]]:
        data = self.take(count * SCALARS[code].itemsize)
        if code == BOOL and data.strip(b"\0\1"):
            self.fail("a boolean is neither 0 nor 1")
        values: np.ndarray[Any, np.dtype[Any]] = np.frombuffer(data, dtype=SCALARS[code])
        return values

    def alignment(self, metadata: dict[str, Any]) -> int:
        self.what = "key 'general.alignment'"
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            self.fail(f"must be a power of two, got {str(alignment)[:80]}")
        return alignment

    def tensors(self, count: int, alignment: int) -> dict[str, TensorInfo]:
        """Descriptions, with offsets still counted from the start of the data."""
        found: dict[str, TensorInfo] = {}
        for number in range(count):
            self.what = f"tensor {number}"
            name = self.name("name")
            self.what = name[:200]
            if name in found:
                self.fail("is there twice")
            found[name] = self.tensor(name, alignment)
        return found

    def tensor(self, name: str, alignment: int) -> TensorInfo:
        dims = self.u32()
        if not 1 <= dims <= MAX_DIMS:
            self.fail(f"has {dims} dimensions; 1 to {MAX_DIMS} are possible")
        sizes = struct.unpack(f"<{dims}Q", self.take(8 * dims))
        elements = math.prod(sizes)
        if not 1 <= elements <= MAX_ELEMENTS:
            self.fail(f"dimensions {list(sizes)} multiply to {elements} elements")
        code, offset = self.u32(), self.u64()
        try:
            kind = GGMLQuantizationType(code)
        except ValueError:
            self.fail(f"unknown ggml type {code}")
        block, size = GGML_QUANT_SIZES[kind]
        if sizes[0] % block:
            self.fail(f"rows of {sizes[0]} are no multiple of {kind.name}'s block of {block}")
        if offset % alignment:
            self.fail(f"its offset {offset} is no multiple of the alignment {alignment}")
        return TensorInfo(name, kind, sizes[::-1], offset, elements // block * size)

    def place(self, tensors: dict[str, TensorInfo], data_start: int) -> dict[str, TensorInfo]:
        """Offsets turned into positions in the file: inside it, and no two tensors over each other."""
        end, before = data_start, ""
        placed: dict[str, TensorInfo] = {}
        for info in sorted(tensors.values(), key=lambda info: info.start):
            self.what = info.name
            start = data_start + info.start
            if start + info.nbytes > self.file.size:
                self.fail(f"needs bytes {start} to {start + info.nbytes}, the file ends at {self.file.size}")
            if start < end:
                self.fail(f"starts at byte {start}, inside '{before}', which ends at {end}")
            end, before = start + info.nbytes, info.name
            placed[info.name] = TensorInfo(info.name, info.type, info.shape, start, info.nbytes)
        return {name: placed[name] for name in tensors}
