"""What the planner must know of a model: its matrices by kind, and what each layer keeps of every token.

Both come from transformers' own classes, built without memory: an architecture that transformers knows is counted as
it is there, and one that it does not know is refused.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..checkpoints import Checkpoint, open_checkpoint
from ..checkpoints.convert import why_dense
from ..checkpoints.mapped import read_json

# From the config.json that each publisher put on huggingface.co, without what does not change a size.
SOURCES = {
    "llama-3-8b": "meta-llama/Meta-Llama-3-8B",
    "llama-3-70b": "meta-llama/Meta-Llama-3-70B",
    "mistral-24b": "mistralai/Mistral-Small-24B-Instruct-2501",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "gemma-3-27b": "google/gemma-3-27b-it, its text model",
}
BUILT_IN: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
    },
    "llama-3-70b": {
        "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
    },
    "mistral-24b": {
        "model_type": "mistral", "hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072,
        "sliding_window": None, "tie_word_embeddings": False,
    },
    "qwen3-8b": {
        "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "use_sliding_window": False, "tie_word_embeddings": False,
    },
    "qwen3-32b": {
        "model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "use_sliding_window": False, "tie_word_embeddings": False,
    },
    "gemma-3-27b": {
        "model_type": "gemma3_text", "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62,
        "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "vocab_size": 262208,
        "sliding_window": 1024, "tie_word_embeddings": True,
    },
}  # fmt: skip
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
WINDOWS = {"full_attention": None, "sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight", "token_embd.weight")


@dataclass(frozen=True)
class Cache:
    """What the layers keep of a sequence.

    layers: (values a token, most tokens kept or None) -> number of such layers. uncounted: kinds of layers whose state
    is not counted here (recurrent ones), with their number. latent: whether it is MLA's compressed cache.
    """

    layers: Mapping[tuple[int, int | None], int]
    uncounted: Mapping[str, int]
    latent: bool = False

    def values(self, context: int) -> int:
        """Numbers kept of one sequence of `context` tokens."""
        return sum(
            count * values * (context if window is None else min(context, window))
            for (values, window), count in self.layers.items()
        )


@dataclass(frozen=True)
class Model:
    """A model's sizes, in values.

    linears, experts: shape [N, K] -> how many such matrices; experts are those of mixtures, of which a token takes
    `experts_used` of `experts_all`. embedding, head, other: values that stay in 16 bits; the head is 0 where it is
    tied to the embedding. stored: what a checkpoint holds, in bytes, if it was given one.
    """

    name: str
    source: str
    hidden: int
    vocabulary: int
    linears: Counter[tuple[int, int]]
    experts: Counter[tuple[int, int]]
    experts_used: int
    experts_all: int
    embedding: int
    head: int
    other: int
    cache: Cache
    stored: Stored | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def parameters(self) -> int:
        matrices = [*self.linears.items(), *self.experts.items()]
        return sum(n * k * count for (n, k), count in matrices) + self.embedding + self.head + self.other

    def experts_read(self, users: int) -> float:
        """The expected share of each layer's experts that a step of `users` tokens needs, if all are as likely.

        Each token picks `experts_used` different ones of `experts_all`, independently of the others.
        """
        return 1 - (1 - self.experts_used / self.experts_all) ** users if self.experts_all else 0.0


@dataclass(frozen=True)
class Stored:
    """A checkpoint's bytes as they are: all, of the packed weights with their scales, of the experts, and of an
    embedding that is not read as a head too."""

    format: str
    total: int
    packed: int
    experts: int
    embedding: int


def read_model(what: str) -> Model:
    """The sizes of a checkpoint (directory, GGUF file), a config.json or a built-in name such as "llama-3-70b".

    Raises ValueError for what is none of these or transformers does not know, ModuleNotFoundError without transformers.
    """
    from transformers import AutoConfig

    path = Path(what)
    checkpoint: Checkpoint | None = None
    if what.lower() in BUILT_IN:
        described = BUILT_IN[what.lower()]
        source = f"config.json of {SOURCES[what.lower()]}"
    elif path.is_file() and path.suffix == ".json":
        described, source = read_json(path), str(path)
    elif path.exists():
        checkpoint = open_checkpoint(path)
        source = str(path)
        if checkpoint.kind == "gguf":
            described = AutoConfig.from_pretrained(path.parent, gguf_file=path.name).to_dict()
        elif checkpoint.config is None:
            raise ValueError(f"{path}: no config.json beside it; the planner needs the number of heads and layers")
        else:
            described = checkpoint.config
    else:
        raise ValueError(
            f"{what} is no checkpoint, no config.json and none of the built-in names {', '.join(BUILT_IN)}"
        )
    return model_of(described, what, source, checkpoint)


def model_of(described: Mapping[str, Any], name: str, source: str, checkpoint: Checkpoint | None = None) -> Model:
    """The sizes of what a config.json describes."""
    config = config_of(described, source)
    matrices = _matrices(config, source)
    text = config.get_text_config()
    experts = next((int(getattr(text, key)) for key in EXPERT_COUNTS if getattr(text, key, None)), 0)
    model = Model(
        name=name,
        source=source,
        hidden=int(text.hidden_size),
        vocabulary=int(text.vocab_size),
        **matrices,
        experts_used=int(getattr(text, "num_experts_per_tok", None) or 0) if experts else 0,
        experts_all=experts,
        cache=cache_of(text),
        stored=_stored(checkpoint) if checkpoint else None,
    )
    model.notes.extend(_notes(model))
    return model


def config_of(described: Mapping[str, Any], source: str) -> Any:
    """transformers' config of what a config.json describes. Raises ValueError, naming the source, where it has none."""
    from transformers import AutoConfig

    plain = {key: value for key, value in described.items() if key not in ("model_type", "quantization_config")}
    if not isinstance(described.get("model_type"), str):
        raise ValueError(f"{source}: has no model_type; is it a transformers config?")
    try:
        config = AutoConfig.for_model(described["model_type"], **json.loads(json.dumps(plain)))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{source}: transformers does not take it: {error}") from error
    if config.is_encoder_decoder:
        raise ValueError(f"{source}: encoder-decoder models are not counted, only causal language models")
    return config


