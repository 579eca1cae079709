"""The commands as typed: what is wrong is said in one line, with an exit code of its own kind; a signal asks for a clean end."""

import argparse
import asyncio
import errno
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest import mock

import pytest

from echo2.base.errors import BadToken, ConfigError, PortBusy, RunFinished, TaskError, Unreachable
from echo2.base.ids import PeerId
from echo2.broadcast.nat.reach import HostFacts
from echo2.cli import coordinator, learner, main, worker
from echo2.cli.demo import model, run as demo
from echo2.cli.process import LINES_BURST, PARENT, LogRateLimit, run_daemon
from echo2.cli.run import LocalRun
from echo2.cli.worker import worker_options
from echo2.config.load import load_config, to_toml
from echo2.coordinator.planning.pool_plan import quiet_solver
from echo2.learner.options import LearnerOptions
from echo2.outside.guard import ProgressLines
from echo2.worker.heartbeat import dialled_port, reach_of
from echo2.worker.weights import progress_for
from tests.patience import WAIT_S
from tests.unit.learner.tiny import make_tiny_model

LINK = "echo2://127.0.0.1:1/12D3KooWPonMYafxrz8bgmhv4GFZcVwJh5A5svfk3x2QL1j1uNuF?token=abc"
NOWHERE = ["--folder", "/proc/nope"]


