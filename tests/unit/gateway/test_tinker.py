"""The SDK's own forms over the routes: what a training client sends, what is refused, what it reads. Skipped without the SDK."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.applications import Starlette

pytest.importorskip("tinker", reason="needs Tinker's SDK: pip install '.[tinker]'")

import torch
from tinker import types
from tinker.proto import tinker_public_pb2 as proto
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_proto_response

from echo2.base.rollout import AdamStep, ClientLoss, Example
from echo2.gateway import operations, tinker as gateway_tinker
from echo2.gateway.app import error_answer
from echo2.gateway.episodes import CallRefused
from echo2.gateway.generate import TokenAnswer, TokenRequest
from echo2.gateway.requests import CHOICES_MAX
from echo2.gateway.tinker import Terms, TinkerApi

pytestmark = pytest.mark.extras
Post = Callable[..., Awaitable[httpx.Response]]


class Recorder:
    """The trainer's port: `told` has the calls, in order. Log-probabilities are minus the targets."""

    terms = Terms("tiny", context_tokens=8, vocabulary_size=50, lora_rank=4, staleness_bound=2)

    newest_version = 7

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.broken: Exception | None = None  # raised by the next forward pass

    async def begin(self, saved: str, *, with_optimiser: bool) -> None:
        self.told.append(("begin", saved, with_optimiser))

    async def forward_backward(
        self, examples: Sequence[Example], loss: ClientLoss, *, is_trained: bool
    ) -> tuple[Sequence[np.ndarray], float]:
        self.told.append((loss, is_trained, examples))
        await asyncio.sleep(0)
        if self.broken is not None:
            error, self.broken = self.broken, None
            raise error
        return [-example.targets_NK.astype(np.float32) for example in examples], 2.5

    async def optim_step(self, step: AdamStep) -> Mapping[str, float]:
        self.told.append(step)
        return {"update_made": 1.0}

    async def forget_gradients(self) -> None:
        self.told.append("forgotten")

    def generate(self, request: TokenRequest) -> TokenAnswer:
        """Two requests at a time."""
        if len(self.told) == 2:
            raise CallRefused(429, "busy", "too many", 1.0)
        self.told.append("asked")
        return TokenAnswer(request, [], lambda rollout: (), asyncio.get_running_loop().create_future())

    def leave(self, answer: TokenAnswer) -> None:
        self.told.append("left")


@asynccontextmanager
async def played() -> AsyncIterator[tuple[Post, Recorder]]:
    """The routes over their trainer; `post` takes a path and JSON or the SDK's protobuf."""
    driven = Recorder()
    api = TinkerApi(driven, driven)  # type: ignore[arg-type]
    app = Starlette(routes=api.routes(), exception_handlers={Exception: error_answer, 500: error_answer})
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway/api/v1/") as client:

        async def post(path: str, body: Any) -> httpx.Response:
            return await client.post(path, **({"content": body} if isinstance(body, bytes) else {"json": body}))

        yield post, driven
    await api.operations.close()


async def session_of(post: Post) -> str:
    asked = {"tags": [], "user_metadata": None, "sdk_version": "0"}
    return str((await post("create_session", asked)).json()["session_id"])


async def model_of(post: Post, rank: int = 4) -> str:
    named = {"session_id": await session_of(post), "model_seq_id": 0, "base_model": "tiny"}
    asked = {**named, "lora_config": {"rank": rank}}
    future = (await post("create_model", asked)).json()
    return str((await post("retrieve_future", {"request_id": future["request_id"]})).json()["model_id"])


def passed(
    model_id: str, number: int, data: list[types.Datum], loss: str = "cross_entropy", *, is_scored: bool = False,
    **settings: float,
) -> bytes:  # fmt: skip
    asked = types.ForwardBackwardInput(data=data, loss_fn=loss, loss_fn_config=settings or None)
    request = types.ForwardBackwardRequest(forward_backward_input=asked, model_id=model_id, seq_id=number)
    message = forward_backward_request_to_proto(request)
    message.forward_only = is_scored
    return bytes(message.SerializeToString())


def tokens(ids: list[int]) -> dict[str, Any]:
    return {"chunks": [{"type": "encoded_text", "tokens": ids}]}


def datum(tokens: list[int], **inputs: Any) -> types.Datum:
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


