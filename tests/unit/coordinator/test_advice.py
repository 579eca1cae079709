"""The advice for each state of a run: the first sentence, what else to do, one utilisation and one end; and colours."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from echo2.base.clock import NO_REQUESTS
from echo2.coordinator.planning.advice import Act, RunNow, advise
from echo2.cost_model.plan import Limit, Term
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb
from tests.unit.cost_model.fleets import plan_of as plan

CSS = Path(__file__).parents[3] / "echo2" / "coordinator" / "web" / "static" / "page.css"
CONTRAST_LEAST = 4.5  # WCAG AA

LIVE = RunNow(
    hello=pb.LearnerHello(step_limit=100, rollouts_per_step=256),
    report=pb.LearnerReport(step=40, wait_s=0.4, utilisation=0.97), train_s=3.6, silent_s=1.0, open_leases=12,
    plan=plan(5.0, 5.0), predicted=0.98, alive=50, active=50, workers=50, usd_per_hour=52.05,
    usd_working_per_hour=49.0,
)  # fmt: skip


def with_learner(**facts: object) -> RunNow:
    """Facts of the run, or of the learner's report."""
    own = {name: facts.pop(name) for name in [*facts] if name in RunNow.__slots__}
    report = pb.LearnerReport()
    report.CopyFrom(LIVE.report)
    for name, value in facts.items():
        report.ClearField(name)
        (getattr(report, name).extend if name == "lengths" else lambda one, name=name: setattr(report, name, one))(
            value
        )  # type: ignore[misc]
    return replace(LIVE, report=report, **own)  # type: ignore[arg-type]


LACKS = "rollouts: 1 of 4 groups complete, 3 begun by workers, 0 not begun, 0 rewards due"
DUE = "rollouts: 0 of 4 groups complete, 0 begun by workers, 0 not begun, 193 rewards due"
PRICE = "3 on standby: it asks 2 USD/h, what spends the budget in an hour is 0.5: the operator may activate it"


