"""Reading checkpoints: what other tools wrote, and errors that name file, tensor and cause."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path

import bitsandbytes.functional as bnb
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from checkpoint_samples import (
    normal,
    safetensors,
    sample_safetensors,
    sample_tensors,
    word_layer,
    write,
)
from halfbyte.checkpoints import CheckpointError, open_checkpoint, pack_state, unpack_state
from halfbyte.formats import PackedWeight, quantize

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
Tensors = dict[str, torch.Tensor]


def same(a: PackedWeight, b: PackedWeight) -> bool:
    return a.format == b.format and a.shape == b.shape and all(torch.equal(a.parts[p], b.parts[p]) for p in a.parts)


# --- bitsandbytes' tensors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("family", ["nf4", "fp4"])
def test_state_is_bitsandbytes_own(family: str, nested: bool) -> None:
    """Names, order, shapes, dtypes and bytes of all tensors, the JSON included; and back."""
    for blocksize, shape, dtype in ((64, (64, 256), DTYPES[2]), (32, (5, 77), DTYPES[1]), (4096, (3, 5), DTYPES[0])):
        weight = normal(*shape, dtype=dtype)
        codes, state = bnb.quantize_4bit(weight, None, None, blocksize, nested, family)
        theirs = {"x": codes} | {f"x.{name}": value for name, value in state.as_dict(packed=True).items()}
        ours = quantize(weight, f"{family}-{blocksize}" + ("-nested" if nested else ""))
        packed = pack_state(ours, "x", str(dtype).removeprefix("torch."))
        assert list(packed) == list(theirs)
        for name, value in packed.items():
            assert value.dtype == theirs[name].dtype, name
            assert torch.equal(value, theirs[name]), name
        assert same(unpack_state(theirs, "x", "file"), ours)
        assert unpack_state(theirs, "x", "file").codes.data_ptr() == codes.data_ptr()
        read = {name.removeprefix("x."): value for name, value in packed.items() if name != "x"}
        again = bnb.QuantState.from_dict(read, torch.device("cpu"))
        assert torch.equal(again.absmax, state.absmax)
        assert again.shape == state.shape
        if shape[1] % 64 == 0:  # elsewhere bitsandbytes compiles for seconds
            assert torch.equal(bnb.dequantize_4bit(packed["x"], again), bnb.dequantize_4bit(codes, state))


@pytest.mark.parametrize("storage", [torch.float16, torch.bfloat16, torch.float32])
def test_codes_stored_as_floats(storage: torch.dtype) -> None:
    weight = normal(16, 64)
    codes, state = bnb.quantize_4bit(weight, quant_type="nf4", quant_storage=storage)
    assert codes.dtype == storage
    tensors = {"x": codes} | {f"x.{name}": value for name, value in state.as_dict(packed=True).items()}
    assert same(unpack_state(tensors, "x", "file"), quantize(weight, "nf4-64"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_absmax_in_16_bits_is_widened(dtype: torch.dtype) -> None:
    tensors = pack_state(quantize(normal(8, 64), "nf4-64"), "x", "bfloat16")
    tensors["x.absmax"] = tensors["x.absmax"].to(dtype)
    weight = unpack_state(tensors, "x", "file")
    assert torch.equal(weight.parts["absmax"], tensors["x.absmax"].float())


def state_json(**changed: object) -> torch.Tensor:
    state = {"quant_type": "nf4", "blocksize": 32, "dtype": "float32", "shape": [4, 64], "nested_blocksize": 256,
             "nested_dtype": "float32", "nested_offset": 0.5} | changed  # fmt: skip
    return raw_state(json.dumps({key: value for key, value in state.items() if value is not ...}).encode())


def raw_state(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


STATE = "x.quant_state.bitsandbytes__nf4"
BAD_STATES: list[tuple[Tensors, str]] = [
    ({STATE: state_json(shape=[4, 64, 1])}, "two positive integers"),
    ({STATE: state_json(shape=[4, -64])}, "two positive integers"),
    ({STATE: state_json(shape=[True, 64])}, "two positive integers"),
    ({STATE: state_json(shape=[4.0, 64])}, "two positive integers"),
    ({STATE: state_json(shape=None)}, "two positive integers"),
    ({STATE: state_json(shape=[1 << 80, 64])}, "two positive integers"),
    ({STATE: state_json(shape=[1 << 40, 1 << 40])}, "bytes of codes"),
    ({STATE: state_json(shape=[4, 65])}, "has 130 bytes of codes, the tensor has 128"),
    ({STATE: state_json(blocksize=48)}, "blocksizes 32"),
    ({STATE: state_json(blocksize="32")}, "blocksize must be"),
    ({STATE: state_json(blocksize=64)}, "must be uint8 \\[4\\]"),
    ({STATE: state_json(quant_type="fp4")}, "the tensor's name says 'nf4'"),
    ({STATE: state_json(dtype="int8")}, "dtype must be one of"),
    ({STATE: state_json(dtype=[1])}, "dtype must be one of"),
    ({STATE: state_json(nested_blocksize=128)}, "nested_blocksize must be 256"),
    ({STATE: state_json(nested_blocksize=...)}, "disagree on whether"),
    ({STATE: state_json(nested_dtype="float16")}, "nested_dtype"),
    ({STATE: state_json(nested_offset="0")}, "nested_offset"),
    ({STATE: state_json(nested_offset=True)}, "nested_offset"),
    ({STATE: state_json(nested_offset=1e39)}, "nested_offset"),
    ({STATE: state_json(nested_offset=float("nan"))}, "not JSON"),
    ({STATE: raw_state(b"[" * 4000)}, "not JSON"),
    ({STATE: raw_state(b"\xff\xfe")}, "not JSON"),
    ({STATE: raw_state(b"[]")}, "JSON object"),
    ({STATE: raw_state(b'{"shape": ' + b"9" * 4000 + b"}")}, "quant_type"),
    ({STATE: raw_state(b" " * 5000)}, "1 to 4096 bytes"),
    ({STATE: torch.zeros(9)}, "must be uint8"),
    ({"x.quant_state.bitsandbytes__fp4": state_json()}, "exactly one of"),
    ({"x": torch.zeros(128, dtype=torch.int64)}, "codes must be stored as"),
    ({"x": torch.zeros(100, 1, dtype=torch.uint8)}, "has 128 bytes of codes, the tensor has 100"),
    ({"x": torch.zeros(128, 2, dtype=torch.uint8)[:, :1]}, "not contiguous"),
    ({"x.quant_map": torch.zeros(16)}, "not the standard nf4 codebook"),
    ({"x.quant_map": torch.zeros(15)}, "not the standard nf4 codebook"),
    ({"x.quant_map": torch.zeros(16).half()}, "model-wide cast"),
    ({"x.absmax": torch.zeros(8)}, "must be uint8 \\[8\\]"),
    ({"x.absmax": torch.zeros(7, dtype=torch.uint8)}, "must be uint8 \\[8\\]"),
    ({"x.nested_absmax": torch.tensor([float("nan")])}, "NaN or infinite"),
    ({"x.nested_absmax": torch.tensor([-1.0])}, "negative"),
    ({"x.nested_absmax": torch.zeros(2)}, "must have shape \\[1\\]"),
    ({"x.nested_absmax": torch.zeros(1).double()}, "must be float32"),
    ({"x.nested_quant_map": torch.zeros(256).bfloat16()}, "model-wide cast"),
    ({"x.nested_quant_map": torch.full((256,), torch.inf)}, "256 finite"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "says"), BAD_STATES, ids=[f"{i}-{says[:24]}" for i, (_, says) in enumerate(BAD_STATES)]
)
def test_bad_state(changed: Tensors, says: str) -> None:
    tensors = pack_state(quantize(normal(4, 64), "nf4-32-nested"), "x", "float32")
    unpack_state(tensors, "x", "file.safetensors")
    with pytest.raises(CheckpointError, match=says) as caught:
        unpack_state(tensors | changed, "x", "file.safetensors")
    assert caught.value.file == "file.safetensors"
    assert caught.value.tensor.startswith("x")
    assert str(caught.value).startswith(f"file.safetensors: {caught.value.tensor}: ")


@pytest.mark.parametrize("suffix", ["", ".absmax", ".quant_map", ".nested_quant_map", STATE[1:]])
def test_missing_state(suffix: str) -> None:
    tensors = pack_state(quantize(normal(4, 64), "nf4-32-nested"), "x", "float32")
    del tensors["x" + suffix]
    with pytest.raises(CheckpointError, match=r"missing|exactly one"):
        unpack_state(tensors, "x", "file")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_plain_absmax_is_checked(value: float) -> None:
    tensors = pack_state(quantize(normal(4, 64), "nf4-32"), "x", "float32")
    tensors["x.absmax"][3] = value
    with pytest.raises(CheckpointError, match="negative, NaN or infinite scales"):
        unpack_state(tensors, "x", "file")


def test_pack_state_errors() -> None:
    with pytest.raises(ValueError, match="no format 'q4_0'"):
        pack_state(quantize(normal(4, 64), "q4_0"), "x", "float32")
    with pytest.raises(ValueError, match="dtype must be"):
        pack_state(quantize(normal(4, 64), "nf4"), "x", "torch.float32")


# --- safetensors and directories --------------------------------------------------------------------------------------


def model_directory(path: Path, config: dict[str, object] | None = None, tensors: Tensors | None = None) -> Path:
    path.mkdir()
    save_file(tensors or sample_tensors(), path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config or {"model_type": "llama"}))
    return path


def test_open_safetensors(tmp_path: Path) -> None:
    file = write(tmp_path / "model.safetensors", sample_safetensors())
    for path in (file, tmp_path):
        checkpoint = open_checkpoint(path)
        assert checkpoint.kind == "bitsandbytes"
        assert checkpoint.config is None
        assert checkpoint.metadata == {"format": "pt"}
        entries = {entry.name: entry for entry in checkpoint.entries()}
        assert len(entries) == 4  # side tensors are no entries
        up = entries["model.layers.0.up_proj.weight"]
        assert (up.format, up.shape, up.packed) == ("nf4-32", (6, 48), True)
        assert up.nbytes == sum(t.nbytes for n, t in sample_tensors().items() if ".up_proj." in n)
        assert entries["model.embed_tokens.weight"].format == "bf16"
        assert entries["model.norm.weight"].bits_per_weight == 32
        assert entries["model.layers.0.down_proj.weight"].format == "fp4-64-nested"
        for name, entry in entries.items():
            loaded = checkpoint.load(name)
            if entry.packed:
                assert isinstance(loaded, PackedWeight)
                assert same(loaded, unpack_state(sample_tensors(), name, "sample"))
            else:
                assert torch.equal(loaded, sample_tensors()[name])
        with pytest.raises(CheckpointError, match="no such tensor"):
            checkpoint.load("model.layers.0.up_proj.weight.absmax")


def test_loaded_tensors_are_private_views(tmp_path: Path) -> None:
    """Writing to a loaded tensor neither fails nor reaches the file; released pages hold the file's bytes again."""
    big = normal(300, 1000)
    save_file({"big": big}, tmp_path / "model.safetensors")
    before = (tmp_path / "model.safetensors").read_bytes()
    checkpoint = open_checkpoint(tmp_path)
    first, second = checkpoint.load("big"), checkpoint.load("big")
    assert isinstance(first, torch.Tensor)
    assert first.data_ptr() == second.data_ptr()  # type: ignore[union-attr]
    first.zero_()
    assert (tmp_path / "model.safetensors").read_bytes() == before
    checkpoint.release("big")
    assert torch.equal(first[5:-5], big[5:-5])


