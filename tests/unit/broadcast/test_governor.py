"""The uplink governor against a model of a link: it finds the rate, keeps the queue short, and yields to others."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from echo2.broadcast.pace import FLOOR_SHARE, UplinkGovernor, UplinkSample

TICK_S = 0.1


@dataclass
class ModelLink:
    """A drop-tail uplink; the round trip that is told is smoothed, as the kernel's is."""

    rate: float
    queue_max_s: float = 0.06
    queue_bytes: float = 0.0
    smoothed_s: float = 0.0

    def tick(self, offered: float) -> tuple[int, float]:
        """Bytes that got through in a tick, and the queue as seen."""
        total = self.queue_bytes + offered * TICK_S
        passed = min(total, self.rate * TICK_S)
        self.queue_bytes = min(total - passed, self.rate * self.queue_max_s)
        self.smoothed_s += 0.5 * (self.queue_bytes / self.rate - self.smoothed_s)
        return int(passed), self.smoothed_s


def _run(governor: UplinkGovernor, link: ModelLink, seconds: float, demand: float = 1e9) -> list[float]:
    rates, now = [], 0.0
    for _ in range(int(seconds / TICK_S)):
        now += TICK_S
        passed, queue_s = link.tick(min(demand, governor.rate_bytes_per_s or demand))
        governor.sample(UplinkSample(passed, queue_s, is_waiting=demand > governor.rate_bytes_per_s > 0), now)
        rates.append(governor.rate_bytes_per_s)
    return rates


@pytest.mark.parametrize("planned", [0.0, 0.5e6, 2e6, 6e6])
def test_rate_is_found_from_whatever_the_plan_said(planned: float) -> None:
    governor, link = UplinkGovernor(), ModelLink(2e6)
    governor.planned(planned)
    rates = _run(governor, link, 30.0)
    late = rates[200:]
    assert 0.93 * link.rate <= sum(late) / len(late) <= 1.04 * link.rate
    assert 0.8 * link.rate <= governor.capacity_bytes_per_s <= 1.1 * link.rate


def test_idle_uplink_is_never_paced() -> None:
    governor = UplinkGovernor()
    assert set(_run(governor, ModelLink(2e6), 10.0, demand=1e6)) == {0.0}
    assert governor.capacity_bytes_per_s == 0.0


def test_rate_does_not_rise_without_need() -> None:
    governor = UplinkGovernor()
    governor.planned(1e6)
    assert max(_run(governor, ModelLink(50e6), 10.0, demand=0.5e6)) <= 1e6


def test_users_limit_holds_whatever_the_link_could_carry() -> None:
    governor = UplinkGovernor(limit_bytes_per_s=1e6)
    governor.planned(5e6)
    assert governor.rate_bytes_per_s == 1e6
    assert max(_run(governor, ModelLink(50e6), 10.0)) == 1e6


def test_other_traffic_finds_room_but_never_all() -> None:
    governor, link = UplinkGovernor(), ModelLink(2e6)
    governor.planned(2e6)
    _run(governor, link, 5.0)
    link.rate = 1.2e6  # something else takes the rest
    shared = _run(governor, link, 20.0)[-50:]
    assert 0.9 * 1.2e6 <= sum(shared) / len(shared) <= 1.05 * 1.2e6
    link.rate = 1e4
    assert min(_run(governor, link, 10.0)) >= 0.9 * FLOOR_SHARE * 1.2e6
