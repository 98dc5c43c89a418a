"""vLLM's operator `vllm::apply_bnb_4bit` on halfbyte's kernels.

vLLM merges layers that read the same activations: q, k and v, gate and up. Their codes follow each other in one
parameter, each shard with scales of its own, and the operator calls bitsandbytes for one shard after the other and
copies each result into place. Where shards end between two blocks, one weight of all rows is the same numbers: codes
stay where they are, scales are put together once, and one launch writes `out`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKeySet

from ..counters import bucket, counts
from ..kernels import Kernel, nvrtc
from ..ops import CheckedWeight, check_weight
from . import bitsandbytes as switch

OPERATOR = "apply_bnb_4bit"
ADDED = "adapters"  # of the counters: calls whose adapters vLLM's own kernels add
ATTRIBUTE = "halfbyte_layer"  # of a parameter: its Layer
ADAPTERS = "halfbyte_adapters"  # of a parameter with LoRA: its vllm_lora.Adapters

_library: Any = None


def enable() -> None:
    """Serve bitsandbytes' operators and vLLM's in this process from now on; does nothing where that is so already.

    Raises as `halfbyte.integrations.bitsandbytes.enable` does; AttributeError where vLLM's operator is not there yet.
    """
    global _library
    switch.enable()
    if _library is not None:
        return
    from vllm.platforms import current_platform

    key = current_platform.dispatch_key
    original = torch.library.get_kernel(f"vllm::{OPERATOR}", key)
    library: Any = torch.library.Library("vllm", "IMPL")  # type: ignore[no-untyped-call]
    switch.replace(library, OPERATOR, key, partial(_apply, original))
    _library = library  # it lasts as long as this


def disable() -> None:
    """Give the operators back, as they were."""
    global _library
    if _library is not None:
        _library._destroy()
        _library = None
    switch.disable()


@dataclass(frozen=True)
class Shard:
    """Rows start..stop of a layer's output, and the weight that makes them."""

    weight: CheckedWeight
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Layer:
    """A parameter of vLLM's in shards that one launch each computes: one shard in all, where they go together.

    bounds: the first and last byte of vLLM's own shards. states: bitsandbytes' description of them, and address: where
    the codes were, both to notice a parameter that got another weight.
    """

    shards: tuple[Shard, ...]
    bounds: tuple[int, ...]
    states: Any
    address: int

    @property
    def pieces(self) -> int:
        """How many shards vLLM has."""
        return len(self.bounds) - 1

    @property
    def shape(self) -> tuple[int, int]:
        """N and K of all shards together."""
        return self.shards[-1].stop, self.shards[0].weight.packed.shape[1]

    @property
    def key(self) -> str:
        """The format's key, of every shard."""
        return ", ".join(dict.fromkeys(shard.weight.packed.format.key for shard in self.shards))

    def kernel(self, dtype: torch.dtype, m: int) -> Kernel:
        """The kernel for m rows of x of a dtype. Raises Unserved where vLLM's own way is faster, or there is none."""
        for shard in self.shards:
            kernel = switch.kernel_for(shard.weight, dtype, m)
        return kernel

    def check(self, x: Tensor, out: Tensor) -> None:
        """Raise TypeError or ValueError unless x is [M, K] and `out` contiguous [M, N] of its dtype."""
        n, k = self.shape
        if x.dim() != 2 or out.shape != (x.shape[0], n) or out.dtype != x.dtype or not out.is_contiguous():
            raise ValueError(
                f"x {list(x.shape)} {x.dtype} and out {list(out.shape)} {out.dtype} for a layer [{n}, {k}]"
            )
        self.shards[0].weight.check_input("x", x, k)

    def multiply(self, x: Tensor, out: Tensor) -> None:
        """Write x [M, K] times the layer's transpose to contiguous `out` [M, N] of x's dtype.

        Raises Unserved, TypeError or ValueError where halfbyte does not, before anything is written.
        """
        self.check(x, out)
        m = x.shape[0]
        self.kernel(x.dtype, m)
        rows = x if x.stride(1) == 1 else x.contiguous()
        for shard in self.shards:
            kernel = shard.weight.kernel(x.dtype, m)
            counts.serve(OPERATOR, kernel.name, bucket(m))
            if m:
                self._run(kernel, rows, shard, out)

    def multiply_decoded(self, weight: Tensor, x: Tensor, out: Tensor) -> None:
        """`multiply` for many rows, with bitsandbytes' values: it decodes a shard of vLLM's to x's dtype after another.

        That is what vLLM does, but for its copy of each result into place. weight: the parameter. Raises as `check`,
        and Unserved for nested scales, which vLLM expands when it loads.
        """
        self.check(x, out)
        if any(state.nested for state in self.states.values()):
            raise switch.Unserved("nested scales")
        start = 0
        for i in range(self.pieces):
            state, codes = self.states[i], weight[self.bounds[i] : self.bounds[i + 1]]
            stop = start + state.shape[0]
            dense = torch.ops.bitsandbytes.dequantize_4bit(
                codes, state.absmax, state.blocksize, state.quant_type, state.shape, x.dtype
            )
            torch.mm(x, dense.t(), out=out[:, start:stop])
            del dense  # before the next one is made
            start = stop

    def _run(self, kernel: Kernel, rows: Tensor, shard: Shard, out: Tensor) -> None:
        """One launch. Only CPU kernels take an `out` with gaps between its rows."""
        target = out[:, shard.start : shard.stop]
        if target.is_contiguous() or kernel.backend == "cpu":
            kernel.run(rows, shard.weight.packed, None, target)
        else:
            whole = torch.empty_like(target, memory_format=torch.contiguous_format)
            kernel.run(rows, shard.weight.packed, None, whole)
            target.copy_(whole)

    def prepare(self, ms: Iterable[int], dtype: torch.dtype) -> None:
        """Compile and load what `multiply` will need for each of these numbers of rows; nothing is counted."""
        n, k = self.shape
        device = self.shards[0].weight.device

        def call(m: int) -> None:
            try:
                self.kernel(dtype, m)
            except switch.Unserved:
                return
            x = torch.zeros(m, k, dtype=dtype, device=device)
            out = x.new_empty(m, n)
            for shard in self.shards:
                self._run(shard.weight.kernel(dtype, m), x, shard, out)

        side_by_side(call, ms, device)


