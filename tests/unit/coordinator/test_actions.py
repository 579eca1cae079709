"""What the operator does to a run that goes on: through the page's API and through `echo2 ctl`, checked, logged and kept."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from echo2.base.errors import ConfigError, EchoError
from echo2.base.ids import PeerId
from echo2.cli.main import main
from echo2.cli.operator import OperatorClient, advice_lines, request_of
from echo2.config.run import RunConfig
from echo2.coordinator.coordinator import CoordinatorDaemon
from echo2.coordinator.fleet.members import Activation, Liveness, OperatorSetting
from echo2.coordinator.hub import CoordinatorOptions, Hub
from echo2.coordinator.planning.telemetry import plan_config
from echo2.trust.identity import Role
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb
from tests.contract.fleet import until
from tests.unit.coordinator.test_daemon import Node, group, options, running
from tests.unit.coordinator.test_planner_input import beat

OFFERS = '[[offer]]\nname = "spot"\nprovider = "manual"\nusd_per_hour = 1.0\n'


@asynccontextmanager
async def operated(chosen: CoordinatorOptions, folder: Path) -> AsyncIterator[tuple[CoordinatorDaemon, OperatorClient]]:
    async with running(chosen) as daemon, OperatorClient.at(daemon.links["operator"], folder) as operator:
        yield daemon, operator


async def ctl(operator: OperatorClient, *words: str) -> dict[str, Any]:
    """`echo2 ctl` without a process."""
    return await operator.act(*request_of(list(words)))


def activation_of(hub: Hub, node: Node) -> Activation:
    return hub.membership.members[node.credentials.peer_id].activation


def money(config: RunConfig) -> tuple[float, float]:
    return config.coordinator.usd_budget, config.coordinator.usd_per_hour_cap


async def test_settings_change_without_a_restart_and_outlive_one(tmp_path: Path) -> None:
    offers = tmp_path / "offers.toml"
    offers.write_text(OFFERS)
    settings = {"offers": str(offers), "usd_budget": 5.0}
    chosen = options(tmp_path / "run", **settings)
    async with (
        operated(chosen, tmp_path / "operator") as (daemon, operator),
        httpx.AsyncClient(base_url=daemon.dashboard_url) as web,
    ):
        hub = daemon.hub
        await ctl(operator, "set", "budget=20", "cap=3.5", "S=2", "price.spot=0.7")
        assert (money(hub.config), hub.config.staleness.bound) == ((20.0, 3.5), 2)
        assert hub.money.offers[0].usd_per_hour == 0.7
        for wrong in (("S=5",), ("S=0",), ("budget=-1",), ("S=1.5",), ("budget=1", "price.sport=0.7")):
            with pytest.raises(EchoError, match="expected"):
                await ctl(operator, "set", *wrong)
        with pytest.raises(EchoError, match="expected"):
            await operator.act("run/settings", {"colour": 3})
        assert hub.config.coordinator.usd_budget == 20.0, "what is refused changes nothing"
        assert any("changes usd_budget = 20" in event.text for event in hub.state.events)
        refused = await web.post("/api/run/settings", json={"usd_budget": 1})
        assert refused.status_code == 403, "an action of the page needs its header"
        csrf = (await web.get("/api/session")).json()["csrf"]
        answer = await web.post("/api/run/settings", json={"usd_budget": 30}, headers={"x-echo2-csrf": csrf})
        assert answer.json()["usd_budget"] == 30.0
        await ctl(operator, "set", "cap=none")
        assert (await web.get("/api/state")).json()["money"]["cap_per_hour"] is None
    async with running(chosen) as again:
        kept = again.hub.config
        assert (money(kept), kept.staleness.bound) == ((30.0, math.inf), 2)
        assert again.hub.money.offers[0].usd_per_hour == 0.7 and again.hub.learner_bound == 4
    async with running(options(tmp_path / "run", staleness_bound=1, **{**settings, "usd_budget": 50.0})) as lower:
        assert lower.hub is not None and lower.hub.config.staleness.bound == 1, "the operator had set 2"
        assert money(lower.hub.config) == (50.0, math.inf), "who edits the config has the last word"


async def test_a_bound_that_is_lowered_and_raised_again_leaves_a_fixed_period_as_it_was(tmp_path: Path) -> None:
    usual = options(tmp_path)
    staleness = usual.config.staleness.model_copy(update={"kappa": 3})
    chosen = replace(usual, config=usual.config.model_copy(update={"staleness": staleness}))
    async with running(chosen) as daemon:
        hub = daemon.hub
        for bound, kappa in ((1, 1), (4, 3)):
            hub.change_settings({"staleness_bound": bound})
            assert plan_config(hub.config, hub.board).fixed_kappa == kappa


async def test_a_run_stands_still_from_pause_to_resume_over_a_restart_and_a_stop_sends_all_home(tmp_path: Path) -> None:
    chosen = options(tmp_path)
    async with operated(chosen, tmp_path / "operator") as (daemon, operator):
        hub = daemon.hub
        node = await Node.joined(daemon, Role.WORKER)
        await until(lambda: activation_of(hub, node) is Activation.ACTIVE, "it works")
        await ctl(operator, "pause", "the", "power", "is", "out")
        assert activation_of(hub, node) is Activation.STANDBY
        late = await Node.joined(daemon, Role.WORKER, name="late")
        assert activation_of(hub, late) is Activation.STANDBY
        told = await ctl(operator, "advice")
        assert "Resume the run" in told["steps"][0]["text"] and "the power is out" in "\n".join(advice_lines(told))
        await ctl(operator, "worker", "late", "drain", "for", "good")
        assert activation_of(hub, late) is Activation.DRAINING
    async with operated(chosen, tmp_path / "operator") as (again, operator):
        hub = again.hub
        assert hub is not None and activation_of(hub, node) is Activation.STANDBY
        await ctl(operator, "resume")
        assert activation_of(hub, node) is Activation.ACTIVE and hub.paused == ""
        worker, learner = await Node.joined(again, Role.WORKER), await Node.joined(again, Role.LEARNER)
        await until(lambda: hub.learner.session is not None, "the learner is here")
        await ctl(operator, "stop", "enough")
        assert (await worker.until("refusal")).code == "RunFinished"
        assert (await learner.until("refusal")).code == "RunFinished"
        assert "stopped by the operator: enough" in hub.ending.text
        with pytest.raises(EchoError):
            await Node.joined(again, Role.LEARNER)
        await ctl(operator, "resume")
        assert hub.ending.finish is None, "the operator alone lets it go on"
        with pytest.raises(EchoError, match="expected one of"):
            await operator.act("run/fly", {})


@pytest.mark.parametrize(
    "words", [["set"], ["set", "x=1"], ["set", "budget=x"], ["fly"], ["worker", "w"], ["do", "a", "{"]]
)
def test_words_that_are_no_command_are_refused_by_name(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        request_of(words)


async def test_the_commands_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("echo2.cli.operator.OPERATOR_FOLDER", tmp_path / "operator")
    async with running(options(tmp_path / "run")) as daemon:

        async def typed(*words: str) -> int:
            command = ["echo2", "ctl", str(tmp_path / "run"), *words]
            return await asyncio.to_thread(main, command[1:])

        assert await typed("set", "budget=20", "cap=3.5", "S=2") == 0 and money(daemon.hub.config) == (20.0, 3.5)
        assert await typed("pause", "prices are high") == 0 and "prices are high" in daemon.hub.paused
        assert await typed("advice") == 0 and "Resume the run" in capsys.readouterr().out
        assert await typed("set", "S=9") != 0 and "expected 1 to 4" in capsys.readouterr().err
    assert request_of(["do", "tokens/revoke", '{"token_id": "a"}']) == ("tokens/revoke", {"token_id": "a"})


# ---- a worker that the learner accuses, that leaves, or whose machine will be taken away

TEXT = "audit: its log-probabilities are 0.08 nats off, 0.05 are allowed"
PATIENT = {"suspect_after": 30.0, "gone_after": 60.0, "lease_timeout": 60.0}


async def test_a_learner_hears_of_all_who_are_barred_however_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be refused at each hello, as one that does not read."""
    async with running(options(tmp_path, **PATIENT)) as daemon:
        workers = [(await Node.joined(daemon, Role.WORKER)).credentials.peer_id for _ in range(4)]
        daemon.hub.set_workers(workers, OperatorSetting.QUARANTINED, "by hand")
        monkeypatch.setattr("echo2.coordinator.streams.SEND_QUEUE_MAX", 4)
        learner = await Node.joined(daemon, Role.LEARNER)
        assert {(await learner.until("banned")).peer_id for _ in workers} == {*workers}


