"""The short way of a call that was seen before: shortcut.cpp, where it was built and what it needs is there."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey

from . import launch
from .cpu.launch import Record as CpuRecord

TABLE = "__dlpack_c_exchange_api__"  # of functions on tensors, which torch 2.10 and newer have
DRIVER_FUNCTIONS = ("cuLaunchKernelEx", "cuCtxGetDevice", "cuStreamIsCapturing")


def connect(linear: Callable[..., Tensor], device: str = "cuda") -> Any | None:
    """The module `_shortcut`, which calls `linear` for whatever it has not been told about; None where it cannot work.

    device: the type of device that tensors of CUDA launches are on.

    It can where a C++ compiler built it and torch has DLPack's exchange table (2.10 and newer).
    """
    exchange = getattr(Tensor, TABLE, None)
    if exchange is None:
        return None
    try:
        from . import _shortcut

        sizes = (ctypes.sizeof(launch.Record), ctypes.sizeof(CpuRecord))
        _shortcut.connect(
            exchange, linear, _allocator(device), _allocator("cpu"), torch.uint8, torch.get_num_threads, *sizes,
            *_driver_functions(),
        )  # fmt: skip
    except (ImportError, TypeError):  # the latter: built from another commit's source
        return None
    return _shortcut


def _driver_functions() -> list[int]:
    """Addresses of `DRIVER_FUNCTIONS`; zeros without a CUDA driver, where nothing is launched on a GPU."""
    try:
        library = launch.driver()
        return [ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in DRIVER_FUNCTIONS]
    except (OSError, AttributeError):
        return [0] * len(DRIVER_FUNCTIONS)


def lead(operator: Any) -> None:
    """Have calls of `halfbyte::linear`'s OpOverload come to `_shortcut` before they go to the dispatcher.

    Those that were seen before and that the dispatcher would pass straight on to a kernel are served there; that is how
    it is in a thread where nothing is switched on, inside inference mode or outside. All others go on as they would.
    To be called before anything keeps the operator in a dict: its hash changes. Does nothing where torch does not show
    what is switched on, or where `connect` cannot work.
    """
    if not hasattr(Tensor, TABLE):
        return
    try:
        from . import _shortcut

        with ThreadPoolExecutor(1) as thread:  # what is switched on belongs to a thread
            plain, inference, *others = thread.submit(_key_sets, _shortcut.keys).result()
        dispatched = operator._op
        watching = (torch._C._is_torch_function_mode_enabled, torch.autograd._profiler_enabled)  # type: ignore[attr-defined]
    except (ImportError, AttributeError):  # of these names of torch's, most are its own business
        return
    if plain is None or inference is None or plain in others or inference in others:
        return
    types = (Tensor, torch.nn.Parameter)
    _shortcut.lead(dispatched, (plain, inference), watching, types, torch.is_grad_enabled, Tensor.is_neg)
    operator._op = _shortcut.operate


def trust(kind: type) -> None:
    """Take tensors of a subclass for ordinary ones: its `__torch_function__` does nothing with this operator."""
    try:
        from . import _shortcut

        _shortcut.trust(kind)
    except (ImportError, AttributeError):
        pass


def _key_sets(keys: Callable[[], bytes | None]) -> list[bytes | None]:
    """What `keys` says in a fresh thread: as it is, in inference mode, and in modes, transforms and autocast."""
    found = [keys()]
    with torch.inference_mode():
        found.append(keys())
    for key in (DispatchKey.Python, DispatchKey.FuncTorchDynamicLayerFrontMode, DispatchKey.Functionalize):
        with torch._C._IncludeDispatchKeyGuard(key):
            found.append(keys())
    for device in ("cuda", "cpu"):
        torch.set_autocast_enabled(device, True)
        found.append(keys())
        torch.set_autocast_enabled(device, False)
    return found


def _allocator(device: str) -> Callable[..., Tensor]:
    """(size, stride, dtype) -> a new tensor on the current device of a type."""
    # What torch's compiled code calls: it does not pass the dispatcher.
    found: Callable[..., Tensor] | None = getattr(torch._C._dynamo.guards, f"_empty_strided_{device}", None)
    return found or (lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device))
