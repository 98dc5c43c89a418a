"""Random problems on every CPU path that the registry offers. HALFBYTE_FUZZ sets how many (2,000 by default).

Every failure prints a line that reproduces it: `HALFBYTE_FUZZ_ONLY=<number> pytest tests/test_kernel_fuzz.py`.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from halfbyte import reference
from halfbyte.formats import PackedWeight
from halfbyte.kernels import Problem, kernels
from halfbyte.kernels.cpu import library
from halfbyte.kernels.cpu_linear import multiply
from kernel_samples import KEYS, multiples, random_weight, slack

COUNT = int(os.environ.get("HALFBYTE_FUZZ", "2000"))
ONLY = os.environ.get("HALFBYTE_FUZZ_ONLY")
CHUNKS = 8
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Run = Callable[[Tensor, PackedWeight, Tensor | None, Tensor], None]


@dataclass(frozen=True)
class Case:
    """A random problem; its number is all that is needed to make it again."""

    number: int
    key: str
    dtype: torch.dtype
    m: int
    n: int
    k: int
    stride: int
    offset: int
    bias: torch.dtype | None
    exact: bool
    magnitude: float
    threads: int


def draw(number: int) -> Case:
    rng = random.Random(number)
    key = rng.choice(KEYS)
    rows, columns = multiples(key)
    k = columns * max(1, int(rng.choice((8, 64, 300, 1500)) * rng.random()) // columns)
    if columns == 1 and rng.random() < 0.5:
        k = 16 * rng.randint(1, 80)
    n = rows * max(1, int(rng.choice((4, 40, 300)) * rng.random()) // rows)
    m = rng.choice((1, 1, 2, 3, 4, 5, 7, 8, 11, 16, 33, 64, 65, 100))
    dtype = rng.choice(DTYPES)
    return Case(
        number=number,
        key=key,
        dtype=dtype,
        m=m,
        n=n,
        k=k,
        stride=rng.choice((0, 0, 1, 7, 64)),
        offset=rng.choice((0, 0, 1, 5)),
        bias=rng.choice((None, dtype, torch.float32)),
        exact=rng.random() < 0.3,
        magnitude=2.0 ** rng.choice((0, 0, 0, -12, 6)),
        threads=rng.choice((1, 2, 3)),
    )


def paths(problem: Problem) -> dict[str, Run]:
    """Every way to compute a problem here: each kernel that supports it, and each instruction set of the library."""
    found: dict[str, Run] = {}
    for kernel in kernels():
        if kernel.supports(problem) is None:
            found[kernel.name] = kernel.run
    loaded = library()
    if loaded is not None:
        for name, isa in loaded.isas.items():
            found[name] = lambda x, weight, bias, out, isa=isa: multiply(loaded, isa, x, weight, bias, out)
    return found


def whole(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(-2, 3, shape, generator=generator).float()


@dataclass(frozen=True)
class Made:
    """A case's tensors, its float64 result, and what sums in fp32 may lose where they cancel."""

    weight: PackedWeight
    x: Tensor
    bias: Tensor | None
    y: Tensor
    slack: float


def make(case: Case) -> Made:
    generator = torch.Generator().manual_seed(case.number)
    weight = random_weight(case.key, case.n, case.k, generator, case.exact)
    buffer = torch.full((case.m, case.k + case.stride + case.offset), torch.nan, dtype=case.dtype)
    x = buffer[:, case.offset : case.offset + case.k]
    drawn = whole((case.m, case.k), generator) if case.exact else torch.randn(case.m, case.k, generator=generator)
    x.copy_(drawn if case.exact else drawn * case.magnitude)
    bias = None
    if case.bias is not None:
        bias = (whole((case.n,), generator) if case.exact else torch.randn(case.n, generator=generator)).to(case.bias)
    dense = weight.dequantize(torch.float64)
    y = x.double() @ dense.t()
    if bias is not None:
        y += bias.double()
    return Made(weight, x, bias, y, slack(x, dense))


def judge(case: Case, made: Made, out: Tensor, name: str) -> None:
    """Raise AssertionError unless `out` is right: to the bit where any order of the sums is exact."""
    if case.exact:
        assert torch.equal(out, made.y.to(case.dtype)), f"{name}: not exact"
    else:
        reference.assert_within_contract(out, made.y, name, made.slack)


def check(case: Case) -> None:
    made = make(case)
    for name, run in paths(Problem(made.weight.format, case.dtype, case.m, case.n, case.k)).items():
        out = torch.full((case.m, case.n), torch.nan, dtype=case.dtype)
        try:
            run(made.x, made.weight, made.bias, out)
            judge(case, made, out, name)
        except Exception as error:
            raise AssertionError(
                f"{name}: {error}\n{case}\nreproduce: HALFBYTE_FUZZ_ONLY={case.number} pytest tests/test_kernel_fuzz.py"
            ) from error


@pytest.mark.parametrize("chunk", range(CHUNKS) if ONLY is None else [0])
def test_random_problems(chunk: int) -> None:
    numbers = range(chunk, COUNT, CHUNKS) if ONLY is None else [int(ONLY)]
    failures = []
    before = torch.get_num_threads()
    try:
        for number in numbers:
            case = draw(number)
            torch.set_num_threads(case.threads)
            try:
                check(case)
            except AssertionError as error:
                failures.append(str(error))
    finally:
        torch.set_num_threads(before)
    assert not failures, f"{len(failures)} of {len(numbers)} problems fail:\n" + "\n".join(failures[:5])


def test_the_fuzz_notices_swapped_nibbles() -> None:
    """The same check, on a weight decoded wrongly, fails: the fuzz can fail."""
    generator = torch.Generator().manual_seed(0)
    weight = random_weight("nf4-64", 32, 256, generator)
    x = torch.randn(4, 256, generator=generator)
    y = reference.linear(x, weight)
    for run in paths(Problem(weight.format, x.dtype, 4, 32, 256)).values():
        out = torch.empty(4, 32)
        run(x, reference.swap_nibbles(weight), None, out)
        with pytest.raises(AssertionError, match="times the limit"):
            reference.assert_within_contract(out, y)
