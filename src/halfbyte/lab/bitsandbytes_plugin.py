"""A pytest plugin: notes every test's outcome as JSON, with halfbyte's switch on if HALFBYTE_BITSANDBYTES=1.

It imports the installed bitsandbytes before pytest can find another one beside the tests.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import bitsandbytes  # noqa: F401

from ..integrations import bitsandbytes as switch

REPORT_VARIABLE = "HALFBYTE_TEST_REPORT"  # the file to write
_outcomes: dict[str, str] = {}


def pytest_configure() -> None:
    switch.follow_environment()


def pytest_runtest_logreport(report: Any) -> None:
    """A test is what its call was; failing before or after it is worse."""
    if report.failed:
        _outcomes[report.nodeid] = "failed"
    elif report.when == "call" or report.skipped:
        _outcomes.setdefault(report.nodeid, report.outcome)


def pytest_collectreport(report: Any) -> None:
    if report.failed:
        _outcomes[report.nodeid] = "not collected"


def pytest_sessionfinish() -> None:
    status = switch.status()
    record = {
        "outcomes": _outcomes,
        "enabled": status.enabled,
        "served": status.served,
        "fallbacks": status.fallbacks,
        "hits": status.hits,
    }
    target = Path(os.environ[REPORT_VARIABLE])
    partial = target.with_suffix(".partial")
    partial.write_text(json.dumps(record))
    partial.rename(target)
