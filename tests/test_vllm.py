"""The integration with vLLM, but for vLLM: a stub has its loader and its operator. tests/vllm runs the real server."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

bnb = pytest.importorskip("bitsandbytes.functional")

import vllm_stub  # noqa: E402
from bitsandbytes_layers import packed_of  # noqa: E402
from halfbyte import reference  # noqa: E402
from halfbyte.counters import counts  # noqa: E402
from halfbyte.integrations import bitsandbytes as switch  # noqa: E402
from halfbyte.integrations import vllm, vllm_layers, vllm_loader, vllm_report  # noqa: E402
from halfbyte.kernels.cpu import library  # noqa: E402

needs_kernels = pytest.mark.skipif(library() is None, reason="no library of CPU kernels here")
BF16 = torch.bfloat16


@pytest.fixture
def loaders(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A stub of vLLM on one rank; halfbyte is off before and after."""
    monkeypatch.delenv(vllm.VARIABLE, raising=False)
    vllm_layers.disable()
    switch.reset_counters()
    yield vllm_stub.stub(monkeypatch)
    vllm_layers.disable()


def quantised(n: int, k: int, seed: int = 0, blocksize: int = 64, nested: bool = False) -> tuple[Tensor, Any]:
    """Codes and QuantState, plain as vLLM makes them of nested ones."""
    dense = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)).to(BF16)
    return bnb.quantize_4bit(dense, quant_type="nf4", blocksize=blocksize, compress_statistics=nested)


def call(weight: Tensor, x: Tensor) -> Tensor:
    """As vLLM's linear method calls it; NaN first, so that what is not written shows."""
    n = sum(state.shape[0] for state in weight.bnb_quant_state.values())
    out = torch.full((x.shape[0], n), torch.nan, dtype=x.dtype)
    torch.ops.vllm.apply_bnb_4bit(x, weight, weight.bnb_shard_offsets, out)
    return out


def exact(shards: list[tuple[Tensor, Any]], x: Tensor) -> Tensor:
    return torch.cat([reference.linear(x, packed_of(*shard)) for shard in shards], dim=1)


def error(out: Tensor, y: Tensor) -> float:
    """Of the output, in multiples of the rounding limit."""
    limit = (y.to(out.dtype).double() - y).norm()
    return float((out.double() - y).norm() / limit)


def activations(m: int, k: int) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(9)).to(BF16)


@needs_kernels
@pytest.mark.parametrize("m", [1, 3, 64])
@pytest.mark.parametrize("heights", [(96,), (128, 64, 64), (1, 1)])
def test_a_merged_layer_is_one_launch_into_out(loaders: Any, heights: tuple[int, ...], m: int) -> None:
    shards = [quantised(n, 128, seed=i) for i, n in enumerate(heights)]
    x, weight = activations(m, 128), vllm_stub.parameter(shards)
    y = exact(shards, x)
    vllm_layers.enable()
    assert error(call(weight, x), y) <= 1.1
    served, passed = counts.totals()
    assert list(served) == ["apply_bnb_4bit"]
    assert not passed
    assert sum(count for rows in served["apply_bnb_4bit"].values() for count in rows.values()) == 1
    layer = weight.halfbyte_layer
    assert len(layer.shards) == 1
    assert layer.pieces == len(heights)
    assert layer.shards[0].weight.packed.codes.data_ptr() == weight.data_ptr()  # the bytes stay
    if len(heights) > 1:  # the scales are there once, and bitsandbytes' descriptions look at them
        scales = layer.shards[0].weight.packed.parts["absmax"].untyped_storage().data_ptr()
        assert all(state.absmax.untyped_storage().data_ptr() == scales for state in weight.bnb_quant_state.values())
    swapped = [((codes >> 4) | (codes << 4), state) for codes, state in shards]
    assert error(call(weight, x), exact(swapped, x)) > 10  # the control


