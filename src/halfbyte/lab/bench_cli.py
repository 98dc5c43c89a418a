"""The commands `halfbyte bench linear`, `layer`, `nf4-16` and `overhead`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from rich.table import Table

from ..terminal import DEFAULT_DEVICE, DeviceOption, console, notices, parse_numbers, parse_shapes, progress_bar

if TYPE_CHECKING:
    from .nf4_16 import Case
    from .rows import Row

MsOption = Annotated[str, typer.Option("--M", help="Rows of x, comma-separated.")]
FormatsOption = Annotated[str, typer.Option(help="Format keys, comma-separated.")]
DtypeOption = Annotated[str, typer.Option(help="Activations: bf16, fp16 or fp32.")]
PeersOption = Annotated[bool, typer.Option(help="Measure the installed peers in the same run.")]
ThreadsOption = Annotated[int | None, typer.Option(help="CPU threads; torch's own number by default.", min=1)]
SecondsOption = Annotated[float, typer.Option(help="Time spent on each candidate of a problem.")]
OutOption = Annotated[Path | None, typer.Option(help="Append the rows to this JSONL file.")]


def bench_linear_command(
    m: MsOption = "1,4,16",
    shapes: Annotated[str, typer.Option(help="NxK of the weights, comma-separated.")] = "4096x4096",
    formats: FormatsOption = "nf4-64",
    dtype: DtypeOption = "bf16",
    device: DeviceOption = DEFAULT_DEVICE,
    peers: PeersOption = True,
    threads: ThreadsOption = None,
    seconds: SecondsOption = 1.0,
    warm: Annotated[bool, typer.Option(help="Keep one copy of the weights in the caches.")] = False,
    out: OutOption = None,
) -> None:
    """Single layers with cold caches: time, bandwidth and error, ours and the peers'."""
    from .linear import bench_linear
    from .rows import append

    chosen = prepared(dtype, device, threads)
    measured = bench_linear(
        parse_shapes(shapes), parse_numbers("--M", m), formats.split(","), dtype, chosen, peers, seconds,
        cold=not warm, on_missing=_missing, on_failure=failed,
    )  # fmt: skip
    rows = []
    with notices.status("measuring"):
        for row in measured:
            if out:
                append(out, [row.record()])
            rows.append(row)
    _show(rows)


def bench_layer_command(
    model: Annotated[list[str] | None, typer.Option(help="llama-3-8b, llama-3-70b, mistral-24b, qwen3-8b, qwen3-32b, "
    "gemma-3-27b, a config.json or a model's directory; repeatable. By default mistral-24b.")] = None,
    m: MsOption = "1,4,8,16,32,64,128",
    formats: FormatsOption = "nf4-64",
    dtype: DtypeOption = "bf16",
    device: DeviceOption = DEFAULT_DEVICE,
    peers: PeersOption = True,
    threads: ThreadsOption = None,
    adapters: Annotated[str, typer.Option(help="LoRA adapters over the rows of x, comma-separated; without them, in "
    "the same run, is always measured, and PEFT's path is the peer.")] = "0",
    rank: Annotated[str, typer.Option(help="Ranks of the adapters, comma-separated.")] = "16",
    seconds: SecondsOption = 0.25,
    out: OutOption = None,
) -> None:  # fmt: skip
    """The four multiplies of a model's decoder layer, cold, beside the peers; `bench summary` adds them up."""
    from .layer import MULTIPLIES, bench_layer, model_of
    from .rows import append

    chosen = prepared(dtype, device, threads)
    models = [model_of(name) for name in model or ("mistral-24b",)]
    ms, keys = parse_numbers("--M", m), formats.split(",")
    words = [word for word in adapters.split(",") if word.strip() != "0"]
    counts = parse_numbers("--adapters", ",".join(words)) if words else []
    mixes = [(count, each) for count in counts for each in parse_numbers("--rank", rank)]
    rows = []
    with progress_bar() as bar:
        task = bar.add_task("measuring", total=len(models) * len(MULTIPLIES) * len(keys) * len(ms))
        measured = bench_layer(models, ms, keys, dtype, chosen, peers, seconds, _missing, failed, mixes)
        for each in measured:
            if out:
                append(out, [each.record()])
            rows.append(each.row)
            if each.row.kernel.startswith("halfbyte ") and not each.row.adapters:  # the first of a problem
                bar.update(task, advance=1, description=f"{each.model} {each.multiply}, M = {each.row.M}")
    _show(rows)


def prepared(dtype: str, device: str, threads: int | None = None) -> torch.device:
    """The device to measure on. Raises ValueError for a dtype or device that is not there."""
    from .linear import DTYPE_NAMES

    if dtype not in DTYPE_NAMES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPE_NAMES)}, got '{dtype}'")
    if threads:
        torch.set_num_threads(threads)
    chosen = torch.device(device)
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {device}: torch sees no CUDA GPU here")
    return chosen


def _missing(names: list[str]) -> None:
    if names:
        notices.print(f"not installed, not measured: {', '.join(names)}", highlight=False)


