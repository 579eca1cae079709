"""What a worker finds out and says about its machine, and what went wrong on it."""

import asyncio
import json
import logging
import os
import subprocess
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from echo2.base.errors import ConfigError, ResourceError
from echo2.coordinator.money.market import built_in_models
from echo2.cost_model.sizing import Quantisation
from echo2.wire.bounds import LOG_LINES_MAX, check
from echo2.worker.heartbeat import LogTail
from echo2.worker.machine import (
    CLOUDS,
    PRICE_VARIABLE,
    LocalGpu,
    NoticeSource,
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
    place_of,
    price_of,
    rate_finding,
    reach,
    source_of,
    watch,
)  # fmt: skip

BARE = WorkerMachine(gpus=(), cores=2, memory_bytes=8 << 30, free_disk_bytes=10 << 30, has_vllm=False)
WITH_GPUS = replace(BARE, gpus=parse_gpus("NVIDIA H200, 143771, 570.1\nNVIDIA H200, 143771, 570.1\n"), has_vllm=True)


def test_this_machine_is_looked_at_and_vllm_chosen_where_there_is_a_gpu_and_vllm(tmp_path: Path) -> None:
    assert parse_gpus("NVIDIA L4, 23034, 550.54\n[Unknown Error]\n") == (LocalGpu("NVIDIA L4", 23034 << 20, "550.54"),)
    assert (WITH_GPUS.gpu_text, BARE.gpu_text) == ("2 x NVIDIA H200", "cpu")
    rows = "".join(f"NVIDIA {name}, 100, 570.1, GPU-{name}-0\n" for name in ("A", "B", "C"))
    for visible, seen in (
        (None, "ABC"), ("1", "B"), ("2, 0", "CA"), ("GPU-C-0,GPU-A", "CA"), ("0,3,1", "A"), ("", ""), ("-1", ""), ("MIG-7", "ABC"),
    ):  # fmt: skip
        assert "".join(gpu.name[-1] for gpu in parse_gpus(rows, visible)) == seen, "as CUDA counts them"
    for choice, machine, expected in (
        ("auto", BARE, "embedded"), ("auto", WITH_GPUS, "vllm"), ("auto", replace(WITH_GPUS, has_vllm=False), "embedded"),
        ("embedded", WITH_GPUS, "embedded"),
    ):  # fmt: skip
        assert chosen_engine(choice, machine) == expected
    with pytest.raises(ConfigError, match="expected vLLM to be installed"):
        chosen_engine("vllm", BARE)
    (tmp_path / "chunks").mkdir()
    (tmp_path / "chunks" / "a.artifact").touch()
    os.truncate(tmp_path / "chunks" / "a.artifact", 1 << 42)
    machine = look(tmp_path)
    assert machine.free_disk_bytes > 1 << 42, "what it keeps itself gives way to newer chunks"
    assert machine.cores >= 1 and machine.memory_bytes > 1 << 28 and "cores" in machine.describe()
    found = {finding.what: finding for finding in findings(replace(machine, free_disk_bytes=1 << 20), tmp_path)}
    assert set(found) == {"GPU", "memory", "disk"} and not found["disk"].is_good


def test_a_model_that_cannot_fit_is_refused_with_what_it_needs(tmp_path: Path) -> None:
    size = built_in_models()["qwen3-0.6b"]
    published, small = size.gpu_weight_bytes, {"memory_bytes": 4 << 30}
    check_room(BARE, size, published, tmp_path)
    check_room(replace(BARE, **small), size, published, tmp_path, Quantisation.BF16)
    check_room(replace(WITH_GPUS, **small), size, published, tmp_path)  # an engine's own weights are on the GPU
    for machine, text in (
        (replace(BARE, **small), r"memory: expected 4\.5 GB while a keyframe of 1\.2 GB is taken"),
        (replace(BARE, free_disk_bytes=1 << 30), "disk at"),
        (replace(WITH_GPUS, shared_memory_bytes=64 << 20), r"shm: expected 311\.2 MB free, .* 67\.1 MB; .*--shm-size"),
    ):
        with pytest.raises(ResourceError, match=text):
            check_room(machine, size, published, tmp_path)


async def test_an_address_that_nobody_answers_at_is_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(host: str, port: int) -> None:
        raise TimeoutError

    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    assert (await reach([address])).is_good and not (await reach([])).is_good
    server.close()
    await server.wait_closed()
    closed = await reach([address])
    assert not closed.is_good and f"{address} (" in closed.text
    monkeypatch.setattr(asyncio, "open_connection", silent)
    assert f"{address} (no answer)" in (await reach([address])).text


