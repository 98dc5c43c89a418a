"""CUDA C++ kernels compiled for the CPU from their own source: see native/cuda_on_cpu.hpp."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

COMPILER = shutil.which("g++")
NATIVE = Path(__file__).parent / "native"
OPTIONS = ("-std=c++17", "-O1", "-fPIC", "-ffp-contract=off", "-w")


@cache
def folder() -> tempfile.TemporaryDirectory[str]:
    """Where things are built; it goes when the process ends."""
    return tempfile.TemporaryDirectory(prefix="halfbyte-cuda-on-cpu-")


@cache
def scheduler(*checks: str) -> Path:
    """The object file that kernels compiled with the same `checks` share; made once."""
    path = Path(folder().name) / f"cuda_on_cpu{''.join(checks)}.o"
    _run_compiler(*checks, "-c", str(NATIVE / "cuda_on_cpu.cpp"), "-o", str(path))
    return path


def build(source: str, to: Path, *options: str, checks: tuple[str, ...]) -> None:
    """Compile native/`source`, which includes a kernel, with the compiler's `checks`; AssertionError with its words."""
    _run_compiler(*checks, *options, str(NATIVE / source), str(scheduler(*checks)), "-o", str(to))


def _run_compiler(*arguments: str) -> None:
    done = subprocess.run([str(COMPILER), *OPTIONS, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
