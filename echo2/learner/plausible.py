"""What is plainly wrong with a report: no honest worker sends it, whatever its engine and its numbers.

Guarantees: each answer says what was expected and what came; None where nothing is wrong. Leaves to others: whether tokens
and numbers are those of the version named (audit), what is done about an untruth (untruths).
"""

from __future__ import annotations

from collections.abc import Collection

from echo2.base.ids import Version
from echo2.base.rollout import FinishReason, GroupSpec, Rollout, RolloutSegment

RELATION_NATS = 1e-3
"""How far the two numbers of a token may be from what the sampling parameters say of them: float32 kernels differ less."""


def problem_of_segment(
    segment: RolloutSegment, spec: GroupSpec, vocabulary_size: int, published: Collection[Version]
) -> str | None:
    """Of a segment in itself, before it is put behind what is held."""
    if not 0 <= segment.index < spec.rollout_count:
        return f"expected an index of 0 to {spec.rollout_count - 1}, got {segment.index}"
    if any(not 0 <= token < vocabulary_size for token in segment.token_ids):
        return f"expected token ids of 0 to {vocabulary_size - 1}, got {max(segment.token_ids)}"
    versions = [span.version for span in segment.version_spans]
    if versions != sorted(versions):
        return f"expected versions that never go back, got {versions[:8]}"
    unknown = [version for version in dict.fromkeys(versions) if version not in published]
    if unknown:
        return f"expected published versions up to {max(published)}, got {unknown[0]}"
    if segment.is_final and segment.offset == 0 and not segment.token_ids:
        return "expected at least one token in a finished rollout, got none"
    return _problem_of_numbers(segment, spec)


def _problem_of_numbers(segment: RolloutSegment, spec: GroupSpec) -> str | None:
    """At temperature 1 a token's two numbers are one, or differ by a filter, which can only make it likelier."""
    if spec.sampling.temperature != 1.0:
        return None
    for place, (logprob, raw) in enumerate(zip(segment.logprobs, segment.raw_logprobs, strict=True)):
        if raw > logprob + RELATION_NATS or (not spec.sampling.is_filtered and raw < logprob - RELATION_NATS):
            return (
                f"expected the raw log-probability of token {segment.offset + place} to be "
                f"{'at most' if spec.sampling.is_filtered else ''} that of sampling at temperature 1, {logprob:.6g}, got {raw:.6g}"
            )
    return None


def problem_of_end(grown: Rollout, held_tokens: int, spec: GroupSpec) -> str | None:
    """Of a rollout with a segment's tokens behind the `held_tokens` that were held: it ends where its lease says it must,
    and nowhere else."""
    sampling, count = spec.sampling, len(grown.token_ids)
    if count > sampling.max_new_tokens:
        return f"expected at most {sampling.max_new_tokens} tokens, got {count}"
    stops = set(sampling.stop_token_ids)
    early = [token for token in grown.token_ids[max(0, held_tokens - 1) : -1] if token in stops]
    if early:
        return f"expected it to end with its first stop token, got {early[0]} before its last token"
    at_string = sampling.string_stop(grown.token_ids, max(0, held_tokens - 1))
    if at_string is not None and at_string < count - 1:
        return f"expected it to end with its first stop string, got {count - 1 - at_string} tokens behind it"
    is_at_stop = grown.token_ids[-1:] and (
        grown.token_ids[-1] in stops or sampling.string_stop(grown.token_ids, count - 1) is not None
    )
    match grown.finish_reason:
        case FinishReason.STOP if (stops or sampling.stop_strings) and not is_at_stop:
            return f"expected a stop token at its end, one of {sampling.stop_token_ids}, got {grown.token_ids[-1]}"
        case FinishReason.LENGTH if count < sampling.max_new_tokens:
            return f"expected {sampling.max_new_tokens} tokens where it ends for its length, got {count}"
        case _:
            return None
