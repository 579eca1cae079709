"""`echo2 ctl RUN ...`: what the page's buttons do, from a terminal, on a run that goes on.

Guarantees: authenticated as an operator; the coordinator checks, logs and saves each change before it answers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

from echo2.base.errors import ConfigError
from echo2.cli.operator import OPERATOR_FOLDER, OperatorClient
from echo2.cli.options import link_text

# Short names of what `set` changes most.
SETTINGS = {"budget": "usd_budget", "cap": "usd_per_hour_cap", "S": "staleness_bound"}
WORKER_STATES = {"drain": "draining", "ban": "banned", "quarantine": "quarantined"}
"""Words of the command for states; active, standby and automatic stand for themselves."""
# What follows the run file, as usage says it.
WORDS = """advice | set budget=USD cap=USD/H S=STEPS price.OFFER=USD/H | pause [REASON] | resume | stop [REASON] |
worker NAME drain|standby|active|automatic|quarantine|ban [REASON] | do ACTION JSON"""


def control(own: argparse.Namespace) -> int:
    """Carries out one command; returns the exit code."""
    name, body = request_of(own.words)
    answer = asyncio.run(_act(own.run, name, body))
    print(
        "\n".join(advice_lines(answer)) if name == "run/advice" else json.dumps(answer, indent=2) if answer else "done"
    )
    return 0


async def _act(run: str, name: str, body: dict[str, Any]) -> dict[str, Any]:
    link = Path(run) / "links" / "operator.link"
    text = link_text(f"@{link}") if link.is_file() else link_text(run)
    async with OperatorClient(text, OPERATOR_FOLDER.expanduser()) as operator:
        return await operator.act(name, body)


def request_of(words: list[str]) -> tuple[str, dict[str, Any]]:
    """The action and its arguments. ConfigError if the words are none."""
    match words:
        case ["advice"]:
            return "run/advice", {}
        case ["set", *changes] if changes:
            return "run/settings", _settings(changes)
        case ["pause" | "stop" as what, *reason]:
            return f"run/{what}", {"reason": " ".join(reason)}
        case ["resume"]:
            return "run/resume", {}
        case ["worker", whom, state, *reason]:
            activation = WORKER_STATES.get(state, state)
            return "workers/state", {"peer_id": whom, "activation": activation, "reason": " ".join(reason)}
        case ["do", action, text]:
            try:
                return action, json.loads(text)
            except ValueError as error:
                raise ConfigError(f"echo2 ctl: {action}: expected JSON, got: {error}") from None
    raise ConfigError(f"echo2 ctl: expected one of: {' '.join(WORDS.split())}; got {' '.join(words)!r}")


def _settings(changes: list[str]) -> dict[str, Any]:
    body: dict[str, Any] = {}
    for change in changes:
        name, _, text = change.partition("=")
        try:
            value = float(text)
        except ValueError:
            raise ConfigError(f"echo2 ctl: {change!r}: expected NAME=NUMBER") from None
        if name.startswith("price."):
            body.setdefault("prices", {})[name.removeprefix("price.")] = value
        elif name in SETTINGS:
            body[SETTINGS[name]] = value
        else:
            raise ConfigError(f"echo2 ctl: {name!r}: expected {', '.join(SETTINGS)} or price.OFFER")
    return body


def advice_lines(advice: dict[str, Any]) -> list[str]:
    """Formats the advice: what to do, in order, then the state of the run."""
    end = advice["hours_left"]
    lines = [f"{number}. {step['text']}" for number, step in enumerate(advice["steps"], 1)]
    lines.append(f"limits   {advice['limits']}")
    ends = f"ends in {end:.1f} h" if end else "its end is not known"
    lines.append(f"trains   {advice['utilisation'] or 0.0:.0%} of the time; {ends}")
    return [*lines, *(f"assumed  {one}" for one in advice["assumed"])]
