"""What the page shows, as JSON values: the run's sections, one row per worker, the curves, a plan and the advice.

Guarantees: valid JSON (no infinities or NaN).
"""

from __future__ import annotations

import math
from dataclasses import asdict
from heapq import nsmallest
from typing import TYPE_CHECKING, Any

from echo2.base.ids import PeerId
from echo2.coordinator.fleet.members import Liveness, Member
from echo2.coordinator.leases.lease import GroupPhase
from echo2.coordinator.leases.waits import why_no_lease
from echo2.coordinator.money.costs import FleetCosts
from echo2.coordinator.money.provisioning import RentedMachine
from echo2.coordinator.planning.board import PREDICTED, Corrections, VersionRow
from echo2.cost_model.plan import Plan
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb

if TYPE_CHECKING:
    from echo2.coordinator.operator import Commands


def finite(value: float | None, digits: int = 6) -> float | None:
    """The rounded value; None (unknown) if it is not finite, because JSON has no infinity."""
    return round(value, digits) if value is not None and math.isfinite(value) else None


EVENTS_SHOWN = 200  # what a person scrolls through; the CSV and the log have all
TREES_SHOWN_NODES_MAX = 200  # beyond, the picture is a blot
VERSIONS_SHOWN = 16  # rows of the table
MACHINES_SHOWN = 50  # newest first
PAID_SHOWN = 30  # newest last


