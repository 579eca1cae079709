"""What a worker says of where it stands and of what went wrong."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from echo2.wire.bounds import LOG_LINES_MAX, check
from echo2.worker.heartbeat import LogTail
from echo2.worker.machine import MachinePlace, place_of

SKY = {"SKYPILOT_CLUSTER_INFO": json.dumps({"cluster_name": "a", "cloud": "GCP", "region": "us-central1", "zone": "b"})}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, MachinePlace()),
        ({"RUNPOD_POD_ID": "x", "RUNPOD_DC_ID": "EU-NL-1"}, MachinePlace("runpod", "EU-NL-1")),
        ({"VAST_CONTAINERLABEL": "C.123"}, MachinePlace("vast.ai", "")),
        (SKY, MachinePlace("gcp", "us-central1")),
        ({"SKYPILOT_CLUSTER_INFO": "[not json"}, MachinePlace()),
        ({"SKYPILOT_CLUSTER_INFO": "[1]"}, MachinePlace()),
        ({"RUNPOD_POD_ID": "x", "RUNPOD_DC_ID": "a\x1b[2J" + "y" * 100}, MachinePlace("runpod", "a[2J" + "y" * 59)),
    ],
)
def test_a_machine_knows_its_provider_and_region_from_its_environment(
    environment: dict[str, str], expected: MachinePlace
) -> None:
    assert place_of(MachinePlace(), environment) == expected
    assert place_of(MachinePlace("own", "cellar"), environment) == MachinePlace("own", "cellar"), (
        "what is declared counts"
    )


def test_warnings_and_errors_are_kept_within_bounds_and_the_rest_is_not() -> None:
    tail, log = LogTail(), logging.getLogger("tests.log_tail")
    log.propagate = False
    log.setLevel(logging.DEBUG)
    log.addHandler(tail)
    try:
        log.info("all is well")
        assert tail.count == 0
        for number in range(50):
            log.warning("no answer\x1b[2J from %s\n%s", number, "x" * 1000)
        try:
            raise ValueError("boom")
        except ValueError:
            log.error("the engine failed", exc_info=sys.exc_info())
    finally:
        log.removeHandler(tail)
    message = tail.message()
    check(message, "this worker")
    assert (tail.count, len(message.lines)) == (51, LOG_LINES_MAX)
    assert message.lines[-1].is_error and message.lines[-1].text == "the engine failed: ValueError: boom"
    assert not message.lines[0].is_error and message.lines[0].text.startswith("no answer?[2J from 31 xxx")
