"""The curriculum: prefers the band, forgets the oldest, goes on alike after a restart."""

from __future__ import annotations

import pytest

from echo2.base.errors import ConfigError
from echo2.tasks.curriculum import BandConfig, InOrder, SuccessBand, make_curriculum


def test_new_and_middling_instances_are_wanted_and_others_come_back_now_and_then() -> None:
    band = SuccessBand(BandConfig(revisit=0.25))
    band.record(1, [1.0, 1.0])
    band.record(2, [0.0, 0.0])
    band.record(3, [1.0, 0.0])
    assert all(band.wants(position, index) for position in range(50) for index in (3, 4))
    for index in (1, 2):
        share = sum(band.wants(position, index) for position in range(2000)) / 2000
        assert 0.2 < share < 0.3


def test_a_restart_with_the_saved_state_decides_alike() -> None:
    band = SuccessBand(BandConfig())
    for index in range(20):
        band.record(index, [float(index % 2)])
    again = SuccessBand(BandConfig(), band.state())
    assert all(band.wants(p, i) == again.wants(p, i) for p in range(50) for i in range(20))


def test_memory_is_bounded_and_the_oldest_is_forgotten() -> None:
    band = SuccessBand(BandConfig(remembered_max=2))
    for index in range(3):
        band.record(index, [1.0])
    band.record(2, [])
    assert set(band.state()) == {"1", "2"}


def test_in_order_takes_everything_and_a_band_without_revisits_is_refused() -> None:
    assert InOrder().wants(0, 0) and InOrder().state() == {}
    InOrder().record(0, [1.0])
    with pytest.raises(ConfigError, match="revisit"):
        BandConfig(revisit=0.0)


def test_curricula_are_made_by_name() -> None:
    assert isinstance(make_curriculum("in_order", 0), InOrder)
    assert isinstance(make_curriculum("success_band", 0), SuccessBand)
    with pytest.raises(ConfigError, match="expected in_order or success_band, got 'hard'"):
        make_curriculum("hard", 0)
