"""What the ladder's rows say: where 4 bits overtake 16, and figures of it. Needs no GPU."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .cards import CARDS, Card
from .ladder_rungs import RUNGS

Rows = Sequence[dict[str, Any]]
BASELINE = "ladder_fp16"
LABELS = {rung.stem: rung.stem.removeprefix("ladder_") for rung in RUNGS} | {
    "cublas": "cuBLAS fp16",
    "library": "halfbyte.linear, nf4-64",
}
# Okabe and Ito's palette, told apart by people who do not see all colours; and a marker each.
COLOURS = ("#000000", "#d55e00", "#999999", "#e69f00", "#56b4e9", "#0072b2", "#009e73", "#999933", "#cc79a7")
MARKERS = "osxDv^P*h"
STYLES = {
    name: {"color": COLOURS[i], "marker": MARKERS[i], "label": label} for i, (name, label) in enumerate(LABELS.items())
}
SIDE = 16384  # of the matrix that the article climbs its ladder with


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of the suite in a JSONL file; of several of one point and kernel the last.

    Raises ValueError where there are none or they come from several devices.
    """
    found = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    rows = {(*_point(row), row["rung"]): row for row in found if row.get("suite") == "ladder"}
    if not rows:
        raise ValueError(f"{path} holds no rows of the suite 'ladder'; halfbyte lab ladder --out {path} writes them")
    if len(devices := {row["device"] for row in rows.values()}) > 1:
        raise ValueError(f"{path} holds rows of several devices: {', '.join(sorted(devices))}; keep a file for each")
    return list(rows.values())


