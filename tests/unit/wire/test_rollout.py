"""Rollouts, groups, offers and tickets come back as they were; whatever is inconsistent is refused by its field."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.base.errors import BadSignature, EchoError, MalformedMessage, NotAllowed
from echo2.base.ids import GroupId, LeaseId, RunId, Version
from echo2.base.rollout import (
    FinishReason,
    GroupSpec,
    Rollout,
    RolloutSegment,
    SamplingParams,
    SegmentVerdict,
    Verdict,
    VersionSpan,
    Work,
)
from echo2.trust.identity import Identity
from echo2.wire import rollout as wire
from echo2.wire.bounds import check
from echo2.wire.coordinator import offer_from_message
from echo2.wire.gen.echo2.v1 import coordinator_pb2, ingest_pb2, rollout_pb2
from echo2.wire.rollout import Ticket, sign_ticket, verify_ticket

SAMPLING = SamplingParams(temperature=0.5, top_p=0.75, top_k=20, max_new_tokens=64, stop_token_ids=(2, 3), seed=7)
GROUP = GroupSpec(GroupId("g-17"), (1, 5, 300), 8, SAMPLING, 42)
SEGMENT = RolloutSegment(
    GroupId("g-17"),
    3,
    10,
    (5, 6, 7),
    (-0.5, -0.25, -1.0),
    (-0.75, -0.5, -1.5),
    (VersionSpan(Version(4), 2), VersionSpan(Version(5), 1)),
    FinishReason.UNFINISHED,
    12,
)


def test_a_whole_rollout_travels_as_the_segment_at_offset_0() -> None:
    rollout = Rollout(
        GroupId("g"), 1, (4, 5), (-1.0, -2.0), (-1.0, -2.0), (VersionSpan(Version(0), 2),), FinishReason.LENGTH
    )
    assert wire.rollout_from_message(wire.rollout_to_message(rollout)) == rollout
    reply = ingest_pb2.GetPartialsReply(rollouts=[wire.rollout_to_message(rollout)])
    assert wire.rollouts_from_partials(reply) == (rollout,)
    reply.rollouts.add().CopyFrom(wire.rollout_to_message(rollout))
    with pytest.raises(MalformedMessage, match="each index once"):
        wire.rollouts_from_partials(reply)
    with pytest.raises(MalformedMessage, match=r"expected it whole, got tokens 10\.\."):
        wire.rollout_from_message(wire.segment_to_message(SEGMENT))


def broken(made: RolloutSegment | GroupSpec, **fields: object) -> Callable[[], object]:
    """Reads the message of a segment or a group with other `fields`; None: without it."""
    message: Any = wire.segment_to_message(made) if isinstance(made, RolloutSegment) else wire.group_to_message(made)
    for name, value in fields.items():
        if value is None or isinstance(value, list):
            message.ClearField(name)
            getattr(message, name).extend(value or ()) if value is not None else None
        else:
            setattr(message, name, value)

    def decode() -> object:
        check(message, "w")
        return (wire.segment_from_message if isinstance(made, RolloutSegment) else wire.group_from_message)(message)

    return decode


SPAN = rollout_pb2.VersionSpan


@pytest.mark.parametrize(
    ("decode", "words"),
    [
        (broken(SEGMENT, group_id=""), "group_id: expected one, got none"),
        (broken(SEGMENT, group_id="x" * 200), "group_id of w: expected up to 128"),
        (broken(SEGMENT, group_id="a\nb"), "group_id of w: expected up to 128 printable"),
        (broken(SEGMENT, index=5000), "index of w: expected 0 to 4095, got 5000"),
        (broken(SEGMENT, offset=1 << 20), "end of rollout 3 of group g-17"),
        (broken(SEGMENT, token_ids=[1, 2**32 - 1, 3]), "token_ids of w: expected 0 to 2147483647"),
        (broken(SEGMENT, token_ids=[1] * (wire.SEGMENT_TOKENS_MAX + 1)), "number of token_ids"),
        (broken(SEGMENT, logprobs=[-0.5]), "expected 3 log-probabilities, one a token, got 1"),
        (broken(SEGMENT, raw_logprobs=[-0.5, 1.0, -0.5]), "raw_logprobs of w: expected"),
        (broken(SEGMENT, logprobs=[-0.5, float("nan"), -0.5]), "logprobs of w: expected finite"),
        (broken(SEGMENT, version_spans=[SPAN(version=1, count=1)]), "version spans that cover 3 tokens, got 1"),
        (broken(SEGMENT, version_spans=[SPAN(version=1, count=0)]), "count of a version span"),
        (broken(SEGMENT, version_spans=[SPAN(version=1, count=1)] * 4), "number of version_spans"),
        (broken(SEGMENT, version_spans=[SPAN(version=1 << 60, count=3)]), "version of w: expected 0 to"),
        (broken(SEGMENT, finish_reason=17), "finish_reason of w: expected a known one, got 17"),
        (broken(GROUP, prompt_token_ids=[]), "number of prompt_token_ids of group g-17: expected 1"),
        (broken(GROUP, rollout_count=0), "rollout_count of group g-17: expected 1 or more, got 0"),
        (broken(GROUP, sampling=None), "sampling of group g-17: expected sampling parameters, got none"),
        (broken(GROUP, consume_step=1 << 60), "consume_step of w: expected 0 to"),
        (broken(GROUP, work=9), "work of w: expected a known one, got 9"),
        (broken(GROUP, work=1), "exact_version of group g-17: expected one for work to evaluate, got None"),
        (broken(GROUP, exact_version=3), "exact_version of group g-17: expected none for work to train, got 3"),
        (broken(GROUP, work=1, exact_version=1 << 60), "exact_version of w: expected 0 to"),
    ],
)
def test_a_malformed_message_is_refused_by_field(decode: Callable[[], object], words: str) -> None:
    with pytest.raises(MalformedMessage, match=words):
        decode()


def test_reports_and_verdicts_over_their_limits_are_refused() -> None:
    report = ingest_pb2.RolloutReport()
    for _ in range(5):
        report.segments.add(token_ids=[1] * wire.SEGMENT_TOKENS_MAX)
    with pytest.raises(MalformedMessage, match="number of tokens of a report"):
        wire.segments_from_report(report)
    with pytest.raises(MalformedMessage, match="expected a known verdict, got 0"):
        wire.verdict_from_message(ingest_pb2.SegmentVerdict(group_id="g"))


@pytest.mark.parametrize("held", [(), (7,), (0, 7), (1, 2, 3)])
def test_an_offer_counts_the_tokens_of_none_or_each_of_its_groups(held: tuple[int, ...]) -> None:
    groups = (GROUP, replace(GROUP, group_id=GroupId("g-18")))
    message = coordinator_pb2.OfferGroups(groups=map(wire.group_to_message, groups), held_tokens=held)
    if len(held) in (0, 2):
        assert offer_from_message(message, "the learner") == (groups, held)
        return
    with pytest.raises(MalformedMessage, match=f"held_tokens of the learner: expected .* 2 groups, got {len(held)}"):
        offer_from_message(message, "the learner")


def test_enumerations_on_the_wire_have_the_names_of_ours() -> None:
    """The byte of a value is contract (tests/contract/test_golden); here, that each stands for what it says."""
    for verdict in Verdict:
        made = wire.verdict_to_message(SegmentVerdict(GroupId("g"), 3, verdict, 10, "why"))
        assert ingest_pb2.SegmentVerdict.Verdict.Name(made.verdict) == f"VERDICT_{verdict.name}"
        assert wire.verdict_from_message(made) == SegmentVerdict(GroupId("g"), 3, verdict, 10, "why")
    for reason in set(FinishReason) - {FinishReason.UNFINISHED}:
        finish = wire.segment_to_message(replace(SEGMENT, finish_reason=reason)).finish_reason
        assert rollout_pb2.FinishReason.Name(finish) == f"FINISH_REASON_{reason.name}"
    evaluated = replace(GROUP, work=Work.EVALUATE, exact_version=Version(12))
    assert wire.group_to_message(evaluated).work == rollout_pb2.WORK_EVALUATE
    assert wire.group_from_message(wire.group_to_message(evaluated)) == evaluated


COORDINATOR = Identity.generate()
WORKER = Identity.generate()
RUN = RunId("a-run")
TICKET = Ticket(LeaseId("lease-1"), GroupId("group-1"), WORKER.peer_id, 1, 1e9, RUN)


@given(at=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_a_changed_byte_is_refused(at: int, flip: int) -> None:
    wire = bytearray(sign_ticket(TICKET, COORDINATOR).SerializeToString())
    wire[at % len(wire)] ^= flip
    try:
        message = rollout_pb2.LeaseTicket.FromString(bytes(wire))
    except Exception:  # noqa: BLE001 - protobuf's decoder refused it first
        return
    with pytest.raises(EchoError):
        verify_ticket(message, RUN, COORDINATOR.peer_id, WORKER.peer_id)


def test_a_signed_ticket_comes_back_whole_and_a_forgers_another_runs_and_another_workers_are_refused() -> None:
    forged = sign_ticket(TICKET, WORKER)
    with pytest.raises(BadSignature, match="expected the signature of the coordinator"):
        verify_ticket(forged, RUN, COORDINATOR.peer_id, WORKER.peer_id)
    good = sign_ticket(TICKET, COORDINATOR)
    assert verify_ticket(good, RUN, COORDINATOR.peer_id, WORKER.peer_id) == TICKET
    with pytest.raises(NotAllowed, match="expected a ticket of run other"):
        verify_ticket(good, RunId("other"), COORDINATOR.peer_id, WORKER.peer_id)
    with pytest.raises(NotAllowed, match="granted to"):
        verify_ticket(good, RUN, COORDINATOR.peer_id, COORDINATOR.peer_id)
    with pytest.raises(MalformedMessage):
        verify_ticket(rollout_pb2.LeaseTicket(), RUN, COORDINATOR.peer_id, WORKER.peer_id)
