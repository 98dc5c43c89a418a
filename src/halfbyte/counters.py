"""What computed how many calls in this process: served by which kernel, or passed on to others, with the reason."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections import Counter

logger = logging.getLogger("halfbyte")
ServedCounts = dict[str, dict[str, dict[str, int]]]
PassedCounts = dict[str, dict[str, int]]


def bucket(m: int) -> str:
    """Rows of x as the counters have them: "0", "1", "2-8", "9-64", "65+"."""
    if m < 2:
        return str(m)
    return "2-8" if m <= 8 else "9-64" if m <= 64 else "65+"


class Counts:
    """Counters of calls, safe to raise from several threads. The first call that is served says so in the log."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cells: dict[tuple[str, str, str], ctypes.c_int64] = {}
        self.reset()

    def reset(self) -> None:
        """Set all counters to zero."""
        with self._lock:
            for cell in self._cells.values():
                cell.value = 0
            self._served: Counter[tuple[str, str, str]] = Counter()
            self._passed: Counter[tuple[str, str]] = Counter()
            self._silent = True

    def serve(self, operator: str, kernel: str, rows: str) -> None:
        """Count a call that a kernel of halfbyte computes; rows: its `bucket`, or what else it worked on."""
        with self._lock:
            self._served[operator, kernel, rows] += 1
        if self._silent:
            self._silent = False
            logger.info("%s is served by halfbyte's %s", operator, kernel)

    def cell(self, operator: str, kernel: str, rows: str) -> int:
        """The address of an int64 in which native code, with the GIL, counts calls as `serve` does."""
        with self._lock:
            return ctypes.addressof(self._cells.setdefault((operator, kernel, rows), ctypes.c_int64()))

    def passed(self, operator: str, reason: str) -> None:
        """Count a call that goes to the implementation that was there before halfbyte."""
        with self._lock:
            self._passed[operator, reason] += 1

    def totals(self) -> tuple[ServedCounts, PassedCounts]:
        """(operator -> kernel -> rows -> calls, operator -> reason -> calls)."""
        served: ServedCounts = {}
        passed: PassedCounts = {}
        with self._lock:
            calls = self._served + Counter({key: cell.value for key, cell in self._cells.items()})
            for (operator, kernel, rows), count in calls.items():
                served.setdefault(operator, {}).setdefault(kernel, {})[rows] = count
            for (operator, reason), count in self._passed.items():
                passed.setdefault(operator, {})[reason] = count
        return served, passed


counts = Counts()
