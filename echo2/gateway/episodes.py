"""Agents' episodes: the seats of open problems, the calls of each episode, and how an episode ends.

    seat free --harness started, or an outside one asked--> episode --reward--> over
       ^                                   '--its time is up--'
       '-------- failed, given up, idle (restarts_max) --------> then dropped and counted, never scored 0

Guarantees: a history that a client repeats maps back to the sampled token ids, or starts a new chain (tree); if a client
disconnects, a retry of the same call gets its answer; a completion that no client received is not trained on; an episode that
takes too long is scored, so that no policy gains by not finishing; every list has a limit, and a client that hits one is
refused, with a time to retry if a retry can help. Runs on one event loop.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar
from weakref import WeakValueDictionary

from echo2.base.errors import EchoError
from echo2.base.rollout import FinishReason, Rollout
from echo2.gateway.harness import Episode, Harness, cause_of, past_proxies
from echo2.gateway.requests import ID_BYTES, CallRequest
from echo2.gateway.tree import ChatCodec, Node, TokenTree, TreePlace
from echo2.outside.guard import MISHAPS, Refusals, Tasks

PIECES_S = 0.5  # least time between two pieces of one stream, in seconds: every piece decodes the whole text again
TICK_S = 1.0  # episodes are timed in minutes, so a second late is early enough
_INCOMPLETE = "\ufffd"  # the decoder ends the text with this while a character's bytes are not all sampled
STARVED_S = 60.0  # without a token of any worker: longer than one takes for the longest prompt
THREADS = 2  # one long job of a caller leaves the other thread to everybody else
_log = logging.getLogger("echo2.gateway")
_T = TypeVar("_T")


LABEL_CHARS_MAX = 200  # shown in one line of a log
CHAINS_MAX = 256  # chains per episode: chats that do not continue one another
REWARD_MAX = 1e6
"""Largest absolute reward. No task needs more, and sums and squares of rewards stay finite."""


def is_reward(value: object) -> bool:
    """Whether `value` is a number from -REWARD_MAX to REWARD_MAX. False for NaN; compares integers exactly, however long."""
    return isinstance(value, int | float) and abs(value) <= REWARD_MAX


@dataclass(frozen=True, slots=True)
class GatewayLimits:
    """Limits of one gateway. `vocabulary_size`: the model's; clients' token ids must be below it. `token_bytes_max`: length of
    the tokenizer's longest token; a text longer than `context_tokens` times that cannot fit. `sessions_max`: open sessions.
    `calls_max`: calls per episode. `session_bytes_max`: approximate memory per episode. `encoded_at_once_max`: longer texts, in
    characters of JSON, are encoded in a thread, not on the event loop. `calls_at_once_max`: unanswered calls per episode.
    `calls_in_flight_max`: completions under way in the whole gateway. `idle_s`: an outside harness without a call for this long
    is taken for dead. `episode_s`: most time of an episode for its harness and tools; waiting for workers does not count.
    `restarts_max`: restarts of a lost episode before its rollout is dropped. `harnesses_max`: episodes that echo2 runs at once.
    `retry_after_s`: what a refused client is told to wait."""

    context_tokens: int
    max_new_tokens: int
    vocabulary_size: int
    token_bytes_max: int
    sessions_max: int = 4096
    calls_max: int = 512
    session_bytes_max: int = 64 << 20
    encoded_at_once_max: int = 16 << 10
    calls_at_once_max: int = 16
    calls_in_flight_max: int = 4096
    idle_s: float = 600.0
    episode_s: float = 3600.0
    restarts_max: int = 2  # a harness that fails each time has a fault
    harnesses_max: int = 64
    retry_after_s: float = 1.0


Scored = tuple[float, Mapping[str, float]]
"""A reward and its parts."""


@dataclass(frozen=True, slots=True)
class Ended:
    """An episode that is over. `text`: why. `scored`: the reward that it was given, if any."""

    key: str
    text: str
    scored: Scored | None


class CallRefused(Exception):
    """`retry_after_s` 0: a retry cannot succeed."""

    def __init__(self, status: int, code: str, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.retry_after_s = status, code, message, retry_after_s


class Fleet(Protocol):
    """The side that samples and trains."""

    def lease(
        self, root: str, chain: int | None, prompt: tuple[int, ...], max_tokens: int, stops: tuple[str, ...],
        temperature: float | None,
    ) -> tuple[str, int] | None:  # fmt: skip
        """Leases a completion; `chain` None: starts a new one. Returns its group ID and chain, or None if the problem is gone."""

    def end_episode(
        self, root: str, chains: Mapping[int, int], outcome: Scored | str, *, is_final: bool, is_starved: bool = False
    ) -> None:
        """`chains`: how many calls of each chain count. `outcome`: the reward, or why there is none. Not final: the seat is played
        again. Starved: its client gave up, and no worker has answered anybody for STARVED_S."""

    async def score(self, root: str, token_ids: tuple[int, ...]) -> Scored | str:
        """Lets the task score a completion. Returns the reward, or why there is none."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One completion of a call, as returned to the client."""

    text: str
    tool_calls: tuple[Mapping[str, object], ...]
    sampled: Rollout
    finish_reason: str  # stop | length | tool_calls


