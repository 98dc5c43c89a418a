"""The suite `ladder`: the kernels of lab/cuda beside cuBLAS and the library, over sizes, shapes and the L2 boundary.

All kernels of a point are measured in one interleaved run, in fp16, with one row of x. Weights are cold (calls rotate
over copies that exceed the L2 three times) or warm (one copy, again and again).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .. import reference
from ..device import arch_of, cache_bytes
from ..formats import PackedWeight, get_format, quantize
from ..kernels import Problem, nvrtc
from ..ops import linear
from ..plan import plan
from . import ladder_launch
from .ladder_rungs import RUNGS, Rung
from .ladder_weights import PlanarQ4, exact_dense, exact_q4, quantize_q4
from .measure import CALL, copies_needed, copy_ceiling, interleave, read_ceiling
from .rows import Environment, Row

LIBRARY_FORMAT = "nf4-64"  # 4.5 bits a weight, as planar Q4 has
SIDES = (1024, 2048, 4096, 8192, 16384, 32768)
SHAPE_WEIGHTS = 1 << 28
SHAPE_KS = (2048, 4096, 8192, 16384, 32768, 65536, 131072)
L2_K = 4096
L2_SHARES = (0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 8.0)  # of the L2, that the fp16 weights would take
SWEEPS = ("square", "l2", "shape")


@dataclass(frozen=True)
class Point:
    """A matrix to measure: which sweep it belongs to, and whether its weights are cold."""

    sweep: str
    n: int
    k: int
    cold: bool


def points(sweeps: Sequence[str], l2_bytes: int) -> list[Point]:
    """The points of the sweeps named, of "square", "l2" and "shape"; those that matter most come first.

    Raises ValueError for an unknown sweep.
    """
    if unknown := set(sweeps) - set(SWEEPS):
        raise ValueError(f"unknown sweep '{sorted(unknown)[0]}'; known: {', '.join(SWEEPS)}")
    rows = [round(share * l2_bytes / (2 * L2_K) / 16) * 16 for share in L2_SHARES]
    all_points = [
        *(Point("square", side, side, True) for side in reversed(SIDES)),
        *(Point("l2", n, L2_K, cold) for n in rows for cold in (False, True)),
        *(Point("shape", SHAPE_WEIGHTS // k, k, True) for k in SHAPE_KS),
        *(Point("square", side, side, False) for side in reversed(SIDES)),
    ]
    return [point for point in all_points if point.sweep in sweeps]


@dataclass(frozen=True)
class Candidate:
    """A kernel on one point. calls: one on each copy of its weights; each writes `y`. exact: float64 [N]."""

    kernel: str
    rung: str
    format: str
    calls: Sequence[CALL]
    y: Callable[[], Tensor]
    exact: Tensor
    bytes: int


def bench(
    chosen: Sequence[Point],
    device: torch.device,
    seconds_each: float = 0.04,
    within_s: float = float("inf"),
    on_note: Callable[[str], None] = lambda note: None,
) -> Iterator[list[dict[str, object]]]:
    """The rows of one point after the other: flat JSON objects, see `rows.Row`, and with them

    sweep, cache ("cold" or "warm"), rung (its stem; "cublas" and "library" for the two others), l2_bytes,
    copy_tb_per_s (the ceiling of a copy, bytes read and written).

    seconds_each: time for each kernel of a point. within_s: after the first point, none is begun later than this after
    the start. on_note hears of kernels and points that are left out.

    Raises ValueError without a CUDA device or the CUDA packages.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        raise ValueError("lab ladder needs a CUDA GPU; its figures can be drawn from rows anywhere: --figures ROWS")
    if reason := nvrtc.missing():
        raise ValueError(f"lab ladder {reason}")
    start = time.monotonic()
    device = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
    environment = Environment.of(device)
    read, copy = read_ceiling(device) / 1e12, copy_ceiling(device) / 1e12
    torch.cuda.empty_cache()
    for number, point in enumerate(chosen):
        if number and time.monotonic() - start > within_s:
            on_note(f"{len(chosen) - number} points left out: {within_s:g} s are over")
            return
        extra = {
            "sweep": point.sweep,
            "cache": "cold" if point.cold else "warm",
            "l2_bytes": cache_bytes(device),
            "copy_tb_per_s": copy,
        }
        with torch.cuda.device(device):
            rows = _measure(point, device, seconds_each, environment, read, on_note)
        yield [row.record() | {"rung": rung} | extra for rung, row in rows]
        torch.cuda.empty_cache()