CAPPED = plan(2.0, 5.0, pool=("a", "b"))
CAPPED = replace(CAPPED, terms=(*CAPPED.terms, Term(Limit.USD_PER_HOUR, 7.0, 10.0, "USD/h", 0.3)))
BUTTONS = {
    "Start the learner:": Act.MAKE_LINK, "Start a worker": Act.MAKE_LINK, "Add workers": Act.MAKE_LINK, "Drop": Act.DISMISS,
    "Stand by": Act.APPLY_PLAN, "Rent": Act.APPROVE,
}  # fmt: skip
"""What the first words of an advice give a button for."""
SAYS = [
    (RunNow(), "Start the learner: none has joined yet. One that was started loads its model first."),
    (with_learner(is_connected=False), "Start the learner again with the same command: it is away."),
    (with_learner(is_connected=False, left_because="DiskFull: no room"),
     "Mend what ended the learner, then start it again with the same command: DiskFull: no room"),
    (with_learner(silent_s=75.0), "Look at the learner: nothing is heard of it for 75 s"),
    (replace(LIVE, alive=0, active=0), "Start a worker: none is connected"),
    (replace(LIVE, alive=3, active=0, idle=PRICE), f"Put a worker to work: 3 workers connected, none active ({PRICE})."),
    (with_learner(waits_for=DUE, waits_s=60.0, rewards_due=193),
     "Give rewards more reward processes (a learner's machine with more cores), or another machine for rewards (Ray"),
    (with_learner(waits_for=DUE, waits_s=2.0, rewards_due=193, utilisation=0.3), "Give rewards more reward processes"),
    (with_learner(waits_for=LACKS, waits_s=90.0), f"Look at what is missing: the learner waits 90 s for {LACKS}."),
    (with_learner(waits_for=LACKS, waits_s=9.0), "Nothing to do: the learner trains 97% of the time"),
    (with_learner(prompts_exhausted=True, waits_for=LACKS),
     "Raise task.epochs or add prompts: they are used up, and the run ends after the groups in flight, about step 40 of"),
    (with_learner(equal_reward_steps=3, waits_for=DUE, waits_s=60.0, rewards_due=193),
     "Nothing is learned: every reward of the last 3 steps was 0; compare completions"),
    (with_learner(equal_reward_steps=3, tokens_max=16, lengths=[9, 16, 16, 16]),
     "Nothing is learned: every reward of the last 3 steps was 0; 75% of the completions were cut at 16 tokens: raise"),
    (with_learner(equal_reward_steps=4, reward_mean=1.0),
     "Nothing is left to learn: in the last 4 steps all rollouts of a prompt had the same reward (1 on average)"),
    (with_learner(equal_reward_steps=2), "Nothing to do: the learner trains 97% of the time"),
    (replace(LIVE, is_budget_spent=True, usd_budget=9), "Raise the budget to go on (page, or `echo2 ctl`): the budget of $9.00 is"),
    (replace(LIVE, spare=26, spare_usd_per_hour=44.69), "Drop 26 of 50 workers: $52.05 -> $7.36/h at the same utilisation (97%)."),
    (replace(LIVE, surplus=26, may_act=False), "Stand by 26 of 50 workers: $49.00 -> $7.36/h at the same utilisation (97%), once"),
    (replace(LIVE, wishes="Rent 2 x h100 (+$5.00/h)", may_act=False), "Rent 2 x h100 (+$5.00/h)."),
    (replace(with_learner(utilisation=0.4), plan=plan(2.0, 5.0)),
     "Add workers or raise S: the learner trains 40% of the time; workers make 28.4 of the 71.1 rollouts/s that"),
    (replace(with_learner(utilisation=0.4), plan=CAPPED), "Raise the cap or S, or take cheaper workers: the learner trains 40%"),
    (replace(with_learner(utilisation=0.4), plan=replace(plan(2.0, 5.0), binding=Limit.USD_BUDGET)), "Raise the budget to train"),
    (replace(with_learner(step=4, utilisation=0.4), plan=plan(2.0, 5.0)), "Nothing to do: the learner makes its first steps at"),
    (LIVE, "Nothing to do: the learner trains 97% of the time at $52.05/h."),
    (with_learner(step=0), "Nothing to do: the first step is on its way."),
    (with_learner(step=0, waits_for=LACKS, waits_s=300.0), "Look at what is missing: the learner waits 5 min for rollouts: 1 of 4"),
    (with_learner(step=0, waits_for=NO_REQUESTS, waits_s=9.0), "Start your trainer: nobody has asked for rollouts yet."),
    (with_learner(waits_for=NO_REQUESTS, waits_s=300.0), "Start your trainer, or end the run: the learner waits 5 min for"),
    (replace(with_learner(step=100, waits_for=LACKS), alive=0, active=0), "Nothing to do: the last step is made, and the"),
    (with_learner(is_finished=True), "Nothing to do: the last step is made, and the run is about to end."),
    (replace(LIVE, finished="run r is finished after 120 steps", is_connected=False, alive=0),
     "Run r is finished after 120 steps. Nothing that the run rented costs money any more; end what you rented by hand."),
    (replace(LIVE, finished="run r is finished after 120 steps", open_machines=1),
     "Run r is finished after 120 steps; 1 rented machine is still being given back."),
    (replace(LIVE, finished="run r is finished after 120 steps", open_machines=2),
     "Run r is finished after 120 steps; 2 rented machines are still being given back."),
]  # fmt: skip


@pytest.mark.parametrize(("run", "text"), SAYS)
def test_the_first_sentence_says_what_to_do_now(run: RunNow, text: str) -> None:
    told = advise(run).headline
    act = next((act for words, act in BUTTONS.items() if text.startswith(words)), Act.NOTHING)
    assert told.text.startswith(text) and told.act is act
    assert bool(told.label) is (act is not Act.NOTHING), "a button has a name, and only a button"
    is_well = run is LIVE or (bool(run.finished) and not run.open_machines)
    is_well = is_well or any(words in told.text for words in ("97% of the time", "first steps", "last step is made"))
    assert (told.kind == "good") is is_well, "green is a run that works, or one that is finished and paid"
    assert (advise(run).limits == "nothing any more") is (bool(run.finished) or "last step is made" in text)


