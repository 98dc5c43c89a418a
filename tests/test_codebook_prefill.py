"""codebook_prefill without a GPU: how it cuts a call, what it hands its kernels (here in torch), their machine code."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from halfbyte import reference
from halfbyte.formats import PackedWeight, get_format
from halfbyte.kernels import Problem, codebook, nvrtc
from halfbyte.kernels import codebook_prefill as prefill
from halfbyte.kernels.codebook_prefill import Cut
from halfbyte.kernels.registry import Expand
from halfbyte.lab import sass
from halfbyte.plan import plan
from kernel_samples import random_weight, seeded

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NF4 = get_format("nf4-64")
compiled = pytest.mark.skipif(nvrtc.missing() is not None, reason=str(nvrtc.missing()))


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path_factory.getbasetemp() / "cubins"))
    nvrtc.cache_folder.cache_clear()


# ---- planning


@compiled
def test_it_serves_many_rows_and_says_why_not() -> None:
    assert prefill.reason_against(Problem(NF4, BF16, 65, 4096, 4096, "sm_90a")) is None
    assert prefill.reason_against(Problem(NF4, FP16, 10**6, 1001, 8, "sm_80")) is None
    for problem, word in [
        (Problem(NF4, BF16, 64, 4096, 4096, "sm_90a"), "got 64"),
        (Problem(NF4, FP32, 256, 4096, 4096, "sm_90a"), "fp32"),
        (Problem(NF4, BF16, 256, 4096, 4096, "sm_75"), "sm_75"),
        (Problem(NF4, BF16, 256, 4096, 4096, "cpu"), "cpu"),
        (Problem(NF4, BF16, 256, 4096, 4100, "sm_90a"), "K = 4100"),
        (Problem(NF4, BF16, 256, 4096, 1 << 20, "sm_90a"), "256 rows of W"),
        (Problem(get_format("q4_0"), BF16, 256, 4096, 4096, "sm_90a"), "q4_0"),
        (Problem(get_format("nvfp4"), BF16, 256, 4096, 4096, "sm_90a"), "nvfp4"),
    ]:
        reason = prefill.reason_against(problem)
        assert reason is not None
        assert word in reason


@compiled
@pytest.mark.parametrize(
    ("shape", "dtype", "arch"),
    [
        ((4096, 4096), BF16, "sm_80"),
        ((65536, 5120), BF16, "sm_80"),
        ((5120, 32768), BF16, "sm_90a"),  # where codebook_gemm fills three quarters of an H200's multiprocessors
        ((4096, 4096), FP16, "sm_90a"),
    ],
)
def test_long_prompts_are_planned_to_it(shape: tuple[int, int], dtype: torch.dtype, arch: str) -> None:
    for m in (2048, 8192, 100_000):
        chosen = plan(Problem(NF4, dtype, m, *shape, arch))
        assert chosen.kernel.name == prefill.STEM
        assert "cuBLAS" in prefill.describe(chosen.problem)
    assert plan(Problem(NF4, dtype, 64, *shape, arch)).kernel.name != prefill.STEM


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("k", [8, 616, 5120, 32768, 49152])
@pytest.mark.parametrize("n", [1, 1000, 4096, 65536, 262144])
@pytest.mark.parametrize("m", [65, 2048, 8192, 1_000_000])
def test_a_call_holds_no_more_than_its_workspace(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    each = prefill.cut(dtype, m, n, k)
    assert prefill.workspace_bytes(dtype, each, k) <= prefill.WORKSPACE
    assert 0 < each.sums <= each.chunk <= m
    assert each.slab % 8 == 0, "slabs begin where outputs can be written 16 bytes at once"


# ---- what the kernels are handed


def memory(address: int, count: int, dtype: torch.dtype) -> Tensor:
    """The `count` elements from an address on."""
    size = count * torch.empty((), dtype=dtype).element_size()
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype)


def fitted(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows over powers of two that bring them below 2^15, and their exponents."""
    exponents = torch.frexp(rows.abs().amax(1)).exponent - 15
    return torch.ldexp(rows, -exponents[:, None]), exponents.int()


