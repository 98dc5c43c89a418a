"""What the README tells a newcomer to type works."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text()
COMMANDS = sorted(set(re.findall(r"^    halfbyte (bench [a-z0-9-]+|[a-z]+) ", README, re.M)))


def test_the_python_example_runs():
    example = re.findall(r"```python\n(.*?)```", README, re.S)[0]
    runnable = "\n".join(line for line in example.splitlines() if "OUT_DIR" not in line)
    done = subprocess.run([sys.executable, "-c", runnable], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_commands_were_found():
    assert {"quantize", "inspect", "verify", "generate", "explain", "bench linear"} <= set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_exists(command):
    words = [sys.executable, "-m", "halfbyte", *command.split(), "--help"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_links_lead_somewhere(link):
    assert (Path(__file__).parents[1] / link).exists()


def test_every_result_row_it_names_exists():
    for name in set(re.findall(r"benchmarks/results/[\w.-]+\.jsonl", README)):
        assert (Path(__file__).parents[1] / name).exists(), name
