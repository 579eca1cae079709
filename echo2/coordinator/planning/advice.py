"""The adviser: what stops or limits the run, what the operator should do next, in order, how the run goes, and what waits. Pure.

`advise` is a function of one snapshot of the run (`RunNow`) and the plan; nothing keeps advice. Guarantees: one verdict for
every state of a run; if there is nothing to do, it says so, and it says so only while workers work and the learner waits for
nothing unusual; one number for the utilisation and one for the end, measured where there is something to measure; whatever waits in
the lease book is reported.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from echo2.base.clock import NO_REQUESTS
from echo2.base.ids import PeerId
from echo2.base.units import counted, format_seconds
from echo2.coordinator.fleet.members import Activation, Liveness, Member
from echo2.coordinator.leases.book import LeaseBook
from echo2.coordinator.leases.lease import Lease, OpenGroup
from echo2.cost_model.plan import Limit, Plan, Term
from echo2.cost_model.snapshot import (
    STALENESS_BOUND_MAX,
    FleetSnapshot,
    PlanConfig,
    WorkerEstimate,
    WorkerState,
    checked,
)
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb

UTILISATION_SLACK = 0.05  # a utilisation below its target by no more than this is noise, not something to act on
LONG_STEPS, LONG_S_MIN = 3.0, 15.0
"""A wait is unusual if it is longer than this many steps take, and this many seconds."""
FIRST_STEP_S = 180.0  # before the first step: workers load the model and generate whole rollouts from nothing
MORE_REWARDS = (
    "Give rewards more reward processes (a learner's machine with more cores), or another machine for rewards (Ray, by "
    "task.ray)"
)
EQUAL_REWARD_STEPS_MAX = 3
"""Where one rollout in a hundred is rewarded, three steps of 64 have no reward one time in seven: still worth a word."""
CUT_SHARE_MIN = 0.25  # fewer cut completions are usual: a few prompts are hard
MEASURED_STEPS = 5  # from so many steps on, the measured utilisation is told, not the predicted one


class Act(enum.Enum):
    """What the button does; NOTHING: there is none."""

    NOTHING = ""
    MAKE_LINK = "make_link"
    APPLY_PLAN = "apply_plan"
    APPROVE = "approve"
    DISMISS = "dismiss"
    RESUME = "resume"


@dataclass(frozen=True, slots=True)
class ToDo:
    """One thing to do. `kind` of the first one is the verdict: good, info, warn or bad."""

    text: str
    kind: str
    act: Act = Act.NOTHING
    label: str = ""


@dataclass(frozen=True, slots=True)
class RunAdvice:
    """`steps`: what to do, most urgent first; the first is the headline. `limits`: what stops or limits the run. `hours_left`: None
    if it is not known. `assumed`: what is assumed rather than measured, each with how to set it. `is_measured`: the utilisation is
    not the predicted one."""

    steps: tuple[ToDo, ...]
    limits: str
    utilisation: float
    hours_left: float | None
    assumed: tuple[str, ...] = ()
    is_measured: bool = False

    @property
    def headline(self) -> ToDo:
        return self.steps[0]


@dataclass(frozen=True, slots=True)
class RunNow:
    """What the advice depends on. `hello`: None before the first learner. `left_because`: why it left, if by an error.
    `silent_s`: since its last message. `train_s`: what a step takes without waiting. `waits_s`: for how long it has waited for
    what its next step lacks. `tokens_max`: sampling.max_new_tokens. `plan_waits_for`: what a first plan lacks. `idle`: why
    connected workers get no work, if none does. `usd_working_per_hour`: of those that work. `spare`: workers on standby that cost
    money, `spare_usd_per_hour` together. `predicted`: the utilisation, 0 while too little was measured. `surplus`: active workers
    that the plan would put on standby. `wishes`: machines to rent or release that wait for the operator's approval. `corrected`:
    why estimates are corrected. `unmeasured`: active workers whose rate is not known."""

    finished: str = ""
    is_cut_short: bool = False
    paused: str = ""
    open_machines: int = 0
    hello: pb.LearnerHello | None = None
    report: pb.LearnerReport = field(default_factory=pb.LearnerReport)
    is_connected: bool = True
    left_because: str = ""
    silent_s: float = 0.0
    silent_s_max: float = 60.0
    train_s: float = 0.0
    waits_s: float = 0.0
    open_leases: int = 0
    tokens_max: int = 0
    plan: Plan | None = None
    predicted: float = 0.0
    plan_waits_for: str = ""
    target: float = 0.98
    alive: int = 0
    active: int = 0
    idle: str = ""
    workers: int = 0
    is_budget_spent: bool = False
    usd_budget: float = math.inf
    usd_per_hour: float = 0.0
    usd_working_per_hour: float = 0.0
    spare: int = 0
    spare_usd_per_hour: float = 0.0
    surplus: int = 0
    wishes: str = ""
    may_act: bool = True
    corrected: str = ""
    unmeasured: int = 0

    @property
    def waits_long(self) -> bool:
        usual_s = LONG_STEPS * (self.train_s + self.report.wait_s) if self.report.step else FIRST_STEP_S
        return bool(self.report.waits_for) and self.waits_s > max(LONG_S_MIN, usual_s)

    @property
    def waits_for_rewards(self) -> bool:
        """Whether rewards rather than workers keep the learner waiting: half a step's are due, or nothing else is."""
        due, batch = self.report.rewards_due, self.hello.rollouts_per_step if self.hello is not None else 0
        return bool(self.report.waits_for) and due > 0 and (2 * due >= max(1, batch) or not self.open_leases)

    @property
    def cut_share(self) -> float:
        """Of the newest completions, those that ended at the limit."""
        lengths = self.report.lengths
        return sum(mean == self.tokens_max for mean in lengths) / max(1, len(lengths))

    @property
    def broken(self) -> tuple[Term, ...]:
        """The plan's broken terms, a cause before what follows from it: with too few rewards, a pool has no more rate than they can
        use; too few workers fill a batch too slowly, which breaks the staleness term as well. Else the most limiting first."""
        terms = [term for term in self.plan.terms if not term.is_met] if self.plan else []
        causes = (Limit.REWARDS, Limit.THROUGHPUT)
        return tuple(sorted(terms, key=lambda term: (*(term.limit_kind is not cause for cause in causes), term.slack)))

    @property
    def is_capped(self) -> bool:
        """Whether the cap leaves less than a worker of the pool costs: more of them would only stand by, on the bill."""
        count, terms = (len(self.plan.pool), self.plan.terms) if self.plan else (0, ())
        return any(t.limit_kind is Limit.USD_PER_HOUR and (t.limit - t.value) * count < t.value for t in terms)

    @property
    def is_ending(self) -> bool:
        """Whether its last step is made: the learner writes the model and serves the last version, and workers leave."""
        return self.report.is_finished or bool(self.hello and 0 < self.hello.step_limit <= self.report.step)

    @property
    def is_measured(self) -> bool:
        return self.report.step >= MEASURED_STEPS and self.report.utilisation > 0

    @property
    def utilisation(self) -> float:
        return self.report.utilisation if self.is_measured else self.predicted

    @property
    def is_short(self) -> bool:
        """Whether the learner trains so much less than it should that something is to be done."""
        return self.is_measured and self.report.utilisation < self.target - UTILISATION_SLACK

    @property
    def trains(self) -> str:
        return f"the learner trains {self.report.utilisation:.0%} of the time"

    def said(self, term: Term) -> str:
        """A broken term in words, by what was measured rather than predicted where that is the same fact."""
        if term.limit_kind is not Limit.THROUGHPUT or not self.is_short or self.train_s <= 0 or self.hello is None:
            return term.text
        most = self.hello.rollouts_per_step / self.train_s
        return f"workers make {most * self.report.utilisation:.3g} of the {most:.3g} rollouts/s that the learner needs"


