"""Offers ranked for a run: the unit price, kinds by name and memory, filters, what does not fit, measured kinds."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from echo2.base.errors import ConfigError
from echo2.coordinator.money.market import Catalogue, built_in_catalogue, built_in_models, keep, kept
from echo2.cost_model.machines import (
    NO_FILTER,
    MarketOffer,
    OfferFilter,
    Ranked,
    kind_of,
    ranked,
    useful_share,
    worker_prior,
)
from echo2.cost_model.sizing import RunLengths

CATALOGUE, MODELS = built_in_catalogue(), built_in_models()
RUN = RunLengths(2560)
RTX4090 = MarketOffer("runpod", "a", "eu-cz", "RTX4090", 1, 24, 0.34, False)
SPOT = dataclasses.replace(RTX4090, instance="b", is_spot=True, usd_per_hour=0.20)
H100 = MarketOffer("aws", "p5", "us-east-1", "H100", 8, 80, 40.0, False)
OLD = MarketOffer("aws", "g4", "us-east-1", "T4", 1, 16, 0.5, False)


def for_model(model: str, *offers: MarketOffer, wish: OfferFilter = NO_FILTER) -> list[Ranked]:
    return ranked(offers, MODELS[model], RUN, CATALOGUE, wish=wish)


def test_the_unit_price_is_the_hours_over_what_they_bring() -> None:
    found = {one.offer.instance: one for one in for_model("qwen3-4b", RTX4090, SPOT, H100)}
    prior = worker_prior(CATALOGUE["RTX4090"], MODELS["qwen3-4b"], RUN)
    assert prior.gpu_count == 1 and found["a"].tokens_per_s == pytest.approx(prior.tokens_per_s)
    assert found["a"].usd_per_million == pytest.approx(0.34 / (prior.tokens_per_s * 3600) * 1e6)
    assert found["b"].usd_per_million == pytest.approx(
        0.20 / (prior.tokens_per_s * 3600 * useful_share(0.05, 300)) * 1e6
    )
    assert found["p5"].sequences == 8 * 256 and found["p5"].egress_usd_per_gib > 0


def test_the_cheapest_tokens_come_first_and_what_cannot_serve_last_with_its_reason() -> None:
    large = for_model("qwen3-32b", RTX4090, OLD, H100, SPOT)
    assert large[0].offer is H100 and not large[0].refusal
    assert all(one.refusal and math.isinf(one.usd_per_million) for one in large[1:])
    assert any("data sheet" in one.refusal for one in large)
    small = for_model("qwen3-4b", RTX4090, SPOT, H100)
    assert [one.usd_per_million for one in small] == sorted(one.usd_per_million for one in small)


def test_kinds_are_told_apart_by_memory() -> None:
    a100 = MarketOffer("gcp", "a2", "europe-west4", "A100", 1, 40, 1.8, False)
    assert kind_of(a100, CATALOGUE) == "A100-40G"
    assert kind_of(dataclasses.replace(a100, gpu_memory_gib=80), CATALOGUE) == "A100-80G"
    assert kind_of(dataclasses.replace(a100, gpu="NVIDIA RTX 4090", gpu_memory_gib=24), CATALOGUE) == "RTX4090"
    assert kind_of(dataclasses.replace(a100, gpu_memory_gib=16), CATALOGUE) == ""


@pytest.mark.parametrize(
    ("wish", "left"),
    [
        (OfferFilter(), 4), (OfferFilter(providers=("aws",)), 2), (OfferFilter(gpus=("rtx4090",)), 2),
        (OfferFilter(region="EU"), 2), (OfferFilter(is_spot=True), 1), (OfferFilter(is_spot=False), 3),
        (OfferFilter(usd_per_hour_max=0.3), 1), (OfferFilter(providers=("lambdalabs",)), 0),
    ],
)  # fmt: skip
def test_filters(wish: OfferFilter, left: int) -> None:
    assert len(for_model("qwen3-4b", RTX4090, SPOT, H100, OLD, wish=wish)) == left


@pytest.mark.parametrize(
    ("name", "value"), [("gpu_count", 0), ("usd_per_hour", math.nan), ("usd_per_hour", -1.0), ("gpu_memory_gib", 0.0)]
)
def test_offers_that_cannot_be_are_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        dataclasses.replace(RTX4090, **{name: value})


def test_a_kept_catalogue_goes_there_and_back_and_a_field_of_another_type_is_refused_by_name(tmp_path: Path) -> None:
    made, path = Catalogue((H100, SPOT), 5.0, "a test"), tmp_path / "kept" / "offers.json"
    keep(made, path)
    assert kept(path) == made and kept(tmp_path / "none") is None
    path.write_text(path.read_text().replace('"is_spot":true', '"is_spot":1'))
    with pytest.raises(ConfigError, match="is_spot"):
        kept(path)
