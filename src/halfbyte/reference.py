"""The definition: layers in float64, and the numerics contract as functions that every test uses.

A kernel's output `out` for a float64 result y is within the contract if ‖out - y‖ / ‖y‖ is at most 1.1 times the
rounding limit of its dtype (fp16, bf16), or 5e-6 (fp32). Nothing here is ever tuned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .formats import PackedWeight, RecordLayout

FACTOR = 1.1  # 16-bit outputs: at most this times the rounding limit
FP32_LIMIT = 5e-6  # fp32 outputs: relative error
CHUNK_VALUES = 1 << 24  # dequantised values held at once: 128 MiB of float64


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter of one layer: y += scaling * b @ (a @ x), with a [rank, K] and b [N, rank]."""

    a: Tensor
    b: Tensor
    scaling: float = 1.0

    @classmethod
    def lora(cls, a: Tensor, b: Tensor, alpha: float, rank_stabilized: bool = False) -> Adapter:
        """Scaled as LoRA is, by alpha / rank (Hu et al., arXiv 2106.09685), or as rsLoRA, by alpha / sqrt(rank)
        (Kalajdzievski, arXiv 2312.03732)."""
        return cls(a, b, alpha / (a.shape[0] ** 0.5 if rank_stabilized else a.shape[0]))

    @property
    def rank(self) -> int:
        """Rows of a."""
        return self.a.shape[0]


def linear(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    adapters: Sequence[Adapter] = (),
    index: Tensor | None = None,
) -> Tensor:
    """x [..., K] times the weight's transpose, plus bias [N], plus each row's adapter; float64 [..., N].

    y_i = W x_i + bias + scaling_a * B_a (A_a x_i) with a = index[i]. index: integers that name each row's adapter, -1
    for none, in the shape of x's leading dimensions or of the first of them ([batch] for x [batch, tokens, K]); by
    default every row takes adapter 0 if there is one. Decodes the weight in chunks of rows, so that a large one needs
    little memory.
    """
    n, k = weight.shape
    rows = x.reshape(-1, k).double()
    out = torch.empty(rows.shape[0], n, dtype=torch.float64, device=x.device)
    step = max(1, CHUNK_VALUES // k)
    for start in range(0, n, step):
        chunk = slice(start, min(n, start + step))
        out[:, chunk] = rows @ weight.dequantize(torch.float64, chunk).t()
    if bias is not None:
        out += bias.double()
    chosen = torch.zeros(rows.shape[0], dtype=torch.int64)
    if index is not None:
        missing = (1,) * (x.dim() - 1 - index.dim())
        chosen = index.reshape(*index.shape, *missing).expand(x.shape[:-1]).reshape(-1).to("cpu")
    for number, adapter in enumerate(adapters):
        mine = (chosen == number).to(x.device)
        shrunk = rows[mine] @ adapter.a.double().t()
        out[mine] += adapter.scaling * (shrunk @ adapter.b.double().t())
    return out.reshape(*x.shape[:-1], n)


def relative_error(out: Tensor, y: Tensor) -> float:
    """‖out - y‖ / ‖y‖ in float64; 0 where both are 0, NaN or infinity where `out` is not finite."""
    norm = y.double().norm()
    distance = (out.double() - y.double()).norm()
    return float(distance / norm) if norm else float(distance) * (float("inf") if distance else 1.0)


def rounding_limit(y: Tensor, dtype: torch.dtype) -> float:
    """The error that rounding the float64 result to `dtype` makes by itself."""
    return relative_error(y.to(dtype), y)


def error_limit(y: Tensor, dtype: torch.dtype) -> float:
    """The largest relative error that the contract allows for outputs of `dtype`."""
    return FP32_LIMIT if dtype == torch.float32 else FACTOR * rounding_limit(y, dtype)


def assert_within_contract(out: Tensor, y: Tensor, label: str = "", slack: float = 0.0) -> None:
    """Raise AssertionError, saying where and by how much, unless `out` is within the contract for float64 `y`.

    slack: absolute error (a 2-norm) allowed beyond the limit; for a handful of outputs that cancel, where sums in fp32
    cannot be relatively exact.
    """
    assert out.shape == y.shape, f"{label}: shape {list(out.shape)}, expected {list(y.shape)}"
    overflow = ~torch.isfinite(y.to(out.dtype))
    wrong = torch.isnan(out) | (torch.isinf(out) & ~overflow)
    if wrong.any():
        where = [tuple(spot.tolist()) for spot in wrong.nonzero()[:4]]
        raise AssertionError(
            f"{label}: {int(wrong.sum())} of {out.numel()} outputs are NaN or infinite, first at {where}"
        )
    if out.numel() == 0:
        return
    out, y = out.masked_fill(overflow, 0), y.masked_fill(overflow, 0)  # what must overflow does not excuse the rest
    limit = error_limit(y, out.dtype)
    error = relative_error(out, y)
    if error <= limit or float((out.double() - y).norm()) <= limit * float(y.norm()) + slack:
        return
    difference = (out.double() - y).abs()
    worst = int(difference.argmax())
    spot = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), out.shape))
    times = error / limit if limit else float("inf")
    raise AssertionError(
        f"{label}: relative error {error:.3e} is {times:.2f} times the limit {limit:.3e} for {out.dtype}; "
        f"worst at {spot}: got {float(out.reshape(-1)[worst]):.6g}, exact {float(y.reshape(-1)[worst]):.6g}"
    )


