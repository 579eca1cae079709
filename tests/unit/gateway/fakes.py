"""A model of letters and a fleet that samples when it is told to."""

import asyncio
import contextlib
import http.client
import json
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from echo2.base.ids import GroupId, Version
from echo2.base.rollout import FinishReason, Rollout, VersionSpan
from echo2.gateway.app import GatewayApp, GatewayPort
from echo2.gateway.episodes import Call, CallRefused, Choice, Episodes, GatewayLimits, Scored, Session
from echo2.gateway.harness import Episode, make_harness
from echo2.gateway.requests import CallRequest, chat_call
from echo2.gateway.tree import ChatCodec
from echo2.trust.ports import GATEWAY, HttpLimits


class LetterCodec:
    """A model whose tokens are letters; an answer may be written in other tokens than its text would be encoded in."""

    def opening(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> Sequence[int]:
        return [ord(c) for c in "".join(f"[{m['role']}]{m['content']}" for m in messages) + "[me]"]

    def between(self, messages: Sequence[Mapping[str, Any]], turn: Sequence[int]) -> Sequence[int]:
        return self.opening(messages, ())

    def encode_text(self, text: str, *, is_beginning: bool) -> Sequence[int]:
        return [ord(c) for c in text]

    def decode(self, token_ids: tuple[int, ...], stops: tuple[str, ...], *, has_tools: bool) -> tuple[str, list[Any]]:
        return "".join(chr(token - 1000 if 1000 <= token < 55_000 else token) for token in token_ids), []

    def settled(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        return token_ids


def letter_bytes(token_id: int) -> bytes:
    return chr(token_id).encode()


def completion(text: str, shift: int = 0) -> Rollout:
    tokens = tuple(ord(c) + shift for c in text)
    return whole_rollout(tokens)


def whole_rollout(tokens: tuple[int, ...]) -> Rollout:
    numbers, spans = (-0.5,) * len(tokens), (VersionSpan(Version(0), len(tokens)),) if tokens else ()
    return Rollout(GroupId("g"), 0, tokens, numbers, numbers, spans, FinishReason.STOP)


@dataclass(frozen=True)
class Lease:
    root: str
    chain: int | None
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    temperature: float | None


@dataclass(frozen=True)
class End:
    root: str
    chains: Mapping[int, int]
    reward: float | None
    parts: Mapping[str, float]
    is_final: bool
    failure: str
    is_starved: bool


class RecordingFleet:
    """Records leases and ends. `on_lease`: called with the group of each lease; `broken`: raised by each lease instead."""

    def __init__(self, on_lease: Callable[[str], None] = lambda group_id: None) -> None:
        self.on_lease = on_lease
        self.leases: dict[str, Lease] = {}
        self.ends: list[End] = []
        self.broken: Exception | None = None
        self.score_answer: Scored | str | Exception = "no task"
        self._depths: dict[tuple[str, int], int] = {}
        self._chains = 0

    def lease(
        self, root: str, chain: int | None, prompt: tuple[int, ...], max_tokens: int, stops: tuple[str, ...],
        temperature: float | None,
    ) -> tuple[str, int] | None:  # fmt: skip
        if self.broken is not None:
            raise self.broken
        number = self._chains if chain is None else chain
        self._chains += chain is None
        depth = self._depths[root, number] = self._depths.get((root, number), 0) + 1
        group_id = f"{root}.{number}.{depth}"
        self.leases[group_id] = Lease(root, chain, prompt, max_tokens, temperature)
        self.on_lease(group_id)
        return group_id, number

    def end_episode(
        self, root: str, chains: Mapping[int, int], outcome: Scored | str, *, is_final: bool, is_starved: bool = False
    ) -> None:
        reward, parts = (None, {}) if isinstance(outcome, str) else outcome
        failure = outcome if isinstance(outcome, str) else ""
        self.ends.append(End(root, chains, reward, parts, is_final, failure, is_starved))

    async def score(self, root: str, token_ids: tuple[int, ...]) -> Scored | str:
        if isinstance(self.score_answer, Exception):
            raise self.score_answer
        return self.score_answer


@contextlib.asynccontextmanager
async def on_port(
    fleet: RecordingFleet, codec: ChatCodec | None = None, harness: str = "", port_limits: HttpLimits = GATEWAY, **limits: Any
) -> AsyncIterator[tuple[Episodes, GatewayPort]]:  # fmt: skip
    """A gateway on a real port of loopback. `harness`: plays its episodes; else outside ones do, with the key `master`."""
    given = {"context_tokens": 100_000, "max_new_tokens": 64, "vocabulary_size": 200_000, "token_bytes_max": 4}
    given |= limits
    port, clock = GatewayPort("", limits=port_limits), asyncio.get_running_loop().time
    episodes = Episodes(
        GatewayLimits(**given), codec or LetterCodec(), fleet, clock, lambda: os.urandom(8).hex(),
        make_harness(harness), f"{port.url}/v1",
    )  # fmt: skip
    serving = asyncio.create_task(port.run(GatewayApp(episodes, "policy", "master", letter_bytes).application()))
    try:
        yield episodes, port
    finally:
        await episodes.close()
        await port.stop(serving)


class PlayedByHand:
    """A harness whose episodes last until they are ended; `begun` lists them."""

    def __init__(self) -> None:
        self.begun: list[Episode] = []

    async def __call__(self, episode: Episode) -> float | None:
        self.begun.append(episode)
        await asyncio.Event().wait()
        return None


class World:
    """Episodes with a recording fleet and a clock that is set by hand. To be made within a running loop."""

    def __init__(self, harness: PlayedByHand | None = None, **limits: Any) -> None:
        given: dict[str, Any] = {
            "context_tokens": 400, "max_new_tokens": 50, "vocabulary_size": 2048, "token_bytes_max": 4, **limits
        }  # fmt: skip
        keys = iter(range(10**6))
        self.now = 0.0
        self.fleet = RecordingFleet()
        self.episodes = Episodes(
            GatewayLimits(**given), LetterCodec(), self.fleet, lambda: self.now, lambda: f"k{next(keys)}", harness
        )

    @property
    def last_end(self) -> End:
        return self.fleet.ends[-1]

    def passes(self, seconds: float) -> None:
        self.now += seconds
        self.episodes.expire()

    def begin(self, session: Session, request: CallRequest) -> tuple[Call, list[str]]:
        """The call, and the groups that it is leased as."""
        before = set(self.fleet.leases)
        call = self.episodes.begin_call(session, request)
        return call, [group_id for group_id in self.fleet.leases if group_id not in before]

    def sample(self, group_id: str, text: str) -> None:
        self.episodes.on_completion(group_id, completion(text, shift=1000))

    def ask(self, session: Session, *said: str, answer: str = "ok", n: int = 1) -> list[str]:
        """A chat whose messages alternate, asked and answered. Returns its groups."""
        call, groups = self.begin(session, chat(*said, n=n))
        for number, group_id in enumerate(groups):
            self.sample(group_id, answer + (str(number) if number else ""))
        assert call.answer.done()
        return groups

    def refusal(self, session: Session, request: CallRequest) -> CallRefused:
        """Why the call is refused, at once or by its answer."""
        before = len(self.fleet.leases)
        try:
            error = self.episodes.begin_call(session, request).answer.exception()
        except CallRefused as refused:
            error = refused
        assert isinstance(error, CallRefused) and len(self.fleet.leases) == before
        return error


def chat(*said: str, **options: Any) -> CallRequest:
    """A chat whose messages alternate between user and assistant."""
    roles = ("user", "assistant")
    messages = [{"role": roles[place % 2], "content": text} for place, text in enumerate(said)]
    return chat_call({"messages": messages, **options})


def texts_of(call: Call) -> list[str]:
    choices: tuple[Choice, ...] = call.answer.result()
    return [choice.text for choice in choices]


def begun(**limits: Any) -> tuple[World, Session]:
    """A world with a problem of two seats, one of them taken."""
    world = World(**limits)
    world.episodes.open_problem("a1", 2, {"index": 5})
    return world, world.episodes.take_seat("")


# ---- a gateway on a real port of loopback, in a thread of its own, for hostile clients

TICK_S = 0.005


@dataclass
class Served:
    """`session`: its one episode."""

    episodes: Episodes
    fleet: RecordingFleet
    port: int
    session: Session

    @property
    def key(self) -> str:
        return self.session.key

    def connect(self, source: str = "127.0.0.1", timeout: float = 10.0) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=timeout, source_address=(source, 0))

    def head(self, length: int, key: str | None = None, kind: str = "application/json", path: str = "") -> bytes:
        """Of a POST. `key` None: none is shown."""
        lines = [
            f"POST {path or '/v1/chat/completions'} HTTP/1.1", "host: x", f"content-type: {kind}",
            f"content-length: {length}", *([] if key is None else [f"authorization: Bearer {key}"]),
        ]  # fmt: skip
        return "\r\n".join([*lines, "", ""]).encode()

    def post(self, body: Any, path: str = "", key: str | None = None, timeout: float = 30.0) -> tuple[int, Any]:
        """Status and answer, by the episode's key unless another is given. `body`: JSON, or its bytes."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        with self.connect(timeout=timeout) as connection:
            connection.sendall(self.head(len(data), key or self.key, path=path) + data)
            return answer_of(connection)


def answer_of(connection: socket.socket) -> tuple[int, Any]:
    """Status and body of the next answer, which is JSON."""
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    return answer.status, json.loads(answer.read())


@contextlib.contextmanager
def served(port_limits: HttpLimits = GATEWAY, **limits: Any) -> Iterator[Served]:
    found: list[Served] = []
    is_ready, loop = threading.Event(), asyncio.new_event_loop()

    async def serve() -> None:
        fleet = RecordingFleet()
        given = {"context_tokens": 400, "max_new_tokens": 50, **limits}
        async with on_port(fleet, None, "", port_limits, **given) as (episodes, port):
            fleet.on_lease = lambda group_id: loop.call_soon(episodes.on_completion, group_id, completion("ok"))
            episodes.open_problem("a1", 1, {})
            found.append(Served(episodes, fleet, int(port.url.rpartition(":")[2]), episodes.take_seat("")))
            is_ready.set()
            while not is_over.is_set():
                await asyncio.sleep(TICK_S)

    is_over = threading.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    assert is_ready.wait(20)
    try:
        yield found[0]
    finally:
        is_over.set()
        thread.join(20)
        loop.close()
