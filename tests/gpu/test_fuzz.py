"""Random problems on every CUDA kernel: HALFBYTE_FUZZ of them each (10,000 by default), shared out by format.

Every failure prints the command that repeats it; see kernel_fuzz.py.
"""

from __future__ import annotations

import itertools
import math
import os

import pytest
from walk import ALL, ARCH, DEVICE, KERNELS

from kernel_fuzz import keys_of, run_seeds

COUNT = int(os.environ.get("HALFBYTE_FUZZ", "10000"))
PARTS = 2  # of each format, to share among processes
TIME_LIMIT_S = None  # each seed has its own


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize(("name", "key"), ALL)
def test_random_problems(name: str, key: str, part: int) -> None:
    kernel = KERNELS[name]
    enough = math.ceil(COUNT / len(keys_of(kernel, ARCH)) / PARTS)
    count, failures = run_seeds(kernel, key, itertools.count(part, PARTS), DEVICE, enough)
    assert not failures, f"{len(failures)} of {count} problems fail:\n" + "\n".join(failures[:5])
    assert count >= enough