async def test_an_accused_worker_is_set_aside_until_it_is_released_and_a_guilty_one_is_banned(tmp_path: Path) -> None:
    async with running(options(tmp_path, **PATIENT)) as daemon:
        hub, learner = daemon.hub, await Node.joined(daemon, Role.LEARNER, open_groups=[group("g1")])
        worker = await Node.joined(daemon, Role.WORKER)
        peer_id = worker.credentials.peer_id
        await worker.say(lease_request=pb.LeaseRequest(free_rollouts=8, version=0))
        assert (await worker.until("lease_grant")).ticket.attempt == 1
        await learner.say(accused=pb.WorkerAccused(peer_id=peer_id, reason=TEXT))
        told = await worker.until("activation")
        assert not told.is_active and told.reason == TEXT, "it may stay, and is told why it gets nothing"
        barred = await learner.until("banned")
        assert (barred.peer_id, barred.reason, barred.is_lifted) == (peer_id, TEXT, False)
        assert not hub.book.leases, "its lease is free for another"
        assert any(event.kind == "audit" and TEXT in event.text for event in hub.state.events), "with the evidence"
        hub.preempt(peer_id, "in two minutes")
        assert hub.membership.members[peer_id].setting is OperatorSetting.QUARANTINED, "a notice does not free it"

        await learner.close()
        learner = await Node.join(daemon, Role.LEARNER, learner.credentials.identity)
        await learner.hello(open_groups=[group("g1"), group("g2")])
        assert (await learner.until("banned")).peer_id == peer_id, "a learner that comes back is told again"

        hub.set_worker(peer_id, OperatorSetting.AUTOMATIC, "its card is that way")
        lifted = await learner.until("banned")
        assert lifted.peer_id == peer_id and lifted.is_lifted
        await learner.close()
        learner = await Node.join(daemon, Role.LEARNER, learner.credentials.identity)
        await learner.hello(open_groups=[group("g1"), group("g2")], barred_peer_ids=[peer_id, "nobody"])
        assert await learner.until("banned") == lifted, "one that was away when it was lifted is told, too"
        await worker.say(lease_request=pb.LeaseRequest(free_rollouts=8, version=0))
        grant = await worker.until("lease_grant")
        assert grant.group.group_id in ("g1", "g2"), "there is nobody else"

        for is_certain in (True, False):
            await learner.say(accused=pb.WorkerAccused(peer_id=peer_id, reason=TEXT, is_certain=is_certain))
        refusal = await worker.until("refusal")
        assert refusal.code == "NotAllowed" and TEXT in refusal.message
        for _ in range(2):
            assert (await learner.until("banned")).is_banned, (
                "each accusation is answered, else it is told again for ever"
            )
        await learner.say(report=pb.LearnerReport(step=1))
        await until(lambda: hub.board.report.step == 1, "what it says after the accusations")
        assert hub.membership.members[peer_id].setting is OperatorSetting.BANNED, "a lesser finding softens no ban"


