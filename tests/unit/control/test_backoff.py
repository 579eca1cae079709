from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from echo2.control.backoff import FLOOR_SHARE, Backoff


@given(seed=st.integers(), failures=st.integers(0, 200))
def test_pauses_grow_to_the_longest_and_start_over_after_success(seed: int, failures: int) -> None:
    backoff = Backoff(random.Random(seed), first_s=0.2, longest_s=5.0)
    pauses = [backoff.next_pause_s() for _ in range(failures)]
    for i, pause in enumerate(pauses):
        ceiling = min(5.0, 0.2 * 2.0 ** min(i, 30))
        assert FLOOR_SHARE * ceiling <= pause <= ceiling
    backoff.succeeded()
    assert backoff.next_pause_s() <= 0.2
