"""The NEON kernels against the contract, cross-compiled and run under qemu; skipped where either is missing.

The same native program, compiled for this machine, runs its own instruction sets: a check of the harness.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from halfbyte import reference
from halfbyte.formats import PackedWeight, quantize
from halfbyte.kernels.cpu import library
from kernel_samples import KEYS, multiples, random_weight, seeded, slack, strided
from native_problems import Problems, build_library, build_program
from test_kernel_fuzz import COUNT, draw, judge, make

CROSS_COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
TOOLS = (CROSS_COMPILER, EMULATOR, "cmake")
MISSING = [tool for tool in TOOLS if shutil.which(tool) is None]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EMULATED = ("neon", "portable")
LOADED = library()
NATIVE = tuple(LOADED.isas) if LOADED else ()


@dataclass(frozen=True)
class Target:
    """Where the native program runs: its command, and the library for that processor."""

    command: tuple[str, ...]
    library: Path
    folder: Path

    def run(self, problems: Problems, isa: str) -> list[Tensor]:
        return problems.run(self.command, self.library, isa, self.folder)[0]


@pytest.fixture(scope="module")
def aarch64(tmp_path_factory: pytest.TempPathFactory) -> Target:
    if MISSING:
        pytest.skip(f"not installed: {', '.join(MISSING)} (Debian: g++-aarch64-linux-gnu, qemu-user, cmake)")
    folder = tmp_path_factory.mktemp("aarch64")
    program = build_program(CROSS_COMPILER, folder)
    built = build_library(CROSS_COMPILER, "aarch64", folder)
    return Target((EMULATOR, "-L", "/usr/aarch64-linux-gnu", str(program)), built, folder)


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Target:
    if LOADED is None:
        pytest.skip("the library of CPU kernels is not built")
    if shutil.which("c++") is None:
        pytest.skip("not installed: c++, a native compiler")
    folder = tmp_path_factory.mktemp("native")
    return Target((str(build_program("c++", folder)),), LOADED.path, folder)


@dataclass
class Checks:
    """Problems with the float64 results that their outputs are held against."""

    problems: Problems = field(default_factory=Problems)
    wanted: list[tuple[str, Tensor, float]] = field(default_factory=list)

    def add(
        self, x: Tensor, packed: PackedWeight, dense: Tensor, bias: Tensor | None, label: str, threads: int = 1
    ) -> None:
        self.problems.linear(x, packed, bias, threads)
        y = x.double() @ dense.t()
        self.wanted.append((label, y if bias is None else y + bias.double(), slack(x, dense)))

    def failures(self, outputs: list[Tensor]) -> list[str]:
        found = []
        for out, (label, y, allowed) in zip(outputs, self.wanted, strict=True):
            try:
                reference.assert_within_contract(out, y, label, allowed)
            except AssertionError as error:
                found.append(str(error))
        return found


def shapes(key: str) -> list[tuple[int, int]]:
    """Whole units, tails of K and of N, and, for bitsandbytes, rows that start inside a block or a byte."""
    rows, columns = multiples(key)
    if columns == 1:
        return [(37, 640), (6, 576), (5, 100), (9, 33), (5, 352)]
    if rows == 1 and columns <= 32:
        return [(37, 640), (6, 96), (5, 224)]
    return [(rows * 5, columns * 3), (rows * 3, columns), (rows * 33, columns * 2)]


def contract(ms: tuple[int, ...], change: Callable[[PackedWeight], PackedWeight] = lambda weight: weight) -> Checks:
    """Problems of all formats, shapes, dtypes and numbers of rows; `change` spoils what the kernels are given."""
    checks, generator = Checks(), seeded(1)
    for key in KEYS:
        for n, k in shapes(key):
            weight = random_weight(key, n, k, generator)
            dense, given = weight.dequantize(torch.float64), change(weight)
            for number, dtype in enumerate(DTYPES):
                for m in ms:
                    bias = torch.randn(n, generator=generator).to(torch.float32 if m == 3 else dtype)
                    label = f"{key} {dtype} M={m} N={n} K={k}"
                    used = None if (m + number) % 3 == 0 else bias
                    checks.add(strided(m, k, dtype, generator), given, dense, used, label, threads=1 + m % 3)
    return checks


def assert_reads_weights_back(target: Target, isa: str) -> None:
    """One-hot rows of x give single weights, in fp32 bit for bit; with swapped nibbles they do not."""
    problems, expected = Problems(), []
    for key in KEYS:
        for n, k in (shapes(key)[0], shapes(key)[-1]):
            weight = random_weight(key, n, k, seeded(2))
            columns = sorted({0, k - 1, *torch.randint(k, (30,), generator=seeded(3)).tolist()})
            for dtype in DTYPES:
                x = torch.nn.functional.one_hot(torch.tensor(columns), k).to(dtype)
                for right, given in ((True, weight), (False, reference.swap_nibbles(weight))):
                    problems.linear(x, given)
                    true = weight.dequantize(dtype)[:, columns].t().contiguous()
                    expected.append((f"{key} {dtype} N={n} K={k}", right, true))
    for out, (label, right, true) in zip(target.run(problems, isa), expected, strict=True):
        distance = reference.ulp_distance(out, true)
        probe = reference.Probe(float((distance == 0).double().mean()), int(distance.max()))
        assert probe.within_contract(out.dtype) == right, (label, right, probe)


@pytest.mark.parametrize("isa", EMULATED)
def test_contract(aarch64: Target, isa: str) -> None:
    checks = contract((1, 3, 4, 9))
    assert not checks.failures(aarch64.run(checks.problems, isa))


def test_contract_with_64_rows(aarch64: Target) -> None:
    checks = contract((64,))
    assert not checks.failures(aarch64.run(checks.problems, "neon"))


def test_every_result_is_wrong_with_swapped_nibbles(aarch64: Target) -> None:
    checks = contract((1, 9), reference.swap_nibbles)
    assert len(checks.failures(aarch64.run(checks.problems, "neon"))) == len(checks.wanted)


@pytest.mark.parametrize("isa", EMULATED)
def test_one_hot_rows_read_single_weights_back(aarch64: Target, isa: str) -> None:
    assert_reads_weights_back(aarch64, isa)


def test_neon_is_what_aarch64_takes(aarch64: Target) -> None:
    problems = Problems()
    problems.linear(torch.ones(1, 64), random_weight("nf4-64", 4, 64, seeded(4)))
    said = problems.run(aarch64.command, aarch64.library, "neon", aarch64.folder)[1]
    assert said.splitlines()[0] == "order of choice: neon portable"
    with pytest.raises(AssertionError, match="instruction set not available: avx2"):
        aarch64.run(problems, "avx2")


@pytest.mark.parametrize("key", ["nf4-64", "fp4-4096", "q4_1", "q4_k", "nvfp4", "gptq-128", "awq-32"])
def test_bits_do_not_depend_on_m_or_threads(aarch64: Target, key: str) -> None:
    weight = random_weight(key, 264, 768, seeded(5))
    x = torch.randn(64, 768, generator=seeded(6))
    alone, several, problems = 64, [(2, 1), (7, 2), (8, 5), (33, 1), (64, 3)], Problems()
    for i in range(alone):
        problems.linear(x[i : i + 1], weight)
    for m, threads in several:
        problems.linear(x[:m], weight, threads=threads)
    outputs = aarch64.run(problems, "neon")
    rows = torch.cat(outputs[:alone])
    for out, (m, threads) in zip(outputs[alone:], several, strict=True):
        assert torch.equal(out, rows[:m]), (m, threads)


def test_decoded_rows(aarch64: Target) -> None:
    """What large M multiplies: the fp32 weights, and two bf16 terms that leave less than 2^-16 of each."""
    problems, expected = Problems(), []
    for key in KEYS:
        weight = random_weight(key, *shapes(key)[0], seeded(7))
        problems.decode(weight, split=False, threads=2)
        problems.decode(weight, split=True)
        expected.append((key, weight.dequantize(torch.float32)))
    outputs = aarch64.run(problems, "neon")
    for (key, true), wide, terms in zip(expected, outputs[::2], outputs[1::2], strict=True):
        assert torch.equal(wide, true), key
        first, rest = terms.float().chunk(2, dim=1)
        assert torch.equal(first, true.bfloat16().float()), key
        assert ((first + rest - true).abs() <= 2.0**-16 * true.abs()).all(), key


def ends_of_the_range() -> Iterator[tuple[Tensor, PackedWeight]]:
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(2, 512, generator=seeded(8)) * torch.tensor([[3e37], [1e-34]])
        yield x.to(dtype), quantize(torch.randn(32, 512, generator=seeded(9)) * 1e-3, "q4_0")
        for key in ("nf4-64", "q4_1", "q4_k", "gptq-32", "awq-32"):
            infinite = torch.randn(3, 256, generator=seeded(10)).to(dtype)
            infinite[1, 77] = torch.inf
            yield infinite, random_weight(key, 64, 256, seeded(11))
    yield (torch.randn(4, 512, generator=seeded(12)) * 20000).half(), random_weight("q4_0", 16, 512, seeded(13))


def test_range(aarch64: Target) -> None:
    """Not finite exactly where the float64 result is not, and every row within the contract."""
    cases, problems = list(ends_of_the_range()), Problems()
    for x, weight in cases:
        problems.linear(x, weight)
    unbounded = 0
    for out, (x, weight) in zip(aarch64.run(problems, "neon"), cases, strict=True):
        y = reference.linear(x, weight)
        rounded = y.to(out.dtype)
        odd = ~rounded.isfinite()
        unbounded += int(odd.sum())
        assert torch.equal(out.isfinite(), ~odd)
        assert torch.equal(out[odd].nan_to_num(nan=7.0), rounded[odd].nan_to_num(nan=7.0))
        for row, exact in zip(out, y, strict=True):
            if exact.isfinite().all() and exact.to(out.dtype).isfinite().all():
                reference.assert_within_contract(row, exact, weight.format.key)
    assert unbounded > 0


def test_random_problems(aarch64: Target) -> None:
    """The fuzz of test_kernel_fuzz.py up to M = 64; beyond, torch multiplies what test_decoded_rows covers."""
    failures, total, chunk = [], 0, 250  # problems a run: their tensors are held at once
    for start in range(0, COUNT, chunk):
        cases = [case for case in map(draw, range(start, min(COUNT, start + chunk))) if case.m <= 64]
        made, problems = [make(case) for case in cases], Problems()
        for case, each in zip(cases, made, strict=True):
            problems.linear(each.x, each.weight, each.bias, case.threads)
        for case, each, out in zip(cases, made, aarch64.run(problems, "neon"), strict=True):
            total += 1
            try:
                judge(case, each, out, f"neon, {case}")
            except AssertionError as error:
                failures.append(str(error))
    assert total > COUNT // 2
    assert not failures, f"{len(failures)} of {total} problems fail:\n" + "\n".join(failures[:5])


@pytest.mark.parametrize("isa", NATIVE)
def test_the_harness_on_this_machine(native: Target, isa: str) -> None:
    checks = contract((1, 9))
    assert not checks.failures(native.run(checks.problems, isa))
    assert_reads_weights_back(native, isa)


@pytest.mark.skipif(not NATIVE, reason="the library of CPU kernels is not built")
def test_the_harness_sees_reads_beyond_a_tensor(native: Target) -> None:
    problems = Problems()
    problems.linear(torch.ones(2, 640), random_weight("nf4-64", 8, 640, seeded(14)))
    problems.structs[0].weight.n = 800  # more rows than there are bytes
    with pytest.raises(AssertionError, match="exit -11"):
        native.run(problems, NATIVE[0])
