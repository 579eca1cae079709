"""Loads a config: preset, then TOML files, then dotted overrides; the last one that sets an option wins.

Guarantees: every error is a `ConfigError` that names the option by its dotted path, what was expected and what came.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from echo2.base.errors import ConfigError
from echo2.config.fields import RATE
from echo2.config.presets import PRESETS
from echo2.config.run import RunConfig
from echo2.config.wording import problem

ERRORS_SHOWN_MAX = 10


def load_config(
    files: Sequence[Path] = (), preset: str | None = None, overrides: Mapping[str, str] | None = None
) -> RunConfig:
    """Returns the resolved config. `overrides` maps dotted names to text as typed on the command line."""
    tree: dict[str, Any] = {}
    for path in files:
        _merge(tree, _read_toml(path))
    preset = preset or tree.pop("preset", None)
    tree.pop("preset", None)
    if preset is not None:
        if preset not in PRESETS:
            raise ConfigError(f"preset: expected one of {', '.join(sorted(PRESETS))}, got {preset!r}")
        base: dict[str, Any] = json.loads(json.dumps(PRESETS[preset]))
        _merge(base, tree)
        tree = base
    for name, text in (overrides or {}).items():
        _set_dotted(tree, name, _value_of(text))
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_explained(error, files)) from None


def parse_overrides(arguments: Iterable[str]) -> dict[str, str]:
    """`--learner.lr 1e-6` or `--learner.lr=1e-6` -> {"learner.lr": "1e-6"}."""
    found: dict[str, str] = {}
    waiting: str | None = None
    for argument in arguments:
        if waiting is not None:
            found[waiting] = argument
            waiting = None
        elif argument.startswith("--") and "." in argument.split("=", 1)[0]:
            name, equals, text = argument[2:].partition("=")
            name = name.replace("-", "_")
            if equals:
                found[name] = text
            else:
                waiting = name
        else:
            if argument.endswith(".toml"):
                raise ConfigError(f"command line: a run file is given as --config {argument}, got {argument!r} alone")
            raise ConfigError(f"command line: expected an override such as --learner.lr 1e-6, got {argument!r}")
    if waiting is not None:
        raise ConfigError(f"command line: expected a value after --{waiting}, got nothing")
    return found


def to_toml(config: BaseModel, with_descriptions: bool = False, notes: Mapping[str, str] | None = None) -> str:
    """The resolved config as TOML that `load_config` reads back to an equal config. `notes`: comments by option."""
    lines: list[str] = []
    for name, value in config:
        if isinstance(value, BaseModel):
            about = {key.partition(".")[2]: note for key, note in (notes or {}).items() if key.startswith(f"{name}.")}
            lines += [f"[{name}]", *_section_lines(value, with_descriptions, about), ""]
    return "\n".join(lines)


def _section_lines(section: BaseModel, with_descriptions: bool, notes: Mapping[str, str]) -> list[str]:
    lines: list[str] = []
    for name, value in section:
        if value is None:
            continue
        if with_descriptions:
            lines.append(f"# {type(section).model_fields[name].description}")
        if name in notes:
            lines.append(f"# {notes[name]}")
        is_rate = RATE in type(section).model_fields[name].metadata and value
        lines.append(f'{name} = "{value!r}B/s"' if is_rate else f"{name} = {_toml_value(value)}")
    return lines


def _toml_value(value: object) -> str:
    if isinstance(value, BaseModel):
        value = dict(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(str(k))} = {_toml_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_toml_value(v) for v in value) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False, default=str)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"config file {path}: expected a TOML file, found nothing there") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path}: cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"config file {path}: expected TOML, got a syntax error: {error}") from None


def _merge(into: dict[str, Any], new: Mapping[str, Any]) -> None:
    for key, value in new.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict) and key != "args":
            _merge(into[key], value)
        else:
            into[key] = value


def _set_dotted(tree: dict[str, Any], name: str, value: object) -> None:
    *folders, leaf = name.split(".")
    for folder in folders:
        tree = tree.setdefault(folder, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"--{name}: {folder} is an option, not a section")
    tree[leaf] = value


def _value_of(text: str) -> object:
    """The TOML value of `text` if it is one, else the text itself (so `--run.name demo` needs no quotes)."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _explained(error: ValidationError, files: Sequence[Path]) -> str:
    where = f" in {', '.join(str(path) for path in files)}" if files else ""
    details = [problem(item) for item in error.errors()[:ERRORS_SHOWN_MAX]]
    more = len(error.errors()) - ERRORS_SHOWN_MAX
    return f"config{where}: " + "; ".join(details) + (f"; and {more} more" if more > 0 else "")
