"""A bitsandbytes weight cut for several ranks, and put together again: slices of its bytes, every value unchanged.

Tensor parallelism gives each rank some rows of a weight [N, K] (along N) or some columns (along K). Blocks of
bitsandbytes lie along the flattened matrix, so a cut is exact where it falls between two blocks, and impossible
elsewhere: half a block has no scale of its own. Rows are contiguous bytes; columns are gathered from codes viewed as
[N, K/2] and scales viewed as [N, K/blocksize]. Nested scales share their second level across all of the weight, so
they are first expanded to the fp32 numbers that they stand for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..formats import BlockFormat, PackedWeight, get_format
from .bitsandbytes import FAMILIES


def expand_nested(weight: PackedWeight) -> PackedWeight:
    """The same weight with plain fp32 scales; one that has them already is returned as it is. Codes are shared.

    A nested scale is an fp32 number (see `formats.codecs.NestedScale`), so no value changes. Raises ValueError for a
    format other than nf4 and fp4.
    """
    _check_family(weight)
    if not weight.format.nested:
        return weight
    plain = get_format(f"{weight.format.name}-{weight.format.blocksize}")
    return PackedWeight(plain, weight.shape, {"codes": weight.codes, "absmax": weight.scales()})


def take_rows(weight: PackedWeight, start: int, stop: int) -> PackedWeight:
    """Rows start..stop of a weight [N, K], scales expanded; codes and scales are views.

    Raises ValueError where a row range does not lie in the weight, or does not begin and end between two blocks (the
    end of the weight counts as such).
    """
    n, k = weight.shape
    size = weight.format.blocksize
    if not 0 <= start < stop <= n:
        raise ValueError(f"rows {start}..{stop} are not within a weight of {n} rows")
    if start * k % size or (stop < n and stop * k % size):
        raise ValueError(f"rows {start}..{stop} of K = {k} do not begin and end between two blocks of {size}")
    weight = expand_nested(weight)
    first, last = start * k, stop * k
    parts = {
        "codes": weight.codes[first // 2 : -(-last // 2)],
        "absmax": weight.parts["absmax"][first // size : -(-last // size)],
    }
    return PackedWeight(weight.format, (stop - start, k), parts)


def take_columns(weight: PackedWeight, start: int, stop: int) -> PackedWeight:
    """Columns start..stop of a weight [N, K], scales expanded; codes and scales are copies.

    Raises ValueError where a column range does not lie in the weight, or K, start or stop is no multiple of the
    blocksize.
    """
    n, k = weight.shape
    size = weight.format.blocksize
    if not 0 <= start < stop <= k:
        raise ValueError(f"columns {start}..{stop} are not within a weight of {k} columns")
    if k % size or start % size or stop % size:
        raise ValueError(f"columns {start}..{stop} of K = {k} do not begin and end between two blocks of {size}")
    weight = expand_nested(weight)
    codes = weight.codes.view(n, k // 2)[:, start // 2 : stop // 2]
    absmax = weight.parts["absmax"].view(n, k // size)[:, start // size : stop // size]
    parts = {"codes": codes.reshape(-1), "absmax": absmax.reshape(-1)}
    return PackedWeight(weight.format, (n, stop - start), {name: part.contiguous() for name, part in parts.items()})


def split_rows(weight: PackedWeight, rank: int, ranks: int, name: str = "weight") -> PackedWeight:
    """What one of `ranks` ranks holds of a weight [N, K] that is cut along N: [N/ranks, K]; see `take_rows`.

    name: of the layer, for messages. Raises ValueError, naming layer, shape, ranks and blocksize, where N is no
    multiple of the ranks or a block would lie in two of them.
    """
    n, k = weight.shape
    _check_rank(rank, ranks)
    share = n // ranks
    if n % ranks or (ranks > 1 and share * k % weight.format.blocksize):
        raise _illegal(weight, ranks, name, "N", n, lambda count: n // count * k)
    return take_rows(weight, rank * share, (rank + 1) * share)


def split_columns(weight: PackedWeight, rank: int, ranks: int, name: str = "weight") -> PackedWeight:
    """What one of `ranks` ranks holds of a weight [N, K] that is cut along K: [N, K/ranks]; see `take_columns`.

    name: of the layer, for messages. Raises ValueError, naming layer, shape, ranks and blocksize, where K is no
    multiple of the ranks or a block would lie in two of them.
    """
    _, k = weight.shape
    _check_rank(rank, ranks)
    if ranks == 1:
        return expand_nested(weight)
    share = k // ranks
    if k % ranks or share % weight.format.blocksize:
        raise _illegal(weight, ranks, name, "K", k, lambda count: k // count)
    return take_columns(weight, rank * share, (rank + 1) * share)


def join_rows(parts: Sequence[PackedWeight]) -> PackedWeight:
    """The weight whose rows `parts` are, one after the other: the inverse of `split_rows`, scales expanded.

    Raises ValueError where they differ in format or K, or one but the last ends within a block.
    """
    plain = [expand_nested(part) for part in parts]
    format, k = _common(plain, 1)
    for part in plain[:-1]:
        if part.shape[0] * k % format.blocksize:
            raise ValueError(f"join_rows: {part.shape[0]} rows of K = {k} end within a block of {format.blocksize}")
    joined = {name: torch.cat([part.parts[name] for part in plain]) for name in plain[0].parts}
    return PackedWeight(format, (sum(part.shape[0] for part in plain), k), joined)


def join_columns(parts: Sequence[PackedWeight]) -> PackedWeight:
    """The weight whose columns `parts` are, side by side: the inverse of `split_columns`, scales expanded.

    Raises ValueError where they differ in format or N, or the K of one is no multiple of the blocksize.
    """
    plain = [expand_nested(part) for part in parts]
    format, n = _common(plain, 0)
    for part in plain:
        if part.shape[1] % format.blocksize:
            raise ValueError(f"join_columns: K = {part.shape[1]} is no multiple of the blocksize {format.blocksize}")
    joined = {
        name: torch.cat([part.parts[name].view(n, -1) for part in plain], dim=1).view(-1) for name in plain[0].parts
    }
    return PackedWeight(format, (n, sum(part.shape[1] for part in plain)), joined)


def _common(parts: Sequence[PackedWeight], axis: int) -> tuple[BlockFormat, int]:
    """The format and the size along `axis` that all parts have."""
    if not parts:
        raise ValueError("there are no parts to join")
    kinds = {(part.format.key, part.shape[axis]) for part in parts}
    if len(kinds) > 1:
        raise ValueError(f"parts to join differ in format or {'NK'[axis]}: {sorted(kinds)}")
    return parts[0].format, parts[0].shape[axis]


def _check_family(weight: PackedWeight) -> None:
    if weight.format.name not in FAMILIES:
        raise ValueError(f"only nf4 and fp4 weights are split and joined here, not {weight.format.key}")


def _check_rank(rank: int, ranks: int) -> None:
    if not 0 <= rank < ranks:
        raise ValueError(f"rank must be 0 to {ranks - 1} of {ranks} ranks, got {rank}")


def _illegal(
    weight: PackedWeight, ranks: int, name: str, axis: str, size: int, run: Callable[[int], int]
) -> ValueError:
    """Why `ranks` ranks cannot share a weight along `axis` of that size; run(count): a rank's weights in a row."""
    n, k = weight.shape
    blocksize = weight.format.blocksize
    legal = [count for count in range(1, ranks) if count == 1 or (size % count == 0 and run(count) % blocksize == 0)]
    return ValueError(
        f"{name}: its {weight.format.key} weight [N, K] = [{n}, {k}] cannot be split along {axis} over {ranks} ranks: "
        + (
            f"{axis} is no multiple of {ranks}"
            if size % ranks
            else f"with K = {k} a rank's share of {size // ranks} would end within a block (blocksize {blocksize})"
        )
        + f"; fewer ranks that can: {', '.join(map(str, legal))}"
    )
