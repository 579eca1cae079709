"""What a worker prefills beside what it samples: its caches again at each version, and rollouts of others for audits.

A swap that recomputes caches (`worker.swap_mode recompute_kv`) reads all tokens that are held once more, and nothing is sampled
meanwhile:

    recompute_s = sequences * tokens held by each / prefill tokens/s          once a version

A worker that samples `d` tokens/s and reads `f` tokens for audits for each of them, at `p` tokens/s, keeps a share of its rate:

    rate = d / (1 + f*d/p)

Guarantees: pure; for priors only, since a rate that was measured has both in it. Leaves to others: the roofline of both rates
(roofline), the share that audits read (cli/run_shape), what a second of standing still costs (columns, rehearsal).
"""

from __future__ import annotations

from dataclasses import dataclass

from echo2.cost_model.catalogue import WorkerPrior


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """What a run asks of its workers. `recomputes`: caches at each version. `audit_share`: tokens read for audits, of those
    sampled."""

    recomputes: bool = False
    audit_share: float = 0.0


NO_PREFILL = PrefillWork()


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Of one worker. `recompute_tokens`, `recompute_s`: at each version. `rate_share`: of its rate, what audits leave."""

    tokens_per_s: float
    recompute_tokens: float = 0.0
    recompute_s: float = 0.0
    rate_share: float = 1.0


def prefill_cost(work: PrefillWork, prior: WorkerPrior, tokens_held: float) -> PrefillCost:
    """`tokens_held`: by a sequence at any moment, on average; all sequences together hold no more than the cache."""
    room = prior.fit.engine_count * prior.fit.cache_tokens
    again = min(prior.slots * tokens_held, room) if work.recomputes else 0.0
    read = work.audit_share * prior.tokens_per_s / prior.prefill_tokens_per_s
    return PrefillCost(prior.prefill_tokens_per_s, again, again / prior.prefill_tokens_per_s, 1.0 / (1.0 + read))


def kept_cache_share(mean: float, tail: float, longest: float, token_s: float, period_s: float) -> float:
    """Of all tokens, those of rollouts that a new version meets while they run. Lengths in tokens; `token_s`: seconds of a
    sequence's token; a version comes every `period_s`, at any moment of a rollout alike."""
    from echo2.cost_model.rehearsal import unit_lengths  # loads numpy: only who asks pays for it

    lengths = mean * unit_lengths(mean, tail, longest)
    met = (lengths * token_s / period_s).clip(max=1.0)
    return float((lengths * met).sum() / lengths.sum())
