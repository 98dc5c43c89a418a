"""A small model in bitsandbytes' NF4, two adapters, and what they answer in float64; and a vLLM to serve them.

`make test-vllm` makes a virtual environment with vLLM and names its Python in HALFBYTE_VLLM; without, there is nothing
to test. The checkpoint is made, and the answers are judged, in halfbyte's own environment. On a machine with CUDA
devices the servers use them:

    HALFBYTE_VLLM=$(which python3) pytest tests/vllm_server/test_adapters.py tests/vllm_server/test_ranks.py
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from vllm_model import Answers, make_adapters, make_checkpoint

PYTHON = os.environ.get("HALFBYTE_VLLM")
collect_ignore_glob = [] if PYTHON else ["test_*.py"]


@pytest.fixture(scope="session")
def python() -> str:
    """vLLM's Python."""
    assert PYTHON
    return PYTHON


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the checkpoint, prequantised with nested scales; adapters in `a` and `b` beside its files."""
    target = tmp_path_factory.mktemp("served")
    make_checkpoint(target)
    make_adapters(target)
    return target


@pytest.fixture(scope="session")
def answers(model: Path) -> Answers:
    return Answers(model)
