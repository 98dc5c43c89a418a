"""The formats: codebooks, and `get_format`, which turns a key into a BlockFormat."""

from __future__ import annotations

import re
from functools import cache

from .block import BlockFormat
from .codecs import AbsmaxScale, E4M3Scale, E8M0Scale, GroupScale, GroupZero, KQuant, NestedScale, RecordHalf
from .layouts import RecordLayout, WordLayout

# QLoRA (Dettmers et al. 2023), appendix E: quantiles of a normal distribution, as bitsandbytes' fp32 table.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
# bitsandbytes' fp4 over its largest value, 12: magnitudes for the low three bits, sign in the high bit; fp32 quotients.
FP4_MAGNITUDES = (
    0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5, 0.1666666716337204, 0.25,
)  # fmt: skip
FP4 = (*FP4_MAGNITUDES, 0.0, *(-value for value in FP4_MAGNITUDES[1:]))  # code 8 is +0 there
# ggml's kvalues_iq4nl.
IQ4_NL = tuple(map(float, (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)))
# OCP Microscaling v1.0, FP4 E2M1.
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = E2M1_MAGNITUDES + tuple(-value for value in E2M1_MAGNITUDES)
INT4 = tuple(map(float, range(16)))
SIGNED_INT4 = tuple(map(float, range(-8, 8)))

BNB_BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # column i of a word sits in nibble AWQ_ORDER[i]


def _bnb(codebook: tuple[float, ...], key: str, blocksize: int, nested: bool) -> BlockFormat:
    scale = NestedScale() if nested else AbsmaxScale()
    return BlockFormat(key, codebook, blocksize, RecordLayout(high_first=True), scale, by_row=False)


def _gguf_records(size: int, start: int) -> RecordLayout:
    return RecordLayout(elements=32, bytes=size, start=start, span=32)


_FIXED = (
    BlockFormat("q4_0", SIGNED_INT4, 32, _gguf_records(18, 2), RecordHalf(18, 0)),
    BlockFormat("q4_1", INT4, 32, _gguf_records(20, 4), RecordHalf(20, 0), RecordHalf(20, 2)),
    BlockFormat("iq4_nl", IQ4_NL, 32, _gguf_records(18, 2), RecordHalf(18, 0)),
    BlockFormat("q4_k", INT4, 32, RecordLayout(256, 144, 16, 64), KQuant(minimum=False), KQuant(minimum=True)),
    BlockFormat("mxfp4", E2M1, 32, RecordLayout(), E8M0Scale()),
    BlockFormat("mxfp4_gguf", E2M1, 32, _gguf_records(17, 1), E8M0Scale(record_bytes=17)),
    BlockFormat("nvfp4", E2M1, 16, RecordLayout(), E4M3Scale()),
)
_FIXED_BY_KEY = {entry.key: entry for entry in _FIXED}
FAMILIES = ("nf4", "fp4", *_FIXED_BY_KEY, "gptq", "gptq_v2", "awq")


@cache
def get_format(key: str) -> BlockFormat:
    """The format of a key.

    "nf4", "fp4" with an optional blocksize and "-nested" ("nf4-64-nested"; blocksize 64 by default); "q4_0", "q4_1",
    "iq4_nl", "q4_k", "mxfp4" (planar), "mxfp4_gguf", "nvfp4"; "gptq", "gptq_v2" and "awq" with an optional group size
    (128 by default).

    Raises ValueError for an unknown key or a blocksize that the family does not have.
    """
    if key in _FIXED_BY_KEY:
        return _FIXED_BY_KEY[key]
    match = re.fullmatch(r"(nf4|fp4|gptq|gptq_v2|awq)(?:-(\d+))?(-nested)?", key)
    if match is None:
        raise ValueError(f"unknown 4-bit format '{key}'; known: {', '.join(FAMILIES)} (as 'nf4-64-nested', 'gptq-128')")
    family, size, nested = match[1], match[2], bool(match[3])
    if family in ("nf4", "fp4"):
        blocksize = int(size or 64)
        if blocksize not in BNB_BLOCKSIZES:
            raise ValueError(f"{family} has blocksizes {', '.join(map(str, BNB_BLOCKSIZES))}; got {blocksize}")
        full_key = f"{family}-{blocksize}" + ("-nested" if nested else "")
        return _bnb(NF4 if family == "nf4" else FP4, full_key, blocksize, nested)
    group = int(size or 128)
    if nested or group < 8 or group % 8:
        raise ValueError(f"{family} needs a group size that is a multiple of 8 and no '-nested'; got '{key}'")
    full_key = f"{family}-{group}"
    if family == "awq":
        return BlockFormat(full_key, INT4, group, WordLayout("N", AWQ_ORDER), GroupScale(), GroupZero(AWQ_ORDER))
    zero = GroupZero(plus_one=family == "gptq")
    return BlockFormat(full_key, INT4, group, WordLayout("K"), GroupScale(), zero)
