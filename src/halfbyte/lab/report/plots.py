"""Result rows as figures: roofline, time against M, bandwidth against size, error of a proof's layers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..ladder_figures import LABELS, card_of_device
from .rows import Row, by, is_ours, label_of, of_suite, provenance
from .svg import ACCENT, FAINT, INK, MARKERS, SERIES, inline, new_figure
from .tables import Table, layer_table


@dataclass(frozen=True)
class Key:
    """An entry of a legend: the class of its colour, its sign, what it stands for."""

    colour: str
    sign: str
    label: str


@dataclass(frozen=True)
class Plot:
    """A figure as inline SVG, under its title."""

    title: str
    svg: str


@dataclass(frozen=True)
class Group:
    """Figures that share a legend, with the rows that they show."""

    title: str
    about: list[str]
    legend: list[Key]
    plots: list[Plot]
    rows: list[Row] = field(default_factory=list)

    @property
    def numbers(self) -> Table | None:
        """The rows as a table."""
        return layer_table("", self.rows)


def flops(row: Row) -> float:
    """Multiplications and additions of y = x W^T."""
    return float(2 * row["M"] * row["N"] * row["K"])


def floor_us(row: Row) -> float:
    """Microseconds that the row's bytes take at the read ceiling of its run."""
    return float(row["bytes"] / row["ceiling_tb_per_s"] / 1e6)


