"""Writing checkpoints: what other tools read, and that nothing half-written or destroyed is ever left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from checkpoint_samples import normal
from halfbyte.checkpoints import (
    CheckpointError,
    open_checkpoint,
    quantize_checkpoint,
    quantize_tensors,
    staged_directory,
    unpack_state,
    write_safetensors,
    writer,
)
from halfbyte.checkpoints.convert import why_dense
from halfbyte.checkpoints.own import pack_own
from halfbyte.checkpoints.staging import LOCK
from halfbyte.formats import PackedWeight, get_format, quantize
from halfbyte.nn import QuantLinear

Tensors = dict[str, torch.Tensor]


def random_packed(key: str, n: int, k: int) -> PackedWeight:
    """A weight in any format, of small numbers: as bytes of scales they are finite in every one."""
    format = get_format(key)
    generator = torch.Generator().manual_seed(0)
    parts = {
        name: torch.randint(1, 60, part.shape, generator=generator).to(part.dtypes[0])
        for name, part in format.parts(n, k).items()
    }
    return PackedWeight(format, (n, k), parts)


def label(**changed: object) -> torch.Tensor:
    return torch.tensor(list(json.dumps({"format": "mxfp4", "shape": [4, 64]} | changed).encode()), dtype=torch.uint8)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# --- safetensors ------------------------------------------------------------------------------------------------------


def odd_tensors() -> Tensors:
    """Types and sizes that leave the next tensor unaligned, in the worst order."""
    tensors: Tensors = {"byte": torch.tensor([1], dtype=torch.uint8), "double": normal(3).double()}
    tensors |= {"half": normal(3).half(), "float": normal(5), "bool": torch.tensor([True, False, True])}
    tensors |= {"empty": torch.zeros(0, 4), "scalar": torch.tensor(2.5), "long": torch.arange(3)}
    tensors |= {"strided": normal(4, 6).t(), "fp8": normal(5).to(torch.float8_e4m3fn), "brain": normal(3, 3).bfloat16()}
    return tensors


def test_written_file_is_safetensors(tmp_path: Path) -> None:
    tensors = odd_tensors()
    assert write_safetensors(tmp_path, tensors.items()) == [tmp_path / "model.safetensors"]
    assert names(tmp_path) == ["model.safetensors"]
    read = load_file(tmp_path / "model.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name].float(), tensor.float()), name
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    ours = open_checkpoint(tmp_path)
    assert {entry.name for entry in ours.entries()} == tensors.keys()
    for name, record in ours.tensors.files[0].records.items():  # type: ignore[attr-defined]
        assert record.start % record.dtype.itemsize == 0, name


def test_packed_weights_are_written_as_bitsandbytes(tmp_path: Path) -> None:
    weights = {"a.weight": quantize(normal(5, 77), "nf4-32"), "b.weight": quantize(normal(8, 64), "fp4-64-nested")}
    write_safetensors(tmp_path, weights.items(), dtype="float16")
    read = load_file(tmp_path / "model.safetensors")
    for name, weight in weights.items():
        again = unpack_state(read, name, "file")
        assert again.format == weight.format
        assert torch.equal(again.dequantize(), weight.dequantize())
    assert b'"dtype": "float16"' in bytes(read["a.weight.quant_state.bitsandbytes__nf4"].tolist())


OWN_FORMATS = ("q4_0", "q4_1", "iq4_nl", "mxfp4", "mxfp4_gguf", "q4_k", "nvfp4", "gptq-32", "gptq_v2-64", "awq-32")


@pytest.mark.parametrize("key", OWN_FORMATS)
def test_other_packed_weights_are_written_as_our_own(tmp_path: Path, key: str) -> None:
    """Under the names that a QuantLinear's state_dict has, and read back to the same bytes."""
    weight = random_packed(key, 16, 256)
    write_safetensors(tmp_path, [("up.weight", weight), ("norm.weight", normal(4))])
    assert load_file(tmp_path / "model.safetensors").keys() == QuantLinear.from_packed(weight).state_dict(
        prefix="up."
    ).keys() | {"norm.weight"}
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.kind == "halfbyte"
    entries = {entry.name: entry for entry in checkpoint.entries()}
    assert entries.keys() == {"up.weight", "norm.weight"}
    entry = entries["up.weight"]
    assert (entry.format, entry.shape, entry.packed) == (key, (16, 256), True)
    again = checkpoint.load("up.weight")
    assert isinstance(again, PackedWeight)
    assert all(torch.equal(again.parts[part], weight.parts[part]) for part in weight.parts)
    checkpoint.release("up.weight")


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"x.halfbyte": label(format="q9")}, "unknown 4-bit format 'q9'"),
        ({"x.halfbyte": label(format=None)}, "unknown"),
        ({"x.halfbyte": label(shape=[4, 65])}, "K must be a multiple of 32"),
        ({"x.halfbyte": label(shape=[4, 96])}, "must have shape"),
        ({"x.halfbyte": label(shape=[-4, 64])}, "at least 1"),
        ({"x.halfbyte": label(shape=[True, 64])}, "must hold a format and a shape"),
        ({"x.halfbyte": label(shape=[1 << 80, 64])}, "must have shape"),
        ({"x.halfbyte": torch.zeros(3)}, "must be uint8"),
        ({"x.halfbyte": torch.tensor(list(b"[" * 900), dtype=torch.uint8)}, "not JSON"),
        ({"x.halfbyte": torch.tensor(list(b"[]"), dtype=torch.uint8)}, "must hold"),
        ({"x.scales": torch.zeros(4, 2)}, "must be .*uint8"),
        ({"x.scales": torch.full((4, 2), 255, dtype=torch.uint8)}, "NaN or infinite"),
        ({"x.scales": None}, "missing"),
    ],
)
def test_bad_own_weights(tmp_path: Path, changed: dict[str, torch.Tensor | None], says: str) -> None:
    tensors: dict[str, torch.Tensor | None] = {**pack_own(quantize(normal(4, 64), "mxfp4"), "x"), **changed}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=says):
        open_checkpoint(tmp_path).load("x")


