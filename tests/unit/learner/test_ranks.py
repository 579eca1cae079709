"""Two real processes over gloo against one, on every path that ranks take; and a whole run in torchrun's environment."""

import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from echo2.base.errors import ConfigError, StateError, Unreachable
from echo2.base.ids import Step, Version
from echo2.cli import learner
from echo2.learner import startup
from echo2.learner.options import LearnerLimits, LearnerOptions
from echo2.learner.publishing.checkpoint import CheckpointStore
from echo2.learner.training.ranks import Ranks, check_agreement, check_replicas, difference
from echo2.learner.training.shards import Ahead, HeldVersions, ShardFollower, VersionCoder
from echo2.weights import DeltaHeader, FrameReader, HostWeights, encode_delta, fingerprint
from echo2.weights.block import EncodedBlock
from echo2.weights.container import Method
from echo2.weights.elements import ELEMENT_TYPES, Block
from echo2.weights.fingerprint import key_of_run
from tests.contract.engine_rig import tiny_config
from tests.fork_server import ROOT, ForkedProcess
from tests.patience import WAIT_S
from tests.ports import choose_ports
from tests.unit.learner import two_ranks
from tests.unit.learner.fleet import RUN, prepared_from
from tests.unit.learner.made import config_of
from tests.unit.learner.tiny import make_tiny_model
from tests.unit.learner.two_ranks import STEPS
from tests.unit.weights.models import KEY, decoded, with_changes

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
Two = tuple[Path, Path, Path]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    torch.set_num_threads(1)
    moe = make_tiny_model(tmp_path_factory.mktemp("moe"))
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny_config("qwen3_moe"))).save_pretrained(moe)
    return make_tiny_model(tmp_path_factory.mktemp("dense")), moe


