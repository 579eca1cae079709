"""What a run keeps of its machines: delivered rates by certain kinds, losses once a worker, joins; and what liars leave behind."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from echo2.base.errors import ConfigError
from echo2.base.ids import PeerId, RunId, Step, Version
from echo2.coordinator.board import LearnerBoard
from echo2.coordinator.membership import Liveness, LivenessRule, Member, Membership
from echo2.coordinator.provisioning import MachineOffer, MachineState, RentedMachine
from echo2.coordinator.runtime.catalogue import built_in_catalogue
from echo2.coordinator.runtime.experience_file import add, known, read_records
from echo2.coordinator.sightings import TOKENS_HELD, Sightings
from echo2.coordinator.telemetry import Heartbeat, LearnerHello, LearnerReport, WorkerHello
from echo2.coordinator.worth import Worth, WorthRecord
from echo2.cost_model.experience import KindRecord
from echo2.cost_model.roofline import tokens_per_s
from echo2.cost_model.sizing import model_size
from echo2.outside import unix_now

RUN = RunId("run")
CONFIG = {
    "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936, "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}  # fmt: skip
MEAN_TOKENS, SLOTS = 1000.0, 16
CATALOGUE = built_in_catalogue()
HONEST = 0.8 * tokens_per_s(CATALOGUE["RTX4090"], model_size(CONFIG), SLOTS, TOKENS_HELD * MEAN_TOKENS)
"""Tokens/s of a machine that does 0.8 of what the roofline says."""


@dataclass
class Fleet:
    """Workers that deliver what they deliver, whatever they say."""

    membership: Membership
    worth: Worth
    board: LearnerBoard

    @classmethod
    def of_nobody(cls) -> Fleet:
        board = LearnerBoard()
        hello = LearnerHello(
            1,
            RUN,
            "a:1",
            "m",
            json.dumps(CONFIG).encode(),
            "d",
            4,
            64,
            8,
            Step(0),
            Version(0),
            longest_sequence_tokens=2560,
        )
        board.came(PeerId("learner"), hello, "", 0.0)
        report = LearnerReport(step=Step(1), train_s=10.0, trained_rollouts=100, trained_tokens=int(100 * MEAN_TOKENS))
        board.heard(report, 1.0)
        return cls(Membership(LivenessRule(15.0, 45.0), 100), Worth(60.0), board)

    def join(self, name: str, *, claims: float, delivers: float, gpu: str = "1 x NVIDIA GeForce RTX 4090") -> Member:
        """Tokens/s claimed and delivered."""
        peer = PeerId(name)
        hello = WorkerHello(1, name, RUN, gpu=gpu, slot_count=SLOTS, provider="runpod", is_spot=True)
        member = self.membership.came(peer, hello, 0.0)
        self.membership.change_of(member, 0.0)
        rate, mean_s = claims / MEAN_TOKENS, 20.0
        beat = Heartbeat(Version(0), SLOTS, tokens_per_s=claims, rollouts_per_s=rate, rollout_s_mean=mean_s)
        self.membership.heard(peer, beat, 1.0)
        self.worth.told_at = 1.0
        self.worth.proven.add(peer)
        record = self.worth.records[peer] = WorthRecord()
        record.took(40 * MEAN_TOKENS / delivers, 40.0)
        member.delivered_per_s = self.worth.delivered_per_s(peer)
        return member

    def records(self, rented: dict[PeerId, tuple[RentedMachine, MachineOffer]] | None = None) -> tuple[KindRecord, ...]:
        """After an hour, the first half of which all were there."""
        sightings = Sightings(RUN, CATALOGUE)
        for now in (100.0, 1900.0, 3700.0):
            members = self.membership.members.values()
            sightings.look(members, rented or {}, self.board, self.worth, (), now)
        return sightings.records(1e9)


def fleet(count: int) -> Fleet:
    made = Fleet.of_nobody()
    for index in range(count):
        made.join(f"w{index}", claims=HONEST * (1 + index / 100), delivers=HONEST)
    return made


def test_rates_are_kept_as_delivered_over_predicted_and_hours_are_counted() -> None:
    (record,) = fleet(4).records()
    assert (record.kind, record.provider, record.is_spot, record.losses) == ("RTX4090", "runpod", True, 0)
    assert record.ratios == pytest.approx((0.8, 0.808, 0.816, 0.824), rel=1e-3) and record.hours == pytest.approx(4.0)


def test_a_worker_that_lies_about_its_rate_or_kind_is_not_kept() -> None:
    honest = fleet(4).records()[0].ratios
    for lie in ({"claims": 40 * HONEST, "delivers": HONEST}, {"claims": 3 * HONEST, "delivers": 3 * HONEST}):
        lying = fleet(4)
        lying.join("liar", **lie)
        ratios = lying.records()[0].ratios
        assert ratios == honest, lie
    alone = Fleet.of_nobody()
    alone.join("liar", claims=HONEST, delivers=HONEST, gpu="8 x NVIDIA B200")
    assert alone.records() == (), "one that names its own kind says nothing of the kind"


def test_what_was_not_delivered_long_enough_or_has_no_data_sheet_is_not_kept() -> None:
    young = fleet(4)
    for record in young.worth.records.values():
        record.rollouts = 5.0
    assert young.records()[0].ratios == ()
    unknown = Fleet.of_nobody()
    for index in range(4):
        unknown.join(f"w{index}", claims=HONEST, delivers=HONEST, gpu="cpu")
    assert unknown.records() == ()


def test_a_rented_machine_is_of_the_kind_that_was_rented_whatever_it_says_and_its_join_is_timed() -> None:
    one = Fleet.of_nobody()
    one.join("w0", claims=HONEST, delivers=HONEST, gpu="1 x NVIDIA B200")
    machine = RentedMachine("m", "spot", "skypilot", "", MachineState.RUNNING, 0.3, 50.0)
    offer = MachineOffer("spot", "skypilot", gpu="RTX4090", usd_per_hour=0.3)
    sightings, rented = Sightings(RUN, CATALOGUE), {PeerId("w0"): (machine, offer)}
    sightings.look((), rented, one.board, one.worth, (), 10.0)
    sightings.look(one.membership.members.values(), rented, one.board, one.worth, (), 250.0)
    (record,) = sightings.records(1e9)
    assert (record.kind, record.provider, record.is_spot) == ("RTX4090", "skypilot", False)
    assert record.joins_s == (200.0,) and record.ratios == pytest.approx((0.8,), rel=1e-3)


def test_a_worker_is_one_loss_however_often_it_comes_and_goes() -> None:
    churning = fleet(4)
    sightings = Sightings(RUN, CATALOGUE)
    members = churning.membership.members
    for turn in range(6):
        members[PeerId("w0")].last_liveness = Liveness.GONE if turn % 2 else Liveness.ALIVE
        sightings.look(members.values(), {}, churning.board, churning.worth, (), 100.0 * turn)
    members[PeerId("w1")].last_liveness, members[PeerId("w1")].has_left = Liveness.GONE, True
    sightings.look(members.values(), {}, churning.board, churning.worth, (), 700.0)
    assert sightings.records(1e9)[0].losses == 1, "who leaves in peace is not lost"
    sightings.look(members.values(), {}, churning.board, churning.worth, (PeerId("w1"),), 800.0)
    assert sightings.records(1e9)[0].losses == 2


def test_the_file_merges_runs_survives_bad_records_and_refuses_what_is_not_its_own(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "machines.json"
    first, second = fleet(4).records()[0], fleet(3).records()[0]
    add(path, [first])
    add(path, [replace(second, run_id="other")])
    add(path, ())
    assert {one.run_id for one in read_records(path)} == {"run", "other"}
    told = json.loads(path.read_text())
    told["records"] += [{**told["records"][0], "ratios": [40.0]}, {"kind": "x"}, 7]
    path.write_text(json.dumps(told))
    assert len(read_records(path)) == 2
    assert not known(path).records, "of a year long gone"
    add(path, [replace(first, unix_s=unix_now())])
    known.cache_clear()
    assert known(path).belief("RTX4090").machines == 4
    for bad in ("[]", "{}", '{"format": 9, "records": []}', "\x00"):
        path.write_text(bad)
        with pytest.raises(ConfigError, match="machines file"):
            read_records(path)
