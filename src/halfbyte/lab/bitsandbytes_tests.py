"""bitsandbytes' own 4-bit tests, from a checkout of its source, without halfbyte and with it, side by side.

The tests run twice, each time in a process of its own, against the bitsandbytes that is installed; they are copied out
of the checkout first, whose own package has no compiled library.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..integrations.bitsandbytes import VARIABLE
from .bitsandbytes_plugin import REPORT_VARIABLE

KEYWORD = "4bit"
# bitsandbytes' own choice of tests, and the marks that its pyproject.toml declares
INI = """[pytest]
addopts = -m "not slow and not benchmark and not deprecated"
markers =
    slow: slow
    benchmark: a benchmark
    deprecated: of a deprecated feature
"""


@dataclass(frozen=True)
class Comparison:
    """Each test's outcome ("passed", "failed", "skipped", "not collected") without halfbyte and with it.

    served, fallbacks: the switch's counters over the second run.
    """

    checkout_version: str
    installed_version: str
    without: dict[str, str]
    with_halfbyte: dict[str, str]
    served: dict[str, dict[str, dict[str, int]]]
    fallbacks: dict[str, dict[str, int]]
    hits: int

    @property
    def different(self) -> dict[str, tuple[str, str]]:
        """Tests whose outcome depends on halfbyte: (without, with)."""
        names = sorted(self.without.keys() | self.with_halfbyte.keys())
        pairs = {name: (self.without.get(name, "missing"), self.with_halfbyte.get(name, "missing")) for name in names}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    @property
    def broken(self) -> list[str]:
        """Tests that pass without halfbyte and not with it."""
        return [name for name, pair in self.different.items() if pair[0] == "passed"]

    @property
    def ok(self) -> bool:
        """Whether halfbyte was reached, and breaks nothing that passes without it."""
        return self.hits > 0 and not self.broken

    def by_file(self) -> dict[str, tuple[Counter[str], Counter[str]]]:
        """Outcomes counted for each file of tests: (without, with)."""
        files: dict[str, tuple[Counter[str], Counter[str]]] = {}
        for index, outcomes in enumerate((self.without, self.with_halfbyte)):
            for name, outcome in outcomes.items():
                counters = files.setdefault(name.partition("::")[0], (Counter(), Counter()))
                counters[index][outcome] += 1
        return files


def compare(checkout: Path, keyword: str = KEYWORD, progress: Callable[[str], None] = lambda text: None) -> Comparison:
    """Run the tests of `checkout` that match `keyword` (pytest's -k), twice.

    Raises FileNotFoundError where the checkout has no tests, ModuleNotFoundError without pytest or bitsandbytes,
    ValueError where pytest itself failed or no test matches.
    """
    if not list(checkout.glob("tests/test_*.py")):
        raise FileNotFoundError(f"{checkout} has no tests/test_*.py; name a checkout of bitsandbytes' source")
    runs = []
    with tempfile.TemporaryDirectory(prefix="halfbyte-bitsandbytes-") as folder:
        shutil.copytree(checkout / "tests", Path(folder) / "tests")
        (Path(folder) / "pytest.ini").write_text(INI)
        for on in (False, True):
            progress(f"bitsandbytes' tests {'with' if on else 'without'} halfbyte")
            runs.append(_run(Path(folder), keyword, on))
            if not runs[0]["outcomes"]:
                raise ValueError(f"no test of {checkout} matches '{keyword}'")
    without, with_halfbyte = runs
    return Comparison(
        _source_version(checkout),
        version("bitsandbytes"),
        without["outcomes"],
        with_halfbyte["outcomes"],
        with_halfbyte["served"],
        with_halfbyte["fallbacks"],
        with_halfbyte["hits"],
    )


def _run(folder: Path, keyword: str, on: bool) -> dict[str, Any]:
    """The plugin's report of one run."""
    report = folder / f"{'with' if on else 'without'}.json"
    quiet = {key: value for key, value in os.environ.items() if not key.startswith(("HALFBYTE_STATUS", "PYTEST_"))}
    environment = quiet | {VARIABLE: "1" if on else "0", REPORT_VARIABLE: str(report)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "halfbyte.lab.bitsandbytes_plugin"]
    command += ["--continue-on-collection-errors", "-k", keyword, "tests"]  # some files import what is not installed
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if not report.exists():
        raise ValueError(f"pytest did not run the tests: {(done.stderr or done.stdout).strip()[-500:]}")
    result: dict[str, Any] = json.loads(report.read_text())
    return result


def _source_version(checkout: Path) -> str:
    """What the checkout's package calls itself, or "unknown"."""
    source = checkout / "bitsandbytes" / "__init__.py"
    found = re.search(r'__version__ = "([^"]+)"', source.read_text()) if source.exists() else None
    return found[1] if found else "unknown"
