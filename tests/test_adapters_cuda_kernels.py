"""The CUDA kernels of adapters without a GPU: what they compile to, and what their launches are given."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import asdict
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from halfbyte.adapters import AdapterPool
from halfbyte.formats import get_format
from halfbyte.kernels import adapters_expand, adapters_shrink, codebook_mma, codebook_wgmma, kernels, nvrtc
from halfbyte.kernels.registry import Expand
from halfbyte.lab import sass

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
needs_nvrtc = pytest.mark.skipif(nvrtc.missing() is not None, reason=str(nvrtc.missing()))
NF4 = get_format("nf4")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path_factory.getbasetemp() / "cubins"))
    nvrtc.cache_folder.cache_clear()
    yield
    nvrtc.cache_folder.cache_clear()


# ---- shrink


@needs_nvrtc
@pytest.mark.parametrize("arch", adapters_shrink.ARCHITECTURES)
@pytest.mark.parametrize(
    ("x_dtype", "a_dtype", "k", "wide"),
    [
        (BF16, BF16, 5120, True),
        (FP16, FP16, 32768, True),
        (BF16, FP32, 5120, True),
        (BF16, BF16, 5120, False),
    ],
    ids=str,
)
def test_shrink_compiles_without_spills(
    arch: str, x_dtype: torch.dtype, a_dtype: torch.dtype, k: int, wide: bool
) -> None:
    config = adapters_shrink.configure(x_dtype, a_dtype, k, wide, arch)
    check_shrink(arch, config, x_dtype == a_dtype)


@needs_nvrtc
@pytest.mark.parametrize(("k", "columns", "block"), [(5120, 16, 64), (5120, 64, 32), (32768, 32, 64)])
def test_shrink_that_lays_x_out_compiles(k: int, columns: int, block: int) -> None:
    check_shrink("sm_90a", adapters_shrink.configure(BF16, BF16, k, True, "sm_90a", columns, block), True)


def check_shrink(arch: str, config: adapters_shrink.Config, tensor_cores: bool) -> None:
    cubin = nvrtc.compile(adapters_shrink.STEM, arch, asdict(config))
    code, found = sass.disassemble(cubin), sass.count(sass.disassemble(cubin).instructions)
    assert not code.local_memory()
    used = sass.resources(cubin)
    assert used.registers <= 128
    if arch in adapters_shrink.CLUSTERS:
        assert config.WARPS == 2, (
            "a multiprocessor whose base kernel has 18 warps of 96 registers has room for two of 128"
        )
        assert used.shared_bytes + 1024 <= adapters_expand.BESIDE
    if tensor_cores:
        batch = 5 if config.RANKS == 16 else 8
        assert found["HMMA"] == 2 * batch
        if config.WIDE:
            wide = sum(found[name] for name in found if name.startswith("LDG") and ".128" in name)
            assert wide == batch * (1 + config.RANKS // 8) + config.COLUMNS // 8, "of A and x, and of x for the image"
    else:
        assert not found["HMMA"]
        assert found["FFMA"] >= config.RANKS


def test_the_order_of_sums_does_not_depend_on_the_rows() -> None:
    for k in (64, 1024, 1025, 4096, 5120, 14336, 32768, 1 << 20):
        imaged = (adapters_shrink.configure(BF16, BF16, k, True, "sm_90a", columns, 64) for columns in (0, 16, 32, 64))
        seen = {(config.CLUSTER, config.WARPS, config.RANKS) for config in imaged}
        assert len(seen) == 1
        cluster = seen.pop()[0]
        assert cluster in (1, 2, 4, 8, 16)
        assert cluster == 16 or k <= 256 * cluster
    assert adapters_shrink.configure(BF16, BF16, 5120, True, "sm_80").CLUSTER == 1, "no clusters there"


@pytest.mark.parametrize(("m", "slots", "width"), [(1, 1, 16), (64, 64, 16), (16, 8, 64), (64, 1000, 768), (3, 2, 7)])
def test_no_more_clusters_than_items_nor_than_fit(m: int, slots: int, width: int) -> None:
    for k in (1024, 5120, 32768):
        config = adapters_shrink.configure(BF16, BF16, k, True, "sm_90a")
        clusters = adapters_shrink.clusters_for(config, m, slots, width)
        assert 1 <= clusters * config.CLUSTER <= max(adapters_shrink.BLOCKS, config.CLUSTER)
        tiles = -(-width // config.RANKS)
        assert clusters <= m * tiles


def test_a_cluster_for_each_item_where_they_fit() -> None:
    config = adapters_shrink.configure(BF16, BF16, 1024, True, "sm_90a")
    for rows in (1, 7, 8, 9, 17, 24, 40):
        for slots in (1, 2, 3):
            kinds = slots + 1  # those without an adapter have an item, too
            shares = (each for each in product(range(rows + 1), repeat=kinds) if sum(each) == rows)
            most = max(sum(-(-count // 8) for count in each) for each in shares)
            assert adapters_shrink.clusters_for(config, rows, slots, 16) == most


def check_layout(stem: str, macros: dict[str, int], struct: str, mirror: type[ctypes.Structure]) -> None:
    """The compiler places the struct's fields where ctypes does."""
    names = [name for name, _ in mirror._fields_]  # type: ignore[misc]
    asserts = "".join(
        f'static_assert(__builtin_offsetof({struct}, {name}) == {getattr(mirror, name).offset}, "{name}");\n'
        for name in names
    )
    asserts += f'static_assert(sizeof({struct}) == {ctypes.sizeof(mirror)}, "size");\n'
    source = nvrtc._source(stem)
    nvrtc.compile(stem, "sm_90a", macros, source + asserts)
    wrong = asserts.replace(f"{struct}) == ", f"{struct}) == 1 + ")
    with pytest.raises(nvrtc.CompileError, match="size"):
        nvrtc.compile(stem, "sm_90a", macros, source + wrong)


