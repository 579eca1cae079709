"""Which worlds `make test` plays where several state one promise; `make soak` plays all."""

from __future__ import annotations

import pytest

PLAYED: dict[str, tuple[str, ...]] = {
    "test_a_worker_that_only_says_that_it_works_is_given_nothing_and_the_others_go_on": (),
    "test_what_workers_say_of_their_own_speed_and_room_takes_no_work_from_others": (),
    "test_what_rots_at_the_learner_and_is_nowhere_else_holds_nobody_up": (),
    "test_honest_workers_are_looked_at_and_never_accused": (),  # unit/learner/test_audit.py
    "test_a_finished_run_sends_its_workers_home_and_lets_none_in_until_it_is_given_more_steps": ("2",),
}
"""Test: the parameters of it that are not left to the soak."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        name, _, parameters = item.name.removesuffix("]").partition("[")
        if parameters not in PLAYED.get(name, (parameters,)):
            item.add_marker(pytest.mark.soak)
