"""Decode speed of vLLM's engine, plain and with halfbyte: several engines on one GPU, asked in turn, noise included.

usage: python benchmarks/engine.py make DIR [--layers 8] [--adapters 8] [--rank 16]
       python benchmarks/engine.py run DIR --out rows.jsonl [--engines plain-0,halfbyte-0,plain-8,halfbyte-8]
                                   [--users 1,16,32,64] [--tokens 128] [--rounds 1] [--bare 16] [--profile 16,64]
                                   [--boot 400] [--lock FILE]

`make` writes a Llama of random weights in the layer shapes of a 24B model (bf16; vLLM quantises it to NF4 while it
loads), and LoRA adapters in DIR/adapters. `run` starts engines, named by arm and number of adapters, all at once, so
that their minute of start-up is paid once; then one engine works at a time, in the order plain, halfbyte, halfbyte,
plain for each number of users. What two runs of one arm differ by is the noise. The arm `beside` is halfbyte with
vLLM's own LoRA kernels beside it, to see what folding adapters gains, `variant` is halfbyte with
HALFBYTE_BATCH_INVARIANT=0. An arm with @2, as in halfbyte@2-0, is one on two
tensor-parallel ranks. Answers are compared with those of plain on one rank, or else of the first engine that was named,
which itself is asked twice. `serve.py` asks whole servers instead.

Every request decodes --tokens tokens after a prompt of 32, requests taking the adapters in turn; then comes the first
token of a prompt of 2,048, and last, of engines with adapters, requests that use none, for --bare users. --profile:
numbers of users for which a decode step's GPU time, by kernel, goes to FILE.profile.json beside the rows, and where the
thread that launches them was meanwhile, in a run of its own. --boot: the seconds that engines have to start; those that
did not are left out. --lock: measure only while no other benchmark that was given this file does.

Engines run as vLLM starts them, in a process beside the one that asks; what they are given for a quicker start, fewer
sizes of CUDA graphs and a warm-up of the sampler's greedy kernels only, is the same for all arms.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine_profile import (
    SAMPLED,
    TRACED,
    decode_steps,
    describe,
    shares,
    start_trace,
    start_watch,
    stop_trace,
    stop_watch,
)
from vllm_process import alone

PLAIN, OURS, BESIDE, VARIANT = "plain", "halfbyte", "beside", "variant"
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PROMPT = 32
FIRST, FIRST_ROUNDS = 2048, 3  # tokens of the prompt whose first token is waited for, and how often A, B, B, A
PROBES, PROBE_TOKENS = 16, 16  # requests whose answers are compared, and the answers' length
SHORT = 8  # tokens of a run that is mostly its prompts
KV_BYTES = 4 << 30
HIDDEN, MLP, HEADS, KV_HEADS, HEAD, VOCABULARY = 5120, 32768, 32, 8, 128, 32768


# ---- the model


def shapes() -> dict[str, tuple[int, int]]:
    """Each linear layer's [N, K], under its name in a checkpoint."""
    rows, few = HEADS * HEAD, KV_HEADS * HEAD
    return {
        "self_attn.q_proj": (rows, HIDDEN),
        "self_attn.k_proj": (few, HIDDEN),
        "self_attn.v_proj": (few, HIDDEN),
        "self_attn.o_proj": (HIDDEN, rows),
        "mlp.gate_proj": (MLP, HIDDEN),
        "mlp.up_proj": (MLP, HIDDEN),
        "mlp.down_proj": (HIDDEN, MLP),
    }


