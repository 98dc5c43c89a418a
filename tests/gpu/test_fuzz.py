"""Random problems on every CUDA kernel: HALFBYTE_FUZZ of them each (10,000 by default), shared out by format.

A share may compile HALFBYTE_FUZZ_COMPILE kernels (10 by default), and takes the problems that these can serve.
Every failure prints the command that repeats it; see kernel_fuzz.py.
"""

from __future__ import annotations

import math
import os

import pytest
from walk import ALL, ARCH, DEVICE, KERNELS

from kernel_fuzz import compilations, keys_of, run_seeds

COUNT = int(os.environ.get("HALFBYTE_FUZZ", "10000"))
COMPILE = int(os.environ.get("HALFBYTE_FUZZ_COMPILE", "10"))
SEEDS = 2000  # of a share, at most
PARTS = 2  # of each format, to share among processes
TIME_LIMIT_S = None  # each seed has its own


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize(("name", "key"), ALL)
def test_random_problems(name: str, key: str, part: int) -> None:
    kernel = KERNELS[name]
    enough = math.ceil(COUNT / len(keys_of(kernel, ARCH)) / PARTS)
    with compilations(COMPILE):
        count, failures = run_seeds(kernel, key, range(part, SEEDS * PARTS, PARTS), DEVICE, enough)
    assert not failures, f"{len(failures)} of {count} problems fail:\n" + "\n".join(failures[:5])
    assert count >= enough
