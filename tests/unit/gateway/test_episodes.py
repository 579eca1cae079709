"""Agents' episodes: what a request continues, who gets a seat, what becomes of what is lost."""

import asyncio
import logging
import math
import random
import re
import threading
import tracemalloc
from dataclasses import replace
from datetime import date
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, strategies as st

from echo2.base.errors import ConfigError, MalformedMessage, TaskError
from echo2.base.rollout import FinishReason
from echo2.gateway.episodes import PIECES_S, STARVED_S, Call, CallRefused, certain_part
from echo2.gateway.harness import PROBLEM_BYTES_MAX, Episode, make_harness
from echo2.gateway.requests import CHOICES_MAX, chat_call, text_call, whole_number
from tests.patience import WAIT_S
from tests.unit.gateway.fakes import LetterCodec, PlayedByHand, World, begun, chat, completion, texts_of


async def settle() -> None:
    """Lets the tasks under way go on, as far as they can without time."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_any_history_goes_on_token_for_token_or_begins_a_chain_that_is_counted() -> None:
    """Only the first call that continues the end of a chain goes on with it; further choices are chains of their own."""
    rng = random.Random(5)
    for _ in range(60):
        world, session = begun(context_tokens=4000)
        known: dict[tuple[str, ...], tuple[int | None, int, tuple[int, ...]]] = {(): (None, 0, ())}  # chain, depth, ids
        lengths: dict[int, int] = {}
        for number in range(12):
            history = (*rng.choice(list(known)), f"q{rng.randrange(3)}")
            chain, depth, before = known[history[:-1]]
            goes_on = chain if chain is not None and lengths[chain] == depth else None
            call, groups = world.begin(session, chat(*history, n=rng.choice((1, 1, 3))))
            texts = [f"a{number}.{choice}" for choice in range(len(groups))]
            for group_id, text in zip(groups, texts, strict=True):
                assert not call.answer.done()
                lease, own = world.fleet.leases[group_id], int(group_id.split(".")[1])
                assert lease.chain == (goes_on if text == texts[0] else None)
                assert lease.prompt_token_ids[: len(before)] == before, "what was sampled is not encoded again"
                lengths[own] = lengths.get(own, 0) + 1
                ids = (*lease.prompt_token_ids, *(ord(c) + 1000 for c in text))
                known[*history, text] = (own, lengths[own], ids)
                world.sample(group_id, text)
            assert texts_of(call) == texts
        assert world.episodes.counts.branches == len(lengths) - 1
        world.episodes.reward(session, 1.0, {})
        assert (world.last_end.chains, world.last_end.reward, world.last_end.is_final) == (lengths, 1.0, True)


async def test_a_completion_that_its_length_has_ended_says_so() -> None:
    world, session = begun()
    for reason, said in ((FinishReason.STOP, "stop"), (FinishReason.LENGTH, "length")):
        call, (group_id,) = world.begin(session, chat(said))
        world.episodes.on_completion(group_id, replace(completion("ok", shift=1000), finish_reason=reason))
        assert [choice.finish_reason for choice in call.answer.result()] == [said]


async def test_token_ids_that_the_model_does_not_have_are_refused() -> None:
    world, session = begun(vocabulary_size=2000)
    for tokens in ([2000], [1, 2, 10**12], [10**4000]):
        refused = world.refusal(session, text_call({"prompt": tokens}))
        assert refused.status == 400 and "token ids below 2000" in refused.message and len(refused.message) < 200
    assert world.begin(session, text_call({"prompt": [1999]}))[1], "a refused call takes no room"
    for tokens in ([-1], [1.5], [True]):
        with pytest.raises(MalformedMessage, match="prompt: expected"):
            text_call({"prompt": tokens})


async def test_a_retry_takes_the_answer_whose_client_disconnected() -> None:
    world, session = begun()
    for is_sampled_before in (True, False):
        request = chat(f"hi {is_sampled_before}")
        call, (group_id,) = world.begin(session, request)
        world.episodes.leave(call)
        if is_sampled_before:
            world.sample(group_id, "yo")
            assert not call.answer.done()
        again = chat(f"hi {is_sampled_before}", logprobs=True, stream=True)  # which it may ask for only now
        retry, groups = world.begin(session, again)
        assert groups == [], "nothing is sampled twice"
        if not is_sampled_before:
            world.sample(group_id, "yo")
        assert texts_of(retry) == ["yo"] and retry.request is again
    call, (abandoned,) = world.begin(session, chat("never read"))
    world.episodes.leave(call)
    world.sample(abandoned, "lost")
    world.episodes.reward(session, 1.0, {})
    assert world.last_end.chains == {0: 1, 1: 1, 2: 0}, "a completion that no client received does not count"


async def test_a_lost_episode_restarts_then_is_dropped_and_never_scored_0() -> None:
    harness = PlayedByHand()
    world = World(harness, restarts_max=1)
    world.episodes.open_problem("a1", 1, {})
    (first,) = world.episodes.sessions.values()
    world.ask(first, "hi")
    world.episodes.fail(first, "its machine died")
    assert (world.last_end.reward, world.last_end.is_final, world.last_end.chains) == (None, False, {0: 0})
    (second,) = world.episodes.sessions.values()
    assert second.session_id != first.session_id
    world.episodes.fail(second, "again")
    assert (world.last_end.reward, world.last_end.is_final) == (None, True) and not world.episodes.sessions
    assert (world.episodes.counts.restarted, world.episodes.counts.dropped) == (1, 1)
    await world.episodes.close()


async def test_an_episode_that_its_client_gave_up_while_no_worker_answered_anybody_is_begun_again() -> None:
    """The stock client gives up after half an hour: without workers for so long all episodes would be lost at once. One that is
    too impatient for its workers, or fails beside a call, would be begun for ever."""
    world = World(PlayedByHand(), restarts_max=1)
    for number, (waited_s, news, is_starved) in enumerate((
        (STARVED_S, "", True), (STARVED_S - 1.0, "", False), (STARVED_S + 1.0, "tokens", False),
        (STARVED_S + 1.0, "an answer", False),
    )):  # fmt: skip
        world.episodes.open_problem(f"a{number}", 1, {})
        *_, session = world.episodes.sessions.values()
        call, (group_id,) = world.begin(session, chat("hi"))
        world.episodes.leave(call)
        world.now += STARVED_S / 2
        world.begin(session, chat("hi"))  # a retry of the same call
        if news == "tokens":
            world.episodes.on_tokens(group_id, (65,))
        elif news:
            world.episodes.open_problem("another", 1, {})
            world.ask([*world.episodes.sessions.values()][-1], "hi")
            world.episodes.close_problem("another", "over")
        world.now += waited_s - STARVED_S / 2
        world.episodes.fail(session, "APITimeoutError")
        assert (world.last_end.is_final, world.last_end.is_starved) == (False, is_starved)
        (session,) = world.episodes.sessions.values()
        world.episodes.fail(session, "a fault of its own")
        assert world.last_end.is_final != is_starved, "one for want of workers does not count"
        world.episodes.close_problem(f"a{number}", "over")
    await world.episodes.close()


async def test_an_episode_that_ends_makes_room_for_the_next_and_its_program_is_ended() -> None:
    harness = PlayedByHand()
    world = World(harness, harnesses_max=1)
    for number in range(3):
        world.episodes.open_problem(f"a{number}", 1, {"index": number})
    for number in range(3):
        await settle()
        assert [episode.problem["index"] for episode in harness.begun] == list(range(number + 1))
        with pytest.raises(CallRefused, match="no episode is wanted"):
            world.episodes.take_seat("")  # an outside harness beside this one
        (session,) = world.episodes.sessions.values()
        world.ask(session, "hi")
        if number == 1:
            world.episodes.close_problem("a1", "stale")
        else:
            world.episodes.reward(session, 1.0, {})
        await settle()
        assert session.playing is not None and session.playing.cancelling()
    world.episodes.open_problem("a3", 1, {})
    (session,) = world.episodes.sessions.values()
    await settle()
    await world.episodes.close()
    assert session.playing is not None and session.playing.cancelled(), "the end ends what plays"


async def test_a_program_gives_its_last_line_as_reward_unless_it_exits_with_an_error() -> None:
    episode = Episode("http://127.0.0.1:1/v1", "key", {})
    left_running = "sleep 1000 & echo 0.5"  # with the program's output open
    closes_early = "echo 0.5; exec >&- 2>&-; sleep 0.2"
    for command, reward in (
        ("echo played; echo 0.5", 0.5), ("echo played", None), (left_running, 0.5), (closes_early, 0.5),
        (f"echo {'[' * 5000}", None),
    ):  # fmt: skip
        play = make_harness(f"sh -c '{command}'")
        assert play is not None and await asyncio.wait_for(play(episode), WAIT_S) == reward
    play = make_harness("sh -c 'echo 0.5; exit 3'")
    with pytest.raises(TaskError, match="expected it to exit with 0, got 3"):
        await play(episode)


async def test_a_function_may_earn_numbers_of_any_kind_but_no_text() -> None:
    episode = Episode("http://127.0.0.1:1/v1", "key", {"rewards": [np.float32(0.5), 0.25, True, "0.5"]})
    play = make_harness(f"{__name__}:earn")
    assert [await play(episode) for _ in range(3)] == [0.5, 0.25, 1.0]
    with pytest.raises(TaskError, match="expected a reward as a number, got '0.5'"):
        await play(episode)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await asyncio.wait_for(play(episode), WAIT_S)


def earn(episode: Episode) -> object:
    rewards = episode.problem["rewards"]
    return rewards.pop(0) if rewards else next(iter(rewards))


async def test_a_function_that_hangs_keeps_no_other_from_playing_nor_the_process_from_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    play, hangs = make_harness(f"{__name__}:earn_late"), threading.Event()
    hanging = asyncio.create_task(play(Episode("http://127.0.0.1:1/v1", "key", {"until": hangs})))
    given = threading.Event()
    given.set()
    assert await asyncio.wait_for(play(Episode("http://127.0.0.1:1/v1", "key", {"until": given})), WAIT_S) == 1.0
    hanging.cancel()
    await asyncio.gather(hanging, return_exceptions=True)
    assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("agent"))
    monkeypatch.setattr("echo2.gateway.harness.THREADS_MAX", 1)
    with pytest.raises(TaskError, match="1 calls of it have not: give its waits a limit"):
        await play(Episode("http://127.0.0.1:1/v1", "key", {"until": given}))
    hangs.set()


def earn_late(episode: Episode) -> object:
    """As a decorator may make it: a function that returns a coroutine."""
    if episode.problem["until"].is_set():
        return asyncio.sleep(0, 1.0)
    return episode.problem["until"].wait(WAIT_S)


def test_a_command_that_no_shell_reads_is_named() -> None:
    for command in ("sh -c 'echo", " "):
        with pytest.raises(ConfigError, match="agent.harness: expected module:function or a command"):
            make_harness(command)


async def test_the_longest_problem_reaches_a_program_and_a_longer_one_is_told() -> None:
    play, longest = make_harness("sh -c 'echo ${#ECHO2_PROBLEM}'"), PROBLEM_BYTES_MAX - len('{"text": ""}')
    assert await play(Episode("http://127.0.0.1:1/v1", "key", {"text": "x" * longest})) == PROBLEM_BYTES_MAX
    dated = Episode("http://127.0.0.1:1/v1", "key", {"day": date(2026, 1, 1)})
    assert await play(dated) == len('{"day": "2026-01-01"}')
    with pytest.raises(TaskError, match="let agent.harness name a function"):
        await play(Episode("http://127.0.0.1:1/v1", "key", {"text": "x" * (longest + 1)}))


async def test_a_harness_gives_the_reward_or_leaves_it_to_the_task_or_breaks() -> None:
    world = World()
    plays: list[Any] = [0.25, None, None, None, OSError("no such tool"), SystemExit(0), asyncio.CancelledError("mine")]

    class Harness:
        async def __call__(self, episode: Any) -> float | None:
            (session,) = world.episodes.sessions.values()
            world.ask(session, "hi")
            outcome = plays.pop(0)
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome  # type: ignore[no-any-return]

    world = World(Harness(), restarts_max=0)  # type: ignore[arg-type]
    answers: list[Any] = [(0.75, {"exact": 0.5}), "it cannot be judged", OSError("no such row")]
    for number in range(7):
        if number in (1, 2, 3):
            world.fleet.score_answer = answers.pop(0)
        world.episodes.open_problem(f"a{number}", 1, {})
        await settle()
    assert [end.reward for end in world.fleet.ends] == [0.25, 0.75, None, None, None, None, None]
    failures = ["OSError: no such row", "OSError: no such tool", "SystemExit: 0", "CancelledError: mine"]
    assert [end.failure for end in world.fleet.ends[3:]] == failures
    assert world.fleet.ends[1].parts == {"exact": 0.5}
    await world.episodes.close()


@pytest.mark.parametrize("is_part", [False, True])
async def test_a_reward_without_an_average_loses_the_episode(is_part: bool, caplog: pytest.LogCaptureFixture) -> None:
    for number in (math.nan, math.inf, -math.inf, 1e300, 10**400):
        world, session = begun(restarts_max=0)
        world.ask(session, "hi")
        with caplog.at_level(logging.WARNING):
            world.episodes.reward(session, 1.0 if is_part else number, {"exact": number if is_part else 1.0})
        end = world.last_end
        assert (end.reward, end.chains, end.parts) == (None, {0: 0}, {})
        assert "expected a reward within 1,000,000 of 0" in caplog.text
        assert (world.episodes.counts.rewarded, world.episodes.counts.dropped) == (0, 1)


async def test_an_idle_outside_harness_is_lost_but_not_one_that_waits_for_the_fleet() -> None:
    world, session = begun(idle_s=10.0, episode_s=100.0)
    _, (group_id,) = world.begin(session, chat("hi"))
    world.passes(50.0)
    assert not world.fleet.ends
    world.sample(group_id, "yo")
    world.passes(9.0)
    assert not world.fleet.ends, "it was answered 9 s ago, however slow the fleet was"
    world.ask(session, "hi", "yo", "so?")
    world.passes(11.0)
    assert [end.is_final for end in world.fleet.ends] == [False]
    assert world.refusal(session, chat("hi")).status == 410


@pytest.mark.parametrize("is_played", [True, False])
async def test_an_episode_whose_own_time_is_up_is_scored_and_waiting_for_workers_takes_none(is_played: bool) -> None:
    world = World(PlayedByHand() if is_played else None, idle_s=80.0, episode_s=100.0)
    world.fleet.score_answer = (0.25, {"exact": 0.0})
    world.episodes.open_problem("a1", 1, {})
    session = next(iter(world.episodes.sessions.values())) if is_played else world.episodes.take_seat("")
    for waited_s, own_s in ((500.0, 60.0), (900.0, 39.0)):
        _, (group_id,) = world.begin(session, chat(f"waits {waited_s}"))
        world.passes(waited_s)
        world.sample(group_id, "yo")
        world.passes(own_s)
    await settle()
    assert not world.fleet.ends, "99 s of its own"
    world.passes(2.0)
    assert world.refusal(session, chat("more")).status == 410
    await settle()
    end = world.last_end
    assert (end.reward, end.parts, end.chains, end.is_final) == (0.25, {"exact": 0.0}, {0: 1, 1: 1}, True)
    assert (world.episodes.counts.timed_out, world.episodes.counts.dropped) == (1, 0) and not world.episodes.sessions
    await world.episodes.close()
    late, session = begun(episode_s=100.0)
    late.ask(session, "hi")
    late.now = 101.0
    late.begin(session, chat("a call just before the tick"))
    for _ in range(3):  # while it is scored
        late.episodes.expire()
    assert late.episodes.counts.timed_out == 1
    silent, _ = begun(episode_s=100.0, idle_s=1e9)
    silent.passes(101.0)
    assert (silent.last_end.reward, silent.last_end.is_final) == (None, False), "the model said nothing"


async def test_seats_are_given_by_label_and_the_surplus_is_told_when_to_retry() -> None:
    world = World()
    for root in ("a1", "a2"):
        world.episodes.open_problem(root, 2, {})
    seated = [world.episodes.take_seat(label) for label in ("x", "y", "x", "y")]
    assert [session.problem.root for session in seated] == ["a1", "a2", "a1", "a2"]
    with pytest.raises(CallRefused) as full:
        world.episodes.take_seat("")
    assert full.value.status == 429 and full.value.retry_after_s > 0
    world.episodes.close_problem("a1", "stale")
    assert world.refusal(seated[0], chat("hi")).status == 410


async def test_of_episodes_that_ended_the_newest_are_remembered() -> None:
    world = World(sessions_max=2)
    world.episodes.open_problem("a1", 5, {})
    ended = []
    for _ in range(5):
        session = world.episodes.take_seat("")
        ended.append(session.session_id)
        world.episodes.fail(session, "its harness gave it up")
    assert list(world.episodes.ended) == ended[-2:]


async def test_limits_hold_and_say_so() -> None:
    assert whole_number(CHOICES_MAX, "n", CHOICES_MAX) == CHOICES_MAX
    world, session = begun(calls_max=3, calls_at_once_max=1, context_tokens=40)
    _, (group_id,) = world.begin(session, chat("hi"))
    lease = world.fleet.leases[group_id]
    assert lease.max_tokens == 40 - len(lease.prompt_token_ids)
    for _ in range(2):
        assert world.refusal(session, chat("hi")).status == 429
    world.sample(group_id, "yo")
    refused = world.refusal(session, chat("x" * 50))
    assert refused.code == "context_length_exceeded"
    assert "this model's maximum context length is 40 tokens" in refused.message, (
        "so that stock clients shorten their chat"
    )
    world.ask(session, "two")
    assert world.refusal(session, chat("hi")).code == "too_many_calls"


async def test_a_text_without_room_is_refused_before_it_is_encoded_and_counts_as_a_call() -> None:
    world, session = begun(calls_max=3)
    world.episodes.codec.opening = world.episodes.codec.encode_text = encoded = Mock(return_value=[1])  # type: ignore[method-assign]
    for text in ("x" * 1601, "é" * 801):
        for request in (text_call({"prompt": text}), chat(text)):
            code = "too_many_calls" if world.episodes.is_spent(session) else "context_length_exceeded"
            assert world.refusal(session, request).code == code
    assert not encoded.called and world.episodes.is_spent(session)


async def leased(call: Call) -> None:
    """Waits until the call's prompt is encoded, or the call is refused."""
    while not call.prompt_token_ids and not call.answer.done():
        await asyncio.sleep(0.001)  # a real thread encodes it


