"""Argument parsing whose errors say what was expected, what came and what may have been meant."""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from echo2.base.errors import ConfigError
from echo2.base.units import parse_duration_s

if TYPE_CHECKING:
    from echo2.config.run import RunConfig

_KINDS = {"int": "a whole number", "float": "a number", "Path": "a path"}  # how a type is told


class Parser(argparse.ArgumentParser):
    """An ArgumentParser with errors in echo2's style; exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.print_usage()
        self.exit(2, f"error: command line: {self._explained(message)}\n")

    def _explained(self, message: str) -> str:
        """Argparse's own texts name neither what was expected nor what came."""
        if match := re.fullmatch(r"unrecognized arguments: (.*)", message):
            return unknown(match[1].split(), all_options(self))
        if match := re.fullmatch(r"argument (\S+): invalid choice: (.+?) \(choose from (.*)\)", message):
            name, value, known = match[1], match[2].strip("'"), match[3].replace("'", "")
            where = "" if name == "COMMAND" else f"{name}: "
            return f"{where}expected one of {known}, got {value!r}{_perhaps(value, known.split(', '))}"
        if match := re.fullmatch(r"the following arguments are required: (.*)", message):
            return f"expected {match[1]}, got none; {self.prog} --help explains it"
        if match := re.fullmatch(r"argument (\S+): invalid (\w+) value: (.*)", message):
            return f"{match[1]}: expected {_KINDS.get(match[2], match[2])}, got {match[3]}"
        return message.removeprefix("argument ")


def count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number from 0, got {text!r}")
    return int(text)


def seconds(text: str) -> float:
    try:
        return parse_duration_s(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("duration: ")) from error


def all_options(parser: argparse.ArgumentParser) -> list[str]:
    names = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            names += [option for inner in action.choices.values() for option in all_options(inner)]
    return names


def unknown(words: Iterable[str], known: Iterable[str]) -> str:
    """Returns the error text for an option that the command does not know. `known`: those of all commands."""
    first, known = next(iter(words)), list(known)
    if (name := first.partition("=")[0]) in known:
        return f"no such option: {name} is another command's; put --help after this command for its own"
    if not first.startswith("-"):
        return f"expected no further argument, got {first!r}"
    return f"no such option: {first}{_perhaps(name, known)}"


def _perhaps(value: str, known: list[str]) -> str:
    near = get_close_matches(value, known, 1, 0.6)
    return f" (did you mean {near[0]}?)" if near else ""


_OVERRIDE = re.compile(r"--[a-z_0-9]+\.[a-z_0-9.]+")  # --section.option


def with_values(arguments: Sequence[str] | None) -> list[str]:
    """Joins `--section.option VALUE` into one word, so that argparse does not take VALUE for a positional argument."""
    words: list[str] = []
    for word in sys.argv[1:] if arguments is None else arguments:
        if words and _OVERRIDE.fullmatch(words[-1]) and not word.startswith("--"):
            words[-1] += f"={word}"
        else:
            words.append(word)
    return words


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds --config and --preset; other `--section.option value` pairs are overrides."""
    text = "run file in TOML; may be repeated, the later one wins"
    parser.add_argument("--config", type=Path, action="append", default=[], metavar="FILE", help=text)
    parser.add_argument("--preset", help="start from the defaults of a setting: local (one machine), lan or wan")
    parser.epilog = "Any option of the config can be given as --section.option VALUE; `echo2 config show` lists them."


def add_daemon_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    parser.add_argument("--log-json", action="store_true", help="log one JSON object per line")
    parser.add_argument("-v", "--verbose", action="store_true", help="log details of planner and broadcast, too")


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> tuple[argparse.Namespace, RunConfig]:
    """Returns the command's own arguments and the resolved config."""
    args, rest = parser.parse_known_args(with_values(arguments))
    check_options(rest, parser)
    return args, config_of(args.config, args.preset, rest)


def config_of(files: Sequence[Path], preset: str | None, rest: Sequence[str]) -> RunConfig:
    """Returns the resolved config of run files and overrides. Puts the files' folders first on the module path, as Python does with
    a script's folder: a user's own task lies beside the run file that names it."""
    from echo2.config.load import load_config, parse_overrides  # imports pydantic, as slow as all the rest

    for path in reversed(files):
        folder = str(path.resolve().parent)
        if folder not in sys.path:
            sys.path.insert(0, folder)
    return load_config(files, preset, parse_overrides(rest))


def check_options(rest: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """Raises ConfigError for an unrecognised option without a dot, which cannot be a config override either."""
    for word in rest:
        if word.startswith("--") and "." not in word.partition("=")[0]:
            raise ConfigError(f"command line: {unknown([word], all_options(parser))}")


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
        raise ConfigError(
            f"join link: expected a file with a link at {path}, found nothing there: echo-coordinator writes RUNS/NAME/links "
            "when it starts"
        ) from None
    except OSError as error:
        raise ConfigError(f"join link: expected a file with a link at {path}, got: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(
            f"join link: expected a file with a link at {path}, got something that is not UTF-8 text"
        ) from None


MODULES = {
    "engine": ("torch", "transformers", "safetensors"),
    "learner": ("torch", "transformers", "safetensors", "tokenizers", "matplotlib", "reasoning_gym", "math_verify"),
    "tinker": ("tinker",),
}
"""The modules of each extra that its commands import."""


def require_extra(extra: str, command: str) -> None:
    """Raises ConfigError that names what to install, unless all modules of `extra` are there."""
    missing = [name for name in MODULES[extra] if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{command}: expected the packages of echo2[{extra}], {', '.join(missing)} not found; "
            f"install them from echo2's checkout: pip install '.[{extra}]'"
        )
