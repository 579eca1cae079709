"""Tokens in, tokens out, over HTTP: what is taken, what is refused and how, and what streams and answers say."""

import asyncio
import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.types import ASGIApp

from echo2.base.errors import ConfigError, MalformedMessage
from echo2.base.ids import GroupId, Version
from echo2.base.rollout import FinishReason, Rollout, Routing, RoutingShape, VersionSpan, packed
from echo2.gateway.app import GatewayApp, pieces_of, reply_of
from echo2.gateway.episodes import PIECES_S, Call, CallRefused, Choice, Episodes
from echo2.gateway.generate import GenerateApp, TokenAnswer, TokenRequest, parsed_request
from echo2.gateway.requests import chat_call, text_call
from echo2.gateway.tree import TreePlace, Wording
from tests.patience import WAIT_S
from tests.unit.gateway.fakes import RecordingFleet, begun, completion, letter_bytes, on_port, whole_rollout

KEY = {"authorization": "Bearer secret"}


def rollout(index: int, tokens: tuple[int, ...], *, is_whole: bool = True, routing: Routing = Routing()) -> Rollout:  # noqa: B008
    spans = (VersionSpan(Version(3), 1), VersionSpan(Version(4), len(tokens) - 1))
    reason = FinishReason.STOP if is_whole else FinishReason.UNFINISHED
    logprobs = tuple(-0.25 * (place + 1) for place in range(len(tokens)))
    return Rollout(GroupId("s1"), index, tokens, logprobs, logprobs, spans, reason, routing)


class PlayedSampler:
    """`plays`: what becomes of a request, in a task of its own."""

    newest_version, routing_shape = 4, None

    def __init__(self, plays: Callable[[TokenAnswer], Any]) -> None:
        self.plays, self.left = plays, 0
        self.published: list[tuple[int, str, bool]] = []
        self.routing_shape: RoutingShape | None = None

    def generate(self, request: TokenRequest) -> TokenAnswer:
        if request.min_version is not None and request.min_version > 4:
            raise CallRefused(409, "version_not_published", "expected a version up to 4", 1.0)
        made = TokenAnswer(request, [], lambda one: one.logprobs, asyncio.get_running_loop().create_future())
        self.task = asyncio.get_running_loop().create_task(self.plays(made))
        return made

    def leave(self, answer: TokenAnswer) -> None:
        self.left += 1

    def status(self) -> Mapping[str, object]:
        return {"newest_version": 4}

    async def publish(self, version: int, folder: str, is_last: bool) -> None:
        if folder == "/none":
            raise ConfigError("model /none: expected a folder")
        self.published.append((version, folder, is_last))


async def whole(answer: TokenAnswer) -> None:
    answer.rollouts = [rollout(index, (7, 8, 9)) for index in range(answer.request.choices)]
    answer.whole.set_result(None)


async def asked(sampler: PlayedSampler, method: str, path: str, body: Any = None, **named: Any) -> httpx.Response:
    app = GenerateApp(sampler, "policy", 64, "secret").application()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        return await client.request(method, path, json=body, **{"headers": KEY, **named})


async def generate(body: Mapping[str, Any], plays: Callable[[TokenAnswer], Any] = whole) -> httpx.Response:
    return await asked(PlayedSampler(plays), "POST", "/inference/v1/generate", {"token_ids": [1, 2], **body})


async def test_an_answer_is_what_a_token_level_client_reads() -> None:
    body = {"sampling_params": {"n": 2, "logprobs": 1, "max_tokens": 3}, "request_id": "r7"}
    told = (await generate(body)).json()
    assert (told["request_id"], told["newest_version"]) == ("r7", 4)
    assert told["usage"] == {"prompt_tokens": 2, "completion_tokens": 6, "total_tokens": 8}
    for index, choice in enumerate(told["choices"]):
        assert (choice["index"], choice["token_ids"], choice["finish_reason"]) == (index, [7, 8, 9], "stop")
        assert choice["versions"] == [3, 4, 4], "the version of each token"
        said = [(entry["token"], entry["logprob"]) for entry in choice["logprobs"]["content"]]
        assert said == [("token_id:7", -0.25), ("token_id:8", -0.5), ("token_id:9", -0.75)]
    assert (await generate({"sampling_params": {}})).json()["choices"][0]["logprobs"] is None


