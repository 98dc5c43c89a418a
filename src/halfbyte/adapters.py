"""LoRA adapters: one or many, any mix over the rows of a batch, in the pass over the base weight.

    y = linear_with_adapters(x, weight, bias, adapters, index)    # y_i = W x_i + bias + s_a B_a (A_a x_i), a = index[i]

`adapters` are a list of `Adapter`, or the slots of an `AdapterPool`, which keeps their weights in memory of a fixed
size while adapters come and go. Layers that share x (q, k, v; gate, up) share a pool, and `shrink` their x once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .adapter_ops import NAME, linear_adapters_op, linear_with_adapters_op, shrink_op
from .formats import PackedWeight, quantize
from .kernels.registry import DTYPES
from .ops import linear
from .reference import Adapter

__all__ = ["Adapter", "AdapterPool", "AdapterPoolFull", "AdapterSet", "linear_with_adapters", "merge_exact", "shrink"]

MAX_RANK = 256
ALIGNMENT = 16  # a pool's ranks are stored rounded up to this with zeros: the K of a tensor core's multiply
MERGE_VALUES = 1 << 22  # float64 values of a weight held at once


@dataclass(frozen=True, eq=False)
class AdapterSet:
    """One layer's adapters by slot, as the operators take them; `pack` and `AdapterPool` make them.

    a: [rows, K], A of all slots, and of other layers where they share x. spans: int32 [slots, 2], a slot's first row in
    `a` and how many. width: the most rows a slot may have, the columns of what `shrink` returns. b: flat; a slot's B is
    [N, stride] from element first * N on. table: int32 [slots, 4]: the slot's first column in what `shrink` returns,
    rank, first, stride. scalings: fp32 [slots]. out_features: N. An empty slot's rank is 0.
    """

    a: Tensor
    spans: Tensor
    width: int
    b: Tensor
    table: Tensor
    scalings: Tensor
    out_features: int

    @property
    def slots(self) -> int:
        """How many there are, empty ones included."""
        return self.table.shape[0]


def linear_with_adapters(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    adapters: Adapters = (),
    index: Tensor | None = None,
    shrunk: Tensor | None = None,
) -> Tensor:
    """A linear layer on 4-bit weights whose rows each take their own LoRA adapter, or none.

    y_i = W x_i + bias + scaling_a * B_a (A_a x_i) with a = index[i]: products and sums in fp32, one rounding at the
    end.

    x: [..., K] in fp32, bf16 or fp16. weight: [N, K]. bias: [N] of x's dtype or fp32. adapters: the slots that `index`
    names: an AdapterPool of one layer, or its `layer(name)`; or a list of Adapters, or one, in fp32, bf16 or fp16.
    index: integers, -1 for no adapter, in the shape of x's leading dimensions or of the first of them ([batch] for x
    [batch, tokens, K]); without it every row takes adapter 0. shrunk: what `shrink(x, …)` returned for layers that
    share a pool and x.
    Returns [..., N] of x's dtype. Differentiable in x, bias, and the A and B of a list.

    A row's bits do not depend on the adapters of the others; rows of -1 have the bits of `halfbyte.linear`, which also
    serves an empty list. On a CPU an index out of range raises IndexError; elsewhere, where nobody may wait to see it,
    such a row gets no adapter.

    Raises TypeError or ValueError that names the argument and what to do about it.
    """
    if not isinstance(weight, PackedWeight):
        raise TypeError(
            f"{NAME}: weight must be a PackedWeight, got {type(weight).__name__}; halfbyte.quantize makes one"
        )
    n, k = weight.shape
    chosen = as_set(adapters, n, k)
    if chosen is None:
        return linear(x, weight, bias)
    if chosen.out_features != n:
        raise ValueError(f"{NAME}: the adapters are for {chosen.out_features} outputs, the weight [N, K] is [{n}, {k}]")
    rows = row_index(index, x)
    x = _autocast(x)
    if bias is not None and x.dtype != bias.dtype != torch.float32:
        bias = bias.to(x.dtype) if torch.is_autocast_enabled(x.device.type) else bias  # else the operator complains
    problem = (x, list(weight.parts.values()), bias, weight.format.key, n, k)
    rest = (chosen.b, chosen.table, chosen.scalings, rows)
    if shrunk is None:
        out: Tensor = linear_with_adapters_op(*problem, chosen.a, chosen.spans, chosen.width, *rest)
        return out
    if shrunk.shape != (*x.shape[:-1], chosen.width):
        raise ValueError(
            f"{NAME}: shrunk must have shape {[*x.shape[:-1], chosen.width]}, got {list(shrunk.shape)}; "
            "halfbyte.adapters.shrink makes it from the same x, adapters and index"
        )
    out = linear_adapters_op(*problem, shrunk, *rest)
    return out


def shrink(x: Tensor, adapters: AdapterSet | AdapterPool, index: Tensor | None = None) -> Tensor:
    """Each row's A x for every layer of a pool at once: fp32 [..., width], for `linear_with_adapters(…, shrunk=…)`.

    x: [..., K]. index: as in `linear_with_adapters`, and the same one.
    """
    a, spans, width = adapters.a, adapters.spans, adapters.width
    out: Tensor = shrink_op(_autocast(x), a, spans, row_index(index, x), width)
    return out


def _autocast(x: Tensor) -> Tensor:
    """As torch's own linear: x is cast to autocast's dtype where it is on."""
    kind = x.device.type
    if x.dtype in DTYPES and torch.is_autocast_enabled(kind):
        return x.to(torch.get_autocast_dtype(kind))
    return x


def row_index(index: Tensor | None, x: Tensor) -> Tensor | None:
    """`index` as int32 [M], a number for each row of x."""
    if index is None:
        return None
    if index.dtype.is_floating_point or index.dtype.is_complex or index.dtype == torch.bool:
        raise TypeError(f"{NAME}: index must hold integers, got {index.dtype}")
    if index.device != x.device:
        raise ValueError(f"{NAME}: index is on {index.device} but x is on {x.device}; move one of them")
    lead = x.shape[:-1]
    if index.shape != lead[: index.dim()]:
        raise ValueError(
            f"{NAME}: index must have the shape of x's leading dimensions {list(lead)} or of the first of them, "
            f"got {list(index.shape)}"
        )
    if index.dim() < len(lead):
        index = index.reshape(*index.shape, *(1,) * (len(lead) - index.dim())).expand(lead)
    return index.reshape(-1).to(torch.int32)


# ---- a list of adapters


def as_set(adapters: Adapters, n: int, k: int) -> AdapterSet | None:
    """The operators' tensors for whatever a caller gave; None for an empty list."""
    if isinstance(adapters, AdapterSet):
        return adapters
    if isinstance(adapters, AdapterPool):
        return adapters.layer()
    listed = [adapters] if isinstance(adapters, Adapter) else list(adapters)
    return pack(listed, n, k) if listed else None


