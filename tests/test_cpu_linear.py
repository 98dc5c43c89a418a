"""The CPU kernels against the contract: every format, type and instruction set, odd shapes, threads, and absence."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from halfbyte import reference
from halfbyte.formats import PackedWeight, get_format, quantize
from halfbyte.kernels import Problem, cpu_linear, registry
from halfbyte.kernels.cpu import Library, library
from halfbyte.kernels.cpu_linear import multiply, weight_struct
from halfbyte.plan import plan
from kernel_samples import KEYS, multiples, random_weight, seeded, slack, strided

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LOADED = library()
pytestmark = pytest.mark.skipif(LOADED is None, reason="the library of CPU kernels is not built")
ISAS = list(LOADED.isas) if LOADED else []


def loaded() -> Library:
    assert LOADED is not None
    return LOADED


def call(isa: str, x: Tensor, weight: PackedWeight, bias: Tensor | None = None, threads: int = 0) -> Tensor:
    """The kernel's output, in a poisoned buffer whose surroundings must stay as they were."""
    m, n = x.shape[0], weight.shape[0]
    around = torch.full((m + 2, n), torch.nan, dtype=x.dtype)
    multiply(loaded(), loaded().isas[isa], x, weight, bias, around[1:-1], threads)
    assert around[0].isnan().all()
    assert around[-1].isnan().all()
    return around[1:-1]


def exact(x: Tensor, dense: Tensor, bias: Tensor | None) -> Tensor:
    """The float64 result, from the weight's float64 values (which a test decodes once)."""
    y = x.double() @ dense.t()
    return y if bias is None else y + bias.double()


def shapes(key: str) -> list[tuple[int, int]]:
    """Whole and odd numbers of rows, more and fewer than integers take; K of whole units, tails, and for bitsandbytes
    rows that start anywhere."""
    rows, columns = multiples(key)
    found = [(136, 1280 if 1280 % columns == 0 else columns * 3), (rows * 3, columns)]
    if columns == 1:
        found += [(7, 96), (6, 576), (5, 100), (9, 33), (3, 1), (2, 4100)]
    elif rows == 1 and columns <= 32:
        found += [(6, 96), (5, 224)]
    return found


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("key", KEYS)
def test_contract(key: str, isa: str) -> None:
    generator = seeded(1)
    for n, k in shapes(key):
        weight = random_weight(key, n, k, generator)
        dense = weight.dequantize(torch.float64)
        for number, dtype in enumerate(DTYPES):
            for m in (1, 3, 4, 9):
                x = strided(m, k, dtype, generator)
                bias = torch.randn(n, generator=generator).to(torch.float32 if m == 3 else dtype)
                given = None if (m + number) % 3 == 0 else bias
                out = call(isa, x, weight, given)
                label = f"{key} {isa} {dtype} M={m} N={n} K={k}"
                reference.assert_within_contract(out, exact(x, dense, given), label, slack(x, dense))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("key", KEYS)
def test_one_hot_rows_read_single_weights_back(key: str, isa: str) -> None:
    for n, k in (shapes(key)[0], shapes(key)[-1]):
        weight = random_weight(key, n, k, seeded(2))
        columns = sorted({0, k - 1, *torch.randint(k, (60,), generator=seeded(3)).tolist()})

        def probe(dtype: torch.dtype, used: PackedWeight, true: PackedWeight = weight, at: list[int] = columns) -> bool:
            def layer(x: Tensor) -> Tensor:
                return call(isa, x, used)

            found = reference.one_hot_probe(layer, true, dtype, at)
            return found.within_contract(dtype)

        for dtype in DTYPES:
            assert probe(dtype, weight), (key, isa, dtype, n, k)
        if k > 1:
            assert not probe(torch.float32, reference.swap_nibbles(weight)), (key, isa, n, k)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("key", ["nf4-64", "fp4-4096", "q4_1", "q4_k", "nvfp4", "gptq-128", "awq-32"])
def test_bits_do_not_depend_on_m_or_threads(key: str, isa: str) -> None:
    weight = random_weight(key, 520, 768, seeded(4))
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(64, 768, generator=seeded(5)).to(dtype)
        alone = torch.cat([call(isa, x[i : i + 1], weight, threads=1) for i in range(64)])
        for m in (2, 3, 7, 8, 12, 33, 64):
            for threads in (1, 2, 5):
                assert torch.equal(call(isa, x[:m], weight, threads=threads), alone[:m]), (dtype, m, threads)


@pytest.mark.parametrize("isa", ISAS)
def test_rows_that_start_inside_a_byte_are_batch_invariant(isa: str) -> None:
    weight = random_weight("nf4-64", 17, 333, seeded(6))
    x = torch.randn(9, 333, generator=seeded(7))
    alone = torch.cat([call(isa, x[i : i + 1], weight) for i in range(9)])
    assert torch.equal(call(isa, x, weight), alone)


