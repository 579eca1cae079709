"""Golden files hold the bytes of every rollout message: changing one is a protocol change."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
from google.protobuf.message import DecodeError, Message
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
    spans_of,
)
from echo2.trust.identity import Identity
from echo2.wire import rollout as wire
from echo2.wire.bounds import ROLLOUT_TOKENS_MAX, ROLLOUTS_PER_GROUP_MAX, TOKEN_ID_MAX, VERSION_MAX, check
from echo2.wire.gen.echo2.v1 import ingest_pb2, rollout_pb2
from echo2.wire.rollout import Ticket, sign_ticket, verify_ticket

GOLDEN = Path(__file__).parent / "golden"

SAMPLING = SamplingParams(temperature=0.5, top_p=0.75, top_k=20, max_new_tokens=64, stop_token_ids=(2, 3), seed=7)
GROUP = GroupSpec(GroupId("g-17"), (1, 5, 300), 8, SAMPLING, 42)
EXAM = GroupSpec(
    GroupId("e00000012-math-0007"), (1, 5), 4, SamplingParams(temperature=0.0), 12, Work.EVALUATE, Version(12)
)
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
VERDICT = SegmentVerdict(GroupId("g-17"), 3, Verdict.RESEND, 10, "tokens 8..9 are missing")


def report_message() -> ingest_pb2.RolloutReport:
    ticket = rollout_pb2.LeaseTicket(
        lease_id="l-1", group_id="g-17", worker_peer_id="12D3", attempt=2, deadline_unix_s=1.5, run_id="r",
        signature=b"\x01\x02",
    )  # fmt: skip
    return ingest_pb2.RolloutReport(
        sequence=9, ticket=ticket, lease_id="l-1", segments=[wire.segment_to_message(SEGMENT)]
    )


MESSAGES: dict[str, Message] = {
    "sampling_params": wire.sampling_to_message(SAMPLING),
    "group_spec": wire.group_to_message(GROUP),
    "group_spec_evaluate": wire.group_to_message(EXAM),
    "rollout_segment": wire.segment_to_message(SEGMENT),
    "segment_verdict": wire.verdict_to_message(VERDICT),
    "rollout_report": report_message(),
    "rollout_verdict": ingest_pb2.RolloutVerdict(sequence=9, segments=[wire.verdict_to_message(VERDICT)]),
    "get_partials_request": ingest_pb2.GetPartialsRequest(ticket=report_message().ticket),
    "get_partials_reply": ingest_pb2.GetPartialsReply(rollouts=[wire.segment_to_message(SEGMENT)]),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_bytes_are_those_of_the_golden_file(name: str) -> None:
    assert MESSAGES[name].SerializeToString(deterministic=True).hex() == (GOLDEN / f"{name}.hex").read_text().strip()


def golden(name: str) -> bytes:
    return bytes.fromhex((GOLDEN / f"{name}.hex").read_text())


def test_golden_bytes_decode_to_what_they_were_made_from() -> None:
    assert wire.sampling_from_message(rollout_pb2.SamplingParams.FromString(golden("sampling_params"))) == SAMPLING
    assert wire.group_from_message(rollout_pb2.GroupSpec.FromString(golden("group_spec"))) == GROUP
    assert wire.group_from_message(rollout_pb2.GroupSpec.FromString(golden("group_spec_evaluate"))) == EXAM
    assert wire.segment_from_message(rollout_pb2.RolloutSegment.FromString(golden("rollout_segment"))) == SEGMENT
    assert wire.verdict_from_message(ingest_pb2.SegmentVerdict.FromString(golden("segment_verdict"))) == VERDICT
    report = ingest_pb2.RolloutReport.FromString(golden("rollout_report"))
    assert wire.segments_from_report(report) == (SEGMENT,)
    verdict = ingest_pb2.RolloutVerdict.FromString(golden("rollout_verdict"))
    assert wire.verdicts_from_message(verdict) == (VERDICT,)


LOGPROB = st.floats(-50, 0, width=32)
TEXT_ID = st.text(st.characters(codec="ascii", categories=["L", "N", "P"]), min_size=1, max_size=20).map(GroupId)
FINISHES = st.sampled_from(FinishReason)


@st.composite
def segments(draw: st.DrawFn) -> RolloutSegment:
    tokens = draw(st.lists(st.integers(0, TOKEN_ID_MAX), max_size=20))
    count = len(tokens)
    versions = draw(st.lists(st.integers(0, VERSION_MAX).map(Version), min_size=count, max_size=count))
    return RolloutSegment(
        group_id=draw(TEXT_ID),
        index=draw(st.integers(0, ROLLOUTS_PER_GROUP_MAX - 1)),
        offset=draw(st.integers(0, ROLLOUT_TOKENS_MAX - count)),
        token_ids=tuple(tokens),
        logprobs=tuple(draw(st.lists(LOGPROB, min_size=count, max_size=count))),
        raw_logprobs=tuple(draw(st.lists(LOGPROB, min_size=count, max_size=count))),
        version_spans=spans_of(versions),
        finish_reason=draw(FINISHES),
        expected_remaining_tokens=draw(st.integers(0, ROLLOUT_TOKENS_MAX)),
    )


@given(segments())
def test_any_segment_comes_back_as_it_was(segment: RolloutSegment) -> None:
    message = rollout_pb2.RolloutSegment.FromString(wire.segment_to_message(segment).SerializeToString())
    assert wire.segment_from_message(message) == segment


@given(
    group_id=TEXT_ID,
    prompt=st.lists(st.integers(0, TOKEN_ID_MAX), min_size=1, max_size=20),
    count=st.integers(1, ROLLOUTS_PER_GROUP_MAX),
    step=st.integers(0, VERSION_MAX),
    temperature=st.floats(0, 100, width=32),
    seed=st.integers(0, 2**64 - 1),
)
def test_any_group_comes_back_as_it_was(
    group_id: GroupId, prompt: list[int], count: int, step: int, temperature: float, seed: int
) -> None:
    group = GroupSpec(group_id, tuple(prompt), count, SamplingParams(temperature=temperature, seed=seed), step)
    message = rollout_pb2.GroupSpec.FromString(wire.group_to_message(group).SerializeToString())
    assert wire.group_from_message(message) == group


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


def broken_segment(**fields: object) -> Callable[[], object]:
    message = wire.segment_to_message(SEGMENT)
    for name, value in fields.items():
        if isinstance(value, list):
            message.ClearField(name)
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)

    def decode() -> object:
        check(message, "w")
        return wire.segment_from_message(message)

    return decode


def broken_group(**fields: object) -> Callable[[], object]:
    message = wire.group_to_message(GROUP)
    for name, value in fields.items():
        if value is None or isinstance(value, list):
            message.ClearField(name)
            if value:
                getattr(message, name).extend(value)
        else:
            setattr(message, name, value)

    def decode() -> object:
        check(message, "w")
        return wire.group_from_message(message)

    return decode


SPAN = rollout_pb2.VersionSpan


@pytest.mark.parametrize(
    ("decode", "words"),
    [
        (broken_segment(group_id=""), "group_id: expected 1 to 128"),
        (broken_segment(group_id="x" * 200), "group_id of w: expected up to 128"),
        (broken_segment(group_id="a\nb"), "group_id of w: expected up to 128 printable"),
        (broken_segment(index=5000), "index of w: expected 0 to 4095, got 5000"),
        (broken_segment(offset=1 << 20), "end of rollout 3 of group g-17"),
        (broken_segment(token_ids=[1, 2**32 - 1, 3]), "token_ids of w: expected 0 to 2147483647"),
        (broken_segment(token_ids=[1] * (wire.SEGMENT_TOKENS_MAX + 1)), "number of token_ids"),
        (broken_segment(logprobs=[-0.5]), "expected 3 log-probabilities, one a token, got 1"),
        (broken_segment(raw_logprobs=[-0.5, 1.0, -0.5]), "raw_logprobs of w: expected"),
        (broken_segment(logprobs=[-0.5, float("nan"), -0.5]), "logprobs of w: expected finite"),
        (broken_segment(version_spans=[SPAN(version=1, count=1)]), "version spans that cover 3 tokens, got 1"),
        (broken_segment(version_spans=[SPAN(version=1, count=0)]), "count of a version span"),
        (broken_segment(version_spans=[SPAN(version=1, count=1)] * 4), "number of version_spans"),
        (broken_segment(version_spans=[SPAN(version=1 << 60, count=3)]), "version of w: expected 0 to"),
        (broken_segment(finish_reason=17), "finish_reason of w: expected a known one, got 17"),
        (broken_group(prompt_token_ids=[]), "number of prompt_token_ids of group g-17: expected 1"),
        (broken_group(rollout_count=0), "rollout_count of group g-17: expected 1 or more, got 0"),
        (broken_group(sampling=None), "sampling of group g-17: expected sampling parameters, got none"),
        (broken_group(consume_step=1 << 60), "consume_step of w: expected 0 to"),
        (broken_group(work=9), "work of w: expected a known one, got 9"),
        (broken_group(work=1), "exact_version of group g-17: expected one for work to evaluate, got None"),
        (broken_group(exact_version=3), "exact_version of group g-17: expected none for work to train, got 3"),
        (broken_group(work=1, exact_version=1 << 60), "exact_version of w: expected 0 to"),
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


DECODERS: dict[str, tuple[type[Message], Callable[..., object]]] = {
    "sampling_params": (rollout_pb2.SamplingParams, wire.sampling_from_message),
    "group_spec": (rollout_pb2.GroupSpec, wire.group_from_message),
    "rollout_segment": (rollout_pb2.RolloutSegment, wire.segment_from_message),
    "rollout_report": (ingest_pb2.RolloutReport, wire.segments_from_report),
    "segment_verdict": (ingest_pb2.SegmentVerdict, wire.verdict_from_message),
    "rollout_verdict": (ingest_pb2.RolloutVerdict, wire.verdicts_from_message),
    "get_partials_reply": (ingest_pb2.GetPartialsReply, wire.rollouts_from_partials),
}


@pytest.mark.parametrize("name", DECODERS)
@given(data=st.data())
def test_any_bytes_decode_or_are_refused_with_a_protocol_error(name: str, data: st.DataObject) -> None:
    """Golden bytes with some replaced, or arbitrary ones: nothing but a value, MalformedMessage or DecodeError."""
    good = bytearray(golden(name))
    if data.draw(st.booleans()):
        for at, value in data.draw(
            st.dictionaries(st.integers(0, len(good) - 1), st.integers(0, 255), max_size=6)
        ).items():
            good[at] = value
        raw = bytes(good[: data.draw(st.integers(0, len(good)))])
    else:
        raw = data.draw(st.binary(max_size=200))
    with contextlib.suppress(MalformedMessage, DecodeError):
        kind, decode = DECODERS[name]
        message = kind.FromString(raw)
        check(message, "w")
        decode(message)


COORDINATOR = Identity.generate()
WORKER = Identity.generate()
RUN = RunId("a-run")
TICKET = Ticket(LeaseId("lease-1"), GroupId("group-1"), WORKER.peer_id, 1, 1e9, RUN)

ids = st.text("abc-123", min_size=1, max_size=40)


@given(lease=ids, group=ids, attempt=st.integers(1, 1 << 20), deadline=st.floats(0, 1e12))
def test_signed_ticket_comes_back_whole(lease: str, group: str, attempt: int, deadline: float) -> None:
    ticket = Ticket(LeaseId(lease), GroupId(group), WORKER.peer_id, attempt, deadline, RUN)
    wire = sign_ticket(ticket, COORDINATOR).SerializeToString()
    message = rollout_pb2.LeaseTicket.FromString(wire)
    assert verify_ticket(message, RUN, COORDINATOR.peer_id, WORKER.peer_id) == ticket


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


def test_forger_other_run_and_other_worker_are_refused() -> None:
    forged = sign_ticket(TICKET, WORKER)
    with pytest.raises(BadSignature, match="expected the signature of the coordinator"):
        verify_ticket(forged, RUN, COORDINATOR.peer_id, WORKER.peer_id)
    good = sign_ticket(TICKET, COORDINATOR)
    with pytest.raises(NotAllowed, match="expected a ticket of run other"):
        verify_ticket(good, RunId("other"), COORDINATOR.peer_id, WORKER.peer_id)
    with pytest.raises(NotAllowed, match="granted to"):
        verify_ticket(good, RUN, COORDINATOR.peer_id, COORDINATOR.peer_id)
    with pytest.raises(MalformedMessage):
        verify_ticket(rollout_pb2.LeaseTicket(), RUN, COORDINATOR.peer_id, WORKER.peer_id)
