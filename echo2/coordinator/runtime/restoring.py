"""Restores what an earlier process knew of the learner, so that the page of a finished run shows how it ended."""

from __future__ import annotations

import json
from collections.abc import Mapping

from echo2.base.ids import PeerId
from echo2.coordinator.board import LearnerBoard, Totals
from echo2.wire.coordinator import learner_hello_from_message, learner_report_from_message
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb


def restore_board(board: LearnerBoard, meta: Mapping[str, str], now: float) -> None:
    """Fills the board from the saved `meta`; fields that were not saved stay as they are. MalformedMessage if it is invalid."""
    board.totals = Totals(**json.loads(meta.get("totals", "{}")))
    if "learner_hello" in meta:
        hello = pb.LearnerHello.FromString(bytes.fromhex(meta["learner_hello"]))
        board.hello = learner_hello_from_message(hello, "the saved learner")
        board.peer_id, board.changed_at = PeerId(meta["learner_peer_id"]), now
    if "learner_report" in meta:
        report = pb.LearnerReport.FromString(bytes.fromhex(meta["learner_report"]))
        board.report = learner_report_from_message(report, "the saved learner")
