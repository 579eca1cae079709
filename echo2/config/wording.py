"""Error messages for invalid configs, in one style: what was expected, what came, what to do.

Guarantees: pydantic's own texts are never shown; a bound without an obvious reason comes with one. Leaves to others:
finding what is wrong (pydantic), reading files (load).
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from echo2.config.run import RunConfig

WHY = {
    "run.name": "it names a folder",
    "staleness.bound": "0 is synchronous; beyond 64 steps no correction learns",
    "model.lora_rank": "a rank above 4096 is no smaller than the weights",
    "sampling.temperature": "0 is greedy; from 100 on every token is as likely as the next",
    "task.eval_temperature": "0 is greedy; from 100 on every token is as likely as the next",
    "task.eval_samples": "a group holds at most 4096 rollouts",
    "broadcast.chunk_bytes": "smaller chunks cost more signatures than bytes; larger ones delay forwarding",
    "coordinator.over_provision": "four times as many groups would be dropped as stale",
    "worker.slots": "no engine decodes more sequences together",
    "worker.draft_tokens": "longer drafts are rejected more often than they help",
}
"""Reasons for the bounds of options."""
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a string",
    "dict": "a table, such as { name = 1 }",
    "tuple": "a list, such as [\"one\", \"two\"]",
}  # fmt: skip
_OWN_WORDS = ("value_error", "assertion_error")


def problem(item: Mapping[str, Any]) -> str:
    """Describes one of pydantic's errors in one clause that begins with the option's dotted name."""
    parts = [str(part) for part in item["loc"]]
    name = ".".join(parts) or "config"
    if item["type"] == "extra_forbidden":
        near = meant(name)
        return f"{name}: no such option ({f'did you mean {near}?' if near else '`echo2 config show` lists them'})"
    message = str(item["msg"]).removeprefix("Value error, ")
    field = _field(RunConfig, parts)
    if item["type"] in _OWN_WORDS or field is None:
        return f"{name}: {message}" + ("" if "got " in message else f", got {item['input']!r}")
    expected = _expected(field)
    if item["type"] == "string_pattern_mismatch":
        expected = "1 to 63 letters, digits, dots, dashes or underscores that begin with a letter or digit"
    why = WHY.get(name, "")
    return f"{name}: expected {expected}, got {item['input']!r}{f' ({why})' if why else ''}"


def meant(name: str) -> str:
    """Guesses the intended option: the most similar name in the same section, else the same name in another section, else a
    similar section; empty if there is none."""
    section, _, own = name.rpartition(".")
    known = [option.rpartition(".") for option in option_names()]
    like = get_close_matches(own, [last for first, _, last in known if first == section], 1, 0.65)
    elsewhere = [f"{first}.{last}" for first, _, last in known if last == own]
    sections = get_close_matches(name.partition(".")[0], [first for first, _, _ in known], 1, 0.65)
    if like:
        return f"{section}.{like[0]}" if section else like[0]
    if elsewhere:
        return elsewhere[0]
    return f"[{sections[0]}]" if sections and not any(name.partition(".")[0] == first for first, _, _ in known) else ""


def option_names(model: type[BaseModel] = RunConfig, prefix: str = "") -> list[str]:
    """The dotted names of all options."""
    names: list[str] = []
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            names += option_names(kind, f"{prefix}{name}.")
        else:
            names.append(f"{prefix}{name}")
    return names


def _field(model: type[BaseModel], parts: Sequence[str]) -> FieldInfo | None:
    """The field at a path; for an entry of a list or table, the field that holds the list or table."""
    field: FieldInfo | None = None
    for part in parts:
        if part not in model.model_fields:
            return field
        field = model.model_fields[part]
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            model = field.annotation
    return field


def _expected(field: FieldInfo) -> str:
    kind: Any = field.annotation
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return "a section of options"
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(_of_kind(part) for part in get_args(kind))
    expected = _of_kind(kind)
    low = next(
        (bound for bound in reversed(field.metadata) if isinstance(bound, Ge | Gt)), None
    )  # the field's own bound comes last
    high = next((bound for bound in field.metadata if isinstance(bound, Le | Lt)), None)
    length = next((bound.max_length for bound in field.metadata if "MaxLen" in type(bound).__name__), None)
    match low, high:
        case (Ge(ge=least), Le(le=most)):
            return f"{expected} from {least} to {most}"
        case (Gt(gt=least), Le(le=most)):
            return f"{expected} above {least} and at most {most}"
        case (Ge(ge=least), None):
            return f"{expected} of at least {least}"
        case (Gt(gt=least), None):
            return f"{expected} above {least}"
    return f"{expected} of at most {length} characters" if length else expected


def _of_kind(kind: Any) -> str:
    choices = [str(part) for part in get_args(kind) if isinstance(part, str)]
    if choices:
        return f"one of {', '.join(choices)}"
    inner = [_of_kind(part) for part in get_args(kind) if part is not Ellipsis and get_origin(kind) is tuple]
    if inner and inner[0].startswith("one of"):
        return f"a list of {inner[0].removeprefix('one of ')}"
    origin = get_origin(kind) or kind
    return _KINDS.get(getattr(origin, "__name__", ""), "another value")
