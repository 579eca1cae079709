"""What is shown of a run: the page's sections and `echo2 status` tell the same facts, each as it is, in one state after another."""

import json
from pathlib import Path
from typing import Any

import pytest

from echo2.base.errors import LimitExceeded, MalformedMessage
from echo2.base.ids import PeerId, Version
from echo2.broadcast.reachability import Access
from echo2.coordinator.fleet.members import Liveness, OperatorSetting
from echo2.coordinator.money.provisioning import MachineState, RentedMachine
from echo2.coordinator.store import EVENTS_MAX, PAID_MAX, SAMPLE_LINES, SAMPLES_MAX, CurvePoint
from echo2.coordinator.streams import SEND_QUEUE_MAX, StreamSession
from echo2.coordinator.web.page import FRESH_S, ChangedValues
from echo2.coordinator.web.state import MACHINES_SHOWN, TOKENS_SHOWN
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb
from tests.unit.coordinator.test_lease_book import delivery, spec
from tests.unit.coordinator.test_limits import Fleet, plan
from tests.unit.coordinator.test_provisioner import Cloud, Scene


def with_learner(fleet: Fleet, **report: Any) -> None:
    """A learner is connected, and has made three of twenty steps."""
    hello = pb.LearnerHello(
        model_name="m", step=3, step_limit=20, rollouts_per_step=8, rollouts_per_group=2, newest_version=3,
        full_snapshot_bytes=10**7, address="h:5", chunk_address="h:6",
    )  # fmt: skip
    fleet.hub.board.on_hello(PeerId("learner"), hello, fleet.clock.now())
    report = {"utilisation": 0.75, "trained_tokens": 4000, "eval_reward": -1, **report}
    fleet.hub.learner.on_message(
        PeerId("learner"),
        pb.LearnerMessage(report=pb.LearnerReport(step=3, train_s=1.25, reward_mean=0.5, newest_version=3, **report)),
    )


def same_facts(fleet: Fleet) -> tuple[dict[str, Any], pb.RunStatus]:
    """Both forms, after a look at every fact that both have."""
    view, hub = fleet.commands.view, fleet.hub
    page, status = view.sections(), view.status()
    run, learner, money, leases, sent = (page[name] for name in ("run", "learner", "money", "leases", "broadcast"))
    assert (run["run_id"], run["finished"]) == (status.run_id, status.finished)
    if learner["is_known"]:
        shown = (learner["is_connected"], learner["model"], learner["version"], learner["utilisation"])
        assert shown == (status.learner_is_connected, status.learner_hello.model_name, 3, status.measured_utilisation)
        assert (learner["step"], learner["buffered"]) == (status.learner.step, status.learner.buffered_rollouts)
    spent = (status.usd_spent, status.usd_per_hour, status.usd_useful)
    assert (money["spent"], money["per_hour"], money["useful"]) == tuple(pytest.approx(one, abs=1e-4) for one in spent)
    assert (leases["open"], leases["queued"]) == (status.open_leases, status.queued_groups)
    published = (status.artifact_bytes_published, status.full_bytes_published)
    assert (sent["artifact_bytes"], sent["full_bytes"]) == published
    assert [(one["what"], one["since"]) for one in page["waits"]] == [
        (one.what, round(one.since_unix_s, 1)) for one in status.waits
    ]
    assert [one["text"] for one in page["events"]] == [one.text for one in status.events]
    headline = page["advice"].headline
    assert (headline.text, headline.kind) == (status.headline, status.headline_kind)
    for worker in status.workers:
        row = view.worker(hub.membership.members[PeerId(worker.peer_id)])
        assert (row["name"], row["state"], row["leases"]) == (worker.name, worker.state, worker.leases)
        assert row["usd_spent"] == pytest.approx(worker.usd_spent, abs=1e-4)
        assert row["tokens_per_s"] == worker.heartbeat.tokens_per_s and row["gpu"] == (worker.hello.gpu or "cpu")
    return page, status


