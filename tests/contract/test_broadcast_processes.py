"""Faults on a fleet of processes: whatever befalls one node, every other holds the very bytes that were published.

No coordinator runs here: nodes have their certificates and the plan, and need nothing else.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.broadcast_run import Outcome, run
from benchmarks.broadcast_scene import Fault, make_scene
from benchmarks.wan.lab import missing

needs_root = pytest.mark.skipif(bool(missing()), reason=f"needs {missing()}")


def broadcast(fault: Fault | None, *, in_lab: bool, natted: int = 0) -> Outcome:
    """3 MiB to three workers over slow links: about two seconds. `run` compares every worker's bytes."""
    scene = make_scene("homogeneous", 3, scale=0.1, mib=3, chunk_kib=16, fault=fault, natted=natted)
    return run(scene, "echo2", in_lab=in_lab)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(Fault("dies", 2), marks=pytest.mark.soak),
        pytest.param(Fault("freezes", 2, for_s=3.0), marks=pytest.mark.soak),
        Fault("is restarted", 0),
        pytest.param(Fault("is restarted", 2), marks=pytest.mark.soak),
    ],
    ids=lambda fault: f"{'worker' if fault.node else 'learner'} {fault.kind}",
)
def test_fault_of_a_process_keeps_nobody_from_the_version(fault: Fault) -> None:
    got = broadcast(fault, in_lab=False)
    assert set(got.times) == {"w0", "w2"} if fault.kind == "dies" else {"w0", "w1", "w2"}


@pytest.mark.soak
@pytest.mark.network_namespaces
@needs_root
def test_link_that_is_cut_and_comes_back_ends_in_a_whole_version() -> None:
    got = broadcast(Fault("link is cut", 2, for_s=3.0), in_lab=True)
    assert set(got.times) == {"w0", "w1", "w2"}
    assert max(got.times["w0"], got.times["w2"]) < got.times["w1"] < 25, "the others did not wait for the one cut off"


@pytest.mark.soak  # tests/contract/test_nat.py has two such workers, tests/unit/broadcast/test_session.py who relays for whom
@pytest.mark.network_namespaces
@needs_root
def test_workers_that_accept_no_connections_are_served_and_relay_over_their_own() -> None:
    got = broadcast(None, in_lab=True, natted=2)
    assert set(got.times) == {"w0", "w1", "w2"}


@pytest.mark.soak
@pytest.mark.network_namespaces
@needs_root
def test_links_grow_over_paths_with_losses_where_bbr_is_refused_also_from_behind_a_nat() -> None:
    scene = make_scene("homogeneous", 2, scale=0.1, mib=8, chunk_kib=16, natted=1, loss=0.01)
    got = run(replace(scene, is_bbr_offered=False), "echo2", in_lab=True)
    assert set(got.times) == {"w0", "w1"}
    assert got.connections > 2, "one to each of the two others"
