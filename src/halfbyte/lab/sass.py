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
    "load/store": ("LDS", "STS", "LDG", "STG", "LDL", "STL", "LDSM", "STSM", "SHFL", "ATOMS", "LDGSTS"),
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
        "I2FP",
        "IADD",
    ),
    "FMA": ("FFMA", "FFMA2", "FMUL", "FMUL2", "FADD", "FADD2", "IMAD", "HFMA2", "HMUL2", "HADD2"),
    "XU": ("I2F", "F2I", "F2F", "I2I", "MUFU", "POPC"),  # conversions, 1/x, exp: a quarter of the ALU's rate
    "tensor": ("HMMA", "HGMMA", "IMMA", "QGMMA", "OMMA"),
}
MULTIPLY_ADDS = ("FFMA", "FFMA2", "HFMA2")
SPACES = {
    "LDG": "global",
    "LDGSTS": "global to shared",
    "UBLKCP": "bulk copy",
    "UTMALDG": "bulk copy",
    "LDS": "shared",
    "LDSM": "shared",
    "LDL": "local",
}
WIDTHS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128, "256": 256}


@dataclass(frozen=True, order=True)
class Load:
    """A kind of load. space: "global", "shared", …; bits: a lane's; hint: what else the opcode says, as "CONSTANT".

    bits is 0 for bulk copies, whose size is not in the instruction.
    """

    space: str
    bits: int
    hint: str

    @staticmethod
    def of(name: str) -> Load | None:
        """The load that an opcode ("LDG.E.128.CONSTANT") is, or None where it is none."""
        first, *words = name.split(".")
        if first not in SPACES:
            return None
        if first == "LDSM":  # 8 x 8 matrices of 16 bits: 32 bits a lane each
            matrices = next((int(word) for word in words if word in ("2", "4")), 1)
            return Load("shared", 32 * matrices, "matrix")
        space = SPACES[first]
        bits = 0 if space == "bulk copy" else next((WIDTHS[word] for word in words if word in WIDTHS), 32)
        return Load(space, bits, ".".join(word for word in words if word != "E" and word not in WIDTHS))


@dataclass(frozen=True)
class Resources:
    """What a kernel occupies: registers a thread, static shared memory and stack a block, bytes."""

    registers: int
    shared_bytes: int
    stack_bytes: int


@dataclass(frozen=True)
class Sass:
    """The instructions of a cubin, in order, and its backward branches as (first, last) instruction."""

    instructions: tuple[str, ...]
    loops: tuple[tuple[int, int], ...]

    def main_span(self) -> tuple[int, int] | None:
        """Of the innermost loops that multiply, the one that does most of it, as (first, last) instruction.

        Tensor instructions count before all; in a kernel that loops without them, multiply-adds do.
        """
        for names in (PIPES["tensor"], MULTIPLY_ADDS):
            work = {loop: _how_many(self._body(loop), names) for loop in self.loops}
            busy = [loop for loop in self.loops if work[loop]]
            inner = [loop for loop in busy if not any(loop != other and _holds(loop, other) for other in busy)]
            if inner:
                return max(inner, key=lambda loop: work[loop])
        return None

    def main_loop(self) -> tuple[str, ...]:
        """The instructions of `main_span`; empty where nothing loops and multiplies."""
        span = self.main_span()
        return self._body(span) if span else ()

    def _body(self, loop: tuple[int, int]) -> tuple[str, ...]:
        return self.instructions[loop[0] : loop[1] + 1]

    def local_memory(self) -> tuple[str, ...]:
        """Loads and stores of local memory: spilled registers, or arrays that are not in registers."""
        return tuple(line for line in self.instructions if opcode(line).split(".")[0] in ("LDL", "STL"))

    def listing(self) -> str:
        """All instructions, one a line, those of the main loop marked with a bar."""
        first, last = self.main_span() or (1, 0)
        return "\n".join(
            f"{i:5} {'|' if first <= i <= last else ' '} {text}" for i, text in enumerate(self.instructions)
        )


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


def loads(instructions: Sequence[str]) -> Counter[Load]:
    """Loads by space, width and cache hint; loads of constants and kernel parameters are left out."""
    found = (Load.of(opcode(line)) for line in instructions)
    return Counter(load for load in found if load)


def disassemble(cubin: bytes) -> Sass:
    """Raises FileNotFoundError where there is no nvdisasm (pip install nvidia-cuda-nvdisasm)."""
    text = _read("nvdisasm", "-c", cubin)
    labels: dict[str, int] = {}
    instructions: list[str] = []
    for line in text.splitlines():
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


def resources(cubin: bytes) -> Resources:
    """Of the one kernel in a cubin. Raises FileNotFoundError where there is no cuobjdump."""
    found = {
        name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", _read("cuobjdump", "-res-usage", cubin))
    }
    return Resources(found["REG"], found["SHARED"], found["STACK"])


def _read(tool: str, option: str, cubin: bytes) -> str:
    """What a tool of the CUDA wheels, or of the PATH, prints about a cubin."""
    wheels = (candidate for folder in map(Path, sys.path) for candidate in sorted(folder.glob(f"nvidia/*/bin/{tool}")))
    found = next(map(str, wheels), None) or shutil.which(tool)
    if found is None:
        raise FileNotFoundError(f"{tool} is not here: pip install nvidia-cuda-{tool}")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([found, option, file.name], check=True, capture_output=True, text=True).stdout


def _holds(outer: tuple[int, int], inner: tuple[int, int]) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def _how_many(instructions: Sequence[str], names: Sequence[str]) -> int:
    return sum(opcode(line).split(".")[0] in names for line in instructions)