async def test_groups_of_a_worker_that_leaves_or_will_lose_its_machine_go_to_another_at_once(tmp_path: Path) -> None:
    async with running(options(tmp_path, **PATIENT)) as daemon:
        hub, learner = daemon.hub, await Node.join(daemon, Role.LEARNER)
        first, second = await Node.join(daemon, Role.WORKER), await Node.join(daemon, Role.WORKER)
        await learner.hello(open_groups=[group("g1")])
        await first.hello()
        await first.say(lease_request=pb.LeaseRequest(free_rollouts=8, version=0))
        await first.until("lease_grant")
        await first.say(leaving=pb.WorkerLeaving(reason="preemption notice"))
        await second.hello()
        await second.say(lease_request=pb.LeaseRequest(free_rollouts=8, version=0))
        grant = await second.until("lease_grant")
        assert grant.is_continuation, "though nobody has missed the first one yet"
        assert hub.membership.members[first.credentials.peer_id].last_liveness is Liveness.GONE
        assert any("leaves: preemption notice" in event.text for event in hub.state.events)
        hub.part_with(first.credentials.peer_id, "preemption notice")  # it may say so as often as it likes
        assert [paid.action for paid in hub.state.paid].count("preempted") == 1

        hub.preempt(second.credentials.peer_id, "the cloud says so")
        revoked = await second.until("lease_revoke")
        assert (revoked.lease_id, revoked.reason) == (grant.ticket.lease_id, "preemption: the cloud says so")
        assert hub.book.leases[revoked.lease_id].is_recalled


async def test_a_worker_that_its_record_bars_is_not_planned_for_while_there_is_another(tmp_path: Path) -> None:
    async with running(options(tmp_path, plan_interval=0.1, **PATIENT)) as daemon:
        hub, learner = daemon.hub, await Node.joined(daemon, Role.LEARNER)
        barred, other = [await Node.joined(daemon, Role.WORKER) for _ in range(2)]
        for worker in (barred, other):
            await worker.say(heartbeat=beat())
        await learner.say(report=pb.LearnerReport(step=1, train_s=1.0, eval_reward=-1.0))
        names = {worker.credentials.peer_id for worker in (barred, other)}
        await until(lambda: hub.plan.now is not None and set(hub.plan.now.pool) == names, "both are worth having")
        hub.book.records.bar(barred.credentials.peer_id, "it gives up prompts", 60.0, hub.clock.now())
        alone = {other.credentials.peer_id}
        await until(lambda: hub.plan.now is not None and set(hub.plan.now.pool) == alone, "the other alone")


async def test_the_state_of_thousands_of_workers_behind_nats_is_told(tmp_path: Path) -> None:
    async with operated(options(tmp_path), tmp_path / "operator") as (daemon, operator):
        hub, reason = daemon.hub, "no port of this host answers"
        peers = [f"12D3KooW{number:044d}" for number in range(3000)]
        links = [pb.PeerLink(peer_id=peer, kind="hole-punched", reason=reason) for peer in peers[:64]]
        for peer in map(PeerId, peers):
            member = hub.membership.on_hello(peer, pb.WorkerHello(name=peer[-8:]), hub.clock.now())
            member.heartbeat.links.links.extend(links)
        status = await operator.status()
        assert len(status.workers) == 3000 and status.ByteSize() > 16 << 20
