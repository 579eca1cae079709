"""Passes the broadcast node's deliveries to the weight keeper, one artifact at a time.

Guarantees: chunks are decoded as they arrive; a bad artifact is forgotten and fetched again. Waits for the node's next delivery and
shows how much has arrived. Leaves to others: which artifacts (broadcast), what to do with them (weights).
"""

from __future__ import annotations

import logging

from echo2.base.ids import Version
from echo2.base.units import format_bytes
from echo2.broadcast.manifest import ArtifactId
from echo2.broadcast.runtime.node import BroadcastNode
from echo2.broadcast.runtime.progress import ArtifactBegun, ArtifactDropped, ArtifactSealed, BlockArrived
from echo2.control.waits import Waits
from echo2.worker.runtime.base_checkpoint import BaseCheckpointLoader
from echo2.worker.runtime.desk import Desk
from echo2.worker.runtime.progress import ProgressLines, ShowsProgress
from echo2.worker.runtime.weights import WeightKeeper

_log = logging.getLogger("echo2.worker")


class Receiving:
    """One per worker; `run` is its loop. `base`: a local checkpoint that may turn out to be the required version."""

    def __init__(
        self,
        node: BroadcastNode,
        keeper: WeightKeeper,
        desk: Desk,
        waits: Waits,
        base: BaseCheckpointLoader,
        progress: ShowsProgress,
    ) -> None:
        self._progress = progress
        self._lines = ProgressLines()
        self._base = base
        self._node = node
        self._keeper = keeper
        self._desk = desk
        self._waits = waits
        self._artifact: ArtifactId | None = None
        self._received_bytes = 0

    async def run(self) -> None:
        """Runs until the node stops; raises IntegrityError if the keeper gives up."""
        self._waits.begin("weights", "the first weights")
        async for step in self._node.progress():
            match step:
                case ArtifactBegun(header):
                    self._artifact = header.artifact
                    _log.debug("receiving %s", header.artifact)
                    self._received_bytes = 0
                    await self._stand_on_base(header.artifact)
                    await self._keeper.began(header.artifact.version, header.artifact.parent)
                    await self._adopt(header.artifact)
                case BlockArrived(artifact, payload):
                    self._tell_progress(artifact, len(payload))
                    if not await self._adopt(artifact):
                        await self._keeper.chunk(payload)
                case ArtifactSealed(artifact, _, total_bytes):
                    _log.debug("received %s, %s", artifact, format_bytes(total_bytes))
                    self._told(artifact)
                    await self._let(artifact.version)
                    await self._keeper.ended(self._more_is_here(artifact.version))
                    if self._keeper.machine.host is not None:
                        self._base.end()
                    if self._keeper.machine.live is not None:
                        self._waits.end("weights")
                case ArtifactDropped(artifact, reason):
                    _log.info("giving up %s half-way: %s", artifact, reason)
                    self._told(artifact)
                    await self._keeper.dropped()

    async def _let(self, version: Version) -> None:
        """Waits for leases that only the live version may sample; the assignments machine bounds the wait."""
        exact = len(self._desk.machine.exact_leases)
        if exact:
            self._waits.begin("version", f"{exact} evaluation leases to end before version {version} goes live")
        await self._desk.version_may_go_live(version)
        self._waits.end("version")

    async def _stand_on_base(self, artifact: ArtifactId) -> None:
        """If the first artifact is a delta, gives the keeper the base checkpoint as its parent. Decoding fails if the parent's
        fingerprint, which the delta names, is another."""
        if artifact.parent is None or self._keeper.machine.host is not None:
            return
        weights = await self._base.candidate()
        if weights is not None:
            self._keeper.host = weights
            _log.info("this machine's base checkpoint and %s lead to version %d", artifact, artifact.version)

    async def _adopt(self, artifact: ArtifactId) -> bool:
        """Uses the base checkpoint instead of a keyframe if their fingerprints are equal; returns whether it did."""
        if artifact.parent is not None or self._keeper.machine.host is not None:
            return False
        fingerprint = self._node.library.fingerprint_of(artifact)
        weights = self._base.proven(artifact.version, fingerprint) if fingerprint else None
        if weights is None:
            return False
        _log.info("version %d is this machine's base checkpoint: nothing to fetch", artifact.version)
        self._told(artifact)
        self._node.adopted(artifact)
        self._base.end()
        await self._keeper.adopt(weights)
        self._waits.end("weights")
        return True

    def _tell_progress(self, artifact: ArtifactId, more_bytes: int) -> None:
        self._received_bytes += more_bytes
        sizes = [offered.total_bytes for offered in self._node.artifacts_available() if offered.artifact == artifact]
        # Bars only until the first version is live; later a version that takes long gets log lines.
        progress = self._progress if self._keeper.machine.live is None else self._lines
        progress.at(_what(artifact), self._received_bytes, max(sizes, default=0))

    def _told(self, artifact: ArtifactId) -> None:
        for progress in (self._progress, self._lines):
            progress.ended(_what(artifact))

    def start_over(self, version: Version | None) -> None:
        """The artifact being received was bad: fetches one that applies to `version` (None: a keyframe)."""
        assert self._artifact is not None, "an artifact was under way"
        self._node.refetch(self._artifact)
        if version is None:
            self._node.set_base(None)  # the base checkpoint may not be what the delta was made from
            self._node.set_live(None)

    def _more_is_here(self, version: Version) -> bool:
        """Whether a complete artifact of a later version can follow at once."""
        return any(
            offered.is_complete and offered.artifact.version > version and offered.artifact.parent in (None, version)
            for offered in self._node.artifacts_available()
        )


def _what(artifact: ArtifactId) -> str:
    """The artifact's name on screen and in the log."""
    return f"{'download' if artifact.parent is None else 'catch-up'} of version {artifact.version}"
