"""A finished run costs nothing more: workers are sent home, machines are given back, and the bill says what all of it was."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from echo2.base.errors import RunFinished, Unreachable
from echo2.base.ids import PeerId
from echo2.control.session import refusal_error
from echo2.coordinator.commands import Commands
from echo2.coordinator.coordinator import CoordinatorDaemon
from echo2.coordinator.fleet.members import OperatorSetting
from echo2.coordinator.planning.telemetry import WorkerHello
from echo2.coordinator.web.state import StateView
from echo2.trust.identity import Role
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb
from tests.unit.coordinator.test_daemon import RUN, WAIT_S, Node, options, running
from tests.unit.coordinator.test_provisioner import OFFER, Cloud, Scene, play

DONE = f"run {RUN} is finished after 20 steps; no work is left for workers"


async def learner_of(daemon: CoordinatorDaemon, step: int = 0, limit: int = 20) -> Node:
    learner = await Node.join(daemon, Role.LEARNER)
    await learner.hello(step=step, step_limit=limit)
    return learner


async def finish(learner: Node, reason: str = "finished") -> None:
    """As the learner's daemon leaves: its last report, then the reason."""
    await learner.say(report=pb.LearnerReport(step=20, is_finished=True, train_s=1.0, reward_mean=0.75, eval_reward=-1))
    await learner.say(leaving=pb.LearnerLeaving(reason=reason))
    await learner.call.done_writing()


