"""codebook_wgmma gives the bits of codebook_mma, whatever the rows of x hold and however the work is cut."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from walk import ALL, DEVICE, activations, apply, weight_of

from halfbyte import reference
from halfbyte.formats import PackedWeight, get_format
from halfbyte.kernels import Kernel, Problem, codebook, codebook_mma, codebook_wgmma
from kernel_fuzz import kernel_named

pytestmark = pytest.mark.skipif(DEVICE.type != "cuda", reason="about CUDA")
BF16, FP16 = torch.bfloat16, torch.float16
MS = (9, 15, 16, 17, 31, 32, 33, 48, 64)
UNIT = codebook_wgmma.UNIT  # of K, of which a row of x gets a power of two of its own
SHAPES = (
    (300, 576),
    (2050, 1088),
    (5120, 4096),
    (2100, 14336),
)  # no whole tiles, stages or units; K that clusters share
KEYS = [key for name, key in ALL if name == codebook_wgmma.STEM]
LARGE = (("nf4-64", BF16, 65536, 5120), ("nf4-64-nested", FP16, 5120, 32768))


def both() -> tuple[Kernel, Kernel]:
    return kernel_named(codebook_wgmma.STEM), kernel_named(codebook_mma.STEM)


def uneven(m: int, k: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    """x [M, K] in which each row has a magnitude of its own and every third row's units have; some are zeros.

    bf16: from 2^-40 to 2^30, so that units need powers of two; fp16: from 2^-14 (and less, which rounds) to 2^4.
    """
    generator = torch.Generator().manual_seed(seed)
    lowest, highest = (-40, 31) if dtype == BF16 else (-14, 5)
    rows = torch.randint(lowest, highest, (m, 1, 1), generator=generator)
    units = torch.randint(lowest, highest, (m, k // UNIT, 1), generator=generator)
    units[1::3] = rows[1::3]
    units[2::3] = rows[2::3] - torch.randint(0, 9, units[2::3].shape, generator=generator)
    x = torch.ldexp(torch.randn(m, k // UNIT, UNIT, generator=generator), units)
    x[m // 2] = 0
    x[:, -1] *= torch.randint(0, 2, (m, 1), generator=generator)
    return x.view(m, k).to(DEVICE, dtype)


def placed(x: Tensor, offset: int, gap: int) -> Tensor:
    """x inside a buffer of NaN, `offset` elements from its begin and `gap` between rows."""
    m, k = x.shape
    buffer = torch.full((m, offset + k + gap), torch.nan, dtype=x.dtype, device=x.device)
    buffer[:, offset : offset + k] = x
    return buffer[:, offset : offset + k]


def bias_of(number: int, n: int, dtype: torch.dtype) -> Tensor | None:
    """None, of x's dtype or fp32, by turns."""
    kind = (None, dtype, torch.float32)[number % 3]
    return None if kind is None else torch.randn(n, device=DEVICE).to(kind)


def served(key: str, dtype: torch.dtype, n: int, k: int) -> bool:
    return codebook_wgmma.reason_against(Problem(get_format(key), dtype, MS[0], n, k, codebook_wgmma.ARCH)) is None


def assert_same_bits(weight: PackedWeight, dtype: torch.dtype, seed: int, label: str) -> None:
    """For each of MS, with the first and the last rows of a larger x, and x in memory of all kinds."""
    wgmma, mma = both()
    n, k = weight.shape
    x = uneven(64, k, dtype, seed)
    places = ((0, 0), (8, 0), (1, 0), (0, 8), (0, 3))
    for number, m in enumerate(MS):
        bias = bias_of(number + seed, n, dtype)
        wanted = apply(mma, x, weight, bias)
        assert not wanted.isnan().any(), label
        place = places[number % len(places)]
        assert torch.equal(apply(wgmma, placed(x[:m], *place), weight, bias), wanted[:m]), f"{label} M={m} first rows"
        last = apply(wgmma, placed(x[-m:], *place), weight, bias)
        assert torch.equal(last, wanted[-m:]), f"{label} M={m} last rows"
    swapped = reference.swap_nibbles(weight)
    assert not torch.equal(apply(wgmma, x, swapped), apply(wgmma, x, weight)), f"{label}: codes are not looked at"


