"""One layer at a time, ours and the peers': exactness, what adapters do to it, and speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..device import arch_of, cache_bytes
from ..formats import PackedWeight
from ..kernels import Problem
from ..ops import linear
from ..plan import plan
from ..reference import Adapter
from .linear import DTYPE_NAMES, bench_weight
from .measure import copies_needed
from .peers import Peer, peers
from .rows import Environment
from .verify import Layer, LayerReport, Truth

# What `--against` takes -> how the names of its peers start.
AGAINST = {"bitsandbytes": ("bitsandbytes ",), "dense": ("cublas ", "torch dense "), "onnxruntime": ("onnxruntime ",)}
SUITE = "prove"
DEFAULT_AGAINST = ("bitsandbytes", "dense")


def choose_peers(against: Sequence[str] | None, device: torch.device) -> tuple[list[Peer], list[str]]:
    """The peers to compare with, bitsandbytes' first, and which of them are not installed.

    against: keys of AGAINST; by default bitsandbytes, where it is installed, and torch on dense weights.
    Raises ValueError for an unknown key, ModuleNotFoundError where a peer that was asked for is not installed.
    """
    wanted = DEFAULT_AGAINST if against is None else tuple(against)
    if unknown := [name for name in wanted if name not in AGAINST]:
        raise ValueError(f"--against takes {', '.join(AGAINST)}; got '{unknown[0]}'")
    found = peers(device)[0]
    chosen = {name: [peer for peer in found if peer.name.startswith(AGAINST[name])] for name in wanted}
    missing = [name for name, of_name in chosen.items() if not of_name]
    if missing and against is not None:
        raise ModuleNotFoundError(f"--against {missing[0]}: it is not installed for {device.type}; pip install it")
    return [peer for of_name in chosen.values() for peer in of_name], missing


def prove_layer(
    name: str,
    weight: PackedWeight,
    against: Sequence[Peer],
    adapters: Mapping[str, Adapter],
    dtype_name: str,
    m: int,
    columns: int,
    seed: int,
) -> dict[str, Any]:
    """The record of one layer, as docs/prove.md describes it. The weight is decoded for the reference once.

    adapters: by the adapter's directory, those that touch this layer. dtype_name: of the comparison with peers.
    """
    truth = Truth.of(weight, m, columns, seed)
    with torch.inference_mode():
        exactness = truth.check(_ours(weight))
        report = LayerReport.of(name, weight, exactness, truth.notices_swap(weight))
        theirs = {peer.name: _against(peer, weight, truth, dtype_name) for peer in against if peer.supports(weight)}
    n, k = weight.shape
    kernel = plan(Problem(weight.format, DTYPE_NAMES[dtype_name], m, n, k, arch_of(weight.device))).kernel
    return {
        "name": name,
        "format": weight.format.key,
        "shape": list(weight.shape),
        "bytes": weight.nbytes,
        "kernel": kernel.name,
        "ok": report.ok,
        "one_hot_ok": report.one_hot_ok,
        "swap_detected": report.swap_detected,
        "halfbyte": asdict(exactness),
        "peers": theirs,
        "adapters": {label: _effect(adapter, truth, dtype_name, name) for label, adapter in adapters.items()},
    }


def _ours(weight: PackedWeight) -> Layer:
    return lambda x: linear(x, weight)


def _against(peer: Peer, weight: PackedWeight, truth: Truth, dtype_name: str) -> dict[str, Any]:
    """A peer held against the same truth, and how far its outputs are from ours, relative to the true ones."""
    layer = peer.build(weight, DTYPE_NAMES[dtype_name])
    x, y = truth.x[dtype_name], truth.y[dtype_name]
    distance = (layer(x).double() - linear(x, weight).double()).norm()
    norm = y.norm()
    return {
        **asdict(truth.check(layer, [dtype_name])),
        "difference": float(distance / norm) if norm else float(distance),
    }


def _effect(adapter: Adapter, truth: Truth, dtype_name: str, name: str) -> dict[str, Any]:
    """How much of the layer's exact output the adapter changes: ‖Δ‖ / ‖y‖ for the same rows."""
    x, y = truth.x[dtype_name], truth.y[dtype_name]
    a, b = (part.to(x.device).double() for part in (adapter.a, adapter.b))
    if a.shape[1] != x.shape[1] or b.shape[0] != y.shape[1]:
        raise ValueError(
            f"{name}: the adapter's A {list(a.shape)} and B {list(b.shape)} do not fit a weight "
            f"{[y.shape[1], x.shape[1]]}; it was trained on another model"
        )
    delta: Tensor = adapter.scaling * (x.double() @ a.t() @ b.t())
    return {"rank": a.shape[0], "scaling": adapter.scaling, "effect": reference.relative_error(y + delta, y)}


def measure_speed(
    name: str,
    weight: PackedWeight,
    count: int,
    against: Sequence[Peer],
    ms: Sequence[int],
    dtype_name: str,
    seconds_each: float,
    most_copies: int,
    ceiling: float,
) -> dict[str, Any]:
    """Rows for one layer shape, on the layer's own weights, ours and the peers' interleaved.

    name: the layer measured. count: how many layers of the model have its shape and format. most_copies: of a
    candidate's weights, where the cache would take more: a model reads its own layers in between and no others, and
    the caches keep of a small one what they can.
    """
    environment = Environment.of(weight.device)
    cache = cache_bytes(weight.device)
    copies = lambda size: min(most_copies, copies_needed(size, cache))  # noqa: E731
    rows = bench_weight(weight, ms, dtype_name, against, seconds_each, SUITE, copies, environment, ceiling)
    return {
        "layer": name,
        "format": weight.format.key,
        "shape": list(weight.shape),
        "layers": count,
        "rows": [row.record() for row in rows],
    }
