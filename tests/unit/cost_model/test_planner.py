from __future__ import annotations

import dataclasses
import itertools
import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.base.errors import ConfigError
from echo2.base.ids import PeerId
from echo2.cost_model.plan import Limit, Plan
from echo2.cost_model.planner import plan
from echo2.cost_model.relations import FleetModel
from echo2.cost_model.snapshot import FleetSnapshot, LinkEstimate, PlanConfig, WorkerState
from tests.unit.cost_model.fleets import learner, random_workers, snapshot, worker


def least_price_by_brute_force(snapshot: FleetSnapshot, config: PlanConfig) -> float:
    """Every subset under every period, judged by the relations alone."""
    fleet, best = FleetModel.of(snapshot, config), math.inf
    subsets = np.array(list(itertools.product([False, True], repeat=len(fleet))))
    prices, rates = subsets @ fleet.price, subsets @ fleet.rate
    for kappa in config.kappas:
        for index in np.flatnonzero((prices < best) & (rates >= fleet.rate_needed * 0.99)).tolist():
            if prices[index] < best and fleet.evaluate(kappa, subsets[index]).keeps_relations(fleet.rate_needed):
                best = float(prices[index])
    return best


@pytest.mark.parametrize("seed", range(25))
def test_chosen_plan_is_within_one_percent_of_brute_force(seed: int) -> None:
    count = 6 + seed % 4
    # Rollouts are short beside a step and no machine is lost here, so a rehearsal has no objection to what the relations allow.
    workers = tuple(
        dataclasses.replace(one, rollout_s_max=one.rollout_s_tail, hazard_per_hour=0.0)
        for one in random_workers(count, seed)
    )
    fleet = snapshot(workers, learner=learner(train_s=256 / (0.5 * count), rollouts_per_step=256))
    config = PlanConfig(staleness_bound=2 + seed % 5)
    chosen, least = plan(fleet, config), least_price_by_brute_force(fleet, config)
    assert chosen.is_feasible == math.isfinite(least)
    if chosen.is_feasible:
        assert least * (1 - 1e-6) <= chosen.usd_per_hour <= least * 1.01


@settings(max_examples=10, deadline=None)
@given(st.integers(3, 8), st.integers(0, 10**6), st.integers(1, 6), st.sampled_from(["link", "more", "price", "bound"]))
def test_more_bandwidth_more_workers_lower_price_or_larger_bound_is_never_worse(
    count: int, seed: int, bound: int, change: str
) -> None:
    assert_change_is_never_worse(count, seed, bound, change)


def test_two_more_workers_do_not_hide_a_feasible_pool() -> None:
    assert_change_is_never_worse(8, 90, 2, "more")


def assert_change_is_never_worse(count: int, seed: int, bound: int, change: str) -> None:
    workers = random_workers(count, seed)
    seat = learner(train_s=256 / (0.4 * count), delta_bytes=6e8)
    config, better = PlanConfig(bound), PlanConfig(bound)
    if change == "link":
        seat = dataclasses.replace(seat, link=LinkEstimate(2e6, 1e8))
        better_seat = dataclasses.replace(seat, link=LinkEstimate(4e7, 1e8))
    else:
        better_seat = seat
    others = workers
    if change == "more":
        others = (*workers, *(dataclasses.replace(one, worker_id=PeerId(one.worker_id + "x")) for one in workers[:2]))
    if change == "price":
        others = tuple(dataclasses.replace(one, price_usd_per_hour=one.price_usd_per_hour * 0.7) for one in workers)
    if change == "bound":
        better = PlanConfig(bound + 1)
    before = plan(snapshot(workers, learner=seat), config)
    after = plan(snapshot(others, learner=better_seat), better)
    if before.is_feasible:
        assert after.is_feasible
        assert after.usd_per_hour <= before.usd_per_hour * (1 + 2e-3)


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 12), st.integers(0, 10**6), st.integers(1, 8))
def test_plans_are_deterministic_and_feasible_ones_keep_every_term(count: int, seed: int, bound: int) -> None:
    fleet = snapshot(random_workers(count, seed), learner=learner(train_s=256 / (0.4 * count)))
    first, second = (plan(fleet, PlanConfig(bound)) for _ in range(2))
    assert first == second
    assert 1 <= first.kappa <= bound
    assert first.in_flight_cap_rollouts >= 256 and first.in_flight_cap_rollouts % 16 == 0
    if first.is_feasible:  # else a term is broken, or whole groups do not reach what the relations alone allow
        assert all(term.is_met for term in first.terms)
        assert first.predicted_utilisation >= 0.975


