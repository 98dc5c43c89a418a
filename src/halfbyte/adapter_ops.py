"""The torch operators of layers with LoRA adapters.

`torch.ops.halfbyte.adapters_shrink(x, a, spans, index, width)` makes h = A x, each row with its own adapter, and
`torch.ops.halfbyte.linear_adapters(x, parts, bias, format, N, K, shrunk, b, table, scalings, index)` multiplies by the
packed weight and adds scaling * B h, in fp32, before the one rounding. They are two because layers that share x share
the first. Both work eagerly, under autograd (x, A, B, bias), on fake and meta tensors, and inside
`torch.compile(fullgraph=True)`. Their backward pass reads the tables on the host, and has no derivative itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKeySet
from torch.autograd.function import once_differentiable

from .counters import bucket, counts
from .kernels import adapters_shrink
from .kernels.adapters import expand_with_torch, shrink_on_cpu, shrink_with_torch
from .kernels.adapters_shrink import Shrink
from .kernels.cpu import library
from .kernels.registry import DTYPES, Expand, Kernel
from .ops import (
    CheckedWeight,
    _check_bias,
    _check_input,
    _check_parts,
    _is_plain,
    _spec,
    checked_weight,
    linear_grad_op,
)

NAME = "halfbyte.linear_with_adapters"
Rows = Tensor | slice

_library: Any = torch.library.Library("halfbyte", "FRAGMENT")  # type: ignore[no-untyped-call]
for _signature in (
    "adapters_shrink(Tensor x, Tensor a, Tensor spans, Tensor? index, int width) -> Tensor",
    "linear_adapters(Tensor x, Tensor[] parts, Tensor? bias, str format, int N, int K, Tensor shrunk, Tensor b, "
    "Tensor table, Tensor scalings, Tensor? index) -> Tensor",
    "linear_with_adapters(Tensor x, Tensor[] parts, Tensor? bias, str format, int N, int K, Tensor a, Tensor spans, "
    "int width, Tensor b, Tensor table, Tensor scalings, Tensor? index) -> Tensor",
    "adapters_shrink_grad(Tensor grad, Tensor x, Tensor a, Tensor spans, Tensor? index) -> (Tensor, Tensor)",
    "adapters_expand_grad(Tensor grad, Tensor shrunk, Tensor b, Tensor table, Tensor scalings, Tensor? index) "
    "-> (Tensor, Tensor)",
):
    _library.define(_signature, tags=(torch.Tag.pt2_compliant_tag,))
shrink_op = torch.ops.halfbyte.adapters_shrink.default
linear_adapters_op = torch.ops.halfbyte.linear_adapters.default
linear_with_adapters_op = torch.ops.halfbyte.linear_with_adapters.default
shrink_grad_op = torch.ops.halfbyte.adapters_shrink_grad.default
expand_grad_op = torch.ops.halfbyte.adapters_expand_grad.default


# ---- checks


def _check_tensor(
    name: str, tensor: Tensor, shape: Sequence[int | None], dtypes: Sequence[torch.dtype], x: Tensor
) -> None:
    """Raise unless `tensor` has the shape (None for any size), one of the dtypes, is contiguous and where x is."""
    found = tensor.shape
    if (
        tensor.dtype in dtypes
        and tensor.device == x.device
        and tensor.is_contiguous()
        and len(found) == len(shape)
        and (shape[0] is None or found[0] == shape[0])
        and (shape[-1] is None or found[-1] == shape[-1])
    ):
        return
    if tensor.dtype not in dtypes:
        raise TypeError(f"{NAME}: {name} must be {' or '.join(map(str, dtypes))}, got {tensor.dtype}; cast it")
    if tensor.device != x.device:
        raise ValueError(f"{NAME}: {name} is on {tensor.device} but x is on {x.device}; move one of them")
    if not tensor.is_contiguous():
        raise ValueError(f"{NAME}: {name} is not contiguous (strides {tensor.stride()}); call .contiguous() on it")
    wanted = ", ".join("any" if size is None else str(size) for size in shape)
    raise ValueError(f"{NAME}: {name} must have shape [{wanted}], got {list(found)}")


def _check_shrink(x: Tensor, a: Tensor, spans: Tensor, index: Tensor | None, m: int) -> None:
    if x.dtype not in DTYPES:
        raise TypeError(f"{NAME}: x must be float32, bfloat16 or float16, got {x.dtype}; cast it with .to(...)")
    _check_tensor("A", a, (None, x.shape[-1]), DTYPES, x)
    _check_tensor("spans", spans, (None, 2), (torch.int32,), x)
    if index is not None:
        _check_tensor("index", index, (m,), (torch.int32,), x)


def _check_expand(x: Tensor, m: int, expand: Expand) -> None:
    _check_tensor("shrunk", expand.shrunk, (m, None), (torch.float32,), x)
    _check_tensor("B", expand.b, (None,), DTYPES, x)
    _check_tensor("table", expand.table, (None, 4), (torch.int32,), x)
    _check_tensor("scalings", expand.scalings, (expand.table.shape[0],), (torch.float32,), x)
    if expand.index is not None:
        _check_tensor("index", expand.index, (m,), (torch.int32,), x)


def _rows(x: Tensor) -> Tensor:
    """x [..., K] as [M, K] of unit stride along K."""
    k = x.shape[-1]
    rows = x if x.dim() == 2 else x.reshape(x.numel() // k if k else 0, k)
    return rows if rows.stride(1) == 1 else rows.contiguous()


# ---- forward


def _shrink(x: Tensor, a: Tensor, spans: Tensor, index: Tensor | None, width: int) -> Tensor:
    rows = _rows(x)
    _check_shrink(x, a, spans, index, rows.shape[0])
    out = torch.empty(rows.shape[0], width, device=x.device)
    loaded = library() if x.device.type == "cpu" else None
    if loaded is not None:
        shrink_on_cpu(loaded, loaded.isa, rows, a, spans, index, out)
    elif adapters_shrink.reason_against(x) is None:
        with torch.cuda.device(x.device):
            adapters_shrink.run(rows, a, spans, index, out)
    else:
        shrink_with_torch(rows, a, spans, index, out)
    return out.view(*x.shape[:-1], width)


def start_shrink(
    rows: Tensor, a: Tensor, spans: Tensor, index: Tensor | None, width: int
) -> tuple[Tensor, Shrink | None]:
    """h, fp32 [M, width], of rows [M, K], for `Expand`: its `shrunk`; its `shrink` where that has yet to write it."""
    if not rows.numel() or not width or rows.device.type != "cuda" or adapters_shrink.reason_against(rows) is not None:
        return _shrink(rows, a, spans, index, width), None
    _check_shrink(rows, a, spans, index, rows.shape[0])
    shrink = Shrink.of(rows, a, spans, index, width)
    return shrink.out, shrink


def _linear_adapters(
    x: Tensor,
    parts: Sequence[Tensor],
    bias: Tensor | None,
    key: str,
    n: int,
    k: int,
    shrunk: Tensor,
    b: Tensor,
    table: Tensor,
    scalings: Tensor,
    index: Tensor | None,
    shrink: Shrink | None = None,
) -> Tensor:
    weight = checked_weight(x, parts, key, n, k)
    weight.check_input("x", x, k)
    if bias is not None:
        _check_bias(x, bias, weight.spec)
        bias = bias.contiguous()
    rows = _rows(x)
    m = rows.shape[0]
    expand = Expand(shrunk.reshape(m, shrunk.shape[-1]), b, table, scalings, index, shrink)
    _check_expand(x, m, expand)
    out = rows.new_empty(m, n)
    kernel = weight.kernel(x.dtype, m)
    fold, reason = kernel.run_adapters, None
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        if m:
            reason = "the kernel folds no adapters" if fold is None else fold(rows, weight.packed, bias, expand, out)
        if reason is not None:
            _compose(weight, kernel, rows, bias, expand, out)
    label = kernel.name if reason is None else f"{kernel.name} and torch ({reason})"
    counts.serve("linear_adapters", label, bucket(m))
    return out.view(*x.shape[:-1], n)


def _linear_with_adapters(
    x: Tensor,
    parts: Sequence[Tensor],
    bias: Tensor | None,
    key: str,
    n: int,
    k: int,
    a: Tensor,
    spans: Tensor,
    width: int,
    b: Tensor,
    table: Tensor,
    scalings: Tensor,
    index: Tensor | None,
) -> Tensor:
    """Both operators; where a kernel does the first, who does the second launches it together with its own."""
    rows = _rows(x)
    shrunk, shrink = start_shrink(rows, a, spans, index, width)
    out = _linear_adapters(rows, parts, bias, key, n, k, shrunk, b, table, scalings, index, shrink)
    return out.view(*x.shape[:-1], n)


def _compose(
    weight: CheckedWeight, kernel: Kernel, rows: Tensor, bias: Tensor | None, expand: Expand, out: Tensor
) -> None:
    """Where the planned kernel folds no adapters: the sum of an fp32 multiply and the adapters, rounded once.

    Rows without an adapter have the planned kernel's own bits. Nothing waits for the device.
    """
    m, n = out.shape
    wide = out if out.dtype == torch.float32 else rows.new_empty(m, n, dtype=torch.float32)
    weight.kernel(torch.float32, m).run(rows.float(), weight.packed, None, wide)
    total = (wide + expand_with_torch(expand, bias, n)).to(out.dtype)
    kernel.run(rows, weight.packed, bias, out)
    if expand.index is not None:
        used = (expand.index >= 0) & (expand.index < expand.table.shape[0])
        total = torch.where(used[:, None], total, out)
    out.copy_(total)


def _shrink_fake(x: Tensor, a: Tensor, spans: Tensor, index: Tensor | None, width: int) -> Tensor:
    _check_shrink(x, a, spans, index, x[..., 0].numel())
    return x.new_empty((*x.shape[:-1], width), dtype=torch.float32)


def _linear_adapters_fake(
    x: Tensor,
    parts: Sequence[Tensor],
    bias: Tensor | None,
    key: str,
    n: int,
    k: int,
    shrunk: Tensor,
    b: Tensor,
    table: Tensor,
    scalings: Tensor,
    index: Tensor | None,
) -> Tensor:
    spec = _spec(key, n, k)
    _check_input("x", x, k, spec)
    _check_parts(x, parts, spec)
    if bias is not None:
        _check_bias(x, bias, spec)
    m = x[..., 0].numel()
    _check_expand(x, m, Expand(shrunk.reshape(m, shrunk.shape[-1]), b, table, scalings, index))
    return x.new_empty((*x.shape[:-1], n))


def _linear_with_adapters_fake(
    x: Tensor,
    parts: Sequence[Tensor],
    bias: Tensor | None,
    key: str,
    n: int,
    k: int,
    a: Tensor,
    spans: Tensor,
    width: int,
    *rest: Any,
) -> Tensor:
    shrunk = _shrink_fake(x, a, spans, rest[-1], width)
    return _linear_adapters_fake(x, parts, bias, key, n, k, shrunk, *rest)


# ---- backward


def _rows_by_slot(index: Tensor | None, slots: int) -> Iterator[tuple[int, Rows]]:
    """Each slot that rows use, and which rows. Waits for the device."""
    if index is None:
        yield 0, slice(None)
        return
    for slot in torch.unique(index).tolist():
        if 0 <= slot < slots:
            yield slot, (index == slot).nonzero().squeeze(1)


def _shrink_grad(grad: Tensor, x: Tensor, a: Tensor, spans: Tensor, index: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gradients of x, in its dtype, and of A, in its: sums in fp32, rounded once."""
    rows = _rows(x)
    above = grad.reshape(rows.shape[0], grad.shape[-1]).float()
    x_grad = torch.zeros(rows.shape, device=x.device)
    a_grad = torch.zeros(a.shape, device=x.device)
    places = spans.tolist()
    for slot, mine in _rows_by_slot(index, len(places)):
        first, count = places[slot]
        part = above[mine, :count]
        x_grad[mine] = part @ a[first : first + count].float()
        a_grad[first : first + count] += part.t() @ rows[mine].float()
    return x_grad.to(x.dtype).view(x.shape), a_grad.to(a.dtype)


