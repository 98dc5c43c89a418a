"""The ladder's kernels, one idea apart: what each is, how it is compiled, and which loads it was designed to have."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..kernels import nvrtc
from .sass_bound import Access

SOURCES = Path(__file__).parent / "cuda"
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
BLOCK, CODE_BYTES = 32, 16  # weights that share a scale; bytes of their codes
Q4_BYTES_PER_WEIGHT = (CODE_BYTES + 2) / BLOCK
INCLUDE = '#include "ladder.cuh"\n'


@dataclass(frozen=True)
class Rung:
    """A kernel of the ladder, cuda/<stem>.cu.

    about: its idea. q4: whether its weights are planar Q4, else fp16. warps: of a block of threads. rows: that a warp
    takes at once, with x in shared memory; 0 where a block of threads takes one row. lane_weights: weights a lane
    takes in one round of the main loop. accesses: the loads of that round.
    """

    stem: str
    about: str
    q4: bool
    warps: int
    rows: int
    lane_weights: int
    accesses: tuple[Access, ...]

    @property
    def macros(self) -> dict[str, int]:
        """Of its source."""
        return {"WARPS": self.warps} | ({"ROWS": self.rows} if self.rows else {})

    @property
    def bytes_per_weight(self) -> float:
        return Q4_BYTES_PER_WEIGHT if self.q4 else 2.0

    @property
    def loads_per_block(self) -> float:
        """Loads for 32 weights, of global and shared memory."""
        return sum(access.count for access in self.accesses) * BLOCK / self.lane_weights

    def shared_bytes(self, k: int) -> int:
        """Dynamic shared memory of a block of threads."""
        return 2 * k if self.rows else 0

    def cubin(self, arch: str) -> bytes:
        """Its machine code for `arch`."""
        return nvrtc.compile(self.stem, arch, self.macros, source(self.stem))


_SCALE = Access("scale", "global", 16, 1, 2)
_CODES = Access("codes", "global", 128, 1, 16)
_TWO_ROWS = (
    Access("codes", "global", 128, 2, 16),
    Access("x", "shared", 128, 4, 16),
    Access("scale", "global", 16, 2, 2),
)

RUNGS = (
    Rung(
        "ladder_fp16",
        "the baseline: fp16 weights and x in 128-bit loads",
        q4=False,
        warps=4,
        rows=0,
        lane_weights=32,
        accesses=(Access("weights", "global", 128, 4, 16), Access("x", "global", 128, 4, 16)),
    ),
    Rung(
        "ladder_q4_bytes",
        "one byte of codes and one value of x at a time",
        q4=True,
        warps=4,
        rows=0,
        lane_weights=32,
        accesses=(Access("codes", "global", 8, 16, 16), Access("x", "global", 16, 32, 64), _SCALE),
    ),
    Rung(
        "ladder_q4_adjacent",
        "the control: as narrow, but neighbouring lanes read neighbouring bytes",
        q4=True,
        warps=4,
        rows=0,
        lane_weights=32,
        accesses=(
            Access("codes", "global", 8, 16, 1),
            Access("x", "global", 16, 32, 4),
            Access("scale", "global", 16, 16, 2, lanes=16),
        ),
    ),
    Rung(
        "ladder_q4_codes",
        "a block's codes in one 128-bit load, x in pairs",
        q4=True,
        warps=4,
        rows=0,
        lane_weights=32,
        accesses=(_CODES, Access("x", "global", 32, 16, 64), _SCALE),
    ),
    Rung(
        "ladder_q4_wide",
        "x in 128-bit loads too",
        q4=True,
        warps=4,
        rows=0,
        lane_weights=32,
        accesses=(_CODES, Access("x", "global", 128, 4, 64), _SCALE),
    ),
    Rung(
        "ladder_q4_rows",
        "rows split across warps, x in shared memory",
        q4=True,
        warps=16,
        rows=2,
        lane_weights=64,
        accesses=_TWO_ROWS,
    ),
    Rung(
        "ladder_q4_bits",
        "numbers made from bits, with no conversion",
        q4=True,
        warps=16,
        rows=2,
        lane_weights=64,
        accesses=_TWO_ROWS,
    ),
)


def get_rung(name: str) -> Rung:
    """The rung of a name, with or without "ladder_". Raises ValueError for an unknown one."""
    for rung in RUNGS:
        if name in (rung.stem, rung.stem.removeprefix("ladder_")):
            return rung
    raise ValueError(f"unknown rung '{name}'; known: {', '.join(rung.stem for rung in RUNGS)}")


@cache
def source(stem: str) -> str:
    """A rung's CUDA C++ in one piece: ladder.cuh stands where the file includes it."""
    text = (SOURCES / f"{stem}.cu").read_text()
    before, found, after = text.partition(INCLUDE)
    if not found:
        raise ValueError(f"{stem}.cu does not include ladder.cuh")
    shared = (SOURCES / "ladder.cuh").read_text().replace("#pragma once\n", "\n")
    line = before.count("\n") + 2
    return f'{before}#line 1 "ladder.cuh"\n{shared}#line {line} "{stem}.cu"\n{after}'
