"""Checks whether the learner answers at its declared address; if not, workers reach it through the relay's byte pipes.

    told --answers--> direct: workers dial it     <--answers again--.
      '---------does not, and holds a place at our relay--> piped --' checked every LOOK_HIDDEN_S

Guarantees: the dial-back is a TLS handshake that must show the learner's own certificate; for a learner that neither answers nor
holds a place at the relay, the event log says what to do. Waits: for the learner to connect; LOOK_S between checks; MISSED_S before
each retry, if an earlier check has succeeded; PLACE_S for the learner to take its place at the relay.
Leaves to others: byte pipes (broadcast.runtime), telling workers (learner_side).
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from echo2.base.ids import PeerId
from echo2.broadcast.pipe_hello import pipe_address
from echo2.broadcast.runtime.dial_back import shows_certificate

if TYPE_CHECKING:
    from echo2.coordinator.runtime.hub import Hub

LOOK_S, LOOK_HIDDEN_S = 300.0, 30.0
MISSED_S = 2.0
LOOKS = 3
PLACE_S, PLACE_LOOK_S = 5.0, 0.1


class LearnerDoor:
    """The checks; one object per coordinator. A run without a relay crosses no NAT, so nothing is checked."""

    def __init__(self, hub: Hub, authority_pem: bytes) -> None:
        self._hub, self._authority_pem = hub, authority_pem
        self._told = ""
        self._has_answered = False

    async def run(self) -> None:
        """Checks until cancelled."""
        learner, board = self._hub.learner, self._hub.board
        while True:
            with contextlib.suppress(TimeoutError):
                pause_s = LOOK_HIDDEN_S if board.pipe_address or self._told else LOOK_S
                await asyncio.wait_for(learner.has_come.wait(), pause_s)
            learner.has_come.clear()
            if learner.session is not None and self._hub.relay_address:
                await self._look()

    async def _look(self) -> None:
        board = self._hub.board
        assert board.hello is not None and board.peer_id is not None, "it has come"
        address, peer_id = board.hello.address, board.peer_id
        is_there = await self._answers(address, peer_id)
        if board.hello.address != address or board.peer_id != peer_id:
            return  # it has reconnected meanwhile, which triggers another check
        pipes = pipe_address(self._hub.relay_address) if not is_there and await self._is_piped(peer_id) else ""
        if is_there:
            self._tell("")
        elif pipes:
            self._tell(
                f"does not answer at {address}: workers reach it through the byte pipes of this coordinator, at {pipes}"
            )
        else:
            self._tell(
                f"does not answer at {address}, and holds no place at the byte pipes of this coordinator: expected workers to "
                "reach it; open learner.port in its firewall, or map a port to it and name that by learner.advertise"
            )
        if pipes != board.pipe_address:
            board.pipe_address = pipes
            self._hub.learner.moved()

    async def _is_piped(self, peer_id: PeerId) -> bool:
        """Whether the learner holds a place at the relay, or takes one within `PLACE_S`: it is told of the relay on connect."""
        for _ in range(round(PLACE_S / PLACE_LOOK_S)):
            if self._hub.relay is not None and self._hub.relay.is_piped(peer_id):
                return True
            await asyncio.sleep(PLACE_LOOK_S)
        return False

    def _tell(self, text: str) -> None:
        if text != self._told:
            self._hub.note("learner", text or "answers at its own address again")
            self._told = text

    async def _answers(self, address: str, peer_id: PeerId) -> bool:
        host, _, port = address.rpartition(":")
        if not port.isdigit():
            return False
        for turn in range(LOOKS if self._has_answered else 1):
            if turn:
                await asyncio.sleep(MISSED_S)
            if await asyncio.to_thread(shows_certificate, host.strip("[]"), int(port), peer_id, self._authority_pem):
                self._has_answered = True
                return True
        return False