def test_slow_network_gets_a_shorter_period_than_the_default() -> None:
    """T_bcast = 3*T_train at kappa = 5 would starve; the plan publishes more often."""
    seat = learner(link=LinkEstimate(1.2e8 / (0.8 * 3 * 64), 1e8), delta_growth=0.0)
    fleet = snapshot(tuple(worker(f"w{i}", rollout_s_tail=20.0, rollout_s_mean=10.0) for i in range(8)), learner=seat)
    chosen = plan(fleet, PlanConfig(6))
    assert chosen.is_feasible and chosen.kappa == 3
    default = plan(fleet, PlanConfig(6, fixed_kappa=5))
    assert not default.is_feasible and default.predicted_utilisation < 0.8
    assert default.binding is Limit.STALENESS and "raise S to" in default.binding_term.remedy


def test_infeasible_plans_name_the_term_and_what_would_mend_it() -> None:
    short = plan(snapshot((worker("a"),)), PlanConfig(4))
    assert short.binding is Limit.THROUGHPUT and "2.92 rollouts/s" in short.binding_term.remedy
    assert short.pool == ("a",)
    workers = tuple(worker(f"w{i}") for i in range(8))
    slow = plan(snapshot(workers, learner=learner(link=LinkEstimate(1e4, 1e8))), PlanConfig(4))
    assert not slow.is_feasible and slow.binding in (Limit.BROADCAST, Limit.STALENESS)
    capped = plan(snapshot(workers), PlanConfig(4, usd_per_hour_cap=1.0))
    assert not capped.is_feasible and capped.usd_per_hour <= 1.0


@pytest.mark.parametrize("count", [2, 60])
@pytest.mark.parametrize("cap, state", [(1.0, WorkerState.ACTIVE), (0.0, WorkerState.UNAVAILABLE)])
def test_where_no_worker_may_be_chosen_the_plan_is_empty_and_says_why(
    count: int, cap: float, state: WorkerState
) -> None:
    workers = tuple(worker(f"w{i}", price=2.0, state=state) for i in range(count))
    empty = plan(snapshot(workers), PlanConfig(4, usd_per_hour_cap=cap))
    assert empty.pool == () and not empty.is_feasible and empty.binding_term.remedy


def test_a_remedy_that_rounds_to_no_change_is_not_told() -> None:
    workers = tuple(worker(f"w{i}", is_pinned=True) for i in range(8))

    def remedy(train_s: float) -> tuple[str, float]:
        chosen = plan(snapshot(workers, learner=learner(train_s=train_s)), PlanConfig(4, fixed_kappa=4))
        term = next(one for one in chosen.terms if one.limit_kind is Limit.STALENESS)
        return term.remedy, term.value

    needed_s = remedy(64.0)[1]
    far, near, nearest = (remedy(needed_s * share)[0] for share in (0.9, 0.99, 0.99999))
    assert "links 3.6 times" in far and "1.6 times the pool" in far and "(now 73.7 s)" in far
    assert "links 1.1 times" in near and "the pool" not in near
    assert nearest == "raise S to 5"


def test_a_cap_or_budget_raised_as_told_is_enough() -> None:
    workers = tuple(worker(f"w{i}", price=312.3403, is_pinned=True) for i in range(8))
    short = plan(snapshot(workers), PlanConfig(4, usd_per_hour_cap=2498.0))
    told = re.match(r"raise it to ([\d.]+) USD/h", short.binding_term.remedy)
    assert short.binding is Limit.USD_PER_HOUR and told and told[1] == "2498.73"
    assert plan(snapshot(workers), PlanConfig(4, usd_per_hour_cap=float(told[1]))).is_feasible


