"""A CUDA device that is not there: the driver's functions that a launch calls, in Python, on memory of the CPU.

All of the path from the operator to the driver is the real one, the launchers of codebook_mma and codebook_wgmma
included; only compiling and the driver are pretended. "Launching" multiplies by what the weight decodes to, with what
the launch says of x; codebook_wgmma's image of x is x.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from halfbyte import ops
from halfbyte.formats import PackedWeight
from halfbyte.kernels import codebook, codebook_mma, codebook_wgmma, launch, nvrtc, shortcut
from halfbyte.kernels.launch import Launcher

NAME = b"dlpack_exchange_api"  # of the capsule; kept, as the capsule does not copy it
DTYPES = list(codebook.X_TYPES)
KERNELS = {codebook_mma.STEM: 1, codebook_wgmma.STEM: 2, codebook_wgmma.IMAGE_STEM: 3}  # number: 8 * this + x's dtype


class PretendedGpu:
    """One device, one stream at a time. `launches`, `images`: what was launched. `errors`: next results, last first."""

    def __init__(self) -> None:
        self.weights: dict[tuple[int, int, int], PackedWeight] = {}  # by addresses of codes and scales, and N
        self.launches: list[SimpleNamespace] = []
        self.images: list[SimpleNamespace] = []
        self.errors: list[int] = []
        self.table: object = None
        self.current_device, self.stream, self.capturing = 0, 0, False
        pointer, integer = ctypes.c_void_p, ctypes.c_int
        self.cuLaunchKernelEx = ctypes.CFUNCTYPE(integer, pointer, pointer, pointer, pointer)(self._launch)
        self.cuCtxGetDevice = ctypes.CFUNCTYPE(integer, ctypes.POINTER(integer))(self._device)
        self.cuStreamIsCapturing = ctypes.CFUNCTYPE(integer, pointer, ctypes.POINTER(integer))(self._capturing)

        self.current_stream = ctypes.CFUNCTYPE(integer, integer, integer, ctypes.POINTER(pointer))(self._stream)

    def _stream(self, device_type: int, device: int, out: Any) -> int:
        out[0] = self.stream
        return 0

    def _launch(self, config: int, function: int, parameters: int, extra: int) -> int:
        if self.errors and (error := self.errors.pop()):
            return error
        pointers = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))
        kernel, dtype = function // 8, DTYPES[function % 8]
        launched = launch._Config.from_address(config)
        note = SimpleNamespace(early=bool(launched.count), stream=launched.stream or 0, blocks=launched.grid[0])
        if kernel == 3:
            call = codebook_wgmma._Problem.from_address(pointers[0] or 0)
            _matrix(call.out, call.m, call.k, call.k, dtype).copy_(
                _matrix(call.x, call.m, call.k, call.x_stride, dtype)
            )
            self.images.append(note)
            return 0
        scales = codebook.Scales.from_address(pointers[2] or 0)
        if kernel == 2:
            call = codebook_wgmma._Problem.from_address(pointers[3] or 0)
            weight, stride = self.weights[0, scales.values, call.n], call.k
        else:
            call = codebook_mma._Problem.from_address(pointers[3] or 0)
            weight, stride = self.weights[call.codes, scales.values, call.n], call.x_stride
        x = _matrix(call.x, call.m, call.k, stride, dtype)
        y = x.double() @ weight.dequantize(torch.float64).t()
        if call.bias:
            y += _matrix(call.bias, 1, call.n, call.n, torch.float32 if call.bias_is_fp32 else dtype).double()
        _matrix(call.out, call.m, call.n, call.n, dtype).copy_(y)
        note.m = call.m
        self.launches.append(note)
        return 0

    def _device(self, out: Any) -> int:
        out[0] = self.current_device
        return 0

    def _capturing(self, stream: int, out: Any) -> int:
        out[0] = self.capturing
        return 0


def _matrix(address: int, rows: int, columns: int, stride: int, dtype: torch.dtype) -> Tensor:
    elements = (rows - 1) * stride + columns
    buffer = (ctypes.c_char * (elements * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype).as_strided((rows, columns), (stride, 1))


def use(gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have tensors of the CPU served by codebook_mma on `gpu`."""
    ops._kernel.cache_clear()
    monkeypatch.setattr(launch, "driver", lambda: gpu)
    monkeypatch.setattr(Launcher, "_shared", OrderedDict())
    monkeypatch.setattr(ops, "arch_of", lambda device: "sm_90a")
    monkeypatch.setattr(ops, "_weights", ops.Memo())
    monkeypatch.setattr(codebook_mma, "reason_against", lambda problem: None)
    monkeypatch.setattr(codebook, "device_of", lambda index: ("sm_90a", 132))
    monkeypatch.setattr(codebook, "tensor_map", lambda *arguments: codebook.TensorMap())
    monkeypatch.setattr(nvrtc, "load", lambda stem, arch, macros, *rest: 8 * KERNELS[stem] + macros["X_TYPE"])
    monkeypatch.setattr(nvrtc, "function", lambda kernel: kernel)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: gpu.stream, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: gpu.capturing)
    known = codebook_mma._arguments

    def arguments(weight: PackedWeight, *rest: Any) -> Any:
        made = known(weight, *rest)
        _, _, scales, problem = made
        gpu.weights[problem.codes, scales.values, problem.n] = weight
        return made

    monkeypatch.setattr(codebook_mma, "_arguments", arguments)
    bound = codebook_wgmma.launch

    def launch_wgmma(weight: PackedWeight, *rest: Any) -> launch.Launch:
        gpu.weights[0, codebook.scales_of(weight).values, weight.shape[0]] = weight
        return bound(weight, *rest)

    monkeypatch.setattr(codebook_wgmma, "launch", launch_wgmma)