def test_unaligned_tensors(tmp_path: Path) -> None:
    """A writer may put 3 bytes before an fp32: legal, if unusual."""
    header = {"a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
              "b": {"dtype": "F32", "shape": [2], "data_offsets": [3, 11]}}  # fmt: skip
    raw = safetensors(header, b"\1\2\3" + struct.pack("<2f", 1.5, -2))
    checkpoint = open_checkpoint(write(tmp_path / "x.safetensors", raw))
    loaded = checkpoint.load("b")
    assert isinstance(loaded, torch.Tensor)
    assert loaded.tolist() == [1.5, -2]
    assert loaded.data_ptr() % 4 == 0


def test_types_that_torch_lacks(tmp_path: Path) -> None:
    header = {"a": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}
    checkpoint = open_checkpoint(write(tmp_path / "x.safetensors", safetensors(header, b"\1\2")))
    assert checkpoint.entries()[0].format == "fp4_e2m1"
    with pytest.raises(CheckpointError, match="torch has no type"):
        checkpoint.load("a")


def one(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"t": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


BAD_SAFETENSORS: list[tuple[bytes, str]] = [
    (b"", "header: needs bytes 0 to 8"),
    (b"\1\0\0", "needs bytes 0 to 8"),
    (safetensors(one(), b"", length=1 << 62), "claims"),
    (safetensors(one(), b"", length=90 << 20), "the file ends at"),
    (safetensors(b"[]"), "does not start with '{'"),
    (safetensors(b"{" * 50_000), "not JSON"),
    (safetensors(b"{\xff}"), "not JSON"),
    (safetensors(b'{"a":{},"a":{}}'), "same key twice"),
    (safetensors('{"a": 1}'.encode("utf-16-le")), "not JSON"),
    (safetensors({"t": 3}), "must have exactly"),
    (safetensors({"__metadata__": {"a": 1}}), "strings to strings"),
    (safetensors(one("F33"), bytes(8)), "unknown dtype"),
    (safetensors(one(["F32"]), bytes(8)), "unknown dtype"),
    (safetensors(one(shape=[2.0]), bytes(8)), "its shape must be"),
    (safetensors(one(shape=[-2]), bytes(8)), "its shape must be"),
    (safetensors(one(shape=[True, 2]), bytes(8)), "its shape must be"),
    (safetensors(one(shape=[1 << 70]), bytes(8)), "its shape must be"),
    (safetensors(one(shape=[1] * 100 + [2]), bytes(8)), "at most 64"),
    (safetensors(one(shape=[1 << 62] * 60), bytes(8)), "needs .* bytes"),
    (safetensors(one(offsets=[8, 0]), bytes(8)), "needs 8 bytes"),
    (safetensors(one(offsets=[0]), bytes(8)), "data_offsets must be"),
    (safetensors(one(offsets=[-8, 0]), bytes(8)), "data_offsets must be"),
    (safetensors(one(offsets=[0, 1 << 63]), bytes(8)), "data_offsets must be"),
    (safetensors(one(offsets=[4, 12]), bytes(12)), "the one before ends"),
    (safetensors(one(), bytes(7)), "is it cut short"),
    (safetensors(one(), bytes(9)), "the file at"),
    (safetensors(one() | {"u": one()["t"]}, bytes(8)), "the one before ends"),
]


@pytest.mark.parametrize(("data", "says"), BAD_SAFETENSORS, ids=range(len(BAD_SAFETENSORS)))
def test_bad_safetensors(tmp_path: Path, data: bytes, says: str) -> None:
    file = write(tmp_path / "model.safetensors", data)
    with pytest.raises(CheckpointError, match=says) as caught:
        open_checkpoint(file)
    assert caught.value.file == str(file)


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        open_checkpoint(tmp_path / "missing")
    with pytest.raises(CheckpointError, match="model directory or a file"):
        open_checkpoint(tmp_path)
    torch.save({"a": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickle"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="pickle"):
        open_checkpoint(tmp_path / "pytorch_model.bin")
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="not a regular file"):
        open_checkpoint(tmp_path)


def sharded(path: Path, weight_map: object = None) -> Path:
    """Two shards that split a weight from its side tensors."""
    path.mkdir()
    tensors = sample_tensors()
    names = list(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in parts.items():
        save_file({name: tensors[name] for name in members}, path / file)
    if weight_map is None:
        weight_map = {name: file for file, members in parts.items() for name in members}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def test_shards(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(sharded(tmp_path / "m"))
    assert {entry.name for entry in checkpoint.entries()} == {
        name for name in sample_tensors() if name.endswith(".weight")
    }
    for entry in checkpoint.entries():
        if entry.packed:
            assert same(checkpoint.load(entry.name), unpack_state(sample_tensors(), entry.name, ""))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("weight_map", "says"),
    [
        ({"x": "../secret.safetensors"}, "plain file name"),
        ({"x": "/etc/passwd"}, "plain file name"),
        ({"x": ".."}, "plain file name|not a .safetensors"),
        ({"x": "a\\b.safetensors"}, "plain file name"),
        ({"x": "a\0.safetensors"}, "plain file name"),
        ({"x": 3}, "plain file name"),
        ({"x": "model.bin"}, "not a .safetensors file"),
        ({"x": "none.safetensors"}, "cannot be opened"),
        ({"x": "a.safetensors"}, "x: is not in a.safetensors"),
        ([], "must be an object"),
        ({}, "must be an object"),
    ],
)
def test_bad_index(tmp_path: Path, weight_map: object, says: str) -> None:
    write(tmp_path / "secret.safetensors", sample_safetensors())
    with pytest.raises(CheckpointError, match=says):
        open_checkpoint(sharded(tmp_path / "m", weight_map))


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    path = sharded(tmp_path / "m", {"model.norm.weight": "a.safetensors", "model.embed_tokens.weight": "b.safetensors"})
    shutil.copy(path / "a.safetensors", path / "b.safetensors")
    (path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"model.norm.weight": "a.safetensors", "x": "b.safetensors"}})
    )
    with pytest.raises(CheckpointError, match=r"is not in|is also in"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (b"[]", "JSON object"),
        (b"{", "not JSON"),
        (b'{"quantization_config": 3}', "must be an object"),
        (b'{"quantization_config": {"quant_method": "fp8"}}', "'fp8' is none of"),
        (b'{"quantization_config": {"quant_method": ["awq"]}}', "is none of"),
        (b'{"quantization_config": {}}', "None is none of"),
    ],
)
def test_bad_config(tmp_path: Path, config: bytes, says: str) -> None:
    model_directory(tmp_path / "m")
    write(tmp_path / "m" / "config.json", config)
    with pytest.raises(CheckpointError, match=says):
        open_checkpoint(tmp_path / "m")


