"""Plays environments of an OpenEnv server (0.3) through the gateway: observations become messages, completions become actions.

    [task]   name = "openenv", args = {url = "ws://127.0.0.1:8000"}
    [agent]  harness = "echo2.gateway.openenv_agent:play"

Guarantees: the reward is the sum of the environment's; an action that the environment refuses is answered to the model with its
error and the episode goes on; an episode whose server fails is lost, not scored 0. Waits for: each answer of the server,
ANSWER_S at most.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any
from urllib.parse import urlsplit

from echo2.base.errors import TaskError
from echo2.base.units import is_loopback
from echo2.gateway.harness import Episode

ANSWER_S = 60.0  # OpenEnv's own client waits as long
MESSAGE_BYTES_MAX = 16 << 20
OBSERVATION_CHARS_MAX = 32_768  # beyond it an observation fits no context that is trained
OPENINGS_MAX = 64  # braces of a completion that are tried as the action's beginning: each may be read to the end
ACTION_ERRORS = {"VALIDATION_ERROR", "EXECUTION_ERROR"}
"""What a server answers to an action that it cannot take; its other errors are its own."""


async def play(episode: Episode) -> float:
    """Plays one episode and returns the sum of its rewards. Raises TaskError if the server failed."""
    from openai import AsyncOpenAI, BadRequestError

    settings = episode.problem["metadata"]
    messages: list[Any] = list(episode.problem["messages"])
    async with connected(str(settings["url"])) as server, AsyncOpenAI(
        base_url=episode.base_url, api_key=episode.api_key, timeout=None
    ) as client:  # fmt: skip
        if server.instructions:
            messages.append({"role": "system", "content": server.instructions})
        observation = await server.ask("reset", {"seed": settings["seed"], **settings["reset"]})
        reward = observation.reward
        messages.append({"role": "user", "content": observation.text})
        for _ in range(int(settings["turns"])):
            if observation.is_done:
                break
            try:
                reply = await client.chat.completions.create(model="policy", messages=messages)
            except BadRequestError as error:
                if error.code != "context_length_exceeded":
                    raise
                break  # as if the turns were over
            text = reply.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": text})
            try:
                observation = await server.ask("step", server.action_of(text))
            except ActionRefused as error:
                messages.append({"role": "user", "content": f"error: {error}"})
                continue
            reward += observation.reward
            messages.append({"role": "user", "content": observation.text})
    return reward


class ActionRefused(Exception):
    """The environment cannot take this action; the text is for the model."""


@dataclass(frozen=True, slots=True)
class EnvObservation:
    """An observation as the model reads it, its reward (0 if it has none), and whether the episode is over."""

    text: str
    reward: float
    is_done: bool


class OpenEnvServer:
    """One session of a server. `action`: JSON schema of its actions."""

    def __init__(self, url: str, socket: Any, action: Mapping[str, Any]) -> None:
        self._url, self._socket, self._action = url, socket, action
        fields = {name: how for name, how in action.get("properties", {}).items() if name != "metadata"}
        only = next(iter(fields), "")
        self._field = only if len(fields) == 1 and fields[only].get("type") == "string" else ""

    @property
    def instructions(self) -> str:
        """Empty where an action is one text, which a completion as a whole is."""
        if self._field:
            return ""
        fields = {key: self._action[key] for key in ("properties", "required", "$defs") if key in self._action}
        return f"Answer with one action as a JSON object of this schema: {json.dumps(fields)}"

    def action_of(self, completion: str) -> dict[str, Any]:
        """The action in a completion. Raises ActionRefused if there is none."""
        if self._field:
            return {self._field: completion}
        decoder = json.JSONDecoder()
        places = (place for place, character in enumerate(completion) if character == "{")
        for place in islice(places, OPENINGS_MAX):
            try:
                action, _ = decoder.raw_decode(completion, place)
            except (ValueError, RecursionError):
                continue
            return dict(action)
        raise ActionRefused(f"expected one action as a JSON object, got {completion[:80]!r}")

    async def ask(self, kind: str, data: Mapping[str, Any]) -> EnvObservation:
        """Resets or steps. Raises ActionRefused if the environment cannot take the step, TaskError if the server failed."""
        from websockets.exceptions import WebSocketException

        try:
            async with asyncio.timeout(ANSWER_S):
                await self._socket.send(json.dumps({"type": kind, "data": dict(data)}))
                answer = json.loads(await self._socket.recv())
        except TimeoutError:
            raise self._error(f"an answer to {kind} within {ANSWER_S:.0f} s, got none") from None
        except (OSError, WebSocketException, ValueError) as error:
            raise self._error(f"an answer to {kind}, got: {error}") from error
        if not isinstance(answer, dict) or not isinstance(answer.get("data"), dict):
            raise self._error(f"an answer as OpenEnv 0.3 sends it, got {answer!r:.200}")
        content = answer["data"]
        if answer.get("type") == "error":
            text = f"{content.get('code')}: {content.get('message')} {content.get('errors') or ''}".strip()
            if kind == "step" and content.get("code") in ACTION_ERRORS:
                raise ActionRefused(text[:1000])
            raise self._error(f"an observation, got the error {text:.400}")
        observation, reward, is_done = content.get("observation"), content.get("reward"), content.get("done")
        is_number = isinstance(reward, int | float | None) and math.isfinite(reward or 0.0)
        if not isinstance(observation, dict) or not is_number or not isinstance(is_done, bool):
            raise self._error(f"an observation with a finite reward or null and done, got {content!r:.200}")
        return EnvObservation(text_of(observation)[:OBSERVATION_CHARS_MAX], float(reward or 0.0), is_done)

    def _error(self, expected: str) -> TaskError:
        return TaskError(f"openenv {self._url}: expected {expected}")


def text_of(observation: Mapping[str, Any]) -> str:
    """The observation's text where it is one text, else its JSON."""
    held = {name: value for name, value in observation.items() if value not in (None, "", [], {})}
    only = next(iter(held.values())) if len(held) == 1 else None
    return only if isinstance(only, str) else json.dumps(held, ensure_ascii=False)


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[OpenEnvServer]:
    """Opens a session of the server at `url`. Raises TaskError if there is none."""
    import httpx
    from websockets.asyncio.client import connect
    from websockets.exceptions import WebSocketException

    parts = urlsplit(url.rstrip("/"))
    is_secure, is_near = parts.scheme in ("https", "wss"), is_loopback(parts.netloc)
    http = f"{'https' if is_secure else 'http'}://{parts.netloc}{parts.path}"
    socket = f"{'wss' if is_secure else 'ws'}://{parts.netloc}{parts.path}/ws"
    try:
        async with httpx.AsyncClient(timeout=ANSWER_S, trust_env=not is_near) as client:
            schema = (await client.get(f"{http}/schema")).raise_for_status().json()["action"]
        way = connect(socket, open_timeout=ANSWER_S, max_size=MESSAGE_BYTES_MAX, proxy=None if is_near else True)
        session = await way
    except (OSError, httpx.HTTPError, WebSocketException, KeyError, ValueError) as error:
        raise TaskError(
            f"openenv {url}: expected an OpenEnv server (0.3) with /schema and /ws, got {type(error).__name__}: {error}"
        ) from error
    try:
        yield OpenEnvServer(url, session, schema)
    finally:
        await session.close()
