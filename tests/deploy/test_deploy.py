"""The files of deploy/: commands that the real programs accept, metrics that exist, manifests that the clients know."""

import configparser
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from echo2.broadcast.node import port_beside
from echo2.cli import coordinator, learner, worker
from echo2.config.load import load_config
from echo2.coordinator.web.page import METRICS, WORKER_METRICS
from echo2.learner.rollouts import prompts
from tests.fork_server import ROOT
from tests.patience import WAIT_S
from tests.ports import choose_ports

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
        line = re.sub(r"\$\{\w+:\+([^}]*)\}", r"\1", line)  # as with the variable set
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
    if where != "compose learner":  # all have one run file: its rewards are tried once
        monkeypatch.setattr(prompts, "check_rewards_of", lambda options: options)
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


def test_ports_agree_and_a_learner_beside_its_coordinator_takes_none_of_its() -> None:
    config = load_config([DEPLOY / "run.toml"], None, {})
    c, port = config.coordinator, config.learner.port
    ports = (c.enrol_port, c.port, c.dashboard_port, c.relay_port, c.relay_port + 1)
    learners = (port, port_beside(port))
    of_role = {"coordinator": ports, "learner": learners, "worker": (config.worker.port,)}
    for name, wanted in of_role.items():
        text = (DEPLOY / "containers" / f"{name}.Containerfile").read_text()
        assert re.search(r"^EXPOSE (.+)$", text, re.MULTILINE)[1].split() == [str(port) for port in wanted]  # type: ignore[index]
    service, stateful = yaml.safe_load_all((DEPLOY / "kubernetes" / "learner.yaml").read_text())
    (container,) = stateful["spec"]["template"]["spec"]["containers"]
    assert tuple(one["port"] for one in service["spec"]["ports"]) == learners, "a service passes no other port on"
    assert tuple(one["containerPort"] for one in container["ports"]) == learners
    rented = yaml.safe_load((DEPLOY / "skypilot" / "learner.yaml").read_text())
    assert tuple(rented["resources"]["ports"]) == learners
    relay = config.learner.relay_port
    assert len({*ports, *learners, relay, relay + 1}) == len(ports) + 4


def test_each_may_write_its_folder_and_read_its_secret() -> None:
    for where, words in _systemd():
        given = dict(itertools.pairwise(words))
        folder = Path("/var/lib/echo2", given.get("--folder") or given["--run.folder"])
        assert folder.is_relative_to("/var/lib/echo2"), f"{where}: the only place that its unit makes for it"
    for path in (DEPLOY / "systemd").glob("*.service"):
        text = path.read_text()
        assert "ProtectHome=read-only" in text and "Environment=HOME=/var/lib/echo2" in text, "where caches are kept"
    assert yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["prometheus"]["user"] == "root"


def test_in_containers_a_learner_may_make_its_sandbox_and_write_its_caches_and_has_its_gpu_alone() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    assert set(services["learner"]["security_opt"]) == {"seccomp=unconfined", "apparmor=unconfined"}
    _, stateful = yaml.safe_load_all((DEPLOY / "kubernetes" / "learner.yaml").read_text())
    context = stateful["spec"]["template"]["spec"]["containers"][0]["securityContext"]
    assert context["seccompProfile"] == context["appArmorProfile"] == {"type": "Unconfined"}
    for name in ("coordinator", "learner"):
        text = (DEPLOY / "containers" / f"{name}.Containerfile").read_text()
        made = re.findall(r"install -d -o echo2 -g echo2 (.+)", text)[0].split()
        places = [volume.split(":")[1] for volume in services[name]["volumes"] if not volume.startswith(".")]
        assert set(places) <= set(made), f"{name}: a volume where the image has nothing is root's"
    devices = [services[name]["deploy"]["resources"]["reservations"]["devices"] for name in ("learner", "worker")]
    (learners,), (workers,) = devices
    assert not set(learners["device_ids"]) & set(workers["device_ids"]), "a count would begin at the first for both"


