from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from echo2.learner.training.packing import GroupLengths, PackingLimits, plan_microbatches

GROUPS = st.lists(
    st.builds(GroupLengths, st.integers(1, 40), st.lists(st.integers(1, 60), max_size=9).map(tuple)), max_size=12
)
LIMITS = st.builds(PackingLimits, st.integers(1, 600), st.integers(1, 300), st.booleans())


@given(groups=GROUPS, limits=LIMITS)
def test_every_completion_has_one_place_and_budgets_hold(groups: list[GroupLengths], limits: PackingLimits) -> None:
    places: Counter[tuple[int, int]] = Counter()
    layout = plan_microbatches(groups, limits)
    assert layout == plan_microbatches(list(groups), limits), "a function of the lengths"
    for micro in layout:
        assert micro.positions <= limits.token_budget or len(micro.rows) == 1
        for row in micro.rows:
            used = 0
            for unit in row:
                assert unit.tokens == groups[unit.group].prompt + sum(
                    groups[unit.group].completions[m] for m in unit.members
                )
                assert limits.is_packed or len(unit.members) == 1
                places.update((unit.group, member) for member in unit.members)
                used += unit.tokens
            assert used <= micro.width
    expected = {(g, m) for g, group in enumerate(groups) for m in range(len(group.completions))}
    assert set(places) == expected and all(count == 1 for count in places.values())


def test_siblings_share_their_prompt() -> None:
    (micro,) = plan_microbatches([GroupLengths(10, (5, 5, 5, 5))], PackingLimits(1000, 100))
    assert micro.width == 30 and len(micro.rows) == 1
