"""The run as it is shown: one message, `RunStatus`, of which `echo2 status` and the page's sections are made; a row a worker.

Guarantees: valid JSON (no infinities or NaN). A fact that the message has is read from there, not asked again of the hub.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from heapq import nsmallest
from typing import Any

from echo2.base.ids import PeerId
from echo2.base.units import counted
from echo2.coordinator.fleet.members import Activation, Liveness, Member
from echo2.coordinator.hub import Hub
from echo2.coordinator.leases.lease import GroupPhase
from echo2.coordinator.money.costs import FleetCosts, Money
from echo2.coordinator.money.provisioner import Provisioner
from echo2.coordinator.money.provisioning import FleetAdvice, RentedMachine
from echo2.coordinator.planning.advice import (
    LONG_S_MIN,
    RunAdvice,
    RunNow,
    advise,
    idle_text,
    lease_waits,
    slowest,
    why_no_lease,
)
from echo2.coordinator.planning.telemetry import PREDICTED, CurrentPlan, VersionRow, is_measured, plan_config
from echo2.cost_model.plan import Plan
from echo2.cost_model.snapshot import is_spent
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb


def finite(value: float | None, digits: int = 6) -> float | None:
    """The rounded value; None (unknown) if it is not finite, because JSON has no infinity."""
    return round(value, digits) if value is not None and math.isfinite(value) else None


EVENTS_SHOWN = 200  # what a person scrolls through; the log has all
SILENT_BEATS = 3  # as many as make a worker suspect
PEER_ID = re.compile(r"\b12D3Koo\w{45}\b")  # in texts of the lease book, which knows no names
SETTLING_S = 5.0  # until the next plan
TREES_SHOWN_NODES_MAX = 200  # beyond, the picture is a blot
VERSIONS_SHOWN = 16  # rows of the table
MACHINES_SHOWN = 50  # newest first; more if more are open: each has its button
TOKENS_SHOWN = 200  # those that are not revoked first, then newest first; each machine that was ever rented had one
PAID_SHOWN = 30  # newest last
ENOUGH = "a few steps, heartbeats and a delta"  # what a plan is trusted from
NAMES_SHOWN = 3  # of workers that wait for the same


class StateView:
    def __init__(self, hub: Hub, provisioner: Provisioner) -> None:
        self._hub, self._provisioner = hub, provisioner

    # ---- the message

    def status(self) -> pb.RunStatus:
        """The whole state of the run, as `echo2 status` asks for it."""
        hub, now, money = self._hub, self._hub.clock.now(), self._hub.money.sums()
        status = self._status(money, self._advice(self._provisioner.advice(money), money))
        status.workers.extend(
            pb.WorkerStatus(
                peer_id=member.peer_id, name=member.name, state=member.last_liveness.value,
                activation=member.activation.value, hello=member.hello, heartbeat=member.heartbeat,
                heartbeat_age_s=max(0.0, now - member.heard_at), leases=hub.book.lease_count(member.peer_id),
                usd_spent=member.usd_spent,
            )
            for member in hub.membership.members.values()
        )  # fmt: skip
        return status

    def _status(self, money: FleetCosts, advice: RunAdvice) -> pb.RunStatus:
        """The state without the workers."""
        hub, board = self._hub, self._hub.board
        rented = [machine.usd_per_hour for machine in hub.money.open_machines]
        status = pb.RunStatus(
            run_id=hub.options.run_id, unix_s=hub.clock.now(), learner_is_connected=board.is_connected, plan=hub.plan.message,
            plan_terms=hub.plan.now.term_lines() if hub.plan.now else (), open_leases=len(hub.book.leases),
            queued_groups=hub.book.queued, usd_spent=money.usd_spent, usd_useful=money.usd_useful,
            usd_per_hour=money.usd_per_hour, usd_useful_per_hour=money.usd_useful_per_hour, finished=hub.ending.text,
            artifact_bytes_published=board.totals.artifact_bytes, full_bytes_published=board.totals.full_bytes,
            measured_utilisation=board.report.utilisation, learner=board.report, learner_hello=board.hello,
            events=[
                pb.Event(unix_s=event.unix_s, kind=event.kind, text=PEER_ID.sub(lambda at: self._name_of(at[0], ""), event.text))
                for event in list(hub.state.events)[-EVENTS_SHOWN:]
            ],
            waits=[pb.Wait(what=what, since_unix_s=since) for what, since in self._waits()],
            headline=advice.headline.text, headline_kind=advice.headline.kind,
            open_machines=len(rented), rented_usd_per_hour=sum(rented),
        )  # fmt: skip
        if board.newest_complete is not None and board.newest_complete.complete_s is not None:
            status.measured_broadcast_s = board.newest_complete.complete_s
        return status

    def sections(self) -> dict[str, Any]:
        """All sections of the page except the workers, whose rows `worker` gives."""
        hub, money, finish = self._hub, self._hub.money.sums(), self._hub.ending.finish
        wishes = self._provisioner.advice(money)
        advice = self._advice(wishes, money)
        status = self._status(money, advice)
        return {
            "run": {
                "run_id": status.run_id, "coordinator": hub.identity.peer_id, "started": round(hub.started_at, 1),
                "staleness_bound": hub.config.staleness.bound, "staleness_bound_max": hub.learner_bound,
                "finished": status.finished, "planner_mode": hub.config.coordinator.planner_mode,
                "is_held": bool(hub.paused) or (finish is not None and finish.is_stopped),  # until the operator resumes it
            },
            "learner": self._learner(status),
            "money": self._money(status, money),
            "machines": self._machines(wishes),
            "advice": advice,
            "plan": plan_value(*self._plan_now()) | {
                "errors": _errors(hub.plan), "utilisation": finite(hub.plan.predicted_utilisation or None, 4),
            },
            "broadcast": self._broadcast(status),
            "leases": self._leases(status),
            "waits": [{"what": wait.what, "since": round(wait.since_unix_s, 1)} for wait in status.waits],
            "tokens": self._tokens(),
            "events": [{"at": round(event.unix_s, 3), "kind": event.kind, "text": event.text} for event in status.events],
        }  # fmt: skip

    def _plan_now(self) -> tuple[Plan | None, str, str]:
        """The plan to show, the planner's mode, and what the planner waits for. There is no plan while no worker is alive."""
        hub, mode = self._hub, self._hub.config.coordinator.planner_mode
        if hub.ending.finish is not None:
            return None, mode, "nothing: the run is finished"
        is_anybody = any(member.last_liveness is Liveness.ALIVE for member in hub.membership.members.values())
        return (hub.plan.now, mode, hub.plan.waits_for) if is_anybody else (None, mode, "a worker: none is connected")

    def _learner(self, status: pb.RunStatus) -> dict[str, Any]:
        board, hello, report = self._hub.board, status.learner_hello, status.learner
        if not status.HasField("learner_hello"):
            return {"is_known": False}
        return {
            "is_known": True, "is_connected": status.learner_is_connected, "since": round(board.changed_at, 1),
            "model": hello.model_name, "peer_id": board.peer_id, "version": board.newest_version,
            "rollouts_per_step": hello.rollouts_per_step, "rollouts_per_group": hello.rollouts_per_group,
            "step_limit": hello.step_limit, "uplink": hello.link.uplink_bytes_per_s, "step": max(hello.step, report.step),
            "train_s": finite(board.train_s), "reward": finite(board.reward_mean),
            "eval_reward": finite(board.eval_reward), "utilisation": finite(report.utilisation),
            "buffered": report.buffered_rollouts, "open": report.open_rollouts, "trained_tokens": report.trained_tokens,
            "refused": report.refused_rollouts, "over_stale_tokens": report.over_stale_tokens_trained,
            "lag_histogram": list(report.lag_histogram), "is_finished": report.is_finished, "audit_s": finite(report.audit_s, 4),
        }  # fmt: skip

    def _money(self, status: pb.RunStatus, money: FleetCosts) -> dict[str, Any]:
        hub, tokens = self._hub, status.learner.trained_tokens
        return {
            "spent": finite(status.usd_spent, 4), "per_hour": finite(status.usd_per_hour, 4),
            "per_mtok": finite(1e6 * status.usd_spent / tokens, 4) if tokens else None,
            "chosen": finite(money.usd_chosen, 4), "chosen_per_hour": finite(money.usd_chosen_per_hour, 4),
            "useful": finite(status.usd_useful, 4),
            "cap_per_hour": finite(hub.config.coordinator.usd_per_hour_cap), "budget": finite(hub.config.coordinator.usd_budget),
            "journal": [replace(paid, whom=self._name_of(paid.whom, "")) for paid in list(hub.state.paid)[-PAID_SHOWN:]],
        }  # fmt: skip

    def _machines(self, wishes: FleetAdvice) -> dict[str, Any]:
        hub, provisioner = self._hub, self._provisioner
        machines = sorted(provisioner.machines.values(), key=lambda machine: (not machine.is_open, -machine.rented_at))
        rented = Counter(machine.offer for machine in machines if machine.is_open)
        return {
            "offers": [
                {
                    "name": offer.name, "provider": offer.provider, "gpu": offer.gpu, "price": offer.usd_per_hour,
                    "is_spot": offer.is_spot, "max": offer.machines_max, "is_automatic": offer.is_automatic,
                    "rented": rented[offer.name],
                    "problem": provisioner.problems.get(offer.name, ""),
                }
                for offer in provisioner.offers.values()
            ],
            "machines": [machine_value(machine, hub.money) for machine in machines[: max(MACHINES_SHOWN, rented.total())]],
            "count": rented.total(),
            "advice": wishes,
        }  # fmt: skip

    def _broadcast(self, status: pb.RunStatus) -> dict[str, Any]:
        hub = self._hub
        plan, board = hub.broadcast_plan, hub.board
        value: dict[str, Any] = {
            "artifact_bytes": status.artifact_bytes_published, "full_bytes": status.full_bytes_published,
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

    def _leases(self, status: pb.RunStatus) -> dict[str, Any]:
        book, name_of = self._hub.book, self._hub.membership.name_of
        oldest = nsmallest(8, book.leases.values(), key=lambda lease: lease.progress_at)
        return {
            "open": status.open_leases, "queued": status.queued_groups,
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

    def _tokens(self) -> list[dict[str, Any]]:
        all_tokens = self._hub.tokens.tokens.values()
        tokens = nsmallest(TOKENS_SHOWN, all_tokens, key=lambda token: (token.is_revoked, -token.created_at))
        return [
            {
                "id": token.token_id, "role": token.role, "label": token.label, "expires": round(token.expires_at),
                "use_limit": token.use_limit, "uses": len(token.peers), "is_revoked": token.is_revoked,
                # Without its age, which `expires` tells: a text that counts seconds would be sent every second.
                "problem": token.problem(token.created_at) if token.is_revoked or token.use_limit else "",
            }
            for token in tokens
        ]  # fmt: skip

    def worker(self, member: Member) -> dict[str, Any]:
        hub, hello, beat, reach = self._hub, member.hello, member.heartbeat, member.reach
        is_gone = member.last_liveness is Liveness.GONE
        return {
            "name": member.name, "state": member.last_liveness.value,
            "activation": "" if is_gone else member.activation.value,
            "setting": member.setting.value, "reason": member.activation_reason, "gpu": hello.gpu or "cpu",
            "engine": f"{hello.engine} {hello.quantisation}".strip(), "provider": hello.provider, "is_spot": hello.is_spot,
            "price": hello.price_usd_per_hour, "slots": hello.slot_count, "version": member.version,
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
            "can_be_dialled": bool((reach or hello).addresses), "relays": len(reach.relays) if reach else 0,
            "links": [] if is_gone else self._links(member),
        }  # fmt: skip

    def _usd_per_mtok(self, member: Member) -> float | None:
        """A worker's whole bill over the tokens trained on, of which its part is that of the rollouts admitted of it; None while
        nothing of it was trained on."""
        hub, records = self._hub, self._hub.book.records
        share = records.of(member.peer_id).admitted / records.admitted if records.admitted > 0 else 0.0
        tokens = hub.board.report.trained_tokens * share
        return finite(1e6 * hub.money.bill_of(member) / tokens, 4) if tokens > 0 else None

    def _links(self, member: Member) -> list[dict[str, str]]:
        name_of, learner = self._hub.membership.name_of, self._hub.board.peer_id
        return [
            {
                "peer": "learner" if link.peer_id == learner else name_of(link.peer_id),
                "kind": link.kind,
                "reason": link.reason,
            }
            for link in member.heartbeat.links.links
        ]

    # ---- what is said of it

    def advice(self) -> RunAdvice:
        """What stops or limits the run, and what to do, as things are now."""
        money = self._hub.money.sums()
        return self._advice(self._provisioner.advice(money), money)

    def _advice(self, fleet: FleetAdvice, money: FleetCosts) -> RunAdvice:
        hub, board = self._hub, self._hub.board
        section, plan, now = hub.config.coordinator, hub.plan.now, hub.clock.now()
        report, silent_s = board.report, now - board.heard_at
        members, idle, finish = list(hub.membership.living()), hub.money.idle_workers(), hub.ending.finish
        working = [member for member in members if member.last_activation is Activation.ACTIVE]
        # A worker that was put on standby a moment ago may be back at once: a change of the plan is no state to report.
        settling = sum(
            now - m.activation_since < SETTLING_S for m in members if m.last_activation is not Activation.ACTIVE
        )
        pool = set(plan.pool) if plan is not None and plan.is_feasible else None
        wishes = [f"Rent {wish.count} x {wish.offer} (+${wish.usd_per_hour:.2f}/h)" for wish in fleet.rent]
        wishes += [f"Release {wish.machine_id} (-${wish.usd_per_hour:.2f}/h)" for wish in fleet.release]
        return advise(
            RunNow(
                finished=hub.ending.text, is_cut_short=finish is not None and bool(finish.cause), paused=hub.paused,
                open_machines=len(hub.money.open_machines),
                hello=board.hello, report=report, is_connected=board.is_connected, left_because=hub.learner.left_because,
                silent_s=silent_s, silent_s_max=self._silent_s_max, train_s=board.train_s,
                waits_s=report.waits_since_s + silent_s, open_leases=len(hub.book.leases),
                tokens_max=hub.config.sampling.max_new_tokens, plan=plan if hub.plan.is_settled else None,
                predicted=hub.plan.predicted_utilisation,
                plan_waits_for=hub.plan.waits_for or ENOUGH, target=plan_config(hub.config, board).target_utilisation,
                alive=sum(member.last_liveness is Liveness.ALIVE for member in members), active=len(working) + settling,
                idle=idle_text(members), workers=len(members), usd_budget=section.usd_budget,
                is_budget_spent=is_spent(money.usd_chosen, section.usd_budget), usd_per_hour=money.usd_per_hour,
                usd_working_per_hour=money.usd_useful_per_hour, spare=len(idle),
                spare_usd_per_hour=sum(member.hello.price_usd_per_hour for member in idle if not member.asks_too_much),
                surplus=sum(member.peer_id not in pool for member in working) if pool is not None else 0, wishes="; ".join(wishes),
                may_act=section.planner_mode == "auto", corrected=hub.plan.reason,
                unmeasured=sum(not is_measured(member) for member in working),
            )
        )  # fmt: skip

    @property
    def _silent_s_max(self) -> float:
        """Of the learner: beyond it something is wrong, not merely busy."""
        return max(LONG_S_MIN, SILENT_BEATS * self._hub.config.coordinator.heartbeat_interval)

    def _name_of(self, whom: str, kind: str = "worker ") -> str:
        member = self._hub.membership.members.get(PeerId(whom))
        return f"{kind}{member.name}" if member else whom

    def _waits(self) -> list[tuple[str, float]]:
        """All waits in the run, longest first: what waits, in words, and since when in unix seconds."""
        hub, board, now = self._hub, self._hub.board, self._hub.clock.now()
        if hub.ending.finish is not None:
            return []
        waits = lease_waits(hub.book, now, self._name_of)
        if not board.is_connected:
            since = board.changed_at or hub.started_at
            waits.append(("the coordinator waits for the learner to connect", since))
        elif now - board.heard_at > self._silent_s_max:
            text = "nothing is heard of the learner, whose stream stands: its process or its network hangs"
            waits.append((text, board.heard_at))
        elif board.report.waits_for:
            on = slowest(hub.book, now, self._name_of) or f"{counted(len(hub.book.leases), 'lease')} out"
            text = f"the learner waits for {board.report.waits_for}"
            if text.startswith("the learner waits for rollouts"):
                text += f": {on}, {counted(hub.book.queued, 'group')} queued"
            waits.append((text, board.heard_at - board.report.waits_since_s))
        if hub.plan.waits_for:
            waits.append((f"the planner waits for {hub.plan.waits_for}", hub.plan.waits_since))
        waiting: dict[str, list[Member]] = {}
        for member in hub.membership.living():
            if member.heartbeat.waits_for:
                waiting.setdefault(member.heartbeat.waits_for, []).append(member)
        for what, members in waiting.items():
            since = min(member.heartbeat_at - member.heartbeat.waits_since_s for member in members)
            waits.append((f"{_names(members)} for {what}", since))
        newest = board.newest
        if newest is not None and newest.waiting and now - newest.published_at > 2 * newest.predicted_s + 1:
            names = ", ".join(hub.membership.members[peer].name for peer in sorted(newest.waiting)[:5])
            text = f"version {newest.published.version} is not live yet on {counted(len(newest.waiting), 'worker')}: {names}"
            waits.append((text, newest.published_at))
        return sorted(waits, key=lambda wait: wait[1])

    def samples(self) -> dict[str, list[Any]]:
        samples = list(self._hub.state.samples)
        return {
            "at": [round(s.unix_s, 2) for s in samples], "step": [s.step for s in samples],
            "reward": [finite(s.reward_mean) for s in samples], "eval": [finite(s.eval_reward) for s in samples],
            "utilisation": [finite(s.utilisation) or None for s in samples],
            "predicted": [finite(s.predicted_utilisation) or None for s in samples],
            "usd": [finite(s.usd_spent, 4) for s in samples],
            "usd_per_hour": [finite(s.usd_per_hour, 4) for s in samples],
        }  # fmt: skip


def _names(waiting: list[Member]) -> str:
    """`worker a waits`, `4 workers wait (a, b, c and others)`: the first few by name."""
    names = [member.name for member in waiting[:NAMES_SHOWN]]
    if len(waiting) == 1:
        return f"worker {names[0]} waits"
    others = " and others" if len(waiting) > len(names) else ""
    return f"{len(waiting)} workers wait ({', '.join(names)}{others})"


def _newest_line(beat: pb.Heartbeat) -> dict[str, Any]:
    """The newest error in a worker's own log; the newest warning if there is no error."""
    lines = beat.log.lines
    newest = next((line for line in reversed(lines) if line.is_error), lines[-1] if lines else None)
    if newest is None:
        return {"said": "", "said_at": None, "said_error": False}
    return {"said": newest.text, "said_at": finite(newest.unix_s, 1), "said_error": newest.is_error}


def command_of(machine: RentedMachine) -> str:
    """The command that a person runs on a machine; it carries a join link. Empty once the machine is gone."""
    return machine.command if machine.is_open else ""


def machine_value(machine: RentedMachine, money: Money) -> dict[str, Any]:
    """A machine as the page shows it. `has_command`: there is a command for a person to run; it carries a join link, so only an
    action returns it."""
    return {
        "machine_id": machine.machine_id, "offer": machine.offer, "provider": machine.provider,
        "label": machine.label, "state": machine.state.value, "price": machine.usd_per_hour,
        "since": round(machine.rented_at, 1), "ended": machine.ended_at and round(machine.ended_at, 1),
        "notice": machine.notice, "has_command": bool(command_of(machine)),
        "workers": [worker.name for worker in money.workers_of(machine)],
    }  # fmt: skip


def _version(row: VersionRow) -> dict[str, Any]:
    return {
        "version": row.published.version, "bytes": row.published.artifact_bytes,
        "parent": row.published.parent if row.published.has_parent else None,
        "full_bytes": row.published.full_snapshot_bytes, "at": round(row.published_at, 2),
        "predicted_s": finite(row.predicted_s, 3), "actual_s": finite(row.complete_s, 3), "pool": row.pool_size,
        "live": len(row.live_after_s), "waiting": len(row.waiting),
    }  # fmt: skip


def plan_value(plan: Plan | None, mode: str, waits_for: str) -> dict[str, Any]:
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


def rollout_summary(entry: pb.RolloutSummary, name_of: Callable[[str], str]) -> dict[str, Any]:
    return {
        "id": entry.rollout_id, "step": entry.step, "reward": finite(entry.reward, 4), "token_count": entry.token_count,
        "oldest_version": entry.oldest_version, "newest_version": entry.newest_version, "finish_reason": entry.finish_reason,
        "workers": [name_of(peer) for peer in entry.peer_ids], "completion": entry.completion, "turns": entry.turn_count,
    }  # fmt: skip


def rollout_value(answer: pb.RolloutsShown, offset: int, name_of: Callable[[str], str]) -> dict[str, Any]:
    """One rollout as the page shows it: its tokens from `offset` on, and the turns that begin among them."""
    summary = rollout_summary(answer.rollouts[0], name_of)
    workers = dict(enumerate(summary["workers"]))
    tokens = [
        {"id": token.token_id, "text": token.text, "logprob": finite(token.logprob, 4), "version": token.version,
         "worker": workers.get(token.peer, "")} for token in answer.tokens
    ]  # fmt: skip
    turns = [{"turn": turn.turn, "position": turn.position, "text": turn.text} for turn in answer.turns]
    return {**summary, "prompt": answer.prompt, "offset": offset, "tokens": tokens, "said": turns}


def _errors(plan: CurrentPlan) -> dict[str, Any]:
    """For each kind of prediction: number of comparisons and mean absolute error."""
    counts = {what: len(plan.errors.get(what, ())) for what in PREDICTED}
    return {what: {"count": count, "error": finite(plan.mean_error(what), 4)} for what, count in counts.items()}
