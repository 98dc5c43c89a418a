"""The torch operators: the only public way to a kernel.

`torch.ops.halfbyte.linear(x, parts, bias, format, N, K)` multiplies by the transpose of a packed weight,
`torch.ops.halfbyte.linear_grad(grad, parts, format, N, K)` by the weight itself (the gradient of x). `parts` are the
tensors of the weight in the order of `BlockFormat.parts`. Both operators check all that they are given. They work
eagerly, under autograd (x and bias; the weight gets no gradient), under autocast, on fake and meta tensors, and inside
`torch.compile(fullgraph=True)`. vmap is refused, and torch.func's transforms do not see through them.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet

from .counters import bucket, counts
from .device import arch_of
from .formats import BlockFormat, PackedWeight, get_format
from .formats.codecs import Part
from .kernels import Kernel, Problem, shortcut
from .kernels.registry import DTYPES
from .plan import plan

OPERATORS = ("linear", "gemm_4bit", "gemv_4bit")  # under whose names repeated calls are counted
GRAD_CHUNK_VALUES = 1 << 22  # weights decoded at once in the backward pass: 16 MiB of fp32

_library: Any = torch.library.Library("halfbyte", "DEF")  # type: ignore[no-untyped-call]
_library.define(
    "linear(Tensor x, Tensor[] parts, Tensor? bias, str format, int N, int K) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "linear_grad(Tensor grad, Tensor[] parts, str format, int N, int K) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
linear_op = torch.ops.halfbyte.linear.default
shortcut.lead(linear_op)
linear_grad_op = torch.ops.halfbyte.linear_grad.default


def linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """x times the transpose of a 4-bit weight, plus bias: `torch.nn.functional.linear` on packed bytes.

    x: [..., K], 1-D or more, any strides, any number of rows (also none), fp32, bf16 or fp16. weight: [N, K] on x's
    device. bias: [N], of x's dtype or fp32. Returns [..., N] of x's dtype, contiguous. Differentiable in x and bias.

    Raises TypeError or ValueError that names the argument and what to do about it.
    """
    if not isinstance(weight, PackedWeight):
        raise TypeError(
            f"halfbyte.linear: weight must be a PackedWeight, got {type(weight).__name__}; halfbyte.quantize makes one"
        )
    n, k = weight.shape
    result: Tensor = linear_op(x, list(weight.parts.values()), bias, weight.format.key, n, k)
    return result


@dataclass(frozen=True, eq=False)
class _Spec:
    """What the tensors of a weight [n, k] in a format must look like."""

    key: str
    format: BlockFormat
    n: int
    k: int
    names: tuple[str, ...]
    parts: tuple[Part, ...]


@lru_cache(maxsize=4096)
def _spec(key: str, n: int, k: int) -> _Spec:
    format = get_format(key)
    format.check_shape(n, k)
    parts = format.parts(n, k)
    return _Spec(key, format, n, k, tuple(parts), tuple(parts.values()))


def _check_input(name: str, x: Tensor, columns: int, spec: _Spec) -> None:
    """Raise unless `x` is a floating-point tensor [..., columns]."""
    if x.dtype not in DTYPES:
        raise TypeError(
            f"halfbyte.linear: {name} must be float32, bfloat16 or float16, got {x.dtype}; cast it with .to(...)"
        )
    if x.dim() == 0 or x.shape[-1] != columns:
        raise ValueError(
            f"halfbyte.linear: {name} must have {columns} columns for a weight [N, K] = [{spec.n}, {spec.k}], "
            f"got shape {list(x.shape)}"
        )


def _check_parts(x: Tensor, parts: Sequence[Tensor], spec: _Spec) -> None:
    """Raise unless `parts` are the tensors of the format, in its order, contiguous and where `x` is.

    The codes may also be a column, [bytes, 1]: that is how bitsandbytes and QuantLinear keep them.
    """
    if len(parts) != len(spec.parts):
        raise ValueError(
            f"halfbyte.linear: {spec.format.key} has {len(spec.parts)} parts {list(spec.names)}, got {len(parts)}"
        )
    device = x.device
    for i, wanted in enumerate(spec.parts):
        part = parts[i]
        if (
            (part.shape != wanted.shape and (i or part.shape != (*wanted.shape, 1)))
            or part.dtype not in wanted.dtypes
            or part.device != device
            or not part.is_contiguous()
        ):
            raise _part_error(x, spec, i, part)


def _part_error(x: Tensor, spec: _Spec, index: int, part: Tensor) -> Exception:
    wanted = spec.parts[index]
    label = f"halfbyte.linear: part '{spec.names[index]}' of a {spec.format.key} weight [{spec.n}, {spec.k}]"
    if part.dtype not in wanted.dtypes:
        names = " or ".join(str(dtype) for dtype in wanted.dtypes)
        return TypeError(f"{label} must be {names}, got {part.dtype}; load it again, a cast cannot be undone")
    if part.device != x.device:
        return ValueError(f"{label} is on {part.device} but the activations are on {x.device}; move one of them")
    if not part.is_contiguous():
        return ValueError(f"{label} is not contiguous (strides {part.stride()}); call .contiguous() on it once")
    return ValueError(f"{label} must have shape {list(wanted.shape)}, got {list(part.shape)}")


def _check_bias(x: Tensor, bias: Tensor, spec: _Spec) -> None:
    if bias.dtype != x.dtype and bias.dtype != torch.float32:
        raise TypeError(f"halfbyte.linear: bias must be {x.dtype} (as x) or float32, got {bias.dtype}; cast it")
    if bias.dim() != 1 or bias.shape[0] != spec.n:
        raise ValueError(f"halfbyte.linear: bias must have shape [{spec.n}], got {list(bias.shape)}")
    if bias.device != x.device:
        raise ValueError(f"halfbyte.linear: bias is on {bias.device} but x is on {x.device}; move one of them")


class CheckedWeight:
    """The tensors of a weight after their checks, ready to multiply by; `checked_weight` makes and remembers them."""

    def __init__(self, spec: _Spec, parts: Sequence[Tensor]) -> None:
        self.spec = spec
        self.device = parts[0].device
        views = [part.detach().view(wanted.shape) for part, wanted in zip(parts, spec.parts, strict=True)]
        self.packed = object.__new__(PackedWeight)  # its constructor would check once more
        for name, value in (
            ("format", spec.format),
            ("shape", (spec.n, spec.k)),
            ("parts", dict(zip(spec.names, views, strict=True))),
        ):
            object.__setattr__(self.packed, name, value)
        self._handle: object | None = None  # what the shortcut calls this weight
        self._remembered: set[tuple[torch.dtype, int]] = set()

    def check_input(self, name: str, x: Tensor, columns: int) -> None:
        """Raise unless `x` is a floating-point tensor [..., columns] on the weight's device."""
        _check_input(name, x, columns, self.spec)
        if x.device != self.device:
            raise _part_error(x, self.spec, 0, self.packed.codes)

    def kernel(self, dtype: torch.dtype, m: int) -> Kernel:
        """The kernel that is planned for m rows of x of a dtype."""
        return _kernel(self.spec, dtype, m, self.device)

    def multiply(self, x: Tensor, bias: Tensor | None, operator: str = "linear") -> Tensor:
        """The operator `linear` on real tensors. Raises TypeError or ValueError as `linear` does.

        operator: under which name the call is counted.
        """
        spec = self.spec
        n, k = spec.n, spec.k
        if self._handle is not None:
            again: Tensor | None = _shortcut.multiply(self._handle, x, bias, operator)  # it counts
            if again is not None:
                return again
        flat = x.dim() == 2
        self.check_input("x", x, k)
        if bias is not None:
            _check_bias(x, bias, spec)
            bias = bias.contiguous()
        rows = x if flat else x.reshape(x.numel() // k, k)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        m = rows.shape[0]
        out = rows.new_empty(m, n)
        kernel = self.kernel(x.dtype, m)
        counts.serve(operator, kernel.name, bucket(m))
        if m:
            run = kernel.run
            if x.is_cuda and x.device.index != torch.cuda.current_device():
                with torch.cuda.device(x.device):
                    run(rows, self.packed, bias, out)
            else:
                run(rows, self.packed, bias, out)
            if _shortcut is not None and kernel.launch is not None:
                self._remember(kernel, x, m)
        return out if flat else out.view(*x.shape[:-1], n)

    def _remember(self, kernel: Kernel, x: Tensor, m: int) -> None:
        """Tell the shortcut what served m rows of x's dtype, so that it can do so again."""
        key = (x.dtype, m)
        if key in self._remembered:
            return
        self._remembered.add(key)
        launch = kernel.launch(self.packed, *key) if kernel.launch is not None else None
        if launch is not None:
            spec = self.spec
            if self._handle is None:
                views = tuple(self.packed.parts.values())
                self._handle = _shortcut.weight(views, spec.key, spec.n, spec.k)
            counters = {operator: counts.cell(operator, kernel.name, bucket(m)) for operator in OPERATORS}
            address = ctypes.addressof(launch.record)
            _shortcut.remember(self._handle, x, m, address, launch.on_cpu, launch, counters)

    def publish(self) -> None:
        """Let the operator's next call with these tensors take the shortcut."""
        if self._handle is not None:
            _shortcut.publish(self._handle)


Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class _Entry(Generic[Value]):
    """A value, and the tensors it was made from: themselves if they still are, address, shape and dtype."""

    tensors: tuple[tuple[weakref.ref[Tensor], int, torch.Size, torch.dtype], ...]
    count: int
    value: Value


class Memo(Generic[Value]):
    """Values made from a list of tensors, found again as long as those are the same memory, shapes and dtypes.

    Checks cost more than some kernels do, and what they look at seldom changes. A value may hold views of the tensors
    but not the last of them itself: it is forgotten when that one's Python object goes. (A view keeps memory: where
    tensors are given other memory in place, as Module.to does, `forget` lets the old go before the next call would.)
    """

    def __init__(self) -> None:
        self._entries: dict[int, _Entry[Value]] = {}

    def find(self, tensors: Sequence[Tensor]) -> Value | None:
        """What was kept for these tensors, or None."""
        entry = self._entries.get(id(tensors[-1]))
        if entry is None or len(tensors) != entry.count:
            return None
        for tensor, (seen, address, shape, dtype) in zip(tensors, entry.tensors):  # noqa: B905 (of one length)
            if tensor.data_ptr() != address or (
                seen() is not tensor and (tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous())
            ):
                return None
        return entry.value

    def keep(self, tensors: Sequence[Tensor], value: Value) -> None:
        """Remember `value` for these tensors. Does nothing where views made now would not share their versions."""
        if torch._C._dispatch_tls_is_dispatch_key_excluded(DispatchKey.ADInplaceOrView):
            return
        key, entries = id(tensors[-1]), self._entries

        def gone(reference: weakref.ref[Tensor]) -> None:
            entry = entries.get(key)
            if entry is not None and entry.tensors[-1][0] is reference:
                del entries[key]

        seen = [(weakref.ref(tensor), tensor.data_ptr(), tensor.shape, tensor.dtype) for tensor in tensors]
        seen[-1] = (weakref.ref(tensors[-1], gone), *seen[-1][1:])
        entries[key] = _Entry(tuple(seen), len(seen), value)

    def forget(self, tensor: Tensor) -> None:
        """Drop what was kept for a list of tensors that ends with this one."""
        self._entries.pop(id(tensor), None)


_weights: Memo[CheckedWeight] = Memo()


def checked_weight(x: Tensor, parts: Sequence[Tensor], key: str, n: int, k: int) -> CheckedWeight:
    """The parts of a weight [n, k], checked against the format (and where `x` is) now or in an earlier call.

    Raises TypeError or ValueError, as `linear` does.
    """
    spec = _spec(key, n, k)
    weight = _weights.find(parts) if parts else None
    if weight is None or weight.spec is not spec:
        weight = check_weight(x, parts, key, n, k)
        _weights.keep(parts, weight)
    return weight


def check_weight(x: Tensor, parts: Sequence[Tensor], key: str, n: int, k: int) -> CheckedWeight:
    """`checked_weight` for callers that remember it themselves."""
    spec = _spec(key, n, k)
    _check_parts(x, parts, spec)
    return CheckedWeight(spec, parts)


def forget_weight(parts: Sequence[Tensor]) -> None:
    """Let go of the memory of a weight whose tensors are about to get other memory in place."""
    _weights.forget(parts[-1])


@lru_cache(maxsize=4096)
def _kernel(spec: _Spec, dtype: torch.dtype, m: int, device: torch.device) -> Kernel:
    """The planned kernel. Keyed by device, as two GPUs of one machine may differ."""
    return plan(Problem(spec.format, dtype, m, spec.n, spec.k, arch_of(device))).kernel


def linear_on_tensors(x: Tensor, parts: Sequence[Tensor], bias: Tensor | None, key: str, n: int, k: int) -> Tensor:
    """The operator on real tensors."""
    weight = checked_weight(x, parts, key, n, k)
    out = weight.multiply(x, bias)
    weight.publish()
    return out


_shortcut: Any = shortcut.connect(linear_on_tensors)
_linear: Callable[..., Tensor] = linear_on_tensors if _shortcut is None else _shortcut.linear  # the same, or faster


def _linear_fake(x: Tensor, parts: Sequence[Tensor], bias: Tensor | None, key: str, n: int, k: int) -> Tensor:
    spec = _spec(key, n, k)
    _check_input("x", x, k, spec)
    _check_parts(x, parts, spec)
    if bias is not None:
        _check_bias(x, bias, spec)
    return x.new_empty((*x.shape[:-1], n))


def _linear_grad(grad: Tensor, parts: Sequence[Tensor], key: str, n: int, k: int) -> Tensor:
    """grad [..., N] times the weight: [..., K] of grad's dtype. Sums in fp32, rounded once."""
    checked = checked_weight(grad, parts, key, n, k)
    checked.check_input("grad", grad, n)
    weight = checked.packed
    rows = grad.reshape(grad.numel() // n, n).float()
    total = rows.new_zeros((rows.shape[0], k))
    step = max(1, GRAD_CHUNK_VALUES // k)
    for start in range(0, n if rows.shape[0] else 0, step):
        chunk = slice(start, min(n, start + step))
        total.addmm_(rows[:, chunk], weight.dequantize(rows=chunk))
    return total.to(grad.dtype).view(*grad.shape[:-1], k)


def _linear_grad_fake(grad: Tensor, parts: Sequence[Tensor], key: str, n: int, k: int) -> Tensor:
    spec = _spec(key, n, k)
    _check_input("grad", grad, n, spec)
    _check_parts(grad, parts, spec)
    return grad.new_empty((*grad.shape[:-1], k))


class _LinearFunction(torch.autograd.Function):
    """The operator with gradients for x and bias. Below it the dispatcher goes on with `keyset`."""

    @staticmethod
    def forward(
        ctx: Any, keyset: DispatchKeySet, x: Tensor, bias: Tensor | None, key: str, n: int, k: int, *parts: Tensor
    ) -> Tensor:
        ctx.save_for_backward(*parts)
        ctx.problem = (key, n, k)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return _below_autograd(keyset, x, parts, bias, key, n, k)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        key, n, k = ctx.problem
        _, needs_x, needs_bias, *rest = ctx.needs_input_grad
        x_grad = bias_grad = None
        if needs_x:
            x_grad = linear_grad_op(grad, list(ctx.saved_tensors), key, n, k)
        if needs_bias:
            bias_grad = grad.reshape(-1, n).sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return (None, x_grad, bias_grad, *(None for _ in rest))


_apply: Callable[..., Tensor] = _LinearFunction.apply


@lru_cache(maxsize=256)
def _is_plain(raw_keyset: int) -> bool:
    """Whether nothing stands between autograd and the device's kernel: no mode, tensor subclass, or lazy negation."""
    keyset = DispatchKeySet.from_raw_repr(raw_keyset) & torch._C._after_autograd_keyset
    return keyset.highestPriorityTypeId() in (DispatchKey.CPU, DispatchKey.CUDA)


def _below_autograd(
    keyset: DispatchKeySet, x: Tensor, parts: Sequence[Tensor], bias: Tensor | None, key: str, n: int, k: int
) -> Tensor:
    with torch._C._AutoDispatchBelowAutograd():
        if _is_plain(keyset.raw_repr()):
            return linear_on_tensors(x, parts, bias, key, n, k)
        result: Tensor = linear_op.redispatch(keyset & torch._C._after_autograd_keyset, x, list(parts), bias, key, n, k)
        return result


def _linear_autograd(
    keyset: DispatchKeySet, x: Tensor, parts: list[Tensor], bias: Tensor | None, key: str, n: int, k: int
) -> Tensor:
    """torch.library.register_autograd would do, at 11 µs more a call: a model calls this hundreds of times a token."""
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        return _apply(keyset, x, bias, key, n, k, *parts)
    if _is_plain(keyset.raw_repr()):
        return _linear(x, parts, bias, key, n, k)
    return _below_autograd(keyset, x, parts, bias, key, n, k)


def _linear_grad_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, parts, *ctx.problem = inputs
    ctx.save_for_backward(*parts)


def _linear_grad_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """The gradient of a gradient: the operator is linear in `grad`, so it is the layer without its bias."""
    parts = list(ctx.saved_tensors)
    return linear_op(grad, parts, None, *ctx.problem), [None] * len(parts), None, None, None


def _autocast(device_type: str, key: DispatchKey) -> Callable[..., Tensor]:
    """As torch's own linear: x is cast to autocast's dtype. An fp32 bias stays, it is added before the one rounding."""
    excluded = DispatchKeySet(key)

    def cast_and_call(x: Tensor, parts: list[Tensor], bias: Tensor | None, format: str, n: int, k: int) -> Tensor:
        dtype = torch.get_autocast_dtype(device_type)
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            if bias is not None and bias.dtype != torch.float32:
                bias = bias.to(dtype)
            result: Tensor = linear_op(x.to(dtype) if x.dtype in DTYPES else x, parts, bias, format, n, k)
            return result

    return cast_and_call


def _refuse_vmap(info: Any, in_dims: Any, *args: Any) -> Any:
    raise NotImplementedError(
        "halfbyte.linear does not run under torch.vmap; it takes any leading dimensions of x, so call it on the "
        "batched tensor itself, and once for each weight"
    )


_library.impl("linear", linear_on_tensors, "CompositeExplicitAutograd")
if _shortcut is not None:
    _library.impl("linear", _shortcut.linear, "CUDA")
_library.impl("linear", _linear_autograd, "Autograd", with_keyset=True)
_library.impl("linear", _autocast("cpu", DispatchKey.AutocastCPU), "AutocastCPU")
_library.impl("linear", _autocast("cuda", DispatchKey.AutocastCUDA), "AutocastCUDA")
_library.impl("linear_grad", _linear_grad, "CompositeExplicitAutograd")
torch.library.register_fake("halfbyte::linear", _linear_fake, lib=_library)
torch.library.register_fake("halfbyte::linear_grad", _linear_grad_fake, lib=_library)
torch.library.register_autograd(
    "halfbyte::linear_grad", _linear_grad_backward, setup_context=_linear_grad_setup, lib=_library
)
torch.library.register_vmap("halfbyte::linear", _refuse_vmap, lib=_library)
torch.library.register_vmap("halfbyte::linear_grad", _refuse_vmap, lib=_library)
