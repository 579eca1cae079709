"""Tokens in, tokens out, for trainers of other projects: vLLM's `/inference/v1/generate`, and the versions that it publishes.

Guarantees: an answer holds whole completions with the version of every token, none older than the request allows; the newest
version only grows; a refusal says why, and when to retry if a retry can help. Waits for each completion as long as its client
does; a client that leaves takes its request along.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from echo2.base.errors import EchoError, MalformedMessage
from echo2.base.rollout import TEMPERATURE_MAX, Rollout, RoutingShape, unpacked
from echo2.gateway.app import (
    MASTER,
    AccessCheck,
    Bodies,
    EventStream,
    answered,
    error_answer,
    error_body,
    first_of,
    models_answer,
    sampled_anew,
)
from echo2.gateway.episodes import CallRefused
from echo2.gateway.requests import CHOICES_MAX, is_set, shown, stop_texts, whole_number

TOKENS_MAX = 1 << 20  # of a completion (SamplingParams), and far above any vocabulary
VERSION_MAX = (1 << 53) - 1  # numbers up to it are exact in JSON and in float64, as of artifacts
SEED_MAX = PRIORITY_MAX = (1 << 63) - 1  # as in vLLM
WRITTEN_AT_ONCE_TOKENS_MAX = 8192  # are written in some ten milliseconds; longer answers in a thread
_PATH_CHARS_MAX = 4096  # what Linux allows
NEWEST = "x-echo2-newest-version"  # header of refused requests: which version there is to ask for
_REQUEST = frozenset({
    "request_id", "token_ids", "sampling_params", "model", "stream", "priority", "min_version", "exact_version",
    "stream_options", "cache_salt", "return_token_ids",
})  # fmt: skip
"""Fields of a body that are read, or change no token."""
_OBEYED = frozenset({
    "n", "temperature", "top_p", "top_k", "max_tokens", "seed", "stop", "stop_token_ids", "ignore_eos",
    "routed_experts_prompt_start",
})  # fmt: skip
"""Sampling parameters that workers sample by."""
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "min_p": (0,), "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,), "min_tokens": (0,),
    "prompt_logprobs": (), "logit_bias": ({},), "allowed_token_ids": (), "bad_words": ([],), "structured_outputs": (),
    "skip_special_tokens": (True, False), "spaces_between_special_tokens": (True, False), "detokenize": (True, False),
    "include_stop_str_in_output": (True, False), "truncate_prompt_tokens": (), "output_kind": (0, 1, 2),
    "return_token_ids": (True, False), "extra_args": ({},), "flat_logprobs": (False,), "return_sampling_mask": (False,),
    "skip_clone": (True, False), "skip_reading_prefix_cache": (True, False), "thinking_token_budget": (), "logprobs": (0, 1),
}  # fmt: skip
"""Sampling parameters of vLLM that echo2 takes with these values alone, which change nothing of the tokens; or with none."""


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """A parsed request. `seed` None: the server chooses. `max_tokens` None: as many as the run allows. `ignores_end`: only the
    request's own stops end it. `routes_from`: prompt tokens whose routes are left out. `min_version`, `exact_version`: of every
    token."""

    token_ids: tuple[int, ...]
    request_id: str = ""
    choices: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int | None = None
    seed: int | None = None
    stops: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignores_end: bool = False
    routes_from: int = 0
    wants_logprobs: bool = True
    is_streamed: bool = False
    priority: int = 0
    min_version: int | None = None
    exact_version: int | None = None


@dataclass(slots=True, eq=False)
class TokenAnswer:
    """A request under way: its `rollouts` by choice so far. `whole`: resolved when all are. `logprobs_of`: those that the
    request's sampling makes count."""

    request: TokenRequest
    rollouts: list[Rollout]
    logprobs_of: Callable[[Rollout], tuple[float, ...]]
    whole: asyncio.Future[None]
    grew: asyncio.Event = field(default_factory=asyncio.Event)


class Sampler(Protocol):
    """The fleet, and the weights that it holds. `routing_shape`: of a mixture of experts whose routes are recorded."""

    @property
    def newest_version(self) -> int: ...

    @property
    def routing_shape(self) -> RoutingShape | None: ...

    def generate(self, request: TokenRequest) -> TokenAnswer:
        """Begins to sample. Raises CallRefused, at once or by the answer."""

    def leave(self, answer: TokenAnswer) -> None:
        """Nobody waits for the answer any more."""

    def status(self) -> Mapping[str, object]:
        """Versions, requests under way, and what they wait for."""

    async def publish(self, version: int, folder: str, is_last: bool) -> None:
        """Loads a model folder as `version` and begins to send it. Raises CallRefused or ConfigError."""


