"""Proposes next actions for a running fleet: machines to rent or end, a period or a bound to change, each with its effect.

Every action is evaluated with the planner's own relations and rehearsal (`planner.promised`), before and after, for the expected
rates and for the low and high ends of their intervals. An action is proposed only if a plan would prefer it to the present fleet:
nearer to the target in steps of 1 %, or as near for less USD/h. Guarantees: pure; bounded work: at most `WEIGHED_MAX` actions,
however many offers there are. Leaves to others: what can be rented (offers), carrying actions out (coordinator).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from echo2.base.ids import PeerId
from echo2.cost_model.effort import UTILISATION_LEAST
from echo2.cost_model.egress import egress_usd_per_hour
from echo2.cost_model.planner import promised
from echo2.cost_model.snapshot import STALENESS_BOUND_MAX, FleetSnapshot, PlanConfig, WorkerEstimate, WorkerState

KINDS_WEIGHED = 3
SHARES = (1.1, 0.5)
"""Shares of the missing rate to try: slightly more than all of it, because lengths fluctuate, and half of it."""
WEIGHED_MAX = len(SHARES) * KINDS_WEIGHED + 3
TOLD_MAX = 3
MACHINES_MAX = 256
MORE_WITHOUT_SHORTAGE = 0.25
"""Share of the pool's rate to add if the rate is not what limits it: a faster pool fills a batch sooner."""
STEP, STEPS_FORGIVEN = 0.01, 1
Z_90, FACTOR_LEAST = 1.645, 0.05


class What(enum.Enum):
    RENT = "rent"
    RELEASE = "release"
    PERIOD = "period"
    BOUND = "bound"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A machine that can be rented, as the planner would see it. `low`, `high`: 90 % interval of its rate over the expected one.
    `offer`: the coordinator's offer through which the dashboard can rent it, if any; `room`: how many can be rented."""

    worker: WorkerEstimate
    kind: str
    gpu_count: int
    provider: str
    region: str
    is_spot: bool
    low: float
    high: float
    machines_measured: int = 0
    offer: str = ""
    room: int = MACHINES_MAX

    @property
    def usd_per_rollout(self) -> float:
        return self.worker.price_usd_per_hour / self.worker.rollouts_per_s


@dataclass(frozen=True, slots=True)
class Situation:
    """The present state of a run. `kappa`: the present period. `pool`: the active workers. `spare`: paid workers that the plan does
    not need. `usd_per_hour`: price of all workers, standby included; `learner_usd_per_hour`: the learner's, on top of that.
    `rate_error`: relative standard error of the pool's rate. `bias`, `reach`: mean difference between the measured utilisation and
    the planner's in this run, and the half-width of its 90 % interval."""

    snapshot: FleetSnapshot
    config: PlanConfig
    kappa: int
    pool: frozenset[PeerId]
    spare: tuple[PeerId, ...] = ()
    usd_per_hour: float = 0.0
    learner_usd_per_hour: float = 0.0
    tokens_per_rollout: float = 0.0
    rate_error: float = 0.0
    bias: float = 0.0
    reach: float = 0.0


@dataclass(frozen=True, slots=True)
class Interval:
    expected: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Outlook:
    """A fleet's predicted numbers. `usd_per_million_tokens`, `hours_left`: infinite if nothing is trained; None if lengths or the
    number of steps left are unknown."""

    utilisation: Interval
    usd_per_hour: float
    usd_per_million_tokens: Interval | None
    hours_left: Interval | None
    kappa: int


@dataclass(frozen=True, slots=True)
class NextAction:
    what: What
    text: str
    after: Outlook
    count: int = 0
    candidate: Candidate | None = None
    workers: tuple[PeerId, ...] = ()


@dataclass(frozen=True, slots=True)
class NextActions:
    before: Outlook
    actions: tuple[NextAction, ...]
    weighed: int


def next_actions(told: Situation, candidates: Iterable[Candidate]) -> NextActions:
    """The best `TOLD_MAX` actions, of different kinds. All are evaluated at the expected rates; only these get intervals."""
    weighing = _Weighing.of(told)
    stay = _Move(What.PERIOD, "", told.pool, told.usd_per_hour, replace(told.config, fixed_kappa=told.kappa))
    now = weighing.promise(stay)
    moves = [*_releases(weighing), *_settings(weighing, now), *_rents(weighing, candidates, now)]
    promises = [(move, weighing.promise(move)) for move in moves]
    found: dict[tuple[What, str], tuple[_Move, _Promise]] = {}
    for move, promise in sorted(promises, key=lambda one: weighing.worth((stay, now), one)):
        is_same = move.what is What.PERIOD and promise.kappa == told.kappa
        is_better = weighing.rank(promise, move) < weighing.rank(now, stay)
        if is_better and not is_same:
            found.setdefault((move.what, move.candidate.kind if move.candidate else ""), (move, promise))
    actions = tuple(weighing.told_of(*one) for one in list(found.values())[:TOLD_MAX])
    return NextActions(weighing.outlook(stay, now), actions, len(moves))


