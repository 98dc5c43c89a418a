"""Random problems for any registered kernel on any device, and the judgement of its answers.

A kernel, a format and a seed make one weight and 16 problems on it: M, dtypes, strides, odd addresses, bias, strict.
Tensors are drawn on the CPU, so a problem is the same everywhere. Failures come with the line that repeats them:

    python tests/kernel_fuzz.py --kernel codebook_mma --device cuda --key nf4-64 --seed 12 --problem 7
"""

from __future__ import annotations

import argparse
import inspect
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from halfbyte import reference
from halfbyte.device import arch_of
from halfbyte.formats import PackedWeight, RecordLayout, get_format
from halfbyte.formats.codecs import RecordHalf
from halfbyte.kernels import Kernel, Problem, kernels, nvrtc
from kernel_samples import FP32_SUMS, KEYS, multiples, random_weight
from time_limit import Limit, time_limit

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PROBLEMS = 16  # on each weight
MS = (1, 1, 1, 2, 2, 3, 4, 4, 5, 6, 7, 8, 8, 9, 12, 16, 17, 25, 32, 33, 64, 100)
MANY = 4096  # outputs from which the contract's norms hold without allowance for chance
GUARD = 128  # NaN elements before and after the output
Inputs = tuple[Tensor, Tensor | None]  # x and bias
HANG_S = 50.0  # a problem takes milliseconds, its compilation tenths of a second


class Dead(RuntimeError):
    """The device takes no more work from this process."""


class OverBudget(Exception):
    """A problem needs a kernel compiled for which there is no time."""


@contextmanager
def compilations(most: int) -> Iterator[None]:
    """Let at most so many kernels be compiled, or read from the cache; OverBudget for what needs another.

    A kernel takes a second or two to compile, and thousands of problems have hundreds of configurations.
    """
    original, seen = nvrtc.compile, set()

    def compile(stem: str, arch: str, macros: Mapping[str, int], *source: str | None) -> bytes:
        key = (stem, arch, tuple(sorted(macros.items())), source)
        if key not in seen and len(seen) >= most:
            raise OverBudget(f"{stem} for {dict(macros)}")
        seen.add(key)
        return original(stem, arch, macros, *source)

    nvrtc.compile = compile
    try:
        yield
    finally:
        nvrtc.compile = original


@dataclass(frozen=True)
class Case:
    """One problem on a weight. stride: elements between rows beyond K, or None for rows that are all the same memory.

    offset: of x's first element, bias_offset of bias's, from an aligned address. bias: its dtype, or None.
    """

    seed: int
    number: int
    dtype: torch.dtype
    m: int
    stride: int | None
    offset: int
    bias: torch.dtype | None
    bias_offset: int
    magnitude: float
    strict: bool


@dataclass(frozen=True)
class Group:
    """A weight [n, k] and its problems. shift: bytes by which its parts miss an aligned address.

    exact: scales are powers of two and codes stand for small numbers, so that sums with whole numbers are exact.
    """

    kernel: str
    key: str
    seed: int
    n: int
    k: int
    shift: int
    exact: bool
    cases: tuple[Case, ...]


def kernel_named(name: str) -> Kernel:
    """A registered kernel. Raises ValueError for an unknown name."""
    for kernel in kernels():
        if kernel.name == name:
            return kernel
    raise ValueError(f"no kernel '{name}'; there are {', '.join(kernel.name for kernel in kernels())}")


@cache
def takes_strict(kernel: Kernel) -> bool:
    """Whether the kernel has a strict mode."""
    return "strict" in inspect.signature(kernel.run).parameters


@cache
def keys_of(kernel: Kernel, arch: str) -> tuple[str, ...]:
    """The formats that a kernel serves on an architecture, for some M and a shape that suits everyone."""

    def served(key: str) -> bool:
        k = 8 * math.lcm(multiples(key)[1], 64)
        return bool(_served(kernel, key, (64, k), arch, DTYPES))

    return tuple(key for key in KEYS if served(key))


def _served(kernel: Kernel, key: str, shape: tuple[int, int], arch: str, dtypes: Sequence[torch.dtype]) -> list[int]:
    """Those of MS that the kernel takes in some of the dtypes."""
    format = get_format(key)
    return [m for m in MS if any(kernel.supports(Problem(format, dtype, m, *shape, arch)) is None for dtype in dtypes)]


