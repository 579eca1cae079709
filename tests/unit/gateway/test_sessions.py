"""The gateway's core: what a request continues, who gets a seat, what becomes of what is lost."""

from __future__ import annotations

import math
import random
import tracemalloc
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from echo2.base.errors import MalformedMessage
from echo2.gateway import events as e
from echo2.gateway.limits import GatewayLimits
from echo2.gateway.requests import CallRequest, chat_call, text_call
from echo2.gateway.sessions import Sessions


class Letters:
    """A model whose tokens are letters; an answer may be written in other tokens than its text would be encoded in."""

    def opening(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> Sequence[int]:
        return [ord(c) for c in "".join(f"[{m['role']}]{m['content']}" for m in messages) + "[me]"]

    def between(self, messages: Sequence[Mapping[str, Any]], turn: Sequence[int]) -> Sequence[int]:
        return [ord(c) for c in "".join(f"[{m['role']}]{m['content']}" for m in messages) + "[me]"]

    def encoded(self, text: str, *, is_beginning: bool) -> Sequence[int]:
        return [ord(c) for c in text]

    def said(self, token_ids: tuple[int, ...], stops: tuple[str, ...], *, has_tools: bool) -> tuple[str, list[Any]]:
        return "".join(chr(token - 1000 if token >= 1000 else token) for token in token_ids), []


class World:
    """The sessions with a fleet that samples when it is told to."""

    def __init__(self, has_harness: bool = False, **limits: Any) -> None:
        given: dict[str, Any] = {
            "context_tokens": 400,
            "max_new_tokens": 50,
            "vocabulary_size": 2048,
            "token_bytes_max": 4,
            **limits,
        }
        keys = iter(range(10**6))
        self.sessions = Sessions(GatewayLimits(**given), Letters(), lambda: f"k{next(keys)}", has_harness)
        self.now = 0.0
        self.asked: dict[str, e.Ask] = {}
        self.told: list[e.Action] = []
        self.depths: dict[tuple[str, int], int] = {}
        self.calls = 0
        self.chains = 0

    def tell(self, event: e.Event) -> list[e.Action]:
        actions = self.sessions.handle(event, self.now)
        self.told += actions
        for encode in [a for a in actions if isinstance(a, e.Encode)]:
            said = tuple(encode.wording.tokens(self.sessions.reading))
            actions += self.tell(e.Encoded(encode.session_id, encode.number, said))
        for action in [a for a in actions if isinstance(a, e.Ask)]:
            chain = self.chains if action.chain is None else action.chain
            self.chains += action.chain is None
            depth = self.depths[action.root, chain] = self.depths.get((action.root, chain), 0) + 1
            group_id = f"{action.root}.{chain}.{depth}"
            self.asked[group_id] = action
            actions += self.tell(e.Leased(action.call_id, action.choice, group_id, chain))
        return actions

    def seat(self, label: str = "") -> e.Action:
        self.calls += 1
        (answer,) = self.tell(e.SeatAsked(self.calls, label))
        return answer

    def call(self, session_id: str, request: CallRequest) -> list[str]:
        """Which groups it is leased as."""
        self.calls += 1
        before = set(self.asked)
        self.tell(e.Called(self.calls, session_id, request))
        return [group_id for group_id in self.asked if group_id not in before]

    def sample(self, group_id: str, text: str, shift: int = 1000) -> list[e.Action]:
        tokens = tuple(ord(c) + shift for c in text)
        return self.tell(e.CallTokens(group_id, tokens, (-0.5,) * len(tokens), (0,) * len(tokens), is_cut=False))

    def ask(self, session_id: str, *said: str, answer: str = "ok", n: int = 1) -> list[str]:
        """A chat whose messages alternate, asked and answered."""
        roles = ["user", "assistant"]
        messages = [{"role": roles[place % 2], "content": text} for place, text in enumerate(said)]
        groups = self.call(session_id, chat_call({"messages": messages, "n": n}))
        for number, group_id in enumerate(groups):
            self.sample(group_id, answer + (str(number) if number else ""))
        return groups


def begun(**limits: Any) -> tuple[World, str]:
    world = World(**limits)
    world.tell(e.ProblemOpened("a1", 2, {"index": 5}))
    seated = world.seat()
    assert isinstance(seated, e.Seated) and seated.told == {"index": 5}
    return world, seated.session_id


def test_what_was_sampled_stands_in_the_next_prompt_as_the_very_ids() -> None:
    world, session = begun()
    (first,) = world.ask(session, "hi", answer="yo")
    (second,) = world.ask(session, "hi", "yo", "so?", answer="no")
    opening = world.asked[first].prompt_token_ids
    assert world.asked[second].prompt_token_ids[: len(opening) + 2] == (*opening, 1000 + ord("y"), 1000 + ord("o"))
    assert world.asked[second].chain == 0 and world.sessions.counts.branches == 0


def test_a_history_that_differs_begins_a_chain_of_its_own_and_is_counted() -> None:
    world, session = begun()
    world.ask(session, "hi", answer="yo")
    (other,) = world.ask(session, "hi", "YO", "so?")
    assert world.asked[other].chain is None and world.sessions.counts.branches == 1
    (again,) = world.ask(session, "hi", "yo", "so?", answer="one")
    (twice,) = world.ask(session, "hi", "yo", "and?", answer="two")
    assert world.asked[again].chain == 0 and world.asked[twice].chain is None, (
        "two continue one answer: the second branches"
    )
    assert world.asked[twice].prompt_token_ids[:8] == world.asked[again].prompt_token_ids[:8]
    (end,) = [a for a in world.tell(e.EpisodeRewarded(session, 1.0)) if isinstance(a, e.EndEpisode)]
    assert end.chains == {0: 2, 1: 1, 2: 1} and end.reward == 1.0 and end.is_final


def test_choices_are_chains_and_any_of_them_may_be_gone_on_with() -> None:
    world, session = begun()
    groups = world.ask(session, "hi", answer="yo", n=3)
    assert len(groups) == 3
    (answer,) = [a for a in world.told if isinstance(a, e.CallAnswer)]
    assert [choice.text for choice in answer.choices] == ["yo", "yo1", "yo2"]
    (second,) = world.ask(session, "hi", "yo2", "so?")
    assert world.asked[second].chain == 2


def test_texts_and_token_ids_continue_as_chats_do() -> None:
    world, session = begun()
    (first,) = world.call(session, text_call({"prompt": "one"}))
    world.sample(first, " two")
    (second,) = world.call(session, text_call({"prompt": "one two three"}))
    assert world.asked[second].prompt_token_ids == (
        *map(ord, "one"),
        *(1000 + ord(c) for c in " two"),
        *map(ord, " three"),
    )
    world.sample(second, "!")
    whole = [*world.asked[second].prompt_token_ids, 1000 + ord("!"), 7]
    (third,) = world.call(session, text_call({"prompt": whole}))
    assert world.asked[third].chain == 0 and world.sessions.counts.branches == 0


def test_token_ids_that_the_model_does_not_have_are_refused() -> None:
    world, session = begun(vocabulary_size=2000)
    for tokens in ([2000], [1, 2, 10**12], [10**4000]):
        assert world.call(session, text_call({"prompt": tokens})) == []
        refused = world.told[-1]
        assert isinstance(refused, e.Refuse) and refused.status == 400 and "token ids below 2000" in refused.message
        assert len(refused.message) < 200
    assert world.call(session, text_call({"prompt": [1999]})), "a refused call leaves no place taken"
    for tokens in ([-1], [1.5], [True]):
        with pytest.raises(MalformedMessage, match="prompt: expected"):
            text_call({"prompt": tokens})


def test_a_second_try_takes_the_answer_behind_which_nobody_waited() -> None:
    world, session = begun()
    for comes_before in (True, False):
        request = chat_call({"messages": [{"role": "user", "content": f"hi {comes_before}"}]})
        (group_id,) = world.call(session, request)
        world.tell(e.ClientLeft(world.calls))
        if comes_before:
            assert not [a for a in world.sample(group_id, "yo") if isinstance(a, e.CallAnswer)]
        assert world.call(session, request) == [], "nothing is sampled twice"
        if not comes_before:
            world.sample(group_id, "yo")
        answer = world.told[-1]
        assert isinstance(answer, e.CallAnswer) and answer.call_id == world.calls
    abandoned = world.call(session, chat_call({"messages": [{"role": "user", "content": "never read"}]}))
    world.tell(e.ClientLeft(world.calls))
    world.sample(abandoned[0], "lost")
    (end,) = [a for a in world.tell(e.EpisodeRewarded(session, 1.0)) if isinstance(a, e.EndEpisode)]
    assert end.chains == {0: 1, 1: 1, 2: 0}, "what nobody was told does not count"


def test_a_lost_episode_is_begun_anew_then_dropped_and_never_worth_nothing() -> None:
    world = World(has_harness=True, restarts_max=1)
    started = [a for a in world.tell(e.ProblemOpened("a1", 1, {})) if isinstance(a, e.RunHarness)]
    world.ask(started[0].session_id, "hi")
    again = world.tell(e.EpisodeFailed(started[0].session_id, "its machine died"))
    (end,) = [a for a in again if isinstance(a, e.EndEpisode)]
    (second,) = [a for a in again if isinstance(a, e.RunHarness)]
    assert (end.reward, end.is_final, end.chains) == (None, False, {0: 0}) and second.session_id != started[
        0
    ].session_id
    last = world.tell(e.EpisodeFailed(second.session_id, "again"))
    (end,) = [a for a in last if isinstance(a, e.EndEpisode)]
    assert (end.reward, end.is_final) == (None, True) and not [a for a in last if isinstance(a, e.RunHarness)]
    assert (world.sessions.counts.restarted, world.sessions.counts.dropped) == (1, 1)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 1e300, 10**400], ids=str)
