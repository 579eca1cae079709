"""The documentation is held to the code: references, commands, links, and a strict build."""

import argparse
import ast
import contextlib
import importlib.util
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from benchmarks import bench_audit
from benchmarks.bench_audit import table_of, write_page
from echo2.cli import coordinator, learner, main, worker
from echo2.cli.plan import load_catalogue, question_of
from echo2.cli.plan_text import PlannedRun, hours_of, planned
from echo2.config.load import load_config, option_names, parse_overrides, read_toml
from echo2.coordinator.web.page import METRICS, WORKER_METRICS

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")])
MAINS = {
    "echo2": main.main,
    "echo-coordinator": coordinator.main,
    "echo-learner": learner.main,
    "echo-worker": worker.main,
}
FROM_INDEX = re.compile(
    r"""\b(?:pip3?|pipx|uv(?:\ pip|\ tool)?)\ (?:install|download|run)\b[^\n`;&|]*?[\s'"]  # a command that installs
    echo2(?:\[[^\]\n]*\])?(?!\ @\ git\+)(?=[\s'"=<>~@]|$)""",  # by name, not from a folder, a file or git
    re.VERBOSE,
)
OVERRIDE = re.compile(r"--([a-z_]+\.[a-z_0-9]+)\b")


def _code_lines(text: str) -> Iterator[str]:
    """Lines of code blocks, indented or fenced, and inline code."""
    is_fenced = False
    for line in text.splitlines():
        if line.startswith("```"):
            is_fenced = not is_fenced
        elif is_fenced or line.startswith("    "):
            yield line.strip()
        else:
            yield from re.findall(r"`([^`]+)`", line)


