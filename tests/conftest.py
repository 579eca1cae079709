"""One profile for property tests: a busy machine must not fail them by being slow."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("echo2", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("echo2")
