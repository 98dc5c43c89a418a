"""vLLM's server and its `vllm bench serve` as processes: started, asked, stopped. Nothing here imports vLLM.

And `alone`, so that benchmarks which start side by side measure one after the other.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

BOOT_S = 600.0
STOP_S = 60.0
NAME = "base"  # under which it serves the model itself


@contextmanager
def alone(lock: Path | None) -> Iterator[None]:
    """Hold a file's lock for a block, having waited until nobody else does. None: neither."""
    if lock is None:
        yield
        return
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Server:
    """An OpenAI server of vLLM's on a free port of this machine; a context manager.

    python: of the environment that vLLM is in. arguments: of its command line. environment: beside this process's own.
    log: the file for what it prints, complete after `stop`. In a session of its own, so that its workers end with it.
    """

    def __init__(
        self, python: str, model: Path, arguments: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> None:
        self.log_file = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        words = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        words += ["--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(self.port), *arguments]
        with log.open("w") as out:
            self.process = subprocess.Popen(
                words,
                cwd=log.parent,
                env=dict(environment),
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop(STOP_S if error[0] is None else 0.0)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def wait(self, seconds: float = BOOT_S) -> None:
        """Until it answers. Raises RuntimeError with the end of its log where it does not."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                self.ask("/health")
                return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.5)
        self.stop()
        raise RuntimeError(f"the server did not start:\n{self.log[-6000:]}")

    def ask(self, path: str, body: dict[str, Any] | None = None) -> str:
        """The answer to a GET, or to a POST of `body` as JSON."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as response:
            text: str = response.read().decode()
            return text

    def complete(self, model: str, prompt: Sequence[int], tokens: int) -> tuple[list[int], list[float]]:
        """The most likely tokens after a prompt of token ids, one after the other, and their logprobs."""
        body = {
            "model": model, "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "logprobs": 1,
            "return_token_ids": True, "ignore_eos": True,
        }  # fmt: skip
        choice = json.loads(self.ask("/v1/completions", body))["choices"][0]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]

    def stop(self, patience: float = STOP_S) -> None:
        """SIGTERM, and seconds of patience; then the end of its session."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(patience)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


CLIENT = """
import json, os, sys, traceback
answers = os.fdopen(int(sys.argv[1]), "w")
from vllm.entrypoints.cli.main import main
for line in sys.stdin:
    sys.argv = ["vllm", *json.loads(line)]
    problem = None
    try:
        main()
    except BaseException:
        problem = traceback.format_exc()
    print(json.dumps(problem), file=answers, flush=True)
"""


class Client:
    """vLLM's command line, again and again in one process, as importing vLLM takes many seconds; a context manager.

    python: of the environment that vLLM is in. log: the file for what it prints.
    """

    def __init__(self, python: str, environment: Mapping[str, str], log: Path) -> None:
        self.log_file = log
        log.parent.mkdir(parents=True, exist_ok=True)
        reader, writer = os.pipe()
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [python, "-c", CLIENT, str(writer)], stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT,
                env=dict(environment), cwd=log.parent, pass_fds=(writer,), text=True, start_new_session=True,
            )  # fmt: skip
        os.close(writer)
        self.answers = os.fdopen(reader)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.answers.close()

    def run(self, words: Sequence[str]) -> None:
        """`vllm WORDS`. Raises RuntimeError with what it said where that fails."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(list(words)) + "\n")
            self.process.stdin.flush()
        line = self.answers.readline()
        problem = json.loads(line) if line else "the process has ended"
        if problem is not None:
            said = self.log_file.read_text(errors="replace")[-3000:]
            raise RuntimeError(f"vllm {' '.join(words[:2])} failed:\n{said}\n{problem}")