@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize("key", KEYS)
def test_bits_are_those_of_codebook_mma(key: str, turn: int) -> None:
    """Each format with two of the shapes and both dtypes, where it is served."""
    n, k = SHAPES[(KEYS.index(key) + 2 * turn) % len(SHAPES)]
    weight = weight_of(key, n, k)
    for dtype in (BF16, FP16):
        if served(key, dtype, n, k):
            assert_same_bits(weight, dtype, KEYS.index(key), f"{key} {n} × {k} {dtype}")


@pytest.mark.parametrize(("key", "dtype", "n", "k"), LARGE, ids=str)
def test_large_layers_have_those_bits_and_keep_the_contract(key: str, dtype: torch.dtype, n: int, k: int) -> None:
    """Many passes of blocks, and K that clusters share."""
    wgmma, mma = both()
    weight = weight_of(key, n, k)
    for make in (activations, uneven):
        x = make(64, k, dtype)
        out = apply(mma, x, weight)
        for m in (16, 33, 64):
            assert torch.equal(apply(wgmma, x[:m], weight), out[:m]), f"{key} {n} × {k} M={m} {make.__name__}"
    x = activations(64, k, dtype)
    for m in (16, 64):
        reference.assert_within_contract(apply(wgmma, x[:m], weight), reference.linear(x[:m], weight), f"{key} M={m}")


@pytest.mark.parametrize("m", [64, 65, 100, 128, codebook_wgmma.MAX_M])
def test_as_many_rows_as_it_takes(m: int) -> None:
    """A launch, several, and a last one for fewer rows."""
    wgmma, mma = both()
    weight = weight_of("nf4-64", 2304, 1536)
    x = uneven(m, 1536, BF16)
    wanted = torch.cat([apply(mma, rows, weight) for rows in x.split(codebook_mma.MAX_M)])
    assert torch.equal(apply(wgmma, x, weight), wanted)


