"""The commands `halfbyte lab …`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ..terminal import JsonOption, console, notices, progress_bar

if TYPE_CHECKING:
    from .sass_report import Report

lab_app = typer.Typer(no_args_is_help=True, help="See what the machine did: machine code, and the ladder.")


@lab_app.command("sass")
def sass_command(
    kernel: Annotated[
        str,
        typer.Argument(
            help="codebook_mma, codebook_wgmma, codebook_gemm, codebook_gemv, or a ladder's rung: fp16, q4_wide, …"
        ),
    ],
    arch: Annotated[list[str] | None, typer.Option(help="CUDA architecture, as sm_90a; may be given again.")] = None,
    card: Annotated[str | None, typer.Option(help="Card of the predicted bound: h200, 5090, …")] = None,
    format: Annotated[str, typer.Option(help="Format key, for the codebook kernels.")] = "nf4-64",
    dtype: Annotated[str, typer.Option(help="Activations, for the codebook kernels: bf16 or fp16.")] = "bf16",
    m: Annotated[int, typer.Option("--M", help="Rows of x, for the codebook kernels.", min=1)] = 1,
    n: Annotated[int, typer.Option("--N", help="Rows of the weight.", min=1)] = 16384,
    k: Annotated[int, typer.Option("--K", help="Columns of the weight.", min=1)] = 16384,
    listing: Annotated[bool, typer.Option("--listing", help="Print the machine code, its main loop marked.")] = False,
    as_json: JsonOption = False,
) -> None:
    """A kernel's machine code: loads, arithmetic by pipe, registers, spills, and a predicted bound. Needs no GPU."""
    from .cards import get_card
    from .sass_report import Problem, examine

    chosen = get_card(card) if card else None
    archs = arch or [chosen.arch if chosen else "sm_90a"]
    reports = [examine(kernel, each, Problem(format, dtype, m, n, k), chosen) for each in archs]
    if as_json:
        records = [report.record() | ({"listing": report.code.sass.listing()} if listing else {}) for report in reports]
        print(json.dumps(records))
        return
    for report in reports:
        print_sass(report)
        if listing:
            print(report.code.sass.listing())


def print_sass(report: Report) -> None:
    """Tables of one report."""
    code, resources = report.code, report.resources
    macros = ", ".join(f"{name} {value}" for name, value in code.macros.items())
    spills = len(code.sass.local_memory())
    loop = code.sass.main_loop()
    first, last = code.sass.main_span() or (0, 0)
    console.print(
        f"[bold]{code.name}[/bold] for {code.arch} ({macros})\n"
        f"  {resources.registers} registers a thread, {resources.shared_bytes} bytes of static shared memory, "
        f"{f'{spills} loads and stores of local memory' if spills else 'nothing spilled'}\n"
        f"  main loop: instructions {first} to {last}, {len(loop)} for {code.weights:,} weights a warp, "
        f"{report.per_weight(len(loop)):.2f} a weight",
        highlight=False,
    )
    loads = _table("loads from", "bits a lane", "hint", "main loop", "for 32 weights", "a weight", left=1)
    for load, number in report.loads.items():
        width = str(load.bits) if load.bits else "in bulk"
        loads.add_row(load.space, width, load.hint.lower() or "none", *_counts(report, number))
    loads.add_row("all", "", "", *_counts(report, sum(report.loads.values())), style="bold")
    pipes = _table("pipe", "main loop", "for 32 weights", "a weight", left=1)
    for name, number in report.pipes.items():
        pipes.add_row(name, *_counts(report, number))
    console.print(loads)
    console.print(pipes)
    if report.bound is None:
        console.print(f"  no bound: no card of {code.arch} in the table (--card)", highlight=False)
        return
    card = report.bound.card
    bounds = _table(f"bound on {card.name}", "clocks for 1,024 weights", left=1)
    for name, clocks in sorted(report.bound.clocks.items(), key=lambda item: -item[1]):
        bounds.add_row(name, f"{clocks:.1f}", style="bold" if name == report.bound.by else "")
    console.print(bounds)
    problem = report.problem
    console.print(
        f"  predicted: at least {report.least_us:,.1f} µs for {problem.n} × {problem.k}, by {report.bound.by}; "
        f"{report.bound.weights_per_second * code.bytes_per_weight / 1e12:.2f} TB/s of weights\n"
        f"  from quoted numbers, nothing measured ({card.source}): {card.multiprocessors} multiprocessors at "
        f"{card.clock_ghz} GHz, {card.memory_tb_per_s} TB/s",
        highlight=False,
    )


def _table(*columns: str, left: int) -> Table:
    table = Table(*columns)
    for column in table.columns[left:]:
        column.justify = "right"
    return table


def _counts(report: Report, number: int) -> tuple[str, str, str]:
    return str(number), f"{report.per_block(number):.4g}", f"{report.per_weight(number):.3f}"


