"""Renders chat templates in a process of its own, since a model folder's template is a program of whoever made the model.

Guarantees: a template that loops or allocates ends at its limits as a ConfigError and costs this process nothing; it renders as
transformers' `apply_chat_template` does, with the clock at the moment given. The process starts with the first rendering and ends
with this one. Waits for: one rendering, at most `CPU_S` of processor time.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from echo2.base.errors import ConfigError, LimitExceeded

CPU_S = 5.0  # limit for a rendering, which takes milliseconds
MEMORY_BYTES = 512 << 20  # what a rendering may allocate beside the library
TEXT_BYTES_MAX = 64 << 20  # a million tokens at 64 bytes each: beyond any context
# Said whichever limit was hit, since a killed process cannot say.
_LIMITS = (
    f"expected a rendering within {CPU_S:.0f} s of processor time, {MEMORY_BYTES >> 20} MiB of memory and a text of "
    f"{TEXT_BYTES_MAX >> 20} MiB, it took more: does the model folder's template loop or repeat without end?"
)


class _Renderer:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # a forked copy of this process must not share the pipes

    def render(self, request: Mapping[str, Any]) -> str:
        with self._lock:
            answer = self._asked(json.dumps(request, default=str).encode())
        if answer is None:
            raise LimitExceeded(_LIMITS)
        reply = json.loads(answer)
        if "error" in reply:
            raise ConfigError(reply["error"])
        return str(reply["text"])

    def _asked(self, request: bytes) -> bytes | None:
        process = self._running()
        assert process.stdin is not None and process.stdout is not None, "it was started with pipes"
        try:
            _write(process.stdin, request)
            answer = process.stdout.readline()
        except OSError:
            answer = b""
        if not answer.endswith(b"\n"):  # it ended before, or within its answer
            self.close()
            return None
        return answer

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._owner != os.getpid():
            command = [sys.executable, "-m", "echo2.tasks.rendering"]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._owner = os.getpid()
        return self._process

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        process.kill()
        process.communicate()  # closes the pipes


_renderer = _Renderer()
atexit.register(_renderer.close)


def render(
    template: str,
    chat: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    arguments: Mapping[str, object],
    now: datetime,
) -> str:
    """The text of a chat, up to the point where the model answers. `arguments`: further variables of the template; `now`: what
    its `strftime_now` tells. Raises ConfigError with what the template raised, LimitExceeded if it broke a limit."""
    messages = [{key: value for key, value in message.items() if value is not None} for message in chat]
    more = {"tools": list(tools) or None, "more": dict(arguments), "now": now.isoformat()}
    return _renderer.render({"template": template, "chat": messages, **more})


# ---- inside that process


def _rendered(template: str, chat: Any, tools: Any, more: Mapping[str, Any], now: str) -> str:
    from transformers.utils import chat_template_utils

    compiled = chat_template_utils._compile_jinja_template(template)  # which it caches
    compiled.environment.globals["strftime_now"] = datetime.fromisoformat(now).strftime
    texts, _ = chat_template_utils.render_jinja_template(
        [chat], tools=tools, chat_template=template, add_generation_prompt=True, **more
    )
    return str(texts[0])


def _answer(request: bytes) -> bytes:
    """Raises MemoryError if that is more than the limit."""
    try:
        text = _rendered(**json.loads(request))
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - a template may raise anything: TemplateError, TypeError, ...
        return json.dumps({"error": f"{type(error).__name__}: {error}"[:2000]}).encode()
    if len(text) > TEXT_BYTES_MAX:
        raise MemoryError
    return json.dumps({"text": text}).encode()


def _write(pipe: IO[bytes], content: bytes) -> None:
    pipe.write(content + b"\n")
    pipe.flush()


def main() -> None:
    """Renders what comes on stdin until it ends; ends without an answer at a limit, that of time by a signal (SIGPROF)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the process that asks
    from transformers.utils.chat_template_utils import render_jinja_template  # noqa: F401 - before memory is limited

    with Path("/proc/self/statm").open() as file:
        in_use = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MEMORY_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while request := sys.stdin.buffer.readline():
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        try:
            answer = _answer(request)
        except MemoryError:
            return
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(sys.stdout.buffer, answer)


if __name__ == "__main__":
    main()
