"""The command `halfbyte`."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import typer
from rich.table import Table

from .checkpoints import open_checkpoint
from .lab.bench_cli import bench_layer_command, bench_linear_command, bench_nf4_16_command, bench_overhead_command
from .lab.capacity_cli import plan_command
from .lab.cli import lab_app
from .lab.drop_in_cli import bench_generate_command, verify_bitsandbytes_command
from .lab.prove_cli import prove_command
from .lab.report_cli import report_command
from .lab.summary_cli import bench_summary_command
from .lab.tune_cli import tune_command
from .terminal import (
    DEFAULT_DEVICE,
    DeviceOption,
    JsonOption,
    PathArgument,
    console,
    notices,
    progress_bar,
)
from .tune import Entry

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Language-model layers straight from their 4-bit weights.",
)
bench_app = typer.Typer(no_args_is_help=True, help="Measure, with today's peers in the same run.")
app.add_typer(bench_app, name="bench")
app.add_typer(lab_app, name="lab")


def main() -> None:
    """Entry point: user errors become one line and exit status 1, not a traceback."""
    try:
        app()
    except (ValueError, FileNotFoundError, FileExistsError, ModuleNotFoundError) as error:
        fail(str(error))


def fail(message: str) -> NoReturn:
    """End the command with one line on standard error."""
    notices.print(f"[red]halfbyte:[/red] {message}", highlight=False, soft_wrap=True)
    raise SystemExit(1)


@app.command()
def quantize(
    source: Annotated[Path, typer.Argument(help="A model's directory with dense safetensors, or a GGUF file.")],
    target: Annotated[Path, typer.Argument(help="Directory to write, in bitsandbytes' format.")],
    format: Annotated[str, typer.Option(help="nf4 or fp4.")] = "nf4",
    blocksize: Annotated[int, typer.Option(help="Weights that share one absmax.")] = 64,
    nested: Annotated[bool, typer.Option(help="Quantise the absmax values too.")] = False,
    skip: Annotated[list[str] | None, typer.Option(help="Also leave weights dense whose name contains this.")] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace an existing target.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a 4-bit checkpoint that halfbyte, and transformers with bitsandbytes, load."""
    from .integrations.convert import quantize_model

    key = f"{format}-{blocksize}" + ("-nested" if nested else "")
    with progress_bar() as bar:
        task = bar.add_task("quantising", total=None)
        summary = quantize_model(
            source,
            target,
            key,
            extra_skip=skip or (),
            overwrite=overwrite,
            progress=lambda name, done, total: bar.update(task, completed=done, total=total),
        )
    if as_json:
        print(json.dumps({"path": str(target), **asdict(summary)}))
        return
    console.print(
        f"{target}: {len(summary.quantized)} weights in {summary.format}, {summary.dense} tensors left dense; "
        f"{summary.bytes_before:,} -> {summary.bytes_after:,} bytes",
        highlight=False,
    )
    for name, reason in summary.left.items():
        console.print(f"  left dense: {name} ({reason})", highlight=False)


@app.command()
def inspect(path: PathArgument, as_json: JsonOption = False) -> None:
    """List a checkpoint's tensors: format, shape, bytes, bits a weight. Reads headers only."""
    entries = open_checkpoint(path).entries()
    rows: list[dict[str, Any]] = [
        {
            "tensor": entry.name,
            "format": entry.format,
            "shape": list(entry.shape),
            "bytes": entry.nbytes,
            "bits": entry.bits_per_weight,
        }
        for entry in entries
    ]
    total = sum(row["bytes"] for row in rows)
    if as_json:
        print(json.dumps({"path": str(path), "bytes": total, "tensors": rows}))
        return
    table = Table("tensor", "format", "shape", "bytes", "bits a weight", title=str(path), title_justify="left")
    table.columns[0].overflow = "fold"  # a tensor's name is never cut short
    for column in (3, 4):
        table.columns[column].justify = "right"
    for row in rows:
        shape = " × ".join(map(str, row["shape"])) or "scalar"
        table.add_row(row["tensor"], row["format"], shape, f"{row['bytes']:,}", f"{row['bits']:.3f}")
    console.print(table)
    console.print(f"{len(rows)} tensors, {total:,} bytes", highlight=False)


