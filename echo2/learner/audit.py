"""Decides which tokens an audit scores under which version, and pairs the exact numbers with those that the worker claimed.

Guarantees: a rollout is scored whole, with all its versions, workers and turns. Every token is scored under the version
that its span names, with the KV cache that an honest engine had at that point, and under an older version. Leaves
to others: which rollouts are audited (audit_draw), keeping the versions and running the forward pass (`ScoreUnderVersion`,
learner/runtime/snapshots), what the numbers say about the worker (suspicion).

An engine prefills again (recomputes its KV cache) when it takes over a rollout from another worker, when a turn begins,
and, unless its worker says that it keeps the cache, when the version changes. Otherwise a piece continues with the cache
of the piece before it.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from echo2.base.ids import PeerId, Version
from echo2.base.noise import rollout_seed, turn_seed, uniforms
from echo2.base.rollout import Rollout, SamplingParams
from echo2.learner.batch import TrainGroup
from echo2.learner.episodes import Insertion
from echo2.scoring.request import Column, TokenScores

NOTHING: Column = np.zeros(0)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Habits:
    """What a worker claims about its engine. `draws_by_seed`: each token is picked by the random number that the lease's seed
    gives for its position. `keeps_cache`: sequences keep their KV cache when the weights change."""

    draws_by_seed: bool = False
    keeps_cache: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """Sampled tokens `start` to `stop - 1` of a rollout, which `worker` reported as sampled by `version`. `keeps_cache`: the
    piece continues with the KV cache of the piece before it. `turn`: the number of its turn, counted from 0; `turn_start`:
    the index of that turn's first sampled token."""

    worker: PeerId
    version: Version
    start: int
    stop: int
    keeps_cache: bool = False
    draws_by_seed: bool = False
    turn: int = 0
    turn_start: int = 0


@dataclass(frozen=True, slots=True)
class Passage:
    """A rollout as its engines read it. `token_ids`: all tokens, from prompt, environment and policy. `places`: int64, the
    indices of the sampled tokens in `token_ids`. `uniforms`: float64, the random number that the seed gives for each sampled
    token. `siblings`: completions of the same prompt, if one worker reported all of this rollout and all of theirs."""

    rollout: Rollout
    sampling: SamplingParams
    token_ids: tuple[int, ...]
    places: npt.NDArray[np.int64]
    uniforms: Column
    pieces: tuple[Piece, ...]
    siblings: tuple[tuple[int, ...], ...] = ()

    @property
    def claimed(self) -> Column:
        return np.asarray(self.sampling.trained_logprobs(self.rollout.logprobs, self.rollout.raw_logprobs))


@dataclass(frozen=True, slots=True)
class Evidence:
    """The claimed and the recomputed scores of a piece. `claimed`: the worker's log-probabilities. `exact`: scores under the
    piece's version. `older`: scores under `older_version`; None if no older version is kept. `is_next_older`: no version was
    published between the two. `uniforms`: empty if the worker does not claim to draw by its seeds."""

    piece: Piece
    claimed: Column
    exact: TokenScores
    older: TokenScores | None
    is_next_older: bool
    uniforms: Column
    older_version: Version | None = None


class ScoreUnderVersion(Protocol):
    """Runs the forward pass under a kept version. `cache`: the cache returned by the call for the previous piece, if this
    piece continues it, else None. Returns the scores, and the cache for the next piece."""

    def __call__(
        self, version: Version, passage: Passage, piece: Piece, cache: object | None
    ) -> tuple[TokenScores, object]: ...


ScoreTogether = Callable[[Version, Sequence[tuple[Passage, Piece]]], list[TokenScores]]
"""Scores pieces that continue no other piece's cache, all under one version; returns one `TokenScores` for each."""


