"""Rollouts, groups, sampling parameters, verdicts, leases and the run's end <-> messages. All others are kept and shown as the
messages that they are.

Guarantees: of a message within its bounds (bounds.parsed, check), what `*_from_message` returns is self-consistent; for
anything else it raises `MalformedMessage`, which names the field, what was expected and what came.

Log-probabilities and sampling parameters travel as float32: a value comes back rounded to float32.
"""

from __future__ import annotations

from echo2.base.errors import BadSignature, MalformedMessage, NotAllowed
from echo2.base.ids import GroupId, LeaseId, PeerId, RunId, Version
from echo2.base.rollout import (
    EndReason,
    FinishReason,
    GroupSpec,
    Rollout,
    Routing,
    SamplingParams,
    SegmentVerdict,
    Ticket,
    Verdict,
    VersionSpan,
    Work,
)
from echo2.base.units import one_line
from echo2.trust.identity import Identity, verify_signature
from echo2.wire.bounds import MESSAGE_CHARS_MAX, ROLLOUT_TOKENS_MAX, core_of, message_of
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb, ingest_pb2, rollout_pb2

REPORT_TOKENS_MAX = SEGMENT_TOKENS_MAX = 1 << 16  # of one report, or of one segment: processed without yielding
REPORT_SPANS_MAX = 1 << 14  # of one report; a span ends only where the version changes
PARTIALS_BYTES_MAX = 256 << 20  # of a GetPartials reply: the complete partial rollouts of one group

# Core type to message.
_FINISH_TO_WIRE = {
    FinishReason.UNFINISHED: rollout_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: rollout_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: rollout_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORTED: rollout_pb2.FINISH_REASON_ABORTED,
}
_VERDICT_TO_WIRE = {verdict: ingest_pb2.SegmentVerdict.Verdict.Value(f"VERDICT_{verdict.name}") for verdict in Verdict}
_WORK_TO_WIRE = {work: rollout_pb2.Work.Value(f"WORK_{work.name}") for work in Work}
_FINISH_FROM_WIRE = {number: reason for reason, number in _FINISH_TO_WIRE.items()}
_VERDICT_FROM_WIRE = {number: verdict for verdict, number in _VERDICT_TO_WIRE.items()}
_WORK_FROM_WIRE = {number: work for work, number in _WORK_TO_WIRE.items()}


def _expect(is_so: bool, what: str, expected: str, got: object) -> None:
    if not is_so:
        raise MalformedMessage(f"{what}: expected {expected}, got {got}")


def group_id_from_wire(value: str) -> GroupId:
    _expect(bool(value), "group_id", "one", "none")
    return GroupId(value)


def lease_id_from_wire(value: str) -> LeaseId:
    _expect(bool(value), "lease_id", "one", "none")
    return LeaseId(value)


def group_to_message(group: GroupSpec) -> rollout_pb2.GroupSpec:
    sampling = message_of(group.sampling, rollout_pb2.SamplingParams)
    return message_of(group, rollout_pb2.GroupSpec, sampling=sampling, work=_WORK_TO_WIRE[group.work])


def group_from_message(message: rollout_pb2.GroupSpec, prompt_tokens_min: int = 1) -> GroupSpec:
    """Parses a group. `prompt_tokens_min` 0: between the learner's own processes, agents' rollouts may have no common prompt."""
    group_id = group_id_from_wire(message.group_id)
    origin, prompt_tokens = f"of group {group_id}", len(message.prompt_token_ids)
    _expect(message.HasField("sampling"), f"sampling {origin}", "sampling parameters", "none")
    _expect(prompt_tokens >= prompt_tokens_min, f"number of prompt_token_ids {origin}", "1 or more", prompt_tokens)
    _expect(message.rollout_count > 0, f"rollout_count {origin}", "1 or more", message.rollout_count)
    return core_of(
        message,
        GroupSpec,
        group_id=group_id,
        sampling=core_of(message.sampling, SamplingParams),
        work=_WORK_FROM_WIRE[message.work],
        exact_version=Version(message.exact_version) if message.HasField("exact_version") else None,
    )


