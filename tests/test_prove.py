"""`halfbyte prove`: its numbers against others' arithmetic, what it must notice, going on where it stopped."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from halfbyte import reference  # noqa: E402
from halfbyte.checkpoints import CheckpointError, open_checkpoint, quantize_checkpoint  # noqa: E402
from halfbyte.cli import app  # noqa: E402
from halfbyte.formats import quantize  # noqa: E402
from halfbyte.integrations.transformers import load  # noqa: E402
from halfbyte.lab import prove as prove_module  # noqa: E402
from halfbyte.lab import prove_layers  # noqa: E402
from halfbyte.lab.prove import Settings, prove  # noqa: E402
from halfbyte.lab.prove_adapters import read_adapter  # noqa: E402
from halfbyte.lab.prove_model import Distance, Divergence, _until_end  # noqa: E402
from halfbyte.lab.prove_page import show  # noqa: E402
from halfbyte.lab.verify import Exactness, LayerReport, Truth, verify  # noqa: E402
from halfbyte.ops import linear  # noqa: E402

WORDS = "the sky is blue because air scatters light of short waves more than long ones so we see it from all sides"
UNCHANGED = f"bitsandbytes {version('bitsandbytes')}"
BITSANDBYTES = f"{UNCHANGED} matmul_4bit"


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: number for number, word in enumerate(["<end>", *dict.fromkeys(WORDS.split())])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Llama in NF4, with a tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, tie_word_embeddings=False, eos_token_id=0, bos_token_id=None,
    )  # fmt: skip
    dense = LlamaForCausalLM(config)
    for parameter in dense.parameters():
        if parameter.dim() == 2 and parameter.shape[0] != 128:
            parameter.data *= 5  # else the layers hardly matter beside the residual stream
    dense.bfloat16().save_pretrained(folder / "dense")
    tokenizer().save_pretrained(folder / "dense")
    quantize_checkpoint(folder / "dense", folder / "packed", "nf4-64-nested")
    return folder / "packed"


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA adapter with what its config may vary: ranks and alphas of single layers, rank-stabilised scaling."""
    torch.manual_seed(1)
    lora = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "up_proj", "down_proj"], task_type="CAUSAL_LM", use_rslora=True,
        rank_pattern={"q_proj": 2}, alpha_pattern={"layers.1.mlp.down_proj": 32}, init_lora_weights=False,
    )  # fmt: skip
    wrapped = peft.get_peft_model(load(model, dtype=torch.float32)[0], lora)
    folder = tmp_path_factory.mktemp("adapters") / "lora"
    wrapped.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(" ".join([WORDS] * 3))
    return file


@pytest.fixture(scope="module")
def settings(model: Path, adapter: Path, text: Path) -> Settings:
    return Settings(
        path=model, adapters=(adapter,), against=("bitsandbytes", "dense"), ms=(1, 3), seconds=0.01, warm=True,
        text=text, text_tokens=40, prompts=("the sky is", "we see light from"), tokens=5,
    )  # fmt: skip


