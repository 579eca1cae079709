"""What the planner is told of workers: robust measures, priors by GPU; and predictions beside what happened."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from echo2.base.ids import PeerId, RunId, Version
from echo2.broadcast.trees import Needs, is_worth_sending, weighted_plan
from echo2.config.run import RunConfig
from echo2.coordinator.fleet.members import Member, Membership, OperatorSetting
from echo2.coordinator.fleet.record import WorkerRecords
from echo2.coordinator.money.market import built_in_catalogue
from echo2.coordinator.planning import telemetry
from echo2.cost_model.machines import GpuType
from echo2.cost_model.plan import Limit
from echo2.cost_model.planner import plan
from echo2.cost_model.relations import FleetModel
from echo2.cost_model.snapshot import FleetSnapshot, LinkEstimate, PlanConfig
from echo2.wire.bounds import check
from echo2.wire.broadcast import plan_to_message
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb
from tests.unit.cost_model.fleets import learner, snapshot, worker

RUN = RunId("run")


def beat(rollouts_per_s: float = 2.0, rollout_s_mean: float = 10.0) -> pb.Heartbeat:
    return pb.Heartbeat(
        has_version=True, rollouts_per_s=rollouts_per_s, tokens_per_s=200 * rollouts_per_s,
        rollout_s_mean=rollout_s_mean, rollout_s_p95=2 * rollout_s_mean,
    )  # fmt: skip


def fleet(*gpus: str) -> Membership:
    membership = Membership(15.0, 45.0, 100, WorkerRecords(60.0))
    for index, gpu in enumerate(gpus):
        hello = pb.WorkerHello(name=f"w{index}", run_id=RUN, gpu=gpu, slot_count=4, link=link(1e6))
        membership.change_of(membership.on_hello(PeerId(f"w{index}"), hello, 0.0), 0.0)
    return membership


def link(uplink_bytes_per_s: float) -> pb.Link:
    return pb.Link(uplink_bytes_per_s=uplink_bytes_per_s, downlink_bytes_per_s=2 * uplink_bytes_per_s, rtt_s=0.05)


def board(*train_s: float) -> telemetry.LearnerBoard:
    made = telemetry.LearnerBoard()
    hello = pb.LearnerHello(
        run_id=RUN, address="a:1", chunk_address="a:1", model_digest="d", rollouts_per_step=64, rollouts_per_group=8,
        full_snapshot_bytes=10**9,
    )  # fmt: skip
    made.on_hello(PeerId("learner"), hello, 0.0)
    for step, seconds in enumerate(train_s, start=1):
        made.on_report(pb.LearnerReport(step=step, train_s=seconds), float(step))
    return made


def fleet_snapshot(
    board: telemetry.LearnerBoard, members: Sequence[Member], now: float, catalogue: Mapping[str, GpuType]
) -> FleetSnapshot | None:
    """The snapshot, made at once; None while too little is known."""
    workers = telemetry.worker_estimates(board, members, now, catalogue)
    return None if workers is None else FleetSnapshot(now, telemetry.learner_estimate(board), tuple(workers))


def test_one_wild_heartbeat_or_step_moves_no_estimate() -> None:
    membership = fleet("H100")
    for at in range(6):
        membership.on_heartbeat(PeerId("w0"), beat(), None, float(at))
    membership.on_heartbeat(PeerId("w0"), beat(500.0, 0.01), None, 7.0)
    told = fleet_snapshot(board(10.0, 10.0, 900.0, 10.0), list(membership.members.values()), 8.0, {})
    assert (told.workers[0].rollouts_per_s, told.workers[0].rollout_s_mean) == (2.0, 10.0)
    assert told.learner.train_s == 10.0


def test_what_the_learner_reports_of_rewards_lengths_and_discarded_groups_is_in_the_plan() -> None:
    known = board(10.0)
    for step in range(2, 12):
        report = pb.LearnerReport(step=step, train_s=10.0, evaluation_rollouts=8.0, idle_s=1.0, discarded_rollouts=32 * step,
            reward_s=2.0, reward_processes=4, lengths=tuple(range(10, 74)),
        )  # fmt: skip
        known.on_report(report, float(step))
    told = fleet_snapshot(known, measured_fleet("H100", "H100", "H100"), 12.0, {})
    learner = told.learner
    assert (learner.trained_rollouts, learner.dropped_rollouts, learner.evaluation_rollouts) == (64, 32, 8)
    assert (learner.train_s, learner.idle_s, learner.lengths[-1]) == (11.0, 1.0, 73.0)
    made = plan(told, PlanConfig(staleness_bound=4))
    assert made.binding is Limit.REWARDS and made.predicted_utilisation < 0.25, "2 of 9.5 rewards/s"
    assert "19 processes" in made.binding_term.remedy and "more workers would not help" in made.binding_term.remedy


@pytest.mark.parametrize(
    ("counts", "dropped"), [((0, 32, 64, 96, 0, 32, 64, 96, 128), 32), ((0, 10**6, 2 * 10**6, 3 * 10**6), 127)]
)
def test_what_a_learner_discards_changes_the_plan_within_bounds(counts: tuple[int, ...], dropped: int) -> None:
    """A new process counts what it discards from 0 again; no claim makes it more than two thirds of what is generated."""
    known = board(10.0)
    for step, count in enumerate(counts, start=2):
        known.on_report(pb.LearnerReport(step=step, train_s=10.0, discarded_rollouts=count), float(step))
    told = fleet_snapshot(known, measured_fleet("H100", "H100", "H100"), 12.0, {})
    assert told is not None and told.learner.dropped_rollouts == dropped


def test_a_plan_reckons_with_deltas_before_the_first_is_measured_though_a_start_publishes_a_whole_version() -> None:
    """By whole snapshots a few workers were enough for what the links allow, and all others stood by."""
    known = board(10.0)
    known.on_publish(pb.VersionPublished(version=0, artifact_bytes=9 * 10**8, full_snapshot_bytes=10**9), 1.0, [], 5.0)
    assert telemetry.learner_estimate(known).delta_bytes == 0.01 * 10**9
    known.on_publish(pb.VersionPublished(version=1, has_parent=True, artifact_bytes=10**8), 1.0, [], 10.0)
    assert telemetry.learner_estimate(known).delta_bytes == 10**8


def measured_fleet(*gpus: str) -> list[Member]:
    """All but the last have been measured."""
    membership = fleet(*gpus)
    for index in range(len(gpus) - 1):
        membership.on_heartbeat(PeerId(f"w{index}"), beat(), None, 1.0)
    return list(membership.members.values())


def test_new_worker_starts_from_its_kind_else_from_the_catalogue() -> None:
    catalogue = built_in_catalogue()

    def prior(measured: list[Member], new: Member) -> telemetry.Speed:
        known = [(member.hello.gpu, telemetry.measured_speed(member)) for member in measured]
        return telemetry.prior_speed(new.hello.gpu, known, catalogue)

    *measured, new = measured_fleet("H100", "RTX4090", "RTX4090")
    assert not telemetry.is_measured(new) and prior(measured, new).rollouts_per_s == 2.0
    *measured, new = measured_fleet("RTX4090", "H100")
    found = prior(measured, new)
    assert found.rollouts_per_s == pytest.approx(2.0 * 3350 / 1008 * (79.6 / 24) ** 0.5)
    assert found.rollout_s_tail == pytest.approx(20.0 * 1008 / 3350)
    *measured, new = measured_fleet("RTX4090", "a home-made one")
    assert prior(measured, new).rollouts_per_s == 2.0
    told = fleet_snapshot(board(10.0), [*measured, new], 2.0, catalogue)
    assert told is not None and [one.is_pinned for one in told.workers] == [False, True]


def test_no_plan_counts_on_a_worker_that_is_drained_measured_or_not() -> None:
    members = measured_fleet("H100", "H100", "H100")
    members[0].setting = members[2].setting = OperatorSetting.DRAINING
    told = fleet_snapshot(board(10.0), members, 2.0, {})
    assert told is not None and plan(told, PlanConfig(4)).pool == ("w1",)
    members[0].setting, members[1].setting = OperatorSetting.ACTIVE, OperatorSetting.AUTOMATIC
    told = fleet_snapshot(board(10.0), members, 2.0, {})
    assert told is not None and [one.is_pinned for one in told.workers] == [True, False, False], (
        "the operator's choice is"
    )


def test_pool_relays_while_a_version_is_on_its_way_and_not_overdue() -> None:
    made, members = board(10.0), measured_fleet("H100", "H100", "H100")

    def relaying(now: float) -> list[bool]:
        told = fleet_snapshot(made, members, now, {})
        return [one.is_relaying for one in told.workers]

    assert relaying(5.0) == [False] * 3
    made.on_publish(pb.VersionPublished(version=1, has_parent=True), 8.0, [PeerId("w0")], 10.0)
    assert relaying(20.0) == [True] * 3
    assert relaying(10.0 + 3 * 8.0 + 1.0) == [False] * 3
    made.on_live(PeerId("w0"), Version(1), 21.0)
    assert relaying(22.0) == [False] * 3


def test_efficiency_of_broadcasts_follows_what_deltas_reached_alone_on_the_links() -> None:
    made, one = board(10.0), PeerId("w0")
    config = RunConfig()
    assert telemetry.plan_config(config, made).broadcast_efficiency == 0.8

    def broadcast(version: int, took_s: float, parent: int | None, pool: tuple[PeerId, ...] = (one,)) -> None:
        published = pb.VersionPublished(version=version, parent=parent or 0, has_parent=parent is not None)
        made.on_publish(published, 3.0, pool, 100.0 * version)
        made.on_live(one, Version(version), 100.0 * version + took_s)

    for version in range(1, 6):
        broadcast(version, 60.0, None)  # a keyframe is fetched by those who need it: it says nothing
    assert made.broadcast_efficiency == 0.8
    for version in range(6, 32):
        broadcast(version, 6.0, version - 1)
    assert telemetry.plan_config(config, made).broadcast_efficiency == pytest.approx(0.5, abs=0.05)
    for version in range(32, 36):
        broadcast(version, 90.0, version - 1, pool=(one, PeerId("away")) if version == 32 else (one,))
    assert made.broadcast_efficiency == pytest.approx(0.5, abs=0.05), "the links had another version as well"
    made.on_leave(PeerId("away"), 3600.0)
    for version in range(36, 66):
        broadcast(version, 1000.0, version - 1)
    assert made.broadcast_efficiency == 0.25


def test_a_version_is_complete_with_the_last_that_has_it_or_leaves_and_an_older_one_is_never_the_newest() -> None:
    made, one, two = board(10.0), PeerId("w0"), PeerId("w1")
    for version in (1, 2, 3):
        made.on_publish(pb.VersionPublished(version=version, has_parent=True), 3.0, [one, two], 10.0)
    rows = made.versions
    made.on_live(one, Version(2), 12.0)
    assert made.newest_complete is None, "the other lacks it"
    made.on_publish(rows[Version(2)].published, 3.0, [one, two], 13.0)  # as a learner that reconnects tells again
    assert made.totals.versions == 3
    rows[Version(1)].waiting.add(three := PeerId("w2"))
    made.on_leave(two, 15.0)
    assert made.newest_complete is rows[Version(2)] and rows[Version(2)].complete_s == 5.0
    made.on_live(three, Version(1), 20.0)
    assert rows[Version(1)].complete_s == 10.0 and made.newest_complete is rows[Version(2)]
    made.on_leave(one, 21.0)
    assert rows[Version(3)].complete_s is None, "nobody has it"
    for version in range(4, 3 * telemetry.VERSIONS_KEPT):
        made.on_publish(pb.VersionPublished(version=version), 3.0, [], 30.0)
    assert len(rows) == telemetry.VERSIONS_KEPT and made.newest is rows[Version(3 * telemetry.VERSIONS_KEPT - 1)]


def test_predictions_stand_next_to_what_happened() -> None:
    made = board(10.0)
    reckoning = telemetry.CurrentPlan(made)
    chosen = plan(snapshot(tuple(worker(f"w{i}") for i in range(8))), PlanConfig(4))
    reckoning.adopt(chosen, True)
    for at in (10.0, 20.0):
        spent = chosen.usd_per_hour * at / 3600
        reckoning.on_step(pb.LearnerReport(utilisation=chosen.predicted_utilisation - 0.05), spent, at)
    assert reckoning.mean_error("utilisation") == pytest.approx(0.05)
    assert reckoning.mean_error("usd_per_hour") == pytest.approx(0.0, abs=1e-9)
    made.on_publish(pb.VersionPublished(version=1, has_parent=True), 3.0, [PeerId("w0")], 20.0)
    made.on_live(PeerId("w0"), Version(1), 25.0)
    for _ in range(2):
        reckoning.on_spread(made.newest_complete)
    assert [*reckoning.errors["broadcast_s"]] == pytest.approx([5.0 - 3.0])


def test_workers_at_work_weigh_what_they_give_and_as_much_is_needed_as_the_plan_asks_for() -> None:
    membership, made = fleet("A100", "A100", "A100", "A100"), board(10.0)
    members = membership.members
    for name, rate in (("w0", 2.0), ("w1", 6.0)):
        members[PeerId(name)].measures.observe(beat(rate))
    members[PeerId("w3")].is_wanted = False
    membership.change_of(members[PeerId("w3")], 2.0)
    nodes = telemetry.broadcast_nodes(made, list(members.values()))
    assert [node.peer_id for node in nodes] == ["learner", "w0", "w1", "w2", "w3"]
    assert telemetry.needs_of(nodes, members, None) == Needs(
        (2.0, 6.0, 4.0, 0.0)
    )  # w2 was not measured: as much as is usual
    snapshot = fleet_snapshot(made, list(members.values()), 3.0, {})
    chosen = plan(snapshot, PlanConfig(4))
    needed = next(term.limit for term in chosen.terms if term.limit_kind is Limit.THROUGHPUT)
    assert 0 < needed < 12 / telemetry.RATE_MARGIN
    assert telemetry.needs_of(nodes, members, chosen).share == pytest.approx(telemetry.RATE_MARGIN * needed / 12)


def test_the_pools_planner_and_the_broadcast_plan_predict_the_same_for_a_pool_beside_a_slow_standby_worker() -> None:
    membership, made = fleet(*["A100"] * 6), board(10.0)
    members = membership.members
    idle = members[PeerId("w5")]
    idle.hello.link.CopyFrom(link(1e5))
    idle.is_wanted = False
    membership.change_of(idle, 1.0)
    nodes = telemetry.broadcast_nodes(made, list(members.values()))
    known = weighted_plan(nodes, telemetry.needs_of(nodes, members, None), 1, 10**8)
    seed, *pool = [LinkEstimate(node.up, node.down, node.rtt_s) for node in nodes[:-1]]
    workers = tuple(worker(f"w{index}", link=link) for index, link in enumerate(pool))
    told = learner(link=seed, delta_bytes=1e8)
    fluid = FleetModel.of(snapshot(workers, learner=told), PlanConfig(1, broadcast_efficiency=1.0))
    own_s = fluid.links_s(1, np.arange(len(workers)))[1].max()
    round_trips_s = seed.rtt_s + max(link.rtt_s for link in pool)
    assert known.predicted_needed_s == pytest.approx(own_s + round_trips_s, rel=0.05)
    assert known.predicted_all_s > 5 * known.predicted_needed_s and known.late == {idle.peer_id}
    idle.is_wanted = True
    membership.change_of(idle, 2.0)
    needs = telemetry.needs_of(nodes, members, None)
    assert not is_worth_sending(known, weighted_plan(nodes, needs, 2, 10**8), needs), "it is served late at work too"


def test_the_broadcasts_planner_knows_regions_what_their_traffic_costs_and_what_a_second_of_the_pool_does() -> None:
    membership, made = fleet("A100", "A100", "A100", "A100", "A100"), board(10.0)
    members = membership.members
    places = (("AWS", "us-east-1"), ("aws", ""), ("", "here"), ("aws", "US-EAST-1"), ("İ" * 64, "x" * 64))
    for member, (provider, region) in zip(members.values(), places, strict=True):
        member.hello.MergeFrom(pb.WorkerHello(provider=provider, region=region, price_usd_per_hour=1.2))
    nodes = telemetry.broadcast_nodes(made, list(members.values()))
    assert [node.egress_usd_per_gib for node in nodes] == [0.0, 0.09, 0.09, 0.0, 0.09, 0.0]
    _, east, *unknown, same, odd = [node.region for node in nodes]
    assert unknown == ["", ""] and east and same == east and odd not in ("", east)
    made_plan = weighted_plan(nodes, Needs((1.0,) * 5), 2, 10**8)
    check(plan_to_message(made_plan), "no name of a worker's makes a plan that nodes refuse")
    members[PeerId("w2")].is_wanted = False
    membership.change_of(members[PeerId("w2")], 1.0)
    assert telemetry.pool_usd_per_s(members.values()) == pytest.approx(4 * 1.2 / 3600)


def test_a_worker_that_says_it_has_no_gpu_of_its_kind_keeps_nobody_from_a_plan() -> None:
    catalogue = built_in_catalogue()
    for liar, honest in (("0 x H100", "L4"), ("L4", "0 x H100")):
        workers = fleet(liar, honest)
        workers.on_heartbeat(PeerId("w0"), beat(), None, 1.0)
        estimates = telemetry.worker_estimates(board(1.0), list(workers.members.values()), 1.0, catalogue)
        assert estimates is not None and all(one.rollouts_per_s > 0 for one in estimates)


def test_what_a_worker_claims_to_run_at_a_time_takes_no_planners_memory() -> None:
    """Little's law on claims: a million rollouts a second of an hour each are four billion at a time, a list of 30 GB."""
    for rate, mean_s in ((1e6, 3600.0), (0.5, 1e9), (1e15, 1e9)):
        fleet = FleetModel.of(snapshot((worker("liar", rate, rollout_s_mean=mean_s, is_pinned=True),)), PlanConfig(4))
        assert 1 <= fleet.slots.max() <= 65_536
