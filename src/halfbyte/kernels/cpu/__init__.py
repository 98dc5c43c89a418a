"""The CPU kernels' shared library (C++ beside this file, see docs/cpu.md) and how Python loads it."""

from .loading import Library, library

__all__ = ["Library", "library"]