def test_workers_are_sent_home_with_the_reason_and_later_ones_are_refused(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(options(tmp_path)) as daemon:
            assert daemon.hub is not None
            worker, learner = await Node.join(daemon, Role.WORKER), await learner_of(daemon)
            await worker.hello()
            await finish(learner)
            told = await worker.until("refusal")
            assert (told.code, told.message) == ("RunFinished", DONE)
            assert isinstance(refusal_error(told), RunFinished) and str(refusal_error(told)) == DONE
            before = daemon.hub.money.sums()
            assert before.usd_per_hour == 0
            late = await Node.join(daemon, Role.WORKER)
            answer = await late.hello(name="late")
            assert (answer.refusal.code, answer.refusal.message) == ("RunFinished", DONE)
            assert daemon.hub.money.sums() == before and "late" not in str(daemon.hub.membership.members)
            for node in (worker, learner, late):
                await node.close()
        async with running(options(tmp_path)) as daemon:  # a coordinator that was started again
            late = await Node.join(daemon, Role.WORKER)
            assert (await late.hello(name="late")).refusal.message == DONE
            assert daemon.hub is not None
            view = StateView(Commands(daemon.hub, "h", 1, [], {})).sections()
            assert view["learner"]["reward"] == 0.75 and view["learner"]["is_finished"] and not view["waits"]
            assert view["run"]["finished"] == f"run {RUN} is finished after 20 steps"
            await late.close()

    asyncio.run(asyncio.wait_for(scene(), 60))


@pytest.mark.parametrize("reason", ["stopped", ""])
def test_a_learner_that_leaves_for_another_reason_ends_nothing(tmp_path: Path, reason: str) -> None:
    async def scene() -> None:
        async with running(options(tmp_path)) as daemon:
            worker, learner = await Node.join(daemon, Role.WORKER), await learner_of(daemon)
            await worker.hello()
            if reason:
                await finish(learner, reason)
            await learner.close()
            another = await Node.join(daemon, Role.WORKER)
            assert (await another.hello(name="w2")).WhichOneof("kind") == "welcome"
            await worker.say(heartbeat=pb.Heartbeat())
            assert daemon.hub is not None and daemon.hub.ending.finish is None
            await another.close()
            await worker.close()

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_a_learner_with_more_steps_opens_the_run_again(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(options(tmp_path)) as daemon:
            learner = await learner_of(daemon)
            await finish(learner)
            assert daemon.hub is not None
            while daemon.hub.ending.finish is None or daemon.hub.learner.session is not None:
                await asyncio.sleep(0.02)
            again = Node(learner.credentials)
            await again.hello(step=20, step_limit=20)  # the same command: nothing is left to do
            foreign = Node(learner.credentials)  # of another model: it is refused, and opens nothing
            assert (await foreign.hello(step=0, step_limit=40, model_digest="e" * 64)).refusal.code == "VersionMismatch"
            assert daemon.hub.ending.finish is not None
            worker = await Node.join(daemon, Role.WORKER)
            assert (await worker.hello()).WhichOneof("kind") == "refusal"
            await again.hello(step=20, step_limit=40)
            assert (await worker.hello()).WhichOneof("kind") == "welcome"
            for node in (learner, again, foreign, worker):
                await node.close()

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_a_coordinator_started_for_more_steps_takes_workers_before_their_learner_comes(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(options(tmp_path, steps=20)) as daemon:
            learner = await learner_of(daemon)
            await finish(learner)
            assert daemon.hub is not None
            while daemon.hub.ending.finish is None:
                await asyncio.sleep(0.02)
            await learner.close()
        for steps, answer in ((20, "refusal"), (40, "welcome")):
            async with running(options(tmp_path, steps=steps)) as daemon:
                worker = await Node.join(daemon, Role.WORKER)
                assert (await worker.hello()).WhichOneof("kind") == answer
                await worker.close()

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_a_coordinator_ends_with_its_run_where_it_is_told_to(tmp_path: Path) -> None:
    async def scene() -> None:
        daemon = CoordinatorDaemon(options(tmp_path, exit_when_finished=True))
        task = asyncio.create_task(daemon.run())
        await asyncio.wait_for(daemon.started.wait(), WAIT_S)
        worker, learner = await Node.join(daemon, Role.WORKER), await learner_of(daemon)
        await worker.hello()
        assert not task.done()
        await finish(learner)
        await worker.until("refusal")
        await asyncio.wait_for(task, WAIT_S)
        for node in (worker, learner):
            await node.close()

    asyncio.run(asyncio.wait_for(scene(), 60))


def finished(run: Scene) -> None:
    run.hub.ending.learner_finished()


@pytest.mark.parametrize("mode", ["advise", "approve", "auto"])
def test_rented_machines_are_given_back_whatever_the_planner_may_do(tmp_path: Path, mode: str) -> None:
    async def scene() -> None:
        run = Scene(tmp_path, Cloud(), planner_mode=mode)
        for _ in range(2):
            await run.provisioner.rent(OFFER.name, "", "because")
        finished(run)
        await run.look()
        await run.provisioner._act()
        assert run.cloud.there == {} and run.hub.money.sums().usd_per_hour == 0
        assert run.hub.ending.is_settled
        with pytest.raises(RunFinished, match="is finished"):
            await run.provisioner.rent(OFFER.name, "", "more")

    play(scene)


def test_a_provider_that_does_not_answer_is_asked_again(tmp_path: Path) -> None:
    async def scene() -> None:
        run = Scene(tmp_path, Cloud())
        await run.provisioner.rent(OFFER.name, "", "because")
        finished(run)
        run.cloud.problem = Unreachable("the cloud is away")
        await run.provisioner._act()
        assert run.cloud.there and not run.hub.ending.is_settled
        run.cloud.problem = None
        await run.look(5.0)
        assert run.cloud.there == {} and run.hub.ending.is_settled

    play(scene)


def test_idle_workers_are_sent_home_by_one_button(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(options(tmp_path)) as daemon:
            assert daemon.hub is not None
            idle, busy = await Node.join(daemon, Role.WORKER), await Node.join(daemon, Role.WORKER)
            await idle.hello(name="idle")
            await busy.hello(name="busy")
            commands = Commands(daemon.hub, "h", 1, [], {})
            daemon.hub.set_worker(idle.credentials.peer_id, OperatorSetting.STANDBY, "too many")
            assert commands.dismiss_idle() == 0, "it may be between two plans"
            daemon.hub.membership.members[idle.credentials.peer_id].activation_since -= 60
            assert [member.name for member in commands.idle_workers()] == ["idle"]
            assert commands.dismiss_idle() == 1
            assert (await idle.until("refusal")).code == "Dismissed"
            assert daemon.hub.money.sums().usd_per_hour == 1.0
            assert (await idle.hello(name="idle")).WhichOneof("kind") == "welcome", "it may come again"
            for node in (idle, busy):
                await node.close()

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_a_reward_that_nobody_measured_is_no_point_of_the_curve(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(options(tmp_path)) as daemon:
            learner = await learner_of(daemon, step=7)
            assert daemon.hub is not None
            for report in (pb.LearnerReport(step=7), pb.LearnerReport(step=8, train_s=1.0, reward_mean=0.0)):
                await learner.say(report=report)
            while daemon.hub.board.report.step < 8:
                await asyncio.sleep(0.02)
            view = StateView(Commands(daemon.hub, "h", 1, [], {}))
            assert (view.samples()["step"], view.samples()["reward"]) == ([7, 8], [None, 0.0])
            await learner.close()

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_the_bill_counts_machines_on_standby_and_shows_the_useful_share_beside_it(tmp_path: Path) -> None:
    async def scene() -> None:
        run = Scene(tmp_path, Cloud())
        hello: dict[str, Any] = {"price_usd_per_hour": 2.0}
        for name in ("works", "idles"):
            member = run.hub.membership.on_hello(PeerId(name), WorkerHello(1, name, RUN, **hello), run.clock.now())
            run.hub._review(run.hub.membership.change_of(member, run.clock.now()))
        run.hub.set_worker(PeerId("idles"), OperatorSetting.STANDBY, "too many")

        def an_hour() -> None:
            for _ in range(3600):
                run.clock.time += 1.0
                for name in ("works", "idles"):
                    run.hub.membership.on_message(PeerId(name), None, run.clock.now())
            run.hub.money.sums()

        an_hour()
        sums = run.hub.money.sums()
        assert (sums.usd_spent, sums.usd_useful) == (pytest.approx(4.0), pytest.approx(2.0))
        assert (sums.usd_per_hour, sums.usd_useful_per_hour) == (4.0, 2.0)
        run.hub.close()
        run.begin()
        again = run.hub.money.sums()
        assert (again.usd_spent, again.usd_useful) == (pytest.approx(4.0), pytest.approx(2.0))
        told = run.commands.status()
        assert (told.usd_spent, told.usd_useful) == (pytest.approx(4.0), pytest.approx(2.0))

    play(scene)
