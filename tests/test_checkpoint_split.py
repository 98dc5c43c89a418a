"""Weights cut for several ranks: every value is the one that the whole weight has, and joining undoes it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.checkpoints import pack_state, unpack_state
from halfbyte.checkpoints.split import (
    expand_nested,
    join_columns,
    join_rows,
    split_columns,
    split_rows,
    take_columns,
    take_rows,
)
from halfbyte.formats import PackedWeight, get_format, quantize

KEYS = ("nf4-32", "nf4-64", "fp4-64", "nf4-128", "nf4-64-nested", "fp4-32-nested")
SIZES = st.tuples(st.sampled_from(KEYS), st.integers(1, 24), st.integers(1, 400), st.integers(1, 6))


def weight_of(key: str, n: int, k: int, seed: int = 0) -> PackedWeight:
    """Random codes, also those that no quantiser writes, and random scales; more than 256 blocks have several second
    levels, each another number."""
    format = get_format(key)
    generator = torch.Generator().manual_seed(seed)
    parts = {}
    for name, part in format.parts(n, k).items():
        if part.dtypes[0] == torch.uint8:
            parts[name] = torch.randint(256, part.shape, generator=generator, dtype=torch.uint8)
        else:
            parts[name] = torch.rand(part.shape, generator=generator)
    return PackedWeight(format, (n, k), parts)


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit: -0 is not 0."""
    return torch.equal(one.contiguous().view(torch.int32), other.contiguous().view(torch.int32))


def same(one: PackedWeight, other: PackedWeight) -> bool:
    return (
        one.format == other.format
        and one.shape == other.shape
        and all(torch.equal(part, other.parts[name]) for name, part in one.parts.items())
    )


