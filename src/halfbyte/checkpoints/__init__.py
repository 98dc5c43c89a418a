"""4-bit checkpoints as files: read into PackedWeight and written back."""

from .bitsandbytes import pack_state, unpack_state
from .errors import CheckpointError

__all__ = ["CheckpointError", "pack_state", "unpack_state"]
