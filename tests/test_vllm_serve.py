"""benchmarks/serve.py, but for the servers: order, arguments, what counts as a difference, and the rows."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import serve
from vllm_process import Client, Server, alone

ABOUT = {"device": "a GPU", "halfbyte": "0.1.0", "bitsandbytes": "0.50.2", "vllm": "0.32.0"}


def run_of(arm: str, speed: float, tpot: float = 10.0, users: tuple[int, ...] = (1, 16)) -> serve.Run:
    metrics = dict.fromkeys(serve.METRICS, 1.0) | {"tokens_per_s": speed, "tpot_ms": tpot}
    run = serve.Run(arm, dict.fromkeys(users, metrics))
    run.answers[0, "base"] = ([1, 2, 3, 4], [-1.0, -1.0, -1.0, -1.0])
    return run


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"num_hidden_layers": 8}))
    for i in range(2):
        (tmp_path / "adapters" / str(i)).mkdir(parents=True)
        (tmp_path / "adapters" / str(i) / "adapter_config.json").write_text(json.dumps({"r": 8 * (i + 1)}))
    return tmp_path / "model"


def settings_of(model: Path, *words: str) -> serve.Settings:
    return serve.parse([str(model), "--out", "rows.jsonl", *words])[0]


def test_each_arm_runs_twice_and_neither_always_first() -> None:
    for rounds in (1, 2, 3):
        order = serve.schedule(rounds)
        assert order.count(serve.PLAIN) == order.count(serve.OURS) == 2 * rounds
    assert serve.schedule(2)[0] != serve.schedule(2)[4]
    # of the places in a round both arms have the same sum, so a drift of the machine hits both alike
    assert sum(i for i, arm in enumerate(serve.ORDER) if arm == serve.PLAIN) == 3


def test_a_difference_within_the_spread_is_none() -> None:
    same = [run_of("plain", 100), run_of("halfbyte", 108), run_of("halfbyte", 104), run_of("plain", 112)]
    fields = serve.summarise(same, 1)["halfbyte"]
    assert fields["spread"] == pytest.approx(12 / 106)
    assert fields["speedup"] is None
    assert serve.summarise(same, 1)["plain"]["tokens_per_s"] == 106
    faster = [run_of("plain", 100), run_of("halfbyte", 208), run_of("halfbyte", 204), run_of("plain", 112)]
    assert serve.summarise(faster, 16)["halfbyte"]["speedup"] == pytest.approx(206 / 106)
    noisy = [run_of("plain", 100), run_of("halfbyte", 100), run_of("halfbyte", 250), run_of("plain", 100)]
    assert serve.summarise(noisy, 1)["halfbyte"]["speedup"] is None  # our own runs' noise counts, too


def test_latencies_are_judged_by_their_own_spread() -> None:
    runs = [
        run_of("plain", 100, 10),
        run_of("halfbyte", 100, 5),
        run_of("halfbyte", 100, 5.1),
        run_of("plain", 120, 10.1),
    ]
    ratios = serve.summarise(runs, 1)["halfbyte"]["ratios"]
    assert ratios["tpot_ms"] == pytest.approx(5.05 / 10.05)
    assert ratios["ttft_ms"] is None


def test_answers_are_compared_up_to_where_they_part() -> None:
    one, other = run_of("plain", 1), run_of("halfbyte", 1)
    assert serve.distance(one, other) == serve.Distance(4, 0.0, 0.0)
    other.answers[0, "base"] = ([1, 2, 9, 4], [-1.0, -1.2, -7.0, -7.0])
    found = serve.distance(one, other)
    assert found.first == 2
    assert found.differing == 1.0
    assert found.logprobs == pytest.approx((0.04 / 2) ** 0.5)
    agreement = serve.agreement([one, other, other, run_of("plain", 1)])
    assert agreement["plain"]["answers_first"] == 4  # plain against plain: the noise floor
    assert agreement["halfbyte"]["answers_first"] == 2


def test_rows_have_the_suite_s_fields(model: Path) -> None:
    settings = settings_of(
        model, "--users", "1,16", "--adapters", "2", "--adapter-dirs", str(model.parent / "adapters")
    )
    runs = [run_of("plain", 100), run_of("halfbyte", 208), run_of("halfbyte", 204), run_of("plain", 112)]
    records = [row for users in settings.users for row in serve.rows(settings, 2, runs, ABOUT, users)]
    assert [(row["users"], row["kernel"]) for row in records] == [
        (1, "bitsandbytes 0.50.2"), (1, "halfbyte 0.1.0"), (16, "bitsandbytes 0.50.2"), (16, "halfbyte 0.1.0"),
    ]  # fmt: skip
    for row in records:
        assert row["suite"] == "serve"
        assert (row["adapters"], row["rank"], row["layers"], row["engine"]) == (2, 8, 8, "vllm 0.32.0")
        assert {"tokens_per_s", "tpot_ms", "itl_p99_ms", "ttft_ms", "spread", "answers_first"} <= row.keys()
        assert row["format"] == "nf4-64-nested"
        json.dumps(row)
    text = serve.table(records)
    assert "1.94" in text
    assert len(text.splitlines()) == 3


def test_arguments_for_server_and_client(model: Path) -> None:
    words = ["--adapters", "0,2", "--adapter-dirs", str(model.parent / "adapters"), "--users", "1,32", "--", "-tp", "2"]
    settings = settings_of(model, *words)
    plain, lora = serve.server_arguments(settings, 0), serve.server_arguments(settings, 2)
    assert plain[-2:] == lora[-2:] == ["-tp", "2"]
    assert "--enable-lora" not in plain
    assert lora[lora.index("--max-lora-rank") + 1] == "16"
    assert plain[plain.index("--max-num-seqs") + 1] == "32"
    client = serve.client_arguments(settings, "http://127.0.0.1:1", 2, 32, Path("/somewhere/32.json"))
    assert client[client.index("--max-concurrency") + 1] == "32"
    assert client[client.index("--lora-modules") + 1 :][:2] == ["0", "1"]


def test_settings_that_cannot_be_measured_are_refused(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, reason in (
        (["--adapters", "1"], "--adapter-dirs"),
        (["--adapters", "3", "--adapter-dirs", str(model.parent / "adapters")], "2/adapter_config.json does not exist"),
        (["--adapters", "0", "--users", "0"], "users and rounds start from 1"),
    ):
        with pytest.raises(SystemExit):
            settings_of(model, *words)
        assert reason in capsys.readouterr().err


def test_failed_requests_and_the_wrong_arm_are_errors() -> None:
    result = dict.fromkeys(serve.METRICS.values(), 1.0) | {"completed": 3}
    assert serve.metrics_of(result, 3)["tpot_ms"] == 1.0
    with pytest.raises(RuntimeError, match="only 3 of 4"):
        serve.metrics_of(result, 4)
    serve.check_arm("plain", "nothing")
    serve.check_arm("halfbyte", "halfbyte serves 2 ×")
    with pytest.raises(RuntimeError, match="without halfbyte"):
        serve.check_arm("halfbyte", "nothing")
    with pytest.raises(RuntimeError, match="with halfbyte"):
        serve.check_arm("plain", "halfbyte serves 2 ×")


STAND_IN = """
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def answer(self, text):
        self.send_response(200); self.end_headers(); self.wfile.write(text.encode())
    def do_GET(self):
        self.answer("ok")
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        count = body["max_tokens"]
        choice = {"token_ids": body["prompt"][:count], "logprobs": {"token_logprobs": [-1.0] * count}}
        self.answer(json.dumps({"choices": [choice]}))
    def log_message(self, *words): pass
