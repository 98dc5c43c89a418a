"""The tuner, its tables and what the planner makes of them, with a kernel and a clock that are only pretended."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import halfbyte
from halfbyte import ops, reference
from halfbyte import tune as tuner
from halfbyte.cli import app
from halfbyte.formats import PackedWeight, get_format, quantize
from halfbyte.kernels import Kernel, Problem, registry
from halfbyte.kernels.registry import Configuration, Settings
from halfbyte.lab import tuning
from halfbyte.plan import plan
from halfbyte.tune import Entry, Stamp, bucket, entry_for, forget, key_of, path_of, read, table, tune, write

CPU = torch.device("cpu")
N, K = 64, 128
STAMP = Stamp("Some GPU", "580.1", "abc", "2026-11-30T00:00:00+00:00")
TILES = (4, 2, 8, 1)  # the best predicted first
DEFAULT: Settings = (("TILES", 4),)


def problem(
    m: int = 1, key: str = "nf4-64", n: int = N, arch: str = "cpu", dtype: torch.dtype = torch.float32
) -> Problem:
    return Problem(get_format(key), dtype, m, n, K, arch)


def configurations(wanted: Problem) -> list[Configuration]:
    """Eight tiles are legal for M up to 8 only."""
    return [Configuration((("TILES", tiles),), 1e-6) for tiles in TILES if tiles < 8 or wanted.m <= 8]


@pytest.fixture
def ran() -> list[Settings | None]:
    return []


@pytest.fixture
def fake(ran: list[Settings | None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Kernel]:
    """A tunable kernel that the planner prefers for weights of 64 rows; tables are in a folder of their own."""

    def run(
        x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor, settings: Settings | None = None
    ) -> None:
        ran.append(settings)
        out.copy_(reference.linear(x, weight, bias))

    kernel = Kernel(
        name="pretended",
        backend="cpu",
        about="a kernel of this test",
        supports=lambda wanted: None if wanted.n == N else "only for 64 rows",
        cost=lambda wanted: 0.0,
        run=run,
        describe=lambda wanted, settings=DEFAULT: f"{dict(settings)['TILES']} tiles",
        configurations=configurations,
    )
    monkeypatch.setattr(registry, "_KERNELS", {**registry._KERNELS, kernel.name: kernel})
    monkeypatch.setattr(tuner, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setenv(tuner.FOLDER_VARIABLE, str(tmp_path / "mine"))
    caches = (table, plan, ops._kernel)
    for each in caches:
        each.cache_clear()
    yield kernel
    for each in caches:
        each.cache_clear()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No cache to exceed with copies of small weights."""
    monkeypatch.setattr(tuning, "cache_bytes", lambda device: 0)
    tuning._copies.cache_clear()


def clock(seconds: dict[int, float], seen: list[tuple[int, int]] | None = None) -> tuner.Measure:
    """A clock that reads these seconds for the kernel in so many tiles; notes (M, number of kernels)."""

    def measure(wanted: Problem, kernels: Sequence[Kernel]) -> list[float]:
        if seen is not None:
            seen.append((wanted.m, len(kernels)))
        words = [kernel.describe(wanted) for kernel in kernels if kernel.describe]
        return [seconds[int(each.split()[0])] for each in words]

    return measure


CLOCK = {4: 12e-6, 2: 10e-6, 8: 11e-6, 1: 30e-6}


def entry(**changed: Any) -> Entry:
    values = {
        "format": "nf4-64", "dtype": "fp32", "M": 4, "N": N, "K": K, "kernel": "pretended", "settings": (("TILES", 2),),
        "us": 10.0, "runner_up": (("TILES", 8),), "runner_up_us": 11.0, "measured": 4, "gain": 0.2,
        "device": "Some GPU", "driver": "580.1", "commit": "abc", "date": "2026-11-30T00:00:00+00:00",
    }  # fmt: skip
    return Entry(**{**values, **changed})


@pytest.mark.parametrize(
    ("m", "largest"), [(0, 1), (1, 1), (2, 2), (3, 4), (5, 8), (8, 8), (9, 16), (64, 64), (65, 128)]
)
def test_buckets(m: int, largest: int) -> None:
    assert bucket(m) == largest


