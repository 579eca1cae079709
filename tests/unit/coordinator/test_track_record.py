"""Predictions that were acted on, next to what came, and how misses mend the next one."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from echo2.coordinator.track_record import RECORDS_MAX, WINDOW_STEPS, Quantity, TrackRecord
from echo2.cost_model.next_actions import Interval
from echo2.cost_model.plan import Plan
from echo2.cost_model.planner import plan
from echo2.cost_model.snapshot import FleetSnapshot, PlanConfig
from tests.unit.cost_model.fleets import learner, worker

BUSY_S = 9.0


def acted_on() -> Plan:
    workers = tuple(worker(f"w{index}", 1.0) for index in range(5))
    return replace(plan(FleetSnapshot(0.0, learner(), workers), PlanConfig(4)), predicted_utilisation=1.0)


def train(track: TrackRecord, steps: int, step_s: float, start: tuple[int, float] = (0, 0.0)) -> tuple[int, float]:
    """Steps that take `BUSY_S` of the learner and `step_s` of the wall clock."""
    step, now = start
    for _ in range(steps):
        step, now = step + 1, now + step_s
        track.step_made(step, BUSY_S, BUSY_S, now)
    return step, now


def test_a_plan_is_compared_with_the_wall_clock_and_what_it_missed_moves_the_next() -> None:
    track, made = TrackRecord(), acted_on()
    at = train(track, 2, 10.0)
    track.planned(made, True, 500, at[1])
    assert track.expected(1.0).expected == 1.0
    train(track, 4 * WINDOW_STEPS + 1, 10.0, at)
    told = track.value()["utilisation"]
    assert told["count"] == 4 and told["newest"][0]["measured"] == pytest.approx(0.9)
    assert track.expected(1.0).expected == pytest.approx(1 - 0.1 * 4 / 4.5)
    assert abs(told["newest"][-1]["predicted"] - 0.9) < abs(told["newest"][0]["predicted"] - 0.9)


def test_the_window_under_way_already_moves_what_is_expected() -> None:
    track = TrackRecord()
    at = train(track, 2, 10.0)
    track.planned(acted_on(), True, 500, at[1])
    at = train(track, 1 + 3, 10.0, at)
    assert track.expected(1.0).expected == 1.0, "three steps say too little"
    train(track, 5, 10.0, at)
    assert track.value()["utilisation"]["count"] == 0
    assert track.expected(1.0).expected == pytest.approx(1 - 0.1 * 0.5 / (0.5 + 0.5))
    assert track.expected(1.0).low < 0.9


def test_an_outage_of_the_learner_is_in_the_wall_clock_and_steps_made_twice_count_once() -> None:
    track = TrackRecord()
    at = train(track, 2, 10.0)
    track.planned(acted_on(), True, 0, at[1])
    step, now = train(track, 17, 10.0, at)
    train(track, WINDOW_STEPS + 8, 10.0, (step - 8, now + 60.0))  # it came back at its last checkpoint
    whole, broken = track.value()["utilisation"]["newest"]
    assert whole["measured"] == pytest.approx(0.9)
    assert broken["measured"] == pytest.approx(0.9 * WINDOW_STEPS / (WINDOW_STEPS + 8 + 6))


def test_a_plan_that_is_not_carried_out_or_is_the_same_again_opens_nothing() -> None:
    track, made = TrackRecord(), acted_on()
    at = train(track, 2, 10.0)
    track.planned(made, False, 500, at[1])
    train(track, WINDOW_STEPS + 2, 10.0, at)
    assert not track.records and track.value()["utilisation"]["open"] == 0


def test_intervals_hold_nine_of_ten_after_a_few_misses() -> None:
    """Windows that miss the model by five points and three of noise."""
    rng, track, held, told = random.Random(5), TrackRecord(), 0, 0
    at = train(track, 2, 10.0)
    track.planned(acted_on(), True, 0, at[1])
    at = train(track, 1, 10.0, at)
    for window in range(120):
        share = min(1.0, rng.gauss(0.95, 0.015))
        at = train(track, WINDOW_STEPS, BUSY_S / share, at)
        newest = track.records[-1]
        held, told = held + (newest.is_held and window >= 8), told + (window >= 8)
    assert held / told >= 0.85
    errors = [abs(one.error) for one in list(track.records)[8:]]
    assert sum(errors) / len(errors) <= 0.03, "within three points of the wall clock"


def test_rates_and_the_finish_are_compared_too() -> None:
    track = TrackRecord()
    at = train(track, 2, 10.0)
    track.planned(acted_on(), True, 100, at[1])
    track.rate_expected("w9", "worker w9, RTX4090", Interval(2.0, 1.0, 4.0), at[1])
    track.rate_expected("w9", "again", Interval(9.0, 8.0, 10.0), at[1])
    track.rate_measured("w9", 1.5, at[1] + 60)
    track.rate_measured("w9", 9.5, at[1] + 70)
    track.rate_measured("unknown", 1.0, at[1])
    at = train(track, 100, 10.0, at)
    track.finished(at[1])
    track.finished(at[1])
    told = track.value()
    assert told["rate"]["count"] == told["rate"]["held"] == 1 and told["rate"]["error"] == pytest.approx(0.25)
    assert told["finish"]["count"] == told["finish"]["held"] == 1
    assert told["finish"]["newest"][0]["measured"] == pytest.approx(1000.0)


def test_it_is_kept_and_restored_bounded_and_without_what_makes_no_sense() -> None:
    track = TrackRecord()
    at = train(track, 2, 10.0)
    track.planned(acted_on(), True, 0, at[1])
    train(track, 3 * WINDOW_STEPS + 1, 10.0, at)
    again = TrackRecord()
    again.restore(track.to_json())
    assert list(again.records) == list(track.records) and list(again.misses) == list(track.misses)
    for index in range(2 * RECORDS_MAX):
        track.rate_expected(f"w{index}", "", Interval(1.0, 1.0, 1.0), 0.0)
        track.rate_measured(f"w{index}", 1.0, 1.0)
    assert len(track.records) == RECORDS_MAX
    bad = TrackRecord()
    for text in ("", "[]", "{", '{"records": [{"what": 1}]}', '{"misses": ["x"]}', '{"misses": [7]}'):
        bad.restore(text)
    row = json.loads(again.to_json())["records"][0]
    bad.restore(json.dumps({"records": [{**row, "measured": float("nan")}]}))
    assert not bad.records and not bad.misses
    assert {one.value for one in Quantity} == set(track.value())
