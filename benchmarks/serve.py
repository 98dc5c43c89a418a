"""What halfbyte changes in a vLLM server, measured from outside with `vllm bench serve`, noise included.

usage: python benchmarks/serve.py MODEL --out rows.jsonl [--users 1,16,32,64] [--adapters 0,1,8] [--adapter-dirs DIR]
                                  [--rounds 1] [--prompt 128] [--tokens 128] [--together] [--boot 600] [--lock FILE]
                                  [-- arguments for the server]

Run it with the Python of vLLM's environment, where halfbyte is installed. For each number of adapters, servers are
started in the order plain, halfbyte, halfbyte, plain (the next round the other way round), each time anew: so each arm
runs twice, and what two runs of one arm differ by is the noise that a difference between the arms has to exceed. Each
server answers random prompts of --prompt tokens with --tokens tokens for every number of users, requests taking the
adapters in turn, and some fixed prompts whose answers are compared: position of the first differing token, and distance
of logprobs up to there, between the arms and between two runs of the plain one.

--together: the servers of a number of adapters start at once and stay, and one at a time is asked, which spares waiting
for them; the GPU must hold them all (-- --gpu-memory-utilization 0.1 --kv-cache-memory-bytes 4294967296).

--boot: the seconds that a server has to start. --lock: wait until no other benchmark that was given this file measures,
and keep it waiting from the start.

--adapter-dirs: a folder with adapters in folders 0, 1, 2, … (PEFT's files). Rows: docs/serving.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from vllm_process import NAME, Client, Server, alone

PLAIN, OURS = "plain", "halfbyte"
ORDER = (PLAIN, OURS, OURS, PLAIN)
PROBES, PROBE_TOKENS = 8, 64  # prompts whose answers are compared, and the answers' length
METRICS = {  # our field -> vLLM's
    "tokens_per_s": "output_throughput",
    "tpot_ms": "median_tpot_ms",
    "tpot_p99_ms": "p99_tpot_ms",
    "itl_ms": "median_itl_ms",
    "itl_p99_ms": "p99_itl_ms",
    "ttft_ms": "median_ttft_ms",
    "ttft_p99_ms": "p99_ttft_ms",
}
LATENCIES = tuple(name for name in METRICS if name != "tokens_per_s")


@dataclass(frozen=True)
class Settings:
    """What is measured, and where."""

    model: Path
    users: Sequence[int] = (1, 16, 32, 64)
    adapters: Sequence[int] = (0, 1, 8)
    adapter_dirs: Path | None = None
    rounds: int = 1
    prompt: int = 128
    tokens: int = 128
    requests: int = 4  # for each user
    boot: int = 600
    together: bool = False
    lock: Path | None = None
    server: Sequence[str] = ()

    def check(self) -> None:
        """Raise ValueError for settings that cannot be measured."""
        most = max(self.adapters)
        if min(self.users) < 1 or min(self.adapters) < 0 or self.rounds < 1:
            raise ValueError("users and rounds start from 1, adapters from 0")
        if most and self.adapter_dirs is None:
            raise ValueError(f"{most} adapters: --adapter-dirs names the folder that they are in")
        for i in range(most):
            config = (self.adapter_dirs or Path()) / str(i) / "adapter_config.json"
            if not config.exists():
                raise ValueError(f"{most} adapters: {config} does not exist")


@dataclass
class Run:
    """One server's life: users -> its metrics, and (prompt, model) -> its answer's tokens and logprobs."""

    arm: str
    speeds: dict[int, dict[str, float]] = field(default_factory=dict)
    answers: dict[tuple[int, str], tuple[list[int], list[float]]] = field(default_factory=dict)


def schedule(rounds: int) -> list[str]:
    """The arms in the order of their servers."""
    return [arm for i in range(rounds) for arm in (ORDER if i % 2 == 0 else tuple(swap(arm) for arm in ORDER))]


def swap(arm: str) -> str:
    return OURS if arm == PLAIN else PLAIN


def server_arguments(settings: Settings, adapters: int) -> list[str]:
    """For vLLM's command line."""
    words = ["--max-num-seqs", str(max(settings.users)), "--no-enable-prefix-caching", "--shutdown-timeout", "20"]
    if adapters:
        assert settings.adapter_dirs is not None
        rank = max(rank_of(settings.adapter_dirs / str(i)) for i in range(adapters))
        # one slot more than adapters: see "On a CPU" in docs/serving.md
        words += ["--enable-lora", "--max-loras", str(adapters + 1), "--max-lora-rank", str(rank), "--lora-modules"]
        words += [f"{i}={settings.adapter_dirs / str(i)}" for i in range(adapters)]
    return [*words, *settings.server]


