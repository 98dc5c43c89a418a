"""The fuzz of GPU kernels, held to account on a CPU: what is right passes, what is wrong fails and can be repeated."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kernel_fuzz
from halfbyte import reference
from halfbyte.formats import PackedWeight, get_format
from halfbyte.kernels import Kernel, Problem, kernels, nvrtc

CPU = torch.device("cpu")
TESTS = Path(__file__).parent
Run = Callable[..., None]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small products: threads that wait for each other take longer."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def table_in_fp16(codebook: tuple[float, ...]) -> tuple[float, ...]:
    """A codebook as GPU kernels hold it: times the factor under which its entries round best to fp16, and back."""
    values = torch.tensor(codebook, dtype=torch.float64)
    factors = torch.linspace(1, 2, 4097, dtype=torch.float64)[:-1].unsqueeze(1) / values.abs().max()
    tables = (values * factors).half().double() / factors
    exact = values.half().double()
    best = exact if bool((exact == values).all()) else tables[(tables - values).square().sum(1).argmin()]
    return tuple(best.tolist())


def honest(x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor, strict: bool = False) -> None:
    """What a GPU kernel does: 16-bit table (not in strict mode, not for fp32), sums and bias in fp32, one rounding."""
    fine = strict or x.dtype == torch.float32
    codebook = weight.format.codebook if fine else table_in_fp16(weight.format.codebook)
    held = PackedWeight(replace(weight.format, codebook=codebook), weight.shape, weight.parts)
    y = (x.double() @ held.dequantize(torch.float64).t()).float()
    out.copy_(y if bias is None else y + bias.float())


def swapped_nibbles(x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor, strict: bool = False) -> None:
    honest(x, reference.swap_nibbles(weight), bias, out, strict)


def no_bias(x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor, strict: bool = False) -> None:
    honest(x, weight, None, out, strict)


def one_output_missing(x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor, strict: bool = False) -> None:
    stale = out[-1, -1].clone()
    honest(x, weight, bias, out, strict)
    out[-1, -1] = stale


def one_weight_dropped(x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor, strict: bool = False) -> None:
    """The last column of x is not read."""
    x = x.clone()
    x[:, -1] = 0
    honest(x, weight, bias, out, strict)


def rows_in_the_wrong_order(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor, strict: bool = False
) -> None:
    honest(x.roll(1, 0), weight, bias, out, strict)


def unaligned_scales_misread(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor, strict: bool = False
) -> None:
    parts = dict(weight.parts)
    if "absmax" in parts and parts["absmax"].storage_offset():
        parts["absmax"] = parts["absmax"].roll(1)
    honest(x, PackedWeight(weight.format, weight.shape, parts), bias, out, strict)


def writes_past_the_end(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor, strict: bool = False
) -> None:
    honest(x, weight, bias, out, strict)
    torch.as_strided(out, (1,), (1,), out.storage_offset() + out.numel()).fill_(0)


class Unsteady:
    """Every other answer is another one, within the contract."""

    calls = 0

    def __call__(self, x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor, strict: bool = False) -> None:
        honest(x, weight, bias, out, strict)
        Unsteady.calls += 1
        if Unsteady.calls % 2:
            torch.nextafter(out, torch.full_like(out, torch.inf), out=out)


def record(run: Run) -> Kernel:
    """A GPU kernel's record that runs here."""
    return Kernel("emulated", "cuda", "", lambda problem: None, lambda problem: 1.0, run)


KEYS = kernel_fuzz.keys_of(record(honest), "cpu")


@pytest.mark.parametrize("key", KEYS)
def test_what_is_right_passes(key: str) -> None:
    count, failures = kernel_fuzz.run_seeds(record(honest), key, range(100), CPU, enough=48)
    assert count >= 48
    assert not failures, failures[0]


WRONG = [
    (swapped_nibbles, "wrong|not exact|NaN"),
    (no_bias, "wrong|not exact"),
    (one_output_missing, "1 of .* outputs"),
    (one_weight_dropped, "wrong|not exact"),
    (rows_in_the_wrong_order, "wrong|not exact"),
    (unaligned_scales_misread, "wrong|not exact"),
    (writes_past_the_end, "wrote outside"),
    (Unsteady(), "second time"),
]


@pytest.mark.parametrize(("run", "words"), WRONG, ids=lambda value: getattr(value, "__name__", "unsteady"))
def test_what_is_wrong_fails_and_its_line_repeats_it(run: Run, words: str) -> None:
    key = "nf4-64"
    kernel = record(run)
    Unsteady.calls = 0
    count, failures = kernel_fuzz.run_seeds(kernel, key, range(8), CPU)
    caught = [failure for failure in failures if re.search(words, failure)]
    assert caught, f"{count} problems, failures: {failures[:3]}"
    line = caught[0].rpartition("repeat: ")[2]
    arguments = dict(re.findall(r"--(\S+) (\S+)", line))
    assert (arguments["kernel"], arguments["key"], arguments["device"]) == ("emulated", key, "cpu")
    Unsteady.calls = 0
    again = kernel_fuzz.run_one(kernel, key, int(arguments["seed"]), int(arguments["problem"]), CPU)
    assert again == (1, [caught[0]])


