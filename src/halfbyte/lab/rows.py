"""Result rows: one JSON object a line, each saying where, when and from which commit it comes."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch
from torch import device as Device

from .. import __version__
from ..device import arch_of, name_of
from ..kernels import registry
from .measure import Timing


@dataclass(frozen=True)
class Environment:
    """Where and with what a row was measured."""

    device: str
    arch: str
    driver: str
    torch: str
    commit: str
    date: str

    @staticmethod
    def of(device: Device) -> Environment:
        date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        driver = _driver() if device.type == "cuda" else ""
        arch = torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else arch_of(device)
        return Environment(name_of(device), arch, driver, version("torch"), commit(), date)


@dataclass(frozen=True)
class Row:
    """One measurement of one kernel; peers' rows look the same. Times in microseconds, rates in TB/s."""

    suite: str
    environment: Environment
    kernel: str
    format: str
    nested: bool
    dtype: str
    M: int
    N: int
    K: int
    timing: Timing
    bytes: int
    ceiling_tb_per_s: float
    error: float
    rounding_limit: float
    adapters: int = 0
    rank: int = 0

    @property
    def tb_per_s(self) -> float:
        return self.bytes / self.timing.us / 1e6

    def record(self) -> dict[str, object]:
        """The row as a flat JSON object."""
        own = {key: value for key, value in asdict(self).items() if key not in ("environment", "timing")}
        flat = {"suite": self.suite, **asdict(self.environment), **own, **asdict(self.timing)}
        given_up = {} if registry.BATCH_INVARIANT else {"batch_invariant": False}
        return flat | {"tb_per_s": self.tb_per_s} | given_up


def append(path: Path, records: Iterable[dict[str, object]]) -> None:
    """Append records to a JSONL file, in one write."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write("".join(json.dumps(record) + "\n" for record in records))


@cache
def commit() -> str:
    """The git commit of this package's source, with a "+" where its files differ from it.

    $HALFBYTE_COMMIT if that is set, for copies outside git; without either, the version.
    """
    if named := os.environ.get("HALFBYTE_COMMIT"):
        return named
    source = Path(__file__).resolve().parents[1]
    try:
        head = _git(source, "rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git(source, "status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return f"halfbyte {__version__}"


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@cache
def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, check=True, capture_output=True, text=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return ""
