"""Formats against other people's code, bit for bit: bitsandbytes' CPU backend, gguf-py, and scalar definitions."""

from __future__ import annotations

import inspect
import itertools
import math

import bitsandbytes.functional as bnb
import numpy as np
import pytest
import torch
from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
from gguf import quants
from gguf.constants import GGMLQuantizationType as GGML
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.formats import FAMILIES, BlockFormat, PackedWeight, WordLayout, get_format, quantize
from halfbyte.formats.quantize import CHUNK_VALUES, dynamic_map

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
GGUF = {"q4_0": GGML.Q4_0, "q4_1": GGML.Q4_1, "iq4_nl": GGML.IQ4_NL, "q4_k": GGML.Q4_K, "mxfp4_gguf": GGML.MXFP4}
KEYS = ("nf4-64", "nf4-32-nested", "fp4-128", *GGUF, "mxfp4", "nvfp4", "gptq-32", "gptq_v2-64", "awq-32")
bnb_dequantize = inspect.unwrap(_dequantize_4bit_compute)  # without its torch.compile, which takes seconds a shape


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def random_weight(format: BlockFormat, n: int, k: int, seed: int = 0) -> PackedWeight:
    """Random bytes in every part, with scales that are finite: what a checkpoint may hold, quantiser or not."""
    random = np.random.default_rng(seed)
    parts = {}
    for name, part in format.parts(n, k).items():
        dtype = part.dtypes[0]
        if dtype in (torch.uint8, torch.int32):
            bits = random.integers(0, 256, size=math.prod(part.shape) * dtype.itemsize, dtype=np.uint8)
            parts[name] = torch.from_numpy(bits).view(dtype).reshape(part.shape)
        else:
            values = torch.from_numpy(random.uniform(0.01, 2, size=part.shape)).to(dtype)
            parts[name] = values.reshape(part.shape)
    weight = PackedWeight(format, (n, k), parts)
    codes = weight.codes
    for start in {"q4_0": (0,), "q4_1": (0, 2), "iq4_nl": (0,), "q4_k": (0, 2)}.get(format.key, ()):
        records = codes.view(-1, format.layout.bytes)  # type: ignore[union-attr]
        halves = torch.from_numpy(random.uniform(-2, 2, size=(len(records), 1))).half()
        records[:, start : start + 2] = halves.view(torch.uint8)
    if format.key == "mxfp4_gguf":
        codes.view(-1, 17)[:, 0] = torch.from_numpy(random.integers(0, 250, size=n * k // 32, dtype=np.uint8))
    if format.key == "mxfp4":
        parts["scales"].clamp_(max=250)
    return weight


# --- bitsandbytes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bitsandbytes_bytes(family: str, nested: bool, dtype: torch.dtype) -> None:
    """Codes, scales and nested statistics, for every blocksize and for shapes that no blocksize divides."""
    shapes = ((64, 256), (5, 77), (33, 640), (1, 1), (3, 5), (130, 256))
    for seed, (blocksize, shape) in enumerate(itertools.product(BLOCKSIZES, shapes)):
        weight = normal(*shape, seed=seed, dtype=dtype)
        ours = quantize(weight, f"{family}-{blocksize}" + ("-nested" if nested else ""))
        codes, state = bnb.quantize_4bit(weight, None, None, blocksize, nested, family)
        label = f"{family} {blocksize} {shape}"
        assert torch.equal(ours.codes, codes.flatten()), label
        assert torch.equal(ours.parts["absmax"], state.absmax), label
        if nested:
            assert torch.equal(ours.parts["nested_absmax"], state.state2.absmax), label
            assert torch.equal(ours.parts["nested_quant_map"], state.state2.code), label
            assert torch.equal(ours.parts["nested_offset"], state.offset), label


@pytest.mark.parametrize("family", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes_values(family: str, nested: bool) -> None:
    """Dequantised fp32 values. bitsandbytes' own C++ path is compared where a row is whole blocks; elsewhere it is
    wrong for some K (352 at blocksize 64), so there its torch code is the peer."""
    for blocksize, (n, k) in itertools.product((32, 64, 256), ((8, 512), (5, 77), (33, 321))):
        weight = normal(n, k, seed=k)
        ours = quantize(weight, f"{family}-{blocksize}" + ("-nested" if nested else ""))
        codes, state = bnb.quantize_4bit(weight, None, None, blocksize, nested, family)
        absmax = state.absmax
        if nested:
            absmax = bnb.dequantize_blockwise(state.absmax, state.state2) + state.offset
        assert torch.equal(ours.scales(), absmax)
        exact = ours.dequantize()
        theirs = bnb_dequantize(
            codes.flatten(), absmax, bnb.get_4bit_type(family, device="cpu"), blocksize, (n, k), torch.float32
        )
        assert torch.equal(exact, theirs), (blocksize, n, k)
        if k % blocksize == 0:
            assert torch.equal(exact, bnb.dequantize_4bit(codes, state)), (blocksize, n, k)


def test_bitsandbytes_tables() -> None:
    for family in ("nf4", "fp4"):
        assert torch.equal(torch.tensor(get_format(family).codebook), bnb.get_4bit_type(family, device="cpu"))
    assert torch.equal(dynamic_map(), bnb.create_dynamic_map())


def test_zero_and_constant_blocks() -> None:
    weight = torch.zeros(4, 128)
    weight[1] = 3.0
    weight[2, 64:] = -2.0
    for key in ("nf4-64", "nf4-64-nested", "fp4-64", "q4_0", "q4_1", "iq4_nl", "mxfp4", "mxfp4_gguf"):
        restored = quantize(weight, key).dequantize()
        assert torch.isfinite(restored).all(), key
        if "nested" not in key and "mxfp4" not in key:
            torch.testing.assert_close(restored, weight, rtol=1e-3, atol=0)


def test_chunks_do_not_show() -> None:
    """A matrix larger than the quantiser's chunk gives bitsandbytes' and gguf's bytes too, its last part uneven."""
    weight = normal(1030, 1056)
    assert weight.numel() > CHUNK_VALUES
    for nested in (False, True):
        codes, state = bnb.quantize_4bit(weight, None, None, 64, nested, "nf4")
        ours = quantize(weight, "nf4-64-nested" if nested else "nf4-64")
        assert torch.equal(ours.codes, codes.flatten())
        assert torch.equal(ours.parts["absmax"], state.absmax)
    assert np.array_equal(quantize(weight, "q4_0").codes.numpy(), quants.quantize(weight.numpy(), GGML.Q4_0))


# --- gguf -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["q4_0", "q4_1", "mxfp4_gguf"])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_gguf_bytes(key: str, scale: float) -> None:
    weight = normal(48, 256, seed=3) * scale
    weight[3, :32] = 0
    theirs = quants.quantize(weight.numpy(), GGUF[key])
    assert np.array_equal(quantize(weight, key).codes.numpy(), theirs)


@pytest.mark.parametrize("key", list(GGUF))
def test_gguf_values(key: str) -> None:
    for seed in range(4):
        weight = random_weight(get_format(key), 24, 512, seed)
        theirs = quants.dequantize(weight.codes.numpy(), GGUF[key])
        assert np.array_equal(weight.dequantize().numpy(), theirs)


def test_iq4_nl_beats_q4_0() -> None:
    """gguf-py has no IQ4_NL quantiser to compare with: its table must at least pay off on normal data."""
    weight = normal(64, 1024)

    def error(key: str) -> float:
        return float((quantize(weight, key).dequantize() - weight).norm() / weight.norm())

    assert error("iq4_nl") < 0.95 * error("q4_0")


# --- words and planar FP4, against scalar definitions -----------------------------------------------------------------


@pytest.mark.parametrize("key", ["gptq-32", "gptq_v2-64", "gptq-128", "awq-32", "awq-128"])
def test_words_by_hand(key: str) -> None:
    """One weight at a time, from the descriptions of AutoGPTQ's and AutoAWQ's packing."""
    n, k = 16, 128
    format = get_format(key)
    weight = random_weight(format, n, k, seed=5)
    values = weight.dequantize(torch.float64)
    group = format.blocksize
    qweight, qzeros = weight.parts["qweight"].tolist(), weight.parts["qzeros"].tolist()
    scales = weight.parts["scales"].double()
    awq_nibble = {0: 0, 2: 1, 4: 2, 6: 3, 1: 4, 3: 5, 5: 6, 7: 7}  # AutoAWQ packs columns 0 2 4 6 1 3 5 7, low first
    for row, column in itertools.product(range(n), range(k)):
        if format.name == "awq":
            shift = 4 * awq_nibble[row % 8]
            code = (qweight[column][row // 8] >> shift) & 15
            zero = (qzeros[column // group][row // 8] >> shift) & 15
        else:
            code = (qweight[column // 8][row] >> 4 * (column % 8)) & 15
            zero = (qzeros[column // group][row // 8] >> 4 * (row % 8)) & 15
            zero += format.name == "gptq"
        assert float(values[row, column]) == float(scales[column // group, row]) * (code - zero)


def e2m1(code: int) -> float:
    """Sign, two exponent bits with bias 1, one mantissa bit (OCP MX v1.0, table 5)."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    magnitude = mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -magnitude if sign else magnitude


@pytest.mark.parametrize("key", ["mxfp4", "nvfp4"])
def test_planar_fp4_by_hand(key: str) -> None:
    n, k = 6, 96
    weight = random_weight(get_format(key), n, k, seed=6)
    values = weight.dequantize(torch.float64)
    codes = weight.codes.tolist()
    for row, column in itertools.product(range(n), range(k)):
        index = row * k + column
        code = codes[index // 2] >> 4 * (index % 2) & 15
        if key == "mxfp4":
            scale = 2.0 ** (int(weight.parts["scales"][row, column // 32]) - 127)
        else:
            block = weight.parts["scales"][row, column // 16].float()
            scale = float(block * weight.parts["global_scale"])  # one fp32 rounding, as kernels do
        assert float(values[row, column]) == scale * e2m1(code)


def test_e8m0_nan_and_extremes() -> None:
    weight = random_weight(get_format("mxfp4"), 1, 96)
    weight.parts["scales"][0] = torch.tensor([0, 254, 255], dtype=torch.uint8)
    scales = weight.scales()
    assert scales[0] == 2.0**-127
    assert scales[1] == 2.0**127
    assert scales[2].isnan()


# --- properties -------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(KEYS), st.integers(1, 4), st.integers(1, 2), st.integers(0, 999), st.data())
def test_rows_equal_the_whole(key: str, eights: int, steps: int, seed: int, data: st.DataObject) -> None:
    format = get_format(key)
    k = steps * 256 if format.by_row else data.draw(st.integers(1, 300))
    n = eights * 8 if isinstance(format.layout, WordLayout) else data.draw(st.integers(1, 12))
    weight = random_weight(format, n, k, seed)
    start = data.draw(st.integers(0, n))
    rows = slice(start, data.draw(st.integers(start, n)))
    assert torch.equal(weight.dequantize(rows=rows), weight.dequantize()[rows])
    assert torch.equal(weight.unpack(rows), weight.unpack()[rows])


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([key for key in KEYS if not isinstance(get_format(key).layout, WordLayout)]), st.data())
def test_pack_unpack(key: str, data: st.DataObject) -> None:
    """Codes put into a record and read back, in the order of the weights."""
    format = get_format(key)
    layout = format.layout
    n, k = data.draw(st.integers(1, 6)), 256 if format.by_row else data.draw(st.integers(1, 99))
    codes = torch.randint(16, (n, k), generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    body = layout.pack(codes.to(torch.uint8))  # type: ignore[union-attr]
    header = torch.zeros(len(body), layout.start, dtype=torch.uint8)  # type: ignore[union-attr]
    records = torch.cat([header, body], dim=1).reshape(layout.shape(n, k))
    assert torch.equal(layout.unpack(records, n, k, slice(0, n)).long(), codes)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["nf4-32", "nf4-64", "fp4-64", "fp4-4096", "q4_0", "mxfp4", "mxfp4_gguf"]),
    st.integers(1, 8),
    st.integers(0, 999),
    st.sampled_from([0.02, 1.0, 50.0]),
    st.data(),
)
def test_quantize_is_idempotent(key: str, n: int, seed: int, scale: float, data: st.DataObject) -> None:
    """What a format can hold exactly it does hold: quantising its own values changes no byte that matters."""
    k = 96 if get_format(key).by_row else data.draw(st.integers(1, 200))
    once = quantize(normal(n, k, seed=seed) * scale, key)
    twice = quantize(once.dequantize(), key)
    assert torch.equal(once.dequantize(), twice.dequantize())


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("q5_0", "unknown 4-bit format 'q5_0'"),
        ("", "unknown"),
        ("nf4-", "unknown"),
        ("q4_0-nested", "unknown"),
        ("nf4-48", "has blocksizes 32"),
        ("fp4-8192", "got 8192"),
        ("gptq-12", "multiple of 8"),
        ("awq-0", "multiple of 8"),
        ("awq-64-nested", "no '-nested'"),
        ("nf4-" + "9" * 5000, "limit|blocksizes"),
    ],
)
def test_unknown_formats(key: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        get_format(key)


def test_format_names() -> None:
    assert get_format("nf4").key == "nf4-64"
    assert get_format("gptq").key == "gptq-128"
    assert get_format("fp4-128-nested").nested
    assert {get_format(family).name for family in FAMILIES} == set(FAMILIES)
    assert get_format("nf4-64") is get_format("nf4-64")


@pytest.mark.parametrize(
    ("weight", "key", "error", "says"),
    [
        (torch.zeros(4, 64, dtype=torch.float64), "nf4", TypeError, "float64"),
        (torch.zeros(4, 64, dtype=torch.int8), "nf4", TypeError, "int8"),
        (torch.zeros(64), "nf4", ValueError, "matrix"),
        (torch.zeros(2, 4, 64), "nf4", ValueError, "matrix"),
        (torch.zeros(0, 64), "nf4", ValueError, "at least 1"),
        (torch.zeros(4, 40), "q4_0", ValueError, "multiple of 32"),
        (torch.full((4, 64), torch.nan), "nf4", ValueError, "NaN"),
        (torch.full((4, 64), torch.inf), "q4_1", ValueError, "infinity"),
        (torch.zeros(4, 256), "q4_k", ValueError, "no quantiser"),
        (torch.zeros(8, 128), "gptq-32", ValueError, "no quantiser"),
    ],
)
def test_quantize_errors(weight: torch.Tensor, key: str, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        quantize(weight, key)


def test_packed_weight_errors() -> None:
    good = quantize(normal(4, 64), "nf4-32")
    parts = dict(good.parts)

    def make(**changed: torch.Tensor) -> PackedWeight:
        return PackedWeight(good.format, good.shape, parts | changed)

    assert make().nbytes == 4 * 32 + 8 * 4
    assert make().bits_per_weight == 5.0
    with pytest.raises(ValueError, match="missing parts \\['absmax'\\]"):
        PackedWeight(good.format, good.shape, {"codes": parts["codes"]})
    with pytest.raises(ValueError, match="unknown parts \\['bias'\\]"):
        make(bias=torch.zeros(4))
    with pytest.raises(TypeError, match=r"'absmax' must be .*float32, got .*bfloat16"):
        make(absmax=parts["absmax"].bfloat16())
    with pytest.raises(ValueError, match="must have shape \\[128\\]"):
        make(codes=parts["codes"].view(-1, 1))
    with pytest.raises(ValueError, match="not contiguous"):
        make(absmax=torch.zeros(16)[::2])
    with pytest.raises(ValueError, match="several devices"):
        make(absmax=torch.zeros(8, device="meta"))
    with pytest.raises(ValueError, match="at least 1"):
        PackedWeight(good.format, (0, 64), parts)
    with pytest.raises(ValueError, match="N must be a multiple of 8"):
        PackedWeight(get_format("awq-32"), (12, 64), parts)
    with pytest.raises(ValueError, match="plain range"):
        good.dequantize(rows=slice(0, 4, 2))


def test_views_are_not_copied() -> None:
    codes = torch.zeros(1000, dtype=torch.uint8)
    weight = PackedWeight(get_format("q4_0"), (4, 64), {"codes": codes[3 : 3 + 4 * 36].view(4, 36)})
    assert weight.codes.data_ptr() == codes.data_ptr() + 3
