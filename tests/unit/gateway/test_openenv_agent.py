"""Environments of an OpenEnv server, in a process of its own, play through the gateway."""

import asyncio
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from echo2.base.errors import ConfigError, TaskError
from echo2.gateway.episodes import GatewayLimits
from echo2.gateway.harness import Episode
from echo2.gateway.openenv_agent import OPENINGS_MAX, ActionRefused, OpenEnvServer, play
from echo2.tasks.built_in import OPENENV_PLAYER, TURNS_MAX
from echo2.tasks.registry import make_task
from echo2.tasks.task import TaskSpec
from tests.e2e.cluster import ROOT
from tests.patience import WAIT_S
from tests.unit.gateway.fakes import End, RecordingFleet, completion, on_port

pytest.importorskip("websockets")
pytestmark = pytest.mark.filterwarnings("ignore")  # the library's own
told: list[str] = []  # what each call's model read


@contextmanager
def serving(*words: str) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [sys.executable, "-m", "tests.unit.gateway.openenv_server", str(port), *words]
    with subprocess.Popen(command, cwd=ROOT) as process:
        try:
            yield port, process
        finally:
            process.kill()


def played(port: int, seed: int, said: list[str], turns: int = 8, at_call: Callable[[], object] = int) -> End:
    """The end of an episode of this seed, in which the policy says these texts. `at_call`: done at each call."""

    async def scene() -> End:
        while True:  # until the server listens
            try:
                (await asyncio.open_connection("127.0.0.1", port))[1].close()
                break
            except OSError:
                await asyncio.sleep(0.05)
        loop, texts = asyncio.get_running_loop(), list(said)

        def sample(group_id: str) -> None:
            at_call()
            loop.call_soon(episodes.on_completion, group_id, completion(texts.pop(0)))

        fleet = RecordingFleet(sample)
        args = {"url": f"ws://127.0.0.1:{port}", "turns": turns, "size": 100}
        metadata = dict(make_task(TaskSpec("openenv", args)).sample(seed).metadata)
        async with on_port(fleet, harness=OPENENV_PLAYER, episode_s=120.0) as (episodes, _):
            episodes.open_problem("a", 1, {"index": seed, "messages": [], "answer": "", "metadata": metadata})
            while not fleet.ends:
                await asyncio.sleep(0.02)
        told.extend("".join(map(chr, lease.prompt_token_ids)) for lease in fleet.leases.values())
        return fleet.ends[0]

    return asyncio.run(asyncio.wait_for(scene(), WAIT_S))


def test_an_environment_of_texts_is_played_to_its_end_and_its_rewards_add_up() -> None:
    with serving() as (port, _):
        assert played(port, 17, ["3", "x", "9", "7"]).reward == pytest.approx(0.8), "two wrong guesses, and one right"
        history = told.pop()
        assert played(port, 17, ["3", "9"], turns=2).reward == pytest.approx(-0.2), "turns end with what there is"
    assert "Guess a digit." in history and "more" in history and "less" in history
    assert "error: EXECUTION_ERROR" in history and "not a digit" in history, "what it refused is told, and it goes on"


def test_actions_of_several_fields_are_json_and_the_schema_is_told() -> None:
    with serving("json") as (port, _):
        assert played(port, 5, ["five?", 'I say {"guess": 5, "sure": true}.']).reward == 1.0
    history = told.pop()
    assert '"sure"' in history and "expected one action as a JSON object" in history


def test_an_episode_whose_server_is_gone_is_lost_and_says_which() -> None:
    with serving() as (port, process):
        end = played(port, 5, ["4", "3", "5"], at_call=process.kill)
    assert end.reward is None and f"openenv ws://127.0.0.1:{port}: expected an answer to step" in end.failure, end
    with pytest.raises(TaskError, match="expected an OpenEnv server"):
        asyncio.run(play(Episode("", "", {"messages": [], "metadata": {"url": f"ws://127.0.0.1:{port}"}})))
    with pytest.raises(ConfigError, match="expected url as http"):
        make_task(TaskSpec("openenv", {"url": "here:8000"}))
    with pytest.raises(ConfigError, match=f"expected 1 to {GatewayLimits(1, 1, 1, 1).calls_max} turns"):
        make_task(TaskSpec("openenv", {"url": "ws://here:8000", "turns": TURNS_MAX + 1}))


def test_a_reward_that_is_no_finite_number_is_the_servers_fault_and_braces_without_end_are_the_models() -> None:
    class Socket:
        async def send(self, _: str) -> None: ...

        async def recv(self) -> str:
            return '{"type": "observation", "data": {"observation": {}, "reward": NaN, "done": false}}'

    server = OpenEnvServer("ws://here", Socket(), {"properties": {"a": {"type": "integer"}, "b": {}}})
    with pytest.raises(TaskError, match="expected an observation with a finite reward"):
        asyncio.run(server.ask("step", {}))
    assert server.action_of("{" * (OPENINGS_MAX - 1) + '{"a": 1}') == {"a": 1}
    with pytest.raises(ActionRefused, match="expected one action as a JSON object"):
        server.action_of("{" * OPENINGS_MAX + '{"a": 1}')
