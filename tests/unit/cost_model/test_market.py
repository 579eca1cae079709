"""Plans and predictions judged by a world that knows nothing of the planner (benchmarks/market_world); `make bench-market` asks
the same of hundreds of fleets."""

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks import bench_market
from benchmarks.bench_market import adding_trial, best_simulated, brute_force_usd, hard_case, infeasible_case, setting
from benchmarks.market_fleets import told, wishes
from benchmarks.market_world import Machine, World, simulate, usual_cap
from echo2.base.errors import ConfigError
from echo2.coordinator.money.market import Catalogue, built_in_catalogue, built_in_models, keep, kept
from echo2.cost_model import machines as cost_machines
from echo2.cost_model.machines import BANDWIDTH_SHARE, STEP_S, MarketOffer, OfferFilter, Roofline, kind_of, worker_prior
from echo2.cost_model.planner import plan
from echo2.cost_model.question import PlanQuestion
from echo2.cost_model.sizing import Quantisation, RunLengths, spread_speed
from tests.unit.cost_model.test_planner import question

USUAL = Machine(8, 30.0, 0.4, 5e7, 2e8)
TRAIN_S = 60.0


def world(**others: object) -> World:
    """S = 4, R = 64 in groups of 8, 60 s a step: four usual machines are enough. Short transfers, unless `others` say so."""
    fields: dict[str, object] = {
        "bound": 4, "batch": 64, "group": 8, "train_s": TRAIN_S, "up": 2e7, "delta": 1e8, "whole": 1e9, "sigma": 0.8,
        "cut": 4.0, **others,
    }  # fmt: skip
    return World(**fields)  # type: ignore[arg-type]


def soaked(*seeds: int) -> list[object]:
    return [pytest.param(seed, marks=pytest.mark.soak) for seed in seeds]


@pytest.mark.parametrize("seed", [2, 11])
def test_best_effort_is_within_a_fiftieth_of_the_best_pool_simulated(seed: int) -> None:
    """2 has a cap; the best pool of 11 was unlucky in its first rehearsal."""
    case = infeasible_case(seed)
    assert case.judged() >= 0.98 * best_simulated(case)


def test_a_long_period_that_the_relations_think_little_of_is_found() -> None:
    """Six machines, S = 5: the relations see 0.12 where the best pool reaches 0.253 with four steps a version."""
    assert infeasible_case(95).judged() >= 0.98 * 0.253


@pytest.mark.parametrize(("seed", "best"), [(49, 0.683), (66, 0.493)])
def test_a_best_effort_finds_the_pool_one_machine_away_from_what_the_relations_prefer(seed: int, best: float) -> None:
    for made in adding_trial(seed)[:2]:
        assert made.predicted_utilisation >= 0.98 * best


@pytest.mark.parametrize(("make", "seed"), [(setting, 0), (setting, 7), (setting, 9), (hard_case, 7), (hard_case, 11)])
def test_prediction_is_near_what_is_simulated(make, seed: int) -> None:  # type: ignore[no-untyped-def]
    """Hard case 11: two machines that are seldom lost cost little; by a normal distribution it seemed 7 %."""
    case = make(seed)
    assert case.made.predicted_utilisation == pytest.approx(case.judged(), abs=0.03)


@pytest.mark.parametrize("seed", [*soaked(39, 376), 507, 0])
def test_one_more_machine_never_makes_a_plan_worse(seed: int) -> None:
    before, after, train_s = adding_trial(seed)
    assert not bench_market.is_worse(before, after, train_s), f"{before.reason} -> {after.reason}"


@pytest.mark.parametrize("seed", [*soaked(0), 1])
def test_a_plan_that_pays_for_traffic_is_within_a_hundredth_of_brute_force_and_is_kept(seed: int) -> None:
    snapshot, config = bench_market.egress_case(seed)
    best, made = brute_force_usd(snapshot, config), plan(snapshot, config)
    assert made.is_feasible == (best is not None)
    assert best is None or made.usd_per_hour <= best * 1.01
    pool = [one for one in snapshot.workers if one.worker_id in made.pool]
    machines, charges = (sum(getattr(one, of) for one in pool) for of in ("price_usd_per_hour", "egress_usd_per_gib"))
    assert made.egress_usd_per_hour == pytest.approx(charges * snapshot.learner.sent_gib_per_hour(made.kappa))
    assert made.usd_per_hour == pytest.approx(machines + made.egress_usd_per_hour)
    again = plan(snapshot, config, made)
    assert (again.pool, again.kappa) == (made.pool, made.kappa)