async def test_a_stream_tells_each_token_once_and_ends_where_a_completion_came_out_otherwise() -> None:
    async def grows(answer: TokenAnswer) -> None:
        for tokens in ((7, 8), (7, 8, 9)):
            answer.rollouts = [rollout(0, tokens, is_whole=len(tokens) == 3)]
            answer.grew.set()
            await asyncio.sleep(0.01)
        answer.whole.set_result(None)

    async def turns(answer: TokenAnswer) -> None:
        for tokens in ((7, 8), (6, 8, 9)):
            answer.rollouts = [rollout(0, tokens, is_whole=False)]
            answer.grew.set()
            await asyncio.sleep(0.01)

    lines = (await generate({"stream": True}, grows)).text.splitlines()
    events = [line[6:] for line in lines if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    assert [token for choice in choices for token in choice["token_ids"]] == [7, 8, 9]
    assert [version for choice in choices for version in choice["versions"]] == [3, 4, 4]
    assert choices[0]["finish_reason"] is None and choices[-1]["finish_reason"] == "stop"
    assert '"sampled_anew"' in (await generate({"stream": True}, turns)).text.splitlines()[-2]


async def hung_up(app: ASGIApp, path: str, key: str, body: Mapping[str, Any], after_s: float) -> None:
    """Posts, and hangs up so many seconds after the body."""
    data = json.dumps(body).encode()
    came: list[dict[str, Any]] = [{"type": "http.request", "body": data, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if not came and after_s:
            await asyncio.sleep(after_s)
        return came.pop() if came else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pass

    headers = {"authorization": f"Bearer {key}", "content-type": "application/json", "content-length": str(len(data))}
    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST",
        "path": path, "query_string": b"", "headers": [(k.encode(), v.encode()) for k, v in headers.items()],
    }  # fmt: skip
    await app(scope, receive, send)
    await asyncio.sleep(0.01)
    assert asyncio.all_tasks() == {asyncio.current_task()}, "nothing waits for it any more"


@pytest.mark.parametrize("after_s", [0.0, 0.05])
async def test_a_client_that_hangs_up_before_or_in_its_stream_takes_its_request_along(after_s: float) -> None:
    async def never(answer: TokenAnswer) -> None:
        pass

    sampler = PlayedSampler(never)
    app = GenerateApp(sampler, "policy", 64, "secret").application()
    await hung_up(app, "/inference/v1/generate", "secret", {"token_ids": [1], "stream": True}, after_s)
    assert sampler.left == 1
    world, session = begun()
    gateway = GatewayApp(world.episodes, "policy", "master", letter_bytes).application()
    asks = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    await hung_up(gateway, "/v1/chat/completions", session.key, asks, after_s)
    (group_id,) = world.fleet.leases
    world.sample(group_id, "ok")
    world.episodes.reward(session, 1.0, {})
    assert not session.answered, "nobody received it"


async def test_a_refusal_says_when_to_come_again() -> None:
    refused = await generate({"min_version": 5})
    assert refused.status_code == 409 and refused.headers["retry-after"] == "1"
    assert refused.headers["x-echo2-newest-version"] == "4"
    assert refused.json()["error"]["message"] == "expected a version up to 4"

    async def fails(answer: TokenAnswer) -> None:
        answer.whole.set_exception(CallRefused(503, "not_sampled", "ask again", 1.0))

    assert (await generate({}, fails)).status_code == 503
    assert (await asked(PlayedSampler(whole), "GET", "/v1/versions", headers={})).status_code == 401
    for method, path, status in (("GET", "/inference/v1/generate", 405), ("POST", "/v1/sessions", 404)):
        odd = await asked(PlayedSampler(whole), method, path)
        assert odd.status_code == status and odd.json()["error"]["message"].startswith(f"{method} {path}: ")


async def test_weights_are_handed_in_by_the_path_of_a_folder() -> None:
    sampler = PlayedSampler(whole)
    taken = await asked(sampler, "POST", "/v1/versions", {"version": 1 << 40, "folder": "/models/5", "is_last": True})
    assert taken.status_code == 201 and sampler.published == [(1 << 40, "/models/5", True)], "any step of a trainer"
    for body, told in (
        ({"version": 5, "folder": "models"}, "expected the absolute path"),
        ({"version": True, "folder": "/m"}, "version: expected a whole number"),
        ({"version": 1 << 53, "folder": "/m"}, "version: expected a whole number"),
        ({"version": 5, "folder": "/m", "is_last": 1}, "expected true or false"),
        ({"version": 5, "folder": "/none"}, "model /none: expected a folder"),
    ):
        refused = await asked(sampler, "POST", "/v1/versions", body)
        assert refused.status_code == 400 and told in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"token_ids": []}, "token_ids: expected one or more"),
        ({"token_ids": [1, -1]}, "token_ids: expected one or more"),
        ({"token_ids": [True]}, "token_ids: expected one or more"),
        ({"sampling_params": 3}, "sampling_params: expected an object"),
        ({"sampling_params": {"min_p": 0.1}}, "sampling_params.min_p: expected 0, since workers sample by"),
        ({"sampling_params": {"best_guess": 1}}, "sampling_params.best_guess: expected none"),
        ({"sampling_params": {"min_tokens": 1}}, "sampling_params.min_tokens: expected 0"),
        ({"sampling_params": {"routed_experts_prompt_start": 2}}, "prompt_start: expected a whole number from 0 to 1"),
        ({"sampling_params": {"n": 17}}, "sampling_params.n: expected a whole number from 1 to 16"),
        ({"sampling_params": {"temperature": "hot"}}, "sampling_params.temperature: expected a number"),
        ({"sampling_params": {"top_p": 0}}, "sampling_params.top_p: expected a number"),
        ({"sampling_params": {"top_k": -2}}, "sampling_params.top_k: expected a whole number"),
        ({"sampling_params": {"stop_token_ids": ["x"]}}, "sampling_params.stop_token_ids: expected token ids"),
        ({"sampling_params": {"seed": -1}}, "sampling_params.seed: expected a whole number"),
        ({"sampling_params": {"ignore_eos": 1}}, "sampling_params.ignore_eos: expected true or false, got 1"),
        ({"stream": "yes"}, "stream: expected true or false"),
        ({"sampling_params": {"logprobs": 5}}, "sampling_params.logprobs: expected 0 or 1"),
        ({"min_version": 1, "exact_version": 1}, "exact_version: expected it or min_version, got both"),
        ({"min_version": 1.5}, "min_version: expected a whole number"),
        ({"features": {"image": 1}}, "features: expected a field of token-in, token-out"),
    ],
)
def test_what_would_change_the_tokens_and_is_not_obeyed_is_refused(body: dict[str, Any], told: str) -> None:
    with pytest.raises(MalformedMessage, match=told.replace("[", r"\[")):
        parsed_request({"token_ids": [1, 2], **body})


