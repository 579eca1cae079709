"""Tinker's API: a client trains this run's model step by step, and samples from the versions that it publishes.

Guarantees: requests and answers are the SDK's own types; what is not done here is refused by name, at the first request that asks
for it; one client trains at a time; a sampler samples by its version or a newer one, at most S newer (`x-echo2-versions` of the
answer), and scores by its version alone. An operation answers at once with an id, and the client polls for its result.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast

import numpy as np
from google.protobuf.message import DecodeError
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tinker import types
from tinker.proto import tinker_public_pb2 as proto
from tinker.types._pydantic_types import get_info_response, get_sampler_response
from tinker.types.future_retrieve_request import FutureRetrieveRequest
from tinker.types.request_failed_response import RequestFailedResponse
from tinker.types.save_weights_for_sampler_response import SaveWeightsForSamplerResponseInternal
from tinker.types.session_heartbeat_request import SessionHeartbeatRequest
from tinker.types.session_heartbeat_response import SessionHeartbeatResponse
from tinker.types.try_again_response import TryAgainResponse

from echo2.base.errors import EchoError, MalformedMessage
from echo2.base.rollout import LOSS_COLUMNS, AdamStep, ClientLoss, Example, FinishReason
from echo2.gateway.app import MASTER, Bodies, error_response
from echo2.gateway.episodes import CallRefused
from echo2.gateway.generate import Sampler, TokenAnswer, TokenRequest
from echo2.gateway.operations import MISSING_S, InOrder, Operations
from echo2.gateway.requests import CHOICES_MAX, shown
from echo2.outside import here, monotonic
from echo2.outside.guard import MISHAPS

API = "/api/v1"  # as the SDK asks
POLL_S = 20.0  # the SDK gives a poll 45 s
SILENT_S = 30.0  # the SDK sends a heartbeat every 10 s
SESSIONS_MAX = 1024  # far more than clients of one run at a time
CHUNK_BYTES = 4 << 20  # of examples in one request, by the SDK's estimate: half of what a body may have
CHUNK_EXAMPLES = 256
"""Examples in one request: a chunk's steps are not interrupted by another's, so a poll ends within seconds."""
_PROTOBUF = "application/x-protobuf"  # how the SDK sends examples
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,99}")  # of a folder
_WEIGHTS, _SAMPLER = "weights", "sampler_weights"  # parts of a path, as the SDK reads it
Kind = TypeVar("Kind", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Terms:
    """What a client may ask of the run. `model`: the name that it gives. `lora_rank` 0: all weights are trained."""

    model: str
    context_tokens: int
    vocabulary_size: int
    lora_rank: int
    staleness_bound: int


class Driven(Protocol):
    """The trainer that the client drives. Raises `EchoError` for what it cannot do."""

    @property
    def terms(self) -> Terms: ...

    async def begin(self, saved: str, *, with_optimiser: bool) -> None:
        """Begins anew from what was saved under a name; "": from the base model."""

    async def forward_backward(
        self, examples: Sequence[Example], loss: ClientLoss, *, is_trained: bool
    ) -> tuple[Sequence[np.ndarray], float]:
        """Adds a gradient up; returns each example's log-probabilities, (N, K), and the summed loss."""

    async def optim_step(self, step: AdamStep) -> Mapping[str, float]:
        """Makes one update; returns its metrics."""

    async def forget_gradients(self) -> None: ...

    async def save(self, name: str, *, overwrites: bool) -> None: ...

    async def publish_trained(self, *, is_named: bool) -> int:
        """Sends the weights as they are to the fleet; returns their version. `is_named`: it is scored by at any time."""

    async def prompt_logprobs(self, version: int, token_ids: Sequence[int]) -> np.ndarray:
        """Log-probabilities of all tokens but the first under a version, float32."""


@dataclass(slots=True, eq=False)
class TrainingClient:
    """`fault`: why the next step must not be made."""

    session_id: str
    model_id: str
    order: InOrder = field(default_factory=InOrder)
    fault: str = ""