@pytest.mark.parametrize(
    ("program", "typed", "code", "said"),
    [
        (main, ["dmo"], 2, "expected one of config, demo, run, .*, got 'dmo' \\(did you mean demo\\?\\)"),
        (main, ["demo", "--stalness", "3"], 2, "no such option: --stalness \\(did you mean --staleness\\?\\)"),
        (main, ["plan", "--config", "x.toml"], 2, "no such option: --config is another command's"),
        (main, ["demo", "--steps", "many"], 2, "command line: --steps: expected a whole number, got 'many'"),
        (main, ["export"], 2, "expected RUN, FOLDER, got none; echo2 export --help explains it"),
        (main, ["export", "/proc/nope", "/tmp/x"], 2, "/proc/nope"),
        (worker, ["join", "LINK", "--nmae", "x"], 2, "no such option: --nmae \\(did you mean --name\\?\\)"),
        (worker, ["joyn"], 2, "got 'joyn' \\(did you mean join\\?\\)"),
        (worker, ["join", "@no.link"], 2, "a file with a link at no.link, found nothing there: echo-coordinator writes"),
        (worker, ["join", "http://example"], 2, "expected echo2://"),
        (worker, ["join", LINK, *NOWHERE], 6, "/proc/nope"),
        (worker, ["join", LINK, "--name", "../../x y"], 2, "--name: expected up to 63 letters"),
        (coordinator, ["hand.toml"], 2, "a run file is given as --config hand.toml"),
        (coordinator, ["--config", "no-such.toml"], 2, "no-such.toml: expected a TOML file, found nothing there"),
        (coordinator, NOWHERE, 8, "/proc/nope"),
        (learner, ["join", "LINK", "--learner.lrr", "1"], 2, "no such option \\(did you mean learner.lr\\?\\)"),
        (learner, ["join", LINK, *NOWHERE, "--model.path", "x"], 6, "/proc/nope"),
        (learner, ["join", LINK, "--model.path", "./no"], 2, "model ./no: expected a folder with config.json, found none"),
        (learner, ["join", LINK, "--model.path", "x", "--task.name", "maths"], 2, "expected one of sort_digits, .*got 'maths'"),
        (learner, ["join", LINK, "--model.path", "x", "--task.name", "./own.py:Own"], 2, "MODULE:NAME, .* got './own.py:Own'"),
        (
            learner,
            ["join", LINK, "--model.path", "x", "--task.name", "calculator", "--task.args.turns_max", "many"],
            2,
            "calculator: expected turns_max to be a whole number of at least 1, got 'many'",
        ),
        (main, ["status", "runs/no"], 2, "runs/no: expected a run's folder .* found no such folder"),
        (main, ["plan", "--billions", "-4"], 2, "billions: expected a number above 0 and up to 10,000, got -4"),
        (main, ["plan", "--billions", "1e30"], 2, "billions: expected a number above 0 and up to 10,000, got 1e\\+30"),
        (main, ["plan", "--billions", "4", "--what-if", "S=inf"], 2, "what-if S: expected a number, got 'inf'"),
        (main, ["plan", "--billions", "4", "--what-if", "kappa=nan"], 2, "what-if kappa: expected a number, got 'nan'"),
        (main, ["config", "show", "--model.path", "\udcff"], 2, "command line: expected UTF-8 text, got '--model.path=.udcff'"),
        (main, ["plan", "--billions", "4", "--catalogue", os.devnull], 2, "catalogue: expected a table for each kind of GPU"),
        (main, ["doctor", "--link", "http://h/x?token=secret"], 2, "^(?!.*secret).*join link: expected echo2://.*got 'http://h/x"),
        (main, ["doctor", "--folder", sys.executable], 2, f"a folder, there or not, got the file {sys.executable}"),
        (main, ["offers", "--offline", "--billions", "0"], 2, "billions: expected a number above 0 and up to 10,000, got 0"),
        (main, ["offers", "--rows", "-1"], 2, "line: --rows: expected a whole number from 0, got '-1'"),
        (main, ["offers", "--max-age", "soon"], 2, "line: --max-age: expected .* got 'soon'"),
        (worker, ["status", "/nowhere"], 2, "expected no further argument, got '/nowhere'"),
        (main, ["plan", "/proc"], 2, "/proc: expected a TOML file, got: Is a directory$"),
        (main, ["plan", sys.executable], 2, "expected a TOML file, got something that is not UTF-8 text$"),
        (worker, ["join", "@/proc"], 2, "expected a file with a link at /proc, got: Is a directory$"),
        (worker, ["join", f"@{sys.executable}"], 2, "expected a file with a link at .* not UTF-8 text$"),
        (main, ["samples", "runs/no"], 2, "runs/no: expected a run's folder .* found no such folder$"),
        (main, ["tail", "/proc"], 2, "/proc: expected a run's folder .* found neither run.toml nor coordinator nor learner in it$"),
        (main, ["stop", "runs/no"], 2, "runs/no: expected a run's folder .* found no such folder$"),
        (main, ["offers", "--billions", "4", "--recorded", "README.md"], 2, "expected a kept catalogue .* got another file$"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_one_line_that_says_what_was_meant(
    program: object, typed: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        ended = program.main(typed)  # type: ignore[attr-defined]
    except SystemExit as end:
        ended = end.code
    told = capsys.readouterr().err
    errors = [line for line in told.splitlines() if line.startswith("error: ")]
    assert (ended, len(errors)) == (code, 1) and "Traceback" not in told, told
    assert re.search(said, errors[0]), told


def test_every_argument_of_every_command_is_explained() -> None:
    from docs.generate import _parser_of

    def unexplained(parser: argparse.ArgumentParser) -> Iterator[str]:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for inner in action.choices.values():
                    yield from unexplained(inner)
            elif not action.help:
                yield f"{parser.prog} {action.dest}"

    for program in (main, coordinator, learner, worker):
        assert list(unexplained(_parser_of(program.main))) == []


def test_the_value_of_an_option_is_not_taken_for_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["config", "show", "--preset", "wan", "--learner.lr", "2e-6", "--plain"]) == 0
    assert "lr = 2e-06" in capsys.readouterr().out


def test_a_mapped_port_is_named_by_an_ip_address_and_a_port_that_peers_may_dial(tmp_path: Path) -> None:
    own = argparse.Namespace(link="echo2://h:1/p?token=t", name="w", folder=tmp_path, preemption="", advertise="")
    for text in ("203.0.113.5:41873", "[2001:db8::5]:41873"):
        own.advertise = text
        options = worker_options(own, load_config())
        assert options.advertised_addresses == (text,)
        assert dialled_port(options, 8419) == 41873
        facts = HostFacts("203.0.113.5", is_reachable=True)
        told = reach_of(facts, ["192.168.0.2:8419"], 41873, PeerId("hub"))
        assert told is not None and list(told.addresses) == ["203.0.113.5:41873"]
    own.advertise = ""
    assert dialled_port(worker_options(own, load_config()), 8419) == 8419
    for text in ("host.example:41873", "203.0.113.5", "203.0.113.5:22", "203.0.113.5:70000", "0.0.0.0:41873"):
        own.advertise = text
        with pytest.raises(ConfigError, match="--advertise: expected the public IP address and the mapped port"):
            worker_options(own, load_config())


def test_a_single_rollout_of_each_prompt_is_refused_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        f'[run]\nfolder = "{tmp_path}/runs"\n[model]\npath = "nowhere"\n[learner]\nrollouts_per_prompt = 1\n'
    )
    assert main.main(["run", str(file)]) == ConfigError.exit_code
    assert "learner.rollouts_per_prompt: expected 2 or more" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    assert learner.main(["join", "link", "--config", str(file)]) == ConfigError.exit_code
    assert "take 4 to 16" in capsys.readouterr().err


def test_only_rank_0_needs_the_file_with_the_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_tiny_model(tmp_path / "model")
    arguments = ["join", f"@{tmp_path / 'nowhere.link'}", "--folder", str(tmp_path / "run"), "--model.path", str(model)]
    followed: list[LearnerOptions] = []
    monkeypatch.setattr(learner, "follow_rank_0", lambda options: followed.append(options) or 0)
    monkeypatch.setenv("RANK", "1")
    assert learner.main(arguments) == 0 and followed[0].join_link == "" and followed[0].link_file is None
    monkeypatch.setenv("RANK", "0")
    assert learner.main(arguments) != 0 and len(followed) == 1
    assert "expected a file with a link" in capsys.readouterr().err


def test_rewards_that_cannot_work_end_the_learner_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    arguments = ["join", "echo2://nobody", "--folder", str(folder), "--model.path", "nobody/no-model"]
    assert learner.main([*arguments, "--task.name", "tests.unit.tasks.naughty:Always"]) == TaskError.exit_code
    assert "naughty:Always: expected a reward for a sample" in (said := capsys.readouterr().err), said
    assert not folder.exists()


STARTED = """
import time
from echo2.cli.process import die_with_parent
die_with_parent()
print("it runs", flush=True)
time.sleep(9)  # by then nobody but the kernel has ended it
print("it outlived the command")
"""
STARTS = f"""
import os, subprocess, sys
subprocess.run([sys.executable, "-c", {STARTED!r}], env={{**os.environ, {PARENT!r}: str(os.getpid())}})
"""


def test_what_a_command_started_ends_with_it_though_it_was_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", STARTS], stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None and command.stdout.readline() == "it runs\n"
        command.kill()
        assert command.stdout.read() == "", "the end of what it wrote: the other has the pipe as well"


class Failing:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    async def run(self) -> None:
        raise self.error

    def stop(self) -> None:
        raise AssertionError("nobody asked for it")


class Waiting:
    """Runs until it is stopped; sends itself signals as soon as it runs."""

    def __init__(self, *signals: signal.Signals) -> None:
        self.was_asked, self.signals = False, signals
        self.stopped = asyncio.Event()

    async def run(self) -> None:
        for number in self.signals:
            os.kill(os.getpid(), number)
            await asyncio.sleep(0.05)
        await asyncio.wait_for(self.stopped.wait(), WAIT_S)

    def stop(self) -> None:
        self.was_asked = True
        self.stopped.set()


@pytest.mark.parametrize(
    ("error", "code", "name"),
    [
        (PortBusy("expected port 1, got\nnothing"), 6, "PortBusy"),
        (BadToken("no"), 4, "BadToken"),
        (OSError(errno.ENOSPC, "No space left on device", "/runs/x"), 6, "DiskFull"),
        (OSError(errno.EDQUOT, "Disk quota exceeded", "/runs/x"), 6, "DiskFull"),
        (SystemExit(0), TaskError.exit_code, "TaskError"),
    ],
)
def test_an_error_is_one_line_and_its_exit_code(
    error: BaseException, code: int, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_daemon(lambda: Failing(error)) == code
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"error: {name}: ")


def test_too_few_open_files_are_refused_before_anything_is_opened(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (64, 64))
    assert run_daemon(mock.Mock(side_effect=AssertionError)) == 6
    assert "open files: expected to be allowed 256 or more, got 64; raise that limit" in capsys.readouterr().err


def test_a_folder_that_was_removed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main.main(["doctor"]) == 6 and "the current folder: No such file" in capsys.readouterr().err


def test_an_end_without_a_failure_is_called_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_daemon(lambda: Failing(RunFinished("run x ended at step 3: stopped by the operator"))) == 0
    assert capsys.readouterr().err == "stopping: run x ended at step 3: stopped by the operator\n"


def test_ctrl_c_before_there_is_a_daemon_ends_it_without_a_word() -> None:
    script = (
        "import os, signal; from echo2.cli import coordinator, learner, worker\n"
        "for own, words in ((learner, ['join', 'x']), (worker, ['join', 'x']), (coordinator, [])):\n"
        "    if not (child := os.fork()):\n"
        "        own.parse = lambda *_: os.kill(os.getpid(), signal.SIGINT); own.main(words)\n"
        "    print(os.waitpid(child, 0)[1])"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=WAIT_S)
    assert (done.stdout, done.stderr) == (f"{int(signal.SIGINT)}\n" * 3, "")


@pytest.mark.parametrize("program", ["echo2", "echo-learner", "echo-worker", "echo-coordinator"])
def test_ctrl_c_while_a_command_is_imported_ends_it_without_a_word(program: str) -> None:
    script = (
        "import os, signal, sys\n"
        "class Interrupt:\n"
        "    def find_spec(name, *_):\n"
        "        if name == 'echo2.base.errors': os.kill(os.getpid(), signal.SIGINT)\n"
        f"sys.argv, sys.meta_path = [{program!r}], [Interrupt, *sys.meta_path]\n"
        f"from echo2.cli.{program.removeprefix('echo-').replace('echo2', 'main')} import main"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, timeout=WAIT_S)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, b"", b"")


def test_the_first_signal_asks_for_a_clean_stop() -> None:
    made: list[Waiting] = []
    assert run_daemon(lambda: made.append(Waiting(signal.SIGTERM)) or made[0]) == 0  # type: ignore[func-returns-value]
    assert made[0].was_asked


@pytest.mark.parametrize("closed", ["", "2>&-"])
def test_a_closed_terminal_asks_for_a_clean_stop_however_often_it_says_so(closed: str) -> None:
    """The kernel and the shell say so each."""
    script = (
        "import signal; from echo2.cli.process import run_daemon; from tests.unit.cli.test_commands import Waiting\n"
        "waiting = []\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored\n"
        "code = run_daemon(lambda: waiting.append(Waiting(signal.SIGHUP, signal.SIGHUP)) or waiting[0])\n"
        "assert waiting[0].was_asked; raise SystemExit(code)"
    )
    command = ["bash", "-c", f'exec {sys.executable} -c "$0" {closed}', script]
    done = subprocess.run(command, check=False, capture_output=True, timeout=WAIT_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_a_flood_of_a_librarys_errors_is_cut_and_what_was_dropped_is_counted() -> None:
    now, limit = [0.0], LogRateLimit(lambda: now[0])
    shown = [one for _ in range(100) if limit.filter(one := logging.makeLogRecord({"msg": "no route"}))]
    assert len(shown) == LINES_BURST
    now[0] = 1.0
    last = logging.makeLogRecord({"msg": "no route"})
    assert limit.filter(last) and last.getMessage() == f"no route ({100 - LINES_BURST} lines before it not logged)"


class Odd(BaseHTTPRequestHandler):
    """A server of files that has a page for every name, as some have, and answers what is handed in with no HTTP."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write({"/b": b"{}", "/c": b"[]"}.get(self.path[:2], b"<html>"))

    def do_POST(self) -> None:
        self.wfile.write(b"* OK IMAP4\r\n")

    def log_message(self, *_: object) -> None: ...


def test_what_cannot_be_published_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Odd) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        here = f"http://127.0.0.1:{server.server_port}"
        (tmp_path / "gateway.url").write_text(f"{here}\n")
        (tmp_path / "gateway.key").write_text("key\n")
        for folder, told in (
            ("http://[x", "http://\\[x/config.json: expected a file of the model"),
            ("http://127.0.0.1/a b", "/a b/config.json: expected a file of the model"),
            *((here + at, "expected the gateway of echo2 serve there") for at in ("", "/b", "/c")),
            (str(tmp_path), "expected the gateway of echo2 serve there"),
        ):
            assert main.main(["publish", folder, "--version", "1", "--run", str(tmp_path)]) == Unreachable.exit_code
            assert re.match(f"error: Unreachable: .*{told}.*\n$", capsys.readouterr().err)
        server.shutdown()


@pytest.mark.parametrize(("closed", "told"), [("| head -1", "[run]\n"), (">&-", "")])
def test_a_reader_that_has_seen_enough_is_no_error(closed: str, told: str) -> None:
    shown = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{sys.executable} -m echo2.cli.main config show {closed}"],
        capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    assert (shown.returncode, shown.stdout, shown.stderr) == (0, told, "")


def test_no_file_takes_the_number_of_an_output_that_was_closed() -> None:
    script = (
        "import os, sys; sys.argv[0] = 'echo-coordinator'; import echo2.cli\n"
        "sys.exit(not all(os.fstat(number) and os.get_inheritable(number) for number in range(3)))"
    )
    subprocess.run(["bash", "-c", f'exec {sys.executable} -c "$0" <&- >&- 2>&-', script], check=True, timeout=WAIT_S)


def test_daemons_work_without_standard_output_and_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    with quiet_solver():
        assert isinstance(progress_for(None, as_json=False), ProgressLines)


def test_what_compiles_the_codec_does_not_see_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = mock.Mock()
    monkeypatch.setattr(model.subprocess, "run", started)
    monkeypatch.setattr(model, "codec_stamp", lambda: tmp_path / "compiled")
    model.warm_once()
    assert started.call_args.kwargs["start_new_session"] and (tmp_path / "compiled").exists()


def test_echo2_serve_puts_the_gateway_in_the_learners_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    async def seen(run: LocalRun, *_: object) -> None:
        started.extend(run.commands().values())

    monkeypatch.setattr(LocalRun, "run", seen)
    file = tmp_path / "run.toml"
    file.write_text(f'[run]\nname = "served"\nfolder = "{tmp_path}"\n[model]\npath = "models/base"\n')
    assert main.main(["serve", str(file), "--workers", "1", "--trains"]) == 0
    assert [command[: 3 if "serve" in command else 2] for command in started] == [
        ["echo-coordinator", "--config"], ["echo-learner", "serve", "--trains"], ["echo-worker", "join"]
    ]  # fmt: skip


def test_a_demo_goes_on_with_its_own_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def made(*how: object) -> None:
        raise TaskError("it goes on")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "_make_base_model", made)
    other = {"model.path": "models/mine"}
    found = "found a run of models/mine; choose --name"
    for name, overrides, said in (("kept", {}, "it goes on"), ("other", other, found)):
        begun = demo.demo_run(main.make_parser().parse_args(["demo", "--name", name]), overrides)
        assert begun.again == f"the same command with --name {name}", "without, its name would be another each time"
        begun.folder.mkdir(parents=True)
        (begun.folder / "run.toml").write_text(to_toml(begun.config, with_descriptions=True))
        assert main.main(["demo", "--name", name, "--steps", "7"])
        assert said in capsys.readouterr().err