@app.command()
def verify(
    path: PathArgument,
    rows: Annotated[int, typer.Option(help="Rows of random activations.")] = 3,
    columns: Annotated[int, typer.Option(help="Columns read back by one-hot probes.")] = 16,
    as_json: JsonOption = False,
) -> None:
    """Hold every 4-bit layer against the float64 reference. Exit status 1 if one is outside the contract."""
    result = run_verify(path, rows, columns)
    if as_json:
        print(json.dumps({"path": str(path), **result}))
    else:
        print_verify(path, result)
    if not result["all_within_contract"]:
        raise SystemExit(1)


def run_verify(path: Path, rows: int, columns: int) -> dict[str, Any]:
    """`lab.verify` with a progress bar."""
    from .lab.verify import summary
    from .lab.verify import verify as reports_of

    checkpoint = open_checkpoint(path)
    total = sum(entry.packed for entry in checkpoint.entries())
    if not total:
        fail(f"{path} holds no 4-bit weights that halfbyte knows")
    reports = []
    with progress_bar() as bar:
        for report in bar.track(reports_of(checkpoint, rows, columns), total=total, description="verifying"):
            reports.append(report)
    return summary(reports)


def print_verify(path: Path, result: dict[str, Any]) -> None:
    """A table of layer kinds would hide the worst one, so: the five worst layers, and a verdict."""
    table = Table("layer", "format", "shape", "error / rounding limit", "fp32 error", "one-hot", "swap seen")
    for layer in sorted(result["layers"], key=lambda layer: -layer["over_limit"])[:5]:
        shape = " × ".join(map(str, layer["shape"]))
        marks = ["yes" if layer[key] else "NO" for key in ("one_hot_ok", "swap_detected")]
        table.add_row(
            layer["name"], layer["format"], shape, f"{layer['over_limit']:.4f}", f"{layer['error_fp32']:.1e}", *marks
        )
    table.title, table.title_justify = "The five worst layers", "left"
    console.print(table)
    verdict = "within the contract" if result["all_within_contract"] else "[red]OUTSIDE the contract[/red]"
    console.print(
        f"{path}: {result['layers_checked']} layers, {verdict}: worst error {result['worst_over_limit']:.4f} of the "
        f"rounding limit (1.1 allowed), fp32 {result['worst_error_fp32']:.1e} (5e-6 allowed), swapped nibbles "
        f"{'detected in every layer' if result['swapped_nibbles_detected'] else '[red]NOT detected[/red]'}",
        highlight=False,
    )