async def test_page_and_status_tell_the_same_and_what_is_so(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 1.0, 2.0)
    hub = fleet.hub
    page, status = same_facts(fleet)
    assert page["learner"] == {"is_known": False} and not status.HasField("learner_hello")
    assert status.headline.startswith("Start the learner")
    for member in hub.membership.members.values():
        hub.review(member)
        hub.allow(member)
    with_learner(fleet)
    hub.handle(hub.book.request, PeerId("w0"), 4, Version(3))
    hub.handle(hub.book.offer, tuple(spec(f"g{number}", 3) for number in range(5)))
    fleet.passes(1800.0)
    page, status = same_facts(fleet)
    assert status.usd_spent == pytest.approx(1.5) and status.usd_per_hour == 3.0 and status.usd_useful_per_hour == 3.0
    assert page["money"]["per_mtok"] == pytest.approx(1e6 * 1.5 / 4000)
    assert status.open_leases == len(hub.book.leases) > 0 and status.queued_groups == 5 - status.open_leases
    assert [worker.leases for worker in status.workers] == [status.open_leases, 0]
    fleet.clock.time += 0.5
    assert [worker.heartbeat_age_s for worker in fleet.commands.view.status().workers] == [0.5, 0.5]
    fleet.passes(0.0)
    assert "worker w0" in next(one.what for one in status.waits if "without progress" in one.what)
    hub.adopt_plan(plan([PeerId("w0")]), fleet.everybody, True)
    page, status = same_facts(fleet)
    assert status.plan.kappa == page["plan"]["kappa"] and tuple(status.plan_terms) == hub.plan.now.term_lines()
    assert [(one.action, one.whom) for one in page["money"]["journal"]] == [("standby", "w1")]
    before = status
    fleet.passes(3600.0)
    _, status = same_facts(fleet)
    rose = (status.usd_spent - before.usd_spent, status.usd_useful - before.usd_useful)
    assert rose == (pytest.approx(3.0), pytest.approx(1.0)), "who stands by is on the bill and does nothing useful"
    delivered = pb.WorkersDelivered(workers=[delivery(PeerId("w0"), 1, 3.0), delivery(PeerId("w1"), 1, 1.0)])
    hub.learner.on_message(PeerId("learner"), pb.LearnerMessage(delivered=delivered))
    bills = [fleet.commands.view.worker(member)["usd_per_mtok"] for member in hub.membership.members.values()]
    whole = pytest.approx([1e6 * 1.5 / 3000, 1e6 * 3.0 / 1000], rel=1e-3)
    assert bills == whole, "its whole bill, by its part of the tokens"


async def test_of_thousands_that_have_gone_little_is_made_and_every_open_machine_has_its_button(tmp_path: Path) -> None:
    """As after weeks of spot machines."""
    run = Scene(tmp_path, Cloud())
    values, machine = ChangedValues(run.hub, run.commands.view), await run.provisioner.rent("gpu", "", "a test")
    run.join(machine, "kept")
    run.hub.membership.members[run.join(machine, "gone")].last_liveness = Liveness.GONE
    await values.changes_since(0)
    run.clock.time += FRESH_S
    run.hub.board.report.newest_version += 1
    assert "workers" not in await values.changes_since(values.serial), "how far it is behind is the page's to tell"
    run.clock.time += 3600.0
    assert json.loads((await values.changes_since(values.serial))["workers"]).keys() == {"kept"}
    for number in range(MACHINES_SHOWN):
        name = f"m{number}"
        run.provisioner.machines[name] = RentedMachine(name, "gpu", "cloud", "", MachineState.STARTING, 2.0, number)
    for _ in range(TOKENS_SHOWN):
        run.commands.create_token("worker", "", 60.0, 1)[0].is_revoked = True
    page = run.commands.view.sections()
    assert len(page["machines"]["machines"]) == page["machines"]["count"] == MACHINES_SHOWN + 1
    assert [token["is_revoked"] for token in page["tokens"]] == [False] + (TOKENS_SHOWN - 1) * [True]


