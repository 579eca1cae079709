"""Event loops for tests that are coroutines."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tests.patience import WAIT_S

T = TypeVar("T")
Scene = Callable[[], Coroutine[Any, Any, T]]


class OwnLoop:
    """A new event loop for each test. Coroutine tests that ask for a fixture of this class run on its loop (conftest)."""

    def run(self, scene: Scene[T]) -> T:
        async def whole() -> T:
            async with asyncio.timeout(WAIT_S):
                return await scene()

        return asyncio.run(whole())


class VirtualTime(OwnLoop):
    """A loop whose time is virtual."""

    def run(self, scene: Scene[T]) -> T:
        from echo2.sim.virtual_loop import VirtualLoop  # what tests of vLLM do without

        loop = VirtualLoop()
        try:
            return loop.run_until_complete(scene())
        finally:
            loop.close()
