"""What computed how many calls in this process: served by which kernel, or passed on to others, with the reason."""

from __future__ import annotations

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
        self.reset()

    def reset(self) -> None:
        """Set all counters to zero."""
        with self._lock:
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

    def passed(self, operator: str, reason: str) -> None:
        """Count a call that goes to the implementation that was there before halfbyte."""
        with self._lock:
            self._passed[operator, reason] += 1

    def totals(self) -> tuple[ServedCounts, PassedCounts]:
        """(operator -> kernel -> rows -> calls, operator -> reason -> calls)."""
        served: ServedCounts = {}
        passed: PassedCounts = {}
        with self._lock:
            for (operator, kernel, rows), count in self._served.items():
                served.setdefault(operator, {}).setdefault(kernel, {})[rows] = count
            for (operator, reason), count in self._passed.items():
                passed.setdefault(operator, {})[reason] = count
        return served, passed


counts = Counts()