class Fake:
    """A kernel's work in torch, on the memory that it is pointed to."""

    def __init__(self, stem: str, wide: bool, weight: PackedWeight, dtype: torch.dtype) -> None:
        self.work: Callable[..., None] = getattr(self, stem.removeprefix("codebook_"))
        self.wide, self.weight, self.dtype, self.terms = wide, weight, dtype, prefill.TERMS[dtype]
        self.seen: list[int] = []

    def start(self, stream: int, blocks: int, **fields: Any) -> None:
        self.seen.append(blocks)
        self.work(blocks, **fields)

    def prefill(self, blocks: int, first: int, rows: int, out: int, w_exponents: int, x_exponents: int) -> None:
        assert blocks == rows
        values = self.weight.dequantize(rows=slice(first, first + rows))
        scaled, exponents = fitted(values)
        high = scaled.half()
        parts = [high, (scaled - high.float()).half()][: self.terms]
        memory(out, rows * self.terms * values.shape[1], FP16).copy_(torch.cat(parts, 1).flatten())
        memory(w_exponents, rows, torch.int32).copy_(exponents)

    def prefill_x(self, blocks: int, x: int, x_stride: int, out: int, w_exponents: int, x_exponents: int) -> None:
        k = self.weight.shape[1]
        rows = torch.stack([memory(x + 2 * i * x_stride, k, self.dtype) for i in range(blocks)]).float()
        scaled, exponents = fitted(rows) if self.dtype == BF16 else (rows, torch.zeros(blocks, dtype=torch.int32))
        memory(out, blocks * self.terms * k, FP16).copy_(scaled.half().repeat(1, self.terms).flatten())
        memory(x_exponents, blocks, torch.int32).copy_(exponents)

    def prefill_y(
        self,
        blocks: int,
        x: int,
        x_stride: int,
        m: int,
        first: int,
        rows: int,
        out: int,
        w_exponents: int,
        x_exponents: int,
        bias: int | None,
        bias_is_fp32: int,
        bias_stride: int,
    ) -> None:
        n = self.weight.shape[0]
        assert blocks >= 1
        assert x % 16 == 0
        assert x_stride % 8 == 0
        if self.wide:
            assert rows % 8 == first % 8 == n % 8 == out % 16 == 0
        exponents = memory(x_exponents, m, torch.int32)[:, None] + memory(w_exponents, rows, torch.int32)
        for i in range(m):
            value = torch.ldexp(memory(x + 4 * i * x_stride, rows, FP32), exponents[i])
            if bias is not None:
                dtype = FP32 if bias_is_fp32 else self.dtype
                size = 4 if bias_is_fp32 else 2
                value = value + memory(bias + size * (i * bias_stride + first), rows, dtype).float()
            memory(out + 2 * (i * n + first), rows, self.dtype).copy_(value.to(self.dtype))


class FakeLauncher:
    index, readable = 0, True

    def __init__(self, weight: PackedWeight) -> None:
        self.addresses = [part.data_ptr() for part in weight.parts.values()]
        self.made: dict[str, Fake] = {}

    def stream(self) -> int:
        return 0

    def get(self, bind: object, weight: PackedWeight, dtype: torch.dtype, m: int, variant: tuple[str, bool]) -> Fake:
        return self.made.setdefault(variant[0], Fake(*variant, weight, dtype))


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codebook, "device_of", lambda index: ("sm_90a", 132))
    monkeypatch.setattr(prefill, "add_up", lambda x, w, sums: sums.copy_(x.float() @ w.float().t()))
    monkeypatch.setattr(prefill.Launcher, "of", lambda stem, weight: FakeLauncher(weight))


