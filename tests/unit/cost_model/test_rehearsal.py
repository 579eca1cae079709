"""The relations, and the rehearsal that has the last word on them."""

import gc
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from echo2.cost_model.rehearsal import Rehearsal, confirmed, reduced, rehearsal_of, rehearse, rehearsed
from echo2.cost_model.relations import FleetModel, OperatingPoint, longest_of, unit_lengths
from echo2.cost_model.snapshot import DownloadMode, LinkEstimate, PlanConfig
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


@given(st.floats(1.01, 3.0), st.floats(1.2, 6.0))
def test_cut_lengths_keep_the_mean_that_was_measured_and_the_tail(ratio: float, cut: float) -> None:
    """A log-normal of the measured mean would lose up to a seventh of it to the cut: the pool would seem too fast."""
    lengths = unit_lengths(2.0, 2.0 * ratio, 2.0 * ratio * cut)
    assert lengths.mean() == pytest.approx(1.0, abs=1e-9)
    assert np.all(np.diff(lengths) >= 0) and lengths[-1] <= ratio * cut * 1.05
    assert lengths[int(0.95 * len(lengths))] == pytest.approx(ratio, rel=0.05)


def test_quantiles_of_the_run_replace_the_log_normal_and_a_tail_at_the_cut_says_nothing_of_the_spread() -> None:
    told = learner(lengths=(1.0,) * 8 + (10.0,) * 2)
    lengths = FleetModel.of(snapshot((worker("a"),), learner=told), PlanConfig(4)).lengths
    assert lengths.mean() == pytest.approx(1.0) and lengths[-1] / lengths[0] == pytest.approx(10.0)
    lengths = unit_lengths(1.0, 1.8, 1.8)
    assert lengths.mean() == pytest.approx(1.0)
    assert np.count_nonzero(lengths >= 0.99 * lengths[-1]) > 0.1 * len(lengths), "many rollouts end at the cut"
    assert np.count_nonzero(lengths < 0.5) > 0.2 * len(lengths)


@pytest.mark.parametrize("seed", range(4))
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
    columns = {name: np.zeros(0) for name in ("slots", "rollout_s", "latency_s", "swap_s")}
    assert rehearse(run(4, 2, 0.5, **columns)) == 0.0


# ---- the rehearsal


def run(bound: int, kappa: int, transfer_s: float, **others: object) -> Rehearsal:
    """T_train = 1 s, R = 64 in groups of 8, four workers of 7 slots, 0.3 s a rollout: 1.46 times the rate needed."""
    fields: dict[str, object] = {
        "groups_per_step": 8, "rewards_per_s": math.inf, "cap_groups": 16, "slots": np.full(4, 7),
        "rollout_s": np.full(4, 0.3), "lengths": unit_lengths(0.3, 0.75, 1.2), "common_s": transfer_s, **others,
    }  # fmt: skip
    seat = learner(rollouts_per_step=64, rollouts_per_group=8, train_s=1.0, encode_s=0.0, delta_growth=0.75)
    count = len(fields["slots"])  # type: ignore[arg-type]
    columns = {"own_s": np.full(count, fields["common_s"]), "latency_s": np.zeros(count), "swap_s": np.zeros(count)}
    return Rehearsal(seat, PlanConfig(bound), kappa, **{**columns, **fields})  # type: ignore[arg-type]


def judged(rewards_per_s: float) -> Rehearsal:
    judges = run(6, 2, 0.2, rewards_per_s=rewards_per_s)
    return replace(judges, learner=replace(judges.learner, reward_s=0.05))


SCARCE = run(8, 2, 1.0, rollout_s=np.full(4, 28 / (64 * 0.95)), cap_groups=32)


@pytest.mark.parametrize(
    ("told", "share", "within"),
    [
        (run(6, 2, 0.5), 1.0, 0.01),  # a wide bound and enough rate
        *((run(8, 2, 0.2, rollout_s=np.full(4, 28 / (64 * rate)), cap_groups=32), rate, 0.02) for rate in (0.5, 0.9)),
        *((judged(64 * rate), rate, 0.02) for rate in (0.4, 0.8)),
        (judged(200.0), 1.0, 0.02),
        # Rate for 0.95 of the need while it works, and half of each period without work.
        (replace(SCARCE, config=PlanConfig(8, download=DownloadMode.STALLED)), 0.6, 0.08),
        (SCARCE, 0.95, 0.02),
    ],
)
def test_the_learner_is_as_busy_as_the_scarcest_thing_allows(told: Rehearsal, share: float, within: float) -> None:
    assert rehearse(told) == pytest.approx(share, abs=within)


def test_a_tight_bound_serialises_and_a_group_larger_than_the_slots_takes_turns() -> None:
    """The same rate in workers of two slots: a group then takes four turns, which a tight bound does not allow."""
    assert rehearse(run(1, 1, 0.5)) < 0.7
    whole = run(2, 1, 0.4)
    turns = run(2, 1, 0.4, rollout_s=np.full(14, 0.3), slots=np.full(14, 2))
    assert rehearse(whole) > 0.95
    assert rehearse(turns) < rehearse(whole) - 0.1


def test_versions_that_replace_one_that_waited_are_larger_and_a_slow_downlink_is_late_alone() -> None:
    grows = run(6, 1, 3.0)
    constant = replace(grows, learner=replace(grows.learner, delta_growth=0.0))
    assert rehearse(grows) < rehearse(constant) - 0.2
    five = {"slots": np.full(5, 7), "rollout_s": np.full(5, 0.3)}
    late = run(3, 1, 0.3, own_s=np.array([0.3, 0.3, 0.3, 0.3, 6.0]), **five)
    assert rehearse(late) >= rehearse(run(3, 1, 0.3)) - 0.01
    assert rehearse(run(3, 1, 6.0, **five)) < 0.7


def test_a_choice_for_a_large_step_is_confirmed_by_a_part_that_is_near_the_whole() -> None:
    """48 workers with room for 90 rollouts each: a step of 84 groups, of which a first look takes 16."""
    told = {"rollout_s_mean": 33.7, "rollout_s_tail": 75.0, "rollout_s_max": 122.0, "apply_s": 1.0}
    workers = tuple(worker(f"w{i:03d}", 2.67, link=LinkEstimate(2.5e7, 1e8, 0.05), **told) for i in range(48))
    links = LinkEstimate(1.25e9, 1.25e9, 0.02)
    seat = learner(rollouts_per_step=1344, train_s=20.0, link=links, delta_bytes=1.6e8, encode_s=1.0)
    fleet = FleetModel.of(snapshot(workers, learner=seat), PlanConfig(6))
    found = fleet.evaluate(1, fleet.is_available)
    run_of_all = rehearsal_of(fleet, found)
    assert reduced(run_of_all, 1000) is run_of_all, "so large a part is the whole"
    whole = rehearse(run_of_all, 60, 1000)
    first, sure = rehearsed(fleet, found), confirmed(fleet, found)
    assert abs(sure.utilisation - whole) < 0.005 < abs(first.utilisation - whole)


def test_long_periods_are_rehearsed_whole_and_leave_nothing_for_the_collector() -> None:
    """Of a period that is cut off, only the wait for its version would be seen. Collections are rare where pauses must be short."""
    told = run(64, 60, 40.0)
    gc.disable()
    try:
        assert rehearse(told) == pytest.approx(rehearse(told, 1000), abs=0.01)
        assert not [one for one in gc.get_objects() if type(one).__name__ == "_Stage"]
    finally:
        gc.enable()