def failed(name: str, error: Exception) -> None:
    first = next(iter(str(error).strip().splitlines()), "")
    notices.print(f"failed, left out: {name}: {type(error).__name__}: {first}", highlight=False, markup=False)


def _show(rows: Sequence[Row]) -> None:
    """A line for each row, under the device and its read ceiling."""
    table = Table("kernel", "format", "N × K", "M", "µs", "p20..p80", "of ceiling", "error / limit")
    for row in rows:
        table.add_row(
            row.kernel + (f", {row.adapters} adapters of rank {row.rank}" if row.adapters else ""),
            row.format,
            f"{row.N} × {row.K}",
            str(row.M),
            f"{row.timing.us:,.1f}",
            f"{row.timing.us_p20:,.1f}..{row.timing.us_p80:,.1f}",
            f"{row.tb_per_s / row.ceiling_tb_per_s:.2f}",
            f"{row.error / row.rounding_limit:.3f}" if row.dtype != "fp32" else f"{row.error:.1e}",
        )
    first = rows[0]
    table.title = (
        f"{first.environment.device}; read ceiling {first.ceiling_tb_per_s * 1e3:.1f} GB/s; x in {first.dtype}"
    )
    table.title_justify = "left"
    console.print(table)


def bench_nf4_16_command(
    batches: Annotated[int, typer.Option(help="Batches a case.", min=1)] = 30,
    calls: Annotated[int, typer.Option(help="Calls a batch.", min=1)] = 10_000,
    resume: Annotated[bool, typer.Option("--resume", help="Measure only what --out does not hold of this machine, "
    "these versions and this commit.")] = False,
    out: OutOption = None,
) -> None:  # fmt: skip
    """bitsandbytes' 16-case single-token protocol, on a GPU, against bitsandbytes in this process.

    Each case's rows are written as they are measured; the score, a geometric mean, where all sixteen are there.
    """
    from .nf4_16 import CASES, cases, done_in, record
    from .rows import append

    if resume and not out:
        raise ValueError("bench nf4-16 --resume goes on with a file: name it with --out")
    results = done_in(out, batches, calls) if resume and out else []
    if results:
        notices.print(f"{len(results)} of {len(CASES)} cases are in {out}", highlight=False)
    try:
        for case in cases(batches, calls, tuple(results)):
            results.append(case)
            if out:
                append(out, [case.ours, case.theirs])
            notices.print(f"{len(results)}/{len(CASES)}: {_case_in_words(case)}", highlight=False)
    finally:
        if results:
            _show_cases(results)
        if out and 0 < len(results) < len(CASES):
            notices.print(f"{len(CASES) - len(results)} cases are missing; --resume goes on with them", highlight=False)
    row = record(results)
    if out:
        append(out, [row])
    console.print(f"geometric mean: {row['geomean_speedup']:.3f} × as fast as {row['peer']}", highlight=False)


def _case_in_words(case: Case) -> str:
    ours, theirs = case.ours, case.theirs
    shape = f"{ours['N']} × {ours['K']} {ours['format']} {ours['dtype']}"
    return f"{shape}: {ours['us']:.2f} µs, bitsandbytes {theirs['us']:.2f} µs"


def _show_cases(results: Sequence[Case]) -> None:
    table = Table("N × K", "dtype", "nested", "halfbyte µs", "bitsandbytes µs", "speed-up")
    for case in results:
        ours, theirs = case.ours, case.theirs
        times = (f"{ours['us']:.2f}", f"{theirs['us']:.2f}", f"{case.speedup:.2f}")
        table.add_row(f"{ours['N']} × {ours['K']}", ours["dtype"], str(ours["nested"]), *times)
    console.print(table)


def bench_overhead_command(
    formats: FormatsOption = "nf4-64,nf4-64-nested",
    dtype: DtypeOption = "bf16",
    m: Annotated[int, typer.Option("--M", help="Rows of x.", min=1)] = 1,
    device: DeviceOption = DEFAULT_DEVICE,
    threads: ThreadsOption = None,
    seconds: Annotated[float, typer.Option(help="Time spent on each candidate.")] = 0.5,
    out: OutOption = None,
) -> None:
    """What an eager call costs the host: our operator and layer, bitsandbytes', and torch's dense linear."""
    from .overhead import SHAPE, bench_overhead
    from .rows import append

    chosen = prepared(dtype, device, threads)
    what = "to enqueue a call" if chosen.type == "cuda" else "a whole call"
    table = Table("kernel", "format", "µs of the host", "p20..p80", title_justify="left")
    with notices.status("measuring"):
        for row in bench_overhead(formats.split(","), dtype, chosen, m, seconds):
            if out:
                append(out, [row.record()])
            timing = row.timing
            spread = f"{timing.us_p20:.2f}..{timing.us_p80:.2f}"
            table.add_row(row.kernel, row.format, f"{timing.us:.2f}", spread)
    table.title = f"{row.environment.device}: {what}, N × K = {SHAPE[0]} × {SHAPE[1]}, M = {m}, x in {dtype}"
    console.print(table)
