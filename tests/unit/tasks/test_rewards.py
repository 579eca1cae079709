"""Rewards: both scorers keep one contract, and a reward that misbehaves costs only itself."""

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest

from echo2.base.errors import ConfigError, LimitExceeded, ResourceError, TaskError
from echo2.contain.messages import Limits
from echo2.contain.pool import RunnerLost
from echo2.tasks import rewards
from echo2.tasks.built_in import PLAIN_TASKS
from echo2.tasks.registry import make_task
from echo2.tasks.rewards import (
    Containment,
    InProcessScorer,
    RayRunner,
    RewardFailure,
    RewardPool,
    RewardScorer,
    Scored,
    check_rewards,
    make_scorer,
    unjudgeable_references,
)
from echo2.tasks.task import Observation, Reward, TaskSpec
from echo2.tasks.visible import own_files, own_modules
from tests.patience import WAIT_S

SPEC = TaskSpec("tests.unit.tasks.naughty:Naughty", {}, seed=3)
CHEAP_SPEC = TaskSpec("tests.unit.tasks.naughty:Naughty", {"is_cheap": True}, seed=3)
TRUSTED = Containment(is_trusted=True)
LIMITS = Limits(cpu_s=1, wall_s=3.0)


@contextmanager
def opened(spec: TaskSpec, limits: Limits = LIMITS, containment: Containment | None = None) -> Iterator[RewardScorer]:
    scorer = make_scorer(make_task(spec), spec, limits, containment)
    try:
        yield scorer
    finally:
        scorer.close()


@pytest.mark.parametrize(
    ("spec", "containment"),
    [(SPEC, None), (SPEC, TRUSTED), (CHEAP_SPEC, None), (CHEAP_SPEC, TRUSTED)],
    ids=["contained", "trusted pool", "cheap but contained", "in process"],
)
def test_rewards_have_parts_and_a_raising_one_costs_itself(spec: TaskSpec, containment: Containment | None) -> None:
    with opened(spec, containment=containment) as scorer:
        texts = ["fine", "raise", "nan", "chatter", "exit", "half", "bare", "cancel"]
        results = [future.result(WAIT_S) for future in [scorer.submit(*asked) for asked in enumerate(texts)]]
        assert [r.reward.value if r.reward else None for r in results] == [1.0, None, None, 4.0, None, 0.5, None, None]
        assert results[0].reward is not None and results[0].reward.parts == {"seed": 3.0}
        assert results[5].reward is not None and results[5].reward.parts == {"share": 0.25}, "of any kind of number"
        assert [r.failure for r in results[1:3]] == [RewardFailure.RAISED, RewardFailure.RAISED]
        assert results[1].message.startswith("ValueError: no such answer (naughty.py, line ")
        assert results[4].message.startswith("SystemExit: 0 (naughty.py, line ")
        assert results[6].message == "TaskError: score: expected a Reward, got 0.5"
        assert results[7].failure is RewardFailure.RAISED and "as those of pytest.fail" in results[7].message


def test_an_instance_that_nothing_can_be_scored_on_is_no_senders_fault() -> None:
    with opened(replace(SPEC, name="tests.unit.tasks.naughty:BadRow")) as scorer:
        for _ in range(2):  # the second is known
            result = scorer.submit(1, "fine", "honest").result(WAIT_S)
            assert result.reward is None and result.failure is RewardFailure.FAULT
            assert not result.failure.is_held_against_sender and "instance 1 itself" in result.message
        spun = scorer.submit(0, "spin", "liar").result(WAIT_S)
        assert spun.failure in (RewardFailure.EXHAUSTED, RewardFailure.TIMED_OUT)  # the latter on a busy machine
        assert scorer.submit(2, "fine").result(WAIT_S).failure is None


