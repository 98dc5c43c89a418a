"""What holds for all tests on a GPU: where they run, how long one may take, and what follows when the device is lost.

pytest -m gpu tests/gpu -n 12 --max-worker-restart 3        (without pytest-xdist: no -n, no --max-worker-restart)
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from walk import DEVICE, PRESENT

import kernel_fuzz
import time_limit

TIME_LIMIT_S = 50.0  # of a test; a module may set its own of that name, or None
HERE = Path(__file__).parent
XDIST = "PYTEST_XDIST_WORKER" in os.environ


def pytest_configure(config: pytest.Config) -> None:
    time_limit.keep_stderr()
    if XDIST:
        torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and DEVICE.type == "cuda":
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.skipif(not PRESENT, reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def in_time(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that does not end ends the process; so does a lost device, on which every later test would fail too."""
    seconds = getattr(request.module, "TIME_LIMIT_S", TIME_LIMIT_S)
    if seconds is None:
        yield
    else:
        with time_limit.time_limit(seconds, request.node.nodeid):
            yield
    if kernel_fuzz.dead(DEVICE):
        reason = f"the device takes no more work from this process since {request.node.nodeid}"
        if XDIST:
            os.write(2, f"{reason}\n".encode())
            os._exit(time_limit.STATUS)  # another worker takes over
        pytest.exit(reason, time_limit.STATUS)
