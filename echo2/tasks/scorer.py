"""Runs inside the containment (contain/inside): computes rewards and steps environments.

Guarantees: only the handler's `answer`, which runs in a fork of its own for each request, reads completions; instances are
drawn and packages imported before the fork. Whatever a task raises becomes an answer.

Request {index, text} asks for the reward of a completion; the answer is {value, parts}. With {stop} it asks for instances up to it
as well, and the answer's value is -1 if one of them fails. Request {index, completions} asks for the
world's answer to an episode's last completion; the answer is {messages} or {value, parts}. If the task raises, the answer is
{error, is_memory}.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import cast

from echo2.base.errors import EchoError, TaskError
from echo2.base.units import described
from echo2.contain.inside import Body, Handler, serve
from echo2.contain.messages import error_text, shown
from echo2.tasks.registry import is_environment, is_users_own, make_environment_source, make_task
from echo2.tasks.task import EnvironmentSource, Observation, Reward, Task, TaskInstance, spec_from_json

INSTANCES_CACHED = 256  # 16 steps of the default 16 prompts; a miss costs a call of `sample`

Answer = dict[str, object]


def scored(task: Task, instance: TaskInstance, text: str) -> Answer:
    return _caught(lambda: _reward(task.score(instance, text)))


def _caught(work: Callable[[], Answer]) -> Answer:
    try:
        return work()
    except MemoryError:
        return {"error": "memory limit reached", "is_memory": True}
    except BaseException as error:  # noqa: BLE001 - the user's code, or pytest.fail; counted and reported by the parent
        text = error_text(error) if isinstance(error, EchoError) else shown(described(error))
        return {"error": text, "is_memory": False}


def _reward(reward: Reward) -> Answer:
    """As JSON's own numbers: numpy's and torch's are of other types."""
    if not isinstance(reward, Reward):
        raise TaskError(f"score: expected a Reward, got {reward!r:.80}")
    return {"value": float(reward.value), "parts": {name: float(number) for name, number in reward.parts.items()}}


def _make(setup: str) -> Handler:
    """Makes the request handler for the task or the environments that `setup` (a TaskSpec as JSON) describes."""
    spec = spec_from_json(setup)
    if is_environment(spec):
        source = make_environment_source(spec)

        def stepped(body: Body) -> Answer:
            completions = [str(text) for text in cast(list[object], body["completions"])]
            observation = replayed(source, int(str(body["index"])), completions)
            if not isinstance(observation, Observation):
                raise TaskError(f"step: expected an Observation, got {observation!r:.80}")
            if observation.reward is not None:
                return _reward(observation.reward)
            return {"messages": [[message.role, message.content] for message in observation.messages]}

        return Handler(lambda body: json.dumps(_caught(lambda: stepped(body))).encode())
    task = make_task(spec)
    sample = lru_cache(maxsize=INSTANCES_CACHED)(task.sample)
    if not is_users_own(spec):  # so that the scorer's lazy imports are loaded before the first fork
        for text in ("", (answer := task.sample(0).answer), f"\\boxed{{{answer}}}"):
            scored(task, task.sample(0), text)

    def answered(body: Body) -> bytes:
        first, text = int(str(body["index"])), str(body["text"])
        others = range(first + 1, int(str(body.get("stop", first + 1))))
        fails = any("error" in scored(task, task.sample(index), text) for index in others)
        return json.dumps({"value": -1.0, "parts": {}} if fails else scored(task, sample(first), text)).encode()

    return Handler(answered, prepare=lambda body: sample(int(str(body["index"]))))


def replayed(source: EnvironmentSource, index: int, completions: Sequence[str]) -> Observation:
    """Plays an episode again up to the last of `completions`, one or more, and returns the world's answer to it. Raises `TaskError`
    if the episode is over before."""
    environment = source.open(index)
    environment.reset()
    for text in completions[:-1]:
        if environment.step(text).is_done:
            raise TaskError(f"{source.name} episode {index}: expected no completion after its end")
    return environment.step(completions[-1])


if __name__ == "__main__":
    serve(_make)