def _measure(
    point: Point,
    device: torch.device,
    seconds_each: float,
    environment: Environment,
    ceiling: float,
    on_note: Callable[[str], None],
) -> list[tuple[str, Row]]:
    candidates = _candidates(point, device, on_note)
    errors = {}
    with torch.inference_mode():
        for each in candidates:
            each.calls[0]()
            errors[each.rung] = reference.relative_error(each.y(), each.exact)
        timings = interleave({each.rung: each.calls for each in candidates}, seconds_each * len(candidates), device)
    return [
        (
            each.rung,
            Row(
                suite="ladder",
                environment=environment,
                kernel=each.kernel,
                format=each.format,
                nested=False,
                dtype="fp16",
                M=1,
                N=point.n,
                K=point.k,
                timing=timings[each.rung],
                bytes=each.bytes,
                ceiling_tb_per_s=ceiling,
                error=errors[each.rung],
                rounding_limit=reference.rounding_limit(each.exact, torch.float16),
            ),
        )
        for each in candidates
    ]


class _Operands:
    """A point's matrix in each format, with as many copies as a point needs, and x.

    Made outside of inference mode: the library starts a kernel early only where it sees that the weight is unchanged.
    """

    def __init__(self, point: Point, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(point.n + point.k)
        self.x = torch.randn(point.k, device=device, generator=generator).half()
        self.dense = torch.randn(point.n, point.k, device=device, generator=generator, dtype=torch.float16)
        self._exceed = cache_bytes(device) if point.cold else 0

    def copies(self, nbytes: int) -> range:
        """One round of the copies of a weight of `nbytes`; the first is the weight itself."""
        return range(copies_needed(nbytes, self._exceed))

    @cached_property
    def denses(self) -> list[Tensor]:
        return [self.dense.clone() if i else self.dense for i in self.copies(self.dense.nbytes)]

    @cached_property
    def q4s(self) -> list[PlanarQ4]:
        first = quantize_q4(self.dense)
        return [first.clone() if i else first for i in self.copies(first.nbytes)]

    @cached_property
    def packed(self) -> list[PackedWeight]:
        first = quantize(self.dense, LIBRARY_FORMAT)
        return [_clone(first) if i else first for i in self.copies(first.nbytes)]

    @cached_property
    def exact_dense(self) -> Tensor:
        return exact_dense(self.x, self.dense)

    @cached_property
    def exact_q4(self) -> Tensor:
        return exact_q4(self.x, self.q4s[0])


def _candidates(point: Point, device: torch.device, on_note: Callable[[str], None]) -> list[Candidate]:
    """The rungs that can take the point, cuBLAS, and the library."""
    operands = _Operands(point, device)
    found = []
    for rung in RUNGS:
        if reason := ladder_launch.reason_against(rung, point.k, device):
            on_note(f"left out at {point.n} × {point.k}: {reason}")
        else:
            found.append(_rung(rung, operands))
    return [*found, _cublas(operands), _library(operands, point, device)]


def _rung(rung: Rung, operands: _Operands) -> Candidate:
    weights: Sequence[PlanarQ4 | Tensor] = operands.q4s if rung.q4 else operands.denses
    y = operands.x.new_full((weights[0].shape[0],), float("nan"))
    calls = [ladder_launch.bind(rung, weight, operands.x, y) for weight in weights]
    exact = operands.exact_q4 if rung.q4 else operands.exact_dense
    key = "q4-planar-32" if rung.q4 else "fp16"
    return Candidate(f"halfbyte {rung.stem}", rung.stem, key, calls, lambda: y, exact, weights[0].nbytes)


def _cublas(operands: _Operands) -> Candidate:
    x = operands.x.unsqueeze(0)
    y = x.new_empty(1, operands.dense.shape[0])
    calls: list[CALL] = [lambda w=weight: torch.mm(x, w.t(), out=y) for weight in operands.denses]  # type: ignore[misc]
    name = f"cublas {torch.__version__}"
    return Candidate(name, "cublas", "fp16", calls, lambda: y[0], operands.exact_dense, operands.dense.nbytes)


def _library(operands: _Operands, point: Point, device: torch.device) -> Candidate:
    """`halfbyte.linear` on the format of the library that has as many bytes a weight as planar Q4."""
    x, first = operands.x.unsqueeze(0), operands.packed[0]
    chosen = plan(Problem(get_format(LIBRARY_FORMAT), torch.float16, 1, point.n, point.k, arch_of(device)))
    last: list[Tensor] = []

    def call(weight: PackedWeight) -> object:
        last[:] = [linear(x, weight)[0]]
        return last

    calls: list[CALL] = [lambda w=weight: call(w) for weight in operands.packed]  # type: ignore[misc]
    exact = reference.linear(x, first)[0]
    name = f"halfbyte {chosen.kernel.name}"
    return Candidate(name, "library", LIBRARY_FORMAT, calls, lambda: last[0], exact, first.nbytes)


def _clone(weight: PackedWeight) -> PackedWeight:
    return PackedWeight(weight.format, weight.shape, {name: part.clone() for name, part in weight.parts.items()})
