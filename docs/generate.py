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
from echo2.config.load import to_toml
from echo2.config.presets import PRESETS
from echo2.config.run import RunConfig
from echo2.coordinator.runtime.web.metrics import METRICS, WORKER_METRICS

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "reference"
NOTE = "<!-- Made by docs/generate.py; `make docs` makes it again. -->\n"


def configuration() -> str:
    """One table for each section of the config."""
    parts = [
        NOTE + "# Configuration\n",
        "One TOML file for the run, or one per role; the same options on the command line as `--section.option VALUE`, which "
        "beat the file, which beats the preset. Durations take `ms`, `s`, `min`, `h`, `d`; sizes `B`, `KiB`, `MiB`, `GiB`; rates "
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
    return "\n".join(parts) + "\n"


def _option(section: str, name: str, field: FieldInfo) -> str:
    value = tomllib.loads(to_toml(RunConfig()))[section][name]
    shown = {True: "true", False: "false"}.get(value, f'"{value}"') if isinstance(value, bool | str) else value
    return f"| `{section}.{name}` | `{shown}` | {_allowed(field)} | {_cell(field.description or '')} |"


def _allowed(field: FieldInfo) -> str:
    choices = get_args(field.annotation)
    if choices and all(isinstance(choice, str) for choice in choices):
        return ", ".join(f"`{choice}`" for choice in choices)
    bounds = []
    for rule in field.metadata:
        for sign, key in ((">=", "ge"), (">", "gt"), ("<=", "le"), ("<", "lt")):
            if (bound := getattr(rule, key, None)) is not None:
                bounds.append(f"{sign} {bound}")
    kind = getattr(field.annotation, "__name__", "table")
    return ", ".join(
        [{"str": "text", "int": "whole number", "float": "number", "bool": "yes or no"}.get(kind, "table"), *bounds]
    )


def commands() -> str:
    """Each command with its arguments, as its own parser knows them."""
    parts = [NOTE + "# Commands\n"]
    parts.append(
        "Commands that take a config also take `--section.option VALUE` for every option of the "
        "[configuration](configuration.md). Links may be given as `@FILE`.\n"
    )
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
        words = [f" {_shown(a)}" for a in own if not a.option_strings] + (
            [" [OPTIONS]"] if any(a.option_strings for a in own) else []
        )
        yield f"## {parser.prog}\n\n    {parser.prog}{''.join(words)}\n\n{parser.description or ''}\n"
        if own:
            yield "| argument | default | what |\n|---|---|---|"
            yield from (_argument(action) for action in own)
            yield ""
    for command in inner:
        yield from _described(command)


def _shown(action: argparse.Action) -> str:
    return str(action.metavar or action.dest.upper())


def _argument(action: argparse.Action) -> str:
    value = "" if action.nargs == 0 else f" {_shown(action)}"
    name = ", ".join(f"`{flag}{value}`" for flag in action.option_strings) or f"`{_shown(action)}`"
    if action.choices and action.option_strings:
        name += f" ({', '.join(map(str, action.choices))})"
    empty = action.default in (None, "", False, [], argparse.SUPPRESS) or action.nargs == 0
    default = "this interpreter" if action.default == sys.executable else f"`{action.default}`"
    return f"| {name} | {'' if empty else default} | {_cell(action.help or '')} |"


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
    """The last results of each benchmark, as its command wrote them."""
    parts = [NOTE + "# Performance\n"]
    parts.append(
        "What each benchmark wrote when it ran last, on two shared cores without a GPU: read the ratios, not the seconds. "
        "`make bench-NAME` runs one again and prints it beside its peers; `benchmarks/README.md` says what each needs.\n"
    )
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        found = json.loads(path.read_text())
        rows = found["rows"] if isinstance(found, dict) else found
        command = "mutants" if path.stem == "mutants" else f"bench-{path.stem.replace('_', '-')}"
        parts.append(f"## make {command}\n")
        parts.append("| what | value | unit | target | |\n|---|---|---|---|---|")
        parts += [_result(row) for row in rows]
        parts.append("")
    return "\n".join(parts) + "\n"


def _result(row: dict[str, Any]) -> str:
    value, target, better = row["value"], row.get("target"), row.get("better", "")
    if target is None or value is None:
        return f"| {_cell(row['name'])} | {_number(value)} | {row.get('unit', '')} | | |"
    is_met = value <= target if better == "lower" else value >= target
    asked = f"{'at most' if better == 'lower' else 'at least'} {_number(target)}"
    unit, verdict = row.get("unit", ""), "met" if is_met else "**missed**"
    return f"| {_cell(row['name'])} | {_number(value)} | {unit} | {asked} | {verdict} |"


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
