"""Every field that daemons say to each other in a storm is on the list of fields that they must say."""

from __future__ import annotations

from pathlib import Path

from echo2.sim.storm import stormy_world

LIST = Path(__file__).with_name("said.txt")
SEEDS = (4, 9)


def said() -> set[str]:
    found: set[str] = set()
    for seed in SEEDS:
        world, until_s = stormy_world(seed)
        assert not world.run(until_s).failure
        found |= world.observer.said
    return found


def test_nothing_that_is_to_be_said_is_left_out() -> None:
    assert not set(LIST.read_text().split()) - said()


if __name__ == "__main__":
    LIST.write_text("\n".join(sorted(said())) + "\n")
