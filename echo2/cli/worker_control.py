"""`echo-worker status`, `drain` and `leave`: words to a worker that runs on this machine."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

from echo2.base.errors import ConfigError
from echo2.worker.runtime.control import Answer, ask, socket_path

HELP = {
    "status": "what the worker of this machine does and waits for",
    "drain": "let it finish what it holds, then leave the run",
    "leave": "make it hand back what it holds and leave the run at once",
}


def add_control_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    for name, text in HELP.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--name", default="", help="which worker, where several run")
        command.add_argument("--folder", type=Path, help="the folder that it was started with")
        command.add_argument("--json", action="store_true", help="answer as one JSON object")
        command.set_defaults(control=name)


def run_control(own: argparse.Namespace) -> int:
    """Asks the worker and prints its answer."""
    answer = asyncio.run(ask(own.folder or _running_folder(own.name), own.control))
    print(json.dumps(answer) if own.json else _as_text(answer))
    return 0


def _running_folder(name: str) -> Path:
    """The folder of the only worker in the default place, or of the one that is named."""
    home = Path("~/.local/share/echo2").expanduser()
    folders = sorted(folder for folder in home.glob(f"worker-{name or '*'}") if socket_path(folder).exists())
    if len(folders) != 1:
        found = ", ".join(folder.name.removeprefix("worker-") for folder in folders) or "none"
        raise ConfigError(f"worker: expected one in {home}, found {found}; choose by --name or --folder")
    return folders[0]


def _as_text(answer: Answer) -> str:
    if set(answer) == {"text"}:
        return str(answer["text"])
    width = max(map(len, answer))
    return "\n".join(f"{key.replace('_', ' '):<{width}}  {value}" for key, value in answer.items())
