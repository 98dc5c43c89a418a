"""halfbyte's own tensors, for packed formats that no other tool keeps in safetensors files.

For a weight under prefix `x.weight` in a format other than bitsandbytes':

    x.weight           the codes, in the shape that `BlockFormat.parts` gives them
    x.weight.<part>    every other part, e.g. x.weight.scales
    x.weight.halfbyte  uint8: JSON {"format": "q4_0", "shape": [N, K]}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NoReturn

import torch
from torch import Tensor

from ..formats import BlockFormat, PackedWeight, get_format
from .errors import CheckpointError

LABEL = ".halfbyte"
MAX_LABEL_BYTES = 1024


def pack_own(weight: PackedWeight, prefix: str) -> dict[str, Tensor]:
    """The tensors of a weight in any format, named under `prefix`; they share memory with `weight`."""
    label = json.dumps({"format": weight.format.key, "shape": list(weight.shape)}).encode()
    codes = weight.format.layout.part
    tensors = {prefix: weight.codes}
    tensors |= {f"{prefix}.{part}": tensor for part, tensor in weight.parts.items() if part != codes}
    return tensors | {prefix + LABEL: torch.frombuffer(bytearray(label), dtype=torch.uint8)}


def describe_own(tensors: Mapping[str, Tensor], prefix: str, where: str) -> tuple[tuple[int, int], BlockFormat]:
    """Logical shape and format of the weight under `prefix`, from its label alone. Raises CheckpointError."""

    def fail(cause: str) -> NoReturn:
        raise CheckpointError(where, prefix + LABEL, cause)

    label = tensors[prefix + LABEL]
    if label.dtype != torch.uint8 or label.dim() != 1 or not 0 < label.numel() <= MAX_LABEL_BYTES:
        fail(f"must be uint8 of 1 to {MAX_LABEL_BYTES} bytes, got {label.dtype} {list(label.shape)}")
    try:
        content = json.loads(bytes(label.tolist()).decode())
    except (ValueError, RecursionError) as error:
        fail(f"is not JSON: {error}")
    shape = content.get("shape") if isinstance(content, dict) else None
    if not isinstance(shape, list) or len(shape) != 2 or not all(type(size) is int for size in shape):
        fail(f"must hold a format and a shape [N, K], got {str(content)[:80]}")
    try:
        format = get_format(str(content.get("format")))
        format.check_shape(*shape)
    except ValueError as error:
        fail(str(error))
    return (shape[0], shape[1]), format


def unpack_own(tensors: Mapping[str, Tensor], prefix: str, where: str) -> PackedWeight:
    """The packed weight under `prefix`; its parts are views of `tensors`.

    where: the file, for messages. Raises CheckpointError where tensors are missing, of another shape or dtype than the
    label says, or scales are not finite.
    """
    shape, format = describe_own(tensors, prefix, where)
    codes = format.layout.part
    names = {part: prefix if part == codes else f"{prefix}.{part}" for part in format.parts(*shape)}
    for name in names.values():
        if name not in tensors:
            raise CheckpointError(where, name, f"missing; a {format.key} weight is stored with it")
    try:
        weight = PackedWeight(format, shape, {part: tensors[name] for part, name in names.items()})
    except (ValueError, TypeError) as error:
        raise CheckpointError(where, prefix, str(error)) from error
    if not scales_are_finite(weight):
        raise CheckpointError(where, prefix, "holds NaN or infinite scales; the file is damaged, get it again")
    return weight


def scales_are_finite(weight: PackedWeight) -> bool:
    """Whether every block's scale and offset is a number."""
    offsets = weight.offsets()
    return bool(torch.isfinite(weight.scales()).all()) and (offsets is None or bool(torch.isfinite(offsets).all()))
