"""bitsandbytes' serialised 4-bit weights: several tensors under one prefix <-> PackedWeight.

The tensors of `QuantState.as_dict(packed=True)` (bitsandbytes 0.50.2), for a weight under prefix `x.weight`:

    x.weight                                uint8 [ceil(N K / 2), 1], or the same bytes as fp16, bf16 or fp32
    x.weight.absmax                         fp32 [blocks]; nested: uint8 [blocks]
    x.weight.quant_map                      fp32 [16]
    x.weight.nested_absmax                  fp32 [ceil(blocks / 256)], nested only
    x.weight.nested_quant_map               fp32 [256], nested only
    x.weight.quant_state.bitsandbytes__nf4  uint8: JSON with quant_type, blocksize, dtype, shape, and nested_blocksize,
    (or ..._fp4)                            nested_dtype, nested_offset
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..formats import BlockFormat, PackedWeight, get_format
from .errors import CheckpointError

FAMILIES = ("nf4", "fp4")
STATE = ".quant_state.bitsandbytes__"
SIDE_TENSORS = (
    ".absmax",
    ".quant_map",
    ".nested_absmax",
    ".nested_quant_map",
    *(STATE + family for family in FAMILIES),
)
DTYPES = ("float32", "float16", "bfloat16")
CODE_STORAGE = (torch.uint8, torch.float16, torch.bfloat16, torch.float32)  # bnb_4bit_quant_storage
MAX_STATE_BYTES = 4096  # bitsandbytes writes about 200


def pack_state(weight: PackedWeight, prefix: str, dtype: str) -> dict[str, Tensor]:
    """bitsandbytes' tensors for a weight in nf4 or fp4, named under `prefix` ("model.layers.0.mlp.up_proj.weight").

    dtype: what the weight was before ("bfloat16", "float16", "float32"); bitsandbytes dequantises to it. Codes and
    scales share memory with `weight`.

    Raises ValueError for another format or dtype.
    """
    format = weight.format
    if format.name not in FAMILIES:
        raise ValueError(f"pack_state: bitsandbytes has no format '{format.key}', only nf4 and fp4")
    if dtype not in DTYPES:
        raise ValueError(f"pack_state: dtype must be one of {', '.join(DTYPES)}; got '{dtype}'")
    parts = weight.parts
    tensors = {
        prefix: parts["codes"].view(-1, 1),
        f"{prefix}.absmax": parts["absmax"],
        f"{prefix}.quant_map": torch.tensor(format.codebook, device=weight.device),
    }
    state: dict[str, Any] = {  # in bitsandbytes' order, so that the JSON is the same byte for byte
        "quant_type": format.name,
        "blocksize": format.blocksize,
        "dtype": dtype,
        "shape": list(weight.shape),
    }
    if format.nested:
        tensors[f"{prefix}.nested_absmax"] = parts["nested_absmax"]
        tensors[f"{prefix}.nested_quant_map"] = parts["nested_quant_map"]
        state |= {
            "nested_blocksize": 256,
            "nested_dtype": "float32",
            "nested_offset": parts["nested_offset"].item(),
        }
    octets = bytearray(json.dumps(state).encode())
    tensors[f"{prefix}{STATE}{format.name}"] = torch.frombuffer(octets, dtype=torch.uint8).to(weight.device)
    return tensors


def unpack_state(tensors: Mapping[str, Tensor], prefix: str, where: str) -> PackedWeight:
    """The packed weight under `prefix`; its parts are views of `tensors`.

    where: the file, for messages. absmax and nested_absmax in fp16 or bf16 are widened to fp32, which is exact: the
    weight is then what the file says, to the last bit. Nothing else is converted.

    Raises CheckpointError for anything that bitsandbytes would not write: missing tensors, sizes that do not follow
    from the shape, a codebook other than NF4's or FP4's, NaN, infinite or negative scales, a malformed quant_state.
    """
    return _Reader(tensors, prefix, where).read()


def describe_state(tensors: Mapping[str, Tensor], prefix: str, where: str) -> tuple[tuple[int, int], BlockFormat]:
    """Logical shape and format of the weight under `prefix`, from its quant_state alone. Raises CheckpointError."""
    return _Reader(tensors, prefix, where).describe()


class _Reader:
    """The tensors of one weight; exists so that every check can name file and tensor."""

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str, where: str) -> None:
        self.tensors = tensors
        self.prefix = prefix
        self.where = where

    def fail(self, cause: str, suffix: str = "") -> NoReturn:
        raise CheckpointError(self.where, self.prefix + suffix, cause)

    def get(self, suffix: str) -> Tensor:
        name = self.prefix + suffix
        if name not in self.tensors:
            self.fail("missing; a bitsandbytes weight is stored with it", suffix)
        return self.tensors[name]

    def suffix(self) -> str:
        """The quant_state's own suffix; it names the family."""
        found = [STATE + family for family in FAMILIES if f"{self.prefix}{STATE}{family}" in self.tensors]
        if len(found) != 1:
            self.fail(f"needs exactly one of quant_state.bitsandbytes__nf4 and __fp4, has {len(found)}")
        return found[0]

    def describe(self) -> tuple[tuple[int, int], BlockFormat]:
        suffix = self.suffix()
        return self.format(self.state(suffix), suffix)

    def read(self) -> PackedWeight:
        suffix = self.suffix()
        state = self.state(suffix)
        shape, format = self.format(state, suffix)
        codes = self.codes(shape)
        blocks = -(-shape[0] * shape[1] // format.blocksize)
        self.codebook(format)
        parts = {"codes": codes}
        if not format.nested:
            parts["absmax"] = self.scales(".absmax", blocks)
        else:
            parts |= self.nested(state, suffix, blocks)
        try:
            return PackedWeight(format, shape, parts)
        except (ValueError, TypeError) as error:
            self.fail(str(error))

    def state(self, suffix: str) -> dict[str, Any]:
        """The quant_state's JSON: an object of at most MAX_STATE_BYTES bytes, without NaN or infinity."""
        tensor = self.get(suffix)
        if tensor.dtype != torch.uint8 or tensor.dim() != 1 or not 0 < tensor.numel() <= MAX_STATE_BYTES:
            self.fail(f"must be uint8 of 1 to {MAX_STATE_BYTES} bytes, got {tensor.dtype} {list(tensor.shape)}", suffix)
        try:
            state = json.loads(bytes(tensor.tolist()).decode(), parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:  # ValueError: bad UTF-8, bad JSON, integers of 4,300 digits
            self.fail(f"is not JSON: {error}", suffix)
        if not isinstance(state, dict):
            self.fail("must be a JSON object", suffix)
        return state

    def format(self, state: dict[str, Any], suffix: str) -> tuple[tuple[int, int], BlockFormat]:
        """Logical shape and format of the quant_state, every field checked."""
        family = suffix.removeprefix(STATE)
        if state.get("quant_type") != family:
            self.fail(f"quant_type is {state.get('quant_type')!r}, the tensor's name says '{family}'", suffix)
        if state.get("dtype") not in DTYPES:
            self.fail(f"dtype must be one of {', '.join(DTYPES)}; got {state.get('dtype')!r}", suffix)
        shape = state.get("shape")
        if not isinstance(shape, list) or len(shape) != 2 or not all(_is_size(size) for size in shape):
            self.fail(f"shape must be two positive integers [N, K], got {shape!r}", suffix)
        nested = f"{self.prefix}.nested_absmax" in self.tensors
        if nested != ("nested_blocksize" in state):
            self.fail("quant_state and tensors disagree on whether the scales are nested", suffix)
        blocksize = state.get("blocksize")
        if not _is_size(blocksize):
            self.fail(f"blocksize must be a positive integer, got {blocksize!r}", suffix)
        try:
            return (shape[0], shape[1]), get_format(f"{family}-{blocksize}" + ("-nested" if nested else ""))
        except ValueError as error:
            self.fail(str(error), suffix)

    def codes(self, shape: tuple[int, int]) -> Tensor:
        """uint8 [bytes], a view."""
        codes = self.get("")
        if codes.dtype not in CODE_STORAGE:
            self.fail(f"codes must be stored as uint8, fp16, bf16 or fp32; got {codes.dtype}")
        wanted, got = -(-shape[0] * shape[1] // 2), codes.numel() * codes.element_size()
        if wanted != got:
            self.fail(f"a weight {list(shape)} has {wanted} bytes of codes, the tensor has {got}")
        if not codes.is_contiguous():
            self.fail("codes are not contiguous; call .contiguous() on them")
        return codes.reshape(-1).view(torch.uint8)

    def codebook(self, format: BlockFormat) -> None:
        table = self.get(".quant_map")
        if table.dtype != torch.float32:
            self.fail(
                f"must be float32, got {table.dtype}: a model-wide cast rounded the codebook; save the model again "
                "without .half() or .to(dtype) on its quantised weights",
                ".quant_map",
            )
        if tuple(table.shape) != (16,) or not torch.equal(table.cpu(), torch.tensor(format.codebook)):
            self.fail(f"is not the standard {format.name} codebook; only that is supported", ".quant_map")

    def scales(self, suffix: str, count: int) -> Tensor:
        """fp32 [count], finite and not negative; a view unless it had to be widened."""
        tensor = self.get(suffix)
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            self.fail(f"must be float32 (or float16, bfloat16), got {tensor.dtype}; quantise the model again", suffix)
        if tuple(tensor.shape) != (count,):
            self.fail(f"must have shape [{count}] by the weight's shape, got {list(tensor.shape)}", suffix)
        if not bool(((tensor >= 0) & (tensor < math.inf)).all()):
            self.fail("holds negative, NaN or infinite scales; the file is damaged, get it again", suffix)
        return tensor.float().contiguous()

    def nested(self, state: dict[str, Any], suffix: str, blocks: int) -> dict[str, Tensor]:
        if state["nested_blocksize"] != 256 or isinstance(state["nested_blocksize"], float):
            self.fail(f"nested_blocksize must be 256, got {state['nested_blocksize']!r}", suffix)
        if state.get("nested_dtype") != "float32":
            self.fail(f"nested_dtype must be 'float32', got {state.get('nested_dtype')!r}", suffix)
        offset = state.get("nested_offset")
        if isinstance(offset, bool) or not isinstance(offset, int | float) or not abs(offset) <= _FP32_MAX:
            self.fail(f"nested_offset must be a number within fp32's range, got {offset!r}", suffix)
        absmax = self.get(".absmax")
        if absmax.dtype != torch.uint8 or tuple(absmax.shape) != (blocks,):
            self.fail(
                f"must be uint8 [{blocks}] by the weight's shape, got {absmax.dtype} {list(absmax.shape)}", ".absmax"
            )
        table = self.get(".nested_quant_map")
        if table.dtype != torch.float32 or tuple(table.shape) != (256,) or not bool(torch.isfinite(table).all()):
            self.fail(
                f"must be 256 finite float32 numbers, got {table.dtype} {list(table.shape)}; a model-wide cast rounds "
                "it: save the model again without .half() or .to(dtype) on its quantised weights",
                ".nested_quant_map",
            )
        return {
            "absmax": absmax.contiguous(),
            "nested_absmax": self.scales(".nested_absmax", -(-blocks // 256)),
            "nested_quant_map": table.contiguous(),
            "nested_offset": torch.tensor(float(offset), dtype=torch.float32, device=absmax.device),
        }


_FP32_MAX = torch.finfo(torch.float32).max


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 62
