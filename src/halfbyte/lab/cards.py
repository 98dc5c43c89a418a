"""What vendors say of their cards. Quoted, not measured: a bound predicted from these is what a card cannot beat.

`memory_tb_per_s`, `l2_mib`, the number of multiprocessors and the boost clock are those of the data sheets and
architecture papers named in `source`; `memory_mib` is the total that the driver (nvidia-smi) reports for such a card,
which is what programs share; `tensor_tflops` is dense fp16 with fp32 sums. Cards in use often boost further
than their data sheet says, and reach about nine tenths of its memory bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Card:
    """A card. clock_ghz: boost. source: the document that the numbers are quoted from."""

    name: str
    arch: str
    multiprocessors: int
    clock_ghz: float
    memory_tb_per_s: float
    l2_mib: int
    memory_mib: int
    tensor_tflops: float
    source: str

    @property
    def bytes_per_clock(self) -> float:
        """Of memory, for each multiprocessor."""
        return self.memory_tb_per_s * 1e3 / self.clock_ghz / self.multiprocessors

    @property
    def tensor_per_clock(self) -> float:
        """Multiply-adds of the tensor cores of a multiprocessor in a clock: fp16 with fp32 sums."""
        return self.tensor_tflops * 1e3 / 2 / self.clock_ghz / self.multiprocessors


# NVIDIA prints no clock for Hopper: 1.98 GHz is what its quoted fp32 TFLOPS stand for; its tensor TFLOPS, for less.
CARDS = {
    "a100": Card(
        "A100 SXM 80 GB", "sm_80", 108, 1.41, 2.039, 40, 81920, 312, "NVIDIA A100 data sheet; Ampere GA100 paper"
    ),
    "h100": Card("H100 SXM", "sm_90a", 132, 1.98, 3.35, 50, 81559, 989, "NVIDIA H100 data sheet; Hopper H100 paper"),
    "h200": Card("H200 SXM", "sm_90a", 132, 1.98, 4.8, 50, 143771, 989, "NVIDIA H200 data sheet; Hopper H100 paper"),
    "l4": Card("L4", "sm_89", 58, 2.04, 0.3, 48, 23034, 121, "NVIDIA L4 data sheet; Ada paper"),
    "l40s": Card("L40S", "sm_89", 142, 2.52, 0.864, 96, 46068, 362, "NVIDIA L40S data sheet; Ada paper"),
    "3090": Card("GeForce RTX 3090", "sm_86", 82, 1.695, 0.936, 6, 24576, 71, "NVIDIA Ampere GA102 paper"),
    "4090": Card("GeForce RTX 4090", "sm_89", 128, 2.52, 1.008, 72, 24564, 165.2, "NVIDIA Ada paper, appendix A"),
    "5090": Card(
        "GeForce RTX 5090", "sm_120", 170, 2.407, 1.792, 96, 32607, 209.5, "NVIDIA RTX Blackwell paper, appendix A"
    ),
}

# Lanes a clock and multiprocessor: CUDA C++ Programming Guide, throughput of native arithmetic instructions.
ISSUE_LANES = 128  # four schedulers, a warp's instruction each
ALU_LANES = 64  # integer, logic, shifts
XU_LANES = 16  # conversions, transcendentals
LOAD_STORE_INSTRUCTIONS = 1  # taken from the four schedulers in a clock


def fma_lanes(arch: str) -> int:
    """fp32 multiply-adds a clock and multiprocessor."""
    return 64 if arch in ("sm_75", "sm_80") else 128


def get_card(name: str) -> Card:
    """The card of a key such as "h200" or "5090". Raises ValueError for one that is not in the table."""
    key = name.lower().replace(" ", "").removeprefix("rtx")
    if key not in CARDS:
        raise ValueError(f"unknown card '{name}'; known: {', '.join(CARDS)}")
    return CARDS[key]
