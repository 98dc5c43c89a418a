"""Layers that multiply one input, in one launch: attention's q, k and v, an MLP's gate and up.

A decoding step reads each weight once, and a launch on a small one is over before all of the device is at work. Where
the forward pass of a module calls several of its QuantLinears on one and the same variable, `join` lays their weights
side by side in one buffer and makes each layer's own tensors views of it: the bytes are those of the checkpoint, there
is no second copy, and loading, saving and merging go on working on the very same objects. The first of the layers that
is called with an x multiplies for all of them, the others take their columns of that result.

The layers change their class, as everything does that `halfbyte.optimize` makes, so nothing of the parent is touched.
The result is handed over in one attribute that each trace of torch.compile sees set and cleared again, so compiled code
holds one operator for all, under any backend and without a break in its graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..formats import BlockFormat, get_format
from ..formats.layouts import RecordLayout
from ..nn import QuantLinear
from ..ops import forget_weight, linear_op
from .one_input import called_on_one

NAMES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # children that are joined where they can be
MOST_ROWS = 64  # of x; beyond, a launch fills any device by itself
ALIGNMENT = 128  # bytes: where a weight may begin within the buffer, as kernels read it by itself, too
OUTER_BLOCK = 256  # scales that share an outer one in nested formats
Pending = tuple[Tensor, int, Tensor, int]  # x, its version, the joined result, a bit for each layer that took its part


class Join:
    """Layers of one input, and the buffer that their weights are views of. `Join()` joins nothing.

    Copies and pickles are such empty ones: a copied layer has memory of its own.
    """

    def __init__(self, members: Sequence[Any] = ()) -> None:
        """members: at least two QuantLinears whose weights `_fit` side by side."""
        self.members = tuple(members)
        self.parts: list[Tensor] = []
        self.bias: Tensor | None = None
        self.pending: Pending | None = None
        self.traced: Pending | None = None  # the same in a trace of torch.compile, which begins and ends without one
        if not members:
            return
        first = members[0]
        self.key: str = first._format_key
        self.k: int = first.in_features
        self.sizes = [layer.out_features for layer in members]
        self.starts = [sum(self.sizes[:i]) for i in range(len(members))]
        self.n = sum(self.sizes)
        wanted = get_format(self.key).parts(self.n, self.k)
        columns = list(zip(*(layer._part_list() for layer in members), strict=True))
        for layer in members:
            forget_weight(layer._part_list())
        for tensors, part in zip(columns, wanted.values(), strict=True):
            alike = tensors[0].shape == part.shape  # whatever N is: `_fit` compared the values
            self.parts.append(tensors[0] if alike else _side_by_side(tensors).view(part.shape))
        if first.bias is not None:
            self.bias = _side_by_side([layer.bias for layer in members])
        self.addresses = self._now()

    def __reduce__(self) -> tuple[type[Join], tuple[()]]:
        return Join, ()

    def _now(self) -> list[int]:
        """Where the members' tensors are."""
        tensors = [part for layer in self.members for part in layer._part_list()]
        tensors += [bias for layer in self.members if (bias := layer._parameters["bias"]) is not None]
        with torch._C.DisableTorchFunctionSubclass():  # or asking bitsandbytes' Params4bit takes ten times as long
            return [tensor.data_ptr() for tensor in tensors]

    def intact(self) -> bool:
        """Whether the members' tensors still are where they were joined. If not, the members are set apart."""
        if not self.members:
            return False
        try:
            moved = self._now() != self.addresses
        except AttributeError:  # a weight without bitsandbytes' QuantState: it is no 4-bit weight any more
            moved = True
        if moved:
            self.split()
        return not moved

    def split(self) -> None:
        """Make the members ordinary layers again, on the memory that they have."""
        for layer in self.members:
            _plain(layer)
        self.members, self.parts, self.bias, self.pending = (), [], None, None

    def take(self, index: int, layer: Any, x: Tensor) -> Tensor | None:
        """Layer `index`'s output for x [..., K], columns of the joined one; None where the layer has to compute it.

        With gradients it has to, and for more than MOST_ROWS rows.
        """
        if torch.is_grad_enabled() or x.numel() > MOST_ROWS * self.k:
            return None
        compiling = torch.compiler.is_compiling()
        version = 0 if compiling or x.is_inference() else x._version  # where there is none, `one_input` found no write
        found = self.traced if compiling else self.pending
        if found is not None and found[0] is x and found[1] == version:
            _, _, out, taken = found
        else:
            if not compiling and not self.intact():
                return None
            operands = layer.operands(x)
            if operands is None:
                return None
            out, taken = self._multiply(x, operands[0], operands[2]), 0
        taken |= 1 << index
        left = None if taken + 1 == 1 << len(self.sizes) else (x, version, out, taken)
        if compiling:
            self.traced = left
        else:
            self.pending = left
        return out.narrow(-1, self.starts[index], self.sizes[index])

    def _multiply(self, x: Tensor, dtype: torch.dtype, like: Tensor | None) -> Tensor:
        """[..., N of all] of x's dtype, computed in `dtype`, with the bias in the dtype of `like`."""
        bias = self.bias
        if bias is not None and like is not None and bias.dtype != like.dtype:
            bias = bias.to(like.dtype)
        if x.dtype == dtype:
            out: Tensor = linear_op(x, self.parts, bias, self.key, self.n, self.k)
            return out
        out = linear_op(x.to(dtype), self.parts, bias, self.key, self.n, self.k)
        return out.to(x.dtype)


