"""Arguments that the commands share: config files, preset, dotted overrides."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from echo2.base.errors import ConfigError
from echo2.cli.parser import all_options, unknown
from echo2.config.load import load_config, parse_overrides
from echo2.config.run import RunConfig

_OVERRIDE = re.compile(r"--[a-z_0-9]+\.[a-z_0-9.]+")


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
    parser.add_argument(
        "--config",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="run file in TOML; may be repeated, the later one wins",
    )
    parser.add_argument("--preset", help="start from the defaults of a setting: local (one machine), lan or wan")
    parser.epilog = "Any option of the config can be given as --section.option VALUE; `echo2 config show` lists them."


def add_log_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--log-json", action="store_true", help="log one JSON object per line")
    parser.add_argument("-v", "--verbose", action="store_true", help="log details of planner and broadcast, too")


def make_importable(files: Sequence[Path]) -> None:
    """Puts the run files' folders first on the module path, as Python does with a script's folder: a user's own task lies beside
    the run file that names it. The first file's folder comes before the second's."""
    for path in reversed(files):
        folder = str(path.resolve().parent)
        if folder not in sys.path:
            sys.path.insert(0, folder)


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> tuple[argparse.Namespace, RunConfig]:
    """Returns the command's own arguments and the resolved config."""
    own, rest = parser.parse_known_args(with_values(arguments))
    check_options(rest, parser)
    make_importable(own.config)
    return own, load_config(own.config, own.preset, parse_overrides(rest))


def check_options(rest: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """Raises ConfigError for an unrecognised option without a dot, which cannot be a config override either."""
    for word in rest:
        if word.startswith("--") and "." not in word.partition("=")[0]:
            raise ConfigError(f"command line: {unknown([word], all_options(parser))}")