def test_values_that_change_nothing_are_taken() -> None:
    params = {
        "min_p": 0.0, "repetition_penalty": 1.0, "skip_special_tokens": False, "top_k": -1, "seed": None, "logprobs": 1,
        "return_token_ids": True,
    }  # fmt: skip
    parsed = parsed_request({"token_ids": [1], "sampling_params": params, "cache_salt": "x", "priority": -3})
    last = (1 << 53) - 1  # which can be published, and so asked for
    assert parsed_request({"token_ids": [1], "exact_version": last}).exact_version == last
    assert (parsed.top_k, parsed.seed, parsed.priority, parsed.wants_logprobs) == (0, None, -3, True)


@pytest.mark.parametrize(("count", "dtype"), [(8, "uint8"), (300, "int16")])
async def test_routes_are_written_as_their_clients_read_them(count: int, dtype: str) -> None:
    import base64

    shape, experts = RoutingShape(2, 2, count), (np.arange(4 * 2 * 2).reshape(4, 2, 2) + count - 16) % count
    routes = Routing(packed(experts[:1], shape), packed(experts[1:], shape))

    async def routed(answer: TokenAnswer) -> None:
        answer.rollouts = [rollout(0, (7, 8, 9), routing=routes)]
        answer.whole.set_result(None)

    async def told(start: int) -> tuple[int, Any]:
        sampler = PlayedSampler(routed)
        sampler.routing_shape = shape
        body = {"token_ids": [1, 2], "sampling_params": {"routed_experts_prompt_start": start}}
        choice = (await asked(sampler, "POST", "/inference/v1/generate", body)).json()["choices"][0]
        payload = choice["routed_experts"]
        assert payload["dtype"] == dtype
        rows = np.frombuffer(base64.b64decode(payload["data"]), payload["dtype"]).reshape(payload["shape"])
        assert (rows == experts[payload["start"] :]).all()
        return payload["start"], len(rows)

    assert await told(0) == (0, 4), "one row for each position that was read"
    assert await told(1) == (1, 3), "a client has the routes of the turns before"
    routes = Routing(b"", packed(experts[1:], shape))
    assert await told(0) == await told(1) == (1, 3), "those of the prompt are not known"
    shape = replace(shape, experts=count - 1)
    with pytest.raises(KeyError, match="routed_experts"):  # a worker names one that is none: the others are answered
        await told(0)


