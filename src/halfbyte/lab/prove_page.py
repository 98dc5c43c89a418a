"""The document of `halfbyte prove` as a page of tables."""

from __future__ import annotations

import statistics
from typing import Any

from rich.console import Console
from rich.table import Table

WORST = 5  # layers listed by name


def show(document: dict[str, Any], console: Console) -> None:
    """Print the page: a verdict first, then what it rests on."""
    model, summary = document["model"], document["summary"]
    environment = document["environment"]
    bits = model["packed_bytes"] * 8 / model["weights"]
    _line(console, f"{model['path']}: {model['packed_layers']} packed layers, {bits:.2f} bits a weight")
    _line(console, f"on {environment['device']}, torch {environment['torch']}, halfbyte {environment['commit']}")
    if document["not_installed"]:
        _line(console, f"not installed, not compared: {', '.join(document['not_installed'])}")
    _line(console, "")
    _exactness(document, console)
    _worst(document, console)
    if summary["adapters"]:
        _adapters(document, console)
    if document.get("speed"):
        _speed(document, console)
    if document.get("end_to_end"):
        _model(document["end_to_end"], console)
        _greedy(document, console)
    _line(console, _verdict(summary))


def _line(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True)


def _table(console: Console, title: str, columns: list[str], rows: list[list[str]]) -> None:
    """The first column to the left, numbers to the right."""
    table = Table(*columns, title=title, title_justify="left")
    table.columns[0].overflow = "fold"
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _exactness(document: dict[str, Any], console: Console) -> None:
    dtype = document["run"]["settings"]["dtype"]
    summary = document["summary"]
    rows = []
    for name, record in {"halfbyte (all dtypes)": summary["halfbyte"], **summary["peers"]}.items():
        over = record["over_limit"]
        fp32 = "" if record["error_fp32"] is None else f"{record['error_fp32']:.1e}"
        difference = f"{record['difference']['median']:.2e}" if "difference" in record else ""
        rows.append(
            [
                name, str(record["layers"]), f"{over['median']:.3f}", f"{over['max']:.3f}", fp32,
                f"{100 * record['equal']:.1f} %", str(record["worst_ulp"]), difference,
            ]
        )  # fmt: skip
    columns = [
        "layers against float64",
        "layers",
        "error / limit",
        "worst",
        "fp32",
        "one-hot equal",
        "ulp off",
        "≠ ours",
    ]
    title = f"error over the rounding limit of the output (1.1 allowed; peers in {dtype}), and single weights read back"
    _table(console, title, columns, rows)


def _worst(document: dict[str, Any], console: Console) -> None:
    layers = sorted(document["layers"], key=lambda layer: (layer["ok"], -_over(layer["halfbyte"])))[:WORST]
    names = [name for name in document["peers"] if any(name in layer["peers"] for layer in layers)]
    rows = []
    for layer in layers:
        one_hot = "read back" if layer["one_hot_ok"] else "NOT read back"
        swap = {True: "seen", False: "NOT seen", None: "no change"}[layer["swap_detected"]]
        theirs = [f"{_over(layer['peers'][name]):.3f}" if name in layer["peers"] else "" for name in names]
        shape = " × ".join(map(str, layer["shape"]))
        ours = f"{_over(layer['halfbyte']):.4f}"
        rows.append([layer["name"], f"{shape}  {layer['format']}", ours, *theirs, f"{one_hot}, {swap}"])
    heads = [name.replace(" ", "\n") for name in names]  # narrow, so that the layers' names have room
    columns = ["layer", "N × K", "halfbyte", *heads, "one-hot, swap"]
    _table(console, f"halfbyte's {len(rows)} worst layers: error / rounding limit", columns, rows)


def _over(record: dict[str, Any]) -> float:
    return max(map(float, record["over_limit"].values()))


def _adapters(document: dict[str, Any], console: Console) -> None:
    rows = []
    for label, record in document["summary"]["adapters"].items():
        effect = record["effect"]
        spread = f"{100 * effect['min']:.2f} .. {100 * effect['median']:.2f} .. {100 * effect['max']:.2f} %"
        head = [label, str(record["layers"]), ", ".join(map(str, record["ranks"])), spread]
        for name, ratio in record["over_difference"].items():
            of = "our error (float64)" if name == "float64" else f"ours ≠ {name}"
            rows.append([*head, of, f"{ratio['min']:,.1f} ×", f"{ratio['median']:,.1f} ×"])
            head = [""] * len(head)
    columns = ["adapter", "layers", "rank", "changes outputs by", "against", "least", "median"]
    _table(console, "what the adapter changes in a layer, against what the kernel changes there", columns, rows)


