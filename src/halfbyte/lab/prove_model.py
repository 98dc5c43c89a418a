"""The whole model: logits, perplexity and greedy answers, ours and the unchanged system's, with its own noise.

The reference is the model on halfbyte in fp32: the layers' part of the proof has held those against float64 to 5e-6.
Systems are loaded one after the other; of the reference only the logits are kept.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..integrations.generate import encode

BASE = "base"  # the variant without an adapter
WINDOW = 512  # tokens of text in one pass
PROMPTS = (
    "Explain in two sentences why the sky is blue.",
    "A train leaves at 14:20 and arrives at 17:05. How long is the journey?",
    "List three things to check before buying a used bicycle.",
    "Write a short note that thanks a neighbour for watering the plants.",
    "What is the difference between weather and climate?",
    "Name the planets of the solar system, nearest to the sun first.",
    "Give me a simple recipe for lentil soup.",
    "Why do leaves change colour in autumn?",
)


@dataclass(frozen=True)
class Distance:
    """Of one system's logits [tokens, vocabulary] from another's.

    relative: 2-norm of the difference over that of the other's. kl: mean KL divergence of its next-token distribution,
    in nats a token. top1: share of positions where both rank the same token first.
    """

    relative: float
    kl: float
    top1: float

    @staticmethod
    def of(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> Distance:
        off = norm = kl = 0.0
        same = tokens = 0
        for ours, truth in _pieces(found, wanted):
            off += float((ours - truth).double().square().sum())
            norm += float(truth.double().square().sum())
            target = truth.double().log_softmax(-1)
            kl += float((target.exp() * (target - ours.double().log_softmax(-1))).sum())
            same += int((ours.argmax(-1) == truth.argmax(-1)).sum())
            tokens += truth.shape[0]
        return Distance(math.sqrt(off / norm), kl / tokens, same / tokens)


def _pieces(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """A few positions of both at a time: in float64 a large vocabulary takes much room."""
    for ours, truth in zip(found, wanted, strict=True):
        for start in range(0, truth.shape[0], 64):
            yield ours[start : start + 64], truth[start : start + 64]


@dataclass(frozen=True)
class Divergence:
    """Where greedy answers to the same prompts part: for each the first token that differs, None where none does."""

    a: str
    b: str
    first: list[int | None]

    @staticmethod
    def of(a: str, ours: Sequence[Sequence[int]], b: str, theirs: Sequence[Sequence[int]]) -> Divergence:
        return Divergence(a, b, [_first(left, right) for left, right in zip(ours, theirs, strict=True)])


def _first(left: Sequence[int], right: Sequence[int]) -> int | None:
    for position, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return position
    return None if len(left) == len(right) else min(len(left), len(right))


@dataclass(frozen=True)
class System:
    """An engine for the model. load: a transformers model on the device."""

    name: str
    load: Callable[[], Any]


@dataclass
class Questions:
    """What every system is asked.

    passages: token ids [1, T] for logits and perplexity. is_text: whether they are a text, of which perplexity makes
    sense. prompts: token ids [1, T] of greedy answers of at most `tokens` new tokens. adapters: PEFT directories.
    """

    passages: list[Tensor]
    is_text: bool
    prompts: list[Tensor]
    tokens: int
    adapters: Sequence[Path] = field(default_factory=tuple)


def prove_model(
    path: Path,
    kind: str,
    dtype: torch.dtype,
    device: str,
    peers: Sequence[str],
    text: str | None,
    text_tokens: int,
    prompts: Sequence[str],
    tokens: int,
    adapters: Sequence[Path] = (),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """The record "end_to_end" of docs/prove.md.

    kind: of the checkpoint. peers: "bitsandbytes" (for its own checkpoints only) and "dense". text: to measure
    perplexity on, its first `text_tokens` tokens; without one logits are compared on the prompts.
    Raises ValueError for a model or tokenizer that transformers cannot load.
    """
    reference, ours, *others = systems(path, kind, dtype, device, peers)
    total = 2 + len(others)
    tokenizer = _tokenizer(path)
    questions = _questions(tokenizer, text, text_tokens, prompts, tokens, adapters)
    progress(0, total)
    with loaded(reference) as model:
        truth = {label: _logits(each, questions.passages) for label, each in variants(model, adapters)}
        shifts = {str(folder): asdict(Distance.of(truth[str(folder)], truth[BASE])) for folder in adapters}
        measured = [_record(reference.name, truth, truth, questions)]
    progress(1, total)
    unchanged = others[0] if others else ours
    answers: dict[str, list[list[int]]] = {}
    for number, system in enumerate((ours, *others), start=2):
        with loaded(system) as model:
            found = {label: _logits(each, questions.passages) for label, each in variants(model, adapters)}
            measured.append(_record(system.name, found, truth, questions))
            answers |= _answers(system.name, model, questions, twice=system is unchanged)
        progress(number, total)
    return {
        "reference": reference.name,
        "unchanged": unchanged.name,
        "text_tokens": sum(ids.shape[1] for ids in questions.passages),
        "is_text": questions.is_text,
        "systems": measured,
        "adapters": shifts,
        "greedy": {
            "prompts": list(prompts),
            "tokens": tokens,
            "adapter": str(adapters[0]) if adapters else None,
            "answers": {
                name: [tokenizer.decode(ids, skip_special_tokens=True) for ids in answers[name]]
                for name in (ours.name, unchanged.name)
            },
            "pairs": [asdict(pair) for pair in _pairs(ours.name, unchanged.name, [o.name for o in others], answers)],
        },
    }


def _pairs(
    ours: str, unchanged: str, others: Sequence[str], answers: dict[str, list[list[int]]]
) -> Iterator[Divergence]:
    """First the noise of the unchanged system, then what changing it does."""
    compared = [(f"{unchanged}, again", unchanged), (f"{unchanged}, in a batch", unchanged)]
    if ours != unchanged:
        compared += [(ours, other) for other in others]
        compared += [(f"{ours}, in a batch", ours)]
    for a, b in compared:
        yield Divergence.of(a, answers[a], b, answers[b])


def systems(path: Path, kind: str, dtype: torch.dtype, device: str, peers: Sequence[str]) -> list[System]:
    """The reference, ours, and the peers that run this checkpoint."""

    def ours(dtype: torch.dtype) -> Any:
        from ..integrations.transformers import load

        return load(path, dtype=dtype, device_map=device)[0]

    def unchanged() -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, device_map=device)

    found = [System("halfbyte fp32", lambda: ours(torch.float32)), System("halfbyte", lambda: ours(dtype))]
    if "bitsandbytes" in peers and kind == "bitsandbytes":
        found.append(System(f"bitsandbytes {version('bitsandbytes')}", unchanged))
    if "dense" in peers:
        found.append(System(f"torch dense {torch.__version__}", lambda: ours(dtype).dequantize()))
    return found


@contextmanager
def loaded(system: System) -> Iterator[Any]:
    """The system's model, and its memory free again afterwards."""
    try:
        model = system.load().eval()
    except OSError as error:  # transformers' error for a file that it misses
        raise ValueError(f"transformers cannot load the model: {error}; --no-model proves the layers alone") from error
    try:
        with torch.inference_mode():
            yield model
    finally:
        del model
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def variants(model: Any, adapters: Sequence[Path]) -> Iterator[tuple[str, Any]]:
    """The model as it is, then with each adapter, which is taken off again."""
    yield BASE, model
    for folder in adapters:
        from peft import PeftModel

        adapted = PeftModel.from_pretrained(model, folder).eval()
        yield str(folder), adapted
        adapted.unload()