def test_the_fastest_is_kept_with_its_runner_up(fake: Kernel) -> None:
    seen: list[tuple[int, int]] = []
    ((_, found),) = tune([(problem(4), fake)], clock(CLOCK, seen), STAMP)
    assert found == entry(us=pytest.approx(10.0), runner_up_us=pytest.approx(11.0), gain=pytest.approx(0.2))
    assert found is not None
    assert found.margin == pytest.approx(0.1)
    assert seen == [(4, 4), (4, 3)]
    written = json.loads(path_of("cpu").read_text())["entries"]
    assert [(each["settings"], each["runner_up"], each["M"]) for each in written] == [({"TILES": 2}, {"TILES": 8}, 4)]
    assert set(written[0]) >= {"format", "dtype", "N", "K", "kernel", "us", "margin", "device", "driver", "date"}
    assert read(path_of("cpu")) == {found.key: found}
    assert [path.name for path in path_of("cpu").parent.iterdir()] == ["cpu.json"]


def test_only_the_best_predicted_are_measured(fake: Kernel) -> None:
    ((_, found),) = tune([(problem(4), fake)], clock(CLOCK), STAMP, most=1)
    assert found is not None
    assert (found.settings, found.runner_up, found.margin, found.measured) == (DEFAULT, None, None, 1)
    assert read(path_of("cpu"))[found.key] == found


@pytest.mark.parametrize(
    ("again", "chosen", "gain"),
    [
        ((12.1e-6, 10e-6, 12e-6), 2, 0.2),  # against the better of the own choice's two turns
        ((10.2e-6, 10e-6, 12e-6), 2, 0.02),
        ((10.05e-6, 10e-6, 12e-6), 4, 0.0),  # one of which it hardly beat
        ((9.9e-6, 10e-6, 9.9e-6), 4, 0.0),
        ((12e-6, inf, 12e-6), 4, 0.0),
    ],
)
def test_luck_is_not_enough(again: tuple[float, ...], chosen: int, gain: float, fake: Kernel) -> None:
    first = clock(CLOCK)
    asked: list[list[int]] = []

    def measure(wanted: Problem, kernels: Sequence[Kernel]) -> Sequence[float]:
        asked.append([int(kernel.describe(wanted).split()[0]) for kernel in kernels if kernel.describe])
        return first(wanted, kernels) if len(asked) == 1 else again

    ((_, found),) = tune([(problem(4), fake)], measure, STAMP)
    assert asked == [list(TILES), [4, 2, 4]]
    assert found is not None
    assert (found.settings, found.gain) == ((("TILES", chosen),), pytest.approx(gain))
    assert found.runner_up == (("TILES", 8 if chosen == 2 else 2),)


def test_the_own_choice_is_not_measured_twice_where_it_wins(fake: Kernel) -> None:
    seen: list[tuple[int, int]] = []
    ((_, found),) = tune([(problem(4), fake)], clock({**CLOCK, 4: 9e-6}, seen), STAMP)
    assert found is not None
    assert (found.settings, found.gain, found.runner_up) == (DEFAULT, 0.0, (("TILES", 2),))
    assert seen == [(4, 4)]


def test_a_run_that_broke_off_goes_on(fake: Kernel) -> None:
    problems = [(problem(m), fake) for m in (1, 2, 4)]
    seen: list[tuple[int, int]] = []
    whole = clock(CLOCK, seen)

    def breaking(wanted: Problem, kernels: Sequence[Kernel]) -> Sequence[float]:
        if wanted.m == 4:
            raise KeyboardInterrupt
        return whole(wanted, kernels)

    with pytest.raises(KeyboardInterrupt):
        list(tune(problems, breaking, STAMP))
    assert [each[2] for each in read(path_of("cpu"))] == [1, 2]
    found = list(tune(problems, whole, STAMP))
    assert [m for m, count in seen if count == 4] == [1, 2, 4]
    assert all(kept is not None for _, kept in found)
    list(tune(problems, whole, STAMP, again=True))
    assert [m for m, count in seen if count == 4] == [1, 2, 4, 1, 2, 4]


def test_an_entry_that_cannot_be_used_is_measured_again(fake: Kernel) -> None:
    for stale in (entry(kernel="gone"), entry(settings=(("TILES", 3),))):
        write(path_of("cpu"), {stale.key: stale})
        ((_, found),) = tune([(problem(4), fake)], clock(CLOCK), STAMP)
        assert found is not None
        assert (found.kernel, found.settings) == ("pretended", (("TILES", 2),))


