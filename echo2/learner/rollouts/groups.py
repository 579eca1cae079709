"""Rollout groups: the completions of one prompt, their turns and calls, and the batch that trains on them.

Guarantees: a group's id is a function of its prompt's number, so that after a restart the same prompt gives the same group. Every
turn after the first, and every call of an agent, is leased as a group of one rollout, whose id names its root group, the rollout
(for agents: the chain of calls) and the turn; no other record of the relation is needed. A turn's prompt is the previous turn's
prompt and completion, followed by the environment's tokens. Tokens held never change; tokens that are sent again must equal them.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import dataclass, field, replace

from echo2.base.ids import GroupId, PeerId, Step, Version
from echo2.base.rollout import (
    NO_ROUTING,
    FinishReason,
    GroupSpec,
    Rollout,
    SamplingParams,
    VersionSpan,
    Work,
    joined_routing,
    joined_spans,
)

NOBODY = PeerId("")

# ---- ids: g00000012 (training), e00000004-00017 (evaluation of version 4), the same with a or x if agents play; r2: third try


def group_id_of(cursor: int, retry: int = 0, evaluated: Version | None = None, *, is_driven: bool = False) -> GroupId:
    """The id of prompt number `cursor` of the run, or of question number `cursor` of the evaluation of a version. `retry`: 0 for
    the first try. `is_driven`: agents play the prompt, call by call."""
    tries = f"r{retry}" if retry else ""
    if evaluated is None:
        return GroupId(f"{'a' if is_driven else 'g'}{cursor:08d}{tries}")
    return GroupId(f"{'x' if is_driven else 'e'}{evaluated:08d}-{cursor:05d}{tries}")


def is_driven(group_id: GroupId) -> bool:
    return group_id.startswith(("a", "x"))


def is_driven_root(group_id: GroupId) -> bool:
    """Whether the group stands for the episodes of one problem. It is never leased; the agents' calls are."""
    return is_driven(group_id) and not is_later_turn(group_id)


def evaluated_version(group_id: GroupId) -> Version | None:
    """The version that a group (or a turn of one) evaluates; None for a training group."""
    return Version(int(group_id[1:].partition("-")[0])) if group_id.startswith(("e", "x")) else None


@dataclass(frozen=True, slots=True)
class TurnOf:
    """Turn number `turn`, counted from 0, of rollout `index` of the group `root`."""

    root: GroupId
    index: int
    turn: int

    @property
    def group_id(self) -> GroupId:
        """The id of this turn's group. The first turns of all rollouts of a prompt are leased as one group, the root."""
        return GroupId(f"{self.root}.{self.index}.{self.turn}") if self.turn else self.root

    @property
    def next(self) -> TurnOf:
        return replace(self, turn=self.turn + 1)


def turn_of(group_id: GroupId, index: int) -> TurnOf:
    """Maps rollout `index` of a leased group to its rollout and turn."""
    root, *rest = group_id.split(".")
    return TurnOf(GroupId(root), int(rest[0]), int(rest[1])) if rest else TurnOf(group_id, index, 0)


def is_later_turn(group_id: GroupId) -> bool:
    return "." in group_id


def root_of(group_id: GroupId) -> GroupId:
    return GroupId(group_id.partition(".")[0])


Prompt = tuple[tuple[int, ...], SamplingParams]  # its tokens, and how its completions are sampled, with its seed


# ---- rollouts and turns


@dataclass(frozen=True, slots=True)
class Insertion:
    """Tokens of the environment, inserted before the sampled token with index `position`. Empty: a turn begins there."""

    position: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SentTokens:
    """Worker `peer_id` reported `token_count` consecutive tokens of a rollout."""

    peer_id: PeerId
    token_count: int


def empty_rollout(group_id: GroupId, index: int) -> Rollout:
    return Rollout(group_id, index, (), (), (), (), FinishReason.UNFINISHED)


