"""Weights to 4 bits. NF4 and FP4 give bitsandbytes' bytes, Q4_0, Q4_1 and GGUF's MXFP4 gguf-py's, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from .block import BlockFormat, PackedWeight
from .codecs import NESTED_BLOCKSIZE, NestedScale
from .layouts import RecordLayout
from .table import get_format

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
CHUNK_VALUES = 1 << 17  # quantised at once: at the 40 bytes a weight that it takes, 5 MB; a multiple of 4096


def quantize(weight: Tensor, format: BlockFormat | str) -> PackedWeight:
    """Quantise a floating-point matrix [N, K] (fp32, fp16 or bf16) to nf4, fp4, q4_0, q4_1, iq4_nl or mxfp4.

    Raises TypeError or ValueError for another dtype, a tensor that is not 2-D, values that are not finite, a shape that
    the format cannot hold, or a format without a quantiser (q4_k, nvfp4, gptq, awq are read, not written).
    """
    chosen = get_format(format) if isinstance(format, str) else format
    if weight.dtype not in FLOATS:
        raise TypeError(f"quantize: weight must be float32, float16 or bfloat16, got {weight.dtype}")
    if weight.dim() != 2:
        raise ValueError(f"quantize: weight must be a matrix [N, K], got shape {list(weight.shape)}")
    if chosen.name not in _QUANTISERS:
        raise ValueError(f"quantize: no quantiser for '{chosen.key}'; there is one for {', '.join(_QUANTISERS)}")
    n, k = weight.shape
    chosen.check_shape(n, k)
    chunks = torch.split(weight, max(1, CHUNK_VALUES // k))
    if not all(bool(torch.isfinite(chunk).all()) for chunk in chunks):
        raise ValueError("quantize: weight holds NaN or infinity; 4-bit blocks cannot represent them")
    quantiser = _QUANTISERS[chosen.name]
    if not chosen.by_row:
        return PackedWeight(chosen, (n, k), quantiser(weight, chosen))
    pieces = [quantiser(chunk.float(), chosen) for chunk in chunks]
    return PackedWeight(chosen, (n, k), {part: torch.cat([piece[part] for piece in pieces]) for part in pieces[0]})


def nearest_in_sorted(values: Tensor, table: Tensor) -> Tensor:
    """Index of the nearest entry of a sorted fp32 table; a tie goes to the lower entry (as in bitsandbytes)."""
    return torch.bucketize(values, (table[:-1] + table[1:]) / 2, out_int32=True)


@lru_cache(maxsize=1)
def dynamic_map() -> Tensor:
    """fp32 [256]: the signed 8-bit dynamic data type of nested scales (Dettmers, arXiv 1511.04561), ascending.

    Seven decades; decade i, from 1e-6 up, holds 2^i means of neighbouring points of a linear grid over [0.1, 1], for
    each sign; and 0 and 1.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        grid = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float32)
        means = (grid[:-1] + grid[1:]) / 2
        for sign in (1, -1):
            values += (sign * 10 ** (decade - 6) * means).tolist()
    return torch.tensor(sorted(values), dtype=torch.float32)


def blockwise(flat: Tensor, blocksize: int) -> tuple[Tensor, Tensor]:
    """Absmax [blocks] of a flat fp32 tensor, and the values over their block's absmax, in [-1, 1].

    Whole blocks are multiplied by the reciprocal, a partial last block is divided: bitsandbytes' arithmetic.
    """
    whole = flat.numel() // blocksize * blocksize
    body = flat[:whole].view(-1, blocksize)
    absmax = body.abs().amax(dim=1)
    scaled = (body * (1.0 / absmax.clamp(min=1e-38)).unsqueeze(1)).clamp(-1, 1).reshape(-1)
    if whole < flat.numel():
        last = flat[whole:].abs().amax().clamp(min=1e-38)
        absmax = torch.cat([absmax, last.unsqueeze(0)])
        scaled = torch.cat([scaled, (flat[whole:] / last).clamp(-1, 1)])
    return absmax, scaled


def _quantize_bnb(weight: Tensor, format: BlockFormat) -> dict[str, Tensor]:
    """Blocks along the flattened matrix, some at a time; the nested statistics see all of them."""
    table = torch.tensor(format.codebook, device=weight.device)
    order = torch.argsort(table)  # FP4's table is not sorted
    by_rank, ranked = order.to(torch.uint8), table[order]
    # bitsandbytes pads an odd count with the value 0 before it looks up the code
    zero = int(by_rank[nearest_in_sorted(torch.zeros(1, device=weight.device), ranked)])
    layout = format.layout
    assert isinstance(layout, RecordLayout)
    packed, scales = [], []
    for chunk in torch.split(weight.reshape(-1), CHUNK_VALUES):
        absmax, scaled = blockwise(chunk.float(), format.blocksize)
        codes = by_rank[nearest_in_sorted(scaled, ranked)]
        packed.append(layout.pack(pad(codes, (0, codes.numel() % 2), value=zero)).reshape(-1))
        scales.append(absmax)
    parts = {"codes": torch.cat(packed), "absmax": torch.cat(scales)}
    return parts | quantize_absmax(parts["absmax"]) if isinstance(format.scale, NestedScale) else parts