async def test_page_and_status_of_a_run_that_starves_is_over_its_budget_or_finished(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 1.0, 2.0, usd_budget=1.0)
    for member in fleet.hub.membership.members.values():
        fleet.hub.review(member)
    with_learner(fleet, waits_for="rollouts: none has come", waits_since_s=300.0)
    _, status = same_facts(fleet)
    assert status.headline.startswith("Look at what is missing: the learner waits 5 min for rollouts")
    (wait,) = [one for one in status.waits if one.what.startswith("the learner waits for rollouts")]
    assert fleet.clock.now() - wait.since_unix_s == pytest.approx(300.0)
    with_learner(fleet, waits_for="workers to fetch version 3", waits_since_s=9.0)
    waits = [one.what for one in fleet.commands.view.status().waits]
    assert "the learner waits for workers to fetch version 3" in waits, "with its leases only where it is rollouts"
    for _ in range(40):
        fleet.passes(60.0, 1)
    page, status = same_facts(fleet)
    assert status.headline.startswith("Raise the budget") and status.headline_kind == "bad"
    assert page["money"]["chosen"] >= 1.0 and page["money"]["budget"] == 1.0
    fleet.hub.set_worker(PeerId("w1"), OperatorSetting.BANNED, "it lies")
    assert [worker.activation for worker in same_facts(fleet)[1].workers] == ["standby", "banned"]
    fleet.hub.ending.finish_run()
    page, status = same_facts(fleet)
    assert page["run"]["finished"] == fleet.hub.ending.text != "" and not status.waits


async def test_what_waits_for_the_same_is_one_line_and_events_name_workers_by_their_names(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 1.0, 2.0, 3.0, 4.0)
    for member in fleet.hub.membership.members.values():
        member.heartbeat.waits_for = "the learner to join the run"
    lines = [one.what for one in fleet.commands.view.status().waits if "to join the run" in one.what]
    assert lines == ["4 workers wait (w0, w1, w2 and others) for the learner to join the run"]
    for member in [*fleet.hub.membership.members.values()][1:]:
        member.heartbeat.waits_for = ""
    assert "worker w0 waits for the learner to join the run" in [one.what for one in fleet.commands.view.status().waits]
    worker = PeerId("12D3Koo" + "W" * 45)
    fleet.hub.membership.on_hello(worker, pb.WorkerHello(name="oregon"), fleet.clock.now())
    fleet.hub.note("lease", f"{worker} hands back group g1: it is among the last of its step")
    page, _ = same_facts(fleet)
    assert page["events"][-1]["text"] == "oregon hands back group g1: it is among the last of its step"


async def test_no_prediction_is_shown_while_too_little_was_measured_and_no_reward_that_a_trainer_computes(
    tmp_path: Path,
) -> None:
    fleet = Fleet(tmp_path, 1.0)
    with_learner(fleet)
    fleet.hub.adopt_plan(plan([PeerId("w0")]), fleet.everybody, True, is_settled=False)
    page, status = same_facts(fleet)
    assert page["advice"].limits == "not known before a few steps, heartbeats and a delta"
    assert page["plan"]["is_known"] and page["plan"]["utilisation"] is None and not status.plan.predicted_utilisation
    assert page["advice"].utilisation == 0.0 and not page["advice"].is_measured
    assert status.headline == "Nothing to do: the learner makes its first steps at $1.00/h."
    assert page["learner"]["reward"] == fleet.commands.view.samples()["reward"][-1] == 0.5
    fleet.hub.board.hello.step_limit = 0  # who hands in the last version decides
    assert fleet.commands.view.sections()["learner"]["reward"] is fleet.hub.board.reward_mean is None


async def test_the_learner_is_told_a_plan_once_and_the_log_of_a_new_period(tmp_path: Path) -> None:
    fleet, told = Fleet(tmp_path, 1.0), list[pb.LearnerOrder]()
    fleet.hub.learner.send = lambda order: bool(told.append(order)) or True  # type: ignore[method-assign]
    for _ in range(2):
        fleet.hub.adopt_plan(plan([PeerId("w0")]), fleet.everybody, True)
    assert [order.plan.in_flight_cap_rollouts for order in told] == [64]
    fleet.hub.adopt_plan(plan([PeerId("w0")], cap=65), fleet.everybody, True)
    assert [order.plan.in_flight_cap_rollouts for order in told] == [64, 65]
    assert len([event for event in fleet.hub.state.events if event.kind == "plan"]) == 1
    fleet.hub.adopt_plan(plan([PeerId("w0")], cap=1 << 40), fleet.everybody, True)
    assert told[-1].plan.in_flight_cap_rollouts == (1 << 31) - 1


