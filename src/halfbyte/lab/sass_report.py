"""`halfbyte lab sass`: a kernel's machine code in numbers, and what they bound its time to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import torch

from .. import kernels as registry
from ..formats import BlockFormat, PackedWeight, get_format
from ..kernels import codebook, codebook_gemm, codebook_gemv, codebook_mma, codebook_wgmma, nvrtc
from . import sass
from .cards import CARDS, Card
from .ladder_rungs import BLOCK, RUNGS, Rung
from .sass_bound import WARP, Access, Bound, bound

TENSOR_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
MMA_ROWS, MMA_COLUMNS, MMA_K = 16, 8, 16  # of HMMA.16816: 16 rows of W, 8 rows of x


@dataclass(frozen=True)
class Problem:
    """What a kernel is compiled for where its configuration depends on it; N and K also size the predicted time."""

    format: str = "nf4-64"
    dtype: str = "bf16"
    m: int = 1
    n: int = 16384
    k: int = 16384


@dataclass(frozen=True)
class Code:
    """A compiled kernel. weights: that a warp takes in one round of its main loop."""

    name: str
    arch: str
    macros: dict[str, int]
    cubin: bytes
    sass: sass.Sass
    weights: int
    bytes_per_weight: float
    accesses: tuple[Access, ...] = ()


@dataclass(frozen=True)
class Report:
    """What `examine` found. Loads and pipes are of the main loop, counted a warp's round."""

    code: Code
    problem: Problem
    resources: sass.Resources
    loads: dict[sass.Load, int]
    pipes: dict[str, int]
    bound: Bound | None

    def per_block(self, number: int) -> float:
        """A count of the main loop, for each 32 weights of a lane."""
        return number * BLOCK * WARP / self.code.weights

    def per_weight(self, number: int) -> float:
        """A count of the main loop, in lanes' instructions for each weight."""
        return number * WARP / self.code.weights

    def record(self) -> dict[str, Any]:
        """As one JSON object."""
        rows = [asdict(load) | self._counts(number) for load, number in self.loads.items()]
        result: dict[str, Any] = {
            "kernel": self.code.name,
            "arch": self.code.arch,
            "macros": self.code.macros,
            "problem": asdict(self.problem),
            "resources": asdict(self.resources),
            "local_memory_instructions": len(self.code.sass.local_memory()),
            "loop": self.code.sass.main_span(),
            "loop_weights": self.code.weights,
            "loop_instructions": self._counts(len(self.code.sass.main_loop())),
            "loads": rows,
            "pipes": {name: self._counts(number) for name, number in self.pipes.items()},
        }
        if self.bound:
            result["card"] = asdict(self.bound.card) | {"measured": False}
            result["clocks_per_1024_weights"] = self.bound.clocks
            result["bound_by"] = self.bound.by
            result["least_us"] = self.least_us
        return result

    def _counts(self, number: int) -> dict[str, float]:
        return {"loop": number, "per_block": self.per_block(number), "per_weight": self.per_weight(number)}

    @property
    def least_us(self) -> float | None:
        """Microseconds that the bound allows for [N, K], or None without a card."""
        return self.bound.seconds(self.problem.n * self.problem.k) * 1e6 if self.bound else None


def kernels() -> tuple[str, ...]:
    """Names that `examine` knows."""
    return (*MULTIPLIERS, *(rung.stem for rung in RUNGS))


def card_of(arch: str) -> Card | None:
    """The first card of an architecture in the table that has the most memory bandwidth, or None."""
    return max((card for card in CARDS.values() if card.arch == arch), key=lambda c: c.memory_tb_per_s, default=None)


def examine(name: str, arch: str, problem: Problem, card: Card | None = None) -> Report:
    """Compile a kernel for an architecture ("sm_90a") and read its machine code.

    name: of `kernels()`; a rung's "ladder_" may be left out. card: what the bound is for, one of the architecture's by
    default.

    Raises ValueError for an unknown kernel, a problem that it does not serve or a card of another architecture,
    ModuleNotFoundError without the CUDA packages, FileNotFoundError without cuobjdump and nvdisasm.
    """
    if reason := nvrtc.missing():
        raise ModuleNotFoundError(f"lab sass {reason}")
    if card is not None and card.arch != arch:
        raise ValueError(f"--card {card.name} is {card.arch}; its bound needs --arch {card.arch}, not {arch}")
    card = card or card_of(arch)
    code = _maker(name)(arch, problem, card)
    loop = code.sass.main_loop()
    if not loop:
        raise ValueError(f"{name} for {arch}: no loop that multiplies was found in its machine code")
    return Report(
        code,
        problem,
        sass.resources(code.cubin),
        dict(sorted(sass.loads(loop).items())),
        dict(sass.by_pipe(loop).most_common()),
        bound(loop, code.weights, code.accesses, code.bytes_per_weight, card) if card else None,
    )


def _maker(name: str) -> Callable[[str, Problem, Card | None], Code]:
    if name in MULTIPLIERS:
        return MULTIPLIERS[name]
    for rung in RUNGS:
        if name in (rung.stem, rung.stem.removeprefix("ladder_")):
            return lambda arch, problem, card: _rung(rung, arch)
    raise ValueError(f"unknown kernel '{name}'; known: {', '.join(kernels())}")


