"""Small checkpoints for tests, built byte by byte so that tests can damage any part of them."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import torch
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from safetensors.torch import save

from halfbyte.checkpoints import pack_state
from halfbyte.formats import quantize


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def array(kind: int, count: int, values: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + values


def info(name: str, sizes: tuple[int, ...], kind: int, offset: int) -> bytes:
    """A tensor's description; sizes innermost first, as in the file."""
    return text(name) + struct.pack("<I", len(sizes)) + struct.pack(f"<{len(sizes)}Q", *sizes) + struct.pack(
        "<IQ", kind, offset
    )  # fmt: skip


def gguf(
    pairs: list[bytes],
    infos: list[bytes],
    data: bytes,
    *,
    version: int = 3,
    alignment: int = 32,
    pair_count: int | None = None,
    tensor_count: int | None = None,
) -> bytes:
    """A GGUF file of these pieces."""
    counts = (
        len(infos) if tensor_count is None else tensor_count,
        len(pairs) if pair_count is None else pair_count,
    )
    header = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(pairs) + b"".join(infos)
    return header + bytes(-len(header) % alignment) + data


def pieces(
    tensors: dict[str, tuple[GGMLQuantizationType, tuple[int, ...], np.ndarray]], alignment: int = 32
) -> tuple[list[bytes], bytes]:
    """Descriptions and data of named tensors given as (type, shape outermost first, bytes)."""
    infos, data = [], b""
    for name, (kind, shape, values) in tensors.items():
        infos.append(info(name, shape[::-1], int(kind), len(data)))
        raw = values.tobytes()
        block, size = GGML_QUANT_SIZES[kind]
        assert len(raw) == int(np.prod(shape)) // block * size
        data += raw + bytes(-len(raw) % alignment)
    return infos, data


METADATA = [
    pair("general.architecture", 8, text("llama")),
    pair("llama.block_count", 4, struct.pack("<I", 1)),
    pair("llama.rope.freq_base", 6, struct.pack("<f", 10000.0)),
    pair("llama.flag", 7, b"\1"),
    pair("tokenizer.ggml.tokens", 9, array(8, 3, text("a") + text("bc") + text(""))),
    pair("tokenizer.ggml.scores", 9, array(6, 3, struct.pack("<3f", 0, -1, -2))),
    pair("nested", 9, array(9, 2, array(1, 2, b"\1\xff") + array(8, 1, text("x")))),
]
TYPES = GGMLQuantizationType


def gguf_tensors() -> dict[str, tuple[GGMLQuantizationType, tuple[int, ...], np.ndarray]]:
    """One tensor of each way in which a type is read."""
    random = np.random.default_rng(7)
    weight = random.normal(size=(6, 256)).astype(np.float32)
    q4_k = random.integers(0, 256, size=(2, 144), dtype=np.uint8)
    q4_k.reshape(-1, 144)[:, :4] = np.array([0.5, 0.25], dtype=np.float16).view(np.uint8)
    iq4 = random.integers(0, 256, size=(3, 2, 18), dtype=np.uint8)
    iq4[:, :, :2] = np.array([0.125], dtype=np.float16).view(np.uint8)
    return {
        "norm.weight": (TYPES.F32, (5,), random.normal(size=5).astype(np.float32)),
        "half.weight": (TYPES.F16, (3, 4), random.normal(size=(3, 4)).astype(np.float16)),
        "brain.weight": (TYPES.BF16, (2, 4), quants.quantize(weight[:2, :4], TYPES.BF16)),
        "double.weight": (TYPES.F64, (3,), random.normal(size=3)),
        "ids": (TYPES.I32, (4,), np.arange(4, dtype=np.int32)),
        "a.weight": (TYPES.Q4_0, (6, 256), quants.quantize(weight, TYPES.Q4_0)),
        "b.weight": (TYPES.Q4_1, (6, 256), quants.quantize(weight, TYPES.Q4_1)),
        "c.weight": (TYPES.IQ4_NL, (3, 64), iq4.reshape(3, 36)),
        "d.weight": (TYPES.Q4_K, (2, 256), q4_k),
        "e.weight": (TYPES.MXFP4, (6, 256), quants.quantize(weight, TYPES.MXFP4)),
        "f.weight": (TYPES.Q8_0, (6, 256), quants.quantize(weight, TYPES.Q8_0)),
        "experts.weight": (TYPES.Q4_0, (3, 2, 256), quants.quantize(weight, TYPES.Q4_0).reshape(3, 2, -1)),
        "vector.weight": (TYPES.Q4_0, (256,), quants.quantize(weight[0], TYPES.Q4_0)),
    }


def sample_gguf() -> bytes:
    return gguf(METADATA, *pieces(gguf_tensors()))


def sample_tensors() -> dict[str, torch.Tensor]:
    """A plain and a nested bitsandbytes weight beside dense tensors."""
    tensors = {"model.norm.weight": normal(7), "model.embed_tokens.weight": normal(5, 8, dtype=torch.bfloat16)}
    tensors |= pack_state(quantize(normal(6, 48), "nf4-32"), "model.layers.0.up_proj.weight", "bfloat16")
    tensors |= pack_state(
        quantize(normal(4, 64, seed=1), "fp4-64-nested"), "model.layers.0.down_proj.weight", "float16"
    )
    return tensors


def sample_safetensors() -> bytes:
    return save(sample_tensors(), metadata={"format": "pt"})


def safetensors(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file with any header, well-formed or not."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def word_layer(layer: str, family: str, n: int, k: int, group: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random GPTQ or AWQ tensors of a layer."""
    generator = torch.Generator().manual_seed(seed)

    def words(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31, shape, generator=generator).int()

    tensors = {
        f"{layer}.qweight": words(k, n // 8) if family == "awq" else words(k // 8, n),
        f"{layer}.qzeros": words(k // group, n // 8),
        f"{layer}.scales": (torch.rand(k // group, n, generator=generator) + 0.1).half(),
    }
    if family != "awq":
        tensors[f"{layer}.g_idx"] = (torch.arange(k) // group).int()
    return tensors


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path
