"""Join links on the command line: the link itself, or @FILE that holds it (which keeps secrets out of `ps`)."""

from __future__ import annotations

from pathlib import Path

from echo2.base.errors import ConfigError


def link_file(argument: str) -> Path | None:
    """Returns the path of a link given as `@FILE`, else None. Read it again when needed: the file may hold a newer link by then."""
    return Path(argument[1:]) if argument.startswith("@") else None


def link_text(argument: str) -> str:
    """Returns the text of a join link given directly or as `@FILE`. Raises `ConfigError` if the file cannot be read."""
    path = link_file(argument)
    if path is None:
        return argument
    try:
        return path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        raise ConfigError(f"join link: expected a file with a link at {path}, found nothing there") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"join link: {path} cannot be read: {error}") from None
