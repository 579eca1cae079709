"""State machine of the agents' episodes: `handle` takes an event and returns every action that follows from it.

    seat free --harness started, or an outside one asked--> session --reward--> ended
       ^                                                      |
       '------ lost: given up, idle, failed (restarts) -------'--> after `restarts_max`: dropped and counted, never scored 0

Guarantees: a history that a client repeats maps back to the sampled token ids, or starts a new chain (tree); if a client
disconnects, a retry of the same call gets its answer; a completion that no client received is not trained on; every list has a
limit, and a client that hits one is refused, with a time to retry if a retry can help. Leaves to others: HTTP and processes
(runtime), leases and training (the learner).
"""

from __future__ import annotations

import hmac
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from echo2.base.errors import EchoError
from echo2.gateway import events as e
from echo2.gateway.episode import Call, GatewayCounts, Problem, Session
from echo2.gateway.growth import certain_part, is_told_in_pieces
from echo2.gateway.limits import CHAINS_MAX, REWARD_MAX, GatewayLimits, is_reward
from echo2.gateway.requests import CallRequest, Message
from echo2.gateway.tree import Speech


class ModelReading(Speech, Protocol):
    """Encodes text like `Speech`, and also decodes sampled tokens."""

    def said(self, token_ids: tuple[int, ...], stops: tuple[str, ...], *, has_tools: bool) -> tuple[str, list[Message]]:
        """Returns the text before the first stop string, and the tool calls in the OpenAI API's shape."""
        ...


PIECES_S = 0.5
"""Least time between two pieces of one stream, in seconds."""


