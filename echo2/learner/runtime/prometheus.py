"""The learner's numbers for Prometheus.

Guarantees: every number of the last row is a gauge, under a name that follows from the row's by rule (docs/learner.md);
a request never waits for the training. Leaves to others: the values (record), the table of names (docs/learner.md).
Waits for: requests, in threads of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from echo2.base.errors import PortBusy

HOST = "127.0.0.1"
PREFIX = "echo2_learner_"
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]")


def gauge_name(name: str) -> str:
    """`phase/wait_s` -> `echo2_learner_phase_wait_s`."""
    return PREFIX + _NOT_IN_NAMES.sub("_", name)


class LastRow(Collector):
    """Gauges of the last row, and what `now` says at the moment of the request."""

    def __init__(self, now: Callable[[], Mapping[str, float]]) -> None:
        self._now = now
        self._row: Mapping[str, object] = {}

    def take(self, row: Mapping[str, object]) -> None:
        self._row = row

    def collect(self) -> Iterator[Metric]:
        live = self._now()
        for name, value in {**self._row, **live}.items():
            match value:
                case bool() | int() | float():
                    yield GaugeMetricFamily(gauge_name(name), f"{name} of the last step", value=float(value))
                case list():
                    family = GaugeMetricFamily(gauge_name(name), f"{name} of the last step", labels=["lag"])
                    for lag, count in enumerate(value):
                        family.add_metric([str(lag)], float(count))
                    yield family


class PrometheusEndpoint:
    """A sink whose last row is served at /metrics, to this machine alone: plain HTTP asks nobody who he is."""

    def __init__(self, port: int, now: Callable[[], Mapping[str, float]]) -> None:
        registry = CollectorRegistry(auto_describe=False)
        self._rows = LastRow(now)
        registry.register(self._rows)
        self._server: Any
        try:
            self._server, self._thread = start_http_server(port, HOST, registry)
        except OSError as error:
            raise PortBusy(f"learner.metrics_port: expected {HOST}:{port} to be free, got {error}") from error

    @property
    def port(self) -> int:
        return int(self._server.server_port)

    def write(self, row: Mapping[str, object]) -> None:
        self._rows.take(row)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
