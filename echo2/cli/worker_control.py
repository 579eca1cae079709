"""`echo-worker status`, `drain` and `leave`: commands to a worker that runs on this machine."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

from echo2.worker.runtime.control import CommandAnswer, ask, ask_at
from echo2.worker.runtime.running import running_workers, the_one

HELP = {
    "status": "what the worker of this machine does and waits for",
    "drain": "let it finish what it holds, then leave the run",
    "leave": "make it hand back what it holds and leave the run at once",
}


def add_control_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    for name, text in HELP.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--name", default="", help="which worker, if several run here")
        command.add_argument("--folder", type=Path, help="the worker's folder, if it is not the default one")
        command.add_argument("--json", action="store_true", help="print JSON")
        command.set_defaults(control=name)


def run_control(own: argparse.Namespace) -> int:
    """Asks the worker and prints its answer."""
    answer = asyncio.run(_asked(own.folder, own.name, own.control))
    print(json.dumps(answer) if own.json else _as_text(answer))
    return 0


async def _asked(folder: Path | None, name: str, command: str) -> CommandAnswer:
    """Asks the worker of `folder` if given, else the running worker called `name`, or the only one."""
    if folder is not None:
        return await ask(folder, command)
    worker = the_one(await running_workers(), name)
    return await ask_at(worker.socket, command, f"worker {worker}")


def _as_text(answer: CommandAnswer) -> str:
    if set(answer) == {"text"}:
        return str(answer["text"])
    width = max(map(len, answer))
    return "\n".join(f"{key.replace('_', ' '):<{width}}  {value}" for key, value in answer.items())
