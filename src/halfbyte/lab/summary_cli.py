"""The command `halfbyte bench summary`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.table import Table

from ..terminal import JsonOption, console

if TYPE_CHECKING:
    from .summary import Case, Layer, WithAdapters

E = TypeVar("E", bound="Case | Layer")
RESULTS = Path("benchmarks/results")
COLUMNS = ("halfbyte", "floor", "bitsandbytes", "dequantise + dense", "dense", "humming int4")
BASES = ("halfbyte", "bitsandbytes")  # under PEFT's path
FILES_HELP = f"JSONL files of rows; by default {RESULTS}/*.jsonl."


def bench_summary_command(
    files: Annotated[list[Path] | None, typer.Argument(help=FILES_HELP)] = None,
    device: Annotated[str, typer.Option(help="Only rows whose device's name contains this, as h200.")] = "",
    strict: Annotated[bool, typer.Option(help="Exit status 1 if halfbyte is slower than what it replaces.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Tables from rows: layers added up, single shapes, and where halfbyte is slower than what it replaces."""
    from .summary import cases, layers, read, shapes, with_adapters

    paths = files or sorted(RESULTS.glob("*.jsonl"))
    if not paths:
        raise ValueError(f"no {RESULTS}/*.jsonl here; name files of rows, as `halfbyte bench layer --out` writes them")
    found = [case for case in cases(read(paths)) if device.lower() in case.ours["device"].lower()]
    if not found:
        raise ValueError(f"no row of halfbyte in the suites linear and layer, among {', '.join(map(str, paths))}")
    alone = [case for case in found if not case.ours["adapters"]]
    single, mixes = shapes(alone), with_adapters(found)
    if as_json:
        layer_records = [_record(layer) | {"model": layer.ours["model"]} for layer in layers(alone)]
        shape_records = [_record(case) | {key: case.ours[key] for key in ("N", "K", "kernel")} for case in single]
        violations = [record for record, case in zip(shape_records, single, strict=True) if case.violates]
        mix_records = [_mix_record(mix) for mix in mixes]
        records = {"layers": layer_records, "adapters": mix_records, "shapes": shape_records, "violations": violations}
        print(json.dumps(records))
    else:
        _show_layers(layers(alone))
        _show_adapters(mixes)
        _show_shapes(single)
        _show_rule(single)
    if strict and any(case.violates for case in single):
        raise SystemExit(1)


def _record(each: Case | Layer) -> dict[str, Any]:
    from .summary import PEERS

    common = ("device", "commit", "date", "format", "dtype", "M", "batch_invariant", "adapters", "rank")
    times = {f"{peer}_us": each.peer_us(peer) for peer in PEERS}
    return {key: each.ours[key] for key in common} | {"us": each.us, "floor_us": each.floor_us, **times}


def _mix_record(mix: WithAdapters) -> dict[str, Any]:
    common = ("device", "commit", "date", "model", "format", "dtype", "M", "adapters", "rank")
    paths = {f"peft_path_{base}_us": mix.path_us(base) for base in BASES}
    own = {"us": mix.layer.us, "base_us": mix.base.us, "added": mix.added}
    return {key: mix.layer.ours[key] for key in common} | own | paths


def _show_adapters(found: Sequence[WithAdapters]) -> None:
    """A table for each model, format and dtype: a line for each mix of adapters and M."""
    same = ("device", "model", "format", "dtype")
    for _, alike in groupby(found, key=lambda mix: [mix.layer.ours[key] for key in same]):
        lines = list(alike)
        row = lines[0].base.ours
        title = f"{row['model']}, one layer with LoRA adapters: sum of its four multiplies, µs; {_where(row)}"
        paths = [f"PEFT's path on {base}" for base in BASES]
        table = Table("adapters", "rank", "M", "without", "halfbyte", "added", *paths, "commit", title=title)
        table.title_justify = "left"
        for column in table.columns[:-1]:
            column.justify = "right"
        for mix in lines:
            ours = mix.layer.ours
            times = ["" if (us := mix.path_us(base)) is None else f"{us:,.1f}" for base in BASES]
            mixed = (str(ours["adapters"]), str(ours["rank"]), str(ours["M"]))
            table.add_row(
                *mixed, f"{mix.base.us:,.1f}", f"{mix.layer.us:,.1f}", f"{mix.added:+.1%}", *times, ours["commit"]
            )
        console.print(table)