class StateView:
    def __init__(self, commands: Commands) -> None:
        self._commands = commands

    def sections(self) -> dict[str, Any]:
        """All sections except the workers, whose rows `worker` gives."""
        hub, now = self._commands.hub, self._commands.hub.clock.now()
        money = hub.money.sums()
        return {
            "run": self._run(),
            "learner": self._learner(),
            "money": self._money(money),
            "machines": self._machines(),
            "advice": self._commands.advice(money),
            "plan": plan_value(*self._plan_now()) | {"errors": _errors(hub.corrections)},
            "broadcast": self._broadcast(),
            "leases": self._leases(),
            "waits": [{"what": what, "since": round(since, 1)} for what, since in self._commands.waits()],
            "tokens": self._tokens(now),
            "events": [
                {"at": round(event.unix_s, 3), "kind": event.kind, "text": event.text}
                for event in list(hub.state.events)[-EVENTS_SHOWN:]
            ],
        }

    def _plan_now(self) -> tuple[Plan | None, str, str]:
        """The plan to show, the planner's mode, and what the planner waits for. There is no plan while no worker is alive."""
        hub, mode = self._commands.hub, self._commands.hub.config.coordinator.planner_mode
        if hub.ending.finish is not None:
            return None, mode, "nothing: the run is finished"
        is_anybody = any(one.last_liveness is Liveness.ALIVE for one in hub.membership.members.values())
        return (hub.plan, mode, hub.plan_waits_for) if is_anybody else (None, mode, "a worker: none is connected")

    def _run(self) -> dict[str, Any]:
        hub = self._commands.hub
        return {
            "run_id": hub.options.run_id, "coordinator": hub.identity.peer_id, "started": round(hub.started_at, 1),
            "staleness_bound": hub.config.staleness.bound, "staleness_bound_max": hub.learner_bound,
            "finished": hub.ending.text, "planner_mode": hub.config.coordinator.planner_mode, "paused": hub.paused,
        }  # fmt: skip

    def _learner(self) -> dict[str, Any]:
        board = self._commands.hub.board
        hello, report = board.hello, board.report
        if hello is None:
            return {"is_known": False}
        return {
            "is_known": True, "is_connected": board.is_connected, "since": round(board.changed_at, 1),
            "model": hello.model_name, "peer_id": board.peer_id, "version": board.newest_version,
            "rollouts_per_step": hello.rollouts_per_step, "rollouts_per_group": hello.rollouts_per_group,
            "step_limit": hello.step_limit, "uplink": hello.link.uplink_bytes_per_s, "step": max(hello.step, report.step),
            "train_s": finite(board.train_s), "reward": finite(report.reward_mean) if report.train_s > 0 else None,
            "eval_reward": finite(board.eval_reward), "utilisation": finite(report.utilisation),
            "buffered": report.buffered_rollouts, "open": report.open_rollouts, "trained_tokens": report.trained_tokens,
            "refused": report.refused_rollouts, "over_stale_tokens": report.over_stale_tokens_trained,
            "lag_histogram": list(report.lag_histogram), "is_finished": report.is_finished, "audit_s": finite(report.audit_s, 4),
        }  # fmt: skip

    def _money(self, money: FleetCosts) -> dict[str, Any]:
        hub = self._commands.hub
        return {
            "spent": finite(money.usd_spent, 4), "per_hour": finite(money.usd_per_hour, 4),
            "per_mtok": finite(1e6 * money.usd_spent / hub.board.report.trained_tokens, 4)
            if hub.board.report.trained_tokens else None,
            "chosen": finite(money.usd_chosen, 4), "useful": finite(money.usd_useful, 4),
            "cap_per_hour": finite(hub.config.coordinator.usd_per_hour_cap), "budget": finite(hub.config.coordinator.usd_budget),
            "journal": [
                {
                    "at": round(one.unix_s, 1), "action": one.action, "whom": self._name_of(one.whom),
                    "reason": one.reason, "per_hour": one.usd_per_hour, "spent": finite(one.usd_spent, 4),
                }
                for one in list(hub.state.paid)[-PAID_SHOWN:]
            ],
        }  # fmt: skip

    def _name_of(self, whom: str) -> str:
        member = self._commands.hub.membership.members.get(PeerId(whom))
        return member.name if member else whom

    def _machines(self) -> dict[str, Any]:
        provisioner = self._commands.provisioner
        machines = sorted(provisioner.machines.values(), key=lambda one: (not one.is_open, -one.rented_at))
        advice = provisioner.advice
        return {
            "offers": [
                {
                    "name": offer.name, "provider": offer.provider, "gpu": offer.gpu, "price": offer.usd_per_hour,
                    "is_spot": offer.is_spot, "max": offer.machines_max, "is_automatic": offer.is_automatic,
                    "rented": sum(one.is_open and one.offer == offer.name for one in machines),
                    "problem": provisioner.problems.get(offer.name, ""),
                }
                for offer in provisioner.offers.values()
            ],
            "machines": [machine_value(one, self._commands) for one in machines[:MACHINES_SHOWN]],
            "count": sum(one.is_open for one in machines),
            "advice": {
                "reason": advice.reason,
                "rent": [
                    {"offer": one.offer, "count": one.count, "per_hour": one.usd_per_hour, "reason": one.reason}
                    for one in advice.rent
                ],
                "release": [
                    {"machine": one.machine_id, "per_hour": one.usd_per_hour, "reason": one.reason}
                    for one in advice.release
                ],
            },
        }  # fmt: skip

    def _broadcast(self) -> dict[str, Any]:
        hub = self._commands.hub
        plan, board = hub.broadcast_plan, hub.board
        value: dict[str, Any] = {
            "artifact_bytes": board.totals.artifact_bytes, "full_bytes": board.totals.full_bytes,
            "versions": [_version(row) for row in list(board.versions.values())[-VERSIONS_SHOWN:]],
            "waiting": [hub.membership.name_of(peer) for peer in sorted(board.newest.waiting)[:20]] if board.newest else [],
        }  # fmt: skip
        if plan is not None:
            newest = board.newest
            scale = newest.published.artifact_bytes / plan.predicted_bytes if newest and plan.predicted_bytes else 1.0
            took = newest.live_after_s if newest else {}
            value |= {
                "topology": plan.topology, "reason": plan.reason, "node_count": len(plan.nodes),
                "nodes": [], "trees": [], "predicted_s": [], "actual_s": [],
            }  # fmt: skip
            if len(plan.nodes) <= TREES_SHOWN_NODES_MAX:
                value |= {
                    "nodes": [{"id": node.peer_id, "name": node.name} for node in plan.nodes],
                    "trees": [{"weight": round(tree.weight, 4), "parents": list(tree.parents)} for tree in plan.trees],
                    "predicted_s": [finite(s * scale, 3) for s in plan.predicted_s],
                    "actual_s": [finite(took.get(node.peer_id), 3) for node in plan.nodes[1:]],
                }
        return value

    def _leases(self) -> dict[str, Any]:
        book, name_of = self._commands.hub.book, self._commands.hub.membership.name_of
        oldest = nsmallest(8, book.leases.values(), key=lambda lease: lease.progress_at)
        return {
            "open": len(book.leases), "queued": book.queued,
            "produced": sum(group.phase is GroupPhase.PRODUCED for group in book.groups.values()),
            **asdict(book.counts),
            "slowest": [
                {
                    "lease": lease.lease_id, "group": lease.group_id, "attempt": lease.attempt,
                    "worker": name_of(lease.worker_id),
                    "tokens": lease.tokens, "finished": lease.finished_rollouts,
                    "progress_at": round(lease.progress_at, 1), "deadline": round(lease.deadline, 1),
                }
                for lease in oldest
            ],
        }  # fmt: skip

    def _tokens(self, now: float) -> list[dict[str, Any]]:
        tokens = sorted(self._commands.hub.tokens.tokens.values(), key=lambda token: -token.created_at)
        return [
            {
                "id": token.token_id, "role": token.role, "label": token.label, "expires": round(token.expires_at),
                "use_limit": token.use_limit, "uses": len(token.peers), "is_revoked": token.is_revoked,
                "problem": token.problem(now) if token.is_revoked or token.use_limit else "",
            }
            for token in tokens
        ]  # fmt: skip

    def worker(self, member: Member) -> dict[str, Any]:
        hub, hello, beat, access = self._commands.hub, member.hello, member.heartbeat, member.access
        is_gone, version = member.last_liveness is Liveness.GONE, member.version
        return {
            "name": member.name, "state": member.last_liveness.value,
            "activation": "" if is_gone else member.activation.value,
            "setting": member.setting.value, "reason": member.activation_reason, "gpu": hello.gpu or "cpu",
            "engine": f"{hello.engine} {hello.quantisation}".strip(), "provider": hello.provider, "is_spot": hello.is_spot,
            "price": hello.price_usd_per_hour, "slots": hello.slot_count, "version": version,
            "lag": None if version is None else max(0, hub.board.newest_version - version),
            "tokens_per_s": finite(beat.tokens_per_s, 1), "rollouts_per_s": finite(beat.rollouts_per_s, 3),
            "usd_per_mtok": self._usd_per_mtok(member),
            "running": beat.running_sequences, "waiting": beat.waiting_sequences,
            "memory_used": beat.memory_used_bytes, "memory_total": beat.memory_total_bytes,
            "leases": hub.book.lease_count(member.peer_id), "uplink": member.link_of("uplink_bytes_per_s"),
            "downlink": member.link_of("downlink_bytes_per_s"), "rtt_s": finite(member.link_of("rtt_s"), 4),
            "usd_spent": finite(member.usd_spent, 4), "heard": round(member.heard_at, 1),
            "joined": round(member.joined_at, 1), "given_up": sum(member.record.ways.values()),
            "no_lease": why_no_lease(hub.book, member, hub.clock.now()), "region": hello.region, **_newest_line(beat),
            "chunks_held": beat.newest_chunks_held, "chunk_count": beat.newest_chunk_count,
            "in_flight": beat.newest_version_in_flight,
            "waits_for": "" if is_gone else beat.waits_for, "finished_rollouts": beat.finished_rollouts,
            "can_be_dialled": bool(access.addresses), "relays": len(access.relays),
            "links": [] if is_gone else self._links(member),
        }  # fmt: skip

    def _usd_per_mtok(self, member: Member) -> float | None:
        """A worker's whole bill over the tokens trained on, of which its part is that of the rollouts admitted of it; None while
        nothing of it was trained on."""
        hub = self._commands.hub
        tokens = hub.board.report.trained_tokens * hub.book.records.admitted_share(member.peer_id)
        return finite(1e6 * hub.money.bill_of(member) / tokens, 4) if tokens > 0 else None

    def _links(self, member: Member) -> list[dict[str, str]]:
        """The worker's links to peers, each with its kind and the reason for it."""
        name_of, learner = self._commands.hub.membership.name_of, self._commands.hub.board.peer_id
        return [
            {
                "peer": "learner" if one.peer_id == learner else name_of(one.peer_id),
                "kind": one.kind,
                "reason": one.reason,
            }
            for one in member.heartbeat.links.links
        ]

    def samples(self) -> dict[str, list[Any]]:
        """The run's curves as columns, oldest first."""
        samples = list(self._commands.hub.state.samples)
        return {
            "at": [round(s.unix_s, 2) for s in samples], "step": [s.step for s in samples],
            "reward": [finite(s.reward_mean) for s in samples], "eval": [finite(s.eval_reward) for s in samples],
            "utilisation": [finite(s.utilisation) for s in samples],
            "predicted": [finite(s.predicted_utilisation) or None for s in samples],
            "usd": [finite(s.usd_spent, 4) for s in samples],
            "usd_per_hour": [finite(s.usd_per_hour, 4) for s in samples],
        }  # fmt: skip