def test_8_bit_is_refused(tmp_path: Path) -> None:
    path = model_directory(
        tmp_path / "m", tensors={"x.weight": torch.zeros(4, 4, dtype=torch.int8), "x.SCB": torch.ones(4)}
    )
    with pytest.raises(CheckpointError, match="8-bit"):
        open_checkpoint(path)


# --- GPTQ and AWQ -----------------------------------------------------------------------------------------------------


def word_directory(path: Path, family: str, tensors: Tensors, **changed: object) -> Path:
    config: dict[str, object] = {"quant_method": family.removesuffix("_v2"), "bits": 4, "group_size": 32}
    if family == "awq":
        config |= {"version": "gemm", "zero_point": True}
    else:
        config |= {"desc_act": False, "sym": True, "checkpoint_format": family}
    return model_directory(path, {"model_type": "llama", "quantization_config": config | changed}, tensors)


@pytest.mark.parametrize("family", ["gptq", "gptq_v2", "awq"])
@pytest.mark.parametrize("group", [32, 64, -1])
def test_words(tmp_path: Path, family: str, group: int) -> None:
    """One entry a layer, its values those of an unpacking with numpy."""
    n, k = 24, 128
    size = k if group == -1 else group
    tensors = word_layer("l.proj", family, n, k, size)
    dense = {"l.proj.bias": normal(n), "l.norm.weight": normal(k)}
    checkpoint = open_checkpoint(word_directory(tmp_path / "m", family, tensors | dense, group_size=group))
    assert checkpoint.kind == family.removesuffix("_v2")
    entries = {entry.name: entry for entry in checkpoint.entries()}
    assert entries.keys() == {"l.proj.weight", *dense}
    entry = entries["l.proj.weight"]
    assert (entry.format, entry.shape, entry.packed) == (f"{family}-{size}", (n, k), True)
    assert entry.nbytes == sum(tensor.nbytes for tensor in tensors.values())
    weight = checkpoint.load("l.proj.weight")
    assert isinstance(weight, PackedWeight)

    def nibbles(words: torch.Tensor, axis: int, order: list[int]) -> np.ndarray:
        values = words.numpy().view(np.uint32)
        spread = np.stack([values >> np.uint32(4 * i) & np.uint32(15) for i in order], axis=axis + 1)
        return spread.reshape([size * 8 if i == axis else size for i, size in enumerate(values.shape)])

    order = [0, 4, 1, 5, 2, 6, 3, 7] if family == "awq" else list(range(8))
    codes = nibbles(tensors["l.proj.qweight"], 1 if family == "awq" else 0, order)
    zeros = nibbles(tensors["l.proj.qzeros"], 1, order).astype(np.float64) + (family == "gptq")
    scales = tensors["l.proj.scales"].double().numpy()
    exact = (codes - zeros.repeat(size, 0)) * scales.repeat(size, 0)
    assert np.array_equal(weight.dequantize(torch.float64).numpy(), exact.T)


