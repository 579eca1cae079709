"""Rollouts, groups, sampling parameters and verdicts <-> messages of proto/echo2/v1/{rollout,ingest}.proto.

Guarantees: what `*_from_message` returns is within the limits below and self-consistent; for anything else
it raises `MalformedMessage`, which names the field, what was expected and what came. Leaves to others:
whether the sender may say it (tickets, learner), whether a token id is in the vocabulary (engine, learner).

Log-probabilities and sampling parameters travel as float32: a value comes back rounded to float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from echo2.base.errors import MalformedMessage
from echo2.base.ids import GroupId, LeaseId, Version
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
from echo2.base.routing import Routing
from echo2.wire.bounds import (
    ID_CHARS_MAX,
    MESSAGE_CHARS_MAX,
    PROMPT_TOKENS_MAX,
    REPORT_SEGMENTS_MAX,
    ROLLOUT_TOKENS_MAX,
    ROLLOUTS_PER_GROUP_MAX,
    SPANS_MAX,
    STOP_TOKENS_MAX,
    TOKEN_ID_MAX,
    VERSION_MAX,
)
from echo2.wire.by_name import core_of, message_of
from echo2.wire.gen.echo2.v1 import ingest_pb2, rollout_pb2

REPORT_TOKENS_MAX = SEGMENT_TOKENS_MAX = 1 << 16
"""Tokens of one report, or of one segment: processed without yielding."""
REPORT_SPANS_MAX = 1 << 14
PARTIALS_BYTES_MAX = 256 << 20
"""Limit of a GetPartials reply: the complete partial rollouts of one group."""

_FINISH_TO_WIRE: dict[FinishReason, rollout_pb2.FinishReason] = {
    FinishReason.UNFINISHED: rollout_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: rollout_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: rollout_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORTED: rollout_pb2.FINISH_REASON_ABORTED,
}
_FINISH_FROM_WIRE = {number: reason for reason, number in _FINISH_TO_WIRE.items()}

_VERDICT_TO_WIRE: dict[Verdict, ingest_pb2.SegmentVerdict.Verdict] = {
    Verdict.HELD: ingest_pb2.SegmentVerdict.VERDICT_HELD,
    Verdict.ADMITTED: ingest_pb2.SegmentVerdict.VERDICT_ADMITTED,
    Verdict.DUPLICATE: ingest_pb2.SegmentVerdict.VERDICT_DUPLICATE,
    Verdict.STALE: ingest_pb2.SegmentVerdict.VERDICT_STALE,
    Verdict.REFUSED: ingest_pb2.SegmentVerdict.VERDICT_REFUSED,
    Verdict.RESEND: ingest_pb2.SegmentVerdict.VERDICT_RESEND,
    Verdict.CLOSED: ingest_pb2.SegmentVerdict.VERDICT_CLOSED,
}
_WORK_TO_WIRE: dict[Work, rollout_pb2.Work] = {
    Work.TRAIN: rollout_pb2.WORK_TRAIN,
    Work.EVALUATE: rollout_pb2.WORK_EVALUATE,
}
_WORK_FROM_WIRE = {number: work for work, number in _WORK_TO_WIRE.items()}
_VERDICT_FROM_WIRE = {number: verdict for verdict, number in _VERDICT_TO_WIRE.items()}


def _checked_id(value: str, what: str) -> str:
    if not 1 <= len(value) <= ID_CHARS_MAX or not value.isprintable():
        raise MalformedMessage(f"{what}: expected 1 to {ID_CHARS_MAX} printable characters, got {value[:40]!r}")
    return value


def _checked_count(value: int, low: int, high: int, what: str) -> int:
    if not low <= value <= high:
        raise MalformedMessage(f"{what}: expected {low} to {high}, got {value}")
    return value


def _checked_tokens(values: Sequence[int], low: int, high: int, what: str) -> tuple[int, ...]:
    _checked_count(len(values), low, high, f"number of {what}")
    token_ids = tuple(values)
    if token_ids and max(token_ids) > TOKEN_ID_MAX:
        raise MalformedMessage(f"{what}: expected token ids up to {TOKEN_ID_MAX}, got {max(token_ids)}")
    return token_ids


def group_id_from_wire(value: str) -> GroupId:
    """A group id within its limits."""
    return GroupId(_checked_id(value, "group_id"))


def lease_id_from_wire(value: str) -> LeaseId:
    """A lease id within its limits."""
    return LeaseId(_checked_id(value, "lease_id"))


def sampling_to_message(sampling: SamplingParams) -> rollout_pb2.SamplingParams:
    return message_of(sampling, rollout_pb2.SamplingParams)


def sampling_from_message(message: rollout_pb2.SamplingParams) -> SamplingParams:
    """Parses sampling parameters; `SamplingParams` checks the ranges itself."""
    stops = _checked_tokens(message.stop_token_ids, 0, STOP_TOKENS_MAX, "stop_token_ids")
    return core_of(message, SamplingParams, stop_token_ids=stops)


def group_to_message(group: GroupSpec) -> rollout_pb2.GroupSpec:
    sampling, work = sampling_to_message(group.sampling), _WORK_TO_WIRE[group.work]
    return message_of(group, rollout_pb2.GroupSpec, sampling=sampling, work=work)


def group_from_message(message: rollout_pb2.GroupSpec, prompt_tokens_min: int = 1) -> GroupSpec:
    """Parses a group. `prompt_tokens_min` 0: between the learner's own processes, agents' rollouts may have no common prompt."""
    group_id = group_id_from_wire(message.group_id)
    whose = f"of group {group_id}"
    if not message.HasField("sampling"):
        raise MalformedMessage(f"sampling {whose}: expected sampling parameters, got none")
    work = _WORK_FROM_WIRE.get(message.work)
    if work is None:
        raise MalformedMessage(f"work {whose}: expected a known kind of work, got {message.work}")
    exact_version = None
    if message.HasField("exact_version"):
        exact_version = Version(_checked_count(message.exact_version, 0, VERSION_MAX, f"exact_version {whose}"))
    return GroupSpec(
        group_id=group_id,
        prompt_token_ids=_checked_tokens(
            message.prompt_token_ids, prompt_tokens_min, PROMPT_TOKENS_MAX, f"prompt_token_ids {whose}"
        ),
        rollout_count=_checked_count(message.rollout_count, 1, ROLLOUTS_PER_GROUP_MAX, f"rollout_count {whose}"),
        sampling=sampling_from_message(message.sampling),
        consume_step=_checked_count(message.consume_step, 0, VERSION_MAX, f"consume_step {whose}"),
        work=work,
        exact_version=exact_version,
    )


def _spans_to_messages(spans: Iterable[VersionSpan]) -> list[rollout_pb2.VersionSpan]:
    return [rollout_pb2.VersionSpan(version=span.version, count=span.count) for span in spans]


def _spans_from_messages(messages: Sequence[rollout_pb2.VersionSpan], what: str) -> tuple[VersionSpan, ...]:
    # The caller has already limited the number of spans; each must cover at least one token.
    return tuple(
        VersionSpan(
            version=Version(_checked_count(message.version, 0, VERSION_MAX, f"version {what}")),
            count=_checked_count(message.count, 1, ROLLOUT_TOKENS_MAX, f"count of a version span {what}"),
        )
        for message in messages
    )


def segment_to_message(segment: RolloutSegment) -> rollout_pb2.RolloutSegment:
    return rollout_pb2.RolloutSegment(  # written out for speed: thousands a second
        group_id=segment.group_id,
        index=segment.index,
        offset=segment.offset,
        token_ids=segment.token_ids,
        logprobs=segment.logprobs,
        raw_logprobs=segment.raw_logprobs,
        expected_remaining_tokens=segment.expected_remaining_tokens,
        version_spans=_spans_to_messages(segment.version_spans),
        finish_reason=_FINISH_TO_WIRE[segment.finish_reason],
        routing=segment.routing.tokens,
        prompt_routing=segment.routing.prompt,
    )


def segment_from_message(message: rollout_pb2.RolloutSegment, tokens_max: int = SEGMENT_TOKENS_MAX) -> RolloutSegment:
    """Parses a segment. `tokens_max`: a whole rollout (`GetPartials`) may be longer than one report's segment."""
    group_id = group_id_from_wire(message.group_id)
    index = _checked_count(message.index, 0, ROLLOUTS_PER_GROUP_MAX - 1, f"index of a rollout of group {group_id}")
    whose = f"of rollout {index} of group {group_id}"
    token_ids = _checked_tokens(message.token_ids, 0, tokens_max, f"token_ids {whose}")
    _checked_count(message.offset + len(token_ids), 0, ROLLOUT_TOKENS_MAX, f"end {whose}")
    spans_max = min(SPANS_MAX, len(token_ids))
    _checked_count(len(message.version_spans), 0, spans_max, f"number of version_spans {whose}")
    finish_reason = _FINISH_FROM_WIRE.get(message.finish_reason)
    if finish_reason is None:
        raise MalformedMessage(f"finish_reason {whose}: expected a known reason, got {message.finish_reason}")
    return RolloutSegment(
        group_id=group_id,
        index=index,
        offset=message.offset,
        token_ids=token_ids,
        logprobs=tuple(message.logprobs),
        raw_logprobs=tuple(message.raw_logprobs),
        version_spans=_spans_from_messages(message.version_spans, whose),
        finish_reason=finish_reason,
        expected_remaining_tokens=_checked_count(
            message.expected_remaining_tokens, 0, ROLLOUT_TOKENS_MAX, f"expected_remaining_tokens {whose}"
        ),
        routing=Routing(message.prompt_routing, message.routing),
    )


