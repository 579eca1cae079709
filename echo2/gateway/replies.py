"""Builds replies in the OpenAI API's format: JSON bodies, and server-sent events of a stream."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from echo2.gateway import events as e
from echo2.gateway.requests import CallRequest

Json = dict[str, object]
TextOf = Callable[[int], str]


def reply_of(answer: e.CallAnswer, request: CallRequest, model: str, now_s: int, text_of: TextOf) -> Json:
    """Builds the whole reply. `text_of`: returns the text of a token ID."""
    is_chat = request.prompt is None
    choices = []
    for number, choice in enumerate(answer.choices):
        told: Json = {
            "index": number,
            "finish_reason": "stop" if not is_chat and choice.tool_calls else choice.finish_reason,
        }
        if is_chat:
            told["message"] = _message(choice)
        else:
            told["text"] = choice.text
        told["logprobs"] = _logprobs(choice, text_of, is_chat=is_chat) if request.wants_logprobs else None
        if request.wants_ids:
            told |= {"token_ids": list(choice.token_ids), "versions": list(choice.versions)}
        choices.append(told)
    reply = _head(answer.call_id, request, model, now_s, "chat.completion" if is_chat else "text_completion")
    reply |= {"choices": choices, "usage": _usage(answer)}
    if request.wants_ids:
        reply["prompt_token_ids"] = list(answer.prompt_token_ids)
    return reply


def piece_of(call_id: int, text: str, request: CallRequest, model: str, now_s: int, *, is_first: bool) -> str:
    """Builds the server-sent event for the next piece of a single-choice stream."""
    choice: Json = {"index": 0, "logprobs": None, "finish_reason": None}
    if request.prompt is not None:
        choice["text"] = text
    else:
        choice["delta"] = {"role": "assistant", "content": text} if is_first else {"content": text}
    return _event(_head(call_id, request, model, now_s, _piece_kind(request)) | {"choices": [choice]})


def pieces_of(
    answer: e.CallAnswer, request: CallRequest, model: str, now_s: int, text_of: TextOf, told: str = ""
) -> Iterator[str]:
    """Yields the answer as server-sent events. `told`: text of the single choice that was streamed already, and is left out."""
    is_chat = request.prompt is None
    head = _head(answer.call_id, request, model, now_s, _piece_kind(request))
    for number, whole in enumerate(answer.choices):
        choice = replace(whole, text=whole.text[len(told) :])
        logprobs = _logprobs(choice, text_of, is_chat=is_chat) if request.wants_logprobs else None
        if not is_chat:
            yield _event(
                head
                | {"choices": [{"index": number, "text": choice.text, "logprobs": logprobs, "finish_reason": None}]}
            )
        else:
            delta: Json = {"content": choice.text} if told else {"role": "assistant", "content": choice.text}
            if choice.tool_calls:
                delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(_written(choice))]
            yield _event(
                head | {"choices": [{"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": None}]}
            )
        last: Json = {"index": number, "finish_reason": choice.finish_reason, "logprobs": None}
        last["delta" if is_chat else "text"] = {} if is_chat else ""
        yield _event(head | {"choices": [last]})
    if request.wants_usage:
        yield _event(head | {"choices": [], "usage": _usage(answer)})
    yield "data: [DONE]\n\n"


def error_body(refused: e.Refuse) -> Json:
    kind = "invalid_request_error" if refused.status in (400, 404, 413) else "api_error"
    return {"error": {"message": refused.message, "type": kind, "code": refused.code, "param": None}}


def _piece_kind(request: CallRequest) -> str:
    return "chat.completion.chunk" if request.prompt is None else "text_completion"


def _head(call_id: int, request: CallRequest, model: str, now_s: int, kind: str) -> Json:
    name = "chatcmpl" if request.prompt is None else "cmpl"
    return {"id": f"{name}-{call_id}", "object": kind, "created": now_s, "model": model}


def _message(choice: e.Choice) -> Json:
    message: Json = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.tool_calls:
        message["tool_calls"] = _written(choice)
    return message


def _written(choice: e.Choice) -> list[Json]:
    """Returns the tool calls with their arguments as JSON text."""
    written = []
    for call in choice.tool_calls:
        function = call["function"]
        assert isinstance(function, dict), "as the reading made it"
        arguments = json.dumps(function["arguments"], ensure_ascii=False)
        written.append({**call, "function": {"name": function["name"], "arguments": arguments}})
    return written


def _logprobs(choice: e.Choice, text_of: TextOf, *, is_chat: bool) -> Json:
    texts = [text_of(token) for token in choice.token_ids]
    if not is_chat:
        return {
            "tokens": texts,
            "token_logprobs": list(choice.logprobs),
            "top_logprobs": None,
            "text_offset": _offsets(texts),
        }
    return {
        "content": [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in zip(texts, choice.logprobs, strict=True)
        ]
    }


def _offsets(texts: Sequence[str]) -> list[int]:
    found, at = [], 0
    for text in texts:
        found.append(at)
        at += len(text)
    return found


def _usage(answer: e.CallAnswer) -> Json:
    sampled = sum(len(choice.token_ids) for choice in answer.choices)
    prompt = len(answer.prompt_token_ids)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _event(body: Json) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
