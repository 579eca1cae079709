"""The rollouts of the newest steps, for operators to look at, and the answer to one request of the dashboard for them.

Guarantees: keeps at most `tokens_max` tokens, about a quarter of them from one step; from a larger step, every n-th rollout.
After a restart, it is empty. An answer is bounded whatever was sampled; its texts contain no control or direction characters
except line breaks and tabs: others are shown as escapes.
"""

from __future__ import annotations

import statistics
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToJson

from echo2.base.ids import Step
from echo2.base.rollout import VersionSpan
from echo2.learner.rollouts.groups import Batch, SentTokens, TrainGroup
from echo2.wire.bounds import (
    LENGTH_SHARES_MAX,
    ROLLOUTS_SHOWN_MAX,
    SENDERS_SHOWN_MAX,
    SHOWN_CHARS_MAX,
    TOKEN_CHARS_MAX,
    TOKENS_SHOWN_MAX,
    TURN_CHARS_MAX,
    TURNS_SHOWN_MAX,
)
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb

TOKENS_KEPT_MAX = 2 << 20  # 8 bytes per token, in host memory
LENGTHS_WINDOW = 1024
"""Rollouts whose lengths are reported: 16 a share, so that one does not move the longest share by much."""
STEP_SHARE = 4  # one step gets 1/4 of the tokens kept


@dataclass(frozen=True, slots=True)
class SeenRollout:
    """A rollout as step number `step` (counted from 1) trained on it: the sampled tokens, all turns concatenated. `insertions`:
    where a turn begins, as the index of its first sampled token, and the environment's tokens before it."""

    rollout_id: str
    step: Step
    reward: float
    prompt_token_ids: array[int]
    token_ids: array[int]
    logprobs: array[float]
    version_spans: tuple[VersionSpan, ...]
    finish_reason: str
    senders: tuple[SentTokens, ...]
    insertions: tuple[tuple[int, array[int]], ...]

    @property
    def size(self) -> int:
        return len(self.token_ids) + len(self.prompt_token_ids) + sum(len(ids) for _, ids in self.insertions)

    @property
    def turns(self) -> list[tuple[int, int, array[int]]]:
        """Number (from 1), position and environment's tokens of each turn; a first one without such tokens is left out."""
        first = 1 if self.insertions and not self.insertions[0][0] else 2
        return [(first + index, *insertion) for index, insertion in enumerate(self.insertions)]


