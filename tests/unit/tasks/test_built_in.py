"""The built-in tasks: what counts as right, what a beginner earns, and that seed and index alone decide."""

import math
import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from echo2.base.errors import ConfigError, TaskError
from echo2.tasks.built_in import ALPHABET, ReasoningGym, SortDigits, Sums, answer_in, format_only_target
from echo2.tasks.registry import drawn, is_environment, make_environment_source, make_task
from echo2.tasks.split import CYCLE, MixedSplit, TaskSplit, places
from echo2.tasks.task import ChatMessage, Reward, TaskInstance, TaskSpec, spec_from_json

DIGITS, SUMS = SortDigits(5), Sums()


@given(st.integers(0, 10**5 - 1), st.text(ALPHABET, max_size=8))
def test_sorted_digits_earn_everything_and_less_earns_less_than_half(index: int, text: str) -> None:
    instance = DIGITS.sample(index)
    assert DIGITS.score(instance, instance.answer).value == 1.0
    assert set(str(instance.prompt) + instance.answer) <= set(ALPHABET)
    assert sorted(str(instance.prompt)[:5]) == list(instance.answer)
    reward = DIGITS.score(instance, text)
    if text != instance.answer:
        assert reward.value < 0.5 and reward.parts["exact"] == 0.0
    if len(text) != 5:
        assert reward.value == 0.0


def test_the_format_only_start_earns_little() -> None:
    rng = random.Random(0)
    instances = [DIGITS.sample(rng.randrange(10**5)) for _ in range(2000)]
    mean = sum(DIGITS.score(i, format_only_target(i, rng)).value for i in instances) / 2000
    assert 0.05 < mean < 0.2


@given(st.integers(0, 99))
def test_the_last_number_is_the_answer_of_a_sum(index: int) -> None:
    instance = SUMS.sample(index)
    right, wrong = instance.answer, str(int(instance.answer) + 1)
    assert SUMS.score(instance, right).value == 1.0 == SUMS.score(instance, right).parts["bare"]
    said = SUMS.score(instance, f"The sum is {wrong} or rather {right}.")
    assert (said.value, said.parts["bare"]) == (1.0, 0.0)
    for text in (wrong, f"{right}, no, {wrong}", f"{right}{right}1", "", "many"):
        assert SUMS.score(instance, text).value == 0.0, text


def test_prompts_are_distinct_and_bounds_are_checked() -> None:
    assert len({SortDigits(2).sample(i).prompt for i in range(100)}) == SortDigits(2).size == 100
    assert len({SUMS.sample(index).prompt for index in range(SUMS.size)}) == 100
    assert SUMS.sample(73).prompt == (ChatMessage("user", "What is 7 + 3? Answer with the number only."),)
    for task in (SortDigits(2), SUMS):
        with pytest.raises(TaskError, match="0 to 99, got 100"):
            task.sample(100)
    for make, said in ((SortDigits, "digit_count"), (Sums, "numbers of 2 to 1000, got 0")):
        with pytest.raises(ConfigError, match=said):
            make(0)


@pytest.mark.parametrize("dataset", ["number_sorting", "countdown", "spell_backward"])
def test_an_instance_depends_on_seed_and_index_alone_and_its_answer_is_right(dataset: str) -> None:
    one, other = ReasoningGym(dataset, seed=3), ReasoningGym(dataset, seed=3)
    late = [one.sample(index) for index in (999_999, 5, 0)]
    assert [other.sample(index) for index in (999_999, 5, 0)] == late
    for instance in late:
        assert one.score(instance, f"so it is <answer>{instance.answer}</answer>").value == 1.0
        assert one.score(instance, "no idea").value < 1.0
    assert ReasoningGym(dataset, seed=4).sample(5).prompt != late[1].prompt


def test_options_reach_the_data_set_and_wrong_ones_are_refused() -> None:
    short = ReasoningGym("spell_backward", 0, 10, {"min_word_len": 3, "max_word_len": 3})
    assert all(len(short.sample(i).answer) == 3 for i in range(10))
    with pytest.raises(ConfigError, match="expected options of that data set"):
        ReasoningGym("spell_backward", 0, 10, {"colour": "red"})
    with pytest.raises(ConfigError, match="expected a data set among .*countdown"):
        ReasoningGym("no_such_set", 0)


def test_the_last_answer_element_counts_else_the_whole_text() -> None:
    assert answer_in("<answer>1</answer> no, <answer> 2 </answer>.") == "2"
    assert answer_in("<answer>unclosed") == "unclosed"
    assert answer_in(" 42\n") == "42"