def _commands(programs: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for page in PAGES:
        if page.parent.name == "reference":
            continue
        for line in _code_lines(page.read_text()):
            words = line.split("  #")[0].split("   ")[0].strip()
            if words.split(" ")[0] in programs and " " in words and "…" not in words.split(" ")[1]:
                yield f"{page.relative_to(ROOT)}: {words}", words


def test_nothing_installs_echo2_by_its_name_from_an_index() -> None:
    """That name on the package index is not this project's: whoever takes it would own every user who follows such a text."""
    wrong = (
        "pip install 'echo2[worker]'",
        "python -m pip install -q echo2==1",
        "pipx install echo2",
        'f"pip install echo2"',
    )
    right = (
        "pip install './echo2[worker]'",
        "pip install 'echo2[worker] @ git+https://a/b'",
        "pip install echo2-0.1.whl",
    )
    assert all(map(FROM_INDEX.search, wrong)) and not any(map(FROM_INDEX.search, right))
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    suffixes = {".py", ".md", ".toml", ".yaml", ".yml", ".js", ".html", ".Containerfile", ".service"}
    files = [ROOT / name for name in listed.splitlines() if Path(name).suffix in suffixes or name == "Makefile"]
    files = [path for path in files if path.is_file() and path != Path(__file__).resolve()]
    found = [f"{path.relative_to(ROOT)}: {hit[0]}" for path in files for hit in FROM_INDEX.finditer(path.read_text())]
    assert not found, found


class _Parsed(Exception):
    pass


def _parses(words: list[str]) -> list[str]:
    """What the program's parser leaves over, without running the command."""
    rest: list[str] = []
    original = argparse.ArgumentParser.parse_known_args

    def stop(self: argparse.ArgumentParser, args: object = None, namespace: object = None) -> object:
        found = original(self, args, namespace)  # type: ignore[call-overload]
        if self.prog in MAINS:
            rest.extend(found[1])
            raise _Parsed
        return found

    with mock.patch.object(argparse.ArgumentParser, "parse_known_args", stop), contextlib.suppress(_Parsed):
        MAINS[words[0]](words[1:])
    return rest


@pytest.mark.parametrize("line", sorted({words for _, words in _commands(tuple(MAINS))}))
def test_every_command_shown_is_one(line: str) -> None:
    words = shlex.split(line.replace("[", "").replace("]", ""))
    words = words[:-1] if words[-1] in ("--help", "...", "…") else words
    if all(re.fullmatch(r"[a-z][a-z0-9-]*", word) for word in words):
        with pytest.raises(SystemExit) as ended, contextlib.redirect_stdout(io.StringIO()):
            MAINS[words[0]]([*words[1:], "--help"])  # a command that is only named
        assert ended.value.code == 0
        return
    try:
        rest = _parses(words)
    except SystemExit:
        pytest.fail(f"not accepted: {line}")
    names = OVERRIDE.findall(" ".join(rest))
    assert set(names) <= set(option_names()), line
    assert all(word.startswith("--") is False or OVERRIDE.match(word) for word in rest), f"unknown: {rest}"


def test_every_make_target_shown_is_one() -> None:
    targets = set(re.findall(r"^([a-z-]+%?):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    benchmarks = {path.stem.removeprefix("bench_") for path in (ROOT / "benchmarks").glob("bench_*.py")}
    shown = [(where, line.split()[1]) for where, line in _commands(("make",))]
    assert shown
    measured = (ROOT / "docs" / "reference" / "performance.md").read_text()
    shown += [("performance", target) for target in re.findall(r"^\| `make ([a-z-]+)`", measured, re.MULTILINE)]
    for where, target in shown:
        name = target.removeprefix("bench-").replace("-", "_")
        assert target in targets or name in benchmarks or target == "bench-NAME", where


def test_references_are_those_of_the_code() -> None:
    command = [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_every_option_and_metric_appears() -> None:
    options = (ROOT / "docs" / "reference" / "configuration.md").read_text()
    assert [name for name in option_names() if f"| `{name}` |" not in options] == []
    metrics = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    assert [name for name in (*METRICS, *WORKER_METRICS) if f"`{name}" not in metrics] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_pages_build_without_a_warning(tmp_path: Path) -> None:
    sphinx = [sys.executable, "-m", "sphinx", "-b", "html", "-W", "--keep-going", "-q"]
    command = [*sphinx, str(ROOT / "docs"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "quickstart.html").exists()


def test_captions_hold_the_figures_of_the_recorded_run() -> None:
    spec = importlib.util.spec_from_file_location("record", ROOT / "docs" / "record.py")
    assert spec is not None and spec.loader is not None
    record = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(record)
    caption = record.caption_of(json.loads(record.SUMMARY.read_text()))
    for page in record.CAPTIONED:
        assert record.CAPTION.findall(page.read_text()) == [caption], f"{page.name}: run `make recording`"


OF_OTHERS = {  # of other projects, of the kernel
    "TINKER_API_KEY", "TINKER_BASE_URL", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "linear_cross_entropy", "save_to_disk",
    "tcp_allowed_congestion_control",
}  # fmt: skip
NAME = re.compile(r"\b[A-Za-z][A-Za-z0-9]*_[A-Za-z0-9_]{2,}\b")


def test_names_that_pages_show_are_in_the_code() -> None:
    """Functions, options, fields, files: a name that was changed or deleted is not spoken of any more."""
    kinds = {".py", ".proto", ".toml", ".yaml", ".yml", ".json", ".js", ".html", ".Containerfile"}
    folders = ("echo2", "tests", "benchmarks", "deploy", "examples", "proto", ".ci")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    text = "\n".join(path.read_text() for path in files if path.suffix in kinds or path.parent.name == ".ci")
    known = set(NAME.findall(text)) | {path.stem for path in files} | set(NAME.findall((ROOT / "Makefile").read_text()))
    pages = [page for page in PAGES if page.name != "CHANGELOG.md"] + sorted((ROOT / "echo2").rglob("DESIGN.md"))
    for page in pages:
        shown = " ".join(re.findall(r"`([^`\n]+)`", page.read_text()))
        gone = set(NAME.findall(shown)) - known - OF_OTHERS
        assert not gone, f"{page.relative_to(ROOT)} speaks of what is not in the code: {sorted(gone)}"


WORDS_MAX = 900
"""Two screens of a page that one reads to do something; what is longer is a reference."""


def test_the_index_says_what_to_read_first_and_no_page_of_a_task_is_long() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    parts = re.findall(r"```\{toctree\}\n:caption: (.*)\n:maxdepth: 1\n\n([^`]*)```", index)
    assert [caption.partition(" - ")[0].partition(",")[0] for caption, _ in parts] == [
        "Start here", "One task a page", "Reference", "Reference",
    ]  # fmt: skip
    listed = [name for _, names in parts for name in names.split()]
    pages = {str(page.relative_to(ROOT / "docs").with_suffix("")) for page in (ROOT / "docs").rglob("*.md")}
    assert sorted(listed) == sorted(pages - {"index"}), "every page is in the index once"
    for caption, names in parts:
        for name in names.split() if not caption.startswith("Reference") else ():
            words = len((ROOT / "docs" / f"{name}.md").read_text().split())
            assert words <= WORDS_MAX or name == "troubleshooting", f"{name}: {words} words"


def test_figures_on_pages_are_those_of_the_files_that_programs_wrote() -> None:
    from benchmarks import bench_demo_llm as bench, demos

    for pattern, page, kept, again in (
        (demos.PASSAGE, demos.README, demos.passage(json.loads(demos.RESULTS.read_text())), "demos"),
        (bench.PASSAGE, bench.PAGE, bench.passage(json.loads(bench.CURVES.read_text())), "bench_demo_llm"),
    ):
        assert pattern.findall(page.read_text()) == [kept], f"python -m benchmarks.{again} --again"


def test_the_task_of_the_page_on_ones_own_task_scores_and_its_run_file_loads(tmp_path: Path) -> None:
    """Its code as it stands there, word for word, in files of the names that it gives."""
    from echo2.config.load import load_config

    page = (ROOT / "docs" / "howto-own-task.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (run_file,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "palindromes.py").write_text(code)
    (tmp_path / "run.toml").write_text(run_file)
    config = load_config([tmp_path / "run.toml"])
    program = (
        "import sys; sys.path.insert(0, '.')\n"
        "from echo2.tasks.registry import make_task; from echo2.tasks.task import TaskSpec\n"
        f"task = make_task(TaskSpec({config.task.name!r}, {dict(config.task.args)!r}, 3))\n"
        "one = task.sample(5)\n"
        "whole = one.answer + one.answer[::-1]\n"
        "print(one == task.sample(5), task.score(one, whole).value, task.score(one, 'zzzz').value)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program]
    said = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    assert said == "True 1.0 0.0\n"


# ---- tables of the documentation are those of what a program wrote last, or of what it answers now


def test_the_audits_table_is_what_the_benchmark_found(tmp_path: Path) -> None:
    kept = json.loads(bench_audit.RESULTS.read_text())
    assert table_of(kept) in bench_audit.PAGE.read_text(), "run `make bench-audit`"
    page = tmp_path / "security.md"
    page.write_text(bench_audit.PAGE.read_text())
    write_page(kept, page)
    assert page.read_text() == bench_audit.PAGE.read_text()


def test_the_benchmarks_figures_say_what_the_page_claims() -> None:
    kept = json.loads(bench_audit.RESULTS.read_text())
    values = {row["name"]: row["value"] for row in kept["rows"]}
    assert kept["honest_accused"] == 0 == values["honest workers accused"]
    assert sum(kept["honest"].values()) >= 5 and values["bound on false alarms"] == pytest.approx(1e-6)
    for found in kept["findings"]:
        if found["noise_nats"] > bench_audit.ALLOWED_NATS:
            assert len(found["rollouts"]) == found["watched"], found["worker"]


@pytest.mark.parametrize(
    ("changed", "what_if", "row"),
    [
        ((), (), "takes 5 of the workers: 200 steps in {:.1f} h for {:.0f} USD, .* busy {:.0%} of"),
        (("--sampling.max_new_tokens=8192",), (), r"`sampling.max_new_tokens` \| 2048 \| 8192: {:.1f}, {:.0f}, {:.0%}"),
        ((), ("mean", "1400"), "assumed 717 .* `mean=1400`: {:.1f}, {:.0f}, {:.0%}"),
        (
            ("--learner.prompts_per_step=64", "--learner.rollouts_per_prompt=16"), (),
            r"\| 32 x 8 \| 64 x 16: {:.1f}, {:.0f}, {:.0%}",
        ),
        ((), ("S", "8"), r"\| 12 \| 8: {:.1f}, {:.0f}, {:.0%};"),
        ((), ("S", "4"), "; 4: {:.1f}, {:.0f}, {:.0%}"),
        (("--coordinator.usd_per_hour_cap=1",), (), r"\| 5 \| 1: {:.1f}, {:.0f}, {:.0%}: two workers"),
    ],
)  # fmt: skip
def test_the_first_runs_numbers_are_the_plans(changed: tuple[str, ...], what_if: tuple[str, ...], row: str) -> None:
    config = load_config([ROOT / "examples" / "first-4b.toml"], None, parse_overrides(changed))
    question, _ = question_of(config, read_toml(ROOT / "examples" / "first-4b-fleet.toml"), load_catalogue(None))
    question = question.what_if(*what_if) if what_if else question
    plan = planned(question)
    hours = hours_of(question, plan, PlannedRun(config.learner.steps, ""))
    usd = hours * (plan.usd_per_hour + question.learner.price_usd_per_hour)
    expected = row.format(hours, usd, plan.predicted_utilisation)
    page = " ".join((ROOT / "docs" / "first-run.md").read_text().split())
    assert re.search(expected, page), expected
    assert changed or what_if or (plan.is_feasible and len(plan.pool) == 5)


# ---- the lives of a rollout, a chunk, a plan and a field in ARCHITECTURE.md name functions that exist, and are as short as it

HOP = re.compile(r"^(\d+)\. `([\w/]+\.py):(?:(\w+)\.)?(\w+)` ", re.MULTILINE)
WALKS = {"rollout": 16, "chunk": 10, "plan": 9, "heartbeat's field": 4}


@pytest.mark.parametrize(("what", "count"), WALKS.items())
def test_a_walk_names_functions_that_exist(what: str, count: int) -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    walk = text.split(f"## Life of a {what}\n", 1)[1].split("\n## ", 1)[0]
    hops = HOP.findall(walk)
    assert [int(number) for number, *_ in hops] == list(range(1, count + 1))
    assert f"{count} hops" in walk
    for _, file, owner, name in hops:
        tree = ast.parse((ROOT / "echo2" / file).read_text())
        scopes = (
            [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner] if owner else [tree]
        )
        nodes = [node for scope in scopes for node in scope.body]
        functions = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert name in functions, f"{file} has no {owner}.{name}"
