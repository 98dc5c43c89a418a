"""What the kernels for codebook weights are given, whatever they multiply with: cuda/codebook_types.cuh in Python.

The table of a codebook, the scales of a weight, maps for bulk copies, and which weights these can describe.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from ..formats import BlockFormat, PackedWeight, RecordLayout
from ..formats.codecs import AbsmaxScale, E8M0Scale, NestedScale
from . import nvrtc

UNIT, TEAM = 64, 4  # weights of a row that are multiplied at once, and such units in a stage
BULK_COPY = ("sm_90a", "sm_100")  # bulk tensor copies
ALIGNMENT = 16  # bytes, of the codes, of x and of its rows
FEW_ROWS = 2048  # of W: below, fp16 outputs are so few that chance could carry the table's rounding beyond the contract
LARGEST = 2.4  # standard deviations, of 64 normal weights: it says how often a block of 64 uses which entry
MEAN_COUNTS = 8  # times as much as the spread: activations with a mean carry a mean error into every output
X_TYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}


class TensorMap(ctypes.Structure):
    _fields_ = (("opaque", ctypes.c_uint64 * 16),)


class Codebook(ctypes.Structure):
    _fields_ = (("high", ctypes.c_uint16 * 16), ("low", ctypes.c_uint16 * 16), ("inverse", ctypes.c_float))


class Scales(ctypes.Structure):
    _fields_ = (
        ("values", ctypes.c_void_p),
        ("outer", ctypes.c_void_p),
        ("map", ctypes.c_void_p),
        ("offset", ctypes.c_void_p),
        ("shift", ctypes.c_int),
        ("aligned", ctypes.c_int),
    )


@cache
def device_of(index: int) -> tuple[str, int]:
    """Architecture and number of multiprocessors of a CUDA device."""
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    suffix = "a" if capability == (9, 0) else ""
    return f"sm_{capability[0]}{capability[1]}{suffix}", properties.multi_processor_count


def scale_kind(format: BlockFormat) -> int | None:
    """The kernel's SCALE_KIND of a format, or None where it has none."""
    kinds = {AbsmaxScale: 0, NestedScale: 1, E8M0Scale: 2}
    return None if format.offset is not None else kinds.get(type(format.scale))


def known_kind(format: BlockFormat) -> int:
    kind = scale_kind(format)
    if kind is None:
        raise ValueError(f"the codebook kernels do not read the scales of {format.key}")
    return kind


def layout_of(format: BlockFormat) -> RecordLayout:
    if not isinstance(format.layout, RecordLayout):
        raise ValueError(f"the codebook kernels do not read the codes of {format.key}")
    return format.layout


def finer(format: BlockFormat, dtype: torch.dtype, n: int, strict: bool) -> bool:
    """Whether the table is kept to 22 bits: one of 11 is chosen for blocks of up to 64, see `table_factor`."""
    coarse = dtype == torch.float16 and (n < FEW_ROWS or format.blocksize > UNIT) and _rounds(format.codebook)
    return strict or dtype == torch.float32 or coarse


def copies_scales(weight: PackedWeight, arch: str) -> bool:
    """Whether bulk copies can bring the scales: fp32, one for each block, rows and address in 16 bytes."""
    return copies_fp32(weight.format, weight.shape[1], arch) and weight.parts["absmax"].data_ptr() % 16 == 0


def copies_fp32(format: BlockFormat, k: int, arch: str) -> bool:
    blocksize = format.blocksize
    return arch in BULK_COPY and scale_kind(format) == 0 and blocksize <= UNIT and k % (4 * blocksize) == 0


