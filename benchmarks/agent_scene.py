"""The agent of `bench_agents --only cache`: six turns of one chat with the stock `openai` client; each turn's seconds are noted."""

from __future__ import annotations

import json
import os
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

TURNS = 6
SAMPLED_TOKENS = 16
NOTES = "ECHO2_BENCH_NOTES"  # names the file of a line for each episode


@lru_cache(maxsize=1)
def stock_client(base_url: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=base_url, api_key="the episode's", timeout=600, max_retries=0)


async def play(episode: Any) -> float:
    """Paid for even digits; an error is noted and raised."""
    client = stock_client(episode.base_url).with_options(api_key=episode.api_key)
    messages: list[Any] = [{"role": "user", "content": episode.problem["messages"][0]["content"] * 8}]
    said, took_s = "", []
    try:
        for turn in range(TURNS):
            began = time.monotonic()
            reply = await client.chat.completions.create(model="policy", messages=messages, max_tokens=SAMPLED_TOKENS)
            took_s.append(time.monotonic() - began)
            answer = reply.choices[0].message.content or ""
            said += answer
            messages += [
                {"role": "assistant", "content": answer},
                {"role": "user", "content": f"{turn}1234567890123456>"},
            ]
    except Exception as error:
        _note({"error": f"{type(error).__name__}: {error}", "turns_s": took_s})
        raise
    _note({"error": "", "turns_s": took_s})
    return sum(letter in "02468" for letter in said) / max(1, len(said))


def _note(line: dict[str, object]) -> None:
    with Path(os.environ[NOTES]).open("a") as file:
        file.write(json.dumps(line) + "\n")