def extended(held: Rollout, segment: Rollout) -> Rollout | None:
    """Returns `held` with the segment's new tokens appended; None if the overlap differs from the held tokens. `segment.offset`
    must not be beyond the held tokens. ABORTED leaves the rollout unfinished, to be continued later."""
    held_count = len(held.token_ids)
    assert segment.offset <= held_count, "a gap is answered with RESEND before"
    overlap = min(held_count - segment.offset, len(segment.token_ids))
    if segment.token_ids[:overlap] != held.token_ids[segment.offset : segment.offset + overlap]:
        return None
    new_spans: list[VersionSpan] = []
    skipped = overlap
    for span in segment.version_spans:
        if span.count > skipped:
            new_spans.append(VersionSpan(span.version, span.count - skipped))
        skipped = max(0, skipped - span.count)
    count = len(segment.token_ids)
    grown = {
        "token_ids": held.token_ids + segment.token_ids[overlap:],
        "logprobs": held.logprobs + segment.logprobs[overlap:],
        "raw_logprobs": held.raw_logprobs + segment.raw_logprobs[overlap:],
        "version_spans": joined_spans(held.version_spans, new_spans),
        "finish_reason": segment.finish_reason if segment.is_finished else FinishReason.UNFINISHED,
        "routing": joined_routing(held.routing, held_count, segment.routing.after(overlap, count), count - overlap),
    }
    whole = copy(held)  # both were checked; to check all again takes ten times as long, with every report of a long one
    for name, value in grown.items():
        object.__setattr__(whole, name, value)
    return whole


def extended_senders(held: tuple[SentTokens, ...], peer_id: PeerId, token_count: int) -> tuple[SentTokens, ...]:
    """Returns `held` extended by `token_count` tokens of `peer_id`; unchanged if there are none or the worker is unknown."""
    if token_count <= 0 or not peer_id:
        return held
    if held and held[-1].peer_id == peer_id:
        return (*held[:-1], SentTokens(peer_id, held[-1].token_count + token_count))
    return (*held, SentTokens(peer_id, token_count))


