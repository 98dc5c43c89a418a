"""docs/ladder.md quotes the rows of the H200: every number in its tables is one of them, or follows from them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from halfbyte.kernels import nvrtc
from halfbyte.lab.ladder_figures import SIDE, overtakes, predicted, read_rows

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "ladder.md").read_text()
ROWS = read_rows(ROOT / "benchmarks" / "results" / "h200-ladder.jsonl")
SQUARE = {row["rung"]: row for row in ROWS if (row["sweep"], row["cache"], row["N"]) == ("square", "cold", SIDE)}
NAME = re.compile(r"`(ladder_\w+|cublas|library)`")


def table(heading: str) -> list[list[str]]:
    """The cells of the first table below a line that contains `heading`, without its head."""
    lines = PAGE[PAGE.index(heading) :].splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("|"))
    body = lines[first + 2 :]
    last = next(i for i, line in enumerate(body) if not line.startswith("|"))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in body[:last]]


def us(sweep: str, cache: str, rung: str, **where: int) -> list[float]:
    """The times of a kernel at the points of a sweep, of all where nothing is asked for."""
    found: list[dict[str, Any]] = [
        row for row in ROWS if (row["sweep"], row["cache"], row["rung"]) == (sweep, cache, rung)
    ]
    return [row["us"] for row in found if all(row[key] == value for key, value in where.items())]


def test_the_times_of_the_rungs():
    cells = table("## What the machine code predicts")
    names = [match[1] for row in cells if (match := NAME.match(row[0]))]
    assert set(names) == set(SQUARE)
    assert len(cells) == len(names)
    base = SQUARE["ladder_fp16"]["us"]
    for name, row in zip(names, cells, strict=True):
        measured = SQUARE[name]
        expected = (f"{measured['us']:.1f}", f"{measured['tb_per_s']:.2f}", f"{base / measured['us']:.2f}")
        assert tuple(row[6:]) == expected, name


@pytest.mark.skipif(nvrtc.missing() is not None, reason="no NVRTC here: pip install 'halfbyte[cuda]'")
def test_the_predictions_for_the_h200():
    pytest.importorskip("cuda.core")
    least = predicted("NVIDIA H200")
    for row in table("## What the machine code predicts"):
        name = NAME.match(row[0])[1]
        if name in least:
            time, by = least[name]
            # the compiler of the day may schedule a loop a little differently
            assert float(row[4]) == pytest.approx(time, rel=0.03), name
            assert row[5] == by, name


def test_where_4_bits_overtake_16():
    for row in table("**Where 4 bits overtake 16.**"):
        for name in NAME.findall(row[0]):
            for cell, cache in zip(row[1:], ("cold", "warm"), strict=True):
                size = overtakes(ROWS, "l2", cache, name)
                assert cell == ("never" if size is None else f"{size / 2**20:.0f} MiB"), (name, cache)


def test_the_sentences():
    """Numbers in running text, each with the words around it."""
    first, second = (us("square", "cold", name, N=SIDE)[0] for name in ("ladder_q4_bytes", "ladder_q4_codes"))
    fp16, control = (us("square", "cold", name, N=SIDE)[0] for name in ("ladder_fp16", "ladder_q4_adjacent"))
    wide, rows, bits = (us("square", "cold", f"ladder_q4_{name}", N=SIDE)[0] for name in ("wide", "rows", "bits"))
    half = [us("l2", "warm", name, N=3840)[0] for name in ("ladder_fp16", "ladder_q4_bytes")]
    worst = max(ROWS, key=lambda row: row["error"] / row["rounding_limit"])
    ceiling, copy = (ROWS[0][f"{name}_tb_per_s"] for name in ("ceiling", "copy"))
    shape = us("shape", "cold", "ladder_q4_wide", K=2048) + us("shape", "cold", "library", K=131072)
    for words in (
        f"({len(ROWS)} rows of commit {ROWS[0]['commit'][:7]}",
        f"A plain read ran at {ceiling:.2f} TB/s in the same process, a copy at {copy:.2f}",
        f"{fp16:.0f} µs to {first:.0f}",
        f"{second / fp16:.1f} times as slow here",
        f"took {control:.0f} µs: {first / control:.1f} times as fast as the first kernel",
        f"for two rows: {wide / rows:.2f} times as fast",
        f"{rows / bits:.2f} times more",
        f"fp16 takes {half[0]:.1f} µs and the first kernel {half[1]:.1f}",
        f"takes {shape[0]:.1f} µs at K = 2048",
        f"the library takes {shape[1]:.1f} at K = 131072",
        f"up to {worst['error'] / worst['rounding_limit']:.3f} of it ({worst['N']} × {worst['K']})",
    ):
        assert words in re.sub(r"\s+", " ", PAGE), words
    assert {row["commit"] for row in ROWS} == {ROWS[0]["commit"]}
    assert all(row["error"] / row["rounding_limit"] < 1.001 for row in ROWS if row["rung"].startswith("ladder_"))


def test_the_figures_are_there():
    for link in re.findall(r"!\[[^]]+\]\(([^)]+)\)", PAGE):
        assert (ROOT / "docs" / link).is_file(), link
