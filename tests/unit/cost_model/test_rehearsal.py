from __future__ import annotations

import dataclasses
import gc
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.cost_model.rehearsal import Rehearsal, reduced, rehearse
from echo2.cost_model.relations import unit_lengths


def run(bound: int, kappa: int, transfer_s: float, **others: object) -> Rehearsal:
    """T_train = 1 s, R = 64 in groups of 8, four workers of 7 slots, 0.3 s a rollout: 1.46 times the rate needed."""
    fields: dict[str, object] = {
        "train_s": 1.0, "encode_s": 0.0, "groups_per_step": 8, "rollouts_per_group": 8, "cap_groups": 16,
        "slots": np.full(4, 7), "rollout_s": np.full(4, 0.3), "latency_s": np.zeros(4), "swap_s": np.zeros(4),
        "lengths": unit_lengths(0.3, 0.75, 1.2), "common_s": transfer_s, "growth": lambda spans: (spans / kappa) ** 0.75,
        **others,
    }  # fmt: skip
    fields.setdefault("own_s", np.full(len(fields["slots"]), fields["common_s"]))  # type: ignore[arg-type]
    return Rehearsal(bound, kappa, **fields)  # type: ignore[arg-type]


@given(st.floats(1.01, 3.0), st.floats(1.2, 6.0))
def test_cut_lengths_keep_the_mean_that_was_measured_and_the_tail(ratio: float, cut: float) -> None:
    """A log-normal of the measured mean would lose up to a seventh of it to the cut: the pool would seem too fast."""
    lengths = unit_lengths(2.0, 2.0 * ratio, 2.0 * ratio * cut)
    assert lengths.mean() == pytest.approx(1.0, abs=1e-9)
    assert np.all(np.diff(lengths) >= 0) and lengths[-1] <= ratio * cut * 1.05
    assert lengths[int(0.95 * len(lengths))] == pytest.approx(ratio, rel=0.05)


def test_a_tail_at_the_cut_says_nothing_of_the_spread_so_the_usual_one_is_taken() -> None:
    lengths = unit_lengths(1.0, 1.8, 1.8)
    assert lengths.mean() == pytest.approx(1.0)
    assert np.count_nonzero(lengths >= 0.99 * lengths[-1]) > 0.1 * len(lengths), "many rollouts end at the cut"
    assert np.count_nonzero(lengths < 0.5) > 0.2 * len(lengths)


def test_a_wide_bound_and_enough_rate_keep_the_learner_busy() -> None:
    assert rehearse(run(6, 2, 0.5)).utilisation == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
def test_too_little_rate_is_the_share_that_it_gives(share: float) -> None:
    """Also with lengths that are cut, where 0.9 of the rate once promised all of it."""
    slower = 28 * 1.0 / (64 * share)
    assert rehearse(run(8, 2, 0.2, rollout_s=np.full(4, slower), cap_groups=32)).utilisation == pytest.approx(
        share, abs=0.02
    )


def test_one_step_bound_serialises_generation_and_training() -> None:
    assert rehearse(run(1, 1, 0.5)).utilisation < 0.7


def test_versions_that_replace_one_that_waited_are_larger() -> None:
    """At three steps a transfer, of a size that did not grow the learner would seem nearly busy."""
    grows = run(6, 1, 3.0)
    constant = dataclasses.replace(grows, growth=lambda spans: 1.0)
    assert rehearse(grows).utilisation < rehearse(constant).utilisation - 0.2


def test_a_group_larger_than_the_slots_is_generated_in_turns() -> None:
    """The same rate in workers of two slots: a group then takes four turns, which a tight bound does not allow."""
    pair = {"slots": np.full(14, 2), "latency_s": np.zeros(14), "swap_s": np.zeros(14)}
    whole, turns = run(2, 1, 0.4), run(2, 1, 0.4, rollout_s=np.full(14, 0.3), **pair)
    assert rehearse(whole).utilisation > 0.95
    assert rehearse(turns).utilisation < rehearse(whole).utilisation - 0.1


def test_stalled_downloads_cost_the_rate_that_stands_still() -> None:
    """Rate for 0.95 of the need while it works, and half of each period without work."""
    told = run(8, 2, 1.0, rollout_s=np.full(4, 28 / (64 * 0.95)), cap_groups=32)
    assert rehearse(told).utilisation == pytest.approx(0.95, abs=0.02)
    assert rehearse(dataclasses.replace(told, is_stalled=True)).utilisation == pytest.approx(0.6, abs=0.08)