def rank_of(adapter: Path) -> int:
    """The rank of a LoRA adapter in PEFT's files."""
    rank: int = json.loads((adapter / "adapter_config.json").read_text())["r"]
    return rank


def client_arguments(settings: Settings, url: str, adapters: int, users: int, result: Path) -> list[str]:
    """For `vllm bench serve`."""
    words = ["bench", "serve", "--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions"]
    words += ["--model", NAME, "--tokenizer", str(settings.model), "--dataset-name", "random", "--seed", "0"]
    words += ["--random-input-len", str(settings.prompt), "--random-output-len", str(settings.tokens), "--ignore-eos"]
    words += ["--num-prompts", str(settings.requests * users), "--max-concurrency", str(users)]
    words += ["--num-warmups", str(users), "--temperature", "0", "--disable-tqdm"]
    words += ["--percentile-metrics", "ttft,tpot,itl", "--metric-percentiles", "99"]
    words += ["--save-result", "--result-dir", str(result.parent), "--result-filename", result.name]
    if adapters:
        words += ["--lora-modules", *map(str, range(adapters)), "--lora-assignment", "round-robin"]
    return words


def metrics_of(result: Mapping[str, Any], requests: int) -> dict[str, float]:
    """Our fields from what `vllm bench serve` saved. Raises RuntimeError where requests failed."""
    if result["completed"] != requests:
        raise RuntimeError(f"only {result['completed']} of {requests} requests were answered")
    return {ours: float(result[theirs]) for ours, theirs in METRICS.items()}


def start(settings: Settings, adapters: int, arm: str, work: Path) -> Server:
    """A server of an arm, not ready yet."""
    environment = dict(os.environ)
    environment.pop("HALFBYTE_DISABLE", None)
    if arm == PLAIN:
        environment["HALFBYTE_DISABLE"] = "1"
    if settings.together:  # servers that start at once would write the same files
        environment["VLLM_CACHE_ROOT"] = str(work / "cache")
    arguments = server_arguments(settings, adapters)
    return Server(sys.executable, settings.model, arguments, environment, work / "server.log")


def measure(settings: Settings, adapters: int, runs: Sequence[Run], client: Client, work: Path) -> Iterator[int]:
    """Start a server for each run, ask the fixed prompts, measure one server after the other, and stop all.

    Yields each number of users that all runs have.
    """
    with ExitStack() as stack:
        servers = [stack.enter_context(start(settings, adapters, run.arm, work / str(i))) for i, run in enumerate(runs)]
        for server in servers:
            server.wait(settings.boot)
        for run, server in zip(runs, servers, strict=True):
            for i, prompt in enumerate(probes(settings.prompt)):
                for model in (NAME, str(i % adapters)) if adapters else (NAME,):
                    run.answers[i, model] = server.complete(model, prompt, PROBE_TOKENS)
        for users in settings.users:
            for i, (run, server) in enumerate(zip(runs, servers, strict=True)):
                result = work / str(i) / f"{users}.json"
                client.run(client_arguments(settings, server.url, adapters, users, result))
                run.speeds[users] = metrics_of(json.loads(result.read_text()), settings.requests * users)
            yield users
        for run, server in zip(runs, servers, strict=True):
            server.stop()
            check_arm(run.arm, server.log)


def probes(length: int) -> list[list[int]]:
    """The fixed prompts: token ids below 300, which every vocabulary has."""
    generator = random.Random(0)
    return [[generator.randrange(3, 300) for _ in range(length)] for _ in range(PROBES)]