def draw(kernel: Kernel, key: str, seed: int, arch: str) -> Group:
    """The problems of a seed. Raises ValueError where the kernel takes none of many."""
    rng = random.Random(f"{key} {seed}")
    for _ in range(200):
        n, k = _shape(rng, key, tall=arch != "cpu")
        dtypes = rng.sample(DTYPES, rng.choice((1, 1, 2)))
        served = _served(kernel, key, (n, k), arch, dtypes)
        if not served:
            continue
        ms = rng.sample(served, min(3, len(served)))  # few, as each may be a compilation
        cases = tuple(
            case
            for number in range(PROBLEMS)
            if (case := _case(rng, kernel, key, seed, number, (n, k), arch, dtypes, ms)) is not None
        )
        if cases:
            shift = rng.choice((0,) * 8 + (1, 2, 4, 8))  # few, as most kernels leave odd addresses to the fallback
            return Group(kernel.name, key, seed, n, k, shift, rng.random() < 0.4, cases)
    raise ValueError(f"{kernel.name} takes no problem in {key} on {arch}")


def _shape(rng: random.Random, key: str, tall: bool) -> tuple[int, int]:
    """(N, K), small; on a GPU sometimes tall, where blocks of threads take several tiles and passes."""
    rows, columns = multiples(key)
    unit = math.lcm(columns, rng.choice((1, 8, 32, 64, 64, 64, 256)))
    if tall and rng.random() < 0.15:
        most_n, most_k = 24_000, 320
    else:
        most_n, most_k = rng.choice((4, 40, 300, 1200)), rng.choice((64, 300, 1500, 4500))
    return rows * rng.randint(1, max(1, most_n // rows)), unit * rng.randint(1, max(1, most_k // unit))


def _case(
    rng: random.Random,
    kernel: Kernel,
    key: str,
    seed: int,
    number: int,
    shape: tuple[int, int],
    arch: str,
    dtypes: Sequence[torch.dtype],
    ms: Sequence[int],
) -> Case | None:
    dtype = rng.choice(dtypes)
    case = Case(
        seed=seed,
        number=number,
        dtype=dtype,
        m=rng.choice(ms),
        stride=rng.choice((0, 0, 0, 1, 7, 8, 64, None)),
        offset=rng.choice((0, 0, 0, 1, 5, 8)),
        bias=rng.choice((None, None, dtype, torch.float32)),
        bias_offset=rng.choice((0, 0, 1, 3)),
        magnitude=2.0 ** rng.choice((0, 0, 0, 0, -12, 6, 11) if dtype == torch.float16 else (0, 0, 0, 0, -12, -60, 60)),
        strict=rng.random() < 0.25 and takes_strict(kernel),
    )
    return case if kernel.supports(Problem(get_format(key), dtype, case.m, *shape, arch)) is None else None


def make_weight(group: Group, device: torch.device) -> PackedWeight:
    """The group's weight, its parts `shift` bytes (and at least an element) past aligned addresses where it says so."""
    generator = torch.Generator().manual_seed(group.seed)
    weight = random_weight(group.key, group.n, group.k, generator, group.exact)
    if group.exact:
        weight = _powers_of_two(weight, generator)
    parts = {name: _shifted(part.to(device), group.shift) for name, part in weight.parts.items()}
    return PackedWeight(weight.format, weight.shape, parts)


def _powers_of_two(weight: PackedWeight, generator: torch.Generator) -> PackedWeight:
    """The weight with scales of 1/2, 1, 2 or 4, so that one scale taken for another is noticed."""

    def powers(shape: Sequence[int]) -> Tensor:
        return torch.ldexp(torch.ones(shape), torch.randint(-1, 3, tuple(shape), generator=generator))

    parts = dict(weight.parts)
    scale, layout = weight.format.scale, weight.format.layout
    if weight.format.nested:
        parts["nested_quant_map"] = powers((256,))
        parts["nested_absmax"] = powers(parts["nested_absmax"].shape)
        parts["nested_offset"] = torch.zeros(())
    elif isinstance(scale, RecordHalf) and isinstance(layout, RecordLayout):
        records = parts["codes"].view(-1, layout.bytes)
        records[:, scale.start : scale.start + 2] = powers((len(records), 1)).half().view(torch.uint8)
    for name in ("absmax", "scales"):
        if name in parts and parts[name].dtype != torch.uint8:
            parts[name] = powers(parts[name].shape).to(parts[name].dtype)
    return PackedWeight(weight.format, weight.shape, parts)


def _shifted(part: Tensor, shift: int) -> Tensor:
    """A copy that begins `shift` bytes after an aligned address, or an element after it where elements are larger."""
    if not shift:
        return part
    skipped = max(1, shift // part.element_size())
    buffer = torch.empty(part.numel() + skipped, dtype=part.dtype, device=part.device)
    return buffer[skipped:].view(part.shape).copy_(part)


def make_inputs(group: Group, case: Case, device: torch.device) -> Inputs:
    """x [M, K] inside a buffer of NaN, and bias [N] or None."""
    generator = torch.Generator().manual_seed(group.seed * PROBLEMS + case.number)
    rows = 1 if case.stride is None else case.m
    if group.exact:
        values = torch.randint(-3, 4, (rows, group.k), generator=generator).float()
    else:
        values = torch.randn(rows, group.k, generator=generator) * case.magnitude
        if case.number % 4 == 0 and case.dtype != torch.float16:
            values[:, group.k // 3] *= 100  # as activations of real models have
    buffer = torch.full((rows, group.k + (case.stride or 0) + case.offset), torch.nan, dtype=case.dtype)
    buffer[:, case.offset : case.offset + group.k] = values
    x = buffer.to(device)[:, case.offset : case.offset + group.k]
    if case.stride is None:
        x = x.expand(case.m, group.k)
    if case.bias is None:
        return x, None
    drawn = torch.randint(-9, 10, (group.n,), generator=generator).float()
    bias = (drawn if group.exact else drawn * case.magnitude).to(device, case.bias)
    return x, _shifted(bias, case.bias_offset * bias.element_size())


@dataclass(frozen=True)
class Dense:
    """A weight in float64, for the references of all its problems: values, their squares and magnitudes, all [K, N].

    magnitudes: of what a kernel adds up: with an offset, that times x and the product without it, which may cancel.
    """

    values: Tensor
    squares: Tensor
    magnitudes: Tensor

    @staticmethod
    def of(weight: PackedWeight) -> Dense:
        values = weight.dequantize(torch.float64)
        magnitudes = values.abs()
        offsets = weight.offsets()
        if offsets is not None:
            each = offsets.double().abs().repeat_interleave(weight.format.blocksize)
            magnitudes = magnitudes + 2 * each[: values.numel()].view(values.shape)
        return Dense(values.t(), values.square().t(), magnitudes.t())


def exactly(kernel: Kernel, weight: PackedWeight, case: Case) -> bool:
    """Whether whole numbers must come out to the bit: on a GPU 16-bit tables round most entries of NF4 and FP4."""
    if kernel.backend != "cuda" or case.strict or case.dtype == torch.float32:
        return True
    table = torch.tensor(weight.format.codebook, dtype=torch.float64)
    return bool((table.half().double() == table).all())


def judge(
    kernel: Kernel, group: Group, case: Case, weight: PackedWeight, dense: Dense, inputs: Inputs, out: Tensor
) -> None:
    """Raise AssertionError unless `out` is right.

    To the bit where any order of the sums is exact. Else every output is as near to the float64 result as the rounding
    of its table and sums in fp32 let it be, and the norms are within the contract; for a handful of outputs, whose
    norms are left to chance, with the same allowance.
    """
    x, bias = inputs
    wide = x.double()
    y = wide @ dense.values
    if bias is not None:
        y += bias.double()
    rounded = y.to(case.dtype)
    if group.exact and exactly(kernel, weight, case):
        wrong = (out != rounded).nonzero()
        if len(wrong):
            spot = tuple(wrong[0].tolist())
            raise AssertionError(
                f"{len(wrong)} of {out.numel()} outputs are not exact, first at {spot}: "
                f"got {float(out[spot]):.9g}, exact {float(y[spot]):.9g}"
            )
        return
    fine = kernel.backend != "cuda" or case.strict or case.dtype == torch.float32
    table = 2.0**-18 if fine else 2.0**-10
    if kernel.name in ("codebook_prefill", "codebook_gemm") and case.dtype == torch.bfloat16:
        table = 2.0**-8  # they round weights themselves to fp16: 2^-12 in the mean, and sums beside a rounding boundary
    chance = table * ((wide.square() @ dense.squares).sqrt() + y.abs() / 2)
    chance += FP32_SUMS * (wide.abs() @ dense.magnitudes)
    finite = torch.isfinite(rounded)
    distance = (out.double() - y).abs()
    off = (finite & ~(distance <= (rounded.double() - y).abs() + chance)) | (~finite & (out != rounded))
    if off.any():
        spot = tuple(off.nonzero()[0].tolist())
        raise AssertionError(
            f"{int(off.sum())} of {out.numel()} outputs are wrong, first at {spot}: "
            f"got {float(out[spot]):.9g}, exact {float(y[spot]):.9g}, allowed {float(chance[spot]):.3g} and rounding"
        )
    slack = 0.0 if out.numel() >= MANY and not group.exact else float(chance.norm())
    reference.assert_within_contract(out, y, slack=slack)


def check(kernel: Kernel, group: Group, case: Case, weight: PackedWeight, dense: Callable[[], Dense]) -> None:
    """Run one problem, twice. Raises AssertionError with the line that repeats it, Dead where the device is lost."""
    device = weight.device
    try:
        inputs = make_inputs(group, case, device)
        size = case.m * group.n
        buffer = torch.full((GUARD + size + GUARD,), torch.nan, dtype=case.dtype, device=device)
        out = buffer[GUARD : GUARD + size].view(case.m, group.n)
        extra = {"strict": True} if case.strict else {}
        kernel.run(inputs[0], weight, inputs[1], out, **extra)
        synchronise(device)
        judge(kernel, group, case, weight, dense(), inputs, out)
        guards = torch.cat([buffer[:GUARD], buffer[GUARD + size :]])
        assert guards.isnan().all(), "wrote outside the output"
        first = out.clone()
        out.fill_(torch.nan)
        kernel.run(inputs[0], weight, inputs[1], out, **extra)
        assert torch.equal(first, out), "another answer the second time"
    except OverBudget:
        raise
    except Exception as error:
        message = f"{error}\n  {describe(group, case)}\n  repeat: {line(group, case, device)}"
        if dead(device):
            raise Dead(message) from error
        raise AssertionError(message) from error


def synchronise(device: torch.device) -> None:
    """Wait for the device here, where a time limit can end the process."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def dead(device: torch.device) -> bool:
    """Whether an error has ended the process's use of the device."""
    try:
        synchronise(device)
    except RuntimeError:
        return True
    return False


def describe(group: Group, case: Case) -> str:
    """The problem in words."""
    kind = "exact" if group.exact else "random"
    return f"{group.kernel} {group.key} N={group.n} K={group.k} shift={group.shift} {kind} {case}"


def line(group: Group, case: Case | None, device: torch.device) -> str:
    """The command that repeats a problem."""
    words = f"python tests/kernel_fuzz.py --kernel {group.kernel} --device {device.type} --key {group.key}"
    return f"{words} --seed {group.seed}" + ("" if case is None else f" --problem {case.number}")


def run_group(kernel: Kernel, group: Group, device: torch.device, limit: Limit) -> tuple[int, list[str]]:
    """(problems, failures) of a group; those over the budget are not counted. Raises Dead where the device is lost."""
    weight = make_weight(group, device)
    dense = cache(lambda: Dense.of(weight))  # not made where all problems are over the budget
    count = 0
    failures = []
    for case in group.cases:
        limit.doing = line(group, case, device)
        try:
            check(kernel, group, case, weight, dense)
        except OverBudget:
            continue
        except AssertionError as error:
            failures.append(str(error))
        count += 1
    return count, failures


def run_seeds(
    kernel: Kernel, key: str, seeds: Iterable[int], device: torch.device, enough: int | None = None
) -> tuple[int, list[str]]:
    """(problems, failures) of some seeds, or of as many as make `enough` problems. Stops after 20 failures.

    A problem that does not end ends the process. Raises Dead, with the failures so far, where the device is lost.
    """
    arch = arch_of(device)
    count = 0
    failures: list[str] = []
    for seed in seeds:
        group = draw(kernel, key, seed, arch)
        with time_limit(HANG_S, line(group, None, device)) as limit:
            try:
                done, failed = run_group(kernel, group, device, limit)
            except Dead as error:
                raise Dead("\n".join([*failures, str(error)])) from error
        count += done
        failures += failed
        if len(failures) > 20 or (enough is not None and count >= enough):
            break
    return count, failures


def run_one(kernel: Kernel, key: str, seed: int, number: int, device: torch.device) -> tuple[int, list[str]]:
    group = draw(kernel, key, seed, arch_of(device))
    group = replace(group, cases=tuple(case for case in group.cases if case.number == number))
    print("\n".join(describe(group, case) for case in group.cases))
    with time_limit(HANG_S, line(group, None, device)) as limit:
        return run_group(kernel, group, device, limit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--key", help="format; all that the kernel serves by default")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    parser.add_argument("--problem", type=int, help="one problem of the seed alone")
    arguments = parser.parse_args()
    kernel, device = kernel_named(arguments.kernel), torch.device(arguments.device)
    arch = arch_of(device)
    keys = [arguments.key] if arguments.key else keys_of(kernel, arch)
    if arguments.problem is not None:
        count, failures = run_one(kernel, keys[0], arguments.seed, arguments.problem, device)
    else:
        seeds = range(arguments.seed, arguments.seed + arguments.seeds)
        results = [run_seeds(kernel, key, seeds, device) for key in keys]
        count, failures = sum(result[0] for result in results), [each for result in results for each in result[1]]
    print("\n".join(failures[:20]))
    print(f"{kernel.name} on {arch}: {count} problems, {len(failures)} fail")
    raise SystemExit(bool(failures) or not count)


if __name__ == "__main__":
    main()
