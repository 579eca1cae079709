"""Runs inside the containment: executes Python programs as `__main__`, each in its own fork (inside).

Guarantees: those of inside, no others. This is the only place in echo2 that executes foreign text, and it is
reached only in a fork under limits and the filter.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
import types
from collections.abc import Mapping
from pathlib import Path

from echo2.contain.inside import Handler, serve

ERROR_CHARS_MAX = 4000  # the last lines of a traceback, which an agent reads as its tool's answer


def _ran(request: Mapping[str, object]) -> bytes:
    """Writes the program's files, executes it, and reports how it ended: `problem` is empty for a clean exit."""
    files = request["files"]
    assert isinstance(files, dict), "requests are our own"
    for name, text in files.items():
        Path(str(name)).write_text(str(text), encoding="utf-8")
    _give_input(str(request["stdin"]))
    sys.argv = ["program.py"]
    sys.path.insert(0, str(Path.cwd()))
    main = sys.modules["__main__"] = types.ModuleType("__main__")  # where pickle, unittest and type hints look
    problem = ""
    try:
        exec(compile(str(request["code"]), "program.py", "exec"), main.__dict__)  # what this module is for
    except SystemExit as leaving:
        problem = "" if leaving.code in (None, 0) else f"exit {str(leaving.code)[:200]}"
    except BaseException:  # noqa: BLE001 - the program's own error, reported to its sender
        problem = traceback.format_exc(limit=-8)[-ERROR_CHARS_MAX:]
    return json.dumps({"problem": problem}).encode()


def _give_input(text: str) -> None:
    """As a file: `sys.stdin.buffer`, `open(0)` and `input` read it as they do outside."""
    if text:
        with tempfile.TemporaryFile() as file:
            file.write(text.encode(errors="replace"))
            file.seek(0)
            os.dup2(file.fileno(), 0)
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)


if __name__ == "__main__":
    serve(lambda setup: Handler(_ran))