async def test_a_long_text_is_encoded_in_a_thread_and_its_call_is_like_any_other_meanwhile() -> None:
    world, session = begun(context_tokens=20_000, calls_at_once_max=2, episode_s=1e9, vocabulary_size=2048)
    long = chat("x" * 17_000)  # more than are encoded at once
    call, groups = world.begin(session, long)
    assert not groups and not call.prompt_token_ids
    world.passes(10_000.0)
    assert not world.fleet.ends, "it waits for the gateway, so it is not idle"
    world.episodes.leave(call)
    assert world.begin(session, long) == (call, []), "its retry takes it over"
    assert len(world.begin(session, chat("short"))[1]) == 1 and world.refusal(session, chat("another")).code == "busy"
    await leased(call)
    assert len(world.fleet.leases) == 2 and len(call.prompt_token_ids) == 17_010
    other = world.episodes.take_seat("")
    unfinished, _ = world.begin(other, long)
    world.episodes.fail(other, "broke")
    await leased(unfinished)
    await asyncio.sleep(0.05)
    assert len(world.fleet.leases) == 2, "of an episode that has ended"
    await world.episodes.close()


async def test_a_text_that_cannot_be_encoded_is_refused_by_what_the_codec_says() -> None:
    world, session = begun(encoded_at_once_max=100)
    for error, status, text in (
        (MalformedMessage("no template"), 400, "no template"), (KeyError("role"), 500, "KeyError")
    ):  # fmt: skip
        world.episodes.codec.opening = Mock(side_effect=error)  # type: ignore[method-assign]
        for size in (5, 120):
            call, _ = world.begin(session, chat("x" * size))
            await leased(call)
            refused = call.answer.exception()
            assert isinstance(refused, CallRefused) and refused.status == status and text in refused.message
    assert not session.calls
    await world.episodes.close()