def _newest_line(beat: pb.Heartbeat) -> dict[str, Any]:
    """The newest error in a worker's own log; the newest warning if there is no error."""
    lines = beat.log.lines
    newest = next((one for one in reversed(lines) if one.is_error), lines[-1] if lines else None)
    if newest is None:
        return {"said": "", "said_at": None, "said_error": False}
    return {"said": newest.text, "said_at": finite(newest.unix_s, 1), "said_error": newest.is_error}


def command_of(machine: RentedMachine) -> str:
    """The command that a person runs on a machine; it carries a join link. Empty once the machine is gone."""
    return machine.command if machine.is_open else ""


def machine_value(machine: RentedMachine, commands: Commands) -> dict[str, Any]:
    """A machine as the page shows it. `has_command`: there is a command for a person to run; it carries a join link, so only an
    action returns it."""
    return {
        "machine_id": machine.machine_id, "offer": machine.offer, "provider": machine.provider,
        "label": machine.label, "state": machine.state.value, "price": machine.usd_per_hour,
        "since": round(machine.rented_at, 1), "ended": machine.ended_at and round(machine.ended_at, 1),
        "notice": machine.notice, "has_command": bool(command_of(machine)),
        "workers": [worker.name for worker in commands.hub.money.workers_of(machine)],
    }  # fmt: skip


