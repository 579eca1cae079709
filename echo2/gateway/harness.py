"""Runs agents: a user's function in this process, or a program in one process per episode.

Guarantees: when an episode is over, its program is killed with its whole process group; an exception or a non-zero exit is
reported as a failure, never taken as a reward.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import shlex
import signal
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, SupportsFloat
from urllib.parse import urlsplit

from echo2.base.errors import ConfigError, TaskError
from echo2.base.units import imported
from echo2.outside.guard import cancel_all, no_stop_iteration

THREADS_MAX = 1024  # of functions: 64 play, the others hang; one that the machine refused would name no cause
OUTPUT_BYTES_MAX = 1 << 20  # only the last line counts; the rest is for the log
LOOK_S = 0.1  # how soon the end of a program is seen whose pipes others hold
CLOSED_S = 1.0  # killed processes close theirs at once; one that has left the group may keep them
PROBLEM_BYTES_MAX = (128 << 10) - len("ECHO2_PROBLEM=\0")  # Linux's MAX_ARG_STRLEN
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")  # MODULE:FUNCTION; anything else is a command
# What an interpreter needs to start; no keys, tokens or proxies of the learner.
_PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "PYTHONPATH", "VIRTUAL_ENV", "TMPDIR")


@dataclass(frozen=True, slots=True)
class Episode:
    """An agent's input: the model's base URL, its API key, and its problem (index, prompt, answer, metadata)."""

    base_url: str
    api_key: str
    problem: Mapping[str, Any]


Harness = Callable[[Episode], Awaitable[float | None]]
"""Plays one episode and returns its reward; None: the task scores it, or the agent has posted it. May raise anything; the
exception fails the episode."""


def make_harness(text: str) -> Harness | None:
    """Makes the harness that `agent.harness` names: module:function or a command; None if it is empty."""
    if not text:
        return None
    return _function_harness(text) if _FUNCTION.fullmatch(text) else _program_harness(text)


def _function_harness(name: str) -> Harness:
    """Calls a user's `module:function`, async or not, with the `Episode`; it returns a number or None."""
    function = imported(name, "agent.harness")

    async def play(episode: Episode) -> float | None:
        is_async = inspect.iscoroutinefunction(function)
        earned = function(episode) if is_async else await _in_thread(partial(function, episode))
        return _number(await earned if inspect.isawaitable(earned) else earned)

    return play


async def _in_thread(work: Callable[[], object]) -> object:
    """Runs `work` in a thread of its own: one that never returns keeps no other waiting, nor the process from its end."""
    if sum(thread.name == "agent" for thread in threading.enumerate()) >= THREADS_MAX:
        raise TaskError(
            f"agent.harness: expected a function that returns, {THREADS_MAX} calls of it have not: give its waits a limit"
        )
    ended: Future[object] = Future()
    ended.set_running_or_notify_cancel()  # from now on whoever gives up does not cancel it

    def run() -> None:
        try:
            ended.set_result(no_stop_iteration(work))
        except BaseException as error:  # noqa: BLE001 - raised again where it is awaited
            ended.set_exception(error)

    threading.Thread(target=run, name="agent", daemon=True).start()
    return await asyncio.wrap_future(ended)


def _program_harness(command: str) -> Harness:
    """Runs a command with OPENAI_BASE_URL, OPENAI_API_KEY and ECHO2_PROBLEM (JSON) in its environment. Of the learner's
    environment it gets only `_PASSED_ON`. Its last line of output may be the reward: a number or {"reward": number}."""
    try:
        arguments = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"agent.harness: expected module:function or a command, got {command!r}: {error}") from None
    if not arguments:
        raise ConfigError(f"agent.harness: expected module:function or a command, got {command!r}")

    async def play(episode: Episode) -> float | None:
        pipe, problem = asyncio.subprocess.PIPE, json.dumps(dict(episode.problem), default=str)
        environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        environment |= {"OPENAI_BASE_URL": episode.base_url, "OPENAI_API_KEY": episode.api_key}
        environment["ECHO2_PROBLEM"] = problem
        if len(problem) > PROBLEM_BYTES_MAX:
            raise TaskError(
                f"agent {arguments[0]}: expected a problem of at most {PROBLEM_BYTES_MAX} bytes as JSON, the most that Linux "
                f"passes on in a variable, got {len(problem)}: let agent.harness name a function (module:function) instead"
            )
        process = await asyncio.create_subprocess_exec(
            *arguments, env=environment | past_proxies(episode.base_url), stdin=asyncio.subprocess.DEVNULL,
            stdout=pipe, stderr=pipe, start_new_session=True,
        )  # fmt: skip
        assert process.stdout is not None and process.stderr is not None, "they are pipes"
        output, errors = bytearray(), bytearray()
        kept = ((process.stdout, output), (process.stderr, errors))
        readers = [asyncio.create_task(_keep_last(*each)) for each in kept]
        try:
            # Its own end counts, not that of its pipes, which what it has left running may hold open; `wait` waits for both.
            while process.returncode is None:
                _, is_open = await asyncio.wait(readers, timeout=LOOK_S)
                if not is_open:
                    await process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await asyncio.wait(readers, timeout=CLOSED_S)
            await cancel_all(readers)
        if process.returncode != 0:
            said = errors.decode(errors="replace")[-400:]
            raise TaskError(f"agent {arguments[0]}: expected it to exit with 0, got {process.returncode}: {said}")
        return _printed(output.decode(errors="replace"))

    return play


def past_proxies(url: str) -> dict[str, str]:
    """The environment's `no_proxy` with the host of `url` added, in both spellings, since clients differ in which they read."""
    host = urlsplit(url).hostname or ""
    names = [name for key in ("no_proxy", "NO_PROXY") for name in re.split(r"[,\s]+", os.environ.get(key, "")) if name]
    joined = ",".join(dict.fromkeys([*names, host]))
    return {"no_proxy": joined, "NO_PROXY": joined}


def cause_of(error: BaseException) -> str:
    """The error and its first cause: a client's own error often says only that the connection failed."""
    first = error
    for _ in range(16):
        if first.__cause__ is None:
            break
        first = first.__cause__
    text = f"{type(error).__name__}: {error}"
    return text if first is error else f"{text} ({type(first).__name__}: {first})"


async def _keep_last(stream: asyncio.StreamReader, held: bytearray) -> None:
    """Reads the stream to its end; `held` has the last OUTPUT_BYTES_MAX bytes so far."""
    while data := await stream.read(1 << 16):
        held += data
        del held[:-OUTPUT_BYTES_MAX]


def _printed(text: str) -> float | None:
    try:
        value = json.loads((text.strip().splitlines() or [""])[-1])
    except (ValueError, RecursionError):
        return None
    return _number(value.get("reward") if isinstance(value, dict) else value)


def _number(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, SupportsFloat):  # numpy's and torch's numbers, too
        return float(value)
    raise TaskError(f"agent: expected a reward as a number, got {value!r:.80}")