# ---- what an action would bring


@dataclass(frozen=True, slots=True)
class _Move:
    """The fleet after an action: `pool` plus `count` of the candidate, under `config`, at `usd_per_hour` in total."""

    what: What
    text: str
    pool: frozenset[PeerId]
    usd_per_hour: float
    config: PlanConfig
    candidate: Candidate | None = None
    count: int = 0
    workers: tuple[PeerId, ...] = ()


@dataclass(frozen=True, slots=True)
class _Promise:
    utilisation: float
    kappa: int


@dataclass(frozen=True, slots=True)
class _Weighing:
    """Evaluates moves. `by_rate`: all workers as active ones, by end of their rates' interval (-1, 0, 1)."""

    told: Situation
    by_id: dict[PeerId, WorkerEstimate]
    by_rate: dict[int, dict[PeerId, WorkerEstimate]]

    @classmethod
    def of(cls, told: Situation) -> _Weighing:
        by_id = {one.worker_id: one for one in told.snapshot.workers}
        factors = {end: 1 + Z_90 * end * told.rate_error for end in (0, -1, 1)}
        return cls(
            told,
            by_id,
            {end: {peer: _at_work(one, factor) for peer, one in by_id.items()} for end, factor in factors.items()},
        )

    def promise(self, move: _Move, end: int = 0) -> _Promise:
        """Utilisation and period of a move, at the expected rates (0) or the low (-1) or high (1) end of their interval."""
        workers = [self.by_rate[end][one] for one in sorted(move.pool)]
        if move.candidate is not None:
            machine = _at_work(move.candidate.worker, (1.0, move.candidate.high, move.candidate.low)[end])
            names = (PeerId(f"{machine.worker_id}#{index}") for index in range(move.count))
            workers += [replace(machine, worker_id=name) for name in names]
        if not workers:
            return _Promise(0.0, move.config.kappas[0])
        found = promised(replace(self.told.snapshot, workers=tuple(workers)), move.config)
        return _Promise(found.utilisation * self.told.snapshot.learner.training_share, found.kappa)

    def usd_per_hour(self, move: _Move, promise: _Promise) -> float:
        """Price per hour, including traffic of the active workers."""
        workers = [self.by_id[one] for one in move.pool]
        more = [move.candidate.worker] * move.count if move.candidate is not None else []
        return move.usd_per_hour + egress_usd_per_hour(self.told.snapshot.learner, promise.kappa, [*workers, *more])

    def rank(self, promise: _Promise, move: _Move) -> tuple[int, float]:
        """The planner's order: steps of utilisation short of the target, then USD/h."""
        short = math.log(self.told.config.target_utilisation / max(promise.utilisation, UTILISATION_LEAST)) / STEP
        return max(0, math.ceil(short - 0.5)), round(self.usd_per_hour(move, promise), 6)

    def worth(self, stay: tuple[_Move, _Promise], one: tuple[_Move, _Promise]) -> tuple[bool, int, float]:
        """Sort key: first moves that reach the target, by USD/h; then by USD/h per utilisation gained. A larger staleness bound
        comes last, because it may hurt learning."""
        move, promise = one
        usd = self.usd_per_hour(move, promise)
        if self.rank(promise, move)[0] <= STEPS_FORGIVEN:
            return move.what is What.BOUND, 0, usd
        gained = max(promise.utilisation - stay[1].utilisation, 1e-6)
        return move.what is What.BOUND, 1, (usd - self.usd_per_hour(*stay)) / gained

    def told_of(self, move: _Move, promise: _Promise) -> NextAction:
        text = move.text.format(kappa=promise.kappa)
        return NextAction(move.what, text, self.outlook(move, promise), move.count, move.candidate, move.workers)

    def outlook(self, move: _Move, middle: _Promise) -> Outlook:
        told, learner = self.told, self.told.snapshot.learner
        same = replace(move, config=replace(move.config, fixed_kappa=middle.kappa))
        low, high = self.promise(same, -1).utilisation, self.promise(same, 1).utilisation
        ends = sorted((low, middle.utilisation, high))
        utilisation = Interval(*(min(1.0, max(0.0, one + told.bias)) for one in (middle.utilisation, ends[0], ends[2])))
        apart = [math.hypot(told.reach, one - utilisation.expected) for one in (utilisation.low, utilisation.high)]
        utilisation = Interval(
            utilisation.expected, max(0.0, utilisation.expected - apart[0]), min(1.0, utilisation.expected + apart[1])
        )
        trained_s = learner.train_s * learner.training_share
        tokens = told.tokens_per_rollout * learner.trained_rollouts / trained_s * 3600 / 1e6
        usd, busy_h = (
            self.usd_per_hour(move, middle) + told.learner_usd_per_hour,
            told.snapshot.steps_left * trained_s / 3600,
        )
        return Outlook(
            utilisation, self.usd_per_hour(move, middle), _over(usd / tokens, utilisation) if tokens > 0 else None,
            _over(busy_h, utilisation) if busy_h > 0 else None, middle.kappa,
        )  # fmt: skip


