import asyncio
import contextlib
import json
import sys
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from unittest import mock

import pytest
from rich.console import Console

from echo2.cli import live, run
from echo2.cli.live import STILL_STEPS, LastMove, LiveRun, ScreenState, draw, lag_lines, plain_line
from echo2.cli.processes import ChildFailed, Children
from echo2.cli.report import lags_of
from echo2.config.load import load_config
from echo2.wire.gen.echo2.v1 import coordinator_pb2


def test_lags_are_those_of_all_steps_and_marked_above_the_bound() -> None:
    assert lags_of([{"lag/histogram": [3, 1]}, {}, {"lag/histogram": [2, 0, 5]}]) == [5, 1, 5]
    assert lags_of([]) == []
    lines = lag_lines([10, 30, 0, 60], bound=2, width=36)
    assert len(lines) == 4
    assert "!" in lines[3] and "60%" in lines[3]
    assert not any("!" in line for line in lines[:3])


def test_screen_shows_each_worker_the_money_and_the_bytes() -> None:
    status = coordinator_pb2.RunStatus(
        usd_spent=1.25, usd_useful=1.0, artifact_bytes_published=10_000, full_bytes_published=40_000
    )
    status.learner.lag_histogram.extend([5, 5])
    worker = status.workers.add(name="oregon[/x]", state="alive", activation="active")
    worker.heartbeat.waits_for = "a [/lease]"
    console = Console(width=140, record=True)
    console.print(draw(ScreenState(title="demo", rewards=[0.1, 0.9], evaluations=[(0, 0.1)], status=status)))
    text = console.export_text()
    for expected in ("oregon[/x]", "active, waits for a [/lease]", "spent $1.2500, 80% of it on work", "now 0.90"):
        assert expected in text
    assert "deltas 10.0 kB, 25% of full snapshots (40.0 kB)" in text


def test_rewards_below_0_and_above_1_are_in_the_curve() -> None:
    console = Console(width=100, record=True)
    rewards = [-4.0] * 10 + [-1.0] * 10 + [2.0] * 10
    console.print(draw(ScreenState(title="demo", rewards=rewards, status=coordinator_pb2.RunStatus())))
    lines = console.export_text().splitlines()
    top = next(number for number, line in enumerate(lines) if "mean reward (-4 to 2)" in line)
    heights = [sum(line.split("│")[1][1 + at] == "█" for line in lines[top + 1 : top + 7]) for at in (0, 10, 20)]
    assert heights == [0, 3, 6]


@pytest.mark.parametrize("width", [60, 80, 200])
def test_no_curve_is_torn_at_any_width_and_the_headline_is_shown(width: int) -> None:
    status = coordinator_pb2.RunStatus(headline="Put a worker to work.", headline_kind="bad")
    status.learner.lag_histogram.extend([5, 5, 90])
    status.learner_hello.staleness_bound = 4
    worker = status.workers.add(name="e-first-4b-rtx4090-f7f6", state="alive", activation="quarantined")
    worker.hello.price_usd_per_hour, worker.heartbeat.tokens_per_s, worker.heartbeat.version = 0.35, 12345.0, 199
    worker.heartbeat.has_version, worker.heartbeat.waits_for = True, "the piece of a version that no peer has sent yet"
    console = Console(width=width, record=True)
    console.print(draw(ScreenState(title="demo", rewards=[n / 200 for n in range(200)], status=status)))
    lines = console.export_text().splitlines()
    top = next(number for number, line in enumerate(lines) if "mean reward" in line)
    blocks = [line.split("│")[1] for line in lines[top + 1 : top + 7]]
    assert all(set(line) <= set(" ▁▂▃▄▅▆▇█") for line in blocks), "six lines of the curve, one below the other"
    ends = [len(line.rstrip()) for line in blocks]
    assert ends[0] == max(ends) and ends == [ends[0]] * 6, "each line reaches the newest step"
    assert sum("lag " in line and "%" in line for line in lines) == 5, "one line for each lag"
    assert "Put a worker to work." in lines[1]
    if width >= 80:
        (row,) = (line for line in lines if "e-first-4b-rtx4090-f7f6" in line)
        assert row.split()[-4:-1] == ["12345", "199", "0"] and not any("…" in line for line in lines)
    status.learner_is_connected = True
    assert plain_line(ScreenState(title="demo", status=status)).endswith("Put a worker to work.")


