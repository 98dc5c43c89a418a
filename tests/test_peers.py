"""The peers of the linear suite hold what their rows say they hold."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import pytest
import torch

from halfbyte import reference
from halfbyte.formats import quantize
from halfbyte.lab import peer_humming, peer_onnxruntime
from halfbyte.lab.linear import bench_linear
from halfbyte.lab.peers import Peer, bnb_module, bnb_operator, installed, peers

CPU = torch.device("cpu")


def onnxruntime_peers() -> list[Peer]:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    return [peer for peer in peers(CPU)[0] if peer.name.startswith("onnxruntime ")]


@pytest.mark.parametrize("key", ["nf4-64", "nf4-32", "q4_0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_onnxruntime_multiplies_with_the_values_it_is_said_to_hold(key: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = quantize(torch.randn(96, 256, generator=generator), key)
    x = torch.randn(5, 256, generator=generator).to(dtype)
    exact, rounded = onnxruntime_peers()
    assert exact.requantised is not None
    dense = exact.requantised[1](weight, dtype)
    y = x.double() @ dense.t()
    assert exact.name.endswith(" MatMulNBits level 1")
    out = exact.build(weight, dtype)(x)
    assert out.dtype == dtype
    reference.assert_within_contract(out, y, exact.name)
    assert rounded.name.endswith(" MatMulNBits level 4")
    assert 1e-3 < reference.relative_error(rounded.build(weight, dtype)(x), y) < 2e-2
    moved = reference.relative_error(dense, weight.dequantize(torch.float64))
    assert moved == 0 if key == "q4_0" else 0.01 < moved < 0.2  # Q4_0 is such an int4 already


def test_int4_of_a_known_block() -> None:
    steps = torch.arange(16).repeat(2) - 8.0
    codes, scales = peer_onnxruntime.quantise(torch.stack([steps * 0.5, torch.zeros(32)]), 32, torch.float32)
    assert scales.tolist() == [[0.5], [0.0]]
    assert codes[0, 0].tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2
    assert codes[1, 0].tolist() == [0x88] * 16


def test_what_onnxruntime_cannot_hold_is_left_out() -> None:
    for key, k, held in (("nf4-64", 128, True), ("nf4-64", 96, False), ("nf4-128", 128, False), ("q4_1", 128, False)):
        assert peer_onnxruntime.supports(quantize(torch.randn(4, k), key)) == held


def test_a_row_of_onnxruntime_says_int4_and_its_error_is_its_own() -> None:
    onnxruntime_peers()
    rows = list(bench_linear([(64, 128)], [2], ["nf4-64"], "fp32", CPU, seconds_each=0.01, cold=False))
    ours, level1, level4 = (
        next(row for row in rows if row.kernel.startswith(start) and row.kernel.endswith(end))
        for start, end in (("halfbyte ", ""), ("onnxruntime ", "level 1"), ("onnxruntime ", "level 4"))
    )
    assert (ours.format, level1.format, level4.format) == ("nf4-64", "int4-64", "int4-64")
    assert level1.error < 5e-6 < 1e-3 < level4.error < 2e-2
    assert level1.bytes == 64 * 128 // 2 + 64 * 2 * 4


def test_bitsandbytes_is_found_in_a_folder_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a copied folder with its dist-info beside it, without an installer."""
    info = tmp_path / "bitsandbytes-99.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bitsandbytes\nVersion: 99.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert installed("bitsandbytes") == "bitsandbytes 99.1"
    assert "bitsandbytes 99.1 matmul_4bit" in [peer.name for peer in peers(torch.device("cuda"))[0]]


def test_bitsandbytes_on_halfbyte_is_no_peer(bitsandbytes_off: None) -> None:
    pytest.importorskip("bitsandbytes")
    from halfbyte.integrations import bitsandbytes as switch

    weight = quantize(torch.randn(64, 64), "nf4-64")
    with switch.enabled():
        with pytest.raises(ValueError, match=r"disable\(\) first"):
            peers(CPU)
        with pytest.raises(ValueError, match=r"disable\(\) first"):
            bnb_operator(weight)
    peers(CPU)


