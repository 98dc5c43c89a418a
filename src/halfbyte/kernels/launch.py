"""How CUDA kernels are launched: what depends on the weight is made once, a call fills in the rest.

A `Launch` is a loaded kernel with its grid and its arguments, bound to a weight; `Launcher` keeps a weight's launches
with it, and knows whether the weight has stayed as it was. Nothing is allocated on the device, so calls on any number
of streams, in graphs or outside, share nothing but the weight. `shortcut` repeats launches without Python.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..formats import PackedWeight
from . import nvrtc

LAUNCHES = 4096  # kept for weights that are made anew for each call; the least used go first
EARLY_START = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class _Attribute(ctypes.Structure):  # CUlaunchAttribute
    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):  # CUlaunchConfig
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    )


CALL_FIELDS = ("x", "bias", "out", "x_stride", "m", "bias_is_fp32")


class Record(ctypes.Structure):
    """A launch as shortcut_calls.hpp reads it."""

    _fields_ = (
        ("config", _Config),
        ("function", ctypes.c_void_p),
        ("parameters", ctypes.c_void_p),
        ("image", ctypes.c_void_p),
        ("image_bytes", ctypes.c_longlong),
        ("count", ctypes.c_int),
        ("call_bytes", ctypes.c_int),
        ("alignment", ctypes.c_int),
        *((name, ctypes.c_int) for name in CALL_FIELDS),
    )


@cache
def driver() -> Any:
    """The CUDA driver's own library; nvrtc.load has found it by the time that something can be launched."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


