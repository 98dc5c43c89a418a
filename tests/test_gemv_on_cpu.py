"""codebook_gemv without a GPU: its source run on the CPU against the reference, and its machine code read."""

from __future__ import annotations

import ctypes
import os
import random
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import cuda_on_cpu
import gemv_on_cpu
from gemv_on_cpu import moved
from halfbyte import reference
from halfbyte.formats import PackedWeight, get_format
from halfbyte.formats.table import BNB_BLOCKSIZES
from halfbyte.kernels import Problem, codebook_gemv, codebook_mma, nvrtc
from halfbyte.lab import sass
from halfbyte.plan import plan
from kernel_samples import KEYS, multiples, random_weight, seeded, slack, strided

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, FP16, FP32)
FUZZ = int(os.environ.get("HALFBYTE_FUZZ_GEMV", "16"))
ALL_KEYS = tuple(dict.fromkeys((*KEYS, *(f"{name}-{size}" for name in ("nf4", "fp4") for size in BNB_BLOCKSIZES))))
on_cpu = pytest.mark.skipif(cuda_on_cpu.COMPILER is None, reason="needs g++")
compiled = pytest.mark.skipif(nvrtc.missing() is not None, reason=str(nvrtc.missing()))


def check(x: Tensor, weight: PackedWeight, bias: Tensor | None = None, arch: str = "sm_90a", label: str = "") -> None:
    """The kernel within the contract; beyond it, what sums in fp32 may lose where a handful of outputs cancels."""
    y = reference.linear(x, weight, bias)
    out = gemv_on_cpu.multiply(x, weight, bias, arch)
    allowed = slack(x, weight.dequantize(torch.float64))
    reference.assert_within_contract(out, y, f"{weight.format.key} {weight.shape} {x.dtype} {label}", allowed)


