"""The serve suite with transformers as the engine: `generate` on bitsandbytes' layers, with and without halfbyte.

One model in the shapes of a real one, its weights random and quantised by bitsandbytes, in arms that take turns in one
process: bitsandbytes, bitsandbytes once more (whatever that differs by is noise), and halfbyte, by its switch and by
`halfbyte.optimize`, one of them or both. bitsandbytes' two arms are one model object, each other arm is one of its own,
as compiled code and captured CUDA graphs keep the kernels that they were made with: an arm that shared them with
another would measure that other one. On a GPU the arms share the weights' memory.

All arms generate as transformers and PyTorch advise where speed counts: each model keeps one StaticCache, as a CUDA
graph is recorded anew for the memory of another; and what is compiled does not check at every token whether the model's
modules changed (`torch.compiler.skip_guard_on_all_nn_modules_unsafe`), unless asked to.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from inspect import signature
from typing import Any

import torch
from torch import nn

from ..counters import bucket
from ..integrations import bitsandbytes as switch
from ..integrations.optimize import optimize
from .rows import Environment

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256,
    },
    "llama-3.2-1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256,
    },
    "smollm2-135m": {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
    },
    "tiny": {
        "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 512,
    },
}  # fmt: skip
ARMS = ("switch", "optimize")
WARM_TOKENS = 4
RECOMPILES = 64  # torch stops compiling a function after eight times, and goes on eagerly


@dataclass
class Arm:
    """A model and the state of the switch that it runs under."""

    name: str
    model: Any
    on: bool
    caches: dict[tuple[int, int], Any] = field(default_factory=dict)

    def run(self, ids: torch.Tensor, tokens: int, options: dict[str, Any]) -> Run:
        """Generate `tokens` tokens for every row of `ids`, after a short warm-up that settles the switch's change.

        The cache is kept for runs of as many rows and tokens, and so is what was compiled and recorded for it.
        """
        from transformers import StaticCache

        length = ids.shape[1] + tokens
        key = ids.shape[0], length
        if key not in self.caches:
            self.caches[key] = StaticCache(config=self.model.config, max_cache_len=length)
        context: AbstractContextManager[Any] = switch.enabled() if self.on else nullcontext()
        with context, torch.inference_mode():
            _generate(self.model, ids, WARM_TOKENS, self.caches[key], options)
            return _generate(self.model, ids, tokens, self.caches[key], options)


@dataclass(frozen=True)
class Run:
    """One call of generate: its tokens [users, prompt + new], seconds in all, and until the prompt was read."""

    tokens: torch.Tensor
    seconds: float
    prompt_s: float


@dataclass(frozen=True)
class Settings:
    """What is measured. users: rows of a batch. rounds: how often each arm takes its turn, after one to warm up.

    arms: by what halfbyte runs beside bitsandbytes, of ARMS. guards: whether compiled code checks those on modules.
    """

    shape: str = "llama-3-8b"
    users: Sequence[int] = (1, 16)
    prompt: int = 32
    tokens: int = 128
    rounds: int = 5
    nested: bool = False
    dtype_name: str = "bf16"
    compiled: bool = True
    layers: int | None = None
    arms: Sequence[str] = ARMS[:1]
    guards: bool = False


def bench_generate(
    settings: Settings, device: torch.device, dtype: torch.dtype, progress: Callable[[str], None] = lambda text: None
) -> Iterator[dict[str, object]]:
    """Rows of every number of users and arm, bitsandbytes first; `speedup` is over it, in the same run.

    Raises ValueError for unknown shapes, and where halfbyte served none of its arm's decoding; ModuleNotFoundError
    without transformers or bitsandbytes.
    """
    progress("building the model")
    model = build(settings.shape, device, dtype, settings.nested, settings.layers)
    environment = asdict(Environment.of(device))
    for users in settings.users:
        torch.compiler.reset()
        arms = make_arms(model, settings.arms)
        ids = torch.randint(
            model.config.vocab_size, (users, settings.prompt), generator=torch.Generator().manual_seed(0)
        )
        speeds, tpots, kernels = _measure(arms, ids.to(device), settings, device, progress)
        first = statistics.median(speeds[arms[0].name])
        for arm in arms:
            fifths = statistics.quantiles(speeds[arm.name], n=5) if settings.rounds > 1 else [first] * 4
            middle = statistics.median(speeds[arm.name])
            yield {
                "suite": "serve",
                **environment,
                "kernel": kernels.get(arm.name, arm.name),
                "format": "nf4-64" + ("-nested" if settings.nested else ""),
                "nested": settings.nested,
                "dtype": settings.dtype_name,
                "adapters": 0,
                "rank": 0,
                "engine": f"transformers {version('transformers')}",
                "model": settings.shape,
                "layers": model.config.num_hidden_layers,
                "compiled": settings.compiled,
                "guards": settings.guards,
                "users": users,
                "prompt_tokens": settings.prompt,
                "new_tokens": settings.tokens,
                "tokens_per_s": middle,
                "tpot_ms": statistics.median(tpots[arm.name]),
                "spread": (fifths[3] - fifths[0]) / middle,
                "speedup": middle / first,
            }


def build(shape: str, device: torch.device, dtype: torch.dtype, nested: bool, layers: int | None = None) -> Any:
    """A Llama of random weights, its linear layers but the head in NF4 by bitsandbytes; `layers` of them, or all.

    Not by from_pretrained: a model's file would have to exist. Raises ValueError for an unknown shape.
    """
    from bitsandbytes.nn import Linear4bit
    from transformers import LlamaConfig, LlamaForCausalLM

    if shape not in SHAPES:
        raise ValueError(f"bench generate: unknown shape '{shape}'; known: {', '.join(SHAPES)}")
    fixed = {"max_position_embeddings": 8192, "rope_theta": 500000.0, "tie_word_embeddings": False}
    config = LlamaConfig(**{**fixed, **SHAPES[shape]})
    config.num_hidden_layers = layers or config.num_hidden_layers
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        torch.manual_seed(0)
        with device:
            model = LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(default)
    for parent in model.model.modules():
        for name, child in parent.named_children():
            if type(child) is not nn.Linear:
                continue
            layer = Linear4bit(
                child.in_features, child.out_features, bias=False, compute_dtype=dtype, compress_statistics=nested,
                quant_type="nf4", device="meta",
            )  # fmt: skip
            layer.weight = type(layer.weight)(
                child.weight.data, requires_grad=False, compress_statistics=nested, quant_type="nf4", module=layer
            )
            setattr(parent, name, layer.to(device).eval())
    model.generation_config.eos_token_id = None  # every row makes all its tokens
    model.generation_config.pad_token_id = 0
    return model.requires_grad_(False)


def make_arms(model: Any, kinds: Sequence[str] = ARMS) -> list[Arm]:
    """bitsandbytes, the same again, and halfbyte's kinds, with models of their own. Raises ValueError for unknown ones.

    Before any of them runs: `optimize` moves weights, which a recorded CUDA graph would not see.
    """
    theirs, theirs_name = twin(model), f"bitsandbytes {version('bitsandbytes')}"
    arms = [Arm(theirs_name, theirs, False), Arm(f"{theirs_name} again", theirs, False)]
    for kind in kinds:
        if kind not in ARMS:
            raise ValueError(f"bench generate: unknown arm '{kind}'; known: {', '.join(ARMS)}")
        ours = twin(model)
        if kind == "optimize":
            optimize(ours)
        arms.append(Arm("halfbyte" if kind == "switch" else "halfbyte optimize", ours, True))
    return arms


def twin(model: Any) -> Any:
    """Another model object with the same weights: on a GPU on the same memory.

    On a CPU on its own, as bitsandbytes rewrites weights there in the first forward pass. Its class is its own, too, or
    torch.compile would find that it fits what was compiled, and captured, for another one.
    """
    memo: dict[int, Any] = {}
    if model.device.type != "cpu":
        shared = [*model.parameters(), *model.buffers()]
        shared += [tensor.quant_state for tensor in shared if getattr(tensor, "quant_state", None) is not None]
        memo = {id(each): each for each in shared}
    copied = copy.deepcopy(model, memo)
    kind = type(model)
    copied.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__})
    return copied


def _measure(
    arms: Sequence[Arm], ids: torch.Tensor, settings: Settings, device: torch.device, progress: Callable[[str], None]
) -> tuple[dict[str, list[float]], dict[str, list[float]], dict[str, str]]:
    """(tokens a second, ms a token, each by arm and round; the kernels that served the decoding of halfbyte's arms)."""
    users = ids.shape[0]
    options = _options(settings, device)
    speeds: dict[str, list[float]] = {arm.name: [] for arm in arms}
    tpots: dict[str, list[float]] = {arm.name: [] for arm in arms}
    kernels: dict[str, str] = {}
    with torch._dynamo.config.patch(recompile_limit=RECOMPILES):
        for turn in range(settings.rounds + 1):
            for arm in arms:
                progress(f"{users} users, {arm.name}: {f'round {turn} of {settings.rounds}' if turn else 'warming up'}")
                if arm.on and not turn:
                    switch.reset_counters()
                run = arm.run(ids, settings.tokens, options)
                if arm.on and not turn:
                    kernels[arm.name] = arm.name.replace("halfbyte", f"halfbyte {_decoding_kernel(users)}", 1)
                if turn:
                    speeds[arm.name].append(users * settings.tokens / run.seconds)
                    tpots[arm.name].append(1e3 * (run.seconds - run.prompt_s) / (settings.tokens - 1))
    return speeds, tpots, kernels


def _decoding_kernel(users: int) -> str:
    """The kernel of halfbyte that served calls of so many rows. Raises ValueError where none did."""
    for by_kernel in switch.status().served.values():
        for kernel, rows in by_kernel.items():
            if bucket(users) in rows:
                return kernel
    raise ValueError(f"bench generate: halfbyte served no call of {users} rows:\n{switch.status()}")


def _options(settings: Settings, device: torch.device) -> dict[str, Any]:
    from transformers import CompileConfig

    if not settings.compiled:
        return {"disable_compile": True}
    config = CompileConfig(mode=None, options={})
    if device.type == "cpu":
        config._compile_all_devices = True
    else:
        config.options["triton.cudagraphs"] = True  # all that mode "reduce-overhead" stands for
    if not settings.guards:
        config.options["guard_filter_fn"] = _guards_that_stay
    return {"compile_config": config}


def _guards_that_stay(entries: Sequence[Any]) -> list[bool]:
    """All but those on modules, and the one on the model's class: it tells the arms' code apart."""
    from transformers import PreTrainedModel

    kept: list[bool] = torch.compiler.skip_guard_on_all_nn_modules_unsafe(entries)  # type: ignore[no-untyped-call]
    for i, entry in enumerate(entries):
        kept[i] |= entry.guard_type == "TYPE_MATCH" and isinstance(entry.value, PreTrainedModel)
    return kept


def _generate(model: Any, ids: torch.Tensor, tokens: int, cache: Any, options: dict[str, Any]) -> Run:
    clock = _Clock(ids.device)
    cache.reset()
    name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"  # until transformers 5.23
    start = clock.now()
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, logits_processor=[clock],
        **{name: cache}, **options,
    )  # fmt: skip
    return Run(out, clock.now() - start, clock.first - start)


class _Clock:
    """Notes when the first logits are there: as a logits processor, which transformers calls at each step."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.first = device, float("nan")

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.first != self.first:
            self.first = self.now()
        return scores