async def test_an_episode_keeps_each_token_once() -> None:
    world, session = begun(context_tokens=40_000)
    rng = random.Random(1)
    prompt = [rng.randrange(300, 2000) for _ in range(8_000)]
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(16):
            _, (group_id,) = world.begin(session, text_call({"prompt": prompt}))
            assert world.fleet.leases[group_id].chain == (0 if number else None)
            world.sample(group_id, "ok")
            prompt = [*prompt, 1000 + ord("o"), 1000 + ord("k"), 300 + number]
            world.fleet.leases.clear()
        kept = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert kept < 800_000 and 4 * 8_000 < session.kept_bytes < 80_000, (kept, session.kept_bytes)


async def test_an_episode_that_keeps_too_much_is_told_so_and_may_end() -> None:
    world, session = begun(session_bytes_max=20_000, context_tokens=4000)
    for number in range(3):
        _, (group_id,) = world.begin(session, text_call({"prompt": [number + 1] * 1000}))
        world.sample(group_id, "ok")
    assert world.refusal(session, text_call({"prompt": [4] * 1000})).code == "episode_too_large"
    world.episodes.reward(session, 1.0, {})
    assert world.last_end.reward == 1.0


async def test_texts_and_ids_continue_the_longest_beginning_that_is_known() -> None:
    rng = random.Random(3)
    for _ in range(40):
        world, session = begun(context_tokens=4000)
        world.episodes.codec.encode_text = (  # type: ignore[method-assign]
            lambda text, *, is_beginning: [7] * is_beginning + [ord(letter) for letter in text]
        )
        texts: dict[str, tuple[int, ...]] = {}
        for _ in range(15):
            prompt = rng.choice(["", *texts]) + "".join(rng.choice("aé") for _ in range(rng.randrange(1, 4)))
            if rng.random() < 0.3:
                prompt = prompt[: rng.randrange(1, len(prompt) + 1)]
            known = max((text for text in texts if prompt.startswith(text) and text != prompt), key=len, default="")
            is_text = rng.random() < 0.5
            before = texts.get(known, (7,) if is_text else ())
            ids = (*before, *map(ord, prompt[len(known) :]))
            _, (group_id,) = world.begin(session, text_call({"prompt": prompt if is_text else list(ids)}))
            assert world.fleet.leases[group_id].prompt_token_ids == ids
            world.sample(group_id, "a")
            if is_text:
                texts.setdefault(prompt + "a", (*ids, 1000 + ord("a")))


