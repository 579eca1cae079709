"""Carries out the sessions' decisions: answers calls, asks for completions, runs agents.

Never blocks; each caller awaits its own answer for as long as it likes. Leaves to others: decisions (sessions), HTTP (app), leases
and rewards (`Fleet`, implemented by the learner).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine
from typing import Protocol

from echo2.base.errors import EchoError
from echo2.gateway import events as e
from echo2.gateway.requests import CallRequest
from echo2.gateway.runtime.harness import Harnesses
from echo2.gateway.runtime.long_work import LongWork
from echo2.gateway.sessions import Sessions
from echo2.outside.guard import MISHAPS, Refusals

TICK_S = 1.0
Reply = e.CallAnswer | e.Refuse | e.Seated
_log = logging.getLogger("echo2.gateway")


class Fleet(Protocol):
    """The side that samples and trains."""

    def ask(self, asked: e.Ask) -> tuple[str, int] | None:
        """Leases a completion; returns its group ID and chain, or None if the problem is gone."""
        ...

    def ended(self, ended: e.EndEpisode) -> None: ...

    async def score(self, root: str, token_ids: tuple[int, ...]) -> e.EpisodeRewarded | str:
        """Lets the task score a completion. Returns the reward, with an empty session ID, or the reason why there is none."""
        ...


class GatewayDesk:
    """One per gateway, on its event loop."""

    def __init__(self, sessions: Sessions, fleet: Fleet, clock: Callable[[], float]) -> None:
        self.sessions, self._fleet, self._clock = sessions, fleet, clock
        self.harnesses: Harnesses | None = None
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._streams: dict[int, asyncio.Queue[str]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._refusals = Refusals(_log)
        self.long_work = LongWork()

    def tell(self, event: e.Event) -> None:
        for action in self.sessions.handle(event, self._clock()):
            match action:
                case e.Ask():
                    leased = self._fleet.ask(action) or ("", -1)
                    self.tell(e.Leased(action.call_id, action.choice, *leased))
                case e.Encode():
                    self._begin(self._encode(action))
                case e.CallPiece(call_id, text):
                    if (stream := self._streams.get(call_id)) is not None:
                        stream.put_nowait(text)
                case e.CallAnswer(call_id) | e.Refuse(call_id) | e.Seated(call_id):
                    waiting = self._waiting.pop(call_id, None)
                    if waiting is not None and not waiting.done():
                        waiting.set_result(action)
                case e.RunHarness():
                    assert self.harnesses is not None, "there is a harness"
                    self.harnesses.run(action)
                case e.StopHarness(session_id):
                    if self.harnesses is not None:
                        self.harnesses.stop(session_id)
                case e.AskScore():
                    self._begin(self._score(action))
                case e.EpisodeLost(session_id, reason):
                    self._refusals.warn("episode %s is lost: %s", session_id, reason)
                case e.EndEpisode():
                    self._fleet.ended(action)

    def call(self, session_id: str, request: CallRequest) -> tuple[int, asyncio.Future[Reply]]:
        call_id = next(self._ids)
        return call_id, self._told(call_id, e.Called(call_id, session_id, request))

    def stream_of(self, call_id: int) -> asyncio.Queue[str]:
        """Returns the queue of a call's new pieces of text; `left` removes it."""
        return self._streams.setdefault(call_id, asyncio.Queue())

    def seat(self, label: str) -> asyncio.Future[Reply]:
        call_id = next(self._ids)
        return self._told(call_id, e.SeatAsked(call_id, label))

    def _told(self, call_id: int, event: e.Event) -> asyncio.Future[Reply]:
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = future
        try:
            self.tell(event)
        except Exception as error:  # noqa: BLE001 - any error becomes an answer to the client
            self._broke(call_id, error)
        return future

    def _broke(self, call_id: int, error: Exception) -> None:
        MISHAPS.note("a call", "an agent", error)
        self.tell(e.CallBroke(call_id, type(error).__name__))

    def left(self, call_id: int) -> None:
        """The client has stopped waiting for the call."""
        self._streams.pop(call_id, None)
        if self._waiting.pop(call_id, None) is not None:
            self.tell(e.ClientLeft(call_id))

    async def run(self) -> None:
        """Sends a tick every TICK_S until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            self.tell(e.GatewayTick())

    async def close(self) -> None:
        self.long_work.close()
        for task in list(self._tasks):
            task.cancel()
        if self.harnesses is not None:
            await self.harnesses.close()
        for call_id, waiting in self._waiting.items():
            if not waiting.done():
                waiting.set_result(e.Refuse(call_id, 503, "run_ended", "the run has ended"))

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _encode(self, asked: e.Encode) -> None:
        token_ids: tuple[int, ...] = ()
        problem = ""
        try:
            made = await self.long_work.run(asked.session_id, lambda: asked.wording.tokens(self.sessions.reading))
            token_ids = tuple(made)
        except EchoError as error:
            problem = str(error)
        except Exception as error:  # noqa: BLE001 - a tokenizer raises what it likes
            MISHAPS.note("the text of a call", asked.session_id, error)
            problem = f"{type(error).__name__}: no tokens could be made of it"
        try:
            self.tell(e.Encoded(asked.session_id, asked.number, token_ids, problem))
        except Exception as error:  # noqa: BLE001 - as for any call
            self._broke(asked.number, error)

    async def _score(self, action: e.AskScore) -> None:
        found = await self._fleet.score(action.root, action.token_ids)
        if isinstance(found, str):
            _log.warning("no reward for episode %s: %s", action.session_id, found)
            self.tell(e.EpisodeFailed(action.session_id, found))
        else:
            self.tell(e.EpisodeRewarded(action.session_id, found.value, found.parts))
