"""A mixture of experts, for which there is no 4-bit kernel: an error that says so, no decoding in silence."""

from __future__ import annotations

from pathlib import Path

import pytest
from server import BOOT_S, start
from vllm_model import make_experts


def test_experts_are_refused_by_name(python: str, tmp_path: Path) -> None:
    model = tmp_path / "experts"
    make_experts(model)
    with (
        start(python, model, tmp_path / "work", "--quantization", "bitsandbytes") as server,
        pytest.raises(RuntimeError, match="did not start"),
    ):
        server.wait(BOOT_S)
    assert (
        "halfbyte has no kernel for mixture-of-experts layers in 4 bits (1 of them, the first is model.layers.0."
        in server.log
    )
    assert "HALFBYTE_DISABLE=1" in server.log