def _expand_grad(
    grad: Tensor, shrunk: Tensor, b: Tensor, table: Tensor, scalings: Tensor, index: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradients of `shrunk`, fp32, and of B, in its dtype: sums in fp32, rounded once."""
    n = grad.shape[-1]
    above = grad.reshape(grad.numel() // n, n).float()
    h = shrunk.reshape(above.shape[0], shrunk.shape[-1])
    h_grad = torch.zeros_like(h)
    b_grad = torch.zeros(b.shape, device=b.device)
    places = table.tolist()
    for slot, mine in _rows_by_slot(index, len(places)):
        column, rank, first, stride = places[slot]
        columns, whole = slice(column, column + rank), slice(first * n, (first + stride) * n)
        part = scalings[slot] * above[mine]
        h_grad[mine, columns] = part @ b[whole].view(n, stride)[:, :rank].float()
        b_grad[whole].view(n, stride)[:, :rank] += part.t() @ h[mine, columns]
    return h_grad.view(shrunk.shape), b_grad.to(b.dtype)


class _ShrinkFunction(torch.autograd.Function):
    """`adapters_shrink` with gradients for x and A. Below it the dispatcher goes on with `keyset`."""

    @staticmethod
    def forward(
        ctx: Any, keyset: DispatchKeySet, x: Tensor, a: Tensor, spans: Tensor, index: Tensor | None, width: int
    ) -> Tensor:
        ctx.save_for_backward(x, a, spans, index)
        return _below_autograd(shrink_op, _shrink, keyset, x, a, spans, index, width)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_grad, a_grad = shrink_grad_op(grad, *ctx.saved_tensors)
        return None, x_grad, a_grad, None, None, None


class _LinearFunction(torch.autograd.Function):
    """`linear_adapters` with gradients for x, bias, `shrunk` and B."""

    @staticmethod
    def forward(
        ctx: Any, keyset: DispatchKeySet, x: Tensor, bias: Tensor | None, key: str, n: int, k: int, *rest: Any
    ) -> Tensor:
        *parts, shrunk, b, table, scalings, index = rest
        ctx.save_for_backward(*rest)
        ctx.problem = (key, n, k)
        ctx.bias_dtype = None if bias is None else bias.dtype
        arguments = (x, parts, bias, key, n, k, shrunk, b, table, scalings, index)
        return _below_autograd(linear_adapters_op, _linear_adapters, keyset, *arguments)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *parts, shrunk, b, table, scalings, index = ctx.saved_tensors
        key, n, k = ctx.problem
        _, needs_x, needs_bias, *rest = ctx.needs_input_grad
        x_grad = bias_grad = h_grad = b_grad = None
        if needs_x:
            x_grad = linear_grad_op(grad, parts, key, n, k)
        if needs_bias:
            bias_grad = grad.reshape(-1, n).sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        if any(rest):
            h_grad, b_grad = expand_grad_op(grad, shrunk, b, table, scalings, index)
        return (None, x_grad, bias_grad, None, None, None, *(None for _ in parts), h_grad, b_grad, None, None, None)


def _below_autograd(operator: Any, kernel: Callable[..., Tensor], keyset: DispatchKeySet, *arguments: Any) -> Tensor:
    with torch._C._AutoDispatchBelowAutograd():
        if _is_plain(keyset.raw_repr()):
            return kernel(*arguments)
        result: Tensor = operator.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)
        return result


_apply_shrink: Callable[..., Tensor] = _ShrinkFunction.apply
_apply_linear: Callable[..., Tensor] = _LinearFunction.apply


def _shrink_autograd(
    keyset: DispatchKeySet, x: Tensor, a: Tensor, spans: Tensor, index: Tensor | None, width: int
) -> Tensor:
    """As in ops.py: torch.library.register_autograd would take much longer, also where no gradient is wanted."""
    if torch.is_grad_enabled() and (x.requires_grad or a.requires_grad):
        return _apply_shrink(keyset, x, a, spans, index, width)
    if _is_plain(keyset.raw_repr()):
        return _shrink(x, a, spans, index, width)
    return _below_autograd(shrink_op, _shrink, keyset, x, a, spans, index, width)


def _linear_adapters_autograd(
    keyset: DispatchKeySet,
    x: Tensor,
    parts: list[Tensor],
    bias: Tensor | None,
    key: str,
    n: int,
    k: int,
    shrunk: Tensor,
    b: Tensor,
    table: Tensor,
    scalings: Tensor,
    index: Tensor | None,
) -> Tensor:
    learns = torch.is_grad_enabled() and (
        x.requires_grad or shrunk.requires_grad or b.requires_grad or (bias is not None and bias.requires_grad)
    )
    if learns:
        return _apply_linear(keyset, x, bias, key, n, k, *parts, shrunk, b, table, scalings, index)
    arguments = (x, parts, bias, key, n, k, shrunk, b, table, scalings, index)
    if _is_plain(keyset.raw_repr()):
        return _linear_adapters(*arguments)
    return _below_autograd(linear_adapters_op, _linear_adapters, keyset, *arguments)


def _linear_with_adapters_autograd(
    keyset: DispatchKeySet,
    x: Tensor,
    parts: list[Tensor],
    bias: Tensor | None,
    key: str,
    n: int,
    k: int,
    a: Tensor,
    spans: Tensor,
    width: int,
    b: Tensor,
    table: Tensor,
    scalings: Tensor,
    index: Tensor | None,
) -> Tensor:
    learns = torch.is_grad_enabled() and (
        x.requires_grad or a.requires_grad or b.requires_grad or (bias is not None and bias.requires_grad)
    )
    if learns:
        shrunk = shrink_op(x, a, spans, index, width)
        out: Tensor = linear_adapters_op(x, parts, bias, key, n, k, shrunk, b, table, scalings, index)
        return out
    arguments = (x, parts, bias, key, n, k, a, spans, width, b, table, scalings, index)
    if _is_plain(keyset.raw_repr()):
        return _linear_with_adapters(*arguments)
    return _below_autograd(linear_with_adapters_op, _linear_with_adapters, keyset, *arguments)


_library.impl("adapters_shrink", _shrink, "CompositeExplicitAutograd")
_library.impl("linear_adapters", _linear_adapters, "CompositeExplicitAutograd")
_library.impl("linear_with_adapters", _linear_with_adapters, "CompositeExplicitAutograd")
_library.impl("adapters_shrink", _shrink_autograd, "Autograd", with_keyset=True)
_library.impl("linear_adapters", _linear_adapters_autograd, "Autograd", with_keyset=True)
_library.impl("linear_with_adapters", _linear_with_adapters_autograd, "Autograd", with_keyset=True)
_library.impl("adapters_shrink_grad", _shrink_grad, "CompositeExplicitAutograd")
_library.impl("adapters_expand_grad", _expand_grad, "CompositeExplicitAutograd")
torch.library.register_fake("halfbyte::adapters_shrink", _shrink_fake, lib=_library)
torch.library.register_fake("halfbyte::linear_adapters", _linear_adapters_fake, lib=_library)
torch.library.register_fake("halfbyte::linear_with_adapters", _linear_with_adapters_fake, lib=_library)
torch.library.register_fake(
    "halfbyte::adapters_shrink_grad",
    lambda grad, x, a, spans, index: (x.new_empty(x.shape), torch.empty_like(a)),
    lib=_library,
)
torch.library.register_fake(
    "halfbyte::adapters_expand_grad",
    lambda grad, shrunk, b, table, scalings, index: (torch.empty_like(shrunk), torch.empty_like(b)),
    lib=_library,
)