def test_a_machine_that_the_cap_does_not_allow_is_passed_over() -> None:
    """The least USD for its rate, and dearer than the cap: it once emptied every pool that was looked at."""
    bargain = Machine(400, 30.0, 2.0, 5e7, 2e8)
    cheap = [replace(USUAL, usd_per_hour=0.17) for _ in range(3)]
    made = plan(told(world(), [*cheap, bargain]), wishes(world(), usd_per_hour_cap=0.6))
    assert made.pool == ("w0000", "w0001", "w0002") and not made.is_feasible
    reached = simulate(world(), cheap, made.kappa, made.in_flight_cap_rollouts)
    assert made.predicted_utilisation == pytest.approx(reached, abs=0.03) and reached > 0.7
    many = [replace(USUAL, usd_per_hour=0.17) for _ in range(80)]
    large = world(batch=2048, train_s=TRAIN_S * 2)
    of_many = plan(told(large, [*many, bargain]), wishes(large, usd_per_hour_cap=1.5))
    assert len(of_many.pool) == 8 and "w0080" not in of_many.pool and of_many.usd_per_hour <= 1.5


def test_a_slow_uplink_gets_the_period_that_keeps_the_learner_busiest() -> None:
    """A transfer of 1.5 steps: the period that keeps up, 6, would reach 0.5 where 1 reaches 0.85."""
    slow = world(bound=6, up=2e6, delta=1.5 * TRAIN_S * 2e6 * 0.8, whole=1e12)
    machines = [USUAL] * 5
    made = plan(told(slow, machines), wishes(slow))
    pool = machines[: len(made.pool)]
    by_period = [simulate(slow, machines, kappa, usual_cap(slow, machines)) for kappa in range(1, 7)]
    assert simulate(slow, pool, made.kappa, made.in_flight_cap_rollouts) >= 0.95 * max(by_period) > 1.3 * by_period[5]


# ---- offers ranked for a run: the unit price, kinds by name and memory, filters, what does not fit, measured kinds

CATALOGUE, MODELS = built_in_catalogue(), built_in_models()
RUN = RunLengths(2560)
RTX4090 = MarketOffer("runpod", "a", "eu-cz", "RTX4090", 1, 24, 0.34, False)
SPOT = replace(RTX4090, instance="b", is_spot=True, usd_per_hour=0.20)
H100 = MarketOffer("aws", "p5", "us-east-1", "H100", 8, 80, 40.0, False)
OLD = MarketOffer("aws", "g4", "us-east-1", "T4", 1, 16, 0.5, False)


def for_model(
    model: str, *offers: MarketOffer, wish: OfferFilter = cost_machines.NO_FILTER
) -> list[cost_machines.Ranked]:
    return cost_machines.ranked(offers, MODELS[model], RUN, CATALOGUE, wish=wish)


def test_the_unit_price_is_the_hours_over_what_they_bring() -> None:
    found = {one.offer.instance: one for one in for_model("qwen3-4b", RTX4090, SPOT, H100)}
    prior = worker_prior(CATALOGUE["RTX4090"], MODELS["qwen3-4b"], RUN)
    assert prior.gpu_count == 1 and found["a"].tokens_per_s == pytest.approx(prior.tokens_per_s)
    assert found["a"].usd_per_million == pytest.approx(0.34 / (prior.tokens_per_s * 3600) * 1e6)
    assert found["b"].usd_per_million == pytest.approx(
        0.20 / (prior.tokens_per_s * 3600 * cost_machines.useful_share(0.05, 300)) * 1e6
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
    assert kind_of(replace(a100, gpu_memory_gib=80), CATALOGUE) == "A100-80G"
    assert kind_of(replace(a100, gpu="NVIDIA RTX 4090", gpu_memory_gib=24), CATALOGUE) == "RTX4090"
    assert kind_of(replace(a100, gpu_memory_gib=16), CATALOGUE) == ""


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
        replace(RTX4090, **{name: value})


def test_a_kept_catalogue_goes_there_and_back_and_a_field_of_another_type_is_refused_by_name(tmp_path: Path) -> None:
    made, path = Catalogue((H100, SPOT), 5.0, "a test"), tmp_path / "kept" / "offers.json"
    keep(made, path)
    assert kept(path) == made and kept(tmp_path / "none") is None
    path.write_text(path.read_text().replace('"is_spot":true', '"is_spot":1'))
    with pytest.raises(ConfigError, match="is_spot"):
        kept(path)


# ---- what a machine does before it is measured: its kind by name, the roofline's sides, and what prefill costs

FIRST_CARD, SIZE = CATALOGUE["H100"], MODELS["qwen3-8b"]


@pytest.mark.parametrize(
    ("text", "kind", "count"),
    [
        ("1 x NVIDIA GeForce RTX 4090", "RTX4090", 1),
        ("2 x NVIDIA H100 80GB HBM3", "H100", 2),
        ("8 x NVIDIA A100-SXM4-80GB", "A100-80G", 8),
        ("NVIDIA RTX A6000", "A6000", 1),
        ("1 x NVIDIA RTX 6000 Ada Generation", "RTX6000Ada", 1),
        ("NVIDIA A100", "", 1),  # of which size?
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "", 1),
        ("1 x NVIDIA L4 + 1 x NVIDIA H100", "", 1),
        ("0 x NVIDIA L4", "", 1),
        ("0 x L4", "", 1),
        ("cpu", "cpu", 1),
    ],
)
def test_a_name_gives_its_kind_and_how_many(text: str, kind: str, count: int) -> None:
    assert cost_machines.kind_of_name(text, CATALOGUE) == (kind, count)


