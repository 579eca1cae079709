"""A real worker whose coordinator and learner answer by grammar: each answer costs a stream at most, and no answer the process."""

import random
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from echo2.base.ids import GroupId, LeaseId, PeerId
from echo2.outside.guard import MISHAPS
from echo2.trust import tls
from echo2.wire.gen.echo2.v1 import coordinator_pb2, ingest_pb2, rollout_pb2
from echo2.wire.rollout import Ticket, sign_ticket
from echo2.worker.control import ask
from tests.redteam.grammar import Grammar
from tests.unit.worker.peers import RUN, SmallLearner, SmallRun
from tests.unit.worker.test_worker import group, prepared, short_pauses, until, working  # noqa: F401 - a fixture

ORDERS, ANSWERS = 100, 60


def order_by(grammar: Grammar, run: SmallRun, *, is_wild: bool) -> coordinator_pb2.WorkerOrder:
    """Any but a refusal and another model, which say that the worker is to end."""
    while True:
        message = grammar.message(coordinator_pb2.WorkerOrder.DESCRIPTOR, is_wild)
        if message.WhichOneof("kind") == "learner":
            message.learner.model_digest = run.model_digest
            message.learner.longest_sequence_tokens = run.whereabouts.longest_sequence_tokens
        if message.WhichOneof("kind") != "refusal":
            return message


def ticket_of(run: SmallRun, worker: PeerId, number: int) -> rollout_pb2.LeaseTicket:
    one = Ticket(LeaseId(f"lease-{number}"), GroupId(f"g{number}"), worker, 1, time.time() + 60, RUN)
    return sign_ticket(one, run.authority.identity)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.soak)])
async def test_a_worker_survives_whatever_a_coordinator_orders(seed: int, tmp_path: Path) -> None:
    mishaps = MISHAPS.count
    grammar = Grammar(random.Random(seed), ["a-run", "g0", "lease-1", "127.0.0.1:9"])
    async with SmallRun(tmp_path / "run") as run:
        await prepared(run)
        async with working(run, tmp_path / "w") as daemon:
            await until(lambda: run.coordinator.heartbeats)
            worker = tls.load_or_create_identity(daemon.folder).peer_id
            grammar.words.append(worker)
            grammar.tickets = [ticket_of(run, worker, number) for number in range(8)]
            for number in range(ORDERS):
                heard = len(run.coordinator.hellos)
                run.coordinator.outbox.put_nowait(order_by(grammar, run, is_wild=number % 3 == 0))
                if number % 3 == 0:
                    await until(
                        lambda heard=heard: (
                            len(run.coordinator.hellos) > heard  # type: ignore[misc]
                            or run.coordinator.outbox.empty()
                        )
                    )
            await until(run.coordinator.outbox.empty)
            beats = len(run.coordinator.heartbeats)
            await until(lambda: len(run.coordinator.heartbeats) > beats + 2)
            assert (await ask(daemon.folder, "status"))["version"] == 0, "what it was leased keeps it, no more"
    assert MISHAPS.count == mishaps, "what a coordinator may say is foreseen"


class LyingLearner(SmallLearner):
    """Answers by grammar until it has done so often enough."""

    grammar: Grammar
    answered = 0

    async def Report(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        if self.answered >= ANSWERS:
            async for verdict in super().Report(requests, context):
                yield verdict
            return
        async for _ in requests:
            self.answered += 1
            yield self.grammar.message(ingest_pb2.RolloutVerdict.DESCRIPTOR, self.answered % 3 == 0)

    async def GetPartials(self, request: Any, context: Any) -> Any:
        if self.answered >= ANSWERS:
            return await super().GetPartials(request, context)
        self.answered += 1
        return self.grammar.message(ingest_pb2.GetPartialsReply.DESCRIPTOR, self.answered % 3 == 0)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.soak)])
async def test_a_worker_survives_whatever_a_learner_answers(seed: int, tmp_path: Path) -> None:
    mishaps = MISHAPS.count
    async with SmallRun(tmp_path / "run") as run:
        liar = LyingLearner(run.authority)
        liar.grammar = Grammar(random.Random(seed), [f"g{number}" for number in range(40)])
        await run.stop("learner")
        run.learner = liar
        await run.start_learner()
        await prepared(run)
        run.coordinator.groups = [group(f"g{number}", tokens_max=60) for number in range(400)]
        run.coordinator.continues = {f"g{number}" for number in range(0, 400, 2)}
        async with working(run, tmp_path / "w"):
            await until(lambda: liar.answered >= ANSWERS)
            run.coordinator.groups = [group(f"after{number}") for number in range(2)]
            await run.coordinator.until(lambda it: it.requests and it.requests[-1].free_rollouts >= 4)
            await liar.until(lambda it: sum(key[0].startswith("after") for key in it.finished) == 8)
    assert MISHAPS.count == mishaps, "what a learner may say is foreseen"