class TinkerApi:
    """The routes. They expect the gateway's key, which `access` has checked."""

    def __init__(self, driven: Driven, sampler: Sampler) -> None:
        self._driven, self._fleet = driven, sampler
        self._bodies, self.operations = Bodies(), Operations[Response]()
        self._sessions: dict[str, float] = {}  # when each was heard last
        self._client: TrainingClient | None = None
        self._numbers = itertools.count()

    def routes(self) -> list[Route]:
        posts: list[tuple[str, type[BaseModel], Callable[[Any], BaseModel]]] = [
            ("client/config", types.ClientConfigRequest, lambda _: types.ClientConfigResponse(
                fwdbwd_max_chunk_bytes_count=CHUNK_BYTES, fwdbwd_max_chunk_len=CHUNK_EXAMPLES)),
            ("client/dynamic_config", types.ClientConfigRequest,
             lambda _: types.ClientDynamicConfigResponse(sample_cancel_enabled=True)),
            ("create_session", types.CreateSessionRequest, self._create_session),
            ("session_heartbeat", SessionHeartbeatRequest, self._heartbeat),
            ("create_model", types.CreateModelRequest, self._create_model),
            ("get_info", types.GetInfoRequest, self._info),
            ("create_sampling_session", types.CreateSamplingSessionRequest, self._create_sampling_session),
            ("asample", types.SampleRequest, self._sample),
            ("optim_step", types.OptimStepRequest, self._optim_step),
            ("save_weights", types.SaveWeightsRequest, self._save),
            ("save_weights_for_sampler", types.SaveWeightsForSamplerRequest, self._publish),
            ("load_weights", types.LoadWeightsRequest, self._load),
        ]  # fmt: skip
        return [
            Route(f"{API}/healthz", self._health),
            Route(f"{API}/get_server_capabilities", self._capabilities),
            *(Route(f"{API}/{path}", self._answering(kind, answer), methods=["POST"]) for path, kind, answer in posts),
            Route(f"{API}/forward_backward", self._forward_backward, methods=["POST"]),
            Route(f"{API}/retrieve_future", self._retrieve, methods=["POST"]),
            Route(f"{API}/cancel_future", self._cancel, methods=["POST"]),
            Route(f"{API}/weights_info", self._weights_info, methods=["POST"]),
            Route(f"{API}/samplers/{{sampler}}", self._sampler),
            Route(f"{API}/sessions/{{session}}/finish", self._finish, methods=["POST"]),
            Route(f"{API}/telemetry", self._telemetry, methods=["POST"]),
            Route(f"{API}/{{rest:path}}", self._unknown, methods=["GET", "POST", "PUT", "DELETE"]),
        ]

    def _answering(
        self, kind: type[Kind], answer: Callable[[Kind], BaseModel]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            body: dict[str, object] = {}

            def parse(told: Mapping[str, object]) -> Kind:
                body.update(told)
                return _parsed(kind, told)

            try:
                return _json(answer(await self._bodies.parsed(request, MASTER, parse)))
            except (MalformedMessage, CallRefused) as refused:
                return _json(self._refused_in_turn(body, refused))

        return endpoint

    # ---- the run, its sessions and its one training client

    async def _health(self, _: Request) -> Response:
        return _json(types.HealthResponse(status="ok"))

    async def _capabilities(self, _: Request) -> Response:
        terms = self._driven.terms
        model = types.SupportedModel(
            model_name=terms.model, max_context_length=terms.context_tokens, trainable=True, sampleable=True
        )
        return _json(types.GetServerCapabilitiesResponse(supported_models=[model]))

    def _create_session(self, _: types.CreateSessionRequest) -> BaseModel:
        terms, session_id = self._driven.terms, here().rng.randbytes(12).hex()
        self._sessions[session_id] = monotonic()
        if len(self._sessions) > SESSIONS_MAX:  # the one that has been silent for longest
            del self._sessions[min(self._sessions, key=self._sessions.__getitem__)]
        rank = terms.lora_rank
        trained = f"an adapter of rank {rank}" if rank else "all weights, whatever rank is asked for"
        text = (
            f"this run trains {trained} of {terms.model}, for one training client at a time. A sampler answers with its "
            f"version or a newer one, at most {terms.staleness_bound} newer. Losses: {', '.join(LOSS_COLUMNS)}, and custom ones "
            "that the client computes"
        )
        return types.CreateSessionResponse(session_id=session_id, info_message=text)

    def _heartbeat(self, asked: SessionHeartbeatRequest) -> BaseModel:
        if asked.session_id not in self._sessions:
            raise CallRefused(404, "no_session", "expected a session since the learner's last start")
        self._sessions[asked.session_id] = monotonic()
        return SessionHeartbeatResponse()

    async def _finish(self, request: Request) -> Response:
        self._sessions.pop(request.path_params["session"], None)
        return Response(status_code=204)

    def _seat(self, session_id: str, number: int) -> TrainingClient:
        """The session's training client; a later one takes the place of an earlier one of the same session."""
        model_id, current = f"{session_id}:train:{number}", self._client
        if current is not None and current.model_id == model_id:
            return current
        if f"{model_id}:0" in self.operations:  # whose results a second of this name would be given
            text = "expected a new model_seq_id, for a later client took its place"
            raise CallRefused(400, "training_client_replaced", text)
        is_other = current is not None and current.session_id != session_id
        if current and is_other and monotonic() - self._sessions.get(current.session_id, -SILENT_S) < SILENT_S:
            until = f"session {current.session_id} has it until it ends or is silent for {SILENT_S:.0f} s"
            raise CallRefused(400, "training_client_taken", f"expected one training client a run: {until}")
        self._client = TrainingClient(session_id, model_id)
        return self._client

    def _create_model(self, asked: types.CreateModelRequest) -> BaseModel:
        terms, lora = self._driven.terms, asked.lora_config
        self._check_model(asked.base_model)
        if asked.optimizer_config.type != "adamw":
            raise _refused(f"optimizer_config: expected adamw, got {asked.optimizer_config.type!r:.80}")
        if lora is not None and terms.lora_rank and lora.rank != terms.lora_rank:
            raise _refused(f"lora_config.rank: expected {terms.lora_rank}, the run's model.lora_rank, got {lora.rank}")
        if lora is not None and not (lora.train_mlp and lora.train_attn):
            raise _refused("lora_config: expected an adapter on attention and MLP layers, got one on a part of them")
        return self._begun(self._seat(asked.session_id, asked.model_seq_id), "", with_optimiser=False)

    def _begun(self, client: TrainingClient, saved: str, *, with_optimiser: bool) -> BaseModel:
        async def work() -> Response:
            await self._driven.begin(saved, with_optimiser=with_optimiser)
            return _json((types.LoadWeightsResponse if saved else types.CreateModelResponse)(model_id=client.model_id))

        request_id = f"{client.model_id}:0"
        self.operations.begin(request_id, work)
        return types.UntypedAPIFuture(request_id=request_id, model_id=client.model_id)

    def _info(self, asked: types.GetInfoRequest) -> BaseModel:
        terms = self._driven.terms
        self._client_of(asked.model_id)
        return get_info_response.GetInfoResponse(
            type="get_info", model_id=asked.model_id, model_name=terms.model, is_lora=bool(terms.lora_rank),
            lora_rank=terms.lora_rank or None,
            model_data=get_info_response.ModelData(model_name=terms.model, tokenizer_id=terms.model),
        )  # fmt: skip

    def _check_model(self, name: str) -> None:
        if name != (expected := self._driven.terms.model):
            raise _refused(f"base_model: expected {expected}, the run's model.path, got {shown(name)}")

    def _client_of(self, model_id: str | None) -> TrainingClient:
        client = self._client
        if client is None or client.model_id != model_id:
            text = (
                "expected the run's training client: another has taken its place, or the learner has started anew; create one "
                "from a saved state"
            )
            raise CallRefused(404, "no_training_client", text)
        return client

    # ---- operations in the order of their numbers

    def _in_turn(
        self, model_id: str | None, number: int | None, run: Callable[[TrainingClient], Awaitable[BaseModel | Response]]
    ) -> types.UntypedAPIFuture:
        client = self._client_of(model_id)
        request_id = f"{client.model_id}:{number or 0}"
        if request_id not in self.operations:
            client.order.check(number or 0)

        async def work() -> Response:
            async with client.order.turn(number or 0):
                self._client_of(client.model_id)
                if lost := client.order.missing:  # it may have been a part of the gradient
                    client.fault, client.order.missing = f"number {lost} did not come in {MISSING_S:.0f} s", 0
                answer = await run(client)
                return answer if isinstance(answer, Response) else _json(answer)

        self.operations.begin(request_id, work)
        return types.UntypedAPIFuture(request_id=request_id, model_id=client.model_id)

    def _refused_in_turn(self, body: Mapping[str, object], refused: Exception) -> BaseModel:
        """Refuses a numbered operation in its turn: those behind a number that never has one would wait for ever."""
        client, number = self._client, body.get("seq_id")
        is_to_retry = isinstance(refused, CallRefused) and refused.retry_after_s
        if client is None or body.get("model_id") != client.model_id or type(number) is not int or is_to_retry:
            raise refused

        async def run(_: TrainingClient) -> BaseModel:
            raise refused

        return self._in_turn(client.model_id, number, run)

    async def _forward_backward(self, request: Request) -> Response:
        async with self._bodies.read(request, MASTER) as data:
            try:
                asked = proto.ForwardBackwardRequest.FromString(data)
            except DecodeError:
                raise MalformedMessage("forward_backward: expected the SDK's protobuf") from None

        async def run(client: TrainingClient) -> Response:
            try:
                loss, terms = _loss_of(asked), self._driven.terms
                examples = [_example(datum, loss, terms, at) for at, datum in enumerate(asked.data)]
                if not examples:
                    raise MalformedMessage("data: expected one or more examples")
                is_trained = not asked.forward_only
                logprobs, total = await self._driven.forward_backward(examples, loss, is_trained=is_trained)
            except Exception as error:  # of any kind: a part of the gradient may be added up already
                client.fault = client.fault if asked.forward_only else f"{type(error).__name__}: {error}"
                raise
            shapes = [tuple(datum.loss_fn_inputs["target_tokens"].shape[1:]) for datum in asked.data]
            return Response(_output(logprobs, shapes, total), media_type=_PROTOBUF)

        return _json(self._in_turn(asked.model_id, asked.seq_id, run))

    def _optim_step(self, asked: types.OptimStepRequest) -> BaseModel:
        async def run(client: TrainingClient) -> BaseModel:
            adam = asked.optim_params
            if not isinstance(adam, types.AdamParams):
                raise _refused(f"optim_params: expected those of adamw, got {adam.type!r:.80}")
            if client.fault:
                text, client.fault = client.fault, ""
                await self._driven.forget_gradients()
                raise _refused(
                    f"no step is made and its gradients are dropped, for an operation before it failed: {text}"
                )
            clip = max(0.0, adam.grad_clip_norm)
            step = AdamStep(adam.learning_rate, adam.beta1, adam.beta2, adam.eps, adam.weight_decay, clip)
            return types.OptimStepResponse(metrics=dict(await self._driven.optim_step(step)))

        return self._in_turn(asked.model_id, asked.seq_id, run)

    def _save(self, asked: types.SaveWeightsRequest) -> BaseModel:
        async def run(client: TrainingClient) -> BaseModel:
            name = _name(asked.path)
            await self._driven.save(f"{client.model_id}/{name}", overwrites=asked.overwrite)
            return types.SaveWeightsResponse(path=_path(client.model_id, _WEIGHTS, name), type="save_weights")

        return self._in_turn(asked.model_id, asked.seq_id, run)

    def _load(self, asked: types.LoadWeightsRequest) -> BaseModel:
        saved = "/".join(_parts_of(asked.path, _WEIGHTS))
        if asked.session_id is not None:
            client = self._seat(asked.session_id, asked.model_seq_id or 0)
            return self._begun(client, saved, with_optimiser=asked.optimizer)

        async def run(client: TrainingClient) -> BaseModel:
            await self._driven.begin(saved, with_optimiser=asked.optimizer)
            client.fault = ""  # the gradients that it was about are gone
            return types.LoadWeightsResponse(path=asked.path, model_id=client.model_id)

        return self._in_turn(asked.model_id, asked.seq_id, run)

    def _publish(self, asked: types.SaveWeightsForSamplerRequest) -> BaseModel:
        async def run(client: TrainingClient) -> BaseModel:
            name = _name(asked.path) if asked.path is not None else ""
            version = await self._driven.publish_trained(is_named=bool(name))
            path = _path(client.model_id, _SAMPLER, f"{name}@{version}") if name else None
            session_id = None if name else f"{client.session_id}:sample:{asked.sampling_session_seq_id}@{version}"
            return SaveWeightsForSamplerResponseInternal(path=path, sampling_session_id=session_id)

        return self._in_turn(asked.model_id, asked.seq_id, run)

    def _version_of(self, path: str | None, base_model: str | None, sampler: str | None = None) -> int:
        """The version that a sampler was made of; the base model is version 0."""
        if path is None and sampler is None:
            self._check_model(base_model or "")
            return 0
        text = sampler if sampler is not None else _parts_of(path or "", _SAMPLER)[1]
        version = text.rpartition("@")[2]
        if not version.isdecimal() or len(version) > 18:
            raise _refused(f"expected a sampler of this run, got {shown(text)}")
        return int(version)

    async def _weights_info(self, request: Request) -> Response:
        body, terms = await self._bodies.parsed(request, MASTER, dict), self._driven.terms
        _parts_of(str(body.get("tinker_path")), _WEIGHTS)
        return _json(types.WeightsInfoResponse(base_model=terms.model, is_lora=True, lora_rank=terms.lora_rank or 1))

    # ---- sampling

    def _create_sampling_session(self, asked: types.CreateSamplingSessionRequest) -> BaseModel:
        version = self._version_of(asked.model_path, asked.base_model)
        name = f"{asked.session_id}:sample:{asked.sampling_session_seq_id}@{version}"
        return types.CreateSamplingSessionResponse(sampling_session_id=name)

    async def _sampler(self, request: Request) -> Response:
        name = request.path_params["sampler"]
        self._version_of(None, None, name)
        return _json(get_sampler_response.GetSamplerResponse(sampler_id=name, base_model=self._driven.terms.model))

    def _sample(self, asked: types.SampleRequest) -> BaseModel:
        _check_sample(asked)
        version = self._version_of(asked.model_path, asked.base_model, asked.sampling_session_id)
        request_id = f"{asked.sampling_session_id or next(self._numbers)}:{asked.seq_id}"
        names = [f"{request_id}:{index}" for index in range(asked.num_samples)]
        future = types.UntypedAPIFuture(request_id=request_id, sample_sequence_ids=names)
        if request_id in self.operations:
            return future
        token_ids = _tokens(asked.prompt, self._driven.terms)
        # A scoring of the prompt needs no worker: the SDK's `compute_logprobs` ignores the one token that it has to ask for.
        is_plain = asked.num_samples == 1 and asked.sampling_params == types.SamplingParams(max_tokens=1)
        is_scoring = bool(asked.prompt_logprobs) and is_plain
        oldest = self._fleet.newest_version - self._driven.terms.staleness_bound
        if not is_scoring and version < oldest:
            text = f"of version {oldest} or newer, which workers may hold, got version {version}"
            raise _refused(f"sampler: expected one {text}; it gives log-probabilities of prompts alone")
        answers: list[TokenAnswer] = []

        async def work() -> Response:
            try:
                await asyncio.gather(*(answer.whole for answer in answers))
                logprobs = await self._driven.prompt_logprobs(version, token_ids) if asked.prompt_logprobs else None
                return _sampled(asked, answers, logprobs)
            finally:
                for answer in answers:
                    self._fleet.leave(answer)

        try:
            for request in () if is_scoring else _requests(asked, token_ids, version):
                answers.append(self._fleet.generate(request))
            self.operations.begin(request_id, work)
        except CallRefused:
            for answer in answers:
                self._fleet.leave(answer)
            raise
        return future

    # ---- results

    async def _retrieve(self, request: Request) -> Response:
        body = await self._bodies.parsed(request, MASTER, dict)
        request_id = _parsed(FutureRetrieveRequest, body).request_id
        try:
            answer = await self.operations.result(request_id, POLL_S)
        except CallRefused as refused:
            if refused.status == 410:
                return error_response(refused)
            is_ours = refused.status >= 500 or refused.status in (409, 429)
            return _json(_failed(str(refused), "server" if is_ours else "user"))
        except EchoError as error:
            return _json(_failed(str(error), "user"))
        except Exception as error:  # noqa: BLE001 - the SDK would ask for ever for what is answered 500
            MISHAPS.note("an operation", "a training client", error)
            return _json(_failed(f"{type(error).__name__}; the learner's log says more", "server"))
        return answer or _json(TryAgainResponse(type="try_again", request_id=request_id, queue_state="active"))

    async def _cancel(self, request: Request) -> Response:
        request_id = str((await self._bodies.parsed(request, MASTER, dict)).get("request_id"))
        if ":sample:" in request_id:  # an operation of the training client cannot be taken back
            self.operations.cancel(request_id)
        return Response(status_code=204)

    async def _telemetry(self, request: Request) -> Response:
        async with self._bodies.read(request, MASTER):
            return _json(types.TelemetryResponse(status="accepted"))

    async def _unknown(self, request: Request) -> Response:
        text = f"{request.method} {request.url.path[:200]}: expected a route of training and sampling; echo2 has no such one"
        refused = CallRefused(404, "not_supported", text)
        return _json(self._refused_in_turn(await self._bodies.parsed(request, MASTER, dict), refused))


# ---- requests


def _parsed(kind: type[Kind], body: Mapping[str, object]) -> Kind:
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise MalformedMessage(f"{where}: {first['msg']}, got {shown(first['input'])}") from None


def _refused(text: str) -> CallRefused:
    return CallRefused(400, "invalid_request_error", text)


def _path(model_id: str, kind: str, name: str) -> str:
    """`tinker://CLIENT/weights/NAME` is a state on this disk, `tinker://CLIENT/sampler_weights/NAME@VERSION` a version."""
    return f"tinker://{model_id}/{kind}/{name}"


def _parts_of(path: str, kind: str) -> tuple[str, str]:
    """The training client of a path, and the name."""
    model_id, slash, name = path.removeprefix("tinker://").partition(f"/{kind}/")
    if not path.startswith("tinker://") or not slash:
        raise _refused(f"path: expected tinker://CLIENT/{kind}/NAME, got {shown(path)}")
    return model_id, name


def _name(name: str | None) -> str:
    if name is None or not _NAME.fullmatch(name):
        raise _refused(f"name: expected letters, digits, dots, hyphens and underscores, up to 100, got {shown(name)}")
    return name


def _tokens(prompt: types.ModelInput, terms: Terms) -> tuple[int, ...]:
    if not all(isinstance(chunk, types.EncodedTextChunk) for chunk in prompt.chunks):
        raise _refused("prompt: expected tokens alone; images and sound are not sampled from here")
    token_ids = tuple(token for chunk in prompt.chunks for token in cast(types.EncodedTextChunk, chunk).tokens)
    if not 1 <= len(token_ids) <= terms.context_tokens:
        raise _refused(f"prompt: expected 1 to {terms.context_tokens} tokens, got {len(token_ids)}")
    if not 0 <= min(token_ids) <= max(token_ids) < terms.vocabulary_size:
        text = f"from 0 to below {terms.vocabulary_size}, got {min(token_ids)} to {max(token_ids)!r:.40}"
        raise _refused(f"prompt: expected token ids {text}")
    return token_ids


def _loss_of(asked: proto.ForwardBackwardRequest) -> ClientLoss:
    known = {"clip_low_threshold": "clip_low", "clip_high_threshold": "clip_high", "beta": "beta"}
    newer = {name: value.number for name, value in asked.loss_fn_config_v2.items()}
    settings = newer or dict(asked.loss_fn_config)
    if odd := sorted(settings.keys() - known.keys()):
        raise MalformedMessage(f"loss_fn_config: expected {', '.join(known)}, got {odd[0]!r:.80}")
    return ClientLoss(asked.loss_fn, **{known[name]: value for name, value in settings.items()})


def _example(datum: proto.Datum, loss: ClientLoss, terms: Terms, number: int) -> Example:
    """Checks one example of a request. Raises `MalformedMessage`, which names what is wrong with it."""
    where = f"data[{number}]"
    if any(chunk.WhichOneof("chunk") != "encoded_text" for chunk in datum.model_input):
        raise MalformedMessage(f"{where}.model_input: expected tokens alone; images and sound are not trained on here")
    raw = b"".join(chunk.encoded_text.tokens for chunk in datum.model_input)
    token_ids = _array(raw, np.dtype(np.int32), f"{where}.model_input").astype(np.int64)
    count, wanted = len(token_ids), ("target_tokens", *LOSS_COLUMNS[loss.name])
    inputs = datum.loss_fn_inputs
    expected = f"{where}.loss_fn_inputs: expected {', '.join(wanted)} for {loss.name}"
    if odd := sorted(inputs.keys() - set(wanted)):
        raise MalformedMessage(f"{expected}, got {odd[0]!r:.80}")
    if missing := [name for name in wanted if name not in inputs and name != "weights"]:
        raise MalformedMessage(f"{expected}, {missing[0]} is missing")
    arrays = {name: _tensor(inputs[name], f"{where}.{name}") for name in wanted if name in inputs}
    targets = arrays.pop("target_tokens")
    shape, most = targets.shape, terms.context_tokens
    is_whole = targets.dtype == np.int64 and targets.ndim in (1, 2) and targets.size > 0
    if not 1 <= count <= most or not is_whole or len(targets) != count:
        text = f"expected 1 to {most} tokens and as many targets, got {count} and targets of shape {shape}, {targets.dtype}"
        raise MalformedMessage(f"{where}: {text}")
    for name, array in arrays.items():
        if array.shape != shape or not np.isfinite(array).all():
            raise MalformedMessage(f"{where}.{name}: expected finite numbers of shape {shape}, got shape {array.shape}")
    for ids in (token_ids, targets):
        if ids.min() < 0 or ids.max() >= terms.vocabulary_size:
            text = f"from 0 to below {terms.vocabulary_size}, got {ids.min()} to {ids.max()}"
            raise MalformedMessage(f"{where}: expected token ids {text}")
    if "weights" in wanted and "weights" not in arrays:
        arrays["weights"] = np.ones(shape)
    columns = {name: array.astype(np.float32).reshape(count, -1) for name, array in arrays.items()}
    return Example(token_ids, targets.astype(np.int64).reshape(count, -1), columns)


def _tensor(tensor: proto.Tensor, where: str) -> np.ndarray:
    """A dense array of the SDK's tensor."""
    if tensor.dtype not in (proto.DTYPE_FLOAT32, proto.DTYPE_INT64):
        raise MalformedMessage(f"{where}: expected float32 or int64, got type {tensor.dtype}")
    dtype: np.dtype[Any] = np.dtype(np.float32 if tensor.dtype == proto.DTYPE_FLOAT32 else np.int64)
    shape = tuple(tensor.shape)
    try:
        if not tensor.HasField("sparse_csr"):
            flat = _array(tensor.dense, dtype, where)
            return flat.reshape(shape) if shape else flat
        csr = tensor.sparse_csr
        rows, columns = (_array(data, np.dtype(np.int64), where) for data in (csr.crow_indices, csr.col_indices))
        if len(shape) != 2 or shape[0] * shape[1] > CHUNK_BYTES or len(rows) != shape[0] + 1:
            raise ValueError
        if rows.min() < 0 or rows.max() > len(columns) or rows[-1] - rows[0] != len(columns):  # before so many are made
            raise ValueError
        dense = np.zeros(shape, dtype)
        dense[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = _array(csr.values, dtype, where)
        return dense
    except (ValueError, IndexError):
        raise MalformedMessage(f"{where}: expected numbers that fill its shape, {shape}") from None


def _array(data: bytes, dtype: np.dtype[Any], where: str) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise MalformedMessage(f"{where}: expected whole numbers of {dtype.itemsize} bytes, got {len(data)} bytes")
    return np.frombuffer(data, dtype)


def _check_sample(asked: types.SampleRequest) -> None:
    for name in (
        "topk_prompt_logprobs", "topk_sample_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k", "record_stability_info"
    ):  # fmt: skip
        if getattr(asked, name):
            text = "for workers report the sampled tokens' log-probabilities alone, which do for loss_fn"
            raise _refused(f"{name}: expected none, {text} {', '.join(LOSS_COLUMNS)}")
    if not 1 <= asked.num_samples <= 64 * CHOICES_MAX:
        raise _refused(f"num_samples: expected 1 to {64 * CHOICES_MAX}, got {asked.num_samples}")


def _requests(asked: types.SampleRequest, token_ids: tuple[int, ...], version: int) -> list[TokenRequest]:
    params, left = asked.sampling_params, asked.num_samples
    stops = [params.stop] if isinstance(params.stop, str) else list(params.stop or ())
    requests: list[TokenRequest] = []
    while left:
        choices = min(left, CHOICES_MAX)
        requests.append(TokenRequest(
            token_ids, choices=choices, temperature=params.temperature, top_p=params.top_p, top_k=max(0, params.top_k),
            max_tokens=params.max_tokens, seed=None if params.seed is None else params.seed + len(requests),
            stops=tuple(stop for stop in stops if isinstance(stop, str)),
            stop_token_ids=tuple(stop for stop in stops if isinstance(stop, int)), ignores_end=params.stop is not None,
            min_version=version,
        ))  # fmt: skip
        left -= choices
    return requests


# ---- answers


def _json(answer: BaseModel) -> Response:
    return JSONResponse(answer.model_dump(mode="json"))


def _failed(text: str, category: str) -> RequestFailedResponse:
    return RequestFailedResponse(error=text, category=types.RequestErrorCategory(category))


def _output(logprobs: Sequence[np.ndarray], shapes: Sequence[tuple[int, ...]], total: float) -> bytes:
    """A record for each example, since they may have different numbers of targets a token."""
    records = []
    for values_NK, trailing in zip(logprobs, shapes, strict=True):
        data = np.ascontiguousarray(values_NK, np.float32).tobytes()
        offsets = np.array([0, len(data)], np.int64).tobytes()
        tensor = proto.BatchedTensor(data=data, offsets=offsets, dtype=proto.DTYPE_FLOAT32, trailing_shape=trailing)
        records.append(proto.ArrayRecord(fields={"logprobs": tensor}, num_datums=1))
    kind, metrics = "ArrayRecord", {"loss:sum": total}
    output = proto.ForwardBackwardOutput(loss_fn_output_type=kind, loss_fn_outputs=records, metrics=metrics)
    return cast(bytes, output.SerializeToString())


def _sampled(asked: types.SampleRequest, answers: Sequence[TokenAnswer], logprobs: np.ndarray | None) -> Response:
    response, versions = proto.SampleResponse(), set[int]()
    for answer in answers:
        for rollout in answer.rollouts:
            versions |= {int(span.version) for span in rollout.version_spans}
            is_cut = rollout.finish_reason is FinishReason.LENGTH
            response.sequences.add(
                stop_reason=proto.STOP_REASON_LENGTH if is_cut else proto.STOP_REASON_STOP,
                tokens=np.array(rollout.token_ids, np.int32).tobytes(),
                logprobs=np.array(answer.logprobs_of(rollout), np.float32).tobytes(),
            )
    for _ in range(asked.num_samples - len(response.sequences)):  # a scoring samples nothing
        response.sequences.add(stop_reason=proto.STOP_REASON_LENGTH)
    if logprobs is not None:
        scores = np.concatenate([np.full(1, np.nan, np.float32), logprobs])
        if asked.prompt_logprobs_last_n is not None:
            scores[: max(0, len(scores) - asked.prompt_logprobs_last_n)] = np.nan
        response.prompt_logprobs = scores.tobytes()
    headers = {"x-echo2-versions": f"{min(versions)}-{max(versions)}"} if versions else {}
    return Response(response.SerializeToString(), media_type=_PROTOBUF, headers=headers)