def test_same_bits_on_threads_of_our_own() -> None:
    weight = random_weight("nf4-64", 1024, 1024, seeded(8))
    x = torch.randn(4, 1024, generator=seeded(9))
    shared = call(ISAS[0], x, weight, threads=3)
    handle = ctypes.CDLL(str(loaded().path))
    handle.hb_get_gomp.restype = ctypes.c_void_p
    handle.hb_set_gomp.argtypes = (ctypes.c_void_p,)
    gomp = handle.hb_get_gomp()
    handle.hb_set_gomp(None)
    try:
        assert torch.equal(call(ISAS[0], x, weight, threads=3), shared)
    finally:
        handle.hb_set_gomp(gomp)


@pytest.mark.skipif(sys.platform != "linux", reason="torch for Linux brings libgomp")
def test_torchs_threads_are_shared() -> None:
    assert loaded().shares_torch_threads


def test_several_python_threads_at_once() -> None:
    weights = [random_weight(key, 256, 1024, seeded(10)) for key in ("nf4-64", "q4_k", "awq-128", "q4_0")]
    xs = [torch.randn(m, 1024, generator=seeded(m)) for m in (1, 5, 16, 40)]
    pairs = [(x, weight) for x in xs for weight in weights]
    expected = [call(ISAS[0], x, weight) for x, weight in pairs]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            for out, wanted in zip(pool.map(lambda pair: call(ISAS[0], *pair), pairs), expected, strict=True):
                assert torch.equal(out, wanted)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("key", ["nf4-64", "nf4-64-nested", "q4_0", "q4_1", "mxfp4_gguf", "nvfp4"])
def test_parts_at_odd_addresses(key: str, isa: str) -> None:
    k = 352 if key != "nvfp4" else 336
    weight = random_weight(key, 5, k, seeded(11))
    codes = weight.codes
    buffer = torch.full((codes.numel() + 3,), 255, dtype=torch.uint8)
    buffer[3:] = codes.reshape(-1)
    moved = PackedWeight(weight.format, weight.shape, {**weight.parts, "codes": buffer[3:].view(codes.shape)})
    x = torch.randn(3, k, generator=seeded(12))
    assert torch.equal(call(isa, x, moved), call(isa, x, weight))


GUARDED: list[mmap.mmap] = []  # kept: tensors look into them


