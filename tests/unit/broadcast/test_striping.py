"""When a link is made of more connections, and when of fewer again: a path with losses and its looks on a virtual clock."""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from echo2.broadcast.pace import LINK_CONNECTIONS
from echo2.broadcast.stripes import CLEAN_S, LEFT_ALONE_S, NODE_FURTHER, OPENING_S, Striping, connections_max
from echo2.broadcast.uplink import PathSent

TICK_S = 0.1
ONE_CARRIES = 400e3  # bytes/s, of one connection over a path with losses


class Path:
    """A link that is to carry `asked` bytes/s; `carried` says how many k connections can."""

    def __init__(self, asked: float, carried: Callable[[int], float], losses_per_s: float = 0.5) -> None:
        self.striping, self.open = Striping(), 1
        self.asked, self.carried, self.losses_per_s = asked, carried, losses_per_s
        self.can_open = True
        self.seen: list[int] = []
        self.now = 0.0
        self._rng = random.Random(3)

    def run(self, seconds: float, limit: int = LINK_CONNECTIONS) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.now += TICK_S
            rate = min(self.asked, self.carried(self.open))
            lost = int(rate > 0 and self._rng.random() < self.losses_per_s * self.open * TICK_S)
            self.striping.look(PathSent(int(rate * TICK_S), lost), self.asked > rate, self.open, limit, self.now)
            if self.striping.count < self.open or self.can_open:
                self.open = self.striping.count
            self.seen.append(self.open)


def lossy(count: int) -> float:
    return count * ONE_CARRIES


def test_a_link_that_losses_hold_back_grows_to_what_is_asked_outlasts_pauses_and_shrinks_once_nothing_is_lost() -> None:
    path = Path(3.5 * ONE_CARRIES, lossy)
    path.run(30)
    assert sorted(set(path.seen)) == [1, 2, 4] and path.seen.index(4) * TICK_S < 15
    assert path.open == 4 and "losses" in path.striping.reason
    asked, path.asked = path.asked, 0.0
    path.run(2 * CLEAN_S)
    path.asked = asked
    path.run(5)
    assert path.open == 4, "between two versions"
    path.losses_per_s, path.carried = 0.0, lambda count: 1e9
    path.run(2 * CLEAN_S + 10)
    assert path.open == 1


def test_growth_ends_at_the_limit_and_a_link_says_that_it_is_short_where_it_may_not_grow() -> None:
    path = Path(100 * ONE_CARRIES, lossy)
    path.run(60)
    assert path.open == LINK_CONNECTIONS
    path.run(10, limit=1)
    assert path.open == 1
    path.run(30, limit=1)
    assert path.striping.is_short
    path.carried = lambda count: 0.0
    path.run(3, limit=1)
    assert path.striping.is_short, "nothing gets through, though much waits"
    path.losses_per_s, path.carried = 0.0, lambda count: 1e9
    path.run(60, limit=1)
    assert not path.striping.is_short


@pytest.mark.parametrize("losses_per_s, asked", [(0.0, 3 * ONE_CARRIES), (2.0, 0.9 * ONE_CARRIES)])
def test_a_link_without_losses_or_with_nothing_that_waits_stays_one_connection(
    losses_per_s: float, asked: float
) -> None:
    path = Path(asked, lossy, losses_per_s)
    path.run(120)
    assert set(path.seen) == {1}


def test_connections_that_carry_no_more_are_given_up_and_tried_again_ever_more_rarely() -> None:
    path = Path(3 * ONE_CARRIES, lambda count: ONE_CARRIES)
    path.run(1000)
    begun = [at * TICK_S for at in range(1, len(path.seen)) if path.seen[at - 1] == 1 and path.seen[at] == 2]
    assert set(path.seen) == {1, 2}
    pauses = [later - earlier for earlier, later in itertools.pairwise(begun)]
    assert len(pauses) >= 3 and pauses[0] >= LEFT_ALONE_S
    assert all(later > 1.5 * earlier for earlier, later in itertools.pairwise(pauses))
    assert path.seen.count(2) < 0.05 * len(path.seen)


def test_connections_that_cannot_be_opened_are_wanted_no_longer() -> None:
    path = Path(3 * ONE_CARRIES, lossy)
    path.can_open = False
    path.run(OPENING_S + 5)
    assert path.striping.count == 1
    assert "could not be opened" in path.striping.reason


def test_a_pause_in_a_trial_does_not_fail_it() -> None:
    path = Path(1.9 * ONE_CARRIES, lossy)
    while path.open == 1:
        path.run(TICK_S)
    asked, path.asked = path.asked, 0.0
    path.run(60)
    path.asked = asked
    path.run(20)
    assert path.open == 2


@dataclass
class Link:
    width: int = 1
    is_short: bool = True


def settled(links: list[Link], rounds: int = 40) -> list[int]:
    """What links come to that take what they may have, in turn."""
    for _ in range(rounds):
        for link in links:
            others = [(one.width, one.is_short) for one in links if one is not link]
            limit = connections_max(link.width, others)
            link.width = limit if link.is_short else 1
            assert 1 <= limit <= LINK_CONNECTIONS
            assert sum(one.width - 1 for one in links) <= NODE_FURTHER
    return [link.width for link in links]


@pytest.mark.parametrize("beside", [0, 1, 15, 47])
def test_a_link_that_losses_hold_back_gets_all_it_may_beside_links_that_need_no_more(beside: int) -> None:
    assert settled([Link(), *(Link(is_short=False) for _ in range(beside))])[0] == LINK_CONNECTIONS


@pytest.mark.parametrize("short, beside", [(2, 0), (8, 40), (17, 31), (28, 20)])
def test_links_that_are_held_back_share_further_connections_alike_also_one_that_comes_later(
    short: int, beside: int
) -> None:
    links = [Link() for _ in range(short - 1)] + [Link(is_short=False) for _ in range(beside + 1)]
    settled(links)
    links[short - 1].is_short = True
    widths = settled(links)[:short]
    assert max(widths) - min(widths) <= 1 and min(widths) > 1


def test_where_more_links_are_held_back_than_connections_are_left_the_first_keep_theirs() -> None:
    widths = settled([Link() for _ in range(48)])
    assert sum(width - 1 for width in widths) == NODE_FURTHER and max(widths) == 2
