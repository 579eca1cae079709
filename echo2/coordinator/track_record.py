"""Compares predictions that were acted on with what happened: utilisation by the wall clock, workers' rates, the finish time.

A plan that is carried out opens a prediction of utilisation. After `WINDOW_STEPS` steps, or when a plan with another pool or
period replaces it, the prediction is compared with the seconds that steps took over all seconds that passed, so waits,
evaluations, checkpoints and restarts of the learner count. The misses so far shift the next prediction (`expected`), and the
spread that remains gives its interval (Student's t): intervals come from this run's own misses. The current window counts by the
share of it that has passed, so that the first steps already have an effect. Guarantees: no IO; bounded memory; saved records that
make no sense are left out. Leaves to others: the model's prediction (cost_model), saving (runtime/remembering).
"""

from __future__ import annotations

import enum
import json
import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from echo2.cost_model.next_actions import Interval
from echo2.cost_model.plan import Plan
from echo2.cost_model.rates import t_quantile

RECORDS_MAX = 256
OPEN_RATES_MAX = 1024
WINDOW_STEPS, STEPS_LEAST, STEPS_OPEN = 16, 8, 4
NEWEST = 16
"""Only so many of the newest misses count, because the run changes."""
PRIOR_WEIGHT, PRIOR_SPREAD, FREEDOM = 0.5, 0.04, 2.0
"""The prior: as if half a window had shown no bias, and two windows a spread of four percentage points."""
SHOWN = 8
COVERAGE = 0.9
FINISH_SPREAD = 0.15


class Quantity(enum.Enum):
    UTILISATION = "utilisation"
    RATE = "rate"
    FINISH = "finish"


@dataclass(frozen=True, slots=True)
class KeptPrediction:
    """One prediction and its outcome. `about`: what was acted on. Units of `predicted` and `measured`: for a finish, seconds from
    `at`; for a rate, rollouts/s."""

    what: str
    about: str
    at: float
    predicted: float
    low: float
    high: float
    measured: float
    measured_at: float

    @property
    def is_held(self) -> bool:
        return self.low <= self.measured <= self.high

    @property
    def error(self) -> float:
        """The miss: for a utilisation the difference, else relative to the prediction."""
        miss = self.measured - self.predicted
        return miss if self.what == Quantity.UTILISATION.value else miss / max(self.predicted, 1e-9)


@dataclass(slots=True)
class _OpenPrediction:
    """`model`: the planner's prediction, before this run's misses are added. `began`: number and time of the first step that ended
    after the prediction, and the learner's busy seconds by then; None before that."""

    about: str
    at: float
    model: float
    promised: Interval
    key: tuple[Any, ...]
    began: tuple[int, float, float] | None = None


