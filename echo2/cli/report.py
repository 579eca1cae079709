"""The report of a finished run: text, summary.json, plots, and a page that opens without a server; with violated promises."""

from __future__ import annotations

import base64
import html
import importlib.resources
import importlib.util
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from google.protobuf.json_format import ParseDict

from echo2.base.errors import StateError
from echo2.base.units import counted, format_bytes, format_seconds
from echo2.cli.process import wrapped
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb

SAMPLES_SHOWN, SAMPLE_CHARS = 3, 240  # before and after fit on one screen; `echo2 samples` has them whole
SUMMARY, PAGE = "summary.json", "report.html"  # in the run's folder
PLOTS = ("reward.png", "utilisation.png", "lag.png")
PARTS = ("dom.js", "format.js", "rollouts.js")  # of the dashboard, in the order in which they need one another
RAMP_STEPS = 5  # machines still start and their rates are being measured


@dataclass(frozen=True, slots=True)
class RunReport:
    """The report as text. `problems`: violated promises, empty if there are none."""

    text: str
    problems: tuple[str, ...]


def write_report(run_folder: Path, status: pb.RunStatus, elapsed_s: float | None = None) -> RunReport:
    """Writes summary.json, plots and report.html into the run folder, from the run's last status and the learner's files there.
    `elapsed_s`: since the command that ran it began; None if several programs did."""
    steps = [row for row in rows_of(run_folder / "learner" / "metrics.jsonl") if "reward/mean" in row]
    evaluated = rows_of(run_folder / "learner" / "evaluations.jsonl")
    evaluations = [(int(row["step"]), float(row["eval/reward"])) for row in evaluated]
    facts = _facts(status, steps, evaluations, elapsed_s) | {"problems": _problems(status)}
    partial = run_folder / f"{SUMMARY}.partial"
    partial.write_text(json.dumps(facts, indent=1) + "\n")
    partial.rename(run_folder / SUMMARY)  # a full disk leaves none, or the one before
    if importlib.util.find_spec("matplotlib") is not None:  # a coordinator's machine has it not
        _plot(run_folder / "plots", steps, evaluations, status.learner_hello.staleness_bound)
    _write_page(run_folder, facts, {worker.peer_id: worker.name for worker in status.workers})
    return read_report(run_folder)


def read_report(run_folder: Path) -> RunReport:
    """The report that was written into the folder. StateError if there is none."""
    path = run_folder / SUMMARY
    if not path.is_file():
        raise StateError(f"run folder {run_folder}: expected {SUMMARY} of a finished run, found none")
    facts = json.loads(path.read_text())
    lines = ["", *(wrapped(f"{label:<22} {text}", 23) for label, text in _entries(run_folder, facts))]
    samples = samples_of(run_folder)[1][:SAMPLES_SHOWN]
    lines += [wrapped(f"  {line}", 6) for sample in samples for line in sample.lines(SAMPLE_CHARS)]
    lines += [wrapped(f"PROBLEM: {problem}", 9) for problem in facts["problems"]]
    return RunReport("\n".join(lines), tuple(facts["problems"]))


def is_reported(run_folder: Path) -> bool:
    """Whether the folder has a report and no step was trained after it."""
    report, metrics = run_folder / SUMMARY, run_folder / "learner" / "metrics.jsonl"
    return report.is_file() and not (metrics.is_file() and metrics.stat().st_mtime > report.stat().st_mtime)


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The complete lines: the last one may be under way, or torn by a full disk."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


@dataclass(frozen=True, slots=True)
class HeldOutSample:
    prompt: str
    answer: str
    before: str
    reward_before: float
    after: str
    reward_after: float

    def lines(self, chars: int = 1 << 20) -> tuple[str, str]:
        """The two lines; of each text `chars` characters, the first half and the last, where the answer is."""

        def cut(text: str) -> str:
            return repr(text if len(text) <= chars else f"{text[: chars // 2]} ... {text[-chars // 2 :]}")

        expected = f", expected {cut(self.answer)}" if self.answer else ""
        before, after = f"{cut(self.before)} ({self.reward_before:.2f})", f"{cut(self.after)} ({self.reward_after:.2f})"
        return f"{cut(self.prompt)}{expected}", f"  before {before}, after {after}"


