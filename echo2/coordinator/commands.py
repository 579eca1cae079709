"""The operator's commands and status: one implementation behind gRPC, the page and the command line.

Guarantees: a command's effect is saved before it returns. Leaves to others: access control (operator, web).
"""

from __future__ import annotations

import math
import shlex
from base64 import urlsafe_b64encode
from collections.abc import Mapping, Sequence
from typing import Any

from echo2.base.errors import MalformedMessage, RunFinished
from echo2.base.ids import PeerId
from echo2.coordinator.ending import dismiss
from echo2.coordinator.fleet.members import Activation, Liveness, Member, OperatorSetting
from echo2.coordinator.fleet.tokens import LABEL_CHARS_MAX, Token
from echo2.coordinator.hub import Hub
from echo2.coordinator.leases.waits import slowest, waits
from echo2.coordinator.money.providers.machine_setup import join_command
from echo2.coordinator.money.provisioner import Provisioner
from echo2.coordinator.money.provisioning import MachineOffer, Provider
from echo2.coordinator.planning.advice import LONG_S_MIN, LearnerFacts, RunAdvice, RunNow, advise, idle_text
from echo2.coordinator.planning.input import is_measured, plan_config
from echo2.cost_model.snapshot import is_spent
from echo2.outside import here
from echo2.trust.identity import JoinLink, Role
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb

EVENTS_SHOWN = 200  # as on the page
REASON_CHARS_MAX = 300  # a line or two in the log
SILENT_BEATS = 3  # as many as make a worker suspect
SETTLING_S = 5.0  # until the next plan
IDLE_S = 30.0
"""A worker on standby for less than this may just be between two plans."""
MACHINE_TOKEN_S = 30 * 86_400.0
"""Lifetime of a machine's token: long enough for the machine to be preempted and come back; it is revoked when the machine ends."""