def rollout_to_message(rollout: Rollout) -> rollout_pb2.RolloutSegment:
    """A whole rollout: the segment at offset 0."""
    return segment_to_message(
        RolloutSegment(
            group_id=rollout.group_id,
            index=rollout.index,
            offset=0,
            token_ids=rollout.token_ids,
            logprobs=rollout.logprobs,
            raw_logprobs=rollout.raw_logprobs,
            version_spans=rollout.version_spans,
            finish_reason=rollout.finish_reason,
            routing=rollout.routing,
        )
    )


def rollout_from_message(message: rollout_pb2.RolloutSegment) -> Rollout:
    """Parses a whole rollout; MalformedMessage if the segment does not start at offset 0."""
    segment = segment_from_message(message, tokens_max=ROLLOUT_TOKENS_MAX)
    if segment.offset != 0:
        raise MalformedMessage(
            f"rollout {segment.index} of group {segment.group_id}: expected it whole, got tokens {segment.offset}.."
        )
    return Rollout(
        group_id=segment.group_id,
        index=segment.index,
        token_ids=segment.token_ids,
        logprobs=segment.logprobs,
        raw_logprobs=segment.raw_logprobs,
        version_spans=segment.version_spans,
        finish_reason=segment.finish_reason,
        routing=segment.routing,
    )