def test_spent_budget_drains_everyone() -> None:
    workers = tuple(worker(f"w{i}", state=WorkerState.ACTIVE) for i in range(8))
    spent = plan(snapshot(workers, spent_usd=10.0), PlanConfig(4, usd_budget=10.0))
    assert spent.pool == () and len(spent.drain) == 8 and "budget" in spent.reason


def test_provider_limit_is_kept() -> None:
    cheap = tuple(worker(f"c{i}", price=0.1, provider="cheap") for i in range(8))
    dear = tuple(worker(f"d{i}", price=0.9, provider="dear") for i in range(8))
    chosen = plan(snapshot((*cheap, *dear)), PlanConfig(4, provider_workers_max=(("cheap", 2),)))
    assert chosen.is_feasible
    assert sum(one.startswith("c") for one in chosen.pool) == 2


def activated(fleet: FleetSnapshot, chosen: Plan, now_s: float) -> FleetSnapshot:
    """The fleet after the plan was carried out."""
    pool = set(chosen.pool)
    workers = []
    for one in fleet.workers:
        state = WorkerState.ACTIVE if one.worker_id in pool else WorkerState.STANDBY
        since = one.state_since_s if state is one.state else now_s
        workers.append(dataclasses.replace(one, state=state, state_since_s=since))
    return dataclasses.replace(fleet, workers=tuple(workers), now_s=now_s)


def test_small_changes_keep_the_pool_and_a_lost_worker_is_replaced() -> None:
    fleet = snapshot(random_workers(12, 5))
    config = PlanConfig(6)
    first = plan(fleet, config)
    fleet = activated(fleet, first, 1000.0)
    cheaper = tuple(dataclasses.replace(one, price_usd_per_hour=one.price_usd_per_hour * 1.03) for one in fleet.workers)
    kept = plan(dataclasses.replace(fleet, workers=cheaper, now_s=2000.0), config, first)
    assert kept.pool == first.pool and not kept.activate and not kept.drain
    lost = first.pool[0]
    without = tuple(
        dataclasses.replace(one, state=WorkerState.UNAVAILABLE) if one.worker_id == lost else one
        for one in fleet.workers
    )
    mended = plan(dataclasses.replace(fleet, workers=without, now_s=2100.0), config, kept)
    assert lost not in mended.pool and mended.is_feasible


def test_a_little_shortage_is_mended_after_the_dwell_and_a_loss_at_once() -> None:
    config = PlanConfig(4)
    workers = tuple(worker(f"w{i:02d}", price=0.4 + 0.01 * i) for i in range(20))
    seat = learner(rollouts_per_step=640)
    first = plan(snapshot(workers, learner=seat), config)
    fleet = activated(snapshot(workers, learner=seat), first, 0.0)
    short = first.throughput_rollouts_per_s / (seat.rollouts_per_step / seat.train_s * config.target_utilisation)
    noisy = dataclasses.replace(seat, train_s=seat.train_s / short / 1.06)
    little = plan(dataclasses.replace(fleet, learner=noisy, now_s=1000.0), config, first)
    assert little.pool == first.pool and little.short_since_s == 1000.0
    calm = plan(dataclasses.replace(fleet, now_s=1100.0), config, little)
    assert calm.pool == first.pool and calm.short_since_s is None
    lasting = plan(dataclasses.replace(fleet, learner=noisy, now_s=1400.0), config, little)
    assert len(lasting.pool) > len(first.pool) and lasting.is_feasible
    gone = tuple(
        dataclasses.replace(one, state=WorkerState.UNAVAILABLE) if one.worker_id == first.pool[0] else one
        for one in fleet.workers
    )
    mended = plan(dataclasses.replace(fleet, workers=gone, learner=noisy, now_s=1000.0), config, first)
    assert mended.is_feasible and mended.activate