def test_a_decode_step_takes_the_longer_of_reading_and_multiplying() -> None:
    def step_s(sequences: int, quantisation: Quantisation = Quantisation.NONE) -> float:
        return Roofline(FIRST_CARD, SIZE, quantisation=quantisation).step_s(sequences, 0.0)

    bandwidth = BANDWIDTH_SHARE * FIRST_CARD.bandwidth_gb_per_s * 1e9
    assert step_s(1) == pytest.approx(SIZE.gpu_weight_bytes / bandwidth + STEP_S)
    computing_s = 2 * 4096 * SIZE.parameters / (cost_machines.DECODE_FLOPS_SHARE * FIRST_CARD.train_tflops * 1e12)
    assert step_s(4096) == pytest.approx(computing_s + STEP_S)
    assert step_s(1) - step_s(1, Quantisation.FP8) == pytest.approx(SIZE.linear_parameters / bandwidth)
    assert step_s(4096, Quantisation.FP8) == step_s(4096), "rounded weights are multiplied no faster"
    short, long = (Roofline(FIRST_CARD, SIZE).tokens_per_s(64, tokens) for tokens in (256, 16_384))
    cache_s = 64 * (16_384 - 256) * 2 * SIZE.kv_values_per_token / bandwidth
    assert 64 / long - 64 / short == pytest.approx(cache_s)


def test_rates_follow_sequences_experts_and_gpus() -> None:
    rates = [Roofline(CATALOGUE["RTX4090"], SIZE).tokens_per_s(count, 1280.0) for count in range(1, 512)]
    assert all(after >= before for before, after in pairwise(rates))
    experts = replace(SIZE, parameters=30_500_000_000, idle_parameters=27_200_000_000)
    dense = replace(experts, idle_parameters=0)
    of_experts, of_dense = (Roofline(FIRST_CARD, size).tokens_per_s(4096, 0.0) for size in (experts, dense))
    assert of_experts > 4 * of_dense
    one, two = (Roofline(FIRST_CARD, SIZE, spread_speed(count)).step_s(64, 1280.0) - STEP_S for count in (1, 2))
    assert 1.0 < one / two < 2.0
    small, large = (worker_prior(CATALOGUE["RTX4090"], MODELS[n], RunLengths(4096)) for n in ("qwen3-4b", "qwen3-32b"))
    assert small.gpu_count == 1 < large.gpu_count
    assert small.tokens_per_s > large.tokens_per_s / large.gpu_count
    assert cost_machines.train_s_prior(FIRST_CARD, 4, 8.0, 1e6) == pytest.approx(0.1 + 48e15 / (4 * 990e12 * 0.23))


def asked(*, recomputes: bool) -> PlanQuestion:
    """Two RTX3090, a card with much bandwidth for its arithmetic."""
    found = question()
    return replace(found, offers=(replace(found.offers[0], gpu="RTX3090", gpus=2),), recomputes_caches=recomputes)


def test_what_is_prefilled_beside_sampling_is_in_a_prior_rate_once_and_in_a_measured_one_not_again() -> None:
    told = asked(recomputes=True)
    prior, cost = told.prior(told.offers[0]), told.prefill_cost(told.offers[0])
    assert cost.recompute_tokens == pytest.approx(44 * told.tokens_in_cache)
    assert cost.recompute_s == pytest.approx(cost.recompute_tokens / prior.prefill_tokens_per_s)
    worker, plain = told.worker(told.offers[0], 0), asked(recomputes=False).worker(told.offers[0], 0)
    assert worker.swap_s == cost.recompute_s > 0.0 == plain.swap_s
    assert worker.tokens_per_s == plain.tokens_per_s == prior.tokens_per_s
    measured = replace(told, offers=(replace(told.offers[0], tokens_per_s=1000.0),)).worker
    worker = measured(replace(told.offers[0], tokens_per_s=1000.0), 0)
    assert (worker.tokens_per_s, worker.swap_s) == (1000.0, 0.0)
    full = cost_machines.prefill_cost(prior, 1e9, recomputes=True)
    assert full.recompute_tokens == prior.fit.engine_count * prior.fit.cache_tokens, "the cache holds no more"