@needs_nvrtc
def test_structs_are_what_the_kernels_take() -> None:
    shrink = asdict(adapters_shrink.configure(BF16, BF16, 1024, True, "sm_90a"))
    check_layout(adapters_shrink.STEM, shrink, "Problem", adapters_shrink._Problem)
    mma = asdict(codebook_mma.configure(NF4, BF16, 1, 4096, 4096, "sm_90a", 132)[0])
    check_layout(codebook_mma.STEM, mma, "Problem", codebook_mma._Problem)
    check_layout(codebook_mma.STEM, mma, "Expand", adapters_expand.ExpandStruct)
    wgmma = asdict(codebook_wgmma.configure(NF4, BF16, 16, 5120, 4096, 132, False))
    check_layout(codebook_wgmma.STEM, wgmma, "Problem", codebook_wgmma._Problem)


@pytest.fixture
def shrinks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """What launches of adapters_shrink are given, where there is no GPU."""
    calls: list[dict[str, Any]] = []

    class Launch:
        def __init__(self, kernel: object, arguments: tuple[Any, ...], **options: Any) -> None:
            last = arguments[-1]
            self.options = {**options, "clusters": last.clusters, "image_blocks": last.image_blocks}

        def __call__(
            self, x: Tensor, bias: None, out: Tensor, stream: int, early: bool, fields: dict[str, Any]
        ) -> None:
            calls.append({**fields, **self.options, "early_now": early})

    monkeypatch.setattr(adapters_shrink, "Launch", Launch)
    monkeypatch.setattr(adapters_shrink, "device_of", lambda index: ("sm_90a", 132))
    monkeypatch.setattr(nvrtc, "load", lambda *arguments: None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    adapters_shrink._launch.cache_clear()
    yield calls
    adapters_shrink._launch.cache_clear()


def test_shrink_is_given_what_it_reads(shrinks: list[dict[str, Any]]) -> None:
    pool = AdapterPool.random(1024, {"q": 32, "v": 64}, [16, 4, 40], dtype=BF16)
    x, index = torch.randn(70, 1024).to(BF16), torch.zeros(70, dtype=torch.int32)
    out = torch.empty(70, pool.width)
    adapters_shrink.run(x, pool.a, pool.spans, index, out)
    adapters_shrink.run(x, pool.a, pool.spans, None, out)
    adapters_shrink.run(x[:0], pool.a, pool.spans, index[:0], out[:0])
    first, second = shrinks
    assert (first["a"], first["spans"], first["index"]) == (
        pool.a.data_ptr(), pool.spans.data_ptr(), index.data_ptr(),
    )  # fmt: skip
    assert second["index"] is None
    assert (first["k"], first["a_rows"], first["n"], first["slots"]) == (1024, pool.a.shape[0], pool.width, 3)
    assert first["blocks"] == 2 * first["clusters"] * 4, "two chunks of rows, clusters of four blocks for K = 1024"
    assert first["early_now"], "it waits for the kernel before it by itself"
    assert first["signal"] is None, "nobody knows of it"


def test_a_launch_tells_the_next_by_words_of_its_own(shrinks: list[dict[str, Any]]) -> None:
    pool = AdapterPool.random(1024, 32, [16], dtype=BF16)
    x = torch.randn(9, 1024).to(BF16)
    shrink = adapters_shrink.Shrink.of(x, pool.a, pool.spans, None, 15)
    end = shrink.out.untyped_storage().data_ptr() + shrink.out.untyped_storage().nbytes()
    assert shrink.out.shape == (9, 15)
    assert shrink.out.is_contiguous()
    plain = shrink.launch()
    imaged = shrink.launch(adapters_shrink.Image(4096, 16, 64, 7))
    for signal, call, words in ((plain, shrinks[0], 1), (imaged, shrinks[1], 16)):
        assert signal == (call["signal"], call["tag"], words)
        assert signal.address is not None
        assert signal.address % 8 == 0
        assert shrink.out.data_ptr() + 4 * shrink.out.numel() <= signal.address
        assert signal.address + 8 * signal.words <= end
        assert signal.tag < 1 << 48, "a word has 16 bits for those who saw it"
    assert plain.tag != imaged.tag
    assert [call["image_blocks"] for call in shrinks] == [0, 16], "a block for each 64 weights of a row"
    assert (shrinks[1]["image"], shrinks[1]["counters"]) == (4096, 7)
    assert shrinks[1]["blocks"] == 16 + 4 * shrinks[1]["clusters"]
    for k in (64, 1536, 32768, 1 << 20):
        config = adapters_shrink.configure(BF16, BF16, k, True, "sm_90a", 16, 64)
        for multiprocessors in (1, 132, 1000):
            blocks = adapters_shrink.image_blocks_for(config, k, multiprocessors)
            assert 0 < blocks <= adapters_shrink.SIGNALS
            assert blocks % config.CLUSTER == 0


# ---- expand


@needs_nvrtc
@pytest.mark.parametrize(("m", "n", "k"), [(1, 65536, 5120), (4, 6144, 5120), (8, 5120, 4096)])
def test_mma_with_adapters_compiles(m: int, n: int, k: int) -> None:
    config = codebook_mma.with_adapters(codebook_mma.configure(NF4, BF16, m, n, k, "sm_90a", 132)[0], "sm_90a")
    code = check_expand(codebook_mma.STEM, asdict(config), multiplies=2 * (2 * 2 + 2 * 3))
    assert any(sass.opcode(line).startswith("LDGSTS.E.64") for line in code), "four numbers of B at once"
    assert any(sass.opcode(line).startswith("LDGSTS.E.BYPASS.128") for line in code), "four of h"
    assert config.shared_bytes <= codebook_mma.room("sm_90a", 1)


@needs_nvrtc
@pytest.mark.parametrize(
    ("m", "n", "k"), [(16, 65536, 5120), (32, 65536, 5120), (16, 5120, 4096), (32, 5120, 32768), (64, 65536, 5120)]
)
def test_wgmma_with_adapters_compiles(m: int, n: int, k: int) -> None:
    config = codebook_wgmma.configure(NF4, BF16, m, n, k, 132, False, adapters=codebook_wgmma.AT_THE_END)
    depth = 2 if config.threads == 640 else 3  # steps of 16 ranks whose B is on its way at once
    code = check_expand(codebook_wgmma.STEM, asdict(config), multiplies=depth * 2 * 2 + 2 * 3)
    assert sum(sass.opcode(line).startswith("LDG.E.EF.64") for line in code) == 2 * depth, "four numbers of B"
    assert sum(sass.opcode(line).startswith("LDG.E.EL.128") for line in code) == depth, "four of h"


@needs_nvrtc
@pytest.mark.parametrize(("m", "n", "k"), [(16, 65536, 5120), (16, 5120, 4096), (64, 65536, 5120)])
def test_wgmma_with_side_warps_for_adapters_compiles(m: int, n: int, k: int) -> None:
    config = codebook_wgmma.configure(NF4, BF16, m, n, k, 132, False, adapters=codebook_wgmma.BY_SIDE_WARPS)
    assert config.ADAPTERS == codebook_wgmma.BY_SIDE_WARPS
    pair = 2 if config.PRODUCER_REGISTERS >= 64 else 1
    code = check_expand(codebook_wgmma.STEM, asdict(config), multiplies=pair * (2 * 2 + 2 * 3), local=96)
    assert any(sass.opcode(line).startswith("LDGSTS.E.64") for line in code), "four numbers of B at once"


@pytest.mark.parametrize(("m", "n", "k"), [(16, 5120, 4096), (32, 6144, 5120), (16, 65536, 5120), (64, 5120, 32768)])
def test_stages_are_spread_with_adapters_only_where_that_gains_more(m: int, n: int, k: int) -> None:
    """Their settings give way; others stay. All have room for the adapters' list."""
    alone = codebook_wgmma.configure(NF4, BF16, m, n, k, 132, False)
    settings = codebook_wgmma._settings(alone)
    config = codebook_wgmma.configure(NF4, BF16, m, n, k, 132, False, settings, codebook_wgmma.BY_SIDE_WARPS)
    assert config.ADAPTERS
    assert config.shared_bytes <= codebook_wgmma.ROOM
    assert config.RANKS == alone.RANKS, "which decides the order of sums"
    if not alone.SPREAD:
        assert codebook_wgmma._settings(config) == settings
    assert ((m, k) == (64, 32768)) == config.SPREAD, "a long K over few rows of W leaves others idle"


def check_expand(stem: str, macros: dict[str, int], multiplies: int, local: int = 40) -> tuple[str, ...]:
    """The code, whose main loop spills nothing; multiplies: for B in 16 bits and, one more for its rest, in fp32."""
    code = sass.disassemble(nvrtc.compile(stem, "sm_90a", macros))
    fp16 = [i for i, line in enumerate(code.instructions) if "HGMMA" in line or "HMMA.16816" in line]
    loops = [code.instructions[first : last + 1] for first, last in code.loops if any(first <= i <= last for i in fp16)]
    spills = {line for line in min(loops, key=len) if sass.opcode(line).startswith(("LDL", "STL"))}
    assert len(spills) <= 1, "at most one address of the main loop is read again for each stage"
    assert len(code.local_memory()) <= local, "of side warps, and at the end of tiles"
    assert sum("TF32" in line for line in code.instructions) == multiplies
    return tuple(code.instructions)


def test_rows_of_a_later_launch_have_their_own_part() -> None:
    pool = AdapterPool.random(64, 32, [16, 16], dtype=FP16)
    layer = pool.layer()
    index = torch.arange(40, dtype=torch.int32) % 2
    expand = Expand(torch.randn(40, layer.width), layer.b, layer.table, layer.scalings, index)
    given = adapters_expand.fields_of(expand, 32)["expand"]
    assert given.shrunk == expand.shrunk[32:].data_ptr()
    assert given.index == index[32:].data_ptr()
    assert (given.b, given.table, given.scalings) == tuple(
        part.data_ptr() for part in (layer.b, layer.table, layer.scalings)
    )
    assert (given.width, given.slots, given.b_type) == (layer.width, 2, 0)
    assert (given.signal, given.tag, given.signals) == (None, 0, 0)
    signal = adapters_shrink.Signal(64, 5, 3)
    told = adapters_expand.fields_of(expand, 0, signal)["expand"]
    assert (told.signal, told.tag, told.signals) == signal
    alone = Expand(expand.shrunk, layer.b, layer.table, layer.scalings, None)
    assert adapters_expand.fields_of(alone, 32)["expand"].index is None


def test_a_table_that_is_not_aligned_is_declined() -> None:
    memory = torch.zeros(12, dtype=torch.int32)
    b, scalings = torch.zeros(0), torch.zeros(2)
    for first, declined in ((0, False), (1, True), (4, False)):
        expand = Expand(torch.zeros(1, 1), b, memory[first : first + 8].view(2, 4), scalings, None)
        assert (adapters_expand.reason_against(expand) is not None) == declined


def test_kernels_that_fold_adapters() -> None:
    folding = {kernel.name for kernel in kernels() if kernel.run_adapters is not None}
    assert folding >= {"cpu_linear", "codebook_mma", "codebook_wgmma"}