def test_an_instance_whose_scorer_waited_in_vain_is_tried_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a judge on the network that was away; what computes too long always does."""
    monkeypatch.setattr(rewards, "AGAIN_S", 0.0)
    for failure, again in ((RewardFailure.TIMED_OUT, None), (RewardFailure.EXHAUSTED, RewardFailure.FAULT)):
        outcomes = [Scored(None, failure, "", 0.0)] * 2 + [Scored(Reward(1.0), None, "", 0.0)]
        pool: Any = RewardPool(SPEC, containment=TRUSTED)
        pool._pool = SimpleNamespace(submit=lambda *_, told=outcomes: rewards._done(told.pop(0)))
        assert [pool.submit(0, "fine").result().failure for _ in range(2)] == [RewardFailure.FAULT, again]


@pytest.mark.parametrize("containment", [None, TRUSTED], ids=["contained", "trusted"])
def test_what_a_completion_used_up_is_worth_0_and_other_failures_nothing(containment: Containment | None) -> None:
    """A trusted one has the learner's rights, so that what it does to its process may be the machine's fault."""
    expected = {
        "hang": (RewardFailure.TIMED_OUT, None),
        "eat": (RewardFailure.OUT_OF_MEMORY, 0.0 if containment is None else None),
        "kill": (RewardFailure.RAISED if containment is None else RewardFailure.FAULT, None),
    }
    if containment is None:  # there it may signal nobody
        expected |= {
            "die": (RewardFailure.DIED, None),
            "spin": (RewardFailure.EXHAUSTED, 0.0),
            "x" * (17 << 20): (RewardFailure.TOO_LARGE, None),
        }
    with opened(SPEC, replace(LIMITS, wall_s=10.0), containment) as scorer:  # a second of computing on a busy machine
        futures = {text: scorer.submit(0, text, "sender") for text in expected}
        results = {text: future.result(WAIT_S) for text, future in futures.items()}
        assert {t: (r.failure, r.reward.value if r.reward else None) for t, r in results.items()} == expected
        assert all(r.reward is None or r.reward.parts == {"exhausted": 1.0} for r in results.values())
        assert scorer.submit(0, "fine").result(WAIT_S).failure is None
        asked, mapped = (scorer.submit(0, text).result(WAIT_S) for text in ("asks", "maps"))
        assert asked.reward is not None and asked.reward.value == 0.0, "its input is not that of its process"
        assert (mapped.failure is None) == (containment is TRUSTED), "what is reserved is no memory yet"


def test_without_containment_rewards_are_refused_unless_they_are_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> str:
        raise ResourceError("no user namespaces")

    monkeypatch.setattr(rewards, "bubblewrap", fails)
    with pytest.raises(ConfigError, match="no user namespaces.* task.trusted_rewards = true"):
        RewardPool(SPEC)
    RewardPool(SPEC, containment=Containment(is_trusted=True)).close()
    with pytest.raises(ConfigError, match="trusted_rewards"):
        make_scorer(make_task(CHEAP_SPEC), CHEAP_SPEC)


def test_the_queue_is_bounded_and_a_closed_pool_refuses_and_cancels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewards, "QUEUE_MAX", 2)
    pool = RewardPool(SPEC, Limits(wall_s=0.5), Containment(processes=1))
    futures = []
    with pytest.raises(LimitExceeded, match="at most 2 requests waiting"):
        for _ in range(10):
            futures.append(pool.submit(0, "hang"))
    pool.close()
    assert futures[-1].cancelled()
    with pytest.raises(TaskError, match="closed"):
        pool.submit(0, "fine")


def test_a_cluster_whose_connection_is_gone_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else the thread would end, and with the last one all rewards, without a word; or the run, where a reward was under way."""

    def gone(*_: object) -> None:
        raise ConnectionError("the client is disconnected")  # which is no RayError

    cluster = SimpleNamespace(exceptions=SimpleNamespace(RayError=KeyError), remote=gone, get=None)
    for name, value in (("_ray", lambda: cluster), ("LOOK_S", 0.001), ("TOLD_S", 0.001)):
        monkeypatch.setattr(rewards, name, value)
    looks, runner = iter([True, True, False]), RayRunner(SPEC, LIMITS, Containment())
    runner._actor = SimpleNamespace(ask=SimpleNamespace(remote=gone))
    with pytest.raises(RunnerLost, match="the client is disconnected"):  # as while a reward is computed
        runner.ask({})
    assert not runner.prepare(lambda: next(looks))
    assert caplog.text.count("a reward process waits for a machine of the Ray cluster: the client is disconnected") == 2


def test_plain_comparisons_of_our_own_stay_in_this_process_and_others_do_not() -> None:
    plain = TaskSpec("sort_digits")
    with opened(plain) as own, opened(CHEAP_SPEC, containment=TRUSTED) as trusted:
        assert isinstance(own, InProcessScorer) and isinstance(trusted, InProcessScorer)
    with opened(CHEAP_SPEC) as cheap, opened(SPEC) as dear:
        assert isinstance(cheap, RewardPool) and isinstance(dear, RewardPool)
    for name in PLAIN_TASKS:
        assert make_task(TaskSpec(name)).is_cheap