def rollout_to_message(rollout: Rollout) -> rollout_pb2.RolloutSegment:
    return rollout_pb2.RolloutSegment(  # written out for speed: thousands a second
        group_id=rollout.group_id,
        index=rollout.index,
        offset=rollout.offset,
        token_ids=rollout.token_ids,
        logprobs=rollout.logprobs,
        raw_logprobs=rollout.raw_logprobs,
        expected_remaining_tokens=rollout.expected_remaining_tokens,
        version_spans=[
            rollout_pb2.VersionSpan(version=span.version, count=span.count) for span in rollout.version_spans
        ],
        finish_reason=_FINISH_TO_WIRE[rollout.finish_reason],
        routing=rollout.routing.tokens,
        prompt_routing=rollout.routing.prompt,
    )


def segment_from_message(message: rollout_pb2.RolloutSegment, tokens_max: int = SEGMENT_TOKENS_MAX) -> Rollout:
    """Parses a segment. `tokens_max`: a whole rollout (`GetPartials`) may be longer than one report's segment."""
    group_id = group_id_from_wire(message.group_id)
    origin, spans = f"of rollout {message.index} of group {group_id}", message.version_spans
    tokens = len(message.token_ids)
    _expect(tokens <= tokens_max, f"number of token_ids {origin}", f"up to {tokens_max}", tokens)
    end = message.offset + tokens
    _expect(end <= ROLLOUT_TOKENS_MAX, f"end {origin}", f"up to {ROLLOUT_TOKENS_MAX}", end)
    _expect(len(spans) <= tokens, f"number of version_spans {origin}", f"up to {tokens}", len(spans))
    _expect(all(span.count for span in spans), f"count of a version span {origin}", "1 or more", 0)
    return Rollout(
        group_id=group_id,
        index=message.index,
        offset=message.offset,
        token_ids=tuple(message.token_ids),
        logprobs=tuple(message.logprobs),
        raw_logprobs=tuple(message.raw_logprobs),
        version_spans=tuple(VersionSpan(Version(span.version), span.count) for span in spans),
        finish_reason=_FINISH_FROM_WIRE[message.finish_reason],
        expected_remaining_tokens=message.expected_remaining_tokens,
        routing=Routing(message.prompt_routing, message.routing),
    )


def rollout_from_message(message: rollout_pb2.RolloutSegment) -> Rollout:
    """Parses a whole rollout; MalformedMessage if the segment does not start at offset 0."""
    rollout = segment_from_message(message, tokens_max=ROLLOUT_TOKENS_MAX)
    if rollout.offset != 0:
        raise MalformedMessage(
            f"rollout {rollout.index} of group {rollout.group_id}: expected it whole, got tokens {rollout.offset}.."
        )
    return rollout


def segments_from_report(message: ingest_pb2.RolloutReport) -> tuple[Rollout, ...]:
    """Parses all segments of a report; one malformed segment refuses the whole report."""
    tokens = sum(len(segment.token_ids) for segment in message.segments)
    _expect(tokens <= REPORT_TOKENS_MAX, "number of tokens of a report", f"up to {REPORT_TOKENS_MAX}", tokens)
    spans = sum(len(segment.version_spans) for segment in message.segments)
    _expect(spans <= REPORT_SPANS_MAX, "number of version_spans of a report", f"up to {REPORT_SPANS_MAX}", spans)
    return tuple(segment_from_message(segment) for segment in message.segments)


def rollouts_from_partials(message: ingest_pb2.GetPartialsReply) -> tuple[Rollout, ...]:
    """Parses the rollouts of a group that the learner holds, including finished ones; each index at most once."""
    rollouts = tuple(rollout_from_message(rollout) for rollout in message.rollouts)
    if len({(rollout.group_id, rollout.index) for rollout in rollouts}) != len(rollouts):
        raise MalformedMessage("partial rollouts: expected each index once, got one twice")
    return rollouts


def verdict_to_message(verdict: SegmentVerdict) -> ingest_pb2.SegmentVerdict:
    text = verdict.message[:MESSAGE_CHARS_MAX]
    return message_of(verdict, ingest_pb2.SegmentVerdict, verdict=_VERDICT_TO_WIRE[verdict.verdict], message=text)


