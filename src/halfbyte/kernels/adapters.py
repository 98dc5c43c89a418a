"""The two small multiplies of LoRA adapters, each row of x with its own: h = A x, then bias + scaling * B h, in fp32.

On a CPU they are C++ (cpu/adapters.hpp), elsewhere torch: without a look at the index from the host, so a CUDA graph of
them may be replayed with other adapters. In both, a row's bits do not depend on what the other rows use.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from .cpu import Library
from .cpu.loading import ExpandStruct, ShrinkStruct
from .registry import Expand

DTYPE_NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
GATHERED_VALUES = 1 << 24  # of adapters, held at once as fp32 where torch computes: 64 MiB


def shrink_on_cpu(
    loaded: Library, isa: int, x: Tensor, a: Tensor, spans: Tensor, index: Tensor | None, out: Tensor, threads: int = 0
) -> None:
    """out [M, width] = the rows of A [rows, K] that each row's slot spans, times x [M, K] of unit stride along K.

    spans: int32 [slots, 2], a slot's first row and how many. index: as in `Expand`. Columns beyond a slot's rows are 0.
    threads: 0 for torch's number. Raises IndexError for an index or spans out of range, MemoryError without memory.
    """
    m, k = x.shape
    call = ShrinkStruct(
        x.data_ptr(),
        a.data_ptr(),
        spans.data_ptr(),
        None if index is None else index.data_ptr(),
        out.data_ptr(),
        m,
        k,
        x.stride(0),
        out.shape[1],
        spans.shape[0],
        a.shape[0],
        DTYPE_NUMBERS[x.dtype],
        DTYPE_NUMBERS[a.dtype],
        threads or torch.get_num_threads(),
    )
    _raise_for(loaded.shrink(isa, ctypes.byref(call)), index, spans)


def expand_on_cpu(loaded: Library, isa: int, expand: Expand, bias: Tensor | None, n: int, threads: int = 0) -> Tensor:
    """fp32 [M, N]: bias [N] (fp32, bf16, fp16, or None for 0), and what each row's adapter adds. Raises as above."""
    shrunk, b, index = expand.shrunk, expand.b, expand.index
    m, width = shrunk.shape
    out = torch.empty(m, n)
    call = ExpandStruct(
        shrunk.data_ptr(),
        b.data_ptr(),
        expand.table.data_ptr(),
        expand.scalings.data_ptr(),
        None if index is None else index.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        m,
        n,
        width,
        expand.table.shape[0],
        b.numel(),
        DTYPE_NUMBERS[b.dtype],
        0 if bias is None else DTYPE_NUMBERS[bias.dtype],
        threads or torch.get_num_threads(),
    )
    _raise_for(loaded.expand(isa, ctypes.byref(call)), index, expand.table)
    return out


def _raise_for(code: int, index: Tensor | None, table: Tensor) -> None:
    if code == 1:
        raise MemoryError("no memory for the adapters of a layer")
    if code == 2:
        assert index is not None
        raise IndexError(
            f"halfbyte.linear_with_adapters: index must be -1 or a slot below {table.shape[0]}, "
            f"got values from {int(index.min())} to {int(index.max())}"
        )
    if code == 3:
        raise IndexError("halfbyte.linear_with_adapters: the table of adapters names places outside their tensors")


def shrink_with_torch(x: Tensor, a: Tensor, spans: Tensor, index: Tensor | None, out: Tensor) -> None:
    """As `shrink_on_cpu`, on any device. An index out of range counts as none: looking for one would wait for it."""
    m, width = out.shape
    slots, used = _slots(index, spans, m, x.device)
    columns = torch.arange(width, device=x.device)
    step = max(1, GATHERED_VALUES // max(1, width * x.shape[1]))
    for start in range(0, m, step):
        rows = slice(start, min(m, start + step))
        span = spans[slots[rows]].long()
        inside = (columns < span[:, 1:]) & used[rows, None]
        gathered = a[torch.where(inside, span[:, :1] + columns, 0)].float()
        # not a matmul: TF32 might round it, and its order of sums might depend on how many rows there are
        sums = (gathered * x[rows, None, :].float()).sum(-1)
        out[rows] = torch.where(inside, sums, 0)


def expand_with_torch(expand: Expand, bias: Tensor | None, n: int) -> Tensor:
    """As `expand_on_cpu`, on any device. An index out of range counts as none."""
    if expand.shrink is not None:
        expand.shrink.launch()
    m, width = expand.shrunk.shape
    device = expand.shrunk.device
    out = torch.zeros(m, n, device=device)
    if bias is not None:
        out += bias
    slots, used = _slots(expand.index, expand.table, m, device)
    columns, outputs = torch.arange(width, device=device), torch.arange(n, device=device)
    step = max(1, GATHERED_VALUES // max(1, width * n))
    for start in range(0, m if width else 0, step):
        rows = slice(start, min(m, start + step))
        column, rank, first, stride = (part[:, None] for part in expand.table[slots[rows]].long().unbind(1))
        inside = (columns < rank) & used[rows, None]
        h = expand.shrunk[rows].gather(1, torch.where(inside, column + columns, 0))
        h = torch.where(inside, h, 0)
        places = (first * n + outputs * stride)[:, :, None] + columns
        gathered = expand.b[torch.where(inside[:, None, :], places, 0)].float()
        out[rows] += expand.scalings[slots[rows], None] * (gathered * h[:, None, :]).sum(-1)
    return out


def _slots(index: Tensor | None, table: Tensor, m: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """int64 [M]: each row's slot, 0 where it has none; and bool [M]: whether it has one."""
    if index is None:
        index = torch.zeros(m, dtype=torch.int32, device=device)
    used = (index >= 0) & (index < table.shape[0])
    return torch.where(used, index, 0).long(), used
