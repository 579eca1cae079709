"""Builds replies in the OpenAI API's format: JSON bodies, and server-sent events of a stream."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from echo2.gateway.episodes import Call, CallRefused, Choice
from echo2.gateway.requests import CallRequest

Json = dict[str, object]
BytesOf = Callable[[int], bytes]


def reply_of(call: Call, answers: Sequence[Choice], model: str, now_s: int, bytes_of: BytesOf) -> Json:
    """Builds the whole reply. `bytes_of`: returns the bytes of a token ID."""
    request = call.request
    is_chat = request.prompt is None
    choices = []
    for number, choice in enumerate(answers):
        reason = "stop" if not is_chat and choice.tool_calls else choice.finish_reason
        logprobs = _logprobs(choice, bytes_of, is_chat=is_chat) if request.wants_logprobs else None
        reply: Json = {"index": number, "finish_reason": reason, "logprobs": logprobs}
        if is_chat:
            called: Json = {"tool_calls": _written(choice)} if choice.tool_calls else {}
            reply["message"] = {"role": "assistant", "content": choice.text, "refusal": None, **called}
        else:
            reply["text"] = choice.text
        if request.wants_ids:
            reply |= {"token_ids": list(choice.sampled.token_ids), "versions": list(choice.sampled.versions)}
        choices.append(reply)
    whole = _head(call, model, now_s) | {"choices": choices, "usage": _usage(call, answers)}
    if request.wants_ids:
        whole["prompt_token_ids"] = list(call.prompt_token_ids)
    return whole


def piece_of(call: Call, text: str, model: str, now_s: int, *, is_first: bool) -> str:
    """Builds the server-sent event for the next piece of a single-choice stream."""
    return _piece(call, model, now_s, 0, _content(call.request, text, is_first=is_first))


def pieces_of(
    call: Call, answers: Sequence[Choice], model: str, now_s: int, bytes_of: BytesOf, told: str = ""
) -> Iterator[str]:
    """Yields the answer as server-sent events. `told`: text of the single choice that was streamed already, and is left out."""
    request = call.request
    is_chat = request.prompt is None
    for number, choice in enumerate(answers):
        logprobs = _logprobs(choice, bytes_of, is_chat=is_chat) if request.wants_logprobs else None
        content = _content(request, choice.text[len(told) :], is_first=not told)
        if is_chat and choice.tool_calls:
            written = _written(choice)
            content["delta"]["tool_calls"] = [{"index": place, **one} for place, one in enumerate(written)]
        yield _piece(call, model, now_s, number, content, logprobs)
        end: Json = {"delta": {}} if is_chat else {"text": ""}
        yield _piece(call, model, now_s, number, end, None, choice.finish_reason)
    if request.wants_usage:
        yield _event(_head(call, model, now_s, ".chunk") | {"choices": [], "usage": _usage(call, answers)})
    yield "data: [DONE]\n\n"


def error_body(refused: CallRefused) -> Json:
    kind = "invalid_request_error" if refused.status in (400, 404, 413) else "api_error"
    return {"error": {"message": refused.message, "type": kind, "code": refused.code, "param": None}}


def _content(request: CallRequest, text: str, *, is_first: bool) -> dict[str, Any]:
    if request.prompt is not None:
        return {"text": text}
    return {"delta": {"role": "assistant", "content": text} if is_first else {"content": text}}


def _piece(
    call: Call, model: str, now_s: int, number: int, content: Json, logprobs: Json | None = None, reason: str | None = None
) -> str:  # fmt: skip
    choice: Json = {"index": number, **content, "logprobs": logprobs, "finish_reason": reason}
    return _event(_head(call, model, now_s, ".chunk") | {"choices": [choice]})


def _head(call: Call, model: str, now_s: int, of_chat: str = "") -> Json:
    """`of_chat`: behind the kind of a chat's answer."""
    is_chat = call.request.prompt is None
    prefix, kind = ("chatcmpl", "chat.completion" + of_chat) if is_chat else ("cmpl", "text_completion")
    return {"id": f"{prefix}-{call.name}", "object": kind, "created": now_s, "model": model}


def _written(choice: Choice) -> list[Json]:
    """Returns the tool calls with their arguments as JSON text."""
    written = []
    for call in choice.tool_calls:
        function = call["function"]
        assert isinstance(function, dict), "as the reading made it"
        arguments = json.dumps(function["arguments"], ensure_ascii=False)
        written.append({**call, "function": {"name": function["name"], "arguments": arguments}})
    return written


def _logprobs(choice: Choice, bytes_of: BytesOf, *, is_chat: bool) -> Json:
    pieces = [bytes_of(token) for token in choice.sampled.token_ids]
    texts = [piece.decode(errors="replace") for piece in pieces]
    if not is_chat:
        scores: Json = {"token_logprobs": list(choice.sampled.logprobs), "top_logprobs": None}
        return {"tokens": texts, **scores, "text_offset": _offsets(pieces)}
    content: list[Json] = [
        {"token": text, "logprob": logprob, "bytes": list(piece), "top_logprobs": []}
        for text, piece, logprob in zip(texts, pieces, choice.sampled.logprobs, strict=True)
    ]
    return {"content": content}


def _offsets(pieces: Sequence[bytes]) -> list[int]:
    """Where each token's text begins, in characters. A character belongs to the token with its last byte."""
    decoder, offsets, at = codecs.getincrementaldecoder("utf-8")("replace"), [], 0
    for piece in pieces:
        offsets.append(at)
        at += len(decoder.decode(piece))
    return offsets


def _usage(call: Call, answers: Sequence[Choice]) -> Json:
    sampled = sum(len(choice.sampled.token_ids) for choice in answers)
    prompt = len(call.prompt_token_ids)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _event(body: Json) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
