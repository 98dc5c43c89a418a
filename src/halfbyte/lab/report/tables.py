"""Result rows as tables: single layers in numbers, speed-ups over peers, and the suites that have no figure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .rows import Row, by, is_ours, label_of, of_suite


@dataclass(frozen=True)
class Table:
    """Cells as text: `left` columns of words, the first of which is each row's heading, then numbers."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    left: int = 1


def rows_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], left: int = 1) -> Table:
    """A table of any values, as text."""
    return Table(title, list(columns), [[str(cell) for cell in row] for row in rows], left)


def layer_table(title: str, rows: Iterable[Row]) -> Table | None:
    """Rows of single layers, in numbers; None where there are none."""
    ordered = sorted(
        rows, key=lambda row: (row["N"], row["K"], row["M"], row["dtype"], not is_ours(row), label_of(row))
    )
    columns = [
        "kernel",
        "format",
        "x",
        "N × K",
        "M",
        "µs",
        "p20 to p80",
        "of ceiling",
        "error / limit",
        "commit",
        "date",
    ]
    cells = [
        [
            row["kernel"], row["format"], row["dtype"], f"{row['N']} × {row['K']}", row["M"], f"{row['us']:,.2f}",
            f"{row['us_p20']:,.2f} to {row['us_p80']:,.2f}",
            f"{row['tb_per_s'] / row['ceiling_tb_per_s']:.2f}" if row["ceiling_tb_per_s"] else "",
            f"{row['error'] / row['rounding_limit']:.3f}" if row["rounding_limit"] else "",
            row["commit"], row["date"][:10],
        ]
        for row in ordered
    ]  # fmt: skip
    return rows_table(title, columns, cells, left=4) if cells else None


def speedups(rows: Sequence[Row]) -> list[Table]:
    """For each device and dtype a table: ours over each peer, by M; pairs are of the same run, shape and M.

    A peer's 4-bit format must be ours; dense layers, and peers whose format we have no rows of, stand beside all.
    """
    tables = []
    ours_have = {row["format"] for row in rows if is_ours(row)}
    for (device, dtype), mine in by(rows, "device", "dtype").items():
        ratios: dict[tuple[str, str], dict[int, list[float]]] = {}
        for run in by(mine, "suite", "date", "commit", "N", "K", "M").values():
            for ours in filter(is_ours, run):
                for peer in run:
                    if is_ours(peer) or (peer["format"] in ours_have and peer["format"] != ours["format"]):
                        continue
                    by_m = ratios.setdefault((label_of(ours), label_of(peer)), {})
                    by_m.setdefault(ours["M"], []).append(peer["us"] / ours["us"])
        ms = sorted({m for by_m in ratios.values() for m in by_m})
        cells = [
            [*pair, *(f"{_geomean(by_m[m]):.2f} ({len(by_m[m])})" if m in by_m else "" for m in ms)]
            for pair, by_m in ratios.items()
        ]
        if cells:
            columns = ["halfbyte's", "peer", *(f"M = {m}" for m in ms)]
            tables.append(
                rows_table(f"{device}, x in {dtype}; in brackets the number of shapes", columns, cells, left=2)
            )
    return tables


def _geomean(ratios: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def _adapters(row: Row) -> str:
    """How many a server has, and whether requests use them."""
    return f"{row.get('adapters', 0)}{', none in use' if row.get('adapters_in_use') == 0 else ''}"


def other_suites(rows: Sequence[Row]) -> list[Table]:
    """What has no figure of its own, as tables."""
    tables: list[Table] = []
    for row in of_suite(rows, "nf4-16"):
        title = f"nf4-16 on {row['device']}: geometric mean of {row['cases']} single-token cases"
        cells = [[row["kernel"], row["peer"], f"{row['geomean_speedup']:.3f}", row["commit"], row["date"][:10]]]
        tables.append(rows_table(title, ["kernel", "peer", "times as fast", "commit", "date"], cells, left=2))
    titles = {
        "nf4-16-case": "Cases of nf4-16: µs of an eager call, the larger of the host's time and the device's",
        "overhead": "overhead: µs of the host for an eager call on a tiny layer",
    }
    for suite, title in titles.items():
        for (device,), mine in by(of_suite(rows, suite), "device").items():
            if found := layer_table(f"{title}; {device}", mine):
                tables.append(found)
    columns = ["kernel", "model", "format", "adapters", "users", "tokens", "tokens/s", "ms a token", "spread"]
    columns += ["commit", "date"]
    for (device,), mine in by(of_suite(rows, "serve"), "device").items():
        cells = [
            [row["kernel"], row.get("model", ""), row["format"], _adapters(row), row["users"],
             f"{row.get('prompt_tokens', '?')} + {row.get('new_tokens', '?')}", f"{row['tokens_per_s']:,.1f}",
             f"{row['tpot_ms']:.2f}", f"{100 * row['spread']:.1f} %", row["commit"], row["date"][:10]]
            for row in sorted(mine, key=lambda row: (row.get("model", ""), _adapters(row), row["users"]))
        ]  # fmt: skip
        tables.append(rows_table(f"serve: a whole model; {device}", columns, cells, left=3))
    return tables
