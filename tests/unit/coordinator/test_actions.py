"""What the operator does to a run that goes on: through the page's API and through `echo2 ctl`, checked, logged and kept."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from echo2.base.errors import ConfigError, EchoError, NotAllowed
from echo2.cli.main import main
from echo2.cli.operator import OperatorClient, advice_lines, request_of
from echo2.config.run import RunConfig
from echo2.coordinator.coordinator import CoordinatorDaemon
from echo2.coordinator.fleet.members import Activation
from echo2.coordinator.hub import Hub
from echo2.coordinator.planning.telemetry import plan_config
from echo2.trust.identity import Role
from tests.unit.coordinator.test_daemon import Node, options, running

OFFERS = '[[offer]]\nname = "spot"\nprovider = "manual"\nusd_per_hour = 1.0\n'


class Ctl:
    """`echo2 ctl` without a process."""

    def __init__(self, operator: OperatorClient) -> None:
        self._operator = operator

    async def __call__(self, *words: str) -> dict[str, Any]:
        return await self._operator.act(*request_of(list(words)))


async def joined(daemon: CoordinatorDaemon, role: Role, **fields: Any) -> Node:
    node = await Node.join(daemon, role)
    answer = await node.hello(**fields)
    if answer.WhichOneof("kind") == "refusal":
        raise NotAllowed(answer.refusal.message)
    return node


async def until(true: Any) -> None:
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0.02)


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
        running(chosen) as daemon,
        OperatorClient.at(daemon.links["operator"], tmp_path / "operator") as operator,
        httpx.AsyncClient(base_url=daemon.dashboard_url) as web,
    ):
        hub, ctl = daemon.hub, Ctl(operator)
        await ctl("set", "budget=20", "cap=3.5", "S=2", "price.spot=0.7")
        assert (money(hub.config), hub.config.staleness.bound) == ((20.0, 3.5), 2)
        assert hub.book.rules.staleness_bound == 2 and hub.money.offers[0].usd_per_hour == 0.7
        for wrong in (("S=5",), ("S=0",), ("budget=-1",), ("S=1.5",), ("budget=1", "price.sport=0.7")):
            with pytest.raises(EchoError, match="expected"):
                await ctl("set", *wrong)
        with pytest.raises(EchoError, match="expected"):
            await operator.act("run/settings", {"colour": 3})
        assert hub.config.coordinator.usd_budget == 20.0, "what is refused changes nothing"
        assert any("changes usd_budget = 20" in event.text for event in hub.state.events)
        refused = await web.post("/api/run/settings", json={"usd_budget": 1})
        assert refused.status_code == 403, "an action of the page needs its header"
        csrf = (await web.get("/api/session")).json()["csrf"]
        answer = await web.post("/api/run/settings", json={"usd_budget": 30}, headers={"x-echo2-csrf": csrf})
        assert answer.json()["usd_budget"] == 30.0
        await ctl("set", "cap=none")
        assert (await web.get("/api/state")).json()["money"]["cap_per_hour"] is None
    async with running(chosen) as again:
        kept = again.hub.config
        assert (money(kept), kept.staleness.bound) == ((30.0, math.inf), 2)
        assert again.hub.money.offers[0].usd_per_hour == 0.7 and again.hub.learner_bound == 4
    async with running(options(tmp_path / "run", staleness_bound=1, **settings)) as lower:
        assert lower.hub is not None and lower.hub.config.staleness.bound == 1, "the operator had set 2"
        assert lower.hub.config.coordinator.usd_budget == 30.0


async def test_a_bound_that_is_lowered_and_raised_again_leaves_a_fixed_period_as_it_was(tmp_path: Path) -> None:
    usual = options(tmp_path)
    staleness = usual.config.staleness.model_copy(update={"kappa": 3})
    chosen = replace(usual, config=usual.config.model_copy(update={"staleness": staleness}))
    async with running(chosen) as daemon:
        hub = daemon.hub
        for bound, kappa in ((1, 1), (4, 3)):
            hub.change_settings({"staleness_bound": bound})
            assert plan_config(hub.config, hub.board).fixed_kappa == kappa


async def test_a_paused_run_gives_no_work_until_it_is_resumed_even_over_a_restart(tmp_path: Path) -> None:
    chosen = options(tmp_path)
    async with (
        running(chosen) as daemon,
        OperatorClient.at(daemon.links["operator"], tmp_path / "operator") as operator,
    ):
        hub, ctl = daemon.hub, Ctl(operator)
        node = await joined(daemon, Role.WORKER)
        await until(lambda: activation_of(hub, node) is Activation.ACTIVE)
        await ctl("pause", "the", "power", "is", "out")
        assert activation_of(hub, node) is Activation.STANDBY
        late = await joined(daemon, Role.WORKER, name="late")
        assert activation_of(hub, late) is Activation.STANDBY
        told = await ctl("advice")
        assert "Resume the run" in told["steps"][0]["text"] and "the power is out" in "\n".join(advice_lines(told))
        await ctl("worker", "late", "drain", "for", "good")
        assert activation_of(hub, late) is Activation.DRAINING
    async with (
        running(chosen) as again,
        OperatorClient.at(again.links["operator"], tmp_path / "operator") as operator,
    ):
        hub = again.hub
        assert hub is not None and activation_of(hub, node) is Activation.STANDBY
        await Ctl(operator)("resume")
        assert activation_of(hub, node) is Activation.ACTIVE and hub.paused == ""


async def test_a_stopped_run_sends_workers_home_and_only_the_operator_lets_it_go_on(tmp_path: Path) -> None:
    async with (
        running(options(tmp_path)) as daemon,
        OperatorClient.at(daemon.links["operator"], tmp_path / "operator") as operator,
    ):
        hub, ctl = daemon.hub, Ctl(operator)
        worker = await joined(daemon, Role.WORKER)
        learner = await joined(daemon, Role.LEARNER)
        await until(lambda: hub.learner.session is not None)
        await ctl("stop", "enough")
        assert (await worker.until("refusal")).code == "RunFinished"
        assert (await learner.until("refusal")).code == "RunFinished"
        assert "stopped by the operator: enough" in hub.ending.text
        with pytest.raises(EchoError):
            await joined(daemon, Role.LEARNER)
        await ctl("resume")
        assert hub.ending.finish is None
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

        assert (
            await typed("set", "budget=20", "cap=3.5", "S=2") == 0 and daemon.hub.config.coordinator.usd_budget == 20.0
        )
        assert await typed("pause", "prices are high") == 0 and "prices are high" in daemon.hub.paused
        assert await typed("advice") == 0 and "Resume the run" in capsys.readouterr().out
        assert await typed("set", "S=9") != 0 and "expected 1 to 4" in capsys.readouterr().err
    assert request_of(["do", "tokens/revoke", '{"token_id": "a"}']) == ("tokens/revoke", {"token_id": "a"})