def check_arm(arm: str, log: str) -> None:
    """Raise RuntimeError unless a server's log says that it was the arm that it should be."""
    on = "halfbyte serves" in log
    if on != (arm == OURS):
        raise RuntimeError(
            f"the server of the arm '{arm}' ran {'with' if on else 'without'} halfbyte; its log:\n{log[-3000:]}"
        )


@dataclass(frozen=True)
class Distance:
    """Two runs' answers to the same prompts.

    first: the median position of the first token that differs, the answer's length where none does. differing: the part
    of the answers in which one does. logprobs: root mean square of the differences of logprobs before it.
    """

    first: float
    differing: float
    logprobs: float


def distance(one: Run, other: Run) -> Distance:
    firsts, squares, differing = [], [], 0
    for key, (tokens, logprobs) in one.answers.items():
        others, other_logprobs = other.answers[key]
        same = next((i for i, pair in enumerate(zip(tokens, others, strict=True)) if pair[0] != pair[1]), len(tokens))
        firsts.append(same)
        differing += same < len(tokens)
        squares += [(logprobs[i] - other_logprobs[i]) ** 2 for i in range(same)]
    rms = math.sqrt(statistics.fmean(squares)) if squares else math.nan
    return Distance(statistics.median(firsts), differing / len(firsts), rms)


def spread(values: Sequence[float]) -> float:
    """What runs of one arm differ by, relative to their median."""
    return (max(values) - min(values)) / statistics.median(values)


def summarise(runs: Sequence[Run], users: int) -> dict[str, dict[str, Any]]:
    """Arm -> its fields: medians of the runs, their spread, and ours over plain.

    `spread` is the larger one of the two arms', of tokens/s. `speedup` is None where the difference lies within it: no
    difference was seen. Latencies have the same in `ratios`, ours over plain, each judged by its own spread.
    """
    arms = {arm: [run.speeds[users] for run in runs if run.arm == arm] for arm in (PLAIN, OURS)}
    middle = {
        arm: {name: statistics.median(row[name] for row in rows) for name in METRICS} for arm, rows in arms.items()
    }
    noise = {name: max(spread([row[name] for row in rows]) for rows in arms.values()) for name in METRICS}

    def ratio(name: str) -> float | None:
        value = middle[OURS][name] / middle[PLAIN][name]
        return value if abs(value - 1) > noise[name] else None

    result: dict[str, dict[str, Any]] = {}
    for arm, rows in arms.items():
        fields: dict[str, Any] = dict(middle[arm])
        fields |= {"spread": noise["tokens_per_s"], "runs": [row["tokens_per_s"] for row in rows]}
        fields["speedup"] = 1.0 if arm == PLAIN else ratio("tokens_per_s")
        fields["ratios"] = None if arm == PLAIN else {name: ratio(name) for name in LATENCIES}
        result[arm] = fields
    return result


def agreement(runs: Sequence[Run]) -> dict[str, dict[str, float]]:
    """Arm -> how far answers are from the first plain run's: those of ours, and of another plain run."""
    plain = [run for run in runs if run.arm == PLAIN]
    pairs = {PLAIN: plain[1], OURS: next(run for run in runs if run.arm == OURS)}
    found = {arm: distance(plain[0], run) for arm, run in pairs.items()}
    return {
        arm: {"answers_first": d.first, "answers_differing": d.differing, "answers_logprobs": d.logprobs}
        for arm, d in found.items()
    }