@pytest.mark.usefixtures("faked")
@pytest.mark.parametrize("cut", [Cut(1000, 200, 200), Cut(64, 200, 7), Cut(32, 96, 50), Cut(1000, 65, 65)], ids=str)
@pytest.mark.parametrize("bias_dtype", [None, FP32, "own"], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("n", [136, 131])
def test_every_slab_and_chunk_lands_in_its_place(n: int, dtype: torch.dtype, bias_dtype: Any, cut: Cut) -> None:
    m, k = 200, 328
    weight = random_weight("nf4-64", n, k, seeded(0))
    x = torch.randn(m, k + 8, generator=seeded(1)).to(dtype)[:, :k]
    bias = None if bias_dtype is None else torch.randn(n, generator=seeded(2)).to(FP32 if bias_dtype == FP32 else dtype)
    out = torch.full((m, n), torch.nan, dtype=dtype)
    launcher: Any = FakeLauncher(weight)
    each = Cut(min(cut.slab, -(-n // 8) * 8), cut.chunk, cut.sums)
    prefill.multiply(launcher, x, weight, bias, out, each)
    reference.assert_within_contract(out, reference.linear(x, weight, bias), f"{dtype} {bias_dtype} {each}")
    assert launcher.made[prefill.X_STEM].seen == [min(each.chunk, m - top) for top in range(0, m, each.chunk)]
    assert sum(launcher.made[prefill.STEM].seen) == n * len(launcher.made[prefill.X_STEM].seen)


@pytest.mark.usefixtures("faked")
def test_adapters_are_added_before_the_rounding_and_only_where_a_row_has_one() -> None:
    m, n, k, rank = 80, 136, 256, 4
    weight = random_weight("nf4-64", n, k, seeded(0))
    x = torch.randn(m, k, generator=seeded(1)).bfloat16()
    b, shrunk = torch.randn(n, rank, generator=seeded(2)), torch.randn(m, rank, generator=seeded(3)) * 10
    index = torch.arange(m, dtype=torch.int32) % 2 - 1
    table = torch.tensor([[0, rank, 0, rank]], dtype=torch.int32)
    expand = Expand(shrunk, b.flatten(), table, torch.tensor([0.5]), index)
    out, plain = torch.empty(m, n, dtype=BF16), torch.empty(m, n, dtype=BF16)
    prefill.run_adapters(x, weight, None, expand, out)
    prefill.run(x, weight, None, plain)
    used = index >= 0
    assert torch.equal(out[~used], plain[~used])
    y = reference.linear(x, weight) + 0.5 * (shrunk.double() @ b.double().t())
    reference.assert_within_contract(out[used], y[used], "rows with an adapter")


@pytest.mark.usefixtures("faked")
@pytest.mark.parametrize("by", [1, 2])
def test_weights_at_odd_addresses_go_to_the_fallback(by: int) -> None:
    weight = random_weight("nf4-64", 16, 64, seeded(0))
    room = torch.empty(weight.codes.numel() + 8, dtype=torch.uint8)
    codes = room[-room.data_ptr() % 4 + by :][: weight.codes.numel()].view(weight.codes.shape).copy_(weight.codes)
    moved = PackedWeight(weight.format, weight.shape, {**weight.parts, "codes": codes})
    x, out = torch.randn(70, 64, generator=seeded(1)).bfloat16(), torch.empty(70, 16, dtype=BF16)
    prefill.run(x, moved, None, out)
    assert torch.equal(out, (x.float() @ weight.dequantize().t()).bfloat16())


@pytest.mark.usefixtures("faked")
@pytest.mark.parametrize("layout", ["offset", "stride", "columns", "expanded"])
def test_any_layout_of_x_is_read(layout: str) -> None:
    weight = random_weight("nf4-64", 24, 64, seeded(0))
    wide = torch.randn(70, 136, generator=seeded(1)).bfloat16()
    x = {
        "offset": wide[:, 1:65],
        "stride": torch.randn(70, 69, generator=seeded(1)).bfloat16()[:, :64],
        "columns": wide[:, ::2][:, :64],
        "expanded": wide[:1, :64].expand(70, 64),
    }[layout]
    out = torch.empty(70, 24, dtype=BF16)
    prefill.run(x, weight, None, out)
    reference.assert_within_contract(out, reference.linear(x, weight), layout)


# ---- the kernels' machine code


def code_of(stem: str, key: str, dtype: torch.dtype, arch: str, wide: bool = True) -> sass.Sass:
    return sass.disassemble(nvrtc.compile(stem, arch, prefill.macros(stem, get_format(key), dtype, wide)))


@compiled
@pytest.mark.parametrize("arch", prefill.ARCHITECTURES)
@pytest.mark.parametrize(
    ("key", "dtype"), [("nf4-64", BF16), ("nf4-64-nested", FP16), ("mxfp4", BF16), ("fp4-4096", FP16)]
)
def test_decoding_writes_16_bytes_a_lane(key: str, dtype: torch.dtype, arch: str) -> None:
    code = code_of(prefill.STEM, key, dtype, arch)
    assert not code.local_memory()
    found = sass.count(code.instructions)
    assert found["STG.E.128"] == 4 * prefill.TERMS[dtype], "four turns at once"
    assert found["STG.E"] == 1, "the row's exponent"
    assert found["LDS"] >= 32, "a look-up a weight"
    narrow = [name for name in found if name.startswith(("STG", "LDG")) and (".U8" in name or ".U16" in name)]
    assert bool(narrow) == (key in ("nf4-64-nested", "mxfp4")), "but for scales of a byte"


@compiled
@pytest.mark.parametrize("arch", prefill.ARCHITECTURES)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_x_and_outputs_go_16_bytes_a_lane(dtype: torch.dtype, arch: str) -> None:
    lay_out, end = (code_of(stem, "nf4-64", dtype, arch) for stem in (prefill.X_STEM, prefill.Y_STEM))
    for code in (lay_out, end, code_of(prefill.Y_STEM, "nf4-64", dtype, arch, wide=False)):
        assert not code.local_memory()
    found = sass.count(lay_out.instructions)
    assert {name for name in found if name.startswith("LDG")} == {"LDG.E.128.CONSTANT"}
    assert found["STG.E.128"] >= prefill.TERMS[dtype]
    found = sass.count(end.instructions)
    assert {name for name in found if name.startswith("STG")} == {"STG.E.128"}
    assert sum(count for name, count in found.items() if name.startswith("LDG") and ".128" in name) >= 2


def test_the_struct_is_what_the_kernels_take() -> None:
    assert ctypes.sizeof(prefill._Problem) == 88
    assert prefill._Problem.bias_stride.offset == 56
    assert ctypes.sizeof(prefill._Table) == 68
