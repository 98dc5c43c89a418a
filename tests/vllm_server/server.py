"""vLLM's OpenAI server as a process, for one test after the other: started once, asked over HTTP, read when it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BOOT_S = 240
STOP_S = 60
# Batches of at most 64 rows, so that on a CPU no 4-bit multiply is one that bitsandbytes does faster.
ARGUMENTS = (
    "--max-model-len", "128", "--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--shutdown-timeout", "20",
)  # fmt: skip
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Completion:
    """A prompt, the tokens that the server added, and their logprobs."""

    model: str
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


class Server:
    """A running server; a context manager. `log` is complete after `stop`."""

    def __init__(self, python: str, model: Path, work: Path, *arguments: str, **environment: str) -> None:
        work.mkdir(parents=True, exist_ok=True)
        self._log = work / "log.txt"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        words = [
            python,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            str(model),
            "--served-model-name",
            "base",
        ]
        words += ["--host", "127.0.0.1", "--port", str(self.port), *ARGUMENTS, *arguments]
        with open(self._log, "w") as log:
            self.process = subprocess.Popen(
                words,
                cwd=work,
                env=clean_environment() | environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def wait(self) -> None:
        """Until it answers. Raises RuntimeError with the end of its log where it does not."""
        deadline = time.monotonic() + BOOT_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                self.get("/health")
                return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.5)
        self.stop()
        raise RuntimeError(f"the server did not start:\n{self.log[-6000:]}")

    def get(self, path: str, body: dict[str, Any] | None = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.read().decode()

    def complete(self, model: str, prompt: list[int], tokens: int = 16) -> Completion:
        body = {
            "model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": 1,
            "return_token_ids": True, "ignore_eos": True,
        }  # fmt: skip
        choice = json.loads(self.get("/v1/completions", body))["choices"][0]
        return Completion(model, prompt, choice["token_ids"], choice["logprobs"]["token_logprobs"])

    def complete_all(self, requests: list[tuple[str, list[int]]]) -> list[Completion]:
        """All at the same time, so that the server batches base and adapters together."""
        with ThreadPoolExecutor(len(requests)) as pool:
            return list(pool.map(lambda request: self.complete(*request), requests))

    def metrics(self) -> dict[str, float]:
        """halfbyte's, by their names and labels."""
        found = re.findall(r"^(halfbyte_\w+_total\{.*\}) (\S+)$", self.get("/metrics"), re.MULTILINE)
        return {name: float(value) for name, value in found}

    def stop(self) -> None:
        """As one stops a service: SIGTERM, and patience."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)  # its own session: nobody else's processes
                self.process.wait()


def clean_environment() -> dict[str, str]:
    """This process's, without what would reach into the other environment, plus ENVIRONMENT."""
    dropped = ("PYTHONPATH", "VIRTUAL_ENV", "PROMETHEUS_MULTIPROC_DIR", "HALFBYTE_DISABLE", "HALFBYTE_BITSANDBYTES")
    return {key: value for key, value in os.environ.items() if key not in dropped} | ENVIRONMENT


def served(log: str) -> tuple[int, int]:
    """(calls served, calls passed on), from the last such line of a log."""
    found = re.findall(r"halfbyte for bitsandbytes: on; ([\d,]+) calls served, ([\d,]+) passed on", log)
    assert found, log[-6000:]
    return int(found[-1][0].replace(",", "")), int(found[-1][1].replace(",", ""))
