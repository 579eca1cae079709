"""Arguments that the commands share: config files, preset, dotted overrides."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from echo2.config.load import load_config, parse_overrides
from echo2.config.run import RunConfig


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds --config and --preset; other `--section.option value` pairs are overrides."""
    parser.add_argument(
        "--config", type=Path, action="append", default=[], metavar="FILE", help="TOML file; may be repeated"
    )
    parser.add_argument("--preset", help="start from a preset: local, lan or wan")
    parser.epilog = "Any option of the config can be given as --section.option VALUE; `echo2 config show` lists them."


def add_log_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--log-json", action="store_true", help="log one JSON object a line")
    parser.add_argument("--verbose", action="store_true", help="log more")


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> tuple[argparse.Namespace, RunConfig]:
    """The command's own arguments and the resolved config."""
    own, rest = parser.parse_known_args(arguments)
    return own, load_config(own.config, own.preset, parse_overrides(rest))
