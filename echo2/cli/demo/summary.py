"""Summarises a finished demo as text, JSON and plots, and lists violated promises."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echo2.base.units import format_bytes
from echo2.config.run import RunConfig
from echo2.wire.gen.echo2.v1 import coordinator_pb2

SAMPLES_SHOWN = 3  # before and after fit on one screen
RAMP_STEPS = 5  # machines still start and their rates are being measured


@dataclass(frozen=True, slots=True)
class Summary:
    """The summary's text. `problems`: violated promises, empty if there are none."""

    text: str
    problems: tuple[str, ...]


def write_summary(run_folder: Path, config: RunConfig, status: coordinator_pb2.RunStatus, elapsed_s: float) -> Summary:
    """Writes summary.json and plots into the run folder, from the learner's metrics.jsonl, samples.jsonl and evaluations.jsonl."""
    rows = _rows(run_folder / "learner" / "metrics.jsonl")
    samples = _rows(run_folder / "learner" / "samples.jsonl")
    steps = [row for row in rows if "reward/mean" in row]
    evaluated = _rows(run_folder / "learner" / "evaluations.jsonl")
    evaluations = [(int(row["step"]), float(row["eval/reward"])) for row in evaluated]
    problems = _problems(status, config)
    facts = _facts(status, steps, evaluations, elapsed_s)
    (run_folder / "summary.json").write_text(json.dumps(facts | {"problems": problems}, indent=1) + "\n")
    _plot(run_folder / "plots", steps, evaluations, config)
    text = _text(run_folder, facts, samples, problems)
    return Summary(text, tuple(problems))


