"""Seeds that nobody can know before they are leased, and what a worker says of its engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from echo2.base.errors import StateError
from echo2.learner.rollouts.prompts import Prompts
from echo2.learner.run_folder import RunFolder
from tests.unit.learner.fleet import options_for
from tests.unit.learner.tiny import make_tiny_model


def test_seeds_follow_from_a_secret_of_the_run_that_is_made_once(tmp_path: Path) -> None:
    options = options_for(tmp_path / "run", make_tiny_model(tmp_path / "model"))
    prompts = Prompts(options, vocabulary_size=100, stop_token_ids=[1])
    seeds = []
    for name in ("one", "one", "other"):
        folder = RunFolder(tmp_path / name)
        prompts.secret = folder.secret()
        folder.release()
        drawn = [prompts.draw(cursor) for cursor in range(3)]
        assert prompts.seeded(drawn[0].again()).sampling == drawn[0].sampling == drawn[0].again().sampling
        seeds.append([draw.sampling.seed for draw in drawn])
    assert seeds[0] == seeds[1] and len({*seeds[0], *seeds[2]}) == 6, (
        "the same after a restart, new ones for another run"
    )
    assert (tmp_path / "one" / "sampling.secret").stat().st_mode & 0o077 == 0
    (tmp_path / "one" / "sampling.secret").write_bytes(b"short")
    folder = RunFolder(tmp_path / "one")
    with pytest.raises(StateError, match="expected 32 bytes, got 5"):
        folder.secret()
    folder.release()
