"""Writes the first sentence of the page: what the operator should do now, and the button for it. Pure.

Guarantees: one answer for every state of a run; if there is nothing to do, it says so. Leaves to others: what the buttons do
(runtime/commands), measuring.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

UTILISATION_SLACK = 0.05
"""A utilisation below its target by no more than this is noise, not something to act on."""


class Act(enum.Enum):
    """What the button does; NOTHING: there is none."""

    NOTHING = ""
    MAKE_LINK = "make_link"
    APPLY_PLAN = "apply_plan"
    APPROVE = "approve"
    DISMISS = "dismiss"


@dataclass(frozen=True, slots=True)
class Headline:
    """`kind`: good, info, warn or bad."""

    text: str
    kind: str
    act: Act = Act.NOTHING
    label: str = ""


@dataclass(frozen=True, slots=True)
class HeadlineFacts:
    """What the sentence depends on. `spare`: workers on standby that cost money, `spare_usd_per_hour` together. `surplus`: active
    workers that the plan would put on standby; the fleet would then cost `plan_usd_per_hour`. `wishes`: machines to rent or
    release that wait for the operator's approval. `shortage`: what limits the plan, in words; empty if its terms hold."""

    finished: str = ""
    open_machines: int = 0
    has_learner: bool = False
    is_learner_there: bool = False
    step: int = 0
    utilisation: float = 0.0
    predicted: float = 0.0
    target: float = 0.98
    alive: int = 0
    workers: int = 0
    is_budget_spent: bool = False
    usd_budget: float = 0.0
    usd_per_hour: float = 0.0
    spare: int = 0
    spare_usd_per_hour: float = 0.0
    surplus: int = 0
    plan_usd_per_hour: float = 0.0
    wishes: str = ""
    may_act: bool = True
    shortage: str = ""


def headline(run: HeadlineFacts) -> Headline:
    """The sentence about the most urgent thing."""
    if run.finished:
        left = f"; {_count(run.open_machines, 'rented machine')} is still being given back" if run.open_machines else ""
        return Headline(
            f"{_sentence(run.finished)}{left or '. Nothing costs money any more'}.", "info" if left else "good"
        )
    if not run.has_learner:
        return Headline("Start the learner: no learner has joined yet.", "info", Act.MAKE_LINK, "Make a join link")
    if not run.is_learner_there:
        text = "Start the learner again with the same command: it is away. It goes on from its last checkpoint."
        return Headline(text, "bad")
    if run.is_budget_spent:
        return Headline(
            f"Raise coordinator.usd_budget to go on: ${run.usd_budget:,.2f} are spent and all workers stand by.", "bad"
        )
    if not run.alive:
        text = "Start a worker: none is connected, so the learner has nothing to train on."
        return Headline(text, "bad", Act.MAKE_LINK, "Make a join link")
    if run.wishes and not run.may_act:
        return Headline(f"{run.wishes}.", "warn", Act.APPROVE, "Do it")
    return _of_a_running_fleet(run)


def _of_a_running_fleet(run: HeadlineFacts) -> Headline:
    same = f"at the same utilisation ({run.predicted:.0%})"
    if run.surplus and not run.may_act:
        return Headline(
            f"Stand by {run.surplus} of {run.workers} workers: ${run.usd_per_hour:.2f} -> ${run.plan_usd_per_hour:.2f}/h {same}.",
            "warn", Act.APPLY_PLAN, "Apply the plan",
        )  # fmt: skip
    if run.spare and run.spare_usd_per_hour > 0 and not run.shortage:
        less = run.usd_per_hour - run.spare_usd_per_hour
        return Headline(
            f"Drop {run.spare} of {run.workers} workers: ${run.usd_per_hour:.2f} -> ${less:.2f}/h {same}.",
            "warn", Act.DISMISS, "Send them home",
        )  # fmt: skip
    if run.step and run.shortage and run.utilisation < run.target - UTILISATION_SLACK:
        waits = f"the learner trains {run.utilisation:.0%} of the time"
        return Headline(f"Add workers or raise S: {waits}; {run.shortage}.", "warn", Act.MAKE_LINK, "Make a join link")
    if not run.step:
        return Headline("Nothing to do: the first step is on its way.", "info")
    return Headline(
        f"Nothing to do: the learner trains {run.utilisation:.0%} of the time at ${run.usd_per_hour:.2f}/h.", "good"
    )


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("s" if number != 1 else "")
