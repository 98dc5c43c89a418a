"""What the commands share: where they print, their progress bar, and the options that mean the same everywhere."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

console = Console(width=None if sys.stdout.isatty() else 160)  # a file or pipe has no width of its own
notices = Console(stderr=True)

PathArgument = Annotated[Path, typer.Argument(help="A GGUF file, a safetensors file, or a model's directory.")]
DeviceOption = Annotated[str, typer.Option(help="cpu, cuda or cuda:1.")]
DEFAULT_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")]


def progress_bar() -> Progress:
    """On standard error, so that standard output holds only the result."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=notices, transient=True)


def parse_numbers(option: str, text: str) -> list[int]:
    """Whole numbers from 1 up, in a comma-separated list. Raises ValueError that names the option."""
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} takes whole numbers separated by commas, got '{text}'") from None
    if any(number < 1 for number in found):
        raise ValueError(f"{option} takes numbers from 1 up, got '{text}'")
    return found


def parse_shapes(text: str) -> list[tuple[int, int]]:
    """[(N, K), …] of "4096x14336,4096x4096". Raises ValueError for anything else."""
    try:
        pairs = [tuple(map(int, word.lower().split("x"))) for word in text.split(",")]
        shapes = [(n, k) for n, k in pairs]
    except ValueError:
        raise ValueError(f"--shapes takes NxK separated by commas, as 4096x14336,4096x4096; got '{text}'") from None
    if any(size < 1 for shape in shapes for size in shape):
        raise ValueError(f"--shapes takes sizes from 1 up, got '{text}'")
    return shapes