def test_a_kernel_without_configurations_is_not_tuned(fake: Kernel) -> None:
    ((_, found),) = tune([(problem(4), replace(fake, configurations=None))], clock(CLOCK), STAMP)
    assert found is None
    assert not path_of("cpu").exists()
    with pytest.raises(ValueError, match="'pretended' has no configurations"):
        replace(fake, configurations=None).configured(DEFAULT)


def test_nothing_is_tuned_inside_graph_capture(fake: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    seen: list[tuple[int, int]] = []
    with pytest.raises(RuntimeError, match="inside CUDA graph capture"):
        list(tune([(problem(4), fake)], clock(CLOCK, seen), STAMP))
    assert not seen


def test_the_plan_takes_the_table_s_configuration(fake: Kernel, ran: list[Settings | None]) -> None:
    write(path_of("cpu"), {entry().key: entry()})
    weight = quantize(torch.randn(N, K, generator=torch.Generator().manual_seed(0)), "nf4-64")
    for m, settings in ((3, (("TILES", 2),)), (4, (("TILES", 2),)), (2, None), (5, None)):
        found = plan(problem(m))
        assert found.kernel.name == "pretended"
        assert found.tuned == (entry() if settings else None)
        halfbyte.linear(torch.randn(m, K), weight)
        assert ran[-1] == settings


@pytest.mark.parametrize(
    "other",
    [
        entry(kernel="codebook_mma"),
        entry(settings=(("TILES", 3),)),
        entry(settings=(("TILES", 2), ("SPLIT", 2))),
        entry(M=8),
        entry(K=256),
        entry(dtype="bf16"),
        entry(format="nf4-64-nested"),
    ],
)
def test_other_entries_are_not_used(other: Entry, fake: Kernel) -> None:
    write(path_of("cpu"), {other.key: other})
    assert plan(problem(4)).tuned is None
    assert plan(problem(4)).kernel is fake


def test_tables_are_by_architecture_and_legality_by_the_problem_itself(fake: Kernel) -> None:
    eight = entry(M=16, settings=(("TILES", 8),))
    write(path_of("sm_90a"), {eight.key: eight, entry().key: entry()})
    assert entry_for(problem(4, arch="sm_90a"), fake) == entry()
    assert entry_for(problem(4), fake) is None
    assert entry_for(problem(9, arch="sm_90a"), fake) is None  # eight tiles are for M up to 8


def test_no_entry_changes_the_kernel_or_a_bit(fake: Kernel) -> None:
    """Whatever a table says of any kernel: the planned kernel stays, and a row's bits stay."""
    weight = quantize(torch.randn(N, K, generator=torch.Generator().manual_seed(0)), "nf4-64")
    x = torch.randn(8, K, generator=torch.Generator().manual_seed(1))
    wanted = halfbyte.linear(x, weight)
    names = [kernel.name for kernel in registry.kernels()]
    for name in names:
        for tiles in (*TILES, 3):
            odd = entry(M=8, kernel=name, settings=(("TILES", tiles),))
            write(path_of("cpu"), {odd.key: odd})
            for each in (table, plan, ops._kernel):
                each.cache_clear()
            assert plan(problem(8)).kernel.name == "pretended"
            assert (plan(problem(8)).tuned is not None) is (name == "pretended" and tiles in TILES)
            assert torch.equal(halfbyte.linear(x, weight), wanted)


def test_shipped_entries_come_first_and_one_s_own_over_them(fake: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped, mine = entry(), entry(settings=(("TILES", 1),))
    other = entry(M=2)
    write(tuner.SHIPPED / "cpu.json", {shipped.key: shipped, other.key: other})
    assert plan(problem(4)).tuned == shipped
    write(path_of("cpu"), {mine.key: mine})
    forget()
    plan.cache_clear()
    assert plan(problem(4)).tuned == mine
    assert plan(problem(2)).tuned == other
    monkeypatch.delenv(tuner.FOLDER_VARIABLE)
    assert path_of("cpu") == tuner.SHIPPED / "cpu.json"


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"entries": [{}]}', '{"entries": [3]}', '{"entries": [{"format": 1}]}']
)
def test_a_broken_table_is_named(text: str, fake: Kernel) -> None:
    path_of("cpu").parent.mkdir()
    path_of("cpu").write_text(text)
    with pytest.raises(ValueError, match=r"cpu\.json is no table of tuned configurations.*tune again"):
        plan(problem(4))
    assert plan(problem(4, n=32)).kernel.name  # a kernel that is not tuned reads no table


