"""kernels/cuda/codebook_gemv.cu run on the CPU, from its own source."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

import cuda_on_cpu
from halfbyte.formats import PackedWeight
from halfbyte.kernels import codebook_gemv, nvrtc
from halfbyte.kernels.codebook_gemv import Config
from halfbyte.kernels.launch import call_fields

CHECKS = ("-fsanitize=alignment", "-fsanitize-undefined-trap-on-error")


class _Range(ctypes.Structure):
    _fields_ = (("begin", ctypes.c_void_p), ("bytes", ctypes.c_longlong))


@cache
def library(config: Config) -> ctypes.CDLL:
    """The kernel compiled for the CPU with a configuration's macros."""
    path = Path(cuda_on_cpu.folder().name) / f"{'-'.join(map(str, asdict(config).values()))}.so"
    defines = [f"-D{name}={value}" for name, value in asdict(config).items()]
    options = ("-shared", *defines, f"-I{nvrtc.SOURCES}")
    cuda_on_cpu.build("codebook_gemv_on_cpu.cpp", path, *options, checks=CHECKS)
    loaded = ctypes.CDLL(str(path))
    loaded.run_on_cpu.restype = ctypes.c_char_p
    return loaded


def build(configs: Iterable[Config]) -> None:
    """Compile many, two at a time."""
    cuda_on_cpu.scheduler(*CHECKS)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(library, dict.fromkeys(configs)))


def multiply(
    x: Tensor, weight: PackedWeight, bias: Tensor | None = None, arch: str = "sm_90a", downwards: bool = False
) -> Tensor:
    """x Wᵀ + bias as the launcher would have `arch` compute it; raises AssertionError where the kernel does wrong.

    downwards: threads take their turns from the last to the first.
    """
    m, n = x.shape[0], weight.shape[0]
    out = torch.full((m, n), torch.nan, dtype=x.dtype)
    first = 0
    while first < m:
        config = codebook_gemv.configure(weight, x.dtype, min(codebook_gemv.MAX_ROWS, m - first), arch)
        rows = slice(first, min(m, first + config.M_ROWS))
        problem = codebook_gemv.parameters(weight, codebook_gemv.in_quads(x[rows]))
        for name, value in call_fields(x[rows], bias, out[rows]).items():
            setattr(problem, name, value)
        tensors = [_span(x[rows]), *weight.parts.values(), *([] if bias is None else [bias])]
        ranges = (_Range * len(tensors))(*(_Range(t.data_ptr(), t.numel() * t.element_size()) for t in tensors))
        blocks = -(-n // config.tile_rows)
        error = library(config).run_on_cpu(
            ctypes.byref(problem), blocks, config.threads, config.shared_bytes, int(downwards), ranges, len(tensors)
        )
        assert not error, f"{error.decode()}: {config}"
        first = rows.stop
    return out


def moved(weight: PackedWeight, by: int) -> PackedWeight:
    """The weight with its codes `by` bytes beyond a multiple of 64, in memory of their own."""
    codes = weight.codes
    size = codes.numel() * codes.element_size()
    room = torch.empty(size + 128, dtype=torch.uint8)
    start = -room.data_ptr() % 64 + by
    view = room[start : start + size].view(codes.dtype).view(codes.shape)
    view.copy_(codes)
    return PackedWeight(weight.format, weight.shape, {**weight.parts, weight.format.layout.part: view})


def _span(x: Tensor) -> Tensor:
    """The memory from x's first element to its last."""
    return torch.as_strided(x, ((x.shape[0] - 1) * x.stride(0) + x.shape[1],), (1,))
