"""How a batch is laid out for the forward pass: prompts shared, completions packed into rows, rows into micro-batches.

Guarantees: every completion stands in exactly one place, whole; its prompt stands in the same unit, before it; a
micro-batch holds at most `token_budget` positions, padding included, unless one row alone is longer. The layout is a
function of the lengths, so a batch trained again is computed in the same order. Leaves to others: tensors and masks
(runtime/collate).

A unit is one prompt followed by some of its completions; a completion sees its prompt and itself, never a sibling. n
completions of one prompt then cost one pass over the prompt instead of n. Units are put into rows, first fit, longest
first. Rows are kept short (`row_tokens`) because dense attention costs the square of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from echo2.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PackingLimits:
    """`row_tokens`: a row is filled up to this; one completion with its prompt may be longer and gets its own row."""

    token_budget: int
    row_tokens: int
    shares_prompts: bool = True

    def __post_init__(self) -> None:
        if self.token_budget < 1 or self.row_tokens < 1:
            raise ConfigError(f"packing: expected budgets of at least one token, got {self}")


@dataclass(frozen=True, slots=True)
class GroupLengths:
    """One group: tokens of its prompt and of its completions."""

    prompt: int
    completions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Unit:
    """Prompt of `group`, then its completions `members` (indices within the group), in that order."""

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
    """The layout of a batch of groups. Groups without completions take no place."""
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
    """Rows come longest first, so a micro-batch is as wide as its first row."""
    stacks: list[list[tuple[Unit, ...]]] = []
    for row in rows:
        if stacks and (len(stacks[-1]) + 1) * _row_tokens(stacks[-1][0]) <= token_budget:
            stacks[-1].append(tuple(row))
        else:
            stacks.append([tuple(row)])
    return [MicroBatch(_row_tokens(stack[0]), tuple(stack)) for stack in stacks]
