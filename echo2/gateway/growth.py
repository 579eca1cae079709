"""Which part of an unfinished completion may be streamed: the part that no later token can take back. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from echo2.gateway.requests import CallRequest

_INCOMPLETE = "\ufffd"
"""The decoder ends the text with this while a character's bytes are not all sampled."""


def is_told_in_pieces(request: CallRequest) -> bool:
    """Whether the text can be streamed as it grows: one choice, and only its text is wanted. Tool calls are parsed from the whole
    text."""
    is_plain = not (request.tools or request.wants_logprobs or request.wants_ids)
    return request.is_streamed and request.choices == 1 and is_plain


def certain_part(text: str, stops: Sequence[str]) -> str:
    """Returns `text` without a trailing part that may begin a stop string, and without a trailing incomplete character."""
    text = text.rstrip(_INCOMPLETE)
    held = max((_overlap(text, stop) for stop in stops), default=0)
    return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`, in characters."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