class Launch:
    """A loaded kernel, its grid of `blocks` of `threads`, and its arguments; calling it launches it.

    kernel: what `nvrtc.load` returned. arguments: ctypes structures in the kernel's order; the last has the fields
    `CALL_FIELDS` (void* x, bias, out; long long x_stride; int m, bias_is_fp32), which each call sets in a copy of its
    own or under a lock. early: it may start before the kernel in front of it has ended (griddepcontrol inside), where a
    call allows that. alignment: bytes that x's address and the stride of its rows are multiples of. rows: the most rows
    of x. name: for errors.
    """

    on_cpu: ClassVar[bool] = False

    def __init__(
        self,
        kernel: Any,
        arguments: Sequence[ctypes.Structure],
        blocks: int,
        threads: int,
        shared_bytes: int,
        early: bool,
        alignment: int,
        rows: int,
        name: str,
    ) -> None:
        self.rows, self.name = rows, name
        self._lock = threading.Lock()
        self._arguments = tuple(arguments)  # they stay where they are
        self._call: Any = arguments[-1]
        self._pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(each) for each in arguments))
        self._attribute = _Attribute(EARLY_START, 0, (ctypes.c_int * 16)(1))
        config = _Config((blocks, 1, 1), (threads, 1, 1), shared_bytes)
        config.attributes = ctypes.addressof(self._attribute) if early else None
        offsets = (getattr(type(self._call), name).offset for name in CALL_FIELDS)
        pointers, count = ctypes.addressof(self._pointers), len(arguments)
        self.record = Record(
            config, nvrtc.function(kernel), pointers, None, 0, count, ctypes.sizeof(self._call), alignment, *offsets
        )
        self._early = early
        self._image: Launch | None = None

    def reads_image(self, image: Launch, size: int) -> None:
        """Say that x is not read by this kernel but by that of `image`, which writes `size` bytes for this one.

        For `shortcut`, which then launches both; `__call__` takes the image in x's place.
        """
        self._image = image  # its record stays where it is
        self.record.image_bytes, self.record.image = size, ctypes.addressof(image.record)

    def __call__(
        self,
        x: Tensor,
        bias: Tensor | None,
        out: Tensor,
        stream: int,
        early: bool = False,
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        """x [m, k] with unit stride along k, bias [n] of x's dtype or fp32, contiguous out [m, n]; on the weight's GPU.

        stream: the raw stream to launch on. early: nothing that the kernel before this one writes is read by it before
        it waits for that one: the weight has stayed as it was. fields: others of the last argument that a call brings;
        they stay, so that such a launch is no one's who does not. Raises RuntimeError where the driver refuses.
        """
        self.start(stream, early=early, **call_fields(x, bias, out), **(fields or {}))

    def start(self, stream: int, blocks: int | None = None, early: bool = False, **fields: Any) -> None:
        """Launch it with these fields of its last argument, of `CALL_FIELDS` and others; those not named stay.

        blocks: other than what it was made with, and so for good. stream, early: see `__call__`. For kernels that hand
        memory on to each other, by address. Raises RuntimeError where the driver refuses.
        """
        config = self.record.config
        with self._lock:  # the driver copies the arguments before it returns
            for name, value in fields.items():
                setattr(self._call, name, value)
            if blocks is not None:
                config.grid[0] = blocks
            config.stream, config.count = stream, int(early and self._early)
            error = driver().cuLaunchKernelEx(
                ctypes.byref(config), ctypes.c_void_p(self.record.function), self._pointers, None
            )
        if error:
            self.failed(error)

    def failed(self, error: int) -> None:
        """Raise for what the driver returned."""
        from cuda.bindings.driver import CUresult

        raise RuntimeError(f"{self.name}: launch failed with {CUresult(error).name}")


def call_fields(x: Tensor, bias: Tensor | None, out: Tensor) -> dict[str, Any]:
    """The `CALL_FIELDS` of a kernel's argument; see `Launch`."""
    fields = {"x": x.data_ptr(), "out": out.data_ptr(), "m": x.shape[0], "x_stride": x.stride(0)}
    if bias is None:
        return fields | {"bias": None, "bias_is_fp32": 0}
    return fields | {"bias": bias.data_ptr(), "bias_is_fp32": int(bias.dtype == torch.float32)}


def part(matrix: Tensor, rows: slice) -> Tensor:
    """Some rows of a matrix; itself where they are all of them, as a view costs a microsecond."""
    return matrix if rows.start == 0 and rows.stop >= matrix.shape[0] else matrix[rows]


def readable(weight: PackedWeight) -> bool:
    """Whether every part lies at a multiple of its element's size; bytes may lie anywhere."""
    return all(part.data_ptr() % part.element_size() == 0 for part in weight.parts.values())


# a weight, x's dtype, at most so many rows of x, and what else distinguishes a kernel's launches
Bind = Callable[..., Launch]


class Launcher:
    """A kernel's launches for one weight, kept with it, and whether the weight's bytes have stayed as they were."""

    _lock = threading.Lock()
    _shared: ClassVar[OrderedDict[tuple[Any, ...], Launch]] = OrderedDict()

    def __init__(self, stem: str, weight: PackedWeight) -> None:
        self.parts = tuple(weight.parts.values())
        self.addresses = [part.data_ptr() for part in self.parts]
        self.index = weight.device.index
        self.readable = readable(weight)
        described = (weight.format.key, weight.shape, *(part.dtype for part in self.parts))
        self._key = (stem, *described, *self.addresses, self.index)
        self._launches: dict[tuple[Any, ...], Launch] = {}
        self._versions: list[int] | None = None
        self._streams: set[int] = set()

    @classmethod
    def of(cls, stem: str, weight: PackedWeight) -> Launcher:
        """The weight's launcher; a new one where its tensors have been given other memory."""
        known: Launcher | None = weight.__dict__.get(stem)
        if known is None or [part.data_ptr() for part in known.parts] != known.addresses:
            known = cls(stem, weight)
            weight.__dict__[stem] = known
        return known

    def get(self, bind: Bind, weight: PackedWeight, dtype: torch.dtype, m: int, variant: object = None) -> Launch:
        """The launch for m rows of x: bind(weight, dtype, m, variant) the first time, for a class of m (1, 2, 3-4 …).

        It is shared by all weights on the same memory. Compiles on first use, which graph capture does not allow.
        """
        key = (dtype, (m - 1).bit_length(), variant)
        found = self._launches.get(key)
        if found is None:
            found = self._launches[key] = self._share(bind, weight, (*self._key, *key), m)
        return found

    def _share(self, bind: Bind, weight: PackedWeight, key: tuple[Any, ...], m: int) -> Launch:
        shared = Launcher._shared
        with self._lock:
            found = shared.get(key)
            if found is not None:
                shared.move_to_end(key)
                return found
        dtype, _, variant = key[-3:]
        found = bind(weight, dtype, m, variant)
        with self._lock:
            shared[key] = found
            while len(shared) > LAUNCHES:
                shared.popitem(last=False)
        return found

    def stream(self) -> int:
        """The raw current stream of the weight's GPU."""
        return int(torch._C._cuda_getCurrentRawStream(self.index))

    def settled(self, stream: int) -> bool:
        """Whether no kernel right before this launch can be writing the weight, so that it may be read meanwhile.

        So it is if the weight has not changed since a launch on the same stream. Inside graph capture a launch on any
        stream will do: a kernel of the graph that writes the weight would have changed its version while captured.
        (Writing through `.data` changes no version: whoever does so right before a launch waits for it first.)
        """
        try:
            versions = [part._version for part in self.parts]
        except RuntimeError:  # inference tensors keep no version
            return False
        if versions == self._versions:
            if stream in self._streams or torch.cuda.is_current_stream_capturing():
                return True
            self._streams.add(stream)
            return False
        self._versions, self._streams = versions, {stream}
        return False