def test_environments_are_stepped_in_the_pool_whichever_process_answers() -> None:
    with closing(RewardPool(TaskSpec("calculator", {"turns_max": 3}, seed=1), LIMITS)) as pool:
        call = '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>'
        for step in [pool.submit_step(index, [call]) for index in range(4)]:
            assert [message.content for message in step.result(WAIT_S).messages] == ["42"]
        for end in [pool.submit_step(index, [call, "I give up"]) for index in range(4)]:
            reward = end.result(WAIT_S).reward
            assert reward is not None and reward.value == 0.0
        late = pool.submit_step(0, [call, "I give up", "again"]).result(WAIT_S)
        assert late.failure is RewardFailure.RAISED and "no completion after its end" in late.message
    with pytest.raises(TaskError, match=r"expected messages as ChatMessage\(role, content\), got \{'role'"):
        Observation(({"role": "user", "content": "a usual mistake"},))  # type: ignore[arg-type]


def test_a_contained_scorer_reads_a_data_set_of_the_hubs_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no network, and of the cache it sees this data set alone."""
    pytest.importorskip("math_verify")
    with TemporaryDirectory() as home:
        kept = Path(home) / "hub" / "datasets--org--puzzles"
        (kept / "blobs").mkdir(parents=True)
        (kept / "blobs" / "b").write_text(json.dumps({"prompt": "1/4+1/4?", "answer": "0.5"}) + "\n")
        (kept / "snapshots" / "aaa").mkdir(parents=True)
        (kept / "snapshots" / "aaa" / "train.jsonl").symlink_to(Path("../../blobs/b"))
        monkeypatch.setenv("HF_HOME", home)
        monkeypatch.delenv("HF_HUB_CACHE", raising=False)
        with opened(TaskSpec("math", {"path": "org/puzzles"}), Limits()) as scorer:
            result = scorer.submit(0, "\\boxed{\\frac{1}{2}}").result(WAIT_S)
            assert result.reward is not None and result.reward.value == pytest.approx(1.0, abs=0.3), result.message
            assert (wrong := scorer.submit(0, "no idea").result(WAIT_S).reward) is not None and wrong.value < 0.3


OWN_TASK = """
from {name}_sorter import Sorter
from echo2.tasks.task import Reward, TaskInstance


class Own:
    name, size, is_cheap = "own", 8, False

    def __init__(self, seed, words="", hidden=False):
        self.words, self.hidden, self.sorter = words, hidden, Sorter()

    def sample(self, index):
        return TaskInstance(index, "sort", "ab")

    def score(self, instance, text):
        from {name}_late import WORTH
        if self.hidden:
            __import__("importlib").import_module("{name}_unseen")
        known = open(self.words).read().split() if self.words else ["ab"]
        return Reward(WORTH if self.sorter.sort(text) in known else 0.0)