@lab_app.command("ladder")
def ladder_command(
    out: Annotated[Path | None, typer.Option(help="Append the rows to this JSONL file, point by point.")] = None,
    sweeps: Annotated[str, typer.Option(help="Of square, l2 and shape, comma-separated.")] = "square,l2,shape",
    seconds: Annotated[float, typer.Option(help="Time for each kernel of a point.", min=0.001)] = 0.04,
    within: Annotated[float, typer.Option(help="Begin no point later than so many seconds after the start.")] = 85.0,
    device: Annotated[str, typer.Option(help="cuda or cuda:1.")] = "cuda",
    figures: Annotated[Path | None, typer.Option(help="Measure nothing: draw the rows of this JSONL file.")] = None,
    to: Annotated[Path | None, typer.Option(help="Folder of the figures; that of the rows by default.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Why a 4-bit kernel is not faster, one idea at a time, on this GPU; or figures of rows, without one."""
    from .ladder_figures import draw, read_rows

    if figures:
        rows = read_rows(figures)
        paths = draw(rows, to or figures.parent, figures.stem)
    else:
        rows, paths = measure_ladder(sweeps.split(","), device, seconds, within, out), []
    if as_json:
        print(json.dumps({"rows": rows, "figures": list(map(str, paths))}))
        return
    print_ladder(rows)
    for path in paths:
        console.print(f"drawn: {path}", highlight=False, soft_wrap=True)


def measure_ladder(
    sweeps: list[str], device: str, seconds: float, within: float, out: Path | None
) -> list[dict[str, Any]]:
    """Measure, with progress on standard error; rows are in the file as soon as a point is done."""
    import torch

    from ..device import cache_bytes
    from .ladder import bench, points
    from .rows import append

    chosen_device = torch.device(device)
    on_gpu = chosen_device.type == "cuda" and torch.cuda.is_available()
    chosen = points(sweeps, cache_bytes(chosen_device) if on_gpu else 0)
    rows: list[dict[str, Any]] = []
    with progress_bar() as bar:
        task = bar.add_task("measuring", total=len(chosen))
        for found in bench(chosen, chosen_device, seconds, within, on_note=notices.print):
            if out:
                append(out, found)
            rows += found
            bar.advance(task)
    return rows


def print_ladder(rows: list[dict[str, Any]]) -> None:
    """Every point's times and bandwidths, and where 4 bits overtake 16."""
    from .ladder_figures import BASELINE, LABELS, overtakes

    if not rows:
        console.print("nothing was measured")
        return
    first = rows[0]
    names = [name for name in LABELS if any(row["rung"] == name for row in rows)]
    console.print(_ladder_table(rows, names, f"{first['device']}: µs a call", lambda row: f"{row['us']:.1f}"))
    ceilings = (
        f"read ceiling {first['ceiling_tb_per_s']:.2f}, copy {first['copy_tb_per_s']:.2f}, "
        f"L2 {first['l2_bytes'] / 2**20:.0f} MiB"
    )
    console.print(_ladder_table(rows, names, f"TB/s of weights; {ceilings}", lambda row: f"{row['tb_per_s']:.2f}"))
    worst = max(rows, key=lambda row: row["error"] / row["rounding_limit"])
    console.print(
        f"worst error {worst['error'] / worst['rounding_limit']:.3f} of the rounding limit, {worst['kernel']} at "
        f"{worst['N']} × {worst['K']}",
        highlight=False,
    )
    for name in names:
        if name in (BASELINE, "cublas"):
            continue
        where = [
            f"{cache} from {size / 2**20:.0f} MiB of fp16 weights" if size else f"{cache} at no size"
            for cache in ("cold", "warm")
            if any((row["sweep"], row["cache"], row["rung"]) == ("l2", cache, name) for row in rows)
            for size in [overtakes(rows, "l2", cache, name)]
        ]
        if where:
            console.print(f"{LABELS[name]} is faster than {LABELS[BASELINE]}: {', '.join(where)}", highlight=False)


def _ladder_table(
    rows: list[dict[str, Any]], names: list[str], title: str, cell: Callable[[dict[str, Any]], str]
) -> Table:
    """A line for each point, a column for each kernel."""
    from .ladder_figures import LABELS

    table = Table("sweep", "weights", "N × K", *(LABELS[name] for name in names), title=title, title_justify="left")
    points: dict[tuple[Any, ...], dict[str, str]] = {}
    for row in rows:
        points.setdefault((row["sweep"], row["cache"], row["N"], row["K"]), {})[row["rung"]] = cell(row)
    for (sweep, cache, n, k), cells in points.items():
        table.add_row(sweep, cache, f"{n} × {k}", *(cells.get(name, "") for name in names))
    for column in table.columns[2:]:
        column.justify = "right"
    return table