class RecentRollouts:
    """Kept rollouts, newest first. `add` each batch that was trained on."""

    def __init__(self, tokens_max: int = TOKENS_KEPT_MAX) -> None:
        self._tokens_max = tokens_max
        self._kept: deque[SeenRollout] = deque()
        self._size = 0

    def add(self, batch: Batch) -> None:
        places = [(group, index) for group in batch.groups for index in range(len(group.rollouts))]
        total = sum(_size(group, index) for group, index in places)
        every = max(1, -(-total * STEP_SHARE // self._tokens_max))
        for group, index in islice(places, 0, None, every):
            if _size(group, index) * STEP_SHARE <= self._tokens_max:
                self._keep(_recorded(batch.step, group, index))

    def newest(self, count: int) -> list[SeenRollout]:
        return list(islice(self._kept, count))

    def find(self, rollout_id: str) -> SeenRollout | None:
        return next((rollout for rollout in self._kept if rollout.rollout_id == rollout_id), None)

    def lengths(self) -> list[int]:
        """Sampled tokens of the newest rollouts, ascending: the mean of each of `LENGTH_SHARES_MAX` equal shares; none while there
        are fewer rollouts than shares."""
        newest = sorted(len(rollout.token_ids) for rollout in islice(self._kept, LENGTHS_WINDOW))
        if len(newest) < LENGTH_SHARES_MAX:
            return []
        ends = [len(newest) * share // LENGTH_SHARES_MAX for share in range(LENGTH_SHARES_MAX + 1)]
        return [round(statistics.fmean(newest[start:end])) for start, end in pairwise(ends)]

    def _keep(self, rollout: SeenRollout) -> None:
        self._kept.appendleft(rollout)
        self._size += rollout.size
        while self._size > self._tokens_max:
            self._size -= self._kept.pop().size


def _size(group: TrainGroup, index: int) -> int:
    return group.tokens_of(index) + len(group.spec.prompt_token_ids)


def _recorded(step: Step, group: TrainGroup, index: int) -> SeenRollout:
    rollout, insertions = group.rollouts[index], group.insertions[index] if group.insertions else ()
    return SeenRollout(
        f"{rollout.group_id}/{rollout.index}",
        Step(step + 1),
        group.rewards[index],
        array("i", group.spec.prompt_token_ids),
        array("i", rollout.token_ids),
        array("f", rollout.logprobs),
        rollout.version_spans,
        rollout.finish_reason.value,
        group.senders[index] if group.senders else (),
        tuple((insertion.position, array("i", insertion.token_ids)) for insertion in insertions),
    )


# ---- for the dashboard, and for the report of a finished run

REPORTED_TOKENS_MAX = 1 << 14  # some 2 MB of a report
PREVIEW_TOKENS = 64  # more than PREVIEW_CHARS, whatever the tokenizer
PREVIEW_CHARS = 160  # a line of the page


def plain(text: str, chars_max: int) -> str:
    """Replaces unprintable characters but line breaks and tabs by their escapes and cuts the text to `chars_max`."""
    text_shown = "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text[:chars_max])
    return text_shown if len(text) <= chars_max and len(text_shown) <= chars_max else text_shown[: chars_max - 1] + "…"


def answer(recent: RecentRollouts, tokenizer: Any, wanted: pb.RolloutsWanted) -> pb.RolloutsShown:
    """Answers with the list of rollouts, or with one rollout's tokens from `wanted.offset` on; empty if it is no longer kept."""
    reply = pb.RolloutsShown(request=wanted.request)
    if not wanted.rollout_id:
        reply.rollouts.extend(_summary(rollout, tokenizer) for rollout in recent.newest(ROLLOUTS_SHOWN_MAX))
        return reply
    if (rollout := recent.find(wanted.rollout_id)) is None:
        return reply
    reply.rollouts.append(_summary(rollout, tokenizer))
    reply.prompt = plain(_text(tokenizer, rollout.prompt_token_ids[-SHOWN_CHARS_MAX:]), SHOWN_CHARS_MAX)
    turns = [turn for turn in rollout.turns if wanted.offset <= turn[1] < wanted.offset + TOKENS_SHOWN_MAX]
    ends = [position for _, position, _ in turns[TURNS_SHOWN_MAX:]]  # what does not fit is asked for next
    part = slice(wanted.offset, min([wanted.offset + TOKENS_SHOWN_MAX, *ends]))
    for number, position, inserted in turns[:TURNS_SHOWN_MAX]:
        text = plain(_text(tokenizer, inserted[:TURN_CHARS_MAX]), TURN_CHARS_MAX)
        reply.turns.add(turn=number, position=position, text=text)
    token_ids = rollout.token_ids[part]
    texts = [_text(tokenizer, [token]) for token in token_ids]
    all_versions = (span.version for span in rollout.version_spans for _ in range(span.count))
    versions = islice(all_versions, part.start, part.stop)
    peers = {peer_id: index for index, peer_id in enumerate(reply.rollouts[0].peer_ids)}
    all_senders = [peers.get(sent.peer_id, len(peers)) for sent in rollout.senders for _ in range(sent.token_count)]
    senders = (all_senders or [0] * len(rollout.token_ids))[part]
    rows = zip(token_ids, texts, rollout.logprobs[part], versions, senders, strict=True)
    for token, text, logprob, version, peer in rows:
        reply.tokens.add(token_id=token, text=plain(text, TOKEN_CHARS_MAX), logprob=logprob, version=version, peer=peer)
    return reply


def pages(recent: RecentRollouts, tokenizer: Any) -> Iterator[pb.RolloutsShown]:
    """The newest rollouts, REPORTED_TOKENS_MAX tokens of them, as the dashboard is answered that turns all their pages."""
    left = REPORTED_TOKENS_MAX
    for rollout in recent.newest(ROLLOUTS_SHOWN_MAX):
        at = 0
        while at < len(rollout.token_ids) and left > 0:
            page = answer(recent, tokenizer, pb.RolloutsWanted(rollout_id=rollout.rollout_id, offset=at))
            at, left = at + len(page.tokens), left - len(page.tokens)
            yield page


def keep(recent: RecentRollouts, tokenizer: Any, folder: Path) -> None:
    """Writes `pages` for the report of the run, which is made when this process has ended."""
    if lines := [MessageToJson(page, indent=None) for page in pages(recent, tokenizer)]:
        (folder / "rollouts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _summary(rollout: SeenRollout, tokenizer: Any) -> pb.RolloutSummary:
    versions = [span.version for span in rollout.version_spans]
    return pb.RolloutSummary(
        rollout_id=rollout.rollout_id, step=rollout.step, reward=rollout.reward, token_count=len(rollout.token_ids),
        oldest_version=min(versions, default=0), newest_version=max(versions, default=0),
        finish_reason=rollout.finish_reason,
        peer_ids=islice(dict.fromkeys(sent.peer_id for sent in rollout.senders), SENDERS_SHOWN_MAX),
        turn_count=rollout.turns[-1][0] if rollout.insertions else 1,
        completion=plain(_text(tokenizer, rollout.token_ids[:PREVIEW_TOKENS]), PREVIEW_CHARS),
    )  # fmt: skip


def _text(tokenizer: Any, token_ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=False))
