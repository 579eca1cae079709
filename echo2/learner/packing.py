"""How a batch is laid out for the forward pass: prompts shared, completions packed into rows, rows into micro-batches.

Guarantees: every completion is placed exactly once, whole, in a unit that begins with its prompt; a micro-batch has at most
`token_budget` positions, padding included, unless a single row is longer. The layout depends only on the lengths, so a
batch that is replayed is computed in the same order. Leaves to others: tensors and masks (runtime/collate).

A unit is one prompt followed by some of its completions; a completion attends to its prompt and itself, never to a sibling.
So n completions of a prompt cost one pass over the prompt instead of n. Units are packed into rows, first fit, longest
first. Rows are kept short (`row_tokens`) because the cost of dense attention grows with the square of a row's length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from echo2.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PackingLimits:
    """`token_budget`: positions per micro-batch. `row_tokens`: length to which rows are filled; if the batch's longest
    completion with its prompt is longer, that length applies instead. `shares_prompts`: whether a unit may have several
    completions."""

    token_budget: int
    row_tokens: int
    shares_prompts: bool = True

    def __post_init__(self) -> None:
        if self.token_budget < 1 or self.row_tokens < 1:
            raise ConfigError(f"packing: expected budgets of at least one token, got {self}")


@dataclass(frozen=True, slots=True)
class GroupLengths:
    """Lengths, in tokens, of a group's prompt and completions."""

    prompt: int
    completions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Unit:
    """The prompt of `group`, followed by its completions `members` (indices within the group), in that order."""

    group: int
    members: tuple[int, ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of units, each padded to `width`."""

    width: int
    rows: tuple[tuple[Unit, ...], ...]

    @property
    def positions(self) -> int:
        return self.width * len(self.rows)


def plan_microbatches(groups: Sequence[GroupLengths], limits: PackingLimits) -> list[MicroBatch]:
    """Lays out a batch of groups. Groups without completions are skipped."""
    longest = max((g.prompt + c for g in groups for c in g.completions), default=0)
    row_tokens = max(longest, min(limits.row_tokens, limits.token_budget))
    units = [unit for index, group in enumerate(groups) for unit in _units(index, group, row_tokens, limits)]
    rows = _first_fit(sorted(units, key=lambda unit: -unit.tokens), row_tokens)
    return _stacked(sorted(rows, key=_row_tokens, reverse=True), limits.token_budget)


def _units(index: int, group: GroupLengths, row_tokens: int, limits: PackingLimits) -> list[Unit]:
    units: list[Unit] = []
    members: list[int] = []
    tokens = group.prompt
    for member, length in enumerate(group.completions):
        if members and (tokens + length > row_tokens or not limits.shares_prompts):
            units.append(Unit(index, tuple(members), tokens))
            members, tokens = [], group.prompt
        members.append(member)
        tokens += length
    if members:
        units.append(Unit(index, tuple(members), tokens))
    return units


def _first_fit(units: Sequence[Unit], row_tokens: int) -> list[list[Unit]]:
    rows: list[list[Unit]] = []
    free: list[int] = []
    for unit in units:
        place = next((i for i, room in enumerate(free) if room >= unit.tokens), None)
        if place is None:
            rows.append([unit])
            free.append(row_tokens - unit.tokens)
        else:
            rows[place].append(unit)
            free[place] -= unit.tokens
    return rows


def _row_tokens(row: Sequence[Unit]) -> int:
    return sum(unit.tokens for unit in row)


def _stacked(rows: Sequence[Sequence[Unit]], token_budget: int) -> list[MicroBatch]:
    """Stacks rows, given longest first, into micro-batches. Each is as wide as its first row."""
    stacks: list[list[tuple[Unit, ...]]] = []
    for row in rows:
        if stacks and (len(stacks[-1]) + 1) * _row_tokens(stacks[-1][0]) <= token_budget:
            stacks[-1].append(tuple(row))
        else:
            stacks.append([tuple(row)])
    return [MicroBatch(_row_tokens(stack[0]), tuple(stack)) for stack in stacks]