def advise(run: RunNow) -> RunAdvice:
    stopped = _what_stops(run)
    steps = [stopped] if stopped is not None else [*_what_helps(run)]
    if not steps:
        steps = [_nothing_to_do(run)]
    hours_left = None if stopped is not None else _hours_left(run)
    has_limits = stopped is None or run.finished or run.is_ending or run.hello is None
    limits = _limits(run) if has_limits else "it stands still"
    return RunAdvice(tuple(steps), limits, run.utilisation, hours_left, tuple(_assumed(run)), run.is_measured)


def idle_text(members: Iterable[Member]) -> str:
    """Why connected workers get no work, the two most frequent reasons first; empty if one of them works or none is connected."""
    alive = [member for member in members if member.last_liveness is Liveness.ALIVE]
    if not alive or any(member.last_activation is Activation.ACTIVE for member in alive):
        return ""
    reasons = Counter(f"{member.activation.value}: {member.activation_reason}" for member in alive)
    return "; ".join(f"{count} on {reason}" for reason, count in reasons.most_common(2))


def _what_stops(run: RunNow) -> ToDo | None:
    """What keeps the run from going on at all, or has ended it."""
    if run.finished:
        kind = "bad" if run.is_cut_short else "info" if run.open_machines else "good"
        left = ". Nothing that the run rented costs money any more; end what you rented by hand"
        if run.open_machines:
            are = "is" if run.open_machines == 1 else "are"
            left = f"; {counted(run.open_machines, 'rented machine')} {are} still being given back"
        return ToDo(f"{run.finished[:1].upper()}{run.finished[1:]}{left}.", kind)
    if run.paused:
        return ToDo(f"Resume the run when you want it to go on: {run.paused}.", "warn", Act.RESUME, "Resume")
    if run.hello is None:
        text = "Start the learner: none has joined yet. One that was started loads its model first."
        return ToDo(text, "info", Act.MAKE_LINK, "Make a join link")
    if not run.is_connected:
        why = "Start the learner again with the same command: it is away. One that was started loads its last checkpoint first."
        if run.left_because:
            why = f"Mend what ended the learner, then start it again with the same command: {run.left_because}"
        return ToDo(why, "bad")
    if run.is_ending:
        return ToDo("Nothing to do: the last step is made, and the run is about to end.", "good")
    if run.is_budget_spent:
        spent = f"the budget of ${run.usd_budget:,.2f} is spent and all workers stand by"
        return ToDo(f"Raise the budget to go on (page, or `echo2 ctl`): {spent}.", "bad")
    if not run.alive:
        text = "Start a worker: none is connected, so the learner has nothing to train on."
        return ToDo(text, "bad", Act.MAKE_LINK, "Make a join link")
    if run.silent_s > run.silent_s_max:
        silent = f"nothing is heard of it for {format_seconds(run.silent_s)}, though its stream stands"
        return ToDo(f"Look at the learner: {silent}.", "bad")
    if not run.active and not (run.wishes and not run.may_act):
        why = f" ({run.idle})" if run.idle else ""
        return ToDo(f"Put a worker to work: {counted(run.alive, 'worker')} connected, none active{why}.", "bad")
    return None


