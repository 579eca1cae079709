"""Joins a run: enrols at the learner's first start, and loads its credentials afterwards.

Guarantees: identity and credentials are stored in the run folder, so a restart needs no token; it retries an unreachable
coordinator until it answers or the learner is stopped. Leaves to others: trust itself (trust).
"""

from __future__ import annotations

import asyncio

from echo2.base.errors import ConfigError, Unreachable
from echo2.control.backoff import Backoff
from echo2.control.runtime.joining import enrolled, unless
from echo2.control.waits import Waits
from echo2.learner.runtime.options import LearnerOptions
from echo2.outside import here
from echo2.trust.identity import JoinLink, Role
from echo2.trust.runtime.enrolling import find_coordinator
from echo2.trust.runtime.tls import Credentials, load_credentials, load_or_create_identity, save_credentials

PAUSE_S_MAX = 4.0


async def join(options: LearnerOptions, waits: Waits, stopped: asyncio.Event) -> Credentials:
    """Returns the credentials of an earlier start of this run, or enrols for new ones.

    Raises `ConfigError` without a join link on the first start, `Unreachable` if stopped before the coordinator answered.
    """
    folder = options.folder / "node"
    identity = load_or_create_identity(folder)
    kept = load_credentials(folder, identity)
    if kept is not None and kept.run_id == options.run_id:
        return kept
    if not options.join_link:
        raise ConfigError(f"run {options.run_id}: expected a join link on the learner's first start, got none")
    link = JoinLink.parse(options.join_link)
    waits.begin("coordinator", f"the coordinator at {link.address}")
    backoff = Backoff(here().rng, longest_s=PAUSE_S_MAX)
    credentials = await unless(stopped, asyncio.create_task(enrolled(link, identity, Role.LEARNER, waits, backoff)))
    if credentials is None:
        raise Unreachable(f"coordinator at {link.address}: stopped before it answered")
    keep(options, credentials)
    return credentials


def keep(options: LearnerOptions, credentials: Credentials) -> None:
    """Stores the credentials in the run folder for the next start."""
    save_credentials(options.folder / "node", credentials)


async def look_for_coordinator(options: LearnerOptions, credentials: Credentials) -> None:
    """Updates the coordinator's address in the credentials, if a join link shows how to find it."""
    if options.join_link:
        link = JoinLink.parse(options.join_link)
        await find_coordinator(link, options.link_file, credentials, lambda found: keep(options, found))
