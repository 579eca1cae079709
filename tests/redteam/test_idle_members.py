"""A member that has proven who it is and then makes no call: its connection ends, and whoever needs one dials again."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import grpc

from echo2.base.ids import RunId
from echo2.trust import tls
from echo2.trust.identity import Identity, Role, RunAuthority, TlsKey, certificate_request
from echo2.trust.ports import LEARNER, SERVICES
from echo2.wire.gen.echo2.v1.probe_pb2 import ProbeBlock
from tests.patience import WAIT_S


def member_of(authority: RunAuthority) -> tls.Credentials:
    identity, key = Identity.generate(), TlsKey.generate()
    issued = authority.issue(certificate_request(identity, key), Role.WORKER, time.time())
    own = authority.identity.peer_id
    return tls.Credentials(
        identity, key.to_pem(), issued, authority.certificate_pem, authority.run_id, own, "127.0.0.1:0"
    )


def test_a_members_connection_without_a_call_ends_and_is_made_anew() -> None:
    assert LEARNER.idle_s <= 30 and SERVICES.idle_s <= 60, "each keeps memory"
    authority = RunAuthority.create(Identity.generate(), RunId("run"), time.time())
    own, member = authority.identity.peer_id, member_of(authority)

    async def echo(messages: object, context: grpc.aio.ServicerContext) -> None:  # type: ignore[type-arg]
        await context.write(await context.read())

    async def scene() -> None:
        server = tls.new_server(replace(LEARNER, idle_s=1.0))
        method = grpc.stream_stream_rpc_method_handler(echo, ProbeBlock.FromString, ProbeBlock.SerializeToString)
        server.add_registered_method_handlers("test.Service", {"Echo": method})
        credentials = tls.server_credentials(tls.coordinator_credentials(authority, "127.0.0.1:0"))
        port = tls.bind_server(server, "127.0.0.1:0", credentials)
        await server.start()
        async with tls.open_channel(f"127.0.0.1:{port}", own, member) as channel:
            for _ in range(2):
                call = channel.stream_stream("/test.Service/Echo")()
                said = ProbeBlock(data=b"x").SerializeToString()
                await call.write(said)
                assert await call.read() == said
                await call.done_writing()
                async with asyncio.timeout(WAIT_S):
                    while (state := channel.get_state()) is grpc.ChannelConnectivity.READY:
                        await channel.wait_for_state_change(state)
        await server.stop(0)

    asyncio.run(scene())
