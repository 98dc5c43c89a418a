"""`bench summary` says what the rows say: sums, floors, the newest run, and every violation of the one rule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from halfbyte.cli import app
from halfbyte.lab.summary import Case, cases, layers, peer_of, read, shapes, with_adapters

SHAPES = {"qkv": (6144, 5120), "o": (5120, 4096), "gate_up": (65536, 5120), "down": (5120, 32768)}
OURS, BNB, CUBLAS = "halfbyte codebook_mma", "bitsandbytes 0.50.2 matmul_4bit", "cublas 2.11.0+cu130"
DEQUANTISE, HUMMING = f"bitsandbytes 0.50.2 dequantize_4bit + {CUBLAS}", "humming 0.1.20"
TIMES = {OURS: 10.0, BNB: 40.0, CUBLAS: 20.0, DEQUANTISE: 30.0, HUMMING: 12.0}


def row(kernel: str, us: float, multiply: str = "o", **changed: Any) -> dict[str, Any]:
    n, k = SHAPES[multiply]
    own = {OURS: "nf4-64", BNB: "nf4-64", DEQUANTISE: "nf4-64", HUMMING: "int4-64"}
    return {
        "suite": "layer", "device": "NVIDIA H200", "arch": "sm_90a", "driver": "1", "torch": "2.11.0", "commit": "abc",
        "date": "2026-11-30T00:00:00+00:00", "kernel": kernel, "format": own.get(kernel, "bf16"), "nested": False,
        "dtype": "bf16", "M": 16, "N": n, "K": k, "adapters": 0, "rank": 0, "us": us, "us_p20": us, "us_p80": us,
        "bytes": n * k * 9 // 16, "tb_per_s": 1.0, "ceiling_tb_per_s": 4.5, "error": 1e-3, "rounding_limit": 1e-3,
        "model": "mistral-24b", "multiply": multiply, **changed,
    }  # fmt: skip


def layer_rows(times: dict[str, float] = TIMES, **changed: Any) -> list[dict[str, Any]]:
    return [row(kernel, us, multiply, **changed) for multiply in SHAPES for kernel, us in times.items()]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return path


def summary(*words: object, status: int = 0) -> str:
    done = CliRunner().invoke(app, ["bench", "summary", *map(str, words)])
    assert done.exit_code == status, done.output
    return done.output


def test_a_layer_is_the_sum_of_its_multiplies() -> None:
    (layer,) = layers(cases(layer_rows()))
    assert layer.us == 40
    assert [layer.peer_us(peer) for peer in ("bitsandbytes", "dequantise", "dense", "humming")] == [160, 120, 80, 48]
    weights = sum(n * k for n, k in SHAPES.values())
    assert layer.floor_us == pytest.approx(weights * 0.5625 / 4.5e12 * 1e6)
    assert layer.floor_us == pytest.approx(70, abs=1)  # the floor that issue 4 states


def test_a_layer_needs_all_multiplies_of_one_run() -> None:
    rows = layer_rows()
    assert not layers(cases(rows[: -len(TIMES)]))
    later = layer_rows({OURS: 5.0, BNB: 40.0}, date="2026-11-30T01:00:00+00:00")
    (layer,) = layers(cases(rows + later[:-2]))  # the later run broke off
    assert layer.us == 40
    (layer,) = layers(cases(later + rows))  # the order of the files says nothing
    assert layer.us == 20
    assert layer.peer_us("humming") is None


def test_a_peer_that_missed_a_multiply_has_no_sum() -> None:
    rows = [each for each in layer_rows() if (each["kernel"], each["multiply"]) != (HUMMING, "down")]
    (layer,) = layers(cases(rows))
    assert layer.peer_us("humming") is None
    assert layer.peer_us("bitsandbytes") == 160


def test_a_run_with_peers_counts_before_a_newer_one_without() -> None:
    alone = layer_rows({OURS: 5.0}, date="2026-11-30T01:00:00+00:00")
    assert [case.us for case in shapes(cases(layer_rows() + alone))] == [10] * 4
    assert [layer.us for layer in layers(cases(layer_rows() + alone))] == [40]
    assert [case.us for case in shapes(cases(alone))] == [5] * 4


def test_cases_of_several_formats_and_runs_keep_their_own_peers() -> None:
    nested = [row(OURS, 11, format="nf4-64-nested"), row(CUBLAS, 21)]
    stray = row(BNB, 1, M=32)  # a peer's row without ours before it
    found = cases([row(CUBLAS, 1), row(OURS, 10), row(CUBLAS, 20), *nested, stray, row(OURS, 9, suite="prove")])
    assert [(case.us, [each["us"] for each in case.peers]) for case in found] == [(10, [20]), (11, [21])]


def test_rows_whose_bits_depended_on_m_are_problems_of_their_own(tmp_path: Path) -> None:
    rows = layer_rows({OURS: 10.0, BNB: 40.0}) + layer_rows({OURS: 5.0, BNB: 40.0}, batch_invariant=False)
    assert sorted(layer.us for layer in layers(cases(rows))) == [20, 40]
    assert len(shapes(cases(rows))) == 2 * len(SHAPES)
    assert "16, bits depend on it" in summary(write(tmp_path / "rows.jsonl", rows))


def test_adapters_are_problems_of_their_own() -> None:
    found = shapes(cases([row(OURS, 10), row(OURS, 12, adapters=8, rank=16), row(OURS, 13, adapters=8, rank=64)]))
    assert [case.us for case in found] == [10, 12, 13]


@pytest.mark.parametrize(
    ("kernel", "peer"),
    [
        (BNB, "bitsandbytes"),
        (DEQUANTISE, "dequantise"),
        ("torch 2.11.0+cu130 dequantize + cublas 2.11.0+cu130", "dequantise"),
        (CUBLAS, "dense"),
        ("torch dense 2.13.0+cpu", "dense"),
        (HUMMING, "humming"),
        ("onnxruntime 1.32.0 MatMulNBits level 1", "onnxruntime"),
    ],
)
def test_kernels_are_told_apart(kernel: str, peer: str) -> None:
    assert peer_of(kernel) == peer


@pytest.mark.parametrize(
    ("bitsandbytes", "dequantise", "broken"),
    [(10.1, 10.1, False), (10.0, None, False), (9.9, 30.0, True), (30.0, 9.9, True), (None, 9.9, True)],
)  # fmt: skip
def test_the_rule(bitsandbytes: float | None, dequantise: float | None, broken: bool, tmp_path: Path) -> None:
    peers = [row(kernel, us) for kernel, us in ((BNB, bitsandbytes), (DEQUANTISE, dequantise)) if us is not None]
    dense = row(CUBLAS, 1.0)  # faster, but of dense weights, which is not what is replaced
    assert Case(row(OURS, 10.0), [*peers, dense]).violates is broken
    path = write(tmp_path / "rows.jsonl", [row(OURS, 10.0), *peers, dense])
    shown = summary(path)
    assert ("violation" in shown) is broken
    assert ("SLOWER" in shown) is broken
    summary(path, "--strict", status=int(broken))
    assert len(json.loads(summary(path, "--json"))["violations"]) == int(broken)


def test_the_table(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", layer_rows())
    shown = summary(path)
    assert "mistral-24b, one layer" in shown
    (line,) = (line for line in shown.splitlines() if line.startswith("│ 16 "))
    assert [cell.strip() for cell in line.strip("│").split("│")] == [
        "16", "40.0", "69.5", "160.0", "120.0", "80.0", "48.0", "abc",
    ]  # fmt: skip
    assert "4 of 4 problems hold" in shown
    assert "humming" not in summary(write(path, [row(OURS, 10), row(BNB, 20)]))


def test_a_violation_says_where_and_by_how_much(tmp_path: Path) -> None:
    shown = summary(write(tmp_path / "rows.jsonl", [row(OURS, 10, "down"), row(BNB, 8, "down")]))
    assert "violation: 5120 × 32768, M = 16, nf4-64, bf16, NVIDIA H200: 10.0 µs, 1.25 times the 8.0" in shown
    assert "0 of 1 problems hold" in shown


def test_only_the_named_device(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [row(OURS, 10), row(OURS, 99, device="Some CPU")])
    assert "Some CPU" not in summary(path, "--device", "h200")
    assert "no row of halfbyte" in str(
        CliRunner().invoke(app, ["bench", "summary", str(path), "--device", "x"]).exception
    )


@pytest.mark.parametrize(("line", "message"), [("{", "no JSON object"), ("[1]", "no suite"), ("{}", "no suite")])
def test_a_broken_line_is_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row(OURS, 1)) + "\n\n" + line + "\n")
    with pytest.raises(ValueError, match=rf"rows\.jsonl:3: .*{message}"):
        list(read([path]))


def test_no_files_no_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "name files of rows" in str(CliRunner().invoke(app, ["bench", "summary"]).exception)


def test_the_repository_s_rows_are_read() -> None:
    results = Path(__file__).parents[1] / "benchmarks" / "results"
    assert "4096 × 4096" in summary(*sorted(results.glob("*.jsonl")))


def test_adapters_are_held_against_the_base_of_their_run() -> None:
    peft = {"peft-path on halfbyte": 14.0, "peft-path on bitsandbytes 0.50.2": 50.0}
    run = {"date": "2026-11-30T02:00:00+00:00"}
    rows = [
        each
        for multiply in SHAPES
        for each in (
            row(OURS, 10.0, multiply, **run),
            row(OURS, 10.5, multiply, adapters=8, rank=16, **run),
            *(row(name, us, multiply, adapters=8, rank=16, **run) for name, us in peft.items()),
        )
    ]
    other_run = layer_rows({OURS: 5.0, BNB: 9.0})
    (mix,) = with_adapters(cases(other_run + rows))
    assert mix.added == pytest.approx(0.05), "its own run's base, not a newer or faster one"
    assert (mix.path_us("halfbyte"), mix.path_us("bitsandbytes"), mix.path_us("vllm")) == (56, 200, None)
    assert not with_adapters(cases([each for each in rows if each["adapters"]])), "no base in that run"


def test_the_table_of_adapters(tmp_path: Path) -> None:
    rows = [
        row(OURS, us, multiply, adapters=a, rank=16 * (a > 0)) for multiply in SHAPES for a, us in ((0, 10), (8, 11))
    ]
    path = write(tmp_path / "rows.jsonl", rows)
    text = summary(path)
    assert "one layer with LoRA adapters" in text
    assert "+10.0%" in text
    (mix,) = json.loads(summary(path, "--json"))["adapters"]
    assert (mix["us"], mix["base_us"], mix["adapters"], mix["rank"]) == (44, 40, 8, 16)
    assert not json.loads(summary(path, "--json"))["violations"]