def _what_helps(run: RunNow) -> Iterable[ToDo]:
    """What the operator can do for a run that goes on, most urgent first. Rewards and prompts come before workers: more workers
    would only wait with the others."""
    report, same = run.report, "at the same utilisation" + (f" ({run.utilisation:.0%})" if run.utilisation else "")
    if report.prompts_exhausted:
        limit = run.hello.step_limit if run.hello is not None else 0
        yield ToDo(
            "Raise task.epochs or add prompts: they are used up, and the run ends after the groups in flight, about step "
            f"{report.step} of {limit}.", "warn",
        )  # fmt: skip
        return
    if report.equal_reward_steps >= EQUAL_REWARD_STEPS_MAX:
        yield _equal_rewards(run)
        return
    if run.waits_for_rewards and (run.waits_long or run.is_short):
        due = f"{report.rewards_due} rewards are due, and the learner has waited {format_seconds(run.waits_s)} for them"
        yield ToDo(f"{MORE_REWARDS}: {due}. More workers would not help.", "bad" if run.waits_long else "warn")
        return
    if run.is_short and run.broken and run.broken[0].limit_kind is Limit.REWARDS:
        yield ToDo(f"{MORE_REWARDS}: {run.trains}; {run.broken[0].text}. More workers would not help.", "warn")
        return
    if run.waits_long:
        waits = f"the learner waits {format_seconds(run.waits_s)} for {report.waits_for}"
        is_asked = report.waits_for != NO_REQUESTS
        what = "Look at what is missing" if is_asked else "Start your trainer, or end the run"
        yield ToDo(f"{what}: {waits}.", "bad" if is_asked else "warn")
    if run.wishes and not run.may_act:
        yield ToDo(f"{run.wishes}.", "warn", Act.APPROVE, "Do it")
    if run.surplus and not run.may_act and run.plan is not None:
        less = f"${run.usd_working_per_hour:.2f} -> ${run.plan.usd_per_hour:.2f}/h {same}, once their machines are given back"
        yield ToDo(
            f"Stand by {run.surplus} of {run.workers} workers: {less}.", "warn", Act.APPLY_PLAN, "Apply the plan"
        )
    if run.spare and run.spare_usd_per_hour > 0 and run.plan is not None and not run.broken:
        less = f"${run.usd_per_hour:.2f} -> ${run.usd_per_hour - run.spare_usd_per_hour:.2f}/h {same}"
        yield ToDo(f"Drop {run.spare} of {run.workers} workers: {less}.", "warn", Act.DISMISS, "Send them home")
    if run.is_short and run.plan is not None and run.plan.binding is Limit.USD_BUDGET:
        yield ToDo(f"Raise the budget to train faster: {run.trains}, and it pays for no busier pool.", "warn")
    elif run.is_short and run.plan is not None:
        for term in run.broken:
            is_rate = term.limit_kind is Limit.THROUGHPUT and run.plan.could_use_more
            what = "Add workers or raise S" if is_rate else (term.remedy or f"Ease {term.limit_kind.value}")
            if is_rate and run.is_capped:
                what = "Raise the cap or S, or take cheaper workers"
            button = (Act.MAKE_LINK, "Make a join link") if is_rate and not run.is_capped else (Act.NOTHING, "")
            yield ToDo(f"{what[:1].upper()}{what[1:]}: {run.trains}; {run.said(term)}.", "warn", *button)


