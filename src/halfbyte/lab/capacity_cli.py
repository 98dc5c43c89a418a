"""The command `halfbyte plan`."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ..terminal import JsonOption, console, parse_numbers

if TYPE_CHECKING:
    from .capacity import Load, Place, WeightBytes
    from .capacity_model import Model

DEFAULT_FORMATS = ("bf16", "nf4-64", "nf4-64-nested", "q4_0")


def plan_command(
    model: Annotated[str, typer.Argument(help="A model's directory or GGUF file, a config.json, or a name: llama-3-8b, "
    "llama-3-70b, mistral-24b, qwen3-8b, qwen3-32b, gemma-3-27b.")],
    context: Annotated[int, typer.Option(help="Tokens of each user's sequence.", min=1)] = 8192,
    users: Annotated[str, typer.Option(help="Users at once, comma-separated.")] = "1,16,64",
    gpu: Annotated[list[str] | None, typer.Option(help="h200, 5090, …, or cpu: this machine; repeatable.")] = None,
    format: Annotated[list[str] | None, typer.Option(help="Of the weights: bf16, q4_0, …; repeatable.")] = None,
    adapters: Annotated[int, typer.Option(help="LoRA adapters kept ready.", min=0)] = 0,
    rank: Annotated[int, typer.Option(help="Their rank.", min=1)] = 16,
    bandwidth: Annotated[float | None, typer.Option(help="TB/s to reckon with, instead of measured or quoted.")] = None,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """What a model needs by format, what fits where, and the tokens/s that memory allows. Needs no GPU."""
    from .capacity import STORED, Load, place_of, weight_bytes
    from .capacity_model import read_model

    if bandwidth is not None and bandwidth <= 0:
        raise ValueError(f"--bandwidth must be above 0 TB/s, got {bandwidth}")
    loads = [Load(context, count, adapters, rank) for count in parse_numbers("--users", users)]
    places = [place_of(name, bandwidth) for name in gpu or ("h200", "5090")]
    read = read_model(model)
    formats = [weight_bytes(read, key) for key in format or (*([STORED] if read.stored else []), *DEFAULT_FORMATS)]
    if as_json:
        print(json.dumps(record(read, formats, places, loads)))
        return
    show(read, formats, places, loads)


def record(model: Model, formats: list[WeightBytes], places: list[Place], loads: list[Load]) -> dict[str, Any]:
    """What `--json` prints: bytes and seconds."""
    from .capacity import KV_BITS, fit, kv_bytes

    context = loads[0].context
    return {
        "model": model.name,
        "source": model.source,
        "parameters": model.parameters,
        "notes": model.notes,
        "weights": [asdict(weights) | {"total": weights.total} for weights in formats],
        "kv": [
            {"context": context, "users": load.users, "bits": bits, "bytes": kv_bytes(model, context, load.users, bits)}
            for load in loads
            for bits in KV_BITS
        ],
        "fits": [
            {
                "place": place.name,
                "memory": place.memory,
                "bandwidth": place.bandwidth,
                "bandwidth_is": place.origin,
                "format": weights.format,
                "kv_bits": bits,
                **asdict(load),
                **{f"{key}_bytes" if key == "adapters" else key: value for key, value in found.items()},
            }
            for place in places
            for weights in formats
            for bits in KV_BITS
            for load in loads
            for found in [asdict(fit(model, weights, place, load, bits))]
        ],
    }


def show(model: Model, formats: list[WeightBytes], places: list[Place], loads: list[Load]) -> None:
    """Three tables: weights, caches, and each place."""
    console.print(f"{model.name}: {model.parameters / 1e9:.3f} G parameters; {model.source}", highlight=False)
    _show_weights(model, formats)
    _show_cache(model, loads)
    for place in places:
        _show_place(model, formats, place, loads)
    console.print(
        "G is 10^9. tokens/s: the bound for all users together, from bytes over bandwidth alone; a cross where it does "
        "not fit.",
        highlight=False,
        soft_wrap=True,
    )
    for note in model.notes:
        console.print(f"note: {note}", highlight=False, soft_wrap=True)


def _table(title: str, *columns: str) -> Table:
    table = Table(*columns, title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _show_weights(model: Model, formats: list[WeightBytes]) -> None:
    table = _table("weights, GB", "format", "matrices", "scales", "second level", "unquantised", "all", "bits a weight")
    for each in formats:
        parts = (each.codes, each.scales, each.second_level, each.unquantised, each.total)
        bits = f"{8 * each.total / model.parameters:.2f}"
        table.add_row(each.format, *(f"{part / 1e9:.3f}" if part else "" for part in parts), bits)
    console.print(table)


def _show_cache(model: Model, loads: list[Load]) -> None:
    from .capacity import KV_BITS, kv_bytes

    title = f"KV cache at {loads[0].context:,} tokens a user, GB"
    table = _table(title, "users", *(f"{bits} bits" for bits in KV_BITS))
    for load in loads:
        sizes = (kv_bytes(model, load.context, load.users, bits) for bits in KV_BITS)
        table.add_row(str(load.users), *(f"{size / 1e9:.3f}" for size in sizes))
    console.print(table)


def _show_place(model: Model, formats: list[WeightBytes], place: Place, loads: list[Load]) -> None:
    from .capacity import KV_BITS, UTILISATION, fit

    title = (
        f"{place.name}: {place.memory / 1e9:.1f} GB, of which {100 * UTILISATION:.0f} % are used; "
        f"{place.bandwidth / 1e12:.3f} TB/s {place.origin}"
    )
    columns = [f"tokens/s, {load.users} user{'s' if load.users > 1 else ''}" for load in loads]
    table = _table(title, "format", "KV bits", "GB, 1 user", "most users", "ms a token, 1 user", *columns)
    for weights in formats:
        for bits in KV_BITS:
            alone = fit(model, weights, place, replace(loads[0], users=1), bits)
            cells = []
            for load in loads:
                found = fit(model, weights, place, load, bits)
                cells.append(f"{found.tokens_per_s:,.0f}" if found.fits else "✗")
            most = str(alone.most_users) if alone.most_users >= 0 else "✗"
            name = weights.format if bits == KV_BITS[0] else ""
            step = f"{alone.step_s * 1e3:.2f}" if alone.fits else "✗"
            table.add_row(name, str(bits), f"{alone.total / 1e9:.1f}", most, step, *cells)
    console.print(table)
