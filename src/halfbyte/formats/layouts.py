"""Where the 4-bit code of each weight sits in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class RecordLayout:
    """Codes in byte records that follow each other along the flattened [N, K] matrix.

    A record holds `elements` weights in `bytes` bytes, its codes from byte `start` on. In each run of `span` weights
    byte j holds weight j and weight j + span/2; `high_first` says that the first of the two is the high nibble.
    Planar codes (bitsandbytes, MXFP4, NVFP4) are records of one byte; GGUF's blocks are records with scales inside.
    """

    elements: int = 2
    bytes: int = 1
    start: int = 0
    span: int = 2
    high_first: bool = False
    part: str = "codes"

    def unpack(self, codes: Tensor, n: int, k: int, rows: slice) -> Tensor:
        """uint8 [rows, K] codes of some rows of the flattened bytes `codes`."""
        first, last = rows.start * k, rows.stop * k
        begin, end = first // self.elements, -(-last // self.elements)
        records = codes.reshape(-1)[begin * self.bytes : end * self.bytes].view(end - begin, self.bytes)
        body = records[:, self.start : self.start + self.elements // 2].reshape(-1, self.span // 2)
        low, high = body & 0xF, body >> 4
        pairs = (high, low) if self.high_first else (low, high)
        flat = torch.cat(pairs, dim=1).reshape(-1)
        skipped = first - begin * self.elements
        return flat[skipped : skipped + last - first].view(-1, k)

    def pack(self, codes: Tensor) -> Tensor:
        """uint8 [records, elements/2] code bytes of flat uint8 `codes`, padded with code 0 to whole records."""
        padded = torch.nn.functional.pad(codes.reshape(-1), (0, -codes.numel() % self.elements))
        halves = padded.view(-1, 2, self.span // 2)
        first, second = halves[:, 0], halves[:, 1]
        packed = (first << 4) | second if self.high_first else first | (second << 4)
        return packed.view(-1, self.elements // 2)

    def shape(self, n: int, k: int) -> tuple[int, ...]:
        """Shape of the part that holds the codes."""
        if self.elements == 2:
            return (-(-n * k // 2),)
        return (n, k // self.elements * self.bytes)


@dataclass(frozen=True)
class WordLayout:
    """Codes in int32 words of eight: weight i of a word sits at bits 4*order[i].

    `axis` "K" is GPTQ's qweight [K/8, N], "N" is AWQ's [K, N/8].
    """

    axis: Literal["K", "N"]
    order: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)
    part: str = "qweight"

    def unpack(self, words: Tensor, n: int, k: int, rows: slice) -> Tensor:
        """uint8 [rows, K] codes of some rows."""
        if self.axis == "K":
            nibbles = unpack_words(words[:, rows], self.order)  # [K/8, rows, 8]
            return nibbles.permute(1, 0, 2).reshape(-1, k)
        begin, end = rows.start // 8, -(-rows.stop // 8)
        nibbles = unpack_words(words[:, begin:end], self.order).reshape(k, -1)  # [K, rows rounded to words]
        skipped = rows.start - begin * 8
        return nibbles[:, skipped : skipped + rows.stop - rows.start].t().contiguous()

    def shape(self, n: int, k: int) -> tuple[int, ...]:
        """Shape of the part that holds the codes."""
        return (k // 8, n) if self.axis == "K" else (k, n // 8)


def unpack_words(words: Tensor, order: tuple[int, ...]) -> Tensor:
    """uint8 [..., 8] nibbles of int32 `words` [...], in the order of the weights."""
    shifts = torch.tensor([4 * position for position in order], dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> shifts) & 0xF).to(torch.uint8)


CodeLayout = RecordLayout | WordLayout
