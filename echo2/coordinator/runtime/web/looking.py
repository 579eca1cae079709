"""Answers single requests of the page, beside the stream of changes: one worker's log, recent rollouts, CSV tables.

Guarantees: valid JSON (no infinities or NaN); a CSV cell that a spreadsheet would take for a formula gets an apostrophe in front.
Leaves to others: access control (guard), what the learner keeps (coordinator/runtime/asking).
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from starlette.responses import Response

from echo2.base.errors import EchoError, MalformedMessage
from echo2.base.ids import PeerId
from echo2.coordinator.membership import Member
from echo2.coordinator.runtime.commands import Commands
from echo2.coordinator.runtime.web.numbers import finite
from echo2.wire.bounds import ROLLOUT_TOKENS_MAX
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb

FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


def log_value(member: Member) -> list[dict[str, Any]]:
    """A worker's own newest warnings and errors, newest first. The text is untrusted."""
    lines = member.heartbeat.log or ()
    return [{"at": finite(one.unix_s, 3), "is_error": one.is_error, "text": one.text} for one in reversed(lines)]


async def rollouts_value(commands: Commands) -> dict[str, Any]:
    """The newest rollouts that the learner keeps; `problem`: why they cannot be shown, else empty."""
    try:
        shown = await commands.rollouts.newest()
    except EchoError as error:
        return {"rollouts": [], "problem": str(error)}
    return {"rollouts": [_summary(one, commands) for one in shown.rollouts], "problem": ""}


async def rollout_value(commands: Commands, rollout_id: str, offset_text: str) -> dict[str, Any]:
    """One rollout: its prompt, and its tokens from `offset` on. MalformedMessage for a bad offset or an unknown id."""
    if not offset_text.isdecimal() or int(offset_text) > ROLLOUT_TOKENS_MAX:
        raise MalformedMessage(f"offset: expected 0 to {ROLLOUT_TOKENS_MAX}, got {offset_text[:40]!r}")
    if not rollout_id or len(rollout_id) > 128 or not rollout_id.isprintable():
        raise MalformedMessage("id: expected a rollout as /api/rollouts names it, GROUP/INDEX")
    shown = await commands.rollouts.tokens(rollout_id, int(offset_text))
    if not shown.rollouts:
        raise MalformedMessage(f"id: expected a rollout that the learner still keeps, {rollout_id!r} is none")
    return {
        **_summary(shown.rollouts[0], commands),
        "prompt": shown.prompt,
        "offset": int(offset_text),
        "tokens": [
            {"id": one.token_id, "text": one.text, "logprob": finite(one.logprob, 4), "version": one.version}
            for one in shown.tokens
        ],
    }


def _summary(one: pb.RolloutSummary, commands: Commands) -> dict[str, Any]:
    members = commands.hub.membership.members
    names = [members[PeerId(peer)].name if PeerId(peer) in members else peer[-8:] for peer in one.peer_ids]
    return {
        "id": one.rollout_id, "step": one.step, "reward": finite(one.reward, 4), "token_count": one.token_count,
        "oldest_version": one.oldest_version, "newest_version": one.newest_version,
        "finish_reason": one.finish_reason, "workers": names, "completion": one.completion,
    }  # fmt: skip


def csv_of(rows: Iterable[Mapping[str, Any]], columns: Sequence[str], name: str) -> Response:
    """A response with a CSV file, to download."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(columns)
    writer.writerows([_cell(row.get(column)) for column in columns] for row in rows)
    headers = {"content-disposition": f'attachment; filename="{name}"'}
    return Response(text.getvalue(), media_type="text/csv; charset=utf-8", headers=headers)


def _cell(value: Any) -> Any:
    if isinstance(value, str) and value.startswith(FORMULA_STARTS):
        return "'" + value
    return "" if value is None else value