def verdict_from_message(message: ingest_pb2.SegmentVerdict) -> SegmentVerdict:
    group_id, verdict = group_id_from_wire(message.group_id), _VERDICT_FROM_WIRE.get(message.verdict)
    origin = f"verdict on rollout {message.index} of group {group_id}"
    _expect(verdict is not None, origin, "a known verdict", message.verdict)
    return core_of(message, SegmentVerdict, group_id=group_id, verdict=verdict)


def verdicts_from_message(message: ingest_pb2.RolloutVerdict) -> tuple[SegmentVerdict, ...]:
    return tuple(verdict_from_message(verdict) for verdict in message.segments)


_PREFIX = b"echo2-lease-ticket-v1:"  # a signature over a ticket holds for nothing else


def _signed_bytes(message: rollout_pb2.LeaseTicket) -> bytes:
    bare = rollout_pb2.LeaseTicket()
    bare.CopyFrom(message)
    bare.signature = b""
    return _PREFIX + bare.SerializeToString(deterministic=True)


def sign_ticket(ticket: Ticket, coordinator: Identity) -> rollout_pb2.LeaseTicket:
    """The ticket as a message, signed by the coordinator's identity."""
    message = message_of(ticket, rollout_pb2.LeaseTicket)
    message.signature = coordinator.sign(_signed_bytes(message))
    return message


def verify_ticket(
    message: rollout_pb2.LeaseTicket, run_id: RunId, coordinator_peer_id: PeerId, worker_peer_id: PeerId
) -> Ticket:
    """Returns the ticket if this run's coordinator granted it to `worker_peer_id` (the caller, known from TLS), else raises."""
    lease_id, group_id = lease_id_from_wire(message.lease_id), group_id_from_wire(message.group_id)
    origin = f"ticket of lease {lease_id} from {worker_peer_id}"
    if len(message.signature) != 64:
        raise BadSignature(f"{origin}: expected a signature of 64 bytes, got {len(message.signature)}")
    try:
        verify_signature(coordinator_peer_id, _signed_bytes(message), message.signature)
    except BadSignature:
        raise BadSignature(f"{origin}: expected the signature of the coordinator {coordinator_peer_id}") from None
    if message.run_id != run_id:
        raise NotAllowed(f"{origin}: expected a ticket of run {run_id}, got one of run {message.run_id[:64]!r}")
    if message.worker_peer_id != worker_peer_id:
        raise NotAllowed(f"{origin}: it was granted to {message.worker_peer_id[:64]}")
    _expect(message.attempt > 0, origin, "attempt 1 or later", message.attempt)
    return core_of(message, Ticket, lease_id=lease_id, group_id=group_id)


FINISHED = "finished"
"""The reason with which a learner leaves after its last step; with any other reason the run goes on, unless it is this word,
a colon and the cause that ended the run before."""
STOPPED = "stopped"  # the reason of a learner that was asked to stop
LEAVING_CHARS_MAX = 500  # a cause, in the page's event log


def leaving_reason(cause: str, is_over: bool) -> str:
    """The reason of a learner that an error ends. `is_over`: it ends the run, too."""
    text = one_line(cause, LEAVING_CHARS_MAX)
    return f"{FINISHED}: {text}" if is_over else text


def cause_of_end(reason: str) -> str | None:
    """What ended the run, given the reason with which its learner leaves: empty if that is its last step; None: it goes on."""
    word, _, cause = reason.partition(": ")
    return cause if word == FINISHED else None


# Message to core type.
_END_REASONS = {pb.LeaseEnded.Reason.Value(f"REASON_{reason.name}"): reason for reason in EndReason}


def end_reason_from_message(message: pb.LeaseEnded) -> EndReason:
    reason = _END_REASONS.get(message.reason)
    if reason is None:
        raise MalformedMessage(f"reason of the end of lease {message.lease_id[:64]!r}: expected a known one")
    return reason


def offer_from_message(message: pb.OfferGroups, origin: str) -> tuple[tuple[GroupSpec, ...], tuple[int, ...]]:
    """The groups, and how many tokens of each have reached the learner; counts are sent only in a reminder."""
    groups, held_tokens = tuple(map(group_from_message, message.groups)), tuple(message.held_tokens)
    if held_tokens and len(held_tokens) != len(groups):
        raise MalformedMessage(
            f"held_tokens of {origin}: expected none or one for each of {len(groups)} groups, got {len(held_tokens)}"
        )
    return groups, held_tokens