def make(target: Path, layers: int, adapters: int, rank: int) -> None:
    """The checkpoint, its tokenizer and the adapters; weights as Llama's are before training."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    target.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int, scale: float = 0.02) -> torch.Tensor:
        return (torch.randn(shape, generator=generator, device=device) * scale).to(torch.bfloat16).cpu()

    def save(tensors: dict[str, torch.Tensor], file: Path) -> None:
        save_file(tensors, file, metadata={"format": "pt"})

    places: dict[str, str] = {}
    for layer in range(-1, layers):
        if layer < 0:
            tensors = {
                "model.embed_tokens.weight": draw(VOCABULARY, HIDDEN),
                "lm_head.weight": draw(VOCABULARY, HIDDEN),
            }
            tensors["model.norm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
        else:
            tensors = {f"model.layers.{layer}.{name}.weight": draw(*shape) for name, shape in shapes().items()}
            for norm in ("input_layernorm", "post_attention_layernorm"):
                tensors[f"model.layers.{layer}.{norm}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
        file = f"model-{layer + 1:05d}.safetensors"
        save(tensors, target / file)
        places |= dict.fromkeys(tensors, file)
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    for i in range(adapters):
        folder = target / "adapters" / str(i)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {}
        for layer in range(layers):
            for name, (n, k) in shapes().items():
                place = f"base_model.model.model.layers.{layer}.{name}"
                tensors[f"{place}.lora_A.weight"] = draw(rank, k, scale=k**-0.5)
                tensors[f"{place}.lora_B.weight"] = draw(n, rank, scale=0.02)
        save(tensors, folder / "adapter_model.safetensors")
        about = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "bias": "none"}
        about |= {"target_modules": list(MODULES), "base_model_name_or_path": str(target)}
        (folder / "adapter_config.json").write_text(json.dumps(about))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["the quick brown fox"], trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(target)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=MLP, num_hidden_layers=layers,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD, max_position_embeddings=4096,
        bos_token_id=0, eos_token_id=1, pad_token_id=2, tie_word_embeddings=False, dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(target)  # last: who waits for the model waits for this file


# ---- an engine, in a process of its own


def serve_engine(model: Path, arm: str, adapters: int, users: int, answers: int, eager: bool) -> None:
    """Start an engine, then do what each line of standard input asks, answering with a line in the file `answers`."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # functions are sent to the engine's process
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    start = time.perf_counter()
    from vllm import LLM, SamplingParams
    from vllm.model_executor.models import registry

    arm, ranks = ranks_of(arm)
    if arm != PLAIN:  # the engine's process is forked from this one
        from halfbyte.integrations import vllm_lora
        from halfbyte.integrations.vllm import register

        if arm == BESIDE:
            vllm_lora.enable = lambda *arguments: None
        register()
    registry._run_in_subprocess = lambda function: function()  # a second import of vLLM would take 20 seconds
    # Kernels of penalties, top-k and masks would be compiled for 16 seconds; requests here are greedy.
    SamplingParams.for_sampler_warmup = staticmethod(lambda: SamplingParams(temperature=0, logprobs=1))
    imported = time.perf_counter()
    while not (model / "config.json").exists():
        time.sleep(0.2)
    options: dict[str, Any] = {"tensor_parallel_size": ranks}
    if adapters:
        options |= {"enable_lora": True, "max_loras": adapters, "max_lora_rank": shared_rank(model)}
    if not eager:
        options["compilation_config"] = {"cudagraph_capture_sizes": graph_sizes(users)}
    llm = LLM(
        model=str(model), dtype="bfloat16", max_model_len=FIRST + 256, max_num_seqs=users, enable_prefix_caching=False,
        quantization="bitsandbytes", load_format="bitsandbytes", kv_cache_memory_bytes=KV_BYTES, enforce_eager=eager,
        gpu_memory_utilization=0.1,  # of which vLLM asks whether it is free, no more: engines share the GPU
        **options,
    )  # fmt: skip
    engine = Engine(llm, model, adapters)
    with os.fdopen(answers, "w") as out:

        def answer(value: Any) -> None:
            out.write(json.dumps(value) + "\n")
            out.flush()

        answer({"ready_s": time.perf_counter() - start, "imported_s": imported - start})
        for line in sys.stdin:
            words = json.loads(line)
            try:
                answer(getattr(engine, words.pop("do"))(**words))
            except Exception:
                answer({"error": traceback.format_exc()})


def graph_sizes(users: int) -> list[int]:
    """Batches that CUDA graphs are captured for: powers of two up to the most users, and these."""
    return sorted({users, *(1 << i for i in range(users.bit_length()))})


# what the engine's process is asked for; `worker` is vLLM's


def read_counters(worker: Any) -> dict[str, Any]:
    """What halfbyte served and passed on there; a replayed graph counts once, when it was captured."""
    from halfbyte.counters import counts

    served, passed = counts.totals()
    return {"served": served, "passed": passed}


