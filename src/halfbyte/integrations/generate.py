"""Text from a model on halfbyte's layers, with transformers as the engine."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch


@dataclass(frozen=True)
class Generated:
    """What a model said, and how fast. Seconds from the call: to the first new token, and to the last; no loading."""

    text: str
    new_tokens: int
    first_token_s: float
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Of the tokens after the first, whose time is the prompt's; NaN for a single token."""
        return (self.new_tokens - 1) / (self.seconds - self.first_token_s) if self.new_tokens > 1 else float("nan")


def generate(
    path: Path,
    prompt: str,
    tokens: int,
    dtype: torch.dtype,
    device: str = "cpu",
    sample: bool = False,
    stream: TextIO | None = None,
) -> Generated:
    """Load the model at `path` (GGUF file or directory) and answer `prompt` with at most `tokens` new tokens.

    stream: where to print the text as it comes. Raises CheckpointError or ValueError for a model that cannot be loaded.
    """
    from .transformers import load

    model, tokenizer = load(path, dtype=dtype, device_map=device)
    return answer(model, tokenizer, prompt, tokens, sample, stream)


def encode(tokenizer: Any, prompt: str) -> Any:
    """Input ids [1, tokens]: the prompt in the tokenizer's chat template, or as it is where there is none."""
    if tokenizer.chat_template is None:
        return tokenizer(prompt, return_tensors="pt")["input_ids"]
    turns = [{"role": "user", "content": prompt}]
    encoded = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    return encoded["input_ids"]


def answer(
    model: Any,
    tokenizer: Any,
    prompt: str,
    tokens: int,
    sample: bool = False,
    stream: TextIO | None = None,
    min_tokens: int = 0,
) -> Generated:
    """See `generate`, for a model already loaded. min_tokens: go on past an end-of-text until there are so many."""
    ids = encode(tokenizer, prompt).to(model.device)
    options: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": sample, "pad_token_id": tokenizer.eos_token_id}
    if min_tokens:
        options["min_new_tokens"] = min_tokens
    if not sample:  # a checkpoint's sampling settings would only draw warnings
        options |= {"temperature": None, "top_p": None, "top_k": None}
    streamer = _Stream(tokenizer, stream)
    start = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), streamer=streamer, **options)
    seconds = time.perf_counter() - start
    new = out[0, ids.shape[1] :]
    text = tokenizer.decode(new, skip_special_tokens=True)
    return Generated(text, len(new), streamer.first_token_at - start, seconds)


class _Stream:
    """Notes when the first token comes and prints whole words (transformers' streamer interface: put and end)."""

    def __init__(self, tokenizer: Any, file: TextIO | None) -> None:
        self.tokenizer, self.file = tokenizer, file
        self.tokens: list[int] = []
        self.printed = 0
        self.prompt_seen = False
        self.first_token_at = float("nan")

    def put(self, value: torch.Tensor) -> None:
        if not self.prompt_seen:  # the first call brings the prompt
            self.prompt_seen = True
            return
        if not self.tokens:
            self.first_token_at = time.perf_counter()
        self.tokens += value.reshape(-1).tolist()
        if self.file is not None:
            text = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
            ready = text.rfind(" ") + 1
            self._print(text[: max(ready, self.printed)])

    def end(self) -> None:
        if self.file is not None:
            self._print(self.tokenizer.decode(self.tokens, skip_special_tokens=True) + "\n")

    def _print(self, text: str) -> None:
        assert self.file is not None
        self.file.write(text[self.printed :])
        self.file.flush()
        self.printed = len(text)
