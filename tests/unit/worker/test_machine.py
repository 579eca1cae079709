"""."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from echo2.base.errors import ConfigError, ResourceError
from echo2.coordinator.money.market import built_in_models
from echo2.worker.machine import (
    CLOUDS,
    PRICE_VARIABLE,
    LocalGpu,
    NoticeSource,
    Price,
    WorkerMachine,
    advertised_finding,
    check_room,
    chosen_engine,
    clock_finding,
    disk_finding,
    findings,
    gpu_finding,
    look,
    memory_finding,
    memory_used_bytes,
    parse_gpus,
    price_of,
    rate_finding,
    reach,
    reach_finding,
    source_of,
    watch,
)

BARE = WorkerMachine(gpus=(), cores=2, memory_bytes=8 << 30, free_disk_bytes=10 << 30, has_vllm=False)
WITH_GPUS = replace(BARE, gpus=parse_gpus("NVIDIA H200, 143771, 570.1\nNVIDIA H200, 143771, 570.1\n"), has_vllm=True)


def test_gpus_are_read_and_broken_lines_skipped() -> None:
    assert parse_gpus("NVIDIA L4, 23034, 550.54\n[Unknown Error]\n") == (LocalGpu("NVIDIA L4", 23034 << 20, "550.54"),)
    assert WITH_GPUS.gpu_text == "2 x NVIDIA H200"
    assert BARE.gpu_text == "cpu"


def test_vllm_is_chosen_where_there_is_a_gpu_and_vllm() -> None:
    assert chosen_engine("auto", BARE) == "embedded"
    assert chosen_engine("auto", WITH_GPUS) == "vllm"
    assert chosen_engine("auto", replace(WITH_GPUS, has_vllm=False)) == "embedded"
    assert chosen_engine("embedded", WITH_GPUS) == "embedded"
    with pytest.raises(ConfigError, match="expected vLLM to be installed"):
        chosen_engine("vllm", BARE)


def test_a_model_that_cannot_fit_is_refused_with_what_it_needs(tmp_path: Path) -> None:
    size = built_in_models()["qwen3-0.6b"]
    published = size.gpu_weight_bytes
    check_room(BARE, size, published, tmp_path)
    with pytest.raises(ResourceError, match=r"memory: expected 4\.5 GB while a keyframe of 1\.2 GB is taken"):
        check_room(replace(BARE, memory_bytes=4 << 30), size, published, tmp_path)
    check_room(
        replace(WITH_GPUS, memory_bytes=4 << 30), size, published, tmp_path
    )  # an engine's own weights are on the GPU
    with pytest.raises(ResourceError, match="disk at"):
        check_room(replace(BARE, free_disk_bytes=1 << 30), size, published, tmp_path)
    with pytest.raises(ResourceError, match=r"/dev/shm: expected 311\.2 MB free, .* got 67\.1 MB; .*--shm-size"):
        check_room(replace(WITH_GPUS, shared_memory_bytes=64 << 20), size, published, tmp_path)


def test_this_machine_can_be_looked_at(tmp_path: Path) -> None:
    machine = look(tmp_path)
    assert machine.cores >= 1 and machine.memory_bytes > 1 << 28 and machine.free_disk_bytes > 0
    assert "cores" in machine.describe()


def test_findings_name_gpu_memory_and_disk(tmp_path: Path) -> None:
    found = {finding.what: finding for finding in findings(replace(BARE, free_memory_bytes=4 << 30), tmp_path)}
    assert set(found) == {"GPU", "memory", "disk"} and all(finding.is_good for finding in found.values())
    assert not findings(replace(BARE, free_disk_bytes=1 << 20), tmp_path)[2].is_good


def test_an_address_that_nobody_answers_at_is_found_out() -> None:
    async def scene() -> None:
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        assert (await reach([f"127.0.0.1:{port}"])).is_good
        server.close()
        await server.wait_closed()
        closed = await reach([f"127.0.0.1:{port}"])
        assert not closed.is_good and f"127.0.0.1:{port} (" in closed.text

    asyncio.run(scene())


def test_memory_counts_the_processes_of_an_engine_and_theirs() -> None:
    before, held = memory_used_bytes(), 64 << 20
    grandchild = f"import sys; held = b'x' * {held}; print('here', flush=True); sys.stdin.read()"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "here\n"
        assert memory_used_bytes() > before + held * 3 // 4
        process.communicate()


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
    assert not small.is_good and "for chunks" in small.text


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


def test_a_flag_beats_the_environment() -> None:
    environment = {PRICE_VARIABLE: "0.31"}
    assert price_of(0.5, environment) == Price(0.5, "worker.price_usd_per_hour")
    assert price_of(0.0, environment) == Price(0.31, PRICE_VARIABLE)
    assert price_of(0.0, {}).usd_per_hour == price_of(0.0, {PRICE_VARIABLE: ""}).usd_per_hour == 0.0


@pytest.mark.parametrize("text", ["cheap", "-1", "nan", "1e9"])
def test_what_is_no_price_is_refused_with_its_source(text: str) -> None:
    with pytest.raises(ConfigError, match=PRICE_VARIABLE):
        price_of(0.0, {PRICE_VARIABLE: text})


class Metadata(BaseHTTPRequestHandler):
    """Says 404 or FALSE for two looks, then gives the notice; hands out a token as AWS does."""

    looks = 0

    def do_PUT(self) -> None:
        self._answer(200, "a-token")

    def do_GET(self) -> None:
        if self.path == "/needs-token" and self.headers.get("X-Token") != "a-token":
            return self._answer(401, "")
        type(self).looks += 1
        if self.path == "/word":
            return self._answer(200, "TRUE" if self.looks > 2 else "FALSE")
        return self._answer(200 if self.looks > 2 else 404, "terminate")

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def service() -> Iterator[str]:
    Metadata.looks = 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("kind", ["status", "word", "token"])
def test_a_notice_is_told_once_it_is_there_and_not_before(service: str, kind: str) -> None:
    source = {
        "status": NoticeSource(f"{service}/action"),
        "word": NoticeSource(f"{service}/word", word="TRUE"),
        "token": NoticeSource(f"{service}/needs-token", token_url=f"{service}/token", token_header="X-Token"),
    }[kind]

    async def scene() -> None:
        told: asyncio.Queue[str] = asyncio.Queue()
        watching = asyncio.create_task(watch(source, told.put_nowait, poll_s=0.01))
        assert await asyncio.wait_for(told.get(), 10) == "preemption notice"
        assert Metadata.looks == 3
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    asyncio.run(scene())


def test_a_source_is_a_cloud_or_an_address() -> None:
    assert source_of("gcp") is CLOUDS["gcp"]
    assert source_of("http://10.0.0.1/notice").url == "http://10.0.0.1/notice"
    with pytest.raises(ConfigError, match="expected aws, azure, gcp or an http address, got 'ibm'"):
        source_of("ibm")
