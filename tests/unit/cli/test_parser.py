"""What a person sees who types a command wrongly: what was expected, what came, what was perhaps meant."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

import pytest

from echo2.cli import coordinator, learner, main, worker


@pytest.mark.parametrize(
    ("program", "typed", "said"),
    [
        (
            main.main,
            ["dmo"],
            "error: command line: expected one of config, demo, run, .*, got 'dmo' \\(did you mean demo\\?\\)",
        ),
        (main.main, ["demo", "--stalness", "3"], "no such option: --stalness \\(did you mean --staleness\\?\\)"),
        (main.main, ["demo", "--steps", "many"], "error: command line: --steps: expected a whole number, got 'many'"),
        (main.main, ["status", "L", "--jsn"], "no such option: --jsn \\(did you mean --json\\?\\)"),
        (main.main, ["export"], "expected run, target, got none; echo2 export --help explains it"),
        (worker.main, ["join", "LINK", "--nmae", "x"], "no such option: --nmae \\(did you mean --name\\?\\)"),
        (worker.main, ["join"], "expected link, got none; echo-worker join --help explains it"),
        (worker.main, ["joyn"], "got 'joyn' \\(did you mean join\\?\\)"),
        (coordinator.main, ["--presett", "wan"], "no such option: --presett \\(did you mean --preset\\?\\)"),
        (coordinator.main, ["hand.toml"], "a run file is given as --config hand.toml"),
        (
            learner.main,
            ["join", "LINK", "--learner.lrr", "1"],
            "learner.lrr: no such option \\(did you mean learner.lr\\?\\)",
        ),
    ],
)
def test_a_wrong_word_is_answered_with_the_one_that_was_meant(
    program: object, typed: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = program(typed)  # type: ignore[operator]
    except SystemExit as ended:
        code = ended.code
    told = capsys.readouterr().err
    assert code == 2, told
    assert re.search(said, told), told


def test_every_argument_of_every_command_is_explained() -> None:
    from docs.generate import _parser_of

    def unexplained(parser: argparse.ArgumentParser) -> Iterator[str]:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for inner in action.choices.values():
                    yield from unexplained(inner)
            elif not action.help:
                yield f"{parser.prog} {action.dest}"

    for program in (main, coordinator, learner, worker):
        assert list(unexplained(_parser_of(program.main))) == []
