"""`python -m halfbyte.run [--status] script.py args…`: an unchanged program, its bitsandbytes layers on halfbyte."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from .integrations.bitsandbytes import STATUS_VARIABLE, VARIABLE, follow_environment

USAGE = "usage: python -m halfbyte.run [--status] (script.py | -m module) [arguments]"


def main(words: list[str]) -> None:
    """Run a script, or with -m a module, as `python` would. --status: print the counters at the end.

    The environment says so to processes that the program starts, where they import halfbyte. Raises SystemExit with
    the usage where no program is named.
    """
    if words[:1] == ["--status"]:
        os.environ[STATUS_VARIABLE] = "1"
        words = words[1:]
    module = words[:1] == ["-m"]
    words = words[1:] if module else words
    if not words or words[0].startswith("-"):
        raise SystemExit(USAGE)
    os.environ[VARIABLE] = "1"
    follow_environment()
    sys.argv = words
    sys.path[0] = os.getcwd() if module else str(Path(words[0]).resolve().parent)
    if module:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
