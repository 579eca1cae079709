"""Presents the tasks and environments of a mixture as one world: an index encodes the task and its instance (tasks/mixture).

Leaves to others: the order of tasks and their weights (tasks/mixture), answers (each task's own world).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from echo2.learner.runtime.world import PromptWorld, TurnAnswer
from echo2.tasks.task import TaskInstance


class MixedWorld:
    """The worlds of several tasks. `names`: the run's names for them, in the same order."""

    name = "mixture"

    def __init__(self, names: Sequence[str], worlds: Sequence[PromptWorld]) -> None:
        self.names, self.worlds = tuple(names), tuple(worlds)

    @property
    def size(self) -> int | None:
        sizes = [world.size for world in self.worlds]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    def instance(self, index: int) -> TaskInstance:
        world, own_index = self._of(index)
        return replace(world.instance(own_index), index=index)

    def name_of(self, index: int) -> str:
        return self.names[index % len(self.worlds)]

    async def answer(
        self, index: int, turns: Sequence[Sequence[int]], room_tokens: int, sender: str = ""
    ) -> TurnAnswer:
        world, own_index = self._of(index)
        return await world.answer(own_index, turns, room_tokens, sender)

    def close(self) -> None:
        for world in self.worlds:
            world.close()

    def _of(self, index: int) -> tuple[PromptWorld, int]:
        own_index, task = divmod(index, len(self.worlds))
        return self.worlds[task], own_index