@app.command()
def generate(
    path: PathArgument,
    prompt: Annotated[str, typer.Option(help="What to say to the model.")],
    tokens: Annotated[int, typer.Option(help="At most so many new tokens.")] = 128,
    dtype: Annotated[str, typer.Option(help="Activations: bf16, fp16 or fp32.")] = "bf16",
    device: DeviceOption = DEFAULT_DEVICE,
    sample: Annotated[bool, typer.Option(help="Sample instead of greedy decoding.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Generate text with transformers, on halfbyte's layers. Uses the chat template where the model has one."""
    from .integrations.generate import generate as run
    from .lab.measure import peak_rss_bytes

    start = time.perf_counter()
    result = run(path, prompt, tokens, dtype_of(dtype), device, sample, stream=None if as_json else sys.stdout)
    record = {
        "text": result.text,
        "new_tokens": result.new_tokens,
        "tokens_per_s": result.tokens_per_s,
        "first_token_s": result.first_token_s,
        "load_s": time.perf_counter() - start - result.seconds,
        "peak_rss_bytes": peak_rss_bytes(),
    }
    if as_json:
        print(json.dumps(record))
    else:
        notices.print(
            f"{result.new_tokens} tokens, {result.tokens_per_s:.1f} tokens/s after the first",
            style="dim",
            highlight=False,
        )


def dtype_of(name: str) -> torch.dtype:
    """torch's dtype for bf16, fp16 or fp32."""
    from .lab.linear import DTYPE_NAMES

    if name not in DTYPE_NAMES:
        fail(f"--dtype must be one of {', '.join(DTYPE_NAMES)}, got '{name}'")
    return DTYPE_NAMES[name]


bench_app.command("linear")(bench_linear_command)
bench_app.command("layer")(bench_layer_command)
bench_app.command("summary")(bench_summary_command)
bench_app.command("nf4-16")(bench_nf4_16_command)
bench_app.command("overhead")(bench_overhead_command)
bench_app.command("generate")(bench_generate_command)
app.command("verify-bitsandbytes")(verify_bitsandbytes_command)


@app.command()
def explain(
    n: Annotated[int, typer.Option("--N", help="Rows of the weight.", min=1)],
    k: Annotated[int, typer.Option("--K", help="Columns of the weight.", min=1)],
    m: Annotated[int, typer.Option("--M", help="Rows of x.", min=0)] = 1,
    format: Annotated[str, typer.Option(help="Format key, as nf4-64-nested.")] = "nf4-64",
    dtype: Annotated[str, typer.Option(help="Activations: bf16, fp16 or fp32.")] = "bf16",
    arch: Annotated[str, typer.Option(help="cpu, or a CUDA architecture such as sm_90a; needs no GPU.")] = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Which kernel serves a multiply, its configuration and predicted time, and why not the others."""
    from .formats import get_format
    from .kernels import Problem
    from .plan import plan

    chosen = get_format(format)
    chosen.check_shape(n, k)
    problem = Problem(chosen, dtype_of(dtype), m, n, k, arch)
    result = plan(problem)
    configuration = result.kernel.describe(problem) if result.kernel.describe else None
    if as_json:
        others = [{"kernel": name, "reason": reason} for name, reason in result.others]
        summary = {"kernel": result.kernel.name, "configuration": configuration, "predicted_us": result.seconds * 1e6}
        tuned = result.tuned.record() if result.tuned else None
        print(json.dumps({**summary, "tuned": tuned, "others": others}))
        return
    console.print(
        f"{result.kernel.name}: {result.kernel.about}\n"
        f"  predicted {result.seconds * 1e6:,.1f} µs for M={m} N={n} K={k}, {chosen.key}, x in {dtype}, on {arch}",
        highlight=False,
    )
    if configuration:
        console.print(f"  {configuration}", highlight=False)
    if result.kernel.configurations:
        console.print(f"  {origin(result.tuned, arch)}", highlight=False)
    for name, reason in result.others:
        console.print(f"  not {name}: {reason}", highlight=False)


def origin(tuned: Entry | None, arch: str) -> str:
    """Whether a kernel's configuration was measured or predicted, in words."""
    if tuned is None:
        return f"configuration predicted: the table of {arch} holds no measured one for this shape and M"
    ahead = f", {100 * tuned.gain:.1f} % faster than the kernel's own choice" if tuned.gain else ""
    ahead += "" if tuned.margin is None else f", {100 * tuned.margin:.1f} % ahead of the next of {tuned.measured}"
    return f"configuration tuned on {tuned.device}, {tuned.date[:10]}: {tuned.us:,.1f} µs at M={tuned.M}{ahead}"


@app.command()
def status(as_json: JsonOption = False) -> None:
    """Whether bitsandbytes' layers run on halfbyte here: the switch, versions, CPU kernels."""
    from .integrations.bitsandbytes import environment

    report = environment()
    if as_json:
        print(json.dumps(report))
        return
    console.print(f"bitsandbytes on halfbyte: {'on' if report['enabled'] else 'off'} in this environment")
    for name, value in {**report["versions"], **report["facts"]}.items():
        console.print(f"  {name}: {value}", highlight=False)


@app.command()
def demo(
    fresh: Annotated[bool, typer.Option(help="Start again, not from what an earlier demo left.")] = False,
    as_json: JsonOption = False,
) -> None:
    """SmolLM2 in NF4: quantise, verify, talk, and measure against torch bf16 and bitsandbytes."""
    from .demo import run

    run(console, notices, fresh, as_json, verify=lambda path: run_verify(path, rows=3, columns=16))


app.command("prove")(prove_command)
app.command("plan")(plan_command)
app.command("tune")(tune_command)
app.command("report")(report_command)