@dataclass(slots=True)
class Problem:
    """One problem and its seats. `description`: what its agents are given, as JSON. `seats`: session ID by seat, None if free.
    `restarts`: count by seat."""

    root: str
    description: Mapping[str, object]
    seats: list[str | None]
    restarts: list[int]
    is_evaluation: bool = False
    label: str = ""

    @property
    def is_untouched(self) -> bool:
        return not (self.label or any(self.seats) or any(self.restarts))

    def free_seats(self) -> Iterator[int]:
        return (seat for seat, session_id in enumerate(self.seats) if session_id is None)


@dataclass(slots=True, eq=False)
class Call:
    """One request under way. `answer`: resolved when a client waits and every choice is sampled; a retry awaits the same one.
    `places`: chain and depth by choice. `streamed`: text already sent to a streaming client. `asked_at`: when it first came."""

    number: int
    session_id: str
    request: CallRequest
    place: TreePlace
    answer: asyncio.Future[tuple[Choice, ...]]
    asked_at: float
    prompt_token_ids: tuple[int, ...] = ()  # empty until encoded
    places: dict[int, tuple[int, int]] = field(default_factory=dict)
    completions: dict[int, Rollout] = field(default_factory=dict)
    has_client: bool = True
    pieces: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    streamed: str = ""
    streamed_at: float = -math.inf

    @property
    def name(self) -> str:
        """Unique in the gateway."""
        return f"{self.session_id}-{self.number}"

    @property
    def is_sampled(self) -> bool:
        return len(self.completions) == self.request.choices


@dataclass(slots=True, eq=False)
class Session:
    """One episode in one seat. `answered`: how many calls of each chain were answered, and so count for training. `playing`: the
    task of its harness, if echo2 runs it. `heard_at`: when a call of it last came or was sampled. `own_s`: until then, the seconds
    in which no call waited for workers."""

    session_id: str
    key: str
    problem: Problem
    seat: int
    heard_at: float
    own_s: float = 0.0
    playing: asyncio.Task[None] | None = None
    tree: TokenTree = field(default_factory=TokenTree)
    calls: list[Call] = field(default_factory=list)
    answered: dict[int, int] = field(default_factory=dict)
    last: Node | None = None
    call_count: int = 0
    is_scored: bool = False

    @property
    def is_waiting(self) -> bool:
        """Whether a call of it waits for workers."""
        return any(not call.is_sampled for call in self.calls)

    def touch(self, now: float) -> None:
        self.own_s += 0.0 if self.is_waiting else now - self.heard_at
        self.heard_at = now

    @property
    def kept_bytes(self) -> int:
        """Approximate memory of the episode: its tokens, and its requests that are under way or not yet answered to a client."""
        return self.tree.kept_bytes + sum(c.request.size_bytes + ID_BYTES * len(c.prompt_token_ids) for c in self.calls)


