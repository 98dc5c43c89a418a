"""QuantLinear: its state is bitsandbytes', and no cast, copy or save changes a bit of the weight."""

from __future__ import annotations

import copy
import io
import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from halfbyte import reference
from halfbyte.checkpoints import CheckpointError
from halfbyte.formats import PackedWeight, quantize
from halfbyte.nn import QuantLinear

FORMATS = ("nf4", "nf4-64-nested", "fp4-128", "q4_0", "q4_1", "iq4_nl", "mxfp4")
K, N = 128, 48


def dense(bias: bool = True, k: int = K, n: int = N, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(k * n)
    return nn.Linear(k, n, bias=bias, dtype=dtype)


def make(format: str = "nf4", bias: bool = True, dtype: torch.dtype = torch.float32) -> QuantLinear:
    return QuantLinear.from_linear(dense(bias, dtype=dtype), format)


def x(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(3, K, generator=torch.Generator().manual_seed(0)).to(dtype)


def octets(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_same_weight(a: PackedWeight, b: PackedWeight) -> None:
    assert (a.format, a.shape) == (b.format, b.shape)
    for name in a.parts:
        assert a.parts[name].dtype == b.parts[name].dtype, name
        assert torch.equal(octets(a.parts[name]), octets(b.parts[name])), name


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bias", [True, False])
def test_forward_is_the_quantised_layer(format: str, bias: bool) -> None:
    linear = dense(bias)
    layer = QuantLinear.from_linear(linear, format)
    assert isinstance(layer, nn.Linear)
    assert_same_weight(layer.packed, quantize(linear.weight.detach(), format))
    wanted = reference.linear(x(), layer.packed, layer.bias)
    reference.assert_within_contract(layer(x()).detach(), wanted.detach())
    assert torch.equal(layer.dequantize(), layer.packed.dequantize())
    assert layer.bias is linear.bias


def test_dequantize_gives_the_dtype_before() -> None:
    assert make(dtype=torch.bfloat16).dequantize().dtype == torch.bfloat16
    assert make(dtype=torch.bfloat16).dequantize(torch.float32).dtype == torch.float32


CASTS = {
    "half": lambda layer: layer.half(),
    "bfloat16": lambda layer: layer.bfloat16(),
    "float16 and back": lambda layer: layer.to(torch.float16).to(torch.float32),
    "double": lambda layer: layer.double(),
    "device and dtype": lambda layer: layer.to("cpu", torch.bfloat16),
    "like a tensor": lambda layer: layer.to(torch.zeros(1, dtype=torch.float16)),
    "inside a model": lambda layer: nn.Sequential(layer).half()[0],
    "deepcopy": copy.deepcopy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "shared memory": lambda layer: layer.share_memory(),
}


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("format", ["nf4", "nf4-64-nested", "q4_0", "mxfp4"])
def test_the_weight_survives(cast: str, format: str) -> None:
    layer = make(format)
    before = copy.deepcopy(layer.packed.parts)
    after = CASTS[cast](layer)
    assert_same_weight(after.packed, PackedWeight(layer.format, (N, K), before))


def test_a_cast_layer_computes_in_the_new_dtype() -> None:
    layer = make("nf4-64-nested").half()
    assert layer.bias.dtype == torch.float16
    reference.assert_within_contract(
        layer(x(torch.float16)).detach(), reference.linear(x(torch.float16), layer.packed, layer.bias.detach())
    )


def test_bias_of_another_dtype_than_x() -> None:
    layer = make().bfloat16()
    for dtype in (torch.float32, torch.float16):
        out = layer(x(dtype)).detach()
        assert out.dtype == dtype
        reference.assert_within_contract(out, reference.linear(x(dtype), layer.packed, layer.bias.detach()))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("assign", [True, False])
def test_safetensors_round_trip(format: str, assign: bool, tmp_path: Path) -> None:
    layer = make(format)
    save_file(nn.Sequential(layer).state_dict(), tmp_path / "layer.safetensors")
    state = load_file(tmp_path / "layer.safetensors")
    fresh = nn.Sequential(QuantLinear(K, N, format=format, device="meta" if assign else None))
    assert fresh.load_state_dict(state, assign=assign) == ([], [])
    assert_same_weight(fresh[0].packed, layer.packed)
    assert torch.equal(fresh(x()), layer(x()))


def test_torch_save_round_trip() -> None:
    layer, file = make("nf4-64-nested"), io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    fresh = QuantLinear(K, N, format="nf4-64-nested")
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert_same_weight(fresh.packed, layer.packed)


def test_meta_layer() -> None:
    layer = QuantLinear(K, N, device="meta")
    assert list(layer.state_dict()) == ["weight", "bias"]
    assert layer(x().to("meta")).shape == (3, N)
    with pytest.raises(RuntimeError, match=r"meta device; load with load_state_dict\(\.\.\., assign=True\)"):
        layer.load_state_dict(make().state_dict())


def test_a_layer_with_many_parts_in_words() -> None:
    """GPTQ: int32 words, fp16 scales and zeros, which a cast must not touch either."""
    from halfbyte.formats import get_format

    format = get_format("gptq-64")
    generator = torch.Generator().manual_seed(0)
    parts = {
        "qweight": torch.randint(-(1 << 31), 1 << 31, (K // 8, N), generator=generator).to(torch.int32),
        "scales": torch.rand(K // 64, N, generator=generator).half() + 0.5,
        "qzeros": torch.randint(-(1 << 31), 1 << 31, (K // 64, N // 8), generator=generator).to(torch.int32),
    }
    layer = QuantLinear.from_packed(PackedWeight(format, (N, K), parts)).bfloat16()
    assert_same_weight(layer.packed, PackedWeight(format, (N, K), parts))
    fresh = QuantLinear(K, N, bias=False, format="gptq-64")
    fresh.load_state_dict(layer.state_dict())
    assert_same_weight(fresh.packed, layer.packed)


def spoil(key: str, value: Tensor | None) -> dict[str, Tensor]:
    state = make().state_dict()
    if value is None:
        del state[key]
    else:
        state[key] = value
    return state


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (spoil("weight.absmax", None), r"weight\.absmax: missing"),
        (spoil("weight", None), r"Missing key.*\"weight\""),
        (spoil("bias", None), r"Missing key.*\"bias\""),
        (spoil("extra", torch.zeros(1)), r"Unexpected key.*\"extra\""),
        (spoil("weight", torch.zeros(5, 1, dtype=torch.uint8)), r"3072 bytes of codes, the tensor has 5"),
        (spoil("weight.absmax", torch.full((96,), torch.nan)), r"weight\.absmax: .*NaN"),
        (spoil("weight.quant_map", torch.zeros(16)), r"not the standard nf4 codebook"),
        (make("nf4-64-nested").state_dict(), r"this layer is nf4-64 \[48, 128\], the state dict holds nf4-64-nested"),
        (make("q4_0").state_dict(), r"the state dict holds q4_0"),
        (dense().state_dict(), r"without scales, not a 4-bit weight; QuantLinear\.from_linear"),
        (
            make("q4_0").state_dict()
            | {"weight.halfbyte": torch.frombuffer(bytearray(b'{"shape": 3}'), dtype=torch.uint8)},
            r"must hold a format and a shape",
        ),
    ],
)
def test_refused_states(state: dict[str, Tensor], message: str) -> None:
    layer = make()
    before = copy.deepcopy(layer.packed)
    with pytest.raises(RuntimeError, match=message):
        layer.load_state_dict(state)
    assert_same_weight(layer.packed, before)


def test_scales_in_bf16_are_widened() -> None:
    """What is left of a checkpoint whose owner called `.to(bfloat16)` on it: the file's own numbers, exactly."""
    state = make().state_dict()
    state["weight.absmax"] = state["weight.absmax"].bfloat16()
    layer = QuantLinear(K, N)
    layer.load_state_dict(state)
    assert torch.equal(layer.absmax, state["weight.absmax"].float())


def test_a_cast_behind_its_back_is_named() -> None:
    layer = make()
    layer.absmax = layer.absmax.half()
    with pytest.raises(TypeError, match=r"'absmax'.*float32, got torch\.float16.*load it again"):
        layer(x())


def test_constructor_refuses() -> None:
    with pytest.raises(ValueError, match="K must be a multiple of 32"):
        QuantLinear(100, 8, format="q4_0")
    with pytest.raises(ValueError, match="unknown 4-bit format"):
        QuantLinear(64, 8, format="int3")
    with pytest.raises(TypeError, match="dtype must be"):
        QuantLinear(64, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"shape \[48, 128\] got a weight of shape \[128, 48\]"):
        QuantLinear(K, N).adopt(quantize(torch.randn(K, N), "nf4"))


def test_trains_what_is_below_and_above() -> None:
    model = nn.Sequential(nn.Linear(K, K), make(), nn.Linear(N, 4))
    model(x()).sum().backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert trained == {"0.weight", "0.bias", "1.bias", "2.weight", "2.bias"}


@pytest.mark.parametrize("format", ["nf4", "nf4-64-nested", "q4_1"])
def test_compiles_whole(format: str) -> None:
    model = nn.Sequential(make(format), nn.GELU(), QuantLinear.from_linear(dense(k=N, n=32), "nf4"))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for m in (3, 7):
        rows = x().repeat(m, 1)
        assert torch.equal(compiled(rows), model(rows))


class TestBitsandbytes:
    """Both ways with bitsandbytes' own Linear4bit."""

    @pytest.fixture(autouse=True)
    def _bnb(self) -> None:
        self.bnb = pytest.importorskip("bitsandbytes")

    def linear4bit(self, format: str, storage: torch.dtype = torch.uint8, k: int = K) -> nn.Module:
        linear = dense(k=k)
        family, blocksize, *nested = format.split("-")
        layer = self.bnb.nn.Linear4bit(k, N, compute_dtype=torch.float32, quant_type=family, quant_storage=storage)
        layer.weight = self.bnb.nn.Params4bit(
            linear.weight.data.clone(), quant_type=family, blocksize=int(blocksize), quant_storage=storage,
            compress_statistics=bool(nested),
        )  # fmt: skip
        layer.bias = linear.bias
        return layer.to("cpu").train()  # in eval it would round absmax to bf16

    @pytest.mark.parametrize("format", ["nf4-64", "nf4-64-nested", "fp4-128", "fp4-64-nested", "nf4-4096"])
    def test_same_state(self, format: str) -> None:
        """Key by key, so that either loads what the other saved."""
        theirs = self.linear4bit(format).state_dict()
        ours = QuantLinear.from_linear(dense(), format).state_dict()
        assert ours.keys() == theirs.keys()
        for key in ours:
            assert ours[key].dtype == theirs[key].dtype, key
            assert torch.equal(ours[key], theirs[key]), key

    @pytest.mark.parametrize("storage", [torch.uint8, torch.float16, torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("format", ["nf4-64", "fp4-64-nested"])
    def test_we_load_theirs(self, format: str, storage: torch.dtype) -> None:
        theirs = self.linear4bit(format, storage)
        ours = QuantLinear(K, N, format=format)
        ours.load_state_dict(theirs.state_dict())
        assert_same_weight(ours.packed, QuantLinear.from_linear(dense(), format).packed)
        assert torch.allclose(ours(x()), theirs(x()), atol=1e-5)

    def test_they_load_ours(self) -> None:
        ours = make("nf4-64-nested")
        state = ours.state_dict()
        theirs = self.bnb.nn.Linear4bit(K, N, compute_dtype=torch.float32)
        stats = {key.removeprefix("weight."): value for key, value in state.items() if key.startswith("weight.")}
        theirs.weight = self.bnb.nn.Params4bit.from_prequantized(
            state["weight"], quantized_stats=stats, device="cpu", module=theirs
        )
        theirs.bias.data = state["bias"]
        assert torch.allclose(ours(x()), theirs.train()(x()), atol=1e-5)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_the_dtype_before_is_kept(self, dtype: torch.dtype) -> None:
        layer = make(dtype=dtype)
        fresh = QuantLinear(K, N)
        fresh.load_state_dict(layer.state_dict())
        state = bytes(fresh.float().state_dict()["weight.quant_state.bitsandbytes__nf4"].tolist())
        assert json.loads(state)["dtype"] == str(dtype).removeprefix("torch.")

    def test_columns_that_are_no_multiple_of_the_block(self) -> None:
        theirs = self.linear4bit("nf4-64", k=3420)
        ours = QuantLinear(3420, N)
        ours.load_state_dict(theirs.state_dict())
        rows = torch.randn(2, 3420)
        reference.assert_within_contract(ours(rows).detach(), reference.linear(rows, ours.packed, ours.bias.detach()))


def test_a_damaged_state_is_a_checkpoint_error() -> None:
    from halfbyte.nn import read_weight

    with pytest.raises(CheckpointError, match=r"file\.safetensors: weight: "):
        read_weight(spoil("weight.quant_state.bitsandbytes__nf4", None), "weight", "file.safetensors")
