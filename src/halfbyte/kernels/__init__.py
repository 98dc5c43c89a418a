"""Kernels and their registry. Importing this package registers every kernel; none compiles or allocates at import."""

from . import (  # noqa: F401 (registers)
    codebook_gemm,
    codebook_gemv,
    codebook_mma,
    codebook_prefill,
    codebook_wgmma,
    cpu_linear,
    fallback,
    triton_linear,
)
from .registry import Kernel, Problem, kernels

__all__ = ["Kernel", "Problem", "kernels"]
