"""Reads a kernel's machine code: what the compiler made of it, without a GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# What each pipe executes, by the first word of an instruction. Only those that count in these kernels.
PIPES = {
    "load/store": ("LDS", "STS", "LDG", "STG", "LDL", "STL", "LDSM", "SHFL", "ATOMS", "LDGSTS"),
    "ALU": (
        "PRMT",
        "LOP3",
        "SHF",
        "IADD3",
        "VIADD",
        "ISETP",
        "SEL",
        "LEA",
        "VIMNMX",
        "VIMNMX3",
        "VHMNMX",
        "F2FP",
        "IADD",
    ),
    "FMA": ("FFMA", "FMUL", "FADD", "IMAD", "HFMA2", "HMUL2", "HADD2"),
    "tensor": ("HMMA", "HGMMA", "IMMA", "QGMMA", "OMMA"),
}


@dataclass(frozen=True)
class Sass:
    """The instructions of a cubin, in order, and its backward branches as (first, last) instruction."""

    instructions: tuple[str, ...]
    loops: tuple[tuple[int, int], ...]

    def main_loop(self) -> tuple[str, ...]:
        """Of the innermost loops with tensor instructions, the one with most of them; empty where there is none."""
        busy = [loop for loop in self.loops if _tensor(self._body(loop))]
        inner = [loop for loop in busy if not any(loop != other and _holds(loop, other) for other in busy)]
        return max(map(self._body, inner), key=_tensor, default=())

    def _body(self, loop: tuple[int, int]) -> tuple[str, ...]:
        return self.instructions[loop[0] : loop[1] + 1]

    def local_memory(self) -> tuple[str, ...]:
        """Loads and stores of local memory: spilled registers, or arrays that are not in registers."""
        return tuple(line for line in self.instructions if opcode(line).split(".")[0] in ("LDL", "STL"))


def opcode(instruction: str) -> str:
    """ "LDS.64" of "@P0 LDS.64 R2, [R4]"."""
    return next(word for word in instruction.split() if not word.startswith("@"))


def count(instructions: Sequence[str], width: bool = True) -> Counter[str]:
    """How often each opcode occurs; of memory operations with their width ("LDS.64"), of others the first word."""
    names = (opcode(line) for line in instructions)
    return Counter(name if width and name.startswith(("LD", "ST")) else name.split(".")[0] for name in names)


def by_pipe(instructions: Sequence[str]) -> Counter[str]:
    """Instructions by the pipe that executes them; the rest are under "other"."""
    pipe_of = {name: pipe for pipe, names in PIPES.items() for name in names}
    return Counter(pipe_of.get(opcode(line).split(".")[0], "other") for line in instructions)


def disassemble(cubin: bytes) -> Sass:
    """Raises FileNotFoundError where there is no nvdisasm (pip install nvidia-cuda-nvdisasm)."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([nvdisasm(), "-c", file.name], check=True, capture_output=True, text=True)
    labels: dict[str, int] = {}
    instructions: list[str] = []
    for line in done.stdout.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line.strip()):
            labels[label[1]] = len(instructions)
        elif found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(\S.*?)\s*;", line):
            instructions.append(found[1])
    loops = []
    for last, text in enumerate(instructions):
        target = re.search(r"\bBRA\b.*?(\.L_x_\d+)", text)
        if target and labels.get(target[1], last + 1) <= last:
            loops.append((labels[target[1]], last))
    return Sass(tuple(instructions), tuple(loops))


def nvdisasm() -> str:
    """The path of nvdisasm, from the CUDA wheels or the PATH."""
    for folder in map(Path, sys.path):
        for candidate in sorted(folder.glob("nvidia/*/bin/nvdisasm")):
            return str(candidate)
    found = shutil.which("nvdisasm")
    if found is None:
        raise FileNotFoundError("nvdisasm is not here: pip install nvidia-cuda-nvdisasm")
    return found


def _holds(outer: tuple[int, int], inner: tuple[int, int]) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def _tensor(instructions: Sequence[str]) -> int:
    return sum(opcode(line).split(".")[0] in PIPES["tensor"] for line in instructions)
