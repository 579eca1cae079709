"""An ordinary agent: sort the digits, with a second and a third try. Nothing here knows of echo2 but the episode's address.

python -m echo2.cli.demo.model runs/digits-model        # a small model, made here in seconds
echo2 run examples/agent.toml --workers 2
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from openai import AsyncOpenAI

TRIES = 3


@lru_cache(maxsize=1)
def stock_client(base_url: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=base_url, api_key="the episode's", timeout=600)


async def play(episode: Any) -> float:
    """Plays one episode; what it returns is the reward."""
    client = stock_client(episode.base_url).with_options(api_key=episode.api_key)
    messages: list[Any] = list(episode.problem["messages"])
    wanted, best = episode.problem["answer"], 0.0
    for attempt in range(TRIES):
        reply = await client.chat.completions.create(model="policy", messages=messages, max_tokens=8)
        said = reply.choices[0].message.content or ""
        answer = "".join(said.split())
        if answer == wanted:
            return max(best, 1.0 - 0.1 * attempt)
        if len(answer) == len(wanted):
            right = sum(one == other for one, other in zip(answer, wanted, strict=True))
            best = max(best, 0.5 * right / len(wanted))
        messages += [{"role": "assistant", "content": said}, episode.problem["messages"][-1]]
    return best
