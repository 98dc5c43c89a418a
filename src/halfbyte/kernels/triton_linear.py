"""One Triton kernel for every 4-bit format, any M, and every GPU that Triton knows: AMD's and Intel's beside NVIDIA's.

Correct before fast: values, products and sums in fp32. The kernels are in triton_linear_kernels.py, which is imported,
and compiled by Triton, on first use. With TRITON_INTERPRET=1 they run on the CPU, slowly, for tests.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ..formats import BlockFormat, PackedWeight, RecordLayout, WordLayout
from ..formats.codecs import GroupZero
from ..formats.table import AWQ_ORDER
from . import codebook_gemv as gemv
from . import fallback
from .launch import readable
from .registry import Kernel, Problem, register

STEM = "triton_linear"
FEW_M = 64  # rows of x up to which bits do not depend on M
MAX_SIZE = 1 << 30  # of N and of K
WIDE_FROM = 1 << 31  # weights that a layer needs 64-bit numbers for
SCALES = {
    gemv.ABSMAX: "absmax",
    gemv.NESTED: "nested",
    gemv.E8M0: "e8m0",
    gemv.E4M3: "e4m3",
    gemv.HALF: "half",
    gemv.HALF_MIN: "half",
    gemv.RECORD_E8M0: "record_e8m0",
    gemv.KQUANT: "kquant",
    gemv.GROUP_FP16: "group",
}
OFFSETS = {gemv.HALF_MIN: "half", gemv.KQUANT: "kquant", gemv.GROUP_FP16: "group"}
ORDERS = {"K": tuple(range(8)), "N": AWQ_ORDER}  # that the kernel has for words along K and N


def interpreted() -> bool:
    """Whether Triton's interpreter is asked for, which takes tensors of the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def installed() -> bool:
    return find_spec("triton") is not None


def reason_against(problem: Problem) -> str | None:
    """Why this kernel cannot serve a problem, or None."""
    if problem.arch == "cpu" and not interpreted():
        return "is for GPUs, not for cpu"
    if problem.arch not in ("cpu", "xpu") and not problem.arch.startswith(("sm_", "gfx")):
        return f"is for GPUs of NVIDIA, AMD and Intel, not for {problem.arch}"
    if problem.m > FEW_M and problem.arch.startswith("sm_"):
        return f"has not been measured on NVIDIA beyond M = {FEW_M}, got {problem.m}"
    if max(problem.n, problem.k) > MAX_SIZE:
        return f"counts rows and columns up to 2^30, got N = {problem.n}, K = {problem.k}"
    if described(problem.format) is None:
        return f"does not know the codes or the scales of {problem.format.key}"
    if not installed():
        return "needs triton: pip install 'halfbyte[triton]' (torch for AMD and Intel GPUs brings one of its own)"
    return None


