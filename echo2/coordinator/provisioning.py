"""Getting machines and giving them back: one protocol for all providers.

Guarantees of a `Provider`: `rent` either gives machines that can join with the link that it was handed or raises, and
`release` ends what it rented, at once or at the latest after its stated grace; both may be called again for the same
machine. Leaves to others: whether to rent (planner, operator), the journal of paid actions (runtime/commands).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Machine:
    """`command`: what to run on it, where somebody else has to; empty where the provider has done so."""

    machine_id: str
    provider: str
    label: str
    command: str = ""


class Provider(Protocol):
    @property
    def name(self) -> str: ...

    async def rent(self, label: str, join_link: str) -> Machine:
        """One machine that joins by `join_link`, which lets one peer in. ResourceError when there is none to be had."""
        ...

    async def release(self, machine_id: str) -> None:
        """Gives it back; unknown ones are no error."""
        ...

    def machines(self) -> list[Machine]:
        """Those rented and not given back, as far as the provider can tell now."""
        ...