def _speed(document: dict[str, Any], console: Console) -> None:
    rows = []
    for shape in document["speed"]:
        by_m: dict[int, dict[str, dict[str, Any]]] = {}
        for row in shape["rows"]:
            ours = row["kernel"].startswith("halfbyte ")
            by_m.setdefault(row["M"], {})["halfbyte" if ours else row["kernel"]] = row
        size = " × ".join(map(str, shape["shape"]))
        for m, found in by_m.items():
            for name, row in found.items():
                against = "" if name == "halfbyte" else f"{row['us'] / found['halfbyte']['us']:.2f} ×"
                label = f"{size}  {shape['format']}  {shape['layers']} layers" if (m, name) == _head(by_m) else ""
                share = f"{row['tb_per_s'] / row['ceiling_tb_per_s']:.2f}"
                rows.append(
                    [label, str(m) if name == "halfbyte" else "", row["kernel"], f"{row['us']:,.1f}", share, against]
                )
    columns = ["N × K", "M", "kernel", "µs a call", "of read ceiling", "halfbyte is faster by"]
    _table(console, "speed of each layer shape, interleaved in one run", columns, rows)
    totals = document["summary"]["step_us"]
    if totals:
        wanted = sorted({m for by in totals.values() for m in by}, key=int)
        step = [[name, *(f"{by[m]:,.0f}" if m in by else "" for m in wanted)] for name, by in totals.items()]
        columns = ["all packed layers together", *(f"µs at M = {m}" for m in wanted)]
        _table(console, "one step of the model through these layers", columns, step)


def _head(by_m: dict[int, dict[str, Any]]) -> tuple[int, str]:
    return next(iter(by_m)), "halfbyte"


def _model(record: dict[str, Any], console: Console) -> None:
    rows = []
    for system in record["systems"]:
        for label, distance in system["logits"].items():
            perplexity = f"{system['perplexity'][label]:.4f}" if system["perplexity"] else "no --text"
            name = system["name"] + ("" if label == "base" else f" + {label}")
            rows.append(
                [name, perplexity, f"{100 * distance['relative']:.3f} %", f"{distance['kl']:.2e}",
                 f"{100 * distance['top1']:.1f} %"]
            )  # fmt: skip
    for label, shift in record["adapters"].items():
        rows.append(
            [f"(what {label} itself changes)", "", f"{100 * shift['relative']:.3f} %", f"{shift['kl']:.2e}",
             f"{100 * shift['top1']:.1f} %"]
        )  # fmt: skip
    on = f"{record['text_tokens']} tokens of {'the text' if record['is_text'] else 'the prompts'}"
    title = f"logits on {on}, against {record['reference']} (its layers are within 5e-6 of float64)"
    _table(console, title, ["system", "perplexity", "logits off by", "KL, nats a token", "same first token"], rows)


def _greedy(document: dict[str, Any], console: Console) -> None:
    greedy = document["end_to_end"]["greedy"]
    unchanged = document["end_to_end"]["unchanged"]
    rows = []
    for counts, pair in zip(document["summary"]["greedy"], greedy["pairs"], strict=True):
        places = [place for place in pair["first"] if place is not None]
        middle = str(round(statistics.median(places))) if places else ""
        first = "" if counts["earliest"] is None else str(counts["earliest"])
        what = "noise of the unchanged system" if counts["a"].startswith(unchanged) else "halfbyte"
        rows.append(
            [f"{counts['a']} | {counts['b']}", what, f"{counts['differ']} of {counts['prompts']}", first, middle]
        )
    columns = ["greedy answers compared", "what it shows", "differ", "first at token", "median"]
    _table(console, f"first divergence of greedy answers, {greedy['tokens']} tokens each", columns, rows)


def _verdict(summary: dict[str, Any]) -> str:
    ours, allowed = summary["halfbyte"], summary["allowed"]
    inside = summary["all_within_contract"]
    verdict = "within the contract" if inside else f"[red]OUTSIDE the contract: {', '.join(summary['outside'])}[/red]"
    swapped = "detected" if summary["swapped_nibbles_detected"] else "[red]NOT detected[/red]"
    return (
        f"{ours['layers']} layers, {verdict}: worst error {ours['over_limit']['max']:.4f} of the rounding limit "
        f"({allowed['over_limit']} allowed), fp32 {ours['error_fp32']:.1e} ({allowed['error_fp32']:.0e} allowed), "
        f"swapped nibbles {swapped}"
    )
