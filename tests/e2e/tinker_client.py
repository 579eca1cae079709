"""A client that trains by the stock SDK in a process of its own; prints one JSON object. Arguments: URL, key, model, what."""

import json
import sys
from typing import Any

import tinker
from tinker import types

PROMPT, ADAM = [5, 6, 7], types.AdamParams(learning_rate=3e-3)
SEQUENCE = [5, 6, 7, 8, 9, 10, 11, 12]


def supervised(client: Any, steps: int) -> list[float]:
    """The loss by step. Both requests are sent before either is waited for; the first step's examples travel in two chunks."""
    losses = []
    for step in range(steps):
        count = 4 if step else 300
        example = types.Datum(
            model_input=types.ModelInput.from_ints(SEQUENCE[:-1]),
            loss_fn_inputs={"target_tokens": SEQUENCE[1:], "weights": [1.0 / count] * 7},
        )
        passed = client.forward_backward([example] * count, "cross_entropy")
        stepped = client.optim_step(ADAM)
        losses.append(passed.result().metrics["loss:sum"])
        assert stepped.result().metrics["update_made"] == 1.0
    return losses


def reinforced(client: Any, steps: int) -> list[float]:
    """The mean reward by step: the share of sampled tokens that are 6, a quarter at first. Each step samples from the last one."""
    rewards = []
    for _ in range(steps):
        sampler = client.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=6, stop=[])
        groups = [sampler.sample(types.ModelInput.from_ints(PROMPT), 16, params) for _ in range(2)]
        sequences = [sequence for group in groups for sequence in group.result().sequences]
        scores = [sum(token == 6 for token in sequence.tokens) / 6 for sequence in sequences]
        mean = sum(scores) / len(scores)
        rewards.append(mean)
        data = []
        for sequence, score in zip(sequences, scores, strict=True):
            before = [0.0] * (len(PROMPT) - 1)
            inputs = {
                "target_tokens": PROMPT[1:] + sequence.tokens, "logprobs": before + sequence.logprobs,
                "advantages": before + [(score - mean) / len(scores)] * 6,
            }  # fmt: skip
            tokens = types.ModelInput.from_ints(PROMPT + sequence.tokens[:-1])
            data.append(types.Datum(model_input=tokens, loss_fn_inputs=inputs))
        passed = client.forward_backward(data, "importance_sampling")
        client.optim_step(ADAM).result()
        passed.result()
    return rewards


def told(ask: Any) -> str:
    try:
        ask().result()
    except Exception as error:  # noqa: BLE001 - the SDK's many
        return str(error)
    return "done"


def teacher(client: Any) -> dict[str, Any]:
    """What a sampler with a name answers before and after three more versions, and what the first of these after the others."""
    sequence, params = types.ModelInput.from_ints(SEQUENCE), types.SamplingParams(max_tokens=1)
    path = client.save_weights_for_sampler("teacher").result().path
    named = client.create_sampling_client(path).result()
    before = named.compute_logprobs(sequence).result()[1:]
    later = []
    for _ in range(3):
        supervised(client, 1)
        later.append(client.save_weights_and_get_sampling_client().result())
    return {
        "before": before, "after": named.compute_logprobs(sequence).result()[1:],
        "newest": later[-1].compute_logprobs(sequence).result()[1:],
        "gone": [
            told(lambda: named.sample(sequence, 1, params)), told(lambda: later[0].compute_logprobs(sequence))
        ],
    }  # fmt: skip


def refusals(service: Any, client: Any, model: str, url: str, key: str) -> list[str]:
    """What it is told when it asks for what is not done."""
    example = types.Datum(
        model_input=types.ModelInput.from_ints(PROMPT[:-1]), loss_fn_inputs={"target_tokens": PROMPT[1:]}
    )
    image = types.ModelInput(chunks=[types.ImageChunk(data=b"x", format="png")])
    pictured = types.Datum(model_input=image, loss_fn_inputs=example.loss_fn_inputs)
    other = tinker.ServiceClient(base_url=url, api_key=f"tml-{key}")
    return [
        told(lambda: other.create_lora_training_client(base_model=model, rank=8)),
        told(lambda: service.create_lora_training_client(base_model="Qwen/Qwen3-8B", rank=8)),
        told(lambda: client.forward_backward([example], "gspo")),
        told(lambda: client.optim_step(ADAM)),
        told(lambda: client.forward_backward([pictured], "cross_entropy")),
    ]  # fmt: skip


def main(url: str, key: str, model: str, what: str) -> dict[str, Any]:
    service = tinker.ServiceClient(base_url=url, api_key=f"tml-{key}")
    if what == "first":
        client = service.create_lora_training_client(base_model=model, rank=8).result()
        losses = supervised(client, 12)
        saved = client.save_state("taught").result().path
        sampler = client.save_weights_and_get_sampling_client().result()
        scores = sampler.compute_logprobs(types.ModelInput.from_ints(SEQUENCE)).result()
        assert scores[0] is None
        base = service.create_sampling_client(base_model=model).result()
        of_base = base.compute_logprobs(types.ModelInput.from_ints(SEQUENCE)).result()
        return {
            "losses": losses, "saved": saved, "scored": -sum(scores[1:]), "base": -sum(of_base[1:]),
            "teacher": teacher(client), "refusals": refusals(service, client, model, url, key),
        }  # fmt: skip
    client = service.create_training_client_from_state_with_optimizer(what).result()
    again = supervised(client, 1)
    client = service.create_lora_training_client(base_model=model, rank=8).result()
    return {"losses": again, "rewards": reinforced(client, 12)}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:5])))