def test_what_was_not_measured_is_not_shown() -> None:
    def shown(status: coordinator_pb2.RunStatus | None) -> tuple[str, str]:
        state = ScreenState(title="demo", status=status)
        console = Console(width=140, record=True)
        console.print(draw(state))
        return plain_line(state), console.export_text()

    assert "the coordinator starts" in shown(None)[0]
    status = coordinator_pb2.RunStatus()
    line, _ = shown(status)
    assert "the learner loads its model" in line and "step" not in line
    status.learner_is_connected = True
    status.learner_hello.step_limit = 120
    for status.learner.step in (0, 100):  # 100: after a restart, before its first step
        for text in shown(status):
            assert "120" in text and "utilisation" not in text and "reward -" not in text
    status.learner.step, status.learner.utilisation, status.plan.predicted_utilisation = 3, 0.5, 0.9
    status.learner.open_rollouts, status.learner.buffered_rollouts = 16, 12
    line, screen = shown(status)
    assert "in flight 28 rollouts, 12 of them buffered" in screen, "there is no cap before a plan"
    status.learner.train_s, status.learner.reward_mean, status.learner.eval_reward = 1.0, 0.25, 0.5
    assert "now 0.25   held-out at step  0.50" in shown(status)[1], "the learner's files are on another machine"
    assert "utilisation 50% (predicted 90%)" in line and "utilisation 50% measured, 90% predicted" in screen
    status.workers.add(name="w2")
    status.workers.add(name="w3").heartbeat.waits_for = "its vllm engine to start"
    status.workers.add(name="spot-7", state="gone")
    line, screen = shown(status)
    assert "w2 waits for a version, w3 waits for its vllm engine to start" in line and "spot-7" not in line + screen
    assert "workers, 1 more have gone" in screen
    status.plan.predicted_utilisation = 0.0  # the machines' rates are still being measured
    line, screen = shown(status)
    assert "predicted" not in line and "predicted" not in screen.split("broadcast")[0].split("capacity model")[0]
    status.learner_hello.step_limit = 0  # of a run that its trainer ends
    line, screen = shown(status)
    assert "step 3  " in line and "step 3   version 0" in screen


def test_a_run_is_given_up_for_standing_still_and_not_for_being_slow() -> None:
    state, moved = ScreenState(title="demo"), LastMove(0.0)
    assert moved.still_s(state, 0.0) == 0.0 and moved.still_s(state, 100.0) == 100.0
    state.status = coordinator_pb2.RunStatus()
    worker = state.status.workers.add(name="oregon")
    assert moved.still_s(state, 200.0) == 0.0, "the coordinator is there"
    for second in range(800, 5001, 600):
        worker.heartbeat.sampled_tokens += 1
        assert moved.still_s(state, float(second)) == (second - 200) / STILL_STEPS, "a slow worker samples"
    state.evaluations.append((3, 0.5))
    assert moved.still_s(state, 5000.0) == 0.0
    state.status.learner.waits_since_s = 77.0
    assert moved.still_s(state, 5100.0) == 100.0, "waiting is no move"


@pytest.mark.parametrize(
    ("name", "code", "is_end"),
    [("coordinator", -9, True), ("coordinator", 0, True), ("w1", 3, True), ("w1", -9, False), ("w1", 0, False)],
)
def test_a_run_ends_by_an_error_and_with_its_coordinator(name: str, code: int, is_end: bool, tmp_path: Path) -> None:
    children = Children(tmp_path, {}, sys.executable, {}, mock.Mock())
    children.log_path(name).write_text("grants leases\n")
    children.processes[name] = mock.Mock(returncode=code)
    how = "was ended by signal 9, and said last" if code < 0 else f"ended with code {code}"
    told = pytest.raises(ChildFailed, match=f"^{name} {how}: grants leases$")
    with told if is_end else contextlib.nullcontext():
        children.raise_if_failed()