class _Exchange(ctypes.Structure):
    """DLPackExchangeAPI."""

    _fields_ = (
        ("version", ctypes.c_uint32 * 2),
        ("others", ctypes.c_void_p * 4),
        ("read", ctypes.c_void_p),
        ("current_stream", ctypes.c_void_p),
    )


def _exchange(gpu: PretendedGpu) -> tuple[object, _Exchange]:
    """torch's exchange table with the streams of `gpu`, in a capsule; and what must live as long as that."""
    python = ctypes.pythonapi
    python.PyCapsule_GetPointer.restype, python.PyCapsule_New.restype = ctypes.c_void_p, ctypes.py_object
    own = python.PyCapsule_GetPointer(ctypes.py_object(Tensor.__dlpack_c_exchange_api__), NAME)  # type: ignore[attr-defined]
    table = _Exchange.from_buffer_copy(ctypes.string_at(own, ctypes.sizeof(_Exchange)))
    table.current_stream = ctypes.cast(gpu.current_stream, ctypes.c_void_p).value
    return python.PyCapsule_New(ctypes.c_void_p(ctypes.addressof(table)), ctypes.c_char_p(NAME), None), table


@contextmanager
def connected(gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any | None]:
    """The shortcut, on the pretended driver, and where ops looks for it; None where it was not built.

    Afterwards all patches are undone, and the shortcut is on what is really there.
    """
    if hasattr(Tensor, "__dlpack_c_exchange_api__"):
        capsule, gpu.table = _exchange(gpu)
        monkeypatch.setattr(Tensor, "__dlpack_c_exchange_api__", capsule)
    module = shortcut.connect(ops.linear_on_tensors, "cpu")
    if module is not None:
        monkeypatch.setattr(ops, "_shortcut", module)
        monkeypatch.setattr(ops, "_linear", module.linear)
    try:
        yield module
    finally:
        monkeypatch.undo()
        ops._kernel.cache_clear()
        shortcut.connect(ops.linear_on_tensors)
