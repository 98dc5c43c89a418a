"""The short way of a call that was seen before: shortcut.cpp, where it was built and what it needs is there."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import launch

DRIVER_FUNCTIONS = ("cuLaunchKernelEx", "cuCtxGetDevice", "cuStreamIsCapturing")


def connect(linear: Callable[..., Tensor], device: str = "cuda") -> Any | None:
    """The module `_shortcut`, which calls `linear` for whatever it has not been told about; None where it cannot work.

    device: the type of device that tensors are on.

    It can where a C++ compiler built it, torch has DLPack's exchange table (2.10 and newer) and there is a CUDA driver.
    """
    exchange = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if exchange is None:
        return None
    try:
        from . import _shortcut

        library = launch.driver()
        functions = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in DRIVER_FUNCTIONS]
        _shortcut.connect(exchange, linear, _allocator(device), *functions)
    except (ImportError, OSError, AttributeError):
        return None
    return _shortcut


def _allocator(device: str) -> Callable[..., Tensor]:
    """(size, stride, dtype) -> a new tensor on the current device of a type."""
    # What torch's compiled code calls: it does not pass the dispatcher.
    found: Callable[..., Tensor] | None = getattr(torch._C._dynamo.guards, f"_empty_strided_{device}", None)
    return found or (lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device))
