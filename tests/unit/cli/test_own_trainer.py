"""The end of a `Run`: nothing that went wrong, or did not end, is kept to itself."""

import os
import socket
import time
from pathlib import Path

import pytest
import torch

import echo2
from echo2.base.errors import ConfigError, Unreachable
from echo2.cli import own_trainer
from echo2.learner.own_trainer import OwnTrainerFollower
from echo2.trust.identity import Identity
from tests.e2e.cluster import environment_of
from tests.fork_server import ForkedProcess
from tests.patience import WAIT_S
from tests.unit.learner.test_own_trainer import OtherRank
from tests.unit.learner.tiny import make_tiny_model


def run_of(folder: Path, link: str = "") -> echo2.Run:
    config = folder / "run.toml"
    model = make_tiny_model(folder / "model")
    config.write_text(
        f'preset = "local"\n[run]\nname = "trial"\nfolder = "{folder}/runs"\n[model]\npath = "{model}"\n'
        '[task]\nname = "sort_digits"\nargs = { digit_count = 3 }\n[learner]\nsteps = 5\n'
    )
    return echo2.Run(config, link)


def begin(run: echo2.Run) -> None:
    echo2.Publisher(run).publish(0, {name: torch.zeros(shape) for name, shape in run.trainer.model.shapes.items()})


def test_forks_of_a_process_with_a_run_are_not_touched_by_what_grpc_does_at_a_fork() -> None:
    """It would end three of forty by a signal, while calls go on in another thread."""
    assert os.environ["GRPC_ENABLE_FORK_SUPPORT"] == "0"


def test_a_checkpoint_is_due_where_the_run_takes_one_and_after_the_last_step(tmp_path: Path) -> None:
    with run_of(tmp_path) as run:
        assert run.checkpoint_every_steps == 20
        due = []
        for step in range(6):
            run.trainer.step_count, run.trainer.is_kept = step, step == 2
            due.append(run.checkpoint_is_due)
        assert due == [False, False, True, False, False, True]
        run.trainer.step_count = 0


@pytest.mark.parametrize("is_asked_for", [False, True])
def test_a_failure_is_raised_once_where_it_is_met_or_by_close(tmp_path: Path, is_asked_for: bool) -> None:
    with run_of(tmp_path) as run:
        run.trainer.ranks = other = OtherRank()
        begin(run)
        with pytest.raises(ConfigError, match="expected a join link on the learner's first start"):
            next(echo2.Rollouts(run)) if is_asked_for else run.close()
    assert other.told == ["is_over"], "no rank waits for what does not come"


def test_another_error_leaves_the_block_and_the_failure_is_a_warning(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="ConfigError: run trial: expected a join link"):
        with pytest.raises(ZeroDivisionError), run_of(tmp_path) as run:
            begin(run)
            raise ZeroDivisionError


def test_a_rank_that_fails_does_not_wait_for_the_first_which_may_wait_for_it(tmp_path: Path) -> None:
    """Without its end torchrun would not end the others, nor show its error, before a collective's limit of half an hour."""
    with pytest.raises(ZeroDivisionError), run_of(tmp_path) as run:
        run._daemon, run.trainer = None, OwnTrainerFollower(run.trainer.model, OtherRank())  # nobody tells it anything
        begin(run)
        raise ZeroDivisionError


def test_a_run_that_does_not_end_says_what_it_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_trainer, "CLOSE_WITHIN_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and says nothing
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        run = run_of(tmp_path, f"echo2://{address}/{Identity.generate().peer_id}?token={'t' * 43}")
        begin(run)
        thread = run._thread
        until = time.monotonic() + WAIT_S
        while run.waits_for != f"the coordinator at {address}":
            assert thread.is_alive() and time.monotonic() < until, run.waits_for
            thread.join(0.01)
        with silent.accept()[0]:  # the handshake has begun, and ends with this connection
            with pytest.raises(
                Unreachable, match=f"run trial at step 0 of 5: .* it waits for the coordinator at {address}"
            ):
                run.close()
        thread.join(WAIT_S)
        assert not thread.is_alive()


LEAVES_IT_OPEN = """
import asyncio, sys, echo2, torch
from concurrent.futures import ThreadPoolExecutor
from echo2.learner.rollouts.groups import Batch

run = echo2.Run(sys.argv[1])
async def stepping():
    await asyncio.get_running_loop().run_in_executor(ThreadPoolExecutor(1), run.trainer.step, Batch(0, ()))
run._daemon.run = stepping
echo2.Publisher(run).publish(0, {name: torch.zeros(shape) for name, shape in run.trainer.model.shapes.items()})
print(next(echo2.Rollouts(run)).step, "taken")
"""


def test_a_trainer_that_ends_without_close_ends(tmp_path: Path) -> None:
    """Python waits for the thread that waits for the trainer."""
    run_of(tmp_path)
    (tmp_path / "trainer.py").write_text(LEAVES_IT_OPEN)
    words = [str(tmp_path / "trainer.py"), str(tmp_path / "run.toml")]
    with (tmp_path / "log").open("wb") as log:
        trainer = ForkedProcess(words, environment_of(tmp_path), tmp_path, log.fileno())
    assert trainer.wait(WAIT_S) == 0 and "0 taken" in (tmp_path / "log").read_text()
