"""The loops on which tests run that are coroutines."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tests.patience import WAIT_S

T = TypeVar("T")
Scene = Callable[[], Coroutine[Any, Any, T]]


class Stage:
    """A loop of its own for each test. A fixture that is a stage has the coroutine tests that ask for it run on its loop."""

    def run(self, scene: Scene[T]) -> T:
        async def whole() -> T:
            async with asyncio.timeout(WAIT_S):
                return await scene()

        return asyncio.run(whole())


class VirtualStage(Stage):
    """A loop whose time is virtual."""

    def run(self, scene: Scene[T]) -> T:
        from echo2.sim.virtual_loop import VirtualLoop  # what tests of vLLM do without

        loop = VirtualLoop()
        try:
            return loop.run_until_complete(scene())
        finally:
            loop.close()
