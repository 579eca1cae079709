"""What to do next with a running fleet: machines to rent or to end, a period or a bound to change, each with what it would bring.

Every action is weighed by the planner's own relations and rehearsal (`planner.promised`), before and after, for the rates expected
and for the low and high ends of their intervals. An action is told only if a plan would prefer it to the fleet as it is: nearer to
the target in steps of 1 %, or as near for less USD/h. Guarantees: pure; bounded work: at most `WEIGHED_MAX` actions however many
offers there are. Leaves to others: what can be rented (offers), doing it (coordinator).
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
"""Of what the pool lacks: a little more than all of it, for lengths waver; and half, where the whole is not worth it."""
WEIGHED_MAX = len(SHARES) * KINDS_WEIGHED + 3
TOLD_MAX = 3
MACHINES_MAX = 256
MORE_WITHOUT_SHORTAGE = 0.25
"""Of the pool's rate, that is tried where rate is not what limits it: a faster pool fills a batch sooner."""
STEP, STEPS_FORGIVEN = 0.01, 1
Z_90, FACTOR_LEAST = 1.645, 0.05


class What(enum.Enum):
    RENT = "rent"
    RELEASE = "release"
    PERIOD = "period"
    BOUND = "bound"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A machine that can be had, as the planner would see it. `low`, `high`: its rate over the expected one, 9 times of 10 between.
    `offer`: of the coordinator's, where a button can rent it; `room`: how many."""

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
    """A run as it is. `kappa`: now. `pool`: who works. `spare`: who is there and on the bill, and not needed by the plan.
    `usd_per_hour`: the whole bill, standby too; `learner_usd_per_hour`: beside it. `rate_error`: relative standard error of the
    pool's rate. `bias`, `reach`: by how much the wall clock differed from the planner's utilisation in this run, and the half-width
    in which it lies 9 times of 10."""

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
    """`usd_per_million_tokens`, `hours_left`: infinite where nothing is trained; None where lengths or the end are not known."""

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
    """The best three, of different kinds. All are weighed by the rates expected; intervals are worked out for those told."""
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
    """`pool` at work with `count` of the candidate, under `config`, at `usd_per_hour` in all."""

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
    """`by_rate`: the workers at work, by the end of their rates' interval."""

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
        """By rates at the middle (0), the low (-1) or the high (1) end of what is known of them."""
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
        """The bill, traffic of those at work with it."""
        workers = [self.by_id[one] for one in move.pool]
        more = [move.candidate.worker] * move.count if move.candidate is not None else []
        return move.usd_per_hour + egress_usd_per_hour(self.told.snapshot.learner, promise.kappa, [*workers, *more])

    def rank(self, promise: _Promise, move: _Move) -> tuple[int, float]:
        """The planner's order: steps of utilisation short of the target, then USD/h."""
        short = math.log(self.told.config.target_utilisation / max(promise.utilisation, UTILISATION_LEAST)) / STEP
        return max(0, math.ceil(short - 0.5)), round(self.usd_per_hour(move, promise), 6)

    def worth(self, stay: tuple[_Move, _Promise], one: tuple[_Move, _Promise]) -> tuple[bool, int, float]:
        """What to tell first: what reaches the target, for the least USD/h; then what gains most for a dollar. A wider bound,
        which learning must bear, comes last."""
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
    """What takes `value` at a utilisation of 1; the low end belongs to the high utilisation."""
    middle, least, most = (
        value / one if one > 1e-6 else math.inf for one in (utilisation.expected, utilisation.low, utilisation.high)
    )
    return Interval(middle, most, least)


def _at_work(worker: WorkerEstimate, factor: float) -> WorkerEstimate:
    """In the pool from the start, `factor` times as fast."""
    factor = max(factor, FACTOR_LEAST)
    return replace(
        worker, rollouts_per_s=worker.rollouts_per_s * factor, tokens_per_s=worker.tokens_per_s * factor,
        rollout_s_mean=worker.rollout_s_mean / factor, rollout_s_tail=worker.rollout_s_tail / factor,
        rollout_s_max=worker.rollout_s_max / factor, state=WorkerState.ACTIVE, is_pinned=False,
    )  # fmt: skip


# ---- actions


def _rents(weighing: _Weighing, candidates: Iterable[Candidate], now: _Promise) -> Iterator[_Move]:
    """The cheapest rate of each kind; as many as the pool lacks, or half. None where the target is reached."""
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
    """Whom the plan does not need."""
    told = weighing.told
    spare = tuple(one for one in told.spare if weighing.by_id[one].price_usd_per_hour > 0)
    if spare:
        saved = sum(weighing.by_id[one].price_usd_per_hour for one in spare)
        text, left = f"end {len(spare)} of {len(weighing.by_id)} workers", max(0.0, told.usd_per_hour - saved)
        yield _Move(What.RELEASE, text, told.pool - set(spare), left, told.config, count=len(spare), workers=spare)


def _settings(weighing: _Weighing, now: _Promise) -> Iterator[_Move]:
    """Another period where it is fixed; one more step of staleness where the target is missed."""
    told = weighing.told
    free = replace(told.config, fixed_kappa=0)
    yield _Move(
        What.PERIOD, f"publish every {{kappa}} steps, not every {told.kappa}", told.pool, told.usd_per_hour, free
    )
    bound = told.config.staleness_bound + 1
    if bound <= STALENESS_BOUND_MAX and now.utilisation < told.config.target_utilisation * (1 - STEP / 2):
        text, wider = f"restart with S = {bound}, if learning bears it", replace(free, staleness_bound=bound)
        yield _Move(What.BOUND, text, told.pool, told.usd_per_hour, wider)
