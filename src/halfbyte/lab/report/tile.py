"""What the data flow of one output tile is counted from: bytes of a format's parts, the tensor core's shape, memories.

The sizes are the user's, so the page multiplies; every number that it multiplies with comes from here.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch

from ...formats import BlockFormat, get_format
from ..cards import CARDS
from ..ladder_figures import card_of_device
from .explorer import families
from .rows import Row, by

MMA = {"m": 16, "n": 8, "k": 16}  # mma.m16n8k16: weights are its A operand, rows of x its 8 columns
ACTIVATION_BYTES = 2  # bf16 or fp16
SUM_BYTES = 4  # fp32
TILE_ROWS = (16, 32, 64, 128)
LARGE = 4096  # sides of a matrix that whole blocks of every format, and whole second-level blocks, divide


def part_sizes(format: BlockFormat) -> list[dict[str, Any]]:
    """For each part: `bytes` for each begun run of `weights` weights along the flattened matrix, and `fixed` bytes.

    Read off `format.parts` at two sizes; for a matrix that the format can hold, fixed + bytes · ceil(N · K / weights)
    is the part's size.
    """
    small, large = format.parts(LARGE, LARGE), format.parts(2 * LARGE, LARGE)
    found = []
    for name, part in small.items():
        item = torch.empty(0, dtype=part.dtypes[0]).element_size()
        first, second = (item * math.prod(each[name].shape) for each in (small, large))
        slope = Fraction(second - first, LARGE * LARGE)
        fixed = int(first - slope * LARGE * LARGE)
        size = math.lcm(slope.numerator, item) if slope else 0
        weights = int(size / slope) if slope else 1
        found.append({"name": name, "bytes": size, "weights": weights, "fixed": fixed})
    return found


def bits_per_weight(format: BlockFormat) -> float:
    """Of a large matrix."""
    return float(sum(Fraction(8 * part["bytes"], part["weights"]) for part in part_sizes(format)))


def multiples(format: BlockFormat) -> tuple[int, int]:
    """What N and K must be multiples of, by asking the format."""

    def holds(n: int, k: int) -> bool:
        try:
            format.check_shape(n, k)
        except ValueError:
            return False
        return True

    k = next(k for k in range(1, LARGE + 1) if holds(LARGE, k))
    return next(n for n in range(1, LARGE + 1) if holds(n, k)), k


def tile_data(rows: Sequence[Row]) -> dict[str, Any]:
    """What the page counts with; `rows` give the read ceilings of the devices that they were measured on."""
    return {
        "families": [
            {"name": name, "formats": [_format(get_format(key)) for key in keys]} for name, keys in families().items()
        ],
        "mma": MMA,
        "activation_bytes": ACTIVATION_BYTES,
        "sum_bytes": SUM_BYTES,
        "tile_rows": TILE_ROWS,
        "memories": memories(rows),
    }


def _format(format: BlockFormat) -> dict[str, Any]:
    n, k = multiples(format)
    return {
        "key": format.key,
        "blocksize": format.blocksize,
        "bits": bits_per_weight(format),
        "parts": part_sizes(format),
        "codes_part": format.layout.part,
        "n_multiple": n,
        "k_multiple": k,
        "offset": format.offset is not None,
    }


def memories(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Bandwidths to reckon with: read ceilings of the rows, GPUs first, then what the cards' vendors quote.

    `tflops` is always quoted; None for a device that is not in the table of cards.
    """
    found: list[dict[str, Any]] = []
    measured = by([row for row in rows if row.get("ceiling_tb_per_s")], "device")
    for (device,), mine in sorted(measured.items(), key=lambda item: not item[1][0]["arch"].startswith("sm_")):
        ceiling = statistics.median(row["ceiling_tb_per_s"] for row in mine)
        known = card_of_device(device)
        tflops = known.tensor_tflops if known else None
        found.append({"name": f"{device}, read ceiling measured", "tb_per_s": ceiling, "tflops": tflops})
    for card in CARDS.values():
        found.append({"name": f"{card.name}, quoted", "tb_per_s": card.memory_tb_per_s, "tflops": card.tensor_tflops})
    return found