def passage_of(group: TrainGroup, member: int, habits_of: Callable[[PeerId], Habits]) -> Passage:
    """Builds the passage of rollout `member` of a training group. Takes milliseconds for a long rollout."""
    rollout = group.rollouts[member]
    insertions = group.insertions[member] if group.insertions else ()
    text, sampled_at = group.text_of(member)
    prompt = group.spec.prompt_token_ids
    return Passage(
        rollout,
        group.spec.sampling,
        (*prompt, *text),
        np.asarray(sampled_at, dtype=np.int64) + len(prompt),
        _uniforms_of(rollout, group.spec.sampling.seed, insertions),
        pieces_of(group, member, habits_of),
        _siblings_of(group, member),
    )


def _uniforms_of(rollout: Rollout, seed: int, insertions: Sequence[Insertion]) -> Column:
    starts = [0, *(insertion.position for insertion in insertions), len(rollout.token_ids)]
    seeds = [rollout_seed(seed, rollout.index)]
    seeds += [rollout_seed(turn_seed(seed, rollout.index, turn + 1), 0) for turn in range(len(insertions))]
    turns = zip(seeds, itertools.pairwise(starts), strict=True)
    return np.concatenate([uniforms(own, stop - start) for own, (start, stop) in turns])


class _Runs(Generic[T]):
    """Run-length encoding: maps a token index to the value of its run. `starts`: where runs begin; `end`: total tokens."""

    def __init__(self, counted: Iterable[tuple[T, int]]) -> None:
        self.starts: list[int] = []
        self.end = 0
        self._values: list[T] = []
        for value, count in counted:
            if count and (not self._values or value != self._values[-1]):
                self.starts.append(self.end)
                self._values.append(value)
            self.end += count

    def at(self, token: int) -> T:
        return self._values[bisect_right(self.starts, token) - 1]


def pieces_of(group: TrainGroup, member: int, habits_of: Callable[[PeerId], Habits]) -> tuple[Piece, ...]:
    """Cuts rollout `member` wherever its version, its worker or its turn changes."""
    versions = _Runs((span.version, span.count) for span in group.rollouts[member].version_spans)
    peers = _Runs((sent.peer_id, sent.token_count) for sent in group.senders[member])
    turns = [insertion.position for insertion in (group.insertions[member] if group.insertions else ())]
    end = min(versions.end, peers.end)
    cuts = sorted(cut for cut in {*versions.starts, *peers.starts, *turns} if 0 < cut < end)
    pieces = []
    for start, stop in itertools.pairwise([0, *cuts, end] if end else [0]):
        peer = peers.at(start)
        goes_on = start > 0 and start not in turns and peer == peers.at(start - 1)
        keeps = goes_on and habits_of(peer).keeps_cache
        turn = sum(position <= start for position in turns)
        at = turns[turn - 1] if turn else 0
        pieces.append(Piece(peer, versions.at(start), start, stop, keeps, habits_of(peer).draws_by_seed, turn, at))
    return tuple(pieces)


def _siblings_of(group: TrainGroup, member: int) -> tuple[tuple[int, ...], ...]:
    own = {sent.peer_id for sent in group.senders[member]}
    if len(own) != 1:
        return ()
    return tuple(
        other.token_ids
        for n, other in enumerate(group.rollouts)
        if n != member and {sent.peer_id for sent in group.senders[n]} == own
    )


def one_back() -> int:
    return 1


