"""Rollouts of several turns: the groups that their turns are leased as, and the one rollout that they make together.

Guarantees: every turn behind the first is a group of one rollout, whose id says of which rollout it is the turn, so that
a journal needs no other record of it; what a turn's prompt holds beyond the turn before it is what the world said.
Leaves to others: the world (tasks), which turn comes next (intake).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from echo2.base.errors import MalformedMessage, StateError
from echo2.base.ids import GroupId, PeerId
from echo2.base.rollout import Rollout, VersionSpan, joined_spans
from echo2.base.routing import NO_ROUTING, joined_routing

NOBODY = PeerId("")
_MARK = "."


@dataclass(frozen=True, slots=True)
class Insertion:
    """Tokens of the world that stand before the sampled token at `position` of a rollout of several turns."""

    position: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SentTokens:
    """`token_count` consecutive tokens of a rollout that the worker `peer_id` reported."""

    peer_id: PeerId
    token_count: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn: all tokens before it, and what was sampled."""

    prompt_token_ids: tuple[int, ...]
    rollout: Rollout
    senders: tuple[SentTokens, ...] = ()


@dataclass(frozen=True, slots=True)
class JoinedRollout:
    """The sampled tokens of all turns as one rollout, and what stands between them."""

    rollout: Rollout
    insertions: tuple[Insertion, ...]
    senders: tuple[SentTokens, ...]


@dataclass(frozen=True, slots=True)
class TurnOf:
    """Turn number `turn`, counted from 0, of rollout `index` of the group `root`."""

    root: GroupId
    index: int
    turn: int

    @property
    def group_id(self) -> GroupId:
        """The id of the group that this turn is leased as; the first turns of a prompt are leased together."""
        return GroupId(f"{self.root}{_MARK}{self.index}{_MARK}{self.turn}") if self.turn else self.root


def turn_of(group_id: GroupId, index: int) -> TurnOf:
    """Which turn of which rollout the rollout `index` of a leased group is."""
    root, *rest = group_id.split(_MARK)
    if not rest:
        return TurnOf(group_id, index, 0)
    if len(rest) != 2 or not all(part.isdigit() for part in rest):
        raise StateError(f"group {group_id}: expected an id of GROUP{_MARK}INDEX{_MARK}TURN")
    return TurnOf(GroupId(root), int(rest[0]), int(rest[1]))


def is_later_turn(group_id: GroupId) -> bool:
    return _MARK in group_id


def root_of(group_id: GroupId) -> GroupId:
    return GroupId(group_id.partition(_MARK)[0])


def check_prompt(root: GroupId, prompt: tuple[int, ...], vocabulary_size: int) -> None:
    """Raises `MalformedMessage` unless the model has every token of a call's prompt."""
    if not prompt or min(prompt) < 0 or max(prompt) >= vocabulary_size:
        raise MalformedMessage(
            f"prompt of a call of {root}: expected 1 or more token ids below {vocabulary_size}, got {len(prompt)} from "
            f"{min(prompt, default=0)!r:.40} to {max(prompt, default=0)!r:.40}"
        )


def common_beginning(prompts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The tokens with which all of them begin."""
    first, last = min(prompts), max(prompts)
    same = next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return first[:same]


def joined(turns: Sequence[Turn], index: int, opening: tuple[int, ...] | None = None) -> JoinedRollout:
    """All turns of one rollout, in order, as rollout `index` of the first one's group.

    `opening`: of an agent's calls, the beginning of the first one's prompt that its siblings have as well; the rest of that
    prompt stands between the prompt and the first sampled token, as the world's words do.
    """
    first, last = turns[0], turns[-1]
    insertions: list[Insertion] = []
    before = first.prompt_token_ids if opening is None else opening
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    raw_logprobs: tuple[float, ...] = ()
    spans: tuple[VersionSpan, ...] = ()
    routing = NO_ROUTING
    senders: tuple[SentTokens, ...] = ()
    for number, turn in enumerate(turns):
        assert turn.prompt_token_ids[: len(before)] == before, "a turn's prompt begins with all that came before it"
        said = turn.prompt_token_ids[len(before) :]
        if said or number > 0 or opening is not None:  # a turn begins there, also where the world said nothing
            insertions.append(Insertion(len(token_ids), said))
        routing = joined_routing(routing, len(token_ids), turn.rollout.routing, len(turn.rollout.token_ids))
        token_ids += turn.rollout.token_ids
        logprobs += turn.rollout.logprobs
        raw_logprobs += turn.rollout.raw_logprobs
        spans = joined_spans(spans, turn.rollout.version_spans)
        senders += turn.senders
        before = turn.prompt_token_ids + turn.rollout.token_ids
    group_id = first.rollout.group_id if opening is None else root_of(first.rollout.group_id)
    reason = last.rollout.finish_reason
    whole = Rollout(group_id, index, token_ids, logprobs, raw_logprobs, spans, reason, routing)
    return JoinedRollout(whole, tuple(insertions), senders)


def extended_senders(held: tuple[SentTokens, ...], peer_id: PeerId, token_count: int) -> tuple[SentTokens, ...]:
    """`held` with `token_count` more tokens of `peer_id`."""
    if token_count <= 0 or not peer_id:
        return held
    if held and held[-1].peer_id == peer_id:
        return (*held[:-1], SentTokens(peer_id, held[-1].token_count + token_count))
    return (*held, SentTokens(peer_id, token_count))
