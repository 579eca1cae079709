"""Former import paths, for scripts written against them: `echo2.tasks.runtime.NAME` is the module `echo2.tasks.NAME` itself."""

from __future__ import annotations

import sys

from echo2.tasks import chat_format, data_files, registry, rewards

__path__: list[str] = []  # a package without files: what can be imported from it is listed here
for _module in (chat_format, data_files, registry, rewards):
    sys.modules[f"{__name__}.{_module.__name__.rpartition('.')[2]}"] = _module
