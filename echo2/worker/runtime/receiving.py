"""From the broadcast node's deliveries to the keeper of weights, one artifact at a time.

Guarantees: chunks are decoded as they come; a bad artifact is forgotten and fetched anew. Waits for the node's next
delivery; what is missing is shown. Leaves to others: which artifacts (broadcast), what to do with them (weights).
"""

from __future__ import annotations

import asyncio
import logging

from echo2.base.ids import Version
from echo2.base.units import format_bytes
from echo2.broadcast.manifest import ArtifactId
from echo2.broadcast.runtime.node import BroadcastNode
from echo2.broadcast.runtime.progress import ArtifactBegun, ArtifactDropped, ArtifactSealed, BlockArrived
from echo2.worker.runtime.waits import Waits
from echo2.worker.runtime.weights import WeightKeeper

PROGRESS_S = 3.0
"""An artifact that takes longer tells how far it is, so often."""
_log = logging.getLogger("echo2.worker")


class Receiving:
    def __init__(self, node: BroadcastNode, keeper: WeightKeeper, waits: Waits) -> None:
        self._node = node
        self._keeper = keeper
        self._waits = waits
        self._artifact: ArtifactId | None = None
        self._received_bytes = 0
        self._told_at = 0.0

    async def run(self) -> None:
        """Until the node stops or the keeper gives up."""
        self._waits.begin("weights", "the first weights")
        async for step in self._node.progress():
            match step:
                case ArtifactBegun(header):
                    self._artifact = header.artifact
                    _log.debug("receiving %s", header.artifact)
                    self._received_bytes, self._told_at = 0, asyncio.get_running_loop().time()
                    await self._keeper.began(header.artifact.version, header.artifact.parent)
                case BlockArrived(artifact, payload):
                    self._tell_progress(artifact, len(payload))
                    await self._keeper.chunk(payload)
                case ArtifactSealed(artifact, _, total_bytes):
                    _log.debug("received %s, %s", artifact, format_bytes(total_bytes))
                    await self._keeper.ended(self._more_is_here(artifact.version))
                    if self._keeper.machine.live is not None:
                        self._waits.end("weights")
                case ArtifactDropped(artifact, reason):
                    _log.info("giving up %s half-way: %s", artifact, reason)
                    await self._keeper.dropped()

    def _tell_progress(self, artifact: ArtifactId, more_bytes: int) -> None:
        self._received_bytes += more_bytes
        now = asyncio.get_running_loop().time()
        if now < self._told_at + PROGRESS_S:
            return
        self._told_at = now
        sizes = [offered.total_bytes for offered in self._node.artifacts_available() if offered.artifact == artifact]
        whole = f" of {format_bytes(max(sizes))}" if any(sizes) else ""
        _log.info("%s: %s%s here and decoded", artifact, format_bytes(self._received_bytes), whole)

    def start_over(self, version: Version | None) -> None:
        """The artifact under way was bad."""
        assert self._artifact is not None, "an artifact was under way"
        self._node.refetch(self._artifact)
        if version is None:
            self._node.set_live(None)

    def _more_is_here(self, version: Version) -> bool:
        """Whether a version after `version` can follow at once."""
        return any(
            offered.is_complete and offered.artifact.version > version and offered.artifact.parent in (None, version)
            for offered in self._node.artifacts_available()
        )