def test_a_specification_survives_json_and_what_it_cannot_carry_is_refused_as_are_rewards_not_finite() -> None:
    for odd, got in ((math.nan, "nan"), (None, ""), ("1", ""), (10**400, "")):
        with pytest.raises(TaskError, match=f"value: expected a finite number, got {got}"):
            Reward(odd)  # type: ignore[arg-type]
    with pytest.raises(TaskError, match="format"):
        Reward(1.0, {"format": math.inf})
    spec = TaskSpec("reasoning_gym", {"dataset": "countdown", "options": {"min_numbers": 3}}, seed=7)
    assert spec_from_json(spec.to_json()) == spec
    with pytest.raises(ConfigError, match="JSON"):
        TaskSpec("x", {"a": object()}).to_json()
    with pytest.raises(ConfigError, match="JSON object"):
        spec_from_json("[]")


# ---- tasks by their names

EXAMPLE = Path(__file__).parents[3] / "examples" / "configs"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (TaskSpec("chess"), "expected one of sort_digits, .* or a class of yours as module:Class, got 'chess'"),
        (TaskSpec("calculator"), "expected a task of one completion, got an environment of several turns"),
        (TaskSpec("sort_digits", {"digits": 3}), "expected arguments among digit_count; got digits"),
        (TaskSpec("math"), "expected the argument path"),
        (TaskSpec("reasoning_gym"), "expected the argument dataset"),
        (TaskSpec("no.such.module:Task"), "expected an importable module no.such.module, got No module named 'no'"),
        (TaskSpec("no_such:Task"), "got No module named 'no_such'; a module is looked for beside the run file and"),
        (TaskSpec("unfinished:Task"), r"module unfinished, got SyntaxError: .*\(unfinished.py, line 2\)$"),
        (TaskSpec("undefined:Task"), r"undefined, got NameError: name 'no' is not defined \(undefined.py, line 1\)$"),
        (TaskSpec("ending:Task"), r"module ending, got SystemExit: no task here \(ending.py, line 1\)$"),
        (TaskSpec("tests.unit.tasks.naughty:Absent"), "expected a function or class Absent"),
        (TaskSpec("tests.unit.tasks.naughty:Naughty", {"colour": 1}), r"expected a constructor \(seed, \*\*args\)"),
    ],
)
def test_a_wrong_specification_is_a_configuration_error(
    spec: TaskSpec, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "unfinished.py").write_text("class Task:\n    size = (")
    (tmp_path / "undefined.py").write_text("size = no")
    (tmp_path / "ending.py").write_text("raise SystemExit('no task here')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=message):
        make_task(spec)


def test_environments_are_made_by_name_and_told_apart_from_tasks() -> None:
    spec = TaskSpec("calculator", {"turns_max": 2}, seed=3)
    assert is_environment(spec) and not is_environment(TaskSpec("sort_digits"))
    assert not is_environment(TaskSpec("tests.unit.tasks.naughty:Naughty"))
    with pytest.raises(TaskError, match="missing size, is_cheap, sample, score"):
        make_task(TaskSpec("tests.unit.tasks.naughty:NotATask"))
    users_own = TaskSpec("echo2.tasks.tools:CalculatorEnvironments", {"turns_max": 2}, seed=3)
    assert is_environment(users_own)
    assert make_environment_source(spec) == make_environment_source(users_own)
    with pytest.raises(ConfigError, match="expected one of sort_digits, .*calculator"):
        make_environment_source(TaskSpec("maze"))
    with pytest.raises(ConfigError, match="arguments among turns_max; got turns"):
        make_environment_source(TaskSpec("calculator", {"turns": 2}))


def test_the_example_of_a_users_task_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLE)
    task = make_task(TaskSpec("palindromes:Palindromes", {"letters": 3}, seed=1))
    instance = task.sample(4)
    beginning = instance.answer
    assert task.sample(4) == instance and len(beginning) == 3
    assert task.score(instance, beginning + beginning[::-1]).value == 1.0
    assert task.score(instance, "x" + beginning).value == 0.0


# ---- which instance a prompt is, of one task or of a mixture

shares_of_tasks = st.lists(st.floats(0.01, 100, allow_nan=False), min_size=1, max_size=6)


@settings(max_examples=100, deadline=None)
@given(shares_of_tasks)
def test_up_to_every_place_each_task_has_its_share_to_within_a_prompt_for_each_other_task(shares: list[float]) -> None:
    order, total = places(shares), sum(shares)
    seen: Counter[int] = Counter()
    for at, task in enumerate(order, start=1):
        seen[task] += 1
        for one, share in enumerate(shares):
            rounding = at * len(shares) / len(order)  # a weight below one place of the cycle gets one all the same
            assert abs(seen[one] - at * share / total) <= max(1, len(shares) - 1) + rounding


