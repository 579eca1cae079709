"""What an operator asks of a real coordinator by a join link."""

from pathlib import Path

import pytest

from echo2.base.errors import ConfigError, NotAllowed
from echo2.cli.operator import OperatorClient
from echo2.coordinator.coordinator import CoordinatorDaemon
from echo2.trust.enrolment import enrol
from echo2.trust.identity import Identity, JoinLink, Role
from echo2.wire.gen.echo2.v1.coordinator_pb2_grpc import OperatorStub
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
        worker = await enrol(JoinLink.parse(made), Identity.generate(), Role.WORKER)
        assert (token.role, token.use_limit, token.peers) == ("worker", 2, {worker.peer_id})
        with pytest.raises(NotAllowed, match="expected the role operator"):
            await OperatorClient(OperatorStub(Node(worker).channel), "").status()
        (first,) = [one for one in daemon.hub.tokens.tokens.values() if one.label == "operator.link"]
        daemon.hub.tokens.revoke(first.token_id)
        async with OperatorClient.at(new, tmp_path / "me") as operator:
            waits = (await operator.status()).waits  # whose link was revoked, and who was given another
        assert "the coordinator waits for the learner to connect" in [wait.what for wait in waits]
        assert not [path for path in (tmp_path / "run" / "links").iterdir() if path.stat().st_mode & 0o077]


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
