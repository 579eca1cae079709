"""Tasksets of the verifiers library (0.4, its v1 API), with one completion each or played by its agents. An optional extra.

Guarantees: prompts and rewards are the taskset's own; a taskset with rewards that need a container is refused by naming them,
not silently scored 0.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections.abc import Mapping
from typing import Any

from echo2.base.errors import ConfigError, TaskError
from echo2.tasks.task import ChatMessage, Prompt, Reward, TaskInstance, checked_index

SIZE_MAX = 1_000_000  # more than a run draws; bounds an endless taskset
PLAYER = "echo2.gateway.verifiers_agent:play"  # the harness that plays tasksets with verifiers' own agents


class VerifiersTask:
    """Taskset `taskset` (the name of an installed package) with its own options; at most its first `size` tasks. `agent`: fields of
    verifiers' AgentConfig for the agent that plays them; None: each task is answered by one completion."""

    is_cheap = False

    def __init__(
        self,
        taskset: str,
        options: Mapping[str, object],
        size: int = SIZE_MAX,
        agent: Mapping[str, object] | None = None,
    ):
        self.name, self._agent = f"verifiers/{taskset}", agent
        self._told: dict[str, object] = {} if agent is None else {
            "taskset": taskset, "options": dict(options), "agent": dict(agent), "size": size
        }  # fmt: skip
        self._tasks = loaded(taskset, options, min(size, SIZE_MAX))
        self.size = len(self._tasks)
        for task in () if agent is not None else {type(task): task for task in self._tasks}.values():
            _refuse_container(task, taskset)

    def sample(self, index: int) -> TaskInstance:
        data = self._tasks[checked_index(index, self.size, self.name)].data
        metadata = {**self._told, "own_index": index} if self._told else {}
        prompt: Prompt = "" if self._agent is not None and data.prompt is None else _prompt(data)
        return TaskInstance(index, prompt, "", {"task_id": str(data.id or data.name or index), **metadata})

    def score(self, instance: TaskInstance, completion_text: str) -> Reward:
        if self._agent is not None:
            raise TaskError(f'{self.name}: expected agent.harness = "{PLAYER}", whose agents bring their rewards')
        task = self._tasks[instance.index]
        trace = _trace(task, instance.prompt, completion_text)
        asyncio.run(task.score(trace, None))
        if not trace.rewards:
            raise TaskError(f"{self.name} task {instance.index}: expected a reward, its taskset computed none")
        parts = {name: float(value) for name, value in trace.metrics.items() if value is not None}
        return Reward(float(trace.reward), parts)


def loaded(taskset: str, options: Mapping[str, object], size: int) -> list[Any]:
    try:
        from verifiers.v1.utils.loaders import load_taskset, taskset_class, taskset_config_type
    except ImportError as error:
        raise TaskError(f"verifiers/{taskset}: the package verifiers is not installed ({error})") from error
    try:
        if size >= SIZE_MAX and taskset_class(taskset).INFINITE:
            raise ConfigError(f"verifiers/{taskset}: expected size, how many of its endless tasks to take")
        config = taskset_config_type(taskset).model_validate({"id": taskset, **options})
        tasks = list(itertools.islice(load_taskset(config), size))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"verifiers/{taskset}: expected an installed taskset and options of it, got {error}"
        ) from error
    if not tasks:
        raise TaskError(f"verifiers/{taskset}: expected at least one task, found none")
    return tasks


def _refuse_container(task: Any, taskset: str) -> None:
    """Refuses a task whose rewards need a container. The library would skip them, and the incomplete reward would look real."""
    parameters = {fn.__name__: inspect.signature(fn).parameters.get("runtime") for fn in task.hooks("reward")}
    needing = [name for name, entry in parameters.items() if entry is not None and entry.default is entry.empty]
    if needing or task.NEEDS_CONTAINER:
        who = ", ".join(needing) or "its tasks"
        raise ConfigError(f"verifiers/{taskset}: expected rewards of the text alone, but {who} need a container")


def _prompt(data: Any) -> Prompt:
    if data.prompt is None:
        raise TaskError(f"verifiers task {data.idx}: expected a prompt, its user speaks first")
    messages = [ChatMessage("system", data.system_prompt)] if data.system_prompt else []
    if isinstance(data.prompt, str):
        return (*messages, ChatMessage("user", data.prompt)) if messages else data.prompt
    for message in data.prompt:
        if not isinstance(message.content, str):
            raise TaskError(f"verifiers task {data.idx}: expected text, got a message with other content")
        messages.append(ChatMessage(str(message.role), message.content))
    return tuple(messages)


def _trace(task: Any, prompt: Prompt, completion_text: str) -> Any:
    """Builds the trace that the library would have recorded for an agent that answered once."""
    import verifiers.v1 as verifiers

    kinds = {"system": verifiers.SystemMessage, "user": verifiers.UserMessage, "assistant": verifiers.AssistantMessage}
    chat = (ChatMessage("user", prompt),) if isinstance(prompt, str) else prompt
    messages = [kinds[message.role](content=message.content) for message in chat if message.role in kinds]
    nodes = [
        verifiers.MessageNode(parent=place - 1 if place else None, message=message)
        for place, message in enumerate(messages)
    ]
    answer = verifiers.AssistantMessage(content=completion_text)
    nodes.append(verifiers.MessageNode(parent=len(nodes) - 1, message=answer, sampled=True))
    return verifiers.Trace(
        task=verifiers.TraceTask(type=type(task).__name__, data=task.data),
        agent=verifiers.AgentInfo(config=verifiers.AgentConfig()),
        nodes=nodes,
        is_completed=True,
        ok=True,
    )
