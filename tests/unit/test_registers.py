"""What CONTRIBUTING says of extensions: a new engine, provider or correction is a class of its own and one line."""

import importlib
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from torch import Tensor

from echo2.cli.learner import learner_options
from echo2.config.load import load_config
from echo2.config.run import LearnerSection, WorkerSection
from echo2.coordinator.money import provisioner
from echo2.coordinator.money.providers.machine_setup import ManualProvider
from echo2.coordinator.money.provisioning import MachineOffer
from echo2.cost_model.sizing import Fit
from echo2.learner.training import loss
from echo2.worker.engines import making as make_engine
from echo2.worker.options import WorkerOptions
from tests.lock import ROOT, oldest_python, pin
from tests.unit.coordinator.test_daemon import options

FIT = Fit(1, 1, sequences=4, sequence_tokens=64, cache_tokens=256, reason="a trial")


def test_every_engine_that_can_be_chosen_has_its_line() -> None:
    engines = set(get_args(WorkerSection.model_fields["engine"].annotation)) - {"auto"}
    root = Path(make_engine.__file__).parents[3]
    assert engines and all((root / f"{make_engine.module_of(name).replace('.', '/')}.py").exists() for name in engines)


def test_an_engine_is_a_module_with_make_and_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[object] = []
    engine = object()

    def make(config: dict[str, object], options: WorkerOptions, fit: Fit, gpus: Sequence[int]) -> object:
        asked.append((config, options.join_link, fit, gpus))
        return engine

    module = ModuleType(make_engine.module_of("trial"))
    monkeypatch.setattr(module, "make", make, raising=False)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    made: object = make_engine.make_engine("trial", {"a": 1}, WorkerOptions("a link", tmp_path), FIT)
    assert made is engine
    assert asked == [({"a": 1}, "a link", FIT, range(0))]


def test_a_provider_is_a_class_and_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class OfTheTest(ManualProvider):
        name = "of-the-test"

    monkeypatch.setitem(
        provisioner.PROVIDERS, "of-the-test", lambda offer, run: OfTheTest(offer, run.config.model.path)
    )
    file = tmp_path / "offers.toml"
    file.write_text('[[offer]]\nname = "one"\nprovider = "of-the-test"\n')
    (offer,) = provisioner.load_offers(file)
    assert offer == MachineOffer("one", "of-the-test")
    assert isinstance(provisioner.make_provider(offer, options(tmp_path)), OfTheTest)


def test_every_correction_has_its_rule_and_its_word_in_the_configuration() -> None:
    assert set(get_args(LearnerSection.model_fields["correction"].annotation)) == set(loss.CORRECTIONS)


def test_a_loss_is_a_function_and_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def plain(inputs: loss.LossInputs) -> Tensor:
        return -inputs.advantage_T * inputs.logprobs_T

    monkeypatch.setitem(loss.LOSSES, "plain", (plain, loss.Divisor.ROLLOUTS))
    config = learner_options(load_config((), None, {"learner.loss": "plain"}), "", tmp_path).trainer.loss
    sequence_T, logprobs_T = torch.zeros(2, dtype=torch.int64), torch.tensor([-1.0, -2.0], requires_grad=True)
    tokens = loss.PackedTokens(logprobs_T, logprobs_T.detach(), torch.ones(1), sequence_T, sequence_T == 0)
    assert float(loss.policy_loss(tokens, config, loss.BatchTotals(2, 1, 2)).loss.detach()) == 3.0


def test_former_import_paths_are_the_modules_themselves() -> None:
    for former, now in {
        "learner.runtime.prompts": "learner.rollouts.prompts",
        "tasks.runtime.chat_format": "tasks.chat_format",
        "tasks.runtime.rewards": "tasks.rewards",
    }.items():
        assert importlib.import_module(f"echo2.{former}") is importlib.import_module(f"echo2.{now}")


# ---- the constraints that a clone installs from


def test_a_release_for_a_newer_python_is_pinned_for_that_python_alone() -> None:
    assert pin("soupsieve", "4.1.3", ">=3.11.5") == 'soupsieve==4.1.3 ; python_full_version >= "3.11.5"'
    assert pin("torch", "2.13.0+cpu", ">=3.10") == "torch==2.13.0"
    assert (
        pin("odd", "1", "!=3.11.0,>=3.9") == 'odd==1 ; python_full_version != "3.11.0" and python_full_version >= "3.9"'
    )


def test_the_oldest_python_can_install_what_is_pinned() -> None:
    """Debian 12 has Python 3.11.2: one pin for 3.11.5 stopped every installation there."""
    oldest = f"{oldest_python()}.0"
    wrong = []
    for line in (ROOT / "constraints.txt").read_text().splitlines()[1:]:
        wanted = Requirement(line)
        if wanted.marker and not wanted.marker.evaluate({"python_full_version": oldest}):
            continue
        try:
            installed = metadata.distribution(wanted.name)
        except metadata.PackageNotFoundError:
            continue
        asks = installed.metadata["Requires-Python"]
        if installed.version.partition("+")[0] in wanted.specifier and asks and oldest not in SpecifierSet(asks):
            wrong.append(line)
    assert not wrong
