"""What result rows say: each problem beside its peers, layers added up, and where we are slower than what we replace.

A case is our row and the peers' rows that follow it, as `bench linear` and `bench layer` write them: one run, measured
in turn. Of several runs of a problem the newest that measured peers counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .layer import MULTIPLIES
from .layer_adapters import PATH

Record = dict[str, Any]
SUITES = ("linear", "layer")
REPLACED = ("bitsandbytes", "dequantise")  # what halfbyte must not be slower than
PEERS = (*REPLACED, "dense", "humming")
RUN = ("device", "commit", "date")
PROBLEM = ("dtype", "M", "batch_invariant", "N", "K", "adapters", "rank")


def peer_of(kernel: str) -> str:
    """Which peer a row's kernel is: one of PEERS, or the name before its version."""
    if " + " in kernel:
        return "dequantise"
    name = kernel.partition(" ")[0]
    return "dense" if name in ("cublas", "torch") else name


def rows_of_x(row: Record) -> str:
    """M, and whether a row's bits depended on it there."""
    return f"{row['M']}" if row["batch_invariant"] else f"{row['M']}, bits depend on it"


@dataclass(frozen=True)
class Case:
    """Our row of a problem, and the peers' of the same run. Times in microseconds."""

    ours: Record
    peers: list[Record] = field(default_factory=list)

    @property
    def us(self) -> float:
        return float(self.ours["us"])

    @property
    def floor_us(self) -> float:
        """The bytes of our row at that run's read ceiling."""
        return float(self.ours["bytes"] / self.ours["ceiling_tb_per_s"] / 1e6)

    def peer_us(self, peer: str) -> float | None:
        """The fastest row of a peer, or None where it has none."""
        return min((float(row["us"]) for row in self.peers if peer_of(row["kernel"]) == peer), default=None)

    @property
    def replaced_us(self) -> float | None:
        """The faster of bitsandbytes and dequantise-and-multiply; None where neither was measured."""
        return min((us for peer in REPLACED if (us := self.peer_us(peer)) is not None), default=None)

    @property
    def violates(self) -> bool:
        """Whether ours is slower than what it replaces."""
        return self.replaced_us is not None and self.us > self.replaced_us


@dataclass(frozen=True)
class Layer:
    """The multiplies of a model's decoder layer at one M, of one run."""

    cases: tuple[Case, ...]

    @property
    def ours(self) -> Record:
        """Our row of the first multiply: what all have in common."""
        return self.cases[0].ours

    @property
    def us(self) -> float:
        return sum(case.us for case in self.cases)

    @property
    def floor_us(self) -> float:
        return sum(case.floor_us for case in self.cases)

    def peer_us(self, peer: str) -> float | None:
        """A peer's sum, or None where a multiply has no row of it."""
        times = [us for case in self.cases if (us := case.peer_us(peer)) is not None]
        return sum(times) if len(times) == len(self.cases) else None


def read(paths: Iterable[Path]) -> Iterator[Record]:
    """The rows of JSONL files. Raises ValueError for a line that is no row, naming file and line."""
    for path in paths:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}:{number}: is no JSON object: {error}") from None
            if not isinstance(row, dict) or "suite" not in row:
                raise ValueError(f"{path}:{number}: is no result row, it has no suite")
            yield row


def cases(rows: Iterable[Record]) -> list[Case]:
    """The cases of the suites `linear` and `layer`, in the rows' order. Rows of peers without ours before are left."""
    found: list[Case] = []
    same = (*RUN, *PROBLEM)
    for each in rows:
        if each["suite"] not in SUITES:
            continue
        row: Record = {"batch_invariant": True, **each}  # rows say so only where it was given up
        if row["kernel"].startswith("halfbyte "):
            found.append(Case(row))
        elif found and all(found[-1].ours[key] == row[key] for key in same):
            found[-1].peers.append(row)
    return found


def shapes(all_cases: Sequence[Case]) -> list[Case]:
    """The newest case with peers of each problem on each device, by device, format, dtype and shape."""
    newest: dict[tuple[Any, ...], Case] = {}
    for case in sorted(all_cases, key=lambda case: (bool(case.peers), case.ours["date"])):
        newest[_key(case, "format", *PROBLEM)] = case
    order = ("format", "dtype", "adapters", "rank", "N", "K", "M", "batch_invariant")
    return sorted(newest.values(), key=lambda case: _key(case, *order))


def layers(all_cases: Sequence[Case]) -> list[Layer]:
    """Of each model, format, dtype and M on each device, the newest run with peers that has all four multiplies."""
    runs: dict[tuple[Any, ...], dict[str, Case]] = {}
    for case in all_cases:
        if case.ours["suite"] == "layer":
            key = _key(case, "model", "format", "dtype", "adapters", "rank", "M", "batch_invariant", "commit", "date")
            runs.setdefault(key, {})[case.ours["multiply"]] = case
    whole = [
        Layer(tuple(found[multiply] for multiply in MULTIPLIES))
        for found in runs.values()
        if found.keys() == set(MULTIPLIES)
    ]
    newest: dict[tuple[Any, ...], Layer] = {}
    for layer in sorted(whole, key=lambda layer: (bool(layer.cases[0].peers), layer.ours["date"])):
        newest[_key(layer, "model", "format", "dtype", "adapters", "rank", "M", "batch_invariant")] = layer
    return [newest[key] for key in sorted(newest)]


@dataclass(frozen=True)
class WithAdapters:
    """A layer with adapters, and the same without them, measured in turn with it."""

    layer: Layer
    base: Layer

    @property
    def added(self) -> float:
        """Time over that of the base, as a share of it."""
        return self.layer.us / self.base.us - 1

    def path_us(self, base: str) -> float | None:
        """PEFT's path over a base ("halfbyte", "bitsandbytes"); None where a multiply has no row of it."""
        names = [row["kernel"] for row in self.layer.cases[0].peers if row["kernel"].startswith(f"{PATH} on {base}")]
        if not names:
            return None
        found = [row["us"] for case in self.layer.cases for row in case.peers if row["kernel"] == names[0]]
        return sum(found) if len(found) == len(self.layer.cases) else None


def with_adapters(all_cases: Sequence[Case]) -> list[WithAdapters]:
    """The newest layer of each mix of adapters, beside the base of the same run; mixes without one are left out."""
    bases: dict[tuple[Any, ...], dict[str, Case]] = {}
    for case in all_cases:
        if case.ours["suite"] == "layer" and not case.ours["adapters"]:
            bases.setdefault(_run(case), {})[case.ours["multiply"]] = case
    found = []
    for layer in layers(all_cases):
        base = bases.get(_run(layer), {}) if layer.ours["adapters"] else {}
        if base.keys() == set(MULTIPLIES):
            found.append(WithAdapters(layer, Layer(tuple(base[multiply] for multiply in MULTIPLIES))))
    return found


def _run(each: Case | Layer) -> tuple[Any, ...]:
    return _key(each, "model", "format", "dtype", "M", "commit", "date")


def _key(each: Case | Layer, *fields: str) -> tuple[Any, ...]:
    return (each.ours["device"], *(each.ours[name] for name in fields))
