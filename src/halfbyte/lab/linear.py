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
from ..kernels import Problem, cpu_linear
from ..kernels.registry import DTYPE_NAMES as DTYPE_NAMES
from ..ops import linear
from ..plan import plan
from .measure import CALL, copies_needed, interleave, read_ceiling, reraise
from .peers import Layer, Peer, clone, dequantising, peers
from .rows import Environment, Row

OURS = "halfbyte"  # a candidate's name; a row's says which kernel
OnFailure = Callable[[str, Exception], None]  # a peer's name, and what it raised


@dataclass(frozen=True, eq=False)
class Candidate:
    """A kernel on one problem: its layers, one for each copy of the weights.

    dense: float64 [N, K], where it holds other values than the problem's weight. exact: the float64 answer for x, where
    it is not x times the weight. adapters, rank: in its layers. label: what rows call it, where that is not `name`.
    """

    name: str
    format: str
    layers: Sequence[Layer]
    weight_bytes: int
    dense: Tensor | None = None
    exact: Layer | None = None
    adapters: int = 0
    rank: int = 0
    label: str = ""


# candidates on a weight, of activations' dtype, with so many copies for so many bytes
More = Callable[[PackedWeight, torch.dtype, Callable[[int], int]], Sequence[Candidate]]


class Bench:
    """One run: its peers, and a read ceiling that is measured once, when the run starts."""

    def __init__(
        self,
        suite: str,
        dtype_name: str,
        device: torch.device,
        with_peers: bool = True,
        seconds_each: float = 1.0,
        cold: bool = True,
        on_missing: Callable[[list[str]], None] = lambda names: None,
        on_failure: OnFailure = reraise,
    ) -> None:
        """seconds_each: time spent on each candidate of a problem. cold: rotate over copies of the weights.

        on_missing: told which peers are not installed. on_failure: told of a peer that fails, which is then left out.
        """
        self.suite, self.dtype_name, self.device, self.seconds_each = suite, dtype_name, device, seconds_each
        self.environment = Environment.of(device)
        self.ceiling = read_ceiling(device) / 1e12
        self.copies = partial(copies_needed, cache_bytes=cache_bytes(device) if cold else 0)
        self.with_peers, self.on_failure = with_peers, on_failure
        self.peers, missing = peers(device) if with_peers else ([], [])
        on_missing(missing)

    def rows(
        self, n: int, k: int, key: str, ms: Sequence[int], rule: bool = False, more: More = lambda *_: []
    ) -> Iterator[Row]:
        """Rows of a random weight [n, k] in a format for each M: ours first, then the peers of the same run.

        rule: also measure to dequantise and multiply, which with bitsandbytes is what we must not be slower than. more:
        what to measure beside these.
        """
        weight = quantize(torch.randn(n, k, device=self.device), key)
        chosen = [*self.peers, dequantising(weight)] if rule and self.with_peers else self.peers
        return bench_weight(
            weight, ms, self.dtype_name, chosen, self.seconds_each, self.suite, self.copies, self.environment,
            self.ceiling, self.on_failure, more,
        )  # fmt: skip


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
    on_failure: OnFailure = reraise,
) -> Iterator[Row]:
    """Rows of every shape (N, K), format and M: ours first, then the peers of the same run. As `Bench`.

    cold: rotate over copies of the weights; else one copy stays in the caches, and the suite is "linear-warm".
    """
    suite = "linear" if cold else "linear-warm"
    bench = Bench(suite, dtype_name, device, with_peers, seconds_each, cold, on_missing, on_failure)
    for n, k in shapes:
        for key in formats:
            yield from bench.rows(n, k, key, ms)


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
    on_failure: OnFailure = reraise,
    more: More = lambda *_: [],
) -> Iterator[Row]:
    """Rows of one weight on its device for each M: ours, then those of the `chosen` peers that take it.

    copies: over how many copies of a candidate's weights to rotate, given its bytes. ceiling: TB/s of a plain read,
    measured in this process. Otherwise as `Bench`.
    """
    candidates = [_ours(weight, copies), *_peers(weight, chosen, dtype_name, copies, on_failure)]
    candidates += more(weight, DTYPE_NAMES[dtype_name], copies)
    for m in ms:
        yield from _measure(suite, weight, candidates, m, dtype_name, seconds_each, environment, ceiling, on_failure)


