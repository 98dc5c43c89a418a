"""What kernels for codebook weights are given of adapters: cuda/adapters_types.cuh and adapters_expand.cuh in Python.

Their outputs get scaling * B h in fp32 before the one rounding, each row of x with its own adapter.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from ..formats import PackedWeight
from .adapters_shrink import NO_SIGNAL, Signal
from .codebook import X_TYPES
from .launch import Bind, Launch
from .registry import Expand

TABLE_ALIGNMENT = 16  # bytes, of the table
BESIDE = 8 << 10  # bytes of shared memory that a block of adapters_shrink may find beside a base kernel's
DEPTH = 3  # tiles on their way, as in adapters_expand.cuh


class ExpandStruct(ctypes.Structure):
    """All zeros: no adapters."""

    _fields_ = (
        ("shrunk", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("scalings", ctypes.c_void_p),
        ("index", ctypes.c_void_p),
        ("width", ctypes.c_int),
        ("slots", ctypes.c_int),
        ("b_type", ctypes.c_int),
        ("signal", ctypes.c_void_p),
        ("tag", ctypes.c_ulonglong),
        ("signals", ctypes.c_int),
    )


def listed_bytes(columns: int) -> int:
    """Shared memory for the items of `columns` rows of x, what is said of them, and a barrier."""
    return 32 * columns + 32


def shared_bytes(rows: int, columns: int, pair: int, warps: int = 1) -> int:
    """Shared memory for what is added to a tile of `rows` rows of W and `columns` of x.

    Beside that its items, what `warps` warps have on its way to them, `pair` tiles of 16 rows of B at a time, and three
    barriers.
    """
    return columns * (4 * (rows + 4) + 32) + warps * DEPTH * 512 * (1 + pair) + 32


def reason_against(expand: Expand) -> str | None:
    """Why kernels cannot be given these adapters, or None."""
    if expand.table.data_ptr() % TABLE_ALIGNMENT:
        return f"the table of adapters does not lie at a multiple of {TABLE_ALIGNMENT} bytes"
    return None


def fields_of(expand: Expand, first: int, signal: Signal = NO_SIGNAL) -> dict[str, Any]:
    """What a launch brings of them (`Launch.__call__`), for the rows of x from `first` on.

    signal: from `Shrink.launch`, right before.
    """
    shrunk, index = expand.shrunk, expand.index
    width = shrunk.shape[1]
    struct = ExpandStruct(
        shrunk.data_ptr() + shrunk.element_size() * width * first,
        expand.b.data_ptr(),
        expand.table.data_ptr(),
        expand.scalings.data_ptr(),
        None if index is None else index.data_ptr() + index.element_size() * first,
        width,
        expand.table.shape[0],
        X_TYPES[expand.b.dtype],
        *signal,
    )
    return {"expand": struct}


def binder(bind: Bind) -> Bind:
    """`bind` for kernels with adapters; no other call shares their launches: their variant is ("adapters", variant)."""

    def bind_with_adapters(weight: PackedWeight, dtype: torch.dtype, m: int, variant: Any) -> Launch:
        return bind(weight, dtype, m, variant[1], adapters=variant[0])

    return bind_with_adapters
