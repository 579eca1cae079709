"""A learner that does not answer where it says is reached through the coordinator's byte pipes, and directly again once it does;
the coordinator's relay is told whom it is not to serve."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from echo2.base.ids import PeerId
from echo2.broadcast.nat import reach
from echo2.broadcast.nat.reach import HostOptions
from echo2.coordinator import learner as learner_door
from echo2.coordinator.coordinator import CoordinatorDaemon
from echo2.coordinator.fleet.members import OperatorSetting
from echo2.trust.identity import Role
from echo2.wire.broadcast import plan_from_message
from tests.unit.coordinator.test_daemon import Node, options, running

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


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    made = Answers()
    monkeypatch.setattr(learner_door, "shows_certificate", made)
    for name, seconds in (("MISSED_S", 0.01), ("LOOK_HIDDEN_S", 0.1), ("LOOK_S", 0.1), ("PLACE_S", 0.2)):
        monkeypatch.setattr(learner_door, name, seconds)
    return made


@asynccontextmanager
async def relaying(folder: Path, *, has_place: bool = True) -> AsyncIterator[CoordinatorDaemon]:
    """As if it listened elsewhere than on the loopback."""
    async with running(options(folder)) as daemon:
        daemon.hub.relay_address = "203.0.113.9:8423"
        daemon.hub.relay = SimpleNamespace(is_piped=lambda peer: has_place, close=lambda: asyncio.sleep(0))  # type: ignore[assignment]
        yield daemon


def complaints(daemon: CoordinatorDaemon) -> list[str]:
    return [event.text for event in daemon.hub.state.events if "does not answer" in event.text]


async def learner_told(worker: Node, wanted: str) -> None:
    while (await worker.until("learner")).address != wanted:
        pass


async def dialled(worker: Node, wanted: tuple[str, ...]) -> None:
    """Waits until the plan says that the learner is dialled there."""
    while plan_from_message(await worker.until("broadcast_plan")).nodes[0].addresses != wanted:
        pass


async def test_a_learner_that_does_not_answer_is_reached_by_pipes_and_directly_once_it_does(
    tmp_path: Path, answers: Answers
) -> None:
    async with relaying(tmp_path) as daemon:
        learner, worker = await Node.join(daemon, Role.LEARNER), await Node.join(daemon, Role.WORKER)
        welcome = (await learner.hello(address=AT, chunk_address=CHUNKS)).welcome
        assert welcome.relay_address == "203.0.113.9:8423"
        came = await worker.hello()
        if came.welcome.learner.address != PIPES:
            await learner_told(worker, PIPES)
        assert answers.asked[0] == ("198.51.100.7", 8421, learner.credentials.peer_id)
        await dialled(worker, (PIPES,))  # all workers are hidden
        await worker.hello(addresses=["127.0.0.1:7777"])
        await dialled(worker, ())  # the learner dials it
        assert any("byte pipes" in text and AT in text for text in complaints(daemon))
        answers.is_there = True
        await learner_told(worker, AT)
        await dialled(worker, (CHUNKS,))


async def test_a_learner_without_a_place_is_left_where_it_says_and_the_operator_is_told_once(
    tmp_path: Path, answers: Answers
) -> None:
    async with relaying(tmp_path, has_place=False) as daemon:
        learner = await Node.join(daemon, Role.LEARNER)
        await learner.hello(address=AT, chunk_address=CHUNKS)
        while len(answers.asked) < 3:
            await asyncio.sleep(0.02)
        (text,) = complaints(daemon)
        assert "learner.advertise" in text and daemon.hub is not None and daemon.hub.board.address == AT


async def test_one_dial_that_fails_moves_nobody(tmp_path: Path, answers: Answers) -> None:
    async with relaying(tmp_path) as daemon:
        learner, answers.is_there = await Node.join(daemon, Role.LEARNER), True
        await learner.hello(address=AT, chunk_address=CHUNKS)
        for fails in (False, True, False):
            asked, answers.is_there = len(answers.asked), not fails
            while len(answers.asked) == asked:
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.2)
        assert daemon.hub is not None and not daemon.hub.board.pipe_address and not complaints(daemon)


async def test_the_relay_serves_who_is_not_banned_and_says_where_it_met_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[HostOptions] = []

    class Relaying:
        def __init__(self, own: Any) -> None: ...

        async def serve(self, options: HostOptions) -> int:
            served.append(options)
            return 7

        async def close(self) -> None: ...

    monkeypatch.setattr(reach, "Nat", Relaying)

    async with running(options(tmp_path, advertise="192.0.2.9")) as daemon:
        hub = daemon.hub
        assert hub is not None and hub.relay_address == "192.0.2.9:7"
        link = daemon.links["worker"].replace("192.0.2.9", "127.0.0.1")
        daemon.links["worker"] = link
        worker = await Node.join(daemon, Role.WORKER)
        worker.credentials.coordinator_address = daemon.services_address.replace("192.0.2.9", "127.0.0.1")
        worker = Node(worker.credentials)
        await worker.hello()
        peer_id, (settings,) = worker.credentials.peer_id, served
        assert not settings.is_barred(peer_id) and not settings.is_barred(PeerId("another"))
        hub.set_worker(peer_id, OperatorSetting.BANNED, "it lies")
        assert settings.is_barred(peer_id)
        settings.proven(peer_id, "198.51.100.7:1")
        while not hub.proven.of(peer_id, hub.clock.now()):
            await worker.read()
