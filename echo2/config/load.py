"""Loads a config: preset, then TOML files, then dotted overrides; the last one that sets an option wins.

Guarantees: every error is a `ConfigError` that names the option by its dotted path, what was expected, what came and what to do;
pydantic's own texts are never shown, and a bound without an obvious reason comes with one.
"""

from __future__ import annotations

import json
import logging
import tomllib
import types
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from datetime import date, time
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from echo2.base.errors import ConfigError
from echo2.base.units import LinkShape
from echo2.config.run import RATE, RunConfig

ERRORS_SHOWN_MAX = 10  # half a screen

PRESETS: dict[str, dict[str, Any]] = {
    "local": {"coordinator": {"host": "127.0.0.1"}},  # one machine: everything on loopback
    "lan": {"coordinator": {"host": "::"}},  # one building
    "wan": {"coordinator": {"host": "::"}},  # rented machines across the Internet
}
"""What differs from the defaults."""
FORMER = {
    "agent.restarts": "an episode that is lost begins again twice",
    "coordinator.relay_port": "the relay listens beside coordinator.port",
}
"""Options that run files may still set, and what holds instead: nothing that would make another run of theirs."""
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a string",
    "dict": "a table, such as { name = 1 }",
    "tuple": "a list, such as [\"one\", \"two\"]",
}  # fmt: skip
_log = logging.getLogger("echo2.config")


def load_config(
    files: Sequence[Path] = (), preset: str | None = None, overrides: Mapping[str, str] | None = None
) -> RunConfig:
    """Returns the resolved config. `overrides` maps dotted names to text as typed on the command line."""
    from_files: dict[str, Any] = {}
    for path in files:
        _merge(from_files, read_toml(path))
    of_files = from_files.pop("preset", None)
    preset = preset or of_files
    if preset is not None and str(preset) not in PRESETS:
        raise ConfigError(f"preset: expected one of {', '.join(sorted(PRESETS))}, got {preset!r}")
    tree: dict[str, Any] = deepcopy(PRESETS.get(str(preset), {}))
    _merge(tree, from_files)
    for name, text in (overrides or {}).items():
        field, value = _field(RunConfig, name.split(".")), _value_of(text)
        is_text = field is not None and field.annotation is str and not isinstance(value, str)
        _set_dotted(tree, name, text if is_text else value)  # a run may be named 20261130
    for name, instead in FORMER.items():
        section, _, option = name.partition(".")
        if isinstance(tree.get(section), dict) and option in tree[section]:
            _log.warning("%s = %s: no longer an option and left out: %s", name, tree[section].pop(option), instead)
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_explained(error, files)) from None


def parse_overrides(arguments: Iterable[str]) -> dict[str, str]:
    """`--learner.lr 1e-6` or `--learner.lr=1e-6` -> {"learner.lr": "1e-6"}."""
    overrides: dict[str, str] = {}
    rest = iter(arguments)
    for argument in rest:
        name, equals, text = argument.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if any("\ud800" <= letter <= "\udfff" for letter in argument):
            raise ConfigError(f"command line: expected UTF-8 text, got {argument!r}")
        if argument.endswith(".toml") and not argument.startswith("--"):
            raise ConfigError(f"command line: a run file is given as --config {argument}, got {argument!r} alone")
        if not argument.startswith("--") or "." not in name:
            raise ConfigError(f"command line: expected an override such as --learner.lr 1e-6, got {argument!r}")
        try:
            overrides[name] = text if equals else next(rest)
        except StopIteration:
            raise ConfigError(f"command line: expected a value after --{name}, got nothing") from None
    return overrides


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
    if isinstance(value, LinkShape):
        shape = f"{value.uplink_bytes_per_s!r}B/s {value.downlink_bytes_per_s!r}B/s {value.rtt_s!r}s"
        value = "" if value.is_off else shape
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(str(k))} = {_toml_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_toml_value(v) for v in value) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False, default=str).replace("\x7f", "\\u007f")  # which JSON takes as it is