async def test_chunks_in_any_order_reach_the_trainer_in_order_and_come_back_with_their_shapes() -> None:
    dense = datum([5, 6, 7], target_tokens=[6, 7, 8], logprobs=[-1.0, -2.0, -3.0], advantages=[0.0, 1.0, 0.5])
    wide = torch.zeros(4, 6, dtype=torch.int64)
    wide[2, 1], wide[3, 5] = 9, 11  # which the SDK sends as a sparse tensor
    sparse = datum([5, 6, 7, 8], target_tokens=wide, weights=(wide > 0).float())

    async with played() as (post, driven):
        model_id = await model_of(post)
        await post("optim_step", {"adam_params": {"learning_rate": 0.1}, "model_id": model_id, "seq_id": 3})
        await post("forward_backward", passed(model_id, 2, [sparse]))
        await post("forward_backward", passed(model_id, 1, [dense] * 2, "ppo", clip_high_threshold=1.5))
        answers = [await post("retrieve_future", {"request_id": f"{model_id}:{number}"}) for number in (1, 2, 3)]
        (loss, is_trained, two), (_, _, one), step = driven.told[1:]
        assert loss == ClientLoss("ppo", clip_high=1.5) and is_trained and len(two) == 2
        assert two[0].columns["advantages"][:, 0].tolist() == [0.0, 1.0, 0.5]
        assert (one[0].targets_NK == wide.numpy()).all() and (one[0].columns["weights"] == (wide > 0).numpy()).all()
        assert step == AdamStep(0.1, 0.9, 0.95, 1e-12) and answers[2].json() == {"metrics": {"update_made": 1.0}}
        first, second = (deserialize_proto_response(a.content, types.ForwardBackwardOutput) for a in answers[:2])
        assert first.metrics == {"loss:sum": 2.5}
        assert first.loss_fn_outputs[1]["logprobs"].to_numpy().tolist() == [-6, -7, -8]
        assert (second.loss_fn_outputs[0]["logprobs"].to_numpy() == -wide.numpy()).all()


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"num_samples": 2**40}, "num_samples: expected 1 to"),
        ({"sampling_session_id": "a:sample:1@4"}, "version 5 or newer, which workers may hold, got version 4"),
        ({"prompt": {"chunks": []}}, "expected 1 to 8 tokens, got 0"),
        ({"prompt": tokens([5] * 9), "prompt_logprobs": True}, "expected 1 to 8 tokens, got 9"),
        ({"prompt": tokens([-1])}, "from 0 to below 50, got -1"),
        ({"prompt": tokens([5, 50]), "prompt_logprobs": True}, "from 0 to below 50, got 5 to 50"),
        ({"record_stability_info": True}, "which do for loss_fn cross_entropy, importance_sampling"),
        ({"num_samples": 3 * CHOICES_MAX}, "too many"),
    ],
)
async def test_a_sampling_that_cannot_be_is_refused_before_anything_is_made(changed: dict[str, Any], told: str) -> None:
    params = {"sampling_params": {"max_tokens": 4}, "sampling_session_id": "a@7"}
    asked = {"num_samples": 1, "prompt": tokens([5]), **params}
    async with played() as (post, driven):
        answer = await post("asample", {**asked, **changed})
        assert answer.status_code in (400, 429) and told in answer.json()["error"]["message"]
        assert driven.told == ["asked", "asked", "left", "left"][: 4 * (answer.status_code == 429)]


@pytest.mark.parametrize("more", [{"num_samples": 2}, {"sampling_params": {"max_tokens": 1, "temperature": 0.5}}])
async def test_one_token_is_sampled_where_more_than_a_scoring_is_asked_for(more: dict[str, Any]) -> None:
    asked = {"prompt": tokens([5]), "sampling_params": {"max_tokens": 1}, "base_model": "tiny", "prompt_logprobs": True}
    async with played() as (post, driven):
        driven.newest_version = 0
        for changed, told in (({}, []), (more, ["asked"])):
            assert (await post("asample", {**asked, **changed})).status_code == 200 and driven.told == told


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("optim_step", {"adam_params": {"learning_rate": None}}, "learning_rate: Input should be a valid number"),
        ("load_weights", {"path": "tinker://x/sampler_weights/a", "optimizer": True}, "expected tinker://CLIENT"),
        ("save_weights_external", {"path": "s3://x"}, "echo2 has no such one"),
    ],
)
async def test_an_operation_that_is_refused_keeps_none_behind_it_waiting(path: str, body: Any, told: str) -> None:
    async with played() as (post, driven):
        model_id = await model_of(post)
        await post(path, body | {"model_id": model_id, "seq_id": 1})
        await post("forward_backward", passed(model_id, 2, [datum([5, 6], target_tokens=[1, 2])]))
        refused = (await post("retrieve_future", {"request_id": f"{model_id}:1"})).json()
        assert told in refused["error"] and refused["category"] == "user"
        assert (await post("retrieve_future", {"request_id": f"{model_id}:2"})).status_code == 200
        assert len(driven.told) == 2


