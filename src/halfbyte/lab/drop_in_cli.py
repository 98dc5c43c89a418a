"""The commands about bitsandbytes: `halfbyte bench generate` and `halfbyte verify-bitsandbytes`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table

from ..terminal import DEFAULT_DEVICE, DeviceOption, JsonOption, console, notices, parse_numbers
from .linear import DTYPE_NAMES


def bench_generate_command(
    shape: Annotated[
        str, typer.Option("--model", help="Shapes: llama-3-8b, llama-3.2-1b, smollm2-135m or tiny.")
    ] = "llama-3-8b",
    users: Annotated[str, typer.Option(help="Rows of a batch, comma-separated.")] = "1,16",
    prompt: Annotated[int, typer.Option(help="Tokens of each prompt.", min=1)] = 32,
    tokens: Annotated[int, typer.Option(help="New tokens.", min=2)] = 128,
    rounds: Annotated[int, typer.Option(help="Turns of each arm.", min=1)] = 5,
    nested: Annotated[bool, typer.Option(help="Nested scales.")] = False,
    dtype: Annotated[str, typer.Option(help="Activations: bf16, fp16 or fp32.")] = "bf16",
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="torch.compile the decoding.")] = True,
    layers: Annotated[int | None, typer.Option(help="Fewer layers than the model has.", min=1)] = None,
    arms: Annotated[
        str, typer.Option(help="halfbyte by its switch, by optimize, or both: switch,optimize.")
    ] = "switch",
    guards: Annotated[bool, typer.Option("--guards", help="Have compiled code check its guards on modules.")] = False,
    device: DeviceOption = DEFAULT_DEVICE,
    out: Annotated[Path | None, typer.Option(help="Append the rows to this JSONL file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """transformers' generate with a static cache: bitsandbytes, itself again (noise), and halfbyte, in turn."""
    from .generate import Settings, bench_generate
    from .rows import append

    if dtype not in DTYPE_NAMES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPE_NAMES)}, got '{dtype}'")
    numbers = parse_numbers("--users", users)
    settings = Settings(
        shape, numbers, prompt, tokens, rounds, nested, dtype, compiled, layers, arms.split(","), guards
    )
    rows = []
    with notices.status("starting") as line:
        for row in bench_generate(settings, torch.device(device), DTYPE_NAMES[dtype], line.update):
            rows.append(row)
            if out:
                append(out, [row])
    if as_json:
        print(json.dumps(rows))
        return
    table = Table("users", "kernel", "tokens/s", "ms a token", "spread", "over bitsandbytes")
    for row in rows:
        figures = (
            f"{row['tokens_per_s']:,.1f}",
            f"{row['tpot_ms']:.2f}",
            f"{row['spread']:.1%}",
            f"{row['speedup']:.3f}",
        )
        table.add_row(str(row["users"]), str(row["kernel"]), *figures)
    first = rows[0]
    table.title = f"{first['model']} shapes, {first['layers']} layers, {first['format']}, {dtype}, on {first['device']}"
    table.title_justify = "left"
    console.print(table)


def verify_bitsandbytes_command(
    checkout: Annotated[Path, typer.Argument(help="A checkout of bitsandbytes' source, of the installed version.")],
    keyword: Annotated[str, typer.Option(help="Which tests: pytest's -k.")] = "4bit",
    as_json: JsonOption = False,
) -> None:
    """bitsandbytes' own 4-bit tests with halfbyte off and on, side by side. Exit status 1 if halfbyte breaks one."""
    from .bitsandbytes_tests import compare

    with notices.status("starting") as line:
        result = compare(checkout, keyword, line.update)
    if as_json:
        print(json.dumps(asdict(result) | {"different": result.different, "ok": result.ok}))
    else:
        table = Table("tests", "outcome", "without halfbyte", "with halfbyte")
        for name, (without, with_halfbyte) in sorted(result.by_file().items()):
            for outcome in sorted(without.keys() | with_halfbyte.keys()):
                table.add_row(name, outcome, f"{without[outcome]:,}", f"{with_halfbyte[outcome]:,}")
        table.title = f"tests of bitsandbytes {result.checkout_version}, run on {result.installed_version}"
        table.title_justify = "left"
        console.print(table)
        for name, (before, after) in result.different.items():
            console.print(f"  {before} -> {after}: {name}", highlight=False, soft_wrap=True)
        passed_on = sum(count for reasons in result.fallbacks.values() for count in reasons.values())
        verdict = "halfbyte breaks none" if result.ok else "[red]NOT ok[/red]"
        console.print(f"{verdict}; {result.hits:,} calls served, {passed_on:,} passed on", highlight=False)
    if not result.ok:
        raise SystemExit(1)
