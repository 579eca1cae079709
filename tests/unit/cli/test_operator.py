"""What an operator asks of a real coordinator by a join link."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from echo2.base.errors import ConfigError
from echo2.cli.operator import OperatorClient
from echo2.coordinator.coordinator import CoordinatorDaemon
from echo2.trust.identity import JoinLink, Role
from tests.patience import WAIT_S
from tests.unit.coordinator.test_daemon import Node, options, running


async def test_a_link_has_what_was_asked_for_and_what_is_refused_is_the_error_that_it_is(tmp_path: Path) -> None:
    async with running(options(tmp_path / "run")) as daemon:
        async with OperatorClient.at(daemon.links["operator"], tmp_path / "me") as operator:
            body = {"role": "worker", "lifetime_s": 60.0, "use_limit": 2, "label": "for one"}
            made = (await operator.act("tokens", body))["join_link"]
            with pytest.raises(ConfigError, match=r"^offer: expected one of .*, got 'cheep'$"):
                await operator.act("machines", {"offer": "cheep"})
            with pytest.raises(ConfigError, match=r"^offer: expected a text of up to 1000 characters, got none$"):
                await operator.act("machines", {"ofer": "local"})
            with pytest.raises(ConfigError, match=r"^usd_budget: expected a number, got 'much'$"):
                await operator.act("run/settings", {"usd_budget": "much"})
            new = (await operator.act("tokens", body | {"role": "operator", "label": ""}))["join_link"]
        (token,) = [one for one in daemon.hub.tokens.tokens.values() if one.label == "for one"]
        assert (token.role, token.use_limit) == ("worker", 2)
        assert JoinLink.parse(made).address == daemon.enrol_address
        (first,) = [one for one in daemon.hub.tokens.tokens.values() if one.label == "operator.link"]
        daemon.hub.tokens.revoke(first.token_id)
        async with OperatorClient.at(new, tmp_path / "me") as operator:
            assert await operator.status(), "whose link was revoked, and who was given another"


async def test_the_status_says_what_happened_what_is_waited_for_and_what_it_has_cost(tmp_path: Path) -> None:
    async with running(options(tmp_path / "run")) as daemon:
        began = time.time()
        worker = await Node.join(daemon, Role.WORKER)
        await worker.hello(price_usd_per_hour=36.0)
        async with OperatorClient.at(daemon.links["operator"], tmp_path / "me") as operator:
            async with asyncio.timeout(WAIT_S):
                while not (status := await operator.status()).workers[0].usd_spent:
                    await asyncio.sleep(0.1)
        assert any("joined" in event.text for event in status.events)
        since = [wait.since_unix_s for wait in status.waits]
        assert since and all(abs(one - began) < 60 for one in since)


async def test_who_was_an_operator_of_one_run_is_let_into_another_and_back_once_the_link_has_ended(
    tmp_path: Path,
) -> None:
    async def ask(daemon: CoordinatorDaemon) -> None:
        async with OperatorClient.at(daemon.links["operator"], tmp_path / "me") as operator:
            assert (await operator.status()).run_id == daemon.options.run_id

    async with running(options(tmp_path / "a")) as first, running(options(tmp_path / "b", run_id="b")) as second:
        for daemon in (first, first, second):
            await ask(daemon)
        for token in first.hub.tokens.tokens.values():
            token.expires_at = 0.0
        await ask(first)