def test_nothing_is_left_for_the_collector() -> None:
    """It comes seldom where pauses must be short, and each rehearsal is some MB."""
    gc.disable()
    try:
        rehearse(run(4, 2, 0.5))
        assert not [one for one in gc.get_objects() if type(one).__name__ == "_Stage"]
    finally:
        gc.enable()


def test_a_slow_downlink_is_late_alone() -> None:
    """One worker of five, at six steps a version; the other four alone would do."""
    five = {name: np.append(column, column[0]) for name, column in (
        ("slots", np.full(4, 7)), ("rollout_s", np.full(4, 0.3)), ("latency_s", np.zeros(4)), ("swap_s", np.zeros(4)),
    )}  # fmt: skip
    late = run(3, 1, 0.3, own_s=np.array([0.3, 0.3, 0.3, 0.3, 6.0]), **five)
    everybody = run(3, 1, 6.0, **five)
    assert rehearse(late).utilisation >= rehearse(run(3, 1, 0.3)).utilisation - 0.01
    assert rehearse(everybody).utilisation < 0.7


@pytest.mark.parametrize("share", [0.4, 0.8])
def test_too_few_rewards_are_the_share_that_they_give(share: float) -> None:
    told = run(6, 2, 0.2, reward_s=0.05, rewards_per_s=64 * share)
    assert rehearse(told).utilisation == pytest.approx(share, abs=0.02)
    assert rehearse(dataclasses.replace(told, rewards_per_s=200.0)).utilisation > 0.98


def test_nothing_comes_of_nobody() -> None:
    nobody = {name: np.zeros(0) for name in ("slots", "rollout_s", "latency_s", "swap_s")}
    assert rehearse(run(4, 2, 0.5, **nobody)).utilisation == 0.0


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 6), st.data())
def test_utilisation_is_a_share_and_falls_with_a_much_slower_broadcast(bound: int, data: st.DataObject) -> None:
    kappa = data.draw(st.integers(1, bound))
    transfer_s = data.draw(st.floats(0.05, float(kappa)))
    fast, slow = (rehearse(run(bound, kappa, one), 160) for one in (transfer_s / 2, transfer_s))
    assert 0 < slow.utilisation <= 1 and 0 <= slow.dropped < 0.5
    assert slow.utilisation <= fast.utilisation + 0.05


@given(st.integers(1, 3000), st.integers(1, 200), st.sampled_from([1, 8, 64]))
def test_a_part_of_a_large_pool_keeps_its_proportions(count: int, slots: int, group: int) -> None:
    each = np.full(count, slots)
    told = run(
        4, 1, 0.2, slots=each, rollout_s=np.full(count, 0.3), latency_s=np.zeros(count), swap_s=np.zeros(count),
        rollouts_per_group=group, groups_per_step=max(8, count * slots // group), cap_groups=2 * max(8, count * slots // group),
    )  # fmt: skip
    part = reduced(told)
    assert len(part.slots) <= len(told.slots) and part.groups_per_step <= told.groups_per_step
    before = (told.slots / told.rollout_s).sum() / told.groups_per_step
    assert (part.slots / part.rollout_s).sum() / part.groups_per_step == pytest.approx(before, rel=1e-6)
    assert part.cap_groups / part.groups_per_step == pytest.approx(2.0, rel=0.2)
    assert math.isfinite(rehearse(part, 16).utilisation)
    if slots >= group:
        assert part.slots.min() >= group


def test_a_part_of_a_large_pool_has_as_many_late_workers_as_the_pool() -> None:
    """Each tenth worker is late, and rates differ from worker to worker: a part by rates alone has only late ones."""
    index = np.arange(120)
    pool = run(
        4, 1, 0.2, slots=np.full(120, 7), rollout_s=0.3 + 0.001 * index, latency_s=np.zeros(120), swap_s=np.zeros(120),
        groups_per_step=320, cap_groups=640, own_s=np.where(index % 10 == 5, 3.0, 0.2),
    )  # fmt: skip
    part = reduced(pool)
    assert len(part.own_s) == 12 and np.count_nonzero(part.own_s > 1.0) == 1


@pytest.mark.parametrize(("bound", "kappa", "transfer_s"), [(40, 40, 3.0), (64, 60, 40.0)])
def test_long_periods_are_rehearsed_whole(bound: int, kappa: int, transfer_s: float) -> None:
    """Of a period that is cut off, only the wait for its version would be seen."""
    told = run(bound, kappa, transfer_s)
    assert rehearse(told).utilisation == pytest.approx(rehearse(told, 1000).utilisation, abs=0.01)
