"""How soon the rollout audit finds each kind of cheat, on a real small policy, and whether it ever flags an honest worker.

    python -m benchmarks.bench_audit [--seconds 150] [--times 3]

Each cheat is watched several times, with other random numbers, until it is accused or `GROUPS_MAX` groups were looked at.
Honest workers of other precisions and batch sizes are watched for the rest of the time, each as a worker of its own for
as many rollouts as everything of a newcomer is audited. Counts and sizes (nats) depend on seeds alone, not on the machine;
how many honest workers there are depends on its speed. Writes results/audit.json and the table of docs/security.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import audit_cost
from benchmarks.audit_workers import (
    OLDEST,
    PREVIOUS,
    SIBLINGS,
    TOKENS,
    Bench,
    Maker,
    altered,
    best_of,
    by_likelihood,
    by_reward,
    copied,
    cut_short,
    dishonest_tail,
    fabricated,
    fleet_noise,
    float8,
    forged_raw,
    hands_back_hard_prompts,
    honest,
    honest_over_a_swap,
    make_bench,
    memorised,
    near_misses,
    one_behind,
    one_token,
    others_tokens,
    perturbed,
    quantised,
    watched,
)
from echo2.learner.audit import NEWCOMER_TOKENS, Habits
from echo2.learner.bets import FALSE_ALARMS_A_DAY, NUMBERS_FACTOR, Accusation

RESULTS = Path(__file__).parent / "results" / "audit.json"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "security.md"
BEGIN, END = "<!-- audit: begin -->", "<!-- audit: end -->"
TIMES = 3
GROUPS_MAX = 20

KIND, FLEET_NOISE_NATS = "embedded none", 0.002
"""Of the worker that is watched, and the noise measured of the others of its kind: bf16 on this model."""
ALLOWED_NATS = NUMBERS_FACTOR * FLEET_NOISE_NATS


OWN = ", says that it cannot draw by its seeds"
WORST = {
    "hands back prompts whose first completion is poor, the rest honest": "others draw them by the same seeds; one lease in 17",
    f"best of four by reward{OWN}": "refused by default; where drafts are allowed, its rollouts are the best of four",
    f"best of four by likelihood{OWN}": "refused by default; where drafts are allowed, its rollouts are the best of four",
}
"""What a lie that is not found can do."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Of one kind of worker. `rollouts`: until it was accused, each time; `noise_nats`: how far its numbers were off."""

    worker: str
    noise_nats: float
    watched: int
    rollouts: list[int]
    bets: list[str]
    certain: int
    rollouts_max: int


def lies(bench: Bench) -> dict[str, Maker]:
    """What an audit must find, whatever the model, but for those that `WORST` tells of."""
    return {
        "the previous version, float32": one_behind(bench),
        "the previous version, bf16": one_behind(bench, torch.bfloat16),
        "tokens of the version before, with honest numbers of the one named": others_tokens(bench, PREVIOUS),
        "tokens of the oldest version admitted, with honest numbers of the newest": others_tokens(bench, OLDEST),
        "made-up log-probabilities": fabricated(bench),
        "one of a token's two numbers made up": forged_raw(bench),
        "ends for its length after one token": one_token(bench),
        "completions cut short with a stop token": cut_short(bench),
        "one completion handed in for all siblings": copied(bench),
        "one memorised answer a group, honest numbers": memorised(bench),
        "best of four by reward, honest numbers": best_of(bench, by_reward),
        "best of four by reward, of the oldest version admitted": best_of(bench, by_reward, OLDEST),
        "best of four by likelihood, honest numbers": best_of(bench, by_likelihood),
        f"best of four by reward{OWN}": best_of(bench, by_reward),
        f"best of four by likelihood{OWN}": best_of(bench, by_likelihood),
        "hands back prompts whose first completion is poor, the rest honest": hands_back_hard_prompts(bench),
        "honest until the version changes, a choice behind it": dishonest_tail(bench),
        "nearly greedy sampling, honest numbers": altered(bench, None, coldness=8.0),
        "sharpened sampling (temperature 0.67), honest numbers": altered(bench, None, coldness=1.5),
        "best of 16 within six deviations of the noise of an unmeasured kind, honest numbers": near_misses(bench, 0.6),
        "best of four within 0.02 nats, honest numbers": near_misses(bench, 0.02, tries=4),
    }


