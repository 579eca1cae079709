"""What CONTRIBUTING says of extensions: a new engine, provider or correction is a class of its own and one line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest
import torch
from torch import Tensor

from echo2.base.ids import RunId
from echo2.config.run import LearnerSection
from echo2.coordinator.provisioning import MachineOffer
from echo2.coordinator.runtime.providers import offers
from echo2.coordinator.runtime.providers.manual import ManualProvider
from echo2.cost_model.sizing import Fit
from echo2.learner import correction
from echo2.learner.correction import Correction, CorrectionConfig, Segments, correction_weights
from echo2.worker.options import EngineChoice, WorkerOptions
from echo2.worker.runtime import make_engine

FIT = Fit(1, 1, sequences=4, sequence_tokens=64, cache_tokens=256, reason="a trial")


def test_every_engine_that_can_be_chosen_has_its_line() -> None:
    assert make_engine.MAKERS.keys() == set(EngineChoice) - {EngineChoice.AUTO}


def test_an_engine_is_a_module_with_make_and_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[object] = []
    engine = object()

    def make(config: dict[str, object], options: WorkerOptions, fit: Fit, gpus: Sequence[int]) -> object:
        asked.append((config, options.join_link, fit, gpus))
        return engine

    module = ModuleType("an_engine_of_the_test")
    monkeypatch.setattr(module, "make", make, raising=False)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(make_engine.MAKERS, EngineChoice.VLLM, module.__name__)
    made: object = make_engine.make_engine(EngineChoice.VLLM, {"a": 1}, WorkerOptions("a link", tmp_path), FIT)
    assert made is engine
    assert asked == [({"a": 1}, "a link", FIT, range(0))]


def test_a_provider_is_a_class_and_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class OfTheTest(ManualProvider):
        name = "of-the-test"

    monkeypatch.setitem(offers.PROVIDERS, "of-the-test", lambda offer, run: OfTheTest(offer, run.model_path))
    file = tmp_path / "offers.toml"
    file.write_text('[[offer]]\nname = "one"\nprovider = "of-the-test"\n')
    (offer,) = offers.load_offers(file)
    assert offer == MachineOffer("one", "of-the-test")
    assert isinstance(offers.make_provider(offer, RunId("r"), tmp_path), OfTheTest)


def test_every_correction_has_its_rule_and_its_word_in_the_configuration() -> None:
    assert correction.RULES.keys() == set(Correction)
    words = get_args(LearnerSection.model_fields["correction"].annotation)
    assert set(words) == {kind.value for kind in Correction}


def test_a_correction_is_a_function_and_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def halved(ratio_T: Tensor, config: CorrectionConfig) -> tuple[Tensor, Tensor]:
        return ratio_T / 2, ratio_T > 0

    monkeypatch.setitem(correction.RULES, Correction.DECOUPLED, halved)
    zeros = torch.zeros(2)
    segments = Segments(torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.bool), 1)
    weights = correction_weights(zeros, zeros, segments, CorrectionConfig(Correction.DECOUPLED))
    assert weights.weights_T.tolist() == [0.5, 0.5]