def pack(adapters: Sequence[Adapter], n: int, k: int) -> AdapterSet:
    """Adapters of a layer [n, k] as slots 0, 1, …: views of a single one's memory, else copies. Differentiable.

    Raises TypeError or ValueError for what is no adapter of such a layer.
    """
    for number, adapter in enumerate(adapters):
        _check_adapter(f"adapter {number}", adapter, n, k)
    if len(adapters) == 1:
        a, b = adapters[0].a.contiguous(), adapters[0].b.reshape(-1)
    else:
        a = torch.cat([adapter.a for adapter in adapters])
        b = torch.cat([adapter.b.reshape(-1) for adapter in adapters])
    ranks = tuple(adapter.rank for adapter in adapters)
    scalings = tuple(float(adapter.scaling) for adapter in adapters)
    tables = (
        _tables_now(ranks, scalings, a.device) if torch.compiler.is_compiling() else _tables(ranks, scalings, a.device)
    )
    return AdapterSet(a, tables[0], max(ranks), b, *tables[1:], out_features=n)


def _tables_now(ranks: Sequence[int], scalings: Sequence[float], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """spans, table and scalings of adapters that follow each other."""
    firsts = [sum(ranks[:i]) for i in range(len(ranks))]
    spans = [[first, rank] for first, rank in zip(firsts, ranks, strict=True)]
    table = [[0, rank, first, rank] for first, rank in zip(firsts, ranks, strict=True)]
    return (
        torch.tensor(spans, dtype=torch.int32, device=device),
        torch.tensor(table, dtype=torch.int32, device=device),
        torch.tensor(scalings, dtype=torch.float32, device=device),
    )


@lru_cache(maxsize=1024)
def _tables(ranks: Sequence[int], scalings: Sequence[float], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Made once: on a GPU each would be a copy that the host waits for."""
    with torch.inference_mode(False):  # they may be saved for a backward pass
        return _tables_now(ranks, scalings, device)


def _check_adapter(name: str, adapter: Adapter, n: int, k: int) -> None:
    if not isinstance(adapter, Adapter):
        raise TypeError(f"{NAME}: {name} must be a halfbyte.Adapter, got {type(adapter).__name__}")
    a, b = adapter.a, adapter.b
    for part, tensor in (("A", a), ("B", b)):
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{NAME}: {name}: {part} must be float32, bfloat16 or float16, got {tensor.dtype}; cast it")
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != k or b.shape != (n, a.shape[0]):
        raise ValueError(
            f"{NAME}: {name}: A must be [rank, {k}] and B [{n}, rank], got {list(a.shape)} and {list(b.shape)}"
        )
    if not 1 <= a.shape[0] <= MAX_RANK:
        raise ValueError(f"{NAME}: {name}: its rank must be from 1 to {MAX_RANK}, got {a.shape[0]}")


# ---- a pool


class AdapterPoolFull(RuntimeError):
    """The pool has no slot or no ranks left for an adapter; it is as it was before."""


class _Arena:
    """Rows of a fixed tensor that slots own; closed up when what is free is in pieces."""

    def __init__(self, capacity: int, columns: int, dtype: torch.dtype, device: torch.device | str | None) -> None:
        self.rows = torch.zeros(capacity, columns, dtype=dtype, device=device)
        self.owned: dict[int, tuple[int, int]] = {}  # slot -> first row, how many; in order of their places

    def free(self, without: int | None = None) -> int:
        """Rows that nobody owns, or only the slot `without`."""
        return self.rows.shape[0] - sum(count for slot, (_, count) in self.owned.items() if slot != without)

    def take(self, slot: int, count: int) -> Tensor:
        """Rows for a slot; the caller has made sure that they are free."""
        end = max((first + owned for first, owned in self.owned.values()), default=0)
        if end + count > self.rows.shape[0]:
            end = self._close_up()
        self.owned[slot] = (end, count)
        return self.rows[end : end + count]

    def _close_up(self) -> int:
        end = 0
        for slot, (first, count) in sorted(self.owned.items(), key=lambda each: each[1]):
            if first != end:
                self.rows[end : end + count] = self.rows[first : first + count].clone()
            self.owned[slot] = (end, count)
            end += count
        return end


class AdapterPool:
    """Adapters of one layer, or of a group that shares x, in memory of a fixed size and address.

    in_features: K. out_features: N, or {name: N} for a group, such as {"q": 4096, "k": 1024, "v": 1024}. slots:
    adapters held at once. ranks: the sum of their ranks that each layer has room for, each rank rounded up to a
    multiple of 16. max_rank: the largest of one adapter in one layer. dtype: of A and B: fp16, bf16 or fp32.

    `add` gives an adapter a slot, the number that `index` names; `replace` and `remove` change and free it. All that
    the operators read, places, ranks and scalings too, lies in tensors on the device that stay where they are, so a
    CUDA graph may be replayed after any of these with another mix. Call them on the stream that serves, between steps.

    Raises ValueError or TypeError for sizes that make no sense.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | Mapping[str, int],
        *,
        slots: int = 64,
        ranks: int = 1024,
        max_rank: int = 64,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        layers = {"": out_features} if isinstance(out_features, int) else dict(out_features)
        sizes = {"in_features": in_features, "slots": slots, "ranks": ranks} | {
            f"out_features {k!r}": v for k, v in layers.items()
        }
        wrong = {name: size for name, size in sizes.items() if size < 1}
        if wrong or not layers:
            raise ValueError(f"AdapterPool: sizes must be from 1 up, got {wrong or 'no layer'}")
        if not 1 <= max_rank <= MAX_RANK:
            raise ValueError(f"AdapterPool: max_rank must be from 1 to {MAX_RANK}, got {max_rank}")
        if dtype not in DTYPES:
            raise TypeError(f"AdapterPool: dtype must be float32, bfloat16 or float16, got {dtype}")
        self.in_features = in_features
        self.out_features = layers
        self.max_rank = max_rank
        self.dtype = dtype
        self.width = _stored(max_rank) * len(layers)
        with torch.inference_mode(False):
            capacity = _stored(ranks)
            self._a = _Arena(capacity * len(layers), in_features, dtype, device)
            self._b = {name: _Arena(capacity, n, dtype, device) for name, n in layers.items()}
            self.spans = torch.zeros(slots, 2, dtype=torch.int32, device=device)
            self._tables = {name: torch.zeros(slots, 4, dtype=torch.int32, device=device) for name in layers}
            self._scalings = {name: torch.zeros(slots, device=device) for name in layers}
        self._held: dict[int, dict[str, tuple[int, float]]] = {}  # slot -> layer -> rank, scaling

    @classmethod
    def random(
        cls,
        in_features: int,
        out_features: int | Mapping[str, int],
        ranks: Sequence[int],
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        seed: int = 0,
    ) -> AdapterPool:
        """A full pool of random adapters of these ranks in slots 0, 1, …; for benches and tests.

        Each adds about 3 % to the outputs of weights that are drawn from a standard normal distribution. They are drawn
        on the pool's device, whose generator the numbers depend on.
        """
        stored = sum(_stored(rank) for rank in ranks)
        pool = cls(
            in_features, out_features, slots=len(ranks), ranks=stored, max_rank=max(ranks), dtype=dtype, device=device
        )  # fmt: skip
        place = pool.a.device
        generator = torch.Generator(place).manual_seed(seed)
        for rank in ranks:
            layers = {}
            for name, n in pool.out_features.items():
                a = torch.randn(rank, in_features, generator=generator, device=place) / in_features**0.5
                b = torch.randn(n, rank, generator=generator, device=place) * 0.03
                layers[name] = Adapter(a.to(dtype), b.to(dtype), (in_features / rank) ** 0.5)
            pool.add(layers)
        return pool

    def __len__(self) -> int:
        """Adapters held."""
        return len(self._held)

    def __contains__(self, slot: object) -> bool:
        return slot in self._held

    @property
    def a(self) -> Tensor:
        """[rows, K]: A of all slots and layers."""
        return self._a.rows

    @property
    def slots(self) -> int:
        """How many there are, empty ones included."""
        return self.spans.shape[0]

    @property
    def free_ranks(self) -> int:
        """The largest sum of stored ranks that every layer still has room for."""
        return min(arena.free() for arena in self._b.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors; they never change."""
        tensors = [self.a, self.spans, *(arena.rows for arena in self._b.values())]
        tensors += [*self._tables.values(), *self._scalings.values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def layer(self, name: str = "") -> AdapterSet:
        """The slots of one layer, for `linear_with_adapters`; it sees all later changes."""
        if name not in self._b:
            raise KeyError(f"AdapterPool: no layer {name!r}; it has {', '.join(map(repr, self._b))}")
        b, table, scalings = self._b[name].rows.view(-1), self._tables[name], self._scalings[name]
        return AdapterSet(self.a, self.spans, self.width, b, table, scalings, self.out_features[name])

    def add(self, adapter: Adapter | Mapping[str, Adapter]) -> int:
        """Copy an adapter into a free slot and return its number.

        adapter: one Adapter, or {layer: Adapter} for a group, where layers may be missing. Its tensors may be on
        another device; their dtype must be the pool's (16-bit numbers go into an fp32 pool, too).

        Raises AdapterPoolFull, or ValueError or TypeError where shapes, ranks or dtypes do not fit.
        """
        slot = next((slot for slot in range(self.slots) if slot not in self._held), None)
        if slot is None:
            raise AdapterPoolFull(f"AdapterPool: all {self.slots} slots are taken; remove an adapter first")
        self._put(slot, self._checked(adapter))
        return slot

    def replace(self, slot: int, adapter: Adapter | Mapping[str, Adapter]) -> None:
        """Put another adapter, of any rank, in the place of the one in `slot`. Raises as `add`, and KeyError."""
        self._known(slot)
        self._put(slot, self._checked(adapter))

    def remove(self, slot: int) -> None:
        """Free a slot and its memory; rows that still name it get no adapter. Raises KeyError for an empty slot."""
        self._known(slot)
        self._release(slot)
        self._publish()

    def set_scaling(self, slot: int, scaling: float, layer: str | None = None) -> None:
        """Change what an adapter is multiplied by, in all layers or in one. Raises KeyError where it is not there."""
        held = self._known(slot)
        if layer is not None and layer not in held:
            raise KeyError(f"AdapterPool: the adapter in slot {slot} has no layer {layer!r}")
        for name in held if layer is None else [layer]:
            held[name] = (held[name][0], float(scaling))
        self._publish()

    def _known(self, slot: int) -> dict[str, tuple[int, float]]:
        if slot not in self._held:
            raise KeyError(f"AdapterPool: slot {slot} is empty; taken are {sorted(self._held) or 'none'}")
        return self._held[slot]

    def _checked(self, adapter: Adapter | Mapping[str, Adapter]) -> dict[str, Adapter]:
        if isinstance(adapter, Adapter):
            if len(self._b) > 1:
                raise TypeError(f"AdapterPool: give {{layer: Adapter}} for the layers {', '.join(self._b)}")
            adapter = {next(iter(self._b)): adapter}
        unknown = set(adapter) - set(self._b)
        if unknown or not adapter:
            raise ValueError(f"AdapterPool: layers must be of {list(self._b)}, got {list(adapter)}")
        for name, each in adapter.items():
            label = f"the adapter's layer {name!r}" if name else "the adapter"
            _check_adapter(label, each, self.out_features[name], self.in_features)
            if each.rank > self.max_rank:
                raise ValueError(f"AdapterPool: {label} has rank {each.rank}, max_rank is {self.max_rank}")
            if any(part.dtype != self.dtype for part in (each.a, each.b)) and self.dtype != torch.float32:
                raise TypeError(
                    f"AdapterPool: {label} is {each.a.dtype} and {each.b.dtype}, the pool {self.dtype}; cast it, "
                    "if that rounding is meant, or make a pool of torch.float32"
                )
        return {name: adapter[name] for name in self._b if name in adapter}

    def _put(self, slot: int, layers: dict[str, Adapter]) -> None:
        need = {name: _stored(each.rank) for name, each in layers.items()}
        for name, count in need.items():
            free = self._b[name].free(without=slot)
            if count > free:
                raise AdapterPoolFull(
                    f"AdapterPool: {count} ranks are needed{f' in {name!r}' if name else ''}, "
                    f"{free} of {self._b[name].rows.shape[0]} are free; remove an adapter or make a larger pool"
                )
        with torch.no_grad():
            self._release(slot)
            rows = self._a.take(slot, sum(need.values()))
            for name, each in layers.items():
                count, rank = need[name], each.rank
                mine, rows = rows[:count], rows[count:]
                mine[:rank] = each.a.detach()
                mine[rank:] = 0
                block = self._b[name].take(slot, count).view(self.out_features[name], count)
                block[:, :rank] = each.b.detach()
                block[:, rank:] = 0
            self._held[slot] = {name: (each.rank, float(each.scaling)) for name, each in layers.items()}
            self._publish()

    def _release(self, slot: int) -> None:
        self._held.pop(slot, None)
        for arena in (self._a, *self._b.values()):
            arena.owned.pop(slot, None)

    def _publish(self) -> None:
        """Write places, ranks and scalings to the device: all of them, as closing up moves other slots, too."""
        spans = torch.zeros(self.slots, 2, dtype=torch.int32)
        tables = {name: torch.zeros(self.slots, 4, dtype=torch.int32) for name in self._b}
        scalings = {name: torch.zeros(self.slots) for name in self._b}
        for slot, layers in self._held.items():
            spans[slot] = torch.tensor(self._a.owned[slot])
            column = 0
            for name, (rank, scaling) in layers.items():
                first, stride = self._b[name].owned[slot]
                tables[name][slot] = torch.tensor([column, rank, first, stride])
                scalings[name][slot] = scaling
                column += stride
        self.spans.copy_(spans)
        for name in self._b:
            self._tables[name].copy_(tables[name])
            self._scalings[name].copy_(scalings[name])


Adapters = AdapterSet | AdapterPool | Sequence[Adapter] | Adapter  # what `linear_with_adapters` takes


def _stored(rank: int) -> int:
    return -(-rank // ALIGNMENT) * ALIGNMENT


# ---- merging


@dataclass(frozen=True)
class MergeLoss:
    """What re-quantising W + s B A costs, in 2-norms over the weight.

    weight_error: distance from W + s B A, of W + s B A. effect_error: the same distance, of s B A: from 1 up, the error
    is as large as all that the adapter does. effect_kept: the share of s B A that is left in the direction of it.
    """

    weight_error: float
    effect_error: float
    effect_kept: float


def merge_exact(weight: PackedWeight, adapter: Adapter) -> tuple[PackedWeight, MergeLoss]:
    """W + s B A, computed in float64 and quantised to the weight's format again, and what that loses.

    A block has 16 values, and an adapter is small beside the steps between them, so most of it is rounded away or
    exaggerated: the loss says how much. Unmerged (`linear_with_adapters`) nothing is lost.

    Raises ValueError for a format that halfbyte does not write (q4_k, gptq, awq, …) or an adapter of another shape.
    """
    n, k = weight.shape
    _check_adapter("the adapter", adapter, n, k)
    a, b = adapter.a.detach().to(weight.device).double(), adapter.b.detach().to(weight.device).double()
    step = max(1, MERGE_VALUES // k)
    chunks = [slice(start, min(n, start + step)) for start in range(0, n, step)]

    def effect(rows: slice) -> Tensor:
        return adapter.scaling * (b[rows] @ a)

    merged = quantize(
        torch.cat([(weight.dequantize(torch.float64, rows) + effect(rows)).float() for rows in chunks]), weight.format
    )
    distance = whole = size = along = 0.0
    for rows in chunks:
        base, delta = weight.dequantize(torch.float64, rows), effect(rows)
        change = merged.dequantize(torch.float64, rows) - base
        distance += float((change - delta).square().sum())
        whole += float((base + delta).square().sum())
        size += float(delta.square().sum())
        along += float((change * delta).sum())
    nothing = float("nan")
    return merged, MergeLoss(
        weight_error=(distance / whole) ** 0.5 if whole else nothing,
        effect_error=(distance / size) ** 0.5 if size else nothing,
        effect_kept=along / size if size else nothing,
    )