async def test_calls_of_all_episodes_together_have_a_limit() -> None:
    world, first = begun(calls_in_flight_max=3)
    second = world.episodes.take_seat("")
    _, (group_id, _) = world.begin(first, chat("hi", n=2))
    assert world.refusal(second, chat("hi", n=2)).code == "busy"
    assert len(world.begin(second, chat("hi"))[1]) == 1
    refused = world.refusal(second, chat("hi"))
    assert (refused.status, refused.code) == (429, "busy") and refused.retry_after_s > 0
    world.sample(group_id, "yo")
    assert len(world.begin(second, chat("hi"))[1]) == 1, "one has ended"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({}, "messages: expected a list"),
        ({"messages": [{"role": "king", "content": ""}]}, "role: expected one of"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content: expected text"),
        ({"messages": [{"role": "user", "content": "x"}], "n": 99}, "n: expected a whole number from 1 to 16"),
        ({"messages": [{"role": "user", "content": "x"}], "stop": ["y" * 65]}, "stop: expected"),
        ({"messages": [{"role": "user", "content": "x"}], "max_tokens": "9"}, "max_tokens: expected"),
        *(
            ({"messages": [{"role": "user", "content": "x"}], name: odd}, f"{name}: expected true or false, got")
            for name, odd in (("stream", "true"), ("logprobs", 5), ("return_token_ids", 1))
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "tool_calls: expected"),
    ],
)
def test_what_is_not_of_the_api_is_refused_by_name(body: dict[str, Any], text: str) -> None:
    with pytest.raises(MalformedMessage, match=text):
        chat_call(body)