def test_a_pool_that_is_too_large_lets_members_go_and_takes_no_others() -> None:
    config = PlanConfig(4)
    workers = tuple(worker(f"w{i:02d}", price=0.4 - 0.001 * (i >= 10)) for i in range(20))
    large, small = learner(rollouts_per_step=512), learner(rollouts_per_step=320)
    first = plan(snapshot(workers[:10], learner=large), config)
    fleet = activated(snapshot(workers, learner=small), first, 0.0)
    known = plan(dataclasses.replace(fleet, now_s=1000.0), config, first)
    assert known.pool == first.pool
    shrunk = plan(dataclasses.replace(fleet, now_s=1400.0), config, known)
    assert shrunk.is_feasible and not shrunk.activate and shrunk.drain
    assert set(shrunk.pool) < set(first.pool)


def test_a_much_cheaper_pool_is_taken_after_the_dwell_but_relays_stay() -> None:
    dear = tuple(worker(f"d{i}", price=1.0, state=WorkerState.ACTIVE) for i in range(5))
    config = PlanConfig(4)
    first = plan(snapshot(dear), config)
    both = (*dear, *(worker(f"c{i}", price=0.2) for i in range(6)))
    known = plan(snapshot(both, now_s=1000.0), config, first)
    assert known.pool == first.pool and known.over_provisioned_since_s == 1000.0
    changed = plan(snapshot(both, now_s=1400.0), config, known)
    assert all(one.startswith("c") for one in changed.pool)
    relaying = (dataclasses.replace(both[0], is_relaying=True), *both[1:])
    held = plan(snapshot(relaying, now_s=1400.0), config, known)
    assert "d0" in held.pool


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: worker("a", price=-1.0), "price_usd_per_hour"),
        (lambda: worker("a", rate=math.nan), "rollouts_per_s"),
        (lambda: PlanConfig(-1), "staleness_bound"),
        (lambda: PlanConfig(4, fixed_kappa=5), "fixed_kappa"),
        (lambda: snapshot(()), "workers"),
        (lambda: snapshot((worker("a"), worker("a"))), "worker_id"),
        (lambda: LinkEstimate(math.inf, 1.0), "uplink"),
        (lambda: learner(rollouts_per_group=1000), "rollouts_per_group"),
    ],
)
def test_bad_input_names_the_field_the_value_and_the_range(make: object, told: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){told}.*expected.*got"):
        make()  # type: ignore[operator]


def test_a_best_effort_lets_versions_wait_for_the_links_only_where_that_is_worth_it() -> None:
    """A slow uplink: of the periods that keep up none comes near to the best one, which does not."""
    link = LinkEstimate(1e6, 1e6, 0.05)
    workers = tuple(
        worker(f"w{i}", 400.0, link=link, rollout_s_mean=1.0, rollout_s_tail=3.0, rollout_s_max=3.0) for i in range(3)
    )
    trains = learner(
        train_s=1.0, rollouts_per_step=192, rollouts_per_group=8, link=link, delta_bytes=1.0e6, full_snapshot_bytes=4e6
    )
    fleet = snapshot(workers, learner=trains)
    chosen = plan(fleet, PlanConfig(staleness_bound=4))
    assert not chosen.is_feasible and chosen.pool
    by_period = {kappa: plan(fleet, PlanConfig(4, fixed_kappa=kappa)) for kappa in range(1, 5)}
    keeping_up = [one for kappa, one in by_period.items() if one.transfer_s <= kappa * trains.train_s]
    assert keeping_up
    assert chosen.predicted_utilisation >= max(one.predicted_utilisation for one in by_period.values()) * 0.97
    if chosen.transfer_s > chosen.kappa * trains.train_s:
        assert chosen.predicted_utilisation > max(one.predicted_utilisation for one in keeping_up) * 1.03


def test_best_efforts_keep_providers_limits_and_the_cap() -> None:
    workers = tuple(worker(f"w{i}", provider="one") for i in range(20))
    config = PlanConfig(4, provider_workers_max=(("one", 2),))
    assert len(plan(snapshot(workers), config).pool) == 2
    pinned = tuple(dataclasses.replace(one, is_pinned=index == 7) for index, one in enumerate(workers))
    capped = plan(snapshot(pinned), PlanConfig(4, usd_per_hour_cap=0.9))
    assert "w7" in capped.pool and capped.usd_per_hour <= 0.9 and not capped.is_feasible


