"""A process with gRPC servers ends only once every call's own task has: else gRPC prints a traceback for each."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from echo2.trust.tls import calls_have_ended


async def test_the_end_of_each_call_is_waited_for_after_the_server_has_stopped() -> None:
    began, is_unwinding, may_end = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def handler(requests: AsyncIterator[bytes], _context: Any) -> None:
        try:
            began.set()
            await asyncio.Event().wait()
        finally:
            is_unwinding.set()
            await may_end.wait()

    server = grpc.aio.server()
    methods = {"Call": grpc.stream_stream_rpc_method_handler(handler)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a.Service", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.stream_stream("/a.Service/Call")()
        await call.write(b"")
        await began.wait()
        await server.stop(0)
        await is_unwinding.wait()
        ending = asyncio.create_task(calls_have_ended())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not ending.done(), "gRPC's task for a call goes by another name now"
        may_end.set()
        await ending
