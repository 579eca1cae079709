"""Episodes of an OpenEnv server as problems: the one of index i is the server's environment, reset with seed i."""

from __future__ import annotations

from collections.abc import Mapping

from echo2.base.errors import ConfigError, TaskError
from echo2.tasks.task import Reward, TaskInstance, checked_index

OPENENV_PLAYER = "echo2.gateway.openenv_agent:play"  # the harness that plays them
TURNS_MAX = 512  # as the gateway's GatewayLimits.calls_max


class OpenEnvTask:
    """`url`: of the server, http(s) or ws(s). `instructions`: what the model is told before the first observation. `turns`: most
    actions of an episode. `reset`: further arguments of the environment's reset."""

    is_cheap = False

    def __init__(self, url: str, instructions: str, size: int, turns: int, reset: Mapping[str, object]) -> None:
        if url.partition("://")[0] not in ("http", "https", "ws", "wss"):
            raise ConfigError(f"task openenv: expected url as http://HOST:PORT or ws://HOST:PORT, got {url!r:.120}")
        if not 1 <= turns <= TURNS_MAX:
            raise ConfigError(
                f"task openenv: expected 1 to {TURNS_MAX} turns, as many calls as an episode may make, got {turns}"
            )
        self.name, self.size, self._instructions = f"openenv/{url}", size, instructions
        self._told = {"url": url, "turns": turns, "reset": dict(reset)}

    def sample(self, index: int) -> TaskInstance:
        seed = checked_index(index, self.size, self.name)
        return TaskInstance(index, self._instructions, "", {**self._told, "seed": seed})

    def score(self, instance: TaskInstance, completion_text: str) -> Reward:
        raise TaskError(
            f'{self.name}: expected agent.harness = "{OPENENV_PLAYER}", through which the environment rewards'
        )
