"""The page: its template, style and scripts (the files beside this one) filled with figures, tables and data."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment as Templates
from jinja2 import FileSystemLoader, StrictUndefined

from ... import __version__
from ..rows import Environment
from .explorer import explorer_data
from .plots import bandwidth_groups, roofline_groups, time_groups
from .proof import Proof, read_proof
from .rows import Row, by, counted, latest, of_suite, read_rows
from .tables import Table, other_suites, speedups
from .tile import tile_data

FOLDER = Path(__file__).parent
SCRIPTS = ("common.js", "explorer.js", "tile.js")


@dataclass(frozen=True)
class Summary:
    """What was written: bytes of the page, rows read, figures drawn, proofs shown."""

    path: Path
    bytes: int
    rows: int
    figures: int
    proofs: int


def write_report(
    out: Path, files: Sequence[Path], proofs: Sequence[Path] = (), title: str = "halfbyte: results"
) -> Summary:
    """Write the page of some files of rows and proofs.

    Raises what `read_rows` and `read_proof` raise, ModuleNotFoundError without matplotlib where there is something to
    draw, ValueError where `out` is a directory. Nothing is written then; else the file is whole at once.
    """
    if out.is_dir():
        raise ValueError(f"--out {out} is a directory; name the HTML file to write")
    rows = read_rows(files)
    chosen = latest(rows)
    shown = [read_proof(file, number) for number, file in enumerate(proofs)]
    groups = {
        "roofline": roofline_groups(chosen),
        "time": time_groups(chosen),
        "bandwidth": bandwidth_groups(chosen),
    }
    page = _render(
        title=title,
        files=[str(file.name) for file in files],
        rows_read=len(rows),
        speedups=speedups(of_suite(chosen, "linear", "layer")),
        others=other_suites(chosen),
        proofs=shown,
        environment=_environments(rows, shown),
        here=_here(),
        data=_embedded({"explorer": explorer_data(), "tile": tile_data(chosen)}),
        **groups,
    )
    _publish(out, page)
    figures = [group for found in (*groups.values(), *(proof.groups for proof in shown)) for group in found]
    return Summary(out, len(page.encode()), len(rows), sum(len(group.plots) for group in figures), len(shown))


def _render(**values: Any) -> str:
    templates = Templates(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script = "".join((FOLDER / name).read_text(encoding="utf-8") for name in SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    where = Environment.of(torch.device("cpu"))
    made = {"date": where.date[:16].replace("T", " ") + " UTC", "halfbyte": __version__, "commit": where.commit}
    style = (FOLDER / "page.css").read_text(encoding="utf-8")
    template = templates.get_template("page.html")
    return template.render(script=script, script_hash=f"sha256-{digest}", style=_Raw(style), made=made, **values)


class _Raw(str):
    """Text that goes into the page as it is."""

    def __html__(self) -> str:
        return self


def _embedded(data: object) -> str:
    """JSON that nothing inside of it can end the script element of."""
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")


def _publish(out: Path, page: str) -> None:
    """Written beside, then renamed: the file is never half there."""
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        beside.write_text(page, encoding="utf-8")
        os.replace(beside, out)
    finally:
        beside.unlink(missing_ok=True)


def _environments(rows: Sequence[Row], proofs: Sequence[Proof]) -> Table:
    """Where the rows and proofs were measured."""
    cells = []
    fields = ("device", "arch", "driver", "torch", "commit")
    for key, mine in by(rows, *fields).items():
        days = sorted({row["date"][:10] for row in mine})
        files = ", ".join(sorted({row["file"] for row in mine}))
        cells.append([*key, " to ".join(dict.fromkeys((days[0], days[-1]))), f"{counted(len(mine), 'row')} of {files}"])
    for proof in proofs:
        where = proof.environment
        cells.append([*(where[name] for name in fields), where["date"][:10], proof.name])
    columns = ["device", "arch", "driver", "torch", "commit", "date", "what"]
    return Table("Where it was measured", columns, [[str(cell) for cell in row] for row in cells], left=len(columns))


def _here() -> Table:
    """Where this page was made."""
    where = asdict(Environment.of(torch.device("cpu")))
    where |= {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    return Table("Where this page was made", ["", ""], [[name, str(value)] for name, value in where.items() if value],
                 left=2)  # fmt: skip
