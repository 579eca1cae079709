"""Which tokens to score under which version, for an audit: exact numbers beside those that a worker claimed.

Guarantees: a rollout is examined whole, whatever its versions, workers and turns: every token under the version that its
span names, behind the key-value cache that an honest engine had there, and under an older version. Leaves
to others: which rollouts (audit_draw), keeping the versions and running the forward pass (`ScoreUnderVersion`,
learner/runtime/snapshots), what the numbers say about the worker (suspicion).

An engine computes its cache anew where the rollout came from another worker, where a turn begins, and, unless its worker
says that it keeps its cache, where the version changes; elsewhere the cache of a piece is that of the piece before it.
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
    """What a worker says of its engine. `draws_by_seed`: each token is the one that the position's random number of its
    lease's seed picks. `keeps_cache`: sequences keep their key-value cache when the weights change."""

    draws_by_seed: bool = False
    keeps_cache: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """Sampled tokens `start` to `stop - 1`: reported by `worker` as of `version`; `keeps_cache` of the piece before. They are of
    turn number `turn`, whose first sampled token is number `turn_start`."""

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
    """A rollout as its engines read it: `token_ids` of prompt, world and policy; `places` of those that were sampled, with
    the `uniforms` of their seeds. `siblings`: the completions of the same prompt that the same worker sent alone."""

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
    """What was claimed of a piece and what is so. `older`: under an older version; None where none is kept.
    `is_next_older`: no version was published between the two.
    `uniforms`: empty where the worker does not say that it draws by its seeds."""

    piece: Piece
    claimed: Column
    exact: TokenScores
    older: TokenScores | None
    is_next_older: bool
    uniforms: Column
    older_version: Version | None = None


class ScoreUnderVersion(Protocol):
    """The forward pass under a kept version. `cache`: what the call for the piece before gave, where this one keeps it; what
    is given back is for the piece behind it."""

    def __call__(
        self, version: Version, passage: Passage, piece: Piece, cache: object | None
    ) -> tuple[TokenScores, object]: ...


ScoreTogether = Callable[[Version, Sequence[tuple[Passage, Piece]]], list[TokenScores]]
"""The same for pieces that stand alone, all under one version."""


def passage_of(group: TrainGroup, member: int, habits_of: Callable[[PeerId], Habits]) -> Passage:
    """The rollout `member` of a group that is trained on: all its tokens and their numbers, milliseconds of work for a long one."""
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
    """Consecutive tokens that share a value, counted."""

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
    """The rollout `member` cut where its version, its sender or its turn changes."""
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
    """Of each passage, the evidence of its pieces whose version is among the `kept` ones (ascending); the older version that it
    is compared with is that of `olders`, where it says one of the passage, else it lies `steps_back` before. Pieces that stand
    alone are scored version by version, so that each is loaded once."""
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
    """With which older version tokens of each are compared: `steps_back` before, as far as so many are kept, and one where the
    passage's workers do not draw by their seeds."""
    back = steps_back if all(piece.draws_by_seed for piece in passage.pieces) else 1
    return {version: kept[max(0, place - back)] for place, version in enumerate(kept) if place > 0}


def _chains(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Pieces with those behind them that keep their cache."""
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
    """`before`: the version of `older`; `published`: all that were, ascending, as far as they are remembered."""
    own = slice(piece.start, piece.stop)
    numbers = passage.uniforms[own] if piece.draws_by_seed else NOTHING
    is_next = before is not None and not any(before < version < piece.version for version in published)
    return Evidence(piece, passage.claimed[own], exact, older, is_next, numbers, before)


def copies(passage: Passage, evidence: Sequence[Evidence]) -> float | None:
    """How much likelier equal siblings are than by chance: the mean over siblings of [equal] / P(the completion).

    Its expectation is at most 1 for completions drawn independently. None where the passage was not examined whole, is not
    of one worker, or has no siblings.
    """
    if not passage.siblings or sum(len(one.claimed) for one in evidence) != len(passage.rollout.token_ids):
        return None
    equal = sum(tokens == passage.rollout.token_ids for tokens in passage.siblings)
    chance = math.fsum(math.fsum(one.exact.drawn) for one in evidence)
    return equal * math.exp(min(600.0, -chance)) / len(passage.siblings)
