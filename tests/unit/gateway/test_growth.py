"""A stream tells nothing that a later token could take back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.gateway import events as e
from echo2.gateway.growth import certain_part
from echo2.gateway.requests import chat_call
from echo2.gateway.sessions import PIECES_S
from tests.unit.gateway.test_sessions import World, begun

letters = st.text("abc", max_size=12)


@given(letters, st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_what_is_told_of_any_beginning_stands_in_the_whole(text: str, stops: list[str]) -> None:
    cut = min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))
    whole = text[:cut]  # what the client reads in the end
    for length in range(len(text) + 1):
        beginning = text[:length]
        if not any(stop in beginning for stop in stops):  # then the completion has ended
            assert whole.startswith(certain_part(beginning, stops))


def test_a_character_that_is_not_whole_waits_for_its_bytes() -> None:
    assert certain_part("caf\ufffd", ()) == "caf" and certain_part("a\ufffdb", ()) == "a\ufffdb"
    assert certain_part("so </ans", ("</answer>",)) == "so " and certain_part("so </b>", ("</answer>",)) == "so </b>"


def asked(world: World, session: str, **options: Any) -> str:
    (group,) = world.call(
        session, chat_call({"messages": [{"role": "user", "content": "hi"}], "stream": True, **options})
    )
    return group


def grown(world: World, group: str, text: str) -> list[e.Action]:
    world.now += PIECES_S
    return world.tell(e.CallGrew(group, tuple(1000 + ord(c) for c in text)))


def test_a_stream_is_told_as_it_grows_and_only_what_is_new() -> None:
    world, session = begun()
    group = asked(world, session, stop=["END"])
    told = [action for text in ("he", "hel", "helloE", "hello EN") for action in grown(world, group, text)]
    assert [one.text for one in told if isinstance(one, e.CallPiece)] == ["he", "l", "lo", " "]
    (answer,) = world.sample(group, "hello END")
    assert isinstance(answer, e.CallAnswer)


@pytest.mark.parametrize(
    "options",
    [{"stream": False}, {"n": 2}, {"logprobs": True}, {"return_token_ids": True}, {"tools": [{"type": "function"}]}],
)
def test_what_is_read_from_the_whole_alone_is_told_whole(options: dict[str, Any]) -> None:
    world, session = begun()
    first, *_ = world.call(
        session, chat_call({"messages": [{"role": "user", "content": "hi"}], "stream": True, **options})
    )
    assert not grown(world, first, "hello")


def test_a_second_try_reads_the_stream_from_its_beginning() -> None:
    world, session = begun()
    group = asked(world, session)
    grown(world, group, "he")
    world.tell(e.ClientLeft(world.calls))
    assert not grown(world, group, "hell"), "nobody reads it"
    asked_again = chat_call({"messages": [{"role": "user", "content": "hi"}], "stream": True})
    assert not world.call(session, asked_again), "it is the same call"
    (piece,) = grown(world, group, "hello")
    assert isinstance(piece, e.CallPiece) and (piece.call_id, piece.text) == (world.calls, "hello")


def test_a_worker_that_reports_token_by_token_does_not_have_the_text_read_each_time() -> None:
    world, session = begun()
    group = asked(world, session)
    assert grown(world, group, "h")
    assert not [piece for end in range(2, 50) for piece in world.tell(e.CallGrew(group, (1000 + ord("h"),) * end))]
