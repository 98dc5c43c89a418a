"""Machine code read without a GPU: what is counted, and what is predicted from it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from halfbyte.kernels import codebook_mma, nvrtc
from halfbyte.lab import sass
from halfbyte.lab.cards import CARDS, get_card
from halfbyte.lab.cli import lab_app
from halfbyte.lab.ladder_rungs import ARCHITECTURES, RUNGS, Rung, get_rung
from halfbyte.lab.sass import Load, Sass
from halfbyte.lab.sass_bound import Access, bound, wavefronts
from halfbyte.lab.sass_report import Problem, examine

needs_compiler = pytest.mark.skipif(nvrtc.missing() is not None, reason=str(nvrtc.missing()))
# 16384 × 16384 on an RTX 5090: microseconds of the article, "Why My 4-Bit CUDA Kernel Wasn't Faster"
ARTICLE = {"ladder_fp16": 320.3, "ladder_q4_bytes": 312.1, "ladder_q4_codes": 144.3, "ladder_q4_wide": 93.0}
ARTICLE_LOADS = {"ladder_q4_bytes": 49, "ladder_q4_codes": 18, "ladder_q4_wide": 6}


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path_factory.getbasetemp() / "cubins"))
    nvrtc.cache_folder.cache_clear()


# ---- reading instructions


@pytest.mark.parametrize(
    ("name", "load"),
    [
        ("LDG.E.U8.CONSTANT", Load("global", 8, "CONSTANT")),
        ("LDG.E.CONSTANT", Load("global", 32, "CONSTANT")),
        ("LDG.E.EF.128.STRONG.GPU", Load("global", 128, "EF.STRONG.GPU")),
        ("LDS.64", Load("shared", 64, "")),
        ("LDSM.16.M88.4", Load("shared", 128, "matrix")),
        ("LDGSTS.E.BYPASS.128", Load("global to shared", 128, "BYPASS")),
        ("UTMALDG.2D", Load("bulk copy", 0, "2D")),
        ("STG.E.128", None),
        ("LDC.64", None),
        ("FFMA", None),
    ],
)
def test_loads_by_width_and_hint(name: str, load: Load | None) -> None:
    assert Load.of(name) == load


def test_pipes_of_instructions() -> None:
    code = ["@!P0 LOP3.LUT R1, R2", "I2FP.F32.S32 R1, R2", "I2F R1, R2", "FFMA R1", "HMMA.16816.F32 R0", "BRA x"]
    assert sass.by_pipe(code) == Counter({"ALU": 2, "XU": 1, "FMA": 1, "tensor": 1, "other": 1})


LOOPS = Sass(
    ("LDG.E R0, [R2]", "FFMA R1", "BRA 0", "S2R R0", "LDG.E R0", "FFMA R1", "FFMA R1", "BRA 4", "BRA 3", "EXIT"),
    ((0, 2), (4, 7), (3, 8)),
)


def test_main_loop_is_the_innermost_that_multiplies_most() -> None:
    assert LOOPS.main_span() == (4, 7)
    with_tensor = Sass((*LOOPS.instructions, "HMMA.16816.F32 R0", "BRA 10"), (*LOOPS.loops, (10, 11)))
    assert with_tensor.main_loop() == ("HMMA.16816.F32 R0", "BRA 10"), "tensor instructions count before all"
    assert Sass(("EXIT",), ((0, 0),)).main_loop() == ()


def test_listing_marks_the_main_loop() -> None:
    lines = LOOPS.listing().splitlines()
    assert [line[6] for line in lines] == list("    ||||  ")
    assert lines[4].endswith("LDG.E R0")


# ---- the article's counts


@needs_compiler
@pytest.mark.parametrize("arch", ["sm_120", "sm_90a"])  # the article's RTX 5090, and Hopper
@pytest.mark.parametrize("stem", ARTICLE_LOADS)
def test_the_articles_loads(stem: str, arch: str) -> None:
    report = examine(stem, arch, Problem())
    assert sum(report.loads.values()) == ARTICLE_LOADS[stem]
    assert report.per_block(sum(report.loads.values())) == ARTICLE_LOADS[stem]
    assert report.per_weight(32) == 1.0  # one a lane and weight


@needs_compiler
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.stem)
def test_rungs_have_the_loads_they_declare_and_spill_nothing(rung: Rung, arch: str) -> None:
    code = sass.disassemble(rung.cubin(arch))
    declared = Counter[tuple[str, int]]()
    for access in rung.accesses:
        declared[access.space, access.bits] += access.count
    found = Counter[tuple[str, int]]()
    for load, number in sass.loads(code.main_loop()).items():
        found[load.space, load.bits] += number
    assert found == declared
    assert not code.local_memory()
    resources = sass.resources(rung.cubin(arch))
    assert resources.stack_bytes == 0
    assert resources.registers * 32 * rung.warps <= 65536 // 2, "two blocks of threads fit a multiprocessor"


# ---- the predicted bound


@pytest.mark.parametrize(
    ("bits", "lane_bytes", "turns"),
    [
        *((32, 4, 1), (8, 1, 1), (64, 8, 2), (128, 16, 4), (32, 0, 1), (16, 2, 1)),
        *((8, 16, 4), (16, 64, 16), (32, 64, 16), (32, 128, 32), (128, 64, 16), (64, 16, 4)),
    ],
)
def test_turns_of_the_banks(bits: int, lane_bytes: int, turns: int) -> None:
    assert wavefronts(bits, [lane * lane_bytes for lane in range(32)]) == turns


def test_bound_of_a_loop_by_hand() -> None:
    card = get_card("h200")
    loop = ["LDG.E.128.CONSTANT R0"] + ["LOP3.LUT R1"] * 10 + ["FFMA R2"] * 32 + ["I2F R3"] * 2 + ["BRA x"]
    result = bound(loop, 1024, [Access("codes", "global", 128, 1, 64)], 0.5625, card)
    expected = {
        "issue": 46 / 4,
        "ALU": 10 / 2,
        "FMA": 32 / 4,
        "conversions": 2 * 2,
        "tensor": 0,
        "load/store instructions": 1,
        "load/store data": 16,
        "shared memory": 0,
        "memory": 576 / (4800 / 1.98 / 132),
    }
    assert result.clocks == pytest.approx(expected)
    assert result.by == "memory"
    assert result.seconds(16384 * 16384) == pytest.approx(16384 * 16384 * 0.5625 / 4.8e12)
    undeclared = bound(loop, 1024, [], 0.5625, card)
    assert undeclared.clocks["load/store data"] == 4, "lanes are adjacent where nothing is declared"


def test_bound_counts_tensor_instructions_and_shared_memory() -> None:
    card = get_card("a100")
    result = bound(["HMMA.16816.F32 R0", "LDS.128 R0", "STS.64 [R0]"], 256, [], 0.5625, card)
    assert result.clocks["tensor"] == pytest.approx(4 * 2048 / card.tensor_per_clock)
    assert card.tensor_per_clock == pytest.approx(1024, rel=0.01), "an A100's multiprocessor, as NVIDIA says"
    assert result.clocks["shared memory"] == 4 * (4 + 2)


@needs_compiler
@pytest.mark.parametrize("stem", ARTICLE)
def test_the_articles_times_are_near_what_is_predicted(stem: str) -> None:
    """Its card boosts beyond the quoted clock, so the time may be below the bound, but not by more than a fifth."""
    report = examine(stem, "sm_120", Problem(), get_card("5090"))
    assert report.least_us == pytest.approx(ARTICLE[stem], rel=0.2)


@needs_compiler
def test_what_the_first_rungs_are_bound_by() -> None:
    bounds = {stem: examine(stem, "sm_90a", Problem()).bound for stem in ARTICLE_LOADS}
    assert all(found is not None and found.by == "load/store data" for found in bounds.values())


def test_cards_are_plausible() -> None:
    for card in CARDS.values():
        assert card.source
        assert card.arch in ARCHITECTURES
        fp32_tflops = 2 * 128 * card.multiprocessors * card.clock_ghz / 1e3
        assert 0.5 < card.tensor_tflops / fp32_tflops < 20, card.name
    with pytest.raises(ValueError, match="5091"):
        get_card("5091")
    assert get_card("RTX 5090") is CARDS["5090"]


# ---- the command


@needs_compiler
@pytest.mark.parametrize("arch", codebook_mma.ARCHITECTURES)
def test_codebook_mma(arch: str) -> None:
    try:
        report = examine("codebook_mma", arch, Problem("nf4-64", "bf16", 1, 4096, 4096))
        more = examine("codebook_mma", arch, Problem("nf4-64-nested", "fp16", 8, 4096, 4096))
    except ValueError as error:  # it has no configuration for a card with little shared memory
        assert arch != "sm_90a"
        pytest.skip(str(error))
    assert report.pipes["tensor"] > 0
    assert 0.5 < report.per_weight(len(report.code.sass.main_loop())) < 10
    assert report.code.bytes_per_weight == 0.5625
    assert 0.5 < more.code.bytes_per_weight < 0.5625


@needs_compiler
def test_command_prints_tables_and_the_listing() -> None:
    result = CliRunner().invoke(lab_app, ["sass", "q4_wide", "--arch", "sm_90a", "--card", "h200", "--listing"])
    assert result.exit_code == 0, result.output
    for words in ("nothing spilled", "bound on H200 SXM", "predicted: at least", "nothing measured", "load/store data"):
        assert words in result.output
    assert any(line[6:7] == "|" and "LDG.E.128" in line for line in result.output.splitlines())


@needs_compiler
def test_command_gives_scripts_json() -> None:
    result = CliRunner().invoke(lab_app, ["sass", "q4_bytes", "--arch", "sm_90a", "--arch", "sm_100", "--json"])
    first, second = json.loads(result.stdout)
    assert [first["arch"], second["arch"]] == ["sm_90a", "sm_100"]
    assert {(load["bits"], load["per_block"]) for load in first["loads"]} == {(8, 16), (16, 33)}
    assert first["card"]["measured"] is False
    assert first["local_memory_instructions"] == 0
    assert "bound_by" not in second, "no card of sm_100 is in the table"


@needs_compiler
@pytest.mark.parametrize(
    ("name", "arch", "problem", "card", "word"),
    [
        ("q5", "sm_90a", Problem(), None, "unknown kernel 'q5'"),
        ("q4_wide", "sm_80", Problem(), "h200", "sm_90a"),
        ("codebook_mma", "sm_90a", Problem(dtype="fp32"), None, "fp32"),
        ("codebook_mma", "sm_90a", Problem(format="q9"), None, "q9"),
        ("codebook_mma", "sm_90a", Problem(format="q4_0"), None, "q4_0"),
    ],
)
def test_bad_input_is_named(name: str, arch: str, problem: Problem, card: str | None, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        examine(name, arch, problem, get_card(card) if card else None)


def test_tools_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [])
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FileNotFoundError, match="nvidia-cuda-nvdisasm"):
        sass.disassemble(b"")


def test_rungs_are_found_by_name() -> None:
    assert get_rung("q4_wide") is get_rung("ladder_q4_wide")
    with pytest.raises(ValueError, match="q4_narrow"):
        get_rung("q4_narrow")
    sources = {path.stem for path in (Path(sass.__file__).parent / "cuda").glob("*.cu")}
    assert sources == {rung.stem for rung in RUNGS}


@needs_compiler
@pytest.mark.parametrize("arch", ["sm_75", "sm_90a"])
@pytest.mark.parametrize(("format", "bits"), [("nf4-64", 4.5), ("q4_k", 4.5), ("awq-128", 4.15625)])
def test_the_kernel_for_every_format(format: str, bits: float, arch: str) -> None:
    """A look-up for each weight of a lane, a multiply-add for each row of x."""
    reports = {m: examine("codebook_gemv", arch, Problem(format, "fp16", m)) for m in (1, 4)}
    for m, report in reports.items():
        assert report.code.weights == 32 * 128
        assert report.code.bytes_per_weight == pytest.approx(bits / 8, abs=0.001)
        assert not report.code.sass.local_memory()
        look_ups = sum(number for load, number in report.loads.items() if (load.space, load.bits) == ("shared", 32))
        assert 128 <= look_ups < 200
        assert report.pipes["FMA"] >= 128 * m
    assert reports[1].pipes["FMA"] < reports[4].pipes["FMA"]


@needs_compiler
def test_the_kernel_for_every_format_says_what_it_does_not_take() -> None:
    with pytest.raises(ValueError, match="is for M up to 64, got 65"):
        examine("codebook_gemv", "sm_90a", Problem(m=65))
    with pytest.raises(ValueError, match="takes x in fp16 or bf16"):
        examine("codebook_gemv", "sm_90a", Problem(dtype="fp32"))


@needs_compiler
def test_the_kernel_for_many_rows_decodes_a_weight_for_each_tile_of_them() -> None:
    few, many = (examine("codebook_gemm", "sm_90a", Problem(m=m, n=65536, k=5120), CARDS["h200"]) for m in (128, 512))
    assert few.code.macros["COLUMNS"] == 128
    assert few.bound is not None
    assert few.bound.by == "tensor"
    assert few.least_us is not None
    assert many.least_us is not None
    assert many.least_us > 3 * few.least_us
    with pytest.raises(ValueError, match="is for M from 65 on, got 1"):
        examine("codebook_gemm", "sm_90a", Problem())
