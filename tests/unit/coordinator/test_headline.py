"""The page's first sentence, for each state of a run; and that its colours can be read."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from echo2.coordinator.headline import Act, HeadlineFacts, headline
from echo2.coordinator.runtime.web.state import seconds_per_step
from echo2.coordinator.saved import CurvePoint

CSS = Path(__file__).parents[3] / "echo2" / "coordinator" / "runtime" / "web" / "static" / "page.css"
CONTRAST_LEAST = 4.5  # WCAG AA

LIVE = HeadlineFacts(
    has_learner=True, is_learner_there=True, step=40, utilisation=0.97, predicted=0.98, alive=50, workers=50,
    usd_per_hour=52.05,
)  # fmt: skip


@pytest.mark.parametrize(
    ("run", "text", "act"),
    [
        (HeadlineFacts(), "Start the learner: no learner has joined yet.", Act.MAKE_LINK),
        (
            replace(LIVE, is_learner_there=False),
            "Start the learner again with the same command: it is away.",
            Act.NOTHING,
        ),
        (replace(LIVE, alive=0), "Start a worker: none is connected", Act.MAKE_LINK),
        (
            replace(LIVE, is_budget_spent=True, usd_budget=100),
            "Raise coordinator.usd_budget to go on: $100.00 are spent",
            Act.NOTHING,
        ),
        (
            replace(LIVE, spare=26, spare_usd_per_hour=44.69),
            "Drop 26 of 50 workers: $52.05 -> $7.36/h at the same utilisation (98%).",
            Act.DISMISS,
        ),
        (
            replace(LIVE, surplus=26, plan_usd_per_hour=7.36, may_act=False),
            "Stand by 26 of 50 workers: $52.05 -> $7.36/h at the same utilisation (98%).",
            Act.APPLY_PLAN,
        ),
        (replace(LIVE, wishes="Rent 2 x h100 (+$5.00/h)", may_act=False), "Rent 2 x h100 (+$5.00/h).", Act.APPROVE),
        (
            replace(LIVE, utilisation=0.4, shortage="workers make 2 of the 5 rollouts/s that it needs"),
            "Add workers or raise S: the learner trains 40% of the time; workers make 2 of the 5 rollouts/s that it needs.",
            Act.MAKE_LINK,
        ),
        (LIVE, "Nothing to do: the learner trains 97% of the time at $52.05/h.", Act.NOTHING),
        (replace(LIVE, step=0), "Nothing to do: the first step is on its way.", Act.NOTHING),
        (
            replace(LIVE, finished="run r is finished after 120 steps", is_learner_there=False, alive=0),
            "Run r is finished after 120 steps. Nothing costs money any more.",
            Act.NOTHING,
        ),
        (
            replace(LIVE, finished="run r is finished after 120 steps", open_machines=1),
            "Run r is finished after 120 steps; 1 rented machine is still being given back.",
            Act.NOTHING,
        ),
    ],
)
def test_the_first_sentence_says_what_to_do_now(run: HeadlineFacts, text: str, act: Act) -> None:
    told = headline(run)
    assert told.text.startswith(text) and told.act is act
    assert bool(told.label) is (act is not Act.NOTHING), "a button has a name, and only a button"


def test_the_time_of_a_step_is_that_of_the_newest_steps() -> None:
    points = [CurvePoint(10.0 * n if n < 5 else 40 + 2.0 * (n - 4), n, 0.5, None, 0.9, 0.9, 0, 0) for n in range(40)]
    assert seconds_per_step(points) == pytest.approx(2.0)
    assert seconds_per_step(points[:1]) is None and seconds_per_step([]) is None


def luminance(colour: str) -> float:
    digits = colour.lstrip("#")
    digits = "".join(2 * one for one in digits) if len(digits) == 3 else digits
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    red, green, blue = (x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


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
        pairs += [(kind, "panel") for kind in ("good", "warn", "bad", "second")] + [
            ("accent-ink", "accent"),
            ("panel", "bad"),
        ]
        found = {pair: contrast(theme[pair[0]], theme[pair[1]]) for pair in pairs}
        assert not {pair: ratio for pair, ratio in found.items() if ratio < CONTRAST_LEAST}
