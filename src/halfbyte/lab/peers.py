"""What people run today, as candidates of the linear suite. A peer that is not installed is left out and named."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from ..formats import PackedWeight
from . import peer_humming, peer_onnxruntime

Layer = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Peer:
    """A peer's implementation of one layer.

    build: makes the layer from the packed weight and the dtype; called once for each copy of the weights.
    packed: whether it reads the 4-bit weight, or a dense copy in the activations' dtype.
    weight_bytes: bytes its layer reads.
    requantised: for a peer with a format of its own, what that is called and the float64 weight [N, K] it then holds.
    """

    name: str
    packed: bool
    build: Callable[[PackedWeight, torch.dtype], Layer]
    weight_bytes: Callable[[PackedWeight, torch.dtype], int]
    supports: Callable[[PackedWeight], bool]
    requantised: tuple[Callable[[PackedWeight], str], Callable[[PackedWeight, torch.dtype], Tensor]] | None = None


def peers(device: torch.device) -> tuple[list[Peer], list[str]]:
    """The peers on this machine, and the names of those that are missing.

    Raises ValueError while bitsandbytes' operators run on halfbyte: that would be no peer.
    """
    found = [
        Peer(f"{_dense_library(device)} {torch.__version__}", False, dense_layer, _dense_bytes, lambda weight: True)
    ]
    missing = []
    if name := installed("bitsandbytes"):
        _require_its_own()
        found.append(Peer(f"{name} matmul_4bit", True, _bnb_packed, _packed_bytes, _is_bnb))
        if device.type == "cpu":
            found.append(Peer(f"{name} Linear4bit", True, bnb_module, _packed_bytes, _bnb_repacks))
    else:
        missing.append("bitsandbytes")
    if device.type == "cuda" and torch.version.hip is None:
        if name := installed(peer_humming.PACKAGE):
            found.append(_humming(name))
        else:
            missing.append(peer_humming.PACKAGE)
    if device.type == "cpu":
        name = installed("onnxruntime") if installed("onnx") else None
        if name:
            found += [_onnxruntime(name, level) for level in peer_onnxruntime.LEVELS]
        else:
            missing.append("onnxruntime (with onnx)")
    return found, missing


def dequantising(weight: PackedWeight) -> Peer:
    """Dequantise, then torch's dense multiply: what remains where no kernel takes the packed weight.

    By bitsandbytes' kernel for its own formats where it is installed, which is the faster; else by torch's operations.
    Its name holds " + ", and no other peer's does.
    """
    multiply = f"{_dense_library(weight.device)} {torch.__version__}"
    name = installed("bitsandbytes") if _is_bnb(weight) else None
    if name:
        _require_its_own()
        return Peer(f"{name} dequantize_4bit + {multiply}", True, _bnb_dequantised, _packed_bytes, _is_bnb)
    own = f"torch {torch.__version__} dequantize + {multiply}"
    return Peer(own, True, _dequantised, _packed_bytes, lambda weight: True)


def installed(package: str) -> str | None:
    """A package's name and version, or None. A folder on the path counts where its dist-info lies beside it."""
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return None


def _dense_library(device: torch.device) -> str:
    return "cublas" if device.type == "cuda" else "torch dense"


def _humming(name: str) -> Peer:
    own = peer_humming
    called = name.replace(own.PACKAGE, "humming")
    return Peer(called, True, own.build, own.weight_bytes, own.supports, (own.format_key, own.values))


def _onnxruntime(name: str, level: int) -> Peer:
    own = peer_onnxruntime
    return Peer(
        f"{name} MatMulNBits level {level}",
        True,
        partial(own.build, level),
        own.weight_bytes,
        own.supports,
        (own.format_key, own.values),
    )


def clone(weight: PackedWeight) -> PackedWeight:
    """The weight in memory of its own."""
    return PackedWeight(weight.format, weight.shape, {name: part.clone() for name, part in weight.parts.items()})


def dense_layer(weight: PackedWeight, dtype: torch.dtype) -> Layer:
    """torch's linear on the weight's values, rounded to `dtype`."""
    dense = weight.dequantize(dtype)
    return lambda x: torch.nn.functional.linear(x, dense)


