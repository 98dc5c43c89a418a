"""Code that vLLM compiled without halfbyte, and finds again in its cache with it: its operators are ours."""

from __future__ import annotations

import random
from pathlib import Path

from server import BOOT_S, Completion, complete_all, served, start
from vllm_model import LAYERS, MERGED, VOCABULARY, Answers

NOISE = 0.05


def run(python: str, model: Path, work: Path, cache: Path, **environment: str) -> tuple[list[Completion], str]:
    """Some completions, and the log of the server that made them; its compiled code is kept in `cache`."""
    generator = random.Random(1)
    prompts = [[generator.randrange(3, VOCABULARY) for _ in range(length)] for length in (4, 25)]
    caches = {"VLLM_CACHE_ROOT": str(cache / "vllm"), "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor")}
    with start(python, model, work, **caches, **environment) as server:
        server.wait(BOOT_S)
        completions = complete_all(server, [("base", prompt) for prompt in prompts])
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
