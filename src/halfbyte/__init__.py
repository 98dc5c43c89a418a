"""Language-model layers straight from their 4-bit weights: exact, and at the speed that memory allows."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .adapters import Adapter, AdapterPool, linear_with_adapters, merge_exact
    from .checkpoints import open_checkpoint
    from .formats import BlockFormat, PackedWeight, get_format, quantize
    from .integrations.optimize import optimize, restore
    from .integrations.transformers import HalfbyteConfig, load
    from .nn import QuantLinear, prepare
    from .ops import linear

__version__ = "0.1.0"

# Resolved on first use: importing halfbyte loads neither transformers nor a compiled library.
_HOMES = {
    "Adapter": "adapters",
    "AdapterPool": "adapters",
    "BlockFormat": "formats",
    "HalfbyteConfig": "integrations.transformers",
    "PackedWeight": "formats",
    "QuantLinear": "nn",
    "get_format": "formats",
    "linear": "ops",
    "linear_with_adapters": "adapters",
    "load": "integrations.transformers",
    "merge_exact": "adapters",
    "open_checkpoint": "checkpoints",
    "optimize": "integrations.optimize",
    "prepare": "nn",
    "quantize": "formats",
    "restore": "integrations.optimize",
}

__all__ = [
    "Adapter",
    "AdapterPool",
    "BlockFormat",
    "HalfbyteConfig",
    "PackedWeight",
    "QuantLinear",
    "get_format",
    "linear",
    "linear_with_adapters",
    "load",
    "merge_exact",
    "open_checkpoint",
    "optimize",
    "prepare",
    "quantize",
    "restore",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'halfbyte' has no attribute '{name}'")
    value = globals()[name] = getattr(import_module(f".{_HOMES[name]}", __name__), name)  # the next look-up finds it
    return value


if os.environ.get("HALFBYTE_BITSANDBYTES") == "1" or os.environ.get("HALFBYTE_STATUS") == "1":
    import_module(".integrations.bitsandbytes", __name__).follow_environment()
