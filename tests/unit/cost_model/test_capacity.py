from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.cost_model.relations import FleetModel, OperatingPoint, lengths_from_quantiles, longest_of, unit_lengths
from echo2.cost_model.snapshot import LinkEstimate, PlanConfig
from tests.unit.cost_model.fleets import learner, random_workers, snapshot, worker


@given(st.integers(1, 12), st.data())
def test_at_the_pace_that_the_relations_give_they_hold_and_at_a_faster_one_not(bound: int, data: st.DataObject) -> None:
    kappa = data.draw(st.integers(1, bound))
    transfer_s, rollout_s, rate = (data.draw(st.floats(0.01, 5.0)) for _ in range(3))
    point = OperatingPoint(bound, kappa, 1.0, 1.0, transfer_s, 0.1, rollout_s, rate)
    for share, holds in ((1.0001, True), (0.999, False)):
        slower = replace(point, train_s=point.pace_s * share)
        keeps = (
            slower.batch_s <= slower.train_s
            and slower.transfer_s <= kappa * slower.train_s
            and slower.staleness_use_s <= slower.staleness_budget_s
        )
        assert keeps == holds


def test_each_term_of_the_links_can_bind_and_a_slow_downlink_is_late_alone() -> None:
    def links(uplink: float, downlinks: tuple[float, ...]) -> tuple[float, list[float]]:
        told = learner(link=LinkEstimate(10.0, 1e9), delta_bytes=100.0)
        workers = tuple(worker(f"w{i}", link=LinkEstimate(uplink, down)) for i, down in enumerate(downlinks))
        fleet = FleetModel.of(snapshot(workers, learner=told), PlanConfig(2, broadcast_efficiency=1.0))
        common_s, own_s = fleet.links_s(1, np.arange(len(workers)))
        return common_s, own_s.tolist()

    assert links(50.0, (1e9, 1e9, 1e9)) == (pytest.approx(10.0), pytest.approx([10.0] * 3))
    assert links(50.0, (1e9, 5.0, 1e9)) == (pytest.approx(10.0), pytest.approx([10.0, 20.0, 10.0]))
    assert links(1e-9, (1e9, 1e9, 1e9)) == (pytest.approx(30.0), pytest.approx([30.0] * 3))


@given(st.integers(1, 64), st.floats(1.2, 5.0))
def test_the_longest_of_a_group_is_what_draws_say(count: int, tail: float) -> None:
    lengths = unit_lengths(1.0, tail, 4 * tail)
    draws = np.random.default_rng(1).choice(lengths, (4000, count)).max(axis=1)
    assert longest_of(lengths, count) == pytest.approx(draws.mean(), rel=0.08)


def test_a_groups_time_in_flight_grows_with_its_size_and_so_does_the_cap() -> None:
    caps = []
    for group in (1, 16, 64):
        told = learner(rollouts_per_step=1024, rollouts_per_group=group, train_s=64.0)
        workers = tuple(worker(f"w{i}", 4.0, rollout_s_tail=75.0, rollout_s_max=240.0) for i in range(8))
        fleet = FleetModel.of(snapshot(workers, learner=told), PlanConfig(6))
        caps.append(fleet.evaluate(2, fleet.is_available).in_flight_cap(group))
    assert caps[0] < caps[1] < caps[2] <= 1024 * 7


def test_quantiles_of_the_run_itself_replace_the_log_normal() -> None:
    two_kinds = (1.0,) * 8 + (10.0,) * 2
    lengths = lengths_from_quantiles(two_kinds)
    assert lengths.mean() == pytest.approx(1.0) and lengths[-1] / lengths[0] == pytest.approx(10.0)
    told = learner(lengths=two_kinds)
    assert np.array_equal(FleetModel.of(snapshot((worker("a"),), learner=told), PlanConfig(4)).lengths, lengths)


@pytest.mark.parametrize("seed", range(10))
def test_a_pinned_worker_that_is_late_leaves_the_others_pace_as_it_is(seed: int) -> None:
    workers = random_workers(6, seed)
    late = worker("late", 0.1, link=LinkEstimate(2e7, 1e4), is_pinned=True)
    told = learner(lengths=(0.5, 1.0, 1.5))
    alone, beside = (FleetModel.of(snapshot(one, learner=told), PlanConfig(3)) for one in (workers, (*workers, late)))
    before, after = (one.evaluate(1, np.ones(len(one), dtype=np.bool_)) for one in (alone, beside))
    assert after.point.pace_s <= before.point.pace_s * 1.001
    assert after.utilisation >= before.utilisation - 1e-3


def test_nobody_and_a_bound_of_nothing_are_no_division() -> None:
    fleet = FleetModel.of(snapshot((worker("a"),)), PlanConfig(0))
    nobody = fleet.evaluate(1, np.zeros(1, dtype=np.bool_))
    assert nobody.utilisation == 0.0 and nobody.point.batch_s == math.inf and not nobody.keeps_up
    assert 0 < fleet.evaluate(1, np.ones(1, dtype=np.bool_)).utilisation < 1
