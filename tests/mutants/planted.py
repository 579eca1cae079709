"""Defects to plant in the product's own lines, each with what must catch it: test files, or seeds of the virtual world."""

# ruff: noqa: E501  (lines of the product, as they stand)

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """`old` stands exactly once in `file`. `tests`: run in a copy where `new` stands in its place; empty: seeds."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = ()


_HUB, _INTAKE, _JOURNAL = "coordinator/runtime/hub.py", "learner/runtime/intake.py", "learner/runtime/journal.py"
_FILES, _TLS, _BATCHER = "learner/runtime/checkpoint.py", "trust/runtime/tls.py", "learner/shelf.py"
_DOOR = "learner/batcher.py"
_SWAP, _GATE, _WIRE, _TOKENS = "worker/swap.py", "worker/token_gate.py", "wire/coordinator.py", "coordinator/tokens.py"
_LEARNER, _WORKER, _ORDERS = "learner/runtime/shift.py", "worker/runtime/shift.py", "learner/runtime/orders.py"
_UNIT = "tests/unit/"
_W = (_UNIT + "wire/test_fields.py",)
_WF = (_UNIT + "sim/test_said.py",)

MUTANTS: tuple[Mutant, ...] = (
    # what is told before it is kept
    Mutant("intake answers ADMITTED before the journal is synced", _INTAKE,
           "        if outcome.is_synced_first:\n            await self.journal.commit()",
           "        if outcome.is_synced_first:\n            await asyncio.sleep(0)"),
    Mutant("hub sends before it keeps", _HUB,
           "        try:\n            self.keeper.flush()\n        except EchoError as error:\n            self._failed(error)\n            return\n        outgoing, self._outgoing = self._outgoing, []\n        for peer_id, order in outgoing:\n            session = self.workers.get(peer_id)\n            if session is not None:\n                session.send(order)\n",
           "        outgoing, self._outgoing = self._outgoing, []\n        for peer_id, order in outgoing:\n            session = self.workers.get(peer_id)\n            if session is not None:\n                session.send(order)\n        asyncio.get_running_loop().call_later(0.3, self.keeper.flush)\n"),
    Mutant("a batch leaves before its composition is synced", _INTAKE,
           "            if batch is not None:\n                await self.journal.commit()\n", "            if batch is not None:\n"),
    Mutant("a finished rollout is not journalled", _DOOR,
           "actions += [Keep(Finished(rollout, group.senders.get(verdict.index, ()))), Score(rollout)]",
           "actions += [Score(rollout)]"),
    Mutant("a drawn batch is not journalled", _DOOR, "[Keep(drawn_of(batch)), Train(batch)]", "[Train(batch)]"),
    Mutant("a closed group is told to nobody", _DOOR,
           "            actions.append(Close(_ids_of(closures, reason), reason))\n", "            pass\n", (_UNIT + "learner/test_batcher.py",)),
    Mutant("commit believes what was appended meanwhile", _JOURNAL,
           "        self._synced = max(self._synced, reached)", "        self._synced = self._appended + 1"),
    Mutant("commit does not wait for its sync", _JOURNAL, "            await asyncio.shield(self._sync)",
           "            self._synced = target", ()),
    Mutant("the journal's sync is forgotten", _JOURNAL,
           "            await asyncio.to_thread(_synced, file, self.folder)", "            await asyncio.sleep(0)"),
    # disks
    Mutant("a checkpoint has its name before its bytes are synced", _FILES,
           "            for path in (*partial.iterdir(), partial):\n                here().files.sync_path(path)\n", "",
           (_UNIT + "outside/test_outside.py",)),
    Mutant("a checkpoint's name is not synced", _FILES,
           "            here().files.rename(partial, target)\n            here().files.sync_path(self.folder)\n",
           "            here().files.rename(partial, target)\n", (_UNIT + "outside/test_outside.py",)),
    Mutant("the newest checkpoint is let go instead of the oldest", _FILES,
           "kept = self.steps()[-self.options.kept :]", "kept = self.steps()[: self.options.kept]",
           (_UNIT + "learner/test_checkpoint.py",)),
    Mutant("a restart does not cut a torn journal", _JOURNAL, "os.truncate(", "(lambda *_: None)(",
           (_UNIT + "learner/test_journal.py",)),
    Mutant("a secret is renamed before it is synced", _TLS, "        here().files.sync(file.fileno())\n", "",
           (_UNIT + "outside/test_outside.py",)),
    # staleness and exactly once
    Mutant("S is off by one", "staleness/rule.py", "<= staleness_bound\n\n\ndef last", "<= staleness_bound + 1\n\n\ndef last",
           (_UNIT + "staleness/test_rule.py",)),
    Mutant("the last step that may train is off by one", "staleness/rule.py",
           "Step(oldest_version + staleness_bound)", "Step(oldest_version + staleness_bound + 1)",
           (_UNIT + "staleness/test_rule.py",)),
    Mutant("the ledger does not note what was trained", "staleness/ledger.py", "        self.trained[group_id] = step\n",
           "", (_UNIT + "staleness/test_rule.py", _UNIT + "learner/test_shelf.py")),
    Mutant("a superseded attempt is taken", _BATCHER, "        if attempt < group.lease_attempt:\n            text",
           "        if attempt < 0:\n            text", (_UNIT + "learner/test_shelf.py",)),
    Mutant("a finished rollout may be sent again", _BATCHER, "        if held.is_finished:\n            self.counts",
           "        if False:\n            self.counts", (_UNIT + "learner/test_shelf.py",)),
    Mutant("a gap in a rollout is taken", _BATCHER, "if segment.offset > len(held.token_ids):",
           "if segment.offset > len(held.token_ids) + 1:", (_UNIT + "learner/test_shelf.py",)),
    # weights
    Mutant("a swap is not checked", _SWAP, "        if is_equal:\n", "        if True:\n",
           (_UNIT + "worker/test_swap.py",)),
    Mutant("tokens of unproven weights pass", _SWAP, "        self._source = SwapSource.DELTA if fits else SwapSource.HOST\n        if self._source is SwapSource.HOST:\n            yield from self._commit(version)\n        yield HoldTokens(version)\n",
           "        self._source = SwapSource.DELTA if fits else SwapSource.HOST\n        if self._source is SwapSource.HOST:\n            yield from self._commit(version)\n",
           (_UNIT + "worker/test_swap.py",)),
    Mutant("a delta goes onto any parent", _SWAP, "self._began.parent == self.live\n", "True\n",
           (_UNIT + "worker/test_swap.py",)),
    Mutant("what was sampled by wrong weights is released", _GATE,
           "        self._spoiled_requests |= {chunk.request_id for chunk in held}\n", "",
           (_UNIT + "worker/test_token_gate.py",)),
    Mutant("a chunk's signature is not looked at", "broadcast/manifest.py",
           "            verify_signature(publisher, _chunk_body(self.key, self.index, self.ends_block, digest), self.signature)",
           "            pass", (_UNIT + "broadcast/test_manifest.py",)),
    # trust
    Mutant("a revoked token lets in", _TOKENS, "        if self.is_revoked:\n            return", "        if False:\n            return",
           (_UNIT + "coordinator/test_tokens.py",)),
    Mutant("a token's role is not looked at", _TOKENS, "if token.role != role:", "if False:",
           (_UNIT + "coordinator/test_tokens.py",)),
    Mutant("a token never expires", _TOKENS, "        if now >= self.expires_at:", "        if False:",
           (_UNIT + "coordinator/test_tokens.py",)),
    Mutant("a ticket's signature is not looked at", "wire/ticket.py",
           "        verify_signature(coordinator_peer_id, _signed_bytes(message), message.signature)", "        pass",
           (_UNIT + "wire/test_ticket.py",)),
    Mutant("another worker's ticket is taken", "wire/ticket.py", "if message.worker_peer_id != worker_peer_id:",
           "if False:", (_UNIT + "wire/test_ticket.py",)),
    Mutant("a barred worker's rollouts are taken", _ORDERS, "            self._ingest.barred[peer_id] = order.reason\n",
           "            pass\n",
           (_UNIT + "learner/test_daemon.py::test_nothing_is_taken_from_a_worker_that_the_coordinator_has_barred",)),
    # lost awaits and calls
    Mutant("a worker does not say good-bye", _WORKER, "        await self.session.leave(reason, LEAVE_S)\n", "", _WF),
    Mutant("a step is reported to nobody", "learner/runtime/loop.py", "        self._stepped()\n", "", _WF),
    Mutant("offers reach nobody", _LEARNER, "            offer=self.session.offer,\n", "",
           (_UNIT + "learner/test_daemon.py::test_the_coordinator_hears_offers_closures_versions_and_reports",)),
    Mutant("closed groups stay open at the coordinator", _LEARNER, "            close=self.session.close,\n", "", _WF),
    Mutant("versions are published in silence", _LEARNER, "        self.session.published(published_message(artifact))\n", "        pass\n", _WF),
    Mutant("a restart does not score what it holds", _DOOR,
           "                    actions.append(Score(last))\n", "                    pass\n"),
    # what the made-up defects of earlier simulators were, and what seeds have found
    Mutant("a commit leaves a part of the old version behind", "weights/host.py",
           "            for part in staged.exchange_parts():\n                staged.exchange(part, self)\n                done.append(part)\n        except",
           "            for part in list(staged.exchange_parts())[:-1]:\n                staged.exchange(part, self)\n                done.append(part)\n        except",
           (_UNIT + "weights/test_round_trip.py",)),
    Mutant("a lost learner is not dialled again", "worker/runtime/reporting.py",
           "                await self._session(self._target)\n                pause_s",
           "                await self._session(self._target)\n                await asyncio.Event().wait()\n                pause_s"),
    Mutant("what is said between the hello and the stream's opening is lost", "control/runtime/session.py",
           "                hello, outbox = party.hello(), _Outbox[Said]()\n                self._outbox = outbox\n                await self._greet(call, hello, address)\n",
           "                hello, outbox = party.hello(), _Outbox[Said]()\n                await self._greet(call, hello, address)\n                self._outbox = outbox\n",
           (_UNIT + "control/test_session.py",)),
    Mutant("a worker without a lease says nothing", "worker/runtime/telling.py",
           '        return "a lease", now - self._idle_since\n', '        return "", 0.0\n'),
    Mutant("the coordinator does not listen to what of a group has reached the learner", "coordinator/hearsay.py",
           "        return quiet_s if quiet_s >= UNHEARD_TIMEOUTS * self.lease_timeout_s else 0.0\n", "        return 0.0\n",
           (_UNIT + "coordinator/test_lease_book.py",)),
    Mutant("a worker is shunned for what has not reached the learner within a second", "coordinator/hearsay.py",
           "quiet_s >= UNHEARD_TIMEOUTS * self.lease_timeout_s", "quiet_s >= 1.0", (_UNIT + "coordinator/test_lease_book.py",)),
    Mutant("what has stopped coming counts as stalled for ever", "broadcast/stalls.py",
           " and now - since < FORGOTTEN_S\n", "\n", (_UNIT + "broadcast/test_stalls.py",)),
    Mutant("what has stopped coming is asked for no more where it is the only way", "broadcast/runtime/node.py",
           "        if stalled is not None:\n            self._update_wants()\n", "", (_UNIT + "broadcast/runtime/test_stalled.py",)),
    Mutant("groups behind closed ones keep their late step", _BATCHER,
           "                if step < group.spec.consume_step and not group.is_sampled:", "                if False:",
           (_UNIT + "learner/test_batcher.py",)),
    Mutant("the renewal of a lease that has ended is taken for a new one", "worker/runtime/orders.py",
           "        if grant.is_renewal and self._desk.machine.group_of(lease_id) is None:", "        if False:",
           (_UNIT + "worker/test_orders.py",)),
    Mutant("a worker's last life's wish outlives it", "coordinator/lease_book.py",
           "        self.seekers.pop(worker_id, None)\n        for lease_id in sorted(self._of_worker",
           "        for lease_id in sorted(self._of_worker", (_UNIT + "coordinator/test_lease_book.py",)),
    Mutant("a worker whose reports are all refused is never accused", "learner/untruths.py",
           "if self._counts[worker] == UNTRUTHS_MAX:", "if self._counts[worker] == -1:", (_UNIT + "learner/test_untruths.py",)),
    Mutant("a pool is planned of the shunned", "coordinator/hearsay.py",
           "        return found if len(found) < len(workers) else set()\n", "        return set()\n",
           (_UNIT + "coordinator/test_lease_book.py",)),
    Mutant("the database may lose what it has kept, and says nothing", "coordinator/runtime/store_mark.py",
           "        if written < (mark.safe if may_lack_the_end else mark.written):", "        if False:",
           ("tests/contract/test_state_store.py",)),
    Mutant("the learner's lost chunks are not made up for", "broadcast/runtime/node.py",
           "                self._forget(key)\n                self._lost(str(artifact))\n", "                self._forget(key)\n",
           (_UNIT + "broadcast/runtime/test_stalled.py",)),
    Mutant("a machine that was made though its answer was lost costs money for ever", "coordinator/runtime/provisioner.py",
           "            self._check_gone(machine, sightings.get(machine.machine_id))\n", "            pass\n",
           (_UNIT + "coordinator/test_provisioner.py",)),
    # dropped fields
    Mutant("the coordinator drops a heartbeat's memory", _WIRE, "        Heartbeat,\n        version=Version(message.version) if message.has_version else None,\n", "        Heartbeat,\n        memory_used_bytes=0, memory_total_bytes=0,\n        version=Version(message.version) if message.has_version else None,\n", _W),
    Mutant("the coordinator drops a heartbeat's waits", _WIRE, "        Heartbeat,\n        version=Version(message.version) if message.has_version else None,\n", "        Heartbeat,\n        waits_for=\"\", waits_since_s=0.0,\n        version=Version(message.version) if message.has_version else None,\n", _W),
    Mutant("the coordinator drops a heartbeat's fingerprint", _WIRE, "        Heartbeat,\n        version=Version(message.version) if message.has_version else None,\n", "        Heartbeat,\n        fingerprint=\"\",\n        version=Version(message.version) if message.has_version else None,\n", _W),
    Mutant("a hello loses its slots", _WIRE, "    return core_of(message, WorkerHello, link=link_from_message(message.link), held_leases=held_leases)\n", "    return core_of(message, WorkerHello, slot_count=0, link=link_from_message(message.link), held_leases=held_leases)\n", _W),
    Mutant("a hello loses its price", _WIRE, "    return core_of(message, WorkerHello, link=link_from_message(message.link), held_leases=held_leases)\n", "    return core_of(message, WorkerHello, price_usd_per_hour=0.0, link=link_from_message(message.link), held_leases=held_leases)\n", _W),
    Mutant("a heartbeat does not say how much memory is used", "worker/runtime/telling.py",
           "            memory_used_bytes=used_bytes,\n", "", _WF),
    Mutant("a heartbeat does not say its version's fingerprint", "worker/runtime/telling.py",
           '            fingerprint=keeper.live_fingerprint if keeper else "",\n', ""),
    Mutant("a hello does not say which leases are held", "worker/runtime/telling.py",
           "            held_tickets=self._held_tickets(),\n", "", _WF),
    Mutant("a verdict loses its count of held tokens", "wire/rollout.py", "verdict=_VERDICT_TO_WIRE[verdict.verdict], message=text)", "verdict=_VERDICT_TO_WIRE[verdict.verdict], message=text, held_tokens=0)",
           (_UNIT + "wire/test_rollout.py",)),
)  # fmt: skip
