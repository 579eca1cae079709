"""Streams as the stock client reads them: pieces as they come, the whole in the end, and an error where it came out otherwise."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from echo2.gateway import events as e
from echo2.gateway.limits import GatewayLimits
from echo2.gateway.runtime.app import GatewayApp
from echo2.gateway.runtime.desk import GatewayDesk
from echo2.gateway.runtime.server import GatewayPort
from echo2.gateway.sessions import PIECES_S, Sessions
from tests.unit.gateway.test_sessions import Letters

openai = pytest.importorskip("openai")


class Fleet:
    """Tells of a completion twice while it grows, then `whole`."""

    def __init__(self, whole: str) -> None:
        self.whole = whole
        self.desk: GatewayDesk

    def ask(self, asked: e.Ask) -> tuple[str, int]:
        asyncio.get_running_loop().create_task(self._sample(f"{asked.root}.0.1"))
        return f"{asked.root}.0.1", 0

    async def _sample(self, group_id: str) -> None:
        for text in ("hel", "hello w"):
            await asyncio.sleep(PIECES_S + 0.05)
            self.desk.tell(e.CallGrew(group_id, tuple(map(ord, text))))
        await asyncio.sleep(0.05)
        tokens = tuple(map(ord, self.whole))
        self.desk.tell(e.CallTokens(group_id, tokens, (-0.5,) * len(tokens), (0,) * len(tokens), is_cut=False))

    def ended(self, ended: e.EndEpisode) -> None: ...

    async def score(self, root: str, token_ids: tuple[int, ...]) -> str:
        return "no task"


def read(whole: str, is_chat: bool) -> tuple[list[str], list[str | None]]:
    """The texts of the stream's pieces, and why they ended."""

    async def scene() -> tuple[list[str], list[str | None]]:
        fleet = Fleet(whole)
        sessions = Sessions(GatewayLimits(10_000, 64, 2048, 1), Letters(), lambda: "k", has_harness=False)
        desk = fleet.desk = GatewayDesk(sessions, fleet, asyncio.get_running_loop().time)
        port = GatewayPort("", "", "")
        serving = asyncio.create_task(port.run(GatewayApp(desk, "policy", "master", chr).application()))
        client = None
        try:
            desk.tell(e.ProblemOpened("a1", 1, {}))
            seated = await desk.seat("")
            assert isinstance(seated, e.Seated)
            client = openai.AsyncOpenAI(base_url=f"{port.url}/v1", api_key=seated.key, timeout=20, max_retries=0)
            texts, reasons = list[str](), list[str | None]()
            stream: Any
            if is_chat:
                stream = await client.chat.completions.create(
                    model="policy", messages=[{"role": "user", "content": "hi"}], stream=True
                )
            else:
                stream = await client.completions.create(model="policy", prompt="hi", stream=True)
            async for piece in stream:
                for choice in piece.choices:
                    texts.append((choice.delta.content if is_chat else choice.text) or "")
                    reasons.append(choice.finish_reason)
            return [text for text in texts if text], reasons
        finally:
            if client is not None:
                await client.close()
            await desk.close()
            await port.stop(serving)

    return asyncio.run(scene())


@pytest.mark.parametrize("is_chat", [True, False], ids=["chat", "text"])
def test_pieces_come_as_they_are_sampled_and_make_the_whole(is_chat: bool) -> None:
    texts, reasons = read("hello world", is_chat)
    assert texts == ["hel", "lo w", "orld"]
    assert [reason for reason in reasons if reason] == ["stop"]


def test_a_completion_that_another_worker_began_anew_ends_the_stream_with_an_error() -> None:
    with pytest.raises(openai.APIError, match="began this completion anew"):
        read("other words", is_chat=True)
