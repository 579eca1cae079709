"""Agents for tests: ordinary loops with the stock OpenAI client."""

import math
from collections import Counter
from typing import Any

from echo2.gateway.harness import Episode

TURNS = 3
SEEN: dict[str, list[dict[str, Any]]] = {}
"""What the clients read, by episode: each answer with the ids and numbers that it carried."""
EPISODES: Counter[str] = Counter()
"""How many were begun, by problem."""
CLIENTS: dict[str, Any] = {}
NOTES: list[Any] = []
"""What a player has to say of its episode."""


def client_of(episode: Episode) -> Any:
    """The stock client; its connections are shared, for a client of its own takes 0.2 s to make."""
    from openai import AsyncOpenAI

    if episode.base_url not in CLIENTS:
        CLIENTS[episode.base_url] = AsyncOpenAI(base_url=episode.base_url, api_key="none", timeout=60)
    return CLIENTS[episode.base_url].with_options(api_key=episode.api_key)


async def three_turns(episode: Episode) -> float:
    """Asks three times, going on with the chat; paid for digits."""
    said = ""
    client = client_of(episode)
    messages: list[Any] = list(episode.problem["messages"])
    for turn in range(TURNS):
        reply = await client.chat.completions.create(
            model="policy", messages=messages, logprobs=True, extra_body={"return_token_ids": True}
        )
        choice = reply.choices[0]
        SEEN.setdefault(episode.api_key, []).append(reply.model_dump())
        said += choice.message.content or ""
        messages += [{"role": "assistant", "content": choice.message.content}]
        messages += [{"role": "user", "content": f"go on {turn}"}]
    letters = "".join(said.split())
    return sum(letter.isdigit() for letter in letters) / max(1, len(letters))


async def misbehaves_at_first(episode: Episode) -> float:
    """Asks with token ids that the model does not have, each of which is refused. Of each problem, the first episode breaks, as
    machines do, and the second is worth nothing that can be averaged."""
    import openai

    problem, client = str(episode.problem["index"]), client_of(episode)
    EPISODES[problem] += 1
    number = EPISODES[problem]
    if number == 1:
        raise OSError("the tool's machine is gone")
    for tokens in ([10**12], [1, 2, 99_999], [*range(5), 10**30]):
        try:
            await client.completions.create(model="policy", prompt=tokens)
        except openai.BadRequestError as error:
            NOTES.append(str(error))
    earned = await three_turns(episode)
    return (math.nan, math.inf, -math.inf, 1e300)[sum(EPISODES.values()) % 4] if number == 2 else earned


async def leaves_it_to_the_task(episode: Episode) -> None:
    await three_turns(episode)


async def notes_its_problem(episode: Episode) -> float:
    NOTES.append(episode.problem)
    return await three_turns(episode)


async def always_breaks(episode: Episode) -> float:
    """As a tool that cannot be reached; the client's own error does not say why."""
    try:
        raise PermissionError("locked")
    except PermissionError as error:
        raise OSError("no tool\n  here") from error
