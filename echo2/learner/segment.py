"""Appends reported segments to a rollout.

Guarantees: the held tokens never change; tokens that are sent again must equal the held ones. Leaves to others: whether a
segment may be believed or trained on (shelf).
"""

from __future__ import annotations

from echo2.base.ids import GroupId
from echo2.base.rollout import FinishReason, Rollout, RolloutSegment, VersionSpan, joined_spans
from echo2.base.routing import joined_routing


def empty_rollout(group_id: GroupId, index: int) -> Rollout:
    """A rollout before its first token."""
    return Rollout(group_id, index, (), (), (), (), FinishReason.UNFINISHED)


def extended(held: Rollout, segment: RolloutSegment) -> Rollout | None:
    """Returns `held` with the segment's new tokens appended; None if the overlap differs from the held tokens.

    `segment.offset` must not be beyond the held tokens. ABORTED leaves the rollout unfinished, to be continued later.
    """
    held_count = len(held.token_ids)
    assert segment.offset <= held_count, "a gap is answered with RESEND before"
    overlap = min(held_count - segment.offset, len(segment.token_ids))
    if segment.token_ids[:overlap] != held.token_ids[segment.offset : segment.offset + overlap]:
        return None
    spans = joined_spans(held.version_spans, spans_from(segment.version_spans, overlap))
    count = len(segment.token_ids)
    new_routing = segment.routing.after(overlap, count)
    return Rollout(
        held.group_id,
        held.index,
        held.token_ids + segment.token_ids[overlap:],
        held.logprobs + segment.logprobs[overlap:],
        held.raw_logprobs + segment.raw_logprobs[overlap:],
        spans,
        segment.finish_reason if segment.is_final else FinishReason.UNFINISHED,
        joined_routing(held.routing, held_count, new_routing, count - overlap),
    )


def spans_from(spans: tuple[VersionSpan, ...], count: int) -> tuple[VersionSpan, ...]:
    """The version spans without the first `count` tokens."""
    kept: list[VersionSpan] = []
    for span in spans:
        skipped = min(count, span.count)
        count -= skipped
        if span.count > skipped:
            kept.append(VersionSpan(span.version, span.count - skipped))
    return tuple(kept)