class Engine:
    """What a `run` asks of an engine."""

    def __init__(self, llm: Any, model: Path, adapters: int) -> None:
        from vllm.lora.request import LoRARequest

        self.llm = llm
        self.loras = [LoRARequest(str(i), i + 1, str(model / "adapters" / str(i))) for i in range(adapters)]

    def _generate(
        self, users: int, tokens: int, seed: int, prompt: int = PROMPT, adapted: bool = True, **sampling: Any
    ) -> Any:
        from vllm import SamplingParams

        generator = random.Random(seed)
        prompts = [{"prompt_token_ids": [generator.randint(3, 300) for _ in range(prompt)]} for _ in range(users)]
        chosen = [self.loras[i % len(self.loras)] for i in range(users)] if self.loras and adapted else None
        wanted = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **sampling)
        return self.llm.generate(prompts, wanted, lora_request=chosen, use_tqdm=False)

    def time(self, users: int, tokens: int, seed: int, prompt: int, adapted: bool) -> float:
        """Seconds from the first request to the last answer."""
        start = time.perf_counter()
        self._generate(users, tokens, seed, prompt, adapted)
        return time.perf_counter() - start

    def answers(self) -> list[dict[str, Any]]:
        """Greedy answers to fixed prompts, and their logprobs."""
        found = []
        for output in self._generate(PROBES, PROBE_TOKENS, -1, logprobs=1):
            choice = output.outputs[0]
            pairs = zip(choice.token_ids, choice.logprobs, strict=True)
            logprobs = [table[token].logprob for token, table in pairs]
            found.append({"tokens": list(choice.token_ids), "logprobs": logprobs})
        return found

    def profile(self, users: int) -> dict[str, Any]:
        """`decode_steps` of this many users, if they can be told apart, and the host's `shares`."""
        self.llm.collective_rpc(start_watch)
        self._generate(users, SAMPLED, 1)
        found: dict[str, Any] = {"users": users, "host": shares(self.llm.collective_rpc(stop_watch)[0])}
        self.llm.collective_rpc(start_trace)
        self._generate(users, 2 * TRACED, 1)
        kernels = self.llm.collective_rpc(stop_trace)[0]
        try:
            return found | decode_steps(kernels, TRACED)
        except RuntimeError as error:
            return found | {"error": str(error), "kernels": []}

    def counters(self) -> dict[str, Any]:
        """See `read_counters`."""
        found: dict[str, Any] = self.llm.collective_rpc(read_counters)[0]
        return found


# ---- asking them


@dataclass(frozen=True)
class Settings:
    """What is measured."""

    model: Path
    out: Path
    engines: Sequence[tuple[str, int]]
    users: Sequence[int]
    tokens: int
    rounds: int
    bare: Sequence[int]
    profile: Sequence[int]
    boot: int
    eager: bool
    lock: Path | None = None


class Child:
    """An engine's process."""

    def __init__(self, settings: Settings, arm: str, adapters: int) -> None:
        self.arm, self.adapters = arm, adapters
        self.name = f"{arm}-{adapters}"
        self.log = settings.out.with_name(f"{settings.out.stem}.{self.name}.log")
        reader, writer = os.pipe()
        words = [sys.executable, __file__, "engine", str(settings.model), "--arm", arm, "--adapters", str(adapters)]
        words += ["--users", str(max(settings.users)), "--answers", str(writer), *["--eager"] * settings.eager]
        environment = dict(os.environ)
        environment["HALFBYTE_DISABLE"] = "1" if ranks_of(arm)[0] == PLAIN else "0"
        environment["HALFBYTE_BATCH_INVARIANT"] = "0" if ranks_of(arm)[0] == VARIANT else "1"
        for name in ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR"):  # as on machines of their own
            environment[name] = f"{tempfile.gettempdir()}/halfbyte-engine/{self.name}/{name.lower()}"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, pass_fds=(writer,), text=True,
                env=environment, start_new_session=True,
            )  # fmt: skip
        os.close(writer)
        self.answers = os.fdopen(reader)
        self.imported = 0.0
        self.ready: float | None = None
        self.thread = threading.Thread(target=self._wait, daemon=True)
        self.thread.start()

    def _wait(self) -> None:
        line = self.answers.readline()
        if line:
            value = json.loads(line)
            self.imported, self.ready = value["imported_s"], value["ready_s"]

    def ask(self, do: str, **words: Any) -> Any:
        """What the engine's method returns. Raises RuntimeError with the end of its log where it has ended."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"do": do, **words}) + "\n")
            self.process.stdin.flush()
            line = self.answers.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RuntimeError(f"the engine {self.name} ended:\n{self.log.read_text(errors='replace')[-3000:]}")
        value = json.loads(line)
        if isinstance(value, dict) and "error" in value:
            raise RuntimeError(f"the engine {self.name} cannot {do}:\n{value['error']}")
        return value

    def stop(self, patience: float) -> None:
        """End it, and the engine's process with it, after so many seconds at most."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(patience)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def run(settings: Settings) -> None:
    """Start all, measure, append rows as they come. A SIGTERM ends the engines, too."""
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *arguments: sys.exit(143))
    children = [Child(settings, *each) for each in settings.engines]
    with ExitStack() as waits:
        waits.callback(stop, children)
        wait_for(children, settings.boot)
        started = [each for each in children if each.ready is not None]
        waits.enter_context(alone(settings.lock))
        shared = about()
        for adapters in dict.fromkeys(child.adapters for child in started):
            pair = {child.arm: child for child in started if child.adapters == adapters}
            try:
                for row in measure(settings, pair, shared):
                    with settings.out.open("a") as file:
                        file.write(json.dumps(row) + "\n")
            except RuntimeError as error:
                print(error, flush=True)
        traces: list[Any] = []
        for users in settings.profile:
            for child in started:
                try:
                    traces.append((child.name, child.ask("profile", users=users)))
                except RuntimeError as error:
                    print(error, flush=True)
                    continue
                settings.out.with_suffix(".profile.json").write_text(json.dumps(traces, indent=1))
                print("\n".join(describe(*traces[-1])), flush=True)