def _dense_bytes(weight: PackedWeight, dtype: torch.dtype) -> int:
    return weight.shape[0] * weight.shape[1] * dtype.itemsize


def _packed_bytes(weight: PackedWeight, dtype: torch.dtype) -> int:
    return weight.nbytes


def _is_bnb(weight: PackedWeight) -> bool:
    return weight.format.name in ("nf4", "fp4")


def _bnb_repacks(weight: PackedWeight) -> bool:
    """Linear4bit's CPU path needs N in 32s, K in blocks and AVX-512 BF16; elsewhere it is matmul_4bit."""
    from bitsandbytes.functional import has_avx512bf16

    n, k = weight.shape
    return _is_bnb(weight) and n % 32 == 0 and k % weight.format.blocksize == 0 and bool(has_avx512bf16())


def _bnb_state(weight: PackedWeight, dtype: torch.dtype) -> tuple[Tensor, object]:
    from bitsandbytes.functional import QuantState, get_4bit_type

    parts = {name: part.clone() for name, part in weight.parts.items()}  # bitsandbytes rewrites some in place
    nested = weight.format.nested
    code = get_4bit_type(weight.format.name, device=weight.device)
    state2 = None
    if nested:
        state2 = QuantState(
            absmax=parts["nested_absmax"], blocksize=256, code=parts["nested_quant_map"], dtype=torch.float32
        )
    state = QuantState(
        absmax=parts["absmax"],
        shape=torch.Size(weight.shape),
        code=code,
        blocksize=weight.format.blocksize,
        quant_type=weight.format.name,
        dtype=dtype,
        offset=parts.get("nested_offset"),
        state2=state2,
    )
    return parts["codes"].view(-1, 1), state


def _require_its_own() -> None:
    """Raise ValueError where bitsandbytes' operators have been replaced by ours in this process."""
    switch = sys.modules.get("halfbyte.integrations.bitsandbytes")
    if switch is not None and switch.status().enabled:
        raise ValueError(
            "bitsandbytes' operators run on halfbyte in this process, so they cannot be measured as a peer; "
            "unset HALFBYTE_BITSANDBYTES or call halfbyte.integrations.bitsandbytes.disable() first"
        )


def bnb_operator(weight: PackedWeight) -> Layer:
    """bitsandbytes' own operator on the weight's bytes, with nothing of its Python layers above it."""
    import bitsandbytes  # noqa: F401 (registers the operator)

    _require_its_own()
    parts, format = weight.parts, weight.format
    first, second = (parts["nested_absmax"], parts["absmax"]) if format.nested else (parts["absmax"], None)
    arguments = (parts["codes"].view(-1, 1), list(weight.shape), first, format.blocksize, format.name, None)
    nested = (second, parts.get("nested_quant_map"), parts.get("nested_offset"))
    operator = torch.ops.bitsandbytes.gemm_4bit.default
    return lambda x: operator(x, *arguments, *nested)


def _bnb_packed(weight: PackedWeight, dtype: torch.dtype) -> Layer:
    from bitsandbytes import matmul_4bit

    codes, state = _bnb_state(weight, dtype)
    return lambda x: matmul_4bit(x, codes.t(), quant_state=state)


def _bnb_dequantised(weight: PackedWeight, dtype: torch.dtype) -> Layer:
    from bitsandbytes.functional import dequantize_4bit

    codes, state = _bnb_state(weight, dtype)
    return lambda x: torch.nn.functional.linear(x, dequantize_4bit(codes, state))


def _dequantised(weight: PackedWeight, dtype: torch.dtype) -> Layer:
    own = clone(weight)
    return lambda x: torch.nn.functional.linear(x, own.dequantize(dtype))


def bnb_module(weight: PackedWeight, dtype: torch.dtype) -> Layer:
    """bitsandbytes' Linear4bit on a copy of the weight's bytes, in eval mode."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    codes, state = _bnb_state(weight, dtype)
    n, k = weight.shape
    module = Linear4bit(k, n, bias=False, compute_dtype=dtype, quant_type=weight.format.name, device="meta")
    module.weight = Params4bit(
        codes, requires_grad=False, quant_state=state, bnb_quantized=True, quant_type=weight.format.name, module=module
    )
    module.quant_state = state
    return module.eval()  # type: ignore[no-any-return]
