"""What is shown of long work."""

import asyncio
import gc
import io
import logging

import pytest

from echo2.outside.guard import ProgressLines, shown
from echo2.worker.weights import progress_for


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


async def test_work_of_unknown_length_is_told_while_it_goes_on_and_its_end_is_the_callers() -> None:
    told: list[str] = []

    class Told:
        def at(self, what: str, done_bytes: int, whole_bytes: int) -> None:
            told.append(what)

        def ended(self, what: str) -> None:
            told.append(f"{what} ended")

    async def work(error: Exception | None) -> int:
        await asyncio.sleep(0)
        if error is not None:
            raise error
        return 7

    assert await shown(Told(), "compilation", work(None)) == 7
    assert told == ["compilation", "compilation ended"]
    with pytest.raises(ValueError, match="boom"):
        await shown(Told(), "compilation", work(ValueError("boom")))
    assert told[2:] == ["compilation", "compilation ended"]

    unasked: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unasked.append(context))
    failing = asyncio.get_running_loop().create_future()
    caller = asyncio.create_task(shown(Told(), "compilation", failing))
    await asyncio.sleep(0)
    failing.set_exception(ValueError("boom"))
    caller.cancel()
    await asyncio.wait((caller,))
    del failing, caller
    gc.collect()
    assert not unasked, "nobody is told of an error that its caller does not wait for any more"


def test_a_bar_is_drawn_and_gone_at_its_end_and_the_log_goes_on_above_it() -> None:
    terminal = Terminal()
    handler, elsewhere = logging.StreamHandler(terminal), logging.StreamHandler(io.StringIO())
    kept = elsewhere.stream
    kept.close()  # it is another's: what becomes of it is not for a bar to meet
    logger = logging.getLogger("echo2")
    logger.addHandler(handler)
    logger.addHandler(elsewhere)
    elsewhere.setLevel(logging.CRITICAL)
    assert isinstance(progress_for(terminal, as_json=True), ProgressLines)
    assert isinstance(progress_for(io.StringIO(), as_json=False), ProgressLines)
    bars = progress_for(terminal, as_json=False)
    bars.at("download", 10_000_000, 40_000_000)
    assert handler.stream is not terminal and elsewhere.stream is kept
    logger.warning("a line meanwhile")
    bars.at("load", 0, 0)
    bars.ended("download")
    bars.ended("load")
    bars.ended("never begun")
    assert handler.stream is terminal and elsewhere.stream is kept
    text = terminal.getvalue()
    assert "download" in text and "a line meanwhile" in text