def segments_from_report(message: ingest_pb2.RolloutReport) -> tuple[RolloutSegment, ...]:
    """Parses all segments of a report; one malformed segment refuses the whole report."""
    _checked_count(len(message.segments), 0, REPORT_SEGMENTS_MAX, "number of segments of a report")
    tokens = sum(len(segment.token_ids) for segment in message.segments)
    _checked_count(tokens, 0, REPORT_TOKENS_MAX, "number of tokens of a report")
    spans = sum(len(segment.version_spans) for segment in message.segments)
    _checked_count(spans, 0, REPORT_SPANS_MAX, "number of version_spans of a report")
    return tuple(segment_from_message(segment) for segment in message.segments)


def rollouts_from_partials(message: ingest_pb2.GetPartialsReply) -> tuple[Rollout, ...]:
    """Parses the rollouts of a group that the learner holds, including finished ones; each index at most once."""
    _checked_count(len(message.rollouts), 0, ROLLOUTS_PER_GROUP_MAX, "number of partial rollouts")
    rollouts = tuple(rollout_from_message(rollout) for rollout in message.rollouts)
    if len({(rollout.group_id, rollout.index) for rollout in rollouts}) != len(rollouts):
        raise MalformedMessage("partial rollouts: expected each index once, got one twice")
    return rollouts


def verdict_to_message(verdict: SegmentVerdict) -> ingest_pb2.SegmentVerdict:
    text = verdict.message[:MESSAGE_CHARS_MAX]
    return message_of(verdict, ingest_pb2.SegmentVerdict, verdict=_VERDICT_TO_WIRE[verdict.verdict], message=text)


def verdict_from_message(message: ingest_pb2.SegmentVerdict) -> SegmentVerdict:
    group_id = group_id_from_wire(message.group_id)
    whose = f"verdict on rollout {message.index} of group {group_id}"
    verdict = _VERDICT_FROM_WIRE.get(message.verdict)
    if verdict is None:
        raise MalformedMessage(f"{whose}: expected a known verdict, got {message.verdict}")
    if len(message.message) > MESSAGE_CHARS_MAX:
        raise MalformedMessage(
            f"{whose}: expected a message up to {MESSAGE_CHARS_MAX} characters, got {len(message.message)}"
        )
    return SegmentVerdict(
        group_id=group_id,
        index=_checked_count(message.index, 0, ROLLOUTS_PER_GROUP_MAX - 1, f"index of the {whose}"),
        verdict=verdict,
        held_tokens=_checked_count(message.held_tokens, 0, ROLLOUT_TOKENS_MAX, f"held_tokens of the {whose}"),
        message=message.message,
    )


def verdicts_from_message(message: ingest_pb2.RolloutVerdict) -> tuple[SegmentVerdict, ...]:
    """Parses all verdicts on one report."""
    _checked_count(len(message.segments), 0, REPORT_SEGMENTS_MAX, "number of verdicts")
    return tuple(verdict_from_message(verdict) for verdict in message.segments)