@needs_kernels
@pytest.mark.parametrize(
    "shards",
    [
        pytest.param([(3, 96, 64), (5, 96, 64)], id="a shard ends within a block"),
        pytest.param([(64, 128, 64), (32, 128, 128)], id="blocksizes differ"),
    ],
)
@pytest.mark.parametrize("m", [1, 5])
def test_shards_that_are_no_single_weight_take_turns(loaders: Any, shards: list[tuple[int, ...]], m: int) -> None:
    made = [quantised(n, k, seed=i, blocksize=blocksize) for i, (n, k, blocksize) in enumerate(shards)]
    x, weight = activations(m, shards[0][1]), vllm_stub.parameter(made)
    y = exact(made, x)
    vllm_layers.enable()
    assert error(call(weight, x), y) <= 1.1
    assert sum(counts.totals()[0]["apply_bnb_4bit"]["cpu_linear"].values()) == 2
    assert len(weight.halfbyte_layer.shards) == 2


@needs_kernels
def test_calls_that_are_not_served_go_to_vllm_and_are_counted(loaders: Any) -> None:
    """On a CPU more than 64 rows are bitsandbytes' business: the answer is then vLLM's, bit for bit."""
    shards = [quantised(64, 128), quantised(64, 128, seed=1)]
    x, weight = activations(65, 128), vllm_stub.parameter(shards)
    plain = call(weight, x)
    vllm_layers.enable()
    assert torch.equal(call(weight, x), plain)
    served, passed = counts.totals()
    assert "apply_bnb_4bit" not in served
    assert [reason for reason in passed["apply_bnb_4bit"] if "M 65+" in reason]


@needs_kernels
@pytest.mark.parametrize("heights", [(96,), (128, 64, 64)])
def test_decoded_shards_are_multiplied_into_place(loaders: Any, heights: tuple[int, ...]) -> None:
    """What a GPU does with many rows: the values that bitsandbytes decodes, and no copy of a result."""
    shards = [quantised(n, 128, seed=i) for i, n in enumerate(heights)]
    x, weight = activations(300, 128), vllm_stub.parameter(shards)
    vllm_layers.enable()
    layer = vllm_layers.layer_of(weight, weight.bnb_shard_offsets)
    dense = [bnb.dequantize_4bit(codes, state).double() for codes, state in shards]  # in bf16
    out = torch.full((300, sum(heights)), torch.nan, dtype=BF16)
    layer.multiply_decoded(weight, x, out)
    assert error(out, torch.cat([x.double() @ each.t() for each in dense], 1)) <= 1.1
    assert error(out, torch.cat([x.double() @ each.t() for each in dense[::-1]], 1)) > 10 or len(heights) == 1
    with pytest.raises(ValueError, match="for a layer"):
        layer.multiply_decoded(weight, x, out[1:])
    assert not vllm_layers._decodes(x, weight, weight.bnb_shard_offsets, out)  # on a CPU vLLM's own way stays
    shards[0][1].nested = True
    with pytest.raises(switch.Unserved, match="nested"):
        layer.multiply_decoded(weight, x, out)


@needs_kernels
@pytest.mark.parametrize("wrong", ["rows", "dtype", "columns"])
def test_arguments_that_do_not_fit_are_left_to_vllm(loaders: Any, wrong: str) -> None:
    weight = vllm_stub.parameter([quantised(64, 128)])
    vllm_layers.enable()
    x = activations(2, 64 if wrong == "columns" else 128)
    out = torch.empty(3 if wrong == "rows" else 2, 64, dtype=torch.float32 if wrong == "dtype" else BF16)
    layer = vllm_layers.layer_of(weight, weight.bnb_shard_offsets)
    with pytest.raises(ValueError, match="columns" if wrong == "columns" else "x .* and out"):
        layer.multiply(x, out)


@needs_kernels
def test_no_rows_and_rows_with_gaps(loaders: Any) -> None:
    shards = [quantised(64, 128), quantised(32, 128, seed=1)]
    weight = vllm_stub.parameter(shards)
    vllm_layers.enable()
    assert call(weight, activations(0, 128)).shape == (0, 96)
    x = activations(128, 4).t()  # K is not the fast axis
    assert error(call(weight, x), exact(shards, x)) <= 1.1