def quantize_absmax(absmax: Tensor) -> dict[str, Tensor]:
    """The nested parts of fp32 `absmax` [blocks]: minus its mean, 8-bit dynamic codes in blocks of 256.

    On the CPU bitsandbytes first rounds the normalised values to a grid of 65,536 steps over [-1, 1]
    (csrc/cpu_ops.cpp, `norm_to_lut_index`), on a GPU it does not: so here, for equal bytes.
    """
    offset = absmax.mean()
    quant_map = dynamic_map().to(absmax.device)
    padded = pad(absmax - offset, (0, -absmax.numel() % NESTED_BLOCKSIZE)).view(-1, NESTED_BLOCKSIZE)
    second = padded.abs().amax(dim=1)
    scaled = (padded * (1.0 / second).unsqueeze(1)).clamp(-1, 1)
    if absmax.device.type == "cpu":
        step = torch.trunc((scaled + 1.0) * 0.5 * 65535 + 0.5)
        scaled = -1.0 + (2.0 * step) / 65535
    codes = torch.where(second.unsqueeze(1) == 0, 0, nearest_in_sorted(scaled, quant_map))
    return {
        "absmax": codes.reshape(-1)[: absmax.numel()].to(torch.uint8),
        "nested_absmax": second,
        "nested_quant_map": quant_map.clone(),
        "nested_offset": offset,
    }


def _reciprocal(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0, 1 / scale)


def _half_bytes(values: Tensor) -> Tensor:
    return values.to(torch.float16).view(torch.uint8)


def _records(format: BlockFormat, weight: Tensor, header: list[Tensor], codes: Tensor) -> dict[str, Tensor]:
    layout = format.layout
    assert isinstance(layout, RecordLayout)
    records = torch.cat([*header, layout.pack(codes.to(torch.uint8))], dim=1)
    return {"codes": records.reshape(weight.shape[0], -1)}


def _quantize_q4_0(weight: Tensor, format: BlockFormat) -> dict[str, Tensor]:
    blocks = weight.reshape(-1, 32)
    extreme = blocks.gather(1, blocks.abs().argmax(dim=1, keepdim=True))
    scale = extreme / -8
    codes = (blocks * _reciprocal(scale) + 8.5).trunc().clamp(0, 15)
    return _records(format, weight, [_half_bytes(scale)], codes)


def _quantize_q4_1(weight: Tensor, format: BlockFormat) -> dict[str, Tensor]:
    blocks = weight.reshape(-1, 32)
    low = blocks.amin(dim=1, keepdim=True)
    scale = (blocks.amax(dim=1, keepdim=True) - low) / 15
    codes = ((blocks - low) * _reciprocal(scale) + 0.5).trunc().clamp(0, 15)
    return _records(format, weight, [_half_bytes(scale), _half_bytes(low)], codes)


def _quantize_iq4_nl(weight: Tensor, format: BlockFormat) -> dict[str, Tensor]:
    """Of 15 candidate scales that put the block's extreme near one of the table's ends, the least squared error."""
    blocks = weight.reshape(-1, 32)
    table = torch.tensor(format.codebook, device=weight.device)
    extreme = blocks.gather(1, blocks.abs().argmax(dim=1, keepdim=True))
    best_error = torch.full_like(extreme, torch.inf)
    best_scale, best_codes = torch.zeros_like(extreme), torch.full_like(blocks, 8, dtype=torch.int32)
    for end in torch.linspace(-134, -120, 8).tolist() + torch.linspace(107, 119, 7).tolist():
        codes = nearest_in_sorted(blocks * _reciprocal(extreme / end), table)
        values = table[codes.long()]
        fitted = (blocks * values).sum(dim=1, keepdim=True) / (values * values).sum(dim=1, keepdim=True)
        scale = fitted.to(torch.float16).float()  # the scale as stored decides the error
        error = ((blocks - scale * values) ** 2).sum(dim=1, keepdim=True)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_scale = torch.where(better, scale, best_scale)
        best_codes = torch.where(better, codes, best_codes)
    return _records(format, weight, [_half_bytes(best_scale)], best_codes)


def _quantize_mxfp4(weight: Tensor, format: BlockFormat) -> dict[str, Tensor]:
    """Shared exponent floor(log2(absmax)) - 2 (OCP MX v1.0, section 6.3), then the nearest E2M1 value, ties to zero."""
    blocks = weight.reshape(-1, 32)
    absmax = blocks.abs().amax(dim=1, keepdim=True)
    exponent = torch.where(absmax > 0, torch.frexp(absmax).exponent - 1 - 2 + 127, 0).clamp(0, 254)
    scale = torch.ldexp(torch.ones_like(absmax, dtype=torch.float64), exponent - 127).float()
    magnitudes = torch.tensor(format.codebook[:8], device=weight.device)
    codes = nearest_in_sorted(blocks.abs() / scale, magnitudes)
    codes = torch.where((blocks < 0) & (codes > 0), codes + 8, codes)
    exponent = exponent.to(torch.uint8)
    if format.key == "mxfp4_gguf":
        return _records(format, weight, [exponent], codes)
    layout = format.layout
    assert isinstance(layout, RecordLayout)
    return {"codes": layout.pack(codes.to(torch.uint8)).reshape(-1), "scales": exponent.view(weight.shape[0], -1)}


_QUANTISERS: dict[str, Callable[[Tensor, BlockFormat], dict[str, Tensor]]] = {
    "nf4": _quantize_bnb,
    "fp4": _quantize_bnb,
    "q4_0": _quantize_q4_0,
    "q4_1": _quantize_q4_1,
    "iq4_nl": _quantize_iq4_nl,
    "mxfp4": _quantize_mxfp4,
    "mxfp4_gguf": _quantize_mxfp4,
}