async def test_evaluations_are_seated_first_but_never_under_a_label() -> None:
    """Rewards of one label are compared, so its seats are those of one problem to train on."""
    world = World()
    world.episodes.open_problem("a1", 2, {"index": 5})
    world.episodes.open_problem("x1", 1, {"index": 9}, is_evaluation=True)
    assert world.episodes.take_seat("mine").problem.root == "a1"
    assert world.episodes.take_seat("").problem.root == "x1"
    world.episodes.close_problem("a1", "stale")
    world.episodes.open_problem("x2", 1, {"index": 8}, is_evaluation=True)
    with pytest.raises(CallRefused, match="no episode is wanted"):
        world.episodes.take_seat("other")
    assert world.episodes.take_seat("").problem.root == "x2"
    harness = PlayedByHand()
    own = World(harness, harnesses_max=1)
    own.episodes.open_problem("a1", 1, {"index": 5})
    own.episodes.open_problem("x1", 1, {"index": 9}, is_evaluation=True)
    own.episodes.open_problem("a2", 1, {"index": 6})
    await settle()
    (first,) = own.episodes.sessions.values()
    own.episodes.fail(first, "broke")
    await settle()
    assert [episode.problem["index"] for episode in harness.begun] == [5, 9], "the one under way is left alone"
    await own.episodes.close()


