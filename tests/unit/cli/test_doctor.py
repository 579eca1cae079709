"""`echo2 doctor` on this machine, with things that are wrong with it."""

import json
import re
import socket
from pathlib import Path

import pytest

from echo2.cli import doctor
from echo2.cli.main import main
from echo2.config.load import option_names
from echo2.contain import box
from echo2.trust.identity import Identity
from tests.unit.learner.tiny import make_tiny_model


@pytest.fixture(autouse=True)
def little_disk_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "DISK_WANTED_BYTES", 1 << 20)


def rows(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, object]]:
    return {row["what"]: row for row in json.loads(capsys.readouterr().out)}


def link_to(port: int) -> str:
    return f"echo2://127.0.0.1:{port}/{Identity.generate().peer_id}?token=secret"


def on_ports(enrol_port: int = 0) -> list[str]:
    """Other ports than the default ones, on which something may run here."""
    return ["--coordinator.port=0", "--coordinator.dashboard_port=0", f"--coordinator.enrol_port={enrol_port}"]


def test_every_finding_of_a_fit_machine_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--folder", str(tmp_path / "not" / "made" / "yet"), "--json", *on_ports()]) == 0
    found = rows(capsys)
    asked = {"Python", "packages", "GPU", "torch", "memory", "disk", "disk speed", "clock", "ports", "containment"}
    assert asked <= found.keys()
    assert all(row["is_good"] is not False for row in found.values())
    assert found["reach and rates"]["is_good"] is None, "what is not known is not ok"
    assert [what for what, row in found.items() if row["advice"]] == ["reach and rates"], "what to do to have them"


def test_each_problem_is_bad_and_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "DISK_WANTED_BYTES", 1 << 60)
    with socket.create_server(("0.0.0.0", 0)) as busy, socket.create_server(("0.0.0.0", 0)) as other:
        ports = busy.getsockname()[1], other.getsockname()[1]
        assert main(["doctor", *on_ports(ports[0]), f"--learner.port={ports[1] - 1}"]) == 6
    out = capsys.readouterr()
    assert "BAD   ports:" in out.out and "stop what listens there" in out.out
    in_use = "Address already in use"
    assert f"{ports[0]} (enrolment): {in_use}, {ports[1]} (chunks): {in_use}; expected" in " ".join(out.out.split())
    named = re.findall(r"(?:coordinator|learner)\.\w+", out.out)
    assert len(named) == 4 and set(named) <= set(option_names()), "what it names can be set"
    assert "BAD   disk:" in out.out and doctor.ADVICE["disk"] in out.out
    assert "doctor: 2 problems: disk, ports" in out.err


def test_a_coordinator_that_does_not_answer_is_bad(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert main(["doctor", "--json", "--link", link_to(port)]) == 6
    found = rows(capsys)["coordinator"]
    assert f"127.0.0.1:{port}" in str(found["found"]) and "firewall" in str(found["advice"])
    assert main(["doctor", "--json", "--link", link_to(port).replace("127.0.0.1", "a..b")]) == 6
    assert f"a..b:{port}: expected an answer" in str(rows(capsys)["coordinator"]["found"])


def test_rewards_that_are_trusted_are_said_loudly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trusting = ["--task.trusted_rewards=true", "--task.name=reasoning_gym", '--task.args={dataset = "countdown"}']
    assert main(["doctor", "--json", *on_ports(), *trusting]) == 6
    finding = rows(capsys)["rewards"]
    assert not finding["is_good"]
    assert "reasoning_gym/countdown EXECUTES text of completions" in str(finding["found"])
    config = tmp_path / "trusting.toml"
    config.write_text('[task]\ntrusted_rewards = true\nname = "reasoning_gym"\nargs = { dataset = "countdown" }\n')
    assert main(["config", "show", str(config)]) == 0
    assert "WARNING: task.trusted_rewards is on" in capsys.readouterr().err


def test_a_machine_that_can_contain_nothing_is_bad_for_tasks_that_need_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(box, "_candidates", lambda: iter(()))
    box.bubblewrap.cache_clear()
    try:
        main(["doctor", "--json", *on_ports()])
        assert rows(capsys)["containment"]["is_good"], "sort_digits is a plain comparison"
        assert main(["doctor", "--json", *on_ports(), "--task.name=math"]) == 6
        finding = rows(capsys)["containment"]
        assert not finding["is_good"] and "found no bwrap" in str(finding["found"])
    finally:
        box.bubblewrap.cache_clear()


def test_a_model_or_prompt_that_no_learner_could_use_is_bad(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, file = make_tiny_model(tmp_path / "model"), tmp_path / "run.toml"
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"question": "1+1", "answer": "2"}))
    task = f'name = "math"\nargs = {{ path = "{data}" }}\neval_prompts = 0'
    file.write_text(f'[run]\nfolder = "{tmp_path}/runs"\n[model]\npath = "{model}"\n[task]\n{task}\n')
    doctor = ["doctor", "--config", str(file), "--folder", str(tmp_path), "--json", *on_ports()]
    assert main(doctor) == 0 and "of 3 tokens" in str(rows(capsys)["task"]["found"])
    assert main([*doctor, "--sampling.max_prompt_tokens=2"]) == 6
    assert "expected at most sampling.max_prompt_tokens = 2 tokens, got 3" in str(rows(capsys)["task"]["found"])
    assert main([*doctor, "--task.name=tests.unit.tasks.naughty:Ends", "--task.args={}"]) != 0
    assert "expected an instance from sample(0), got SystemExit: 0" in str(rows(capsys)["task"]["found"])
    assert main([*doctor, "--task.eval_prompts=1"]) == 6
    assert "expected fewer held-out prompts than the task has, 1, got 1" in str(rows(capsys)["task"]["found"])
    main([*doctor, "--task.name=tests.unit.tasks.naughty:Counted", "--task.args={}"])
    assert "its answer '0'" in str(rows(capsys)["task"]["found"])
    (model / "model.safetensors").unlink()
    assert main(doctor) == 0 and rows(capsys)["weights"]["is_good"] is None, "a worker's machine does not need them"
    main([*doctor, "--model.path=org/some-405B"])
    assert rows(capsys)["learner of it here"]["is_good"] is None, "of a guessed size"
    (model / "model.safetensors").write_bytes(b"half")
    assert main(doctor) == 6 and "model.safetensors" in str(rows(capsys)["model"]["found"])
    assert main(["run", str(file)]) == 2 and "model.safetensors" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