def ulp_distance(out: Tensor, expected: Tensor) -> Tensor:
    """int64: how many representable values of their common dtype lie between two tensors; -0 equals 0."""
    assert out.dtype == expected.dtype
    bits = {2: torch.int16, 4: torch.int32}[out.element_size()]
    top = torch.iinfo(bits).max

    def ordered(values: Tensor) -> Tensor:
        pattern = values.contiguous().view(bits).long()
        return torch.where(pattern < 0, -(pattern & top), pattern)

    return (ordered(out) - ordered(expected)).abs()


@dataclass(frozen=True)
class Probe:
    """What one-hot activations read back: share of weights that are bit for bit right, and the worst distance."""

    equal: float
    worst_ulp: int

    def within_contract(self, dtype: torch.dtype) -> bool:
        """CPU and strict mode: fp32 all equal, 16-bit at least 99 % equal; never off by more than one."""
        if dtype == torch.float32:
            return self.worst_ulp == 0
        return self.worst_ulp <= 1 and self.equal >= 0.99


def one_hot_probe(
    layer: Callable[[Tensor], Tensor], weight: PackedWeight, dtype: torch.dtype, columns: Sequence[int] | None = None
) -> Probe:
    """Read columns of the weight (all by default) back through `layer` (without bias) by one-hot rows of x."""
    n, k = weight.shape
    chosen = torch.tensor(list(range(k)) if columns is None else list(columns))
    x = torch.zeros(len(chosen), k, dtype=dtype)
    x[torch.arange(len(chosen)), chosen] = 1
    out = layer(x.to(weight.device)).cpu()
    step = max(1, CHUNK_VALUES // k)
    rows = [weight.dequantize(dtype, slice(i, i + step)).cpu()[:, chosen] for i in range(0, n, step)]
    distance = ulp_distance(out, torch.cat(rows).t().contiguous())
    return Probe(equal=float((distance == 0).double().mean()), worst_ulp=int(distance.max()))


def swap_nibbles(weight: PackedWeight) -> PackedWeight:
    """The weight with the two halves of each code byte swapped: a decoding error that every test must notice."""
    layout = weight.format.layout
    codes = weight.codes
    if isinstance(layout, RecordLayout):
        swapped = codes.clone()
        body = swapped.reshape(-1)[: codes.numel() // layout.bytes * layout.bytes].view(-1, layout.bytes)
        inside = slice(layout.start, layout.start + layout.elements // 2)
        body[:, inside] = (body[:, inside] >> 4) | (body[:, inside] << 4)
    else:
        octets = codes.contiguous().view(torch.uint8)
        swapped = ((octets >> 4) | (octets << 4)).view(torch.int32)
    return PackedWeight(weight.format, weight.shape, {**weight.parts, layout.part: swapped})