@pytest.mark.parametrize("is_part", [False, True])
def test_what_is_no_reward_loses_the_episode_whoever_gave_it(number: float, is_part: bool) -> None:
    world, session = begun(restarts_max=0)
    world.ask(session, "hi")
    actions = world.tell(e.EpisodeRewarded(session, 1.0 if is_part else number, {"exact": number if is_part else 1.0}))
    (end,) = [a for a in actions if isinstance(a, e.EndEpisode)]
    assert (end.reward, end.chains, end.parts) == (None, {0: 0}, {})
    (lost,) = [a for a in actions if isinstance(a, e.EpisodeLost)]
    assert "expected a reward within 1,000,000 of 0" in lost.reason
    assert (world.sessions.counts.rewarded, world.sessions.counts.dropped) == (0, 1)


def test_idle_and_endless_episodes_are_lost_but_not_those_that_wait_for_the_fleet() -> None:
    world, session = begun(idle_s=10.0, episode_s=100.0)
    (group_id,) = world.call(session, chat_call({"messages": [{"role": "user", "content": "hi"}]}))
    world.now = 50.0
    assert not world.tell(e.GatewayTick())
    world.sample(group_id, "yo")
    world.now = 61.0
    assert [a.is_final for a in world.tell(e.GatewayTick()) if isinstance(a, e.EndEpisode)] == [False]
    refused = world.call(session, chat_call({"messages": [{"role": "user", "content": "hi"}]}))
    assert refused == [] and isinstance(world.told[-1], e.Refuse) and world.told[-1].status == 410