class Joined:
    """The forward of a layer that shares a launch; before the layer's own class in the bases."""

    def forward(self, x: Tensor) -> Tensor:
        join, index = self.__dict__["_halfbyte_join"]
        out: Tensor | None = join.take(index, self, x) if join.members else None
        if out is not None:
            return out
        if not isinstance(self, Joined):  # set apart just now
            return self.forward(x)
        out = super().forward(x)  # type: ignore[misc]
        return out

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[misc]
        self.__dict__["_halfbyte_join"][0].intact()
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in ("weight", "bias"):  # as PEFT replaces it when it merges an adapter
            self.__dict__["_halfbyte_join"][0].intact()


class JoinedLinear(Joined, QuantLinear):
    """A QuantLinear that shares a launch; `halfbyte.optimize` makes them, `restore` undoes them."""


_CLASSES: dict[type, type] = {QuantLinear: JoinedLinear}  # others derived from QuantLinear add themselves: `joins`


def joins(plain: type, joined: type) -> None:
    """Have layers of a class derived from QuantLinear joined, too, and be of the class `joined` then."""
    _CLASSES[plain] = joined


def join(model: nn.Module) -> list[nn.Module]:
    """Join what can be joined in `model`; returns all layers that are. Call it again after the model was changed."""
    found: list[Any] = []
    with torch.inference_mode(False), torch.no_grad():
        for parent in model.modules():
            children = parent._modules
            for child in children.values():
                if isinstance(child, Joined):
                    made = child.__dict__["_halfbyte_join"][0]
                    if not (made.intact() and all(member in children.values() for member in made.members)):
                        _set_apart(child)
            for group in _groups(parent):
                made = Join(group)
                for index, layer in enumerate(group):
                    layer.__class__ = _CLASSES[type(layer)]
                    layer.__dict__["_halfbyte_join"] = (made, index)
            found.extend(child for child in children.values() if isinstance(child, Joined))
    return found


def separate(model: nn.Module) -> list[nn.Module]:
    """Undo `join`: the same objects, of their own classes, on memory of their own. Returns them."""
    found: list[Any] = [module for module in model.modules() if isinstance(module, Joined)]
    with torch.inference_mode(False), torch.no_grad():
        for layer in found:
            _set_apart(layer)
            forget_weight(layer._part_list())
            for part in [*layer._part_list(), *([] if layer.bias is None else [layer.bias])]:
                if part.untyped_storage().nbytes() != part.numel() * part.element_size():
                    part.data = part.data.clone()
    return found


