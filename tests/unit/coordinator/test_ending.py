"""A finished run costs nothing more: workers are sent home, machines are given back, and the bill says what all of it was."""

import asyncio
from pathlib import Path

import pytest

from echo2.base.errors import RunFinished, Unreachable
from echo2.control.session import refusal_error
from echo2.coordinator.coordinator import CoordinatorDaemon
from echo2.coordinator.operator import Commands
from echo2.trust.identity import Role
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb
from tests.unit.coordinator.test_daemon import RUN, WAIT_S, Node, options, running
from tests.unit.coordinator.test_provisioner import OFFER, Cloud, Scene

DONE = f"run {RUN} is finished after 20 steps; no work is left for workers"


async def finish(daemon: CoordinatorDaemon, learner: Node, reason: str = "finished") -> None:
    """As the learner's daemon leaves: its last report, then the reason."""
    await learner.say(report=pb.LearnerReport(step=20, is_finished=True, train_s=1.0, reward_mean=0.75, eval_reward=-1))
    await learner.say(leaving=pb.LearnerLeaving(reason=reason))
    await learner.call.done_writing()
    while daemon.hub.learner.session is not None:
        await asyncio.sleep(0.02)


async def test_workers_are_sent_home_with_the_reason_and_later_ones_are_refused(tmp_path: Path) -> None:
    async with running(options(tmp_path, steps=20)) as daemon:
        hub = daemon.hub
        worker, learner = await Node.joined(daemon, Role.WORKER), await Node.joined(daemon, Role.LEARNER, step_limit=20)
        await finish(daemon, learner, "stopped")
        again = Node(learner.credentials)
        await again.hello(step_limit=20)
        await again.close()  # neither of these ends anything
        late = await Node.join(daemon, Role.WORKER)
        assert (await late.hello(name="late")).WhichOneof("kind") == "welcome" and hub.ending.finish is None
        await late.close()
        learner = Node(learner.credentials)
        await learner.hello(step_limit=20)
        await finish(daemon, learner)
        told = await worker.until("refusal")
        assert (told.code, told.message) == ("RunFinished", DONE)
        assert isinstance(refusal_error(told), RunFinished) and str(refusal_error(told)) == DONE
        before = hub.money.sums()
        assert before.usd_per_hour == 0
        other = await Node.join(daemon, Role.WORKER)
        assert (await other.hello(name="other")).refusal.message == DONE
        assert hub.money.sums() == before and "other" not in str(hub.membership.members)
    async with running(options(tmp_path, steps=20)) as daemon:  # a coordinator that was started again
        other = Node(other.credentials)
        assert (await other.hello(name="other")).refusal.message == DONE
        view = Commands(daemon.hub, "h", 1, [], {}).view.sections()
        assert view["learner"]["reward"] == 0.75 and view["learner"]["is_finished"] and not view["waits"]
        assert view["run"]["finished"] == f"run {RUN} is finished after 20 steps"
    async with running(options(tmp_path, steps=40)) as daemon:  # and one that was started for more steps
        other = Node(other.credentials)
        assert (await other.hello(name="other")).WhichOneof("kind") == "welcome", "before its learner comes"
        assert not Commands(daemon.hub, "h", 1, [], {}).view.sections()["learner"]["is_finished"], "nobody ends it now"


async def test_a_learner_with_more_steps_opens_the_run_again_and_one_of_another_model_does_not(tmp_path: Path) -> None:
    async with running(options(tmp_path)) as daemon:
        learner, worker = await Node.joined(daemon, Role.LEARNER, step_limit=20), await Node.join(daemon, Role.WORKER)
        await finish(daemon, learner)
        again, foreign = Node(learner.credentials), Node(learner.credentials)
        await again.hello(step=20, step_limit=20)  # the same command: nothing is left to do
        assert (await foreign.hello(step=0, step_limit=40, model_digest="e" * 64)).refusal.code == "VersionMismatch"
        assert daemon.hub.ending.finish is not None
        assert (await worker.hello()).WhichOneof("kind") == "refusal"
        assert daemon.hub.board.report.is_finished
        await again.hello(step=20, step_limit=40)
        assert not daemon.hub.board.report.is_finished, "before it reports"
        assert (await worker.hello()).WhichOneof("kind") == "welcome"


async def test_a_run_without_a_last_step_ends_with_its_learner_and_goes_on_with_it(tmp_path: Path) -> None:
    """As one whose learner serves a trainer."""
    async with running(options(tmp_path, steps=200)) as daemon:
        learner = await Node.joined(daemon, Role.LEARNER)
        await finish(daemon, learner)
    async with running(options(tmp_path, steps=200)) as daemon:
        assert daemon.hub.ending.finish is not None, "not by the coordinator alone"
        again = Node(learner.credentials)
        await again.hello(step=20)
        assert daemon.hub.ending.finish is None


async def test_a_coordinator_ends_with_its_run_where_it_is_told_to(tmp_path: Path) -> None:
    daemon = CoordinatorDaemon(options(tmp_path, exit_when_finished=True))
    task = asyncio.create_task(daemon.run())
    await asyncio.wait_for(daemon.started.wait(), WAIT_S)
    learner = await Node.joined(daemon, Role.LEARNER, step_limit=20)
    assert not task.done()
    await finish(daemon, learner)
    await asyncio.wait_for(task, WAIT_S)


@pytest.mark.parametrize("mode", ["advise", "approve", "auto"])
async def test_rented_machines_are_given_back_as_soon_as_the_provider_answers(tmp_path: Path, mode: str) -> None:
    run = Scene(tmp_path, Cloud(), planner_mode=mode)
    for _ in range(2):
        await run.provisioner.rent(OFFER.name, "", "because")
    run.hub.ending.finish_run()
    run.cloud.problem = Unreachable("the cloud is away")
    await run.provisioner._act()
    assert run.cloud.there and not run.hub.ending.is_settled
    run.cloud.problem = None
    await run.look(5.0)
    assert run.cloud.there == {} and run.hub.money.sums().usd_per_hour == 0
    assert run.hub.ending.is_settled
    with pytest.raises(RunFinished, match="is finished"):
        await run.provisioner.rent(OFFER.name, "", "more")


async def test_a_run_that_the_operator_stopped_stays_stopped_over_a_restart(tmp_path: Path) -> None:
    run = Scene(tmp_path, Cloud())
    run.commands.stop_run("enough, before its learner came")
    run.begin()
    assert "stopped by the operator" in run.hub.ending.text, "its steps are all still to be made"
    run.commands.resume()
    assert run.hub.ending.finish is None
    run.hub.ending.finish_run("its data is used up")
    run.commands.resume()
    assert "its data is used up" in run.hub.ending.text, "that is no stop"