def test_an_agent_has_its_whole_idle_time_after_an_answer_however_slow_the_fleet_was() -> None:
    world, session = begun(idle_s=10.0, episode_s=100.0)
    (group_id,) = world.call(session, chat_call({"messages": [{"role": "user", "content": "hi"}]}))
    world.now = 50.0
    assert [a for a in world.sample(group_id, "yo") if isinstance(a, e.CallAnswer)]
    world.now = 59.0
    assert not world.tell(e.GatewayTick()), "it was answered 9 s ago"
    assert world.ask(session, "hi", "yo", "so?"), "and its next call is taken"


def test_seats_are_given_by_label_and_who_comes_too_many_is_told_when_to_come_again() -> None:
    world = World()
    for root in ("a1", "a2"):
        world.tell(e.ProblemOpened(root, 2, {}))
    seats = [world.seat(label) for label in ("x", "y", "x", "y", "")]
    assert [s.root for s in seats if isinstance(s, e.Seated)] == ["a1", "a2", "a1", "a2"]
    assert isinstance(seats[-1], e.Refuse) and seats[-1].status == 429 and seats[-1].retry_after_s > 0
    (closed,) = [a for a in seats[:1] if isinstance(a, e.Seated)]
    world.tell(e.ProblemClosed("a1", "stale"))
    world.call(closed.session_id, chat_call({"messages": [{"role": "user", "content": "hi"}]}))
    assert isinstance(world.told[-1], e.Refuse) and world.told[-1].status == 410


