"""A hard time limit: a kernel that never ends must not hold the device, so the process that waits for it ends."""

from __future__ import annotations

import faulthandler
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

GRACE_S = 5.0  # after which the traceback is printed from C, where no Python thread could
STATUS = 3
_stderr = 2


@dataclass
class Limit:
    """A running limit. doing: what is under way, for the message; replace it as the work goes on."""

    doing: str


def keep_stderr() -> None:
    """Remember where messages go; call it before something captures standard error."""
    global _stderr
    _stderr = os.dup(2)


@contextmanager
def time_limit(seconds: float, doing: str) -> Iterator[Limit]:
    """End this process, with a status of 3 and saying what it was doing, unless the block ends within `seconds`."""
    limit = Limit(doing)
    done = threading.Event()

    def watch() -> None:
        if not done.wait(seconds):
            os.write(_stderr, f"\nno end after {seconds:g} s, this process gives up: {limit.doing}\n".encode())
            faulthandler.dump_traceback(_stderr)
            os._exit(STATUS)

    faulthandler.dump_traceback_later(seconds + GRACE_S, exit=True, file=_stderr)
    threading.Thread(target=watch, daemon=True).start()
    try:
        yield limit
    finally:
        done.set()
        faulthandler.cancel_dump_traceback_later()