def _rows(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def _facts(
    status: coordinator_pb2.RunStatus,
    steps: Sequence[dict[str, Any]],
    evaluations: Sequence[tuple[int, float]],
    elapsed_s: float,
) -> dict[str, Any]:
    learner = status.learner
    measured, predicted = steady_utilisation(steps)
    return {
        "elapsed_s": round(elapsed_s, 1),
        "steps": learner.step,
        "held_out_reward_first": evaluations[0][1] if evaluations else None,
        "held_out_reward_last": evaluations[-1][1] if evaluations else None,
        "reward_last_10_steps": sum(row["reward/mean"] for row in steps[-10:]) / max(1, len(steps[-10:])),
        "trained_rollouts": learner.trained_rollouts,
        "trained_tokens": learner.trained_tokens,
        "tokens_over_bound": learner.over_stale_tokens_trained,
        "dropped_stale_rollouts": learner.dropped_stale_rollouts,
        "duplicate_rollouts": learner.duplicate_rollouts,
        "lag_histogram": list(learner.lag_histogram),
        "utilisation_measured": measured,
        "utilisation_predicted": predicted,
        **_published_bytes(steps),
        "audit_own_s_per_step": round(learner.audit_s, 4),
        "usd_spent": round(status.usd_spent, 6),
        "usd_useful": round(status.usd_useful, 6),
        "versions_equal": {
            worker.name: worker.heartbeat.fingerprint == learner.fingerprint for worker in status.workers
        },
        "fingerprint": learner.fingerprint,
    }


def _published_bytes(steps: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Returns the bytes that the learner published, by kind: every worker fetches the deltas; keyframes and merged deltas serve
    workers that join late or fall behind."""
    last = steps[-1] if steps else {}
    kinds = (("delta_bytes", "deltas"), ("keyframe_bytes", "keyframes"), ("merged_delta_bytes", "merged"))
    return {
        **{name: int(last.get(f"bytes/{kind}", 0)) for name, kind in kinds},
        "full_snapshot_bytes": int(last.get("bytes/full_snapshots", 0)),
    }


def published_text(facts: Mapping[str, Any]) -> str:
    """Formats one line: deltas against full snapshots of the same versions, and what else was published."""
    whole = facts["full_snapshot_bytes"]
    share = facts["delta_bytes"] / whole if whole else 0.0
    return (
        f"published              deltas of {format_bytes(facts['delta_bytes'])}, {share:.0%} of full snapshots "
        f"({format_bytes(whole)}); for workers that come late: keyframes of {format_bytes(facts['keyframe_bytes'])}, "
        f"merged deltas of {format_bytes(facts['merged_delta_bytes'])}"
    )


def audit_text(own_s_per_step: float) -> str:
    """Formats one line: the audit's cost."""
    return f"audit                  the learner scored {own_s_per_step:.3g} s a step on its own device"


def steady_utilisation(steps: Sequence[dict[str, Any]]) -> tuple[float | None, float | None]:
    """Returns measured and predicted utilisation over the same steps: from RAMP_STEPS after the first step with a prediction.

    Earlier the learner waits for machines to start and for the first rates to be measured, which the model does not cover.
    """
    planned = [number for number, row in enumerate(steps) if row.get("utilisation/predicted")]
    steady = steps[planned[0] + RAMP_STEPS :] if planned else []
    if not steady:
        return None, None
    busy = sum(row["step_s"] for row in steady)
    waiting = sum(row["phase/wait_s"] for row in steady)
    predicted = sum(row["utilisation/predicted"] * row["step_s"] for row in steady) / busy
    return round(busy / (busy + waiting), 4), round(predicted, 4)


def lags_of(steps: Sequence[dict[str, Any]]) -> list[int]:
    """Tokens trained on in the whole run, by lag."""
    rows = [row.get("lag/histogram", []) for row in steps]
    return [sum(row[lag] for row in rows if lag < len(row)) for lag in range(max(map(len, rows), default=0))]


def _problems(status: coordinator_pb2.RunStatus, config: RunConfig) -> list[str]:
    learner = status.learner
    problems = []
    if learner.step < config.learner.steps:
        problems.append(f"expected {config.learner.steps} steps, got {learner.step}")
    if learner.over_stale_tokens_trained:
        problems.append(f"expected 0 tokens trained above S, got {learner.over_stale_tokens_trained}")
    for worker in status.workers:
        if worker.state == "alive" and worker.heartbeat.fingerprint != learner.fingerprint:
            problems.append(
                f"worker {worker.name}: expected final weights {learner.fingerprint}, got "
                f"{worker.heartbeat.fingerprint or 'none'} (version {worker.heartbeat.version})"
            )
    return problems


def _text(run_folder: Path, facts: dict[str, Any], samples: Sequence[dict[str, Any]], problems: Sequence[str]) -> str:
    first, last = facts["held_out_reward_first"], facts["held_out_reward_last"]
    equal = [name for name, is_equal in facts["versions_equal"].items() if is_equal]
    lines = [
        "",
        f"held-out reward        {_number(first)} -> {_number(last)} in {facts['steps']} steps, {facts['elapsed_s']:.0f} s",
        f"tokens trained above S {facts['tokens_over_bound']} of {facts['trained_tokens']}; "
        f"rollouts dropped as stale {facts['dropped_stale_rollouts']}, duplicates {facts['duplicate_rollouts']}",
        f"learner utilisation    {_percent(facts['utilisation_measured'])} measured, "
        f"{_percent(facts['utilisation_predicted'])} predicted, after the first plan",
        published_text(facts),
        audit_text(facts["audit_own_s_per_step"]),
        f"final weights          equal to the learner's bit for bit at {len(equal)} of {len(facts['versions_equal'])} workers",
        f"cost                   USD {facts['usd_spent']:.4f}{_per_million(facts)}",
        f"run folder             {run_folder}: run.toml, summary.json, plots/, learner/metrics.jsonl, "
        "learner/samples.jsonl, learner/model/",
    ]
    for sample in [s for s in samples if s.get("step") == 0][:SAMPLES_SHOWN]:
        after = [s for s in samples if s["prompt"] == sample["prompt"]][-1]
        lines.append(
            f"  {sample['prompt']!r}: before {sample['completion']!r} ({sample['reward']:.2f}), "
            f"after {after['completion']!r} ({after['reward']:.2f})"
        )
    return "\n".join([*lines, *(f"PROBLEM: {problem}" for problem in problems)])


def _per_million(facts: dict[str, Any]) -> str:
    tokens, usd = facts["trained_tokens"], facts["usd_spent"]
    return f", {1e6 * usd / tokens:.2f} per million tokens trained on" if tokens and usd else ""


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _plot(
    folder: Path, steps: Sequence[dict[str, Any]], evaluations: Sequence[tuple[int, float]], config: RunConfig
) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(exist_ok=True)
    numbers, lag_counts = [row["step"] for row in steps], lags_of(steps)

    def save(name: str, draw: Callable[[Any], object], **labels: object) -> None:
        figure, axes = plt.subplots(figsize=(8, 4))
        draw(axes)
        axes.set(**labels)
        axes.legend()
        figure.savefig(folder / name, dpi=120, bbox_inches="tight")
        plt.close(figure)

    def rewards(axes: Any) -> None:
        axes.plot(numbers, [row["reward/mean"] for row in steps], lw=1, label="training rollouts")
        if evaluations:
            axes.plot(*zip(*evaluations, strict=True), "o-", label="held-out prompts")

    def utilisation(axes: Any) -> None:
        axes.plot(numbers, [row.get("utilisation", float("nan")) for row in steps], label="measured")
        axes.plot(numbers, [row.get("utilisation/predicted", float("nan")) for row in steps], "--", label="predicted")

    def lags(axes: Any) -> None:
        axes.bar(range(len(lag_counts)), lag_counts)
        axes.axvline(config.staleness.bound + 0.5, color="red", label=f"S = {config.staleness.bound}")

    save("reward.png", rewards, xlabel="step", ylabel="mean reward", ylim=(0, 1.02), title="Reward")
    save(
        "utilisation.png",
        utilisation,
        xlabel="step",
        ylabel="learner utilisation",
        ylim=(0, 1.05),
        title="Learner utilisation",
    )
    save("lag.png", lags, xlabel="lag of trained tokens (steps)", ylabel="tokens", title="Staleness")