@pytest.mark.parametrize("room", [1 << 19, 500])
def test_shards_and_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """Files are closed by their size, or when the room for their header is used up; a weight is never split."""
    monkeypatch.setattr(writer, "HEADER_ROOM", room)
    tensors = {f"layer.{i}.weight": normal(16, 16, seed=i) for i in range(7)}
    packed = quantize(normal(8, 64), "nf4-64")
    limit = 3 * 1024 if room > 1000 else 1 << 20
    if room > 1000:
        paths = write_safetensors(tmp_path, [*tensors.items(), ("q.weight", packed)], max_shard_bytes=limit)
    else:
        paths = write_safetensors(tmp_path, tensors.items(), max_shard_bytes=limit)
    assert len(paths) > 2
    assert [path.name for path in paths] == [
        f"model-{i:05d}-of-{len(paths):05d}.safetensors" for i in range(1, len(paths) + 1)
    ]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    for name, tensor in tensors.items():
        assert torch.equal(load_file(tmp_path / index["weight_map"][name])[name], tensor)
    homes = {home for name, home in index["weight_map"].items() if name.startswith("q.")}
    assert len(homes) == (room > 1000)
    total = sum(tensor.nbytes for path in paths for tensor in load_file(path).values())
    assert index["metadata"]["total_size"] == total
    assert len(open_checkpoint(tmp_path).entries()) == len(tensors) + len(homes)
    assert set(names(tmp_path)) == {"model.safetensors.index.json", *(path.name for path in paths)}


def test_no_tensors_at_all(tmp_path: Path) -> None:
    write_safetensors(tmp_path, [])
    assert load_file(tmp_path / "model.safetensors") == {}


def failing() -> Iterator[tuple[str, torch.Tensor]]:
    yield "a", torch.zeros(100)
    raise OSError("disk full")


