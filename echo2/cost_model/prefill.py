"""What a worker prefills besides sampling: its KV caches again at each version, and other workers' rollouts for audits.

A swap that recomputes caches (`worker.swap_mode recompute_kv`) prefills all cached tokens again and samples nothing meanwhile:

    recompute_s = sequences * cached tokens of each / prefill tokens/s          once per version

A worker that samples `d` tokens/s and prefills `f` tokens for audits per sampled token, at `p` tokens/s, keeps part of its rate:

    rate = d / (1 + f*d/p)

Guarantees: pure; for priors only, since a measured rate includes both. Leaves to others: the roofline of both rates (roofline),
the share that audits prefill (cli/run_shape), the cost of a second of pausing (columns, rehearsal).
"""

from __future__ import annotations

from dataclasses import dataclass

from echo2.cost_model.catalogue import WorkerPrior


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """Prefill that a run asks of its workers. `recomputes`: whether swaps recompute KV caches. `audit_share`: tokens prefilled for
    audits per sampled token."""

    recomputes: bool = False
    audit_share: float = 0.0


NO_PREFILL = PrefillWork()


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Prefill cost of one worker. `tokens_per_s`: its prefill rate. `recompute_tokens`, `recompute_s`: per version. `rate_share`:
    share of its sampling rate that audits leave."""

    tokens_per_s: float
    recompute_tokens: float = 0.0
    recompute_s: float = 0.0
    rate_share: float = 1.0


def prefill_cost(work: PrefillWork, prior: WorkerPrior, tokens_held: float) -> PrefillCost:
    """The prefill cost of a worker. `tokens_held`: average cached tokens of a sequence; the total is limited by the cache."""
    room = prior.fit.engine_count * prior.fit.cache_tokens
    again = min(prior.slots * tokens_held, room) if work.recomputes else 0.0
    read = work.audit_share * prior.tokens_per_s / prior.prefill_tokens_per_s
    return PrefillCost(prior.prefill_tokens_per_s, again, again / prior.prefill_tokens_per_s, 1.0 / (1.0 + read))


def kept_cache_share(mean: float, tail: float, longest: float, token_s: float, period_s: float) -> float:
    """Share of all tokens that belong to rollouts during which a new version arrives. Lengths in tokens; `token_s`: seconds per
    token of a sequence. A version arrives every `period_s`, equally likely at any moment of a rollout."""
    from echo2.cost_model.rehearsal import unit_lengths  # loads numpy, so only on demand

    lengths = mean * unit_lengths(mean, tail, longest)
    met = (lengths * token_s / period_s).clip(max=1.0)
    return float((lengths * met).sum() / lengths.sum())
