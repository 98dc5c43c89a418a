"""ONNX Runtime's 4-bit layer as a peer: MatMulNBits, which has an int4 format of its own and no codebooks.

The weight is quantised again, to symmetric int4 with the same block, so its rows are of format int4, and its error is
against what it then holds. It has kernels for fp32 and fp16 activations; bf16 ones are widened around it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..formats import PackedWeight

Layer = Callable[[Tensor], Tensor]
Int4 = tuple[Tensor, Tensor]  # codes [N, blocks, block / 2], two a byte, the first one low; scales [N, blocks]

LEVELS = {1: "fp32 inside", 4: "activations rounded to 8 bits"}  # its accuracy_level
BLOCKS = {"nf4": (32, 64), "q4_0": (32,)}
_last: list[tuple[PackedWeight, torch.dtype, Int4]] = []  # copies of one weight are quantised once


def supports(weight: PackedWeight) -> bool:
    """NF4 and Q4_0 with blocks that it has as well, and rows of whole blocks."""
    block = weight.format.blocksize
    return block in BLOCKS.get(weight.format.name, ()) and weight.shape[1] % block == 0


def format_key(weight: PackedWeight) -> str:
    """What a row of this peer calls its format."""
    return f"int4-{weight.format.blocksize}"


def weight_bytes(weight: PackedWeight, dtype: torch.dtype) -> int:
    """Codes and scales, read once."""
    n, k = weight.shape
    return n * k // 2 + n * k // weight.format.blocksize * _inside(dtype).itemsize


def values(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """The weight that it multiplies with, float64 [N, K]."""
    codes, scales = _quantised(weight, dtype)
    steps = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(2).double() - 8
    return (steps * scales.double().unsqueeze(-1)).flatten(1)


def build(level: int, weight: PackedWeight, dtype: torch.dtype) -> Layer:
    """A session of one node, with as many threads as torch has."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    # Its threads would go on spinning through the next candidate's call.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    model = _model(level, weight, dtype)
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return partial(_run, session, _inside(dtype))


def _run(session: object, inside: torch.dtype, x: Tensor) -> Tensor:
    (y,) = session.run(None, {"x": x.to(inside).numpy()})  # type: ignore[attr-defined]
    return torch.from_numpy(y).to(x.dtype)


def _inside(dtype: torch.dtype) -> torch.dtype:
    return torch.float16 if dtype == torch.float16 else torch.float32


def _quantised(weight: PackedWeight, dtype: torch.dtype) -> Int4:
    inside = _inside(dtype)
    for known, type, found in _last:
        if known is weight and type == inside:
            return found
    _last[:] = [(weight, inside, quantise(weight.dequantize(torch.float32), weight.format.blocksize, inside))]
    return _last[0][2]


def quantise(dense: Tensor, block: int, dtype: torch.dtype) -> Int4:
    """Symmetric int4 of fp32 [N, K]: a block's largest value becomes -8, everything else the nearest step."""
    blocks = dense.view(dense.shape[0], -1, block)
    largest = blocks.gather(2, blocks.abs().argmax(2, keepdim=True))
    scales = (largest / -8).to(dtype)
    inverse = torch.where(scales == 0, 0, 1 / scales.float())
    steps = (blocks * inverse).round().add_(8).clamp_(0, 15).to(torch.uint8)
    return steps[..., 0::2] | steps[..., 1::2] << 4, scales.squeeze(2)


def _model(level: int, weight: PackedWeight, dtype: torch.dtype) -> bytes:
    from onnx import TensorProto, helper

    codes, scales = _quantised(weight, dtype)
    n, k = weight.shape
    number = TensorProto.FLOAT16 if _inside(dtype) == torch.float16 else TensorProto.FLOAT
    node = helper.make_node(
        "MatMulNBits",
        ["x", "codes", "scales"],
        ["y"],
        domain="com.microsoft",
        **{"N": n, "K": k, "bits": 4, "block_size": weight.format.blocksize, "accuracy_level": level},
    )
    constants = [
        helper.make_tensor("codes", TensorProto.UINT8, codes.shape, codes.numpy().tobytes(), raw=True),
        helper.make_tensor("scales", number, [scales.numel()], scales.numpy().tobytes(), raw=True),
    ]
    ends = [helper.make_tensor_value_info(name, number, ["M", size]) for name, size in (("x", k), ("y", n))]
    graph = helper.make_graph([node], "layer", ends[:1], ends[1:], constants)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())