def skeleton_of(config: Any, source: str) -> Any:
    """transformers' model of a config, without memory. Raises ValueError where it has none."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        raise ValueError(f"{source}: transformers has no causal language model for it: {error}") from error


def _matrices(config: Any, source: str) -> dict[str, Any]:
    """Every parameter and saved buffer of the model, by kind, from its classes without memory."""
    skeleton = skeleton_of(config, source)
    linears: Counter[tuple[int, int]] = Counter()
    experts: Counter[tuple[int, int]] = Counter()
    sizes = {"embedding": 0, "head": 0, "other": 0}
    tied = set(getattr(skeleton, "all_tied_weights_keys", None) or ())
    head = skeleton.get_output_embeddings()
    for name, module in skeleton.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            full = f"{name}.{own}"
            if full in tied:
                continue
            if parameter.dim() == 3 and "expert" in full:
                experts[parameter.shape[1], parameter.shape[2]] += parameter.shape[0]
            elif module is head:
                sizes["head"] += parameter.numel()
            elif isinstance(module, torch.nn.Linear) and why_dense(full, parameter) is None:
                linears[parameter.shape[0], parameter.shape[1]] += 1
            else:
                kind = "embedding" if full.endswith(EMBEDDINGS) else "other"
                sizes[kind] += parameter.numel()
        kept = module._buffers.keys() - module._non_persistent_buffers_set  # as a router's correction: saved, too
        sizes["other"] += sum(module._buffers[own].numel() for own in kept)
    return {"linears": linears, "experts": experts, **sizes}


def cache_of(text: Any) -> Cache:
    """What a (text) config says each layer keeps: keys and values of each token, in a window where it has one; MLA's
    latent vector and rotary key; nothing counted for recurrent layers."""
    values = _values_a_token(text)
    layers: Counter[tuple[int, int | None]] = Counter()
    uncounted: Counter[str] = Counter()
    for kind in _layer_kinds(text):
        if kind not in WINDOWS:
            uncounted[kind] += 1
            continue
        window = getattr(text, WINDOWS[kind] or "", None)
        layers[values, None if window is None else int(window)] += 1
    return Cache(dict(layers), dict(uncounted), bool(getattr(text, "kv_lora_rank", None)))


def _values_a_token(text: Any) -> int:
    """Numbers that a layer with attention keeps of a token; 0 for a model without attention."""
    if getattr(text, "kv_lora_rank", None):
        return int(text.kv_lora_rank) + int(text.qk_rope_head_dim)
    queries = getattr(text, "num_attention_heads", None)
    named = (getattr(text, key, None) for key in ("num_key_value_heads", "num_kv_heads"))
    heads = next((value for value in named if value is not None), queries)
    if not heads or not queries:
        return 0
    return 2 * int(heads) * int(getattr(text, "head_dim", None) or text.hidden_size // queries)


def _layer_kinds(text: Any) -> list[str]:
    """A kind for each layer that keeps a cache of its own; layers that share another's (Gemma 3n) are left out."""
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        windowed = getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)
        kinds = ["sliding_attention" if windowed else "full_attention"] * int(text.num_hidden_layers)
    shared = int(getattr(text, "num_kv_shared_layers", None) or 0)
    return list(kinds)[: len(kinds) - shared]


