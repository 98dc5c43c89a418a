"""The counters of a process that runs a model in vLLM: in its log, and among its Prometheus metrics.

Both come from a thread that looks every few seconds, so that counting costs the calls themselves nothing more. Without
`--shutdown-timeout` vLLM kills its workers when it stops, and the last line is then up to INTERVAL seconds old.

Metrics: vLLM serves /metrics from its API server, workers are other processes, and what carries its own numbers there
has no room for others. prometheus_client itself has a way for several processes, a directory that
PROMETHEUS_MULTIPROC_DIR names, and vLLM's endpoint reads it: where that is set, the counters are there, too.
"""

from __future__ import annotations

import os
import threading
from multiprocessing import util
from typing import Any

from ..counters import counts
from . import bitsandbytes as switch
from .vllm import logger

INTERVAL = 60.0  # seconds between two lines of the log, where there is anything new
METRICS_INTERVAL = 2.0
DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"

_reporting = 0  # the process that does


def start() -> None:
    """Report from now on, and when the process ends; does nothing the second time in a process."""
    global _reporting
    if _reporting == os.getpid():
        return
    _reporting = os.getpid()
    report = Report()
    stop = threading.Event()

    def run() -> None:
        waited = 0.0
        while not stop.wait(METRICS_INTERVAL):
            report.publish()
            waited += METRICS_INTERVAL
            if waited >= INTERVAL:
                report.log()
                waited = 0.0

    def finish() -> None:
        stop.set()
        thread.join()
        report.publish()
        report.log()

    thread = threading.Thread(target=run, name="halfbyte-report", daemon=True)
    thread.start()
    util.Finalize(None, finish, exitpriority=0)  # atexit is not for processes that multiprocessing has started


class Report:
    """What was reported last, and the metrics where there are any."""

    def __init__(self) -> None:
        self._logged = ""
        self._served: Any = None
        if os.environ.get(DIRECTORY):
            from prometheus_client import Counter

            self._served = Counter(
                "halfbyte_served", "4-bit multiplies by halfbyte; rows: of activations", ["operator", "kernel", "rows"]
            )
            self._passed = Counter("halfbyte_passed_on", "4-bit multiplies left to bitsandbytes", ["operator"])
            self._published: dict[tuple[str, ...], int] = {}

    def log(self) -> None:
        """Write the counters to vLLM's log, if they changed since."""
        text = str(switch.status())
        if text != self._logged:
            logger.info("%s", text)
            self._logged = text

    def publish(self) -> None:
        """Bring the metrics up to the counters."""
        if self._served is None:
            return
        served, passed = counts.totals()
        for operator, by_kernel in served.items():
            for kernel, rows in by_kernel.items():
                for bucket, count in rows.items():
                    self._raise(self._served, (operator, kernel, bucket), count)
        for operator, reasons in passed.items():
            self._raise(self._passed, (operator,), sum(reasons.values()))

    def _raise(self, metric: Any, labels: tuple[str, ...], count: int) -> None:
        before = self._published.get(labels, 0)
        if count > before:  # a reset starts from zero: what came before stays counted
            metric.labels(*labels).inc(count - before)
        self._published[labels] = count
