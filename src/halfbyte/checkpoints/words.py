"""GPTQ and AWQ: int32 words with eight codes each -> PackedWeight.

A layer `x` is stored as x.qweight, x.qzeros, x.scales (and x.g_idx in GPTQ); here it is one entry, `x.weight`. The
config says how to read the words: bits, group size, GPTQ's two versions of the zero point.

Act-order is refused: a g_idx other than k // group_size means that the columns of a group are spread over the matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..formats import PackedWeight, get_format
from .errors import CheckpointError

PARTS = (".qweight", ".qzeros", ".scales")
SIDE_TENSORS = (*PARTS, ".g_idx")
GPTQ_FORMATS = ("gptq", "gptq_v2")


@dataclass(frozen=True)
class WordScheme:
    """What quantization_config says: family "gptq", "gptq_v2" or "awq"; group size, -1 for one group a row."""

    family: str
    group_size: int
    desc_act: bool = False


def parse_scheme(config: Mapping[str, Any], file: Path) -> WordScheme:
    """The scheme of a quantization_config with quant_method gptq or awq.

    Raises CheckpointError for other widths than 4 bits, layouts other than GPTQ's two and AWQ's gemm, and settings a
    layer (GPTQModel's "dynamic").
    """

    def fail(cause: str) -> NoReturn:
        raise CheckpointError(file, "quantization_config", cause)

    bits = config.get("bits", config.get("w_bit"))
    if bits != 4 or isinstance(bits, bool):
        fail(f"bits must be 4, got {bits!r}")
    group = config.get("group_size", config.get("q_group_size"))
    if not isinstance(group, int) or isinstance(group, bool) or (group != -1 and not 8 <= group <= 1 << 30):
        fail(f"group_size must be -1 or a multiple of 8, got {group!r}")
    if config.get("quant_method") == "awq":
        version = config.get("version") or config.get("format") or "gemm"
        if str(version).lower() != "gemm":
            fail(f"AWQ's version must be 'gemm', got {version!r}; other versions pack the words in another order")
        if config.get("zero_point", True) is not True:
            fail("AWQ without zero points is not supported")
        return WordScheme("awq", group)
    layout = config.get("checkpoint_format") or config.get("format") or "gptq"
    if layout not in GPTQ_FORMATS:
        fail(f"checkpoint_format must be one of {', '.join(GPTQ_FORMATS)}; got {layout!r}")
    if config.get("dynamic"):
        fail("'dynamic' (settings of single layers) is not supported")
    desc_act = config.get("desc_act", False)
    if not isinstance(desc_act, bool):
        fail(f"desc_act must be true or false, got {desc_act!r}")
    return WordScheme(layout, group, desc_act)


def describe_words(
    shapes: Mapping[str, tuple[int, ...]], layer: str, scheme: WordScheme, where: str
) -> tuple[tuple[int, int], str]:
    """Logical shape [N, K] and format key of a layer, from the shapes of its tensors.

    Raises CheckpointError where the shapes contradict each other or the scheme.
    """

    def fail(cause: str) -> NoReturn:
        raise CheckpointError(where, f"{layer}.weight", cause)

    for part in PARTS:
        if layer + part not in shapes:
            fail(f"'{layer}{part}' is missing")
        if len(shapes[layer + part]) != 2:
            fail(f"'{layer}{part}' must be a matrix, got shape {list(shapes[layer + part])}")
    rows, columns = shapes[layer + ".qweight"]
    n, k = (columns, rows * 8) if scheme.family != "awq" else (columns * 8, rows)
    group = k if scheme.group_size == -1 else scheme.group_size
    if n < 1 or k < 1 or k % group:
        fail(f"K = {k} is no multiple of the config's group_size {group}, or the layer is empty")
    if shapes[layer + ".scales"] != (k // group, n):
        fail(
            f"'{layer}.scales' of a layer [{n}, {k}] in groups of {group} must have shape {[k // group, n]}, got "
            f"{list(shapes[layer + '.scales'])}; does config.json belong to these weights?"
        )
    try:
        format = get_format(f"{scheme.family}-{group}")
        format.check_shape(n, k)
    except ValueError as error:
        fail(str(error))
    return (n, k), format.key


def load_words(
    tensors: Mapping[str, Tensor], layer: str, key: str, shape: tuple[int, int], scheme: WordScheme, where: str
) -> PackedWeight:
    """The packed weight of a layer that `describe_words` described; its parts are views of `tensors`."""
    parts = {part.removeprefix("."): tensors[layer + part].contiguous() for part in PARTS}
    if not bool(torch.isfinite(parts["scales"]).all()):
        raise CheckpointError(where, f"{layer}.scales", "holds NaN or infinity; the file is damaged, get it again")
    format = get_format(key)
    if f"{layer}.g_idx" in tensors:
        _check_order(tensors[f"{layer}.g_idx"], shape[1], format.blocksize, f"{layer}.g_idx", where)
    elif scheme.desc_act:
        raise CheckpointError(where, f"{layer}.g_idx", "missing, though the config says desc_act (act-order)")
    try:
        return PackedWeight(format, shape, parts)
    except (ValueError, TypeError) as error:
        raise CheckpointError(where, f"{layer}.weight", str(error)) from error


def _check_order(order: Tensor, k: int, group: int, name: str, where: str) -> None:
    if tuple(order.shape) != (k,) or order.dtype not in (torch.int32, torch.int64):
        raise CheckpointError(where, name, f"must be integers [{k}], got {order.dtype} {list(order.shape)}")
    if not torch.equal(order.long(), torch.arange(k) // group):
        raise CheckpointError(
            where,
            name,
            "the columns are in act-order (desc_act with a permutation), which is not supported; quantise the model "
            "with desc_act=False, or use a checkpoint made so",
        )
