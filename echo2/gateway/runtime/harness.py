"""Runs agents: a user's function in this process, or a program in one process per episode.

Guarantees: when an episode is over, its program is killed with its whole process group; an exception or a non-zero exit is reported
as a failure, never taken as a reward. Waits for each harness at most `episode_s`. Leaves to others: which episodes to run, and
rewards that the task computes (sessions).
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import re
import shlex
import signal
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from echo2.base.errors import ConfigError, TaskError
from echo2.gateway import events as e

OUTPUT_BYTES_MAX = 1 << 20
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "PYTHONPATH", "VIRTUAL_ENV", "TMPDIR")


@dataclass(frozen=True, slots=True)
class Episode:
    """An agent's input: the model's base URL, its API key, and its problem (index, prompt, answer, metadata)."""

    base_url: str
    api_key: str
    problem: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Played:
    """A finished episode. `reward` None: the task scores it, or the agent has posted the reward."""

    reward: float | None = None


class Harness(Protocol):
    async def play(self, episode: Episode) -> Played:
        """Plays one episode. May raise anything; the exception fails the episode."""
        ...


class FunctionHarness:
    """Calls a user's `module:function`, async or not, with the `Episode`; it returns a number or None."""

    def __init__(self, name: str, at_once: int) -> None:
        self._function = _loaded(name)
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="agent")

    async def play(self, episode: Episode) -> Played:
        if inspect.iscoroutinefunction(self._function):
            returned = await self._function(episode)
        else:
            returned = await asyncio.get_running_loop().run_in_executor(self._threads, self._function, episode)
        return Played(_number(returned))


class ProgramHarness:
    """Runs a command with OPENAI_BASE_URL, OPENAI_API_KEY and ECHO2_PROBLEM (JSON) in its environment.

    Of the learner's environment it gets only `_PASSED_ON`. Its last line of output may be the reward: a number or
    {"reward": number}.
    """

    def __init__(self, command: str) -> None:
        self._arguments = shlex.split(command)

    async def play(self, episode: Episode) -> Played:
        environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        environment |= {
            "OPENAI_BASE_URL": episode.base_url,
            "OPENAI_API_KEY": episode.api_key,
            "ECHO2_PROBLEM": json.dumps(dict(episode.problem)),
        }
        process = await asyncio.create_subprocess_exec(
            *self._arguments,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            assert process.stdout is not None and process.stderr is not None, "they are pipes"
            said, told = await asyncio.gather(_last_of(process.stdout), _last_of(process.stderr))
            status = await process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if status != 0:
            raise TaskError(f"agent {self._arguments[0]}: expected it to exit with 0, got {status}: {told[-400:]}")
        return Played(_printed(said))


def make_harness(told: str, at_once: int) -> Harness | None:
    """Makes the harness that `agent.harness` names: module:function or a command; None if it is empty."""
    if not told:
        return None
    return FunctionHarness(told, at_once) if _FUNCTION.fullmatch(told) else ProgramHarness(told)


class Harnesses:
    """The episodes under way. `tell`: called with the event that ends each."""

    def __init__(self, harness: Harness, base_url: str, episode_s: float, tell: Callable[[e.Event], None]) -> None:
        self._harness, self._base_url, self._episode_s, self._tell = harness, base_url, episode_s, tell
        self._playing: dict[str, asyncio.Task[None]] = {}

    def run(self, action: e.RunHarness) -> None:
        episode = Episode(self._base_url, action.key, action.told)
        self._playing[action.session_id] = asyncio.get_running_loop().create_task(
            self._play(action.session_id, episode)
        )

    def stop(self, session_id: str) -> None:
        task = self._playing.pop(session_id, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    async def close(self) -> None:
        tasks = list(self._playing.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _play(self, session_id: str, episode: Episode) -> None:
        event: e.Event
        try:
            played = await asyncio.wait_for(self._harness.play(episode), self._episode_s)
            event = e.HarnessDone(session_id)
            if played.reward is not None:
                event = e.EpisodeRewarded(session_id, played.reward)
        except Exception as error:  # noqa: BLE001 - the user's code; the sessions count the failure and restart
            event = e.EpisodeFailed(session_id, f"{type(error).__name__}: {error}"[:500])
        self._playing.pop(session_id, None)
        self._tell(event)


async def _last_of(stream: asyncio.StreamReader) -> str:
    """Reads the stream to its end and returns its last OUTPUT_BYTES_MAX bytes as text."""
    held = b""
    while data := await stream.read(1 << 16):
        held = (held + data)[-OUTPUT_BYTES_MAX:]
    return held.decode(errors="replace")


def _printed(text: str) -> float | None:
    last = (text.strip().splitlines() or [""])[-1]
    try:
        told = json.loads(last)
    except ValueError:
        return None
    return _number(told.get("reward") if isinstance(told, dict) else told)


def _number(told: object) -> float | None:
    if told is None:
        return None
    if isinstance(told, bool | int | float):
        return float(told)
    raise TaskError(f"agent: expected a reward as a number, got {told!r:.80}")


def _loaded(name: str) -> Callable[..., Any]:
    module_name, _, function_name = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), function_name, None)
    except ImportError as error:
        raise ConfigError(f"agent.harness: expected an importable module {module_name}, got {error}") from error
    if not callable(found):
        raise ConfigError(f"agent.harness: expected a function {function_name} in {module_name}")
    return found  # type: ignore[no-any-return]