@pytest.mark.parametrize("key", ["nf4-64", "nf4-64-nested", "fp4-128"])
def test_bitsandbytes_operator_multiplies_by_the_weight(key: str) -> None:
    pytest.importorskip("bitsandbytes")
    weight = quantize(torch.randn(64, 128, generator=torch.Generator().manual_seed(0)), key)
    x = torch.randn(2, 128, generator=torch.Generator().manual_seed(1))
    y = reference.linear(x, weight)
    assert reference.relative_error(bnb_operator(weight)(x), y) < 1e-4
    assert reference.relative_error(bnb_module(weight, torch.float32)(x), y) < 2e-2  # its CPU path is bf16 inside


@pytest.fixture
def pretended_humming(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A humming that notes its calls, as the package needs a GPU even to be built: which copies, of what."""
    calls: list[str] = []

    class Schema:
        def dequant_tensors(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
            return tensors["weight"] * 2

    class BaseWeightSchema:
        @staticmethod
        def from_config(config: dict[str, object]) -> Schema:
            assert config == {"quant_method": "humming", "dtype": "int4", "group_size": 64}
            return Schema()

    class HummingWeightSchema:
        @staticmethod
        def quant_tensor(dense: torch.Tensor, schema: Schema, dtype: torch.dtype) -> dict[str, torch.Tensor]:
            assert dense.dtype == torch.float32
            calls.append(f"quantise {tuple(dense.shape)} {dtype}")
            return {"weight": dense}

    class HummingLayer(torch.nn.Module):
        def __init__(self, shape_n: int, shape_k: int, weight_config: Schema, torch_dtype: torch.dtype) -> None:
            super().__init__()
            assert isinstance(weight_config, Schema)
            calls.append(f"layer {shape_n} {shape_k} {torch_dtype}")

        def load_from_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
            calls.append("load")

        def transform(self) -> None:
            calls.append("transform")

    layer, schema = ModuleType("humming.layer"), ModuleType("humming.schema")
    layer.HummingLayer = HummingLayer  # type: ignore[attr-defined]
    schema.BaseWeightSchema, schema.HummingWeightSchema = BaseWeightSchema, HummingWeightSchema  # type: ignore[attr-defined]
    for name, module in (("humming", ModuleType("humming")), ("humming.layer", layer), ("humming.schema", schema)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(peer_humming, "_last", [])
    return calls


def test_humming_quantises_once_for_all_copies(pretended_humming: list[str]) -> None:
    weight = quantize(torch.randn(128, 256, generator=torch.Generator().manual_seed(0)), "nf4-64")
    for _ in range(2):
        peer_humming.build(weight, torch.bfloat16)
    assert torch.equal(peer_humming.values(weight, torch.bfloat16), weight.dequantize(torch.float32).double() * 2)
    copy = ["layer 128 256 torch.bfloat16", "load", "transform"]
    assert pretended_humming == ["quantise (128, 256) torch.bfloat16", *copy, *copy]
    peer_humming.build(weight, torch.float16)
    assert pretended_humming[7] == "quantise (128, 256) torch.float16"
    with pytest.raises(ValueError, match="fp16 and bf16"):
        peer_humming.build(weight, torch.float32)


def test_humming_s_bytes_are_codes_and_16_bit_scales() -> None:
    weight = quantize(torch.randn(128, 256), "nf4-64")
    assert peer_humming.weight_bytes(weight, torch.bfloat16) == 128 * 256 // 2 + 128 * 4 * 2
    assert peer_humming.format_key(weight) == "int4-64"
    assert not peer_humming.supports(weight)  # on a CPU


def test_humming_is_a_peer_of_nvidia_gpus_where_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if installed("humming-kernels") is None:
        assert "humming-kernels" in peers(torch.device("cuda"))[1]
    info = tmp_path / "humming_kernels-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: humming-kernels\nVersion: 9.9\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "humming 9.9" in [peer.name for peer in peers(torch.device("cuda"))[0]]
    assert not any("humming" in name for name in (*(peer.name for peer in peers(CPU)[0]), *peers(CPU)[1]))