def _point(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["sweep"], row["cache"], row["N"], row["K"]


def select(rows: Rows, sweep: str, cache: str, rung: str) -> list[dict[str, Any]]:
    """A kernel's rows of a sweep, by the number of weights, then by K."""
    found = [row for row in rows if (row["sweep"], row["cache"], row["rung"]) == (sweep, cache, rung)]
    return sorted(found, key=lambda row: (row["N"] * row["K"], row["K"]))


def fp16_bytes(row: dict[str, Any]) -> int:
    """What the row's matrix would take in fp16."""
    return int(2 * row["N"] * row["K"])


def overtakes(rows: Rows, sweep: str, cache: str, rung: str, baseline: str = BASELINE) -> float | None:
    """Bytes of the fp16 matrix from which on a kernel is faster than the baseline, at all larger sizes measured.

    Interpolated between the two sizes where the ratio of times passes 1; the smallest size where it is faster at all of
    them, None where it is slower at the largest or nothing was measured.
    """
    times = {_point(row): row["us"] for row in select(rows, sweep, cache, baseline)}
    ratios = [
        (math.log(fp16_bytes(row)), math.log(times[_point(row)] / row["us"]))
        for row in select(rows, sweep, cache, rung)
        if _point(row) in times
    ]
    if not ratios or ratios[-1][1] <= 0:
        return None
    for (low, slower), (high, faster) in zip(reversed(ratios[:-1]), reversed(ratios[1:]), strict=True):
        if slower <= 0:
            return math.exp(low + (high - low) * -slower / (faster - slower))
    return math.exp(ratios[0][0])


def card_of_device(device: str) -> Card | None:
    """The card of the table that a device's name tells, or None."""
    words = device.lower().replace("-", " ").split()
    return next((card for key, card in CARDS.items() if key in words), None)


def predicted(device: str) -> dict[str, tuple[float, str]]:
    """Least microseconds at 16384 × 16384 of each rung on the device's card, and by what; empty where it is unknown."""
    from .sass_report import Problem, examine

    card = card_of_device(device)
    if card is None:
        return {}
    result = {}
    for rung in RUNGS:
        report = examine(rung.stem, card.arch, Problem(n=SIDE, k=SIDE), card)
        if report.bound and report.least_us:
            result[rung.stem] = report.least_us, report.bound.by
    return result


def draw(rows: Rows, folder: Path, stem: str) -> list[Path]:
    """Figures as SVG and PNG, <stem>-rungs, -square, -l2 and -shape; those whose rows are there. Returns their paths.

    Raises ModuleNotFoundError without matplotlib.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("lab ladder --figures needs matplotlib: pip install 'halfbyte[lab]'") from error
    matplotlib.use("Agg")
    matplotlib.rcParams |= {
        "font.size": 9,
        "svg.hashsalt": "halfbyte",
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {"rungs": _rungs(rows), "square": _square(rows), "l2": _l2(rows), "shape": _shape(rows)}
    paths = []
    for name, figure in drawn.items():
        if figure is None:
            continue
        for suffix, options in (("svg", {"metadata": {"Date": None}}), ("png", {"dpi": 150})):
            path = folder / f"{stem}-{name}.{suffix}"
            figure.savefig(path, bbox_inches="tight", **options)
            paths.append(path)
    return paths


def _new(title: str, rows: Rows, height: float = 4.2) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, height))
    axes = figure.add_subplot()
    axes.set_title(f"{title}\n{rows[0]['device']}, y = W x in fp16, commit {rows[0]['commit']}", loc="left", fontsize=9)
    return figure, axes


def _rungs(rows: Rows) -> Any:
    """Bars at one size, with what the machine code predicts."""
    times = {row["rung"]: row for row in rows if _point(row) == ("square", "cold", SIDE, SIDE)}
    if not times:
        return None
    names = [name for name in LABELS if name in times]
    figure, axes = _new(f"{SIDE} × {SIDE}, weights from memory", rows)
    places = range(len(names))
    bars = axes.barh(places, [times[name]["us"] for name in names], color=[STYLES[name]["color"] for name in names])
    axes.bar_label(bars, [f"{times[name]['us']:.1f} µs" for name in names], padding=3)
    least = predicted(str(rows[0]["device"]))
    marks = [(place, least[name][0]) for place, name in zip(places, names, strict=True) if name in least]
    if marks:
        axes.plot([us for _, us in marks], [place for place, _ in marks], "|", color="#cc0000", markersize=18, mew=2)
        axes.plot([], [], "|", color="#cc0000", mew=2, label="least time predicted from the machine code")
        axes.legend(frameon=False, loc="lower right")
    axes.set_yticks(places, [LABELS[name] for name in names])
    axes.invert_yaxis()
    axes.set_xlabel("µs a call")
    return figure


def _lines(axes: Any, rows: Rows, sweep: str, x: Any, y: Any, caches: Iterable[str] = ("cold",)) -> bool:
    """A line for each kernel, dashed where the weights are warm. Whether there was anything to draw."""
    found = False
    for cache in caches:
        for name, style in STYLES.items():
            chosen = select(rows, sweep, cache, name)
            values = [(x(row), y(row)) for row in chosen if y(row) is not None]
            if values:
                line = dict(style) if cache == "cold" or "cold" not in caches else style | {"label": None}
                axes.plot(*zip(*values, strict=True), markersize=4, lw=1.2, ls="-" if cache == "cold" else ":", **line)
                found = True
    return found


def _legend_beside(axes: Any) -> None:
    axes.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _square(rows: Rows) -> Any:
    """Effective bandwidth against the side of a square, beside the ceilings."""
    figure, axes = _new("Square matrices, weights from memory: bytes of weights over time", rows)
    if not _lines(axes, rows, "square", lambda row: row["N"], lambda row: row["tb_per_s"]):
        return None
    for name, label in (("ceiling_tb_per_s", "read ceiling"), ("copy_tb_per_s", "copy ceiling")):
        axes.axhline(rows[0][name], color="#555555", lw=0.8, ls="--")
        axes.annotate(
            label, (1, rows[0][name]), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=7
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(sides := sorted({row["N"] for row in rows if row["sweep"] == "square"}), list(map(str, sides)))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("N = K")
    axes.set_ylabel("TB/s")
    _legend_beside(axes)
    return figure


def _l2(rows: Rows) -> Any:
    """How much faster than the fp16 baseline, across the sizes at which weights cease to fit the L2."""
    times = {_point(row): row["us"] for row in rows if row["rung"] == BASELINE}

    def ratio(row: dict[str, Any]) -> float | None:
        base = times.get(_point(row))
        return None if base is None or row["rung"] == BASELINE else base / row["us"]

    figure, axes = _new("K = 4096: the fp16 rung's time over a kernel's; dotted: weights warm", rows)
    if not _lines(axes, rows, "l2", lambda row: fp16_bytes(row) / row["l2_bytes"], ratio, ("cold", "warm")):
        return None
    axes.axhline(1, color="#555555", lw=0.8)
    for share, label in ((1, "fp16 fills the L2"), (32 / 9, "Q4 fills the L2")):
        axes.axvline(share, color="#555555", lw=0.8, ls="--")
        axes.annotate(
            label, (share, 1), xycoords=("data", "axes fraction"), rotation=90, ha="right", va="top", fontsize=7
        )
    axes.set_xscale("log", base=2)
    axes.set_xlabel(f"bytes of the fp16 weights over the L2's {rows[0]['l2_bytes'] / 2**20:.0f} MiB")
    axes.set_ylabel("times as fast as the fp16 rung")
    _legend_beside(axes)
    return figure


def _shape(rows: Rows) -> Any:
    """Time against K at the same number of weights."""
    figure, axes = _new("The same bytes in other shapes, weights from memory", rows)
    if not _lines(axes, rows, "shape", lambda row: row["K"], lambda row: row["us"]):
        return None
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    chosen = [row for row in rows if row["sweep"] == "shape"]
    axes.set_xticks(ks := sorted({row["K"] for row in chosen}), list(map(str, ks)))
    for formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        formatter(lambda us, _: f"{us:g}")
    axes.set_xlabel(f"K, with N × K = {chosen[0]['N'] * chosen[0]['K']:,}")
    axes.set_ylabel("µs a call")
    _legend_beside(axes)
    return figure
