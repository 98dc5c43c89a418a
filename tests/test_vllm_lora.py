"""Adapters folded into vLLM's 4-bit layers, but for vLLM: a stub has its LoRA layers, kernels and operator."""

from __future__ import annotations

import sys
from collections.abc import Iterator
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
from halfbyte.integrations import vllm_layers, vllm_lora  # noqa: E402
from halfbyte.kernels.cpu import library  # noqa: E402

pytestmark = pytest.mark.skipif(library() is None, reason="no library of CPU kernels here")
BF16 = torch.bfloat16
SLOTS, RANK, K = 3, 8, 128
MERGED = (128, 64, 64)


class BaseLinearLayerWithLoRA(nn.Module):
    """vLLM's stacked tensors for each shard, and its way to fill them."""

    def __init__(self, base_layer: nn.Module, heights: tuple[int, ...]) -> None:
        super().__init__()
        self.base_layer, self.heights = base_layer, heights

    @classmethod
    def can_replace_layer(
        cls, source_layer: Any, lora_config: Any, packed_modules_list: Any, model_config: Any
    ) -> bool:
        return True

    def create_lora_weights(self, max_loras: int, lora_config: Any, model_config: Any = None) -> None:
        rank = lora_config.max_lora_rank
        self.lora_a_stacked = tuple(torch.zeros(max_loras, 1, rank, K, dtype=BF16) for _ in self.heights)
        self.lora_b_stacked = tuple(torch.zeros(max_loras, 1, n, rank, dtype=BF16) for n in self.heights)

    def set_mapping(self, punica_wrapper: Any) -> None:
        self.punica_wrapper = punica_wrapper

    def set_lora(self, index: int, a: list[Tensor], b: list[Tensor]) -> None:
        for i in range(len(self.heights)):
            self.lora_a_stacked[i][index], self.lora_b_stacked[i][index] = 0, 0
            self.lora_a_stacked[i][index, 0, : a[i].shape[0]] = a[i]
            self.lora_b_stacked[i][index, 0, :, : b[i].shape[1]] = b[i]

    def apply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        raise AssertionError("vLLM would add the adapters to the base layer's output")


class RowParallelLinearWithLoRA(BaseLinearLayerWithLoRA):
    pass


class RowParallelLinearWithShardedLoRA(BaseLinearLayerWithLoRA):
    pass


class LogitsProcessorWithLoRA(nn.Module):
    pass


CLASSES = (LogitsProcessorWithLoRA, RowParallelLinearWithLoRA, RowParallelLinearWithShardedLoRA)


class Punica:
    """vLLM's wrapper on a CPU: longer than the step, and anything beyond its tokens."""

    def __init__(self, index: list[int]) -> None:
        self._token_lora_indices = torch.tensor([*index, 1 << 40, -(1 << 40)])
        self.added = 0
        self.slices: tuple[int, ...] = ()

    def add_lora_linear(
        self, y: Tensor, x: Tensor, a: tuple[Tensor, ...], b: tuple[Tensor, ...], scale: float, slices: tuple[int, ...]
    ) -> None:
        assert scale == 1.0
        assert sum(slices) == y.shape[1]
        self.added += 1
        self.slices = slices
        for row, slot in enumerate(self._token_lora_indices[: len(y)].tolist()):
            if slot >= 0:
                parts = [
                    bs[slot, 0].double() @ (one[slot, 0].double() @ x[row].double())
                    for one, bs in zip(a, b, strict=True)
                ]
                y[row] += torch.cat(parts).to(y.dtype)