def rows(
    settings: Settings, adapters: int, runs: Sequence[Run], about: Mapping[str, Any], users: int
) -> Iterator[dict[str, Any]]:
    """The two rows of a number of users, of suite `serve`; about: the fields that all rows share."""
    answers = agreement(runs)
    config = json.loads((settings.model / "config.json").read_text())
    quantization = config.get("quantization_config") or {}
    nested = bool(quantization.get("bnb_4bit_use_double_quant", not quantization))  # in flight vLLM nests
    family = quantization.get("bnb_4bit_quant_type", "nf4")
    rank = rank_of(settings.adapter_dirs / "0") if adapters and settings.adapter_dirs else 0
    for arm, fields in summarise(runs, users).items():
        yield {
            "suite": "serve",
            **about,
            "kernel": f"halfbyte {about['halfbyte']}" if arm == OURS else f"bitsandbytes {about['bitsandbytes']}",
            "format": f"{family}-64" + ("-nested" if nested else ""),
            "nested": nested,
            "dtype": "bf16",
            "adapters": adapters,
            "rank": rank,
            "engine": f"vllm {about['vllm']}",
            "model": settings.model.name,
            "layers": config.get("num_hidden_layers"),
            "users": users,
            "prompt_tokens": settings.prompt,
            "new_tokens": settings.tokens,
            **fields,
            **answers[arm],
        }


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """What a person reads."""
    lines = ["adapters  users  plain tok/s  halfbyte tok/s  spread  speed-up  TPOT ms      TTFT ms"]
    for plain, ours in zip(records[::2], records[1::2], strict=True):
        gain = "none" if ours["speedup"] is None else f"{ours['speedup']:.2f}"
        lines.append(
            f"{ours['adapters']:8}  {ours['users']:5}  {plain['tokens_per_s']:11.1f}  {ours['tokens_per_s']:14.1f}  "
            f"{ours['spread']:5.1%}  {gain:>8}  {plain['tpot_ms']:.1f} > {ours['tpot_ms']:.1f}  "
            f"{plain['ttft_ms']:.0f} > {ours['ttft_ms']:.0f}"
        )
    return "\n".join(lines)


ABOUT = """
import json, torch
from dataclasses import asdict
from halfbyte.lab.rows import Environment
print(json.dumps(asdict(Environment.of(torch.device("cuda" if torch.cuda.is_available() else "cpu")))))
"""


def about() -> dict[str, Any]:
    """Where and with what; the device is asked by a process that ends, so that no memory of it stays taken."""
    done = subprocess.run([sys.executable, "-c", ABOUT], check=True, capture_output=True, text=True)
    fields: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    for package in ("halfbyte", "bitsandbytes", "vllm"):
        try:
            fields[package] = version(package)
        except PackageNotFoundError as error:
            raise SystemExit(f"{package} is not installed where this Python is: {sys.executable}") from error
    return fields


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def parse(words: Sequence[str]) -> tuple[Settings, Path]:
    words, server = list(words), []
    if "--" in words:
        split = words.index("--")
        words, server = words[:split], words[split + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--users", type=numbers, default=[1, 16, 32, 64])
    parser.add_argument("--adapters", type=numbers, default=[0, 1, 8])
    parser.add_argument("--adapter-dirs", type=Path)
    for name, default in (("rounds", 1), ("prompt", 128), ("tokens", 128), ("requests", 4), ("boot", 600)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--together", action="store_true")
    parser.add_argument("--lock", type=Path)
    given = vars(parser.parse_args(words))
    out = given.pop("out")
    for name in ("model", "adapter_dirs"):
        given[name] = given[name] and given[name].resolve()
    settings = Settings(**given, server=server)
    try:
        settings.check()
    except ValueError as error:
        parser.error(str(error))
    return settings, out


def main() -> None:
    settings, out = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *arguments: sys.exit(143))  # ends the servers, too
    shared = about()
    records: list[dict[str, Any]] = []

    def keep(adapters: int, runs: Sequence[Run], users: int) -> None:
        new = list(rows(settings, adapters, runs, shared, users))
        with out.open("a") as file:
            file.write("".join(json.dumps(record) + "\n" for record in new))
        records.extend(new)
        print("\n".join(table(new).splitlines()[len(records) > len(new) :]), flush=True)

    with alone(settings.lock), tempfile.TemporaryDirectory(prefix="halfbyte-serve-") as folder:
        work = Path(folder)
        with Client(sys.executable, os.environ, work / "client.log") as client:
            for adapters in settings.adapters:
                runs = [Run(arm) for arm in schedule(settings.rounds)]
                if settings.together:
                    for users in measure(settings, adapters, runs, client, work / str(adapters)):
                        keep(adapters, runs, users)
                    continue
                for i, run in enumerate(runs):
                    print(f"{adapters} adapters, server {i + 1}: {run.arm}", file=sys.stderr, flush=True)
                    list(measure(settings, adapters, [run], client, work / f"{adapters}-{i}"))
                for users in settings.users:
                    keep(adapters, runs, users)


if __name__ == "__main__":
    main()
