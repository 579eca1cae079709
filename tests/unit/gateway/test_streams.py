"""Streams as the stock client reads them: pieces as they come, the whole in the end, and an error where it came out otherwise.

The client is imported where it is used: it takes most of a second, and all processes of a test run collect this file."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from echo2.gateway.app import pieces_of, reply_of
from echo2.gateway.episodes import PIECES_S, Call, Choice, Episodes
from echo2.gateway.requests import chat_call, text_call
from echo2.gateway.tree import TreePlace, Wording
from tests.patience import WAIT_S
from tests.unit.gateway.fakes import RecordingFleet, completion, letter_bytes, on_port, whole_rollout


async def sample(episodes: Episodes, group_id: str, whole: str) -> None:
    """Reports a completion twice while it grows, then `whole`."""
    for text in ("hel", "hello w"):
        await asyncio.sleep(PIECES_S + 0.05)
        episodes.on_tokens(group_id, tuple(map(ord, text)))
    await asyncio.sleep(0.05)
    episodes.on_completion(group_id, completion(whole))


async def read(whole: str, is_chat: bool) -> tuple[list[str], list[str | None]]:
    """The texts of the stream's pieces, and why they ended."""
    import openai

    loop, sampling = asyncio.get_running_loop(), list[asyncio.Task[None]]()
    fleet = RecordingFleet(lambda group_id: sampling.append(loop.create_task(sample(episodes, group_id, whole))))
    async with on_port(fleet) as (episodes, port):
        episodes.open_problem("a1", 1, {})
        key = episodes.take_seat("").key
        client = openai.AsyncOpenAI(base_url=f"{port.url}/v1", api_key=key, timeout=WAIT_S, max_retries=0)
        texts, reasons = list[str](), list[str | None]()
        async with client:
            made = client.chat.completions if is_chat else client.completions
            asked = {"messages": [{"role": "user", "content": "hi"}]} if is_chat else {"prompt": "hi"}
            async for piece in await made.create(model="policy", stream=True, **asked):
                for choice in piece.choices:
                    texts.append((choice.delta.content if is_chat else choice.text) or "")
                    reasons.append(choice.finish_reason)
        return [text for text in texts if text], reasons


@pytest.mark.parametrize("is_chat", [True, False], ids=["chat", "text"])
async def test_pieces_come_as_they_are_sampled_and_make_the_whole(is_chat: bool) -> None:
    texts, reasons = await read("hello world", is_chat)
    assert texts == ["hel", "lo w", "orld"]
    assert [reason for reason in reasons if reason] == ["stop"]


async def test_a_completion_that_another_worker_began_anew_ends_the_stream_with_an_error() -> None:
    from openai import APIError

    with pytest.raises(APIError, match="began this completion anew"):
        await read("other words", is_chat=True)


@pytest.mark.parametrize("is_chat", [True, False], ids=["chat", "text"])
async def test_the_bytes_of_tokens_add_up_to_the_text_where_a_character_has_several_tokens(is_chat: bool) -> None:
    text = "a\U0001f600b"
    pieces = (b"a", b"\xf0\x9f", b"\x98", b"\x80", b"b", b"")  # the last one is an end token
    hi = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True}
    request = chat_call(hi) if is_chat else text_call({"prompt": "hi", "logprobs": 0})
    call = Call(1, "a1", request, TreePlace(Wording(), None, b""), asyncio.get_running_loop().create_future())
    reply: Any = reply_of(
        call, [Choice(text, (), whole_rollout(tuple(range(6))), "stop")], "policy", 0, lambda token: pieces[token]
    )
    logprobs = reply["choices"][0]["logprobs"]
    if is_chat:
        assert b"".join(bytes(token["bytes"]) for token in logprobs["content"]).decode() == text
    else:
        assert logprobs["text_offset"] == [0, 1, 1, 1, 2, 3]


@pytest.mark.parametrize("is_chat", [True, False], ids=["chat", "text"])
async def test_whole_answers_and_events_are_of_the_stock_clients_own_types(is_chat: bool) -> None:
    from openai import types
    from openai.types import chat as chat_types

    whole = chat_types.ChatCompletion if is_chat else types.Completion
    tool = {"id": "", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    for tools, wanted in itertools.product(([], [tool]), ({}, {"logprobs": True if is_chat else 1})):
        asked = {"messages": [{"role": "user", "content": "hi"}], **wanted} if is_chat else {"prompt": "hi", **wanted}
        request = (chat_call if is_chat else text_call)({**asked, "n": 2, "stream_options": {"include_usage": True}})
        call = Call(1, "a1", request, TreePlace(Wording(), None, b""), asyncio.get_running_loop().create_future())
        choices = [Choice("yes", tuple(tools), completion("yes"), reason) for reason in ("stop", "length")]
        told = whole.model_validate(reply_of(call, choices, "policy", 0, letter_bytes), strict=True)
        assert not told.model_extra and told.usage.completion_tokens == 6 and len(told.choices) == 2
        assert told.id.endswith("-a1-1")
        *events, last = "".join(pieces_of(call, choices, "policy", 0, letter_bytes)).strip().split("\n\n")
        assert last == "data: [DONE]" and len(events) == 5
        if is_chat:  # of a text's events the client's type has a reason to end in each, which none but the last one has
            pieces = [chat_types.ChatCompletionChunk.model_validate_json(line[6:], strict=True) for line in events]
            assert not any(piece.model_extra for piece in pieces) and pieces[-1].usage.completion_tokens == 6
            assert [one.finish_reason for piece in pieces for one in piece.choices][1::2] == ["stop", "length"]