def samples_of(run_folder: Path) -> tuple[str, list[HeldOutSample]]:
    """The lines with which every held-out prompt begins, and those that were answered by the base model, too, each once, without
    these lines."""
    first: dict[tuple[str, str], dict[str, Any]] = {}
    last: dict[tuple[str, str], dict[str, Any]] = {}
    rows = rows_of(run_folder / "learner" / "samples.jsonl")
    shared = _shared_lines({row["prompt"] for row in rows})
    for row in rows:
        asked = row["prompt"][len(shared) :], str(row.get("answer", ""))
        last[asked] = row
        if row["step"] == 0:
            first.setdefault(asked, row)
    return shared, [
        HeldOutSample(*asked, row["completion"], row["reward"], last[asked]["completion"], last[asked]["reward"])
        for asked, row in first.items()
    ]


def _shared_lines(prompts: set[str]) -> str:
    """The lines with which every prompt begins, as a chat template's system text; empty if there is one prompt."""
    lines = zip(*(prompt.splitlines(keepends=True)[:-1] for prompt in prompts), strict=False)
    shared = takewhile(lambda line: len(set(line)) == 1, lines)
    return "".join(line[0] for line in shared) if len(prompts) > 1 else ""


def _facts(
    status: pb.RunStatus,
    steps: Sequence[dict[str, Any]],
    evaluations: Sequence[tuple[int, float]],
    elapsed_s: float | None,
) -> dict[str, Any]:
    """What summary.json holds. Every worker fetches the deltas; keyframes and merged deltas serve workers that join late or fall
    behind."""
    learner, measured, predicted = status.learner, *steady_utilisation(steps)
    encoded = {kind: _encoded(steps, f"bytes/{kind}") for kind in ("deltas", "keyframes", "merged", "full_snapshots")}
    names = Counter(worker.name for worker in status.workers)
    return {
        "elapsed_s": elapsed_s and round(elapsed_s, 1),
        "training_s": round(sum(row["step_s"] + row["phase/wait_s"] for row in steps), 1),
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
        "delta_bytes": encoded["deltas"],
        "keyframe_bytes": encoded["keyframes"],
        "merged_delta_bytes": encoded["merged"],
        "full_snapshot_bytes": encoded["full_snapshots"],
        "audit_own_s_per_step": round(learner.audit_s, 4),
        "usd_spent": round(status.usd_spent, 6),
        "usd_useful": round(status.usd_useful, 6),
        "versions_equal": {
            w.name if names[w.name] == 1 else f"{w.name} {w.peer_id}": w.heartbeat.fingerprint == learner.fingerprint
            for w in status.workers
            if learner.fingerprint
        },
        "fingerprint": learner.fingerprint,
    }


def _encoded(steps: Sequence[dict[str, Any]], name: str) -> int:
    """Bytes that all of the learner's processes have encoded: each counts from 0, so a smaller count begins the next one's."""
    counts = [int(row[name]) for row in steps if name in row]
    return sum(count for count, after in pairwise([*counts, -1]) if after < count)


def steady_utilisation(steps: Sequence[dict[str, Any]]) -> tuple[float | None, float | None]:
    """Returns measured and predicted utilisation over the same steps: from RAMP_STEPS after the first step with a prediction.
    Earlier the learner waits for machines to start and for the first rates to be measured, which the model does not cover."""
    planned = [number for number, row in enumerate(steps) if row.get("utilisation/predicted")]
    steady = steps[planned[0] + RAMP_STEPS :] if planned else []
    if not steady:
        return None, None
    busy = sum(row["step_s"] for row in steady)
    waiting = sum(row["phase/wait_s"] for row in steady)
    predicted = sum(row["utilisation/predicted"] * row["step_s"] for row in steady) / busy
    return round(busy / (busy + waiting), 4), round(predicted, 4)


def lags_of(steps: Sequence[dict[str, Any]]) -> list[int]:
    rows = [row.get("lag/histogram", []) for row in steps]
    return [sum(row[lag] for row in rows if lag < len(row)) for lag in range(max(map(len, rows), default=0))]