def run_ranks(words: list[str], folder: Path, *models: Sequence[Path], program: str = "two_ranks") -> list[int]:
    """Runs two ranks in torchrun's environment; returns their exit codes."""
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(choose_ports((0,))[0])}
    ranks = []
    for rank in range(2):
        own = models[min(rank, len(models) - 1)]
        command = ["-m", f"tests.unit.learner.{program}", *words, *map(str, own), str(folder)]
        with (folder / f"rank{rank}.log").open("wb") as log:
            environment = {**ENVIRONMENT, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(ForkedProcess(command, environment, ROOT, log.fileno()))
    return [rank.wait(WAIT_S) for rank in ranks]


def logs(folder: Path) -> str:
    return "\n".join(path.read_text()[-4000:] for path in folder.glob("rank?.log"))


@pytest.fixture(scope="module")
def two(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Two:
    """What two processes left in a folder, and both models."""
    folder = tmp_path_factory.mktemp("two")
    others = [shutil.copytree(path, folder / f"own-{path.name}") for path in models]
    assert run_ranks(["paths"], folder, models, others) == [0, 0], logs(folder)
    return folder, *models


def found_of(two: Two, scenario: str) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(two[0] / f"{scenario}.pt", weights_only=False)
    return found


@pytest.mark.parametrize("scenario", two_ranks.SCENARIOS)
def test_two_ranks_train_and_publish_as_one_process_on_the_same_path(two: Two, tmp_path: Path, scenario: str) -> None:
    found = found_of(two, scenario)
    one = two_ranks.team_of(scenario, two_ranks.options_of(scenario, *two[1:], tmp_path), Ranks())
    is_rounded = scenario.endswith("as_on_gpu")
    assert found["dtypes"] == {str(p.dtype) for p in one.model.parameters}
    assert found["dtypes"] == {"torch.bfloat16" if is_rounded else "torch.float32"}
    base = one.snapshot()
    near = {"rel": 3e-2, "abs": 2e-3} if is_rounded else {"rel": 2e-3, "abs": 2e-5}
    for step in range(STEPS):
        result = one.step(two_ranks.batch(step))
        assert result.metrics is not None
        for name, value in {**result.metrics, "grad_norm": result.grad_norm}.items():
            assert found["steps"][step][name] == pytest.approx(value, **near), (step, name)
    for name, tensor in one.snapshot().items():
        assert found["whole"][name].dtype == tensor.dtype
        # In bf16 a step moves a weight by 1e-3 at the most, up or down where its gradient is lost in rounding.
        atol = 5e-3 if is_rounded else 2e-4
        assert torch.allclose(found["whole"][name].float(), tensor.float(), rtol=1e-2, atol=atol), name
    assert_published(found, base)
    assert found["again"] == found["repeated"], "what was loaded is what was saved"
    assert not found["left_to_chance"], "as routers and dropout are in training mode"
    assert found["held"], "each rank takes its rows of whole weights, and they come together again"
    if not scenario.endswith("lora") and not is_rounded:
        one.load_newest(CheckpointStore(two[0] / scenario / "checkpoints", LearnerLimits(free_bytes_min=0)))
        numbers, behind = two_ranks.scored(one)
        assert len(numbers) == 29 and found["scored"] == pytest.approx(numbers, abs=1e-3)
        assert found["behind"] == pytest.approx(behind, rel=2e-3, abs=2e-5), "training goes on as if nothing was scored"


def assert_published(found: dict[str, Any], base: dict[str, torch.Tensor]) -> None:
    """A worker that takes the keyframe and the delta holds the ranks' weights to the bit."""
    worker = HostWeights.empty()
    for name in ("keyframe", "delta"):
        worker.commit(decoded(worker, FrameReader().feed(found[name])))
        if name == "keyframe":
            assert worker.fingerprint() == fingerprint(base, KEY), "both begin with the same weights"
    assert worker.version == Version(STEPS)
    held = worker.tensors()
    assert held.keys() == found["whole"].keys()
    assert all(torch.equal(held[name], tensor) for name, tensor in found["whole"].items())


def test_no_rank_holds_the_whole_model_and_one_process_reads_what_two_wrote(two: Two, tmp_path: Path) -> None:
    """Machines that share no disk: what the second wrote went to the first, and came back to be read."""
    found = found_of(two, "float32")
    one = two_ranks.team_of("float32", two_ranks.options_of("float32", *two[1:], tmp_path), Ranks())
    total = sum(p.numel() for p in one.model.parameters)
    assert found["moment_elements"] == pytest.approx(total / 2, rel=0.02)
    assert len(found["loaded_elements"]) == len(one.model.parameters)
    layer = sum(p.numel() for n, p in one.model.masters_by_name().items() if ".layers.1." in n)
    assert max(found["loaded_elements"]) <= 1.02 * (1.5 * layer) < 0.75 * total, "half of one layer, and the next whole"
    store = CheckpointStore(two[0] / "float32" / "checkpoints", LearnerLimits(free_bytes_min=0))
    assert len(list(store.folder_of(Step(STEPS)).glob("*.safetensors"))) == 2, "each rank writes its own rows"
    assert not [path for path in (two[0] / "elsewhere").rglob("*") if path.is_file()], "and keeps nothing"
    loaded = one.load_newest(store)
    assert loaded is not None and loaded.published_version == Version(STEPS)
    for name, tensor in one.snapshot().items():
        assert torch.equal(tensor, found["whole"][name]) and torch.equal(tensor, loaded.published[name])


@pytest.mark.parametrize("scenario", ["copies", "copies_as_on_gpu"])
def test_copies_add_up_their_gradients_once_an_update(two: Two, scenario: str) -> None:
    """However many micro-batches there are: two layers and the rest, each as large as this rank's rows of it."""
    found = found_of(two, scenario)
    assert min(found["microbatches"]) > 1
    assert len(found["met"]) == 3 * STEPS
    assert sum(found["met"]) == STEPS * sum(tensor.numel() for tensor in found["whole"].values())


def test_ranks_that_were_told_something_else_are_refused_by_name(two: Two) -> None:
    said = found_of(two, "moe")["refused"]
    assert "learner.token_budget of rank 1 on " in said
    assert "expected 40, as on rank 0 on " in said and "got 41." in said


def test_another_model_is_named_by_its_file_and_its_machine() -> None:
    first = {"host": "a", "model": "a folder", "model file model.safetensors": "8 bytes of sum 1"}
    same = {**first, "host": "b"}
    assert difference([first, same]) == ""
    other = {**same, "model file model.safetensors": "8 bytes of sum 2"}
    assert difference([first, same, other]) == (
        "model file model.safetensors of rank 2 on b: expected 8 bytes of sum 1, as on rank 0 on a, got 8 bytes of sum 2. "
        "Put the same model on every machine"
    )


class OfTwo(Ranks):
    """The second of two ranks, whose first was started with `first`."""

    def __init__(self, first: LearnerOptions) -> None:
        self._first = first

    def gather(self, said: Mapping[str, Any]) -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = []
        ranks = Ranks()
        ranks.gather = lambda first: told.append(dict(first)) or [dict(first)]  # type: ignore[method-assign, func-returns-value]
        check_agreement(self._first, ranks)
        return [*told, dict(said)]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("loss", "gspo"), ("correction", "decoupled"), ("clip", (0.1, 0.1)), ("kl_coefficient", 0.5), ("lr", 0.5),
        ("gradient_checkpointing", True), ("updates_per_batch", 2), ("advantage", "mc_grpo"), ("token_budget", 7),
    ],
)  # fmt: skip
def test_ranks_that_would_train_otherwise_are_refused_by_the_option(name: str, value: object, model_path: Path) -> None:
    first = LearnerOptions(Path("one"), config_of(model_path))
    check_agreement(LearnerOptions(Path("other"), first.config, threads=3), OfTwo(first))
    learner = first.config.learner.model_copy(update={name: value})
    other = LearnerOptions(Path("other"), first.config.model_copy(update={"learner": learner}))
    with pytest.raises(ConfigError, match=f"^learner.{name} of rank 1 on .* got {re.escape(repr(value))}. Give every"):
        check_agreement(other, OfTwo(first))


