"""What a call costs the host: our operator and layer against bitsandbytes', on layers too small to matter.

A token through a 4-bit model is hundreds of such calls, and without CUDA graphs a GPU waits for the host whenever a
call takes it longer than the kernel takes the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from .. import reference
from ..formats import PackedWeight, quantize
from ..integrations import bitsandbytes
from ..nn import QuantLinear
from ..ops import linear, linear_op
from .linear import DTYPE_NAMES
from .measure import CALL, Timing, host_time
from .peers import Layer, bnb_module, bnb_operator, dense_layer, installed
from .rows import Environment, Row

SHAPE = (64, 64)


@dataclass(frozen=True)
class Candidate:
    """A way to call a layer; bytes: of its weight; switched: called while halfbyte serves bitsandbytes' operators."""

    name: str
    layer: Layer
    bytes: int
    format: str
    switched: bool = False


def bench_overhead(
    formats: Sequence[str],
    dtype_name: str,
    device: torch.device,
    m: int = 1,
    seconds_each: float = 0.5,
    shape: tuple[int, int] = SHAPE,
) -> Iterator[Row]:
    """Rows of suite "overhead" of every format: microseconds of the host a call, all candidates by turns.

    shape: (N, K) of the layer; x is [m, K]. Candidates: `halfbyte::linear` called through torch.ops, `halfbyte.linear`,
    `QuantLinear`, bitsandbytes' operator and its `Linear4bit` where it is installed and knows the format, torch's dense
    layer, and then, by turns of their own, bitsandbytes' two again as halfbyte serves them. Called in inference mode.

    Raises ValueError for an unknown format or a shape that it cannot hold.
    """
    environment = Environment.of(device)
    n, k = shape
    dtype = DTYPE_NAMES[dtype_name]
    for key in formats:
        weight = quantize(torch.randn(n, k, device=device), key)
        x = torch.randn(m, k, device=device).to(dtype)
        y = reference.linear(x, weight)
        chosen = candidates(weight, x, dtype_name)
        errors, timings = _measured([each for each in chosen if not each.switched], x, y, seconds_each)
        switched = [each for each in chosen if each.switched]
        if switched:
            with bitsandbytes.enabled():
                errors_then, timings_then = _measured(switched, x, y, seconds_each)
            errors, timings = errors | errors_then, timings | timings_then
        for each in chosen:
            yield Row(
                suite="overhead",
                environment=environment,
                kernel=each.name,
                format=each.format,
                nested=weight.format.nested,
                dtype=dtype_name,
                M=m,
                N=n,
                K=k,
                timing=timings[each.name],
                bytes=each.bytes,
                ceiling_tb_per_s=0.0,
                error=errors[each.name],
                rounding_limit=reference.rounding_limit(y, dtype),
            )


def candidates(weight: PackedWeight, x: torch.Tensor, dtype_name: str) -> list[Candidate]:
    """All ways to call a layer of this weight with activations like x; ours first."""
    dtype, (n, k), key = x.dtype, weight.shape, weight.format.key
    parts = list(weight.parts.values())
    module = QuantLinear.from_packed(weight, dtype=dtype).eval()
    found = [
        Candidate("halfbyte linear, torch.ops", lambda x: linear_op(x, parts, None, key, n, k), weight.nbytes, key),
        Candidate("halfbyte linear", lambda x: linear(x, weight), weight.nbytes, key),
        Candidate("halfbyte QuantLinear", module, weight.nbytes, key),
    ]
    name, switched = installed("bitsandbytes"), []
    if name and weight.format.name in ("nf4", "fp4"):

        def theirs() -> dict[str, Layer]:  # made twice: on a CPU Linear4bit repacks its weight, and rounds its scales
            return {"gemm_4bit, torch.ops": bnb_operator(weight), "Linear4bit": bnb_module(weight, dtype)}

        found += [Candidate(f"{name} {what}", layer, weight.nbytes, key) for what, layer in theirs().items()]
        switched = [
            Candidate(f"halfbyte for {name} {what}", layer, weight.nbytes, key, switched=True)
            for what, layer in theirs().items()
        ]
    size = n * k * dtype.itemsize
    dense = Candidate(f"torch {torch.__version__} linear", dense_layer(weight, dtype), size, dtype_name)
    return [*found, dense, *switched]


def _measured(
    chosen: Sequence[Candidate], x: torch.Tensor, y: torch.Tensor, seconds_each: float
) -> tuple[dict[str, float], dict[str, Timing]]:
    """Error and time of candidates by turns."""
    with torch.inference_mode():
        errors = {each.name: reference.relative_error(each.layer(x), y) for each in chosen}
        calls = {each.name: _call(each.layer, x) for each in chosen}
        return errors, host_time(calls, seconds_each * len(chosen), x.device)


def _call(layer: Layer, x: torch.Tensor) -> CALL:
    return lambda: layer(x)
