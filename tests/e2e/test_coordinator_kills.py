"""kill -9 of the coordinator's process under a load of real streams, judged by the history checker.

How long recovery takes, and with how many workers, is measured by `make bench-coordinator`.
"""

from __future__ import annotations

import asyncio

from benchmarks.bench_coordinator import RECOVERY_S_MAX, Outcome, measure
from tests.patience import WAIT_S


def test_kills_under_load_lose_no_join_no_lease_and_no_group_and_double_none() -> None:
    outcome = Outcome()
    asyncio.run(
        asyncio.wait_for(measure(outcome, workers=16, seconds=2, groups_per_s=10, kills=2, doing=print), WAIT_S)
    )
    assert outcome.violations == []
    assert max(outcome.recovery_s) < RECOVERY_S_MAX
    assert max(outcome.streams_back_s) < RECOVERY_S_MAX
    assert outcome.grants_after > 0