print("arguments", sys.argv[1:], flush=True)
if os.environ.get("HALFBYTE_DISABLE") != "1":
    print("halfbyte serves 1 x", flush=True)
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def stand_in(tmp_path: Path, code: str) -> dict[str, str]:
    """An environment in which vLLM's server is `code`."""
    package = tmp_path / "site" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    (package / "api_server.py").write_text(code)
    return {"PYTHONPATH": str(tmp_path / "site")}


def test_a_server_is_started_asked_and_stopped(tmp_path: Path) -> None:
    environment = stand_in(tmp_path, STAND_IN)
    with Server(sys.executable, Path("a-model"), ["--more"], environment, tmp_path / "work" / "log") as server:
        server.wait()
        assert server.complete("base", [7, 8], 2) == ([7, 8], [-1.0, -1.0])
    assert server.process.poll() is not None
    assert "'a-model'" in server.log
    assert "'--more'" in server.log


def test_a_server_is_not_waited_for_after_an_error(tmp_path: Path) -> None:
    code = (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(600)"
    )
    start = time.monotonic()
    server = Server(sys.executable, Path("a-model"), [], stand_in(tmp_path, code), tmp_path / "log")
    while "up" not in server.log:
        time.sleep(0.05)
    server.__exit__(SystemExit, SystemExit(143), None)
    assert server.process.poll() is not None
    assert time.monotonic() - start < 30


