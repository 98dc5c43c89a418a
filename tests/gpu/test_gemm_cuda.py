"""codebook_gemm beyond what all kernels are tested for: tiles and cuts, ranges of scales, graphs, what a call holds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from walk import ARCH, DEVICE, activations, weight_of

from halfbyte import reference
from halfbyte.formats import PackedWeight
from halfbyte.kernels import codebook_gemm as gemm
from halfbyte.kernels.codebook_gemm import Cut, Tile
from halfbyte.kernels.launch import Launcher

BF16, FP32 = torch.bfloat16, torch.float32
pytestmark = pytest.mark.skipif(DEVICE.type != "cuda" or gemm.ARCH != ARCH, reason=f"about {gemm.ARCH}")
tiles = pytest.mark.parametrize("tile", gemm.TILES, ids=lambda tile: f"{tile.rows}x{tile.COLUMNS}")


def cuts(tile: Tile, m: int, k: int) -> list[Cut]:
    """K whole, in two segments, in as many as there are stages; and x in chunks."""
    units = k // gemm.UNIT
    sizes = {-(-units // count // gemm.TEAM) * gemm.TEAM for count in (1, 2, 100)}
    whole = [Cut(tile, m, size, -(-units // size)) for size in sizes]
    return [*whole, Cut(tile, tile.COLUMNS, *min((each.units, each.segments) for each in whole))]


def multiply(weight: PackedWeight, x: Tensor, bias: Tensor | None, each: Cut) -> Tensor:
    out = torch.full((x.shape[0], weight.shape[0]), torch.nan, dtype=x.dtype, device=DEVICE)
    gemm.multiply(Launcher.of(gemm.STEM, weight), x, weight, bias, out, each)
    return out


@tiles
@pytest.mark.parametrize("bias_dtype", [BF16, FP32, None], ids=str)
@pytest.mark.parametrize(
    ("key", "n", "k"),
    [
        ("nf4-64", 2000, 2048),
        ("nf4-64-nested", 1531, 1536),
        ("nf4-64-nested", 300, 1088),
        ("mxfp4", 1024, 512),
        ("mxfp4", 515, 576),
        ("nf4-32", 777, 1024),
        ("fp4-128", 640, 4096),
    ],
)
def test_tiles_segments_and_chunks(key: str, n: int, k: int, bias_dtype: torch.dtype | None, tile: Tile) -> None:
    m = 300
    weight, x = weight_of(key, n, k), activations(m, k, BF16)
    bias = None if bias_dtype is None else torch.randn(n, device=DEVICE).to(bias_dtype)
    y = reference.linear(x, weight, bias)
    for each in cuts(tile, m, k):
        out = multiply(weight, x, bias, each)
        reference.assert_within_contract(out, y, f"{key} {n} × {k} {each}")
        assert torch.equal(out, multiply(weight, x, bias, each))


@tiles
def test_scales_of_any_size_and_order(tile: Tile) -> None:
    """Each row of outputs keeps the contract where scales of a row of W rise or fall by 2^29 along K, or are 0."""
    weight = weight_of("nf4-64", 512, 4096)
    scales = weight.parts["absmax"].clone().view(512, 64)
    scales[:128, 20:] *= 2.0**15
    scales[:128, 40:] *= 2.0**14
    scales[128:256, 20:] *= 2.0**-15
    scales[128:256, 40:] *= 2.0**-14
    scales[256:258] *= 2.0**60
    scales[258:260] *= 2.0**-100
    scales[260], scales[261, :8] = 0, 0
    weight = PackedWeight(weight.format, weight.shape, {**weight.parts, "absmax": scales.view(-1)})
    x = activations(128, 4096, BF16)
    y = reference.linear(x, weight)
    for each in cuts(tile, 128, 4096):
        out = multiply(weight, x, None, each)
        assert torch.equal(out[:, 260], torch.zeros_like(out[:, 260]))
        for column in [*range(0, 512, 37), *range(256, 260), 261]:
            spot = (slice(None), slice(column, column + 1))
            reference.assert_within_contract(out[spot], y[spot], f"row {column} of W, {each}")


@tiles
def test_rows_of_x_of_any_size(tile: Tile) -> None:
    weight, x = weight_of("nf4-64-nested", 1024, 1024), activations(256, 1024, FP32)
    x = (x * 2.0 ** torch.linspace(-90, 90, 256, device=DEVICE).round()[:, None]).to(BF16)
    x[7], x[9, ::3] = 0, 0
    y = reference.linear(x, weight)
    for each in cuts(tile, 256, 1024):
        out = multiply(weight, x, None, each)
        assert not out[7].any()
        for row in [*range(0, 256, 17), 9]:
            if row != 7:
                reference.assert_within_contract(out[row : row + 1], y[row : row + 1], f"row {row} of x, {each}")


@pytest.mark.parametrize(("m", "n", "k"), [(4096, 14336, 4096), (8192, 4096, 14336), (300, 5120, 32768)])
def test_a_call_holds_its_workspace_and_no_more(m: int, n: int, k: int) -> None:
    weight = weight_of("nf4-64", n, k)
    x, out = activations(m, k, BF16), torch.empty(m, n, dtype=BF16, device=DEVICE)
    gemm.run(x, weight, None, out)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    gemm.run(x, weight, None, out)
    assert torch.cuda.max_memory_allocated() - before <= gemm.WORKSPACE


@pytest.mark.parametrize(("n", "k"), [(3000, 2048), (4096, 8192)])
def test_a_graph_is_replayed_with_new_inputs(n: int, k: int) -> None:
    m = 200
    weight, x = weight_of("nf4-64", n, k), activations(m, k, BF16)
    bias, out = torch.randn(n, device=DEVICE, dtype=BF16), torch.empty(m, n, dtype=BF16, device=DEVICE)
    gemm.run(x, weight, bias, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gemm.run(x, weight, bias, out)
        gemm.run(x, weight, bias, out)
    for seed in (3, 4):
        x.copy_(activations(m, k, BF16, seed))
        for name, part in weight_of("nf4-64", n, k, seed).parts.items():
            weight.parts[name].copy_(part)
        out.fill_(torch.nan)
        graph.replay()
        reference.assert_within_contract(out, reference.linear(x, weight, bias), f"replay {seed}")
