"""Renders chat templates in a process of its own, since a model folder's template is a program of whoever made the model.

Guarantees: a template that loops or allocates ends at its limits as a ConfigError and costs this process nothing; it renders as
transformers' `apply_chat_template` does, with the clock at the moment given. The process starts with the first rendering and ends
with this one; long chats have another. Waits for: renderings of that length, each at most `CPU_S` of processor time.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import resource
import signal
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from echo2.base.errors import ConfigError, LimitExceeded
from echo2.contain.inside import Body, Handler, serve
from echo2.contain.messages import Ending, Limits
from echo2.contain.sandbox import Launch, Sandbox

CPU_S = 5.0  # limit for a rendering, which takes milliseconds
MEMORY_BYTES = 512 << 20  # what a rendering may allocate beside the library
SHORT_CHARS = 64 << 10  # rendered within milliseconds
TEXT_BYTES_MAX = 64 << 20  # a million tokens at 64 bytes each: beyond any context
# Said whichever limit was hit, since a killed process cannot say.
_LIMITS = (
    f"expected a rendering within {CPU_S:.0f} s of processor time, {MEMORY_BYTES >> 20} MiB of memory and a text of "
    f"{TEXT_BYTES_MAX >> 20} MiB, it took more: does the model folder's template loop or repeat without end?"
)


# The limits above are kept inside; these bound only what a process can ask of a machine.
_LAUNCH = Launch(
    "echo2.tasks.rendering", "",
    Limits(wall_s=600.0, memory_bytes=1 << 46, request_bytes=1 << 31, answer_bytes=8 * TEXT_BYTES_MAX), None,
)  # fmt: skip
# Short chats and long ones have a process each: an event loop, which renders short ones itself, waits for no thread's long one.
_locks = (threading.Lock(), threading.Lock())
_renderers: dict[tuple[int, bool], Sandbox] = {}  # by process, too: a forked copy of this one must not share the pipes


@atexit.register
def _end() -> None:
    for is_long in (False, True):
        _renderers.pop((os.getpid(), is_long), Sandbox(_LAUNCH)).kill()


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
    request = json.dumps({"template": template, "chat": messages, **more}, default=str)
    is_long = len(request) > SHORT_CHARS
    with _locks[is_long]:
        answer = _renderers.setdefault((os.getpid(), is_long), Sandbox(_LAUNCH)).ask({"request": request})
    if answer.ending is not Ending.ANSWERED:
        raise LimitExceeded(_LIMITS)
    reply = json.loads(answer.body)
    if "error" in reply:
        raise ConfigError(reply["error"])
    return str(reply["text"])


# ---- inside that process


def _rendered(template: str, chat: Any, tools: Any, more: Mapping[str, Any], now: str) -> str:
    from transformers.utils import chat_template_utils

    compiled = chat_template_utils._compile_jinja_template(template)  # which it caches
    compiled.environment.globals["strftime_now"] = datetime.fromisoformat(now).strftime
    texts, _ = chat_template_utils.render_jinja_template(
        [chat], tools=tools, chat_template=template, add_generation_prompt=True, **more
    )
    return str(texts[0])


def _answer(body: Body) -> bytes:
    """Ends the process at a limit, that of time by a signal (SIGPROF)."""
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    try:
        text = _rendered(**json.loads(str(body["request"])))
        if len(text) > TEXT_BYTES_MAX:
            raise MemoryError
        answer = json.dumps({"text": text}).encode()
    except MemoryError:
        os._exit(1)
    except Exception as error:  # noqa: BLE001 - a template may raise anything: TemplateError, TypeError, ...
        answer = json.dumps({"error": f"{type(error).__name__}: {error}"[:2000]}).encode()
    signal.setitimer(signal.ITIMER_PROF, 0)
    return answer


def _make(setup: str) -> Handler:
    from transformers.utils.chat_template_utils import render_jinja_template  # noqa: F401 - before memory is limited

    ctypes.CDLL(None).prctl(1, 0)  # PR_SET_PDEATHSIG: it serves all threads, and outlives the one that asked first
    with Path("/proc/self/statm").open() as file:
        in_use = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MEMORY_BYTES,) * 2)
    return Handler(_answer)


if __name__ == "__main__":
    serve(_make)
