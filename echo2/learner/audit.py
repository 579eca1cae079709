"""Which tokens to score under which version, for an audit: exact log-probabilities beside those that a worker claimed.

Guarantees: every token is scored under the very version that its span names, and under the one published before it;
each version's weights are needed once. Leaves to others: keeping the snapshots and running the forward pass
(`ScoreUnderVersion`, learner/runtime/snapshots), what the numbers say about the worker (suspicion).

A sequence that kept its KV cache across a swap matches no version exactly after it: under `keep_kv` audit first spans
only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from echo2.base.ids import GroupId, PeerId, Version
from echo2.base.rng import derived_rng
from echo2.base.rollout import Rollout

NEWCOMER_TOKENS = 2048
FLOOR_NATS = -12.0
"""Log-probabilities below this count as this where a token's likelihood is judged, so that the judgement is bounded."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Of consecutive tokens, under one version: the log-probability of each (nats), the mean of max(log-probability,
    FLOOR_NATS) of a token drawn there, the probability that the sequence ends there, and whether it did."""

    logprobs: tuple[float, ...]
    expected: tuple[float, ...]
    stop_chances: tuple[float, ...]
    stopped: tuple[bool, ...]

    def __post_init__(self) -> None:
        lengths = {len(self.logprobs), len(self.expected), len(self.stop_chances), len(self.stopped)}
        assert len(lengths) == 1, "four numbers a token"


class ScoreUnderVersion(Protocol):
    """The forward pass under a kept snapshot: scores of `token_ids[start:stop]` after the prompt and what precedes.

    Under the sampling temperature, without filters.
    """

    def __call__(self, version: Version, rollout: Rollout, start: int, stop: int) -> TokenScores: ...


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens `start` to `stop - 1` of `rollout`: sampled under `version`, as `worker` says who reported them."""

    worker: PeerId
    rollout: Rollout
    version: Version
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Evidence:
    """What was claimed of a piece and what is so. `previous`: log-probabilities under the version before; empty where
    that is not kept. `is_raw`: of the raw model, for tokens were sampled with a filter."""

    piece: Piece
    exact: TokenScores
    previous: tuple[float, ...]
    is_raw: bool = False

    @property
    def claimed(self) -> tuple[float, ...]:
        rollout = self.piece.rollout
        numbers = rollout.raw_logprobs if self.is_raw else rollout.logprobs
        return numbers[self.piece.start : self.piece.stop]


def pieces_of(rollout: Rollout, senders: Sequence[tuple[PeerId, int]], first_span_only: bool = False) -> list[Piece]:
    """The rollout cut where its version or its sender changes. `senders`: who reported how many tokens, in order."""
    spans = rollout.version_spans[: 1 if first_span_only else None]
    cuts = {0}
    for counts in ([span.count for span in spans], [count for _, count in senders]):
        cuts |= {sum(counts[: n + 1]) for n in range(len(counts))}
    end = min(sum(span.count for span in spans), sum(count for _, count in senders))
    edges = sorted(cut for cut in cuts if cut <= end)
    versions = [span.version for span in spans for _ in range(span.count)]
    peers = [peer for peer, count in senders for _ in range(count)]
    return [Piece(peers[start], rollout, versions[start], start, stop) for start, stop in itertools.pairwise(edges)]


def examined(
    pieces: Sequence[Piece], kept: Sequence[Version], score: ScoreUnderVersion, is_raw: bool = False
) -> list[Evidence]:
    """Scores of the pieces whose version is among the `kept` ones (ascending), each version loaded once.

    `is_raw`: tokens were sampled with top-p or top-k; `score` is then of the raw model, temperature 1.
    """
    exact: dict[int, TokenScores] = {}
    previous: dict[int, tuple[float, ...]] = {}
    for place, version in enumerate(kept):
        after = kept[place + 1] if place + 1 < len(kept) else None
        for number, piece in enumerate(pieces):
            if piece.version == version:
                exact[number] = score(version, piece.rollout, piece.start, piece.stop)
            elif piece.version == after:
                previous[number] = score(version, piece.rollout, piece.start, piece.stop).logprobs
    return [Evidence(pieces[n], exact[n], previous.get(n, ()), is_raw) for n in sorted(exact)]


def is_chosen(seed: int, group_id: GroupId, share: float, tokens_seen: int) -> bool:
    """Whether a group is audited: `share` of all, by its name, and all of a worker of which little was seen yet."""
    if share <= 0:
        return False
    return tokens_seen < NEWCOMER_TOKENS or derived_rng(seed, "audit", group_id).random() < share


def copies(rollouts: Sequence[Rollout], logprobs: Sequence[Sequence[float]]) -> float:
    """How much likelier equal siblings are than by chance: the mean over pairs of [equal] / P(the completion).

    Its expectation is at most 1 for completions drawn independently. `logprobs`: exact, per token.
    """
    pairs = [(i, j) for i in range(len(rollouts)) for j in range(i)]
    if not pairs:
        return 1.0
    chance = [math.exp(-min(600.0, -math.fsum(row))) for row in logprobs]
    equal = [1.0 / chance[i] for i, j in pairs if rollouts[i].token_ids == rollouts[j].token_ids]
    return math.fsum(equal) / len(pairs)
