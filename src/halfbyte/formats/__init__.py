"""What a 4-bit weight is. Nothing here touches a GPU or a file."""

from .block import BlockFormat, PackedWeight
from .layouts import RecordLayout, WordLayout
from .quantize import quantize
from .table import FAMILIES, get_format

__all__ = ["FAMILIES", "BlockFormat", "PackedWeight", "RecordLayout", "WordLayout", "get_format", "quantize"]