def test_limits_hold_and_say_so() -> None:
    world, session = begun(calls_max=3, calls_at_once_max=1, context_tokens=40)
    hi = chat_call({"messages": [{"role": "user", "content": "hi"}]})
    (group_id,) = world.call(session, hi)
    assert world.asked[group_id].max_tokens == 40 - len(world.asked[group_id].prompt_token_ids)
    for request, status in ((hi, 429), (hi, 429)):
        assert world.call(session, request) == []
        assert isinstance(world.told[-1], e.Refuse) and world.told[-1].status == status
    world.sample(group_id, "yo")
    world.call(session, chat_call({"messages": [{"role": "user", "content": "x" * 50}]}))
    assert isinstance(world.told[-1], e.Refuse) and world.told[-1].code == "context_length_exceeded"
    world.ask(session, "two")
    world.call(session, hi)
    assert isinstance(world.told[-1], e.Refuse) and world.told[-1].code == "too_many_calls"


def test_a_text_without_room_is_refused_before_it_is_encoded_and_counts_as_a_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoded: list[str] = []
    monkeypatch.setattr(Letters, "opening", lambda self, messages, tools: encoded.append("opening") or [1])
    monkeypatch.setattr(Letters, "encoded", lambda self, text, is_beginning: encoded.append("text") or [1])
    world, session = begun(calls_max=3)
    for text in ("x" * 1601, "é" * 801):
        for request in (text_call({"prompt": text}), chat_call({"messages": [{"role": "user", "content": text}]})):
            is_spent = world.sessions.is_spent(session)
            assert world.call(session, request) == []
            told = world.told[-1]
            assert isinstance(told, e.Refuse) and told.status == 400
            assert told.code == ("too_many_calls" if is_spent else "context_length_exceeded")
    assert not encoded and world.sessions.is_spent(session)


def test_a_long_text_becomes_tokens_beside_the_loop_and_its_call_is_any_call_meanwhile() -> None:
    world, session = begun(encoded_at_once_max=100, calls_at_once_max=2, episode_s=1e9)
    long = chat_call({"messages": [{"role": "user", "content": "x" * 120}]})
    (encode,) = world.sessions.handle(e.Called(50, session, long), 0.0)
    assert isinstance(encode, e.Encode)
    world.now = 10_000.0
    assert not world.tell(e.GatewayTick()), "it waits for the gateway, so it is not idle"
    world.tell(e.ClientLeft(50))
    assert world.call(session, long) == [], "its second try takes it over"
    waiting = chat_call({"messages": [{"role": "user", "content": "short"}]})
    assert len(world.call(session, waiting)) == 1 and world.call(session, long) == []
    assert isinstance(world.told[-1], e.Refuse) and world.told[-1].code == "busy"
    asked = world.tell(e.Encoded(session, encode.number, (7, 8, 9)))
    (ask,) = [a for a in asked if isinstance(a, e.Ask)]
    assert ask.prompt_token_ids == (7, 8, 9)
    world.tell(e.EpisodeFailed(session, "broke"))
    assert world.tell(e.Encoded(session, encode.number, (7,))) == [], "of an episode that has ended"
    world, session = begun(encoded_at_once_max=100)
    (encode,) = world.sessions.handle(e.Called(50, session, long), 0.0)
    assert isinstance(encode, e.Encode)
    (told,) = world.tell(e.Encoded(session, encode.number, (), "no template"))
    assert isinstance(told, e.Refuse) and (told.call_id, told.status, told.message) == (50, 400, "no template")


