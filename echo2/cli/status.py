"""`echo2 status`: prints a run's state once. Also makes join links, for `echo2 link`."""

from __future__ import annotations

import asyncio
from pathlib import Path

from google.protobuf import json_format
from rich.console import Console

from echo2.cli.demo.screen import ScreenState, draw
from echo2.cli.link_text import link_text
from echo2.cli.operator import OperatorClient

OPERATOR_FOLDER = Path("~/.config/echo2/operator")


def show_status(link: str, as_json: bool) -> int:
    """Prints the run's status; returns the exit code."""
    return asyncio.run(_show(link_text(link), as_json))


async def _show(link: str, as_json: bool) -> int:
    async with OperatorClient(link, OPERATOR_FOLDER.expanduser()) as operator:
        status = await operator.status()
    if as_json:
        print(json_format.MessageToJson(status, preserving_proto_field_name=True))
        return 0
    Console().print(draw(ScreenState(title=f"run {status.run_id}", status=status)))
    return 0


def make_link(link: str, role: str, lifetime_s: float, use_limit: int, label: str) -> int:
    """Prints a new join link, which cannot be shown again; returns the exit code."""

    async def ask() -> str:
        async with OperatorClient(link_text(link), OPERATOR_FOLDER.expanduser()) as operator:
            return await operator.create_link(role, lifetime_s, use_limit, label)

    print(asyncio.run(ask()))
    return 0
