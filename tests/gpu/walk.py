"""The registry as test parameters: every CUDA kernel, and the formats that it serves on this device.

HALFBYTE_TEST_DEVICE=cpu walks the CPU kernels instead, which tests the tests where there is no GPU.
"""

from __future__ import annotations

import math
import os

import torch
from torch import Tensor

from halfbyte.device import arch_of
from halfbyte.formats import PackedWeight, get_format, quantize
from halfbyte.kernels import Kernel, Problem, kernels
from kernel_fuzz import keys_of, takes_strict
from kernel_samples import multiples, random_weight

DEVICE = torch.device(os.environ.get("HALFBYTE_TEST_DEVICE", "cuda"))
PRESENT = DEVICE.type == "cpu" or torch.cuda.is_available()
ARCH = arch_of(DEVICE) if PRESENT else "sm_90a"
QUANTISED = ("nf4", "fp4", "q4_0", "q4_1", "mxfp4")  # by quantisers that take no time
MANY = (16, 130)  # rows of x that a kernel takes which does not take a few
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
KERNELS = {kernel.name: kernel for kernel in kernels() if kernel.backend == DEVICE.type}
ALL = [(name, key) for name, kernel in KERNELS.items() for key in keys_of(kernel, ARCH)]
MODES = [(name, strict) for name, kernel in KERNELS.items() for strict in (False, True)[: 1 + takes_strict(kernel)]]


def some(count: int) -> list[tuple[str, str]]:
    """Up to `count` formats of each kernel, spread over those that it serves."""
    chosen = []
    for name, kernel in KERNELS.items():
        keys = keys_of(kernel, ARCH)
        step = max(1, math.ceil(len(keys) / count))
        chosen += [(name, key) for key in keys[::step]]
    return chosen


def fitting(key: str, n: int, k: int) -> tuple[int, int]:
    """(N, K) rounded up to what the format, and a kernel that takes 64 columns at a time, can hold."""
    rows, columns = multiples(key)
    unit = math.lcm(columns, 64)
    return math.ceil(n / rows) * rows, math.ceil(k / unit) * unit


def serves(kernel: Kernel, key: str, dtype: torch.dtype, m: int, n: int, k: int) -> bool:
    return kernel.supports(Problem(get_format(key), dtype, m, n, k, ARCH)) is None


def rows_of(kernel: Kernel, key: str, dtype: torch.dtype, n: int, k: int, *ms: int) -> list[int]:
    """Those of `ms` rows of x that the kernel takes; one of MANY for one that takes none of them, as it is for more."""
    served = [m for m in ms if serves(kernel, key, dtype, m, n, k)]
    return served or [m for m in MANY if serves(kernel, key, dtype, m, n, k)][:1]


def weight_of(key: str, n: int, k: int, seed: int = 0) -> PackedWeight:
    """A quantised normal matrix where there is a quantiser, else random bytes; on the device."""
    if get_format(key).name in QUANTISED:
        return quantize(torch.randn(n, k, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE), key)
    return random_weight(key, n, k, torch.Generator().manual_seed(seed)).to(DEVICE)


def activations(m: int, k: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    """x [M, K] with a column that is 100 times larger, as in real models; on the device."""
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(seed))
    x[:, k // 3] *= 100
    return x.to(DEVICE, dtype)


def apply(kernel: Kernel, x: Tensor, weight: PackedWeight, bias: Tensor | None = None, strict: bool = False) -> Tensor:
    """The kernel's answer, written over NaN."""
    out = torch.full((x.shape[0], weight.shape[0]), torch.nan, dtype=x.dtype, device=x.device)
    kernel.run(x, weight, bias, out, **({"strict": True} if strict else {}))
    return out