def test_what_is_no_call_counts_as_one() -> None:
    world, session = begun(calls_max=2)
    for _ in range(2):
        assert not world.sessions.is_spent(session)
        world.tell(e.CallRefused(session))
    assert world.sessions.is_spent(session) and world.ask(session, "hi") == []
    assert isinstance(world.told[-1], e.Refuse) and world.told[-1].code == "too_many_calls"


def test_an_episode_keeps_each_token_once() -> None:
    world, session = begun(context_tokens=40_000)
    rng = random.Random(1)
    prompt = [rng.randrange(300, 2000) for _ in range(20_000)]
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(100):
            (group_id,) = world.call(session, text_call({"prompt": prompt}))
            assert world.asked[group_id].chain == (0 if number else None)
            world.sample(group_id, "ok", shift=1000)
            prompt = [*prompt, 1000 + ord("o"), 1000 + ord("k"), 300 + number]
            world.asked.clear()
            world.told.clear()
        kept = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    (episode,) = world.sessions.sessions.values()
    assert kept < 2_000_000 and 4 * 20_000 < episode.kept_bytes < 200_000, (kept, episode.kept_bytes)


def test_an_episode_that_keeps_too_much_is_told_so_and_may_end() -> None:
    world, session = begun(session_bytes_max=20_000, context_tokens=4000)
    for number in range(9):
        groups = world.call(session, text_call({"prompt": [number + 1] * 1000}))
        if not groups:
            break
        world.sample(groups[0], "ok")
    told = world.told[-1]
    assert number == 3 and isinstance(told, e.Refuse) and (told.status, told.code) == (400, "episode_too_large")
    assert "at most 20000 bytes" in told.message
    (end,) = [a for a in world.tell(e.EpisodeRewarded(session, 1.0)) if isinstance(a, e.EndEpisode)]
    assert end.reward == 1.0


def test_texts_and_ids_stand_behind_the_longest_beginning_that_is_known() -> None:
    rng = random.Random(3)
    for _ in range(40):
        world, session = begun(context_tokens=4000)
        texts: dict[str, tuple[int, ...]] = {}
        for _ in range(15):
            prompt = rng.choice(["", *texts]) + "".join(rng.choice("aé") for _ in range(rng.randrange(1, 4)))
            if rng.random() < 0.3:
                prompt = prompt[: rng.randrange(1, len(prompt) + 1)]
            known = max((text for text in texts if prompt.startswith(text) and text != prompt), key=len, default="")
            ids = (*texts.get(known, ()), *map(ord, prompt[len(known) :]))
            is_text = rng.random() < 0.5
            (group_id,) = world.call(session, text_call({"prompt": prompt if is_text else list(ids)}))
            assert world.asked[group_id].prompt_token_ids == ids
            world.sample(group_id, "a")
            if is_text:
                texts.setdefault(prompt + "a", (*ids, 1000 + ord("a")))


def test_calls_of_all_episodes_together_have_a_limit() -> None:
    world, first = begun(calls_in_flight_max=3)
    second = world.seat()
    assert isinstance(second, e.Seated)
    body = {"messages": [{"role": "user", "content": "hi"}]}
    group_id, _ = world.call(first, chat_call({**body, "n": 2}))
    for choices, count in ((2, 0), (1, 1), (1, 0)):
        assert len(world.call(second.session_id, chat_call({**body, "n": choices}))) == count
        refused = world.told[-1]
        if not count:
            assert isinstance(refused, e.Refuse) and (refused.status, refused.code) == (429, "busy")
            assert refused.retry_after_s > 0
    world.sample(group_id, "yo")
    assert len(world.call(second.session_id, chat_call(body))) == 1, "one has ended"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({}, "messages: expected a list"),
        ({"messages": [{"role": "king", "content": ""}]}, "role: expected one of"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content: expected text"),
        ({"messages": [{"role": "user", "content": "x"}], "n": 99}, "n: expected a whole number from 1 to 16"),
        ({"messages": [{"role": "user", "content": "x"}], "stop": ["y" * 65]}, "stop: expected"),
        ({"messages": [{"role": "user", "content": "x"}], "max_tokens": "9"}, "max_tokens: expected"),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"function": {}}]}]},
            "tool_calls: expected",
        ),
    ],
)
def test_what_is_not_of_the_api_is_refused_by_name(body: dict[str, Any], text: str) -> None:
    with pytest.raises(MalformedMessage, match=text):
        chat_call(body)