def cheats(bench: Bench) -> dict[str, Maker]:
    """Lies, and alterations: what is as small as honest noise must pass."""
    made = lies(bench) | {"weights in fp8 (e4m3)": altered(bench, float8)}
    for bits in (8, 6, 5, 4):
        made[f"weights in int{bits}"] = altered(bench, quantised(bits))
    for size in (0.02, 0.05, 0.1, 0.2):
        made[f"weights perturbed by {size:g} of their mean size"] = altered(bench, perturbed(size))
    return made


def finding_of(bench: Bench, worker: str, make: Maker, times: int = TIMES) -> Finding:
    rollouts, bets, certain, noises = [], [], 0, []
    for time_number in range(times):
        by_seed = OWN not in worker
        habits, noise = Habits(by_seed, kind=KIND), fleet_noise(KIND, FLEET_NOISE_NATS)
        held, seen, accusation = watched(bench, make, GROUPS_MAX, 1000 * time_number, habits, noise)
        noises.append(held.noise_nats)
        if accusation is not None:
            rollouts.append(seen)
            bets.append(accusation.bet)
            certain += accusation.is_certain
    return Finding(worker, statistics.mean(noises), times, rollouts, bets, certain, GROUPS_MAX * SIBLINGS)


def honest_kinds(bench: Bench) -> dict[str, Maker]:
    """Precisions and batch sizes."""
    return {
        "float32, batch 8": honest(bench),
        "bf16, batch 8": honest(bench, torch.bfloat16),
        "float16, batch 8": honest(bench, torch.float16),
        "float32, batch 1": honest(bench, siblings=1),
        "bf16, batch 3": honest(bench, torch.bfloat16, siblings=3),
        "float32, over a change of versions": honest_over_a_swap(bench),
    }


def watch_newcomer(bench: Bench, make: Maker, number: int) -> tuple[float, Accusation | None]:
    """One honest worker for as many tokens as are looked at of every newcomer: the noise of its numbers in nats, and what
    it was accused of. Equal numbers give equal workers."""
    groups = NEWCOMER_TOKENS // (len(make(0)) * TOKENS)
    noise = fleet_noise(KIND, FLEET_NOISE_NATS)
    held, _, accusation = watched(bench, make, groups, 100_000 + 1000 * number, noise=noise)
    return held.noise_nats, accusation


def watch_honest(bench: Bench, until: float) -> tuple[dict[str, int], int, float]:
    """How many honest workers of each kind were watched, how many were accused, and the largest noise of one."""
    kinds = honest_kinds(bench)
    counts, accused, noise = dict.fromkeys(kinds, 0), 0, 0.0
    number = 0
    while time.monotonic() < until or not all(counts.values()):
        for kind, make in kinds.items():
            off_by, accusation = watch_newcomer(bench, make, number)
            counts[kind] += 1
            accused += accusation is not None
            noise = max(noise, off_by)
            number += 1
    return counts, accused, noise