def test_failure_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="disk full"):
        write_safetensors(tmp_path, failing(), max_shard_bytes=10)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("tensors", "error", "says"),
    [
        ([("a", torch.zeros(1)), ("a", torch.zeros(1))], CheckpointError, "a: is written twice"),
        ([("__metadata__", torch.zeros(1))], CheckpointError, "reserves"),
        ([("a", torch.zeros(2, dtype=torch.complex128))], ValueError, "complex128"),
        ([("a" * 600_000, torch.zeros(2))], CheckpointError, "too long"),
    ],
)
def test_write_errors(
    tmp_path: Path, tensors: list[tuple[str, torch.Tensor]], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        write_safetensors(tmp_path, tensors)
    assert names(tmp_path) == []


def test_existing_weights_are_kept(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="already holds weights"):
        write_safetensors(tmp_path, [("a", torch.zeros(2))])
    assert load_file(tmp_path / "model.safetensors")["a"].tolist() == [1, 1]


def test_killed_writer_leaves_no_weights(tmp_path: Path) -> None:
    """A process killed in the middle leaves a temporary file, never a final name; the next run removes it."""
    code = (
        "import os, signal, sys, torch; from halfbyte.checkpoints import write_safetensors\n"
        "def tensors():\n"
        "    yield 'a', torch.ones(1000)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "write_safetensors(sys.argv[1], tensors())"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == -9
    (left,) = names(tmp_path)
    assert left.startswith(writer.TEMPORARY)
    with pytest.raises(CheckpointError, match="not found"):
        open_checkpoint(tmp_path)
    write_safetensors(tmp_path, [("a", torch.zeros(2))])
    assert names(tmp_path) == ["model.safetensors"]


# --- staging ----------------------------------------------------------------------------------------------------------


def test_staging_swaps_whole_directories(tmp_path: Path) -> None:
    final = tmp_path / "model [1]"
    with staged_directory(final) as stage:
        (stage / "a").write_text("first")
        assert not final.exists()
    assert names(final) == ["a"]
    with pytest.raises(CheckpointError, match="not empty"), staged_directory(final):
        pass
    with suppress(RuntimeError), staged_directory(final, overwrite=True) as stage:
        (stage / "b").write_text("second")
        raise RuntimeError
    assert (final / "a").read_text() == "first"
    with staged_directory(final, overwrite=True) as stage:
        (stage / "b").write_text("second")
    assert names(final) == ["b"]
    assert names(tmp_path) == ["model [1]"]


def test_staging_removes_what_crashed_runs_left(tmp_path: Path) -> None:
    stale, other = tmp_path / ".model.partial-dead", tmp_path / ".other.partial-dead"
    for directory in (stale, other):
        directory.mkdir()
        (directory / LOCK).touch()
    kept = tmp_path / ".model.partial-old"  # no lock: an old checkpoint moved aside when a run died
    kept.mkdir()
    with staged_directory(tmp_path / "model") as live, staged_directory(tmp_path / "model") as second:
        assert not stale.exists()
        assert live.exists()  # a running writer's directory is left alone
        (second / "x").touch()
    assert names(tmp_path) == [".model.partial-old", ".other.partial-dead", "model"]


@pytest.mark.parametrize("kind", ["file", "link"])
def test_staging_refuses(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "target"
    if kind == "file":
        target.touch()
    else:
        (tmp_path / "real").mkdir()
        target.symlink_to(tmp_path / "real")
    with pytest.raises(CheckpointError, match="file or a link"), staged_directory(target, overwrite=True):
        pass


# --- conversion -------------------------------------------------------------------------------------------------------


def dense_model(path: Path) -> Path:
    """Names of a small Llama with a mixture of experts beside it; files that must and must not be copied."""
    path.mkdir()
    tensors = {
        "model.embed_tokens.weight": normal(32, 64),
        "model.norm.weight": normal(64),
        "lm_head.weight": normal(32, 64),
        "model.layers.0.mlp.gate.weight": normal(4, 64),
        "model.layers.0.mlp.gate_proj.weight": normal(48, 64),
        "model.layers.0.mlp.down_proj.weight": normal(64, 77),
        "model.layers.0.mlp.experts.gate_up_proj": normal(4, 64, 32),
        "model.layers.0.mlp.experts.3.w1.weight": normal(8, 64),
        "model.layers.0.self_attn.q_proj.weight": normal(64, 64, dtype=torch.float16),
        "model.layers.0.self_attn.q_proj.bias": normal(64),
        "model.layers.0.conv.weight": normal(4, 4, 3),
        "model.layers.0.int.weight": torch.zeros(4, 4, dtype=torch.int32),
        "model.layers.0.A_log": normal(4, 4),
    }
    save_file({name: t.clone() if t.dtype != torch.float32 else t.bfloat16() for name, t in tensors.items()},
              path / "model.safetensors")  # fmt: skip
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "bfloat16"}))
    for name in ("tokenizer.json", "generation_config.json", "LICENSE", "chat_template.jinja", "tokenizer.model"):
        (path / name).write_text(name)
    for name in ("old.bin", "model.safetensors.index.json.bak", ".hidden.json"):
        (path / name).write_text(name)
    return path