async def test_a_row_says_how_a_worker_is_reached_by_what_it_found_out_else_by_its_hello(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 1.0)
    (member,) = fleet.hub.membership.members.values()

    def shown() -> tuple[bool, int]:
        row = fleet.commands.view.worker(member)
        return row["can_be_dialled"], row["relays"]

    assert shown() == (False, 0)
    member.hello.addresses.append("1.2.3.4:5")
    assert shown() == (True, 0)
    member.reach = Access(relays=(PeerId("r"),))
    assert shown() == (False, 1)
    member.reach = Access(addresses=("1.2.3.4:6",))
    assert shown() == (True, 0)


async def test_idle_workers_are_sent_home_by_one_button_but_for_those_of_rented_machines(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 1.0, 1.0)
    hub, machine = fleet.hub, await fleet.commands.provisioner.rent("gpu", "", "a test")
    hub.tokens.tokens[machine.token_id].peers.add(PeerId("w0"))
    for peer_id in fleet.everybody:
        hub.set_worker(peer_id, OperatorSetting.STANDBY, "too many")
    assert await fleet.commands.act("workers/dismiss", b"{}") == {"count": 0}, "they may be between two plans"
    fleet.passes(60.0)
    assert [one.peer_id for one in hub.money.idle_workers()] == [PeerId("w1")]
    assert await fleet.commands.act("workers/dismiss", b"{}") == {"count": 1}
    assert [one.last_liveness for one in hub.membership.members.values()] == [Liveness.ALIVE, Liveness.GONE]


async def test_several_workers_are_drained_and_released_at_once_or_none_of_them(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 1.0, 1.0, 1.0)
    hub, members = fleet.hub, fleet.hub.membership.members
    hub.workers = {peer: StreamSession(peer, lambda refusal: pb.WorkerOrder(refusal=refusal)) for peer in members}

    async def acted(action: str, *peer_ids: str, **more: str) -> dict[str, Any]:
        return await fleet.commands.act(f"workers/{action}", json.dumps({"peer_ids": peer_ids, **more}).encode())

    assert await acted("state", "w0", "w1", "w0", activation="draining") == {"count": 2}
    assert [member.activation.value for member in members.values()] == ["draining", "draining", "active"]
    with pytest.raises(MalformedMessage, match="nobody"):
        await acted("state", "w0", "nobody", activation="banned")
    assert not hub.membership.banned, "it is refused whole"
    assert [await acted("release", "w1", "w2") for _ in range(2)] == [{"count": 2}, {"count": 0}]
    for peer in ("w1", "w2"):
        refusal = hub.workers[PeerId(peer)].orders.get_nowait().refusal
        assert (refusal.code, refusal.message) == ("Dismissed", "released by the operator")
    hub.review(hub.membership.on_hello(PeerId("w1"), members[PeerId("w1")].hello, fleet.clock.now()))
    assert members[PeerId("w1")].last_liveness is Liveness.ALIVE, "it may come again"


async def test_a_node_that_reads_no_orders_is_disconnected_and_told_why_before_what_waits() -> None:
    session = StreamSession(PeerId("w"), lambda refusal: pb.WorkerOrder(refusal=refusal))
    for _ in range(SEND_QUEUE_MAX):
        session.send(pb.WorkerOrder())
    assert session.is_open
    session.send(pb.WorkerOrder())
    refusal, end = session.orders.get_nowait(), session.orders.get_nowait()
    assert refusal is not None and refusal.refusal.code == "LimitExceeded" and end is None
    session.send(pb.WorkerOrder())
    session.refuse(LimitExceeded("again"))
    assert not session.is_open and session.orders.empty()


