"""Writes docs/reference from the code: options, commands, metrics, exit codes; with --check says which differ.

python docs/generate.py [--check]
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args
from unittest import mock

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from echo2.base import errors
from echo2.cli import coordinator, learner, main, worker
from echo2.config.load import PRESETS, to_toml
from echo2.config.run import RunConfig
from echo2.coordinator.web.page import METRICS, WORKER_METRICS

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "reference"
NOTE = "<!-- Made by docs/generate.py; `make docs` makes it again. -->\n"


RULES = """
## What is no option

| what | follows from |
|---|---|
| LoRA's alpha; AdamW's betas and epsilon | twice the rank; 0.9, 0.99, 1e-8 |
| largest norm of a gradient; cap of truncated weights | 1; 2 |
| M2PO's limit; the divisor of the loss | a mean square of 0.04; the loss, as in its paper |
| threads of the trainer; processes of rewards | `OMP_NUM_THREADS`, else all cores but one; a quarter of the cores, at least two |
| a lost episode | restarted twice |
| heartbeats | every 0.5 s on one machine, else every 5 s |
| a silent worker | suspect after 3 heartbeats (at least 3 s), gone after 9 |
| reports of partial rollouts; a lease without progress | every 2 s, or every second heartbeat; goes on elsewhere after 120 s |
| aim of the learner's utilisation | 0.98 |
| chunks; coding of deltas | up to 256 KiB, smaller on slow uplinks and of small artifacts; by link and cores |
| disk for chunks; checkpoints kept; snapshots for newcomers | twice the published weights; the newest two; every 16 versions |
| addresses of learner and worker | loopback if the run is on this machine, else all |
| what each kind of machine delivered | `~/.local/share/echo2/machines.json` |
"""


def configuration() -> str:
    """One table for each section of the config."""
    parts = [
        NOTE + "# Configuration\n",
        "One TOML file for the run, or one per role; `--section.option VALUE` beats the file, which beats the preset. "
        "Durations take `ms`, `s`, `min`, `h`, `d`; sizes `B`, `KiB`, `MiB`, `GiB`; rates "
        "`bit/s` to `gbit/s` and `B/s` to `GiB/s`. `echo2 config show FILE` prints what results.\n",
        'Presets (`preset = "wan"` at the top of the file, or `--preset wan`) differ from the defaults in:\n',
    ]
    for preset, sections in PRESETS.items():
        listed = [f"`{s}.{n} = {v!r}`".replace("'", '"') for s, fields in sections.items() for n, v in fields.items()]
        parts.append(f"- **{preset}**: {', '.join(listed)}")
    for name, field in RunConfig.model_fields.items():
        section = field.annotation
        assert isinstance(section, type) and issubclass(section, BaseModel), name
        parts.append(f"\n## [{name}]\n\n| option | default | allowed | what it changes |\n|---|---|---|---|")
        parts += [_option(name, option, found) for option, found in section.model_fields.items()]
    return "\n".join(parts) + "\n" + RULES


def _option(section: str, name: str, field: FieldInfo) -> str:
    value = tomllib.loads(to_toml(RunConfig()))[section][name]
    shown = {True: "true", False: "false"}.get(value, f'"{value}"') if isinstance(value, bool | str) else value
    return f"| `{section}.{name}` | `{shown}` | {_allowed(field)} | {_cell(field.description or '')} |"


def _allowed(field: FieldInfo) -> str:
    choices = get_args(field.annotation)
    if choices and all(isinstance(choice, str) for choice in choices):
        return ", ".join(f"`{choice}`" for choice in choices)
    bounds: dict[str, Any] = {}
    for rule in field.metadata:
        bounds |= {
            key: rule_bound for key in ("ge", "gt", "le", "lt") if (rule_bound := getattr(rule, key, None)) is not None
        }
    if "gt" in bounds:
        bounds.pop("ge", None)
    kinds = (
        ["integer"] if getattr(field.annotation, "__name__", "table") == "int" else []
    )  # the default shows the others
    if "ge" in bounds and "le" in bounds:
        return " ".join([*kinds, f"{bounds['ge']} to {bounds['le']}"])
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    return ", ".join([*kinds, *(f"{signs[key]} {bound}" for key, bound in bounds.items())])


def commands() -> str:
    """Each command with what it does; `--help` lists its arguments, as its own parser knows them."""
    parts = [NOTE + "# Commands\n"]
    parts.append(
        "`COMMAND --help` explains the arguments. Commands with a config also take `--section.option VALUE` for each option of "
        "the [configuration](configuration.md). Links may be given as `@FILE`.\n"
    )
    parts.append("| command | what it does |\n|---|---|")
    for module in (main, coordinator, learner, worker):
        parts += _described(_parser_of(module.main))
    return "\n".join(parts) + "\n"


class _Caught(Exception):
    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def _parser_of(run: Callable[[Sequence[str]], int]) -> argparse.ArgumentParser:
    """The parser that a command makes, at the moment when it would read its arguments."""

    def catch(self: argparse.ArgumentParser, *_: object, **__: object) -> None:
        raise _Caught(self)

    with mock.patch.object(argparse.ArgumentParser, "parse_known_args", catch):
        try:
            run([])
        except _Caught as caught:
            return caught.parser
    raise AssertionError("the command read no arguments")


def _described(parser: argparse.ArgumentParser) -> Iterator[str]:
    own, inner = [], []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            inner += list(dict.fromkeys(action.choices.values()))
        elif not isinstance(action, argparse._HelpAction | argparse._VersionAction):
            own.append(action)
    if own or not inner:
        words = [str(a.metavar or a.dest.upper()) for a in own if not a.option_strings]
        flags = [a.option_strings[0] for a in own if a.option_strings]
        text = f"{_cell(parser.description or '').rstrip('.')}{': ' if flags else ''}{', '.join(f'`{flag}`' for flag in flags)}"
        yield f"| `{' '.join([parser.prog, *words])}` | {text} |"
    for command in inner:
        yield from _described(command)


def metrics() -> str:
    """The names that `/metrics` serves."""
    parts = [NOTE + "# Metrics\n"]
    parts.append(
        "## Of the coordinator\n\n`GET /metrics` on the dashboard's port. 0 stands for what is not known yet.\n"
    )
    parts.append("| metric | meaning |\n|---|---|")
    parts += [f"| `{name}` | {_cell(entry[0])} |" for name, entry in METRICS.items()]
    parts += [f"| `{name}{{worker}}` | {_cell(entry[0])} |" for name, entry in WORKER_METRICS.items()]
    parts.append(
        "\n## Of the learner\n\nThe rows of `metrics.jsonl` are described in [the learner's page](../learner.md).\n"
    )
    return "\n".join(parts) + "\n"


def exit_codes() -> str:
    """The exception tree with the exit code of each branch."""
    parts = [NOTE + "# Errors and exit codes\n"]
    parts.append("A command that fails prints one line, `error: NAME: text`, and ends with the code of its kind.\n")
    parts.append("| error | exit code | meaning |\n|---|---|---|")
    parts += [
        f"| `{name}` | {kind.exit_code} | {_cell((kind.__doc__ or '').splitlines()[0])} |"
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.EchoError)
    ]
    return "\n".join(parts) + "\n"


def performance() -> str:
    """What each benchmark measured last: how many targets were met, and each that was missed."""
    parts = [NOTE + "# Performance\n"]
    parts.append(
        "Measured on two shared cores, `gpu` on an H200: read the ratios, not the seconds. `make bench-NAME` measures again; "
        "`benchmarks/results/NAME.json` keeps every row. Missed targets, of a figure in several settings the worst, are below.\n"
    )
    summary = ["| command | figures | targets met |", "|---|---|---|"]
    missed = ["| command | what | value | unit | target |", "|---|---|---|---|---|"]
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        results = json.loads(path.read_text())
        rows = results["rows"] if isinstance(results, dict) else results
        command = path.stem if path.stem in ("gpu", "mutants", "redteam") else f"bench-{path.stem.replace('_', '-')}"
        judged = [row for row in rows if row.get("target") is not None and row["value"] is not None]
        misses = [row for row in judged if not _is_met(row)]
        summary.append(f"| `make {command}` | {len(rows)} | {len(judged) - len(misses)} of {len(judged)} |")
        missed += [_miss(path.stem, rows) for rows in _by_figure(misses)]
    return "\n".join([*parts, *summary, "", *missed]) + "\n"


def _is_met(row: dict[str, Any]) -> bool:
    if row.get("better") == "lower":
        return bool(row["value"] <= row["target"])
    return bool(row["value"] >= row["target"])


def _by_figure(misses: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Misses of one figure (the text after the setting's colon, unit and target) together, the worst first."""
    groups: dict[tuple[object, ...], list[dict[str, Any]]] = {}
    for row in misses:
        groups.setdefault((row["name"].partition(": ")[2] or row["name"], row.get("unit"), row["target"]), []).append(
            row
        )
    return [
        sorted(rows, key=lambda row: row["value"], reverse=rows[0].get("better") == "lower") for rows in groups.values()
    ]


def _miss(name: str, rows: list[dict[str, Any]]) -> str:
    row, more = rows[0], f" (worst of {len(rows)})" if len(rows) > 1 else ""
    bound = "at most" if row.get("better") == "lower" else "at least"
    cells = (_cell(row["name"]) + more, _number(row["value"]), row.get("unit", ""), f"{bound} {_number(row['target'])}")
    return f"| {name} | {' | '.join(cells)} |"


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("%%", "%")


UNCHECKED = ("performance.md",)
"""Follows the benchmarks' results, which change by being measured."""

PAGES = {
    "configuration.md": configuration,
    "commands.md": commands,
    "metrics.md": metrics,
    "errors.md": exit_codes,
    "performance.md": performance,
}


def write() -> int:
    """Writes or checks all pages; returns the exit code."""
    TARGET.mkdir(exist_ok=True)
    bad = []
    for name, make in PAGES.items():
        path, text = TARGET / name, make()
        if "--check" not in sys.argv:
            path.write_text(text)
        elif not path.exists() or (path.read_text() != text and name not in UNCHECKED):
            bad.append(name)
    for name in bad:
        print(f"docs/reference/{name} differs from the code: run `make docs`", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(write())