async def test_a_training_client_whose_place_was_taken_is_not_made_again_under_its_number() -> None:
    async with played() as (post, _):
        first = await model_of(post)
        asked = {"session_id": first.split(":")[0], "base_model": "tiny", "lora_config": {"rank": 4}}
        assert (await post("create_model", {**asked, "model_seq_id": 1})).status_code == 200
        again = await post("create_model", {**asked, "model_seq_id": 0})
        assert again.status_code == 400 and "a new model_seq_id" in again.json()["error"]["message"]


async def test_a_client_that_slept_keeps_its_place_unless_another_took_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(gateway_tinker, "monotonic", lambda: now[0])
    async with played() as (post, _):
        first, second = (await model_of(post)).split(":")[0], await session_of(post)
        now[0] += 100.0
        for session in (second, first):
            assert (await post("session_heartbeat", {"session_id": session})).status_code == 200
        asked = {"session_id": second, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}}
        refused = await post("create_model", asked)
        assert refused.status_code == 400 and "expected one training client a run" in refused.text
        now[0] += 100.0
        assert (await post("create_model", asked)).status_code == 200
        monkeypatch.setattr(gateway_tinker, "SESSIONS_MAX", 2)
        await session_of(post)
        heard = [(await post("session_heartbeat", {"session_id": session})).status_code for session in (first, second)]
        assert heard == [404, 200], "of too many the one that was silent for longest has gone"


@pytest.mark.parametrize(
    ("example", "loss", "told"),
    [
        (datum([5, 60], target_tokens=[1, 2]), "cross_entropy", "token ids from 0 to below 50, got 5 to 60"),
        (datum([5, 6], target_tokens=[1, 2, 3]), "cross_entropy", "as many targets, got 2 and targets of shape"),
        (datum(list(range(1, 10)), target_tokens=[1] * 9), "cross_entropy", "expected 1 to 8 tokens"),
        (datum([5, 6], target_tokens=[1, 2], weights=[1.0, float("nan")]), "cross_entropy", "expected finite numbers"),
        (datum([5, 6], target_tokens=[1, 2], logprobs=[0.0, 0.0]), "ppo", "advantages is missing"),
        (datum([5, 6], target_tokens=[1, 2], advantages=[0.0, 0.0]), "cross_entropy", "got 'advantages'"),
        (datum([5, 6], target_tokens=[1, 2]), "custom", "loss_fn: expected one of cross_entropy"),
    ],
)  # fmt: skip
async def test_a_wrong_example_is_refused_and_no_step_is_made_of_it(example: types.Datum, loss: str, told: str) -> None:
    async with played() as (post, driven):
        model_id = await model_of(post)
        await post("forward_backward", passed(model_id, 1, [datum([5, 6], target_tokens=[1, 2])]))
        await post("forward_backward", passed(model_id, 2, [example], loss))
        await post("forward_backward", passed(model_id, 3, [example], loss, is_scored=True))  # which takes nothing back
        await post("optim_step", {"adam_params": {}, "model_id": model_id, "seq_id": 4})
        answers = [(await post("retrieve_future", {"request_id": f"{model_id}:{n}"})).json() for n in (2, 4)]
        assert told in answers[0]["error"] and answers[0]["category"] == "user"
        assert "no step is made" in answers[1]["error"] and told in answers[1]["error"]
        assert len(driven.told) == 3 and driven.told[-1] == "forgotten"


