"""The command `halfbyte tune`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from ..terminal import DEFAULT_DEVICE, DeviceOption, console, parse_numbers, parse_shapes, progress_bar
from .bench_cli import DtypeOption, failed, prepared

if TYPE_CHECKING:
    from ..kernels import Problem
    from ..kernels.registry import Settings
    from ..tune import Entry


def tune_command(
    model: Annotated[list[str] | None, typer.Argument(help="llama-3-8b, llama-3-70b, mistral-24b, qwen3-8b, qwen3-32b, "
    "gemma-3-27b, a config.json or a model's directory.")] = None,
    shapes: Annotated[str, typer.Option(help="NxK of weights, comma-separated; also beside a model's.")] = "",
    m: Annotated[str, typer.Option("--M", help="Rows of x, comma-separated; each for its bucket: 1, 2, 3-4, 5-8 …")
    ] = "1,2,4,8,16,32,64,128",
    formats: Annotated[str, typer.Option("--formats", "--format", help="Format keys, comma-separated.")] = "nf4-64",
    dtype: DtypeOption = "bf16",
    device: DeviceOption = DEFAULT_DEVICE,
    seconds: Annotated[float, typer.Option(help="Time spent on each configuration.")] = 0.05,
    most: Annotated[int, typer.Option(help="Configurations to measure, the best predicted first.", min=1)] = 12,
    again: Annotated[bool, typer.Option(help="Also measure what the table holds already.")] = False,
) -> None:  # fmt: skip
    """Measure kernels' configurations on this GPU and keep the fastest, for the planner to use. Resumable.

    Exit status 1 if a configuration failed or gave other bits; it is named and left out.
    """
    from ..device import arch_of
    from ..tune import path_of
    from .layer import model_of
    from .tuning import problems_of, tune_on

    chosen = prepared(dtype, device)
    wanted = [shape for name in model or () for shape in model_of(name).shapes.values()]
    wanted += parse_shapes(shapes) if shapes else []
    if not wanted:
        raise ValueError("halfbyte tune takes a model, or --shapes NxK,…")
    arch = arch_of(chosen)
    problems = problems_of(wanted, formats.split(","), parse_numbers("--M", m), dtype, arch)
    results, failures = [], []

    def on_failure(name: str, error: Exception) -> None:
        failures.append(name)
        failed(name, error)

    with progress_bar() as bar:
        task = bar.add_task("tuning", total=len(problems))
        for problem, entry in tune_on(problems, chosen, seconds, most, again, on_failure):
            results.append((problem, entry))
            bar.update(task, advance=1, description=f"tuning {problem.n} × {problem.k}, M = {problem.m}")
    _show(results)
    if any(entry for _, entry in results):
        console.print(f"table: {path_of(arch)}", highlight=False, soft_wrap=True)
    if failures:
        raise SystemExit(1)


def _show(results: list[tuple[Problem, Entry | None]]) -> None:
    table = Table("N × K", "M", "format", "kernel", "settings", "µs", "gain", "runner-up", "µs", "margin", "measured")
    fixed = 0
    for problem, entry in results:
        if entry is None:
            fixed += 1
            continue
        runner_up = ("", "", "")
        if entry.runner_up is not None:
            runner_up = (_words(entry.runner_up), f"{entry.runner_up_us:,.2f}", f"{100 * (entry.margin or 0):.1f} %")
        table.add_row(
            f"{problem.n} × {problem.k}", str(problem.m), entry.format, entry.kernel, _words(entry.settings),
            f"{entry.us:,.2f}", f"{100 * entry.gain:.1f} %", *runner_up, f"{entry.measured}, {entry.date[:10]}",
        )  # fmt: skip
    if table.rows:
        console.print(table)
    if fixed:
        console.print(f"{fixed} of {len(results)} problems go to kernels that have nothing to tune", highlight=False)


def _words(settings: Settings) -> str:
    return " ".join(f"{name}={value}" for name, value in settings)