def side_by_side(call: Callable[[int], None], ms: Iterable[int], device: torch.device) -> None:
    """call(m) for each m, in threads: first calls compile, for half a second or more each, on a core each."""
    listed = list(ms)
    on_gpu = device.type == "cuda"
    if on_gpu:
        nvrtc.missing()  # imports what must not be imported by two threads at once

    def there(m: int) -> None:
        with torch.cuda.device(device) if on_gpu else nullcontext():  # a thread's own
            call(m)

    with ThreadPoolExecutor(max(1, min(len(listed), os.cpu_count() or 1))) as pool:
        for _ in pool.map(there, listed):
            pass  # an error is raised here
    if on_gpu:
        torch.cuda.synchronize(device)


def layer_of(weight: Tensor, offsets: Tensor | Sequence[int]) -> Layer:
    """The layer of a parameter: its `bnb_quant_state` {shard: QuantState}, `offsets` the shards' first and last byte.

    Made once and kept with the parameter. Raises Unserved or ValueError for a weight that halfbyte does not have.
    """
    known: Layer | None = getattr(weight, ATTRIBUTE, None)
    states: Any = weight.bnb_quant_state  # type: ignore[attr-defined]
    if known is not None and known.states is states and known.address == weight.data_ptr():
        return known
    bounds = [int(offset) for offset in offsets]
    pieces = [states[i] for i in range(len(states))]
    merged = _merged(weight, pieces, bounds)
    weights = (
        [_checked(weight[bounds[i] : bounds[i + 1]], state) for i, state in enumerate(pieces)]
        if merged is None
        else [merged]
    )
    shards = []
    start = 0
    for one in weights:
        stop = start + one.packed.shape[0]
        shards.append(Shard(one, start, stop))
        start = stop
    layer = Layer(tuple(shards), tuple(bounds), states, weight.data_ptr())
    setattr(weight, ATTRIBUTE, layer)
    return layer


def _checked(codes: Tensor, state: Any) -> CheckedWeight:
    key = switch.format_key(state)
    if key is None:
        raise switch.Unserved(f"no format for {state.quant_type} in blocks of {state.blocksize}")
    return check_weight(codes, switch.raw_parts(codes, state), key, *state.shape)


def _merged(weight: Tensor, pieces: list[Any], bounds: list[int]) -> CheckedWeight | None:
    """All shards as one weight, or None where they are no such thing.

    Their scales then move into one tensor, and bitsandbytes' descriptions get views of it.
    """
    first = pieces[0]
    key, size, k = switch.format_key(first), first.blocksize, first.shape[1]
    heights = [state.shape[0] for state in pieces]
    if (
        key is None
        or any(state.nested or switch.format_key(state) != key or state.shape[1] != k for state in pieces)
        or any(height * k % size for height in heights[:-1])
        or any(bounds[i + 1] - bounds[i] != -(-height * k // 2) for i, height in enumerate(heights))
        or bounds[-1] != weight.numel()
    ):
        return None
    scales = [switch.flat_scales(state.absmax) for state in pieces]
    absmax = scales[0] if len(scales) == 1 else torch.cat(scales)
    merged = check_weight(weight, [weight.detach(), absmax], key, sum(heights), k)
    for state, part in zip(pieces, torch.split(absmax, [len(scale) for scale in scales]), strict=True):
        state.absmax = part
    return merged


def _decodes(x: Tensor, weight: Tensor, offsets: Tensor, out: Tensor) -> bool:
    """Multiply by a decoded weight, where vLLM's own way is that, too; else do nothing. Returns whether it did."""
    if x.shape[0] <= switch.GEMM_ROWS or x.device.type != "cuda":
        return False
    try:
        layer_of(weight, offsets).multiply_decoded(weight, x, out)
    except (switch.Unserved, TypeError, ValueError):
        return False
    return True


def _apply(original: Any, keyset: DispatchKeySet, x: Tensor, weight: Tensor, offsets: Tensor, out: Tensor) -> None:
    """The implementation that the dispatcher calls: halfbyte's, or else vLLM's. With LoRA, adapters are in it."""
    adapters: Any = getattr(weight, ADAPTERS, None)
    index = None if adapters is None else adapters.index(x.shape[0])
    if index is not None:
        try:
            adapters.multiply(layer_of(weight, offsets), x, index, out)
            return
        except (switch.Unserved, TypeError, ValueError) as error:
            counts.passed(ADDED, str(error))
    try:
        layer_of(weight, offsets).multiply(x, out)
    except (switch.Unserved, TypeError, ValueError) as error:
        counts.passed(OPERATOR, str(error))
        if not _decodes(x, weight, offsets, out):
            original.call_boxed(keyset, x, weight, offsets, out)
    if index is not None:
        adapters.add(x, out)