async def test_the_temperature_of_a_request_counts_only_in_evaluations_and_what_is_ignored_is_named() -> None:
    world = World()
    world.episodes.open_problem("x1", 1, {"index": 9}, is_evaluation=True)
    world.episodes.open_problem("a1", 1, {"index": 5})
    for is_evaluation in (True, False):
        session = world.episodes.take_seat("")
        for temperature, obeyed in ((0.3, 0.3), (0, 0.0), ("hot", None), (True, None), (None, None)):
            _, (group,) = world.begin(session, chat(repr(temperature), temperature=temperature))
            assert world.fleet.leases[group].temperature == (obeyed if is_evaluation else None)
    assert chat("x", temperature=0.1, seed=4, model="m").ignored == ("seed", "temperature")
    assert chat("x", tool_choice="required", top_logprobs=2).ignored == ("tool_choice", "top_logprobs")
    assert chat("x", tool_choice="auto").ignored == () and text_call({"prompt": "x", "echo": True}).ignored == ("echo",)
    said = [
        {"role": "user", "content": "x", "name": "bob", "refusal": None},
        {"role": "assistant", "content": "y", "audio": {}},
    ]
    assert chat_call({"messages": said}).ignored == ("messages.name",)
    assert chat("x", max_completion_tokens=None, max_tokens=3).max_tokens == 3
    assert chat("x", **{"\u6e29\n": 1}).ignored == (r"\u6e29\n",), "in a header"
    assert len(chat("x", **{f"f{number}": 1 for number in range(40)}).ignored) == 32