"""


def own_task(folder: Path, monkeypatch: pytest.MonkeyPatch, **args: object) -> TaskSpec:
    """A task in several files beside one another, which nobody has installed."""
    name = f"own_{folder.name}".replace("-", "_")
    (folder / f"{name}.py").write_text(OWN_TASK.format(name=name))
    sorter = f"from {name}_deep.order import sort\nclass Sorter:\n    sort = staticmethod(sort)\n"
    (folder / f"{name}_sorter.py").write_text(sorter)
    (folder / f"{name}_deep").mkdir()
    (folder / f"{name}_deep" / "__init__.py").write_text("")
    (folder / f"{name}_deep" / "order.py").write_text("def sort(text):\n    return ''.join(sorted(text))\n")
    (folder / f"{name}_late.py").write_text("WORTH = 1.0\n")
    (folder / f"{name}_unseen.py").write_text("")
    (folder / "words.txt").write_text("ab xyz")
    (folder / "secret.txt").write_text("hidden")
    monkeypatch.syspath_prepend(folder)
    return TaskSpec(f"{name}:Own", args, seed=0)


def test_a_task_in_several_files_sees_what_its_arguments_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = own_task(tmp_path, monkeypatch, words=str(tmp_path / "words.txt"))
    named = {"between": "/", "files": [f"{tmp_path}/", spec.args["words"]]}
    assert own_files(replace(spec, args=named)) == named["files"], "a separator is no folder to be shown"
    check_rewards(spec)
    with opened(spec) as scorer:
        results = [scorer.submit(0, text).result(WAIT_S) for text in ("ba", "zyx", "q")]
        assert [r.reward.value if r.reward else r.message for r in results] == [1.0, 1.0, 0.0]


def test_what_a_reward_lacks_is_named_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = own_task(tmp_path, monkeypatch, hidden=True)
    module = spec.name.partition(":")[0]
    with pytest.raises(TaskError) as told:
        check_rewards(spec)
    unseen = tmp_path / f"{module}_unseen.py"
    assert f"No module named '{module}_unseen'" in str(told.value)
    assert f'task.readable = ["{unseen}"]' in str(told.value)
    check_rewards(spec, Containment(readable=(str(unseen),)))
    with closing(RewardPool(replace(SPEC, name="tests.unit.tasks.naughty:Heavy"), LIMITS, TRUSTED)) as pool:
        assert "it needs more than 2048 MiB of memory" in pool.submit(0, "fine").result(WAIT_S).message
    check_rewards(SPEC)  # it fails for some texts only
    check_rewards(replace(SPEC, name="tests.unit.tasks.naughty:Counted"))
    monkeypatch.setenv("ECHO2_JUDGE", "1")
    for name, said in (
        ("Always", "expected a reward for a sample .*, got ValueError"),
        ("Absent", "function or class Absent"),
        ("Ends", "expected an instance from sample\\(0\\), got SystemExit: 0 \\(naughty.py, line"),
        ("NoMessages", "instance 0: expected a prompt of text or of ChatMessages, got .{'role'"),
        ("NoSize", "expected size to be a number of prompts above 0, or None for no end, got '9'"),
        ("NoFile", "expected a constructor .*, got FileNotFoundError: no words here \\(naughty.py, line"),
        ("Starts", "got RuntimeError: can't start new thread .*; contained rewards start no threads or programs"),
        ("Keyed", "got KeyError: 'ECHO2_JUDGE' .*; contained rewards do not see variables"),
    ):
        with pytest.raises((TaskError, ConfigError), match=said):
            check_rewards(TaskSpec(f"tests.unit.tasks.naughty:{name}", {}, seed=3))
    monkeypatch.setenv("ECHO2_JUDGE", "Operation not permitted")
    forbidden_by_none = r"to float: 'Operation not permitted' \(\w+\.py, line \d+\)$"
    with pytest.raises(TaskError, match=forbidden_by_none):
        check_rewards(TaskSpec("tests.unit.tasks.naughty:Keyed", {}, seed=3), TRUSTED)


def test_references_that_cannot_be_judged_are_told_with_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    answers = ["7", "9^{9^{9^{9^{9}}}}", r"\frac{1}{2}", "2", "\\text{}"]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"question": f"{n}?", "answer": text}) for n, text in enumerate(answers)))
    spec = TaskSpec("math", {"path": str(path)}, 0)
    left_out = unjudgeable_references(spec)
    assert left_out == {1, 4}
    assert "2 of 5 references cannot be judged" in caplog.text
    assert "rows.jsonl row 2" in caplog.text and "rows.jsonl row 5" in caplog.text
    path.write_text(json.dumps({"question": "none", "answer": "\\text{}"}))
    with pytest.raises(TaskError, match=r"rows.jsonl row 1"):
        unjudgeable_references(spec)
    assert unjudgeable_references(TaskSpec("sums", {}, 0)) == frozenset()


# ---- which files a user's task is shown


def test_folders_without_an_init_file_long_chains_and_files_that_are_no_python_end_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for path, text in {
        "kit/mine.py": "import first\nfrom kit import second\nfrom kit.deep import third\ndef late():\n    import fifth",
        "kit/second.py": "import torch, json",
        "kit/deep/third.py": "import fourth",
        "first.py": "", "fourth.py": "", "fifth.py": "", "unused.py": "",
    }.items():  # fmt: skip
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    modules = own_modules("kit.mine:Task")
    assert modules[0] == "kit" and set(modules) == {"kit", "first", "fourth", "fifth"}
    for number in range(400):
        (tmp_path / f"link{number}.py").write_text(f"import link{number + 1}")
    (tmp_path / "link400.py").write_text("import wrong\nimport nul\nimport last")
    (tmp_path / "wrong.py").write_text('print "of another Python"')
    (tmp_path / "nul.py").write_bytes(b"\0")
    (tmp_path / "last.py").touch()
    assert {"link0", "link400", "last"} <= set(own_modules("link0:Task"))
