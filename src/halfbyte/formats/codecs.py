"""How a block's scale and offset are read: the only place where 4-bit formats differ beyond a table.

A codec names the tensors ("parts") it reads and turns them into fp32, one number a block, in the order of the blocks
along the flattened [N, K] matrix. Every product and sum here is a single fp32 rounding: kernels must do the same, so
that the scale is the same number everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .layouts import unpack_words

HALVES = (torch.float16, torch.bfloat16)
NESTED_BLOCKSIZE = 256  # absmax values that share one second-level scale; bitsandbytes' kernels fix it


@dataclass(frozen=True)
class Part:
    """One tensor of a packed weight: the shape and dtypes it must have."""

    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]


Parts = Mapping[str, Tensor]


class Codec(Protocol):
    """Reads fp32 numbers, one a block, from a weight's parts."""

    def parts(self, n: int, k: int, blocksize: int) -> dict[str, Part]:
        """The tensors read, beside the codes, for a weight of logical shape [n, k]."""
        ...

    def read(self, parts: Parts, n: int, k: int, blocksize: int) -> Tensor:
        """fp32 [ceil(n*k / blocksize)]."""
        ...


def blocks(n: int, k: int, blocksize: int) -> int:
    """Number of blocks along the flattened [n, k]."""
    return -(-n * k // blocksize)


@dataclass(frozen=True)
class AbsmaxScale:
    """One fp32 a block (bitsandbytes)."""

    def parts(self, n: int, k: int, blocksize: int) -> dict[str, Part]:
        return {"absmax": Part((blocks(n, k, blocksize),), (torch.float32,))}

    def read(self, parts: Parts, n: int, k: int, blocksize: int) -> Tensor:
        return parts["absmax"]


@dataclass(frozen=True)
class NestedScale:
    """bitsandbytes' nested (double-quantised) absmax: map[q] * absmax2[block >> 8] + offset, every step in fp32."""

    def parts(self, n: int, k: int, blocksize: int) -> dict[str, Part]:
        count = blocks(n, k, blocksize)
        return {
            "absmax": Part((count,), (torch.uint8,)),
            "nested_absmax": Part((-(-count // NESTED_BLOCKSIZE),), (torch.float32,)),
            "nested_quant_map": Part((256,), (torch.float32,)),
            "nested_offset": Part((), (torch.float32,)),
        }

    def read(self, parts: Parts, n: int, k: int, blocksize: int) -> Tensor:
        absmax = parts["absmax"]
        second = parts["nested_absmax"].repeat_interleave(NESTED_BLOCKSIZE)[: absmax.numel()]
        return parts["nested_quant_map"][absmax.int()] * second + parts["nested_offset"]


@dataclass(frozen=True)
class RecordHalf:
    """An fp16 at byte `start` of each record of `bytes` bytes (Q4_0, Q4_1, IQ4_NL)."""

    bytes: int
    start: int

    def parts(self, n: int, k: int, blocksize: int) -> dict[str, Part]:
        return {}

    def read(self, parts: Parts, n: int, k: int, blocksize: int) -> Tensor:
        return half_column(parts["codes"].reshape(-1, self.bytes), self.start)


@dataclass(frozen=True)
class KQuant:
    """Q4_K's superblock of 256: fp16 (byte `start`) times a 6-bit number, for its eight blocks of 32.

    The 12 bytes from byte 4 on hold eight 6-bit scales and eight 6-bit mins: of the first four, bits 0..5 of bytes 0..3
    (scales) and 4..7 (mins); of the last four, the nibbles of bytes 8..11 (scales low, mins high) below the top two
    bits of bytes 0..3 and 4..7. (ggml, `get_scale_min_k4`.)
    """

    minimum: bool
    bytes: int = 144

    def parts(self, n: int, k: int, blocksize: int) -> dict[str, Part]:
        return {}

    def read(self, parts: Parts, n: int, k: int, blocksize: int) -> Tensor:
        records = parts["codes"].reshape(-1, self.bytes)
        base = 8 if self.minimum else 4
        first = records[:, base : base + 4]
        last = records[:, 12:16] >> 4 if self.minimum else records[:, 12:16] & 0xF
        six = torch.cat([first & 0x3F, last | ((first >> 2) & 0x30)], dim=1)
        values = half_column(records, 2 if self.minimum else 0).unsqueeze(1) * six.float()
        return (-values if self.minimum else values).reshape(-1)


@dataclass(frozen=True)
class E8M0Scale:
    """2^(e - 127) of a byte e a block, NaN for 255 (OCP MX v1.0): in its own tensor or at a record's head."""

    record_bytes: int | None = None

    def parts(self, n: int, k: int, blocksize: int) -> dict[str, Part]:
        return {} if self.record_bytes else {"scales": Part((n, k // blocksize), (torch.uint8,))}

    def read(self, parts: Parts, n: int, k: int, blocksize: int) -> Tensor:
        if self.record_bytes:
            exponent = parts["codes"].reshape(-1, self.record_bytes)[:, 0]
        else:
            exponent = parts["scales"].reshape(-1)
        values = torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent.int() - 127)
        return torch.where(exponent == 255, torch.nan, values).float()


@dataclass(frozen=True)
class E4M3Scale:
    """NVFP4: an fp8 E4M3 a block of 16, times one fp32 for the whole tensor, rounded to fp32."""

    def parts(self, n: int, k: int, blocksize: int) -> dict[str, Part]:
        return {
            "scales": Part((n, k // blocksize), (torch.float8_e4m3fn,)),
            "global_scale": Part((), (torch.float32,)),
        }

    def read(self, parts: Parts, n: int, k: int, blocksize: int) -> Tensor:
        return parts["scales"].reshape(-1).float() * parts["global_scale"]


@dataclass(frozen=True)
class GroupScale:
    """GPTQ and AWQ: 16-bit scales [K/group, N]."""

    def parts(self, n: int, k: int, blocksize: int) -> dict[str, Part]:
        return {"scales": Part((k // blocksize, n), HALVES)}

    def read(self, parts: Parts, n: int, k: int, blocksize: int) -> Tensor:
        return parts["scales"].float().t().reshape(-1)


@dataclass(frozen=True)
class GroupZero:
    """GPTQ and AWQ: -scale * zero, zeros as eight nibbles in an int32 along N, qzeros [K/group, N/8].

    GPTQ's first format stores zero - 1 (`plus_one`); "gptq_v2" and AWQ store the zero itself.
    """

    order: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)
    plus_one: bool = False

    def parts(self, n: int, k: int, blocksize: int) -> dict[str, Part]:
        return {"qzeros": Part((k // blocksize, n // 8), (torch.int32,))}

    def read(self, parts: Parts, n: int, k: int, blocksize: int) -> Tensor:
        zeros = unpack_words(parts["qzeros"], self.order).reshape(-1, n).float() + float(self.plus_one)
        return (-parts["scales"].float() * zeros).t().reshape(-1)


def half_column(records: Tensor, start: int) -> Tensor:
    """fp32 [records] of the little-endian fp16 at byte `start` of uint8 records [records, bytes]."""
    return records[:, start : start + 2].contiguous().view(torch.float16).squeeze(1).float()
