"""Generation in the fleet simulation: the real offers and the real lease book between learner and workers.

The learner offers groups up to the plan's cap, each for the step at which it expects to train on it. The book leases them
to workers that want some and may start them. A lost worker's groups continue on others from its last report. Guarantees:
offers, leases, results and closings are those of the book. A living worker always progresses here, so deadlines never
pass and no tick is sent. Leaves to others: which worker is in the pool (fleet), versions (fleet_links).

A worker waits for a group that it may start, and is woken by a grant.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Concatenate, ParamSpec

from benchmarks.fleet_model.clock import VirtualClock
from benchmarks.fleet_model.scenario import FleetScenario
from benchmarks.fleet_model.worker import RolloutRun, SimGroup, SimWorker
from echo2.base.ids import GroupId, Step
from echo2.base.rng import derived_rng
from echo2.base.rollout import EndReason, GroupSpec, SamplingParams
from echo2.config.run import RunConfig
from echo2.coordinator.leases import lease as le
from echo2.coordinator.leases.book import LeaseBook
from echo2.coordinator.leases.lease import LeaseRules
from echo2.learner.rollouts.admission import cap_groups

LEASE_TIMEOUT_S = 120.0
GROUPS_MAX = 1 << 20
P = ParamSpec("P")


class Generation:
    """Calls `finished` with each complete group and `emptied` with each worker that has no work left."""

    def __init__(
        self,
        scenario: FleetScenario,
        clock: VirtualClock,
        finished: Callable[[SimGroup], None],
        emptied: Callable[[SimWorker], None],
    ) -> None:
        self.scenario, self.clock, self._finished, self._emptied = scenario, clock, finished, emptied
        group_size, batch = scenario.learner.rollouts_per_group, scenario.learner.rollouts_per_step
        self.groups_per_step = -(-batch // group_size)
        bound = scenario.config.staleness_bound
        learner = {"prompts_per_step": self.groups_per_step, "rollouts_per_prompt": group_size}
        self.config = RunConfig.model_validate({"staleness": {"bound": bound}, "learner": learner})
        self.book = LeaseBook(LeaseRules(bound, LEASE_TIMEOUT_S, groups_max=GROUPS_MAX))
        self.groups: dict[GroupId, SimGroup] = {}
        self.workers: dict[str, SimWorker] = {}
        self._sampling = SamplingParams(max_new_tokens=scenario.lengths.max_tokens)
        self._rng = derived_rng(scenario.seed, "lengths")
        self._group_count = self._run_count = 0
        self._calls: deque[Callable[[float], list[le.Action]]] = deque()
        self._is_handling = False

    @property
    def outstanding_groups(self) -> int:
        """Number of groups offered and neither trained on nor dropped."""
        return len(self.groups)

    # ---- the learner's side

    def offer(self, next_step: int, cap_rollouts: int) -> None:
        """Offers as many groups as the cap leaves room for."""
        ahead = self.outstanding_groups
        specs = []
        for number in range(max(0, cap_groups(self.config, cap_rollouts) - ahead)):
            group = SimGroup(GroupId(f"g{self._group_count:09d}"))
            self._group_count += 1
            for _ in range(self.scenario.learner.rollouts_per_group):
                tokens = self.scenario.lengths.draw(self._rng)
                group.tokens += tokens
                group.runs.append(RolloutRun(group, tokens))
            self.groups[group.group_id] = group
            step = next_step + (ahead + number) // self.groups_per_step
            specs.append(GroupSpec(group.group_id, (0,), len(group.runs), self._sampling, Step(step)))
        if specs:
            self._handle(self.book.offer, tuple(specs))

    def close(self, groups: Iterable[SimGroup], reason: str) -> None:
        """Closes groups that the learner has trained on or dropped."""
        ids = tuple(group.group_id for group in groups)
        for group_id in ids:
            del self.groups[group_id]
        self._handle(self.book.close, ids, reason)

    # ---- the workers' side

    def came(self, worker: SimWorker) -> None:
        """Adds a worker that is in the pool and ready."""
        self.workers[worker.truth.name] = worker
        rate = worker.truth.slots * worker.truth.sequence_tokens_per_s / self.scenario.lengths.mean_tokens
        self._handle(self.book.reconnect, worker.peer_id, ())
        self.book.rate(worker.peer_id, rate)
        self._handle(self.book.allow, worker.peer_id, True)
        self.seek(worker)

    def drain(self, worker: SimWorker) -> None:
        """Stops leasing to the worker: started groups finish, leases of groups not yet started are handed back."""
        self._handle(self.book.allow, worker.peer_id, False)
        self._handle(self.book.request, worker.peer_id, 0, worker.version)
        idle = {
            run.group.group_id: run.group
            for run in worker.waiting
            if not any(other.is_begun and not other.is_done for other in run.group.runs)
        }
        worker.waiting = deque(run for run in worker.waiting if run.group.group_id not in idle)
        for group in idle.values():
            self._handle(self.book.end, worker.peer_id, group.lease_id, EndReason.HANDED_BACK, "drained")

    def lose(self, worker: SimWorker, loss_s: float) -> None:
        """Loses the worker and its last `loss_s` seconds of work, which it had not reported; others continue its groups."""
        now = self.clock.now()
        for run in worker.running.values():
            worked_s = now - run.began_s - (worker.stalled_s - run.stalled_s) - loss_s
            run.tokens_left -= max(0.0, worked_s) * worker.truth.sequence_tokens_per_s
            run.tokens_left = max(1.0, run.tokens_left)
        worker.running.clear()
        worker.waiting.clear()
        self._handle(self.book.lose, worker.peer_id, "preempted")

    def seek(self, worker: SimWorker) -> None:
        """Tells the book of free slots, once until the next grant or newer version."""
        known = self.book.wanting.get(worker.peer_id)
        if worker.is_active and worker.free_slots > 0 and (known is None or known.version != worker.version):
            self._handle(self.book.request, worker.peer_id, worker.free_slots, worker.version)

    # ---- the book

    def _handle(
        self, method: Callable[Concatenate[float, P], list[le.Action]], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Calls the book's methods one at a time; queues them, because a grant may cause another call."""
        self._calls.append(lambda now: method(now, *args, **kwargs))
        if self._is_handling:
            return
        self._is_handling = True
        while self._calls:
            for action in self._calls.popleft()(self.clock.now()):
                match action:
                    case le.Grant(is_renewal=False):
                        self._take(action)
                    case le.Revoke(worker_id, lease_id, reason):
                        raise AssertionError(
                            f"lease {lease_id} of {worker_id}: expected to be left alone, got {reason}"
                        )
                    case _:
                        pass  # for a real coordinator: saving, renewals, messages to the operator
        self._is_handling = False

    def _take(self, grant: le.Grant) -> None:
        worker, group = self.workers[grant.worker_id], self.groups[grant.group.group_id]
        group.lease_id = grant.lease_id
        group.oldest = worker.version if group.oldest is None else min(group.oldest, worker.version)
        for run in group.runs:
            run.is_begun = False
            if not run.is_done:
                worker.waiting.append(run)
        self._fill(worker)
        self.seek(worker)

    def _fill(self, worker: SimWorker) -> None:
        while worker.waiting and len(worker.running) < worker.truth.slots:
            self._begin(worker, worker.waiting.popleft())

    def _begin(self, worker: SimWorker, run: RolloutRun) -> None:
        number = self._run_count
        self._run_count += 1
        now = self.clock.now()
        run.began_s, run.stalled_s, run.is_begun = now, worker.stalled_s, True
        worker.running[number] = run
        duration_s = run.tokens_left / worker.truth.sequence_tokens_per_s + max(0.0, worker.stands_until_s - now)
        self.clock.after(duration_s, partial(self._due, worker, worker.life, number, worker.stalled_s))

    def _due(self, worker: SimWorker, life: int, number: int, stalled_s: float) -> None:
        if worker.life != life:
            return
        if worker.stalled_s > stalled_s:  # it was paused meanwhile: due that much later
            late_s = worker.stalled_s - stalled_s
            self.clock.after(late_s, partial(self._due, worker, life, number, worker.stalled_s))
            return
        run = worker.running.pop(number)
        run.is_done = True
        self._fill(worker)
        self.seek(worker)
        if run.group.open_count == 0:
            self._whole(worker, run.group)
        if not worker.has_work:
            self._emptied(worker)

    def _whole(self, worker: SimWorker, group: SimGroup) -> None:
        tokens = int(group.tokens)
        self._handle(self.book.on_progress, worker.peer_id, group.lease_id, len(group.runs), tokens)
        self._handle(self.book.end, worker.peer_id, group.lease_id, EndReason.FINISHED, "")
        self._finished(group)