def test_weights_are_kept_to_a_thousandth_and_no_task_is_left_out() -> None:
    assert Counter(places([0.5, 0.3, 0.2])) == {0: 500, 1: 300, 2: 200}
    assert Counter(places([3.14159, 1.0]))[1] == round(CYCLE / 4.14159)
    assert Counter(places([1e6, 1.0]))[1] == 1
    assert places([7.0]) == (0,)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.one_of(st.none(), st.integers(5, 40)), st.integers(0, 4), st.floats(0.2, 5)), min_size=1, max_size=4),
    st.integers(0, 50),
)  # fmt: skip
def test_each_task_comes_in_its_own_order(told: list[tuple[int | None, int, float]], seed: int) -> None:
    alone = [TaskSplit(size, held_out, seed) for size, held_out, _ in told]
    weights = tuple(weight for *_, weight in told)
    mixed, turns = MixedSplit(tuple(alone), weights), places(weights)
    found: dict[int, list[int]] = {task: [] for task in range(len(told))}
    for position in range(CYCLE - 60, CYCLE + 60):  # into the second cycle
        cycle, slot = divmod(position, len(turns))
        own_index, task = divmod(mixed.train_index(position), len(told))
        assert task == turns[slot]
        assert own_index == alone[task].train_index(cycle * turns.count(task) + turns[:slot].count(task))
        found[task].append(own_index)
    for task, split in enumerate(alone):
        for index in map(split.held_out_index, range(split.held_out_count)):
            assert index not in found[task]
        held_out = [mixed.held_out_index(task, place) for place in range(split.held_out_count)]
        assert held_out == [task + split.held_out_index(p) * len(told) for p in range(split.held_out_count)]


def test_an_interrupt_while_a_task_draws_is_no_fault_of_the_task() -> None:
    def interrupted(index: int) -> TaskInstance:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        drawn("t", interrupted, 0)


def test_a_task_that_was_drawn_as_often_as_it_may_be_is_passed_over_until_none_is_left() -> None:
    splits = (TaskSplit(6, 1, 0, epochs_max=2), TaskSplit(31, 1, 0, epochs_max=1))
    mixed, position, found = MixedSplit(splits, (3.0, 1.0)), 0, []
    while mixed.has(position := mixed.upcoming(position)):
        found.append(divmod(mixed.train_index(position), 2))
        position += 1
    assert Counter(task for _, task in found) == {0: 10, 1: 30}
    assert all(Counter(found)[index, 0] == 2 for index in {index for index, task in found if task == 0})
    assert not mixed.has(position) and mixed.upcoming(position) == position
    assert mixed.train_count == 35


def test_an_endless_task_in_it_makes_the_mixture_endless() -> None:
    split = TaskSplit(None, 5, seed=0)
    assert [split.held_out_index(p) for p in range(5)] == [0, 1, 2, 3, 4]
    assert [split.train_index(p) for p in (0, 1, 10**9)] == [5, 6, 10**9 + 5] and split.train_count is None
    mixed = MixedSplit((TaskSplit(6, 1, 0, 1), TaskSplit(None, 2, 0, 1)), (1.0, 1.0))
    assert mixed.train_count is None
    assert mixed.has(mixed.upcoming(10**6))
    with pytest.raises(TaskError, match="weights above 0"):
        MixedSplit((TaskSplit(None, 0, 0), TaskSplit(None, 0, 0)), (1.0, 0.0))
    with pytest.raises(TaskError, match="held-out"):  # none would be left to train on
        TaskSplit(10, 10, seed=0)


# ---- one task


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 200), st.data())
def test_each_epoch_visits_every_training_instance_once_and_no_held_out_one(size: int, data: st.DataObject) -> None:
    held_out_count = data.draw(st.integers(0, size - 1))
    split = TaskSplit(size, held_out_count, seed=data.draw(st.integers(0, 1000)))
    held_out = {split.held_out_index(position) for position in range(held_out_count)}
    length = size - held_out_count
    epochs = [[split.train_index(epoch * length + place) for place in range(length)] for epoch in range(2)]
    assert epochs[0] != epochs[1] or length < 20
    for epoch in epochs:
        assert len(set(epoch)) == length
        assert set(epoch) | held_out == set(range(size))
        assert not set(epoch) & held_out