async def test_no_step_is_made_of_a_gradient_that_broke_off_and_a_loaded_state_begins_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The SDK sends the step before it knows how the gradient ended. Number 7 was refused unread, as its body was too large."""
    monkeypatch.setattr(operations, "MISSING_S", 0.01)
    good = datum([5, 6], target_tokens=[1, 2])
    async with played() as (post, driven):
        model_id = await model_of(post)
        load = {"path": f"tinker://{model_id}/weights/a", "optimizer": True, "model_id": model_id, "seq_id": 4}
        step = {"adam_params": {}, "model_id": model_id}
        for number, path, body in (
            (1, "forward_backward", passed(model_id, 1, [good])), (2, "optim_step", step | {"seq_id": 2}),
            (3, "forward_backward", passed(model_id, 3, [good])), (4, "load_weights", load),
            (5, "forward_backward", passed(model_id, 5, [good])), (6, "optim_step", step | {"seq_id": 6}),
            (8, "optim_step", step | {"seq_id": 8}), (9, "optim_step", step | {"seq_id": 9}),
        ):  # fmt: skip
            if number in (1, 3):
                driven.broken = RuntimeError("CUDA out of memory")  # in the second of two micro-batches
            await post(path, body)
            answer = await post("retrieve_future", {"request_id": f"{model_id}:{number}"})
            if number in (2, 8):
                assert "no step is made and its gradients are dropped" in answer.json()["error"]
                assert driven.told[-1] == "forgotten" and ("number 7 did not come" in answer.text) == (number == 8)
        step_made = AdamStep(1e-4, 0.9, 0.95, 1e-12)
        assert driven.told[-3:] == [step_made, "forgotten", step_made], "of the gradient since the state was loaded"


async def test_numbers_that_no_sdk_sends_are_refused_before_they_take_memory_or_reach_the_trainer() -> None:
    def no_numbers(tensor: proto.Tensor) -> None:
        tensor.dtype, tensor.dense = proto.DTYPE_FLOAT32, np.array([1.0, np.nan], np.float32).tobytes()

    def too_many(tensor: proto.Tensor) -> None:
        del tensor.shape[:]
        tensor.shape.extend([2, 3])
        rows = np.array([0, 1 << 40, 1 << 40], np.int64).tobytes()
        one = np.zeros(1, np.int64).tobytes()
        tensor.sparse_csr.CopyFrom(proto.SparseCsr(crow_indices=rows, col_indices=one, values=one))

    def far_around(tensor: proto.Tensor) -> None:
        del tensor.shape[:]
        tensor.shape.extend([4, 3])
        rows = np.array([0, 1 << 62, -1 << 63, -1 << 62, 0], np.int64).tobytes()  # four times 2^62 more, which is 0
        tensor.sparse_csr.CopyFrom(proto.SparseCsr(crow_indices=rows))

    fill = "numbers that fill its shape"
    for change, told in ((no_numbers, "as many targets"), (too_many, fill), (far_around, fill)):
        async with played() as (post, driven):
            model_id = await model_of(post)
            asked = passed(model_id, 1, [datum([5, 6], target_tokens=[1, 2])])
            message = proto.ForwardBackwardRequest.FromString(asked)
            change(message.data[0].loss_fn_inputs["target_tokens"])
            await post("forward_backward", message.SerializeToString())
            answer = (await post("retrieve_future", {"request_id": f"{model_id}:1"})).json()
            assert told in answer["error"] and answer["category"] == "user" and len(driven.told) == 1


async def test_what_is_not_done_here_is_refused_at_the_first_request_that_asks_for_it() -> None:
    async with played() as (post, driven):
        session = {"session_id": "a", "model_seq_id": 0, "base_model": "tiny"}
        rank = await post("create_model", session | {"lora_config": {"rank": 8}})
        part = await post("create_model", session | {"lora_config": {"rank": 4, "train_attn": False}})
        optimiser = await post("create_model", session | {"optimizer_config": {"type": "dimuon", "version": 1}})
        route = await post("create_custom_loss", {})
        prompt = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]}, "sampling_params": {}}
        topk = await post("asample", prompt | {"base_model": "tiny", "topk_sample_logprobs": 3})
        texts = [answer.json()["error"]["message"] for answer in (rank, part, optimiser, route, topk)]
        assert "lora_config.rank: expected 4" in texts[0] and "an adapter on attention and MLP layers" in texts[1]
        assert "expected adamw, got 'dimuon'" in texts[2] and "echo2 has no such one" in texts[3]
        assert "topk_sample_logprobs: expected none" in texts[4] and driven.told == []