def _equal_rewards(run: RunNow) -> ToDo:
    """For many steps no group has had rewards that differ."""
    steps, reward = f"{run.report.equal_reward_steps} steps", run.report.reward_mean
    if reward:
        equal = f"in the last {steps} all rollouts of a prompt had the same reward ({reward:.3g} on average)"
        change = "end the run, or take other prompts, more rollouts a prompt or a higher sampling.temperature"
        return ToDo(f"Nothing is left to learn: {equal}; {change}.", "warn")
    change = (
        "compare completions and expected answers (`echo2 samples`), then take easier prompts or longer completions"
    )
    if run.cut_share >= CUT_SHARE_MIN:
        cut = f"{run.cut_share:.0%} of the completions were cut at {run.tokens_max} tokens"
        change = f"{cut}: raise sampling.max_new_tokens, or ask for shorter answers (`echo2 samples` shows them)"
    return ToDo(f"Nothing is learned: every reward of the last {steps} was 0; {change}.", "bad")


def _nothing_to_do(run: RunNow) -> ToDo:
    if not run.report.step:
        if run.report.waits_for == NO_REQUESTS:
            return ToDo("Start your trainer: nobody has asked for rollouts yet.", "info")
        waits = f": the learner waits for {run.report.waits_for}" if run.report.waits_for else ""
        return ToDo(f"Nothing to do: the first step is on its way{waits}.", "info")
    if not run.is_measured:
        return ToDo(f"Nothing to do: the learner makes its first steps at ${run.usd_per_hour:.2f}/h.", "good")
    return ToDo(f"Nothing to do: {run.trains} at ${run.usd_per_hour:.2f}/h.", "info" if run.is_short else "good")