def _look(number: int) -> tuple[int, tuple[str, str]]:
    """Colour and marker of a series: other pairs where there are more series than colours."""
    return number % len(SERIES), MARKERS[(number + number // len(SERIES)) % len(MARKERS)]


def _styles(labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    """How matplotlib draws each label."""
    looks = {label: _look(number) for number, label in enumerate(labels)}
    return {label: {"color": SERIES[colour], "marker": marker} for label, (colour, (marker, _)) in looks.items()}


def _legend(labels: Sequence[str]) -> list[Key]:
    """The same for the reader."""
    looks = {label: _look(number) for number, label in enumerate(labels)}
    return [Key(f"series-{colour}", sign, label) for label, (colour, (_, sign)) in looks.items()]


def _labels(rows: Sequence[Row]) -> list[str]:
    """Ours first, then by name of first appearance."""
    return list(dict.fromkeys(label_of(row) for row in sorted(rows, key=lambda row: not is_ours(row))))


def _dots(axes: Any, points: Sequence[tuple[float, float]], style: dict[str, Any], label: str) -> None:
    """Points; peers' are hollow, so that those beneath show."""
    fill = "full" if label.startswith("halfbyte") else "none"
    axes.plot(*zip(*points, strict=True), linestyle="none", fillstyle=fill, **style)


def _plain(axes: Any, which: str, base: int = 10) -> None:
    """A logarithmic axis with numbers written out."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    getattr(axes, f"set_{which}scale")("log", base=base)
    axis = getattr(axes, f"{which}axis")
    low, high = getattr(axes, f"get_{which}lim")()
    subs = (1, 2, 5) if high / low < 40 else (1, 3) if high / low < 1000 else (1,)
    axis.set_major_locator(LogLocator(base=base, subs=subs if base == 10 else (1,)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))


def roofline_groups(rows: Sequence[Row]) -> list[Group]:
    """For each device one figure: FLOP/s achieved against FLOP a byte of weights, under the roofs.

    A device that was measured at one intensity only has no figure.
    """
    found: list[Group] = []
    for (device,), mine in by(
        [row for row in of_suite(rows, "linear", "layer") if row["ceiling_tb_per_s"]], "device"
    ).items():
        if len({flops(row) / row["bytes"] for row in mine}) < 2:
            continue
        labels = list(dict.fromkeys(row["kernel"] for row in sorted(mine, key=lambda row: not is_ours(row))))
        styles = _styles(labels)
        figure, axes = new_figure()
        for label in labels:
            points = [
                (flops(row) / row["bytes"], flops(row) / row["us"] / 1e6) for row in mine if row["kernel"] == label
            ]
            _dots(axes, points, styles[label], label)
        about = _roofs(axes, device, mine)
        axes.set_xlabel("FLOP a byte of weights")
        axes.set_ylabel("TFLOP/s")
        _plain(axes, "x", base=2)
        _plain(axes, "y")
        best = max(mine, key=lambda row: row["tb_per_s"] / row["ceiling_tb_per_s"])
        alt = (
            f"Roofline of {device}: {len(mine)} measurements of {', '.join(labels)}. Nearest to the memory roof: "
            f"{label_of(best)} at M = {best['M']}, {best['N']} × {best['K']}, with "
            f"{best['tb_per_s'] / best['ceiling_tb_per_s']:.2f} of the read ceiling."
        )
        plot = Plot("", inline(figure, f"roofline{len(found)}", alt))
        found.append(Group(device, [*about, provenance(mine)], _legend(labels), [plot], mine))
    return found


def _roofs(axes: Any, device: str, rows: Sequence[Row]) -> list[str]:
    """Draw what bounds the device, and return what the reader must know of it."""
    measured = statistics.median(row["ceiling_tb_per_s"] for row in rows)
    card = card_of_device(device)
    intensities = [flops(row) / row["bytes"] for row in rows]
    left, right = min(intensities) / 1.5, max(intensities) * 1.5
    about = [f"Solid: the read ceiling measured in these runs, {_rate(measured)} (median)."]
    if card is None:
        about.append("No roof of arithmetic: the package's table of cards does not hold this device.")
    else:
        right = max(right, 1.5 * card.tensor_tflops / measured)
        quoted = card.memory_tb_per_s
        axes.plot(
            [left, card.tensor_tflops / quoted], [left * quoted, card.tensor_tflops], color=FAINT, ls=":", marker=""
        )
        axes.plot([card.tensor_tflops / quoted, right], [card.tensor_tflops] * 2, color=FAINT, ls=":", marker="")
        about.append(
            f"Dotted, quoted and not measured ({card.source}): {_rate(quoted)} and "
            f"{card.tensor_tflops:g} TFLOP/s in fp16."
        )
    end = min(right, card.tensor_tflops / measured) if card else right
    axes.plot([left, end], [left * measured, end * measured], color=INK, ls="-", marker="", lw=1)
    return about


def _rate(tb_per_s: float) -> str:
    return f"{tb_per_s:.2f} TB/s" if tb_per_s >= 0.1 else f"{tb_per_s * 1e3:.1f} GB/s"


def time_groups(rows: Sequence[Row], prefix: str = "time") -> list[Group]:
    """For each device and dtype, a figure for each shape that was measured at several M: µs a call, floor and peers."""
    found: list[Group] = []
    chosen = [row for row in rows if row["suite"] in ("linear", "linear-warm", "layer", "prove")]
    for (suite, device, dtype), mine in by(chosen, "suite", "device", "dtype").items():
        shapes = {shape: at for shape, at in sorted(by(mine, "N", "K").items()) if len({row["M"] for row in at}) > 1}
        if not shapes:
            continue
        shown = [row for at in shapes.values() for row in at]
        labels = _labels(shown)
        plots = [
            Plot(f"N × K = {n} × {k}", _time(at, _styles(labels), f"{prefix}{len(found)}-{n}x{k}", (n, k)))
            for (n, k), at in shapes.items()
        ]
        about = [f"x in {dtype}; {_where(suite)}. Bars: 20th to 80th percentile. {provenance(shown)}."]
        legend = _legend(labels)
        if any(map(_has_floor, shown)):
            legend.append(Key("ink", "╌╌", "floor: our smallest format's bytes at the read ceiling of its run"))
        found.append(Group(f"{device}, {dtype}, suite {suite}", about, legend, plots, shown))
    return found


def _where(suite: str) -> str:
    return "one copy of the weights, in the caches" if suite == "linear-warm" else "weights from memory"


def _has_floor(row: Row) -> bool:
    return is_ours(row) and row["ceiling_tb_per_s"] > 0


def _time(rows: Sequence[Row], styles: dict[str, dict[str, Any]], name: str, shape: tuple[int, int]) -> str:
    figure, axes = new_figure()
    words = []
    for label, style in styles.items():
        mine = sorted((row for row in rows if label_of(row) == label), key=lambda row: row["M"])
        if not mine:
            continue
        us = [row["us"] for row in mine]
        spread = [
            [max(0.0, row["us"] - row["us_p20"]) for row in mine],
            [max(0.0, row["us_p80"] - row["us"]) for row in mine],
        ]
        axes.errorbar([row["M"] for row in mine], us, yerr=spread, elinewidth=0.8, **style)
        words.append(f"{label}: " + ", ".join(f"{row['us']:,.1f} at M = {row['M']}" for row in mine))
    floors = [floor_us(row) for row in rows if _has_floor(row)]
    if floors:
        axes.axhline(min(floors), color=INK, lw=1, ls="--")
        words.append(f"floor: {min(floors):,.1f}")
    _plain(axes, "x", base=2)
    _plain(axes, "y")
    ms = sorted({row["M"] for row in rows})
    axes.set_xticks(ms, list(map(str, ms)))
    axes.set_xlabel("M, rows of x")
    axes.set_ylabel("µs a call")
    return inline(figure, name, f"Microseconds a call for {shape[0]} × {shape[1]}. {'; '.join(words)}.")


SWEEPS = {
    ("l2", "cold"): "K = 4096, weights from memory",
    ("l2", "warm"): "K = 4096, the same weights again and again",
    ("square", "cold"): "square matrices, weights from memory",
}


def bandwidth_groups(rows: Sequence[Row]) -> list[Group]:
    """For each device of the ladder's rows: effective bandwidth against bytes of weights, with the L2's size."""
    found: list[Group] = []
    for (device,), mine in by(of_suite(rows, "ladder"), "device").items():
        names = [name for name in LABELS if any(row["rung"] == name for row in mine)]
        names += sorted({row["rung"] for row in mine} - set(names))
        styles = _styles(names)
        plots = []
        for (sweep, cache), title in SWEEPS.items():
            at = [row for row in mine if (row["sweep"], row["cache"]) == (sweep, cache)]
            if at:
                plots.append(Plot(title, _bandwidth(at, styles, f"bandwidth{len(found)}-{sweep}-{cache}", title)))
        about = [
            "Bytes of weights over time. Upright line: the L2's size, as the device reports it. Dashed: ceilings of a "
            f"read and of a copy of the same run. {provenance(mine)}."
        ]
        found.append(Group(device, about, _legend([LABELS.get(name, name) for name in names]), plots, mine))
    return found


def _bandwidth(rows: Sequence[Row], styles: dict[str, dict[str, Any]], name: str, title: str) -> str:
    figure, axes = new_figure(height=3.4)
    words = []
    for rung, style in styles.items():
        mine = sorted((row for row in rows if row["rung"] == rung), key=lambda row: row["bytes"])
        if mine:
            axes.plot([row["bytes"] / 2**20 for row in mine], [row["tb_per_s"] for row in mine], **style)
            best = max(mine, key=lambda row: row["tb_per_s"])
            words.append(
                f"{LABELS.get(rung, rung)} at most {best['tb_per_s']:.2f}, at {best['bytes'] / 2**20:,.0f} MiB"
            )
    cache = rows[0]["l2_bytes"] / 2**20
    axes.axvline(cache, color=ACCENT, lw=1.2)
    where = {"xycoords": ("data", "axes fraction"), "fontsize": 8, "rotation": 90, "ha": "left", "va": "bottom"}
    axes.annotate(f" L2, {cache:.0f} MiB", (cache, 0.02), color=ACCENT, **where)
    for column, words_of in (("ceiling_tb_per_s", "read"), ("copy_tb_per_s", "copy")):
        level = statistics.median(row[column] for row in rows)
        axes.axhline(level, color=INK, lw=0.9, ls="--")
        axes.annotate(words_of, (1, level), xycoords=("axes fraction", "data"), fontsize=8, ha="right", va="bottom")
    _plain(axes, "x", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("MiB of weights")
    axes.set_ylabel("TB/s")
    return inline(figure, name, f"Bandwidth, {title}, TB/s; L2 of {cache:.0f} MiB. {'; '.join(words)}.")


def error_group(document: dict[str, Any], prefix: str) -> Group:
    """A proof's layers: error over the rounding limit, ours and the peers'."""
    layers, allowed = document["layers"], document["summary"]["allowed"]["over_limit"]
    series = {"halfbyte": [(i, _worst(layer["halfbyte"])) for i, layer in enumerate(layers)]}
    for name in document["peers"]:
        series[name] = [(i, _worst(layer["peers"][name])) for i, layer in enumerate(layers) if name in layer["peers"]]
    series = {name: points for name, points in series.items() if points}
    figure, axes = new_figure()
    styles = _styles(list(series))
    for name, points in reversed(series.items()):
        _dots(axes, points, styles[name], name)
    axes.axhline(allowed, color=INK, lw=1, ls="--")
    axes.annotate(
        f"{allowed:g} allowed", (1, allowed), xycoords=("axes fraction", "data"), fontsize=8, ha="right", va="bottom"
    )
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("layer, in the checkpoint's order")
    axes.set_ylabel("error / rounding limit")
    words = [
        f"{name}: {min(y for _, y in points):.3f} to {max(y for _, y in points):.3f}" for name, points in series.items()
    ]
    alt = f"Error over the rounding limit of {len(layers)} layers. {'; '.join(words)}; {allowed:g} allowed."
    about = ["The larger of a layer's errors in bf16 and fp16 against float64, in multiples of the rounding limit."]
    return Group("Every layer", about, _legend(list(series)), [Plot("", inline(figure, f"{prefix}-error", alt))])


def _worst(record: dict[str, Any]) -> float:
    return max(map(float, record["over_limit"].values()))
