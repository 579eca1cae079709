"""What an operator asks of a real coordinator by a join link."""

from __future__ import annotations

from pathlib import Path

from echo2.cli.operator import OperatorClient
from echo2.trust.identity import JoinLink
from tests.unit.coordinator.test_daemon import options, play, running


def test_a_link_that_is_made_has_what_was_asked_for(tmp_path: Path) -> None:
    async def scene() -> None:
        async with running(options(tmp_path / "run")) as daemon:
            async with OperatorClient(daemon.links["operator"], tmp_path / "me") as operator:
                made = await operator.create_link("worker", 60.0, 2, "for one")
            assert daemon.hub is not None
            (token,) = [one for one in daemon.hub.tokens.tokens.values() if one.label == "for one"]
            assert (token.role, token.use_limit) == ("worker", 2)
            assert JoinLink.parse(made).address == daemon.enrol_address

    play(scene)