@settings(deadline=None, max_examples=150)
@given(SIZES)
def test_rows_keep_every_value_and_join_again(case: tuple[str, int, int, int]) -> None:
    key, n, k, ranks = case
    whole = weight_of(key, n, k)
    size = whole.format.blocksize
    if n % ranks or (ranks > 1 and n // ranks * k % size):
        with pytest.raises(ValueError, match="cannot be split along N"):
            split_rows(whole, 0, ranks)
        return
    parts = [split_rows(whole, rank, ranks) for rank in range(ranks)]
    values = whole.dequantize()
    for part, rows in zip(parts, values.split(n // ranks), strict=True):
        assert part.shape == (n // ranks, k)
        assert equal(part.dequantize(), rows)
    assert same(join_rows(parts), expand_nested(whole))


@settings(deadline=None, max_examples=150)
@given(SIZES.map(lambda case: (case[0], case[1], max(1, case[2] // 32) * 32, case[3])))
def test_columns_keep_every_value_and_join_again(case: tuple[str, int, int, int]) -> None:
    key, n, k, ranks = case
    whole = weight_of(key, n, k)
    if ranks > 1 and (k % ranks or k // ranks % whole.format.blocksize):
        with pytest.raises(ValueError, match="cannot be split along K"):
            split_columns(whole, 0, ranks)
        return
    parts = [split_columns(whole, rank, ranks) for rank in range(ranks)]
    values = whole.dequantize()
    for part, columns in zip(parts, values.split(k // ranks, dim=1), strict=True):
        assert part.shape == (n, k // ranks)
        assert equal(part.dequantize(), columns)
    if k % whole.format.blocksize == 0:
        assert same(join_columns(parts), expand_nested(whole))


@settings(deadline=None, max_examples=100)
@given(SIZES, st.data())
def test_any_range_between_blocks(case: tuple[str, int, int, int], data: st.DataObject) -> None:
    """As fused layers need them: q, k and v of different heights in one weight. Other ranges are refused."""
    key, n, k, _ = case
    whole = weight_of(key, n, k)
    start = data.draw(st.integers(0, n - 1))
    stop = data.draw(st.integers(start + 1, n))
    size = whole.format.blocksize
    if start * k % size or (stop < n and stop * k % size):
        with pytest.raises(ValueError, match="between two blocks"):
            take_rows(whole, start, stop)
    else:
        assert equal(take_rows(whole, start, stop).dequantize(), whole.dequantize()[start:stop])


def test_a_rank_of_rows_is_a_view_and_one_of_columns_is_not() -> None:
    """So that a rank's rows cost no memory beyond the file's pages, and its columns do not keep the others alive."""
    whole = weight_of("nf4-64", 8, 128)
    rows, columns = split_rows(whole, 1, 2), split_columns(whole, 1, 2)
    assert rows.codes.data_ptr() == whole.codes.data_ptr() + 4 * 128 // 2
    assert columns.codes.untyped_storage().nbytes() == 8 * 64 // 2


def test_a_checkpoint_of_bitsandbytes_splits_and_is_written_back() -> None:
    """Nested scales of more than 256 blocks, through the serialised form and back."""
    dense = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    stored = pack_state(quantize(dense, "nf4-64-nested"), "w", "bfloat16")
    whole = unpack_state(stored, "w", "here")
    for split, dim in ((split_rows, 0), (split_columns, 1)):
        parts = [unpack_state(pack_state(split(whole, rank, 4), "w", "bfloat16"), "w", "here") for rank in range(4)]
        assert equal(torch.cat([part.dequantize() for part in parts], dim=dim), whole.dequantize())


def test_neighbours_are_told_apart() -> None:
    """The control: rank 1 is not rank 0, and a split along the wrong axis is another weight."""
    whole = weight_of("nf4-64", 128, 128)
    assert not equal(split_rows(whole, 0, 2).dequantize(), split_rows(whole, 1, 2).dequantize())
    assert not equal(split_columns(whole, 0, 2).dequantize(), whole.dequantize()[:, 64:])


def test_an_illegal_split_names_layer_shape_ranks_and_blocksize() -> None:
    whole = weight_of("nf4-64", 8, 192)
    with pytest.raises(
        ValueError, match=r"layers\.3\.down_proj.*\[8, 192\].*along K over 2 ranks.*K = 192.*96 .*blocksize 64"
    ):
        split_columns(whole, 0, 2, "layers.3.down_proj")
    with pytest.raises(ValueError, match=r"along K over 5 ranks: K is no multiple of 5; fewer ranks that can: 1, 3$"):
        split_columns(whole, 0, 5, "layers.3.down_proj")
    narrow = weight_of("nf4-128", 6, 32)
    with pytest.raises(ValueError, match=r"up.*along N over 6 ranks: with K = 32 .*share of 1 .*blocksize 128.*: 1$"):
        split_rows(narrow, 0, 6, "up")
    with pytest.raises(ValueError, match="rank must be 0 to 1 of 2 ranks, got 2"):
        split_rows(whole, 2, 2)


@pytest.mark.parametrize("bounds", [(-1, 2), (2, 2), (3, 2), (0, 9)])
def test_ranges_outside_a_weight_are_refused(bounds: tuple[int, int]) -> None:
    whole = weight_of("nf4-64", 8, 64)
    with pytest.raises(ValueError, match="not within a weight of 8 rows"):
        take_rows(whole, *bounds)
    with pytest.raises(ValueError, match="not within a weight of 64 columns"):
        take_columns(whole, bounds[0], bounds[1] if bounds[1] < 9 else 65)


def test_what_does_not_join_is_refused() -> None:
    with pytest.raises(ValueError, match="no parts"):
        join_rows([])
    with pytest.raises(ValueError, match="differ in format or K"):
        join_rows([weight_of("nf4-64", 2, 64), weight_of("nf4-64", 2, 128)])
    with pytest.raises(ValueError, match="differ in format or N"):
        join_columns([weight_of("nf4-64", 2, 64), weight_of("fp4-64", 2, 64)])
    with pytest.raises(ValueError, match="end within a block of 64"):
        join_rows([weight_of("nf4-64", 1, 96), weight_of("nf4-64", 2, 96)])
    with pytest.raises(ValueError, match="no multiple of the blocksize"):
        join_columns([weight_of("nf4-64", 2, 96), weight_of("nf4-64", 2, 96)])
    with pytest.raises(ValueError, match="only nf4 and fp4"):
        split_rows(quantize(torch.ones(4, 64), "q4_0"), 0, 2)
