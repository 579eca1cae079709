"""The files of deploy/: commands that the real programs accept, metrics that exist, manifests that the clients know."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from echo2.cli import coordinator, learner, worker
from echo2.config.load import load_config
from echo2.coordinator.runtime.web.metrics import METRICS, WORKER_METRICS

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
MAINS: dict[str, Callable[[list[str]], int]] = {
    "echo-coordinator": coordinator.main,
    "echo-learner": learner.main,
    "echo-worker": worker.main,
}
METRIC = re.compile(r"\becho2_[a-z_]+\b")


def _compose() -> Iterator[tuple[str, list[str]]]:
    for name, service in yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"].items():
        if "build" in service:
            yield f"compose {name}", [f"echo-{name}", *service["command"]]


def _kubernetes() -> Iterator[tuple[str, list[str]]]:
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            for container in document.get("spec", {}).get("template", {}).get("spec", {}).get("containers", []):
                yield f"kubernetes {path.stem}", [f"echo-{container['name']}", *container["args"]]


def _systemd() -> Iterator[tuple[str, list[str]]]:
    for path in sorted((DEPLOY / "systemd").glob("*.service")):
        unit = configparser.ConfigParser(interpolation=None, strict=False)
        unit.optionxform = str  # type: ignore[assignment,method-assign]
        unit.read(path)
        program, *rest = shlex.split(unit["Service"]["ExecStart"])
        yield f"systemd {path.stem}", [Path(program).name, *rest]


def _skypilot() -> Iterator[tuple[str, list[str]]]:
    for path in sorted((DEPLOY / "skypilot").glob("*.yaml")):
        task = yaml.safe_load(path.read_text())
        line = task["run"].replace("\\\n", " ").split("exec ", 1)[1]
        for name, value in task["envs"].items():
            line = line.replace(f'"${name}"', shlex.quote(value))
        program, *rest = shlex.split(line)
        yield f"skypilot {path.stem}", [Path(program).name, *rest]


COMMANDS = dict([*_compose(), *_kubernetes(), *_systemd(), *_skypilot()])


@pytest.mark.parametrize("where", sorted(COMMANDS))
def test_every_command_line_is_accepted(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the moment at which the daemon would start."""
    link = tmp_path / "role.link"
    link.write_text("echo2://127.0.0.1:8418/12D3KooWxyz?token=t\n")
    program, *given = COMMANDS[where]
    arguments = []
    for word in given:
        changed = f"@{link}" if word.startswith("@") else word
        arguments.append(str(DEPLOY / "run.toml") if changed.endswith("run.toml") else changed)
    started: list[object] = []
    for module in (coordinator, learner, worker):
        monkeypatch.setattr(module, "run_daemon", lambda make, folder: started.append(make) or 0)
    assert MAINS[program](arguments) == 0
    assert started, "the daemon would have been started"


def test_three_roles_are_there_in_each_way_to_deploy() -> None:
    roles = {"coordinator", "learner", "worker"}
    for way in ("compose", "kubernetes", "systemd"):
        text = " ".join(name for name in COMMANDS if name.startswith(way))
        assert all(role in text for role in roles), way
    for role in roles:
        text = (DEPLOY / "containers" / f"{role}.Containerfile").read_text()
        assert f'ENTRYPOINT ["echo-{role}"]' in text
        copied = re.findall(r"^COPY (?!--)(.+) \S+$", text, re.MULTILINE)
        assert all((ROOT / name).exists() for line in copied for name in line.split())


def test_what_compiles_dependencies_is_there_before_pip_needs_it() -> None:
    """fastecdsa, which libp2p brings, has no wheel; neither slim images nor rented machines have GMP's headers."""
    for path in (*(DEPLOY / "containers").glob("*.Containerfile"), *(DEPLOY / "skypilot").glob("*.yaml")):
        before_pip, installs, _ = path.read_text().partition("pip install")
        assert installs and "libgmp-dev" in before_pip, path.name
        assert re.search(r"apt-get install.*\b(gcc|build-essential)\b", before_pip), path.name
    assert "libgmp10" in (DEPLOY / "containers" / "coordinator.Containerfile").read_text().split("\nFROM ")[-1]


def test_ports_agree() -> None:
    config = load_config([DEPLOY / "run.toml"], None, {})
    c = config.coordinator
    ports = (c.enrol_port, c.port, c.dashboard_port, c.relay_port)
    for name, wanted in (
        ("coordinator", ports),
        ("learner", (config.learner.port,)),
        ("worker", (config.worker.port,)),
    ):
        text = (DEPLOY / "containers" / f"{name}.Containerfile").read_text()
        assert re.search(r"^EXPOSE (.+)$", text, re.MULTILINE)[1].split() == [str(port) for port in wanted]  # type: ignore[index]


@pytest.mark.parametrize("path", sorted((DEPLOY / "kubernetes").glob("*.yaml")), ids=lambda path: path.stem)
def test_manifests_hold_only_what_the_client_knows(path: Path) -> None:
    """Read into the official client's models and back: a field that it does not know would be gone."""
    client = pytest.importorskip("kubernetes.client", reason="the extra `kubernetes` is not installed")
    kinds = {
        ("v1", "Service"): "V1Service",
        ("v1", "PersistentVolumeClaim"): "V1PersistentVolumeClaim",
        ("apps/v1", "StatefulSet"): "V1StatefulSet",
        ("apps/v1", "Deployment"): "V1Deployment",
    }
    api = client.ApiClient()

    for document in yaml.safe_load_all(path.read_text()):
        model = api.deserialize(
            json.dumps(document), kinds[document["apiVersion"], document["kind"]], "application/json"
        )
        assert api.sanitize_for_serialization(model) == document


def test_dashboard_and_alerts_use_metrics_that_exist() -> None:
    known = set(METRICS) | set(WORKER_METRICS)
    dashboard = json.loads((DEPLOY / "grafana" / "echo2.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(queries) >= len(dashboard["panels"]) > 0
    queries += [rule["expr"] for rule in _alerts()]
    used = {name for query in queries for name in METRIC.findall(query)}
    assert used and used <= known, used - known


def _alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_each_alert_has_its_section_in_the_runbook() -> None:
    runbook = (ROOT / "docs" / "runbook.md").read_text()
    for rule in _alerts():
        assert f"### {rule['alert']}\n" in runbook


@pytest.mark.parametrize(("kind", "file"), [("rules", "alerts.yml"), ("config", "prometheus.yml")])
def test_prometheus_accepts_them(kind: str, file: str) -> None:
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    command = [tool, "check", kind, *(["--syntax-only"] if kind == "config" else []), file]
    done = subprocess.run(command, cwd=DEPLOY / "prometheus", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
