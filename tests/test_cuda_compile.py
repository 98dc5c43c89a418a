"""Every CUDA kernel compiles for each architecture it declares, without local memory and with the widths meant."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from halfbyte.formats import get_format
from halfbyte.kernels import Problem, codebook, codebook_mma, codebook_wgmma, nvrtc
from halfbyte.lab import sass

pytestmark = pytest.mark.skipif(nvrtc.missing() is not None, reason=str(nvrtc.missing()))

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# key, dtype, m, n, k, strict, scales decoded aside
CASES = [
    ("nf4", BF16, 1, 16384, 16384, False, False),
    ("nf4", FP16, 1, 16384, 16384, False, False),
    ("nf4", BF16, 1, 4096, 4096, False, False),
    ("nf4", BF16, 4, 16384, 16384, False, False),
    ("nf4", BF16, 8, 14336, 4096, False, False),
    ("nf4", FP16, 8, 4096, 14336, False, False),
    ("nf4", BF16, 16, 12288, 4096, False, False),
    ("nf4-64-nested", BF16, 1, 16384, 16384, False, True),
    ("nf4-64-nested", FP16, 8, 14336, 4096, False, True),
    ("nf4-32", BF16, 1, 4096, 4096, False, False),
    ("nf4-4096", BF16, 1, 300, 576, False, True),
    ("mxfp4", BF16, 8, 14336, 4096, False, True),
    ("nf4", BF16, 1, 16384, 16384, True, False),
    ("nf4-64-nested", FP32, 8, 4096, 4096, False, True),
]
# stores three numbers and loads them again; half of that is in the main loop of some 550 instructions
SPILLS = (("nf4", FP16, 1, 16384, 16384, False, False), "sm_90a")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path_factory.getbasetemp() / "cubins"))
    nvrtc.cache_folder.cache_clear()


def macros(case: tuple[Any, ...], arch: str) -> dict[str, int]:
    key, dtype, m, n, k, strict, side = case
    side = side or arch not in codebook.BULK_COPY
    m = min(m, codebook_mma._chunk(arch))
    try:
        config, _ = codebook_mma.configure(get_format(key), dtype, m, n, k, arch, 132, strict, side)
    except ValueError as error:
        pytest.skip(str(error))
    return asdict(config)


@pytest.mark.parametrize("arch", codebook_mma.ARCHITECTURES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_no_local_memory_and_the_widths_meant(case: tuple[Any, ...], arch: str) -> None:
    code = sass.disassemble(nvrtc.compile("codebook_mma", arch, macros(case, arch)))
    loop = sass.count(code.main_loop())
    assert len(code.local_memory()) <= (6 if (case, arch) == SPILLS else 0)
    tiles, terms = macros(case, arch)["TILES"], macros(case, arch)["TERMS"]
    assert loop["HMMA"] >= 4 * tiles * terms
    if tiles > 1:  # with one, the compiler may lay the end of a pass into the loop
        narrow = [
            name for name in loop if name.startswith(("LD", "ST")) and any(w in name for w in (".U8", ".U16", ".S8"))
        ]
        assert not narrow, f"byte or half loads in the main loop: {narrow}"
        next_x = 2 if macros(case, arch)["X_ROWS"] == 8 else 1
        assert sum(loop[name] for name in loop if name.startswith(("LDG.", "STG"))) <= next_x, "but for the next x"
    if macros(case, arch)["BLOCK"] == 64:
        assert loop["LDS.64"] >= 2 * tiles, "codes are read 8 bytes a lane and row"
    assert loop["LDS.128"] >= 2, "x is read 16 bytes a lane"


@pytest.mark.parametrize("arch", codebook.BULK_COPY)
def test_codes_come_by_bulk_copy(arch: str) -> None:
    code = sass.disassemble(nvrtc.compile("codebook_mma", arch, macros(CASES[0], arch)))
    assert sass.count(code.instructions)["UTMALDG"] >= 2


def test_codes_come_16_bytes_at_a_time_before_hopper() -> None:
    code = sass.disassemble(nvrtc.compile("codebook_mma", "sm_80", macros(CASES[0], "sm_80")))
    copies = [name for name in sass.count(code.instructions) if name.startswith("LDGSTS")]
    assert copies
    assert all(".128" in name for name in copies)


def test_supports_says_why_not() -> None:
    nf4 = get_format("nf4")
    assert codebook_mma.reason_against(Problem(nf4, BF16, 1, 64, 64, "sm_90a")) is None
    for problem, word in [
        (Problem(nf4, BF16, 1, 64, 64, "sm_75"), "sm_75"),
        (Problem(nf4, BF16, 65, 64, 64, "sm_90a"), "65"),
        (Problem(nf4, BF16, 1, 64, 96, "sm_90a"), "K = 96"),
        (Problem(get_format("q4_0"), BF16, 1, 64, 64, "sm_90a"), "q4_0"),
        (Problem(get_format("nvfp4"), BF16, 1, 64, 64, "sm_90a"), "nvfp4"),
    ]:
        reason = codebook_mma.reason_against(problem)
        assert reason is not None
        assert word in reason


@pytest.mark.parametrize("n", [16, 96, 1000, 4096, 14336, 65536, 151936])
@pytest.mark.parametrize("k", [64, 576, 4096, 14336, 32768])
def test_every_row_and_unit_is_someones(n: int, k: int) -> None:
    splits = set()
    for m in (1, 2, 5, 8, 16):
        config, grid = codebook_mma.configure(get_format("nf4"), BF16, m, n, k, "sm_90a", 132)
        slab = -(-n // (16 * grid.clusters))
        assert grid.clusters * config.SPLIT <= 132
        assert 1 <= config.LAST <= config.TILES
        assert (slab - config.LAST) % config.TILES == 0, "the larger slabs end with a pass of LAST tiles"
        assert grid.units % codebook.TEAM == 0
        assert k <= grid.units * config.SPLIT * codebook.UNIT
        assert k > grid.units * (config.SPLIT - 1) * codebook.UNIT, "no block without work in K"
        assert config.shared_bytes <= codebook_mma.room("sm_90a", config.RESIDENT)
        splits.add((config.SPLIT, grid.units))
    assert len(splits) == 1, "the order of summation must not depend on M"


def test_structs_are_what_the_kernel_takes() -> None:
    assert ctypes.sizeof(codebook_mma._Maps) == 768
    assert ctypes.sizeof(codebook.Codebook) == 68
    assert ctypes.sizeof(codebook.Scales) == 40
    assert ctypes.sizeof(codebook_mma._Problem) == 152


@pytest.mark.parametrize("key", ["nf4", "fp4", "mxfp4"])
def test_scaled_table_is_finer_than_a_rounded_one(key: str) -> None:
    entries = torch.tensor(get_format(key).codebook, dtype=torch.float64)
    factor = codebook.table_factor(get_format(key).codebook)
    scaled = (entries * factor).half().double() / factor
    plain = entries.half().double()
    assert (scaled - entries).norm() <= (plain - entries).norm()
    assert ((scaled - entries).abs() <= entries.abs() * 2**-11).all()


# ---- codebook_wgmma

SERVED_SHAPES = (  # those of the targets for batches
    *((6144, 5120), (5120, 4096), (65536, 5120), (5120, 32768), (16384, 16384)),
    *((4096, 14336), (14336, 4096), (12288, 4096), (4096, 4096)),
)
CHOICES = ("ROW_GROUPS", "UNIT_GROUPS", "COLUMNS", "BLOCK", "X_TYPE", "CLUSTER", "RANKS", "SCALE_KIND", "SPREAD")
REGISTERS = 65536  # of a multiprocessor
SHARED = 227 << 10  # bytes that a block may have


def wgmma_configurations() -> list[codebook_wgmma.Config]:
    """All that the kernel offers for some formats on those shapes, each once."""
    found: dict[codebook_wgmma.Config, None] = {}
    for key in ("nf4", "nf4-32", "nf4-64-nested", "mxfp4"):
        format = get_format(key)
        for dtype, m, (n, k) in [
            (dtype, m, shape) for dtype in (BF16, FP16) for m in (16, 32, 64) for shape in SERVED_SHAPES
        ]:
            side = not codebook.copies_fp32(format, k, codebook_wgmma.ARCH)
            found |= dict.fromkeys(codebook_wgmma.configurations(format, dtype, m, n, k, 132, side))
    return list(found)


def covering(configs: Sequence[codebook_wgmma.Config]) -> list[codebook_wgmma.Config]:
    """A few of them in which every two choices of any of them meet; and those that need the most registers."""

    def met(config: codebook_wgmma.Config) -> set[tuple[tuple[str, int], ...]]:
        chosen = [(name, getattr(config, name)) for name in CHOICES]
        heavy = (
            config.COLUMNS >= 32 and config.X_TYPE == 1
        )  # sums of many rows of bf16: how they are cut, and all scales
        return set(combinations(chosen, 2)) | ({tuple(chosen[i] for i in (0, 1, 2, 3, 7))} if heavy else set())

    left = set().union(*map(met, configs))
    found = []
    while left:
        found.append(max(configs, key=lambda config: len(met(config) & left)))
        left -= met(found[-1])
    return found


def registers_at_start(config: codebook_wgmma.Config) -> int:
    """Of a thread, before the warpgroups share them anew."""
    return REGISTERS // config.threads // 8 * 8


def wgmma_id(config: codebook_wgmma.Config) -> str:
    return "-".join(str(getattr(config, name)) for name in CHOICES)


@pytest.mark.parametrize("config", covering(wgmma_configurations()), ids=wgmma_id)
def test_wgmma_has_no_local_memory_and_the_widths_meant(config: codebook_wgmma.Config) -> None:
    cubin = nvrtc.compile(codebook_wgmma.STEM, codebook_wgmma.ARCH, asdict(config))
    code, resources = sass.disassemble(cubin), sass.resources(cubin)
    loop, all_of_it = sass.count(code.main_loop()), sass.count(code.instructions)
    assert not code.local_memory()
    shapes = {sass.opcode(line).split(".")[1] for line in code.main_loop() if "HGMMA" in sass.opcode(line)}
    assert shapes == {f"64x{config.COLUMNS}x16"}, "all rows of x at once"
    units, rest = divmod(loop["HGMMA"], 4)  # of 64 rows and 64 k, which take four
    assert units in (4 // config.UNIT_GROUPS, 8 // config.UNIT_GROUPS), "a stage's, or two stages' by turns"
    assert rest == 0
    assert all_of_it["HGMMA"] == loop["HGMMA"], "there is one main loop"
    assert not [name for name in loop if name.startswith(("LDG", "STG", "STS"))], (
        "all that it reads is in shared memory"
    )
    assert not [name for name in loop if any(width in name for width in (".U8", ".U16", ".S8", ".S16"))]
    scale_blocks = 64 // config.BLOCK
    codes = (
        4 if config.BLOCK == 32 else 0
    )  # words that are read one by one, as 16 weights of each scale block are a lane's
    assert 16 * units <= loop["LDS"] <= units * (16 + codes + 2 * scale_blocks), "16 look-ups, two rows' scales"
    if config.BLOCK == 64:
        assert loop["LDS.64"] >= 2 * units, "codes are read 8 bytes a lane and row"
    assert all_of_it["UTMALDG"] >= (1 if config.SCALE_SIDE else 2), "codes and fp32 scales"
    assert all_of_it["UBLKCP"] >= (2 if config.X_TYPE == 1 else 1), "x, and what undoes its scaling"
    check_registers(config, code, resources.registers)


def check_registers(config: codebook_wgmma.Config, code: sass.Sass, at_start: int) -> None:
    """The warpgroups share what the launch gave, as the code says, and use no more than that."""
    assert at_start <= registers_at_start(config)
    shared = 128 * config.PRODUCER_REGISTERS + (config.threads - 128) * config.CONSUMER_REGISTERS
    assert shared <= config.threads * at_start, "else the multiplying warpgroups wait for registers for ever"
    said = [line for line in code.instructions if sass.opcode(line).startswith("USETMAXREG")]
    assert {int(line.split()[-1], 16) for line in said} == {config.PRODUCER_REGISTERS, config.CONSUMER_REGISTERS}
    used = {int(number) for line in code.instructions for number in re.findall(r"\bR(\d+)\b", line)}
    assert max(used) < config.CONSUMER_REGISTERS


def test_wgmma_configurations_fit() -> None:
    configs = wgmma_configurations()
    assert len({wgmma_id(config) for config in configs}) == len(configs), "one ring for each choice, the longest"
    for config in configs:
        assert config.STAGES >= 2
        assert config.shared_bytes + 1024 <= SHARED, "the table begins 1024 bytes in"
        shared = 128 * config.PRODUCER_REGISTERS + (config.threads - 128) * config.CONSUMER_REGISTERS
        assert shared <= config.threads * registers_at_start(config)
        assert config.PRODUCER_REGISTERS % 8 == config.CONSUMER_REGISTERS % 8 == 0
        assert 24 <= config.PRODUCER_REGISTERS <= registers_at_start(config) <= config.CONSUMER_REGISTERS <= 256


@pytest.mark.parametrize("block", [32, 64])
@pytest.mark.parametrize("columns", [16, 32, 64])
@pytest.mark.parametrize("x_type", [0, 1])
def test_laying_x_out_takes_little_beside_the_multiply(x_type: int, columns: int, block: int) -> None:
    macros = {"COLUMNS": columns, "BLOCK": block, "X_TYPE": x_type, "OVERLAP": 1}
    cubin = nvrtc.compile(codebook_wgmma.IMAGE_STEM, codebook_wgmma.ARCH, macros)
    code, resources = sass.disassemble(cubin), sass.resources(cubin)
    assert not code.local_memory()
    assert resources.registers <= 64
    assert resources.shared_bytes == resources.stack_bytes == 0
    found = sass.count(code.instructions)
    reads = [name for name in found if name.startswith("LDG")]
    assert reads
    assert all(".128" in name for name in reads), "x is read 16 bytes a lane"


def test_laying_x_out_is_launched_with_blocks_of_two_warps(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []
    monkeypatch.setattr(nvrtc, "load", lambda *arguments: loaded.append(arguments))
    monkeypatch.setattr(nvrtc, "function", lambda kernel: 0)
    config = codebook_wgmma.configure(get_format("nf4"), BF16, 16, 4096, 4096, 132, False)
    config_of_launch = codebook_wgmma.launch_image(config, 4096, 4096, 0, 132).record.config
    assert config_of_launch.block[0] == 64
    assert config_of_launch.shared_bytes == 0
    assert loaded[0][0] == codebook_wgmma.IMAGE_STEM
    # beside 640 threads, the most, there are registers for its two warps
    assert 640 * registers_at_start(max(wgmma_configurations(), key=lambda each: each.threads)) + 64 * 64 <= REGISTERS


def test_wgmma_structs_are_what_the_kernels_take() -> None:
    assert ctypes.sizeof(codebook_wgmma._Maps) == 256
    assert ctypes.sizeof(codebook_wgmma._Problem) == 136
    assert codebook_wgmma._Problem.x_stride.offset == 24
    assert codebook_wgmma._Problem.units.offset == 48


def test_wgmma_says_why_not() -> None:
    nf4 = get_format("nf4")
    assert codebook_wgmma.reason_against(Problem(nf4, BF16, 9, 64, 64, "sm_90a")) is None
    assert codebook_wgmma.reason_against(Problem(nf4, BF16, codebook_wgmma.MAX_M, 64, 64, "sm_90a")) is None
    assert codebook_wgmma.reason_against(Problem(nf4, FP16, 16, 2048, 64, "sm_90a")) is None
    assert codebook_wgmma.reason_against(Problem(get_format("mxfp4"), FP16, 16, 64, 64, "sm_90a")) is None, (
        "an exact table"
    )
    for problem, word in [
        (Problem(nf4, BF16, 16, 64, 64, "sm_100"), "sm_100"),
        (Problem(nf4, BF16, 16, 64, 64, "cpu"), "cpu"),
        (Problem(nf4, BF16, 8, 64, 64, "sm_90a"), "got 8"),
        (Problem(nf4, BF16, codebook_wgmma.MAX_M + 1, 64, 64, "sm_90a"), f"got {codebook_wgmma.MAX_M + 1}"),
        (Problem(nf4, FP32, 16, 4096, 64, "sm_90a"), "fp32"),
        (Problem(nf4, FP16, 16, 2047, 64, "sm_90a"), "fewer than 2048 rows"),
        (Problem(nf4, BF16, 16, 64, 96, "sm_90a"), "K = 96"),
        (Problem(get_format("q4_0"), BF16, 16, 64, 64, "sm_90a"), "q4_0"),
        (Problem(get_format("nvfp4"), BF16, 16, 64, 64, "sm_90a"), "nvfp4"),
    ]:
        reason = codebook_wgmma.reason_against(problem)
        assert reason is not None
        assert word in reason


# ---- the cache on disk

SOURCE = 'extern "C" __global__ void tiny(int* out) { *out = VALUE; }'


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tiny.cu").write_text(SOURCE)
    monkeypatch.setattr(nvrtc, "SOURCES", tmp_path)
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(nvrtc, "_cubins", {})
    nvrtc.cache_folder.cache_clear()
    nvrtc._source.cache_clear()
    return tmp_path / "cache"


def test_a_second_process_compiles_nothing(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = nvrtc.compile("tiny", "sm_90a", {"VALUE": 1})
    monkeypatch.setattr(nvrtc, "_cubins", {})
    monkeypatch.setattr(nvrtc, "_compile", lambda *arguments: pytest.fail("compiled again"))
    assert nvrtc.compile("tiny", "sm_90a", {"VALUE": 1}) == first


def test_threads_compile_a_kernel_once_and_two_at_once(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[int] = []
    both = threading.Barrier(2, timeout=20)  # passed by two compilations at a time only

    def compile(source: str, stem: str, arch: str, macros: dict[str, int]) -> bytes:
        both.wait()
        compiled.append(macros["VALUE"])
        return b"cubin %d" % macros["VALUE"]

    monkeypatch.setattr(nvrtc, "_compile", compile)
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda i: nvrtc.compile("tiny", "sm_90a", {"VALUE": i % 2}), range(6)))
    assert found == [b"cubin 0", b"cubin 1"] * 3
    assert sorted(compiled) == [0, 1]


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"", lambda data: data[:-1] + b"\xff"])
def test_a_damaged_entry_is_rebuilt(tiny: Path, monkeypatch: pytest.MonkeyPatch, damage: object) -> None:
    first = nvrtc.compile("tiny", "sm_90a", {"VALUE": 1})
    (entry,) = tiny.glob("*.cubin")
    entry.write_bytes(damage(entry.read_bytes()))  # type: ignore[operator]
    monkeypatch.setattr(nvrtc, "_cubins", {})
    assert nvrtc.compile("tiny", "sm_90a", {"VALUE": 1}) == first
    assert nvrtc._read(entry) == first


def test_other_options_architectures_and_sources_are_other_entries(tiny: Path) -> None:
    nvrtc.compile("tiny", "sm_90a", {"VALUE": 1})
    nvrtc.compile("tiny", "sm_90a", {"VALUE": 2})
    nvrtc.compile("tiny", "sm_80", {"VALUE": 1})
    (tiny.parent / "tiny.cu").write_text(SOURCE + " // changed")
    nvrtc._source.cache_clear()
    nvrtc.compile("tiny", "sm_90a", {"VALUE": 1})
    assert len(list(tiny.glob("*.cubin"))) == 4


def test_a_refusal_carries_the_compilers_log(tiny: Path) -> None:
    with pytest.raises(nvrtc.CompileError, match="nonsense"):
        nvrtc.compile("tiny", "sm_90a", {"VALUE": "nonsense"})  # type: ignore[dict-item]


def test_a_folder_that_cannot_be_written_falls_back_with_a_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path / "file" / "below"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    nvrtc.cache_folder.cache_clear()
    with pytest.warns(UserWarning, match="HALFBYTE_CACHE"):
        folder = nvrtc.cache_folder()
    assert folder.parent == tmp_path
    nvrtc.cache_folder.cache_clear()


def test_many_processes_at_once(tiny: Path) -> None:
    script = (
        "from pathlib import Path; from halfbyte.kernels import nvrtc; import hashlib, sys;"
        f"nvrtc.SOURCES = Path({str(tiny.parent)!r});"
        "print(hashlib.sha256(nvrtc.compile('tiny', 'sm_90a', {'VALUE': 7})).hexdigest())"
    )
    source = str(Path(codebook_mma.__file__).parents[2])
    environment = {**os.environ, "HALFBYTE_CACHE": str(tiny), "PYTHONPATH": source}
    runs = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(3)
    ]
    assert len({run.communicate(timeout=300)[0] for run in runs}) == 1
    assert all(run.returncode == 0 for run in runs)
    assert len(list(tiny.iterdir())) == 1


def test_two_threads_may_compile_the_first_kernels(tmp_path: Path) -> None:
    """Both would import cuda-core at once, which it does not bear."""
    script = (
        "import threading\n"
        "from halfbyte.kernels import nvrtc\n"
        "done, gate = [], threading.Barrier(2)\n"
        "def work(columns):\n"
        "    gate.wait()\n"
        "    macros = {'COLUMNS': columns, 'BLOCK': 64, 'X_TYPE': 1, 'OVERLAP': 1}\n"
        "    done.append(len(nvrtc.compile('codebook_wgmma_x', 'sm_90a', macros)))\n"
        "threads = [threading.Thread(target=work, args=(columns,)) for columns in (16, 32)]\n"
        "[thread.start() for thread in threads], [thread.join() for thread in threads]\n"
        "assert len(done) == 2, done\n"
    )
    source = str(Path(codebook_mma.__file__).parents[2])
    environment = {**os.environ, "HALFBYTE_CACHE": str(tmp_path), "PYTHONPATH": source}
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300, env=environment)
