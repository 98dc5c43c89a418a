"""The commands `halfbyte bench nf4-16` and `halfbyte bench overhead`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table

from ..terminal import DEFAULT_DEVICE, DeviceOption, console, notices


def bench_nf4_16_command(
    batches: Annotated[int, typer.Option(help="Batches a case.", min=1)] = 30,
    calls: Annotated[int, typer.Option(help="Calls a batch.", min=1)] = 10_000,
    out: Annotated[Path | None, typer.Option(help="Append the rows to this JSONL file.")] = None,
) -> None:
    """bitsandbytes' 16-case single-token protocol, on a GPU, against bitsandbytes in this process."""
    from .nf4_16 import CASES, cases, record
    from .rows import append

    table = Table("N × K", "dtype", "nested", "halfbyte µs", "bitsandbytes µs", "speed-up")
    results = []
    for case in cases(batches, calls):
        results.append(case)
        ours, theirs = case.ours, case.theirs
        if out:
            append(out, [ours.record(), theirs.record()])
        times = (f"{ours.timing.us:.2f}", f"{theirs.timing.us:.2f}", f"{case.speedup:.2f}")
        table.add_row(f"{ours.N} × {ours.K}", ours.dtype, str(ours.nested), *times)
        notices.print(
            f"{len(results)}/{len(CASES)}: {ours.N} × {ours.K} {ours.format} {ours.dtype}: {times[0]} µs, "
            f"bitsandbytes {times[1]} µs",
            highlight=False,
        )
    row = record(results)
    if out:
        append(out, [row])
    console.print(table)
    console.print(f"geometric mean: {row['geomean_speedup']:.3f} × as fast as {row['peer']}", highlight=False)


def bench_overhead_command(
    formats: Annotated[str, typer.Option(help="Format keys, comma-separated.")] = "nf4-64,nf4-64-nested",
    dtype: Annotated[str, typer.Option(help="Activations: bf16, fp16 or fp32.")] = "bf16",
    m: Annotated[int, typer.Option("--M", help="Rows of x.", min=1)] = 1,
    device: DeviceOption = DEFAULT_DEVICE,
    threads: Annotated[int | None, typer.Option(help="CPU threads; torch's own number by default.", min=1)] = None,
    seconds: Annotated[float, typer.Option(help="Time spent on each candidate.")] = 0.5,
    out: Annotated[Path | None, typer.Option(help="Append the rows to this JSONL file.")] = None,
) -> None:
    """What an eager call costs the host: our operator and layer, bitsandbytes', and torch's dense linear."""
    from .linear import DTYPE_NAMES
    from .overhead import SHAPE, bench_overhead
    from .rows import append

    if dtype not in DTYPE_NAMES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPE_NAMES)}, got '{dtype}'")
    if threads:
        torch.set_num_threads(threads)
    chosen = torch.device(device)
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {device}: torch sees no CUDA GPU here")
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