def test_a_server_that_ends_at_once_is_an_error_with_its_log(tmp_path: Path) -> None:
    environment = stand_in(tmp_path, "raise SystemExit('no such model')")
    start = time.monotonic()
    with (
        Server(sys.executable, Path("a-model"), [], environment, tmp_path / "log") as server,
        pytest.raises(RuntimeError, match="no such model"),
    ):
        server.wait()
    assert time.monotonic() - start < 30


def test_parse_takes_what_the_usage_says(model: Path) -> None:
    settings, out = serve.parse(
        [str(model), "--out", "rows.jsonl", "--adapters", "0", "--rounds", "2", "--tokens", "32"]
    )
    assert out == Path("rows.jsonl")
    assert (settings.rounds, settings.tokens, settings.users, list(settings.server)) == (2, 32, [1, 16, 32, 64], [])


BENCH = """
import json, os, pathlib, sys
def main():
    words = sys.argv
    if words[1:3] != ["bench", "serve"]:
        raise SystemExit("no such command")
    said = {each: words[words.index(each) + 1] for each in words if each.startswith("--") and each != words[-1]}
    with open(os.environ["ASKED"], "a") as asked:
        print(os.getpid(), said["--base-url"], said["--max-concurrency"], file=asked)
    result = dict.fromkeys(METRICS, 2.0) | {"completed": int(said["--num-prompts"])}
    (pathlib.Path(said["--result-dir"]) / said["--result-filename"]).write_text(json.dumps(result))
""".replace("METRICS", repr(list(serve.METRICS.values())))


def stand_in_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bench: str) -> Path:
    """vLLM's server and command line are stand-ins; the file that says which server was asked, and by which process."""
    environment = stand_in(tmp_path, STAND_IN)
    (tmp_path / "site" / "vllm" / "entrypoints" / "cli").mkdir()
    (tmp_path / "site" / "vllm" / "entrypoints" / "cli" / "main.py").write_text(bench)
    monkeypatch.setenv("PYTHONPATH", environment["PYTHONPATH"])
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    monkeypatch.delenv("HALFBYTE_DISABLE", raising=False)
    monkeypatch.setattr(serve, "about", lambda: ABOUT)
    monkeypatch.setattr(serve.signal, "signal", lambda *arguments: None)
    return tmp_path / "asked"


@pytest.mark.parametrize("together", [True, False])
def test_servers_one_by_one_or_together_give_the_same_rows(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    asked = stand_in_for_all(tmp_path, monkeypatch, BENCH)
    out = tmp_path / "rows.jsonl"
    words = [str(model), "--out", str(out), "--users", "1,4", "--adapters", "0", *["--together"] * together]
    monkeypatch.setattr(sys, "argv", ["serve.py", *words])
    serve.main()
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["users"], row["kernel"]) for row in rows] == [
        (1, "bitsandbytes 0.50.2"), (1, "halfbyte 0.1.0"), (4, "bitsandbytes 0.50.2"), (4, "halfbyte 0.1.0"),
    ]  # fmt: skip
    assert all(len(row["runs"]) == 2 for row in rows)
    clients, urls, users = zip(*(line.split() for line in asked.read_text().splitlines()), strict=True)
    assert len(set(clients)) == 1  # one process imported vLLM for all
    assert len(set(urls)) == 4
    assert list(users) == (["1"] * 4 + ["4"] * 4 if together else ["1", "4"] * 4)
    assert list(urls) == ([*urls[:4], *urls[:4]] if together else [url for url in urls[::2] for _ in range(2)])


def test_a_client_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_for_all(tmp_path, monkeypatch, BENCH)
    with Client(sys.executable, dict(os.environ), tmp_path / "client.log") as client:
        with pytest.raises(RuntimeError, match="no such command"):
            client.run(["bench", "latency"])
        client.process.kill()
        client.process.wait()
        with pytest.raises(RuntimeError, match="the process has ended"):
            client.run(["bench", "serve"])


HOLDER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from vllm_process import alone
with alone(Path(sys.argv[2])):
    print("mine", flush=True)
    sys.stdin.readline()
"""


def test_benchmarks_with_one_lock_measure_one_after_the_other(tmp_path: Path) -> None:
    lock, words = tmp_path / "lock", [sys.executable, "-c", HOLDER, str(Path(serve.__file__).parent)]
    holders = []
    for _ in range(2):
        process = subprocess.Popen([*words, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        holders.append(process)
        if len(holders) == 1:
            assert process.stdout.readline() == "mine\n"
    first, second = holders
    assert not select.select([second.stdout], [], [], 1.0)[0]
    first.communicate("\n")
    assert second.stdout.readline() == "mine\n"
    second.communicate("\n")
    with alone(lock), alone(None):
        pass
