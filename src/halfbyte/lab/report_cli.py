"""The command `halfbyte report`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ..terminal import JsonOption, console, notices


def report_command(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Files of result rows (JSONL); by default benchmarks/results/*.jsonl.")
    ] = None,
    proof: Annotated[
        list[Path] | None, typer.Option(help="A document of halfbyte prove (JSON); may be given again.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="The page's title.")] = "halfbyte: results",
    as_json: JsonOption = False,
) -> None:
    """One HTML file, no network: results as plots, proofs, a nibble explorer, and one output tile step by step."""
    from .report import write_report
    from .report.rows import counted, default_files

    chosen = list(files) if files else default_files()
    if not as_json:
        notices.print(
            f"reading {', '.join(map(str, chosen)) or 'no rows'}", style="dim", highlight=False, soft_wrap=True
        )
    summary = write_report(out, chosen, proof or (), title)
    if as_json:
        print(json.dumps(asdict(summary) | {"path": str(out)}))
        return
    console.print(
        f"{out}: {counted(summary.figures, 'figure')}, {counted(summary.rows, 'row')}, "
        f"{counted(summary.proofs, 'proof')}, {summary.bytes:,} bytes",
        highlight=False,
        soft_wrap=True,
    )