@dataclass(slots=True)
class GatewayCounts:
    """Counters since the start."""

    sessions: int = 0
    calls: int = 0
    branches: int = 0
    retried: int = 0
    refused: int = 0
    restarted: int = 0
    dropped: int = 0
    timed_out: int = 0
    rewarded: int = 0
    prompt_tokens: int = 0
    kept_tokens: int = 0  # prompt tokens that were in the tree already


class Episodes:
    """All open problems and sessions. `harness`: plays the episodes, with the API at `base_url`; if None, outside harnesses ask for
    seats. `new_key`: returns a fresh unguessable string."""

    def __init__(
        self,
        limits: GatewayLimits,
        codec: ChatCodec,
        fleet: Fleet,
        clock: Callable[[], float],
        new_key: Callable[[], str],
        harness: Harness | None = None,
        base_url: str = "",
    ) -> None:
        self.limits, self.codec, self._fleet, self._clock, self._new_key = limits, codec, fleet, clock, new_key
        self._harness, self._base_url = harness, base_url
        if harness is not None:
            os.environ.update(past_proxies(base_url))  # a function's client reads them in this process
        self.problems: dict[str, Problem] = {}
        self.sessions: dict[str, Session] = {}
        self.ended: dict[str, Ended] = {}  # the last `sessions_max` that were, oldest first
        self.counts = GatewayCounts()
        self.long_work = LongWork()
        self._of_group: dict[str, tuple[Session, Call, int]] = {}  # by leased group: its session, call and choice
        self._sampled_at = -math.inf  # when the last tokens of any call came
        self._interned = tuple(range(limits.vocabulary_size))  # so that equal token ids share one int object
        self._tasks = Tasks()
        self._refusals = Refusals(_log)

    # ---- what the learner says

    def open_problem(
        self, root: str, seats: int, description: Mapping[str, object], *, is_evaluation: bool = False
    ) -> None:
        """The learner wants `seats` episodes of this problem. Evaluations are played before training problems."""
        self.problems[root] = Problem(root, description, [None] * seats, [0] * seats, is_evaluation)
        self._fill_seats()

    def close_problem(self, root: str, reason: str) -> None:
        self.problems.pop(root, None)
        for session in [s for s in self.sessions.values() if s.problem.root == root]:
            self._end(session, f"its group is closed: {reason}")
        self._fill_seats()

    def on_completion(self, group_id: str, completion: Rollout) -> None:
        """A leased completion is whole. Answers the client once every choice of its call is."""
        session, call, choice = self._of_group.pop(group_id, (None, None, 0))
        if session is None or call is None:
            return
        self._sampled_at = self._clock()
        session.touch(self._clock())
        call.completions[choice] = completion
        if call.is_sampled and call.has_client:
            with self._answering(session, call):
                self._deliver(session, call)

    def on_tokens(self, group_id: str, token_ids: tuple[int, ...]) -> None:
        """Streams the part of an unfinished completion that no later token can take back."""
        session, call, _ = self._of_group.get(group_id, (None, None, 0))
        if session is None or call is None:
            return
        self._sampled_at = now = self._clock()
        if not call.has_client or not call.request.is_streamed_in_pieces or now - call.streamed_at < PIECES_S:
            return
        call.streamed_at, stops = now, call.request.stops
        with self._answering(session, call):
            settled = self.codec.settled(token_ids)
            text = certain_part(self.codec.decode(settled, stops, has_tools=False)[0], stops)
            if len(text) > len(call.streamed) and text.startswith(call.streamed):
                call.pieces.put_nowait(text[len(call.streamed) :])
                call.streamed = text

    # ---- what clients ask

    def has_key(self, session_id: str, key: str) -> bool:
        """Whether this is the key of the session, open or ended."""
        session = self.sessions.get(session_id) or self.ended.get(session_id)
        return session is not None and hmac.compare_digest(session.key.encode(), key.encode())

    def take_seat(self, label: str) -> Session:
        """Seats an outside harness. Episodes with the same label get the same problem, so that their rewards can be compared."""
        place = None if self._harness or len(self.sessions) >= self.limits.sessions_max else self._free_seat(label)
        if place is None:
            raise self._refusal(429, "no_seat", "no episode is wanted now; come again", self.limits.retry_after_s)
        problem, seat = place
        problem.label = label or problem.label
        return self._sit(problem, seat)

    def begin_call(self, session: Session, request: CallRequest) -> Call:
        """Begins a call, or takes up the same call of a client that disconnected. Its `answer` may raise CallRefused, too."""
        if session.session_id not in self.sessions or session.is_scored:
            raise CallRefused(410, "session_ended", "this episode has ended")
        session.touch(self._clock())
        for call in session.calls:
            if call.request.digest == request.digest and not call.has_client:
                # A retry takes over an abandoned call, and its answer if there is one.
                self.counts.retried += 1
                call.has_client, call.request, call.pieces, call.streamed = True, request, asyncio.Queue(), ""
                if call.is_sampled:
                    with self._answering(session, call):
                        self._deliver(session, call)
                return call
        self._check_limits(session, request)
        session.call_count += 1  # refused or not: to look at it costs time
        place = session.tree.place_of(request)
        if place.wording.text_bytes > self.limits.context_tokens * self.limits.token_bytes_max:
            raise self._no_room(f"a text of {place.wording.text_bytes} bytes")
        answer = asyncio.get_running_loop().create_future()
        call = Call(session.call_count, session.session_id, request, place, answer, session.heard_at)
        session.calls.append(call)
        if place.wording.size > self.limits.encoded_at_once_max:
            self._tasks.start(self._encode_aside(session, call))
        else:
            with self._answering(session, call):
                self._lease(session, call, place.wording.tokens(self.codec))
        return call

    def leave(self, call: Call) -> None:
        """The client has stopped waiting."""
        call.has_client = False

    def reward(self, session: Session, value: float, parts: Mapping[str, float]) -> None:
        """The harness, a client or the task gave a reward, which ends the episode."""
        if session.session_id not in self.sessions:
            return
        if not session.answered:
            return self.fail(session, "it made no call")
        wrong = [number for number in (value, *parts.values()) if not is_reward(number)]
        if wrong:
            return self.fail(session, f"expected a reward within {REWARD_MAX:,.0f} of 0, got {wrong[0]!r:.40}")
        self.counts.rewarded += 1
        chains = {chain: session.answered.get(chain, 0) for chain in session.tree.lengths}
        self._end(session, f"the episode has its reward, {value:g}", (value, dict(parts)))
        self._fleet.end_episode(session.problem.root, chains, (value, parts), is_final=True)
        self._fill_seats()

    def fail(self, session: Session, reason: str) -> None:
        """Restarts the episode, or drops it after `restarts_max`: a fault of the machinery never becomes a reward. Starved ones
        do not count, or all would be dropped at once; that of a client which is merely too impatient counts, or would go on."""
        if session.session_id not in self.sessions:
            return
        problem, awake_at = session.problem, self._clock() - STARVED_S
        unanswered = (call for call in session.calls if not call.is_sampled)
        is_starved = any(max(call.asked_at, self._sampled_at) <= awake_at for call in unanswered)
        is_final = problem.restarts[session.seat] >= self.limits.restarts_max and not is_starved
        self._refusals.warn("episode %s is lost: %s", session.session_id, reason)
        self._end(session, f"the episode is lost: {reason}")
        self.counts.dropped += is_final
        self.counts.restarted += not is_final
        if not is_final:
            problem.restarts[session.seat] += not is_starved
            problem.seats[session.seat] = None
        chains = dict.fromkeys(session.tree.lengths, 0)
        self._fleet.end_episode(problem.root, chains, reason, is_final=is_final, is_starved=is_starved)
        self._fill_seats()

    def finish(self, session: Session) -> None:
        """The harness finished without giving a reward, so the task scores the last completion."""
        if session.last is None:
            self.fail(session, "it made no call")
        elif session.session_id in self.sessions and not session.is_scored:
            session.is_scored = True
            self._tasks.start(self._score(session, session.last.token_ids))

    def is_spent(self, session: Session) -> bool:
        """Whether every new call will be refused: the call limit is reached and no abandoned call is left to retry."""
        return session.call_count >= self.limits.calls_max and all(call.has_client for call in session.calls)

    # ---- seats

    def _fill_seats(self) -> None:
        """Begins episodes on free seats, as many as may be played at once."""
        if self._harness is None:
            return
        free = [(problem, seat) for problem in self._by_urgency() for seat in problem.free_seats()]
        for problem, seat in free[: max(0, self.limits.harnesses_max - len(self.sessions))]:
            session = self._sit(problem, seat)
            session.playing = self._tasks.start(self._play(self._harness, session))

    async def _play(self, harness: Harness, session: Session) -> None:
        episode = Episode(self._base_url, session.key, session.problem.description)
        try:
            reward = await harness(episode)
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # of the user's code
            if isinstance(error, asyncio.CancelledError) and session.playing and session.playing.cancelling():
                raise  # ours
            return self.fail(session, cause_of(error)[:500])
        if reward is None:
            self.finish(session)
        else:
            self.reward(session, reward, {})

    def _by_urgency(self) -> list[Problem]:
        """Evaluations first: workers delay their next version until the evaluation is complete."""
        return sorted(self.problems.values(), key=lambda problem: not problem.is_evaluation)

    def _free_seat(self, label: str) -> tuple[Problem, int] | None:
        """A free seat on the problem with this label; for a new label, on a training problem that no session has touched; without
        a label, on any unlabelled problem."""
        problems = self._by_urgency()
        candidates = [problem for problem in problems if problem.label == label]
        if label and not candidates:
            candidates = [problem for problem in problems if problem.is_untouched and not problem.is_evaluation]
        return next(((problem, seat) for problem in candidates for seat in problem.free_seats()), None)

    def _sit(self, problem: Problem, seat: int) -> Session:
        self.counts.sessions += 1
        session_id, now = f"{problem.root}-{seat}-{self.counts.sessions}", self._clock()
        session = Session(session_id, f"{session_id}.{self._new_key()}", problem, seat, now)
        problem.seats[seat] = session_id
        self.sessions[session_id] = session
        return session

    # ---- calls

    def _check_limits(self, session: Session, request: CallRequest) -> None:
        limits = self.limits
        if session.call_count >= limits.calls_max or len(session.tree.lengths) + request.choices > CHAINS_MAX:
            text = f"an episode has at most {limits.calls_max} calls and {CHAINS_MAX} chains of them"
            raise self._refusal(400, "too_many_calls", text)
        busy = sum(not call.is_sampled for call in session.calls)
        if busy >= limits.calls_at_once_max or len(self._of_group) + request.choices > limits.calls_in_flight_max:
            raise self._refusal(429, "busy", "too many calls are under way", limits.retry_after_s)
        if (total := session.kept_bytes + request.size_bytes) > limits.session_bytes_max:
            text = f"expected an episode of at most {limits.session_bytes_max} bytes, with this call it has {total}"
            raise self._refusal(400, "episode_too_large", text)
        if isinstance(request.prompt, tuple) and max(request.prompt) >= limits.vocabulary_size:
            text = f"prompt: expected token ids below {limits.vocabulary_size}, got {max(request.prompt)!r:.40}"
            raise self._refusal(400, "invalid_request_error", text)

    def _refusal(self, status: int, code: str, text: str, retry_after_s: float = 0.0) -> CallRefused:
        self.counts.refused += 1
        return CallRefused(status, code, text, retry_after_s)

    def _no_room(self, got: str) -> CallRefused:
        # In the words by which clients know that they have to shorten their chat.
        text = (
            f"this model's maximum context length is {self.limits.context_tokens} tokens: expected a prompt of one to "
        )
        return CallRefused(400, "context_length_exceeded", f"{text}{self.limits.context_tokens - 1}, got {got}")

    async def _encode_aside(self, session: Session, call: Call) -> None:
        with self._answering(session, call):
            token_ids = await self.long_work.run(session.session_id, lambda: call.place.wording.tokens(self.codec))
            if call in session.calls:  # the episode may have ended in the meantime
                self._lease(session, call, token_ids)

    @contextmanager
    def _answering(self, session: Session, call: Call) -> Iterator[None]:
        """Any error becomes the client's answer: a tokenizer raises what it likes."""
        try:
            yield
        except Exception as error:  # noqa: BLE001
            self._refuse(session, call, error)

    def _lease(self, session: Session, call: Call, added: Sequence[int]) -> None:
        """Asks for completions now that all prompt tokens are known."""
        request, place, limits = call.request, call.place, self.limits
        length = place.length + len(added)
        room = limits.context_tokens - length
        if room < 1 or not length:
            raise self._no_room(f"{length} tokens")
        call.prompt_token_ids = tuple(map(self._interned.__getitem__, itertools.chain(place.known_ids, added)))
        self.counts.calls += 1
        self.counts.prompt_tokens += length
        self.counts.kept_tokens += place.length
        tokens = min(request.max_tokens or limits.max_new_tokens, limits.max_new_tokens, room)
        temperature = request.temperature if session.problem.is_evaluation else None
        chain, branches = session.tree.chain_for(place), session.tree.branches
        asked = (call.prompt_token_ids, tokens, request.stops, temperature)
        for choice in range(request.choices):
            leased = self._fleet.lease(session.problem.root, None if choice else chain, *asked)
            if leased is None:
                raise CallRefused(410, "session_ended", "the group of this episode is gone")
            group_id, leased_chain = leased
            call.places[choice] = (leased_chain, session.tree.began(leased_chain))
            self._of_group[group_id] = (session, call, choice)
        self.counts.branches += session.tree.branches - branches

    def _deliver(self, session: Session, call: Call) -> None:
        """Answers the client. From now on the call counts for training, and later calls may continue it."""
        prompt, tree = call.request.prompt, session.tree
        choices = tuple(self._choice(call, number) for number in range(call.request.choices))
        for number, choice in enumerate(choices):
            chain, depth = call.places[number]
            session.answered[chain] = max(session.answered.get(chain, 0), depth)
            node = tree.node(call.place, chain, depth, call.prompt_token_ids, choice.sampled.token_ids)
            if prompt is None:
                message = {"role": "assistant", "content": choice.text, "tool_calls": list(choice.tool_calls)}
                tree.answered(node, call.place.key, message)
            else:
                texts = set[str]()
                if isinstance(prompt, str):
                    whole, _ = self.codec.decode(choice.sampled.token_ids, (), has_tools=False)  # with the stop string
                    texts = {prompt + choice.text, prompt + whole}
                tree.completed(node, texts)
            session.last = node if number == 0 else session.last
        session.calls.remove(call)
        call.answer.set_result(choices)

    def _choice(self, call: Call, number: int) -> Choice:
        sampled, request = call.completions[number], call.request
        text, tool_calls = self.codec.decode(sampled.token_ids, request.stops, has_tools=bool(request.tools))
        # Nine letters and digits, as Mistral's templates ask.
        named = tuple({**tool, "id": f"c{call.number:04}{number:02}{at:02}"} for at, tool in enumerate(tool_calls))
        is_cut = sampled.finish_reason is FinishReason.LENGTH
        return Choice(text, named, sampled, "length" if is_cut else "tool_calls" if named else "stop")

    def _refuse(self, session: Session, call: Call, error: Exception) -> None:
        if isinstance(error, CallRefused):
            refused = error
        elif isinstance(error, EchoError):
            refused = CallRefused(400, "invalid_request_error", str(error))
        else:
            MISHAPS.note("a call", "an agent", error)
            refused = CallRefused(500, "internal_error", f"{type(error).__name__}; the learner's log says more")
        if call in session.calls:
            session.calls.remove(call)
        for group_id in [g for g, (_, of_call, _) in self._of_group.items() if of_call is call]:
            del self._of_group[group_id]
        if not call.answer.done():
            call.answer.set_exception(refused)
            call.answer.exception()  # nobody has to fetch it

    # ---- ends

    async def _score(self, session: Session, token_ids: tuple[int, ...]) -> None:
        outcome: Scored | str
        try:
            outcome = await self._fleet.score(session.problem.root, token_ids)
        except Exception as error:  # noqa: BLE001 - the task's code: an episode that is scored has no time limit
            outcome = cause_of(error)[:500]
        if isinstance(outcome, str):
            self.fail(session, outcome)
        else:
            self.reward(session, *outcome)

    def _end(self, session: Session, text: str, scored: Scored | None = None) -> None:
        for call in list(session.calls):
            self._refuse(session, call, CallRefused(410, "session_ended", text))
        del self.sessions[session.session_id]
        self.ended[session.session_id] = Ended(session.key, text, scored)
        if len(self.ended) > self.limits.sessions_max:
            del self.ended[next(iter(self.ended))]
        if session.playing is not None and session.playing is not asyncio.current_task():
            session.playing.cancel()

    async def run(self) -> None:
        """Calls `expire` every TICK_S until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            self.expire()

    def expire(self) -> None:
        """Ends episodes whose own time is up, and fails those whose outside harness asks nothing any more."""
        now = self._clock()
        for session in [session for session in self.sessions.values() if not session.is_scored]:
            idle_s = 0.0 if session.is_waiting else now - session.heard_at
            if session.own_s + idle_s > self.limits.episode_s:
                self._time_out(session)
            elif session.playing is None and idle_s > self.limits.idle_s:
                self.fail(session, f"it asked nothing for {self.limits.idle_s:.0f} s")

    def _time_out(self, session: Session) -> None:
        """Stops the harness and lets the task score what there is: what the policy asked of its tools took the time."""
        if session.last is None:
            return self.fail(session, f"it took over {self.limits.episode_s:.0f} s without an answer of the model")
        self.counts.timed_out += 1
        self._refusals.warn("episode %s took over %.0f s: it is scored", session.session_id, self.limits.episode_s)
        if session.playing is not None:
            session.playing.cancel()
        self.finish(session)

    async def close(self) -> None:
        """Ends the agents' programs and answers every client that still waits."""
        self.long_work.close()
        await self._tasks.end()
        for session in list(self.sessions.values()):
            for call in list(session.calls):
                self._refuse(session, call, CallRefused(503, "run_ended", "the run has ended"))


def certain_part(text: str, stops: Sequence[str]) -> str:
    """Returns `text` without a trailing part that may begin a stop string, and without a trailing incomplete character."""
    text = text.rstrip(_INCOMPLETE)
    return text[: len(text) - max((_overlap(text, stop) for stop in stops), default=0)]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`, in characters."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


class LongWork:
    """Runs what would hold the event loop in THREADS threads: at most one job of a caller at a time, in their order."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="gateway")
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # of callers with jobs

    async def run(self, caller: str, work: Callable[[], _T]) -> _T:
        """Runs `work` in a thread; returns or raises what it does."""
        async with self._turns.setdefault(caller, asyncio.Lock()):
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        """Cancels waiting jobs; running ones finish by themselves."""
        self._threads.shutdown(wait=False, cancel_futures=True)