def _ours(weight: PackedWeight, copies: Callable[[int], int]) -> Candidate:
    layers = [_layer(clone(weight)) for _ in range(copies(weight.nbytes))]
    return Candidate(OURS, weight.format.key, layers, weight.nbytes)


def _layer(weight: PackedWeight) -> Layer:
    return lambda x: linear(x, weight)


def _peers(
    weight: PackedWeight,
    chosen: Sequence[Peer],
    dtype_name: str,
    copies: Callable[[int], int],
    on_failure: OnFailure,
) -> list[Candidate]:
    candidates = []
    for peer in chosen:
        if not peer.supports(weight):
            continue
        try:
            candidates.append(_candidate(peer, weight, dtype_name, copies))
        except Exception as error:  # whatever a peer may raise
            on_failure(peer.name, error)
    return candidates


def _candidate(peer: Peer, weight: PackedWeight, dtype_name: str, copies: Callable[[int], int]) -> Candidate:
    dtype = DTYPE_NAMES[dtype_name]
    size = peer.weight_bytes(weight, dtype)
    layers = [peer.build(weight, dtype) for _ in range(copies(size))]
    if peer.requantised:
        called, values = peer.requantised
        return Candidate(peer.name, called(weight), layers, size, values(weight, dtype))
    return Candidate(peer.name, weight.format.key if peer.packed else dtype_name, layers, size)


def _measure(
    suite: str,
    weight: PackedWeight,
    candidates: Sequence[Candidate],
    m: int,
    dtype_name: str,
    seconds_each: float,
    environment: Environment,
    ceiling: float,
    on_failure: OnFailure,
) -> Iterator[Row]:
    n, k = weight.shape
    dtype, device = DTYPE_NAMES[dtype_name], weight.device
    x = torch.randn(m, k, device=device).to(dtype)
    y = reference.linear(x, weight)
    ours_name = _label(Problem(weight.format, dtype, m, n, k, arch_of(device)))

    def failed(name: str, error: Exception) -> None:
        if name.startswith(OURS):
            raise error
        on_failure(name, error)

    with torch.inference_mode():
        errors = {}
        for each in candidates:
            try:
                exact = each.exact(x) if each.exact else y if each.dense is None else x.double() @ each.dense.t()
                error = reference.relative_error(each.layers[0](x), exact)
                errors[each] = error, reference.rounding_limit(exact, dtype)
            except Exception as failure:  # whatever a peer may raise
                failed(each.name, failure)
        calls = {each.name: [_call(layer, x) for layer in each.layers] for each in errors}
        timings = interleave(calls, seconds_each * len(calls), device, failed)
    for each, (error, limit) in errors.items():
        if each.name not in timings:
            continue
        yield Row(
            suite=suite,
            environment=environment,
            kernel=ours_name if each.name.startswith(OURS) else each.label or each.name,
            format=each.format,
            nested=weight.format.nested and each.dense is None,
            dtype=dtype_name,
            M=m,
            N=n,
            K=k,
            timing=timings[each.name],
            bytes=each.weight_bytes,
            ceiling_tb_per_s=ceiling,
            error=error,
            rounding_limit=limit,
            adapters=each.adapters,
            rank=each.rank,
        )


def _label(problem: Problem) -> str:
    """A row's name of our kernel, with the instruction set of CPU kernels."""
    name = plan(problem).kernel.name
    return f"halfbyte {name} {cpu_linear.instruction_set(problem)}" if name == "cpu_linear" else f"halfbyte {name}"


def _call(layer: Layer, x: Tensor) -> CALL:
    return lambda: layer(x)