@pytest.fixture(scope="module")
def proof(settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    out = tmp_path_factory.mktemp("proofs") / "proof.json"
    return prove(settings, out), out


@pytest.fixture
def layers_only(settings: Settings) -> Settings:
    return replace(settings, adapters=(), against=("dense",), speed=False, model=False, text=None)


def record_of(proof: dict[str, Any], name: str) -> dict[str, Any]:
    return next(layer for layer in proof["layers"] if layer["name"] == name)


class TestTheDocument:
    def test_is_written_whole_under_its_name_alone(self, proof: tuple[dict[str, Any], Path]) -> None:
        document, out = proof
        assert json.loads(out.read_text()) == document
        assert [file.name for file in out.parent.iterdir()] == [out.name]

    def test_layers_hold_the_contract_and_the_peer_does_not(self, proof: tuple[dict[str, Any], Path]) -> None:
        document = proof[0]
        assert len(document["layers"]) == document["model"]["packed_layers"] == 14
        for layer in document["layers"]:
            assert layer["ok"]
            assert layer["swap_detected"] is True
            assert max(layer["halfbyte"]["over_limit"].values()) <= 1.1
            assert layer["halfbyte"]["error"]["fp32"] <= 5e-6
            assert set(layer["halfbyte"]["worst_ulp"].values()) <= {0, 1}
            assert layer["peers"][BITSANDBYTES]["over_limit"]["bf16"] > 1.2  # it rounds the weights to 16 bits first
        summary = document["summary"]
        assert summary["all_within_contract"]
        assert summary["halfbyte"]["over_limit"]["max"] < summary["peers"][BITSANDBYTES]["over_limit"]["min"]

    def test_numbers_of_a_layer_by_other_means(self, proof: tuple[dict[str, Any], Path], settings: Settings) -> None:
        name = "model.layers.1.mlp.down_proj.weight"
        checkpoint = open_checkpoint(settings.path)
        weight = checkpoint.load(name)
        number = [entry.name for entry in checkpoint.entries() if entry.packed].index(name)
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(3, weight.shape[1], generator=generator).bfloat16()
        y = x.double() @ weight.dequantize(torch.float64).t()
        ours = linear(x, weight)
        found = record_of(proof[0], name)
        assert found["halfbyte"]["error"]["bf16"] == pytest.approx(reference.relative_error(ours, y), rel=1e-9)
        limit = reference.relative_error(y.bfloat16(), y)
        assert found["halfbyte"]["over_limit"]["bf16"] == pytest.approx(reference.relative_error(ours, y) / limit)
        dense = torch.nn.functional.linear(x, weight.dequantize(torch.bfloat16))
        theirs = next(record for peer, record in found["peers"].items() if peer.startswith("torch dense"))
        assert theirs["difference"] == pytest.approx(float((dense.double() - ours.double()).norm() / y.norm()))

    def test_speed_has_every_shape_and_candidate(self, proof: tuple[dict[str, Any], Path]) -> None:
        shapes = {tuple(record["shape"]): record for record in proof[0]["speed"]}
        assert {shape: record["layers"] for shape, record in shapes.items()} == {
            (64, 64): 4, (32, 64): 4, (192, 64): 4, (64, 192): 2
        }  # fmt: skip
        for record in shapes.values():
            by_m = {m: {row["kernel"] for row in record["rows"] if row["M"] == m} for m in (1, 3)}
            assert by_m[1] == by_m[3]
            assert {name.split()[0] for name in by_m[1]} == {"halfbyte", "bitsandbytes", "torch"}
            assert all(row["us"] > 0 and row["suite"] == "prove" for row in record["rows"])
        ours = [row["us"] * record["layers"] for record in shapes.values() for row in record["rows"]
                if row["kernel"].startswith("halfbyte") and row["M"] == 3]  # fmt: skip
        assert proof[0]["summary"]["step_us"]["halfbyte"]["3"] == pytest.approx(sum(ours))


class TestAdapters:
    def test_scaling_and_effect_are_pefts(
        self, proof: tuple[dict[str, Any], Path], settings: Settings, adapter: Path
    ) -> None:
        """Against PEFT's own forward in fp32, layer by layer."""
        wrapped = peft.PeftModel.from_pretrained(load(settings.path, dtype=torch.float32)[0], adapter)
        read = read_adapter(adapter)
        assert read.ranks == [2, 4]
        assert len(read.layers) == 6
        names = [entry.name for entry in open_checkpoint(settings.path).entries() if entry.packed]
        for name, lora in read.layers.items():
            module = wrapped.base_model.model.get_submodule(name.removesuffix(".weight"))
            assert lora.scaling == pytest.approx(module.scaling["default"])
            weight = module.base_layer.packed
            x = Truth.of(weight, 3, 16, names.index(name)).x["bf16"].float()
            with torch.inference_mode():
                base, adapted = module.base_layer(x), module(x)
            effect = float((adapted - base).norm() / base.norm())
            found = record_of(proof[0], name)["adapters"][str(adapter)]
            assert found["effect"] == pytest.approx(effect, rel=1e-4)
            assert found["rank"] == lora.a.shape[0]
        assert all(not layer["adapters"] for layer in proof[0]["layers"] if layer["name"] not in read.layers)

    def test_summary_sets_it_against_the_kernels_difference(
        self, proof: tuple[dict[str, Any], Path], adapter: Path
    ) -> None:
        summary = proof[0]["summary"]["adapters"][str(adapter)]
        assert summary["layers"] == 6
        ratios = [
            layer["adapters"][str(adapter)]["effect"] / layer["peers"][BITSANDBYTES]["difference"]
            for layer in proof[0]["layers"]
            if layer["adapters"]
        ]
        assert summary["over_difference"][BITSANDBYTES]["min"] == pytest.approx(min(ratios))
        assert "float64" in summary["over_difference"]

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"use_dora": True}, "DoRA"),
            ({"peft_type": "IA3"}, "only LORA is read"),
            ({"lora_alpha": "much"}, "must be a number"),
        ],
    )
    def test_other_adapters_are_refused(
        self, adapter: Path, tmp_path: Path, change: dict[str, Any], message: str
    ) -> None:
        folder = shutil.copytree(adapter, tmp_path / "adapter")
        config = json.loads((folder / "adapter_config.json").read_text()) | change
        (folder / "adapter_config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match=message):
            read_adapter(folder)

    def test_damaged_and_foreign_adapters_are_refused(
        self, adapter: Path, layers_only: Settings, tmp_path: Path
    ) -> None:
        with pytest.raises(CheckpointError, match="not found"):
            read_adapter(tmp_path)
        folder = shutil.copytree(adapter, tmp_path / "adapter")
        file = folder / "adapter_model.safetensors"
        tensors = load_file(file)
        save_file({name: part for name, part in tensors.items() if "1.mlp.up_proj.lora_B" not in name}, file)
        with pytest.raises(CheckpointError, match=r"up_proj.lora_B.weight: missing"):
            read_adapter(folder)
        save_file({name.replace("layers", "blocks"): part for name, part in tensors.items()}, file)
        with pytest.raises(ValueError, match="none of its 6 layers"):
            prove(replace(layers_only, adapters=(folder,)))
        save_file(
            {name: part[:, :-1].contiguous() if "q_proj.lora_A" in name else part for name, part in tensors.items()},
            file,
        )
        with pytest.raises(ValueError, match="trained on another model"):
            prove(replace(layers_only, adapters=(folder,)))


class TestTheModel:
    def test_perplexity_is_the_models_loss(self, proof: tuple[dict[str, Any], Path], settings: Settings) -> None:
        """The reference against a dense fp32 model with the same values, by transformers' own loss."""
        packed, words = load(settings.path, dtype=torch.float32)
        assert settings.text is not None
        ids = words(settings.text.read_text(), return_tensors="pt")["input_ids"][:, :40]
        with torch.inference_mode():
            loss = packed.dequantize()(ids, labels=ids).loss
        systems = {system["name"]: system for system in proof[0]["end_to_end"]["systems"]}
        assert systems["halfbyte fp32"]["perplexity"]["base"] == pytest.approx(float(loss.exp()), rel=1e-5)
        assert systems["halfbyte"]["perplexity"]["base"] == pytest.approx(float(loss.exp()), rel=0.05)

    def test_logits_and_what_the_adapter_changes(self, proof: tuple[dict[str, Any], Path], adapter: Path) -> None:
        record = proof[0]["end_to_end"]
        systems = {system["name"]: system["logits"] for system in record["systems"]}
        assert list(systems) == ["halfbyte fp32", "halfbyte", UNCHANGED, f"torch dense {torch.__version__}"]
        assert systems["halfbyte fp32"]["base"] == {"relative": 0, "kl": 0, "top1": 1}
        for name in list(systems)[1:]:
            assert 1e-4 < systems[name]["base"]["relative"] < 0.1
        assert record["adapters"][str(adapter)]["relative"] > 5 * systems["halfbyte"][str(adapter)]["relative"]

    def test_greedy_answers_and_the_noise_of_the_unchanged_system(self, proof: tuple[dict[str, Any], Path]) -> None:
        record = proof[0]["end_to_end"]
        unchanged = UNCHANGED
        assert record["unchanged"] == unchanged
        pairs = {(pair["a"], pair["b"]): pair["first"] for pair in record["greedy"]["pairs"]}
        assert pairs[f"{unchanged}, again", unchanged] == [None, None]  # one process, no batching: no noise
        assert set(pairs) >= {(f"{unchanged}, in a batch", unchanged), ("halfbyte", unchanged)}
        assert len(record["greedy"]["answers"]["halfbyte"]) == 2
        assert len(proof[0]["summary"]["greedy"]) == len(pairs)

    def test_measures(self) -> None:
        ours, theirs = [torch.tensor([[0.0, 0.0], [0.0, 3.0]])], [torch.tensor([[0.0, 0.0], [4.0, 0.0]])]
        found = Distance.of(ours, theirs)
        assert found.relative == pytest.approx(5 / 4)
        p, q = torch.tensor([4.0, 0.0]).softmax(0), torch.tensor([0.0, 3.0]).softmax(0)
        assert found.kl == pytest.approx(float((p * (p / q).log()).sum()) / 2, rel=1e-6)
        assert found.top1 == 0.5
        assert Divergence.of("a", [[1, 2], [1, 2], [1]], "b", [[1, 2], [1, 3], [1, 2]]).first == [None, 1, 1]
        assert _until_end([5, 6, 0, 7], {0}) == [5, 6, 0]
        assert _until_end([5, 6], {None}) == [5, 6]

    def test_bitsandbytes_on_halfbyte_is_no_peer(self, settings: Settings, bitsandbytes_off: None) -> None:
        from halfbyte.integrations import bitsandbytes as switch

        with switch.enabled(), pytest.raises(ValueError, match="cannot be measured as a peer"):
            prove(replace(settings, only="0.self_attn.q_proj", adapters=(), speed=False))


class TestWhatMustBeNoticed:
    def test_a_kernel_that_swaps_nibbles(self, layers_only: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
        swapped: Callable[..., Any] = lambda x, weight: linear(x, reference.swap_nibbles(weight))  # noqa: E731
        monkeypatch.setattr(prove_layers, "linear", swapped)
        document = prove(layers_only)
        assert not document["summary"]["all_within_contract"]
        assert len(document["summary"]["outside"]) == 14
        assert not any(layer["one_hot_ok"] for layer in document["layers"])

    def test_a_kernel_that_is_slightly_off_in_one_layer(
        self, layers_only: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        off: Callable[..., Any] = lambda x, weight: linear(x, weight) * (1.004 if weight.shape[1] == 192 else 1)  # noqa: E731
        monkeypatch.setattr(prove_layers, "linear", off)
        found = prove(layers_only)["summary"]["outside"]
        assert found == [f"model.layers.{layer}.mlp.down_proj.weight" for layer in range(2)]

    def test_a_weight_of_one_code_has_no_swap_to_notice(self) -> None:
        weight = quantize(torch.zeros(4, 64), "nf4-64")
        truth = Truth.of(weight, 3, 8, 0)
        exactness = truth.check(lambda x: linear(x, weight))
        assert truth.notices_swap(weight) is None
        assert LayerReport.of("zeros", weight, exactness, None).ok

    def test_verify_and_prove_say_the_same(self, proof: tuple[dict[str, Any], Path], settings: Settings) -> None:
        for report in verify(open_checkpoint(settings.path)):
            found = record_of(proof[0], report.name)
            assert report.over_limit == max(found["halfbyte"]["over_limit"].values())
            assert report.error_fp32 == found["halfbyte"]["error"]["fp32"]


class TestInterruption:
    @staticmethod
    def stop_after(count: int) -> Callable[[str, int, int], None]:
        def progress(stage: str, done: int, total: int) -> None:
            if stage == "layers" and done == count:
                raise KeyboardInterrupt

        return progress

    def test_a_run_goes_on_where_it_stopped(
        self, layers_only: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        whole = prove(layers_only)
        out = tmp_path / "deep" / "proof.json"
        with pytest.raises(KeyboardInterrupt):
            prove(layers_only, out, progress=self.stop_after(5))
        partial = out.with_name("proof.json.partial")
        assert len(json.loads(partial.read_text())["layers"]) == 5
        assert not out.exists()
        with pytest.raises(ValueError, match="go on with --resume"):
            prove(layers_only, out)
        with pytest.raises(ValueError, match="settings differ"):
            prove(replace(layers_only, rows=4), out, resume=True)
        calls = []
        original = prove_module.prove_layer
        monkeypatch.setattr(
            prove_module, "prove_layer", lambda name, *rest: calls.append(name) or original(name, *rest)
        )
        resumed = prove(layers_only, out, resume=True)
        assert len(calls) == 9
        assert resumed["layers"] == whole["layers"]
        assert not partial.exists()
        assert json.loads(out.read_text()) == resumed
        with pytest.raises(ValueError, match="nothing to resume"):
            prove(layers_only, out, resume=True)

    def test_another_checkpoint_under_the_same_name_is_no_resumption(
        self, layers_only: Settings, model: Path, tmp_path: Path
    ) -> None:
        folder = shutil.copytree(model, tmp_path / "model")
        moved = replace(layers_only, path=folder)
        with pytest.raises(KeyboardInterrupt):
            prove(moved, tmp_path / "p.json", progress=self.stop_after(2))
        tensors = load_file(folder / "model.safetensors")
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match="files differ"):
            prove(moved, tmp_path / "p.json", resume=True)

    def test_a_damaged_state_is_named(self, layers_only: Settings, tmp_path: Path) -> None:
        (tmp_path / "p.json.partial").write_text('{"run": ')
        with pytest.raises(ValueError, match=r"p\.json\.partial cannot be read"):
            prove(layers_only, tmp_path / "p.json", resume=True)


class TestTheCommand:
    def test_the_page_shows_every_part(self, proof: tuple[dict[str, Any], Path], adapter: Path) -> None:
        console = Console(width=160, record=True, file=StringIO())
        show(proof[0], console)
        page = console.export_text()
        for wanted in (
            "14 packed layers", "within the contract", "swapped nibbles detected", "model.layers.0.mlp.up_proj.weight",
            "halfbyte cpu_linear", "perplexity", "noise of the unchanged system", "5 tokens each", "all packed layers",
        ):  # fmt: skip
            assert wanted in page, page
        for name in proof[0]["peers"]:
            assert name in page

    def test_prints_a_page_and_takes_prompts_from_a_file(self, model: Path, tmp_path: Path) -> None:
        out, prompts = tmp_path / "p.json", tmp_path / "prompts.txt"
        prompts.write_text("the sky\n\nlight\n")
        words = ["prove", str(model), "--against", "dense", "--tokens", "2", "--no-speed", "--only", "0.mlp.up",
                 "--device", "cpu", "--out", str(out), "--prompts", str(prompts)]  # fmt: skip
        result = CliRunner().invoke(app, words, catch_exceptions=False)
        assert result.exit_code == 0
        assert "1 layers, within the contract" in result.stdout
        assert json.loads(out.read_text())["end_to_end"]["greedy"]["prompts"] == ["the sky", "light"]

    def test_exit_status_says_that_a_layer_is_off(self, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(prove_layers, "linear", lambda x, weight: linear(x, weight) * 1.01)
        words = ["prove", str(settings.path), "--no-model", "--no-speed", "--json", "--device", "cpu"]
        result = CliRunner().invoke(app, words, catch_exceptions=False)
        assert result.exit_code == 1
        assert json.loads(result.stdout)["summary"]["all_within_contract"] is False

    @pytest.mark.parametrize(
        ("words", "error", "message"),
        [
            (["--against", "abacus"], ValueError, "--against takes bitsandbytes, dense, onnxruntime"),
            (["--dtype", "fp32"], ValueError, "bf16 or fp16"),
            (["--resume"], ValueError, "--resume needs --out"),
            (["--only", "nothing"], ValueError, "whose name contains 'nothing'"),
            (["--M", "0"], ValueError, "--M takes numbers from 1 up"),
        ],
    )
    def test_mistakes(self, model: Path, words: list[str], error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            CliRunner().invoke(app, ["prove", str(model), "--device", "cpu", *words], catch_exceptions=False)


def test_a_gguf_model_with_the_peer_that_can_hold_it(tmp_path: Path) -> None:
    from halfbyte.demo import model_file

    try:
        file = model_file()
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    document = prove(Settings(path=file, only="blk.0.", speed=False, model=False))
    assert document["model"]["kind"] == "gguf"
    assert document["summary"]["all_within_contract"]
    assert {layer["format"] for layer in document["layers"]} == {"q4_1"}
    assert all(name.startswith("torch dense") for name in document["summary"]["peers"])


def test_a_dense_model_has_nothing_to_prove(model: Path) -> None:
    with pytest.raises(ValueError, match="no 4-bit weights"):
        prove(Settings(path=model.with_name("dense")))


def test_the_dense_twin_answers_as_the_library_does(model: Path) -> None:
    """What the peer "dense" runs is the same values in torch's own layers."""
    from halfbyte.lab.prove_model import systems

    dense = systems(model, "bitsandbytes", torch.float32, "cpu", ("dense",))[-1].load()
    assert {type(module) for module in dense.modules() if isinstance(module, torch.nn.Linear)} == {torch.nn.Linear}
    ids = torch.arange(8)[None]
    with torch.inference_mode():
        found, wanted = dense(ids).logits, load(model, dtype=torch.float32)[0](ids).logits
    assert reference.relative_error(found, wanted) < 1e-5


@pytest.mark.parametrize(
    ("device", "offset", "dtype", "equal", "worst", "ok"),
    [
        ("cpu", None, "bf16", 0.995, 1, True),
        ("cpu", None, "bf16", 0.98, 1, False),
        ("cpu", None, "fp32", 0.9, 1, False),
        ("cuda", None, "bf16", 0.5, 1, True),  # the default mode; strict keeps 99 %
        ("cuda", None, "bf16", 0.99, 2, False),
        ("cuda", None, "fp32", 0.1, 4, True),  # a table of 21 bits
        ("cuda", None, "fp32", 0.1, 9, False),
        ("cuda", "fp16", "fp32", 0.1, 900, True),  # an offset cancels the product
    ],
)
def test_what_the_contract_asks_of_single_weights(device, offset, dtype, equal, worst, ok):
    weight = SimpleNamespace(device=torch.device(device), format=SimpleNamespace(offset=offset))
    assert Exactness({}, {}, {dtype: equal}, {dtype: worst}).one_hot_ok(weight) is ok