def test_what_has_no_meaning_here_is_named_and_not_obeyed() -> None:
    call = chat_call({"messages": [{"role": "user", "content": "x"}], "temperature": 0.1, "seed": 4, "model": "m"})
    assert call.ignored == ("seed", "temperature")


def test_random_histories_never_encode_again_what_was_sampled() -> None:
    rng = random.Random(5)
    for _ in range(60):
        world, session = begun(context_tokens=4000)
        known: list[tuple[str, ...]] = [()]
        ids: dict[tuple[str, ...], tuple[int, ...]] = {}
        for number in range(12):
            history = (*rng.choice(known), f"q{rng.randrange(3)}")
            (group_id,) = world.ask(session, *history, answer=f"a{number}")
            prompt = world.asked[group_id].prompt_token_ids
            before = ids.get(history[:-1], ())
            assert prompt[: len(before)] == before
            answered = (*history, f"a{number}")
            ids[answered] = (*prompt, *(ord(c) + 1000 for c in f"a{number}"))
            known.append(answered)
        (end,) = [a for a in world.tell(e.EpisodeRewarded(session, 1.0)) if isinstance(a, e.EndEpisode)]
        assert sum(end.chains.values()) == 12


def test_seats_that_evaluate_go_first_but_never_under_a_label() -> None:
    """Rewards of one label are compared, so its seats are those of one problem to train on."""
    world = World()
    world.tell(e.ProblemOpened("a1", 2, {"index": 5}))
    world.tell(e.ProblemOpened("x1", 1, {"index": 9, "evaluation": "held_out"}, is_evaluation=True))
    labelled = world.seat("mine")
    assert isinstance(labelled, e.Seated) and labelled.root == "a1"
    unnamed = world.seat()
    assert isinstance(unnamed, e.Seated) and unnamed.told["evaluation"] == "held_out"
    own = World(has_harness=True, harnesses_max=1)
    own.tell(e.ProblemOpened("a1", 1, {"index": 5}))
    own.tell(e.ProblemOpened("x1", 1, {"index": 9}, is_evaluation=True))
    own.tell(e.ProblemOpened("a2", 1, {"index": 6}))
    (first,) = [action for action in own.told if isinstance(action, e.RunHarness)]
    own.tell(e.EpisodeFailed(first.session_id, "broke"))
    begun = [action.told["index"] for action in own.told if isinstance(action, e.RunHarness)]
    assert begun[0] == 5 and begun[1] == 9, "the one under way is left alone"


def test_a_label_is_given_no_seat_where_only_an_evaluation_is_open() -> None:
    world = World()
    world.tell(e.ProblemOpened("x1", 1, {"index": 9}, is_evaluation=True))
    refused = world.seat("mine")
    assert isinstance(refused, e.Refuse) and (refused.status, refused.code) == (429, "no_seat")
    unnamed = world.seat()
    assert isinstance(unnamed, e.Seated) and unnamed.root == "x1", "the seat is free for whoever names no label"


def test_the_temperature_of_a_request_counts_where_nothing_is_trained_on() -> None:
    world = World()
    world.tell(e.ProblemOpened("x1", 1, {"index": 9}, is_evaluation=True))
    world.tell(e.ProblemOpened("a1", 1, {"index": 5}))
    for is_exam in (True, False):
        seated = world.seat()
        assert isinstance(seated, e.Seated) and world.sessions.evaluates(seated.session_id) is is_exam
        for told, obeyed in ((0.3, 0.3), (0, 0.0), ("hot", None), (True, None), (None, None)):
            body = {"messages": [{"role": "user", "content": repr(told)}], "temperature": told}
            (group,) = world.call(seated.session_id, chat_call(body))
            assert world.asked[group].temperature == (obeyed if is_exam else None)