def _limits(run: RunNow) -> str:
    """What limits the run, in words: each broken term, most limiting first; if all hold, the tightest."""
    if run.finished or run.is_ending:
        return "nothing any more"
    if run.waits_for_rewards:
        return f"rewards: {run.report.rewards_due} are due"
    if run.plan is None:
        return f"not known before {run.plan_waits_for or 'a first plan'}"
    if run.broken:
        return "; ".join(run.said(term) for term in run.broken)
    return f"nothing; nearest to its limit: {run.plan.binding_term.text}"


def _hours_left(run: RunNow) -> float | None:
    left = run.hello.step_limit - run.report.step if run.hello is not None else 0
    if left <= 0 or run.train_s <= 0 or run.utilisation <= 0:
        return None
    return left * run.train_s / run.utilisation / 3600


def _assumed(run: RunNow) -> Iterable[str]:
    if run.corrected:
        yield run.corrected
    if run.unmeasured:
        yield f"{counted(run.unmeasured, 'worker')} not measured yet: taken as fast as others, scaled by their data sheets"
    if run.usd_per_hour > 0:
        declared = "worker.price_usd_per_hour, offers file"
        yield f"prices are what workers and offers declare ({declared}); traffic costs typical rates of mid 2026"


# ---- what if


WHAT_IF = {
    "staleness_bound": STALENESS_BOUND_MAX, "uplink_factor": 1e4, "fleet_size": 2000, "target_utilisation": 1.0,
    "usd_per_hour_cap": 1e9,
}  # fmt: skip
"""The numbers that can be changed, and the most of each."""


def what_if(
    snapshot: FleetSnapshot, config: PlanConfig, changed: Mapping[str, float]
) -> tuple[FleetSnapshot, PlanConfig]:
    """What the planner is to be asked if some numbers were others; one of 0 stays as it is. `uplink_factor` scales the learner's
    uplink. `fleet_size` sets the number of workers: a smaller fleet keeps those that are cheapest per rollout, a larger one adds
    copies of them. ConfigError for a number out of range."""
    for name, most in WHAT_IF.items():
        checked("what if", name, changed[name], 0, most)
    bound, link = int(changed["staleness_bound"]) or config.staleness_bound, snapshot.learner.link
    config = replace(
        config, staleness_bound=bound, fixed_kappa=min(config.fixed_kappa, bound),
        target_utilisation=changed["target_utilisation"] or config.target_utilisation,
        usd_per_hour_cap=changed["usd_per_hour_cap"] or config.usd_per_hour_cap,
    )  # fmt: skip
    link = replace(link, uplink_bytes_per_s=link.uplink_bytes_per_s * (changed["uplink_factor"] or 1.0))
    size, workers = int(changed["fleet_size"]), snapshot.workers
    workers = _fleet_of(workers, size) if size else workers
    return replace(snapshot, learner=replace(snapshot.learner, link=link), workers=workers), config


def _fleet_of(workers: tuple[WorkerEstimate, ...], size: int) -> tuple[WorkerEstimate, ...]:
    usable = [worker for worker in workers if worker.state is not WorkerState.UNAVAILABLE] or list(workers)
    best = sorted(usable, key=lambda worker: (worker.price_usd_per_hour / worker.rollouts_per_s, worker.worker_id))
    fleet = best[:size]
    for index in range(size - len(fleet)):
        like = best[index % len(best)]
        copy_id = PeerId(f"{like.worker_id}+{index // len(best) + 1}")
        fleet.append(replace(like, worker_id=copy_id, state=WorkerState.STANDBY, is_pinned=False))
    return tuple(fleet)


# ---- why groups wait, and workers get none


def slowest(book: LeaseBook, now: float, name_of: Callable[[PeerId], str] = str) -> str:
    """The workers whose leases have stood still longest (up to three); empty if every lease makes progress."""
    return ", ".join(f"{_leases(leases)} on {name_of(worker)}" for worker, leases in _slow(book, now)[:3])


