"""Rollouts of several turns: each turn's group, by which it is leased, and the joined rollout.

Guarantees: every turn after the first is a group of one rollout. The group's id names the rollout and the turn, so the
journal needs no other record of the relation. A turn's prompt is the previous turn's prompt and completion, followed by the
environment's tokens. Leaves to others: the environment (tasks), which turn comes next (intake).
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
    """Tokens of the environment, inserted before the sampled token with index `position`. Empty: a turn begins there."""

    position: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SentTokens:
    """Worker `peer_id` reported `token_count` consecutive tokens of a rollout."""

    peer_id: PeerId
    token_count: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn: all tokens before it, its sampled tokens, and the workers that reported them."""

    prompt_token_ids: tuple[int, ...]
    rollout: Rollout
    senders: tuple[SentTokens, ...] = ()


@dataclass(frozen=True, slots=True)
class JoinedRollout:
    """The sampled tokens of all turns as one rollout, and the environment's tokens in between."""

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
        """The id of this turn's group. The first turns of all rollouts of a prompt are leased as one group, the root."""
        return GroupId(f"{self.root}{_MARK}{self.index}{_MARK}{self.turn}") if self.turn else self.root


def turn_of(group_id: GroupId, index: int) -> TurnOf:
    """Maps rollout `index` of a leased group to its rollout and turn. Raises `StateError` if the id is malformed."""
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
    """Raises `MalformedMessage` if a call's prompt is empty or has a token outside the model's vocabulary."""
    if not prompt or min(prompt) < 0 or max(prompt) >= vocabulary_size:
        raise MalformedMessage(
            f"prompt of a call of {root}: expected 1 or more token ids below {vocabulary_size}, got {len(prompt)} from "
            f"{min(prompt, default=0)!r:.40} to {max(prompt, default=0)!r:.40}"
        )


def common_beginning(prompts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The longest common prefix of the prompts."""
    # In lexicographic order, a prefix shared by the first and the last prompt is shared by all prompts between them.
    first, last = min(prompts), max(prompts)
    same = next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return first[:same]


def joined(turns: Sequence[Turn], index: int, opening: tuple[int, ...] | None = None) -> JoinedRollout:
    """Joins all turns of one rollout, given in order, into rollout `index` of the first turn's root group.

    `opening`: for an agent's calls, the prefix that the first call's prompt shares with its siblings'; it becomes the prompt.
    The rest of that prompt becomes an insertion before the first sampled token, like the environment's tokens.
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
        if said or number > 0 or opening is not None:  # an empty insertion marks a turn's start, too
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
    """Returns `held` extended by `token_count` tokens of `peer_id`; unchanged if there are none or the worker is unknown."""
    if token_count <= 0 or not peer_id:
        return held
    if held and held[-1].peer_id == peer_id:
        return (*held[:-1], SentTokens(peer_id, held[-1].token_count + token_count))
    return (*held, SentTokens(peer_id, token_count))