# ---- streams: nothing is sent that a later token could take back

letters = st.text("abc", max_size=12)


@given(letters, st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_the_certain_part_of_any_beginning_stands_in_the_whole(text: str, stops: list[str]) -> None:
    assert certain_part("caf\ufffd", ()) == "caf" and certain_part("so </ans", ("</answer>",)) == "so "
    cut = min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))
    whole = text[:cut]  # what the client reads in the end
    for length in range(len(text) + 1):
        beginning = text[:length]
        if not any(stop in beginning for stop in stops):  # then the completion has ended
            assert whole.startswith(certain_part(beginning, stops))


def pieces_of(world: World, call: Call, group_id: str, *texts: str) -> list[str]:
    """The pieces streamed as the completion grows to each text."""
    for text in texts:
        world.now += PIECES_S
        world.episodes.on_tokens(group_id, tuple(1000 + ord(c) for c in text))
    return [call.pieces.get_nowait() for _ in range(call.pieces.qsize())]


async def test_a_stream_sends_only_new_and_certain_text() -> None:
    world, session = begun()
    call, (group,) = world.begin(session, chat("hi", stream=True, stop=["END"]))
    assert pieces_of(world, call, group, "he", "hel", "helloE", "hello EN") == ["he", "l", "lo", " "]
    for length in range(2, 50):  # reported at once: the text is not decoded each time
        world.episodes.on_tokens(group, (1000 + ord("h"),) * length)
    assert call.pieces.empty()
    world.sample(group, "hello END")
    assert texts_of(call) == ["hello END"]


