"""One profile for property tests: a busy machine must not fail them by being slow. The codec is compiled once before all."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from echo2.cli.demo.warm import warm_once

settings.register_profile("echo2", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("echo2")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # not in each process of pytest-xdist
        warm_once()
