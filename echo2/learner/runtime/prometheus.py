"""Exports the learner's metrics to Prometheus.

Guarantees: every number of the last row is a gauge, whose name follows from the row's name by rule (docs/learner.md); a request
never waits for training; at most CONNECTIONS_MAX connections are open, each closed after CONNECTION_S whatever the client does.
Leaves to others: the values (record), the table of names (docs/learner.md). Waits for: requests, in its own threads.
"""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import make_wsgi_app
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from echo2.base.errors import PortBusy

HOST = "127.0.0.1"
CONNECTIONS_MAX, CONNECTION_S = 16, 10.0
PREFIX = "echo2_learner_"
_log = logging.getLogger("echo2.learner")
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]")


def gauge_name(name: str) -> str:
    """Gauge name of a row's field: `phase/wait_s` becomes `echo2_learner_phase_wait_s`."""
    return PREFIX + _NOT_IN_NAMES.sub("_", name)


class LastRow(Collector):
    """Collects gauges from the last row and from `now`, which is called at each request."""

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


class _BoundedServer(ThreadingMixIn, WSGIServer):
    """Serves each connection in a thread; local programs that connect and stay silent can occupy at most CONNECTIONS_MAX."""

    daemon_threads = True

    def __init__(self, *arguments: Any) -> None:
        self._places = threading.BoundedSemaphore(CONNECTIONS_MAX)
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        end = threading.Timer(CONNECTION_S, _shut, (request,))
        end.daemon = True
        end.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            end.cancel()
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("a request for metrics ended early", exc_info=True)


class _QuietHandler(WSGIRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:
        """Logs nothing: scrapes are too frequent to log."""


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # already closed
        connection.shutdown(socket.SHUT_RDWR)


class PrometheusEndpoint:
    """A sink that serves its last row at /metrics, on loopback only, because plain HTTP authenticates nobody."""

    def __init__(self, port: int, now: Callable[[], Mapping[str, float]]) -> None:
        registry = CollectorRegistry(auto_describe=False)
        self._rows = LastRow(now)
        registry.register(self._rows)
        try:
            self._server = make_server(HOST, port, make_wsgi_app(registry), _BoundedServer, _QuietHandler)
        except OSError as error:
            raise PortBusy(f"learner.metrics_port: expected {HOST}:{port} to be free, got {error}") from error
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_port)

    def write(self, row: Mapping[str, object]) -> None:
        self._rows.take(row)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
