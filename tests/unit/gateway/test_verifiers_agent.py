"""Agents and tools of the verifiers library play through the gateway as they are; runs where the library is installed, and uv."""

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from echo2.base.errors import ConfigError
from echo2.tasks.registry import make_task
from echo2.tasks.task import TaskSpec
from echo2.tasks.verifiers_task import PLAYER
from tests.patience import WAIT_S
from tests.unit.gateway.fakes import LetterCodec, RecordingFleet, completion, on_port

pytestmark = [pytest.mark.extras, pytest.mark.filterwarnings("ignore")]  # the library's own
TOOLS = """
import verifiers.v1 as vf


class CalcTools(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = None

    @vf.tool
    def add(self, a: int, b: int) -> str:
        "Adds two numbers."
        return str(a + b)


if __name__ == "__main__":
    CalcTools.run()
"""
TASKSET = """
import verifiers.v1 as vf
from echo2_calc.tools import CalcTools


class CalcData(vf.TaskData):
    answer: str


class CalcConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class CalcTask(vf.Task[CalcData, vf.State, CalcConfig]):
    @classmethod
    def toolsets(cls, config):
        return [CalcTools(config.tools)]

    @vf.reward
    async def exact(self, trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)


class CalcTasksetConfig(vf.TasksetConfig):
    count: int = 3
    task: CalcConfig = CalcConfig()


class Calc(vf.Taskset[CalcTask, CalcTasksetConfig]):
    def load(self):
        for n in range(self.config.count):
            yield CalcTask(CalcData(prompt=f"{n}+{n}?", answer=str(2 * n)), self.config.task)


__all__ = ["Calc"]
"""
GAME = """
import itertools
import verifiers.v1 as vf


class GameTask(vf.Task[vf.TaskData]):
    pass


class GameConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GameEnv(vf.Env[GameConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            first = await interaction.turn()
            second = await interaction.turn(f"after {first.last_reply}")
        interaction.trace.record_reward("won", float((first.last_reply + second.last_reply) == "ab"))


class Game(vf.Taskset[GameTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        for n in itertools.count():
            yield GameTask(vf.TaskData(prompt=f"board {n}"), self.config.task)


__all__ = ["Game", "GameEnv"]
"""
CALLS_THE_TOOL = (1,)


class Script(LetterCodec):
    """Reads one token as a call of the tool."""

    def decode(self, token_ids: tuple[int, ...], stops: tuple[str, ...], *, has_tools: bool) -> tuple[str, list[Any]]:
        if token_ids == CALLS_THE_TOOL:
            assert has_tools
            return "", [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 1}}}]
        return "".join(map(chr, token_ids)), []


@pytest.fixture(autouse=True)
def installed_taskset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verifiers.v1")
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if shutil.which("uv") is None:
        pytest.skip("verifiers starts its chat program by uv, which is not installed")
    files = {"echo2_calc/__init__.py": TASKSET, "echo2_calc/tools.py": TOOLS, "echo2_game/__init__.py": GAME}
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))


def told_of(spec: TaskSpec, index: int) -> Mapping[str, object]:
    instance = make_task(spec).sample(index)
    return {"index": instance.index, "messages": [], "answer": instance.answer, "metadata": dict(instance.metadata)}


def played(spec: TaskSpec, index: int, answers: list[str]) -> RecordingFleet:
    """Two episodes of a problem, one after the other, whose calls get the answers in their order."""

    async def scene() -> RecordingFleet:
        loop = asyncio.get_running_loop()

        def sample(group_id: str) -> None:
            loop.call_later(0.05, episodes.on_completion, group_id, completion(answers.pop(0)))

        fleet = RecordingFleet(sample)
        async with on_port(fleet, Script(), PLAYER, episode_s=120.0) as (episodes, _):
            for number in range(2):
                episodes.open_problem(f"a{number}", 1, told_of(spec, index))
                async with asyncio.timeout(WAIT_S):
                    while len(fleet.ends) <= number:
                        await asyncio.sleep(0.05)
        return fleet

    return asyncio.run(scene())


class GymServer(BaseHTTPRequestHandler):
    """A resource server of NeMo Gym: it rewards the text "4"."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        told: dict[str, object] = {}
        if self.path == "/verify":
            said = asked["response"]["output"][-1]["content"][0]["text"]
            told = {**asked, "reward": float(said == "4")}
        body = json.dumps(told).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


def test_the_librarys_tasksets_reach_nemo_gym(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"responses_create_params": {"input": [{"role": "user", "content": "2+2?"}]}}) + "\n")
    with ThreadingHTTPServer(("127.0.0.1", 0), GymServer) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        options = {"dataset": str(rows), "task": {"resources_url": f"http://127.0.0.1:{server.server_port}"}}
        fleet = played(TaskSpec("verifiers", {"taskset": "nemo_gym", "options": options, "agent": {}}), 0, ["4", "5"])
        server.shutdown()
    assert [end.reward for end in fleet.ends] == [1.0, 0.0], [end.failure for end in fleet.ends]
    assert "2+2?" in "".join(map(chr, next(iter(fleet.leases.values())).prompt_token_ids))


def test_a_taskset_with_its_own_environment_plays_in_it_as_textarena_and_openenv_do() -> None:
    args = {"taskset": "echo2_game", "options": {}, "agent": {"max_turns": 4}}
    with pytest.raises(ConfigError, match="expected size"):
        make_task(TaskSpec("verifiers", args))
    fleet = played(TaskSpec("verifiers", {**args, "size": 3}), 2, list("abba"))
    assert [end.reward for end in fleet.ends] == [1.0, 0.0]
    asked = ["".join(map(chr, lease.prompt_token_ids)) for lease in fleet.leases.values()]
    assert "board 2" in asked[0] and "after a" in asked[1] and "after b" in asked[3]
    assert [lease.chain for lease in fleet.leases.values()] == [None, 0, None, 1]


def test_a_taskset_with_tools_is_played_as_it_is_and_its_rewards_are_its_own() -> None:
    spec = TaskSpec("verifiers", {"taskset": "echo2_calc", "options": {"count": 2}, "agent": {"max_turns": 4}})

    call = chr(*CALLS_THE_TOOL)
    fleet = played(spec, 1, [call, "2", call, "3"])
    assert [end.reward for end in fleet.ends] == [1.0, 0.0], "1+1 is 2"
    assert [lease.chain for lease in fleet.leases.values()] == [None, 0, None, 1], "it goes on token for token"
    first, second = list(fleet.leases.values())[:2]
    assert second.prompt_token_ids[: len(first.prompt_token_ids) + 1] == (*first.prompt_token_ids, *CALLS_THE_TOOL)
    assert "[tool]" in "".join(map(chr, second.prompt_token_ids)) and "2" in "".join(map(chr, second.prompt_token_ids))
    assert not [name for name in os.environ if name.startswith("ECHO2_EPISODE_KEY")]