def _set_apart(layer: Any) -> None:
    if isinstance(layer, Joined):
        layer.__dict__["_halfbyte_join"][0].split()
        _plain(layer)  # a copy, which no Join knows


def _plain(layer: Any) -> None:
    if isinstance(layer, Joined):
        layer.__class__ = next(plain for plain, joined in _CLASSES.items() if joined is type(layer))
        del layer.__dict__["_halfbyte_join"]


def _side_by_side(tensors: Sequence[Tensor]) -> Tensor:
    """One flat tensor that holds them all in order, and they become views of it: of their memory if they lie so."""
    begin = address = tensors[0].data_ptr()
    storage = tensors[0].untyped_storage()
    for tensor in tensors:
        if tensor.data_ptr() != address or tensor.untyped_storage().data_ptr() != storage.data_ptr():
            break
        address += tensor.numel() * tensor.element_size()
    else:
        return tensors[0].data.as_strided(((address - begin) // tensors[0].element_size(),), (1,))
    whole = torch.cat([tensor.data.view(-1) for tensor in tensors])
    for tensor, view in zip(tensors, torch.split(whole, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.data = view.view(tensor.shape)
    return whole


def _groups(parent: nn.Module) -> Iterator[list[Any]]:
    """Children of `parent` that can be joined, in their order."""
    children = parent._modules
    for names in NAMES:
        layers: list[Any] = [children.get(name) for name in names]
        if sum(type(layer) in _CLASSES for layer in layers) < 2:
            continue
        for together in called_on_one(parent.forward):
            alike: dict[Any, list[Any]] = {}
            for name, layer in zip(names, layers, strict=True):
                what = _signature(layer) if name in together else None
                if what is not None:
                    alike.setdefault(what, []).append(layer)
            yield from (group for group in alike.values() if len(group) > 1 and _fit(group))


def _signature(layer: Any) -> Any:
    """What layers that share a launch have in common; None for a layer that cannot, or already does."""
    if type(layer) not in _CLASSES or "forward" in layer.__dict__ or layer.weight.is_meta:
        return None
    try:
        key, parts = layer._format_key, layer._part_list()
    except (ValueError, AttributeError):  # a weight that halfbyte has no format for, or none at all
        return None
    if any(one is not other for one, other in zip(parts, layer._part_list(), strict=True)):
        return None  # made at each call, as of scales in 16 bits
    bias = None if layer.bias is None else layer.bias.dtype
    return type(layer), key, layer.in_features, layer.weight.device, bias, getattr(layer, "compute_dtype", None)


def _fit(layers: Sequence[Any]) -> bool:
    """Whether the bytes of these weights, laid side by side, are those of the matrix with all their rows."""
    format: BlockFormat = get_format(layers[0]._format_key)
    if not isinstance(format.layout, RecordLayout):
        return False  # N runs within a row of words
    k = layers[0].in_features
    block = 1 if format.by_row else format.blocksize * (OUTER_BLOCK if format.nested else 1)
    if any(layer.out_features * k % block for layer in layers):
        return False
    whole = format.parts(sum(layer.out_features for layer in layers), k)
    biases = [[layer.bias for layer in layers]] if layers[0].bias is not None else []
    columns = list(zip(*(layer._part_list() for layer in layers), strict=True))
    for tensors, part in zip(columns, whole.values(), strict=True):
        if tensors[0].shape == part.shape:  # one for all rows: an offset, a table
            if not all(torch.equal(tensors[0], tensor) for tensor in tensors):
                return False
        elif any(tensor.numel() * tensor.element_size() % ALIGNMENT for tensor in tensors[:-1]):
            return False
    return all(tensor.is_contiguous() for tensors in [*columns, *biases] for tensor in tensors)
