"""Problems for the library of CPU kernels as a file, for tests/native/run_problems.cpp: where no Python runs."""

from __future__ import annotations

import ctypes
import struct
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from halfbyte.formats import PackedWeight
from halfbyte.kernels.cpu.loading import CallStruct, WeightStruct
from halfbyte.kernels.cpu_linear import DTYPE_NUMBERS, weight_struct

POINTERS = ("codes", "scales", "second", "map", "constant", "zeros")
SOURCE = Path(__file__).parent / "native" / "run_problems.cpp"
SOURCES = Path(__file__).parents[1]
ALIGNMENT = 64


class ProblemStruct(ctypes.Structure):
    """Problem in run_problems.cpp; pointers are numbers of blobs, counted from 1."""

    _fields_ = (("kind", ctypes.c_int64), ("weight", WeightStruct), ("call", CallStruct))


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@dataclass
class Problems:
    """A list of problems, and the outputs that a run of the native program gave."""

    structs: list[ProblemStruct] = field(default_factory=list)
    blobs: list[bytes] = field(default_factory=list)
    outputs: list[tuple[int, torch.dtype, tuple[int, ...]]] = field(default_factory=list)

    def linear(self, x: Tensor, weight: PackedWeight, bias: Tensor | None = None, threads: int = 1) -> int:
        """Add out = x Wᵀ + bias, out poisoned with NaN before; returns the problem's number."""
        m, n = x.shape[0], weight.shape[0]
        problem = self._problem(0, weight)
        span = torch.as_strided(x, ((m - 1) * x.stride(0) + x.shape[1],), (1,))
        problem.call = CallStruct(
            self._blob(span),
            None if bias is None else self._blob(bias),
            None,
            m,
            x.stride(0),
            n,
            DTYPE_NUMBERS[x.dtype],
            0 if bias is None else DTYPE_NUMBERS[bias.dtype],
            threads,
        )
        return self._add(problem, torch.full((m, n), torch.nan, dtype=x.dtype))

    def decode(self, weight: PackedWeight, split: bool, threads: int = 1) -> int:
        """Add decoding all rows: fp32 [N, K], or two bf16 terms [N, 2K]; returns the problem's number."""
        n, k = weight.shape
        problem = self._problem(1, weight)
        dtype, columns = (torch.bfloat16, 2 * k) if split else (torch.float32, k)
        problem.call = CallStruct(None, None, None, 0, 0, columns, DTYPE_NUMBERS[dtype], 0, threads)
        return self._add(problem, torch.full((n, columns), torch.nan, dtype=dtype))

    def run(self, command: Sequence[str], library: Path, isa: str, folder: Path) -> tuple[list[Tensor], str]:
        """The outputs in the order of the problems, and what the program printed.

        command: the native program, with an emulator before it where needed. Raises AssertionError where it fails.
        """
        problems, results = folder / "problems", folder / "results"
        offsets = self._write(problems)
        done = subprocess.run(
            [*command, str(library), isa, str(problems), str(results)], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{' '.join(command)} {isa}: exit {done.returncode}: {done.stderr}"
        data = results.read_bytes()
        found = []
        for blob, dtype, shape in self.outputs:
            part = bytearray(data[offsets[blob] : offsets[blob] + len(self.blobs[blob])])
            found.append(torch.frombuffer(part, dtype=dtype).view(shape))
        return found, done.stdout

    def _problem(self, kind: int, weight: PackedWeight) -> ProblemStruct:
        problem = ProblemStruct(kind, WeightStruct.from_buffer_copy(weight_struct(weight)))
        numbers = {part.data_ptr(): self._blob(part) for part in weight.parts.values()}
        for name in POINTERS:
            address = getattr(problem.weight, name)
            setattr(problem.weight, name, None if address is None else numbers[address])
        return problem

    def _blob(self, tensor: Tensor) -> int:
        self.blobs.append(raw(tensor))
        return len(self.blobs)

    def _add(self, problem: ProblemStruct, out: Tensor) -> int:
        problem.call.out = self._blob(out)
        self.structs.append(problem)
        self.outputs.append((len(self.blobs) - 1, out.dtype, tuple(out.shape)))
        return len(self.structs) - 1

    def _write(self, path: Path) -> list[int]:
        sizes = (ctypes.sizeof(WeightStruct), ctypes.sizeof(CallStruct))
        header = struct.pack("<8s4q", b"HBPROBS1", *sizes, len(self.structs), len(self.blobs))
        at = len(header) + ctypes.sizeof(ProblemStruct) * len(self.structs) + 16 * len(self.blobs)
        offsets = []
        for blob in self.blobs:
            at = -(-at // ALIGNMENT) * ALIGNMENT
            offsets.append(at)
            at += len(blob)
        with path.open("wb") as file:
            file.write(header)
            for problem in self.structs:
                file.write(bytes(problem))
            for offset, blob in zip(offsets, self.blobs, strict=True):
                file.write(struct.pack("<2q", offset, len(blob)))
            for offset, blob in zip(offsets, self.blobs, strict=True):
                file.write(b"\0" * (offset - file.tell()))
                file.write(blob)
        return offsets


def build_program(compiler: str, folder: Path) -> Path:
    """Compile run_problems.cpp. Raises AssertionError with the compiler's words where that fails."""
    program = folder / "run_problems"
    includes = f"-I{SOURCES / 'src/halfbyte/kernels/cpu'}"
    command = [
        compiler,
        "-std=c++17",
        "-O1",
        "-Wall",
        "-Wextra",
        "-Werror",
        includes,
        str(SOURCE),
        "-o",
        str(program),
        "-ldl",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return program


def build_library(compiler: str, processor: str, folder: Path) -> Path:
    """Cross-compile the library for a Linux processor with the project's own CMakeLists.txt."""
    configure = [
        *("cmake", "-S", str(SOURCES), "-B", str(folder), "-DCMAKE_SYSTEM_NAME=Linux"),
        *(f"-DCMAKE_SYSTEM_PROCESSOR={processor}", f"-DCMAKE_CXX_COMPILER={compiler}"),
        f"-DHALFBYTE_LIBRARY_DIR={folder}",
    ]
    for command in (configure, ["cmake", "--build", str(folder)]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=570)
        assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout}\n{done.stderr}"
    return folder / "halfbyte_cpu.so"
