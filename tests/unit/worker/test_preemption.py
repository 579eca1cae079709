from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from echo2.base.errors import ConfigError
from echo2.worker.runtime.preemption import CLOUDS, NoticeSource, answer_of, source_of, watch
from echo2.worker.runtime.provider import TAGS, tagged_price


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


def test_a_price_tag_is_read_as_the_notice_is_and_a_cloud_without_tags_says_nothing(service: str) -> None:
    Metadata.looks = 10
    assert answer_of(NoticeSource(f"{service}/tags/price")) == "terminate"
    Metadata.looks = 0
    assert answer_of(NoticeSource(f"{service}/tags/price")) is None, "404: no such tag"
    assert set(TAGS) < set(CLOUDS)
    assert tagged_price("azure") is None and tagged_price("http://somewhere") is None
