"""What sessions do when they are told something."""

from typing import Any, TypeVar

from echo2.broadcast.events import Event
from echo2.broadcast.session import BroadcastSession

Kind = TypeVar("Kind", bound=Any)


def acts(session: BroadcastSession, now: float, *events: Event, kind: type[Kind] = object) -> list[Kind]:  # type: ignore[assignment]
    """The actions of that kind that follow from the events, in order."""
    return [action for event in events for action in session.handle(event, now) if isinstance(action, kind)]