@pytest.mark.parametrize("format", ["nf4-64", "nf4-32-nested", "fp4-128"])
def test_quantize_checkpoint(tmp_path: Path, format: str) -> None:
    source = dense_model(tmp_path / "dense")
    seen: list[tuple[str, int, int | None]] = []
    summary = quantize_checkpoint(source, tmp_path / "q", format, progress=lambda *step: seen.append(step))
    layer = "model.layers.0."
    quantised = [layer + name for name in ("mlp.down_proj.weight", "mlp.gate_proj.weight", "self_attn.q_proj.weight")]
    assert sorted(summary.quantized) == quantised
    assert summary.left.keys() == {
        "model.embed_tokens.weight", "lm_head.weight", layer + "mlp.gate.weight", layer + "conv.weight",
        layer + "int.weight", layer + "A_log", layer + "mlp.experts.gate_up_proj", layer + "mlp.experts.3.w1.weight",
    }  # fmt: skip
    assert "fused experts" in summary.left[layer + "mlp.experts.gate_up_proj"]
    assert summary.dense == 10
    assert [step[1:] for step in seen] == [(i, 13) for i in range(1, 14)]
    before, after = load_file(source / "model.safetensors"), open_checkpoint(tmp_path / "q")
    assert after.kind == "bitsandbytes"
    assert summary.bytes_after == sum(entry.nbytes for entry in after.entries())
    assert summary.bytes_before == sum(tensor.nbytes for tensor in before.values())
    for entry in after.entries():
        loaded = after.load(entry.name)
        if entry.name in quantised:
            assert isinstance(loaded, PackedWeight)
            assert entry.format == format
            wanted = quantize(before[entry.name], format)
            assert all(torch.equal(loaded.parts[part], wanted.parts[part]) for part in wanted.parts)
        else:
            assert torch.equal(loaded, before[entry.name])  # type: ignore[arg-type]
    assert names(tmp_path / "q") == sorted(
        ["model.safetensors", "config.json", "tokenizer.json", "generation_config.json", "LICENSE",
         "chat_template.jinja", "tokenizer.model"]
    )  # fmt: skip
    config = after.config
    assert config is not None
    assert config["model_type"] == "llama"
    written = config["quantization_config"]
    assert written["bnb_4bit_quant_type"] == format[:3]
    assert written["bnb_4bit_use_double_quant"] is format.endswith("nested")
    assert written["bnb_4bit_compute_dtype"] == "bfloat16"
    assert "lm_head" in written["llm_int8_skip_modules"]
    assert layer + "mlp.gate" in written["llm_int8_skip_modules"]
    assert layer + "mlp.experts" in written["llm_int8_skip_modules"]


def test_config_is_what_transformers_writes(tmp_path: Path) -> None:
    from transformers import BitsAndBytesConfig

    theirs = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype="float32",
        llm_int8_skip_modules=["lm_head"],
    ).to_dict()
    quantize_tensors([("a.weight", normal(4, 64))], {"dtype": "float32"}, tmp_path / "q")
    ours = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    assert ours == json.loads(json.dumps(theirs))


def test_quantize_tensors_hook(tmp_path: Path) -> None:
    tensors = {"a.weight": normal(8, 64), "b.norm.weight": normal(8)}
    summary = quantize_tensors(
        iter(tensors.items()), {"x": 1}, tmp_path / "q", extras=lambda stage: (stage / "tokenizer.json").touch()
    )
    assert summary.quantized == ["a.weight"]
    assert names(tmp_path / "q") == ["config.json", "model.safetensors", "tokenizer.json"]


