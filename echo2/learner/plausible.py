"""Checks reports for errors that no honest worker makes, whatever its engine's numerical noise.

Guarantees: each function returns a text that says what was expected and what came, or None if nothing is wrong. Leaves to
others: whether tokens and log-probabilities come from the version named (audit), counting false reports (untruths).
"""

from __future__ import annotations

from collections.abc import Collection

from echo2.base.ids import Version
from echo2.base.rollout import FinishReason, GroupSpec, Rollout, RolloutSegment

RELATION_NATS = 1e-3
"""Nats. Tolerance for the relation between a token's two log-probabilities that the sampling parameters imply; float32
kernels differ by less."""


def problem_of_segment(
    segment: RolloutSegment, spec: GroupSpec, vocabulary_size: int, published: Collection[Version]
) -> str | None:
    """Checks a segment by itself, before it is appended to the held tokens."""
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
    """Checks log-probabilities at temperature 1. There a token's two numbers are equal without a filter (top-p, top-k), and
    a filter can only make a sampled token more likely."""
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
    """Checks a rollout that a segment has extended beyond the `held_tokens` held before: it must end where the sampling
    parameters require, and nowhere else."""
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
