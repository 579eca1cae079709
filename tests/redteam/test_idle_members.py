"""A member that has proven who it is and then makes no call: its connection ends, and whoever needs one dials again."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import grpc

from echo2.base.ids import RunId
from echo2.trust.identity import Identity, Role, RunAuthority, TlsKey, certificate_request
from echo2.trust.runtime import tls
from echo2.trust.runtime.port_limits import LEARNER, PEERS, SERVICES


def test_a_members_connection_without_a_call_ends_and_is_made_anew() -> None:
    assert max(PEERS.idle_s, LEARNER.idle_s) <= 30 and SERVICES.idle_s <= 60, "each keeps memory"
    now = time.time()
    authority = RunAuthority.create(Identity.generate(), RunId("run"), now)
    identity, key = Identity.generate(), TlsKey.generate()
    issued = authority.issue(certificate_request(identity, key), Role.WORKER, now)
    own = authority.identity.peer_id
    member = tls.Credentials(
        identity, key.to_pem(), issued, authority.certificate_pem, authority.run_id, own, "127.0.0.1:0"
    )

    async def echo(messages: object, context: grpc.aio.ServicerContext) -> None:  # type: ignore[type-arg]
        await context.write(await context.read())

    async def scene() -> None:
        server = tls.new_server(replace(PEERS, idle_s=1.0))
        server.add_frames("test.Service", {"Echo": grpc.stream_stream_rpc_method_handler(echo)})
        credentials = tls.server_credentials(tls.coordinator_credentials(authority, "127.0.0.1:0"))
        port = tls.bind_server(server, "127.0.0.1:0", credentials)
        await server.start()
        async with tls.open_channel(f"127.0.0.1:{port}", own, member) as channel:
            for _ in range(2):
                call = channel.stream_stream("/test.Service/Echo")()
                await call.write(b"x")
                assert await call.read() == b"x"
                await call.done_writing()
                async with asyncio.timeout(20.0):
                    while (state := channel.get_state()) is grpc.ChannelConnectivity.READY:
                        await channel.wait_for_state_change(state)
        await server.stop(0)

    asyncio.run(scene())