def _rung(rung: Rung, arch: str) -> Code:
    cubin = rung.cubin(arch)
    weights = WARP * rung.lane_weights
    return Code(
        rung.stem, arch, rung.macros, cubin, sass.disassemble(cubin), weights, rung.bytes_per_weight, rung.accesses
    )


def _codebook_mma(arch: str, problem: Problem, card: Card | None) -> Code:
    """Its weights a round are what its tensor instructions multiply: each holds 16 x 16 of them."""
    format, dtype = _asked(codebook_mma.STEM, problem)
    multiprocessors = card.multiprocessors if card else codebook_mma.MULTIPROCESSORS
    config, _ = codebook_mma.configure(format, dtype, problem.m, problem.n, problem.k, arch, multiprocessors)
    times = -(-problem.m // MMA_COLUMNS)  # a weight meets this many groups of rows of x
    return _multiplier(codebook_mma.STEM, arch, asdict(config), problem, "HMMA", times)


def _codebook_wgmma(arch: str, problem: Problem, card: Card | None) -> Code:
    """As codebook_mma's, but a weight meets all rows of x in one instruction."""
    format, dtype = _asked(codebook_wgmma.STEM, problem)
    n, k, m = problem.n, problem.k, min(problem.m, codebook_wgmma.CHUNK)
    if reason := codebook_wgmma.reason_against(registry.Problem(format, dtype, problem.m, n, k, arch)):
        raise ValueError(f"lab sass {codebook_wgmma.STEM}: it {reason}")
    multiprocessors = card.multiprocessors if card else codebook_mma.MULTIPROCESSORS
    side = not codebook.copies_fp32(format, k, arch)
    config = codebook_wgmma.configure(format, dtype, m, n, k, multiprocessors, side)
    return _multiplier(codebook_wgmma.STEM, arch, asdict(config), problem, "HGMMA", 1)


def _codebook_gemm(arch: str, problem: Problem, card: Card | None) -> Code:
    """As codebook_wgmma's, a weight decoded for each tile of x.

    The loop also holds what is done where a row's power of two is raised, which is seldom.
    """
    format, dtype = _asked(codebook_gemm.STEM, problem)
    n, k = problem.n, problem.k
    if reason := codebook_gemm.reason_against(registry.Problem(format, dtype, problem.m, n, k, arch)):
        raise ValueError(f"lab sass {codebook_gemm.STEM}: it {reason}")
    multiprocessors = card.multiprocessors if card else codebook_mma.MULTIPROCESSORS
    tile = codebook_gemm.cut(problem.m, n, k, multiprocessors).tile
    macros = codebook_gemm.macros(codebook_gemm.STEM, tile, format, codebook.copies_fp32(format, k, arch))
    return _multiplier(codebook_gemm.STEM, arch, macros, problem, "HGMMA", -(-problem.m // tile.COLUMNS))


def _codebook_gemv(arch: str, problem: Problem, card: Card | None) -> Code:
    """Of an aligned weight; a warp's round is its rows of a tile and their chunks of 32 weights."""
    format, dtype = _asked(codebook_gemv.STEM, problem)
    n, k, stem = problem.n, problem.k, codebook_gemv.STEM
    if reason := codebook_gemv.reason_against(registry.Problem(format, dtype, problem.m, n, k, arch)):
        raise ValueError(f"lab sass {stem}: it {reason}")
    parts = {
        name: torch.empty(part.shape, dtype=part.dtypes[0], device="meta") for name, part in format.parts(n, k).items()
    }
    m = min(problem.m, codebook_gemv.MAX_ROWS)
    config = codebook_gemv.configure(PackedWeight(format, (n, k), parts), dtype, m, arch)
    cubin = nvrtc.compile(stem, arch, asdict(config))
    weights = config.tile_rows * BLOCK * config.chunks
    return Code(stem, arch, asdict(config), cubin, sass.disassemble(cubin), weights, _bytes_per_weight(problem))


MULTIPLIERS = {
    codebook_mma.STEM: _codebook_mma,
    codebook_wgmma.STEM: _codebook_wgmma,
    codebook_gemm.STEM: _codebook_gemm,
    codebook_gemv.STEM: _codebook_gemv,
}


def _asked(stem: str, problem: Problem) -> tuple[BlockFormat, torch.dtype]:
    """The format and dtype asked for. Raises ValueError for others than the kernel `stem` multiplies."""
    if problem.dtype not in TENSOR_DTYPES:
        raise ValueError(f"lab sass {stem} takes x in {' or '.join(TENSOR_DTYPES)}, got '{problem.dtype}'")
    format = get_format(problem.format)
    format.check_shape(problem.n, problem.k)
    return format, TENSOR_DTYPES[problem.dtype]


def _multiplier(stem: str, arch: str, macros: dict[str, int], problem: Problem, instruction: str, times: int) -> Code:
    """A kernel whose tensor instructions each hold 16 x 16 weights of a warp, `times` of them the same."""
    cubin = nvrtc.compile(stem, arch, macros)
    code = sass.disassemble(cubin)
    weights = sass.count(code.main_loop())[instruction] * MMA_ROWS * MMA_K // times
    return Code(stem, arch, macros, cubin, code, weights, _bytes_per_weight(problem))


def _bytes_per_weight(problem: Problem) -> float:
    """Of all parts of the format."""
    n, k = problem.n, problem.k
    parts = get_format(problem.format).parts(n, k).values()
    return sum(prod(part.shape) * part.dtypes[0].itemsize for part in parts) / n / k