def guarded(tensor: Tensor) -> Tensor:
    """A copy that ends where readable memory ends: reading or writing one byte beyond kills the process."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    pages = -(-raw.numel() // mmap.PAGESIZE) + 1
    memory = mmap.mmap(-1, pages * mmap.PAGESIZE)
    GUARDED.append(memory)
    last = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + (pages - 1) * mmap.PAGESIZE
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(last), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    start = (pages - 1) * mmap.PAGESIZE - raw.numel()
    torch.frombuffer(memory, dtype=torch.uint8, count=raw.numel(), offset=start).copy_(raw)
    return torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=start).view(tensor.shape)


@pytest.mark.skipif(sys.platform != "linux", reason="guard pages as Linux has them")
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("key", KEYS)
def test_nothing_beyond_the_tensors_is_touched(key: str, isa: str) -> None:
    rows, columns = multiples(key)
    several = [(5, 352), (8, 576), (3, 333)] if columns == 1 else [(rows * 5, columns * 3), (rows * 33, columns)]
    for n, k in several:
        weight = random_weight(key, n, k, seeded(23))
        parts = {name: guarded(part) for name, part in weight.parts.items()}
        at_the_end = PackedWeight(weight.format, weight.shape, parts)
        for dtype in (torch.float32, torch.bfloat16):
            for m in (1, 5, 20, 70):
                x = torch.randn(m, k, generator=seeded(24)).to(dtype)
                out = guarded(torch.zeros(m, n, dtype=dtype))
                multiply(loaded(), loaded().isas[isa], guarded(x), at_the_end, None, out)
                assert torch.equal(out, call(isa, x, weight)), (n, k, dtype, m)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("key", ["nf4-64", "nf4-128-nested", "q4_1", "q4_k", "nvfp4", "gptq-128", "awq-32", "fp4-64"])
def test_many_rows(key: str, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_linear, "TILE_VALUES", 48 * 768)
    n, k = (120, 768) if key != "fp4-64" else (119, 333)
    weight = random_weight(key, n, k, seeded(13))
    for dtype in DTYPES:
        for m in (70, 128, 141):  # of AMX: tiles to fill up, a whole call, two
            x = strided(m, k, dtype, seeded(14))
            bias = torch.randn(n, generator=seeded(15)).to(dtype)
            for given in (None, bias):
                out = call(isa, x, weight, given)
                reference.assert_within_contract(out, reference.linear(x, weight, given), f"{key} {isa} {dtype} {m}")


@pytest.mark.skipif("amx" not in ISAS, reason="this processor has no AMX")
@pytest.mark.parametrize("key", ["nf4-64-nested", "q4_1", "nvfp4"])  # tiles do not serve blocks of 16
def test_few_rows_go_over_amx_only_where_their_bits_may_depend_on_their_number(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = random_weight(key, 250, 1024, seeded(31))
    direct, taken = cpu_linear._multiply_direct, dict[int, str]()

    def noted(loaded: Library, isa: int, x: Tensor, *rest: Any) -> None:
        taken[x.shape[0]] = loaded.compiled[isa]
        direct(loaded, isa, x, *rest)

    monkeypatch.setattr(cpu_linear, "_multiply_direct", noted)
    monkeypatch.setattr(loaded(), "isa", loaded().isas["avx512"])
    for invariant in (True, False):
        monkeypatch.setattr(registry, "BATCH_INVARIANT", invariant)
        taken.clear()
        for m in (1, 4, 5, 33, 64, 100):
            x = torch.randn(m, 1024, generator=seeded(m)).bfloat16()
            reference.assert_within_contract(call("avx512", x, weight), reference.linear(x, weight), f"{key} {m}")
        few, many = "avx512", ("avx512" if invariant or key == "nvfp4" else "amx")
        expected = {1: few, 4: few, 5: many, 33: many, 64: many, 100: "amx"}
        assert taken == {m: isa for m, isa in expected.items() if m <= 64 or key != "nvfp4"}
        for m, isa in taken.items():
            problem = Problem(weight.format, torch.bfloat16, m, 250, 1024, "cpu")
            assert cpu_linear.instruction_set(problem) == isa
            told = "HALFBYTE_BATCH_INVARIANT=0 would let amx serve" in cpu_linear.describe(problem)
            assert told == (isa == "avx512" and m >= 5 and key != "nvfp4")
            assert cpu_linear.describe(problem).startswith(f"{isa}, ")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("m", [2, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_x_near_the_ends_of_the_range(isa: str, dtype: torch.dtype, m: int) -> None:
    weight = quantize(torch.randn(32, 512, generator=seeded(16)) * 1e-3, "q4_0")
    x = torch.randn(m, 512, generator=seeded(17))
    x[0] *= 3e37
    x[1] *= 1e-34
    x = x.to(dtype)
    out, y = call(isa, x, weight), reference.linear(x, weight)
    for row in range(2):
        reference.assert_within_contract(out[row], y[row], f"row {row}")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("key", ["nf4-64", "q4_1", "q4_k", "gptq-32", "awq-32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_infinity_gives_what_float64_gives(key: str, isa: str, dtype: torch.dtype) -> None:
    weight = random_weight(key, 160, 256, seeded(18))
    x = torch.randn(3, 256, generator=seeded(19)).to(dtype)
    x[1, 77] = torch.inf
    out, y = call(isa, x, weight), reference.linear(x, weight)
    assert torch.equal(out[1].double().nan_to_num(nan=7.0), y[1].nan_to_num(nan=7.0))
    reference.assert_within_contract(out[::2], y[::2], key)


def wild(kind: str, m: int, k: int) -> Tensor:
    """bf16 rows in which little is like the rest."""
    generator = seeded(25)
    x = torch.randn(m, k, generator=generator)
    if kind == "outliers":
        x[:, torch.randint(k, (3,), generator=generator)] *= 1000
    elif kind == "tails":
        x = x**7
    elif kind == "range":
        x *= 2.0 ** torch.randint(-60, 30, (m, k), generator=generator)
    else:
        x *= torch.rand(m, k, generator=generator) < 0.01
    return x.bfloat16()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ["outliers", "tails", "range", "sparse"])
@pytest.mark.parametrize("key", ["nf4-64", "fp4-64", "q4_1", "q4_k", "nvfp4"])
def test_contract_whatever_a_row_of_x_holds(key: str, kind: str, isa: str) -> None:
    weight = random_weight(key, 256, 1024, seeded(26))
    dense = weight.dequantize(torch.float64)
    x = wild(kind, 9, 1024)
    out, y = call(isa, x, weight), x.double() @ dense.t()
    for row in range(9):
        reference.assert_within_contract(out[row], y[row], f"{key} {kind} {isa} row {row}", slack(x[row], dense))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("magnitude", [1e35, 1e-35])
def test_scales_near_the_ends_of_the_range(magnitude: float, isa: str) -> None:
    weight = random_weight("nf4-64", 160, 512, seeded(29))
    parts = {**weight.parts, "absmax": weight.parts["absmax"] * magnitude}
    weight = PackedWeight(weight.format, weight.shape, parts)
    x = torch.randn(3, 512, generator=seeded(30)).bfloat16()
    x[1] *= 1e3 if magnitude < 1 else 1e2
    reference.assert_within_contract(call(isa, x, weight), reference.linear(x, weight), isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("m", [512, 513])
def test_as_many_rows_as_amx_takes_and_one_more(m: int, isa: str) -> None:
    weight = random_weight("nf4-64", 72, 192, seeded(31))
    x = torch.randn(m, 192, generator=seeded(32)).bfloat16()
    bias = torch.randn(72, generator=seeded(33))
    out = call(isa, x, weight, bias)
    reference.assert_within_contract(out, reference.linear(x, weight, bias), isa)


@pytest.mark.parametrize("isa", ISAS)
def test_nan_stays_in_its_row(isa: str) -> None:
    weight = random_weight("nf4-64", 192, 512, seeded(27))
    x = torch.randn(5, 512, generator=seeded(28)).bfloat16()
    alone = call(isa, x, weight)
    x[3, 200] = torch.nan
    out = call(isa, x, weight)
    assert out[3].isnan().all()
    assert torch.equal(out[[0, 1, 2, 4]], alone[[0, 1, 2, 4]])


@pytest.mark.parametrize("isa", ISAS)
def test_fp16_outputs_overflow_only_where_the_result_does(isa: str) -> None:
    weight = random_weight("q4_0", 16, 512, seeded(20))
    x = (torch.randn(4, 512, generator=seeded(21)) * 20000).half()
    out, y = call(isa, x, weight), reference.linear(x, weight)
    assert y.half().isinf().any()
    assert y.half().isfinite().any()
    assert torch.equal(out.isinf(), y.half().isinf())


def test_structs_follow_values_not_objects() -> None:
    first = random_weight("nf4-64", 8, 128, seeded(22))
    again = PackedWeight(first.format, first.shape, dict(first.parts))
    assert weight_struct(first) is weight_struct(again)
    fp4 = PackedWeight(get_format("fp4-64"), first.shape, first.parts)
    reshaped = PackedWeight(first.format, (16, 64), first.parts)
    assert weight_struct(fp4).codebook[:] == list(get_format("fp4").codebook)
    assert (weight_struct(reshaped).n, weight_struct(reshaped).k) == (16, 64)


def test_the_plan_takes_the_kernel() -> None:
    for key in KEYS:
        for m in (1, 64, 65, 5000):
            chosen = plan(Problem(get_format(key), torch.bfloat16, m, 4096, 5120))
            assert chosen.kernel.name == "cpu_linear", (key, m)
    assert "cuda" in str(cpu_linear.supports(Problem(get_format("nf4"), torch.float16, 1, 64, 64, "cuda")))


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "always", "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("isa", ISAS)
def test_environment_forces_an_instruction_set(isa: str) -> None:
    code = "from halfbyte.kernels.cpu import library; print(library().isa_name)"
    assert run_python(code, HALFBYTE_CPU_ISA=isa).stdout.strip() == isa


def test_unavailable_instruction_set_is_an_error() -> None:
    code = (
        "import torch; from halfbyte.formats import get_format; from halfbyte.kernels import Problem\n"
        "from halfbyte.plan import plan\n"
        "plan(Problem(get_format('nf4'), torch.float32, 1, 64, 64))"
    )
    done = run_python(code, HALFBYTE_CPU_ISA="sse9")
    assert done.returncode == 1
    assert "HALFBYTE_CPU_ISA=sse9: this build does not know it; available here: " in done.stderr


def test_without_the_library_torch_computes_and_one_notice_says_so() -> None:
    code = (
        "import torch; from halfbyte.formats import get_format; from halfbyte.kernels import Problem\n"
        "import halfbyte.kernels.cpu.loading as lib; lib.NAME = 'missing.so'\n"
        "from halfbyte.plan import plan\n"
        "for m in (1, 2):\n"
        "    chosen = plan(Problem(get_format('nf4'), torch.float32, m, 64, 64))\n"
        "    print(chosen.kernel.name, dict(chosen.others)['cpu_linear'])"
    )
    done = run_python(code)
    assert (
        done.stdout.splitlines()
        == ["torch_dequantize " + "the library of CPU kernels is not installed (no C++ compiler at install time)"] * 2
    )
    assert done.stderr.count("halfbyte runs without its CPU kernels") == 1