def stop(children: Sequence[Child]) -> None:
    """End all; those that started may take a while for it."""
    for child in children:
        child.stop(5.0 if child.ready is not None else 0.0)


def wait_for(children: Sequence[Child], seconds: int) -> None:
    """Wait until all have started or ended, or the time is over, and print how it went."""
    deadline = time.monotonic() + seconds
    for child in children:
        child.thread.join(max(0.0, deadline - time.monotonic()))
        if child.ready is None:
            print(f"{child.name}: did not start\n{child.log.read_text(errors='replace')[-2500:]}", flush=True)
        else:
            print(f"{child.name}: ready after {child.ready:.0f} s, {child.imported:.0f} s of imports", flush=True)


def measure(settings: Settings, pair: Mapping[str, Child], shared: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows of the arms that started, each case's as soon as it is done."""
    answers = {arm: child.ask("answers") for arm, child in pair.items()}
    first = PLAIN if PLAIN in pair else next(iter(pair))
    again = pair[first].ask("answers") if len(pair) > 1 else None
    labels = {PLAIN: f"bitsandbytes {shared['bitsandbytes']}", OURS: f"halfbyte {shared['halfbyte']}"}
    labels |= {BESIDE: f"{labels[OURS]}, adapters by vllm {shared['vllm']}", VARIANT: labels[OURS]}
    for rounds, case in cases(settings, any(child.adapters for child in pair.values())):
        users, prompt, tokens, adapted = (case[name] for name in ("users", "prompt", "tokens", "adapted"))
        short = timed(pair, rounds, {**case, "tokens": min(tokens, SHORT)})  # a warm-up, too
        seconds = timed(pair, rounds, case)
        for name, child in pair.items():
            arm, ranks = ranks_of(name)
            speeds = [users * tokens / each for each in seconds[name]]
            middle = statistics.median(speeds)
            compared = again if name == first else answers[name]
            row = {
                "suite": "serve",
                **shared,
                "kernel": labels[arm],
                "format": "nf4-64",
                "nested": False,  # vLLM expands the scales when it loads
                "dtype": "bf16",
                **({"batch_invariant": False} if arm == VARIANT else {}),
                "adapters": child.adapters,
                **({"adapters_in_use": 0} if child.adapters and not adapted else {}),
                "rank": shared_rank(settings.model) if child.adapters else 0,
                "engine": f"vllm {shared['vllm']} LLM" + (f", {ranks} ranks" if ranks > 1 else ""),
                "model": "24b-shapes",
                "layers": json.loads((settings.model / "config.json").read_text())["num_hidden_layers"],
                "users": users,
                "prompt_tokens": prompt,
                "new_tokens": tokens,
                "tokens_per_s": middle,
                "tpot_ms": users / middle * 1e3,
                **({"step_ms": step_ms(seconds[name], short[name], tokens)} if tokens > SHORT else {}),
                **({"ttft_ms": statistics.median(seconds[name]) * 1e3} if tokens == 1 else {}),
                "spread": (max(speeds) - min(speeds)) / middle,
                "runs": speeds,
                **(distance(answers[first], compared) if again and compared else {}),
                "counters": None if arm == PLAIN else child.ask("counters"),
            }
            brief = f"{row['tokens_per_s']:.0f} tokens/s, {row['tpot_ms']:.3f} ms each, spread {row['spread']:.1%}"
            bare = " with no adapter in use" if child.adapters and not adapted else ""
            print(f"{child.name}: {users} users, {prompt} + {tokens} tokens{bare}: {brief}", flush=True)
            yield row


def cases(settings: Settings, adapters: bool) -> Iterator[tuple[int, dict[str, int]]]:
    """What engines with adapters or without are timed at, and how often A, B, B, A; see the module."""
    decode = {"prompt": PROMPT, "tokens": settings.tokens, "adapted": adapters}
    for users in settings.users:
        yield settings.rounds, decode | {"users": users}
    yield max(settings.rounds, FIRST_ROUNDS), {"users": 1, "prompt": FIRST, "tokens": 1, "adapted": adapters}
    if adapters:
        for users in settings.bare:
            yield settings.rounds, decode | {"users": users, "adapted": False}


def timed(pair: Mapping[str, Child], rounds: int, case: Mapping[str, int]) -> dict[str, list[float]]:
    """Each arm's seconds for a case, run by run, in the order A, B, B, A, …"""
    there = list(pair)
    seconds: dict[str, list[float]] = {arm: [] for arm in there}
    for i, arm in enumerate((there + there[::-1]) * rounds):
        seconds[arm].append(pair[arm].ask("time", seed=i, **case))
    return seconds


def step_ms(long: Sequence[float], short: Sequence[float], tokens: int) -> float:
    """A decode step alone, from the seconds of runs of so many tokens and of runs of SHORT tokens."""
    return (statistics.median(long) - statistics.median(short)) / (tokens - SHORT) * 1e3


def shared_rank(model: Path) -> int:
    """The adapters' rank."""
    rank: int = json.loads((model / "adapters" / "0" / "adapter_config.json").read_text())["r"]
    return rank


def distance(one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """As serve.py's: where answers first differ (median), which part of them does, and their logprobs before it."""
    from serve import Run
    from serve import distance as of_runs

    runs = [Run("", {}, {(i, ""): (a["tokens"], a["logprobs"]) for i, a in enumerate(each)}) for each in (one, other)]
    return {f"answers_{name}": value for name, value in asdict(of_runs(*runs)).items()}


def about() -> dict[str, Any]:
    """Where and with what."""
    from importlib.metadata import version

    import torch

    import halfbyte
    from halfbyte.lab.rows import Environment

    fields = asdict(Environment.of(torch.device("cuda" if torch.cuda.is_available() else "cpu")))
    fields["halfbyte"] = halfbyte.__version__
    for package in ("bitsandbytes", "vllm"):
        fields[package] = version(package)
    return fields


def ranks_of(name: str) -> tuple[str, int]:
    """An arm, and its number of tensor-parallel ranks."""
    arm, _, ranks = name.partition("@")
    return arm, int(ranks or 1)


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def engines(text: str) -> list[tuple[str, int]]:
    """Arms and numbers of adapters."""
    found = [word.rpartition("-") for word in text.split(",")]
    if any(ranks_of(arm)[0] not in (PLAIN, OURS, BESIDE, VARIANT) for arm, _, _ in found):
        raise ValueError(f"engines are named {PLAIN}-0, {OURS}@2-8 and the like, not {text}")
    return [(arm, int(adapters)) for arm, _, adapters in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make")
    for name, default in (("layers", 8), ("adapters", 8), ("rank", 16)):
        making.add_argument(f"--{name}", type=int, default=default)
    running = commands.add_parser("run")
    running.add_argument("--out", type=Path, required=True)
    running.add_argument("--engines", type=engines, default="plain-0,halfbyte-0,plain-8,halfbyte-8")
    running.add_argument("--lock", type=Path)
    running.add_argument("--users", type=numbers, default=[1, 16, 32, 64])
    running.add_argument("--bare", type=numbers, default=[16])
    running.add_argument("--profile", type=numbers, default=[])
    for name, default in (("tokens", 128), ("rounds", 1), ("boot", 400)):
        running.add_argument(f"--{name}", type=int, default=default)
    engine = commands.add_parser("engine")  # what `run` starts
    engine.add_argument("--arm", required=True)
    for name in ("adapters", "users", "answers"):
        engine.add_argument(f"--{name}", type=int, required=True)
    for each in (making, running, engine):
        each.add_argument("model", type=lambda word: Path(word).resolve())
    for each in (running, engine):
        each.add_argument("--eager", action="store_true", help="no CUDA graphs, nothing compiled")
    given = vars(parser.parse_args())
    command = given.pop("command")
    if command == "make":
        make(given.pop("model"), **given)
    elif command == "run":
        run(Settings(**given))
    else:
        serve_engine(**given)


if __name__ == "__main__":
    main()
