"""The layer suite: the four multiplies of a decoder layer, as servers run them, ours and the peers' in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from ..checkpoints.mapped import read_json
from .layer_adapters import Mix, candidates
from .linear import Bench, OnFailure
from .measure import reraise
from .rows import Row

Shape = tuple[int, int]
SUITE = "layer"
MULTIPLIES = ("qkv", "o", "gate_up", "down")  # q, k and v share x and are one multiply; so are gate and up

# (N, K) of each. From the config.json that each publisher put on huggingface.co: hidden size h, intermediate size i, q
# query and v key-value heads of d values give ((q + 2 v) d, h), (h, q d), (2 i, h) and (h, i).
LAYERS: Mapping[str, tuple[Shape, Shape, Shape, Shape]] = {
    # meta-llama/Meta-Llama-3-8B: h 4096, i 14336, q 32, v 8, d 128
    "llama-3-8b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    # meta-llama/Meta-Llama-3-70B: h 8192, i 28672, q 64, v 8, d 128
    "llama-3-70b": ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)),
    # mistralai/Mistral-Small-24B-Instruct-2501, of whose shapes Sarvam-M is, too: h 5120, i 32768, q 32, v 8, d 128
    "mistral-24b": ((6144, 5120), (5120, 4096), (65536, 5120), (5120, 32768)),
    # Qwen/Qwen3-8B: h 4096, i 12288, q 32, v 8, d 128
    "qwen3-8b": ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)),
    # Qwen/Qwen3-32B: h 5120, i 25600, q 64, v 8, d 128
    "qwen3-32b": ((10240, 5120), (5120, 8192), (51200, 5120), (5120, 25600)),
    # google/gemma-3-27b-it, its text model: h 5376, i 21504, q 32, v 16, d 128
    "gemma-3-27b": ((8192, 5376), (5376, 4096), (43008, 5376), (5376, 21504)),
}
PROJECTIONS = {  # what transformers calls a layer's linear modules, apart or already merged
    "q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "qkv_proj": "qkv", "o_proj": "o",
    "gate_proj": "gate_up", "up_proj": "gate_up", "gate_up_proj": "gate_up", "down_proj": "down",
}  # fmt: skip


@dataclass(frozen=True)
class Model:
    """A model's name in rows, and its multiplies' shapes (N, K)."""

    name: str
    shapes: Mapping[str, Shape]


@dataclass(frozen=True)
class LayerRow:
    """A row of this suite: which multiply of which model it is."""

    row: Row
    model: str
    multiply: str

    def record(self) -> dict[str, object]:
        """The row as a flat JSON object."""
        return {**self.row.record(), "model": self.model, "multiply": self.multiply}


def model_of(what: str) -> Model:
    """A model by a name in LAYERS, a config.json, or a directory that holds one.

    Raises ValueError for what is none of these, for what transformers does not know, and for a layer that is made of
    other multiplies; ModuleNotFoundError where a config.json needs transformers and it is missing.
    """
    if what.lower() in LAYERS:
        return Model(what.lower(), dict(zip(MULTIPLIES, LAYERS[what.lower()], strict=True)))
    path = Path(what)
    if path.is_dir():
        path /= "config.json"
    if not path.is_file() or path.suffix != ".json":
        raise ValueError(f"{what} is no config.json, no directory with one, and none of {', '.join(LAYERS)}")
    name = path.resolve().parent.name if path.name == "config.json" else path.stem
    return Model(name, _shapes(path))


def _shapes(path: Path) -> dict[str, Shape]:
    """The multiplies of the first decoder layer, from transformers' own classes, built without memory."""
    from .capacity_model import config_of, skeleton_of

    text = config_of(read_json(path), str(path)).get_text_config()
    skeleton = skeleton_of(text, str(path))
    linears = {
        name.partition(".layers.0.")[2]: (module.out_features, module.in_features)
        for name, module in skeleton.named_modules()
        if ".layers.0." in name and isinstance(module, torch.nn.Linear)
    }
    shapes: dict[str, Shape] = {}
    unknown = []
    for name, (n, k) in linears.items():
        multiply = PROJECTIONS.get(name.rpartition(".")[2])
        if multiply is None or shapes.get(multiply, (0, k))[1] != k or name.count(".") > 1:
            unknown.append(name)
        else:
            shapes[multiply] = (shapes.get(multiply, (0, k))[0] + n, k)
    if unknown or shapes.keys() != set(MULTIPLIES):
        raise ValueError(
            f"{path}: its first layer is not made of q, k, v, o, gate, up and down projections, but of "
            f"{', '.join(linears) or 'none that can be found'}; `halfbyte bench linear --shapes` measures any shape"
        )
    return {multiply: shapes[multiply] for multiply in MULTIPLIES}


def bench_layer(
    models: Sequence[Model],
    ms: Sequence[int],
    formats: Sequence[str],
    dtype_name: str,
    device: torch.device,
    with_peers: bool = True,
    seconds_each: float = 0.25,
    on_missing: Callable[[list[str]], None] = lambda names: None,
    on_failure: OnFailure = reraise,
    adapters: Sequence[Mix] = (),
) -> Iterator[LayerRow]:
    """Rows of each multiply of each model, format and M, cold: ours first, then the peers'. As `lab.linear.Bench`.

    Besides the linear suite's peers: to dequantise and multiply. A multiply's weights are made once for all M.

    adapters: how many of which rank, measured in turn with the same multiplies without; their only peer is PEFT's path.
    """
    bench = Bench(SUITE, dtype_name, device, with_peers and not adapters, seconds_each, True, on_missing, on_failure)
    for model in models:
        for multiply, (n, k) in model.shapes.items():
            for key in formats:
                more = partial(candidates, mixes=adapters, with_peers=with_peers)
                for row in bench.rows(n, k, key, ms, rule=not adapters, more=more):
                    yield LayerRow(row, model.name, multiply)