def common_beginning(prompts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    # In lexicographic order, a prefix shared by the first and the last prompt is shared by all prompts between them.
    first, last = min(prompts), max(prompts)
    same = next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return first[:same]


# ---- groups


@dataclass(slots=True)
class Group:
    """A prompt's rollouts and rewards. A group that is tried again has the prompt and the seed of the one before it: a worker
    that lets a group fail or go stale cannot force another sample.

    `cursor`, `retry`: as in its id. `rollouts`: one entry per index, empty at first. `rewards`: by index, once known; None if
    scoring failed. `senders`: by index, which worker reported which tokens. `seats_open`: number of agents' episodes that have
    not ended; in a group of agents each rollout is one chain of calls and has no tokens. `min_version`: the oldest that may
    have sampled its tokens."""

    spec: GroupSpec
    cursor: int
    retry: int = 0
    rollouts: list[Rollout] = field(default_factory=list)
    rewards: dict[int, float | None] = field(default_factory=dict)
    lease_attempt: int = 0
    senders: dict[int, tuple[SentTokens, ...]] = field(default_factory=dict)
    seats_open: int = 0
    min_version: int = 0

    @classmethod
    def opened(cls, spec: GroupSpec, cursor: int, retry: int) -> Group:
        if is_driven_root(spec.group_id):
            return cls(spec, cursor, retry, seats_open=spec.rollout_count)
        return cls(spec, cursor, retry, [empty_rollout(spec.group_id, index) for index in range(spec.rollout_count)])

    @property
    def is_training(self) -> bool:
        return self.spec.work is Work.TRAIN

    @property
    def is_sampled(self) -> bool:
        return all(rollout.is_finished for rollout in self.rollouts)

    @property
    def is_ready(self) -> bool:
        return self.seats_open == 0 and len(self.rewards) == len(self.rollouts)

    @property
    def is_begun(self) -> bool:
        return any(rollout.token_ids for rollout in self.rollouts)

    @property
    def begun_rollouts(self) -> int:
        if is_driven_root(self.spec.group_id):
            return len(self.rollouts)
        return sum(bool(rollout.token_ids) for rollout in self.rollouts)

    @property
    def token_count(self) -> int:
        return sum(len(rollout.token_ids) for rollout in self.rollouts)

    @property
    def oldest_version(self) -> Version:
        """The oldest version of all tokens; a version beyond all others if there are no tokens."""
        versions = [rollout.oldest_version for rollout in self.rollouts]
        return min((version for version in versions if version is not None), default=Version(1 << 62))

    def is_sent_by(self, peer_id: PeerId) -> bool:
        return any(sent.peer_id == peer_id for senders in self.senders.values() for sent in senders)

    def add_chain(self) -> int:
        """Adds a chain of an agent's calls; returns its index."""
        index = len(self.rollouts)
        self.rollouts.append(replace(empty_rollout(self.spec.group_id, index), finish_reason=FinishReason.STOP))
        return index

    def end_seat(self, chains: Collection[int], lost: Collection[int], reward: float | None, *, is_final: bool) -> None:
        """Records that an episode ended with `reward` for its `chains`; its `lost` ones do not count. If not `is_final`, its seat
        stays open for another episode."""
        for chain in (*lost, *chains):
            self.rewards[chain] = reward if chain in chains else None
        self.seats_open -= is_final


@dataclass(frozen=True, slots=True)
class TrainGroup:
    """A complete group. Rollouts whose reward failed are left out, so it may be ragged. `rollouts` hold only the sampled
    tokens. `insertions` holds, for each rollout, the environment's tokens in between, which the model reads but is not trained
    on; empty if all rollouts have one turn. `senders`: which worker reported which tokens."""

    spec: GroupSpec
    cursor: int
    rollouts: tuple[Rollout, ...]
    rewards: tuple[float, ...]
    insertions: tuple[tuple[Insertion, ...], ...] = ()
    senders: tuple[tuple[SentTokens, ...], ...] = ()

    def text_of(self, index: int) -> tuple[list[int], list[int]]:
        """All tokens after the prompt of rollout `index`, the environment's included, and the indices of the sampled ones."""
        token_ids = self.rollouts[index].token_ids
        text: list[int] = []
        sampled_at: list[int] = []
        begin = 0
        for insertion in self.insertions[index] if self.insertions else ():
            sampled_at += range(len(text), len(text) + insertion.position - begin)
            text += [*token_ids[begin : insertion.position], *insertion.token_ids]
            begin = insertion.position
        sampled_at += range(len(text), len(text) + len(token_ids) - begin)
        text += token_ids[begin:]
        return text, sampled_at

    def tokens_of(self, index: int) -> int:
        """Number of tokens after the prompt of rollout `index`, the environment's included."""
        insertions = self.insertions[index] if self.insertions else ()
        return len(self.rollouts[index].token_ids) + sum(len(insertion.token_ids) for insertion in insertions)


def joined(
    turns: Sequence[tuple[Group, Rollout]], index: int, opening: tuple[int, ...] | None = None
) -> tuple[Rollout, tuple[Insertion, ...], tuple[SentTokens, ...]]:
    """Joins all turns of one rollout, given in order with the group of each, into rollout `index` of the first turn's root
    group. Returns it with the environment's tokens between the sampled ones, and the workers that reported these. `opening`:
    for an agent's calls, the prefix that the first call's prompt shares with its siblings', which becomes the prompt. The rest
    of that prompt becomes an insertion before the first sampled token, like the environment's tokens."""
    insertions: list[Insertion] = []
    spans: tuple[VersionSpan, ...] = ()
    senders: tuple[SentTokens, ...] = ()
    routing, count = NO_ROUTING, 0
    before = turns[0][0].spec.prompt_token_ids if opening is None else opening
    for number, (group, turn) in enumerate(turns):
        prompt = group.spec.prompt_token_ids
        assert prompt[: len(before)] == before, "a turn's prompt begins with all that came before it"
        inserted = prompt[len(before) :]
        if inserted or number > 0 or opening is not None:  # an empty insertion marks a turn's start, too
            insertions.append(Insertion(count, inserted))
        routing = joined_routing(routing, count, turn.routing, len(turn.token_ids))
        spans, senders = joined_spans(spans, turn.version_spans), senders + group.senders.get(turn.index, ())
        count += len(turn.token_ids)
        before = prompt + turn.token_ids
    token_ids = tuple(itertools.chain.from_iterable(turn.token_ids for _, turn in turns))
    logprobs = tuple(itertools.chain.from_iterable(turn.logprobs for _, turn in turns))
    raw_logprobs = tuple(itertools.chain.from_iterable(turn.raw_logprobs for _, turn in turns))
    root, reason = root_of(turns[0][1].group_id), turns[-1][1].finish_reason
    whole = Rollout(root, index, token_ids, logprobs, raw_logprobs, spans, reason, routing)
    return whole, tuple(insertions), senders


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups that optimiser step `step`, counted from 0, trains on."""

    step: Step
    groups: tuple[TrainGroup, ...]

    @property
    def rollout_count(self) -> int:
        return sum(len(group.rollouts) for group in self.groups)