def _version(row: VersionRow) -> dict[str, Any]:
    return {
        "version": row.published.version, "bytes": row.published.artifact_bytes,
        "parent": row.published.parent if row.published.has_parent else None,
        "full_bytes": row.published.full_snapshot_bytes, "at": round(row.published_at, 2),
        "predicted_s": finite(row.predicted_s, 3), "actual_s": finite(row.complete_s, 3), "pool": row.pool_size,
        "live": len(row.live_after_s),
    }  # fmt: skip


def plan_value(plan: Plan | None, mode: str, waits_for: str) -> dict[str, Any]:
    """A plan as the page shows it; also for what-if."""
    if plan is None:
        return {"is_known": False, "mode": mode, "waits_for": waits_for}
    return {
        "is_known": True, "mode": mode, "kappa": plan.kappa, "pool": list(plan.pool), "pool_size": len(plan.pool),
        "activate": list(plan.activate), "drain": list(plan.drain), "cap": plan.in_flight_cap_rollouts,
        "utilisation": finite(plan.predicted_utilisation, 4), "broadcast_s": finite(plan.broadcast_s, 4),
        "throughput": finite(plan.throughput_rollouts_per_s, 3), "usd_per_hour": finite(plan.usd_per_hour, 4),
        "reason": plan.reason,
        "terms": [
            {
                "kind": term.limit_kind.value, "text": term.text, "value": finite(term.value, 5),
                "limit": finite(term.limit, 5), "unit": term.unit, "slack": finite(term.slack, 4),
                "is_met": term.is_met, "is_binding": term.limit_kind is plan.binding, "remedy": term.remedy,
            }
            for term in plan.terms
        ],
    }  # fmt: skip


def _errors(corrections: Corrections) -> dict[str, Any]:
    """For each kind of prediction: number of comparisons and mean absolute error."""
    counts = {what: len(corrections.errors.get(what, ())) for what in PREDICTED}
    return {what: {"count": count, "error": finite(corrections.mean_error(what), 4)} for what, count in counts.items()}
