"""Many rows of x times a 4-bit codebook weight: a slab of W is decoded to fp16, cuBLAS multiplies, slab after slab.

Each row of W and of x is scaled by a power of two on its way to fp16 (cuda/codebook_prefill.cu, codebook_prefill_x.cu),
so nothing overflows; cuBLAS sums in fp32, and codebook_prefill_y.cu undoes the powers, adds the bias and rounds once.
For bf16 activations fp16's 11 bits of a weight are within the contract; for fp16 ones a second fp16 number holds what
the first misses, at twice the multiplications.

All that a call holds is one piece of memory of PyTorch's allocator, of WORKSPACE bytes at most for any M.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from itertools import accumulate
from math import ceil
from typing import Any

import torch
from torch import Tensor

from ..formats import BlockFormat, PackedWeight, RecordLayout
from . import codebook, fallback, nvrtc
from .adapters import expand_with_torch
from .launch import Launch, Launcher
from .registry import Expand, Kernel, Problem, register

STEM, X_STEM, Y_STEM = "codebook_prefill", "codebook_prefill_x", "codebook_prefill_y"
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
MIN_M = 65  # rows of x; fewer are for kernels whose bits do not depend on M
GRAIN = 8  # weights that a thread decodes at once, and what K is a multiple of
TERMS = {torch.bfloat16: 1, torch.float16: 2}  # fp16 numbers that hold a weight
THREADS, AHEAD = 128, 4  # of a block; 8 weights each that it fetches before it decodes them
Y_THREADS, Y_BLOCKS = 256, 8  # of a block; blocks a multiprocessor
SLAB_BYTES, CHUNK_BYTES, SUM_BYTES = 96 << 20, 128 << 20, 64 << 20  # of W and x in fp16, and of their sums, at once
WORKSPACE = SLAB_BYTES + CHUNK_BYTES + SUM_BYTES + (1 << 20)
DECODE_SECONDS = 0.7e-12  # a weight, on an H200
ROWS = 256  # rows of W that slabs are multiples of, as cuBLAS's tiles are


class _Table(ctypes.Structure):
    _fields_ = (("value", ctypes.c_float * 16), ("top", ctypes.c_float))


class _Problem(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("x_stride", ctypes.c_longlong),
        ("m", ctypes.c_int),
        ("n", ctypes.c_int),
        ("k", ctypes.c_int),
        ("bias_is_fp32", ctypes.c_int),
        ("first", ctypes.c_int),
        ("rows", ctypes.c_int),
        ("bias_stride", ctypes.c_longlong),
        ("codes", ctypes.c_void_p),
        ("w_exponents", ctypes.c_void_p),
        ("x_exponents", ctypes.c_void_p),
    )


@dataclass(frozen=True)
class Cut:
    """How a call is cut: rows of W in a slab, of x in a chunk, and those of a chunk whose sums are held at once."""

    slab: int
    chunk: int
    sums: int


def reason_against(problem: Problem) -> str | None:
    """Why this kernel cannot serve a problem, or None."""
    format, layout = problem.format, problem.format.layout
    if problem.arch not in ARCHITECTURES:
        return f"compiles for {', '.join(ARCHITECTURES)}, not for {problem.arch}"
    if problem.m < MIN_M:
        return f"is for M from {MIN_M} on, got {problem.m}"
    if problem.dtype not in TERMS:
        return "multiplies fp16 and bf16 activations, got fp32"
    if not isinstance(layout, RecordLayout) or layout.elements != 2:
        return f"reads planar codes, two to a byte; {format.key} has another layout"
    if codebook.scale_kind(format) is None:
        return f"reads fp32, nested and E8M0 scales without offsets; {format.key} has others"
    if format.blocksize < GRAIN or format.blocksize & (format.blocksize - 1):
        return f"needs a power of two of at least {GRAIN} weights a scale, {format.key} has {format.blocksize}"
    if problem.k % GRAIN:
        return f"needs K in multiples of {GRAIN}, got K = {problem.k}"
    if TERMS[problem.dtype] * problem.k * 2 * ROWS > SLAB_BYTES:
        return f"decodes {ROWS} rows of W at once, which must fit {SLAB_BYTES >> 20} MiB, got K = {problem.k}"
    if not hasattr(torch.ops.aten.mm, "dtype_out"):
        return f"needs torch 2.8 or newer, whose mm gives fp32 sums of fp16 matrices, got {torch.__version__}"
    return nvrtc.missing()


def cut(dtype: torch.dtype, m: int, n: int, k: int) -> Cut:
    """Slabs and chunks of a problem; see `Cut`."""
    row_bytes = TERMS[dtype] * k * 2
    slab = min(ceil(n / 8) * 8, SLAB_BYTES // row_bytes // ROWS * ROWS)
    chunk = ceil(m / ceil(m / (CHUNK_BYTES // row_bytes)))  # all about as large
    return Cut(slab, chunk, min(chunk, max(1, SUM_BYTES // (4 * slab))))


def predicted_seconds(problem: Problem) -> float:
    """From times on an H200: launches; decoding for each chunk, cuBLAS by arithmetic or by memory; x and outputs."""
    terms, m, n, k = TERMS[problem.dtype], problem.m, problem.n, problem.k
    each = cut(problem.dtype, m, n, k)
    chunks, slabs = ceil(m / each.chunk), ceil(n / each.slab)
    decode = n * k * DECODE_SECONDS * (1 + terms) / 2
    multiply = 2 * terms * n * k * max(m / 7.4e14, chunks / 3.5e12)
    ends = m * k * (1 + terms) * 0.7e-12 + m * n * 1.8e-12
    return 8e-6 + chunks * (slabs * 4e-6 + decode) + multiply + ends


def describe(problem: Problem) -> str:
    """How a problem is cut, in words."""
    each = cut(problem.dtype, problem.m, problem.n, problem.k)
    terms = "" if TERMS[problem.dtype] == 1 else " twice (fp16 keeps 22 bits of a weight so)"
    return (
        f"slabs of {each.slab} rows of W decoded to fp16, times {each.chunk} rows of x by cuBLAS{terms}, "
        f"{workspace_bytes(problem.dtype, each, problem.k):,} bytes of workspace"
    )


def workspace_bytes(dtype: torch.dtype, each: Cut, k: int) -> int:
    """What a call holds."""
    return sum(_sizes(dtype, each, k))


def _sizes(dtype: torch.dtype, each: Cut, k: int) -> tuple[int, ...]:
    """Bytes of W and x in fp16, their sums, the exponents of W's rows, and of x's; all multiples of 256."""
    row_bytes = TERMS[dtype] * k * 2
    sizes = (each.slab * row_bytes, each.chunk * row_bytes, each.sums * each.slab * 4, each.slab * 4, each.chunk * 4)
    return tuple(ceil(size / 256) * 256 for size in sizes)


def bind(weight: PackedWeight, dtype: torch.dtype, m: int, variant: tuple[str, bool]) -> Launch:
    """Compile or find one of the three kernels; not inside graph capture.

    variant: its stem, and whether outputs are written 16 bytes at once.
    """
    arch = codebook.device_of(weight.device.index)[0]
    n, k = weight.shape
    stem, wide = variant
    problem = _Problem(n=n, k=k, codes=weight.codes.data_ptr())
    arguments: tuple[ctypes.Structure, ...] = (problem,)
    if stem == STEM:
        arguments = (table_of(weight.format.codebook), codebook.scales_of(weight), problem)
    return Launch(
        nvrtc.load(stem, arch, macros(stem, weight.format, dtype, wide), weight.device.index, 0),
        arguments,
        blocks=1,
        threads=Y_THREADS if stem == Y_STEM else THREADS,
        shared_bytes=0,
        early=False,
        alignment=codebook.ALIGNMENT,
        rows=MIN_M,
        name=stem,
    )


def macros(stem: str, format: BlockFormat, dtype: torch.dtype, wide: bool = True) -> dict[str, int]:
    """What a kernel of these is compiled with; its source says what each means."""
    x_type = {"X_TYPE": codebook.X_TYPES[dtype]}
    if stem == X_STEM:
        return {"TERMS": TERMS[dtype], "THREADS": THREADS} | x_type
    if stem == Y_STEM:
        return {"THREADS": Y_THREADS, "WIDE": 8 if wide else 1} | x_type
    return {
        "TERMS": TERMS[dtype],
        "THREADS": THREADS,
        "AHEAD": AHEAD,
        "BLOCK": format.blocksize,
        "SCALE_KIND": codebook.known_kind(format),
        "HIGH_FIRST": int(codebook.layout_of(format).high_first),
    }


def table_of(values: tuple[float, ...]) -> _Table:
    """The codebook in fp32."""
    return _Table((ctypes.c_float * 16)(*values), max(map(abs, values)))


def run(x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor) -> None:
    """See registry.Run; bias may also be fp32 [M, N]. Weights that are not 4-byte aligned go to the fallback."""
    launcher = Launcher.of(STEM, weight)
    if not launcher.readable or launcher.addresses[0] % 4:
        fallback.run(x, weight, bias, out)
        return
    if (x.data_ptr() | x.stride(0) * x.element_size()) % codebook.ALIGNMENT or x.stride(1) != 1:
        x = x.clone(memory_format=torch.contiguous_format)
    multiply(launcher, x, weight, bias, out, cut(x.dtype, x.shape[0], *weight.shape))


def multiply(launcher: Launcher, x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor, each: Cut) -> None:
    """`run`, cut as it is told."""
    (n, k), dtype, terms = weight.shape, x.dtype, TERMS[x.dtype]
    wide = n % 8 == 0 and out.data_ptr() % 16 == 0
    decode, lay_out, end = (launcher.get(bind, weight, dtype, 1, (stem, wide)) for stem in (STEM, X_STEM, Y_STEM))
    stream, most_blocks = launcher.stream(), Y_BLOCKS * codebook.device_of(launcher.index)[1]
    workspace = torch.empty(workspace_bytes(dtype, each, k), dtype=torch.uint8, device=x.device)
    ends = accumulate(_sizes(dtype, each, k))
    parts = [workspace[end - size : end] for end, size in zip(ends, _sizes(dtype, each, k), strict=True)]
    w_part, x_part, sums_part, w_exponents, x_exponents = parts
    item = x.element_size()
    pointers: dict[str, Any] = {"bias": None, "bias_is_fp32": 0, "bias_stride": 0}
    exponents: dict[str, Any] = {"w_exponents": w_exponents.data_ptr(), "x_exponents": x_exponents.data_ptr()}
    if bias is not None:
        pointers["bias_is_fp32"] = int(bias.dtype == torch.float32)
        pointers["bias_stride"] = n if bias.dim() == 2 else 0
    for top in range(0, x.shape[0], each.chunk):
        chunk = min(each.chunk, x.shape[0] - top)
        address = x.data_ptr() + top * x.stride(0) * item
        lay_out.start(stream, chunk, x=address, x_stride=x.stride(0), out=x_part.data_ptr(), **exponents)
        x_image = x_part[: chunk * terms * k * 2].view(torch.float16).view(chunk, terms * k)
        for first in range(0, n, each.slab):
            rows = min(each.slab, n - first)
            decode.start(stream, rows, first=first, rows=rows, out=w_part.data_ptr(), **exponents)
            w_image = w_part[: rows * terms * k * 2].view(torch.float16).view(rows, terms * k)
            for start in range(0, chunk, each.sums):
                m = min(each.sums, chunk - start)
                pitch = ceil(rows / 8) * 8
                sums = sums_part[: m * pitch * 4].view(torch.float32).view(m, pitch)[:, :rows]
                add_up(x_image[start : start + m], w_image, sums)
                if bias is not None:
                    pointers["bias"] = bias.data_ptr() + (top + start) * pointers["bias_stride"] * bias.element_size()
                end.start(
                    stream,
                    min(most_blocks, ceil(m * rows / (8 if wide else 1) / Y_THREADS)),
                    x=sums.data_ptr(),
                    x_stride=pitch,
                    m=m,
                    first=first,
                    rows=rows,
                    out=out.data_ptr() + (top + start) * n * item,
                    w_exponents=w_exponents.data_ptr(),
                    x_exponents=x_exponents.data_ptr() + 4 * start,
                    **pointers,
                )


def add_up(x: Tensor, w: Tensor, sums: Tensor) -> None:
    """sums fp32 [M, N] = x [M, K] times w [N, K] transposed, both fp16: products and sums in fp32."""
    torch.ops.aten.mm.dtype_out(x, w.t(), torch.float32, out=sums)


def run_adapters(x: Tensor, weight: PackedWeight, bias: Tensor | None, expand: Expand, out: Tensor) -> None:
    """See registry.RunAdapters: what they add is made by torch, then added like a bias of each row's own."""
    run(x, weight, expand_with_torch(expand, bias, out.shape[1]), out)


register(
    Kernel(
        name=STEM,
        backend="cuda",
        about="4-bit codebook weights decoded to fp16 in slabs, multiplied by cuBLAS, for more than 64 rows of x",
        supports=reason_against,
        cost=predicted_seconds,
        run=run,
        run_adapters=run_adapters,
        describe=describe,
    )
)
