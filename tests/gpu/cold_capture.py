"""Capture a kernel's very first call in a CUDA graph: it works, or raises an error that names `prepare`.

    python tests/gpu/cold_capture.py codebook_mma nf4-64

Then, in the same process, a call of a new weight on the compiled kernel. Status 0 if nothing was corrupted.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parents[1])]

from walk import KERNELS, activations, apply, fitting, rows_of, weight_of  # noqa: E402

from halfbyte import reference  # noqa: E402
from halfbyte.formats import PackedWeight  # noqa: E402
from time_limit import time_limit  # noqa: E402


def first_call_captured(name: str, weight: PackedWeight, x: torch.Tensor) -> str:
    """How the capture of a call went: "works", or the error's words. Raises AssertionError for a wrong answer."""
    kernel = KERNELS[name]
    out = torch.full((x.shape[0], weight.shape[0]), torch.nan, dtype=x.dtype, device=x.device)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            kernel.run(x, weight, None, out)
    except Exception as error:
        story = []
        chain: BaseException | None = error
        while chain is not None:
            story.append(str(chain))
            chain = chain.__context__
        words = " / ".join(story)
        assert "prepare" in words, f"the error does not say what to do: {words}"
        return f"refused: {words}"
    torch.cuda.synchronize()
    assert out.isnan().all(), "something ran while it was captured"
    graph.replay()
    reference.assert_within_contract(out, reference.linear(x, weight), "replay")
    return "works"


def main(name: str, key: str) -> None:
    n, k = fitting(key, 1024, 2048)
    x = activations(rows_of(KERNELS[name], key, torch.bfloat16, n, k, 1)[0], k, torch.bfloat16)
    weights = [weight_of(key, n, k, seed) for seed in (1, 2)]
    torch.cuda.synchronize()
    for what, weight in zip(("kernel never seen", "weight never seen"), weights, strict=True):
        print(f"{name} {key}, {what}: {first_call_captured(name, weight, x)}")
        y = reference.linear(x, weight)
        reference.assert_within_contract(apply(KERNELS[name], x, weight), y, "eager after the capture")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, time_limit(40, "cold capture"):
        os.environ["HALFBYTE_CACHE"] = folder
        main(*sys.argv[1:])