def test_conversion_refuses(tmp_path: Path) -> None:
    source = dense_model(tmp_path / "dense")
    for dst in (source, tmp_path, source / "." / ".." / "dense"):
        with pytest.raises(CheckpointError, match="is the source"):
            quantize_checkpoint(source, dst, overwrite=True)
    with pytest.raises(ValueError, match="not as 'q4_0'"):
        quantize_checkpoint(source, tmp_path / "q", "q4_0")
    quantize_checkpoint(source, tmp_path / "q")
    before = (tmp_path / "q" / "model.safetensors").stat().st_mtime_ns
    with pytest.raises(CheckpointError, match="not empty"):
        quantize_checkpoint(source, tmp_path / "q")
    assert (tmp_path / "q" / "model.safetensors").stat().st_mtime_ns == before
    quantize_checkpoint(source, tmp_path / "q", overwrite=True)
    assert (tmp_path / "q" / "model.safetensors").stat().st_mtime_ns != before
    with pytest.raises(CheckpointError, match="quantised already"):
        quantize_checkpoint(tmp_path / "q", tmp_path / "r")
    with pytest.raises(CheckpointError, match="not a model directory"):
        quantize_checkpoint(source / "model.safetensors", tmp_path / "r")
    (source / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(CheckpointError, match="Conv1D"):
        quantize_checkpoint(source, tmp_path / "r")
    (source / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: not found"):
        quantize_checkpoint(source, tmp_path / "r")
    assert names(tmp_path) == ["dense", "q"]


def test_conversion_names_a_weight_with_nan(tmp_path: Path) -> None:
    bad = normal(8, 64)
    bad[3, 3] = float("nan")
    with pytest.raises(CheckpointError, match=r"bad\.weight: .*NaN"):
        quantize_tensors([("good.weight", normal(8, 64)), ("bad.weight", bad)], {}, tmp_path / "q")
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "linear"),
    [
        ("lm_head", False),
        ("language_model.lm_head", False),
        ("model.layers.1.mlp.gate", False),
        ("model.layers.1.mlp.gate_proj", True),
        ("model.layers.1.block_sparse_moe.gate", False),
        ("model.layers.1.mlp.shared_expert_gate", False),
        ("model.layers.1.mlp.shared_expert.up_proj", True),
        ("model.layers.1.mlp.experts.12.up_proj", False),
        ("model.decoder.embed_positions", False),
        ("transformer.wte", False),
        ("encoder.layer.0.attention.output.dense", True),
        ("encoder.layer.0.output.dense", True),
        ("embeddings.word_embeddings", False),
        ("model.layers.0.input_layernorm", False),
        ("visual.blocks.0.attn.qkv", True),
    ],
)
def test_which_weights_are_linear(name: str, linear: bool) -> None:
    assert (why_dense(name + ".weight", normal(4, 8)) is None) is linear


# --- with transformers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_reads_what_we_write_and_back(tmp_path: Path, tied: bool) -> None:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, vocab_size=128, tie_word_embeddings=tied)  # fmt: skip
    dense = LlamaForCausalLM(config).bfloat16()
    dense.save_pretrained(tmp_path / "dense")
    summary = quantize_checkpoint(tmp_path / "dense", tmp_path / "ours", "nf4-64-nested")
    assert len(summary.quantized) == 14
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.bfloat16)
    assert type(loaded.model.layers[0].mlp.up_proj).__name__ == "Linear4bit"
    assert type(loaded.lm_head).__name__ == "Linear"
    ours = open_checkpoint(tmp_path / "ours")
    values = {e.name: ours.load(e.name).dequantize(torch.bfloat16) for e in ours.entries() if e.packed}  # type: ignore[union-attr]
    dense.load_state_dict(values, strict=False)
    tokens = torch.arange(24)[None]
    with torch.no_grad():
        got, wanted = loaded(tokens).logits.float(), dense(tokens).logits.float()
    assert float((got - wanted).norm() / wanted.norm()) < 0.02  # bitsandbytes rounds inside its kernels
    four_bit = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "dense", quantization_config=four_bit, dtype=torch.bfloat16
    )
    theirs.save_pretrained(tmp_path / "theirs")
    read = open_checkpoint(tmp_path / "theirs")
    assert {(e.name, e.format, e.shape) for e in read.entries()} == {
        (e.name, e.format, e.shape) for e in ours.entries()
    }
    for entry in read.entries():
        if entry.packed:
            mine, other = ours.load(entry.name), read.load(entry.name)
            assert all(torch.equal(mine.parts[p], other.parts[p]) for p in mine.parts)  # type: ignore[union-attr]