def test_a_table_that_cannot_be_written_leaves_the_old_one(fake: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path_of("cpu"), {entry().key: entry()})

    def full(self: Path, text: str) -> None:
        self.touch()
        raise OSError("no space")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="no space"):
        write(path_of("cpu"), {})
    assert read(path_of("cpu")) == {entry().key: entry()}
    assert [path.name for path in path_of("cpu").parent.iterdir()] == ["cpu.json"]


def test_configured_again_is_configured_anew(fake: Kernel, ran: list[Settings | None]) -> None:
    weight, out = quantize(torch.randn(N, K), "nf4-64"), torch.empty(1, N)
    for kernel in (fake.configured((("TILES", 2),)), fake.configured((("TILES", 2),)).configured((("TILES", 1),))):
        kernel.run(torch.randn(1, K), weight, None, out)
    assert ran == [(("TILES", 2),), (("TILES", 1),)]


def test_every_tunable_kernel_lists_its_own_choice_first() -> None:
    """What it takes without a table is its first configuration; no configuration comes twice."""
    for kernel in registry.kernels():
        for arch in ("cpu", "sm_90a"):
            for m in (1, 4, 16, 64):
                wanted = Problem(get_format("nf4-64"), torch.bfloat16, m, 6144, 5120, arch)
                if kernel.configurations is None or kernel.supports(wanted) is not None:
                    continue
                found = kernel.configurations(wanted)
                settings = [each.settings for each in found]
                assert len(set(settings)) == len(settings) > 0
                assert all(list(each) == sorted(each) for each in settings)
                assert [each.seconds for each in found] == sorted(each.seconds for each in found)
                if kernel.describe:
                    chosen = kernel.configured(settings[0]).describe
                    assert chosen is not None
                    assert chosen(wanted) == kernel.describe(wanted)


