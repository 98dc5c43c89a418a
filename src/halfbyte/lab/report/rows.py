"""Result rows for the page: read, checked, and of several measurements of one thing the last."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
FOLDER = Path("benchmarks/results")

_ENVIRONMENT = ("suite", "device", "arch", "driver", "torch", "commit", "date", "kernel")
_LAYER = dict.fromkeys((*_ENVIRONMENT, "format", "dtype"), "text") | {
    **dict.fromkeys(("M", "N", "K", "bytes", "us", "us_p20", "us_p80"), "positive"),
    **dict.fromkeys(("tb_per_s", "ceiling_tb_per_s", "error", "rounding_limit"), "number"),
}
# What a row of each suite must hold, as docs/measuring.md describes it.
SUITES: dict[str, dict[str, str]] = {
    "linear": _LAYER,
    "linear-warm": _LAYER,
    "layer": _LAYER,
    "prove": _LAYER,
    "overhead": _LAYER,
    "nf4-16-case": _LAYER,
    "ladder": _LAYER
    | {"rung": "text", "sweep": "text", "cache": "text", "l2_bytes": "positive", "copy_tb_per_s": "number"},
    "nf4-16": dict.fromkeys((*_ENVIRONMENT, "peer"), "text") | {"geomean_speedup": "positive", "cases": "positive"},
    "serve": dict.fromkeys((*_ENVIRONMENT, "format", "dtype"), "text")
    | {"users": "positive", "tokens_per_s": "positive", "tpot_ms": "positive", "spread": "number"},
}


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "text": ("a text", lambda value: isinstance(value, str)),
    "number": ("a number", _is_number),
    "positive": ("a number above 0", lambda value: _is_number(value) and value > 0),
}


def default_files(folder: Path = FOLDER) -> list[Path]:
    """The files of rows in benchmarks/results under the current directory, by name; none where there is no such."""
    return sorted(folder.glob("*.jsonl"))


def read_rows(files: Iterable[Path]) -> list[Row]:
    """The rows of JSONL files, each with the file's name as "file".

    Raises FileNotFoundError for a file that is not there, ValueError that names file and line for what is no JSON
    object, a suite that is not in SUITES, a field that is missing or of another kind.
    """
    return [row for file in files for row in _read(file)]


def _read(file: Path) -> list[Row]:
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file of rows; halfbyte bench … --out {file} writes one")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not a JSONL file: {error}") from None
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        where = f"{file}, line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where} is not JSON: {error}; a row is one JSON object on a line of its own") from None
        check_row(row, where)
        rows.append(row | {"file": file.name})
    return rows


def check_row(row: object, where: str) -> None:
    """Raise ValueError, beginning with `where`, unless `row` is one that SUITES describes."""
    if not isinstance(row, dict):
        raise ValueError(f"{where} holds {type(row).__name__}, where a row is a JSON object")
    suite = row.get("suite")
    if not isinstance(suite, str) or suite not in SUITES:
        raise ValueError(f"{where} is of an unknown suite {suite!r}; known: {', '.join(SUITES)}")
    for field, kind in SUITES[suite].items():
        words, fits = _KINDS[kind]
        if field not in row:
            raise ValueError(f"{where}: a row of suite '{suite}' without the field '{field}'")
        if not fits(row[field]):
            raise ValueError(f"{where}: '{field}' must be {words}, got {row[field]!r}")


_POINT = (
    *("suite", "device", "kernel", "format", "dtype", "M", "N", "K", "adapters", "rank"),
    *("rung", "sweep", "cache", "peer"),
    *("users", "engine", "model", "layers", "compiled", "prompt_tokens", "new_tokens", "adapters_in_use"),
)


def latest(rows: Iterable[Row]) -> list[Row]:
    """Of rows that measure the same thing the one of the latest date; of equal dates the last read."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        point = tuple(row.get(field) for field in _POINT)
        if point not in found or row["date"] >= found[point]["date"]:
            found[point] = row
    return list(found.values())


def of_suite(rows: Iterable[Row], *suites: str) -> list[Row]:
    """The rows of some suites."""
    return [row for row in rows if row["suite"] in suites]


def is_ours(row: Row) -> bool:
    return str(row["kernel"]).startswith("halfbyte")


def label_of(row: Row) -> str:
    """Kernel, format (a dense layer's name says what it is), and adapters where there are some."""
    words = [row["kernel"]] if row["format"] == row["dtype"] else [row["kernel"], row["format"]]
    if row.get("adapters"):
        words.append(f"{row['adapters']} adapters of rank {row['rank']}")
    return ", ".join(words)


def by(rows: Iterable[Row], *fields: str) -> dict[tuple[Any, ...], list[Row]]:
    """Rows grouped by the values of some fields, groups in order of first appearance."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[field] for field in fields), []).append(row)
    return groups


def counted(number: int, thing: str) -> str:
    """As in "1 row" and "2 rows"."""
    return f"{number:,} {thing}" + ("" if number == 1 else "s")


def provenance(rows: Sequence[Row]) -> str:
    """In words: commits, days and files that rows come from."""
    commits = ", ".join(dict.fromkeys(row["commit"] for row in sorted(rows, key=lambda row: row["date"])))
    days = sorted({row["date"][:10] for row in rows})
    span = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    files = ", ".join(sorted({row["file"] for row in rows if "file" in row}))
    return f"{counted(len(rows), 'row')} of commit {commits}, {span}" + (f"; {files}" if files else "")