def read_toml(path: Path) -> dict[str, Any]:
    """Reads a TOML file. Raises `ConfigError` that names it."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: expected a TOML file, found nothing there") from None
    except OSError as error:
        raise ConfigError(f"{path}: expected a TOML file, got: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: expected a TOML file, got something that is not UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        hint = "; a text stands in quotes" if "Invalid value" in str(error) else ""
        raise ConfigError(f"{path}: expected TOML, got a syntax error: {error}{hint}") from None


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
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return text if isinstance(value, date | time) else value  # as of a run that is named after its day


def _explained(error: ValidationError, files: Sequence[Path]) -> str:
    where = f" in {', '.join(str(path) for path in files)}" if files else ""
    details = [problem(item) for item in error.errors()[:ERRORS_SHOWN_MAX]]
    more = len(error.errors()) - ERRORS_SHOWN_MAX
    return f"config{where}: " + "; ".join(details) + (f"; and {more} more" if more > 0 else "")


def problem(item: Mapping[str, Any]) -> str:
    """Describes one of pydantic's errors in one clause that begins with the option's dotted name."""
    parts = [str(part) for part in item["loc"]]
    name = ".".join(parts) or "config"
    if item["type"] == "extra_forbidden":
        near = meant(name)
        return f"{name}: no such option ({f'did you mean {near}?' if near else '`echo2 config show` lists them'})"
    message = str(item["msg"]).removeprefix("Value error, ")
    field = _field(RunConfig, parts)
    if item["type"] in ("value_error", "assertion_error") or field is None:  # then the text is ours
        return f"{name}: {message}" + ("" if "got " in message else f", got {item['input']!r}")
    why = field.json_schema_extra.get("why") if isinstance(field.json_schema_extra, dict) else ""
    return f"{name}: expected {_expected(field)}, got {item['input']!r}{f' ({why})' if why else ''}"


def meant(name: str) -> str:
    """Guesses the intended option: the most similar name in the same section, else the same name in another section, else a
    similar section; empty if there is none."""
    section, _, last_part = name.rpartition(".")
    known = [option.rpartition(".") for option in option_names()]
    like = get_close_matches(last_part, [last for first, _, last in known if first == section], 1, 0.65)
    elsewhere = [f"{first}.{last}" for first, _, last in known if last == last_part]
    sections = get_close_matches(name.partition(".")[0], [first for first, _, _ in known], 1, 0.65)
    if like:
        return f"{section}.{like[0]}" if section else like[0]
    if elsewhere:
        return elsewhere[0]
    return f"[{sections[0]}]" if sections and not any(name.partition(".")[0] == first for first, _, _ in known) else ""


def option_names(model: type[BaseModel] = RunConfig, prefix: str = "") -> list[str]:
    names: list[str] = []
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            names += option_names(kind, f"{prefix}{name}.")
        else:
            names.append(f"{prefix}{name}")
    return names


def _field(model: type[BaseModel], parts: Sequence[str]) -> FieldInfo | None:
    """The field at a path; of an entry of a list or table, what such an entry is."""
    field: FieldInfo | None = None
    for part in parts:
        kind: Any = model if field is None else field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            field = kind.model_fields.get(part, field)
        elif get_origin(kind) in (dict, tuple):
            field = FieldInfo.from_annotation(get_args(kind)[-1 if get_origin(kind) is dict else 0])
    return field


def _expected(field: FieldInfo) -> str:
    kind: Any = field.annotation
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return "a section of options"
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(_of_kind(part) for part in get_args(kind))
    has_example = isinstance(field.default, tuple) and field.default
    expected = f"a list, such as {list(field.default)}" if has_example else _of_kind(kind)
    # Reversed: the field's own bound comes last.
    low = next((bound for bound in reversed(field.metadata) if isinstance(bound, Ge | Gt)), None)
    high = next((bound for bound in field.metadata if isinstance(bound, Le | Lt)), None)
    length = next((bound.max_length for bound in field.metadata if "MaxLen" in type(bound).__name__), None)
    least_length = next((f"{bound.min_length} to" for bound in field.metadata if isinstance(bound, MinLen)), "at most")
    match low, high:
        case Ge(ge=least), Lt(lt=most):
            return f"{expected} from {least} to below {most:.15g}"
        case Ge(ge=least), Le(le=most):
            return f"{expected} from {least} to {most}"
        case Gt(gt=least), Le(le=most):
            return f"{expected} above {least} and at most {most:.15g}"
        case Ge(ge=least), None:
            return f"{expected} of at least {least}"
        case Gt(gt=least), None:
            return f"{expected} above {least}"
    return f"{expected} of {least_length} {length} {'characters' if kind is str else 'entries'}" if length else expected


def _of_kind(kind: Any) -> str:
    if choices := [str(part) for part in get_args(kind) if isinstance(part, str)]:
        return f"one of {', '.join(choices)}"
    inner = [_of_kind(part) for part in get_args(kind) if part is not Ellipsis and get_origin(kind) is tuple]
    if inner and inner[0].startswith("one of"):
        return f"a list of {inner[0].removeprefix('one of ')}"
    origin = get_origin(kind) or kind
    return _KINDS.get(getattr(origin, "__name__", ""), "another value")