def examined(
    passages: Sequence[Passage],
    kept: Sequence[Version],
    score: ScoreUnderVersion,
    steps_back: Callable[[], int] = one_back,
    olders: Sequence[Mapping[Version, Version] | None] = (),
    together: ScoreTogether | None = None,
) -> list[list[Evidence]]:
    """Scores the passages; returns, for each, the evidence of the pieces whose version is in `kept` (ascending).

    The older version to compare with comes from `olders[n]`, if given for passage n, else it is `steps_back()` versions
    earlier. Pieces that continue no cache are scored version by version, so each version is loaded once. A chain of pieces
    that share a cache is scored only if all its versions are kept.
    """
    found: list[list[Evidence]] = [[] for _ in passages]
    alone: list[tuple[int, Piece]] = []
    compared: list[Mapping[Version, Version]] = []
    for number, passage in enumerate(passages):
        given = olders[number] if number < len(olders) else None
        compared.append(older_of(passage, kept, steps_back()) if given is None else given)
        for chain in _chains(passage.pieces):
            if len(chain) == 1:
                alone += [(number, piece) for piece in chain if piece.version in kept]
            elif all(piece.version in kept for piece in chain):
                found[number] += _examined_chain(passage, chain, kept, compared[number], score)
    exact: dict[tuple[int, int], TokenScores] = {}
    older: dict[tuple[int, int], TokenScores] = {}
    for version in kept:
        asked = [one for one in alone if version in (one[1].version, compared[one[0]].get(one[1].version))]
        pieces = [(passages[number], piece) for number, piece in asked]
        scored = together(version, pieces) if together else [score(version, *one, None)[0] for one in pieces]
        for (number, piece), scores in zip(asked, scored, strict=True):
            (exact if piece.version == version else older)[number, piece.start] = scores
    for number, piece in alone:
        key = (number, piece.start)
        before = compared[number].get(piece.version) if key in older else None
        found[number].append(evidence_of(passages[number], piece, exact[key], older.get(key), before, kept))
    return found


def older_of(passage: Passage, kept: Sequence[Version], steps_back: int) -> dict[Version, Version]:
    """Maps each kept version, except the oldest, to the older version to compare with: `steps_back` versions earlier, or the
    oldest kept. Goes back one version if a worker of the passage does not draw by its seeds."""
    back = steps_back if all(piece.draws_by_seed for piece in passage.pieces) else 1
    return {version: kept[max(0, place - back)] for place, version in enumerate(kept) if place > 0}


def _chains(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Splits pieces into chains: a piece, then the pieces that continue its KV cache."""
    chain: list[Piece] = []
    for piece in pieces:
        if chain and not piece.keeps_cache:
            yield chain
            chain = []
        chain.append(piece)
    if chain:
        yield chain


def _examined_chain(
    passage: Passage,
    chain: Sequence[Piece],
    kept: Sequence[Version],
    compared: Mapping[Version, Version],
    score: ScoreUnderVersion,
) -> Iterator[Evidence]:
    cache: object | None = None
    for piece in chain:
        older, before = None, compared.get(piece.version)
        if before is not None:
            older = score(before, passage, piece, cache)[0]
        exact, cache = score(piece.version, passage, piece, cache)
        yield evidence_of(passage, piece, exact, older, before, kept)


def evidence_of(
    passage: Passage,
    piece: Piece,
    exact: TokenScores,
    older: TokenScores | None,
    before: Version | None,
    published: Sequence[Version],
) -> Evidence:
    """Pairs a piece's claims with its scores. `before`: the version of `older`. `published`: the versions still remembered,
    ascending; they decide `is_next_older`."""
    own = slice(piece.start, piece.stop)
    numbers = passage.uniforms[own] if piece.draws_by_seed else NOTHING
    is_next = before is not None and not any(before < version < piece.version for version in published)
    return Evidence(piece, passage.claimed[own], exact, older, is_next, numbers, before)


def copies(passage: Passage, evidence: Sequence[Evidence]) -> float | None:
    """Likelihood ratio of copied siblings against chance: the mean over siblings of [equal] / P(the completion).

    For completions drawn independently its expectation is at most 1. None if not all tokens were scored, or if the
    passage has no siblings (it has none if several workers sampled it).
    """
    if not passage.siblings or sum(len(one.claimed) for one in evidence) != len(passage.rollout.token_ids):
        return None
    equal = sum(tokens == passage.rollout.token_ids for tokens in passage.siblings)
    chance = math.fsum(math.fsum(one.exact.drawn) for one in evidence)
    return equal * math.exp(min(600.0, -chance)) / len(passage.siblings)
