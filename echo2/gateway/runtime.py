"""A former import path, for scripts written against it: `echo2.gateway.runtime.reading.ChatReading(chat).said` is `chat.decode`."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

from echo2.tasks.chat_format import ChatFormat


def _reading_of(chat: ChatFormat) -> SimpleNamespace:
    return SimpleNamespace(said=chat.decode)


__path__: list[str] = []  # a package without files: what can be imported from it is listed here
_module = ModuleType(f"{__name__}.reading")
vars(_module)["ChatReading"] = _reading_of
sys.modules[_module.__name__] = _module