async def test_what_stands_still_is_not_sent_each_second_and_what_the_planner_waits_for_is_told_since_it_does(
    tmp_path: Path,
) -> None:
    fleet, began = Fleet(tmp_path), 1000.0
    fleet.commands.create_token("worker", "for two", 60.0, 2)
    fleet.commands.create_token("worker", "used", 3600.0, 1)[0].peers.add(PeerId("w"))
    fleet.clock.time += 100.0
    before = fleet.commands.view.sections()["tokens"]
    fleet.clock.time += 1.0
    assert fleet.commands.view.sections()["tokens"] == before
    assert {one["label"]: one["problem"] for one in before} == {"for two": "", "used": "it was used 1 of 1 times"}
    fleet.clock.time += 3600.0
    fleet.hub.plan.wait_for("the learner", fleet.clock.now())
    assert {wait.since_unix_s for wait in fleet.commands.view.status().waits if "planner" in wait.what} == {began}
    fleet.hub.plan.wait_for("the learner's first step", fleet.clock.now())
    (wait,) = [wait for wait in fleet.commands.view.status().waits if "planner" in wait.what]
    assert (wait.what, wait.since_unix_s) == ("the planner waits for the learner's first step", fleet.clock.now())


async def test_the_curves_end_with_the_last_steps_own_reward_and_its_evaluation_over_a_restart(tmp_path: Path) -> None:
    """A report may be made after a step and before its row is written: it has the new step and the old row's numbers. A reward that
    nobody has measured is no point."""
    fleet = Fleet(tmp_path)
    for evaluated_before in (None, 0.75):
        hello = pb.LearnerHello(step=6, step_limit=8)
        fleet.hub.board.on_hello(PeerId("learner"), hello, fleet.clock.now())
        assert fleet.commands.view.sections()["learner"]["eval_reward"] == evaluated_before
        reports = [pb.LearnerReport(step=6)]
        for step, reward, evaluated in ((7, 0.6, -1.0), (8, 0.6, -1.0), (8, 0.9, -1.0), (8, 0.9, 0.75)):
            reports.append(pb.LearnerReport(step=step, train_s=1.0, reward_mean=reward, eval_reward=evaluated))
        for report in reports:
            fleet.hub.learner.on_message(PeerId("learner"), pb.LearnerMessage(report=report))
        series = fleet.commands.view.samples()
        assert [series["step"], series["reward"], series["eval"][-1:]] == [[6, 7, 8], [None, 0.6, 0.9], [0.75]]
        fleet.hub.flush_now()
        fleet.begin()


async def test_the_curves_are_whole_after_a_restart(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    for step in range(SAMPLES_MAX):
        for reward in (0.25, 0.5, 0.75):  # the step, its measures, its evaluation
            fleet.hub.state.sample(CurvePoint(1.0, step, reward, None, 0.5, 0.5, 1.0, 1.0))
        if step % 1000 == 999:
            fleet.hub.flush_now()
    fleet.hub.state.store.prune(EVENTS_MAX, SAMPLE_LINES * SAMPLES_MAX, PAID_MAX)
    before = fleet.commands.view.samples()
    fleet.begin()
    assert fleet.commands.view.samples() == before and len(before["step"]) == SAMPLES_MAX
    for step in (SAMPLES_MAX - 3, SAMPLES_MAX - 2):  # an own trainer is back at its checkpoint
        fleet.hub.state.sample(CurvePoint(1.0, step, 0.5, None, 0.0, 0.5, 1.0, 1.0))
    after = fleet.commands.view.samples()
    assert after["step"] == [*range(SAMPLES_MAX - 1)], "uPlot takes ascending steps alone"
    assert after["utilisation"][-2:] == [None, None], "0: not measured yet"


async def test_a_name_stands_for_the_one_worker_of_it_that_is_there(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 1.0, 1.0)
    gone, there = fleet.hub.membership.members.values()
    gone.hello.name = there.hello.name = "spot"  # a machine that was rented again
    asked = b'{"peer_id": "spot", "activation": "standby"}'
    with pytest.raises(MalformedMessage, match="as 2 are called: w0, w1"):
        await fleet.commands.act("workers/state", asked)
    gone.last_liveness = Liveness.GONE
    await fleet.commands.act("workers/state", asked)
    assert (gone.setting, there.setting) == (OperatorSetting.AUTOMATIC, OperatorSetting.STANDBY)
