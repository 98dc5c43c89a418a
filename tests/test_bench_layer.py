"""The layer suite: which multiplies a model's layer is made of, and what a run of them leaves behind."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from halfbyte.adapters import AdapterPool
from halfbyte.cli import app
from halfbyte.formats import quantize
from halfbyte.lab import linear as linear_suite
from halfbyte.lab.layer import LAYERS, MULTIPLIES, Model, bench_layer, model_of
from halfbyte.lab.layer_adapters import listed, peft_path
from halfbyte.lab.linear import Bench
from halfbyte.lab.peers import Peer, dense_layer, dequantising
from halfbyte.reference import linear, relative_error
from test_cli import halfbyte

CPU = torch.device("cpu")
SHAPES = {"qkv": (96, 64), "o": (64, 64), "gate_up": (256, 64), "down": (64, 128)}
TINY = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 1, "vocab_size": 96,
}  # fmt: skip


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No cache to exceed with copies of small weights, and a read ceiling that is not measured."""
    monkeypatch.setattr(linear_suite, "cache_bytes", lambda device: 0)
    monkeypatch.setattr(linear_suite, "read_ceiling", lambda device: 1e10)


def config_file(folder: Path, **described: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(described))
    return folder / "config.json"


@pytest.mark.parametrize("name", LAYERS)
def test_the_table_is_what_transformers_builds(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from halfbyte.lab.capacity_model import BUILT_IN

    assert LAYERS.keys() == BUILT_IN.keys()
    path = config_file(tmp_path / "model", **(BUILT_IN[name] | {"num_hidden_layers": 1}))
    assert dict(model_of(str(path)).shapes) == dict(model_of(name).shapes)


def test_a_model_with_a_vision_tower_is_its_text_model(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    text = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 96}  # fmt: skip
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    path = config_file(tmp_path / "seeing", model_type="gemma3", text_config=text, vision_config=vision)
    model = model_of(str(path.parent))
    assert model == Model("seeing", {"qkv": (256, 64), "o": (64, 128), "gate_up": (256, 64), "down": (64, 128)})


def test_merged_projections_are_the_same_multiplies(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    described = TINY | {"model_type": "phi3", "pad_token_id": 0}
    assert model_of(str(config_file(tmp_path / "merged", **described))).shapes == SHAPES


@pytest.mark.parametrize(
    ("described", "message"),
    [
        ({"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 1}, "first layer is not made of q, k, v"),
        (TINY | {"model_type": "mixtral", "num_local_experts": 2}, "first layer is not made of q, k, v"),
        ({"hidden_size": 64}, "no model_type"),
    ],
)
def test_other_layers_are_refused(described: dict[str, object], message: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match=message):
        model_of(str(config_file(tmp_path / "other", **described)))


def test_an_unknown_model_is_refused_with_the_names() -> None:
    with pytest.raises(ValueError, match=r"llama-4-9000b is no config\.json.*mistral-24b"):
        model_of("llama-4-9000b")


def test_the_command_writes_a_row_for_each_multiply_and_m(tmp_path: Path, quick: None) -> None:
    pytest.importorskip("transformers")
    out, path = tmp_path / "rows.jsonl", config_file(tmp_path / "tiny", **TINY)
    words = ("--model", path, "--M", "1,3", "--formats", "nf4,q4_0", "--device", "cpu", "--seconds", "0.01")
    done = CliRunner().invoke(app, ["bench", "layer", *map(str, words), "--out", str(out)])
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    ours = [row for row in rows if row["kernel"].startswith("halfbyte ")]
    wanted = [(name, *SHAPES[name], key, m) for name in MULTIPLIES for key in ("nf4-64", "q4_0") for m in (1, 3)]
    assert [(row["multiply"], row["N"], row["K"], row["format"], row["M"]) for row in ours] == wanted
    assert {(row["suite"], row["model"], row["date"]) for row in rows} == {("layer", "tiny", rows[0]["date"])}
    assert all(row["error"] <= 1.1 * row["rounding_limit"] for row in ours)
    replaced = [row for row in rows if " + " in row["kernel"]]
    assert [(row["multiply"], row["format"], row["M"]) for row in replaced] == [(a, f, m) for a, _, _, f, m in wanted]
    assert all(row["bytes"] == row["N"] * row["K"] * 9 // 16 for row in replaced + ours)
    both = halfbyte("bench", "summary", out, "--json")
    assert {layer["M"] for layer in json.loads(both)["layers"]} == {1, 3}


def test_without_peers_there_are_none(quick: None) -> None:
    model = Model("tiny", SHAPES)
    rows = list(bench_layer([model], [1], ["nf4"], "fp32", CPU, with_peers=False, seconds_each=0.001))
    assert [row.row.kernel.partition(" ")[0] for row in rows] == ["halfbyte"] * 4


@pytest.mark.parametrize("key", ["nf4-64", "nf4-64-nested", "fp4-32", "q4_0", "mxfp4"])
def test_dequantise_and_multiply_is_the_weight(key: str) -> None:
    weight = quantize(torch.randn(64, 128, generator=torch.Generator().manual_seed(0)), key)
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(1))
    peer = dequantising(weight)
    assert peer.supports(weight)
    assert " + torch dense " in peer.name
    assert not peer.name.startswith("halfbyte")
    assert relative_error(peer.build(weight, torch.float32)(x), linear(x, weight)) < 1e-5


def failing(stage: str) -> Peer:
    """A peer that raises while it is built, at its first call, or from the second on: in the clock's warm-up."""
    calls = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        if stage == "call" or (stage == "clock" and len(calls) > 1):
            raise RuntimeError(f"in {stage}\nand more")
        return x @ torch.ones(x.shape[1], 64)

    def build(weight: object, dtype: torch.dtype) -> object:
        if stage == "build":
            raise RuntimeError(f"in {stage}\nand more")
        return layer

    return Peer(f"peer of {stage}", False, build, lambda weight, dtype: 1 << 30, lambda weight: True)  # type: ignore[arg-type]


@pytest.mark.parametrize("stage", ["build", "call", "clock"])
def test_a_peer_that_fails_is_named_and_left_out(stage: str, quick: None) -> None:
    told: list[tuple[str, str]] = []
    on_failure = lambda name, error: told.append((name, str(error)))  # noqa: E731
    bench = Bench("linear", "fp32", CPU, seconds_each=0.001, cold=False, on_failure=on_failure)
    dense = Peer("dense", False, dense_layer, lambda weight, dtype: 1 << 30, lambda weight: True)
    bench.peers = [failing(stage), dense]
    rows = list(bench.rows(64, 64, "nf4", [1, 2]))
    assert {row.kernel for row in rows if not row.kernel.startswith("halfbyte")} == {"dense"}
    assert [row.M for row in rows] == [1, 1, 2, 2]
    assert set(told) == {(f"peer of {stage}", f"in {stage}\nand more")}


def test_our_own_failure_ends_the_run(monkeypatch: pytest.MonkeyPatch, quick: None) -> None:
    told: list[str] = []
    bench = Bench("linear", "fp32", CPU, False, 0.001, on_failure=lambda name, error: told.append(name))

    def broken(*_: object) -> torch.Tensor:
        raise RuntimeError("ours")

    monkeypatch.setattr(linear_suite, "linear", broken)
    with pytest.raises(RuntimeError, match="ours"):
        list(bench.rows(64, 64, "nf4", [1]))
    assert not told


def test_a_failure_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    from halfbyte.lab.bench_cli import failed

    failed("humming 0.1.20", RuntimeError("[no] compiler\nlog " * 9))
    assert capsys.readouterr().err.split("\n")[0].startswith("failed, left out: humming 0.1.20: RuntimeError: [no] com")


def test_mistakes_get_one_line(tmp_path: Path) -> None:
    for words, message in (
        (("--model", "llama-4-9000b"), "llama-4-9000b"),
        (("--M", "0"), "--M"),
        (("--dtype", "int8"), "--dtype"),
    ):
        assert message in halfbyte("bench", "layer", "--device", "cpu", *words, status=1)


def test_rows_of_peers_are_not_repeated_for_formats_they_lack(quick: None) -> None:
    model = replace(Model("tiny", SHAPES), shapes={"o": (64, 64)})
    rows = list(bench_layer([model], [1], ["mxfp4"], "bf16", CPU, seconds_each=0.001))
    names = [row.row.kernel for row in rows]
    assert len(names) == len(set(names))
    assert not any(name.startswith("bitsandbytes") for name in names)


def test_adapters_are_measured_beside_the_same_layer_without(tmp_path: Path, quick: None) -> None:
    pytest.importorskip("transformers")
    out, path = tmp_path / "rows.jsonl", config_file(tmp_path / "tiny", **TINY)
    words = ("--model", path, "--M", "2,5", "--adapters", "0,1,3", "--rank", "4", "--seconds", "0.01")
    done = CliRunner().invoke(app, ["bench", "layer", *map(str, words), "--device", "cpu", "--out", str(out)])
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    path_of_peft = "peft-path on halfbyte"
    found = [(row["multiply"], row["M"], row["adapters"], row["kernel"].startswith("halfbyte ")) for row in rows]
    mixes = [(0, True), (1, True), (1, False), (3, True), (3, False)]
    assert found == [(multiply, m, *mix) for multiply in MULTIPLIES for m in (2, 5) for mix in mixes]
    assert {row["kernel"] for row in rows if not row["kernel"].startswith("halfbyte ")} == {path_of_peft}
    assert {row["rank"] for row in rows if row["adapters"]} == {4}
    assert {row["date"] for row in rows} == {rows[0]["date"]}, "one run"
    ours = [row for row in rows if row["kernel"].startswith("halfbyte ")]
    assert all(row["error"] <= 1.1 * row["rounding_limit"] for row in ours)
    theirs = [row for row in rows if row["kernel"] == path_of_peft]
    assert all(row["rounding_limit"] < row["error"] < 10 * row["rounding_limit"] for row in theirs), "it rounds often"
    records = json.loads(halfbyte("bench", "summary", out, "--json"))
    assert [(each["adapters"], each["M"]) for each in records["adapters"]] == [(1, 2), (1, 5), (3, 2), (3, 5)]
    assert {layer["adapters"] for layer in records["layers"]} == {0}
    assert "PEFT's path" in halfbyte("bench", "summary", out)


@pytest.mark.parametrize("words", [("--adapters", "-1"), ("--adapters", "one"), ("--adapters", "1", "--rank", "0")])
def test_mixes_that_make_no_sense_are_refused(words: tuple[str, ...]) -> None:
    assert words[-2] in halfbyte("bench", "layer", "--device", "cpu", *words, status=1)


def test_peft_path_is_peft(quick: None) -> None:
    """Its sum is that of the definition, whichever rows take which adapter."""
    weight = quantize(torch.randn(48, 64, generator=torch.Generator().manual_seed(0)), "nf4")
    pool = AdapterPool.random(64, 48, [4, 4, 4], dtype=torch.float32)
    chosen = listed(pool.layer())
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(1))
    exact = linear(x, weight, None, chosen, torch.arange(7) % 3)
    assert relative_error(peft_path(lambda x: linear(x, weight).float(), chosen, 3)(x), exact) < 1e-6
    alone = linear(x, weight, None, chosen[:1], torch.zeros(7, dtype=torch.int64))
    assert relative_error(peft_path(lambda x: linear(x, weight).float(), chosen[:1], 1)(x), alone) < 1e-6