@pytest.mark.parametrize("uplink_bytes_per_s", [1e4, 1e5, 1e6])
@pytest.mark.parametrize("count", [1, 3, 12, 40])
def test_a_fleet_that_no_version_reaches_in_time_is_still_put_to_work(uplink_bytes_per_s: float, count: int) -> None:
    """A best effort of nobody would stop the run: that its broadcast takes no time does not speak for it."""
    slow = LinkEstimate(uplink_bytes_per_s, uplink_bytes_per_s, 0.05)
    workers = tuple(worker(f"w{number}", link=slow) for number in range(count))
    made = plan(snapshot(workers, learner=learner(link=slow, train_s=1.0)), PlanConfig(staleness_bound=4))
    assert not made.is_feasible
    assert made.pool and made.predicted_utilisation > 0


def test_rewards_that_are_too_slow_are_the_term_that_binds_and_workers_are_no_remedy() -> None:
    workers = tuple(worker(f"w{i}", rollout_s_max=90.0) for i in range(10))
    slow = plan(snapshot(workers, learner=learner(reward_s=1.0, reward_processes=2)), PlanConfig(4))
    assert not slow.is_feasible and slow.binding is Limit.REWARDS and slow.predicted_utilisation < 0.6
    assert (
        "let 4 processes compute rewards" in slow.reason
        and "task.ray" in slow.reason
        and "add workers" not in slow.reason
    )
    assert plan(snapshot(workers, learner=learner(reward_s=1.0, reward_processes=8)), PlanConfig(4)).is_feasible


def test_machines_that_are_lost_lower_the_promise_and_it_says_by_how_much() -> None:
    """Half a loss an hour and ten minutes to join: 0.99 was promised where 0.91 to 0.95 were had."""
    lossy = {"hazard_per_hour": 0.5, "join_s": 600.0, "rollout_s_max": 90.0, "is_pinned": True}
    spot = tuple(worker(f"w{i}", 1.08, **lossy) for i in range(4))
    calm = tuple(dataclasses.replace(one, hazard_per_hour=0.0) for one in spot)
    had, promised = (plan(snapshot(one), PlanConfig(4)) for one in (spot, calm))
    assert promised.predicted_utilisation > 0.99 and promised.utilisation_spread == 0.0
    assert 0.88 < had.predicted_utilisation < 0.97 and had.utilisation_spread > 0.02
    assert "plus or minus" in had.reason


def test_a_kept_pool_is_judged_like_a_fresh_one() -> None:
    """The verdict is that of the plan's own numbers: it once said feasible at 89 % beside a target of 98 %."""
    workers = tuple(worker(f"w{i:02d}", price=0.4 + 0.01 * i) for i in range(20))
    seat = learner(rollouts_per_step=640)
    first = plan(snapshot(workers, learner=seat), PlanConfig(4))
    fleet = activated(snapshot(workers, learner=seat), first, 0.0)
    for faster in (0.97, 0.9, 0.85, 0.7):
        quick = dataclasses.replace(seat, train_s=seat.train_s * faster)
        kept = plan(dataclasses.replace(fleet, learner=quick, now_s=1000.0), PlanConfig(4), first)
        reached = kept.predicted_utilisation >= 0.98 - 0.005
        assert kept.is_feasible == (reached and all(term.is_met for term in kept.terms))


def test_a_budget_is_a_constraint_the_cheapest_way_to_finish() -> None:
    cheap = tuple(worker(f"c{i}", 0.4, 0.05) for i in range(3))
    dear = tuple(worker(f"d{i}", 1.0, 1.0) for i in range(8))
    fleet = snapshot((*cheap, *dear), steps_left=200)
    free = plan(fleet, PlanConfig(4))
    assert free.is_feasible and free.usd_to_finish > 11.0
    tight = plan(fleet, PlanConfig(4, usd_budget=8.0))
    assert not tight.is_feasible and tight.usd_to_finish <= 8.0 and "finishes for" in tight.reason
    assert tight.predicted_utilisation < free.predicted_utilisation
    hopeless = plan(fleet, PlanConfig(4, usd_budget=0.5))
    assert "cannot finish" in hopeless.reason and "would finish" in hopeless.reason
