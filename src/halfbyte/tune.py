"""Which of a kernel's configurations is fastest, found by measuring and kept in tables.

tuned/<arch>.json holds an entry for each problem that was tuned: format, dtype, M, N, K, the kernel and its settings,
and where, when and by how much they won. Such a table ships with the package; one in $HALFBYTE_TUNED is read after it,
and is the one that tuning writes if that is set. M stands for all M of its bucket (1, 2, 3-4, 5-8 …), the largest.

A table only chooses among the configurations that a kernel itself calls legal for a problem: an entry for another
kernel than the planned one, or with settings that the kernel no longer has, is not used. Nothing runs at import.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from .kernels import Kernel, Problem
from .kernels.registry import DTYPE_NAMES, Configuration, Settings

SHIPPED = Path(__file__).parent / "tuned"
FOLDER_VARIABLE = "HALFBYTE_TUNED"
Key = tuple[str, str, int, int, int]  # format, dtype, M, N, K
SURE = 0.01  # by which part of its time a configuration must beat the kernel's own choice to take its place

# Seconds a call of each kernel on a problem, measured in turn; infinity for one that failed.
Measure = Callable[[Problem, Sequence[Kernel]], Sequence[float]]


@dataclass(frozen=True)
class Stamp:
    """Where and when an entry was measured."""

    device: str
    driver: str
    commit: str
    date: str


@dataclass(frozen=True)
class Entry:
    """The fastest configuration of a problem. Times in microseconds; the runner-up's are None where there was none.

    measured: how many configurations were. gain: by which part of its time the kernel's own choice was slower when both
    were measured once more; 0 where it is that choice.
    """

    format: str
    dtype: str
    M: int
    N: int
    K: int
    kernel: str
    settings: Settings
    us: float
    runner_up: Settings | None
    runner_up_us: float | None
    measured: int
    gain: float
    device: str
    driver: str
    commit: str
    date: str

    @property
    def key(self) -> Key:
        return self.format, self.dtype, self.M, self.N, self.K

    @property
    def margin(self) -> float | None:
        """By which part of its time the runner-up was slower."""
        return None if self.runner_up_us is None else self.runner_up_us / self.us - 1

    def record(self) -> dict[str, Any]:
        """The entry as a JSON object."""
        runner_up = None if self.runner_up is None else dict(self.runner_up)
        return asdict(self) | {"settings": dict(self.settings), "runner_up": runner_up, "margin": self.margin}

    @staticmethod
    def of(record: Mapping[str, Any]) -> Entry:
        """The entry of a JSON object. Raises KeyError, TypeError or AttributeError for any other."""
        values = {name: record[name] for name in Entry.__dataclass_fields__}
        runner_up = values["runner_up"]
        values["settings"] = _settings(values["settings"])
        values["runner_up"] = None if runner_up is None else _settings(runner_up)
        return Entry(**values)


def _settings(record: Mapping[str, int]) -> Settings:
    return tuple(sorted(record.items()))


def bucket(m: int) -> int:
    """The largest M of the bucket that m is in: 1, 2, 4, 8 …"""
    return 1 << (m - 1).bit_length() if m > 0 else 1


def key_of(problem: Problem) -> Key:
    """What a problem is looked up by in the table of its architecture."""
    names = {dtype: name for name, dtype in DTYPE_NAMES.items()}
    return problem.format.key, names[problem.dtype], bucket(problem.m), problem.n, problem.k


def path_of(arch: str) -> Path:
    """Where tuning writes the table of an architecture."""
    return Path(os.environ.get(FOLDER_VARIABLE) or SHIPPED) / f"{arch}.json"


@cache
def table(arch: str) -> Mapping[Key, Entry]:
    """The entries of an architecture: those that ship, then those of $HALFBYTE_TUNED. Read once; see `forget`.

    Raises ValueError for a file that is no such table.
    """
    return read(SHIPPED / f"{arch}.json") | read(path_of(arch))


def forget() -> None:
    """Read tables again when they are next asked for. Plans that were made keep theirs."""
    table.cache_clear()


def read(path: Path) -> dict[Key, Entry]:
    """The entries of a table; none where there is no file. Raises ValueError, naming the file, where it is no table."""
    if not path.exists():
        return {}
    try:
        entries = [Entry.of(record) for record in json.loads(path.read_text())["entries"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no table of tuned configurations ({error!r}); delete it, or tune again") from None
    return {entry.key: entry for entry in entries}


def write(path: Path, entries: Mapping[Key, Entry]) -> None:
    """Write a table, an entry a line in the order of keys: beside its place, then renamed into it."""
    lines = ",\n".join(json.dumps(entries[key].record()) for key in sorted(entries))
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(f'{{"entries": [\n{lines}\n]}}\n')
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def entry_for(problem: Problem, kernel: Kernel) -> Entry | None:
    """What the tables hold of a problem that `kernel` serves, if the kernel still calls it legal."""
    return _usable(table(problem.arch), problem, kernel) if kernel.configurations is not None else None


def _usable(entries: Mapping[Key, Entry], problem: Problem, kernel: Kernel) -> Entry | None:
    """The entry of a problem, if it is of this kernel and of a configuration that is legal."""
    entry = entries.get(key_of(problem))
    if entry is None or entry.kernel != kernel.name or kernel.configurations is None:
        return None
    return entry if any(each.settings == entry.settings for each in kernel.configurations(problem)) else None


def tune(
    problems: Sequence[tuple[Problem, Kernel]],
    measure: Measure,
    stamp: Stamp,
    most: int = 12,
    again: bool = False,
) -> Iterator[tuple[Problem, Entry | None]]:
    """Measure configurations of each problem's kernel and write each winner to its architecture's table at once.

    Yields every problem with its entry: None where the kernel has no choice of configurations. A problem of which the
    table to be written has a usable entry is skipped, with that, unless `again`: so a run that broke off goes on where
    it was. most: how many configurations are measured, the best predicted first.

    Raises RuntimeError inside CUDA graph capture: tuning runs, waits and allocates.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "halfbyte.tune: cannot tune inside CUDA graph capture; tune before, or leave it to the model"
        )
    for problem, kernel in problems:
        path = path_of(problem.arch)
        entries = read(path)
        entry = None if again else _usable(entries, problem, kernel)
        if entry is None and kernel.configurations is not None:
            entry = search(problem, kernel, kernel.configurations(problem)[:most], measure, stamp)
            write(path, entries | {entry.key: entry})
            forget()
        yield problem, entry


def search(
    problem: Problem, kernel: Kernel, configurations: Sequence[Configuration], measure: Measure, stamp: Stamp
) -> Entry:
    """Measure configurations of a kernel, its own choice first, which must work: the fastest as an entry.

    The fastest of many may have been lucky. So it is measured again, between two turns of the kernel's own choice, and
    takes its place only where it is faster than the better of them by SURE.
    """
    configured = [kernel.configured(each.settings) for each in configurations]
    times = measure(problem, configured)
    best, gain = min(range(len(times)), key=times.__getitem__), 0.0
    if best:
        before, seconds, after = measure(problem, [configured[0], configured[best], configured[0]])
        gain = min(before, after) / seconds - 1
        if gain < SURE:
            best, gain = 0, 0.0
    others = [(seconds, number) for number, seconds in enumerate(times) if number != best and math.isfinite(seconds)]
    second = min(others, default=None)
    return Entry(
        *key_of(problem),
        kernel=kernel.name,
        settings=configurations[best].settings,
        us=times[best] * 1e6,
        runner_up=None if second is None else configurations[second[1]].settings,
        runner_up_us=None if second is None else second[0] * 1e6,
        measured=1 + len(others),
        gain=gain,
        **asdict(stamp),
    )
