"""The tables that ship: what each of their configurations compiles to, and that the planner and `explain` know them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict

import pytest
from typer.testing import CliRunner

from halfbyte import tune
from halfbyte.cli import app
from halfbyte.formats import get_format
from halfbyte.kernels import Problem, codebook, codebook_mma, codebook_wgmma, nvrtc, registry
from halfbyte.kernels.registry import Settings
from halfbyte.lab import sass
from halfbyte.plan import plan
from halfbyte.tune import Entry

ENTRIES = [(path.stem, entry) for path in sorted(tune.SHIPPED.glob("*.json")) for entry in tune.read(path).values()]


def problem_of(arch: str, entry: Entry) -> Problem:
    dtype = registry.DTYPE_NAMES[entry.dtype]
    return Problem(get_format(entry.format), dtype, entry.M, entry.N, entry.K, arch)


def mma_macros(problem: Problem, settings: Settings) -> dict[str, int]:
    return asdict(codebook_mma._planned(problem, settings)[0])


def wgmma_macros(problem: Problem, settings: Settings) -> dict[str, int]:
    side = not codebook.copies_fp32(problem.format, problem.k, codebook_wgmma.ARCH)
    m = min(problem.m, codebook_wgmma.CHUNK)
    shape = (m, problem.n, problem.k, codebook_mma.MULTIPROCESSORS)
    return asdict(codebook_wgmma.configure(problem.format, problem.dtype, *shape, side, settings))


MACROS: Mapping[str, Callable[[Problem, Settings], dict[str, int]]] = {
    codebook_mma.STEM: mma_macros,
    codebook_wgmma.STEM: wgmma_macros,
}


def compiled() -> list[tuple[str, str, tuple[tuple[str, int], ...]]]:
    """(kernel, architecture, macros) of all entries, each once."""
    found = {}
    for arch, entry in ENTRIES:
        macros = MACROS[entry.kernel](problem_of(arch, entry), entry.settings)
        assert all(macros[name] == value for name, value in entry.settings), "its settings, not the kernel's own"
        found[entry.kernel, arch, tuple(sorted(macros.items()))] = None
    return list(found)


@pytest.fixture(autouse=True)
def only_what_ships(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(tune.FOLDER_VARIABLE, raising=False)


@pytest.mark.skipif(nvrtc.missing() is not None, reason=str(nvrtc.missing()))
@pytest.mark.parametrize(
    ("kernel", "arch", "macros"), compiled(), ids=lambda each: each if isinstance(each, str) else ""
)
def test_configurations_compile_without_local_memory(
    kernel: str, arch: str, macros: tuple[tuple[str, int], ...], monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path_factory.getbasetemp() / "cubins"))
    nvrtc.cache_folder.cache_clear()
    code = sass.disassemble(nvrtc.compile(kernel, arch, dict(macros)))
    assert not code.local_memory()
    assert not [name for name in sass.count(code.main_loop()) if any(width in name for width in (".U8", ".S8"))]


@pytest.mark.parametrize(("arch", "entry"), ENTRIES, ids=lambda each: "-".join(map(str, getattr(each, "key", ()))))
def test_the_planner_takes_it(arch: str, entry: Entry) -> None:
    """For all M of its bucket; the kernel says what it runs."""
    problem = problem_of(arch, entry)
    for m in (entry.M, entry.M // 2 + 1):
        found = plan(Problem(problem.format, problem.dtype, m, problem.n, problem.k, arch))
        if found.kernel.name != entry.kernel:
            pytest.skip(f"{found.kernel.name} serves this now, so the entry is of no use: tune again")
        assert found.tuned == entry
        assert found.kernel.describe is not None
        assert found.kernel.describe(found.problem)


def test_explain_says_where_it_was_measured() -> None:
    if not ENTRIES:
        pytest.skip("no table ships")
    arch, entry = ENTRIES[0]
    words = ["explain", "--N", entry.N, "--K", entry.K, "--M", entry.M, "--format", entry.format, "--arch", arch]
    done = CliRunner().invoke(app, [*map(str, words), "--dtype", entry.dtype])
    assert done.exit_code == 0
    said = " ".join(done.output.split())
    assert f"configuration tuned on {entry.device}, {entry.date[:10]}: {entry.us:,.1f} µs at M={entry.M}" in said
    assert f"{100 * entry.gain:.1f} % faster than the kernel's own choice" in said


def test_they_are_of_problems_that_their_kernel_serves() -> None:
    kernels = {kernel.name: kernel for kernel in registry.kernels()}
    for arch, entry in ENTRIES:
        assert kernels[entry.kernel].supports(problem_of(arch, entry)) is None
        assert tune.bucket(entry.M) == entry.M, "what stands for its bucket is the largest M of it"
