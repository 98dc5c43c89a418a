"""Code that vLLM compiled without halfbyte, and finds again in its cache with it: its operators are ours.

With adapters it is other code: compiled without halfbyte it adds them itself, with halfbyte the operator does. Each
must find its own in a cache that has both.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from server import BOOT_S, Completion, complete_all, served, start
from vllm_model import ADAPTERS, LAYERS, MERGED, RANK, VOCABULARY, Answers

NOISE = 0.05


def run(
    python: str,
    model: Path,
    work: Path,
    cache: Path,
    *arguments: str,
    names: Sequence[str] = ("base",),
    **environment: str,
) -> tuple[list[Completion], str]:
    """Some completions, and the log of the server that made them; its compiled code is kept in `cache`."""
    generator = random.Random(1)
    prompts = [[generator.randrange(3, VOCABULARY) for _ in range(length)] for length in (4, 25)]
    caches = {"VLLM_CACHE_ROOT": str(cache / "vllm"), "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor")}
    with start(python, model, work, *arguments, **caches, **environment) as server:
        server.wait(BOOT_S)
        completions = complete_all(server, [(name, prompt) for prompt in prompts for name in names])
        server.stop()
        return completions, server.log


def kernels_in(cache: Path) -> set[str]:
    """Compiled libraries."""
    return {str(path.relative_to(cache)) for path in cache.rglob("*.so")}


def test_off_and_then_on_with_a_warm_cache(python: str, model: Path, answers: Answers, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    plain, log = run(python, model, tmp_path / "off", cache, HALFBYTE_DISABLE="1")
    assert "halfbyte is switched off by HALFBYTE_DISABLE=1" in log
    assert "halfbyte serves" not in log
    assert "halfbyte for bitsandbytes" not in log
    compiled = kernels_in(cache)
    assert compiled, "nothing was compiled: this tests nothing"

    ours, log = run(python, model, tmp_path / "on", cache)
    assert kernels_in(cache) == compiled, "the cache was not used"
    calls, passed_on = served(log)
    assert passed_on == 0
    assert calls >= LAYERS * MERGED * len(ours[0].tokens)
    assert calls % (LAYERS * MERGED) == 0
    for one in (*plain, *ours):
        assert answers.distance("base", one.prompt, one.tokens, one.logprobs) < NOISE, one


def test_adapters_on_off_and_on_again_with_one_cache(
    python: str, model: Path, answers: Answers, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    lora = ["--enable-lora", "--max-loras", "3", "--max-lora-rank", str(RANK), "--lora-modules"]
    lora += [f"{name}={model / name}" for name in ADAPTERS]
    for i, off in enumerate(("0", "1", "0")):
        done, log = run(python, model, tmp_path / str(i), cache, *lora, names=("base", *ADAPTERS), HALFBYTE_DISABLE=off)
        assert ("halfbyte serves" in log) == (off == "0")
        for one in done:
            assert answers.distance(one.model, one.prompt, one.tokens, one.logprobs) < NOISE, (i, one)