@dataclass(slots=True)
class Sessions:
    """All open problems and sessions.

    `new_key`: returns a fresh unguessable string. `has_harness`: echo2 runs the agents itself; otherwise outside harnesses ask for
    seats.
    """

    limits: GatewayLimits
    reading: ModelReading
    new_key: Callable[[], str]
    has_harness: bool
    problems: dict[str, Problem] = field(default_factory=dict)
    sessions: dict[str, Session] = field(default_factory=dict)
    counts: GatewayCounts = field(default_factory=GatewayCounts)
    _of_call: dict[int, str] = field(default_factory=dict)
    _of_group: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    _numbers: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self._numbers = tuple(range(self.limits.vocabulary_size))

    def handle(self, event: e.Event, now: float) -> list[e.Action]:
        """Returns the actions that follow from `event`, in the order in which to carry them out."""
        return [*self._on(event, now), *(self._begun(now) if self.has_harness else ())]

    def key_fits(self, session_id: str, key: str) -> bool:
        session = self.sessions.get(session_id)
        return session is not None and hmac.compare_digest(session.key.encode(), key.encode())

    def is_spent(self, session_id: str) -> bool:
        """Whether every new call will be refused: the call limit is reached and no abandoned call is left to retry."""
        session = self.sessions.get(session_id)
        if session is None or session.call_count < self.limits.calls_max:
            return False
        return all(call.is_waited_for for call in session.calls.values())

    def evaluates(self, session_id: str) -> bool:
        """Whether the session is an evaluation. Its tokens are not trained on, so the client may choose the temperature."""
        session = self.sessions.get(session_id)
        return session is not None and self.problems[session.root].is_evaluation

    def _on(self, event: e.Event, now: float) -> Iterator[e.Action]:
        match event:
            case e.ProblemOpened(root, seats, told, is_evaluation):
                self.problems[root] = Problem(root, dict(told), [None] * seats, [0] * seats, is_evaluation)
            case e.ProblemClosed(root, reason):
                yield from self._closed(root, reason)
            case e.SeatAsked():
                yield from self._seated(event, now)
            case e.Called():
                yield from self._called(event, now)
            case e.Encoded():
                yield from self._encoded(event, now)
            case e.CallRefused(session_id):
                if session_id in self.sessions:
                    self.sessions[session_id].call_count += 1
            case e.Leased():
                yield from self._leased(event)
            case e.CallTokens():
                yield from self._sampled(event, now)
            case e.CallGrew(group_id, token_ids):
                yield from self._grew(group_id, token_ids, now)
            case e.ClientLeft(call_id):
                self._left(call_id)
            case e.CallBroke(call_id, name):
                yield from self._broke(call_id, name)
            case e.EpisodeRewarded(session_id, value, parts):
                yield from self._ended(session_id, value, parts)
            case e.EpisodeFailed(session_id, reason):
                yield from self._failed(session_id, reason)
            case e.HarnessDone(session_id):
                yield from self._done(session_id)
            case e.GatewayTick():
                yield from self._ticked(now)

    # ---- seats

    def _begun(self, now: float) -> Iterator[e.Action]:
        running = sum(session.is_own for session in self.sessions.values())
        for problem in self._by_urgency:
            for seat, taken in enumerate(problem.seats):
                if running >= self.limits.harnesses_max:
                    return
                if taken is None:
                    session = self._sit(problem, seat, now, is_own=True)
                    running += 1
                    yield e.RunHarness(session.session_id, session.key, problem.told)

    @property
    def _by_urgency(self) -> list[Problem]:
        """Evaluations first: workers delay their next version until the evaluation is complete."""
        return sorted(self.problems.values(), key=lambda problem: not problem.is_evaluation)

    def _seated(self, event: e.SeatAsked, now: float) -> Iterator[e.Action]:
        found = None if self.has_harness or len(self.sessions) >= self.limits.sessions_max else self._free(event.label)
        if found is None:
            self.counts.refused += 1
            yield e.Refuse(
                event.call_id, 429, "no_seat", "no episode is wanted now; come again", self.limits.retry_after_s
            )
            return
        problem, seat = found
        problem.label = event.label or problem.label
        session = self._sit(problem, seat, now, is_own=False)
        yield e.Seated(event.call_id, session.session_id, session.key, problem.root, seat, problem.told)

    def _free(self, label: str) -> tuple[Problem, int] | None:
        """Finds a free seat: on the problem with this label; for a new label, on a training problem that no session has touched;
        without a label, on any unlabelled problem."""
        labelled = [problem for problem in self.problems.values() if label and problem.label == label]
        fresh = [one for one in self.problems.values() if one.is_untouched and not one.is_evaluation]
        unnamed = [problem for problem in self._by_urgency if not problem.label]
        for problem in labelled or (fresh if label else unnamed):
            for seat, taken in enumerate(problem.seats):
                if taken is None:
                    return problem, seat
        return None

    def _sit(self, problem: Problem, seat: int, now: float, *, is_own: bool) -> Session:
        self.counts.sessions += 1
        session_id = f"{problem.root}-{seat}-{problem.restarts[seat]}"
        session = Session(session_id, f"{session_id}.{self.new_key()}", problem.root, seat, is_own, now, now)
        problem.seats[seat] = session_id
        self.sessions[session_id] = session
        return session

    # ---- calls

    def _called(self, event: e.Called, now: float) -> Iterator[e.Action]:
        session = self.sessions.get(event.session_id)
        if session is None or session.is_scored:
            yield e.Refuse(event.call_id, 410, "session_ended", "this episode has ended")
            return
        session.heard_at = now
        request = event.request
        if (again := session.call_of(request)) is not None:
            yield from self._taken_up(session, again, event.call_id)
            return
        refused = self._over_limit(session, event.call_id, request)
        if refused is not None:
            self.counts.refused += 1
            yield refused
            return
        session.call_count += 1  # refused or not: to look at it costs time
        place = session.tree.place_of(request)
        if place.wording.text_bytes > self.limits.context_tokens * self.limits.token_bytes_max:
            yield self._no_room(event.call_id, f"a text of {place.wording.text_bytes} bytes")
            return
        call = Call(event.call_id, event.call_id, request, place)
        session.calls[call.call_id] = call
        self._of_call[call.call_id] = session.session_id
        if place.wording.size > self.limits.encoded_at_once_max:
            yield e.Encode(session.session_id, call.number, place.wording)
            return
        try:
            token_ids = place.wording.tokens(self.reading)
        except EchoError as error:
            yield from self._refused(session, call, 400, "invalid_request_error", str(error))
            return
        yield from self._placed(session, call, token_ids)

    def _over_limit(self, session: Session, call_id: int, request: CallRequest) -> e.Refuse | None:
        limits = self.limits
        if session.call_count >= limits.calls_max or len(session.tree.lengths) + request.choices > CHAINS_MAX:
            text = f"an episode has at most {limits.calls_max} calls and {CHAINS_MAX} chains of them"
            return e.Refuse(call_id, 400, "too_many_calls", text)
        busy = sum(call.answer is None for call in session.calls.values())
        if busy >= limits.calls_at_once_max or len(self._of_group) + request.choices > limits.calls_in_flight_max:
            return e.Refuse(call_id, 429, "busy", "too many calls are under way", limits.retry_after_s)
        if (kept := session.kept_bytes + request.size_bytes) > limits.session_bytes_max:
            text = f"expected an episode of at most {limits.session_bytes_max} bytes, with this call it has {kept}"
            return e.Refuse(call_id, 400, "episode_too_large", text)
        if isinstance(request.prompt, tuple) and max(request.prompt) >= limits.vocabulary_size:
            text = f"prompt: expected token ids below {limits.vocabulary_size}, got {max(request.prompt)!r:.40}"
            return e.Refuse(call_id, 400, "invalid_request_error", text)
        return None

    def _no_room(self, call_id: int, got: str) -> e.Refuse:
        text = f"expected a prompt of 1 to {self.limits.context_tokens - 1} tokens, got {got}"
        return e.Refuse(call_id, 400, "context_length_exceeded", text)

    def _encoded(self, event: e.Encoded, now: float) -> Iterator[e.Action]:
        session = self.sessions.get(event.session_id)
        call = next((c for c in session.calls.values() if c.number == event.number), None) if session else None
        if session is None or call is None:  # the episode has ended in the meantime
            return
        session.heard_at = now
        if event.problem:
            yield from self._refused(session, call, 400, "invalid_request_error", event.problem)
        else:
            yield from self._placed(session, call, event.token_ids)

    def _placed(self, session: Session, call: Call, token_ids: Sequence[int]) -> Iterator[e.Action]:
        """Asks for completions once all prompt tokens are known. Interns the ids, so that equal ids share one int object."""
        place, length = call.place, call.place.length + len(token_ids)
        room = self.limits.context_tokens - length
        if room < 1 or not length:
            self._forget(session, call)
            yield self._no_room(call.call_id, f"{length} tokens")
            return
        call.prompt_token_ids = tuple(map(self._numbers.__getitem__, itertools.chain(place.known_ids, token_ids)))
        self.counts.calls += 1
        self.counts.prompt_tokens += length
        self.counts.kept_tokens += place.length
        yield from self._asked(session, call, room)

    def _asked(self, session: Session, call: Call, room: int) -> Iterator[e.Action]:
        request, limits = call.request, self.limits
        tokens = min(request.max_tokens or limits.max_new_tokens, limits.max_new_tokens, room)
        chain = session.tree.chain_for(call.place)
        temperature = request.temperature if self.evaluates(session.session_id) else None
        for choice in range(request.choices):
            goes_on = chain if choice == 0 else None
            yield e.Ask(
                call.call_id, choice, session.root, goes_on, call.prompt_token_ids, tokens, request.stops, temperature
            )

    def _leased(self, event: e.Leased) -> Iterator[e.Action]:
        found = self._call(event.call_id)
        if found is None:
            return
        session, call = found
        if not event.group_id:
            yield from self._refused(session, call, 410, "session_ended", "the group of this episode is gone")
            return
        before = session.tree.branches
        call.depths[event.choice] = (event.chain, session.tree.began(event.chain))
        self.counts.branches += session.tree.branches - before
        self._of_group[event.group_id] = (session.session_id, call.call_id, event.choice)

    def _sampled(self, event: e.CallTokens, now: float) -> Iterator[e.Action]:
        session_id, call_id, choice = self._of_group.pop(event.group_id, ("", 0, 0))
        session = self.sessions.get(session_id)
        call = session.calls.get(call_id) if session is not None else None
        if session is None or call is None:
            return
        session.heard_at = now
        call.sampled[choice] = event
        if len(call.sampled) < call.request.choices:
            return
        call.answer = self._answer(call)
        if call.is_waited_for:
            yield from self._told(session, call)

    def _grew(self, group_id: str, token_ids: tuple[int, ...], now: float) -> Iterator[e.Action]:
        session_id, call_id, _ = self._of_group.get(group_id, ("", 0, 0))
        session = self.sessions.get(session_id)
        call = session.calls.get(call_id) if session is not None else None
        if session is None or call is None or not call.is_waited_for or not is_told_in_pieces(call.request):
            return
        session.heard_at = now
        if (
            now - call.grown_at < PIECES_S
        ):  # every piece decodes the whole text again, and a worker may report token by token
            return
        call.grown_at, stops = now, call.request.stops
        text = certain_part(self.reading.said(token_ids, stops, has_tools=False)[0], stops)
        if len(text) > len(call.told_text) and text.startswith(call.told_text):
            piece, call.told_text = text[len(call.told_text) :], text
            yield e.CallPiece(call_id, piece)

    def _answer(self, call: Call) -> e.CallAnswer:
        choices = []
        for number in range(call.request.choices):
            sampled = call.sampled[number]
            text, tool_calls = self.reading.said(
                sampled.token_ids, call.request.stops, has_tools=bool(call.request.tools)
            )
            named = tuple(
                {**tool_call, "id": f"call_{call.call_id}_{number}_{place}"}
                for place, tool_call in enumerate(tool_calls)
            )
            reason = "length" if sampled.is_cut else "tool_calls" if named else "stop"
            choices.append(e.Choice(text, named, sampled.token_ids, sampled.logprobs, sampled.versions, reason))
        return e.CallAnswer(call.call_id, call.prompt_token_ids, tuple(choices))

    def _told(self, session: Session, call: Call) -> Iterator[e.Action]:
        """Delivers the answer. From now on the call counts for training, and later calls may continue it."""
        assert call.answer is not None, "it has its answer"
        prompt = call.request.prompt
        for number, choice in enumerate(call.answer.choices):
            chain, depth = call.depths[number]
            session.told_calls[chain] = max(session.told_calls.get(chain, 0), depth)
            node = session.tree.node(call.place, chain, depth, call.prompt_token_ids, choice.token_ids)
            if prompt is None:
                answer = {"role": "assistant", "content": choice.text, "tool_calls": list(choice.tool_calls)}
                session.tree.answered(node, call.place.key, answer)
            else:
                session.tree.completed(node, prompt + choice.text if isinstance(prompt, str) else "")
            session.last = node if number == 0 else session.last
        self._forget(session, call)
        yield call.answer

    def _taken_up(self, session: Session, call: Call, call_id: int) -> Iterator[e.Action]:
        """A retry takes over the abandoned call, and its answer if there is one."""
        self.counts.retried += 1
        self._forget(session, call)
        for group_id, (session_id, old, choice) in list(self._of_group.items()):
            if session_id == session.session_id and old == call.call_id:
                self._of_group[group_id] = (session_id, call_id, choice)
        call.call_id, call.is_waited_for, call.told_text = call_id, True, ""
        if call.answer is not None:
            call.answer = self._answer(call)
        session.calls[call_id] = call
        self._of_call[call_id] = session.session_id
        if call.answer is not None:
            yield from self._told(session, call)

    def _left(self, call_id: int) -> None:
        found = self._call(call_id)
        if found is not None:
            found[1].is_waited_for = False

    def _broke(self, call_id: int, name: str) -> Iterator[e.Action]:
        """Removes the call after an unexpected error, and answers its client with 500."""
        every = ((session, call) for session in self.sessions.values() for call in session.calls.values())
        found = next((one for one in every if call_id in (one[1].call_id, one[1].number)), None)
        if found is not None:
            self._forget(*found)
            call_id = found[1].call_id
        for group_id in [group_id for group_id, (_, of_call, _) in self._of_group.items() if of_call == call_id]:
            del self._of_group[group_id]
        yield e.Refuse(call_id, 500, "internal_error", f"{name}; the learner's log says more")

    def _call(self, call_id: int) -> tuple[Session, Call] | None:
        session = self.sessions.get(self._of_call.get(call_id, ""))
        call = session.calls.get(call_id) if session is not None else None
        return None if session is None or call is None else (session, call)

    def _forget(self, session: Session, call: Call) -> None:
        session.calls.pop(call.call_id, None)
        self._of_call.pop(call.call_id, None)

    def _refused(self, session: Session, call: Call, status: int, code: str, text: str) -> Iterator[e.Action]:
        self._forget(session, call)
        if call.is_waited_for:
            yield e.Refuse(call.call_id, status, code, text)

    # ---- ends

    def _done(self, session_id: str) -> Iterator[e.Action]:
        session = self.sessions.get(session_id)
        if session is None or session.is_scored:
            return
        if session.last is None:
            yield from self._failed(session_id, "it made no call")
            return
        session.is_scored = True
        yield e.AskScore(session_id, session.root, session.last.token_ids)

    def _ended(self, session_id: str, value: float, parts: object) -> Iterator[e.Action]:
        session = self.sessions.get(session_id)
        if session is None:
            return
        if not session.told_calls:
            yield from self._failed(session_id, "it made no call")
            return
        told = dict(parts) if isinstance(parts, dict) else {}
        wrong = [number for number in (value, *told.values()) if not is_reward(number)]
        if wrong:  # whoever gave it: a harness, a client, the task
            yield from self._failed(
                session_id, f"expected a reward within {REWARD_MAX:,.0f} of 0, got {wrong[0]!r:.40}"
            )
            return
        self.counts.rewarded += 1
        chains = {chain: session.told_calls.get(chain, 0) for chain in session.tree.lengths}
        yield from self._over(session, "the episode has its reward")
        yield e.EndEpisode(session.root, chains, value, told, is_final=True)

    def _failed(self, session_id: str, reason: str) -> Iterator[e.Action]:
        """Restarts the episode, or drops it after `restarts_max`: a fault of the machinery never becomes a reward."""
        session = self.sessions.get(session_id)
        if session is None:
            return
        problem = self.problems[session.root]
        is_final = problem.restarts[session.seat] >= self.limits.restarts_max
        chains = dict.fromkeys(session.tree.lengths, 0)
        yield e.EpisodeLost(session_id, reason)
        yield from self._over(session, f"the episode is lost: {reason}")
        self.counts.dropped += is_final
        self.counts.restarted += not is_final
        if not is_final:
            problem.restarts[session.seat] += 1
            problem.seats[session.seat] = None
        yield e.EndEpisode(session.root, chains, None, {}, is_final)

    def _over(self, session: Session, text: str) -> Iterator[e.Action]:
        for call in list(session.calls.values()):
            yield from self._refused(session, call, 410, "session_ended", text)
        del self.sessions[session.session_id]
        for group_id in [g for g, (owner, _, _) in self._of_group.items() if owner == session.session_id]:
            del self._of_group[group_id]
        if session.is_own:
            yield e.StopHarness(session.session_id)

    def _closed(self, root: str, reason: str) -> Iterator[e.Action]:
        problem = self.problems.pop(root, None)
        for session in [s for s in self.sessions.values() if problem is not None and s.root == root]:
            yield from self._over(session, f"its group is closed: {reason}")

    def _ticked(self, now: float) -> Iterator[e.Action]:
        for session in list(self.sessions.values()):
            waits = any(call.answer is None for call in session.calls.values())
            if now - session.began_at > self.limits.episode_s:
                yield from self._failed(session.session_id, f"it took over {self.limits.episode_s:.0f} s")
            elif not session.is_scored and not waits and now - session.heard_at > self.limits.idle_s:
                yield from self._failed(session.session_id, f"it asked nothing for {self.limits.idle_s:.0f} s")
