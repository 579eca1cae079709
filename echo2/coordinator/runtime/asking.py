"""Requests recent rollouts and their tokens from the learner while an operator looks at them.

Guarantees: at most `ASKED_MAX` requests are open, each for at most `ANSWER_S`; the list is requested at most once per
`LIST_FRESH_S`, however many operators look; an answer without a request is dropped. Waits for the learner's answer. Leaves to
others: access control (web).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from echo2.base.errors import LimitExceeded, Unreachable
from echo2.outside import monotonic
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb

ASKED_MAX = 8
ANSWER_S = 10.0
LIST_FRESH_S = 2.0


class RolloutDesk:
    """`send`: sends an order to the learner; returns False if none is connected."""

    def __init__(self, send: Callable[[pb.LearnerOrder], bool]) -> None:
        self._send = send
        self._open: dict[int, asyncio.Future[pb.RolloutsShown]] = {}
        self._asked = 0
        self._list: asyncio.Task[pb.RolloutsShown] | None = None
        self._list_at = float("-inf")

    async def newest(self) -> pb.RolloutsShown:
        """The list of the newest rollouts, at most `LIST_FRESH_S` old."""
        has_failed = self._list is not None and self._list.done() and self._list.exception() is not None
        if self._list is None or has_failed or monotonic() - self._list_at > LIST_FRESH_S:
            self._list_at = monotonic()
            self._list = asyncio.get_running_loop().create_task(self._ask("", 0))
        return await asyncio.shield(self._list)

    async def tokens(self, rollout_id: str, offset: int) -> pb.RolloutsShown:
        """One rollout's tokens, from token `offset` on."""
        return await self._ask(rollout_id, offset)

    def answered(self, shown: pb.RolloutsShown) -> None:
        waiting = self._open.get(shown.request)
        if waiting is not None and not waiting.done():
            waiting.set_result(shown)

    async def _ask(self, rollout_id: str, offset: int) -> pb.RolloutsShown:
        """Sends a request and waits for the answer. LimitExceeded if too many are open, Unreachable if no learner answers."""
        if len(self._open) >= ASKED_MAX:
            raise LimitExceeded(f"rollouts: expected at most {ASKED_MAX} questions at a time; try again")
        self._asked += 1
        request = self._asked
        waiting = self._open[request] = asyncio.get_running_loop().create_future()
        try:
            wanted = pb.RolloutsWanted(request=request, rollout_id=rollout_id, offset=offset)
            if not self._send(pb.LearnerOrder(wanted=wanted)):
                raise Unreachable("rollouts: the learner keeps them, and it is not connected")
            return await asyncio.wait_for(waiting, ANSWER_S)
        except TimeoutError:
            raise Unreachable(f"rollouts: expected the learner's answer within {ANSWER_S:.0f} s, got none") from None
        finally:
            del self._open[request]
