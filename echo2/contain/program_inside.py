"""Runs inside the containment: executes Python programs as `__main__`, each in its own fork (inside).

Guarantees: those of inside, no others. This is the only place in echo2 that executes foreign text, and it is
reached only in a fork under limits and the filter.
"""

from __future__ import annotations

import io
import json
import sys
import traceback
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
    sys.stdin = io.StringIO(str(request["stdin"]))
    sys.argv = ["program.py"]
    sys.path.insert(0, str(Path.cwd()))
    names = {"__name__": "__main__", "__builtins__": __builtins__}
    problem = ""
    try:
        exec(compile(str(request["code"]), "program.py", "exec"), names)  # what this module is for
    except SystemExit as leaving:
        problem = "" if leaving.code in (None, 0) else f"exit {str(leaving.code)[:200]}"
    except BaseException:  # noqa: BLE001 - the program's own error, reported to its sender
        problem = traceback.format_exc(limit=-8)[-ERROR_CHARS_MAX:]
    return json.dumps({"problem": problem}).encode()


if __name__ == "__main__":
    serve(lambda setup: Handler(_ran))
