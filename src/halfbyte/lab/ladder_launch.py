"""Launches the ladder's kernels on a CUDA device."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from ..device import arch_of
from ..kernels import nvrtc
from .ladder_rungs import BLOCK, Rung, source
from .ladder_weights import PlanarQ4
from .measure import CALL

WIDEST = 16  # bytes of a load: what addresses and rows must be multiples of


def reason_against(rung: Rung, k: int, device: torch.device) -> str | None:
    """Why a rung cannot take rows of K weights on a device, or None."""
    if k % BLOCK:
        return f"{rung.stem} needs K in multiples of {BLOCK}, got K = {k}"
    limit = _shared_limit(device)
    if rung.shared_bytes(k) > limit:
        return f"{rung.stem} keeps x in shared memory, {limit} bytes here; K = {k} needs {rung.shared_bytes(k)}"
    return None


def bind(rung: Rung, weight: PlanarQ4 | Tensor, x: Tensor, y: Tensor) -> CALL:
    """A call that computes y = W x with a rung's kernel on the current stream.

    weight: PlanarQ4 for a Q4 rung, fp16 [N, K] for the baseline. x: fp16 [K]. y: fp16 [N], written. All are contiguous,
    on one CUDA device and begin at 16-byte boundaries. The kernel is compiled and loaded here, so not in graph capture.

    Raises ValueError or TypeError for other operands, and what `nvrtc.load` raises.
    """
    from cuda.bindings import driver

    n, k = weight.shape
    matrices = (weight.codes, weight.scales) if isinstance(weight, PlanarQ4) else (weight,)
    _check(rung, weight, x, y)
    kernel, blocks = _load(rung, n, k, x.device)
    numbers = (ctypes.c_int(k), ctypes.c_int(n)) if rung.rows else (ctypes.c_int(k),)
    arguments = [*(ctypes.c_void_p(tensor.data_ptr()) for tensor in (*matrices, x, y)), *numbers]
    pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
    launch = driver.CUlaunchConfig()
    launch.gridDimX, launch.gridDimY, launch.gridDimZ = blocks, 1, 1
    launch.blockDimX, launch.blockDimY, launch.blockDimZ = 32 * rung.warps, 1, 1
    launch.sharedMemBytes = rung.shared_bytes(k)
    held = (arguments, matrices, x, y)  # what the pointers point to lives as long as the call

    def call() -> object:
        launch.hStream = torch._C._cuda_getCurrentRawStream(x.device.index)
        (error,) = driver.cuLaunchKernelEx(launch, kernel, ctypes.addressof(pointers), 0)
        if error:
            raise RuntimeError(f"{rung.stem}: launch failed with {error.name} for N = {n}, K = {k}")
        return held

    return call


def _check(rung: Rung, weight: PlanarQ4 | Tensor, x: Tensor, y: Tensor) -> None:
    if rung.q4 != isinstance(weight, PlanarQ4):
        raise TypeError(
            f"{rung.stem} takes {'planar Q4' if rung.q4 else 'an fp16 matrix'}, got {type(weight).__name__}"
        )
    n, k = weight.shape
    parts = {"codes": weight.codes, "scales": weight.scales} if isinstance(weight, PlanarQ4) else {"weight": weight}
    shapes = {"codes": (n, k // 2), "scales": (n, k // BLOCK), "weight": (n, k), "x": (k,), "y": (n,)}
    for name, tensor in {**parts, "x": x, "y": y}.items():
        dtype = torch.uint8 if name == "codes" else torch.float16
        if tensor.dtype != dtype or tuple(tensor.shape) != shapes[name]:
            wanted, got = f"{dtype} {list(shapes[name])}", f"{tensor.dtype} {list(tensor.shape)}"
            raise ValueError(f"{rung.stem}: {name} must be {wanted}, got {got}")
    for name, tensor in {**parts, "x": x, "y": y}.items():
        if tensor.device.type != "cuda" or tensor.device != x.device:
            raise ValueError(f"{rung.stem}: {name} is on {tensor.device}; all operands must be on one CUDA device")
        if not tensor.is_contiguous() or tensor.data_ptr() % WIDEST:
            raise ValueError(f"{rung.stem}: {name} must be contiguous and begin at a {WIDEST}-byte boundary; clone it")
    if reason := reason_against(rung, k, x.device):
        raise ValueError(reason)


def _load(rung: Rung, n: int, k: int, device: torch.device) -> tuple[Any, int]:
    """The kernel, and how many blocks of threads to start: one a row, or as many as fit the card at once."""
    from cuda.bindings import driver

    room = _shared_limit(device) if rung.rows else 0
    kernel = nvrtc.load(rung.stem, arch_of(device), rung.macros, device.index, room, source(rung.stem))
    if not rung.rows:
        return kernel, n
    function = nvrtc.check(driver.cuKernelGetFunction(kernel))
    fitting = nvrtc.check(
        driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, 32 * rung.warps, rung.shared_bytes(k))
    )
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return kernel, min(max(1, fitting) * multiprocessors, -(-n // (rung.warps * rung.rows)))


def _shared_limit(device: torch.device) -> int:
    """Bytes of shared memory that a block of threads may have."""
    from cuda.bindings import driver

    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    return int(nvrtc.check(driver.cuDeviceGetAttribute(attribute, nvrtc.check(driver.cuDeviceGet(device.index)))))