def rows_of(kept: dict[str, Any]) -> list[dict[str, object]]:
    """Targets: whatever is off by more than honest engines may be, or lies otherwise, is found within a newcomer's tokens
    (and truncation, of which a completion says one bit, within four times as many)."""
    rows: list[dict[str, object]] = []
    for one in (Finding(**given) for given in kept["findings"]):
        is_altered = one.worker.startswith("weights")
        is_allowed = (not one.rollouts and one.worker in WORST) or (is_altered and one.noise_nats <= ALLOWED_NATS)
        rate = 100.0 * len(one.rollouts) / one.watched
        rows.append(row(f"{one.worker}: found", rate, "%", None if is_allowed else 100.0, "higher"))
        median = statistics.median(one.rollouts) if one.rollouts else None
        slow = 4.0 if "draw" in one.bets else 1.0
        rows.append(
            row(f"{one.worker}: rollouts until found, median", median, "rollouts",
                None if is_allowed else slow * NEWCOMER_TOKENS / TOKENS, "lower")
        )  # fmt: skip
    rows.append(row("honest workers watched", sum(kept["honest"].values()), "workers", None, "higher"))
    rows.append(row("honest workers accused", kept["honest_accused"], "workers", 0, "lower"))
    rows.append(row("largest noise of an honest worker", kept["honest_noise_nats"], "nats", ALLOWED_NATS, "lower"))
    rows.append(row("bound on false alarms", FALSE_ALARMS_A_DAY, "a worker and day", 1e-6, "lower"))
    return rows


def row(name: str, value: object, unit: str, target: float | None, better: str) -> dict[str, object]:
    return {"name": name, "value": value, "unit": unit, "target": target, "better": better}


def table_of(kept: dict[str, Any]) -> str:
    """The table of docs/security.md."""
    lines = ["| worker | off by, nats | after rollouts | by | then |", "|---|---|---|---|---|"]
    for one in (Finding(**given) for given in kept["findings"]):
        if one.rollouts:
            median, worst = statistics.median(one.rollouts), max(one.rollouts)
            when = f"{median:.0f}" if worst == median else f"{median:.0f}, at worst {worst}"
            if len(one.rollouts) < one.watched:
                when += f"; {len(one.rollouts)} of {one.watched}"
            then = "quarantined" if not one.certain else "banned" if one.certain == len(one.rollouts) else "either"
            then = "refused" if one.bets[0] == "intake" else then
        else:
            when = "not found"
            then = WORST.get(one.worker, "within its kind's noise" if one.noise_nats <= ALLOWED_NATS else "")
        lines.append(f"| {one.worker} | {one.noise_nats:.3f} | {when} | {', '.join(sorted(set(one.bets)))} | {then} |")
    watched = sum(kept["honest"].values())
    lines.append(
        f"| {watched} honest workers | {kept['honest_noise_nats']:.3f} | {kept['honest_accused']} accused | | |"
    )
    return "\n".join(lines)


def write_page(kept: dict[str, Any], page: Path = PAGE) -> None:
    text = page.read_text()
    head, tail = text.split(BEGIN)[0], text.split(END)[1]
    page.write_text(f"{head}{BEGIN}\n\n{table_of(kept)}\n\n{END}{tail}")


def measure_workers(kept: dict[str, Any], only: str | None, seconds: float, times: int) -> None:
    """Cheats, and honest workers for the rest of the time."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        bench = make_bench(Path(folder))
        if only in (None, "cheats"):
            findings = []
            for worker, make in cheats(bench).items():
                findings.append(asdict(finding_of(bench, worker, make, times)))
                print(f"{time.monotonic() - began:6.1f} s  {findings[-1]}", flush=True)
            kept["findings"] = findings
        if only in (None, "honest"):
            kept["honest"], kept["honest_accused"], kept["honest_noise_nats"] = watch_honest(bench, began + seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument(
        "--times", type=int, default=TIMES, help="how often each lie is watched, with other random numbers"
    )
    parser.add_argument(
        "--only", choices=("cheats", "honest", "cost"), help="measure one part, keep what is known of the others"
    )
    given = parser.parse_args()
    kept: dict[str, Any] = json.loads(RESULTS.read_text()) if given.only else {}
    if given.only != "cost":
        measure_workers(kept, given.only, given.seconds, given.times)
    if given.only in (None, "cost"):
        kept["cost"] = audit_cost.measured()
    kept["rows"] = rows_of(kept) + audit_cost.rows_of(kept["cost"])
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    write_page(kept)
    print(table_of(kept))


if __name__ == "__main__":
    main()
