"""What a main loop costs a multiprocessor, pipe by pipe, and so the least time that a card can take for a layer.

A model, not a measurement. It knows of a main loop what the machine code says and, where a kernel declares it, how far
apart the addresses of a warp's lanes are. It leaves out everything else: what is outside of the loop, waiting,
misses in caches, how well the pipes overlap. The largest of its numbers is a lower bound of the time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from . import sass
from .cards import ALU_LANES, ISSUE_LANES, LOAD_STORE_INSTRUCTIONS, XU_LANES, Card, fma_lanes

WARP = 32
BANKS, BANK_BYTES = 32, 4  # of shared memory and of the L1 cache, which lie in the same memory


@dataclass(frozen=True)
class Access:
    """Loads of a main loop that a kernel was designed to have, and where a warp's lanes read.

    bits: of a lane's load. count: such loads in the loop. lane_bytes: from a lane's address to that of the next.
    lanes: neighbouring lanes that share an address.
    """

    what: str
    space: str
    bits: int
    count: int
    lane_bytes: int
    lanes: int = 1

    @property
    def wavefronts(self) -> int:
        """Turns that one such load of a warp takes at the banks."""
        return wavefronts(self.bits, [lane // self.lanes * self.lane_bytes for lane in range(WARP)])


def wavefronts(bits: int, addresses: Sequence[int]) -> int:
    """Turns of the 32 banks that one load of a warp takes, for the byte addresses of its lanes.

    Lanes are served 128 bytes at a time: all 32 of them for loads of up to 32 bits, 16 for 64 bits, 8 for 128. Among
    them, words of 4 bytes in the same bank take turns unless they are the same word (CUDA C++ Programming Guide, on
    shared memory; the L1 cache is taken to behave alike, as it lies in the same memory).
    """
    together = min(WARP, BANKS * BANK_BYTES * 8 // bits)
    turns = 0
    for first in range(0, WARP, together):
        words = {
            word
            for address in addresses[first : first + together]
            for word in range(address // BANK_BYTES, (address + bits // 8 - 1) // BANK_BYTES + 1)
        }
        turns += max(Counter(word % BANKS for word in words).values())
    return turns


@dataclass(frozen=True)
class Bound:
    """Clocks of a multiprocessor for a thousand (1,024) weights, by what would take them; the largest is the bound."""

    clocks: dict[str, float]
    card: Card

    @property
    def by(self) -> str:
        return max(self.clocks, key=lambda name: self.clocks[name])

    @property
    def weights_per_second(self) -> float:
        """Of the whole card, at most."""
        return 1024 / self.clocks[self.by] * self.card.multiprocessors * self.card.clock_ghz * 1e9

    def seconds(self, weights: int) -> float:
        """The least time for a matrix of so many weights, if every multiprocessor has as much to do."""
        return weights / self.weights_per_second


def bound(loop: Sequence[str], weights: int, accesses: Sequence[Access], bytes_per_weight: float, card: Card) -> Bound:
    """The bound of a main loop that takes a warp through `weights` weights of `bytes_per_weight`, scales included.

    accesses: the loop's loads, as its kernel declares them; of other loads, lanes are taken to be adjacent.
    """
    pipes = sass.by_pipe(loop)
    shared, through_l1 = _turns(loop, accesses, "shared"), _turns(loop, accesses, "global")
    stores = sum(_store_turns(line) + _operand_turns(line) for line in loop)
    clocks = {
        "issue": len(loop) * WARP / ISSUE_LANES,
        "ALU": pipes["ALU"] * WARP / ALU_LANES,
        "FMA": pipes["FMA"] * WARP / fma_lanes(card.arch),
        "conversions": pipes["XU"] * WARP / XU_LANES,
        "tensor": sum(map(_multiply_adds, loop)) / card.tensor_per_clock,
        "load/store instructions": pipes["load/store"] / LOAD_STORE_INSTRUCTIONS,
        "load/store data": shared + stores + through_l1,
        "shared memory": shared + stores,
        "memory": weights * bytes_per_weight / card.bytes_per_clock,
    }
    return Bound({name: value * 1024 / weights for name, value in clocks.items()}, card)


def _turns(loop: Sequence[str], accesses: Sequence[Access], space: str) -> float:
    """Turns of the banks that the loop's loads of a space take."""
    left = Counter[int]()
    for load, number in sass.loads(loop).items():
        if load.space == space:
            left[load.bits] += number
    turns = 0
    for access in accesses:
        if access.space == space:
            turns += access.count * access.wavefronts
            left[access.bits] -= access.count
    adjacent = {bits: wavefronts(bits, [lane * bits // 8 for lane in range(WARP)]) for bits in left}
    return turns + sum(max(0, number) * adjacent[bits] for bits, number in left.items())


def _store_turns(instruction: str) -> int:
    """Turns of a store to shared memory by adjacent lanes."""
    first, *words = sass.opcode(instruction).split(".")
    if first not in ("STS", "STSM"):
        return 0
    bits = next((sass.WIDTHS[word] for word in words if word in sass.WIDTHS), 32)
    return max(1, bits // 32)


def _group_columns(instruction: str) -> int:
    """Columns of a warpgroup's tensor instruction (32 of HGMMA.64x32x16), 0 of others."""
    first, *words = sass.opcode(instruction).split(".")
    shape = next((word for word in words if word.startswith("64x")), "") if first == "HGMMA" else ""
    return int(shape.split("x")[1]) if shape else 0


def _operand_turns(instruction: str) -> float:
    """A warp's quarter of the turns in which a warpgroup's instruction reads 16 k of its columns, 16 bits each."""
    return _group_columns(instruction) * 16 * 2 / 128 / 4


def _multiply_adds(instruction: str) -> int:
    """Of one warp's tensor instruction m16n8kK, K from its name: 16 of HMMA.16816, 8 of HMMA.1688, 32 of IMMA.16832.

    A warp's quarter of HGMMA.64xNx16 is m16nNk16.
    """
    first, *words = sass.opcode(instruction).split(".")
    if first not in sass.PIPES["tensor"]:
        return 0
    if columns := _group_columns(instruction):
        return 16 * columns * 16
    shape = next((word for word in words if word.startswith("168")), "16816")
    return 16 * 8 * int(shape[3:])
