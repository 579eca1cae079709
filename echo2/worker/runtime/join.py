"""Joins a run: gets an identity, and credentials for the run that the join link names.

Guarantees: identity and credentials are kept in the folder, so a restart needs no token; a folder that belongs to another run is
refused; an unreachable coordinator is retried without limit, with jittered backoff; a wrong token, peer or protocol version ends
the join at once. Waits for the coordinator to answer.
"""

from __future__ import annotations

import logging
from pathlib import Path

from echo2.base.errors import ResourceError, StateError, TrustError
from echo2.control.backoff import Backoff
from echo2.control.runtime.joining import enrolled
from echo2.control.waits import Waits
from echo2.outside import unix_now
from echo2.trust.identity import JoinLink, Role
from echo2.trust.runtime.tls import (
    Credentials,
    load_credentials,
    load_or_create_identity,
    save_credentials,
)

RENEW_BEFORE_S = 3 * 86400.0
_log = logging.getLogger("echo2.worker")


async def join(link: JoinLink, folder: Path, waits: Waits, backoff: Backoff) -> Credentials:
    """Credentials for the run; enrols if there are none or they expire within `RENEW_BEFORE_S`.

    Raises ResourceError if the folder cannot hold them, StateError if it belongs to another run.
    """
    try:
        identity = load_or_create_identity(folder)
    except OSError as error:
        raise ResourceError(f"{folder}: expected a folder to keep the identity in, got {error}") from None
    kept = _kept(folder, link)
    if kept is not None:
        return kept
    credentials = await enrolled(link, identity, Role.WORKER, waits, backoff)
    save_credentials(folder, credentials)
    _log.info("enrolled in run %s as %s", credentials.run_id, credentials.peer_id)
    return credentials


def _kept(folder: Path, link: JoinLink) -> Credentials | None:
    """The credentials kept in the folder, if they still serve this link."""
    try:
        credentials = load_credentials(folder, load_or_create_identity(folder))
    except TrustError as error:
        _log.info("enrolling anew: %s", error)
        return None
    if credentials is None:
        return None
    if credentials.coordinator_peer_id != link.peer_id:
        raise StateError(
            f"{folder}: it belongs to run {credentials.run_id} of coordinator {credentials.coordinator_peer_id}, the "
            f"link names {link.peer_id}; give this run a folder of its own"
        )
    if credentials.certificate.not_after_unix_s < unix_now() + RENEW_BEFORE_S:
        return None
    return credentials