def _stored(checkpoint: Checkpoint) -> Stored:
    entries = checkpoint.entries()
    formats = Counter(entry.format for entry in entries if entry.packed) or Counter(entry.format for entry in entries)
    untied = any(entry.name.endswith(("lm_head.weight", "output.weight", "embed_out.weight")) for entry in entries)
    embedding = sum(entry.nbytes for entry in entries if untied and entry.name.endswith(EMBEDDINGS))
    return Stored(
        format=formats.most_common(1)[0][0],
        total=sum(entry.nbytes for entry in entries),
        packed=sum(entry.nbytes for entry in entries if entry.packed),
        experts=sum(entry.nbytes for entry in entries if ".experts." in entry.name or "_exps" in entry.name),
        embedding=embedding,
    )


def _notes(model: Model) -> list[str]:
    """What a reader must know about how this model was counted."""
    notes = []
    windows = {window: count for (_, window), count in model.cache.layers.items() if window is not None}
    for window, count in windows.items():
        notes.append(
            f"{count} of {sum(model.cache.layers.values())} layers keep the last {window:,} tokens only; an engine "
            "that gives them the whole context needs more"
        )
    if model.cache.latent:
        notes.append(
            "MLA: the cache is the latent vector and the rotary key of each token, as serving engines keep it; "
            "transformers itself keeps the expanded keys and values, many times as much"
        )
    if model.cache.uncounted:
        kinds = ", ".join(f"{count} × {kind}" for kind, count in model.cache.uncounted.items())
        notes.append(f"not counted: the state of {kinds}, whose size does not grow with the context")
    if model.experts:
        dense = sum(n * k * count for (n, k), count in model.experts.items()) * 2
        notes.append(
            f"a token takes {model.experts_used} of {model.experts_all} experts a layer; a step reads the expected "
            f"number of different ones. `halfbyte quantize` leaves experts in 16 bits ({dense / 1e9:,.1f} GB): the "
            "4-bit rows are for checkpoints that hold them in 4 bits, as GGUF files do"
        )
    return notes


def values_in(matrices: Mapping[tuple[int, int], int]) -> int:
    """Weights in all of them."""
    return sum(math.prod(shape) * count for shape, count in matrices.items())
