"""One safetensors file: its header, checked, and its tensors as views of the mapped file.

The format (https://huggingface.co/docs/safetensors): 8 bytes little-endian length of the header, the header (JSON,
may be padded with spaces), then the tensors' bytes without gaps. safetensors' own `safe_open` does not tell where a
tensor lies, and so its pages cannot be given back while a model larger than the memory is walked: hence this reader.
The fuzz tests hold the two against each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from .errors import CheckpointError
from .mapped import MAX_JSON_BYTES, MappedFile, parse_json

# safetensors' name -> our name, torch's type, bits; types without a torch type are described but not loaded
_DTYPES: dict[str, tuple[str, torch.dtype | None, int]] = {
    "BOOL": ("bool", torch.bool, 8),
    "U8": ("uint8", torch.uint8, 8),
    "I8": ("int8", torch.int8, 8),
    "U16": ("uint16", torch.uint16, 16),
    "I16": ("int16", torch.int16, 16),
    "U32": ("uint32", torch.uint32, 32),
    "I32": ("int32", torch.int32, 32),
    "U64": ("uint64", torch.uint64, 64),
    "I64": ("int64", torch.int64, 64),
    "F16": ("fp16", torch.float16, 16),
    "BF16": ("bf16", torch.bfloat16, 16),
    "F32": ("fp32", torch.float32, 32),
    "F64": ("fp64", torch.float64, 64),
    "C64": ("complex64", torch.complex64, 64),
    "F8_E4M3": ("fp8_e4m3", torch.float8_e4m3fn, 8),
    "F8_E5M2": ("fp8_e5m2", torch.float8_e5m2, 8),
    "F8_E8M0": ("fp8_e8m0", getattr(torch, "float8_e8m0fnu", None), 8),
    "F6_E2M3": ("fp6_e2m3", None, 6),
    "F6_E3M2": ("fp6_e3m2", None, 6),
    "F4": ("fp4_e2m1", None, 4),
}
MAX_DIMS = 64  # torch's limit; also keeps the product of a hostile shape from growing without end
SAFETENSORS_NAMES = {dtype: name for name, (_, dtype, _) in _DTYPES.items() if dtype is not None}


def dtype_name(dtype: torch.dtype) -> str:
    """ "bf16" for torch.bfloat16, and so on."""
    return _DTYPES[SAFETENSORS_NAMES[dtype]][0]


@dataclass(frozen=True)
class Record:
    """Where a tensor lies: its type's name here ("bf16") and in torch, shape, first byte in the file, bytes."""

    format: str
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    start: int
    nbytes: int


class SafetensorsFile(Mapping[str, Tensor]):
    """The tensors of one file by name, each mapped when asked for.

    Raises CheckpointError (on opening) for a header that is malformed or does not fit the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = MappedFile(path)
        length = int.from_bytes(self.file.read(0, 8, "header"), "little")
        if length > MAX_JSON_BYTES:
            self._fail("header", f"claims {length} bytes; at most {MAX_JSON_BYTES} are read")
        data = self.file.read(8, length, "header")
        if not data.startswith(b"{"):
            self._fail("header", "does not start with '{': not a safetensors file")
        header = parse_json(data, path, "header")
        self.metadata: dict[str, str] = self._metadata(header.pop("__metadata__", {}))
        self.records = {name: self._record(name, value, 8 + length) for name, value in header.items()}
        self._check_regions(8 + length)

    def __getitem__(self, name: str) -> Tensor:
        record = self.records[name]
        if record.dtype is None:
            self._fail(name, f"torch has no type for '{record.format}'")
        data = self.file.tensor(record.start, record.nbytes, name)
        if record.start % record.dtype.itemsize:
            data = data.clone()  # other writers may leave a tensor unaligned for its type
        return data.view(record.dtype).view(record.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)

    def __contains__(self, name: object) -> bool:  # Mapping's would map the tensor
        return name in self.records

    def release(self, name: str) -> None:
        """See Checkpoint.release."""
        self.file.release(self.records[name].start, self.records[name].nbytes)

    def _fail(self, tensor: str, cause: str) -> NoReturn:
        raise CheckpointError(self.path, tensor, cause)

    def _metadata(self, value: Any) -> dict[str, str]:
        if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
            self._fail("__metadata__", "must map strings to strings")
        return value

    def _record(self, name: str, value: Any, data_start: int) -> Record:
        if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
            self._fail(name, "its header must have exactly dtype, shape and data_offsets")
        dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            self._fail(name, f"unknown dtype {str(dtype)[:40]!r}")
        if not isinstance(shape, list) or len(shape) > MAX_DIMS or not all(map(_is_count, shape)):
            self._fail(name, f"its shape must be a list of at most {MAX_DIMS} integers from 0 to 2^63")
        if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
            self._fail(name, "its data_offsets must be two integers from 0 to 2^63")
        label, torch_dtype, bits = _DTYPES[dtype]
        begin, end = offsets
        wanted = math.prod(shape) * bits
        if wanted != (end - begin) * 8:
            self._fail(name, f"{dtype} of shape {shape} needs {-(-wanted // 8)} bytes, its offsets hold {end - begin}")
        return Record(label, torch_dtype, tuple(shape), data_start + begin, end - begin)

    def _check_regions(self, data_start: int) -> None:
        """Tensors follow each other without gaps or overlap, and end with the file: safetensors' rule."""
        position = data_start
        for name, record in sorted(self.records.items(), key=lambda item: (item[1].start, item[1].nbytes)):
            if record.start != position:
                self._fail(name, f"starts at byte {record.start}, the one before ends at {position}")
            position += record.nbytes
        if position != self.file.size:
            self._fail("file", f"its tensors end at byte {position}, the file at {self.file.size}; is it cut short?")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63
