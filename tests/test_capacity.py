"""What `halfbyte plan` says, against published numbers and against what transformers itself allocates."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

transformers = pytest.importorskip("transformers")

from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from halfbyte.checkpoints import open_checkpoint, quantize_checkpoint  # noqa: E402
from halfbyte.cli import app  # noqa: E402
from halfbyte.lab.capacity import (  # noqa: E402
    STORED,
    Load,
    Place,
    activation_bytes,
    adapter_bytes,
    fit,
    kv_bytes,
    place_of,
    weight_bytes,
)
from halfbyte.lab.capacity_model import BUILT_IN, Model, model_of, read_model  # noqa: E402

# The totals that the publishers' safetensors indexes hold.
PUBLISHED = {
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "mistral-24b": 23_572_403_200,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "gemma-3-27b": 27_009_346_304,
}
TINY: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128,
}  # fmt: skip


def tiny(model_type: str, **more: Any) -> dict[str, Any]:
    return {"model_type": model_type, **TINY, **more}


def sizes(described: dict[str, Any]) -> Model:
    return model_of(described, "tiny", "test")


@pytest.fixture(scope="module")
def llama_70b() -> Model:
    return read_model("llama-3-70b")


class TestTheChapter:
    """sources/down-to-the-metal: the KV cache of Llama-3-70B, and what 4-bit weights free."""

    def test_its_cache(self, llama_70b: Model) -> None:
        assert kv_bytes(llama_70b, 8192, 1) == 2 * 80 * 8 * 128 * 8192 * 1 * 2
        assert round(kv_bytes(llama_70b, 8192, 1) / 1e9, 1) == 2.7
        assert round(kv_bytes(llama_70b, 128 * 1024, 1) / 1e9) == 43

    def test_at_128k_it_is_larger_than_the_4_bit_weights(self, llama_70b: Model) -> None:
        assert kv_bytes(llama_70b, 128 * 1024, 1) > weight_bytes(llama_70b, "nf4-64").total

    def test_4_bits_free_100_gb(self, llama_70b: Model) -> None:
        freed = weight_bytes(llama_70b, "bf16").total - weight_bytes(llama_70b, "nf4-64-nested").total
        assert freed == pytest.approx(100e9, rel=0.02)

    def test_8_and_4_bits_halve_it_twice(self, llama_70b: Model) -> None:
        sizes_of = [kv_bytes(llama_70b, 8192, 3, bits) for bits in (16, 8, 4)]
        assert sizes_of[0] == 2 * sizes_of[1] == 4 * sizes_of[2]


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_models_have_the_published_size(name: str) -> None:
    assert read_model(name).parameters == PUBLISHED[name]


def test_every_parameter_of_a_model_is_counted_once() -> None:
    for described in (
        tiny("llama", tie_word_embeddings=False, attention_bias=True),
        tiny("llama", tie_word_embeddings=True),
        tiny("gemma3_text"),
        tiny("mixtral", num_local_experts=4),
        tiny("qwen3_moe", num_experts=8, moe_intermediate_size=32),
    ):
        plain = {key: value for key, value in described.items() if key != "model_type"}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(described["model_type"], **plain))
        assert sizes(described).parameters == model.num_parameters(), described


@pytest.mark.parametrize("key", ["nf4-64", "nf4-64-nested", "fp4-128"])
def test_bytes_are_those_of_a_checkpoint(key: str, tmp_path: Path) -> None:
    described = tiny("llama", tie_word_embeddings=False)
    plain = {name: value for name, value in described.items() if name != "model_type"}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **plain), dtype=torch.bfloat16).save_pretrained(
        tmp_path / "dense"
    )
    quantize_checkpoint(tmp_path / "dense", tmp_path / "packed", key)
    checkpoint = open_checkpoint(tmp_path / "packed")
    packed = [checkpoint.load(entry.name) for entry in checkpoint.entries() if entry.packed]
    dense = sum(entry.nbytes for entry in checkpoint.entries() if not entry.packed)
    model = read_model(str(tmp_path / "packed"))
    found = weight_bytes(model, key)
    assert len(packed) == 28
    assert found.codes + found.scales + found.second_level == sum(weight.nbytes for weight in packed)
    assert found.unquantised == dense
    assert bool(found.second_level) == key.endswith("nested")
    stored = weight_bytes(model, STORED)
    assert stored.total == sum(entry.nbytes for entry in checkpoint.entries())
    assert stored.format == f"as stored ({key})"
    assert stored.gathered == found.gathered == 128 * 64 * 2


def test_a_shape_that_a_format_cannot_hold_stays_in_16_bits() -> None:
    odd = sizes(tiny("llama", intermediate_size=100))
    found = weight_bytes(odd, "q4_0")
    down = 4 * 64 * 100  # K = 100 is no multiple of 32
    assert found.unquantised - weight_bytes(odd, "nf4-64").unquantised == down * 2


TOKENS, WINDOW = 40, 8


@pytest.mark.parametrize(
    "described",
    [
        tiny("llama"),
        tiny("mistral", sliding_window=WINDOW),
        tiny("gemma3_text", sliding_window=WINDOW, num_hidden_layers=7),
        tiny("qwen3", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2),
        tiny("qwen3", use_sliding_window=False, sliding_window=WINDOW),
        tiny("gpt_oss", sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2),
        tiny("llama4_text", attention_chunk_size=WINDOW, num_local_experts=4, intermediate_size_mlp=96),
        tiny(
            "gemma3n_text",
            sliding_window=WINDOW,
            num_hidden_layers=10,
            num_kv_shared_layers=5,
            laurel_rank=8,
            vocab_size_per_layer_input=128,
            hidden_size_per_layer_input=16,
            activation_sparsity_pattern=[0.0] * 10,
        ),
    ],
    ids=lambda described: f"{described['model_type']}-{described.get('use_sliding_window', '')}",
)
def test_the_cache_is_what_transformers_allocates(described: dict[str, Any]) -> None:
    """In a window transformers keeps one token less: the one at work is added when it is used."""
    plain = {key: value for key, value in described.items() if key != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(described["model_type"], **plain)).eval()
    with torch.inference_mode():
        cache = model(torch.arange(TOKENS)[None], use_cache=True).past_key_values
    per_token = 2 * TINY["num_key_value_heads"] * TINY["head_dim"]
    held = [layer.keys.numel() + layer.values.numel() for layer in cache.layers if layer.keys is not None]
    windowed = sum(values < per_token * TOKENS for values in held)
    counted = sizes(described).cache
    assert counted.values(TOKENS) == sum(held) + windowed * per_token
    window = described.get("sliding_window") or described.get("attention_chunk_size")
    assert (windowed > 0) == (window is not None and described.get("use_sliding_window", True))
    assert counted.values(4) == len(held) * 4 * per_token  # shorter than the window: all tokens


class TestMixtures:
    def test_mixtral_is_counted_and_a_token_reads_its_experts_only(self) -> None:
        model = sizes(
            {
                "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8,
                "num_experts_per_tok": 2,
            }
        )  # fmt: skip
        assert model.parameters == 46_702_792_704  # published
        active = 12_879_925_248  # published as "12.9B active parameters"
        assert weight_bytes(model, "bf16").read(model, 1) == pytest.approx(2 * (active - model.embedding))
        assert "2 of 8 experts" in model.notes[0]

    def test_expected_experts_of_a_batch(self) -> None:
        model = sizes(tiny("qwen3_moe", num_experts=16, num_experts_per_tok=3, moe_intermediate_size=32))
        draw = random.Random(0)
        trials = [len({expert for _ in range(5) for expert in draw.sample(range(16), 3)}) / 16 for _ in range(4000)]
        assert model.experts_read(5) == pytest.approx(sum(trials) / len(trials), abs=0.01)
        assert model.experts_read(1) == pytest.approx(3 / 16)

    def test_mla_keeps_the_latent_vector(self) -> None:
        """DeepSeek-V3: 70.272 KB a token in bf16 (published), and 671 G parameters without the extra prediction."""
        model = sizes({"model_type": "deepseek_v3"})
        assert kv_bytes(model, 1, 1) == 70_272
        assert model.parameters == 671_026_419_200
        assert any("MLA" in note for note in model.notes)

    def test_recurrent_layers_are_named_as_not_counted(self) -> None:
        model = sizes(tiny("qwen3_next", num_experts=4, num_hidden_layers=4))
        assert sum(model.cache.layers.values()) == 1
        assert model.cache.uncounted == {"linear_attention": 3}
        assert any("not counted: the state of 3 × linear_attention" in note for note in model.notes)
        mamba = sizes({"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 128})
        assert kv_bytes(mamba, 1000, 1) == 0
        assert mamba.cache.uncounted == {"linear_attention": 2}


class TestFit:
    place = Place("a card", 24 << 30, 1e12, "given")

    def test_a_step_is_bytes_over_bandwidth(self) -> None:
        model = read_model("llama-3-8b")
        weights = weight_bytes(model, "nf4-64")
        found = fit(model, weights, self.place, Load(4096, 8, adapters=2, rank=16))
        # q, k, v, o, gate, up, down: N + K each
        one_adapter = 32 * 2 * 16 * (8192 + 5120 + 5120 + 8192 + 18432 + 18432 + 18432)
        assert adapter_bytes(model, 16) == one_adapter
        read = weights.total - 128256 * 4096 * 2 + 8 * 4096 * 131072 + 2 * one_adapter
        assert found.step_bytes == read
        assert found.step_s == read / 1e12
        assert found.tokens_per_s == pytest.approx(8 * 1e12 / read)
        assert found.total == weights.total + 8 * 4096 * 131072 + 2 * one_adapter + activation_bytes(model, 8)

    @pytest.mark.parametrize("bits", [16, 8, 4])
    @pytest.mark.parametrize("context", [1000, 8192, 100_000])
    def test_most_users_is_the_last_that_fits(self, bits: int, context: int) -> None:
        model = read_model("qwen3-8b")
        weights = weight_bytes(model, "nf4-64-nested")
        most = fit(model, weights, self.place, Load(context, 1), bits).most_users
        assert most > 0
        assert fit(model, weights, self.place, Load(context, most), bits).fits
        assert not fit(model, weights, self.place, Load(context, most + 1), bits).fits

    def test_weights_that_do_not_fit(self, llama_70b: Model) -> None:
        found = fit(llama_70b, weight_bytes(llama_70b, "bf16"), self.place, Load(1, 1))
        assert not found.fits
        assert found.most_users == -1


class TestPlaces:
    def test_a_card_is_quoted_and_this_machine_measured(self) -> None:
        if not torch.cuda.is_available():
            card = place_of("5090")
            assert card.origin == "quoted"
            assert card.bandwidth == 1.792e12
            assert 31e9 < card.memory < 35e9
        here = place_of("cpu")
        assert here.origin == "measured"
        assert 1e8 < here.bandwidth < 1e13
        assert place_of("h200", 4.45).bandwidth == 4.45e12

    def test_unknown(self) -> None:
        with pytest.raises(ValueError, match="unknown card 'abacus'"):
            place_of("abacus")


class TestRefusals:
    @pytest.mark.parametrize(
        ("described", "message"),
        [
            ({"hidden_size": 64}, "no model_type"),
            ({"model_type": "no-such-model"}, "transformers does not take it"),
            ({"model_type": "t5"}, "encoder-decoder"),
            ({"model_type": "vit"}, "no causal language model"),
        ],
    )
    def test_configs(self, described: dict[str, Any], message: str, tmp_path: Path) -> None:
        file = tmp_path / "config.json"
        file.write_text(json.dumps(described))
        with pytest.raises(ValueError, match=message):
            read_model(str(file))

    def test_names(self) -> None:
        with pytest.raises(ValueError, match=r"none of the built-in names llama-3-8b"):
            read_model("gpt-9")
        with pytest.raises(ValueError, match="needs a checkpoint"):
            weight_bytes(read_model("llama-3-8b"), STORED)


def run(*words: str) -> str:
    result = CliRunner().invoke(app, ["plan", *words], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_the_command_prints_tables_and_json(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(tiny("gemma3_text", num_hidden_layers=6, sliding_window=32)))
    page = run(str(file), "--context", "100", "--users", "2,5", "--gpu", "h200", "--gpu", "4090")
    for words in ("nf4-64-nested", "KV cache at 100 tokens", "H200", "RTX 4090", "quoted", "last 32 tokens only"):
        assert words in page
    result = json.loads(
        run(str(file), "--context", "100", "--users", "2", "--gpu", "h200", "--format", "fp4", "--json")
    )
    assert result["kv"][0] == {"context": 100, "users": 2, "bits": 16, "bytes": 2 * 2 * 64 * (100 + 5 * 32)}
    assert [row["format"] for row in result["weights"]] == ["fp4-64"]
    assert {row["kv_bits"] for row in result["fits"]} == {16, 8, 4}
    assert all(row["fits"] and row["bandwidth_is"] == "quoted" for row in result["fits"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("llama-3-8b", "--gpu", "abacus"), "unknown card"),
        (("llama-3-8b", "--users", "none"), "--users"),
        (("llama-3-8b", "--format", "nf5"), "unknown 4-bit format"),
        (("llama-3-8b", "--bandwidth", "0"), "--bandwidth"),
        (("no/such/model",), "built-in names"),
    ],
)
def test_mistakes_say_what_is_wrong(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):  # `main` makes it one line and exit status 1
        run(*words)
