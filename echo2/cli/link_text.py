"""Join links on the command line: the link itself, or @FILE that holds it (so that secrets stay out of `ps`)."""

from __future__ import annotations

from pathlib import Path

from echo2.base.errors import ConfigError


def link_file(argument: str) -> Path | None:
    """Where a link lies that was given as `@FILE`: it may be another one by the time that it is needed again."""
    return Path(argument[1:]) if argument.startswith("@") else None


def link_text(argument: str) -> str:
    """The text of a join link given directly or as `@FILE`."""
    path = link_file(argument)
    if path is None:
        return argument
    try:
        return path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        raise ConfigError(f"join link: expected a file with a link at {path}, found nothing there") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"join link: {path} cannot be read: {error}") from None
