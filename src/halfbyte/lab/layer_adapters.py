"""LoRA adapters in the layer suite: ours in the pass over the base, and the path that PEFT takes after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from .. import reference
from ..adapters import Adapter, AdapterPool, AdapterSet, linear_with_adapters
from ..formats import PackedWeight
from ..ops import linear
from .linear import OURS, Candidate
from .peers import Layer, bnb_operator, clone, installed

PATH = "peft-path"  # how rows of it are called
Mix = tuple[int, int]  # adapters, and the rank that all have


def candidates(
    weight: PackedWeight,
    dtype: torch.dtype,
    copies: Callable[[int], int],
    mixes: Sequence[Mix],
    with_peers: bool = True,
) -> list[Candidate]:
    """For each mix: our operator, then PEFT's path on our base and on bitsandbytes'; adapters are of x's dtype.

    Row i of x takes adapter i modulo their number, and each copy of the weight has adapters of its own.
    """
    if not mixes:
        return []
    bases = [clone(weight) for _ in range(copies(weight.nbytes))]
    return [each for mix in mixes for each in _of_mix(weight, dtype, bases, mix, with_peers)]


def _of_mix(
    weight: PackedWeight, dtype: torch.dtype, bases: Sequence[PackedWeight], mix: Mix, with_peers: bool
) -> Iterator[Candidate]:
    count, rank = mix
    n, k = weight.shape
    pool = AdapterPool.random(k, n, [rank] * count, dtype=dtype, device=weight.device)
    first = pool.layer()
    sets = [first, *(replace(first, a=first.a.clone(), b=first.b.clone()) for _ in bases[1:])]

    @cache
    def index(m: int) -> Tensor:
        return (torch.arange(m, device=weight.device) % count).to(torch.int32)

    def exact(x: Tensor) -> Tensor:
        return reference.linear(x, weight, None, listed(first), index(x.shape[0]))

    def candidate(name: str, layers: Sequence[Layer], label: str = "") -> Candidate:
        unique = f"{name}, {count} of rank {rank}"
        return Candidate(unique, weight.format.key, layers, weight.nbytes, None, exact, count, rank, label)

    pairs = list(zip(bases, sets, strict=True))
    yield candidate(OURS, [_ours(base, each, index) for base, each in pairs])
    if not with_peers:
        return
    paths: list[tuple[str, Callable[[PackedWeight], Layer]]] = [("halfbyte", _base)]
    name = installed("bitsandbytes") if weight.format.name in ("nf4", "fp4") else None
    if name and weight.device.type == "cuda":
        paths.append((name, bnb_operator))
    for named, base_layer in paths:
        label = f"{PATH} on {named}"
        layers = [peft_path(base_layer(base), listed(each), count) for base, each in pairs]
        yield candidate(label, layers, label)


def _ours(base: PackedWeight, adapters: AdapterSet, index: Callable[[int], Tensor]) -> Layer:
    return lambda x: linear_with_adapters(x, base, None, adapters, index(x.shape[0]))


def _base(weight: PackedWeight) -> Layer:
    return lambda x: linear(x, weight)


def listed(adapters: AdapterSet) -> list[Adapter]:
    """A layer's adapters by slot, as views of its memory. Waits for the device."""
    n, found = adapters.out_features, []
    rows = zip(adapters.spans.tolist(), adapters.table.tolist(), adapters.scalings.tolist(), strict=True)
    for (start, _), (column, rank, first, stride), scaling in rows:
        a = adapters.a[start + column : start + column + rank]
        b = adapters.b[first * n : (first + stride) * n].view(n, stride)[:, :rank]
        found.append(Adapter(a, b, scaling))
    return found


def peft_path(base: Layer, adapters: Sequence[Adapter], count: int) -> Layer:
    """What PEFT's LoRA layers do, but for its Python: the base's output in x's dtype, then each adapter's part of it.

    One adapter takes all rows; of several, each takes its rows out and adds to them in place.
    """

    @cache
    def rows(m: int, number: int) -> Tensor:
        return torch.arange(number, m, count, device=adapters[0].a.device)

    def effect(x: Tensor, adapter: Adapter) -> Tensor:
        multiply = torch.nn.functional.linear
        return multiply(multiply(x, adapter.a), adapter.b) * adapter.scaling

    def layer(x: Tensor) -> Tensor:
        out = base(x)
        if count == 1:
            return out + effect(x, adapters[0])
        m = x.shape[0]
        for number in range(min(count, m)):
            mine = rows(m, number)
            out[mine] += effect(x[mine], adapters[number])
        return out

    return layer