@needs_kernels
def test_a_parameter_that_gets_another_weight_is_noticed(loaders: Any) -> None:
    first, second = [quantised(64, 128)], [quantised(64, 128, seed=5)]
    x, weight = activations(2, 128), vllm_stub.parameter(first)
    vllm_layers.enable()
    call(weight, x)
    weight.data.copy_(second[0][0])
    weight.bnb_quant_state = {0: second[0][1]}
    assert error(call(weight, x), exact(second, x)) <= 1.1


@needs_kernels
def test_off_is_as_before_and_both_ways_are_idempotent(loaders: Any) -> None:
    weight, x = vllm_stub.parameter([quantised(64, 128), quantised(64, 128, seed=1)]), activations(3, 128)
    before = call(weight, x)
    vllm_layers.enable()
    vllm_layers.enable()
    assert not torch.equal(call(weight, x), before)  # bitsandbytes rounds more: the control that it was replaced
    vllm_layers.disable()
    vllm_layers.disable()
    assert torch.equal(call(weight, x), before)


@needs_kernels
def test_compiled_before_it_was_on(loaders: Any) -> None:
    """A graph calls the operator, so that what was compiled, or taken from a cache, without halfbyte meets it, too."""
    shards = [quantised(64, 128), quantised(64, 128, seed=1)]
    weight, x = vllm_stub.parameter(shards), activations(3, 128)
    offsets = weight.bnb_shard_offsets

    @torch.compile(backend="aot_eager", fullgraph=True)
    def layer(x: Tensor) -> Tensor:
        out = torch.empty(3, 128, dtype=BF16)
        torch.ops.vllm.apply_bnb_4bit(x, weight, offsets, out)
        return out * 1

    layer(x)
    assert not counts.totals()[0]
    vllm_layers.enable()
    assert error(layer(x), exact(shards, x)) <= 1.1
    assert counts.totals()[0]["apply_bnb_4bit"]["cpu_linear"] == {"2-8": 1}


@needs_kernels
def test_prepare_calls_the_kernels_and_counts_nothing(loaders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = vllm_stub.parameter([quantised(3, 96), quantised(5, 96, seed=1)])
    layer = vllm_layers.layer_of(weight, weight.bnb_shard_offsets)
    runs: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        vllm_layers.Layer, "_run", lambda self, kernel, rows, shard, out: runs.append((len(rows), shard.start))
    )
    layer.prepare([1, 4, 100], BF16)  # 100: bitsandbytes' business
    assert sorted(runs) == [(1, 0), (1, 3), (4, 0), (4, 3)]
    assert not counts.totals()[0]


