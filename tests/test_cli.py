"""The command, from the shell's side: what it prints, what it refuses, and its exit status."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96, "dtype": "bfloat16",
}  # fmt: skip


def halfbyte(*words, status=0):
    """Standard output of the command; checks its exit status and that no traceback is shown."""
    done = subprocess.run([sys.executable, "-m", "halfbyte", *map(str, words)], capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout if status == 0 else done.stdout + done.stderr


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """A small dense Llama checkpoint, without a tokenizer."""
    folder = tmp_path_factory.mktemp("dense")
    torch.manual_seed(0)
    sizes = {"self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64), "self_attn.v_proj": (32, 64),
             "self_attn.o_proj": (64, 64), "mlp.gate_proj": (128, 64), "mlp.up_proj": (128, 64),
             "mlp.down_proj": (64, 128)}  # fmt: skip
    tensors = {"model.embed_tokens.weight": torch.randn(96, 64), "model.norm.weight": torch.ones(64),
               "lm_head.weight": torch.randn(96, 64)}  # fmt: skip
    for layer in range(2):
        for name, shape in sizes.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.randn(shape)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = torch.ones(64)
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture(scope="module")
def packed(dense, tmp_path_factory):
    target = tmp_path_factory.mktemp("packed") / "model"
    summary = json.loads(halfbyte("quantize", dense, target, "--nested", "--json"))
    assert len(summary["quantized"]) == 14
    return target


def test_inspect_lists_every_tensor(packed):
    listing = json.loads(halfbyte("inspect", packed, "--json"))
    by_name = {row["tensor"]: row for row in listing["tensors"]}
    gate = by_name["model.layers.0.mlp.gate_proj.weight"]
    assert gate["format"] == "nf4-64-nested"
    assert gate["shape"] == [128, 64]
    assert 4.1 < gate["bits"] < 6  # 8-bit scales, and the second level's fixed 1 KiB map on a tiny layer
    assert by_name["lm_head.weight"]["format"] == "bf16"
    assert "gate_proj" in halfbyte("inspect", packed)


def test_verify_passes_and_says_by_how_much(packed):
    result = json.loads(halfbyte("verify", packed, "--json"))
    assert result["layers_checked"] == 14
    assert result["worst_over_limit"] <= 1.1
    assert result["swapped_nibbles_detected"] is True
    assert result["all_within_contract"] is True
    assert "within the contract" in halfbyte("verify", packed)


def test_verify_refuses_a_dense_model(dense):
    assert "no 4-bit weights" in halfbyte("verify", dense, status=1)


def test_verify_reports_a_broken_checkpoint(packed, tmp_path):
    broken = tmp_path / "model.safetensors"
    tensors = load_file(packed / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight.nested_absmax"][0] = float("nan")
    save_file(tensors, broken)
    message = halfbyte("verify", broken, status=1)
    assert "model.layers.0.mlp.up_proj.weight" in message
    assert "NaN" in message or "finite" in message


def test_quantize_refuses_to_overwrite(dense, packed):
    before = (packed / "model.safetensors").read_bytes()
    assert "overwrite" in halfbyte("quantize", dense, packed, status=1)
    assert (packed / "model.safetensors").read_bytes() == before


def test_quantize_refuses_its_own_source(dense):
    halfbyte("quantize", dense, dense, "--overwrite", status=1)
    assert (dense / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("inspect", "no-such-model"), "no-such-model"),
        (("quantize", "no-such-model", "out"), "no-such-model"),
        (("bench", "linear", "--M", "a"), "--M"),
        (("bench", "linear", "--shapes", "12"), "--shapes"),
        (("bench", "linear", "--dtype", "int8"), "--dtype"),
        (("explain", "--N", "64", "--K", "65", "--format", "q4_0"), "multiple of 32"),
        (("explain", "--N", "64", "--K", "64", "--format", "nf5"), "unknown 4-bit format"),
    ],
)
def test_mistakes_get_one_line(words, message):
    assert message in halfbyte(*words, status=1)


def test_explain_names_a_kernel_and_why_not_the_others():
    result = json.loads(halfbyte("explain", "--N", 4096, "--K", 4096, "--format", "nf4-64-nested", "--json"))
    assert result["predicted_us"] > 0
    assert {result["kernel"], *(other["kernel"] for other in result["others"])} >= {"torch_dequantize"}
    there = ("explain", "--M", 1, "--N", 4096, "--K", 14336, "--format", "nf4", "--arch", "sm_90a")
    assert "blocks of" in json.loads(halfbyte(*there, "--json"))["configuration"]
    assert "shared memory" in halfbyte(*there)


def test_bench_linear_writes_rows_with_peers(tmp_path):
    out = tmp_path / "rows.jsonl"
    halfbyte(
        "bench",
        "linear",
        "--shapes",
        "256x512",
        "--M",
        "1,2",
        "--device",
        "cpu",
        "--warm",
        "--seconds",
        "0.05",
        "--out",
        out,
    )
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    names = {row["kernel"].split()[0] for row in rows}
    assert {"halfbyte", "torch", "bitsandbytes"} <= names
    ours = [row for row in rows if row["kernel"].startswith("halfbyte")]
    assert len(ours) == 2
    assert all(row["error"] <= 1.1 * row["rounding_limit"] for row in ours)
    assert all(row["bytes"] == 256 * 512 // 2 + 256 * 8 * 4 for row in ours)
