"""The Triton kernels of triton_linear.py. Importing this needs triton; its interpreter can run them without a GPU.

Formats differ in `code_at` (where a code is) and `scale_at`, `offset_at` (a block's numbers): the operations of
formats/layouts.py and formats/codecs.py one by one, each a single fp32 rounding, so they must be compiled without
contraction into fused multiply-adds. All take tensors of rows and columns of W that broadcast against each other.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def widen(values):
    """fp32 of fp32, fp16 or bf16; bf16 by its bits, as the interpreter loses some otherwise."""
    if values.dtype == tl.bfloat16:
        return (values.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return values.to(tl.float32)


@triton.jit
def narrow(values, dtype: tl.constexpr):
    """fp32 rounded to the nearest fp16 or bf16, ties to even; bf16 by its bits, as the interpreter truncates."""
    if dtype == tl.bfloat16:
        bits = values.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        nearest = tl.where(values == values, nearest, 0x7FC0)
        return nearest.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return values.to(dtype)


@triton.jit
def byte_at(codes, place, inside):
    return tl.load(codes + place, mask=inside, other=0).to(tl.int32)


@triton.jit
def half_at(codes, place, inside):
    """fp32 of the little-endian fp16 that begins at a byte, which may be odd."""
    bits = byte_at(codes, place, inside) | (byte_at(codes, place + 1, inside) << 8)
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def power_of_two(exponent):
    """E8M0: 2^(exponent - 127), NaN for 255."""
    bits = tl.where(exponent == 0, 0x400000, exponent << 23)
    return tl.where(exponent == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def e4m3(byte):
    """fp8 E4M3 without infinities; NaN for 0x7F and 0xFF."""
    magnitude = byte & 0x7F
    small = magnitude.to(tl.float32) * 0.001953125
    value = tl.where(magnitude < 8, small, ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True))
    value = tl.where(magnitude == 0x7F, float("nan"), value)
    return tl.where(byte >= 0x80, -value, value)


@triton.jit
def nibble_of_word(words, place, position, inside, AWQ: tl.constexpr):
    """Nibble of weight `position` of a word: in order, or in AWQ's 0, 4, 1, 5, 2, 6, 3, 7."""
    nibble = ((position >> 1) | ((position & 1) << 2)) if AWQ else position
    return (tl.load(words + place, mask=inside, other=0) >> (4 * nibble)) & 0xF


