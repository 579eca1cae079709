"""What of a completion that goes on may be told already: nothing that a later token could take back. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from echo2.gateway.requests import CallRequest

_INCOMPLETE = "\ufffd"
"""Stands at the end where a character's bytes have not all been sampled."""


def is_told_in_pieces(request: CallRequest) -> bool:
    """Whether its text can be told as it grows: one choice, whose text alone is asked for. Calls of tools are read from the
    whole."""
    is_plain = not (request.tools or request.wants_logprobs or request.wants_ids)
    return request.is_streamed and request.choices == 1 and is_plain


def certain_part(text: str, stops: Sequence[str]) -> str:
    """`text` without what may begin a stop string, and without a character that is not whole."""
    text = text.rstrip(_INCOMPLETE)
    held = max((_overlap(text, stop) for stop in stops), default=0)
    return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` begin `stop`, and are not all of it."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