SHIPPED = sorted((Path(tuner.__file__).parent / "tuned").glob("*.json"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_what_ships_was_measured_and_is_used(path: Path) -> None:
    """Each entry is of a configuration that its kernel still lists and that surely won, with where and when it was.

    Where the kernel's own choice did as well, there is no entry: the table would only keep it from choosing better.
    """
    names = {kernel.name: kernel for kernel in registry.kernels()}
    entries = read(path)
    assert entries
    for each in entries.values():
        wanted = Problem(get_format(each.format), registry.DTYPE_NAMES[each.dtype], each.M, each.N, each.K, path.stem)
        assert key_of(wanted) == each.key
        assert tuner._usable(entries, wanted, names[each.kernel]) == each, each
        assert each.device
        assert each.commit
        assert each.date
        assert 0 < each.us <= (each.runner_up_us or inf)
        assert each.gain >= tuner.SURE
        kernel = names[each.kernel]
        assert kernel.configurations is not None
        assert each.settings != kernel.configurations(wanted)[0].settings


def splitting(kernel: Kernel) -> Kernel:
    """With a fault: more tiles add up in another order."""

    def run(x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor, settings: Settings = DEFAULT) -> None:
        parts = x.split(K // settings[0][1], dim=1)
        dense = weight.dequantize(torch.float32).split(K // settings[0][1], dim=1)
        total = torch.zeros(x.shape[0], N)
        for a, b in zip(parts, dense, strict=True):
            total += a @ b.t()
        out.copy_(total)

    return replace(kernel, run=run)


def test_the_clock_measures_every_configuration(fake: Kernel, ran: list[Settings | None], quick: None) -> None:
    configured = [fake.configured(each.settings) for each in configurations(problem())]
    times = tuning.seconds_of(problem(4), configured, CPU, 0.001)
    assert len(times) == 4
    assert 0 < min(times) <= max(times) < 1
    assert set(ran) == {(("TILES", tiles),) for tiles in TILES}


def test_a_configuration_that_changes_bits_is_named_and_left_out(fake: Kernel, quick: None) -> None:
    faulty = [splitting(fake).configured(each.settings) for each in configurations(problem())]
    told: list[tuple[str, str]] = []
    times = tuning.seconds_of(problem(4), faulty, CPU, 0.001, lambda name, error: told.append((name, str(error))))
    assert times[1:] == [inf, inf, inf]
    assert [name for name, _ in told] == [f"pretended, 64 × 128, M = 4: {tiles} tiles" for tiles in TILES[1:]]
    assert all("other bits" in error for _, error in told)
    with pytest.raises(ValueError, match="other bits"):
        tuning.seconds_of(problem(4), faulty, CPU, 0.001)


@pytest.mark.parametrize("stage", ["first", "warm-up"])
def test_a_configuration_that_fails_is_left_out_unless_it_is_the_default(stage: str, fake: Kernel, quick: None) -> None:
    calls: list[Settings] = []

    def run(x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor, settings: Settings = DEFAULT) -> None:
        calls.append(settings)
        if settings == (("TILES", 2),) and (stage == "first" or calls.count(settings) > 1):
            raise RuntimeError("no launch")
        out.zero_()

    broken, told = replace(fake, run=run), []
    problems = [(problem(4), broken)]
    measure = lambda wanted, kernels: tuning.seconds_of(  # noqa: E731
        wanted, kernels, CPU, 0.001, lambda name, error: told.append(name)
    )
    ((_, found),) = tune(problems, measure, STAMP)
    assert told == ["pretended, 64 × 128, M = 4: 2 tiles"]
    assert found is not None
    assert found.measured == 3
    assert (("TILES", 2),) not in (found.settings, found.runner_up)
    with pytest.raises(RuntimeError, match="no launch"):
        tuning.seconds_of(problem(4), [broken.configured((("TILES", 2),))], CPU, 0.001, lambda name, error: None)


def command(*words: str) -> str:
    done = CliRunner().invoke(app, [*words])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.output


def test_the_command_tunes_each_bucket_once(fake: Kernel, quick: None) -> None:
    words = ("tune", "--shapes", f"{N}x{K},32x{K}", "--M", "1,3,4", "--dtype", "fp32", "--device", "cpu")
    shown = command(*words, "--format", "nf4", "--seconds", "0.001")
    assert "2 of 4 problems go to kernels that have nothing to tune" in shown
    assert "pretended" in shown
    kept = read(path_of("cpu"))
    assert list(kept) == [("nf4-64", "fp32", 1, N, K), ("nf4-64", "fp32", 4, N, K)]
    assert all(each.measured == 4 and each.us > 0 and each.device for each in kept.values())
    before = path_of("cpu").read_bytes()
    command(*words, "--seconds", "0.001")
    assert path_of("cpu").read_bytes() == before


def test_the_command_fails_where_a_configuration_does(
    fake: Kernel, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry._KERNELS, fake.name, splitting(fake))
    words = ["tune", "--shapes", f"{N}x{K}", "--M", "4", "--dtype", "fp32", "--device", "cpu", "--seconds", "0.001"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1
    assert "failed, left out: pretended, 64 × 128, M = 4: 2 tiles" in " ".join(done.output.split())
    assert [each.settings for each in read(path_of("cpu")).values()] == [DEFAULT]


def test_explain_says_whether_it_was_measured(fake: Kernel) -> None:
    words = ("explain", "--N", str(N), "--K", str(K), "--M", "4", "--dtype", "fp32")
    shown = command(*words)
    assert "4 tiles" in shown
    assert "configuration predicted: the table of cpu holds no measured one" in shown
    assert json.loads(command(*words, "--json"))["tuned"] is None
    write(path_of("cpu"), {entry().key: entry()})
    forget()
    plan.cache_clear()
    shown = command(*words)
    assert "2 tiles" in shown
    assert (
        "configuration tuned on Some GPU, 2026-11-30: 10.0 µs at M=4, 20.0 % faster than the kernel's own choice, "
        in shown
    )
    assert "10.0 % ahead of the next of 4" in shown
    assert json.loads(command(*words, "--json"))["tuned"]["settings"] == {"TILES": 2}
    assert "configuration tuned" not in command("explain", "--N", "32", "--K", str(K))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "a model, or --shapes"),
        (("--shapes", "64"), "--shapes"),
        (("mistral-25b",), "mistral-25b"),
        (("--shapes", "64x64", "--M", "x"), "--M"),
    ],
)
def test_mistakes(words: Sequence[str], message: str, fake: Kernel) -> None:
    done = CliRunner().invoke(app, ["tune", "--device", "cpu", *words])
    assert message in str(done.exception)


def test_problems_of_a_model_are_its_multiplies() -> None:
    from halfbyte.lab.layer import model_of

    shapes = list(model_of("mistral-24b").shapes.values())
    found = tuning.problems_of(shapes, ["nf4"], [1, 2, 16, 17], "bf16", "sm_90a")
    assert len(found) == 4 * 4
    assert [each.m for each in found[:4]] == [1, 2, 16, 32]
    assert key_of(found[0]) == ("nf4-64", "bf16", 1, 6144, 5120)