def _over(value: float, utilisation: Interval) -> Interval:
    """Divides `value`, given for a utilisation of 1, by the utilisation; the low end comes from the high utilisation."""
    middle, least, most = (
        value / one if one > 1e-6 else math.inf for one in (utilisation.expected, utilisation.low, utilisation.high)
    )
    return Interval(middle, most, least)


def _at_work(worker: WorkerEstimate, factor: float) -> WorkerEstimate:
    """The worker as an active one, `factor` times as fast."""
    factor = max(factor, FACTOR_LEAST)
    return replace(
        worker, rollouts_per_s=worker.rollouts_per_s * factor, tokens_per_s=worker.tokens_per_s * factor,
        rollout_s_mean=worker.rollout_s_mean / factor, rollout_s_tail=worker.rollout_s_tail / factor,
        rollout_s_max=worker.rollout_s_max / factor, state=WorkerState.ACTIVE, is_pinned=False,
    )  # fmt: skip


# ---- actions


def _rents(weighing: _Weighing, candidates: Iterable[Candidate], now: _Promise) -> Iterator[_Move]:
    """Rents the cheapest offer per rollout of each kind, enough for the missing rate or half of it. Yields nothing if the target
    is reached."""
    told, learner = weighing.told, weighing.told.snapshot.learner
    if now.utilisation >= told.config.target_utilisation * (1 - STEP / 2):
        return
    needed = told.config.target_utilisation * (1 + told.config.hysteresis.add_margin)
    have = sum(weighing.by_id[one].rollouts_per_s for one in told.pool)
    lacking = needed * learner.rollouts_per_step / learner.train_s - have
    if lacking <= 0:
        lacking = MORE_WITHOUT_SHORTAGE * have
    kinds: dict[str, Candidate] = {}
    for one in sorted(candidates, key=lambda one: (one.usd_per_rollout, not one.offer)):
        kinds.setdefault(one.kind, one)
    cap = told.config.usd_per_hour_cap
    for candidate in list(kinds.values())[:KINDS_WEIGHED]:
        price = candidate.worker.price_usd_per_hour
        affordable = math.floor((cap - told.usd_per_hour) / price + 1e-9) if cap and price > 0 else MACHINES_MAX
        most = min(MACHINES_MAX, candidate.room, affordable)
        for count in {min(most, math.ceil(share * lacking / candidate.worker.rollouts_per_s)) for share in SHARES}:
            if count > 0:
                usd = told.usd_per_hour + count * price
                yield _Move(What.RENT, _rent_text(candidate, count), told.pool, usd, told.config, candidate, count)


def _rent_text(one: Candidate, count: int) -> str:
    several = f"{count} machine{'s' if count > 1 else ''} of {one.gpu_count} x {one.kind}"
    machine = f"{count} x {one.kind}" if one.gpu_count == 1 else several
    where = " ".join(
        filter(None, ("spot" if one.is_spot else "", f"at {one.provider}", f"in {one.region}" if one.region else ""))
    )
    return f"rent {machine} {where} at ${one.worker.price_usd_per_hour:.3g}/h each".replace("{", "(").replace("}", ")")


def _releases(weighing: _Weighing) -> Iterator[_Move]:
    """Ends the paid workers that the plan does not need."""
    told = weighing.told
    spare = tuple(one for one in told.spare if weighing.by_id[one].price_usd_per_hour > 0)
    if spare:
        saved = sum(weighing.by_id[one].price_usd_per_hour for one in spare)
        text, left = f"end {len(spare)} of {len(weighing.by_id)} workers", max(0.0, told.usd_per_hour - saved)
        yield _Move(What.RELEASE, text, told.pool - set(spare), left, told.config, count=len(spare), workers=spare)


def _settings(weighing: _Weighing, now: _Promise) -> Iterator[_Move]:
    """Changes the period to the best one; if the target is missed, also raises the staleness bound by one."""
    told = weighing.told
    free = replace(told.config, fixed_kappa=0)
    yield _Move(
        What.PERIOD, f"publish every {{kappa}} steps, not every {told.kappa}", told.pool, told.usd_per_hour, free
    )
    bound = told.config.staleness_bound + 1
    if bound <= STALENESS_BOUND_MAX and now.utilisation < told.config.target_utilisation * (1 - STEP / 2):
        text, wider = f"restart with S = {bound}, if learning bears it", replace(free, staleness_bound=bound)
        yield _Move(What.BOUND, text, told.pool, told.usd_per_hour, wider)
