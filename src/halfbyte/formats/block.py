"""The one description of a 4-bit weight: value = scale[block] * codebook[code] + offset[block]."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .codecs import Codec, Part
from .layouts import CodeLayout, WordLayout


@dataclass(frozen=True)
class BlockFormat:
    """A 4-bit format.

    key: how operators, configurations and the command name it ("nf4-64-nested", "q4_0", "gptq-128").
    codebook: the 16 values, each exact in fp32.
    blocksize: weights that share a scale, counted along the flattened [N, K].
    layout: where the codes are. scale, offset: how a block's fp32 numbers are read; no offset means 0.
    by_row: whether rows start on block boundaries (all formats but bitsandbytes', whose blocks ignore rows).
    """

    key: str
    codebook: tuple[float, ...]
    blocksize: int
    layout: CodeLayout
    scale: Codec
    offset: Codec | None = None
    by_row: bool = True

    @property
    def name(self) -> str:
        """The family: "nf4" of "nf4-64-nested"."""
        return self.key.split("-")[0]

    @property
    def nested(self) -> bool:
        """Whether the scales are themselves quantised in bitsandbytes' way."""
        return self.key.endswith("-nested")

    def parts(self, n: int, k: int) -> dict[str, Part]:
        """The tensors of a packed weight of logical shape [n, k], codes first: names, shapes, dtypes."""
        code_dtype = torch.int32 if isinstance(self.layout, WordLayout) else torch.uint8
        parts = {self.layout.part: Part(self.layout.shape(n, k), (code_dtype,))}
        parts |= self.scale.parts(n, k, self.blocksize)
        if self.offset is not None:
            parts |= self.offset.parts(n, k, self.blocksize)
        return parts

    def check_shape(self, n: int, k: int) -> None:
        """Raise ValueError where a matrix [n, k] cannot be held in this format."""
        if n < 1 or k < 1:
            raise ValueError(f"{self.key}: a weight needs N and K of at least 1, got [{n}, {k}]")
        if self.by_row:
            multiple = (
                self.blocksize if isinstance(self.layout, WordLayout) else max(self.blocksize, self.layout.elements)
            )
            if k % multiple:
                raise ValueError(f"{self.key}: K must be a multiple of {multiple}, got K = {k}")
        if isinstance(self.layout, WordLayout) and n % 8:
            raise ValueError(f"{self.key}: N must be a multiple of 8 (packed zero points), got N = {n}")


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight matrix as its checkpoint's bytes.

    format: what the bytes mean. shape: logical (N, K), as in torch.nn.Linear.weight. parts: the tensors that
    `format.parts(N, K)` names; views of a checkpoint's memory are fine, nothing is copied or repacked.

    Raises ValueError or TypeError where parts are missing, unknown, or of the wrong shape, dtype or device.
    """

    format: BlockFormat
    shape: tuple[int, int]
    parts: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        n, k = self.shape
        self.format.check_shape(n, k)
        wanted = self.format.parts(n, k)
        if missing := wanted.keys() - self.parts.keys():
            raise ValueError(f"{self.format.key}: missing parts {sorted(missing)} for a weight [{n}, {k}]")
        if unknown := self.parts.keys() - wanted.keys():
            raise ValueError(f"{self.format.key}: unknown parts {sorted(unknown)}; it has {list(wanted)}")
        devices = {str(tensor.device) for tensor in self.parts.values()}
        if len(devices) > 1:
            raise ValueError(f"{self.format.key}: parts are on several devices {sorted(devices)}; move them to one")
        for name, part in wanted.items():
            tensor = self.parts[name]
            if tensor.dtype not in part.dtypes:
                raise TypeError(f"{self.format.key}: part '{name}' must be {part.dtypes[0]}, got {tensor.dtype}")
            if tuple(tensor.shape) != part.shape:
                raise ValueError(
                    f"{self.format.key}: part '{name}' of a weight [{n}, {k}] must have shape {list(part.shape)}, "
                    f"got {list(tensor.shape)}"
                )
            if not tensor.is_contiguous():
                raise ValueError(f"{self.format.key}: part '{name}' is not contiguous; call .contiguous() on it")
        object.__setattr__(self, "parts", {name: self.parts[name] for name in wanted})

    @property
    def codes(self) -> Tensor:
        """The part that holds the codes."""
        return self.parts[self.format.layout.part]

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.numel() * part.element_size() for part in self.parts.values())

    @property
    def bits_per_weight(self) -> float:
        return self.nbytes * 8 / (self.shape[0] * self.shape[1])

    def to(self, device: torch.device | str) -> PackedWeight:
        """The same weight on another device; dtypes never change."""
        return PackedWeight(self.format, self.shape, {name: part.to(device) for name, part in self.parts.items()})

    def scales(self) -> Tensor:
        """fp32 [blocks], in the order of the blocks along the flattened [N, K]."""
        return self.format.scale.read(self.parts, *self.shape, self.format.blocksize)

    def offsets(self) -> Tensor | None:
        """fp32 [blocks], or None for formats without offsets."""
        if self.format.offset is None:
            return None
        return self.format.offset.read(self.parts, *self.shape, self.format.blocksize)

    def unpack(self, rows: slice | None = None) -> Tensor:
        """uint8 [rows, K] codes 0..15 of some rows (all by default)."""
        n, k = self.shape
        return self.format.layout.unpack(self.codes, n, k, _bounds(rows, n))

    def dequantize(self, dtype: torch.dtype = torch.float32, rows: slice | None = None) -> Tensor:
        """The true values of some rows (all by default), [rows, K].

        Computed in float64, where products of fp32 numbers are exact, then rounded once to `dtype`.
        """
        n, k = self.shape
        bounds = _bounds(rows, n)
        codebook = torch.tensor(self.format.codebook, dtype=torch.float64, device=self.device)
        values = codebook[self.unpack(bounds).int()].reshape(-1)
        first, last = bounds.start * k, bounds.stop * k
        size = self.format.blocksize
        covered = slice(first // size, -(-last // size))
        inside = slice(first - covered.start * size, last - covered.start * size)
        values *= self.scales()[covered].double().repeat_interleave(size)[inside]
        offsets = self.offsets()
        if offsets is not None:
            values += offsets[covered].double().repeat_interleave(size)[inside]
        return values.view(-1, k).to(dtype)


def _bounds(rows: slice | None, n: int) -> slice:
    """`rows` with its ends filled in and clamped to [0, n]."""
    start, stop, step = (rows or slice(None)).indices(n)
    if step != 1:
        raise ValueError(f"rows must be a plain range of rows, got step {step}")
    return slice(start, max(start, stop))