def small_shape(key: str) -> tuple[int, int]:
    """Rows that do not fill a tile, more columns than one tile and not whole ones where the format allows."""
    rows, columns = multiples(key)
    return (37 if rows == 1 else 40), columns * max(1, 330 // columns)


# ---- its source, run


@on_cpu
@pytest.mark.parametrize("key", ALL_KEYS)
def test_contract(key: str) -> None:
    n, k = small_shape(key)
    weight = random_weight(key, n, k, seeded(0))
    for dtype, m in ((BF16, 1), (FP16, 7), (FP32, 13)):
        bias = None if m == 7 else torch.randn(n, generator=seeded(2)).to(FP32 if m == 1 else dtype)
        check(torch.randn(m, k, generator=seeded(1)).to(dtype), weight, bias)


@on_cpu
@pytest.mark.parametrize("k", [1, 2, 31, 32, 33, 63, 95, 127, 190, 255, 257])
@pytest.mark.parametrize("key", ["nf4-32", "fp4-64-nested"])
def test_blocks_and_bytes_straddle_rows(key: str, k: int) -> None:
    for n in (1, 3, 33):
        check(torch.randn(2, k, generator=seeded(k)), random_weight(key, n, k, seeded(n)))


@on_cpu
@pytest.mark.parametrize("key", ["nf4-64", "q4_0", "q4_k", "nvfp4", "gptq-128", "awq-128"])
def test_many_rounds_of_the_ring(key: str) -> None:
    k = 4608 if key == "nf4-64" else 9 * multiples(key)[1] * (4608 // (9 * multiples(key)[1]))
    weight = random_weight(key, 40, k, seeded(3))
    for arch in ("sm_75", "sm_86", "sm_90a"):
        check(torch.randn(2, k, generator=seeded(4)).bfloat16(), weight, arch=arch, label=arch)


@on_cpu
@pytest.mark.parametrize("by", [1, 4, 8])
@pytest.mark.parametrize("key", ["nf4-64", "q4_0", "q4_1", "q4_k", "mxfp4", "mxfp4_gguf", "nvfp4", "gptq-32", "awq-32"])
def test_codes_at_any_address(key: str, by: int) -> None:
    n, k = small_shape(key)
    if key.startswith(("gptq", "awq")) and by % 4:
        pytest.skip("int32 words lie at multiples of four")
    check(torch.randn(2, k, generator=seeded(by)).bfloat16(), moved(random_weight(key, n, k, seeded(5)), by))


@on_cpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_x_with_any_stride_and_address(dtype: torch.dtype) -> None:
    weight = random_weight("nf4-64", 33, 318, seeded(6))
    check(strided(3, 318, dtype, seeded(7)), weight)
    check(torch.randn(3, 400, generator=seeded(8)).to(dtype)[:, 40:358], weight)
    check(torch.randn(1, 318, generator=seeded(9)).to(dtype).expand(3, -1), weight)


@on_cpu
@pytest.mark.parametrize("key", KEYS)
def test_single_weights_and_swapped_nibbles(key: str) -> None:
    n, k = small_shape(key)
    weight = random_weight(key, n, k, seeded(10))
    chosen = random.Random(key).sample(range(k), 24)
    for dtype in (FP32, FP16):
        probe = reference.one_hot_probe(lambda x: gemv_on_cpu.multiply(x, weight), weight, dtype, chosen)
        assert probe.within_contract(dtype), f"{dtype}: {probe}"
    swapped = reference.swap_nibbles(weight)
    probe = reference.one_hot_probe(lambda x: gemv_on_cpu.multiply(x, swapped), weight, FP32, chosen)
    assert not probe.within_contract(FP32)


@on_cpu
@pytest.mark.parametrize("key", ["nf4-64-nested", "q4_k", "awq-32", "gptq_v2-40"])
@pytest.mark.parametrize("arch", ["sm_75", "sm_90a"])
def test_a_row_has_the_same_bits_at_any_m(key: str, arch: str) -> None:
    k = 4480 if key != "q4_k" else 4608
    weight, x = random_weight(key, 40, k, seeded(11)), torch.randn(11, k, generator=seeded(12))
    alone = torch.cat([gemv_on_cpu.multiply(x[i : i + 1], weight, arch=arch) for i in range(4)])
    for m in (2, 3, 4, 5, 8, 11):
        out = gemv_on_cpu.multiply(x[:m], weight, arch=arch)
        assert torch.equal(out[:4], alone[:m]), f"M = {m}"
    assert torch.equal(gemv_on_cpu.multiply(x[:2], weight, arch=arch, downwards=True), alone[:2])


@on_cpu
@pytest.mark.parametrize("key", KEYS)
def test_exact_where_sums_are_exact(key: str) -> None:
    n, k = small_shape(key)
    weight = random_weight(key, n, k, seeded(13), exact=True)
    x = torch.randint(-2, 3, (5, k), generator=seeded(14)).float()
    assert torch.equal(gemv_on_cpu.multiply(x, weight), reference.linear(x, weight).float())


@on_cpu
def test_numbers_beyond_fp16_do_not_overflow() -> None:
    weight = random_weight("iq4_nl", 8, 320, seeded(15))
    for scale in (1e-30, 1e36):
        x = (torch.randn(2, 320, generator=seeded(16)) * scale).bfloat16()
        assert bool(torch.isfinite(reference.linear(x, weight).bfloat16()).all())
        check(x, weight)


@on_cpu
@pytest.mark.parametrize("key", ["mxfp4", "mxfp4_gguf"])
def test_exponent_255_is_nan_in_its_row_alone(key: str) -> None:
    weight = random_weight(key, 7, 96, seeded(17))
    if key == "mxfp4":
        weight.parts["scales"][3, 1] = 255
    else:
        weight.codes.view(7, 3, 17)[3, 1, 0] = 255
    out = gemv_on_cpu.multiply(torch.randn(2, 96, generator=seeded(18)), weight)
    assert torch.equal(out.isnan().any(0), torch.arange(7) == 3)


@on_cpu
@pytest.mark.parametrize(("key", "k"), [("nf4-32", 100), ("nf4-64", 96), ("nvfp4", 48)])
def test_a_bad_scale_stays_in_the_rows_it_belongs_to(key: str, k: int) -> None:
    weight = random_weight(key, 5, k, seeded(19))
    scales = weight.parts["absmax" if key.startswith("nf4") else "scales"].view(-1)
    for block in range(scales.numel()):
        spoilt = scales.clone()
        spoilt[block] = torch.nan
        bad = (
            {**weight.parts, "absmax": spoilt}
            if key.startswith("nf4")
            else {**weight.parts, "scales": spoilt.view(5, -1)}
        )
        case = PackedWeight(weight.format, weight.shape, bad)
        expected = case.dequantize().isnan().any(1)
        out = gemv_on_cpu.multiply(torch.randn(1, k, generator=seeded(20)), case)
        assert torch.equal(out[0].isnan(), expected), f"block {block}"


@dataclass(frozen=True)
class Case:
    """A random problem; its number is all that is needed to make it again."""

    number: int
    key: str
    dtype: torch.dtype
    m: int
    n: int
    k: int
    by: int
    stride: int
    arch: str


def draw(number: int) -> Case:
    rng = random.Random(number)
    key = rng.choice(KEYS)
    rows, columns = multiples(key)
    words = key.startswith(("gptq", "awq"))
    return Case(
        number=number,
        key=key,
        dtype=rng.choice(DTYPES),
        m=rng.choice((5, 8)),
        n=rows * rng.randint(1, max(1, 90 // rows)),
        k=columns * rng.randint(1, max(1, rng.choice((60, 700, 2500)) // columns)),
        by=rng.choice((0, 0, 0, 4, 32)) if words else rng.choice((0, 0, 0, 1, 16)),
        stride=rng.choice((0, 0, 1, 8)),
        arch=rng.choice(("sm_75", "sm_86", "sm_90a")),
    )


@on_cpu
@pytest.mark.parametrize("chunk", range(4))
def test_random_problems(chunk: int) -> None:
    """HALFBYTE_FUZZ_GEMV sets how many (16 by default)."""
    for number in range(chunk, FUZZ, 4):
        case = draw(number)
        weight = moved(random_weight(case.key, case.n, case.k, seeded(number)), case.by)
        x = torch.full((case.m, case.k + case.stride), torch.nan, dtype=case.dtype)[:, case.stride // 2 :][:, : case.k]
        x.copy_(torch.randn(case.m, case.k, generator=seeded(number + 1)))
        check(x, weight, arch=case.arch, label=f"{case}")


# ---- the emulation notices what would be wrong on a GPU


@on_cpu
@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        ("        copies_wait<STAGES - 1>();\n", ""),
        ("        copies_wait<STAGES - 1>();\n", "        copies_wait<STAGES>();\n"),
        ("        __syncwarp();\n        load_raw", "        load_raw"),
        ("        __syncwarp();    // all lanes", "        // all lanes"),
        ("    __syncthreads();\n\n    float sum", "\n    float sum"),
        ("    __syncthreads();                                 // all", "    // all"),
        ("    __syncthreads();\n    for (int i = threadIdx.x; i < M_ROWS", "    for (int i = threadIdx.x; i < M_ROWS"),
        ("if (k0 >= p.k) return;", ""),
        ("if (from < end) copy_piece", "copy_piece"),
        ("if (start >= 32 || k + start >= p.k) continue;", ""),
        ("p.x_in_quads && k + 4 <= p.k", "k + 4 <= p.k"),
        ("p.x_in_quads && k + 4 <= p.k", "p.x_in_quads"),
        ("#define X_ROW (CHUNKS * X_CHUNK)", "#define X_ROW (X_CHUNK)"),
    ],
)
def test_a_broken_kernel_is_noticed(was: str, becomes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = (nvrtc.SOURCES / "codebook_gemv.cu").read_text()
    assert source.count(was) == 1, "the test is out of date"
    (tmp_path / "codebook_gemv.cu").write_text(source.replace(was, becomes))
    monkeypatch.setattr(nvrtc, "SOURCES", tmp_path)
    gemv_on_cpu.library.cache_clear()
    generator = seeded(21)
    weight = random_weight("nf4-64", 40, 4106, generator)
    noticed = 0
    try:
        for x in (torch.randn(3, 4106, generator=generator), strided(2, 4106, FP32, generator)):
            y = reference.linear(x, weight)
            for downwards in (False, True):
                try:
                    reference.assert_within_contract(gemv_on_cpu.multiply(x, weight, None, "sm_90a", downwards), y)
                except AssertionError:
                    noticed += 1
    finally:
        gemv_on_cpu.library.cache_clear()
    assert noticed


# ---- the launcher


def test_serves_every_format_on_every_architecture() -> None:
    for key in KEYS:
        for arch in codebook_gemv.ARCHITECTURES:
            n, k = small_shape(key)
            for m in (1, 8, 64):
                problem = Problem(get_format(key), BF16, m, n, k, arch)
                assert codebook_gemv.reason_against(problem) == nvrtc.missing()


@compiled
def test_supports_says_why_not() -> None:
    nf4 = get_format("nf4")
    for problem, word in [
        (Problem(nf4, BF16, 1, 64, 64, "sm_70"), "sm_70"),
        (Problem(nf4, BF16, 1, 64, 64, "cpu"), "cpu"),
        (Problem(nf4, BF16, 65, 64, 64, "sm_90a"), "65"),
        (Problem(nf4, BF16, 1, 64, 1 << 31, "sm_90a"), "2^30"),
    ]:
        assert word in str(codebook_gemv.reason_against(problem))


@compiled
@pytest.mark.parametrize("shape", [(64, 64), (4096, 4096), (16384, 16384)])
def test_the_planner_prefers_tensor_cores_then_this_then_torch(shape: tuple[int, int]) -> None:
    for m in (1, 2, 8, 16, 64):
        for key in ("nf4", "q4_0", "awq-32"):
            problem = Problem(get_format(key), BF16, m, *shape, "sm_90a")
            better = codebook_mma.reason_against(problem) is None
            wanted = ("codebook_mma", "codebook_wgmma") if better else ("codebook_gemv",)
            assert plan(problem).kernel.name in wanted


def test_the_order_of_summation_does_not_look_at_m() -> None:
    for key in KEYS:
        n, k = small_shape(key)
        weight = random_weight(key, n, k, seeded(22))
        for arch in codebook_gemv.ARCHITECTURES:
            configs = [codebook_gemv.configure(weight, BF16, m, arch) for m in range(1, 9)]
            assert len({config.WARPS for config in configs}) == 1
            assert all(config.shared_bytes <= codebook_gemv.SHARED_LIMIT[arch] for config in configs)


def test_the_struct_is_what_the_kernel_takes() -> None:
    assert ctypes.sizeof(codebook_gemv._Problem) == 9 * 8 + 2 * 8 + 7 * 4 + 16 * 4 + 4


# ---- its machine code

WIDE = 8 * codebook_gemv.SMALL_GRID * 64  # rows of layers with many blocks


def config_for(key: str, dtype: torch.dtype, m: int, n: int, k: int, arch: str, by: int = 0) -> codebook_gemv.Config:
    """The configuration for a weight [n, k]; made from a few rows, as their number decides little."""
    rows = 32 if key.startswith(("gptq", "awq")) or n % 32 == 0 else n
    weight = moved(random_weight(key, rows, k, seeded(0)), by)
    config = codebook_gemv.configure(weight, dtype, m, arch)
    many = replace(config, WARPS=codebook_gemv.warps(n, k, config, arch))
    return codebook_gemv.fit(many, m, arch)


def body_of(code: sass.Sass) -> tuple[str, ...]:
    """The shortest of the loops that hold all the multiply-adds."""
    bodies = [code.instructions[first : last + 1] for first, last in code.loops]
    return max(bodies, key=lambda body: (sass.count(body)["FFMA"], -len(body)))


PLAIN = ("nf4-64", "nf4-64-nested", "q4_0", "q4_1", "q4_k", "mxfp4", "mxfp4_gguf", "nvfp4", "gptq-128", "awq-128")


@compiled
@pytest.mark.parametrize("key", PLAIN)
@pytest.mark.parametrize("arch", ["sm_75", "sm_90a"])
def test_codes_come_in_16_bytes_and_few_instructions(key: str, arch: str) -> None:
    config = config_for(key, BF16, 1, WIDE, 4096, arch)
    code = sass.disassemble(nvrtc.compile("codebook_gemv", arch, asdict(config)))
    assert not code.local_memory()
    everything, body = sass.count(code.instructions), sass.count(body_of(code))
    wide = sum(number for name, number in everything.items() if name.startswith("LDG") and ".128" in name)
    assert wide >= 4, "a lane has at least four pieces of a tile to copy"
    narrow = {name: number for name, number in everything.items() if name.startswith(("LDG", "LDS")) and "U8" in name}
    of_scales = {"nf4-64-nested": 4, "mxfp4": 4, "nvfp4": 8}.get(key, 0)  # before the loop and in it
    assert sum(narrow.values()) <= 2 * of_scales, f"codes are not read byte by byte: {narrow}"
    look_ups = sum(number for name, number in body.items() if name in ("LDS", "LDS.U"))
    assert look_ups >= 128, "one look-up in the table for each weight of a lane"
    if arch == "sm_90a":
        assert sum(body.values()) <= (7.5 if key == "nf4-64" else 9) * 128, "instructions for a lane's 128 weights"


@compiled
@pytest.mark.parametrize("arch", codebook_gemv.ARCHITECTURES)
@pytest.mark.parametrize(
    ("key", "dtype", "m", "n", "k", "by"),
    [
        ("nf4-64", BF16, 8, WIDE, 4096, 0),
        ("nf4-64-nested", FP32, 8, 65, 4099, 0),
        ("mxfp4_gguf", FP16, 1, WIDE, 4096, 1),
        ("q4_k", FP32, 8, 64, 8192, 0),
        ("gptq_v2-40", FP16, 8, 64, 4000, 0),
        ("awq-128", BF16, 8, 64, 4096, 4),
    ],
)
def test_no_local_memory(arch: str, key: str, dtype: torch.dtype, m: int, n: int, k: int, by: int) -> None:
    config = config_for(key, dtype, m, n, k, arch, by)
    assert not sass.disassemble(nvrtc.compile("codebook_gemv", arch, asdict(config))).local_memory()