@pytest.fixture
def utils(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """vllm.lora.utils; halfbyte is on for the test."""
    vllm_layers.disable()
    switch.reset_counters()
    vllm_stub.stub(monkeypatch)
    contents: dict[str, dict[str, Any]] = {
        "vllm.lora": {},
        "vllm.lora.utils": {"_all_lora_classes": CLASSES},
        "vllm.lora.layers": {},
        "vllm.lora.layers.base_linear": {"BaseLinearLayerWithLoRA": BaseLinearLayerWithLoRA},
    }
    for name, content in contents.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, own = name.rpartition(".")
        monkeypatch.setattr(sys.modules[parent], own, module, raising=False)
    vllm_layers.enable()
    yield sys.modules["vllm.lora.utils"]
    vllm_lora.disable()
    vllm_layers.disable()


def config(**changes: Any) -> Any:
    lora = SimpleNamespace(lora_dtype=BF16, max_lora_rank=RANK, fully_sharded_loras=False, **changes)
    return SimpleNamespace(lora_config=lora, additional_config={})


class Base(nn.Module):
    """A 4-bit layer of vLLM's."""

    def __init__(self, shards: list[tuple[Tensor, Any]]) -> None:
        super().__init__()
        self.weight = vllm_stub.parameter(shards)
        self.quant_method = self
        self.tp_size = 1

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        out = torch.full((x.shape[0], self.rows()), torch.nan, dtype=x.dtype)
        torch.ops.vllm.apply_bnb_4bit(x, self.weight, self.weight.bnb_shard_offsets, out)
        return out if bias is None else out + bias

    def rows(self) -> int:
        return sum(state.shape[0] for state in self.weight.bnb_quant_state.values())


class RowParallelLinear(Base):
    pass


class GateLinear(Base):
    pass


def quantised(heights: tuple[int, ...]) -> list[tuple[Tensor, Any]]:
    generator = torch.Generator().manual_seed(0)
    return [
        bnb.quantize_4bit(torch.randn(n, K, generator=generator).to(BF16), quant_type="nf4", compress_statistics=False)
        for n in heights
    ]


def layer_with(utils: ModuleType, shards: list[tuple[Tensor, Any]], punica: Any) -> Any:
    """A folding layer on these shards, as vLLM makes it, without adapters."""
    vllm_lora.enable(config(), (1,))
    (cls,) = [each for each in utils._all_lora_classes if each.__name__ == "HalfbyteRowParallelLinearWithLoRA"]
    layer = cls(RowParallelLinear(shards), tuple(state.shape[0] for _, state in shards))
    layer.create_lora_weights(SLOTS, config().lora_config)
    layer.set_mapping(punica)
    return layer


def adapter(heights: tuple[int, ...], seed: int, rank: int = RANK) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    a = [torch.randn(rank, K, generator=generator).to(BF16) / 16 for _ in heights]
    return a, [torch.randn(n, rank, generator=generator).to(BF16) for n in heights]


def exact(shards: list[tuple[Tensor, Any]], adapters: dict[int, Any], index: list[int], x: Tensor) -> Tensor:
    """In float64, each row with its adapter."""
    y = torch.cat([reference.linear(x, packed_of(*shard)) for shard in shards], dim=1)
    for row, slot in enumerate(index):
        if slot in adapters:
            parts = [b.double() @ (a.double() @ x[row].double()) for a, b in zip(*adapters[slot], strict=True)]
            y[row] += torch.cat(parts)
    return y


def activations(m: int) -> Tensor:
    return torch.randn(m, K, generator=torch.Generator().manual_seed(9)).to(BF16)


@pytest.mark.parametrize("heights", [(96,), MERGED], ids=["one shard", "merged"])
def test_rows_with_adapters_and_without_in_one_pass(utils: ModuleType, heights: tuple[int, ...]) -> None:
    index = [0, -1, 2, 1, 0, 2]
    shards, punica, x = quantised(heights), Punica(index), activations(len(index))
    layer = layer_with(utils, shards, punica)
    adapters = {0: adapter(heights, 1), 2: adapter(heights, 2, rank=3)}  # slot 1 stays empty
    for slot, (a, b) in adapters.items():
        layer.set_lora(slot, a, b)
    out = layer.apply(x)
    y = exact(shards, adapters, index, x)
    reference.assert_within_contract(out, y)
    assert reference.relative_error(out, exact(shards, {0: adapters[2], 2: adapters[0]}, index, x)) > 0.1  # the control
    punica._token_lora_indices.fill_(-1)
    assert torch.equal(out[1:2], layer.apply(x[1:2]))  # a row without an adapter has the bits it has without LoRA
    served, passed = counts.totals()
    assert served["apply_bnb_4bit"]["cpu_linear with adapters"] == {"2-8": 1}
    assert not passed
    assert not punica.added


def test_adapters_come_and_go_in_their_slots(utils: ModuleType) -> None:
    shards, x = quantised(MERGED), activations(2)
    layer = layer_with(utils, shards, Punica([1, 1]))
    memory = layer.lora_a_stacked[0].data_ptr(), layer.lora_b_stacked[0].data_ptr()
    for seed in (1, 2):
        a, b = adapter(MERGED, seed)
        layer.set_lora(1, a, b)
        reference.assert_within_contract(layer.apply(x), exact(shards, {1: (a, b)}, [1, 1], x))
    assert memory == (layer.a.data_ptr(), layer.b.data_ptr())  # vLLM fills what the operator reads


def test_a_step_without_adapters_is_the_base_layer(utils: ModuleType) -> None:
    shards, x = quantised(MERGED), activations(4)
    layer = layer_with(utils, shards, Punica([-1] * 4))
    layer.set_lora(0, *adapter(MERGED, 1))
    reference.assert_within_contract(layer.apply(x), exact(shards, {}, [-1] * 4, x))
    assert counts.totals()[0]["apply_bnb_4bit"] == {"cpu_linear": {"2-8": 1}}


class Meta:
    """vLLM's tensors on a GPU: where no token has an adapter the mapping stays that of an earlier step."""

    def __init__(self) -> None:
        self.no_lora_flag_cpu = torch.tensor([False])
        self.token_lora_mapping = torch.full((8,), 77, dtype=torch.int32)

    def prepare_tensors(self, mapping: Tensor) -> None:
        self.no_lora_flag_cpu[0] = bool((mapping == -1).all())
        if not self.no_lora_flag_cpu[0]:
            self.token_lora_mapping[: len(mapping)] = mapping


def test_on_a_gpu_vllm_says_on_the_host_whether_there_are_adapters(utils: ModuleType) -> None:
    """And its mapping is that of this step, also in a graph that was captured with adapters and looks at no flag."""
    shards, x, meta = quantised(MERGED), activations(2), Meta()
    punica = SimpleNamespace(token_mapping_meta=meta)
    layer = layer_with(utils, shards, punica)
    layer_with(utils, shards, punica)  # every layer has the same wrapper
    adapters = {0: adapter(MERGED, 1)}
    layer.set_lora(0, *adapters[0])
    meta.prepare_tensors(torch.tensor([0, -1]))
    reference.assert_within_contract(layer.apply(x), exact(shards, adapters, [0, -1], x))
    meta.prepare_tensors(torch.tensor([-1, -1]))
    reference.assert_within_contract(layer.apply(x), exact(shards, {}, [], x))
    meta.no_lora_flag_cpu[0] = False  # as when the graph was captured
    reference.assert_within_contract(layer.apply(x), exact(shards, {}, [], x))
    assert counts.totals()[0]["apply_bnb_4bit"] == {"cpu_linear": {"2-8": 1}, "cpu_linear with adapters": {"2-8": 2}}


@pytest.mark.parametrize("case", ["many rows", "many rows, ours", "shards that end within a block"])
def test_what_is_not_folded_vllm_adds_and_it_is_counted(
    utils: ModuleType, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    many = case.startswith("many rows")
    heights, m = (MERGED, 65) if many else ((96, 32), 3)
    index = [i % 2 - 1 for i in range(m)]
    shards, punica, x = quantised(heights), Punica(index), activations(m)
    if case == "many rows, ours":
        monkeypatch.setattr(switch, "decoding_is_faster", lambda *arguments: False)
    if not many:  # as where formats differ: nothing to put together
        monkeypatch.setattr(vllm_layers, "_merged", lambda *arguments: None)
    layer = layer_with(utils, shards, punica)
    adapters = {0: adapter(heights, 1)}
    layer.set_lora(0, *adapters[0])
    out = layer.apply(x)
    assert reference.relative_error(out, exact(shards, adapters, index, x)) < 0.01
    assert punica.added == 1
    assert punica.slices == heights  # no zeros of other shards are gathered for each token
    served, passed = counts.totals()
    assert [each for each in passed["adapters"] if ("M 65+" if many else "a launch each") in each]
    assert ("apply_bnb_4bit" in passed) == (case == "many rows")  # then bitsandbytes had the base layer
    assert ("65+" in served.get("apply_bnb_4bit", {}).get("cpu_linear", {})) == (case == "many rows, ours")


def test_layers_are_replaced_in_vllms_order_and_given_back(utils: ModuleType) -> None:
    wanted = config()
    vllm_lora.enable(wanted, (1,))
    names = [each.__name__ for each in utils._all_lora_classes]
    assert names == [
        "LogitsProcessorWithLoRA",
        "HalfbyteRowParallelLinearWithLoRA",
        "RowParallelLinearWithLoRA",
        "RowParallelLinearWithShardedLoRA",
    ]
    assert wanted.additional_config  # compiled code with our layers is other code
    vllm_lora.enable(wanted, (1,))
    assert len(utils._all_lora_classes) == 4
    vllm_lora.disable()
    assert utils._all_lora_classes is CLASSES


@pytest.mark.parametrize(
    ("change", "reason"),
    [("none", None), ("subclass", "may do more"), ("dtype", "float16"), ("8 bits", None), ("dense", None)],
)
def test_which_layers_are_folded(utils: ModuleType, change: str, reason: str | None) -> None:
    wanted = config()
    vllm_lora.enable(wanted, (1,))
    cls = utils._all_lora_classes[1]
    base: Any = (GateLinear if change == "subclass" else RowParallelLinear)(quantised((64,)))
    if change == "dtype":
        wanted.lora_config.lora_dtype = torch.float16
    elif change == "8 bits":
        base.weight.bnb_quant_state = {0: torch.ones(1)}
    elif change == "dense":
        base = nn.Linear(4, 4)
    fits = cls.can_replace_layer(
        source_layer=base, lora_config=wanted.lora_config, packed_modules_list=[], model_config=None
    )
    assert fits == (change == "none")
    reasons = counts.totals()[1].get("adapters", {})
    assert bool(reasons) == (reason is not None)
    assert all(reason is not None and reason in each for each in reasons)


@pytest.mark.parametrize("case", ["no LoRA", "sharded", "no dictionary"])
def test_where_nothing_can_be_folded_vllm_stays_as_it_is(utils: ModuleType, case: str) -> None:
    wanted = config()
    if case == "no LoRA":
        wanted.lora_config = None
    elif case == "sharded":
        wanted.lora_config.fully_sharded_loras = True
    else:
        wanted.additional_config = SimpleNamespace(compute_hash=lambda: "x")
    vllm_lora.enable(wanted, (1,))
    assert utils._all_lora_classes is CLASSES
    assert bool(counts.totals()[1]) == (case != "no LoRA")
