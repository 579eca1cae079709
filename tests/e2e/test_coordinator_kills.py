"""kill -9 of the coordinator's process under a load of real streams, judged by the history checker.

How long recovery takes, and with how many workers, is measured by `make bench-coordinator`.
"""

from __future__ import annotations

import asyncio

import pytest

from benchmarks import bench_coordinator
from benchmarks.bench_coordinator import RECOVERY_S_MAX, Outcome, measure
from tests.patience import WAIT_S


def test_kills_under_load_lose_no_join_no_lease_and_no_group_and_double_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_coordinator, "HEARTBEAT_S", 1.0)  # the load is settled after three
    monkeypatch.setattr(bench_coordinator, "STATES", 0)  # nobody asks for the page
    outcome = Outcome()
    asyncio.run(
        asyncio.wait_for(measure(outcome, workers=16, seconds=2, groups_per_s=10, kills=2, doing=print), WAIT_S)
    )
    assert outcome.violations == []
    assert max(outcome.recovery_s) < RECOVERY_S_MAX
    assert max(outcome.streams_back_s) < RECOVERY_S_MAX
    assert outcome.grants_after > 0