def test_when_rewards_are_the_limit_no_workers_are_advised() -> None:
    """193 rewards are due and workers stand idle: whatever the plan lacks, more workers would wait with the others."""
    run = replace(
        with_learner(waits_for=DUE, waits_s=60.0, rewards_due=193, utilisation=0.3),
        plan=plan(2.0, 5.0),
        wishes="Rent 2",
    )
    told = advise(replace(run, may_act=False))
    assert len(told.steps) == 1 and "Ray" in told.headline.text and "More workers would not help" in told.headline.text
    assert told.limits == "rewards: 193 are due"


def test_rewards_that_the_plan_finds_too_slow_come_before_the_workers_that_are_missing_for_it() -> None:
    rewards = plan(2.0, 5.0, Limit.REWARDS, "name a Ray cluster").terms
    run = replace(with_learner(utilisation=0.4), plan=replace(plan(1.0, 5.0), terms=plan(1.0, 5.0).terms + rewards))
    (only,) = advise(run).steps
    assert only.text.startswith("Give rewards more reward processes")
    assert "reward processes judge 2 of the 5" in only.text


def test_steps_come_in_order_with_one_utilisation_one_end_and_what_is_assumed() -> None:
    short = replace(
        with_learner(utilisation=0.5),
        plan=plan(9.0, 5.0, Limit.STALENESS, "raise S to 6"),
        corrected="halved",
        unmeasured=2,
    )
    short = replace(short, plan=replace(short.plan, terms=(replace(short.plan.terms[0], slack=-0.8),)))
    told = advise(replace(short, wishes="Rent 1 x spot (+$1.00/h)", may_act=False))
    assert [one.act for one in told.steps] == [Act.APPROVE, Act.NOTHING]
    assert told.steps[1].text.startswith("Raise S to 6: the learner trains 50% of the time;")
    assert told.utilisation == 0.5 and told.hours_left == pytest.approx(60 * 3.6 / 0.5 / 3600)
    assert told.assumed[0] == "halved" and told.assumed[1].startswith("2 workers not measured yet")
    early = advise(with_learner(step=2, utilisation=0.1))
    assert early.utilisation == 0.98 and not early.is_measured, "before anything is measured, what the plan promises"
    assert told.is_measured
    limits = "nothing; nearest to its limit: workers make 5 rollouts/s, enough for the 5 that the learner needs"
    assert advise(LIVE).limits == limits


def test_a_paused_run_is_to_be_resumed_and_nothing_else() -> None:
    told = advise(replace(LIVE, paused="paused by the operator", active=0))
    assert [one.act for one in told.steps] == [Act.RESUME]
    assert told.hours_left is None and told.limits == "it stands still" and advise(LIVE).hours_left


def luminance(colour: str) -> float:
    digits = colour.lstrip("#")
    digits = "".join(2 * one for one in digits) if len(digits) == 3 else digits
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    red, green, blue = (x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_every_text_stands_out_from_what_is_behind_it() -> None:
    themes = [
        dict(re.findall(r"--([\w-]+):\s*(#[0-9a-f]+)", block))
        for block in re.findall(r":root[^{]*\{([^}]*)\}", CSS.read_text())
    ]
    themes = [theme for theme in themes if "ink" in theme]
    assert len(themes) == 3, "light, dark by the system, dark by choice"
    for theme in themes:
        pairs = [(text, behind) for text in ("ink", "soft", "accent") for behind in ("bg", "panel", "hover")]
        pairs += [(kind, f"{kind}-bg") for kind in ("good", "warn", "bad", "idle", "info")]
        pairs += [(kind, "panel") for kind in ("good", "warn", "bad", "second")]
        pairs += [("accent-ink", "accent"), ("panel", "bad")]
        lights = {pair: sorted(luminance(theme[name]) for name in pair) for pair in pairs}
        found = {pair: (high + 0.05) / (low + 0.05) for pair, (low, high) in lights.items()}
        assert not {pair: ratio for pair, ratio in found.items() if ratio < CONTRAST_LEAST}