# --- memory -----------------------------------------------------------------------------------------------------------

MEMORY = """
import sys, torch
from pathlib import Path
from halfbyte.checkpoints import open_checkpoint, quantize_checkpoint
torch.set_num_threads(1)
def status(field):
    return int(Path("/proc/self/status").read_text().split(field + ":")[1].split()[0]) * 1024
def convert(source, target):
    quantize_checkpoint(source, target, "nf4-64")
def load(source):
    checkpoint = open_checkpoint(source)
    weights = [checkpoint.load(entry.name) for entry in checkpoint.entries() if entry.packed]
    assert all(int(weight.codes.max()) == 255 for weight in weights)  # touches every byte
    return weights
action, small, *big = sys.argv[1:]
action = {"convert": convert, "load": load}[action]
action(small, *(path + "-small" for path in big[1:]))  # code and library pages are no part of a model
Path("/proc/self/clear_refs").write_text("5")
start = status("VmRSS")
kept = action(*big)
print(status("VmRSS") - start, status("VmHWM") - start)
"""


def measure(*arguments: object) -> tuple[int, int]:
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, *map(str, arguments)], check=True, capture_output=True, text=True
    )
    at_rest, peak = map(int, done.stdout.split())
    return at_rest, peak


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux' resettable peak of memory")
def test_memory(tmp_path: Path) -> None:
    """Loading takes the packed bytes plus 5 %; converting never holds more than that plus the largest dense tensor.

    192 MiB of bf16 in 24 layers: a converter that kept the dense model, or its output twice, would be far over.
    """
    layers = {f"layers.{i}.weight": normal(2048, 2048, dtype=torch.bfloat16) for i in range(3)}
    source, small = tmp_path / "dense", tmp_path / "small"
    write_safetensors(source, ((f"{i}.{name}", t) for i in range(8) for name, t in layers.items()))
    write_safetensors(small, [("a.weight", normal(128, 2048, dtype=torch.bfloat16))])
    for directory in (source, small):
        (directory / "config.json").write_text("{}")
    largest = 2048 * 2048 * 2
    _, converting = measure("convert", small, source, tmp_path / "q")
    packed = sum(entry.nbytes for entry in open_checkpoint(tmp_path / "q").entries())
    assert packed == pytest.approx(24 * 2048 * 2048 * (0.5 + 4 / 64), rel=0.001)
    assert converting <= packed * 1.05 + largest
    at_rest, loading = measure("load", tmp_path / "q-small", tmp_path / "q")
    assert packed * 0.9 < at_rest <= packed * 1.05
    assert loading <= packed * 1.05 + largest


def test_a_model_larger_than_memory_opens(tmp_path: Path) -> None:
    """A sparse file of 8 TiB: headers are read, nothing is allocated, a small tensor loads."""
    size = 8 << 40
    header = {"big": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]},
              "small": {"dtype": "U8", "shape": [4], "data_offsets": [size, size + 4]}}  # fmt: skip
    raw = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    try:
        with open(path, "wb") as file:
            file.write(len(raw).to_bytes(8, "little") + raw)
            file.truncate(8 + len(raw) + size + 4)
    except OSError:
        pytest.skip("this file system holds no sparse file of 8 TiB")
    checkpoint = open_checkpoint(path)
    assert checkpoint.entries()[0].nbytes == size
    assert checkpoint.load("small").tolist() == [0, 0, 0, 0]  # type: ignore[union-attr]