@needs_kernels
def test_prepare_compiles_side_by_side_and_tells_of_errors(loaders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = vllm_stub.parameter([quantised(8, 96)])
    layer = vllm_layers.layer_of(weight, weight.bnb_shard_offsets)
    both = threading.Barrier(2, timeout=20)  # passed by two calls at a time only
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(vllm_layers.Layer, "_run", lambda self, kernel, rows, shard, out: both.wait())
    layer.prepare([1, 4], BF16)

    def fail(self: Any, kernel: Any, rows: Tensor, shard: Any, out: Tensor) -> None:
        if len(rows) == 4:
            raise RuntimeError("no room")

    monkeypatch.setattr(vllm_layers.Layer, "_run", fail)
    with pytest.raises(RuntimeError, match="no room"):
        layer.prepare([1, 4], BF16)


def test_the_entry_point_is_where_vllm_looks() -> None:
    found = [point for point in entry_points(group="vllm.general_plugins") if point.name == "halfbyte"]
    if not found:
        pytest.skip("halfbyte was installed before it had an entry point; install it again")
    assert found[0].load() is vllm.register


def test_register_puts_the_loader_in_place_once(loaders: Any) -> None:
    base = loaders["bitsandbytes"]
    vllm.register()
    first = loaders["bitsandbytes"]
    assert issubclass(first, vllm_loader.Loading)
    assert issubclass(first, base)
    vllm.register()
    assert loaders["bitsandbytes"] is first


def test_register_does_nothing_where_it_is_off(loaders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    base = loaders["bitsandbytes"]
    monkeypatch.setenv(vllm.VARIABLE, "1")
    vllm.register()
    assert loaders["bitsandbytes"] is base


def test_register_without_bitsandbytes_in_vllm_says_so(loaders: Any, caplog: pytest.LogCaptureFixture) -> None:
    loaders.clear()
    with caplog.at_level(logging.INFO, "vllm.halfbyte"):
        vllm.register()
    assert "vllm-bnb-plugin brings it" in caplog.text
    assert not loaders


def test_register_comes_before_or_after_the_plugin(loaders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """From vLLM 0.28 on: entry points are called in any order, and the plugin's must not take the place again."""
    base = loaders.pop("bitsandbytes")
    plugin: Any = ModuleType("vllm_bnb_plugin")
    plugin.register = lambda: loaders.setdefault("bitsandbytes", base)
    monkeypatch.setitem(sys.modules, "vllm_bnb_plugin", plugin)
    vllm.register()
    plugin.register()
    assert issubclass(loaders["bitsandbytes"], vllm_loader.Loading)


def test_importing_it_needs_no_vllm() -> None:
    code = "import sys, halfbyte.integrations.vllm_loader; assert 'vllm' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def model_of(**modules: nn.Module) -> nn.Module:
    model = nn.Module()
    for name, module in modules.items():
        model.add_module(name, module)
    return model


def config_of(model: nn.Module, **quantization: Any) -> SimpleNamespace:
    return SimpleNamespace(model=model, hf_config=SimpleNamespace(quantization_config=quantization))


def loader_of(loaders: dict[str, Any], tensors: dict[str, Any]) -> Any:
    vllm.register()
    loader = loaders["bitsandbytes"](vllm_stub.LoadConfig("bitsandbytes"))
    loader.tensors = tensors
    return loader


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_hold_the_values_of_one(monkeypatch: pytest.MonkeyPatch, ranks: int, nested: bool) -> None:
    """Every kind of layer: rows, columns, heads that several ranks share, and what is not cut. All ranks together are
    the whole weight, bit for bit."""
    heights = {"q_proj": 128, "k_proj": 64, "v_proj": 64, "up_proj": 256, "gate_proj": 256, "o_proj": 128, "fc": 96}
    tensors: dict[str, Any] = {}
    whole = {}
    for seed, (name, n) in enumerate(heights.items()):
        codes, state = quantised(n, 256, seed=seed, nested=nested)
        tensors[f"{name}.weight"] = (codes, state)
        tensors[f"{name}.bias"] = torch.ones(n)
        whole[name] = packed_of(codes, state).dequantize()
    shares: dict[str, list[Tensor]] = {name: [] for name in heights}
    for rank in range(ranks):
        loaders = vllm_stub.stub(monkeypatch, ranks)
        model = model_of(
            qkv_proj=vllm_stub.QKVParallelLinear(rank, ranks, heads=2),
            gate_up_proj=vllm_stub.MergedColumnParallelLinear(rank, ranks),
            o_proj=vllm_stub.RowParallelLinear(rank, ranks),
            fc=vllm_stub.ReplicatedLinear(rank, ranks),
        )
        loader = loader_of(loaders, {name: _copy(tensor) for name, tensor in tensors.items()})
        loader._verify_model_compatibility(model, config_of(model, load_in_4bit=True))
        states: dict[str, Any] = {}
        for name, tensor in loader._quantized_4bit_generator([], True, states):
            module, _, kind = name.rpartition(".")
            if kind == "bias":
                assert torch.equal(tensor, tensors[name])
                continue
            shares[module].append(packed_of(tensor, states[name]).dequantize())
    heads = max(1, ranks // 2)  # ranks that have the same key-value head
    for name, parts in shares.items():
        if name == "fc":
            assert all(torch.equal(part, whole[name]) for part in parts)
            continue
        distinct = parts
        if name in ("k_proj", "v_proj"):
            distinct = parts[::heads]
            assert all(torch.equal(part, distinct[i // heads]) for i, part in enumerate(parts))
        assert torch.equal(torch.cat(distinct, dim=1 if name == "o_proj" else 0), whole[name])


def _copy(tensor: Any) -> Any:
    """Tensors as another rank reads them: QuantStates are changed when a weight is cut."""
    if isinstance(tensor, Tensor):
        return tensor.clone()
    codes, state = tensor
    parts = state.as_dict(packed=True)
    return codes.clone(), bnb.QuantState.from_dict({key: value.clone() for key, value in parts.items()}, device="cpu")


def test_nested_scales_keep_their_offset_in_fp32(loaders: Any) -> None:
    """vLLM loads under the model's dtype as torch's default, and bitsandbytes makes the offset a tensor of that."""
    codes, state = quantised(64, 512, nested=True)

    def read() -> tuple[Tensor, Any]:
        return codes, bnb.QuantState.from_dict(state.as_dict(packed=True), device="cpu")

    loader = loader_of(loaders, {"w": read})
    model = nn.Module()
    loader._verify_model_compatibility(model, config_of(model, load_in_4bit=True))
    states: dict[str, Any] = {}
    with vllm_loader.default_dtype(BF16):
        assert read()[1].offset.dtype == BF16  # what it is about
        ((_, tensor),) = loader._quantized_4bit_generator([], True, states)
        assert torch.get_default_dtype() == BF16
    assert torch.equal(packed_of(tensor, states["w"]).dequantize(), packed_of(codes, state).dequantize())


def test_a_split_that_is_illegal_names_layer_k_ranks_and_blocksize(monkeypatch: pytest.MonkeyPatch) -> None:
    loaders = vllm_stub.stub(monkeypatch, 2)
    model = model_of(down_proj=vllm_stub.RowParallelLinear(1, 2))
    loader = loader_of(loaders, {"down_proj.weight": quantised(32, 192)})
    loader._verify_model_compatibility(model, config_of(model, load_in_4bit=True))
    with pytest.raises(ValueError, match=r"down_proj.*\[32, 192\].*along K over 2 ranks.*96 .*blocksize 64.*: 1$"):
        list(loader._quantized_4bit_generator([], True, {}))


def test_a_layer_that_is_fused_on_disk_is_refused_on_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    loaders = vllm_stub.stub(monkeypatch, 2)
    model = model_of(qkv_proj=vllm_stub.QKVParallelLinear(0, 2))
    loader = loader_of(loaders, {"qkv_proj.weight": quantised(256, 64)})
    loader._verify_model_compatibility(model, config_of(model, load_in_4bit=True))
    with pytest.raises(ValueError, match=r"qkv_proj.*2 tensor-parallel ranks.*pipeline-parallel-size"):
        list(loader._quantized_4bit_generator([], True, {}))


def test_what_vllm_refuses_for_other_reasons_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    loaders = vllm_stub.stub(monkeypatch, 2)
    model = model_of(down_proj=vllm_stub.RowParallelLinear(1, 2))
    with pytest.raises(ValueError, match="Prequant BitsAndBytes"):  # 8 bits, on several ranks
        loader_of(loaders, {})._verify_model_compatibility(model, config_of(model, load_in_8bit=True))


@needs_kernels
def test_loading_switches_on_and_logs_which_kernels_serve(
    loaders: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    monkeypatch.setattr(vllm_report, "start", lambda: started.append(1))
    qkv = nn.Module()
    qkv.weight = vllm_stub.parameter([quantised(128, 64), quantised(64, 64, seed=1), quantised(64, 64, seed=2)])
    other = nn.Module()
    other.weight = vllm_stub.parameter([quantised(128, 64), quantised(64, 64, seed=1), quantised(64, 64, seed=2)])
    model = model_of(qkv_proj=qkv, other=model_of(qkv_proj=other))
    config = SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_capture_sizes=[1, 2]), lora_config=None)
    loader = loader_of(loaders, {})
    with caplog.at_level(logging.INFO, "vllm.halfbyte"):
        loader.load_model(config, config_of(model))
    assert loader._sizes == (1, 2)
    assert started
    assert "halfbyte serves 2 × qkv_proj [256, 64] nf4-64, 3 shards in one launch: cpu_linear for M = 1" in caplog.text
    call(qkv.weight, activations(1, 64))
    assert counts.totals()[0]["apply_bnb_4bit"]["cpu_linear"] == {"1": 1}


def test_experts_are_refused_by_name(loaders: Any) -> None:
    experts = nn.Module()
    experts.quant_method = vllm_stub.BitsAndBytesMoEMethod()
    model = model_of(mlp=model_of(experts=experts))
    with pytest.raises(ValueError, match=r"no kernel for mixture-of-experts.*mlp\.experts.*HALFBYTE_DISABLE=1"):
        loader_of(loaders, {}).load_weights(model, config_of(model))


def test_a_model_without_4_bit_layers_is_left_alone(loaders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_report, "start", lambda: pytest.fail("nothing to report"))
    model = model_of(fc=nn.Linear(4, 4))
    loader_of(loaders, {}).load_weights(model, config_of(model))


def test_where_it_cannot_be_switched_on_vllm_serves(
    loaders: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def old() -> None:
        raise RuntimeError("bitsandbytes 0.48 has no operator gemm_4bit")

    monkeypatch.setattr(vllm_layers, "enable", old)
    loader = loader_of(loaders, {"norm": torch.ones(2)})
    with caplog.at_level(logging.WARNING, "vllm.halfbyte"):
        loader.load_weights(nn.Module(), config_of(nn.Module()))
    assert "does not serve this model: bitsandbytes 0.48" in caplog.text
    assert "norm" in loader.loaded


REPORTING = """
import logging, multiprocessing, os, sys
from halfbyte.counters import counts
from halfbyte.integrations import vllm_report
def work():
    logging.basicConfig(level=logging.INFO, stream=sys.stdout)
    vllm_report.METRICS_INTERVAL = vllm_report.INTERVAL = 0.01
    vllm_report.start(); vllm_report.start()
    counts.serve("apply_bnb_4bit", "a_kernel", "2-8")
if __name__ == "__main__":
    process = multiprocessing.get_context(sys.argv[1]).Process(target=work)
    process.start(); process.join()
    sys.exit(process.exitcode)
"""


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_worker_reports_when_it_ends(tmp_path: Path, method: str) -> None:
    """vLLM's workers are multiprocessing's children, which atexit does not reach."""
    script = tmp_path / "worker.py"
    script.write_text(REPORTING)
    done = subprocess.run([sys.executable, script, method], capture_output=True, text=True, check=True)
    assert done.stdout.count("M 2-8: 1") == 1, done.stdout + done.stderr


def test_metrics_follow_the_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    """prometheus_client comes with vLLM; here a stand-in records what it is told."""
    told: dict[tuple[str, ...], int] = {}

    class Counter:
        def __init__(self, name: str, text: str, labels: list[str]) -> None:
            self.name = name

        def labels(self, *values: str) -> SimpleNamespace:
            key = (self.name, *values)
            return SimpleNamespace(inc=lambda count: told.__setitem__(key, told.get(key, 0) + count))

    module: Any = ModuleType("prometheus_client")
    module.Counter = Counter
    monkeypatch.setitem(sys.modules, "prometheus_client", module)
    monkeypatch.setenv(vllm_report.DIRECTORY, "somewhere")
    switch.reset_counters()
    report = vllm_report.Report()
    counts.serve("apply_bnb_4bit", "a_kernel", "1")
    counts.serve("apply_bnb_4bit", "a_kernel", "1")
    counts.passed("apply_bnb_4bit", "one reason")
    report.publish()
    report.publish()
    counts.passed("apply_bnb_4bit", "another")
    report.publish()
    assert told == {
        ("halfbyte_served", "apply_bnb_4bit", "a_kernel", "1"): 2,
        ("halfbyte_passed_on", "apply_bnb_4bit"): 2,
    }
    switch.reset_counters()
