"""One record per kernel. Tests, fuzzing, benchmarks, `explain` and the planner walk this list."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from ..formats import BlockFormat, PackedWeight
from .adapters_shrink import Shrink
from .cpu.launch import CpuLaunch
from .launch import Launch

# whether a row's bits must not depend on how many rows there are, up to 64; a process may give that up for speed
BATCH_INVARIANT = os.environ.get("HALFBYTE_BATCH_INVARIANT", "1") != "0"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DTYPE_NAMES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Problem:
    """One multiply to plan: out [M, N] = x [M, K] times a packed weight [N, K], transposed.

    arch: "cpu", or a CUDA architecture such as "sm_90a".
    """

    format: BlockFormat
    dtype: torch.dtype
    m: int
    n: int
    k: int
    arch: str = "cpu"


@dataclass(frozen=True, eq=False)
class Expand:
    """What adapters add to the rows of a multiply: scalings[slot] * B[slot] @ (their columns of `shrunk`).

    shrunk: fp32 [M, width], each row's A x. b: flat; a slot's B is [N, stride] from element first * N on. table: int32
    [slots, 4]: the slot's first column of `shrunk`, rank, first, stride. scalings: fp32 [slots]. index: int32 [M], each
    row's slot, -1 for none; None where all rows take slot 0. shrink: what is to write `shrunk`, if that has yet to be
    launched: the kernel does so right before its own launch.
    """

    shrunk: Tensor
    b: Tensor
    table: Tensor
    scalings: Tensor
    index: Tensor | None
    shrink: Shrink | None = None


Settings = tuple[tuple[str, int], ...]  # names and values of what tuning may choose of a kernel, in the names' order


@dataclass(frozen=True)
class Configuration:
    """One way for a kernel to share out a problem's work, and the seconds a call is predicted to take so.

    It changes no bit of a result: what decides the order of summation is no setting.
    """

    settings: Settings
    seconds: float


# x [M, K] with unit stride along K; the weight; bias [N] of x's dtype or fp32, or None; contiguous out [M, N]
Run = Callable[[Tensor, PackedWeight, Tensor | None, Tensor], None]
# as Run, with what adapters add before the one rounding; the reason why not where it does not take these adapters
RunAdapters = Callable[[Tensor, PackedWeight, Tensor | None, Expand, Tensor], str | None]


@dataclass(frozen=True)
class Kernel:
    """What a kernel is and can do.

    supports: the reason why it cannot serve a problem, or None where it can. cost: predicted seconds of a call.
    run: writes `out`; its inputs are already validated. describe: its configuration for a problem, in words. launch:
    for a CUDA kernel, the launch (with one before it that lays x out, if it needs that) with which `run` serves m rows
    of x at aligned addresses, for a CPU kernel the call of the library; None where one does not do.
    run_adapters: `run` with adapters, where the kernel folds them in; rows without an adapter have the bits of `run`.
    configurations: for a kernel that can be tuned, the legal ones for a problem, the best predicted first, which it
    takes by itself. Such a kernel's run, describe, launch and run_adapters also take the keyword `settings`.
    """

    name: str
    backend: Literal["cpu", "cuda", "triton", "torch"]
    about: str
    supports: Callable[[Problem], str | None]
    cost: Callable[[Problem], float]
    run: Run = field(repr=False)
    deterministic: bool = True
    batch_invariant_to: int = 0  # the largest M for which a row's bits do not depend on M
    describe: Callable[[Problem], str] | None = None
    launch: Callable[[PackedWeight, torch.dtype, int], Launch | CpuLaunch | None] | None = field(
        default=None, repr=False
    )
    run_adapters: RunAdapters | None = field(default=None, repr=False)
    configurations: Callable[[Problem], Sequence[Configuration]] | None = field(default=None, repr=False)

    def configured(self, settings: Settings) -> Kernel:
        """This kernel in one of its configurations. Raises ValueError for a kernel that has none to choose from."""
        if self.configurations is None:
            raise ValueError(f"kernel '{self.name}' has no configurations to choose from")
        chosen: dict[str, Any] = {
            name: partial(function, settings=settings)
            for name in ("run", "describe", "launch", "run_adapters")
            if (function := getattr(self, name)) is not None
        }
        return replace(self, **chosen)


_KERNELS: dict[str, Kernel] = {}


def register(kernel: Kernel) -> Kernel:
    """Add a kernel to the registry; its name must be new."""
    if kernel.name in _KERNELS:
        raise ValueError(f"kernel '{kernel.name}' is registered twice")
    _KERNELS[kernel.name] = kernel
    return kernel


def kernels() -> tuple[Kernel, ...]:
    """All registered kernels."""
    return tuple(_KERNELS.values())
