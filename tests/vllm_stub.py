"""As much of vLLM as halfbyte's integration asks for, for tests without vLLM; tests/vllm has the real one.

`stub(monkeypatch)` puts it into sys.modules for a test.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


class LinearBase(nn.Module):
    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        super().__init__()
        self.tp_rank, self.tp_size = rank, ranks


class ReplicatedLinear(LinearBase):
    """tp_size as it is in vLLM: that of the group, though nothing is cut."""


class RowParallelLinear(LinearBase):
    pass


class ColumnParallelLinear(LinearBase):
    pass


class MergedColumnParallelLinear(ColumnParallelLinear):
    output_sizes = (128, 128)


class QKVParallelLinear(ColumnParallelLinear):
    output_sizes = (128, 64, 64)

    def __init__(self, rank: int = 0, ranks: int = 1, heads: int = 2) -> None:
        super().__init__(rank, ranks)
        self.num_kv_head_replicas = max(1, ranks // heads)


class BitsAndBytesMoEMethod:
    """Named as vLLM's and the plugin's."""


@dataclass
class LoadConfig:
    load_format: str


class BitsAndBytesModelLoader:
    """Reads nothing: `tensors` are {name: (codes, QuantState)} or {name: tensor}, in the order of a file, or functions
    that return these when they are read."""

    def __init__(self, load_config: LoadConfig) -> None:
        self.pre_quant = False
        self.load_8bit = False
        self.tensors: dict[str, Any] = {}
        self.loaded: dict[str, Tensor] = {}
        self.states: dict[str, Any] = {}

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        self.load_weights(model_config.model, model_config)
        return model_config.model

    def _verify_model_compatibility(self, model: nn.Module, model_config: Any) -> None:
        self.pre_quant = bool(model_config.hf_config.quantization_config)
        if self.pre_quant and sys.modules["vllm.distributed"].get_tensor_model_parallel_world_size() > 1:
            raise ValueError("Prequant BitsAndBytes models with tensor parallelism is not supported.")

    def _quantized_4bit_generator(
        self, files: Any, use_safetensors: bool, states: dict[str, Any]
    ) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.tensors.items():
            if callable(tensor):
                tensor = tensor()
            if isinstance(tensor, tuple):
                tensor, states[name] = tensor
            yield name, tensor

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        self._verify_model_compatibility(model, model_config)
        self.loaded = dict(self._quantized_4bit_generator([], True, self.states))


def parameter(shards: list[tuple[Tensor, Any]]) -> nn.Parameter:
    """A merged layer's parameter as vLLM leaves it: codes in a row, a QuantState for each shard, offsets in bytes."""
    weight = nn.Parameter(torch.cat([codes.view(-1, 1) for codes, _ in shards]), requires_grad=False)
    ends = torch.tensor([0] + [math.prod(state.shape) // 2 for _, state in shards]).cumsum(0)
    weight.bnb_quant_state = {i: shards[i][1] for i in reversed(range(len(shards)))}  # in no order: that of a file
    weight.bnb_shard_offsets = ends
    return weight


def _apply(x: Tensor, weight: Tensor, offsets: Tensor, out: Tensor) -> None:
    """What vLLM does: bitsandbytes for each shard, and a copy."""
    from bitsandbytes import matmul_4bit

    start = 0
    for i in range(len(weight.bnb_quant_state)):
        state = weight.bnb_quant_state[i]
        stop = start + state.shape[0]
        out[:, start:stop] = matmul_4bit(x, weight[offsets[i] : offsets[i + 1]].t(), state)
        start = stop


_library: Any = None


def operator() -> None:
    """Define vllm::apply_bnb_4bit, once in a process."""
    global _library
    if _library is None:
        _library = torch.library.Library("vllm", "FRAGMENT")
        _library.define("apply_bnb_4bit(Tensor x, Tensor weight, Tensor offsets, Tensor(a3!) out) -> ()")
        _library.impl("apply_bnb_4bit", _apply, "CPU")
        torch.library.register_fake("vllm::apply_bnb_4bit", lambda x, weight, offsets, out: None, lib=_library)


def stub(monkeypatch: pytest.MonkeyPatch, ranks: int = 1) -> dict[str, Any]:
    """A vLLM of that many tensor-parallel ranks; returns its table of loaders."""
    operator()
    loaders: dict[str, Any] = {"bitsandbytes": BitsAndBytesModelLoader}

    def get_model_loader(config: LoadConfig) -> Any:
        if config.load_format not in loaders:
            raise ValueError(f"Load format `{config.load_format}` is not supported")
        return loaders[config.load_format](config)

    def register_model_loader(name: str) -> Any:
        return lambda cls: loaders.__setitem__(name, cls)

    modules = {
        "vllm": {},
        "vllm.config": {},
        "vllm.config.load": {"LoadConfig": LoadConfig},
        "vllm.distributed": {"get_tensor_model_parallel_world_size": lambda: ranks},
        "vllm.platforms": {"current_platform": SimpleNamespace(dispatch_key="CPU")},
        "vllm.model_executor": {},
        "vllm.model_executor.model_loader": {
            "get_model_loader": get_model_loader,
            "register_model_loader": register_model_loader,
        },
        "vllm.model_executor.utils": {"get_packed_modules_mapping": lambda model: PACKED},
        "vllm.model_executor.layers": {},
        "vllm.model_executor.layers.linear": {
            cls.__name__: cls for cls in (ColumnParallelLinear, QKVParallelLinear, RowParallelLinear)
        },
    }
    for name, content in modules.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, own = name.rpartition(".")
        if parent:
            monkeypatch.setattr(sys.modules[parent], own, module, raising=False)
    monkeypatch.setitem(sys.modules, "vllm_bnb_plugin", None)  # not installed
    return loaders
