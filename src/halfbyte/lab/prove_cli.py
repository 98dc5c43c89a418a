"""The command `halfbyte prove`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ..terminal import (
    DEFAULT_DEVICE,
    DeviceOption,
    JsonOption,
    PathArgument,
    console,
    notices,
    parse_numbers,
    progress_bar,
)


def prove_command(
    path: PathArgument,
    adapter: Annotated[
        list[Path] | None, typer.Option(help="A LoRA adapter's directory (PEFT); may be given again.")
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(help="A peer: bitsandbytes, dense or onnxruntime; may be given again. By default the first two."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the document here, and its state beside it while it grows.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the unfinished run beside --out.")] = False,
    text: Annotated[Path | None, typer.Option(help="A text file to measure perplexity on.")] = None,
    text_tokens: Annotated[int, typer.Option(help="Of which so many tokens are read.", min=2)] = 512,
    prompts: Annotated[Path | None, typer.Option(help="A file with one prompt a line, for greedy answers.")] = None,
    tokens: Annotated[int, typer.Option(help="New tokens of each greedy answer.", min=1)] = 32,
    dtype: Annotated[str, typer.Option(help="Of the comparison with peers: bf16 or fp16.")] = "bf16",
    device: DeviceOption = DEFAULT_DEVICE,
    m: Annotated[str, typer.Option("--M", help="Rows of x to time, comma-separated.")] = "1,16,32",
    rows: Annotated[int, typer.Option(help="Rows of each layer's random activations.", min=1)] = 3,
    columns: Annotated[int, typer.Option(help="Columns read back by one-hot probes.", min=1)] = 16,
    seconds: Annotated[float, typer.Option(help="Time spent on each candidate of a timing.")] = 0.5,
    warm: Annotated[bool, typer.Option("--warm", help="Time with the weights in the caches.")] = False,
    only: Annotated[str, typer.Option(help="Layers whose name contains this.")] = "",
    speed: Annotated[bool, typer.Option(help="Time each layer shape.")] = True,
    model: Annotated[bool, typer.Option(help="Run the whole model.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Prove on your own model: error of every layer, speed of every shape, and the model's answers, beside its peers.

    Exit status 1 if a layer is outside the contract.
    """
    from .prove import Settings, prove
    from .prove_model import PROMPTS
    from .prove_page import show

    settings = Settings(
        path=path,
        adapters=tuple(adapter or ()),
        against=tuple(against) if against else None,
        dtype=dtype,
        device=device,
        rows=rows,
        columns=columns,
        only=only,
        ms=tuple(parse_numbers("--M", m)),
        seconds=seconds,
        warm=warm,
        text=text,
        text_tokens=text_tokens,
        prompts=tuple(read_prompts(prompts)) if prompts else PROMPTS,
        tokens=tokens,
        speed=speed,
        model=model,
    )
    if model:
        from transformers.utils import logging

        logging.disable_progress_bar()  # it would write into ours
    with progress_bar() as bar:
        tasks = {}

        def progress(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done, total=total)

        try:
            document = prove(settings, out, resume, progress)
        except KeyboardInterrupt:
            hint = f"; go on with --out {out} --resume" if out else ", and without --out nothing is kept"
            notices.print(f"interrupted{hint}", highlight=False, soft_wrap=True)
            raise SystemExit(130) from None
    if as_json:
        print(json.dumps(document))
    else:
        show(document, console)
    if not document["summary"]["all_within_contract"]:
        raise SystemExit(1)


def read_prompts(file: Path) -> list[str]:
    """The lines of a file that are not empty."""
    lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    found = [line for line in lines if line]
    if not found:
        raise ValueError(f"--prompts: {file} has no prompt in it")
    return found
