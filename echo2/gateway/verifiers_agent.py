"""Plays tasksets of the verifiers library (0.4) through the gateway, with the library's own agents, turns and tools.

    [task]   name = "verifiers", args = {taskset = "...", agent = {max_turns = 8}}, trusted_rewards = true
    [agent]  harness = "echo2.gateway.verifiers_agent:play"

Guarantees: rewards are the taskset's own; an episode in which anything but the model failed is lost, not scored 0; all episodes
of a taskset share one set of servers, which run while any of them plays and restart after EPISODES_MAX episodes, since the
library keeps what it allocates for each episode.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from echo2.base.errors import TaskError
from echo2.gateway.harness import Episode
from echo2.tasks.verifiers_task import loaded

_HARNESS = {"id": "null"}  # a chat with the task's tools; the harness itself executes nothing
_RUNTIME = {"type": "subprocess"}  # the only one that needs neither docker nor an account
EPISODES_MAX = 256  # the library keeps memory of each episode
_numbers = itertools.count()
_stages: dict[str, _ServedTaskset] = {}


async def play(episode: Episode) -> float:
    """Plays one episode and returns its reward. Raises TaskError if anything but the model's answer failed."""
    from verifiers.v1.clients import EvalClientConfig, ModelContext

    meta = episode.problem["metadata"]
    key_name = f"ECHO2_EPISODE_KEY_{next(_numbers)}"  # the library reads keys only from the environment
    os.environ[key_name] = episode.api_key
    try:
        client = EvalClientConfig(base_url=episode.base_url, api_key_var=key_name)
        async with _playing(meta) as stage:
            played = await stage.env.run_episode(stage.tasks[int(meta["own_index"])], ModelContext("policy", client))
    finally:
        del os.environ[key_name]
    errors = [*played.errors, *(error for trace in played.traces for error in trace.errors)]
    if not played.ok or not played.traces:
        raise TaskError(f"verifiers/{meta['taskset']}: {errors[0].type}: {errors[0].message}" if errors else "no trace")
    return float(played.traces[0].reward)


class _ServedTaskset:
    """A taskset's environment, and the servers that its episodes share, run by one asyncio task."""

    def __init__(self, meta: dict[str, Any]) -> None:
        from verifiers.v1.configs.agent import AgentConfig, agent_config_fields
        from verifiers.v1.utils.loaders import env_config_type, environment_class, taskset_config_type

        name = str(meta["taskset"])
        agent = AgentConfig.model_validate({"harness": dict(_HARNESS), "runtime": dict(_RUNTIME), **meta["agent"]})
        taskset = taskset_config_type(name).model_validate({"id": name, **meta["options"]})
        config = env_config_type(name)  # of the taskset's own environment, or of one that only lets the agent play
        seats = list(agent_config_fields(config(taskset=taskset)))
        if len(seats) != 1:
            raise TaskError(f"verifiers/{name}: expected an environment of one agent, got {', '.join(seats)}")
        self.env: Any = environment_class(name)(config(taskset=taskset, **{seats[0]: agent}))
        self.tasks: list[Any] = []
        self._load = partial(loaded, meta["taskset"], meta["options"], int(meta["size"]))
        self.players = self.episodes = 0
        self._is_over = asyncio.Event()
        self._is_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._serving = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        try:
            self.tasks = await asyncio.to_thread(self._load)  # seconds, for large ones
            async with self.env.serving():
                self._is_ready.set_result(None)
                await self._is_over.wait()
        except Exception as error:
            if self._is_ready.done():
                raise
            self._is_ready.set_exception(error)  # raised again in every episode that awaits `ready`

    async def ready(self) -> None:
        await asyncio.shield(self._is_ready)

    async def end(self) -> None:
        self._is_over.set()
        await asyncio.gather(self._serving, return_exceptions=True)


@asynccontextmanager
async def _playing(meta: dict[str, Any]) -> AsyncIterator[_ServedTaskset]:
    name = json.dumps([meta["taskset"], meta["options"], meta["agent"]], sort_keys=True)
    stage = _stages.get(name)
    if stage is None:
        stage = _stages[name] = _ServedTaskset(meta)
    stage.players += 1
    stage.episodes += 1
    if stage.episodes >= EPISODES_MAX and _stages.get(name) is stage:
        del _stages[name]
    try:
        await stage.ready()
        yield stage
    finally:
        stage.players -= 1
        if not stage.players:
            if _stages.get(name) is stage:
                del _stages[name]
            await stage.end()