def test_act_order(tmp_path: Path) -> None:
    """Refused where it permutes; accepted where desc_act is set but every group is in place."""
    tensors = word_layer("l.proj", "gptq", 16, 64, 32)
    checkpoint = open_checkpoint(word_directory(tmp_path / "a", "gptq", tensors, desc_act=True))
    assert isinstance(checkpoint.load("l.proj.weight"), PackedWeight)
    moved = tensors | {"l.proj.g_idx": tensors["l.proj.g_idx"].flip(0).contiguous()}
    checkpoint = open_checkpoint(word_directory(tmp_path / "b", "gptq", moved))
    with pytest.raises(CheckpointError, match=r"l\.proj\.g_idx: the columns are in act-order"):
        checkpoint.load("l.proj.weight")
    del tensors["l.proj.g_idx"]
    assert open_checkpoint(word_directory(tmp_path / "c", "gptq", tensors)).load("l.proj.weight") is not None
    checkpoint = open_checkpoint(word_directory(tmp_path / "d", "gptq", tensors, desc_act=True))
    with pytest.raises(CheckpointError, match="missing, though the config says desc_act"):
        checkpoint.load("l.proj.weight")


@pytest.mark.parametrize(
    ("family", "changed", "says"),
    [
        ("gptq", {"bits": 8}, "bits must be 4, got 8"),
        ("gptq", {"bits": True}, "bits must be 4"),
        ("gptq", {"group_size": 0}, "group_size"),
        ("gptq", {"group_size": 33}, "no multiple of the config's group_size|multiple of 8"),
        ("gptq", {"group_size": "32"}, "group_size"),
        ("gptq", {"group_size": 64}, "must have shape \\[1, 16\\]"),
        ("gptq", {"checkpoint_format": "marlin"}, "'marlin'"),
        ("gptq", {"dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic"),
        ("gptq", {"desc_act": "yes"}, "desc_act"),
        ("awq", {"version": "gemv"}, "'gemv'"),
        ("awq", {"zero_point": False}, "zero points"),
    ],
)
def test_bad_word_config(tmp_path: Path, family: str, changed: dict[str, object], says: str) -> None:
    path = word_directory(tmp_path / "m", family, word_layer("l.proj", family, 16, 64, 32), **changed)
    with pytest.raises(CheckpointError, match=says):
        open_checkpoint(path).entries()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"scales": None}, "'l.proj.scales' is missing"),
        ({"qzeros": None}, "'l.proj.qzeros' is missing"),
        ({"scales": torch.ones(2, 8).half()}, "must have shape \\[2, 16\\]"),
        ({"scales": torch.ones(32).half()}, "must be a matrix"),
        ({"scales": torch.ones(2, 16)}, "must be torch.float16, got torch.float32"),
        ({"scales": torch.full((2, 16), torch.nan).half()}, "NaN"),
        ({"qzeros": torch.zeros(2, 3, dtype=torch.int32)}, "'qzeros' .* must have shape"),
        ({"qweight": torch.zeros(8, 16, dtype=torch.int64)}, "'qweight' must be torch.int32"),
        ({"g_idx": torch.zeros(63, dtype=torch.int32)}, "must be integers \\[64\\]"),
        ({"weight": torch.zeros(16, 64)}, "which one counts"),
    ],
)
def test_bad_words(tmp_path: Path, changed: dict[str, torch.Tensor | None], says: str) -> None:
    tensors: dict[str, torch.Tensor | None] = dict(word_layer("l.proj", "gptq", 16, 64, 32))
    tensors |= {f"l.proj.{name}": value for name, value in changed.items()}
    kept = {name: value for name, value in tensors.items() if value is not None}
    with pytest.raises(CheckpointError, match=says):
        open_checkpoint(word_directory(tmp_path / "m", "gptq", kept)).load("l.proj.weight")


def test_words_without_config(tmp_path: Path) -> None:
    save_file(word_layer("l.proj", "gptq", 16, 64, 32), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="no quantization_config"):
        open_checkpoint(tmp_path)
    (tmp_path / "quantize_config.json").write_text('{"bits": 4, "group_size": 32, "desc_act": false}')  # AutoGPTQ's
    assert open_checkpoint(tmp_path).entries()[0].format == "gptq-32"