@pytest.mark.parametrize("words", ["step 3", "error: DiskFull: no room", "stopping: SIGTERM"])
async def test_a_run_that_is_stopped_tells_whether_its_learner_has_saved(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its code does not tell: the signal may come as it ends by itself. Code 0: somebody else has stopped it."""
    code = -15 if "stopping" not in words else 0

    class Stopped(LiveRun):
        async def run(self, workers: Sequence[str]) -> None:
            self.newest = coordinator_pb2.RunStatus(open_machines=2, rented_usd_per_hour=1.8)
            self.children.log_path("learner").write_text("error: of an earlier start\n")
            self.children.commands = {"learner": ["echo-learner"]}
            self.children._lock.descriptor = 0
            monkeypatch.setattr(
                asyncio, "create_subprocess_exec", mock.AsyncMock(return_value=mock.Mock(returncode=code))
            )
            await self.children.start("learner")
            with self.children.log_path("learner").open("a") as log:
                log.write(words)
            if code:
                raise asyncio.CancelledError

    monkeypatch.setattr(run, "LiveRun", Stopped)
    config = load_config(overrides={"run.folder": str(tmp_path)})
    expected = "could not save all: error: DiskFull: no room$" if "error" in words else "goes on from there$"
    expected = expected if code else "not by this command; the same command goes on from what it saved$"
    with pytest.raises(run.StoppedByUser, match=expected):
        (tmp_path / config.run.name).mkdir()
        (tmp_path / config.run.name / "run.toml").write_text("of a good run")
        await run.LocalRun(config, {}).run(Console(file=(printed := StringIO())), True, mock.Mock())
    assert (tmp_path / config.run.name / "run.toml").read_text() == "of a good run", "no learner has taken another"
    assert "still rented: 2 machines at 1.80 USD/h; the same command looks after them" in printed.getvalue()


@pytest.mark.parametrize("name", ["learner", "w1"])
async def test_a_learner_has_time_to_save(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    children, process = Children(tmp_path, {}, sys.executable, {}, mock.Mock()), mock.Mock(returncode=None)
    children.processes[name], process.wait = process, lambda: asyncio.sleep(0.01)
    monkeypatch.setattr("echo2.cli.processes.STOP_WITHIN_S", 0.0)
    monkeypatch.setattr(children, "_kill", killed := mock.Mock())
    await children.stop(name)
    assert process.send_signal.called and killed.called == (name != "learner")


@pytest.mark.parametrize("workers", [[], ["w1"]])
async def test_plain_lines_come_seldom_and_a_run_without_workers_goes_on(
    workers: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`echo2 serve` starts none unless it is told to."""
    learner_runs, children, operator = [True, True, False], mock.AsyncMock(), mock.AsyncMock()
    children.run_folder, children.processes = tmp_path, {}
    children.start.side_effect = lambda name: children.processes.update({name: None})
    children.raise_if_failed = children.raise_if_learner_is_alone = mock.Mock()
    children.is_running = lambda name: name == "learner" and learner_runs.pop(0)
    operator.status.return_value = coordinator_pb2.RunStatus(learner_is_connected=True)
    operator.status.return_value.workers.add(name="[/x]")  # a worker chooses its name
    links, file = list[str](), tmp_path / "links" / "operator.link"

    def opened(link: str, _: Path) -> contextlib.nullcontext[mock.AsyncMock]:
        links.append(link)
        file.write_text("echo2://h:1/p?token=newer")
        return contextlib.nullcontext(operator)

    monkeypatch.setattr(live.OperatorClient, "at", opened)
    monkeypatch.setattr(live, "LOOKS_MAX", 2)
    monkeypatch.setattr(live, "LOOK_EVERY_S", 0.0)
    (tmp_path / "links").mkdir()
    file.write_text("echo2://h:1/p?token=t")
    with StringIO() as printed:
        await LiveRun(children, Console(file=printed), True, lambda status: False).run(workers)
        assert printed.getvalue().count("\n") == 1 + 1, "the page's address, and one line"
        assert "[/x] waits for a version" in printed.getvalue()
    assert [call.args[0] for call in children.start.await_args_list] == ["learner", *workers] and not learner_runs
    assert [link.rpartition("=")[2] for link in links] == ["t", "newer"], (
        "anew after some looks: a run of weeks outlives them"
    )


@pytest.mark.parametrize(("finished", "asked"), [("run r is finished", 3), ("", 1)])
async def test_the_coordinator_of_a_finished_run_is_stopped_once_it_has_given_back_what_it_rented(
    finished: str, asked: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    children, operator = mock.AsyncMock(run_folder=tmp_path), mock.AsyncMock()
    children.is_running = mock.Mock(return_value=True)
    counts = [2, 1, 0][:asked]
    operator.status.side_effect = [coordinator_pb2.RunStatus(finished=finished, open_machines=n) for n in counts]
    monkeypatch.setattr(live.OperatorClient, "at", lambda *_: contextlib.nullcontext(operator))
    monkeypatch.setattr(live, "LOOK_EVERY_S", 0.0)
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "operator.link").write_text("echo2://h:1/p?token=t")
    one = LiveRun(children, Console(file=(printed := StringIO())), True, lambda status: True)
    await one._end()
    assert operator.status.await_count == asked and children.stop_nodes.await_count == 1
    children.stop.assert_awaited_once_with("coordinator")
    assert ("giving back 1 rented machine\n" in printed.getvalue()) is bool(finished)


def test_rows_that_a_learner_cuts_off_as_it_goes_back_leave_the_screen(tmp_path: Path) -> None:
    (tmp_path / "learner").mkdir()
    state = ScreenState(title="demo")
    for rewards in ([0.1, 0.2, 0.3], [0.1], [0.1, 0.5]):
        rows = [{"step": step, "reward/mean": reward} for step, reward in enumerate(rewards, 1)]
        (tmp_path / "learner" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        state.read(tmp_path)
        assert state.rewards == rewards
