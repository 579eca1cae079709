from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from echo2.base.errors import ConfigError
from echo2.base.ids import PeerId
from echo2.broadcast.nat.facts import HostFacts
from echo2.cli import learner
from echo2.cli.main import main
from echo2.cli.options import with_values
from echo2.cli.worker import worker_options
from echo2.config.load import load_config
from echo2.worker.heartbeat import reach_of
from echo2.worker.links import dialled_port


@pytest.mark.parametrize("name", ["../../x y", "-x", "a/b", "x" * 64])
def test_a_name_that_leaves_its_folder_is_refused(name: str) -> None:
    own = argparse.Namespace(link="LINK", folder=None, name=name, preemption="", advertise="")
    with pytest.raises(ConfigError, match="--name: expected up to 63 letters"):
        worker_options(own, load_config())


def test_the_value_of_an_option_is_not_taken_for_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--preset", "wan", "--learner.lr", "2e-6", "--plain"]) == 0
    assert "lr = 2e-06" in capsys.readouterr().out
    assert with_values(["--a.b", "1", "x", "--a.c", "-2", "--a.d", "--e", "f"]) == [
        "--a.b=1", "x", "--a.c=-2", "--a.d", "--e", "f",
    ]  # fmt: skip


def test_a_mapped_port_is_named_by_an_ip_address_and_a_port_that_peers_may_dial(tmp_path: Path) -> None:
    own = argparse.Namespace(link="echo2://h:1/p?token=t", name="w", folder=tmp_path, preemption="", advertise="")
    for text in ("203.0.113.5:41873", "[2001:db8::5]:41873"):
        own.advertise = text
        options = worker_options(own, load_config())
        assert options.advertised_addresses == (text,)
        assert dialled_port(options, 8419) == 41873
        facts = HostFacts("203.0.113.5", is_reachable=True)
        told = reach_of(facts, ["192.168.0.2:8419"], 41873, PeerId("hub"))
        assert told is not None and list(told.addresses) == ["203.0.113.5:41873"]
    own.advertise = ""
    assert dialled_port(worker_options(own, load_config()), 8419) == 8419
    for text in ("host.example:41873", "203.0.113.5", "203.0.113.5:22", "203.0.113.5:70000", "0.0.0.0:41873"):
        own.advertise = text
        with pytest.raises(ConfigError, match="--advertise: expected the public IP address and the mapped port"):
            worker_options(own, load_config())


def test_a_single_rollout_of_each_prompt_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        f'[run]\nfolder = "{tmp_path}/runs"\n[model]\npath = "nowhere"\n[learner]\nrollouts_per_prompt = 1\n'
    )
    assert main(["run", str(file)]) == ConfigError.exit_code
    assert "learner.rollouts_per_prompt: expected 2 or more" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    assert learner.main(["join", "link", "--config", str(file)]) == ConfigError.exit_code
    assert "take 4 to 16" in capsys.readouterr().err