def test_the_line_is_a_command_that_runs() -> None:
    kernel = kernel_fuzz.kernel_named("torch_dequantize")
    group = kernel_fuzz.draw(kernel, "mxfp4", 3, "cpu")
    line = kernel_fuzz.line(group, group.cases[0], CPU)
    program, *words = shlex.split(line)
    assert program == "python"
    done = subprocess.run([sys.executable, *words], cwd=TESTS.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "torch_dequantize on cpu: 1 problems, 0 fail" in done.stdout


def test_problems_over_the_budget_of_compilations_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel with a configuration for each dtype and M finds the first few, and the problems that these serve."""
    compiled = []
    monkeypatch.setattr(nvrtc, "compile", lambda stem, arch, macros, source=None: compiled.append(macros) or b"")
    ran = []

    def run(x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor, strict: bool = False) -> None:
        nvrtc.compile("emulated", "sm_90a", {"M": out.shape[0], "BYTES": x.element_size()}, None)
        ran.append((out.shape[0], x.element_size()))
        honest(x, weight, bias, out, strict)

    with kernel_fuzz.compilations(3):
        count, failures = kernel_fuzz.run_seeds(record(run), "nf4-64", range(40), CPU)
    assert not failures, failures[0]
    assert len({(macros["M"], macros["BYTES"]) for macros in compiled}) == len(set(ran)) == 3
    assert 3 <= count == len(ran) // 2 < 40 * kernel_fuzz.PROBLEMS


def test_a_problem_that_does_not_end_ends_the_process() -> None:
    code = (
        "import time, time_limit\n"
        "with time_limit.time_limit(0.5, 'first') as limit:\n"
        "    limit.doing = 'the stuck one'\n"
        "    time.sleep(30)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=TESTS, capture_output=True, text=True, timeout=20)
    assert done.returncode == 3
    assert "no end after 0.5 s, this process gives up: the stuck one" in done.stderr


def test_the_registered_kernels_pass() -> None:
    for name in ("cpu_linear", "torch_dequantize"):
        kernel = kernel_fuzz.kernel_named(name)
        for key in kernel_fuzz.keys_of(kernel, "cpu")[::6]:
            count, failures = kernel_fuzz.run_seeds(kernel, key, range(100), CPU, enough=16)
            assert count
            assert not failures, failures[0]


def test_the_tests_for_gpus_pass_on_cpu_kernels() -> None:
    """Those that need no CUDA find nothing wrong with what is here, nor with a kernel that takes no few rows of x.

    And they are not all skipped.
    """
    options = ["-q", "-rN", "-vv", "-p", "no:cacheprovider", "-p", "kernel_for_many"]
    environment = {
        "HALFBYTE_TEST_DEVICE": "cpu",
        "HALFBYTE_FUZZ": "200",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(TESTS),
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "tests/gpu", "-k", "not 4096 and not 14336 and not 24600"],
        cwd=TESTS.parent,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed
    assert int(passed[1]) > 100
    of_many = re.findall(r"(\w+)\[for_many-.*\] PASSED", done.stdout)
    assert {"test_error", "test_single_weights", "test_rows_are_batch_invariant", "test_random_problems"} <= set(
        of_many
    )


@pytest.mark.parametrize("kernel", [each for each in kernels() if each.backend == "cuda"], ids=lambda each: each.name)
def test_every_gpu_kernel_is_given_problems_that_it_takes(kernel: Kernel) -> None:
    """Whatever rows of x it is for: drawn for the card that it serves, from its fewest to its most."""
    reason = nvrtc.missing()
    if reason is not None:
        pytest.skip(reason)
    keys = kernel_fuzz.keys_of(kernel, "sm_90a")
    assert "nf4-64" in keys
    groups = [kernel_fuzz.draw(kernel, "nf4-64", seed, "sm_90a") for seed in range(40)]
    cases = [(group, case) for group in groups for case in group.cases]
    format = get_format("nf4-64")
    for group, case in cases:
        assert kernel.supports(Problem(format, case.dtype, case.m, group.n, group.k, "sm_90a")) is None
    drawn = {case.m for _, case in cases}
    served = {
        m for m in kernel_fuzz.MS if kernel.supports(Problem(format, torch.bfloat16, m, 64, 512, "sm_90a")) is None
    }
    assert drawn == served
    assert len(cases) >= 40 * kernel_fuzz.PROBLEMS // 2


@pytest.mark.parametrize(
    ("what", "status", "output", "verdict"),
    [
        ("alone", 0, "all problems done", "clean"),
        ("alone", 1, "all problems done", "failed"),
        ("memcheck", 0, "all problems done\n========= ERROR SUMMARY: 0 errors", "clean"),
        ("memcheck", 0, "========= ERROR SUMMARY: 0 errors", "failed"),
        ("memcheck", 9, "all problems done\n========= ERROR SUMMARY: 12 errors", "found something"),
        ("racecheck", 0, "all problems done\n========= RACECHECK SUMMARY: 0 hazards displayed", "clean"),
        ("racecheck", 0, "all problems done\n========= RACECHECK SUMMARY: 1 hazard displayed", "found something"),
        ("racecheck", 255, "========= Error: Device not supported. Please refer to the manual", "not supported"),
        ("racecheck", 255, "========= Error: process didn't terminate successfully", "failed"),
    ],
)
def test_what_a_sanitizer_says_is_understood(
    what: str, status: int, output: str, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(TESTS / "gpu")
    assert importlib.import_module("sanitize").verdict(what, status, output) == verdict
