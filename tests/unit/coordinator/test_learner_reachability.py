"""A learner that does not answer where it says is reached through the coordinator's byte pipes, and directly again once it does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from echo2.base.ids import PeerId
from echo2.coordinator import learner as learner_door
from echo2.coordinator.coordinator import CoordinatorDaemon
from echo2.trust.identity import Role
from echo2.wire.broadcast import plan_from_message
from tests.unit.coordinator.test_daemon import Node, options, play, running

AT, CHUNKS, PIPES = "198.51.100.7:8421", "198.51.100.7:8422", "203.0.113.9:8424"


class Answers:
    """In place of the network: whether the learner answers. `asked` holds what was dialled."""

    def __init__(self) -> None:
        self.is_there = False
        self.asked: list[tuple[str, int, PeerId]] = []

    def __call__(self, host: str, port: int, peer_id: PeerId, authority_pem: bytes) -> bool:
        assert b"CERTIFICATE" in authority_pem
        self.asked.append((host, port, peer_id))
        return self.is_there


@contextmanager
def answering(monkeypatch: pytest.MonkeyPatch) -> Iterator[Answers]:
    made = Answers()
    monkeypatch.setattr(learner_door, "shows_certificate", made)
    monkeypatch.setattr(learner_door, "MISSED_S", 0.01)
    monkeypatch.setattr(learner_door, "LOOK_HIDDEN_S", 0.1)
    monkeypatch.setattr(learner_door, "LOOK_S", 0.1)
    monkeypatch.setattr(learner_door, "PLACE_S", 0.2)
    yield made


def relaying(daemon: CoordinatorDaemon, *, has_place: bool) -> None:
    """As if it listened elsewhere than on the loopback."""
    assert daemon.hub is not None
    daemon.hub.relay_address = "203.0.113.9:8423"
    daemon.hub.relay = SimpleNamespace(is_piped=lambda peer: has_place, close=lambda: asyncio.sleep(0))  # type: ignore[assignment]


async def address_told(worker: Node, wanted: str) -> None:
    while (await worker.until("learner")).address != wanted:
        pass


def test_a_learner_that_does_not_answer_is_reached_by_pipes_and_directly_once_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        with answering(monkeypatch) as answers:
            async with running(options(tmp_path)) as daemon:
                relaying(daemon, has_place=True)
                learner, worker = await Node.join(daemon, Role.LEARNER), await Node.join(daemon, Role.WORKER)
                welcome = (await learner.hello(address=AT, chunk_address=CHUNKS)).welcome
                assert welcome.relay_address == "203.0.113.9:8423"
                came = await worker.hello(addresses=["127.0.0.1:7777"])
                if came.welcome.learner.address != PIPES:
                    await address_told(worker, PIPES)
                assert answers.asked[0] == ("198.51.100.7", 8421, learner.credentials.peer_id)
                while plan_from_message(await worker.until("broadcast_plan")).nodes[0].addresses:
                    pass  # a worker that can be dialled is there: the learner dials it
                assert daemon.hub is not None
                assert any("byte pipes" in event.text and AT in event.text for event in daemon.hub.state.events)
                answers.is_there = True
                await address_told(worker, AT)
                while plan_from_message(await worker.until("broadcast_plan")).nodes[0].addresses != (CHUNKS,):
                    pass
                for node in (learner, worker):
                    await node.close()

    play(scene)


def test_where_all_workers_are_hidden_the_plan_has_them_dial_the_pipes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        with answering(monkeypatch):
            async with running(options(tmp_path)) as daemon:
                relaying(daemon, has_place=True)
                learner, worker = await Node.join(daemon, Role.LEARNER), await Node.join(daemon, Role.WORKER)
                await learner.hello(address=AT, chunk_address=CHUNKS)
                await worker.hello()
                while plan_from_message(await worker.until("broadcast_plan")).nodes[0].addresses != (PIPES,):
                    pass
                for node in (learner, worker):
                    await node.close()

    play(scene)


def test_a_learner_without_a_place_is_left_where_it_says_and_the_operator_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        with answering(monkeypatch) as answers:
            async with running(options(tmp_path)) as daemon:
                relaying(daemon, has_place=False)
                learner = await Node.join(daemon, Role.LEARNER)
                await learner.hello(address=AT, chunk_address=CHUNKS)
                while len(answers.asked) < 3:
                    await asyncio.sleep(0.02)
                assert daemon.hub is not None and daemon.hub.board.address == AT
                told = [event.text for event in daemon.hub.state.events if "does not answer" in event.text]
                assert len(told) == 1 and "learner.advertise" in told[0]
                await learner.close()

    play(scene)


def test_one_dial_that_fails_moves_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        with answering(monkeypatch) as answers:
            async with running(options(tmp_path)) as daemon:
                relaying(daemon, has_place=True)
                learner = await Node.join(daemon, Role.LEARNER)
                answers.is_there = True
                await learner.hello(address=AT, chunk_address=CHUNKS)
                for fails in (False, True, False):
                    asked, answers.is_there = len(answers.asked), not fails
                    while len(answers.asked) == asked:
                        await asyncio.sleep(0.001)
                await asyncio.sleep(0.2)
                assert daemon.hub is not None and not daemon.hub.board.pipe_address
                assert not any("does not answer" in event.text for event in daemon.hub.state.events)
                await learner.close()

    play(scene)
