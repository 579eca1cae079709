"""What earlier runs saw: beliefs by kind, losses and joins by provider, and how little one that lies can move them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from echo2.base.errors import ConfigError
from echo2.cost_model.experience import (
    AGE_MOST_S,
    APART,
    JOIN_S,
    MACHINES_OF_A_RUN,
    NO_EXPERIENCE,
    RATIO_LEAST,
    RATIO_MOST,
    SPOT_HAZARD_PER_HOUR,
    Experience,
    KindRecord,
    agreed_ratios,
    merged,
)

HONEST = KindRecord("r1", "RTX4090", "runpod", True, 1e9, (0.7, 0.75, 0.72), 40.0, 4, (200.0, 240.0, 220.0))


def test_without_records_the_priors_stand() -> None:
    assert NO_EXPERIENCE.belief("H100").ratio == 1.0
    assert NO_EXPERIENCE.hazard_per_hour("aws", "H100", True) == SPOT_HAZARD_PER_HOUR
    assert NO_EXPERIENCE.hazard_per_hour("aws", "H100", False) == 0.0
    assert NO_EXPERIENCE.join_s("aws", "H100", True) == JOIN_S


def test_what_runs_saw_moves_rates_losses_and_joins_of_their_kind_most() -> None:
    known = Experience((HONEST, replace(HONEST, run_id="r2")))
    assert 0.7 < known.belief("RTX4090").ratio < 0.76 and known.belief("RTX4090").machines == 6
    assert known.belief("H100").machines == 0
    own = known.hazard_per_hour("runpod", "RTX4090", True)
    other = known.hazard_per_hour("vastai", "H100", True)
    assert SPOT_HAZARD_PER_HOUR < other < own < 0.1
    assert known.hazard_per_hour("runpod", "RTX4090", False) == 0.0
    assert 220 <= known.join_s("runpod", "RTX4090", True) < known.join_s("runpod", "H100", True) < JOIN_S
    assert known.join_s("vastai", "RTX4090", True) == JOIN_S


def test_one_worker_that_lies_is_left_out_or_stays_near_the_others() -> None:
    honest = [0.70, 0.72, 0.74, 0.76]
    for lie in (0.001, RATIO_LEAST, 0.4, 1.2, RATIO_MOST, 9.0, math.inf, math.nan):
        assert agreed_ratios([*honest, lie], []) == tuple(honest), lie
    near = agreed_ratios([*honest, 0.73 * APART * 0.99], [])
    assert len(near) == 5 and math.prod(near) ** 0.2 < math.prod(honest) ** 0.25 * APART**0.21


def test_claims_alone_count_from_three_on_and_never_against_machines_of_the_run() -> None:
    assert agreed_ratios([1.3, 1.3], []) == ()
    assert agreed_ratios([1.3, 1.3, 1.3], []) == (1.3, 1.3, 1.3)
    assert agreed_ratios([1.3, 1.3, 1.3, 1.3], [0.7]) == (0.7,)
    assert agreed_ratios([0.2, 0.7, 1.3], []) == (), "of which none is near two others"


def test_a_run_of_a_thousand_counts_as_eight_and_one_odd_run_of_three_not_at_all() -> None:
    crowd = agreed_ratios([0.7 + index / 1e4 for index in range(1000)], [])
    assert len(crowd) == MACHINES_OF_A_RUN and crowd[0] < 0.78 and crowd[-1] > 0.75
    odd = replace(HONEST, run_id="liar", ratios=(1.4,) * MACHINES_OF_A_RUN)
    runs = (HONEST, replace(HONEST, run_id="r2"))
    assert Experience((*runs, odd)).belief("RTX4090") == Experience(runs).belief("RTX4090")
    assert Experience((HONEST, odd)).belief("RTX4090").high > 1.4, (
        "of two nobody knows who is right: the interval holds both"
    )


def test_of_a_run_seen_twice_the_longer_watch_stays_and_old_runs_are_forgotten() -> None:
    longer = replace(HONEST, hours=50.0, unix_s=HONEST.unix_s + 5)
    assert merged([longer], [HONEST], 10) == (longer,) == merged([HONEST], [longer], 10)
    many = [replace(HONEST, run_id=f"r{index}", unix_s=float(index)) for index in range(20)]
    assert [one.run_id for one in merged(many, [], 3)] == ["r17", "r18", "r19"]
    assert not Experience.of([HONEST], HONEST.unix_s + AGE_MOST_S + 1).records


@pytest.mark.parametrize(
    "bad",
    [
        {"ratios": (RATIO_MOST + 0.01,)}, {"ratios": (math.nan,)}, {"ratios": (0.5,) * 9}, {"kind": ""}, {"run_id": "x" * 65},
        {"hours": -1.0}, {"losses": 10_000}, {"joins_s": (1e6,)}, {"unix_s": math.inf}, {"provider": "p" * 65},
    ],
)  # fmt: skip
def test_a_record_that_cannot_be_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="record of"):
        replace(HONEST, **bad)  # type: ignore[arg-type]