@triton.jit
def code_at(
    codes, rows, columns, inside, n, k, LAYOUT: tl.constexpr,
    ELEMENTS: tl.constexpr, BYTES: tl.constexpr, START: tl.constexpr, SPAN: tl.constexpr, HIGH_FIRST: tl.constexpr,
):  # fmt: skip
    """Codes 0..15. LAYOUT: "records" (RecordLayout's fields follow), or int32 words along K or N."""
    if LAYOUT == "words_k":
        return nibble_of_word(codes, columns // 8 * n + rows, columns % 8, inside, False)
    if LAYOUT == "words_n":
        return nibble_of_word(codes, columns * (n // 8) + rows // 8, rows % 8, inside, True)
    index = rows * k + columns
    place = index % SPAN
    run = index % ELEMENTS // SPAN * (SPAN // 2)
    byte = byte_at(codes, index // ELEMENTS * BYTES + START + run + place % (SPAN // 2), inside)
    first = place < SPAN // 2
    return tl.where(first, byte >> 4, byte & 0xF) if HIGH_FIRST else tl.where(first, byte & 0xF, byte >> 4)


@triton.jit
def six_bits(codes, index, inside, MINIMUM: tl.constexpr):
    """Q4_K's fp16 times 6-bit number, see codecs.KQuant; not negated."""
    record = index // 256 * 144
    sub = index % 256 // 32
    byte = byte_at(codes, record + (8 if MINIMUM else 4) + sub % 4, inside)
    last = byte_at(codes, record + 12 + sub % 4, inside)
    late = ((last >> 4) if MINIMUM else (last & 0xF)) | ((byte >> 2) & 0x30)
    number = tl.where(sub < 4, byte & 0x3F, late)
    return half_at(codes, record + (2 if MINIMUM else 0), inside) * number.to(tl.float32)


@triton.jit
def scale_at(
    codes, scales, outer, map, constant, rows, columns, inside, n, k,
    SCALE: tl.constexpr, BLOCK: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """fp32 scale of each weight. SCALE names the codec; BYTES: of a record that holds its scale."""
    index = rows * k + columns
    if SCALE == "group":
        return widen(tl.load(scales + columns // BLOCK * n + rows, mask=inside, other=0))
    if SCALE == "absmax":
        return tl.load(scales + index // BLOCK, mask=inside, other=0)
    if SCALE == "nested":
        block = index // BLOCK
        inner = tl.load(map + tl.load(scales + block, mask=inside, other=0).to(tl.int32), mask=inside, other=0)
        return inner * tl.load(outer + block // 256, mask=inside, other=0) + tl.load(constant)
    if SCALE == "e8m0":
        return power_of_two(byte_at(scales, index // BLOCK, inside))
    if SCALE == "e4m3":
        return e4m3(byte_at(scales, index // BLOCK, inside)) * tl.load(constant)
    if SCALE == "record_e8m0":
        return power_of_two(byte_at(codes, index // BLOCK * BYTES, inside))
    if SCALE == "kquant":
        return six_bits(codes, index, inside, False)
    return half_at(codes, index // BLOCK * BYTES, inside)


@triton.jit
def weight_at(
    codes, table, scales, zeros, outer, map, constant, rows, columns, n, k,
    LAYOUT: tl.constexpr, ELEMENTS: tl.constexpr, BYTES: tl.constexpr, START: tl.constexpr, SPAN: tl.constexpr,
    HIGH_FIRST: tl.constexpr, SCALE: tl.constexpr, OFFSET: tl.constexpr, BLOCK: tl.constexpr, PLUS_ONE: tl.constexpr,
):  # fmt: skip
    """fp32 values of weights, each rounded once. Beyond [n, k] they are finite, and meet an x of 0 or are not stored.

    With an offset the product is exact before it is added: a code of 4 bits times a scale of at most 17.
    """
    inside = (rows < n) & (columns < k)
    code = code_at(codes, rows, columns, inside, n, k, LAYOUT, ELEMENTS, BYTES, START, SPAN, HIGH_FIRST)
    scale = scale_at(
        codes, scales, outer, map, constant, rows, columns, inside, n, k, SCALE=SCALE, BLOCK=BLOCK, BYTES=BYTES
    )
    value = tl.load(table + code) * scale
    if OFFSET == "group":
        word = columns // BLOCK * (n // 8) + rows // 8
        zero = nibble_of_word(zeros, word, rows % 8, inside, LAYOUT == "words_n") + PLUS_ONE
        value -= scale * zero.to(tl.float32)
    elif OFFSET == "kquant":
        value -= six_bits(codes, rows * k + columns, inside, True)
    elif OFFSET == "half":
        value += half_at(codes, (rows * k + columns) // BLOCK * BYTES + 2, inside)
    return value


@triton.jit
def store(out, sums, bias, batch, rows, m, n):
    """sums [BLOCK_M, BLOCK_N] plus bias, rounded once. batch [BLOCK_M, 1], rows [1, BLOCK_N]."""
    if bias is not None:
        sums += widen(tl.load(bias + rows, mask=rows < n, other=0))
    tl.store(out + batch * n + rows, narrow(sums, out.dtype.element_ty), mask=(batch < m) & (rows < n))


@triton.jit(do_not_specialize=["m", "x_stride"])
def few_rows(
    x, codes, table, scales, zeros, outer, map, constant, bias, out, m, n, x_stride, K: tl.constexpr,
    LAYOUT: tl.constexpr, ELEMENTS: tl.constexpr, BYTES: tl.constexpr, START: tl.constexpr, SPAN: tl.constexpr,
    HIGH_FIRST: tl.constexpr, SCALE: tl.constexpr, OFFSET: tl.constexpr, BLOCK: tl.constexpr, PLUS_ONE: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, HALVINGS: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows of x times BLOCK_N rows of W, without tensor cores.

    The order of a sum is fixed here, not by the compiler: column c of each tile of 2^HALVINGS = BLOCK_K is added to
    sum c, one after another; then neighbours are added, again and again. So a row's bits depend on no tile size.
    """
    tiles = tl.cdiv(m, BLOCK_M)
    batch = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = tl.program_id(0) // tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = rows.to(tl.int64) if WIDE else rows
    sums = tl.zeros([BLOCK_M, BLOCK_N, BLOCK_K], tl.float32)
    for start in range(0, K, BLOCK_K):
        columns = start + tl.arange(0, BLOCK_K)
        columns = columns.to(tl.int64) if WIDE else columns
        values = weight_at(
            codes, table, scales, zeros, outer, map, constant, rows[:, None], columns[None, :], n, K,
            LAYOUT, ELEMENTS, BYTES, START, SPAN, HIGH_FIRST, SCALE, OFFSET, BLOCK, PLUS_ONE,
        )  # fmt: skip
        inside = (batch[:, None] < m) & (columns[None, :] < K)
        part = widen(tl.load(x + batch[:, None] * x_stride + columns[None, :], mask=inside, other=0))
        sums = tl.fma(part[:, None, :], values[None, :, :], sums)
    for step in tl.static_range(HALVINGS):
        sums = tl.sum(tl.reshape(sums, [BLOCK_M, BLOCK_N, BLOCK_K >> (step + 1), 2]), axis=3)
    store(out, tl.reshape(sums, [BLOCK_M, BLOCK_N]), bias, batch[:, None], rows[None, :], m, n)


@triton.jit(do_not_specialize=["m", "x_stride"])
def many_rows(
    x, codes, table, scales, zeros, outer, map, constant, bias, out, m, n, x_stride, K: tl.constexpr,
    LAYOUT: tl.constexpr, ELEMENTS: tl.constexpr, BYTES: tl.constexpr, START: tl.constexpr, SPAN: tl.constexpr,
    HIGH_FIRST: tl.constexpr, SCALE: tl.constexpr, OFFSET: tl.constexpr, BLOCK: tl.constexpr, PLUS_ONE: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Tiles through `tl.dot` in full fp32. Sums of TILES tiles are added up, as one long sum would lose too much."""
    tiles = tl.cdiv(m, BLOCK_M)
    batch = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = tl.program_id(0) // tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = rows.to(tl.int64) if WIDE else rows
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, K, BLOCK_K * TILES):
        partial = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(first, min(first + BLOCK_K * TILES, K), BLOCK_K):
            columns = start + tl.arange(0, BLOCK_K)
            columns = columns.to(tl.int64) if WIDE else columns
            values = weight_at(
                codes, table, scales, zeros, outer, map, constant, rows[None, :], columns[:, None], n, K,
                LAYOUT, ELEMENTS, BYTES, START, SPAN, HIGH_FIRST, SCALE, OFFSET, BLOCK, PLUS_ONE,
            )  # fmt: skip
            inside = (batch[:, None] < m) & (columns[None, :] < K)
            part = widen(tl.load(x + batch[:, None] * x_stride + columns[None, :], mask=inside, other=0))
            partial = tl.dot(part, values, partial, input_precision="ieee")
        sums += partial
    store(out, sums, bias, batch[:, None], rows[None, :], m, n)