def predicted_seconds(problem: Problem) -> float:
    """A launch by Triton, then for few rows of x instructions at 0.6 of an H200's issue rate, 30 to decode a weight.

    Beyond FEW_M rows a part of what the fallback predicts, which leaves out the multiplication, too. No device has
    confirmed any of it.
    """
    if problem.arch == "cpu":
        return 1.0 + problem.m * problem.n * problem.k * 1e-6  # interpreted
    if problem.m > FEW_M:
        return 0.8 * fallback.cost(problem)
    rows = tile_rows(problem.m)
    return 4e-5 + problem.n * problem.k * -(-problem.m // rows) * (30 + 2 * rows) / (0.6 * 132 * 128 * 1.8e9)


@cache
def described(format: BlockFormat) -> dict[str, Any] | None:
    """The kernel's constants for a format, or None where it cannot read it."""
    layout, scale = format.layout, gemv.scale_kind(format)
    if scale is None:
        return None
    zero = format.offset
    constants = {
        "SCALE": SCALES[scale],
        "OFFSET": OFFSETS.get(scale, ""),
        "BLOCK": format.blocksize,
        "PLUS_ONE": int(isinstance(zero, GroupZero) and zero.plus_one),
    }
    if isinstance(layout, WordLayout):
        order = ORDERS[layout.axis]
        if layout.order != order or not isinstance(zero, GroupZero) or zero.order != order:
            return None
        name, records = f"words_{layout.axis.lower()}", RecordLayout()  # which is not looked at
    else:
        name, records = "records", layout
    fields = ("elements", "bytes", "start", "span", "high_first")
    return {"LAYOUT": name, **constants, **{field.upper(): getattr(records, field) for field in fields}}


@dataclass(frozen=True)
class Config:
    """A launch: the kernel's name, its constants, Triton's options, and how many programs."""

    kernel: str
    constants: dict[str, Any]
    options: dict[str, Any]
    programs: int


def configure(format: BlockFormat, m: int, n: int, k: int) -> Config:
    """The launch for a weight [n, k] and m rows of x. Raises ValueError for a format that the kernel cannot read."""
    constants = described(format)
    if constants is None:
        raise ValueError(f"{STEM} does not read {format.key}")
    if m <= FEW_M:
        name, own = "few_rows", {"BLOCK_M": tile_rows(m), "BLOCK_N": 8, "BLOCK_K": 128, "HALVINGS": 7}
    else:
        name, own = "many_rows", {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32, "TILES": 32}
    # Products and sums that formats define as two roundings must not become one.
    options = {"num_warps": 8 if own["BLOCK_M"] == 16 else 4, "enable_fp_fusion": False}
    constants = {**constants, "K": k, "WIDE": n * k >= WIDE_FROM, **own}
    return Config(name, constants, options, -(-m // own["BLOCK_M"]) * -(-n // own["BLOCK_N"]))


def describe(problem: Problem) -> str:
    """The configuration in words."""
    config = configure(problem.format, problem.m, problem.n, problem.k)
    sizes = " × ".join(str(config.constants[f"BLOCK_{axis}"]) for axis in "MNK")
    return f"{config.kernel}, {config.programs} programs of {config.options['num_warps']} warps, tiles of {sizes}"


def tile_rows(m: int) -> int:
    """Rows of x that share a decoded weight, where there are few."""
    return min(16, 1 << (m - 1).bit_length())


@cache
def table(codebook: tuple[float, ...], device: torch.device) -> Tensor:
    """fp32 [16] on a device, made on first use."""
    return torch.tensor(codebook, dtype=torch.float32, device=device)


def launch(x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor) -> None:
    """The kernel for a weight that it can read; see registry.Run."""
    from . import triton_linear_kernels

    (n, k), m, parts = weight.shape, x.shape[0], weight.parts
    config = configure(weight.format, m, n, k)
    scales = parts.get("absmax", parts.get("scales"))
    if scales is not None and scales.dtype == torch.float8_e4m3fn:
        scales = scales.view(torch.uint8)  # not every GPU has the type
    tensors = (
        *(x, weight.codes, table(weight.format.codebook, weight.device), scales, parts.get("qzeros")),
        *(parts.get("nested_absmax"), parts.get("nested_quant_map")),
        *(parts.get("nested_offset", parts.get("global_scale")), bias, out),
    )
    kernel = getattr(triton_linear_kernels, config.kernel)[(config.programs,)]
    kernel(*tensors, m, n, x.stride(0), **config.constants, **config.options)


def run(x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor) -> None:
    """See registry.Run. Words and numbers at addresses that no load can take go to the fallback."""
    if not readable(weight):
        fallback.run(x, weight, bias, out)
        return
    if x.stride(1) != 1:
        x = x.contiguous()
    with torch.xpu.device(x.device) if x.device.type == "xpu" else nullcontext():  # CUDA's and ROCm's: ops.py
        launch(x, weight, bias, out)


register(
    Kernel(
        name=STEM,
        backend="triton",
        about="every 4-bit format, any M, on GPUs of NVIDIA, AMD and Intel, through Triton; fp32 arithmetic",
        supports=reason_against,
        cost=predicted_seconds,
        run=run,
        batch_invariant_to=FEW_M,
        describe=describe,
    )
)