def _problems(status: pb.RunStatus) -> list[str]:
    from echo2.coordinator.planning.advice import EQUAL_REWARD_STEPS_MAX  # loads the lease book and numpy

    learner, problems = status.learner, []
    if learner.step < (steps := status.learner_hello.step_limit):
        why = f": {status.finished}" if status.finished else ""
        problems.append(f"expected {steps} steps, got {learner.step}{why}")
    if learner.equal_reward_steps >= EQUAL_REWARD_STEPS_MAX and not learner.reward_mean:
        problems.append(
            f"expected rewards above 0, the last {learner.equal_reward_steps} steps had none: nothing was learned"
        )
    if learner.over_stale_tokens_trained:
        problems.append(f"expected 0 tokens trained above S, got {learner.over_stale_tokens_trained}")
    for worker in status.workers:
        if worker.state == "alive" and worker.heartbeat.fingerprint != learner.fingerprint:
            problems.append(
                f"worker {worker.name}: expected final weights {learner.fingerprint}, got "
                f"{worker.heartbeat.fingerprint or 'none'} (version {worker.heartbeat.version})"
            )
    return problems


def _entries(run_folder: Path, facts: dict[str, Any]) -> list[tuple[str, str]]:
    ends = (facts["held_out_reward_first"], facts["held_out_reward_last"])
    held_out = "not measured" if None in ends else f"{ends[0]:.2f} -> {ends[1]:.2f}"
    model = run_folder / "learner" / "model"
    equal = [name for name, is_equal in facts["versions_equal"].items() if is_equal]
    whole, compared = facts["full_snapshot_bytes"], len(facts["versions_equal"])
    percent = 100 * facts["delta_bytes"] / whole if whole else 0.0
    tokens, usd = facts["trained_tokens"], facts["usd_spent"]
    each = f", {1e6 * usd / tokens:.2f} per million tokens trained on" if tokens and usd else ""
    links, tensorboard = run_folder / "learner" / "trackers.json", run_folder / "learner" / "tensorboard"
    trackers = [str(link) for link in json.loads(links.read_text())] if links.is_file() else []
    trackers += [f"tensorboard --logdir {tensorboard}"] if tensorboard.is_dir() else []
    return [
        ("held-out reward", f"{held_out} in {counted(facts['steps'], 'step')}"),
        ("reward, last 10 steps", f"{facts['reward_last_10_steps']:.2f}"),
        ("time", f"{format_seconds(facts['training_s'])} of steps and waits between them"),
        ("cost", f"USD {usd:.4f}{each}"),
        ("learner utilisation", f"{facts['utilisation_measured']:.1%} measured, {facts['utilisation_predicted']:.1%} predicted, "
         "after the first plan" if facts["utilisation_measured"] is not None else "too few steps to measure"),
        ("tokens trained above S", f"{facts['tokens_over_bound']} of {facts['trained_tokens']}; rollouts dropped as "
         f"stale {facts['dropped_stale_rollouts']}, duplicates {facts['duplicate_rollouts']}"),
        ("published", f"deltas of {format_bytes(facts['delta_bytes'])}"
         f"{f', {percent:.2g}% of full snapshots ({format_bytes(whole)})' if whole else ''}; "
         f"for workers that come late: keyframes of {format_bytes(facts['keyframe_bytes'])}, merged deltas of "
         f"{format_bytes(facts['merged_delta_bytes'])}"),
        ("audit", f"the learner scored {facts['audit_own_s_per_step']:.3g} s a step on its own device"),
        ("final weights", f"equal to the learner's bit for bit at {len(equal)} of {counted(compared, 'worker')}"),
        *(("tracker", where) for where in trackers),
        ("page", f"{run_folder / PAGE} (opens without a server)"),
        ("model", str(model) if model.is_dir() else f"not written; echo2 export {run_folder} FOLDER writes the newest checkpoint"),
    ]  # fmt: skip