class GenerateApp:
    """`key`: every request bears it. `model`: the name that clients give."""

    def __init__(self, sampler: Sampler, model: str, context_tokens: int, key: str) -> None:
        self._sampler, self._model, self._context_tokens, self._key = sampler, model, context_tokens, key
        self._bodies = Bodies()

    def application(self, more: Sequence[Route] = ()) -> ASGIApp:
        """`more`: routes of another door on the same port."""
        routes = [
            *more,
            Route("/inference/v1/generate", self._generate, methods=["POST"]),
            Route("/v1/versions", self._publish, methods=["POST"]),
            Route("/v1/versions", self._status),
            Route("/v1/models", self._models),
            Route("/v1/models/{model:path}", self._models),
            Route("/health", self._status),
        ]
        handlers = dict.fromkeys((EchoError, ClientDisconnect, HTTPException, Exception), error_answer)
        handlers[CallRefused] = self._refusal
        return AccessCheck(Starlette(routes=routes, exception_handlers=handlers), self._caller_of)

    def _caller_of(self, key: str) -> str | None:
        return MASTER if hmac.compare_digest(key.encode(), self._key.encode()) else None

    async def _refusal(self, request: Request, error: Exception) -> Response:
        answer = await error_answer(request, error)
        answer.headers[NEWEST] = str(self._sampler.newest_version)
        return answer

    async def _generate(self, request: Request) -> Response:
        asked = await self._bodies.parsed(request, MASTER, parsed_request)
        answer = self._sampler.generate(asked)
        if asked.is_streamed:
            return EventStream(self._streamed(answer), lambda: self._sampler.leave(answer))
        try:
            await answered(request, answer.whole)
        finally:
            self._sampler.leave(answer)
        if sum(len(rollout.token_ids) for rollout in answer.rollouts) <= WRITTEN_AT_ONCE_TOKENS_MAX:
            return self._whole(answer)
        return await asyncio.to_thread(self._whole, answer)

    def _whole(self, answer: TokenAnswer) -> Response:
        choices = [self._choice(answer, rollout, 0) for rollout in answer.rollouts]
        return JSONResponse({**self._head(answer), "choices": choices, "prompt_logprobs": None})

    async def _streamed(self, answer: TokenAnswer) -> AsyncIterator[str]:
        """Events of the tokens that are new since the last one. Tokens that were sent never change: where another worker began a
        completion anew and came to others, the stream ends with an error."""
        sent: list[tuple[int, ...]] = [()] * len(answer.rollouts)
        try:
            while True:
                answer.grew.clear()
                is_over = answer.whole.done()
                if is_over:
                    answer.whole.result()
                for index, rollout in enumerate(answer.rollouts):
                    begun = len(sent[index])
                    if rollout.token_ids[:begun] != sent[index]:
                        raise sampled_anew()
                    if len(rollout.token_ids) > begun or (is_over and rollout.is_finished):
                        sent[index] = rollout.token_ids
                        choice = self._choice(answer, rollout, begun)
                        yield _event({**self._head(answer), "choices": [choice]})
                if is_over:
                    yield "data: [DONE]\n\n"
                    return
                await first_of(answer.whole, answer.grew.wait())
                if not answer.whole.done() and not answer.grew.is_set():
                    yield ": still sampling\n\n"
        except CallRefused as refused:
            yield _event(error_body(refused))

    def _head(self, answer: TokenAnswer) -> dict[str, object]:
        prompt = len(answer.request.token_ids)
        sampled = sum(len(rollout.token_ids) for rollout in answer.rollouts)
        usage = {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
        newest = self._sampler.newest_version
        return {"request_id": answer.request.request_id, "usage": usage, "newest_version": newest}

    def _choice(self, answer: TokenAnswer, rollout: Rollout, begun: int) -> dict[str, object]:
        """One choice from its token number `begun` on, with the version that sampled each token."""
        token_ids, logprobs = rollout.token_ids[begun:], answer.logprobs_of(rollout)[begun:]
        versions = list(rollout.versions[begun:])
        choice: dict[str, object] = {
            "index": rollout.index, "token_ids": list(token_ids), "versions": versions,
            "finish_reason": rollout.finish_reason.value if rollout.is_finished else None,
            "logprobs": None,
        }  # fmt: skip
        if answer.request.wants_logprobs:
            choice["logprobs"] = {"content": [
                {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
                for token, logprob in zip(token_ids, logprobs, strict=True)
            ]}  # fmt: skip
        shape = self._sampler.routing_shape
        if shape is not None and not begun and rollout.is_finished and rollout.routing:
            with suppress(MalformedMessage):  # a worker's lie, and no fault of who asks
                choice["routed_experts"] = experts_of(rollout, shape, answer.request)
        return choice

    async def _publish(self, request: Request) -> Response:
        body = await self._bodies.parsed(request, MASTER, dict)
        version, folder = body.get("version"), body.get("folder")
        if not isinstance(folder, str) or not 1 <= len(folder) <= _PATH_CHARS_MAX or not folder.startswith("/"):
            raise MalformedMessage(f"folder: expected the absolute path of a model folder, got {shown(folder)}")
        await self._sampler.publish(whole_number(version, "version", VERSION_MAX), folder, is_set(body, "is_last"))
        return JSONResponse(self._sampler.status(), status_code=201)

    async def _status(self, request: Request) -> Response:
        return JSONResponse(self._sampler.status())

    async def _models(self, request: Request) -> Response:
        return models_answer(request, self._model, max_model_len=self._context_tokens)


def _event(body: Mapping[str, object]) -> str:
    return f"data: {json.dumps(body)}\n\n"


def parsed_request(body: Mapping[str, object]) -> TokenRequest:
    """Parses a body of `/inference/v1/generate`. Raises `MalformedMessage`, which names the field, what was expected and what came;
    also for a field that would change the tokens and is not obeyed."""
    token_ids, params = body.get("token_ids"), body.get("sampling_params") or {}
    if not isinstance(token_ids, list) or not token_ids or not all(type(n) is int and n >= 0 for n in token_ids):
        raise MalformedMessage(f"token_ids: expected one or more token ids, got {shown(token_ids)}")
    if not isinstance(params, dict):
        raise MalformedMessage(f"sampling_params: expected an object, got {shown(params)}")
    odd = sorted(name for name, value in body.items() if name not in _REQUEST and value is not None)
    if odd:
        raise MalformedMessage(f"{odd[0][:40]}: expected a field of token-in, token-out answer without images")
    for name, value in params.items():
        if name not in _OBEYED and value is not None and value not in _NEUTRAL.get(name, ()):
            raise MalformedMessage(
                f"sampling_params.{name[:40]}: expected {' or '.join(map(repr, _NEUTRAL.get(name, ()))) or 'none'}, since "
                f"workers sample by {', '.join(sorted(_OBEYED))} alone, got {shown(value)}"
            )
    exact, least = (
        None if body.get(name) is None else whole_number(body[name], name, VERSION_MAX, 0)
        for name in ("exact_version", "min_version")
    )
    if exact is not None and least is not None:
        raise MalformedMessage("exact_version: expected it or min_version, got both")
    stop_ids = params.get("stop_token_ids") or []
    if not isinstance(stop_ids, list) or not all(type(n) is int and 0 <= n < TOKENS_MAX for n in stop_ids):
        raise MalformedMessage(f"sampling_params.stop_token_ids: expected token ids, got {shown(stop_ids)}")
    tokens, seed = params.get("max_tokens"), params.get("seed")
    top_k, routes_from = params.get("top_k"), params.get("routed_experts_prompt_start") or 0
    return TokenRequest(
        token_ids=tuple(token_ids),
        request_id=str(body.get("request_id") or "")[:128],
        choices=whole_number(1 if params.get("n") is None else params["n"], "sampling_params.n", CHOICES_MAX),
        temperature=_number(params, "temperature", 0.0, TEMPERATURE_MAX),
        top_p=_number(params, "top_p", 1e-6, 1.0),
        top_k=0 if top_k in (None, -1, 0) else whole_number(top_k, "sampling_params.top_k", TOKENS_MAX),
        max_tokens=None if tokens is None else whole_number(tokens, "sampling_params.max_tokens", TOKENS_MAX),
        seed=None if seed is None else whole_number(seed, "sampling_params.seed", SEED_MAX, 0),
        stops=stop_texts(params.get("stop")),
        stop_token_ids=tuple(stop_ids),
        ignores_end=is_set(params, "ignore_eos", "sampling_params."),
        routes_from=whole_number(routes_from, "sampling_params.routed_experts_prompt_start", len(token_ids) - 1, 0),
        wants_logprobs=params.get("logprobs") is not None,
        is_streamed=is_set(body, "stream"),
        priority=whole_number(body.get("priority") or 0, "priority", PRIORITY_MAX, -PRIORITY_MAX),
        min_version=least,
        exact_version=exact,
    )


def _number(params: Mapping[str, object], name: str, low: float, high: float) -> float:
    raw = 1.0 if params.get(name) is None else params[name]
    if isinstance(raw, bool) or not isinstance(raw, int | float) or not low <= raw <= high:
        raise MalformedMessage(f"sampling_params.{name}: expected a number from {low:g} to {high:g}, got {shown(raw)}")
    return float(raw)


def experts_of(rollout: Rollout, shape: RoutingShape, request: TokenRequest) -> dict[str, object]:
    """The routes of a rollout as prime-rl, verifiers and SkyRL read them (vLLM itself writes an .npy file): base64 of (positions,
    routers, chosen), all positions that were read (the prompt's, if they are known, and the tokens' but the last) from
    `request.routes_from` on; `start`: the first one's. A byte an expert, or two if one is beyond 255."""
    parts = [unpacked(part, shape) for part in (rollout.routing.prompt, rollout.routing.tokens) if part]
    rows = np.concatenate(parts)
    first = len(request.token_ids) + len(rollout.token_ids) - 1 - len(rows)
    start = max(first, request.routes_from)
    rows = rows[start - first :]
    kind = "uint8" if rows.max(initial=0) < 256 else "int16"
    data = base64.b64encode(rows.astype(kind).tobytes()).decode()
    return {"data": data, "shape": rows.shape, "start": start, "dtype": kind}