def test_grafana_finds_its_data_source_and_the_board() -> None:
    mounted = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["grafana"]["volumes"]
    places = {target: DEPLOY / source for source, target, _ in (volume.split(":") for volume in mounted)}
    provisioning = Path("/etc/grafana/provisioning")
    read = {
        str(Path(place).parent): yaml.safe_load(file.read_text())
        for place, file in places.items()
        if file.suffix == ".yaml"
    }
    (source,) = read[str(provisioning / "datasources")]["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
    (folder,) = read[str(provisioning / "dashboards")]["providers"]
    assert places[f"{folder['options']['path']}/echo2.json"].is_file()


@pytest.mark.extras
@pytest.mark.parametrize("path", sorted((DEPLOY / "kubernetes").glob("*.yaml")), ids=lambda path: path.stem)
def test_manifests_hold_only_what_the_client_knows(path: Path) -> None:
    """Read into the official client's models and back: a field that it does not know would be gone."""
    client = pytest.importorskip("kubernetes.client", reason="the Kubernetes client is not installed")
    kinds = {"Service": "v1", "PersistentVolumeClaim": "v1", "StatefulSet": "apps/v1", "Deployment": "apps/v1"}
    api = client.ApiClient()
    for document in yaml.safe_load_all(path.read_text()):
        assert document["apiVersion"] == kinds[document["kind"]]
        model = api.deserialize(json.dumps(document), f"V1{document['kind']}", "application/json")
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
    assert set(re.findall(r"^### (Echo2\w+)$", runbook, re.MULTILINE)) == {rule["alert"] for rule in _alerts()}


@pytest.mark.parametrize(("kind", "file"), [("rules", "alerts.yml"), ("config", "prometheus.yml")])
def test_prometheus_accepts_them(kind: str, file: str) -> None:
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    command = [tool, "check", kind, *(["--syntax-only"] if kind == "config" else []), file]
    done = subprocess.run(command, cwd=DEPLOY / "prometheus", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


_ON, _OFF = {"echo2_learner_connected": "1x60"}, {"echo2_learner_connected": "0x60"}
_UP, _SUSPECT, _ALIVE = (f'{name}{{job="echo2"}}' for name in ("up", "echo2_workers_suspect", "echo2_workers_alive"))
FIRING: dict[str, tuple[dict[str, str], ...]] = {
    # what each alert is about: series that must set it off by minute 60, and the like of it that must not
    "Echo2CoordinatorDown": ({_UP: "0x60"}, {_UP: "1x60"}),
    "Echo2LearnerAway": (
        _OFF | {"echo2_workers_alive": "2x60"},
        _ON | {"echo2_workers_alive": "2x60"},
        _OFF | {"echo2_workers_alive": "0x60"},  # of a finished run
    ),
    "Echo2OverStaleTokens": ({"echo2_over_stale_tokens_trained": "3x60"}, {"echo2_over_stale_tokens_trained": "0x60"}),
    "Echo2NoProgress": (
        {"echo2_step": "7x60", "echo2_usd_per_hour": "2x60"},
        {"echo2_step": "0+1x60", "echo2_usd_per_hour": "2x60"},
        {"echo2_step": "_x48 0x12", "echo2_usd_per_hour": "_x48 2x12"},  # which began twelve minutes ago
    ),
    "Echo2LearnerStarved": (
        _ON | {"echo2_learner_utilisation": "0.5x60", "echo2_learner_utilisation_predicted": "0.99x60"},
        _ON | {"echo2_learner_utilisation": "0.95x60", "echo2_learner_utilisation_predicted": "0.99x60"},
        _OFF | {"echo2_learner_utilisation": "0.5x60", "echo2_learner_utilisation_predicted": "0.99x60"},
        _ON | {"echo2_learner_utilisation": "0x60", "echo2_learner_utilisation_predicted": "0.99x60"},  # not known yet
    ),
    "Echo2PlanInfeasible": (
        _ON | {"echo2_learner_utilisation_predicted": "0.5x60"},
        _ON | {"echo2_learner_utilisation_predicted": "0x60"},
        _OFF | {"echo2_learner_utilisation_predicted": "0.5x60"},
    ),
    "Echo2BroadcastSlow": (
        _ON | {"echo2_broadcast_seconds": "9x60", "echo2_broadcast_seconds_predicted": "4x60"},
        _ON | {"echo2_broadcast_seconds": "9x60", "echo2_broadcast_seconds_predicted": "0x60"},
        _OFF | {"echo2_broadcast_seconds": "9x60", "echo2_broadcast_seconds_predicted": "4x60"},
    ),
    "Echo2RolloutsStale": (
        {"echo2_rollouts_dropped_stale": "0+1x60", "echo2_rollouts_trained": "0+10x60"},
        {"echo2_rollouts_dropped_stale": "0+1x60", "echo2_rollouts_trained": "0+100x60"},
        {"echo2_rollouts_dropped_stale": "5x60", "echo2_rollouts_trained": "0+100x50 3000x10"},  # back at a checkpoint
    ),
    "Echo2LeasesExpire": (
        {"echo2_leases_expired": "0+2x60", "echo2_leases_granted": "0+10x60"},
        {"echo2_leases_expired": "0x60", "echo2_leases_granted": "0x60"},
    ),
    "Echo2WorkersSuspect": (  # every quarter of a minute: four of ten for half a minute; one; all, after a restart
        {_UP: "1x240", _SUSPECT: "0x230 4x1 0x8", _ALIVE: "10x230 6x10"},
        {_UP: "1x240", _SUSPECT: "0x230 1x1 0x8", _ALIVE: "10x230 9x10"},
        {_UP: "1x225 0x4 1x10", _SUSPECT: "0x225 _x4 10x1 0x8", _ALIVE: "10x225 _x4 0x1 10x8"},
    ),
    "Echo2WorkerBehind": (
        {'echo2_worker_lag_versions{worker="oslo"}': "9x60"},
        {'echo2_worker_lag_versions{worker="oslo"}': "2x60"},
    ),
}
NO_STEPS = "No optimiser step in 20 minutes while the pool costs 2 USD/h."


def test_each_alert_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    assert {rule["alert"] for rule in _alerts()} == FIRING.keys()
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    tests = []
    for alert, cases in FIRING.items():
        for series in cases:
            inputs = [{"series": name, "values": values} for name, values in series.items()]
            count = f'count(ALERTS{{alertname="{alert}", alertstate="firing"}}) or vector(0)'
            expected = [{"labels": "{}", "value": 1 if series is cases[0] else 0}]
            asked = [{"expr": count, "eval_time": "60m", "exp_samples": expected}]
            interval = "15s" if alert == "Echo2WorkersSuspect" else "1m"
            tests.append({"interval": interval, "input_series": inputs, "promql_expr_test": asked})
            if alert == "Echo2NoProgress" and series is cases[0]:
                told = [{"exp_labels": {"severity": "critical"}, "exp_annotations": {"summary": NO_STEPS}}]
                tests[-1]["alert_rule_test"] = [{"eval_time": "60m", "alertname": alert, "exp_alerts": told}]
    rules = [str(DEPLOY / "prometheus" / "alerts.yml")]
    file = {"rule_files": rules, "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "fires.yml").write_text(yaml.safe_dump(file))
    done = subprocess.run(
        [tool, "test", "rules", str(tmp_path / "fires.yml")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", sorted((DEPLOY / "systemd").glob("*.service")), ids=lambda path: path.stem)
def test_systemd_accepts_the_units(path: Path, tmp_path: Path) -> None:
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("systemd is not installed")

    def complaints(text: str) -> str:
        unit = tmp_path / path.name
        unit.write_text(text.replace("/opt/echo2/bin/" + path.stem, "/bin/true"))
        done = subprocess.run([tool, "verify", str(unit)], capture_output=True, text=True, check=False)
        return "\n".join(line for line in done.stderr.splitlines() if path.name in line)

    assert complaints(path.read_text()) == ""
    assert "Restart" in complaints(path.read_text().replace("RestartSec=", "RestartSeconds=")), "a wrong name is told"


SERVICE_KEYS = {
    "build", "image", "command", "ports", "volumes", "restart", "healthcheck", "depends_on", "deploy", "stop_grace_period",
    "shm_size", "profiles", "user", "security_opt",
}  # fmt: skip


def test_compose_names_only_what_is_there() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert compose.keys() == {"name", "services", "volumes"}
    for name, service in compose["services"].items():
        assert service.keys() <= SERVICE_KEYS, name
        assert ("build" in service) != ("image" in service)
        if "build" in service:
            context = DEPLOY / service["build"]["context"]
            assert (context / service["build"]["dockerfile"]).is_file()
        for volume in service.get("volumes", []):
            source, target, *_ = volume.split(":")
            assert target.startswith("/")
            assert (DEPLOY / source).exists() if source.startswith(".") else source in compose["volumes"], volume
        assert set(service.get("depends_on", ())) <= compose["services"].keys()
        for other, condition in service.get("depends_on", {}).items():
            assert condition == {"condition": "service_healthy"} and "healthcheck" in compose["services"][other]
        assert set(service.get("profiles", ())) <= {"monitoring"}


def test_skypilots_tasks_have_the_fields_of_a_task() -> None:
    fields = {"name", "resources", "secrets", "envs", "file_mounts", "setup", "run"}
    resources = {"accelerators", "use_spot", "disk_size", "ports"}
    for path in (DEPLOY / "skypilot").glob("*.yaml"):
        task = yaml.safe_load(path.read_text())
        assert task.keys() <= fields and task["resources"].keys() <= resources, path.name
        used = set(re.findall(r"\$(ECHO2_\w+)", task["run"]))
        assert used == {*task["secrets"], *task["envs"]}, f"{path.name}: given and not used, or used and not given"
        checked = subprocess.run(["bash", "-n"], input=task["setup"] + task["run"], text=True, check=False)
        assert checked.returncode == 0


# ---- the coordinator's image, built and run where something builds images: docker, podman or buildah. ECHO2_IMAGE_OPTIONS: wh

BUILDERS = ("docker", "podman", "buildah")
TAG, BASE = "echo2-coordinator-test", "python:3.12-slim"
CONFIG = "/etc/echo2/run.toml"


def _ran(*command: str) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=3 * WAIT_S)
    if done.returncode and re.search(rf"{BASE}.*(pull|pinging|resolve|registry)", done.stderr):
        pytest.skip(f"{BASE} cannot be had here: {done.stderr[-200:]}")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout.strip()


@pytest.mark.soak
def test_the_coordinators_image_is_built_and_listens(tmp_path: Path) -> None:
    there = (
        name
        for name in BUILDERS
        if shutil.which(name) and not subprocess.run([name, "info"], check=False, capture_output=True).returncode
    )
    builder = next(there, None)
    if builder is None:
        pytest.skip(f"nothing that builds images answers: {', '.join(BUILDERS)}")
    options = shlex.split(os.environ.get("ECHO2_IMAGE_OPTIONS", ""))
    file = ROOT / "deploy" / "containers" / "coordinator.Containerfile"
    _ran(builder, "build", *options, "-f", str(file), "-t", TAG, str(ROOT))
    volume = f"--volume={ROOT / 'deploy' / 'run.toml'}:{CONFIG}:ro"
    names = ("enrol_port", "port", "dashboard_port")
    ports = [f"--coordinator.{name}={port}" for name, port in zip(names, choose_ports([0] * len(names)), strict=True)]
    if builder == "buildah":  # it has no command that runs an image with its entry point
        name = _ran(builder, "from", TAG)
        command = [builder, "run", volume, name, "--", "echo-coordinator", "--config", CONFIG, *ports]
    else:
        name = TAG
        command = [builder, "run", "--name", name, volume, TAG, "--config", CONFIG, *ports]
    log = tmp_path / "log"
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out) as running:
        end = time.monotonic() + WAIT_S
        while "dashboard at" not in log.read_text() and running.poll() is None and time.monotonic() < end:
            time.sleep(0.5)
        running.terminate()
    _ran(builder, "rm", *([] if builder == "buildah" else ["--force"]), name)
    told = log.read_text()
    assert "learner.link) made for the role learner" in told and "listening: enrolment at" in told, told
