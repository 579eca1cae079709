"""Argument parsing whose errors say what was expected, what came and what may have been meant."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import NoReturn

_UNKNOWN = re.compile(r"unrecognized arguments: (.*)")
_CHOICE = re.compile(r"argument (\S+): invalid choice: (.+?) \(choose from (.*)\)")
_MISSING = re.compile(r"the following arguments are required: (.*)")
_TYPE = re.compile(r"argument (\S+): invalid (\w+) value: (.*)")
_KINDS = {"int": "a whole number", "float": "a number", "Path": "a path"}


class Parser(argparse.ArgumentParser):
    """An ArgumentParser with errors in echo2's style; exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.print_usage()
        self.exit(2, f"error: command line: {self._told(message)}\n")

    def _told(self, message: str) -> str:
        if found := _UNKNOWN.fullmatch(message):
            return unknown(found[1].split(), all_options(self))
        if found := _CHOICE.fullmatch(message):
            name, came, known = found[1], found[2].strip("'"), found[3].replace("'", "")
            where = "" if name == "COMMAND" else f"{name}: "
            return f"{where}expected one of {known}, got {came!r}{_perhaps(came, known.split(', '))}"
        if found := _MISSING.fullmatch(message):
            return f"expected {found[1]}, got none; {self.prog} --help explains it"
        if found := _TYPE.fullmatch(message):
            return f"{found[1]}: expected {_KINDS.get(found[2], found[2])}, got {found[3]}"
        return message


def all_options(parser: argparse.ArgumentParser) -> list[str]:
    """Returns every long option of a command and its subcommands, as written."""
    found = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found += [option for inner in action.choices.values() for option in all_options(inner)]
    return found


def unknown(words: Iterable[str], known: Iterable[str]) -> str:
    """Returns the error text for an unknown option."""
    first = next(iter(words))
    return f"no such option: {first}{_perhaps(first.partition('=')[0], list(known))}"


def _perhaps(came: str, known: list[str]) -> str:
    near = get_close_matches(came, known, 1, 0.6)
    return f" (did you mean {near[0]}?)" if near else ""