@pytest.mark.parametrize(
    "options",
    [{"stream": False}, {"n": 2}, {"logprobs": True}, {"return_token_ids": True}, {"tools": [{"type": "function"}]}],
)
async def test_what_is_read_from_the_whole_is_not_sent_in_pieces(options: dict[str, Any]) -> None:
    world, session = begun()
    call, (first, *_) = world.begin(session, chat("hi", **{"stream": True, **options}))
    assert not pieces_of(world, call, first, "hello")


async def test_a_text_that_goes_on_with_the_stop_string_has_it_once() -> None:
    class Stopping(LetterCodec):
        def decode(
            self, token_ids: tuple[int, ...], stops: tuple[str, ...], *, has_tools: bool
        ) -> tuple[str, list[Any]]:
            text, _ = super().decode(token_ids, stops, has_tools=has_tools)
            return text.partition(stops[0])[0] if stops else text, []

    world, session = begun()
    world.episodes.codec = Stopping()
    for prompt, expected in (("q", "q"), ("qlook\nObs: 7", "qlook\nObs: 7"), ("qlook; Obs: 7", "qlook\nObs:; Obs: 7")):
        call, (group,) = world.begin(session, text_call({"prompt": prompt, "stop": "\nObs:"}))
        read = "".join(chr(token % 1000) for token in world.fleet.leases[group].prompt_token_ids)
        assert read == expected
        world.sample(group, "look\nObs:")
        assert texts_of(call) == ["look"]


LACKING = Mock(side_effect=ConfigError("tokenizer: expected one that takes this text, got: piece id is out of range"))


@pytest.mark.parametrize("decoded", ["whole", "as it grows", "for its retry"])
async def test_a_completion_that_cannot_be_decoded_is_answered_with_an_error_and_ends_nothing_else(
    decoded: str,
) -> None:
    (world, session), request = begun(), chat("hi", stream=decoded == "as it grows")
    call, (group,) = world.begin(session, request)
    if decoded == "for its retry":
        world.episodes.leave(call)
        world.sample(group, "ok")
    world.episodes.codec.decode, world.now = LACKING, PIECES_S  # type: ignore[method-assign]
    if decoded == "whole":
        world.sample(group, "ok")
    elif decoded == "as it grows":
        world.episodes.on_tokens(group, (1,))
    else:
        call, _ = world.begin(session, request)
    error = call.answer.exception()
    assert isinstance(error, CallRefused) and "piece id is out of range" in error.message
    assert not session.calls


async def test_calls_of_tools_have_ids_that_every_template_takes() -> None:
    (world, session), ids = begun(), set[str]()
    calls = [{"id": "", "type": "function", "function": {"name": "add", "arguments": {}}}] * 2
    world.episodes.codec.decode = Mock(return_value=("", calls))  # type: ignore[method-assign]
    for asked in ("1+1?", "2+2?"):
        call, groups = world.begin(session, chat(asked, n=2, tools=[{"type": "function"}]))
        for group in groups:
            world.sample(group, "ok")
        ids |= {str(tool["id"]) for choice in call.answer.result() for tool in choice.tool_calls}
    assert len(ids) == 8 and all(re.fullmatch("[a-z0-9]{9}", one) for one in ids), "nine are what Mistral's ask for"


async def test_a_retry_reads_the_stream_from_its_beginning() -> None:
    world, session = begun()
    request = chat("hi", stream=True)
    call, (group,) = world.begin(session, request)
    pieces_of(world, call, group, "he")
    world.episodes.leave(call)
    assert not pieces_of(world, call, group, "hell"), "no client reads it"
    retry, groups = world.begin(session, request)
    assert not groups and pieces_of(world, retry, group, "hello") == ["hello"]
