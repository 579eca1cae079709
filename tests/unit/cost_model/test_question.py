from __future__ import annotations

from dataclasses import replace

import pytest

from echo2.base.errors import ConfigError
from echo2.coordinator.money.market import built_in_catalogue, built_in_models
from echo2.cost_model.machines import gpu_of, parse_catalogue, worker_prior
from echo2.cost_model.plan import Plan
from echo2.cost_model.planner import plan
from echo2.cost_model.question import PlanQuestion, PoolOffer, TokenCounts, advise, billions_in, parse_what_if
from echo2.cost_model.sizing import RunLengths
from echo2.cost_model.snapshot import LinkEstimate, PlanConfig
from tests.unit.cost_model.fleets import learner

CATALOGUE, MODELS = built_in_catalogue(), built_in_models()


def question() -> PlanQuestion:
    link = LinkEstimate(12.5e6, 5e7, 0.08)
    offers = (PoolOffer("RTX5090", 24, 0.55, link), PoolOffer("H100", 8, 2.4, link))
    return PlanQuestion(
        MODELS["qwen3-8b"], RunLengths(9216), learner(rollouts_per_step=2048, train_s=200.0), PlanConfig(4),
        TokenCounts(2800, 7000, 8192), offers, CATALOGUE,
    )  # fmt: skip


def test_what_if_changes_one_number_and_the_plan_with_it() -> None:
    base = question()
    before = plan(base.snapshot(), base.wishes)
    dear = base.what_if("price.RTX5090", "9.0")
    after = plan(dear.snapshot(), dear.wishes)
    assert before.is_feasible and after.is_feasible
    assert any(one.startswith("RTX5090") for one in before.pool)
    assert not any(one.startswith("RTX5090") for one in after.pool) or after.usd_per_hour > before.usd_per_hour
    assert base.what_if("uplink", "1gbit").learner.link.uplink_bytes_per_s == 125e6
    assert base.what_if("S", "2").wishes.staleness_bound == 2
    assert base.what_if("count.H200", "3").offers[-1].count == 3
    assert parse_what_if("uplink=1gbit, S=4") == [("uplink", "1gbit"), ("S", "4")]


def test_a_larger_batch_or_longer_rollouts_take_longer_to_train_on() -> None:
    base = question()
    more = base.what_if("R", str(3 * base.learner.trained_rollouts)).learner
    longer = base.what_if("mean", str(2 * base.tokens.mean)).learner
    assert more.trained_rollouts == 3 * base.learner.trained_rollouts
    assert 2.5 < more.train_s / base.learner.train_s <= 3 and 1.7 < longer.train_s / base.learner.train_s <= 2


def test_a_slower_learner_is_advised_only_where_a_step_gets_no_dearer() -> None:
    base = question()
    effort = replace(plan(base.snapshot(), base.wishes), is_feasible=False)

    def advised(usd_per_hour: float) -> bool:
        def planned(changed: PlanQuestion) -> Plan | None:
            slower = changed.learner.train_s > base.learner.train_s
            return replace(effort, is_feasible=True, usd_per_hour=usd_per_hour) if slower else None

        return any(one.what_if.startswith("train=") for one in advise(base, effort, planned))

    assert not advised(effort.usd_per_hour) and advised(0.0)


def test_advice_plans_no_change_twice() -> None:
    """S has a limit of its own, which several factors reach."""
    base, asked = question(), list[PlanQuestion]()
    effort = replace(plan(base.snapshot(), base.wishes), is_feasible=False)

    def planned(changed: PlanQuestion) -> Plan | None:
        asked.append(changed)
        return None

    assert advise(base, effort, planned) == ()
    assert max(one.wishes.staleness_bound for one in asked) == 64 and base not in asked
    assert all(one not in asked[:place] for place, one in enumerate(asked))


def test_advice_passes_over_what_cannot_be_asked_and_a_budget_does_not_hide_a_slower_learner() -> None:
    base = question()
    base = replace(base, wishes=replace(base.wishes, usd_budget=1000.0))
    effort = replace(plan(base.snapshot(), base.wishes), is_feasible=False)

    def planned(changed: PlanQuestion) -> Plan | None:
        if sum(offer.count for offer in changed.offers) > 1000:
            raise ConfigError("snapshot: workers: expected 1 to 1000 workers")
        is_more = sum(offer.count for offer in changed.offers) > 100
        is_slower = 2.5 < changed.learner.train_s / base.learner.train_s < 10  # beyond, the hours cost too much
        return replace(effort, is_feasible=True, usd_per_hour=0.0) if is_more or is_slower else None

    found = {one.what_if.partition("=")[0] for one in advise(base, effort, planned)}
    assert found == {"count.RTX5090", "train"}


@pytest.mark.parametrize(
    ("name", "value"),
    [("S", "-1"), ("S", "65"), ("S", "x"), ("uplink", "0bit"), ("colour", "3"), ("price.GTX", "1"), ("price", "1"), ("cap", "-1"),
     ("train", "nan"), ("kappa", "9")],
)  # fmt: skip
def test_bad_what_ifs_are_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match="expected"):
        question().what_if(name, value)


def test_bad_catalogues_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="memory_gib"):
        parse_catalogue({"A": {"price": 1}})
    table = {"memory_gib": 1.0, "bandwidth_gb_per_s": -1, "usd_per_hour": 1, "train_tflops": 1}
    with pytest.raises(ConfigError, match="GPU A: bandwidth_gb_per_s"):
        parse_catalogue({"A": table})
    with pytest.raises(ConfigError, match="RTX4090"):
        gpu_of(CATALOGUE, "RTX4091")


def test_tokens_in_cache_lie_between_half_the_mean_and_half_the_longest() -> None:
    asked = question()
    prompt = (9216 - 8192) / 2
    assert prompt + asked.tokens.mean / 2 < asked.tokens_in_cache < prompt + asked.tokens.longest / 2
    prior = asked.prior(asked.offers[0])
    assert prior.tokens_per_s > worker_prior(CATALOGUE["RTX5090"], asked.model, asked.lengths).tokens_per_s


def test_model_sizes_are_read_from_names() -> None:
    assert billions_in("Qwen/Qwen3-8B") == 8.0
    assert billions_in("Qwen2.5-0.5B-Instruct") == 0.5
    assert billions_in("tiny") is None