def test_memory_counts_the_processes_of_an_engine_and_theirs() -> None:
    before, held = memory_used_bytes(), 64 << 20
    grandchild = f"import sys; held = b'x' * {held}; print('here', flush=True); sys.stdin.read()"
    child = [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}])"]
    with subprocess.Popen(child, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "here\n"
        assert memory_used_bytes() > before + held * 3 // 4
        process.communicate()


def test_findings_say_what_is_bad_with_what_was_expected() -> None:
    named = "203.0.113.5:41873"
    good = [
        gpu_finding("cpu", 0, ""), gpu_finding("1 x NVIDIA L4", 24 << 30, "580.65.06"), memory_finding(8 << 30, 4 << 30),
        disk_finding("/data", 20 << 30, 8 << 30), clock_finding(0.2), advertised_finding(named, "203.0.113.5", True),
        advertised_finding(named, "198.51.100.2", True),
    ]  # fmt: skip
    assert all(finding.is_good for finding in good) and "peers are told 198.51.100.2:41873" in good[-1].text
    assert "CUDA 13" in gpu_finding("1 x NVIDIA L4", 24 << 30, "550.54").text
    assert rate_finding(1234.5, 32).line() == "rate: 1234 tokens/s with 32 sequences, measured before the first lease"
    assert rate_finding(0.0, 32).line().startswith("rate: unknown: the engine sampled no token")
    for bad, text in (
        (gpu_finding("1 x Tesla V100", 16 << 30, "470.42"), "at least 525"),
        (memory_finding(8 << 30, 100 << 20), "expected at least 1.1 GB free"),
        (disk_finding("/data", 1 << 30, 8 << 30), "for chunks"),
        (clock_finding(42.0), "42.0 s behind the coordinator's"),
        (clock_finding(-42.0), "42.0 s ahead of the coordinator's"),
        (advertised_finding(named, "203.0.113.5", False), "it works as a hidden worker"),
        (advertised_finding("[2001:db8::5]:4", "198.51.100.2", False), "from 198.51.100.2, not from [2001"),
    ):
        assert not bad.is_good and text in bad.line()


def test_a_price_is_the_flags_then_the_environments_and_what_is_none_is_refused_with_its_source() -> None:
    for flag, environment, expected in ((0.5, "0.31", 0.5), (0.0, "0.31", 0.31), (0.0, "", 0.0)):
        assert price_of(flag, {PRICE_VARIABLE: environment}) == expected
    assert price_of(0.0, {}) == 0.0
    for text in ("cheap", "-1", "nan", "1e9"):
        with pytest.raises(ConfigError, match=PRICE_VARIABLE):
            price_of(0.0, {PRICE_VARIABLE: text})


def test_a_machine_knows_its_provider_and_region_from_its_environment() -> None:
    sky = json.dumps({"cluster_name": "a", "cloud": "GCP", "region": "us-central1", "zone": "b"})
    for environment, expected in (
        ({}, ("", "")),
        ({"RUNPOD_POD_ID": "x", "RUNPOD_DC_ID": "EU-NL-1"}, ("runpod", "EU-NL-1")),
        ({"VAST_CONTAINERLABEL": "C.123"}, ("vast.ai", "")),
        ({"SKYPILOT_CLUSTER_INFO": sky}, ("gcp", "us-central1")),
        ({"SKYPILOT_CLUSTER_INFO": "[not json"}, ("", "")),
        ({"SKYPILOT_CLUSTER_INFO": "[1]"}, ("", "")),
        ({"RUNPOD_POD_ID": "x", "RUNPOD_DC_ID": "a\x1b[2J" + "y" * 100}, ("runpod", "a[2J" + "y" * 59)),
    ):
        assert place_of("", environment) == expected
        assert place_of("own/cellar", environment) == ("own", "cellar"), "what is declared counts"


class Metadata(BaseHTTPRequestHandler):
    """Says nonsense, then 404 or FALSE, then gives the notice; hands out a token as AWS does."""

    looks = 0

    def do_PUT(self) -> None:
        self._answer(200, "a-token")

    def do_GET(self) -> None:
        if self.path == "/needs-token" and self.headers.get("X-Token") != "a-token":
            return self._answer(401, "")
        type(self).looks += 1
        if self.looks == 1:
            self.wfile.write(b"nonsense\n")
        elif self.path == "/word":
            self._answer(200, "TRUE" if self.looks > 2 else "FALSE")
        else:
            self._answer(200 if self.looks > 2 else 404, "terminate")

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


async def test_a_notice_is_told_once_it_is_there_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo2.worker.machine.POLL_S", 0.01)
    with ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        at = f"http://127.0.0.1:{server.server_port}"
        for source in (
            NoticeSource(f"{at}/action"),
            NoticeSource(f"{at}/word", word="TRUE"),
            NoticeSource(f"{at}/needs-token", token_url=f"{at}/token", token_header="X-Token"),
        ):
            Metadata.looks, told = 0, asyncio.Queue[str]()
            watching = asyncio.create_task(watch(source, told.put_nowait))
            assert await asyncio.wait_for(told.get(), 10) == "preemption notice" and Metadata.looks == 3
            watching.cancel()
        server.shutdown()
    assert source_of("gcp") is CLOUDS["gcp"] and source_of("http://10.0.0.1/notice").url == "http://10.0.0.1/notice"
    with pytest.raises(ConfigError, match="expected aws, azure, gcp or an http address, got 'ibm'"):
        source_of("ibm")


def test_warnings_and_errors_are_kept_within_bounds_and_the_rest_is_not() -> None:
    tail, log = LogTail(), logging.getLogger("tests.log_tail")
    log.propagate = False
    log.setLevel(logging.DEBUG)
    log.addHandler(tail)
    log.info("all is well")
    for number in range(50):
        log.warning("no answer\x1b[2J from %s\n%s", number, "x" * 1000)
    log.error("the engine failed", exc_info=(ValueError, ValueError("boom"), None))
    message = tail.message()
    check(message, "this worker")
    assert (tail.count, len(message.lines)) == (51, LOG_LINES_MAX)
    assert message.lines[-1].is_error and message.lines[-1].text == "the engine failed: ValueError: boom"
    assert not message.lines[0].is_error and message.lines[0].text.startswith("no answer?[2J from 31 xxx")
