"""Faults on a fleet of processes: whatever befalls one node, every other holds the very bytes that were published.

No coordinator runs here: nodes have their certificates and the plan, and need nothing else.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.bench_broadcast import Cell, Results, measured, options_of, row
from benchmarks.broadcast_run import Outcome, run
from benchmarks.broadcast_scene import Fault, make_scene
from benchmarks.wan.lab import missing

needs_root = pytest.mark.skipif(bool(missing()), reason=f"needs {missing()}")


def broadcast(fault: Fault | None, *, in_lab: bool, natted: int = 0) -> Outcome:
    """3 MiB to three workers over slow links: about two seconds. `run` compares every worker's bytes."""
    scene = make_scene("homogeneous", 3, scale=0.1, mib=3, chunk_kib=16, fault=fault, natted=natted)
    return run(scene, "echo2", in_lab=in_lab)


@pytest.mark.soak  # tests/contract/test_broadcast.py has it in one process
def test_broadcast_completes_though_no_coordinator_can_be_reached() -> None:
    assert set(broadcast(None, in_lab=False).times) == {"w0", "w1", "w2"}


@pytest.mark.parametrize(
    "fault",
    [
        Fault("dies", 2),
        pytest.param(Fault("freezes", 2, for_s=3.0), marks=pytest.mark.soak),
        Fault("is restarted", 0),
        pytest.param(Fault("is restarted", 2), marks=pytest.mark.soak),
    ],
    ids=lambda fault: f"{'worker' if fault.node else 'learner'} {fault.kind}",
)
def test_fault_of_a_process_keeps_nobody_from_the_version(fault: Fault) -> None:
    got = broadcast(fault, in_lab=False)
    assert set(got.times) == {"w0", "w2"} if fault.kind == "dies" else {"w0", "w1", "w2"}
    assert got.slowest_s < 25


@pytest.mark.network_namespaces
@needs_root
def test_link_that_is_cut_and_comes_back_ends_in_a_whole_version() -> None:
    got = broadcast(Fault("link is cut", 2, for_s=3.0), in_lab=True)
    assert set(got.times) == {"w0", "w1", "w2"}
    assert max(got.times["w0"], got.times["w2"]) < got.times["w1"] < 25, "the others did not wait for the one cut off"


@pytest.mark.network_namespaces
@needs_root
def test_worker_whose_disk_is_full_says_so_and_gets_the_version() -> None:
    got = broadcast(Fault("has a full disk", 2), in_lab=True)
    assert set(got.times) == {"w0", "w1", "w2"}
    assert set(got.troubles) == {"w1"}
    assert re.search(r"/w1/chunks: expected (room for \d+ bytes|.* no space left)", got.troubles["w1"])


@pytest.mark.network_namespaces
@needs_root
def test_workers_that_accept_no_connections_are_served_and_relay_over_their_own() -> None:
    got = broadcast(None, in_lab=True, natted=2)
    assert set(got.times) == {"w0", "w1", "w2"}


@pytest.mark.network_namespaces
@needs_root
def test_links_grow_over_paths_with_losses_where_bbr_is_refused_also_from_behind_a_nat() -> None:
    scene = make_scene("homogeneous", 2, scale=0.1, mib=8, chunk_kib=16, natted=1, loss=0.01)
    got = run(replace(scene, is_bbr_offered=False), "echo2", in_lab=True)
    assert set(got.times) == {"w0", "w1"}
    assert got.connections > 2, "one to each of the two others"


@pytest.mark.soak
def test_a_cell_that_fails_is_a_row_that_says_so_and_the_rows_so_far_are_on_disk(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.json")
    results.add(measured(Cell("homogeneous", 2, mib=1), options_of(["--limit-s", "0.01"]), in_lab=False))
    (failed,) = json.loads((tmp_path / "results.json").read_text())
    assert failed["name"] == "homogeneous/2/echo2" and failed["value"] is None and failed["unit"].startswith("failed: ")
    results.add(measured(Cell("homogeneous", 2, mib=1), options_of([]), in_lab=False))
    rows = {found["name"]: found["value"] for found in json.loads((tmp_path / "results.json").read_text())}
    assert rows["homogeneous/2/echo2"] >= 1 and rows["homogeneous/2/learner sent"] > 0


def test_rows_of_parts_that_did_not_run_stay_and_each_says_when_it_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    for first, second in (("a", "b"), ("b", "c")):
        Results(path).add([row(first, 1.0 if first == "a" else 2.0, "s", None), row(second, 3.0, "s", None)])
    rows = json.loads(path.read_text())
    assert {found["name"]: found["value"] for found in rows} == {"a": 1.0, "b": 2.0, "c": 3.0}
    assert all(found["commit"] and found["measured"] for found in rows)
