"""Prepares recent rollouts for the dashboard, in answer to one request of the coordinator.

Guarantees: an answer is bounded whatever was sampled; its texts contain no control or direction characters except line breaks and
tabs: others are shown as escapes. Leaves to others: which rollouts are kept (learner/recent), sending (session).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from echo2.learner.recent import RecentRollouts, SeenRollout, versions_of
from echo2.wire.bounds import (
    ROLLOUTS_SHOWN_MAX,
    SENDERS_SHOWN_MAX,
    SHOWN_CHARS_MAX,
    TOKEN_CHARS_MAX,
    TOKENS_SHOWN_MAX,
)
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb

PREVIEW_TOKENS = 64
PREVIEW_CHARS = 160
_BREAKS = {"\n": "\n", "\t": "\t"}


def plain(text: str, chars_max: int) -> str:
    """Replaces unprintable characters by their escapes and cuts the text to `chars_max`."""
    shown = "".join(c if c.isprintable() else _BREAKS.get(c) or ascii(c)[1:-1] for c in text[:chars_max])
    return shown if len(text) <= chars_max and len(shown) <= chars_max else shown[: chars_max - 1] + "…"


def answer(recent: RecentRollouts, tokenizer: Any, wanted: pb.RolloutsWanted) -> pb.RolloutsShown:
    """Answers with the list of rollouts, or with one rollout's tokens from `wanted.offset` on; empty if it is no longer kept."""
    shown = pb.RolloutsShown(request=wanted.request)
    if not wanted.rollout_id:
        shown.rollouts.extend(_summary(one, tokenizer) for one in recent.newest(ROLLOUTS_SHOWN_MAX))
        return shown
    try:
        one = recent[wanted.rollout_id]
    except KeyError:
        return shown
    shown.rollouts.append(_summary(one, tokenizer))
    shown.prompt = plain(_text(tokenizer, one.prompt_token_ids[-SHOWN_CHARS_MAX:]), SHOWN_CHARS_MAX)
    part = slice(wanted.offset, wanted.offset + TOKENS_SHOWN_MAX)
    token_ids = one.token_ids[part]
    texts = tokenizer.batch_decode([[token] for token in token_ids], skip_special_tokens=False)
    versions = islice(versions_of(one), part.start, part.stop)
    for token, text, logprob, version in zip(token_ids, texts, one.logprobs[part], versions, strict=True):
        shown.tokens.add(token_id=token, text=plain(text, TOKEN_CHARS_MAX), logprob=logprob, version=version)
    return shown


def _summary(one: SeenRollout, tokenizer: Any) -> pb.RolloutSummary:
    versions = [span.version for span in one.version_spans]
    return pb.RolloutSummary(
        rollout_id=one.rollout_id, step=one.step, reward=one.reward, token_count=len(one.token_ids),
        oldest_version=min(versions, default=0), newest_version=max(versions, default=0),
        finish_reason=one.finish_reason, peer_ids=one.peer_ids[:SENDERS_SHOWN_MAX],
        completion=plain(_text(tokenizer, one.token_ids[:PREVIEW_TOKENS]), PREVIEW_CHARS),
    )  # fmt: skip


def _text(tokenizer: Any, token_ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=False))
