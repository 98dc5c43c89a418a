"""A call of the library that was made before, as the shortcut (shortcut.cpp) repeats it."""

from __future__ import annotations

import ctypes
from typing import ClassVar

from .loading import Library, WeightStruct


class Record(ctypes.Structure):
    """CpuLaunch of shortcut_calls.hpp."""

    _fields_ = (
        ("linear", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("isa", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
    )


class CpuLaunch:
    """`Library.linear` on one instruction set with a weight and x of one dtype (its number in abi.hpp).

    name: of the layer, for errors.
    """

    on_cpu: ClassVar[bool] = True

    def __init__(self, library: Library, isa: int, weight: WeightStruct, dtype: int, name: str) -> None:
        self.name = name
        self._weight = weight  # it stays where it is
        function = ctypes.cast(library.linear, ctypes.c_void_p).value
        self.record = Record(function, ctypes.addressof(weight), isa, dtype)

    def failed(self, error: int) -> None:
        """Raise for what the library returned."""
        raise MemoryError(f"no memory for the activations of {self.name} (error {error} of the library)")
