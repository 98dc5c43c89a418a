"""The linear suite: single layers, ours and peers', in one interleaved run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .. import reference
from ..device import arch_of, cache_bytes
from ..formats import PackedWeight, quantize
from ..kernels import Kernel, Problem
from ..kernels.cpu import library
from ..ops import linear
from ..plan import plan
from .measure import CALL, copies_needed, interleave, read_ceiling
from .peers import Layer, Peer, peers
from .rows import Environment, Row

DTYPE_NAMES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Candidate:
    """A kernel on one problem: its layers, one for each copy of the weights.

    dense: float64 [N, K], where it holds other values than the problem's weight.
    """

    name: str
    format: str
    layers: Sequence[Layer]
    weight_bytes: int
    dense: Tensor | None = None


def bench_linear(
    shapes: Sequence[tuple[int, int]],
    ms: Sequence[int],
    formats: Sequence[str],
    dtype_name: str,
    device: torch.device,
    with_peers: bool = True,
    seconds_each: float = 1.0,
    cold: bool = True,
    on_missing: Callable[[list[str]], None] = lambda names: None,
) -> Iterator[Row]:
    """Rows of every shape (N, K), format and M: ours first, then the peers of the same run.

    seconds_each: time spent on each candidate of a problem. cold: rotate over copies of the weights; else one copy
    stays in the caches, and the suite is "linear-warm". The read ceiling is measured once, in this process.
    """
    suite = "linear" if cold else "linear-warm"
    to_exceed = cache_bytes(device) if cold else 0
    environment = Environment.of(device)
    ceiling = read_ceiling(device) / 1e12
    chosen, missing = peers(device) if with_peers else ([], [])
    on_missing(missing)
    for n, k in shapes:
        for key in formats:
            weight = quantize(torch.randn(n, k, device=device), key)
            yield from bench_weight(
                weight, ms, dtype_name, chosen, seconds_each, suite, partial(copies_needed, cache_bytes=to_exceed),
                environment, ceiling,
            )  # fmt: skip


def bench_weight(
    weight: PackedWeight,
    ms: Sequence[int],
    dtype_name: str,
    chosen: Sequence[Peer],
    seconds_each: float,
    suite: str,
    copies: Callable[[int], int],
    environment: Environment,
    ceiling: float,
) -> Iterator[Row]:
    """Rows of one weight on its device for each M: ours, then those of the `chosen` peers that take it.

    copies: over how many copies of a candidate's weights to rotate, given its bytes. ceiling: TB/s of a plain read,
    measured in this process. Otherwise as `bench_linear`.
    """
    candidates = [_ours(weight, copies), *_peers(weight, chosen, dtype_name, copies)]
    for m in ms:
        yield from _measure(suite, weight, candidates, m, dtype_name, seconds_each, environment, ceiling)


def _ours(weight: PackedWeight, copies: Callable[[int], int]) -> Candidate:
    layers = [_layer(_clone(weight)) for _ in range(copies(weight.nbytes))]
    return Candidate("halfbyte", weight.format.key, layers, weight.nbytes)


def _layer(weight: PackedWeight) -> Layer:
    return lambda x: linear(x, weight)


def _clone(weight: PackedWeight) -> PackedWeight:
    return PackedWeight(weight.format, weight.shape, {name: part.clone() for name, part in weight.parts.items()})


def _peers(
    weight: PackedWeight, chosen: Sequence[Peer], dtype_name: str, copies: Callable[[int], int]
) -> list[Candidate]:
    dtype = DTYPE_NAMES[dtype_name]
    candidates = []
    for peer in chosen:
        if not peer.supports(weight):
            continue
        size = peer.weight_bytes(weight, dtype)
        layers = [peer.build(weight, dtype) for _ in range(copies(size))]
        key = weight.format.key if peer.packed else dtype_name
        dense = None
        if peer.requantised:
            called, values = peer.requantised
            key, dense = called(weight), values(weight, dtype)
        candidates.append(Candidate(peer.name, key, layers, size, dense))
    return candidates


def _measure(
    suite: str,
    weight: PackedWeight,
    candidates: Sequence[Candidate],
    m: int,
    dtype_name: str,
    seconds_each: float,
    environment: Environment,
    ceiling: float,
) -> Iterator[Row]:
    n, k = weight.shape
    dtype, device = DTYPE_NAMES[dtype_name], weight.device
    x = torch.randn(m, k, device=device).to(dtype)
    y = reference.linear(x, weight)
    exact = {each.name: y if each.dense is None else x.double() @ each.dense.t() for each in candidates}
    ours_name = _label(plan(Problem(weight.format, dtype, m, n, k, arch_of(device))).kernel)
    with torch.inference_mode():
        errors = {each.name: reference.relative_error(each.layers[0](x), exact[each.name]) for each in candidates}
        calls = {candidate.name: [_call(layer, x) for layer in candidate.layers] for candidate in candidates}
        timings = interleave(calls, seconds_each * len(candidates), device)
    for candidate in candidates:
        ours = candidate.name == "halfbyte"
        yield Row(
            suite=suite,
            environment=environment,
            kernel=ours_name if ours else candidate.name,
            format=candidate.format,
            nested=weight.format.nested and candidate.dense is None,
            dtype=dtype_name,
            M=m,
            N=n,
            K=k,
            timing=timings[candidate.name],
            bytes=candidate.weight_bytes,
            ceiling_tb_per_s=ceiling,
            error=errors[candidate.name],
            rounding_limit=reference.rounding_limit(exact[candidate.name], dtype),
        )


def _label(kernel: Kernel) -> str:
    """A row's name of our kernel, with the instruction set of CPU kernels."""
    loaded = library() if kernel.backend == "cpu" else None
    return f"halfbyte {kernel.name}" + (f" {loaded.isa_name}" if loaded else "")


def _call(layer: Layer, x: Tensor) -> CALL:
    return lambda: layer(x)
