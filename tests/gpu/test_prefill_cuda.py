"""codebook_prefill beyond what all kernels are tested for: many slabs and chunks, graphs of them, what a call holds."""

from __future__ import annotations

import pytest
import torch
from walk import ARCH, DEVICE, activations, weight_of

from halfbyte import reference
from halfbyte.formats import PackedWeight
from halfbyte.kernels import codebook_prefill as prefill
from halfbyte.kernels.codebook_prefill import Cut
from halfbyte.kernels.launch import Launcher

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
pytestmark = pytest.mark.skipif(DEVICE.type != "cuda" or ARCH not in prefill.ARCHITECTURES, reason="about newer GPUs")


@pytest.mark.parametrize("cut", [Cut(512, 256, 256), Cut(1536, 700, 300), Cut(256, 128, 50)], ids=str)
@pytest.mark.parametrize(("dtype", "bias_dtype"), [(BF16, BF16), (FP16, FP32), (BF16, None)], ids=str)
@pytest.mark.parametrize(
    ("key", "n", "k"), [("nf4-64", 2000, 2048), ("nf4-64-nested", 1531, 1544), ("mxfp4", 1024, 512)]
)
def test_slabs_and_chunks(
    key: str, n: int, k: int, dtype: torch.dtype, bias_dtype: torch.dtype | None, cut: Cut
) -> None:
    weight, x = weight_of(key, n, k), activations(700, k, dtype)
    bias = None if bias_dtype is None else torch.randn(n, device=DEVICE).to(bias_dtype)
    y = reference.linear(x, weight, bias)
    each = Cut(min(cut.slab, -(-n // 8) * 8), cut.chunk, cut.sums)
    runs = []
    for _ in range(3):
        out = torch.full((700, n), torch.nan, dtype=dtype, device=DEVICE)
        prefill.multiply(Launcher.of(prefill.STEM, weight), x, weight, bias, out, each)
        reference.assert_within_contract(out, y, f"{key} {n} × {k} {dtype} {each}")
        runs.append(out)
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_rows_of_very_different_sizes(dtype: torch.dtype) -> None:
    """Rows of W and of x 2^20 apart keep their own precision: each row of outputs is within the contract."""
    weight = weight_of("nf4-64", 512, 1024)
    sizes = 2.0 ** torch.linspace(-20 if dtype == BF16 else -4, 0, 512, device=DEVICE).round()
    parts = dict(weight.parts)
    parts["absmax"] = (parts["absmax"].view(512, -1) * sizes[:, None]).view(parts["absmax"].shape)
    weight = PackedWeight(weight.format, weight.shape, parts)
    x = activations(256, 1024, FP32)
    x = (x * 2.0 ** torch.linspace(-12 if dtype == BF16 else -4, 0, 256, device=DEVICE).round()[:, None]).to(dtype)
    y, out = reference.linear(x, weight), torch.empty(256, 512, dtype=dtype, device=DEVICE)
    prefill.run(x, weight, None, out)
    for rows in range(0, 256, 32):
        for columns in range(0, 512, 64):
            spot = (slice(rows, rows + 32), slice(columns, columns + 64))
            reference.assert_within_contract(out[spot], y[spot], f"{dtype} rows {rows}, columns {columns}")


@pytest.mark.parametrize(("m", "n", "k"), [(4096, 14336, 4096), (8192, 4096, 14336), (2048, 65536, 5120)])
def test_a_call_holds_its_workspace_and_no_more(m: int, n: int, k: int) -> None:
    weight = weight_of("nf4-64", n, k)
    x, out = activations(m, k, BF16), torch.empty(m, n, dtype=BF16, device=DEVICE)
    prefill.run(x, weight, None, out)  # cuBLAS takes a workspace of its own once
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    prefill.run(x, weight, None, out)
    assert torch.cuda.max_memory_allocated() - before <= prefill.WORKSPACE


def test_a_graph_of_many_slabs_is_replayed_with_new_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "SLAB_BYTES", 2 << 20)
    n, k, m = 3000, 2048, 300
    weight, x = weight_of("nf4-64", n, k), activations(m, k, BF16)
    bias, out = torch.randn(n, device=DEVICE, dtype=BF16), torch.empty(m, n, dtype=BF16, device=DEVICE)
    assert prefill.cut(BF16, m, n, k).slab < n
    prefill.run(x, weight, bias, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prefill.run(x, weight, bias, out)
    for seed in (3, 4):
        x.copy_(activations(m, k, BF16, seed))
        for name, part in weight_of("nf4-64", n, k, seed).parts.items():
            weight.parts[name].copy_(part)
        out.fill_(torch.nan)
        graph.replay()
        reference.assert_within_contract(out, reference.linear(x, weight, bias), f"replay {seed}")