@pytest.mark.parametrize(("replicas", "count"), [(3, 4), (8, 4), (2, 1), (0, 4)])
def test_copies_that_cannot_be_spread_evenly_over_the_ranks_are_refused(replicas: int, count: int) -> None:
    with pytest.raises(ConfigError, match=rf"learner.replicas: expected a divisor of the {count} .* got {replicas}"):
        check_replicas(replicas, count)


def test_a_rank_s_own_gpu_is_the_current_one_before_any_is_used(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP puts its rows there; nf4 computes on a GPU before it."""
    order: list[object] = []

    def load(*_: object, **__: object) -> None:
        order.append("model")
        raise ConfigError("that far")

    monkeypatch.setattr(startup, "pick_device", lambda _: torch.device("cuda:1"))
    monkeypatch.setattr(startup, "check_agreement", lambda *_: None)
    monkeypatch.setattr(startup, "PolicyModel", load)
    monkeypatch.setattr(torch.cuda, "set_device", order.append)
    with pytest.raises(ConfigError, match="that far"):
        startup.new_team(LearnerOptions(Path("one"), config_of(model_path)), Ranks())
    assert order == [torch.device("cuda:1"), "model"]


# ---- a whole run


def whole_run(command: str, models: tuple[Path, Path], folder: Path, *, ends_well: bool = True) -> dict[str, Any]:
    """Returns what rank 0 says of a run that ended well: all of it was coded in rows, and is what its fleet holds."""
    folder.mkdir(exist_ok=True)
    codes = run_ranks([command], folder, models)
    assert (codes == [0, 0]) == ends_well, logs(folder)
    if not ends_well:
        return {}
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 6 and summary["fingerprint"] == summary["followed"]
    exported = dict(AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16).named_parameters())
    other = json.loads((folder / "rank1.json").read_text())
    shapes = sorted(str(tuple(tensor.shape)) for tensor in exported.values())
    assert sorted(summary["gathered"]) == sorted(other["gathered"]) == shapes, "once, for the export"
    assert f"{fingerprint(exported, key_of_run(RUN)):016x}" == summary["fingerprint"]
    elements = sum(tensor.numel() for tensor in exported.values())
    assert other["newest"] == 6 and 0.4 * elements < other["own_elements"] <= 0.5 * elements
    return summary


def test_a_daemon_on_ranks_publishes_what_workers_hold(models: tuple[Path, Path], tmp_path: Path) -> None:
    summary = whole_run("daemon", models, tmp_path / "run")
    assert summary["merged"] == summary["fingerprint"]
    resumed = prepared_from(two_ranks.options_of("bf16", *models, tmp_path / "run"))
    assert resumed.team.step_count == 6 and resumed.checkpoint_step == 6


@pytest.mark.soak
def test_a_rank_that_cannot_code_its_rows_ends_the_run(models: tuple[Path, Path], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    whole_run("failing", models, folder, ends_well=False)
    error = (folder / "error").read_text()
    assert error.startswith("StateError: rank 1: expected block") and error.endswith("OSError: a row cannot be read")
    summary = whole_run("daemon", models, folder)
    assert summary["versions"][0] == [4, 2], "what was cut off comes first"
    assert [0, 4] in summary["merged_to"], "and goes to newcomers as a delta from the base"


BLOCK_ELEMENTS = 256
OLD = {"a": torch.randn(64, 33, generator=torch.Generator().manual_seed(1)).bfloat16(), "b": torch.ones(7)}
NEW = {name: with_changes(np.random.default_rng(2), tensor, 0.1, 2) for name, tensor in OLD.items()}
WHOLE = DeltaHeader(target_version=Version(1), fingerprint_key=KEY, block_elements=BLOCK_ELEMENTS)


def two_groups() -> list[dist.ProcessGroup]:
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as threads:  # each waits for the other
        return [*threads.map(lambda rank: dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60)), range(2))]


@pytest.fixture
def leader() -> Iterator[VersionCoder]:
    """With a second rank that serves and holds versions 0 and 1."""
    first, second = two_groups()
    held = HeldVersions()
    held.keep(Version(0), OLD)
    held.keep(Version(1), NEW)
    thread = threading.Thread(target=ShardFollower(second, held).serve)
    thread.start()
    leader = VersionCoder(first, 2)
    yield leader
    leader.stop()
    thread.join()


def test_a_rank_that_has_ended_is_an_error_of_one_line_on_the_others(
    models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, _other = two_groups()

    def follow(options: LearnerOptions) -> int:
        first._set_default_timeout(timedelta(seconds=1))  # the other does not take part
        first.allreduce(torch.zeros(1)).wait()
        return 0

    monkeypatch.setattr(learner, "follow_rank_0", follow)
    monkeypatch.setenv("RANK", "1")
    arguments = ["join", "@none", "--model.path", str(models[0])]
    with pytest.raises(RuntimeError, match="gloo|pair closure"):  # a process alone has no other ranks
        learner.main(arguments)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert learner.main(arguments) == Unreachable.exit_code
    assert re.search(
        "error: Unreachable: rank 1: expected .* other ranks .*(gloo|pair closure)", capsys.readouterr().err
    )


def delta_header() -> DeltaHeader:
    return DeltaHeader(
        target_version=Version(1), parent_version=Version(0), parent_fingerprint=fingerprint(OLD, KEY),
        fingerprint_key=KEY, block_elements=BLOCK_ELEMENTS,
    )  # fmt: skip


def in_two(header: DeltaHeader) -> DeltaHeader:
    return DeltaHeader(**{name: getattr(header, name) for name in header.__slots__} | {"shard_count": 2})


def test_an_encoding_that_nobody_draws_to_its_end_is_in_nobodys_way(leader: VersionCoder) -> None:
    given_up = leader.encode(None, NEW, WHOLE)
    assert len([next(given_up) for _ in range(8)]) == 8
    assert leader.fingerprint(Version(1), NEW, KEY) == fingerprint(NEW, KEY)
    whole = encode_delta(OLD, NEW, in_two(delta_header()))
    assert b"".join(leader.encode(OLD, NEW, delta_header())) == b"".join(whole)
    with pytest.raises(StateError, match="rank 1: expected block .* encoding 1: expected 2, which was begun last"):
        list(given_up)


def test_kept_versions_are_coded_from_and_forgotten_ones_are_told(leader: VersionCoder) -> None:
    alone, header = VersionCoder(), delta_header()
    assert list(alone.encode(OLD, NEW, header)) == list(encode_delta(OLD, NEW, header))
    leader.keep(Version(0))
    leader.forget_before(Version(1))
    whole = encode_delta(OLD, NEW, in_two(delta_header()))
    assert b"".join(leader.encode(OLD, NEW, delta_header())) == b"".join(whole)
    leader.keep(None)
    leader.forget_before(Version(1))
    with pytest.raises(StateError, match="rank 1: expected its part .* version 0: expected it among those held, got 1"):
        leader.fingerprint(Version(0), OLD, KEY)
    with pytest.raises(StateError, match="rank 1: expected block 6 of delta from version 0 to version 1, got State"):
        list(leader.encode(OLD, NEW, delta_header()))
    assert list(leader.encode(None, NEW, WHOLE)), "the ones that it holds are coded all the same"


def test_a_rank_that_does_not_answer_is_given_up_within_the_time_limit() -> None:
    first, second = two_groups()
    head = torch.zeros(3, dtype=torch.int64)
    taken = [second.recv([head], 0, 0)]  # takes one order, and no more
    began = time.monotonic()
    with pytest.raises(Unreachable, match=r"rank 1: expected .* within 1 s"):
        VersionCoder(first, 2, timeout_s=1.0).fingerprint(Version(0), OLD, KEY)
    assert time.monotonic() - began < 20 and taken


def test_a_rank_that_is_gone_is_seen_at_once() -> None:
    first, second = two_groups()
    leader = VersionCoder(first, 2, timeout_s=40.0)
    follower = ShardFollower(second, HeldVersions())
    thread = threading.Thread(target=follower.serve)
    thread.start()
    leader.stop()
    thread.join()
    del thread, follower, second  # its end of the connections goes with it
    began = time.monotonic()
    with pytest.raises(Unreachable, match="rank 1: expected"):
        leader.fingerprint(Version(0), OLD, KEY)
    assert time.monotonic() - began < 20


def test_no_more_than_one_blocks_bytes_wait_for_who_asks() -> None:
    element = ELEMENT_TYPES[0]
    coded = EncodedBlock(Method.RAW, b"x" * 100, 1)
    drawn: list[int] = []

    def blocks() -> Iterator[tuple[Block, EncodedBlock]]:
        for index in range(50):
            drawn.append(index)
            yield Block(index, 1, element, ()), coded

    ahead = Ahead(lambda: (512, blocks()))
    taken, rounds = 0, 0
    with pytest.raises(StateError, match="all were given"):
        while True:
            ready = ahead.take()
            assert len(ready) <= 512
            taken, rounds = taken + len(ready) // 120, rounds + 1
    ahead.stop()
    assert taken == 50 == len(drawn) and rounds >= 50 / 4
    large = Ahead(lambda: (10, blocks()))
    assert len(large.take()) == 120, "one that is larger comes alone"
    large.stop()