@dataclass(slots=True)
class TrackRecord:
    """`misses`: measured utilisation minus the model's."""

    records: deque[KeptPrediction] = field(default_factory=lambda: deque(maxlen=RECORDS_MAX))
    misses: deque[float] = field(default_factory=lambda: deque(maxlen=NEWEST))
    changes: int = 0
    _plan: _OpenPrediction | None = None
    _finish: _OpenPrediction | None = None
    _rates: dict[str, tuple[float, Interval, str]] = field(default_factory=dict)
    _step: int = 0
    _step_at: float = 0.0
    _step_s: float = 0.0
    _busy_s: float = 0.0

    # ---- what is expected

    @property
    def bias(self) -> float:
        """What to add to the planner's utilisation to get that of the wall clock."""
        weight, miss = self._open_miss()
        return (sum(self.misses) + weight * miss) / (len(self.misses) + weight + PRIOR_WEIGHT)

    @property
    def reach(self) -> float:
        """The half-width of an interval that contains the wall clock's utilisation 9 times out of 10."""
        bias, (open_weight, open_miss) = self.bias, self._open_miss()
        weight = len(self.misses) + open_weight + FREEDOM
        left = sum((one - bias) ** 2 for one in self.misses) + open_weight * (open_miss - bias) ** 2
        left += FREEDOM * PRIOR_SPREAD**2
        return math.sqrt(left / weight) * t_quantile((1 + COVERAGE) / 2, weight)

    def _open_miss(self) -> tuple[float, float]:
        """The current window's share of a whole one, and the wall clock's utilisation in it so far minus the model's."""
        one = self._plan
        steps = self._step - one.began[0] if one is not None and one.began is not None else 0
        if one is None or steps < STEPS_OPEN:
            return 0.0, 0.0
        return min(1.0, steps / WINDOW_STEPS), self._share(one) - one.model

    def _share(self, one: _OpenPrediction) -> float:
        """The share of the time since `one` began that the learner has trained."""
        assert one.began is not None, "asked for where it has begun"
        _, began_at, busy_s = one.began
        return min(1.0, (self._busy_s - busy_s) / max(self._step_at - began_at, 1e-9))

    def expected(self, model_utilisation: float) -> Interval:
        """The wall clock's utilisation for a planner's prediction: shifted by this run's misses, with its interval."""
        middle = min(1.0, max(0.0, model_utilisation + self.bias))
        return Interval(middle, max(0.0, middle - self.reach), min(1.0, middle + self.reach))

    # ---- what happens

    def planned(self, plan: Plan, is_acted_on: bool, steps_left: int, now: float) -> None:
        """A plan was adopted. The same pool and period as before change nothing."""
        key = (plan.kappa, plan.pool)
        if not is_acted_on or not self._step_s or (self._plan is not None and self._plan.key == key):
            return
        self._close(now)
        about = f"kappa = {plan.kappa}, {len(plan.pool)} workers"
        model = plan.predicted_utilisation
        self._plan = _OpenPrediction(about, now, model, self.expected(model), key)
        if steps_left > 0 and model > 0:
            told = self.expected(model)
            busy_s = steps_left * self._step_s
            low, high = (busy_s / max(one, 0.01) for one in (told.high, told.low))
            middle = busy_s / max(told.expected, 0.01)
            low, high = min(low, middle * (1 - FINISH_SPREAD)), max(high, middle * (1 + FINISH_SPREAD))
            self._finish = self._finish or _OpenPrediction(about, now, middle, Interval(middle, low, high), key)

    def step_made(self, step: int, took_s: float, usual_s: float, now: float) -> None:
        """The learner finished `step` in `took_s` seconds; a step usually takes `usual_s`. Steps that are repeated after a restart
        from a checkpoint count once."""
        self._busy_s += max(0, step - self._step) * took_s if self._step else 0.0
        self._step, self._step_at, self._step_s = max(step, self._step), now, usual_s
        if self._plan is None:
            return
        if self._plan.began is None:
            self._plan.began = self._step, now, self._busy_s
        elif self._step - self._plan.began[0] >= WINDOW_STEPS:
            again = self._plan
            self._close(now)
            began = self._step, now, self._busy_s
            self._plan = _OpenPrediction(again.about, now, again.model, self.expected(again.model), again.key, began)

    def _close(self, now: float) -> None:
        open_one, self._plan = self._plan, None
        if open_one is None or open_one.began is None or self._step - open_one.began[0] < STEPS_LEAST:
            return
        share = self._share(open_one)
        self.misses.append(share - open_one.model)
        self._keep(Quantity.UTILISATION, open_one.about, open_one.at, open_one.promised, share, now)

    def finished(self, now: float) -> None:
        """The learner has made its last step."""
        if self._finish is not None:
            one, self._finish = self._finish, None
            self._close(now)
            self._keep(Quantity.FINISH, one.about, one.at, one.promised, now - one.at, now)

    def rate_expected(self, worker: str, about: str, rate: Interval, now: float) -> None:
        """Notes the expected rate of a worker that has not been measured; only the first one counts."""
        if worker not in self._rates and len(self._rates) < OPEN_RATES_MAX:
            self._rates[worker] = now, rate, about

    def rate_measured(self, worker: str, rate: float, now: float) -> None:
        if worker in self._rates and rate > 0:
            at, told, about = self._rates.pop(worker)
            if at < now:
                self._keep(Quantity.RATE, about, at, told, rate, now)

    def _keep(self, what: Quantity, about: str, at: float, told: Interval, measured: float, now: float) -> None:
        self.changes += 1
        self.records.append(KeptPrediction(what.value, about, at, told.expected, told.low, told.high, measured, now))

    # ---- saving and display

    def value(self, shown: int = SHOWN) -> dict[str, dict[str, Any]]:
        """For each quantity: number of records, mean absolute miss, bias, how many fell in their interval, the newest `shown`."""
        opened = {Quantity.UTILISATION: self._plan is not None, Quantity.FINISH: self._finish is not None}
        found = {}
        for what in Quantity:
            rows = [one for one in self.records if one.what == what.value]
            found[what.value] = {
                "count": len(rows), "open": len(self._rates) if what is Quantity.RATE else int(opened[what]),
                "error": round(statistics.fmean(abs(one.error) for one in rows), 5) if rows else None,
                "bias": round(statistics.fmean(one.error for one in rows), 5) if rows else None,
                "held": sum(one.is_held for one in rows),
                "newest": [{name: _short(value) for name, value in asdict(one).items()} for one in rows[-shown:]],
            }  # fmt: skip
        return found

    def to_json(self) -> str:
        return json.dumps({"records": [asdict(one) for one in self.records], "misses": list(self.misses)})

    def restore(self, text: str) -> None:
        """Loads what an earlier process saved; ignores what cannot be read."""
        try:
            told = json.loads(text or "{}")
            rows = [KeptPrediction(**row) for row in told.get("records", ())][-RECORDS_MAX:]
            misses = [float(one) for one in told.get("misses", ())][-NEWEST:]
        except (AttributeError, TypeError, ValueError):
            return
        self.records.extend(one for one in rows if _is_finite(asdict(one).values()))
        self.misses.extend(one for one in misses if -1.0 <= one <= 1.0)


def _short(value: object) -> object:
    return float(f"{value:.6g}") if isinstance(value, float) and abs(value) < 1e6 else value


def _is_finite(values: Iterable[object]) -> bool:
    return all(isinstance(one, str) or (isinstance(one, int | float) and math.isfinite(one)) for one in values)
