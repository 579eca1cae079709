"""Mutated input for every decoder: an `EchoError` or a value, in bounded time and memory. `make soak` runs millions."""

import logging
from collections.abc import Iterator

import pytest

from tests.fuzz_targets import CORPUS, TARGETS, Fuzzer

SLOW = {"config", "journal"}  # they read files


@pytest.fixture(autouse=True)
def quiet_journal() -> Iterator[None]:
    """It tells of every torn end that it cuts off."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", TARGETS)
def test_kept_inputs_are_decoded_and_mutated_ones_decoded_or_refused(name: str) -> None:
    """Of the kept ones all but a ticket that the test's own coordinator did not sign; the rest raise no surprise."""
    fuzzer = Fuzzer(TARGETS[name], seed=1)
    for path in sorted((CORPUS / name).iterdir()):
        fuzzer.once(path.read_bytes())
    assert fuzzer.outcomes["accepted"] > 0 or name == "rollout_report", fuzzer.outcomes
    fuzzer.run(75 if name in SLOW else 1500)
    refused = sum(count for outcome, count in fuzzer.outcomes.items() if outcome != "accepted")
    assert refused > 0, "the mutations reach nothing"
