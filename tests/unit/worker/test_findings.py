from __future__ import annotations

from echo2.worker.findings import (
    advertised_finding,
    clock_finding,
    disk_finding,
    gpu_finding,
    memory_finding,
    rate_finding,
    reach_finding,
)


def test_an_old_driver_is_named_with_what_is_needed() -> None:
    assert gpu_finding("cpu", 0, "").is_good
    assert gpu_finding("1 x NVIDIA L4", 24 << 30, "580.65.06").is_good
    assert "CUDA 13" in gpu_finding("1 x NVIDIA L4", 24 << 30, "550.54").text
    old = gpu_finding("1 x Tesla V100", 16 << 30, "470.42")
    assert not old.is_good and "at least 525" in old.line()


def test_little_memory_or_disk_is_said() -> None:
    assert memory_finding(8 << 30, 4 << 30).is_good
    assert not memory_finding(8 << 30, 100 << 20).is_good
    assert disk_finding("/data", 20 << 30, 8 << 30).is_good
    small = disk_finding("/data", 1 << 30, 8 << 30)
    assert not small.is_good and "worker.store_bytes" in small.text


def test_a_skewed_clock_is_told_by_its_side() -> None:
    assert clock_finding(0.2).is_good
    behind, ahead = clock_finding(42.0), clock_finding(-42.0)
    assert not behind.is_good and "42.0 s behind the coordinator's" in behind.text
    assert not ahead.is_good and "42.0 s ahead of the coordinator's" in ahead.text


def test_addresses_that_do_not_answer_are_named_with_the_reason() -> None:
    assert reach_finding(["1.2.3.4:5"], {}).is_good
    assert not reach_finding([], {}).is_good
    closed = reach_finding(["1.2.3.4:5"], {"1.2.3.4:5": "timed out"})
    assert not closed.is_good and "1.2.3.4:5 (timed out)" in closed.text


def test_the_rate_names_its_load() -> None:
    assert rate_finding(0.0, 32).line().startswith("rate: unknown: the engine sampled no token")
    assert rate_finding(1234.5, 32).line() == "rate: 1234 tokens/s with 32 sequences, measured before the first lease"


def test_an_advertised_address_that_does_not_answer_is_told_with_what_to_do() -> None:
    assert advertised_finding("203.0.113.5:41873", "203.0.113.5", is_reachable=True).is_good
    elsewhere = advertised_finding("203.0.113.5:41873", "198.51.100.2", is_reachable=True)
    assert elsewhere.is_good and "peers are told 198.51.100.2:41873" in elsewhere.text
    silent = advertised_finding("203.0.113.5:41873", "203.0.113.5", is_reachable=False)
    assert not silent.is_good and "hidden worker" in silent.line() and "worker.port" in silent.line()
    far = advertised_finding("[2001:db8::5]:41873", "198.51.100.2", is_reachable=False)
    assert "come from 198.51.100.2, not from [2001:db8::5]" in far.text