def _write_page(run_folder: Path, facts: dict[str, Any], names: Mapping[str, str]) -> None:
    """Writes report.html in the dashboard's own style, with its pictures inside. `names`: of the workers, by peer id."""
    escape = html.escape
    rows = "".join(f"<tr><th scope=row>{escape(a)}<td>{escape(b)}" for a, b in _entries(run_folder, facts))
    problems = "".join(f'<div class="banner">{escape(problem)}</div>' for problem in facts["problems"])
    plots = "".join(
        f'<section class="panel span4"><img style="width:100%" alt="{path.stem}" src="data:image/png;base64,'
        f'{base64.b64encode(path.read_bytes()).decode()}"></section>'
        for path in (run_folder / "plots" / name for name in PLOTS)
        if path.is_file()
    )
    samples = "".join(
        f"<tr><td class=completion>{escape(sample.prompt)}<td class=completion>{escape(sample.answer)}"
        f"<td class=completion>{escape(sample.before)}<td class=n>{sample.reward_before:.2f}"
        f"<td class=completion>{escape(sample.after)}<td class=n>{sample.reward_after:.2f}"
        for sample in samples_of(run_folder)[1]
    )
    name = escape(run_folder.name)
    style, rollouts = _static("page.css"), _rollouts_section(run_folder, names)
    (run_folder / PAGE).write_text(
        f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'><title>{name}"
        f"</title><style>{style}</style><header class=bar><h1>{name}</h1></header>{problems}<main>"
        f"<section class=panel><table class=totals>{rows}</table></section>{plots}<section class=panel><h2>Held-out prompts"
        "</h2><div class=scroll><table><tr><th>Prompt<th>Expected<th>Before<th class=n>Reward<th>After<th class=n>Reward"
        f"{samples}</table></div></section>{rollouts}\n",
        encoding="utf-8",
    )


def _static(name: str) -> str:
    return (importlib.resources.files("echo2.coordinator.web") / "static" / name).read_text(encoding="utf-8")


def _rollouts_section(run_folder: Path, names: Mapping[str, str]) -> str:
    """The dashboard's view of rollouts, token by token, with its answers to the questions that a reader may ask. Ends `main`."""
    from echo2.coordinator.web.state import rollout_summary, rollout_value  # loads the lease book and numpy

    pages = [ParseDict(row, pb.RolloutsShown(), True) for row in rows_of(run_folder / "learner" / "rollouts.jsonl")]
    if not pages:
        return "</main>"
    name_of, offsets, answers = (lambda peer: names.get(peer, peer[-8:])), dict[str, int](), dict[str, Any]()
    for page in pages:
        name = page.rollouts[0].rollout_id
        offset = offsets.get(name, 0)
        answers["/api/rollout?" + urlencode({"id": name, "offset": offset})] = rollout_value(page, offset, name_of)
        offsets[name] = offset + len(page.tokens)
    newest = {page.rollouts[0].rollout_id: rollout_summary(page.rollouts[0], name_of) for page in pages}
    answers["/api/rollouts"] = {"rollouts": list(newest.values()), "problem": ""}
    index = _static("index.html")
    panel, dialog = (
        re.findall(rf'<{tag} [^>]*id="{name}".*?</{tag}>', index, re.DOTALL)[0].replace(
            "<details class", "<details open class"
        )
        for tag, name in (("details", "rollouts"), ("dialog", "rollout-dialog"))
    )
    script = "".join(re.sub(r"^import .*$|^export ", "", _static(name), flags=re.M) for name in PARTS)
    rows = json.dumps(answers).replace("<", "\\u003c")
    return (
        f'{panel.replace(" span7", "")}</main>{dialog}<script type="application/json" id="rollouts-kept">{rows}</script>'
        f"<script type=module>{script}</script>"
    )


def _plot(folder: Path, steps: Sequence[dict[str, Any]], evaluations: Sequence[tuple[int, float]], bound: int) -> None:
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
        predicted = [row.get("utilisation/predicted") or float("nan") for row in steps]  # 0: not yet
        axes.plot(numbers, predicted, "--", label="predicted")

    def lags(axes: Any) -> None:
        axes.bar(range(len(lag_counts)), lag_counts)
        axes.axvline(bound + 0.5, color="red", label=f"S = {bound}")

    seen = [0.0, 1.0, *(row["reward/mean"] for row in steps), *(reward for _, reward in evaluations)]
    save("reward.png", rewards, title="Reward", xlabel="step", ylabel="mean reward", ylim=(min(seen), 1.02 * max(seen)))
    save("utilisation.png", utilisation, title="Learner utilisation", xlabel="step", ylabel="share", ylim=(0, 1.05))
    save("lag.png", lags, title="Staleness", xlabel="lag of trained tokens (steps)", ylabel="tokens")