def _tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    origin = (path.parent, {"gguf_file": path.name}) if path.is_file() else (path, {})
    try:
        return AutoTokenizer.from_pretrained(origin[0], **origin[1])
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: no tokenizer: {error}; --no-model proves the layers alone") from error


def _questions(
    tokenizer: Any, text: str | None, text_tokens: int, prompts: Sequence[str], tokens: int, adapters: Sequence[Path]
) -> Questions:
    encoded = [encode(tokenizer, prompt) for prompt in prompts]
    if text is None:
        return Questions(encoded, False, encoded, tokens, adapters)
    ids = tokenizer(text, return_tensors="pt", truncation=False)["input_ids"][:, :text_tokens]
    passages = [part for part in ids.split(WINDOW, dim=1) if part.shape[1] > 1]
    if not passages:
        raise ValueError("--text: the file has no text to measure perplexity on")
    return Questions(passages, True, encoded, tokens, adapters)


def _logits(model: Any, passages: Sequence[Tensor]) -> list[Tensor]:
    """fp32 [T, vocabulary] on the CPU for each passage."""
    return [model(ids.to(model.device)).logits[0].float().cpu() for ids in passages]


def _record(
    name: str, found: dict[str, list[Tensor]], truth: dict[str, list[Tensor]], questions: Questions
) -> dict[str, Any]:
    distances = {label: asdict(Distance.of(logits, truth[label])) for label, logits in found.items()}
    surprise = {label: _perplexity(logits, questions.passages) for label, logits in found.items()}
    return {"name": name, "logits": distances, "perplexity": surprise if questions.is_text else None}


def _perplexity(logits: Sequence[Tensor], passages: Sequence[Tensor]) -> float:
    """exp of the mean surprise of each token after a passage's first, given those before it."""
    total, count = 0.0, 0
    for scores, ids in zip(logits, passages, strict=True):
        wanted = ids[0, 1:].cpu()
        total -= float(scores[:-1].double().log_softmax(-1).gather(1, wanted[:, None]).sum())
        count += wanted.numel()
    return math.exp(total / count)


def _answers(name: str, model: Any, questions: Questions, twice: bool) -> dict[str, list[list[int]]]:
    """Greedy token ids of each prompt: asked one by one, and all in one batch; one by one again for the noise.

    With the first adapter, where there is one: it is what would be served.
    """
    for label, each in variants(model, questions.adapters[:1]):
        if label == BASE and questions.adapters:
            continue
        alone = [_greedy(each, [ids], questions.tokens)[0] for ids in questions.prompts]
        found = {name: alone, f"{name}, in a batch": _greedy(each, questions.prompts, questions.tokens)}
        if twice:
            found[f"{name}, again"] = [_greedy(each, [ids], questions.tokens)[0] for ids in questions.prompts]
    return found


def _greedy(model: Any, prompts: Sequence[Tensor], tokens: int) -> list[list[int]]:
    """Greedy answers to prompts in one batch, padded on the left; each up to and with its end of text."""
    ends = model.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends])
    pad = next(iter(ends - {None}), 0)
    longest = max(ids.shape[1] for ids in prompts)
    batch = torch.full((len(prompts), longest), pad)
    mask = torch.zeros_like(batch)
    for row, ids in enumerate(prompts):
        batch[row, longest - ids.shape[1] :] = ids[0]
        mask[row, longest - ids.shape[1] :] = 1
    out = model.generate(
        input_ids=batch.to(model.device), attention_mask=mask.to(model.device), max_new_tokens=tokens,
        do_sample=False, temperature=None, top_p=None, top_k=None, pad_token_id=pad,
    )  # fmt: skip
    return [_until_end(row, ends) for row in out[:, longest:].tolist()]


def _until_end(ids: list[int], ends: set[int | None]) -> list[int]:
    for position, token in enumerate(ids):
        if token in ends:
            return ids[: position + 1]
    return ids
