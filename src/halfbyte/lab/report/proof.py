"""A proof (the JSON of `halfbyte prove`) for the page: the tables of the terminal, and figures of its numbers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from ..prove import SCHEMA
from ..prove_page import show
from .plots import Group, error_group, time_groups
from .rows import check_row
from .tables import Table


@dataclass
class Proof:
    """What the page shows of one document."""

    name: str
    inside: bool
    verdict: str
    lines: list[str]
    tables: list[Table]
    groups: list[Group] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)


def read_proof(file: Path, number: int) -> Proof:
    """Read and lay out one document; `number` keeps the ids of its figures apart from those of others.

    Raises FileNotFoundError where there is no such file, ValueError for one that is no finished proof of this schema.
    """
    document = _load(file)
    try:
        for shape in document.get("speed", []):
            for row in shape["rows"]:
                check_row(row, f"{file}, speed of {shape['layer']}")
        printed = _Printed()
        show(document, printed)
        groups = [error_group(document, f"proof{number}"), *_speed(document, number)]
        *lines, verdict = printed.lines
        inside = bool(document["summary"]["all_within_contract"])
        return Proof(file.name, inside, verdict, lines, printed.tables, groups, document["environment"])
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{file} is no whole document of halfbyte prove: {type(error).__name__} {error}") from error


def _load(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise FileNotFoundError(f"--proof: no such file: {file}; halfbyte prove MODEL --out {file} writes it")
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"--proof: {file} is not JSON: {error}") from None
    if not isinstance(document, dict) or not isinstance(document.get("run"), dict):
        raise ValueError(f"--proof: {file} is not a document of halfbyte prove")
    if "summary" not in document:
        raise ValueError(f"--proof: {file} is of an unfinished run: go on with halfbyte prove … --resume")
    if document.get("schema") != SCHEMA:
        raise ValueError(f"--proof: {file} is of schema {document.get('schema')!r}, this halfbyte reads {SCHEMA}")
    return document


def _speed(document: dict[str, Any], number: int) -> list[Group]:
    rows = [row for shape in document.get("speed", []) for row in shape["rows"]]
    return time_groups(rows, f"proof{number}-time")


class _Printed(Console):
    """Keeps what the terminal's page prints, as lines and tables."""

    def __init__(self) -> None:
        super().__init__(file=StringIO())
        self.lines: list[str] = []
        self.tables: list[Table] = []

    def print(self, *objects: Any, **how: Any) -> None:
        for each in objects:
            if isinstance(each, RichTable):
                self.tables.append(_table(each))
            elif words := _plain(each):
                self.lines.append(words)


def _plain(words: Any) -> str:
    return Text.from_markup(str(words)).plain.replace("\n", " ")


def _table(table: RichTable) -> Table:
    columns = [[_plain(cell) for cell in column.cells] for column in table.columns]
    rows = [list(row) for row in zip(*columns, strict=True)]
    left = sum(column.justify != "right" for column in table.columns)
    return Table(_plain(table.title or ""), [_plain(column.header) for column in table.columns], rows, left)
