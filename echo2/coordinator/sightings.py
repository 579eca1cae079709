"""Records for later runs what this run observes of each kind of machine: rates, losses and join times.

A worker's claims count only as far as they are supported: its rate up to twice what the learner admitted (worth), its kind only if
the run rented the machine or several workers agree (experience). Each worker counts once, and as at most one loss.
Guarantees: no IO; memory is bounded by the fleet; machines without a data sheet, including CPUs, are left out. Leaves to others:
the file (runtime/experience_file).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from echo2.base.errors import EchoError
from echo2.base.ids import PeerId, RunId
from echo2.coordinator.board import LearnerBoard
from echo2.coordinator.membership import Liveness, Member
from echo2.coordinator.planner_input import believed_rate, is_measured
from echo2.coordinator.provisioning import MachineOffer, RentedMachine
from echo2.coordinator.worth import ROLLOUTS_KEPT, Worth
from echo2.cost_model.catalogue import CPU, GpuType
from echo2.cost_model.experience import (
    CLAIMS_LEAST,
    HOURS_OF_A_RUN,
    JOIN_S_MOST,
    JOINS_OF_A_RUN,
    KindRecord,
    agreed_ratios,
)
from echo2.cost_model.kinds import kind_of_name
from echo2.cost_model.roofline import tokens_per_s
from echo2.cost_model.sizing import ModelSize, RunLengths, gpu_fit, model_size, quantisation_called, spread_speed

TOKENS_HELD = 0.75
"""Tokens in a sequence's KV cache at a random moment, as a share of the mean rollout length. It is above half because long rollouts
run for longer, so a random moment finds them more often."""


@dataclass(slots=True)
class SeenMachine:
    """What was observed of one worker. `is_certain`: the run rented its machine, so its kind is known. `ratio`: delivered over
    predicted rate; None: not known."""

    kind: str
    provider: str
    is_spot: bool
    is_certain: bool
    hours: float = 0.0
    is_lost: bool = False
    ratio: float | None = None
    join_s: float | None = None


@dataclass(slots=True)
class Sightings:
    run_id: RunId
    catalogue: Mapping[str, GpuType]
    seen: dict[PeerId, SeenMachine] = field(default_factory=dict)
    _began: float | None = None
    _looked_at: float | None = None

    def look(
        self,
        members: Iterable[Member],
        rented: Mapping[PeerId, tuple[RentedMachine, MachineOffer]],
        board: LearnerBoard,
        worth: Worth,
        preempted: Collection[PeerId],
        now: float,
    ) -> None:
        """Observes the fleet as it is now. `rented`: workers on machines that this run rented; `preempted`: workers whose machines
        the cloud preempted."""
        passed_s = 0.0 if self._looked_at is None else max(0.0, now - self._looked_at)
        self._looked_at = now
        self._began = now if self._began is None else self._began
        size, lengths, held = work_of(board)
        for member in members:
            if member.peer_id not in worth.proven and member.peer_id not in self.seen:
                continue
            sighting = self._sighting(member, rented.get(member.peer_id), now)
            if not sighting.kind:
                continue
            if member.last_liveness is not Liveness.GONE:
                sighting.hours += passed_s / 3600
            elif member.peer_id in preempted or not member.has_left:
                sighting.is_lost = True
            record = worth.records.get(member.peer_id)
            is_long_enough = record is not None and record.rollouts >= ROLLOUTS_KEPT
            if size is not None and is_long_enough and is_measured(member):
                ratio = self._ratio(member, size, lengths, held)
                sighting.ratio = sighting.ratio if ratio is None else ratio

    def _sighting(self, member: Member, machine: tuple[RentedMachine, MachineOffer] | None, now: float) -> SeenMachine:
        """The worker's record, made when it has delivered for the first time: that is when its join ends."""
        known = self.seen.get(member.peer_id)
        if known is not None:
            return known
        gpu = machine[1].gpu if machine is not None and machine[1].gpu else member.hello.gpu
        kind = kind_of_name(gpu, self.catalogue)[0]
        is_certain = machine is not None and bool(machine[1].gpu)
        made = SeenMachine("" if kind == CPU else kind, member.hello.provider, member.hello.is_spot, is_certain)
        if machine is not None:
            made.provider, made.is_spot = machine[1].provider, machine[1].is_spot
            if self._began is not None and machine[0].rented_at >= self._began:  # else an earlier process rented it
                made.join_s = min(JOIN_S_MOST, now - machine[0].rented_at)
        self.seen[member.peer_id] = made
        return made

    def _ratio(self, member: Member, size: ModelSize, lengths: RunLengths, held: float) -> float | None:
        """Believed tokens/s over the roofline's prediction for the same number of running sequences; None if the model would not
        fit this kind."""
        kind, count = self.seen[member.peer_id].kind, kind_of_name(member.hello.gpu, self.catalogue)[1]
        value, gpu = member.measures.value, self.catalogue[kind]
        quantisation = quantisation_called(member.hello.quantisation)
        try:
            fit = gpu_fit(size, [gpu.memory_bytes] * count, replace(lengths, quantisation=quantisation))
        except EchoError:
            return None
        running = value("running_sequences") or float(member.hello.slot_count)
        each = max(1, round(running / fit.engine_count))
        speed = spread_speed(fit.tensor_parallel)
        predicted = fit.engine_count * tokens_per_s(gpu, size, each, held, speed, quantisation)
        delivered = value("tokens_per_s") * believed_rate(member) / value("rollouts_per_s")
        return delivered / predicted if predicted > 0 else None

    def records(self, unix_s: float) -> tuple[KindRecord, ...]:
        """One record per kind, provider and spot or on-demand, if enough workers of it were seen."""
        groups: dict[tuple[str, str, bool], list[SeenMachine]] = {}
        for one in self.seen.values():
            if one.kind:
                groups.setdefault((one.kind, one.provider, one.is_spot), []).append(one)
        found = []
        for (kind, provider, is_spot), group in sorted(groups.items()):
            if not any(one.is_certain for one in group) and len(group) < CLAIMS_LEAST:
                continue
            ratios = agreed_ratios(
                (one.ratio for one in group if one.ratio is not None and not one.is_certain),
                (one.ratio for one in group if one.ratio is not None and one.is_certain),
            )
            joins = sorted(one.join_s for one in group if one.join_s is not None)[:JOINS_OF_A_RUN]
            hours, losses = sum(one.hours for one in group), sum(one.is_lost for one in group)
            fewer = min(1.0, HOURS_OF_A_RUN / hours) if hours > 0 else 1.0
            found.append(
                KindRecord(
                    str(self.run_id), kind, provider[:64], is_spot, unix_s, ratios, round(hours * fewer, 4),
                    min(round(losses * fewer), int(HOURS_OF_A_RUN)), tuple(round(one, 1) for one in joins),
                )
            )  # fmt: skip
        return tuple(found)


def work_of(board: LearnerBoard) -> tuple[ModelSize | None, RunLengths, float]:
    """The model's size, the run's lengths, and the tokens in a sequence's KV cache; the size is None until a rollout was trained
    on."""
    hello, report = board.hello, board.report
    if hello is None or not report.trained_rollouts:
        return None, RunLengths(0), 0.0
    try:
        size = model_size(json.loads(hello.model_config_json))
    except (EchoError, ValueError):
        return None, RunLengths(0), 0.0
    mean = report.trained_tokens / report.trained_rollouts
    return size, RunLengths(hello.longest_sequence_tokens), TOKENS_HELD * mean