def _show_layers(found: Sequence[Layer]) -> None:
    """A table for each model, format and dtype: a line for each M."""
    from .summary import rows_of_x

    for alike in _alike(found, "device", "model", "format", "dtype"):
        row = alike[0].ours
        title = f"{row['model']}, one layer: sum of its four multiplies, µs; {_where(row)}"
        ends = [((rows_of_x(layer.ours),), (layer.ours["commit"],)) for layer in alike]
        _show(title, ("M",), ("commit",), alike, ends)


def _show_shapes(found: Sequence[Case]) -> None:
    """A table for each device, format and dtype: a line for each shape and M."""
    from .summary import rows_of_x

    for alike in _alike(found, "device", "format", "dtype", "adapters", "rank"):
        ends = []
        for case in alike:
            row, mark = case.ours, " [red]SLOWER[/red]" if case.violates else ""
            ends.append(((f"{row['N']} × {row['K']}", rows_of_x(row)), (row["commit"], row["kernel"] + mark)))
        title = f"Single multiplies, µs; {_where(alike[0].ours)}"
        _show(title, ("N × K", "M"), ("commit", "kernel"), alike, ends)


def _alike(found: Sequence[E], *named: str) -> list[list[E]]:
    """Neighbours that agree in these fields."""
    return [list(group) for _, group in groupby(found, key=lambda each: [each.ours[key] for key in named])]


def _where(row: dict[str, Any]) -> str:
    return f"{row['format']}, x in {row['dtype']}{_adapters(row)}; {row['device']}"


def _adapters(row: dict[str, Any]) -> str:
    return f", {row['adapters']} adapters of rank {row['rank']}" if row["adapters"] else ""


def _show(
    title: str,
    before: Sequence[str],
    after: Sequence[str],
    found: Sequence[Case | Layer],
    ends: Sequence[tuple[Sequence[str], Sequence[str]]],
) -> None:
    """Times between the columns that name a line and those after; columns of peers that none has are left out."""
    from .summary import PEERS

    times = [[each.us, each.floor_us, *(each.peer_us(peer) for peer in PEERS)] for each in found]
    kept = [column for column in range(len(COLUMNS)) if any(line[column] is not None for line in times)]
    table = Table(*before, *(COLUMNS[column] for column in kept), *after, title=title, title_justify="left")
    for column in table.columns[len(before) : len(before) + len(kept)]:
        column.justify = "right"
    for line, (first, last) in zip(times, ends, strict=True):
        cells = ["" if (us := line[column]) is None else f"{us:,.1f}" for column in kept]
        table.add_row(*first, *cells, *last)
    console.print(table)


def _show_rule(found: Sequence[Case]) -> None:
    """The one rule: nowhere slower than the faster of bitsandbytes and dequantise + dense."""
    judged = [case for case in found if case.replaced_us is not None]
    broken = [case for case in judged if case.violates]
    for case in broken:
        row, theirs = case.ours, case.replaced_us or 0.0
        console.print(
            f"[red]violation[/red]: {row['N']} × {row['K']}, M = {row['M']}, {row['format']}, {row['dtype']}"
            f"{_adapters(row)}, {row['device']}: {case.us:,.1f} µs, {case.us / theirs:.2f} times the {theirs:,.1f} of "
            "what it replaces",
            highlight=False,
            soft_wrap=True,
        )
    console.print(
        f"never slower than the faster of bitsandbytes and dequantise + dense: {len(judged) - len(broken)} of "
        f"{len(judged)} problems hold"
        + (f"; {len(found) - len(judged)} were measured without either" if len(found) > len(judged) else ""),
        highlight=False,
    )