def lease_waits(book: LeaseBook, now: float, name_of: Callable[[PeerId], str] = str) -> list[tuple[str, float]]:
    waits: list[tuple[str, float]] = []
    first = book.first_queued
    if first is not None:
        waits.append((f"{counted(book.queued, 'group')} without a worker: {_why(book, first, now)}", first.since))
    for worker_id, leases in _slow(book, now)[:8]:
        text = f"{_leases(leases)} on {name_of(worker_id)} without progress at {sum(lease.tokens for lease in leases)} tokens"
        waits.append((text, leases[0].progress_at))
    for worker_id, record in book.records.barred(now)[:8]:
        if text := bar_text(book, worker_id, now):
            waits.append((f"{name_of(worker_id)} is {text}", record.barred_at))
    return waits


def bar_text(book: LeaseBook, worker_id: PeerId, now: float) -> str:
    """For how long the worker is barred by what it failed, and why; empty if it is not."""
    record = book.records.of(worker_id)
    if now >= record.barred_until or not book.records.is_barred(worker_id, book.allowed, now):
        return ""
    return f"given no leases for {record.barred_until - record.barred_at:.0f} s: {record.why}"


def why_no_lease(book: LeaseBook, member: Member, now: float) -> str:
    """Why the worker is given no lease now, in one sentence; empty if it can be given one, or has gone. The only place that
    decides what is said: its liveness; what operator, price and plan say (`Member.activation_reason`); what it failed (`bar_text`);
    what it may hold (`LeaseBook.limit_of`); what waits."""
    worker_id = member.peer_id
    if member.last_liveness is Liveness.GONE:
        return ""
    if member.last_liveness is Liveness.SUSPECT:
        return "nothing is heard of it"
    if member.activation is not Activation.ACTIVE:
        return f"{member.activation.value}: {member.activation_reason}"
    if barred := bar_text(book, worker_id, now):
        return barred
    request = book.wanting.get(worker_id)
    if request is None:
        held = book.lease_count(worker_id)
        return f"it asks for none: it is full with {counted(held, 'lease')}" if held else "it does not ask for any yet"
    if limit := book.limit_of(worker_id):
        return limit
    if not book.queued:
        return "no group waits for a worker"
    if not book.has_work_for([worker_id]):
        return f"no group that waits may be sampled at version {request.version}, which it has"
    return ""


def _leases(leases: list[Lease]) -> str:
    return f"{len(leases)} leases" if len(leases) > 1 else f"lease {leases[0].lease_id}"


def _slow(book: LeaseBook, now: float) -> list[tuple[PeerId, list[Lease]]]:
    """Leases without progress for more than a quarter of the timeout, by worker, longest first."""
    by_worker: dict[PeerId, list[Lease]] = {}
    for lease in sorted(book.leases.values(), key=lambda lease: lease.progress_at):
        if now - lease.progress_at <= book.rules.lease_timeout_s / 4:
            break
        by_worker.setdefault(lease.worker_id, []).append(lease)
    return list(by_worker.items())


def _why(book: LeaseBook, group: OpenGroup, now: float) -> str:
    active = book.allowed
    allowed = [(worker, request) for worker, request in book.wanting.items() if worker in active]
    need = group.spec.consume_step - book.rules.staleness_bound
    if now < group.not_before:
        return f"the learner refused the last attempt at {group.spec.group_id}"
    if not active:
        return "no worker is active"
    if not allowed:
        return f"all {len(active)} active workers are full"
    exact = group.spec.exact_version
    if exact is not None and all(request.version != exact for _, request in allowed):
        return f"it is an evaluation of version {exact}, at which none of {len(allowed)} willing workers is"
    newest = max(request.version for _, request in allowed)
    if exact is None and newest < need:
        return f"it takes version {need} or newer, the newest of {len(allowed)} willing workers is {newest}"
    if not book.open_requests():
        return f"{counted(len(allowed), 'willing worker')} must deliver what they hold before they are given more"
    return f"{len(allowed)} willing workers lost or refused the group at its front a moment ago"
