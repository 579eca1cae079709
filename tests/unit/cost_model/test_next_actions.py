"""What to do next: each action is better than nothing by the plan's own order, weighed with intervals, in bounded work."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echo2.cost_model import next_actions as module
from echo2.cost_model.next_actions import Candidate, NextActions, Situation, What, next_actions
from echo2.cost_model.planner import plan, promised
from echo2.cost_model.snapshot import FleetSnapshot, PlanConfig
from tests.unit.cost_model.fleets import learner, worker


def situation(count: int, rate: float = 0.1, **others: object) -> Situation:
    """`count` workers where some 41 keep the learner busy, at 0.35 USD/h each."""
    workers = tuple(worker(f"w{index:03d}", rate, 0.35) for index in range(count))
    snapshot = FleetSnapshot(0.0, learner(), workers, steps_left=500)
    fields: dict[str, object] = {
        "usd_per_hour": 0.35 * count, "tokens_per_rollout": 1000.0, "rate_error": 0.02, "reach": 0.03, **others,
    }  # fmt: skip
    pool = frozenset(one.worker_id for one in workers)
    return Situation(snapshot, PlanConfig(4), 1, pool, **fields)  # type: ignore[arg-type]


def candidate(kind: str, rate: float, price: float, **others: object) -> Candidate:
    made = Candidate(worker(kind, rate, price), kind, 1, "runpod", "EU", True, 0.7, 1.4)
    return replace(made, **others)  # type: ignore[arg-type]


MARKET = (candidate("RTX4090", 0.1, 0.34), candidate("H100", 0.4, 2.4), candidate("L4", 0.03, 0.45))


def check(told: Situation, found: NextActions) -> None:
    """What must hold of any answer."""
    target = told.config.target_utilisation
    assert found.weighed <= module.WEIGHED_MAX and len(found.actions) <= module.TOLD_MAX
    for outlook in (found.before, *(one.after for one in found.actions)):
        u = outlook.utilisation
        assert 0 <= u.low <= u.expected <= u.high <= 1
        for other in (outlook.usd_per_million_tokens, outlook.hours_left):
            assert other is not None and other.low <= other.expected <= other.high
    for action in found.actions:
        is_busier = min(target, action.after.utilisation.expected) > found.before.utilisation.expected
        assert is_busier or action.after.usd_per_hour < found.before.usd_per_hour, action.text


def test_a_pool_that_is_too_small_is_told_what_to_rent_and_what_it_brings() -> None:
    told = situation(30)
    found = next_actions(told, MARKET)
    check(told, found)
    first = found.actions[0]
    assert first.what is What.RENT and first.candidate is not None and first.candidate.kind == "RTX4090"
    assert "RTX4090 spot at runpod in EU at $0.34/h each" in first.text
    assert found.before.utilisation.expected < 0.8 and first.after.utilisation.expected > 0.95
    assert first.after.usd_per_hour == pytest.approx(10.5 + 0.34 * first.count)
    assert found.before.hours_left is not None and first.after.hours_left is not None
    assert first.after.hours_left.expected < found.before.hours_left.expected - 1.5


def test_what_is_told_is_what_the_planner_says_of_that_very_fleet() -> None:
    told = situation(30)
    first = next_actions(told, MARKET).actions[0]
    more = [worker(f"new{index:03d}", 0.1, 0.34) for index in range(first.count)]
    whole = replace(told.snapshot, workers=(*told.snapshot.workers, *more))
    made = plan(replace(whole, workers=tuple(replace(one, is_pinned=True) for one in whole.workers)), told.config)
    assert first.after.utilisation.expected == pytest.approx(made.predicted_utilisation, abs=0.01)
    assert promised(whole, told.config).utilisation == pytest.approx(made.predicted_utilisation, abs=0.01)


def test_an_unsure_rate_makes_a_wider_interval_and_so_do_misses_of_this_run() -> None:
    def width(told: Situation, machine: Candidate) -> float:
        u = next_actions(told, [machine]).actions[0].after.utilisation
        return u.high - u.low

    sure, unsure = (
        candidate("RTX4090", 0.1, 0.34, low=0.95, high=1.05),
        candidate("RTX4090", 0.1, 0.34, low=0.5, high=2.0),
    )
    assert width(situation(30), sure) < width(situation(30), unsure)
    assert width(situation(30, reach=0.0), sure) < width(situation(30, reach=0.1), sure)
    biased = next_actions(situation(30, bias=-0.05), MARKET).before.utilisation.expected
    assert biased == pytest.approx(next_actions(situation(30), MARKET).before.utilisation.expected - 0.05)


def test_where_the_target_is_reached_nothing_is_rented_and_what_is_spare_is_given_back() -> None:
    told = situation(60)
    spare = tuple(sorted(told.pool))[:12]
    found = next_actions(replace(told, spare=spare), MARKET)
    check(told, found)
    assert [one.what for one in found.actions] == [What.RELEASE] and found.actions[0].workers == spare
    assert found.actions[0].after.usd_per_hour == pytest.approx(0.35 * 48)
    assert not next_actions(told, MARKET).actions


def test_a_period_that_starves_the_learner_is_changed() -> None:
    told = situation(60)
    slow = replace(told.snapshot, learner=learner(delta_bytes=2.2e9))
    found = next_actions(replace(told, snapshot=slow, kappa=4, config=PlanConfig(4, fixed_kappa=4)), ())
    assert found.actions and found.actions[0].what is What.PERIOD, found
    assert "not every 4" in found.actions[0].text and found.actions[0].after.kappa < 4


def test_cap_room_and_ten_thousand_candidates_bound_what_is_weighed() -> None:
    told = replace(situation(30), config=PlanConfig(4, usd_per_hour_cap=11.0))
    assert all(one.count <= 1 for one in next_actions(told, MARKET).actions if one.what is What.RENT)
    small = next_actions(situation(30), [candidate("RTX4090", 0.1, 0.34, room=2)])
    assert {one.count for one in small.actions if one.what is What.RENT} <= {1, 2}
    many = [candidate(f"kind{index % 40}", 0.05 + index / 1e5, 0.3 + index / 1e4) for index in range(10_000)]
    found = next_actions(situation(30), many)
    check(situation(30), found)


def test_nobody_at_work_is_a_utilisation_of_nothing_and_renting_mends_it() -> None:
    told = situation(4)
    found = next_actions(replace(told, pool=frozenset()), [candidate("RTX4090", 0.5, 0.34)])
    assert found.before.utilisation.expected == 0.0
    assert found.actions[0].what is What.RENT and found.actions[0].after.utilisation.expected > 0.9


def test_a_provider_that_charges_for_traffic_is_weighed_with_it() -> None:
    free, charged = candidate("RTX4090", 0.1, 0.34), candidate("L40S", 0.1, 0.33)
    charged = replace(charged, worker=replace(charged.worker, egress_usd_per_gib=0.12))
    told = situation(30)
    (first, *_) = next_actions(told, [free, charged]).actions
    assert first.candidate is not None and first.candidate.kind == "RTX4090"
    (alone, *_) = next_actions(told, [charged]).actions
    assert alone.after.usd_per_hour > told.usd_per_hour + alone.count * 0.33 + 1.0


def test_time_without_training_is_in_the_utilisation_and_in_the_end() -> None:
    told = situation(60)
    slow = replace(
        told, snapshot=replace(told.snapshot, learner=learner(train_s=64.0, idle_s=6.4, evaluation_rollouts=16))
    )
    busy, idle = next_actions(told, ()).before, next_actions(slow, ()).before
    assert idle.utilisation.expected == pytest.approx(0.9 * busy.utilisation.expected, abs=0.01)
    assert busy.hours_left is not None and idle.hours_left is not None
    assert idle.hours_left.expected == pytest.approx(busy.hours_left.expected, rel=0.02)
