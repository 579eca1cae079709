"""Agents and tools of the verifiers library play through the gateway as they are; runs where the library is installed, and uv."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from echo2.gateway import events as e
from echo2.gateway.limits import GatewayLimits
from echo2.gateway.runtime.app import GatewayApp
from echo2.gateway.runtime.desk import GatewayDesk
from echo2.gateway.runtime.harness import Harnesses, make_harness
from echo2.gateway.runtime.server import GatewayPort
from echo2.gateway.sessions import Sessions
from echo2.tasks.runtime.registry import make_task
from echo2.tasks.runtime.verifiers_task import PLAYER
from echo2.tasks.task import TaskSpec
from tests.unit.gateway.test_sessions import Letters

pytestmark = pytest.mark.filterwarnings("ignore")  # the library's own
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
CALLS_THE_TOOL = (1,)


class Script(Letters):
    """Reads one token as a call of the tool."""

    def said(self, token_ids: tuple[int, ...], stops: tuple[str, ...], *, has_tools: bool) -> tuple[str, list[Any]]:
        if token_ids == CALLS_THE_TOOL:
            assert has_tools
            return "", [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 1}}}]
        return "".join(map(chr, token_ids)), []


class Fleet:
    """Calls the tool first, then says `answers` in their order, an episode after the other."""

    def __init__(self, answers: Sequence[str]) -> None:
        self.answers, self.asked, self.ends = list(answers), list[e.Ask](), list[e.EndEpisode]()
        self.desk: GatewayDesk

    def ask(self, asked: e.Ask) -> tuple[str, int]:
        self.asked.append(asked)
        group_id = f"{asked.root}.0.{len(self.asked)}"
        tokens = CALLS_THE_TOOL if asked.chain is None else tuple(map(ord, self.answers.pop(0)))
        sampled = e.CallTokens(group_id, tokens, (-0.5,) * len(tokens), (0,) * len(tokens), is_cut=False)
        asyncio.get_running_loop().call_later(0.05, self.desk.tell, sampled)
        return group_id, 0

    def ended(self, ended: e.EndEpisode) -> None:
        self.ends.append(ended)

    async def score(self, root: str, token_ids: tuple[int, ...]) -> e.EpisodeRewarded | str:
        raise AssertionError("the taskset gives the reward")


@pytest.fixture(autouse=True)
def installed_taskset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verifiers.v1")
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if shutil.which("uv") is None:
        pytest.skip("verifiers starts its chat program by uv, which is not installed")
    package = tmp_path / "echo2_calc"
    package.mkdir()
    (package / "__init__.py").write_text(TASKSET)
    (package / "tools.py").write_text(TOOLS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))


def told_of(spec: TaskSpec, index: int) -> Mapping[str, object]:
    instance = make_task(spec).sample(index)
    return {"index": instance.index, "messages": [], "answer": instance.answer, "metadata": dict(instance.metadata)}


def test_a_taskset_with_tools_is_played_as_it_is_and_its_rewards_are_its_own() -> None:
    spec = TaskSpec("verifiers", {"taskset": "echo2_calc", "options": {"count": 2}, "agent": {"max_turns": 4}})

    async def scene() -> Fleet:
        fleet = Fleet(["2", "3"])
        sessions = Sessions(GatewayLimits(100_000, 64), Script(), lambda: os.urandom(8).hex(), has_harness=True)
        desk = fleet.desk = GatewayDesk(sessions, fleet, asyncio.get_running_loop().time)
        port = GatewayPort("", "", "")
        harness = make_harness(PLAYER, 1)
        assert harness is not None
        desk.harnesses = Harnesses(harness, f"{port.url}/v1", 120.0, desk.tell)
        app = GatewayApp(desk, "policy", "master", chr)
        serving = asyncio.create_task(port.run(app.application()))
        try:
            for number in range(2):
                desk.tell(e.ProblemOpened(f"a{number}", 1, told_of(spec, 1)))
                async with asyncio.timeout(150):
                    while len(fleet.ends) <= number:
                        await asyncio.sleep(0.05)
        finally:
            await desk.close()
            await port.stop(serving)
        return fleet

    fleet = asyncio.run(scene())
    assert [end.reward for end in fleet.ends] == [1.0, 0.0], "1+1 is 2"
    assert [asked.chain for asked in fleet.asked] == [None, 0, None, 0], "the tool's answer goes on token for token"
    first, second = fleet.asked[:2]
    assert second.prompt_token_ids[: len(first.prompt_token_ids) + 1] == (*first.prompt_token_ids, *CALLS_THE_TOOL)
    assert "[tool]" in "".join(map(chr, second.prompt_token_ids)) and "2" in "".join(map(chr, second.prompt_token_ids))
    assert not [name for name in os.environ if name.startswith("ECHO2_EPISODE_KEY")]
