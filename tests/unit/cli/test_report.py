"""The end of a run: its report as text, file and page, in main of echo2 status and samples, as of run and demo."""

import errno
import importlib.util
import json
import os
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import pytest
from google.protobuf.json_format import MessageToJson

from echo2.base.errors import Unreachable
from echo2.base.ids import RunId
from echo2.cli import processes
from echo2.cli.main import main
from echo2.cli.processes import Children, RunLock
from echo2.cli.report import is_reported, write_report
from echo2.coordinator.money.provisioning import MachineState, RentedMachine
from echo2.coordinator.store import SqlStore, StateChanges
from echo2.trust.identity import Identity
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb
from tests.fork_server import ROOT
from tests.patience import WAIT_S


def rents_two(finished: Path) -> None:
    (finished / "coordinator").mkdir()
    with closing(SqlStore(f"sqlite:///{finished}/coordinator/state.sqlite", RunId(finished.name))) as store:
        for number, state in enumerate((MachineState.RUNNING, MachineState.GONE, MachineState.RELEASING)):
            machine = RentedMachine(f"m{number}", "gpu", "cloud", "", state, 0.9, 0.0)
            store.write(StateChanges({("machines", machine.machine_id): machine}))


@pytest.fixture
def without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a coordinator's machine; drawing them takes seconds."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    learner = tmp_path / "learner"
    learner.mkdir()
    (tmp_path / "run.toml").write_text("")
    steps = [
        {"step": n, "reward/mean": n / 4, "step_s": 2.0, "phase/wait_s": 1.0, "lag/histogram": [9]} for n in range(1, 5)
    ]
    (learner / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in steps))
    evaluations = [{"step": 0, "eval/reward": 0.25}, {"step": 4, "eval/reward": 0.75}]
    (learner / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in evaluations))
    samples = [
        {"step": step, "prompt": "2+2=", "answer": "4", "completion": said, "reward": reward}
        for step, said, reward in ((0, "<b>5", 0.0), (4, "4", 1.0))
    ]
    (learner / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    (learner / "trackers.json").write_text('["https://tracker.example/mine"]')
    return tmp_path


def status_of(step: int) -> pb.RunStatus:
    status = pb.RunStatus(usd_spent=1.5)
    status.learner.step, status.learner.trained_tokens = step, 1000
    status.learner_hello.step_limit, status.learner_hello.staleness_bound = 4, 2
    return status


def test_the_report_has_rewards_cost_time_samples_and_tracker_and_a_page_that_needs_no_server(finished: Path) -> None:
    report = write_report(finished, status_of(4))
    assert not report.problems
    for text in ("0.25 -> 0.75 in 4 steps", "12 s of", "USD 1.5000", "expected '4'", "https://tracker.example/mine"):
        assert text in report.text
    assert all(len(line) <= 80 for line in report.text.splitlines() if str(finished) not in line)
    page = (finished / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 3 and "&lt;b&gt;5" in page, "a model's text is no markup"
    assert not re.search(r'(src|href)="?(/|http)', page)


def test_rewards_below_0_and_above_1_are_in_the_plot(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.axes import Axes

    limits = dict[str, tuple[float, float]]()
    monkeypatch.setattr(Axes, "set", lambda self, **labels: limits.update({labels["title"]: labels.get("ylim")}))
    (finished / "learner" / "evaluations.jsonl").write_text('{"step": 0, "eval/reward": -2.0}\n')
    with (finished / "learner" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "reward/mean": 3.0, "step_s": 1.0, "phase/wait_s": 0.0}\n')
    write_report(finished, status_of(4))
    low, high = limits["Reward"]
    assert low <= -2.0 and high >= 3.0


def test_the_page_shows_rollouts_token_by_token_by_the_dashboards_own_code(finished: Path, without_plots: None) -> None:
    write_report(finished, status_of(4))
    assert "rollouts-kept" not in (finished / "report.html").read_text(), "an older run's folder has none"
    one = pb.RolloutSummary(rollout_id="g1/0", step=4, reward=0.5, token_count=3, peer_ids=["p1", "p2"], turn_count=2)
    pages = [pb.RolloutsShown(rollouts=[one], prompt="</script>"), pb.RolloutsShown(rollouts=[one])]
    for number, page in ((0, pages[0]), (1, pages[0]), (2, pages[1])):
        page.tokens.add(token_id=number, text="<b>", logprob=-0.5, version=3, peer=number % 2)
    pages[0].turns.add(turn=2, position=1, text="go on")
    kept = "".join(MessageToJson(page, indent=None) + "\n" for page in pages)
    (finished / "learner" / "rollouts.jsonl").write_text(kept)
    status = status_of(4)
    status.workers.add(peer_id="p1", name="berlin")
    write_report(finished, status)
    text = (finished / "report.html").read_text()
    kept = json.loads(re.findall(r'id="rollouts-kept">(.*?)</script>', text)[0])
    assert [row["id"] for row in kept["/api/rollouts"]["rollouts"]] == ["g1/0"]
    first, rest = (kept[f"/api/rollout?id=g1%2F0&offset={offset}"] for offset in (0, 2))
    assert [token["worker"] for token in first["tokens"]] == ["berlin", "p2"], "without a name, its id's end"
    assert (first["prompt"], first["reward"], first["said"][0]["position"]) == ("</script>", 0.5, 1)
    assert (rest["offset"], rest["tokens"][0]["id"], rest["tokens"][0]["version"]) == (2, 2, 3)
    assert text.count("</script>") == 2 and not re.search(r"^(import|export) ", text, re.MULTILINE)
    for name in ("rollouts", "rollout-dialog", "rollout-tokens", "rollouts-body"):
        assert text.count(f'id="{name}"') == 1


def test_status_of_a_finished_run_shows_its_report(
    finished: Path, without_plots: None, capsys: pytest.CaptureFixture[str]
) -> None:
    write_report(finished, status_of(4))
    assert main(["status", str(finished)]) == 0 and "0.25 -> 0.75" in capsys.readouterr().out
    assert main(["samples", str(finished)]) == 0 and "after '4' (1.00)" in capsys.readouterr().out
    row = {"step": 0, "prompt": "long " * 2000, "completion": "so " * 999 + "four", "reward": 0.0}
    (finished / "learner" / "samples.jsonl").write_text(json.dumps(row) + "\n")
    assert (
        main(["status", str(finished)]) == 0
        and len(shown := capsys.readouterr().out) < 4000
        and "four' (0.00)" in shown
    )
    assert main(["samples", str(finished)]) == 0 and len(capsys.readouterr().out) > 10_000
    lock = RunLock(finished)
    lock.note("learner", os.getpid())  # it goes on for more steps, and has made none yet
    assert main(["status", str(finished)]) != 0 and "links/operator.link" in capsys.readouterr().err
    os.close(lock.descriptor)
    (finished / "run.lock").unlink()
    newer = (finished / "summary.json").stat().st_mtime + 5
    os.utime(finished / "learner" / "metrics.jsonl", (newer, newer))
    assert not is_reported(finished)
    assert main(["status", str(finished)]) != 0 and "links/operator.link" in capsys.readouterr().err


def test_letters_that_the_locale_does_not_have_end_no_command(finished: Path) -> None:
    (finished / "learner" / "samples.jsonl").write_text(
        json.dumps({"step": 0, "prompt": "größer", "completion": "四", "reward": 0.5}) + "\n"
    )
    script = (
        f"import sys; sys.argv = ['echo2', 'samples', {str(finished)!r}]\n"
        "from echo2.cli.main import main; from echo2.cli.report import PARTS, _static\n"
        "list(map(_static, ('index.html', *PARTS))); sys.exit(main())"
    )
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=ascii_only, capture_output=True, check=False, timeout=WAIT_S
    )
    assert (done.returncode, done.stderr) == (0, b"") and b"'gr??er'" in done.stdout


def test_a_report_for_which_there_is_no_room_is_none(
    finished: Path, without_plots: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, *_: object, **__: object) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk, pytest.raises(OSError, match="No space"):
        disk.setattr(Path, "write_text", full)
        write_report(finished, status_of(4))
    assert not is_reported(finished), "echo2 status would read it"


def test_a_line_that_is_under_way_is_left_out(
    finished: Path, without_plots: None, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("metrics", "evaluations", "samples"):
        with (finished / "learner" / f"{name}.jsonl").open("a") as file:
            file.write('{"step": 4, "rew')
    assert not write_report(finished, status_of(4)).problems
    assert main(["samples", str(finished)]) == 0 and "after '4' (1.00)" in capsys.readouterr().out


def test_a_line_of_a_log_is_shown_once_it_is_whole(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = finished / "logs" / "w1.log"
    log.parent.mkdir()
    log.write_text("joined\nsleeps")
    lock, further = RunLock(finished), [" well\nends", None]

    def later(_: float) -> None:
        if (text := further.pop(0)) is None:
            os.close(lock.descriptor)
        else:
            log.write_text(log.read_text() + text)

    monkeypatch.setattr(processes.time, "sleep", later)
    assert main(["tail", str(finished)]) == 0
    shown = [line.split(maxsplit=1)[1] for line in capsys.readouterr().out.splitlines()]
    assert shown == ["joined", "sleeps well", "ends"]


def test_a_process_that_has_the_id_of_an_ended_run_is_left_alone(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        (finished / "run.lock").write_text(f"echo2 {other.pid}\n")  # ended long ago; nobody holds it
        assert main(["stop", str(finished)]) == 8
        assert main(["status", str(finished)]) == Unreachable.exit_code
        assert "no process of the run is at work" in capsys.readouterr().err
        assert other.poll() is None
        other.kill()


async def test_who_stops_a_run_that_stops_waits_with_it_and_interrupts_no_save(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rents_two(finished)
    lock, sent = RunLock(finished), []
    with monkeypatch.context() as others:
        others.setattr(processes.os, "kill", Mock(side_effect=PermissionError(errno.EPERM, "Operation not permitted")))
        assert main(["stop", str(finished)]) == 6
    said = capsys.readouterr().err
    assert f"{finished}: expected the user who started it (process {os.getpid()}) to stop it, got another user" in said
    await Children(finished, {}, "", {}, lock).stop_nodes()
    monkeypatch.setattr(processes.os, "kill", lambda _, number: sent.append(number))
    monkeypatch.setattr(processes.time, "sleep", lambda _: os.close(lock.descriptor))
    assert main(["stop", str(finished)]) == 0 and set(sent) == {0}, "0: whether it is alive"
    assert "stopped; still rented: 2 machines at 1.80 USD/h; the same" in capsys.readouterr().out


def test_missing_steps_and_three_without_a_reward_are_problems(finished: Path, without_plots: None) -> None:
    assert write_report(finished, status_of(3)).problems == ("expected 4 steps, got 3",)
    status = status_of(4)
    status.learner.equal_reward_steps = 1
    assert not write_report(finished, status).problems
    status.learner.equal_reward_steps = 3
    assert "the last 3 steps had none" in write_report(finished, status).problems[0]


def test_a_run_at_rest_says_so_and_by_hand_where_logs_are(
    finished: Path, without_plots: None, capsys: pytest.CaptureFixture[str]
) -> None:
    (finished / "run.lock").write_text("echo2 999999999\n")
    rents_two(finished)
    assert main(["status", str(finished)]) == Unreachable.exit_code
    said = capsys.readouterr().err
    assert "; still rented: 2 machines at 1.80 USD/h; " in said
    write_report(finished, status_of(4))
    assert main(["status", str(finished)]) == 0
    assert "PROBLEM: still rented: 2 machines at 1.80 USD/h; " in capsys.readouterr().out
    (finished / "summary.json").unlink()
    assert "no process of the run is at work; 4 steps trained, reward " in said
    assert "the same `echo2 run` goes on" in said
    (finished / "run.toml").unlink()  # only `echo2 run` writes it
    assert main(["samples", str(finished)]) == 0
    assert main(["tail", str(finished)]) == 8
    assert "programs started by hand log to their own terminals" in capsys.readouterr().err


def test_a_run_stopped_after_a_restart_claims_no_model_and_no_comparison(finished: Path, without_plots: None) -> None:
    (finished / "learner" / "evaluations.jsonl").unlink()
    counts = (100, 300, None, 40, 90)  # the third step was made up; the process after it counts from 0
    rows = [
        {"step": n, "reward/mean": 0.5, "step_s": 1.0, "phase/wait_s": 0.0}
        | (
            {}
            if count is None
            else {f"bytes/{kind}": count for kind in ("deltas", "keyframes", "merged", "full_snapshots")}
        )
        for n, count in enumerate(counts, 1)
    ]
    (finished / "learner" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    status = status_of(4)
    for peer_id in ("p1", "p2"):
        status.workers.add(peer_id=peer_id, name="box")
    report = write_report(finished, status)
    facts = json.loads((finished / "summary.json").read_text())
    assert facts["delta_bytes"] == facts["full_snapshot_bytes"] == 390
    assert facts["versions_equal"] == {}, "a learner without a fingerprint has nothing to compare with"
    text = " ".join(report.text.split())
    assert "held-out reward not measured in 4 steps" in text
    assert f"model not written; echo2 export {finished} FOLDER" in text
    (finished / "learner" / "model").mkdir()
    status.learner.fingerprint = status.workers[1].heartbeat.fingerprint = "abc"
    text = " ".join(write_report(finished, status).text.split())
    assert "bit for bit at 1 of 2 workers" in text, "two machines of one name are two workers"
    assert f"model {finished / 'learner' / 'model'}" in text


def test_what_all_held_out_prompts_begin_with_is_shown_once(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    system = "system\nYou are helpful.\nuser\n"
    rows = [
        {"step": step, "prompt": f"{system}{asked}", "answer": answer, "completion": said, "reward": 1.0}
        for step, said in ((0, "one"), (0, "other"), (4, "new"))
        for asked, answer in (("2+2=", "4"), ("2+3=", "5"), ("go", "a"), ("go", "b"))  # agents' may begin alike
    ]
    (finished / "learner" / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["samples", str(finished)]) == 0
    told = capsys.readouterr().out
    assert told.count("helpful") == 1 and f"each prompt begins {system!r}" in told
    assert "'2+2=', expected" in told and "'2+3=', expected" in told
    assert told.count("before 'one' (1.00), after 'new' (1.00)") == 4 and "other" not in told, "each prompt once"


def test_a_coordinator_that_is_away_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("echo2.cli.operator.OPERATOR_FOLDER", tmp_path / "me")
    link = f"echo2://127.0.0.1:1/{Identity.generate().peer_id}?token=abc"
    assert main(["ctl", link, "pause"]) == Unreachable.exit_code
    said = capsys.readouterr().err
    assert "127.0.0.1:1: expected an answer within" in said
    assert "got: Connection refused; a coordinator that was" in said
    assert "Errno" not in said
