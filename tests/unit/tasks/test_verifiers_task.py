"""Tasksets of the verifiers library: their prompts and rewards are kept; runs where the library is installed."""

import sys
from contextlib import closing
from pathlib import Path

import pytest

from echo2.base.errors import ConfigError
from echo2.tasks.registry import make_task
from echo2.tasks.rewards import Containment, RewardPool
from echo2.tasks.task import ChatMessage, TaskSpec
from tests.patience import WAIT_S

pytestmark = pytest.mark.extras
TASKSET = """
import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str = ""


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=2.0)
    async def right(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def letters(self, trace) -> float:
        return float(len(trace.last_reply))


class ContainerTask(vf.Task[SumData]):
    @vf.reward
    async def runs(self, trace, runtime) -> float:
        return 1.0


class SumConfig(vf.TasksetConfig):
    count: int = 3
    needs_container: bool = False
    last_needs_container: bool = False


class Sums(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        for n in range(self.config.count):
            is_last = n == self.config.count - 1 and self.config.last_needs_container
            kind = ContainerTask if self.config.needs_container or is_last else SumTask
            yield kind(SumData(prompt=f"{n}+{n}?", system_prompt="Be brief.", answer=str(2 * n)))


__all__ = ["Sums"]
"""


def spec(**options: object) -> TaskSpec:
    return TaskSpec("verifiers", {"taskset": "echo2_sums", "options": options})


@pytest.fixture(autouse=True)
def installed_taskset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verifiers.v1")
    (tmp_path / "echo2_sums.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "echo2_sums", raising=False)


def test_prompts_rewards_with_their_weights_and_metrics_are_the_tasksets_own() -> None:
    task = make_task(spec(count=5))
    assert task.size == 5 and not task.is_cheap
    instance = task.sample(3)
    assert instance.prompt == (ChatMessage("system", "Be brief."), ChatMessage("user", "3+3?"))
    right, wrong = task.score(instance, "6"), task.score(instance, "seven")
    assert (right.value, right.parts) == (2.0, {"letters": 1.0})
    assert (wrong.value, wrong.parts) == (0.0, {"letters": 5.0})
    with closing(RewardPool(spec(count=5), containment=Containment(is_trusted=True, processes=1))) as pool:
        assert pool.submit(3, "6").result(WAIT_S).reward == right, "above 1, too"


def test_rewards_that_need_a_container_and_unknown_names_and_options_are_refused() -> None:
    for how in ("needs_container", "last_needs_container"):
        with pytest.raises(ConfigError, match="runs need a container"):
            make_task(spec(**{how: True}))
    with pytest.raises(ConfigError, match="expected an installed taskset and options of it"):
        make_task(spec(colour="red"))
    with pytest.raises(ConfigError, match="no_such_taskset"):
        make_task(TaskSpec("verifiers", {"taskset": "no_such_taskset"}))
    with pytest.raises(ConfigError, match="expected the argument taskset"):
        make_task(TaskSpec("verifiers"))