# ---- streams of answers, with the stock client of the chat API


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
    call = Call(1, "a1", request, TreePlace(Wording(), None, b""), asyncio.get_running_loop().create_future(), 0.0)
    choice = Choice(text, (), whole_rollout(tuple(range(6))), "stop")
    reply: Any = reply_of(call, [choice], "policy", 0, lambda token: pieces[token])
    logprobs = reply["choices"][0]["logprobs"]
    if is_chat:
        assert b"".join(bytes(token["bytes"]) for token in logprobs["content"]).decode() == text
    else:
        assert logprobs["text_offset"] == [0, 1, 1, 1, 2, 3]


async def test_a_stream_has_the_token_ids_that_a_whole_answer_has() -> None:
    request = text_call({"prompt": [5, 6], "n": 2, "return_token_ids": True})
    call = Call(1, "a1", request, TreePlace(Wording(), None, b""), asyncio.get_running_loop().create_future(), (5, 6))
    choices = [Choice(text, (), completion(text), "stop") for text in ("yes", "no")]
    whole: Any = reply_of(call, choices, "policy", 0, letter_bytes)
    *lines, _ = "".join(pieces_of(call, choices, "policy", 0, letter_bytes)).strip().split("\n\n")
    events = [json.loads(line[6:]) for line in lines]
    assert [event["prompt_token_ids"] for event in events if "prompt_token_ids" in event] == [whole["prompt_token_ids"]]
    pieces = [piece for event in events for piece in event["choices"] if "versions" in piece]
    said = [(piece["token_ids"], piece["versions"]) for piece in pieces]
    assert said == [(choice["token_ids"], choice["versions"]) for choice in whole["choices"]]
    assert all(choice["prompt_token_ids"] == whole["prompt_token_ids"] for choice in whole["choices"]), "as vLLM's"


@pytest.mark.parametrize("is_chat", [True, False], ids=["chat", "text"])
async def test_whole_answers_and_events_are_of_the_stock_clients_own_types(is_chat: bool) -> None:
    from openai import types
    from openai.types import chat as chat_types

    whole = chat_types.ChatCompletion if is_chat else types.Completion
    tool = {"id": "", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    for tools, wanted in itertools.product(([], [tool]), ({}, {"logprobs": True if is_chat else 1})):
        asked = {"messages": [{"role": "user", "content": "hi"}], **wanted} if is_chat else {"prompt": "hi", **wanted}
        request = (chat_call if is_chat else text_call)({**asked, "n": 2, "stream_options": {"include_usage": True}})
        call = Call(1, "a1", request, TreePlace(Wording(), None, b""), asyncio.get_running_loop().create_future(), 0.0)
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