@pytest.mark.parametrize("m", [16, 32, 64])
@pytest.mark.parametrize("key", ["nf4-64", "nf4-64-nested"])
def test_short_rings_give_the_same_bits(key: str, m: int) -> None:
    """Configurations with a ring of two slots, which every stage waits for, beside their own."""
    n, k, (_, mma) = 2304, 8192, both()
    weight, x = weight_of(key, n, k), uneven(m, k, BF16)
    index, multiprocessors = DEVICE.index or 0, codebook.device_of(DEVICE.index or 0)[1]
    side = not codebook.copies_scales(weight, codebook_wgmma.ARCH)
    wanted, stream = apply(mma, x, weight), torch.cuda.current_stream().cuda_stream
    found = list(codebook_wgmma.configurations(weight.format, BF16, m, n, k, multiprocessors, side))
    assert len(found) >= 6
    for config in found[:: len(found) // 5]:
        for stages in (2, config.STAGES):
            chosen = replace(config, STAGES=stages)
            multiply = codebook_wgmma.launch(weight, chosen, index, multiprocessors)
            image, out = codebook_wgmma.image_for(x, multiply), torch.full_like(wanted, torch.nan)
            codebook_wgmma.launch_image(chosen, n, k, index, multiprocessors)(x, None, image, stream, True)
            multiply(image, None, out, stream, False)
            assert torch.equal(out, wanted), f"{key} M={m}: {chosen}"


@pytest.mark.parametrize("m", [9, 32, 64])
@pytest.mark.parametrize(
    ("key", "n", "k"), [("nf4-64", 5120, 4096), ("nf4-64-nested", 300, 32768), ("nf4-64", 4100, 8192)]
)
def test_stages_spread_over_blocks_give_the_same_bits(key: str, n: int, k: int, m: int) -> None:
    """Every configuration that spreads them, many calls on the same memory, which holds anything before the first."""
    _, mma = both()
    weight, x, bias = weight_of(key, n, k), uneven(m, k, BF16), torch.randn(n, device=DEVICE)
    index, multiprocessors = DEVICE.index or 0, codebook.device_of(DEVICE.index or 0)[1]
    side = not codebook.copies_scales(weight, codebook_wgmma.ARCH)
    wanted, stream = apply(mma, x, weight, bias), torch.cuda.current_stream().cuda_stream
    found = codebook_wgmma.configurations(weight.format, BF16, m, n, k, multiprocessors, side)
    spread = [config for config in found if config.SPREAD]
    assert len(spread) >= 3
    for config in spread:
        multiply = codebook_wgmma.launch(weight, config, index, multiprocessors)
        lay_out = codebook_wgmma.launch_image(config, n, k, index, multiprocessors)
        memory = codebook_wgmma.image_for(x, multiply).fill_(255)
        outs = [torch.full_like(wanted, torch.nan) for _ in range(20)]
        for out in outs:
            lay_out(x, None, memory, stream, True)
            multiply(memory, bias, out, stream, True)
        assert all(torch.equal(out, wanted) for out in outs), f"{key} {n} × {k} M={m}: {config}"


@pytest.mark.parametrize("m", [16, 64])
def test_replays_read_what_is_there_then(m: int) -> None:
    """Three calls in a graph, whose images share its memory, with x, bias and weight rewritten between replays."""
    (wgmma, mma), n, k = both(), 2304, 1536
    weight, x, bias = weight_of("nf4-64", n, k), uneven(m, k, BF16), torch.randn(n, device=DEVICE)
    apply(wgmma, x, weight, bias)  # compiles
    outs = [torch.empty(m, n, dtype=BF16, device=DEVICE) for _ in range(3)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for out in outs:
            wgmma.run(x, weight, bias, out)
    for seed in (5, 6):
        x.copy_(uneven(m, k, BF16, seed))
        bias.normal_()
        for part, other in zip(weight.parts.values(), weight_of("nf4-64", n, k, seed).parts.values(), strict=True):
            part.copy_(other)
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        wanted = apply(mma, x, weight, bias)
        assert all(torch.equal(out, wanted) for out in outs)


@pytest.mark.parametrize("m", [16, 40])
def test_a_weight_written_just_before_is_read_as_written(m: int) -> None:
    """Calls of an unchanged weight start early, and must not where the kernel right before writes it."""
    (wgmma, mma), (n, k) = both(), (8192, 4096)
    sources = [weight_of("nf4-64", n, k, seed) for seed in (1, 2)]
    weight, x = weight_of("nf4-64", n, k, 3), activations(m, k, BF16)
    wanted = [apply(mma, x, source) for source in sources]
    assert not torch.equal(*wanted)
    outs = []
    for turn in range(12):
        if turn % 3 == 0:  # then two calls that start early
            for name, part in weight.parts.items():
                part.copy_(sources[turn // 3 % 2].parts[name])
        outs.append(apply(wgmma, x, weight))
    for turn, out in enumerate(outs):
        assert torch.equal(out, wanted[turn // 3 % 2]), f"turn {turn}"


def test_each_call_reads_what_the_one_before_wrote() -> None:
    """Layers of M = 16, one after another, each launched while the one before is at work."""
    wgmma, mma = both()
    k = 2048
    layers = [weight_of("nf4-64", k, k, seed) for seed in range(4)]
    for layer in layers:  # so that what follows sixteen of them is as large as what they began with
        layer.parts["absmax"].mul_(k**-0.5)
    start = activations(16, k, BF16)

    def forward(kernel: Kernel, synchronised: bool) -> Tensor:
        x = start
        for layer in layers * 4:
            x = apply(kernel, x, layer)
            if synchronised:
                torch.cuda.synchronize()
        return x

    wanted = forward(mma, True)
    assert torch.isfinite(wanted).all()
    assert wanted.any()
    for _ in range(5):
        assert torch.equal(forward(wgmma, False), wanted)
