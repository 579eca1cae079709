"""Watches the cloud's metadata service for a preemption notice, so that the drain begins before the machine goes away.

Guarantees: a notice is acted on once; a service that does not answer does not count as a notice. Polls every `POLL_S`. Leaves to
others: the drain (shift). Most clouds also send SIGTERM, which works without this.
"""

from __future__ import annotations

import asyncio
import logging
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass

from echo2.base.errors import ConfigError

POLL_S = 2.0
ANSWER_S = 1.5
ANSWER_BYTES_MAX = 4096
_log = logging.getLogger("echo2.worker")


@dataclass(frozen=True, slots=True)
class NoticeSource:
    """Where to look. A notice is a response with status 200 whose text contains `word` (empty: any text)."""

    url: str
    headers: tuple[tuple[str, str], ...] = ()
    word: str = ""
    token_url: str = ""  # PUT here first; the answer is sent along in the header `token_header`
    token_header: str = ""


CLOUDS = {
    "aws": NoticeSource(
        "http://169.254.169.254/latest/meta-data/spot/instance-action",
        token_url="http://169.254.169.254/latest/api/token",
        token_header="X-aws-ec2-metadata-token",
    ),
    "gcp": NoticeSource(
        "http://metadata.google.internal/computeMetadata/v1/instance/preempted",
        headers=(("Metadata-Flavor", "Google"),),
        word="TRUE",
    ),
    "azure": NoticeSource(
        "http://169.254.169.254/metadata/scheduledevents?api-version=2020-07-01",
        headers=(("Metadata", "true"),),
        word="Preempt",
    ),
}


def source_of(text: str) -> NoticeSource:
    """The source for a cloud's name, or for the http address of a service that answers 200 before a preemption. ConfigError for
    anything else."""
    if text in CLOUDS:
        return CLOUDS[text]
    if text.startswith(("http://", "https://")):
        return NoticeSource(text)
    raise ConfigError(f"preemption notice: expected {', '.join(sorted(CLOUDS))} or an http address, got {text!r}")


async def watch(source: NoticeSource, noticed: Callable[[str], None], poll_s: float = POLL_S) -> None:
    """Polls until there is a notice, calls `noticed` once, and then waits to be cancelled."""
    while not await asyncio.to_thread(_is_noticed, source):
        await asyncio.sleep(poll_s)
    _log.warning("this machine will be taken away, says %s", source.url)
    noticed("preemption notice")
    await asyncio.Event().wait()


def _is_noticed(source: NoticeSource) -> bool:
    text = answer_of(source)
    return text is not None and source.word in text


def answer_of(source: NoticeSource) -> str | None:
    """The text of the service's answer; None on any error or a status other than 200."""
    # Metadata services are link-local: a proxy could not reach this machine's.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    headers = dict(source.headers)
    try:
        if source.token_url:
            asked = urllib.request.Request(
                source.token_url, method="PUT", headers={"X-aws-ec2-metadata-token-ttl-seconds": "60"}
            )
            with opener.open(asked, timeout=ANSWER_S) as answer:
                headers[source.token_header] = answer.read(ANSWER_BYTES_MAX).decode("ascii", "replace").strip()
        with opener.open(urllib.request.Request(source.url, headers=headers), timeout=ANSWER_S) as answer:
            text = answer.read(ANSWER_BYTES_MAX).decode("utf-8", "replace")
            return text if answer.status == 200 else None
    except (OSError, ValueError, urllib.error.URLError):
        return None