class Commands:
    """The commands. `enrol_host`, `enrol_port`: the address in join links."""

    def __init__(
        self,
        hub: Hub,
        enrol_host: str,
        enrol_port: int,
        offers: Sequence[MachineOffer],
        providers: Mapping[str, Provider],
    ) -> None:
        self.hub, self._enrol_host, self._enrol_port = hub, enrol_host, enrol_port
        self.provisioner = Provisioner(hub, offers, providers, self._machine_link)

    def _machine_link(self, label: str) -> tuple[Token, str]:
        return self.create_token(Role.WORKER.value, label[:LABEL_CHARS_MAX], MACHINE_TOKEN_S, 1)

    def join_link(self, secret: str) -> str:
        return str(JoinLink(self._enrol_host, self._enrol_port, self.hub.identity.peer_id, secret))

    def join_command(self, role: str, join_link: str) -> str:
        """The shell command with which a node joins, or an operator connects remotely."""
        match Role(role):
            case Role.WORKER:
                return join_command(join_link, self.hub.config.model.path)
            case Role.LEARNER:
                return shlex.join(["echo-learner", "join", join_link])
            case _:
                return shlex.join(["echo2", "status", join_link])

    def create_token(self, role: str, label: str, lifetime_s: float, use_limit: int) -> tuple[Token, str]:
        """Makes a token. Returns it with its join link, which cannot be shown again."""
        secret = urlsafe_b64encode(here().rng.randbytes(32)).rstrip(b"=").decode()
        token = self.hub.tokens.create(secret, role, label, lifetime_s, use_limit, self.hub.clock.now())
        self.hub.state.save("tokens", token.token_id, token)
        self.hub.state.require_sync()
        self.hub.note("token", f"{token.token_id} ({label or role}) made for the role {role}")
        self.hub.flush_now()
        return token, self.join_link(secret)

    def revoke_token(self, token_id: str) -> None:
        token = self.hub.tokens.revoke(token_id)
        self.hub.state.save("tokens", token.token_id, token)
        self.hub.state.require_sync()
        self.hub.note("token", f"{token.token_id} ({token.label or token.role}) revoked")
        self.hub.flush_now()

    def set_worker(self, peer_id: str, setting: str, reason: str) -> None:
        try:
            wanted = OperatorSetting(setting)
        except ValueError:
            known = ", ".join(one.value for one in OperatorSetting)
            raise MalformedMessage(f"worker state: expected one of {known}, got {setting[:40]!r}") from None
        if len(reason) > REASON_CHARS_MAX or not reason.isprintable():
            raise MalformedMessage(f"reason: expected up to {REASON_CHARS_MAX} printable characters")
        self.hub.set_worker(PeerId(peer_id), wanted, reason)

    def idle_workers(self) -> list[Member]:
        """Workers that have been on standby for `IDLE_S` and are on no rented machine: what they cost buys nothing."""
        hub, now = self.hub, self.hub.clock.now()
        rented = hub.money.rented_workers()
        return [
            member
            for member in hub.membership.living()
            if member.last_activation is Activation.STANDBY and member.peer_id not in rented
            and not member.is_newcomer and now - member.activation_since >= IDLE_S
        ]  # fmt: skip

    def dismiss_idle(self) -> int:
        """Dismisses the idle workers: their processes exit with code 0. Returns how many."""
        idle = self.idle_workers()
        for member in idle:
            dismiss(self.hub, member.peer_id, "the operator sends it home: the run does not need it")
        self.hub.flush_now()
        return len(idle)

    async def release_workers(self, peer_ids: Sequence[str], reason: str) -> int:
        """Releases the rented machines of the given workers and dismisses the workers on other machines. Returns how many workers
        that ends."""
        members = self.hub.membership.members
        for peer_id in peer_ids:
            if peer_id not in members:
                raise MalformedMessage(f"worker: expected one of this run, got {peer_id[:80]!r}")
        chosen = [members[PeerId(peer_id)] for peer_id in peer_ids]
        living = [member for member in chosen if member.last_liveness is not Liveness.GONE]
        on_machine = {
            one.peer_id: machine.machine_id
            for machine in self.hub.money.machines.values() if machine.is_open
            for one in self.hub.money.workers_of(machine)
        }  # fmt: skip
        for member in living:
            if member.peer_id not in on_machine:
                dismiss(self.hub, member.peer_id, reason)
        self.hub.flush_now()
        for machine_id in dict.fromkeys(on_machine[one.peer_id] for one in living if one.peer_id in on_machine):
            await self.provisioner.release(machine_id, reason)
        return len(living)

    # ---- the run

    def change_settings(self, numbers: Mapping[str, float], prices: Mapping[str, float]) -> dict[str, Any]:
        """Changes budget, cap, staleness bound and the prices of offers, without a restart. Returns the settings that hold now."""
        hub = self.hub
        if unknown := sorted(set(prices) - (offers := {one.name for one in hub.money.offers})):
            raise MalformedMessage(f"prices: expected offers of {sorted(offers)}, got {unknown[0][:60]!r}")
        hub.change_settings({**hub.settings, **numbers, "prices": {**hub.settings.get("prices", {}), **prices}})
        told = ", ".join(f"{name} = {value:g}" for name, value in {**numbers, **prices}.items())
        hub.note("operator", f"changes {told}")
        hub.state.require_sync()
        hub.flush_now()
        plain = {name: None if value == math.inf else value for name, value in hub.settings.items()}
        return {**plain, "staleness_bound": hub.config.staleness.bound}

    def pause(self, reason: str) -> None:
        """Puts all workers on standby until `resume`: they end what they hold and get no more."""
        self.hub.pause(f"paused by the operator{f': {reason}' if reason else ''}")

    def resume(self) -> None:
        """Lets a paused or a stopped run go on."""
        self.hub.pause("")
        self.hub.ending.resume()
        self.hub.flush_now()

    def stop_run(self, reason: str) -> None:
        """Ends the run: workers are dismissed, machines are released, and the learner is told that it is over."""
        cause = f"stopped by the operator{f': {reason}' if reason else ''}"
        self.hub.ending.finish_run(cause, is_stopped=True)
        if self.hub.learner.session is not None:
            self.hub.learner.session.refuse(RunFinished(self.hub.ending.text))
        self.hub.flush_now()

    # ---- looking

    def advice(self) -> RunAdvice:
        """What stops or limits the run, and what to do, as things are now."""
        hub, money = self.hub, self.hub.money.sums()
        section, plan, advice, now = hub.config.coordinator, hub.plan, self.provisioner.advice, hub.clock.now()
        members, idle, finish = list(hub.membership.living()), self.idle_workers(), hub.ending.finish
        active = {one.peer_id for one in members if one.last_activation is Activation.ACTIVE}
        # A worker that was put on standby a moment ago may be back at once: a change of the plan is no state to report.
        settling = {one.peer_id for one in members if now - one.activation_since < SETTLING_S}
        wishes = [f"Rent {one.count} x {one.offer} (+${one.usd_per_hour:.2f}/h)" for one in advice.rent]
        wishes += [f"Release {one.machine_id} (-${one.usd_per_hour:.2f}/h)" for one in advice.release]
        return advise(
            RunNow(
                finished=hub.ending.text, is_cut_short=finish is not None and bool(finish.cause), paused=hub.paused,
                open_machines=sum(one.is_open for one in hub.money.machines.values()), learner=self._learner_facts(),
                plan=plan, plan_waits_for=hub.plan_waits_for, target=plan_config(hub.config, hub.board).target_utilisation,
                alive=sum(one.last_liveness is Liveness.ALIVE for one in members), active=len(active | settling),
                idle=idle_text(members), workers=len(members), usd_budget=section.usd_budget,
                is_budget_spent=is_spent(money.usd_chosen, section.usd_budget), usd_per_hour=money.usd_per_hour, spare=len(idle),
                spare_usd_per_hour=sum(one.hello.price_usd_per_hour for one in idle if not one.asks_too_much),
                surplus=len(active - set(plan.pool)) if plan is not None and plan.is_feasible else 0, wishes="; ".join(wishes),
                may_act=section.planner_mode == "auto", corrected=hub.corrections.reason,
                unmeasured=sum(one.peer_id in active and not is_measured(one) for one in members),
            )
        )  # fmt: skip

    def _learner_facts(self) -> LearnerFacts | None:
        hub, board, now = self.hub, self.hub.board, self.hub.clock.now()
        hello, report, limit = board.hello, board.report, hub.config.sampling.max_new_tokens
        if hello is None:
            return None
        return LearnerFacts(
            is_there=board.is_connected, left_because=hub.learner.left_because, silent_s=now - board.heard_at,
            silent_s_max=self._silent_s_max, step=int(report.step),
            step_limit=hello.step_limit, step_s=board.train_s + report.wait_s, train_s=board.train_s,
            utilisation=report.utilisation, waits_for=report.waits_for,
            waits_s=report.waits_since_s + now - board.heard_at if report.waits_for else 0.0, rewards_due=report.rewards_due,
            open_leases=len(hub.book.leases), rollouts_per_step=hello.rollouts_per_step,
            prompts_exhausted=report.prompts_exhausted, equal_reward_steps=report.equal_reward_steps,
            reward=report.reward_mean, tokens_max=limit,
            cut_share=sum(mean == limit for mean in report.lengths) / max(1, len(report.lengths)),
        )  # fmt: skip

    @property
    def _silent_s_max(self) -> float:
        """Of the learner: beyond it something is wrong, not merely busy."""
        return max(LONG_S_MIN, SILENT_BEATS * self.hub.config.coordinator.heartbeat_interval)

    def _name_of(self, peer_id: PeerId) -> str:
        member = self.hub.membership.members.get(peer_id)
        return f"worker {member.name}" if member else peer_id

    def waits(self) -> list[tuple[str, float]]:
        """All waits in the run, longest first: what waits, in words, and since when in unix seconds."""
        hub, board, now = self.hub, self.hub.board, self.hub.clock.now()
        if hub.ending.finish is not None:
            return []
        found = waits(hub.book, now, self._name_of)
        if not board.is_connected:
            since = board.changed_at or hub.started_at
            found.append(("the coordinator waits for the learner to connect", since))
        elif now - board.heard_at > self._silent_s_max:
            text = "nothing is heard of the learner, whose stream stands: its process or its network hangs"
            found.append((text, board.heard_at))
        elif board.report.waits_for:
            on = slowest(hub.book, now, self._name_of) or f"{len(hub.book.leases)} leases out"
            text = f"the learner waits for {board.report.waits_for}: {on}, {hub.book.queued} groups queued"
            found.append((text, board.heard_at - board.report.waits_since_s))
        if hub.plan_waits_for:
            found.append((f"the planner waits for {hub.plan_waits_for}", hub.started_at))
        for member in hub.membership.living():
            if member.heartbeat.waits_for:
                text = f"worker {member.name} waits for {member.heartbeat.waits_for}"
                found.append((text, member.heartbeat_at - member.heartbeat.waits_since_s))
        newest = board.newest
        if newest is not None and newest.waiting and now - newest.published_at > 2 * newest.predicted_s + 1:
            names = ", ".join(hub.membership.members[peer].name for peer in sorted(newest.waiting)[:5])
            text = f"version {newest.published.version} is not live yet on {len(newest.waiting)} workers: {names}"
            found.append((text, newest.published_at))
        return sorted(found, key=lambda wait: wait[1])

    def status(self) -> pb.RunStatus:
        """The run's whole status, for the command line."""
        hub, board, now = self.hub, self.hub.board, self.hub.clock.now()
        members, money = hub.membership.members.values(), hub.money.sums()
        events = list(hub.state.events)[-EVENTS_SHOWN:]
        status = pb.RunStatus(
            run_id=hub.options.run_id, unix_s=now, learner_is_connected=board.is_connected, plan=hub.plan_update,
            plan_terms=hub.plan.term_lines() if hub.plan else (), open_leases=len(hub.book.leases),
            queued_groups=hub.book.queued, usd_spent=money.usd_spent, usd_useful=money.usd_useful,
            usd_per_hour=money.usd_per_hour, usd_useful_per_hour=money.usd_useful_per_hour, finished=hub.ending.text,
            artifact_bytes_published=board.totals.artifact_bytes,
            full_bytes_published=board.totals.full_bytes, measured_utilisation=board.report.utilisation,
            learner=board.report, learner_hello=board.hello,
            events=[pb.Event(unix_s=event.unix_s, kind=event.kind, text=event.text) for event in events],
            workers=[self._worker(member, now) for member in members],
            waits=[pb.Wait(what=what, since_unix_s=since) for what, since in self.waits()],
        )  # fmt: skip
        if board.newest_complete is not None and board.newest_complete.complete_s is not None:
            status.measured_broadcast_s = board.newest_complete.complete_s
        return status

    def _worker(self, member: Member, now: float) -> pb.WorkerStatus:
        return pb.WorkerStatus(
            peer_id=member.peer_id, name=member.name, state=member.last_liveness.value,
            activation=member.activation.value, hello=member.hello, heartbeat=member.heartbeat,
            heartbeat_age_s=max(0.0, now - member.heard_at),
            leases=len(self.hub.book.leases_of(member.peer_id)), usd_spent=member.usd_spent,
        )  # fmt: skip