@cache
def table_factor(codebook: tuple[float, ...]) -> float:
    """The constant by which a codebook is multiplied before it is rounded to fp16, chosen so that it rounds well.

    1 where all entries are exact already; else the one of 65536 factors between 1 and 2 (a power of two more changes
    nothing) for which the errors of a normal weight's entries, in blocks of 64, are least: their mean square, and more
    so the square of their mean. Its inverse goes into the fp32 scales.
    """
    values = torch.tensor(codebook, dtype=torch.float64)
    if bool((values.half().double() == values).all()):
        return 1.0
    ordered = (values / values.abs().max()).sort()
    between = (ordered.values[1:] + ordered.values[:-1]) / 2
    below = torch.cat([torch.zeros(1), torch.special.ndtr(LARGEST * between), torch.ones(1)])
    often = torch.empty_like(values).index_copy_(0, ordered.indices, below.diff())
    factors = torch.linspace(1, 2, 65537, dtype=torch.float64)[:-1] / values.abs().max()
    factors = factors.float().double().unsqueeze(1)
    errors = (values * factors).half().double() / factors - values
    return float(factors[(errors.square() @ often + MEAN_COUNTS * (errors @ often).square()).argmin(), 0])


@cache
def _rounds(codebook: tuple[float, ...]) -> bool:
    """Whether the scaled table in fp16 is off by more than fp32's own rounding."""
    scaled = torch.tensor(codebook, dtype=torch.float64) * table_factor(codebook)
    return bool(((scaled.half().double() - scaled).abs() > scaled.abs() * 2**-22).any())


@cache
def table_of(codebook: tuple[float, ...], terms: int) -> Codebook:
    """The table as the kernel takes it: fp16 bits, and with two terms what they miss, 2^11 times larger."""
    factor = 1.0 if terms == 2 else table_factor(codebook)
    scaled = torch.tensor(codebook, dtype=torch.float64) * factor
    high = scaled.half()
    low = ((scaled - high.double()) * 2048).half()
    bits = [[value & 0xFFFF for value in part.view(torch.int16).tolist()] for part in (high, low)]
    return Codebook((ctypes.c_uint16 * 16)(*bits[0]), (ctypes.c_uint16 * 16)(*bits[1]), 1 / factor)


def scales_of(weight: PackedWeight) -> Scales:
    format, parts = weight.format, weight.parts
    kind = known_kind(format)
    values = parts["scales" if kind == 2 else "absmax"]
    block = min(format.blocksize, UNIT)
    whole_stages = weight.shape[1] % (TEAM * UNIT) == 0
    aligned = whole_stages and (kind == 0 or (format.blocksize == block and values.data_ptr() % 4 == 0))
    result = Scales(values=values.data_ptr(), shift=(format.blocksize // block).bit_length() - 1, aligned=aligned)
    if kind == 1:
        result.outer = parts["nested_absmax"].data_ptr()
        result.map = parts["nested_quant_map"].data_ptr()
        result.offset = parts["nested_offset"].data_ptr()
    return result


def tensor_map(matrix: Tensor, rows: int, columns: int, box_rows: int, box_columns: int) -> TensorMap:
    """A map for bulk copies of boxes 16, 32 or 128 bytes wide from a uint8 or fp32 matrix; chunks swizzled by row."""
    from cuda.bindings import driver

    types, swizzles = driver.CUtensorMapDataType, driver.CUtensorMapSwizzle
    size = matrix.element_size()
    swizzle = {
        16: swizzles.CU_TENSOR_MAP_SWIZZLE_NONE,
        32: swizzles.CU_TENSOR_MAP_SWIZZLE_32B,
        128: swizzles.CU_TENSOR_MAP_SWIZZLE_128B,
    }[box_columns * size]
    result = nvrtc.check(
        driver.cuTensorMapEncodeTiled(
            types.CU_TENSOR_MAP_DATA_TYPE_UINT8 if size == 1 else types.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
            2,
            matrix.data_ptr(),
            [driver.cuuint64_t(columns), driver.cuuint64_t(rows)],
            [driver.cuuint64_t(columns * size)],
            [driver.cuuint32_t(box_columns), driver.cuuint32_t(box_rows)],
            [driver.cuuint32_t(1), driver.cuuint32_t(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return TensorMap.from_buffer_copy(ctypes.string_at(result.getPtr(), ctypes.sizeof(TensorMap)))
