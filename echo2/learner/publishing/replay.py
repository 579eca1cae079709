"""After a start, trains again on the batches recorded since the checkpoint.

Guarantees: every recorded batch is trained on once, in order. If each version gets the fingerprint with which it was published,
the learner is back in its previous state. If one does not (a GPU that sums in another order, other threads, another machine),
nothing is lost: published versions stay as they are, the last of them is rebuilt bit for bit from the chunk store, and the
retrained weights are published as the next version, with a delta from that one. Leaves to others: records (journal), sending
(publisher).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from echo2.base.errors import EchoError, FingerprintMismatch
from echo2.base.ids import Step, Version
from echo2.base.units import format_seconds
from echo2.broadcast.store import LeftVersions
from echo2.learner.metrics import RunFacts, StepTimes, step_row, task_fields
from echo2.outside import monotonic
from echo2.weights import HostWeights

if TYPE_CHECKING:
    from echo2.learner.startup import Prepared

TOLD_EVERY_S = 10.0  # a person who waits sees that it goes on
_log = logging.getLogger("echo2.learner")


@dataclass(frozen=True, slots=True)
class StandingVersion:
    """A version with its weights, a snapshot from the team."""

    version: Version
    weights: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Replayed:
    """`before`: the parent of the delta to `newest` that is still to be published; None if it was published. `rows`: the metrics
    row of each replayed step, because the kill may have come before the row was written."""

    newest: StandingVersion
    before: StandingVersion | None
    rows: tuple[Mapping[str, object], ...]

    @property
    def batches(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class _Difference:
    """The first version whose replayed fingerprint differs from the published one."""

    version: Version
    recorded: str
    found: str


def replay(checkpointed: StandingVersion, learner: Prepared, left: LeftVersions) -> Replayed:
    """Trains on all recorded batches. `checkpointed`: the newest version at the checkpoint, with its exact weights.

    Raises `FingerprintMismatch` if a version comes out different and the last published one cannot be rebuilt.
    """
    # Workers may hold a sealed version even if the kill came before its record was written.
    recorded = learner.history.published.items()
    published = {version: known or left.fingerprint_of(version) for version, known in recorded}
    exact, begun, difference = checkpointed, None, None
    rows: list[Mapping[str, object]] = []
    if (step := Version(learner.trainer.step_count)) > checkpointed.version and step in published:
        # The supervised warm start is on disk before its version is published: the checkpoint has the version's masters.
        made = StandingVersion(step, learner.team.snapshot())
        exact, begun = (made, None) if published[step] else (exact, made)
    last, began_s, told_s = max(learner.history.drawn, default=Step(0)), monotonic(), float("-inf")
    while (batch := learner.history.next_batch(learner.groups)) is not None:
        if monotonic() - told_s >= TOLD_EVERY_S:
            told_s, left_count = monotonic(), last + 1 - batch.step
            about = f", about {format_seconds((told_s - began_s) / len(rows) * left_count)}" if rows else ""
            _log.info("trained again on %d recorded batches, %d are left%s", len(rows), left_count, about)
        version = Version(batch.step + 1)
        result = learner.team.step(batch, version in published)
        row = step_row(batch, result, StepTimes(), RunFacts())
        rows.append({**row, **task_fields(batch, learner.prompts.task_of)})
        if version not in published or difference is not None:
            continue
        made = StandingVersion(version, learner.team.snapshot())
        if not published[version]:  # was being published when the learner was killed; no worker has it
            begun = made
            continue
        found = f"{learner.team.coder.fingerprint(version, made.weights, learner.fingerprint_key):016x}"
        if found != published[version]:
            difference = _Difference(version, published[version], found)
        else:
            exact, begun = made, None
            learner.team.coder.forget_before(version)
    if difference is not None:
        newest, before = _go_on_from_published(exact, published, difference, learner, left)
    else:
        newest, before = (begun, exact) if begun is not None else (exact, None)
    learner.groups.take_closures()  # discard them: the hello tells the coordinator what is open
    learner.groups.drop_stale()
    if difference is not None:
        _tell(difference, newest, before, len(rows))
    return Replayed(newest, before, tuple(rows))


def _go_on_from_published(
    exact: StandingVersion,
    published: Mapping[Version, str],
    difference: _Difference,
    learner: Prepared,
    left: LeftVersions,
) -> tuple[StandingVersion, StandingVersion | None]:
    """Rebuilds the last published version; returns the newest version from now on, and the parent for its delta, if one is due."""
    team = learner.team
    last = max(version for version, fingerprint in published.items() if fingerprint)
    host = HostWeights.from_tensors(team.whole(exact.weights, exact.version), exact.version, learner.fingerprint_key)
    try:
        applied = left.bring(host, last, published[last])
    except EchoError as error:
        raise FingerprintMismatch(
            f"version {difference.version}: expected the fingerprint {difference.recorded} with which it was published, got "
            f"{difference.found} after training on the recorded batches again; to go on from version {last}, which workers "
            f"hold, its weights are needed, and they are not in the chunk store: {error}"
        ) from None
    _log.info(
        "version %d, the last published, is rebuilt from %s", last, ", ".join(map(str, applied)) or "the checkpoint"
    )
    tensors = host.tensors()
    rebuilt = StandingVersion(last, team.hold(last, {name: tensors[name] for name in exact.weights}))
    team.coder.forget_before(last)
    step = Version(team.trainer.step_count)
    if step == last:
        return rebuilt, None
    if step > learner.groups.published[-1]:
        learner.groups.publish(step)
    return StandingVersion(step, team.snapshot()), rebuilt


def _tell(difference: _Difference, newest: StandingVersion, before: StandingVersion | None, batches: int) -> None:
    leaves = (
        f"what came out leaves as version {newest.version}, with a delta from version {before.version}"
        if before is not None
        else f"what came out leaves with the next version, with a delta from version {newest.version}"
    )
    _log.warning(
        "training on the recorded batches again gave version %d the fingerprint %s, it was published with %s: this device, "
        "its threads or the trainer's options do not give the same bits. No batch is lost and none counts twice: %d were "
        "trained on again, published versions stay as they are, and %s",
        difference.version, difference.found, difference.recorded, batches, leaves,
    )  # fmt: skip
