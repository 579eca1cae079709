"""A trainer of the user's own, through the Python API, in a run of real processes."""

import re
from pathlib import Path

import pytest

import echo2
from echo2.base.errors import ConfigError
from tests.e2e.cluster import ROOT, Cluster, trained_groups

STEPS = 12


def steps_printed(cluster: Cluster) -> list[int]:
    return [int(step) for step in re.findall(r"^step (\d+): reward", cluster.log("learner"), re.MULTILINE)]


def test_own_trainer_learns_and_goes_on_after_a_kill(tmp_path: Path, run_config: str) -> None:
    """examples/own_trainer.py as a user would start it; killed once between checkpoints."""
    config = run_config.replace("steps = 30", f"steps = {STEPS}") + "[staleness]\nbound = 3\n"
    with Cluster(tmp_path, config, workers=1) as cluster:
        given = [str(cluster.run_folder / "run.toml"), f"@{cluster.run_folder / 'links' / 'learner.link'}"]
        cluster.commands["learner"] = [str(ROOT / "examples" / "own_trainer.py"), *given]
        cluster.start_all()
        cluster.wait_until(lambda: 8 in steps_printed(cluster), "step 8")
        cluster.kill("learner")
        cluster.start("learner")
        assert cluster.wait("learner") == 0, cluster.log("learner")[-2000:]

        printed = steps_printed(cluster)
        assert printed[-1] == STEPS
        again = printed.index(6, printed.index(8))  # from the checkpoint of step 5 on
        assert printed[again:] == list(range(6, STEPS + 1))
        trained = trained_groups(cluster)
        assert sorted(trained.values()) == sorted(step for step in range(STEPS) for _ in range(12))
        last = cluster.metrics()[-1]
        assert last["step"] == STEPS
        assert last["tokens/over_stale"] == 0 and sum(last["lag/histogram"][4:]) == 0
        rewards = [float(text) for text in re.findall(r"reward (\d\.\d+)", cluster.log("learner"))]
        assert sum(rewards[-5:]) > sum(rewards[:5])

    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(cluster.run_folder / "learner" / "model")


def test_a_stranger_to_the_model_is_refused_before_anything_is_sent(tmp_path: Path, run_config: str) -> None:
    import torch

    file = tmp_path / "run.toml"
    file.write_text(run_config)
    with echo2.Run(file) as run:
        with pytest.raises(ConfigError, match=r"rollouts: expected Publisher\.publish first"):
            next(echo2.Rollouts(run))
        with pytest.raises(ConfigError, match=r"publish: expected the \d+ tensors of .*, got other\.weight"):
            echo2.Publisher(run).publish(0, [*skeleton(run), ("other.weight", torch.zeros(1))])
        with pytest.raises(
            ConfigError,
            match=r"publish: expected model\.embed_tokens\.weight of shape \(.*\) and a float dtype, got \(1,\)",
        ):
            echo2.Publisher(run).publish(0, [*skeleton(run), ("model.embed_tokens.weight", torch.zeros(1))])
        for wrong in (torch.nn.Linear(1, 1), [torch.zeros(1)], None):
            with pytest.raises(ConfigError, match=f"expected tensors by name, .*, got {type(wrong).__name__}"):
                echo2.Publisher(run).publish(0, wrong)
        with pytest.raises(ConfigError, match=r"embed_tokens\.weight is missing, got module\.model\.embed_tokens"):
            echo2.Publisher(run).publish(0, {f"module.{name}": tensor for name, tensor in skeleton(run)})
        with pytest.raises(ConfigError, match=r"and a float dtype, got a cpu Tensor torch\.sparse_coo"):
            echo2.Publisher(run).publish(0, [(name, tensor.to_sparse()) for name, tensor in skeleton(run)])
        taken = skeleton(run)
        for _, tensor in taken:
            tensor.untyped_storage().resize_(0)
        with pytest.raises(ConfigError, match="with values to copy, got: The tensor has a non-zero number"):
            echo2.Publisher(run).publish(0, taken)
        echo2.Publisher(run).publish(0, skeleton(run))
        with pytest.raises(ConfigError, match="expected a join link on the learner's first start"):
            next(echo2.Rollouts(run))


def skeleton(run: echo2.Run) -> list[tuple[str, object]]:
    import torch

    return [(name, torch.zeros(shape)) for name, shape in run.trainer.model.shapes.items()]


@pytest.mark.extras
def test_trl_trains_through_its_rollout_hook(tmp_path: Path, run_config: str) -> None:
    pytest.importorskip("trl", reason="TRL is not installed")
    config = run_config.replace("steps = 30", "steps = 6") + "[staleness]\nbound = 1\n"
    with Cluster(tmp_path, config) as cluster:
        given = [str(cluster.run_folder / "run.toml"), f"@{cluster.run_folder / 'links' / 'learner.link'}"]
        cluster.commands["learner"] = [str(ROOT / "examples" / "trl_trainer.py"), *given]
        cluster.start_all()
        assert cluster.wait("learner") == 0, cluster.log("learner")[-3000:]
        assert [row["step"] for row in cluster.metrics() if "reward/mean" in row] == [1, 2, 3, 4, 5, 6]
        rewards = [float(text) for text in re.findall(r"'reward': '?([\d.]+)", cluster.log("learner"))]
        measured = [row["reward/mean"] for row in cluster.metrics() if "reward/mean" in row]
        assert rewards == pytest.approx(measured, abs=1e-3), "TRL saw the rewards of the run's own rollouts"
