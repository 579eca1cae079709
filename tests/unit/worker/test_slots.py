"""The slot book under random traffic, against a model cache that holds real token prefixes."""

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from echo2.base.errors import EngineError
from echo2.base.rollout import FinishReason, SamplingParams
from echo2.worker.engines.embedded.slots import BLOCK_TOKENS, BlockPool, SlotTable, blocks_for
from echo2.worker.engines.engine import GenerateRequest

CONTEXT = 4 * BLOCK_TOKENS
PROMPTS = {"a": tuple(range(1, 71)), "b": tuple(range(100, 165)), "c": (9,), "d": tuple(range(40))}


def request(request_id: str, prefix: str = "a", done: tuple[int, ...] = (), max_new_tokens: int = 8) -> GenerateRequest:
    return GenerateRequest(request_id, PROMPTS[prefix], done, SamplingParams(max_new_tokens=max_new_tokens), prefix)


class SlotTraffic(RuleBasedStateMachine):
    """`cache[block, row]` is the (epoch, prefix of tokens) that the keys at that place were computed from."""

    @initialize(slot_count=st.integers(1, 5), spare_blocks=st.integers(0, 12))
    def begin(self, slot_count: int, spare_blocks: int) -> None:
        self.table = SlotTable(slot_count, CONTEXT, CONTEXT + spare_blocks * BLOCK_TOKENS)
        self.cache: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}
        self.kept: set[str] = set()
        self.count = 0
        self.said: list[tuple[int, ...]] = []

    def place(self, slot: int, at: int, *, is_written: bool = False) -> tuple[int, int]:
        assert at // BLOCK_TOKENS < self.table.blocks.counts[slot], "what is cached has a place"
        block = int(self.table.blocks.tables[slot, at // BLOCK_TOKENS])
        assert not is_written or self.table.blocks.holders[block] == 1, "shared blocks are not written"
        return block, at % BLOCK_TOKENS

    @rule(prefix=st.sampled_from("abcd"), done=st.integers(0, 4), siblings=st.integers(1, 4))
    def submit(self, prefix: str, done: int, siblings: int) -> None:
        for _ in range(siblings):
            self.count += 1
            self.table.submit(request(f"r{self.count}", prefix, tuple(range(10, 10 + done))))

    @rule(data=st.data(), inserted=st.integers(1, 9), siblings=st.integers(1, 2))
    def go_on(self, data: st.DataObject, inserted: int, siblings: int) -> None:
        """The next turn of a chat: all that was said, and what came behind it."""
        known = [tokens for tokens in self.said if len(tokens) + inserted + 8 <= CONTEXT]
        if not known:
            return
        prompt = (*data.draw(st.sampled_from(known)), *range(200, 200 + inserted))
        for _ in range(siblings):
            self.count += 1
            self.table.submit(GenerateRequest(f"r{self.count}", prompt, (), SamplingParams(max_new_tokens=8), "turn"))

    @rule(budget=st.integers(1, 120))
    def step(self, budget: int) -> None:
        self.table.admit()
        self._copy()
        fills = self.table.next_fills(budget)
        assert sum(len(fill.token_ids) for fill in fills) <= budget
        for fill in fills:
            tokens = self.table.running[fill.slot].tokens
            for offset, token in enumerate(fill.token_ids):
                at = fill.start + offset
                assert tokens[at] == token
                self.cache[self.place(fill.slot, at, is_written=True)] = (self.table.epoch, tuple(tokens[: at + 1]))
        self.table.filled(fills)
        self._copy()
        for sequence in self.table.decodable():
            at = len(sequence.tokens) - 1
            self.cache[self.place(sequence.slot, at, is_written=True)] = (self.table.epoch, tuple(sequence.tokens))
            if self.table.extend(sequence, 20 + at) is not FinishReason.UNFINISHED:
                self.table.release(sequence)
                self.said.append(tuple(sequence.tokens))

    def _copy(self) -> None:
        for copy in self.table.next_copies():
            for at in range(copy.count):
                assert self.cache[copy.source, at][0] == self.table.epoch, "only current weights are shared"
                self.cache[copy.target, at] = self.cache[copy.source, at]

    @rule(keep_kv=st.booleans())
    def swap(self, keep_kv: bool) -> None:
        self.table.weights_changed(keep_kv=keep_kv)
        self.kept = {s.request.request_id for s in self.table.running.values() if s.cached}

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        ids = [s.request.request_id for s in self.table.running.values()] + [*self.table.waiting]
        if not ids:
            return
        gone = data.draw(st.sampled_from(ids))
        assert self.table.abort(gone)
        assert not self.table.abort(gone)

    @invariant()
    def cached_positions_hold_the_right_tokens(self) -> None:
        for slot, sequence in self.table.running.items():
            assert sequence.slot == slot
            assert 0 <= sequence.cached < len(sequence.tokens) <= CONTEXT
            for at in range(sequence.cached):
                epoch, tokens = self.cache[self.place(slot, at)]
                assert tokens == tuple(sequence.tokens[: at + 1])
                assert epoch == self.table.epoch or sequence.request.request_id in self.kept

    @invariant()
    def what_is_kept_holds_the_right_tokens_of_the_live_weights(self) -> None:
        for row, tokens in self.table._kept._tokens.items():
            for at in range(len(tokens)):
                assert self.cache[self.place(row, at)] == (self.table.epoch, tokens[: at + 1])

    @invariant()
    def blocks_are_not_lost(self) -> None:
        blocks = self.table.blocks
        held = [int(block) for row in range(len(blocks.tables)) for block in blocks.tables[row, : blocks.counts[row]]]
        assert {block: held.count(block) for block in held} == {block: blocks.holders[block] for block in held}
        assert len(set(held)) + blocks.free_count == blocks.block_count
        for slot, sequence in self.table.running.items():
            assert blocks.counts[slot] <= blocks_for(len(sequence.tokens)), "no more than is in use"

    @invariant()
    def slots_are_not_lost(self) -> None:
        assert len(self.table.running) + len(self.table._free) == self.table.slot_count
        assert not set(self.table.running) & set(self.table._free)

    def teardown(self) -> None:
        if not hasattr(self, "table"):
            return
        for _ in range(self.count * (CONTEXT + 8)):
            self.step(400)
            if not self.table.running and not self.table.waiting:
                break
        assert not self.table.running and not self.table.waiting, "sequences are stuck"


SlotTraffic.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestSlotTraffic = SlotTraffic.TestCase


def said_by(table: SlotTable, request: GenerateRequest, tokens: list[int], *, swaps: bool = False) -> tuple[int, ...]:
    """Runs the request to its end, `swaps`: under other weights after each token; all its tokens."""
    table.submit(request)
    table.admit()
    table.next_copies()
    table.filled(table.next_fills(1000))
    (sequence,) = table.decodable()
    while table.extend(sequence, tokens[sequence.completion_count]) is FinishReason.UNFINISHED:
        if swaps:
            table.weights_changed(keep_kv=True)
        table.decodable()
    table.release(sequence)
    return tuple(sequence.tokens)


def test_siblings_prefill_their_prompt_once_also_after_its_sequence_has_left() -> None:
    table = SlotTable(4, CONTEXT)
    for index in range(4):
        table.submit(request(f"r{index}", max_new_tokens=1))
    table.admit()
    assert table.next_copies() == []
    fills = table.next_fills(100)
    assert [fill.token_ids for fill in fills] == [PROMPTS["a"][:-1]]
    table.filled(fills)
    assert [copy.count for copy in table.next_copies()] == [69 - 2 * BLOCK_TOKENS] * 3, "whole blocks are shared"
    decodable = table.decodable()
    blocks_taken = table.blocks.block_count - table.blocks.free_count
    assert len(decodable) == 4 and blocks_taken == 2 + 4, "two whole blocks for all, one of each's own"
    for sequence in decodable:
        assert table.extend(sequence, 9) is FinishReason.LENGTH
        table.release(sequence)
    table.submit(request("late"))
    table.admit()
    assert [copy.count for copy in table.next_copies()] == [69 - 2 * BLOCK_TOKENS] and table.next_fills(100) == []


def test_a_prompt_that_no_longer_fits_a_step_waits_for_the_next_in_which_it_fits_whole() -> None:
    table = SlotTable(3, CONTEXT)
    for name, width in (("first", 61), ("long", 51), ("short", 9)):
        prompt = tuple(range(len(name) * 1000, len(name) * 1000 + width))
        table.submit(GenerateRequest(name, prompt, (), SamplingParams(max_new_tokens=4), name))
    table.admit()
    filled = []
    for _ in range(2):
        fills = table.next_fills(70)
        table.filled(fills)
        filled.append([(fill.slot, fill.start, len(fill.token_ids)) for fill in fills])
    assert filled == [[(0, 0, 60), (2, 0, 8)], [(1, 0, 50)]]
    assert len(table.decodable()) == 3


def test_the_next_turn_computes_only_what_is_new_and_nothing_of_other_weights() -> None:
    table = SlotTable(1, CONTEXT)
    said = said_by(table, request("first", max_new_tokens=4), [5, 6, 7, 8])
    before = table.prefilled_tokens
    second = GenerateRequest("second", (*said, 50, 51), (), SamplingParams(max_new_tokens=2), "other")
    said = said_by(table, second, [1, 2])
    assert (table.prefilled_tokens - before, table.shared_prompt_tokens) == (2, 73), "the last sampled and the next"
    table.weights_changed(keep_kv=True)
    third = GenerateRequest("third", (*said, 52), (), SamplingParams(max_new_tokens=2), "other")
    mixed, shared = said_by(table, third, [1, 2], swaps=True), table.shared_prompt_tokens
    assert table.prefilled_tokens - before == 2 + len(said), "what other weights computed is computed anew"
    said_by(table, GenerateRequest("fourth", (*mixed, 53), (), SamplingParams(max_new_tokens=2), "other"), [1, 2])
    assert table.shared_prompt_tokens == shared, "what began under other weights is kept for nobody"


def test_the_chat_that_goes_on_keeps_its_cache_where_others_must_go() -> None:
    table = SlotTable(1, CONTEXT, CONTEXT)  # four blocks in all
    said = said_by(table, request("old", "d", max_new_tokens=1), [5])
    said_by(table, GenerateRequest("newer", tuple(range(60, 100)), (), SamplingParams(max_new_tokens=1), "n"), [5])
    shared = table.shared_prompt_tokens
    said_by(table, GenerateRequest("more", (*said, *range(30)), (), SamplingParams(max_new_tokens=1), "m"), [5])
    assert table.shared_prompt_tokens - shared == 40


def test_a_request_for_which_no_cache_makes_room_costs_none() -> None:
    table = SlotTable(2, CONTEXT, CONTEXT + BLOCK_TOKENS)  # five blocks in all
    said = said_by(table, request("old", "d", max_new_tokens=1), [5])
    table.submit(GenerateRequest("long", tuple(range(60, 150)), (), SamplingParams(max_new_tokens=8), "l"))
    (long,) = table.admit()
    table.filled(table.next_fills(1000))
    table.submit(GenerateRequest("large", tuple(range(200, 300)), (), SamplingParams(max_new_tokens=1), "w"))
    assert table.admit() == []
    table.abort("large")
    table.release(long)
    shared = table.shared_prompt_tokens
    said_by(table, GenerateRequest("next", (*said, 50), (), SamplingParams(max_new_tokens=1), "n"), [5])
    assert table.shared_prompt_tokens - shared == 40


def test_the_youngest_waits_where_blocks_run_out_and_goes_on_with_what_it_has() -> None:
    table = SlotTable(2, CONTEXT, CONTEXT)
    table.submit(GenerateRequest("old", tuple(range(60)), (), SamplingParams(max_new_tokens=60), "o"))
    table.submit(GenerateRequest("young", tuple(range(30)), (), SamplingParams(max_new_tokens=60), "y"))
    sampled: list[list[str]] = []
    while table.running or table.waiting:
        table.admit()
        table.filled(table.next_fills(1000))
        step = table.decodable()
        sampled.append([sequence.request.request_id for sequence in step])
        for sequence in step:
            if table.extend(sequence, 7) is not FinishReason.UNFINISHED:
                table.release(sequence)
    alone = sampled.index(["old"])
    assert sampled[0] == ["old", "young"] and ["young"] not in sampled[:alone] and sampled[-1] == ["young"]
    assert sum("young" in step for step in sampled) == 60, "nothing is sampled twice"


def test_blocks_are_taken_from_the_lowest_on_and_come_back_and_one_sequence_must_fit() -> None:
    table = SlotTable(2, CONTEXT)
    table.is_holding = True
    table.submit(request("r"))
    assert table.admit() == []
    with pytest.raises(EngineError, match="request r"):
        table.submit(request("r"))
    with pytest.raises(EngineError, match=f"one sequence of {CONTEXT} tokens"):
        SlotTable(2, CONTEXT, CONTEXT - BLOCK_TOKENS)
    pool = BlockPool(3, CONTEXT, 6 * BLOCK_TOKENS)
    assert pool.reserve(0, 40) and pool.reserve(1, 1) and pool.free_count == 3
    pool.keep(0, 0)
    assert pool.reserve(2, 33) and list(pool.tables[2, :2]) == [0, 1] and pool.free_count == 3
    assert pool.reserve(0, CONTEXT) is False and pool.counts[0] == 0, "all or nothing"
    assert pool.reserve(0, 3 * BLOCK_TOKENS) and pool.free_count == 0
