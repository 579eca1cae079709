"""The open groups, of training and of the running evaluation: which tokens are admitted, which groups are trained on next.

Guarantees: no batch has a token over the staleness bound (one rule, checked on arrival and again when a batch is drawn); an
evaluation's group holds tokens of its version alone and is in no batch; a group enters at most one batch (ledger); a batch is
R/n complete groups, those that would go stale first. A group whose tokens can no longer be used is closed and counted, and its
prompt is offered again under another id, a limited number of times; replacements of groups without contrast are bounded, so a
task that is too easy or too hard slows a run down but never stops it.

Sources. Dynamic sampling: Yu et al. (DAPO), arXiv 2503.14476.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from echo2.base.ids import GroupId, PeerId, Step, Version
from echo2.base.rng import turn_seed
from echo2.base.rollout import FinishReason, GroupSpec, Rollout, SamplingParams, SegmentVerdict, Verdict, Work
from echo2.config.run import RunConfig
from echo2.learner.rollouts.groups import (
    NOBODY,
    Batch,
    Group,
    Prompt,
    TrainGroup,
    TurnOf,
    common_beginning,
    empty_rollout,
    extended,
    extended_senders,
    group_id_of,
    is_driven,
    is_driven_root,
    is_later_turn,
    joined,
    root_of,
)
from echo2.learner.rollouts.workers import SenderRecords
from echo2.staleness.rule import Ledger, is_admissible

STEPS_REMEMBERED = 256
"""For so many steps, the ledger remembers a trained group, whose late copies are answered DUPLICATE and afterwards CLOSED; and so
many steps past the bound a version is known, so that late tokens are refused as stale, not as impossible."""
RETRIES_MAX = {Work.TRAIN: 2, Work.EVALUATE: 64}
"""How often a prompt is offered again after its group went stale or its worker was barred. A question left out would bias a
result."""
RELATION_NATS = 1e-3
"""Tolerance for the relation between a token's two log-probabilities that the sampling parameters imply; float32 kernels differ by
less."""
DROPPED_MAX_RATIO = 2
"""For one step at most so many times its groups are dropped for equal rewards; more would let a solved task stop the run."""


def cap_groups(config: RunConfig, planned_rollouts: int | None) -> int:
    """The most groups in flight. Until a plan arrives: one batch being sampled and one in the buffer."""
    learner = config.learner
    planned = planned_rollouts or 2 * learner.rollouts_per_step
    highest = (config.staleness.bound + 1) * learner.prompts_per_step
    return max(learner.prompts_per_step, min(planned // learner.rollouts_per_prompt, highest))


@dataclass(frozen=True, slots=True)
class Closure:
    """A closed group. `again`: number and try of the group that replaces it, if its prompt gets another."""

    group_id: GroupId
    reason: str  # complete | stale | quarantined | no contrast | reward failed | unused | restarted | evaluation over
    again: tuple[int, int] | None = None


@dataclass(slots=True)
class Counts:
    """Rollouts for training by outcome, counted since the run began."""

    admitted: int = 0
    duplicate: int = 0
    refused: int = 0
    dropped_stale: int = 0
    dropped_quarantined: int = 0
    dropped_equal_rewards: int = 0
    dropped_reward_failed: int = 0
    trained: int = 0
    trained_tokens: int = 0


@dataclass(slots=True)
class OpenGroups:
    """`next_step`: the step of the next batch to be drawn. `published`: versions that workers may name. `roots`: those of `groups`
    that a batch may be drawn of, which with many turns are a small part, and are asked for with every report. `resumed_at`: the
    step from which this process went on: if from an older backup, honest workers have later versions for a while. `row_bytes`:
    of a token's routes, if they are asked for; others would only fill memory and journal, and are dropped."""

    config: RunConfig
    vocabulary_size: int
    ledger: Ledger = field(init=False)
    next_step: Step = field(default_factory=lambda: Step(0))
    published: list[Version] = field(default_factory=lambda: [Version(0)])
    resumed_at: Step = field(default_factory=lambda: Step(-STEPS_REMEMBERED))
    groups: dict[GroupId, Group] = field(default_factory=dict)
    roots: dict[GroupId, Group] = field(default_factory=dict)
    closures: list[Closure] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    drops_for_step: int = 0
    workers: SenderRecords = field(default_factory=SenderRecords)
    row_bytes: int = 0

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.bound)

    @property
    def bound(self) -> int:
        return self.config.staleness.bound

    @property
    def groups_per_step(self) -> int:
        return self.config.learner.prompts_per_step

    # ---- what is held

    @property
    def training(self) -> list[Group]:
        return [group for group in self.groups.values() if group.is_training]

    @property
    def evaluation(self) -> list[Group]:
        return [group for group in self.groups.values() if not group.is_training]

    @property
    def lacking(self) -> list[Group]:
        """Groups that still need a worker, oldest first; those of the evaluation last."""
        return [group for group in (*self.training, *self.evaluation) if not group.is_sampled]

    @property
    def in_flight_groups(self) -> int:
        """Training groups offered or buffered. Groups drawn into a batch do not count, nor do the groups of later turns."""
        return len(self.roots)

    @property
    def open_rollouts(self) -> int:
        return sum(not rollout.is_finished for group in self.training for rollout in group.rollouts)

    @property
    def buffered_rollouts(self) -> int:
        """Rollouts for training whose turns so far are all finished."""
        finished = 0
        for group in self.training:
            if not is_later_turn(group.spec.group_id):
                finished += sum(rollout.is_finished for rollout in group.rollouts)
            elif not group.is_sampled:
                finished -= 1
        return finished

    def turns(self, root: GroupId, index: int) -> list[tuple[Group, Rollout]]:
        """The turns of one rollout so far, each with its group, including the one being sampled."""
        turns: list[tuple[Group, Rollout]] = []
        at = TurnOf(root, index, 1 if is_driven(root) else 0)
        while (group := self.groups.get(at.group_id)) is not None:
            turns.append((group, group.rollouts[index if at.turn == 0 else 0]))
            at = at.next
        return turns

    def family(self, root: GroupId, index: int | None = None) -> list[GroupId]:
        """The ids of a group and its rollouts' later turns; with `index`, only that rollout's later turns."""
        names = [root] if index is None else []
        for each in range(len(self.groups[root].rollouts)) if index is None else (index,):
            names += [group.spec.group_id for group, _ in self.turns(root, each) if group.spec.group_id != root]
        return names

    # ---- opening

    def open(self, spec: GroupSpec, cursor: int, retry: int) -> GroupSpec:
        assert spec.group_id not in self.groups, f"group {spec.group_id} is open already"
        group = Group.opened(spec, cursor, retry)
        # A worker begins it with a version from here on: one that names an older one would only make it stale.
        group.min_version = min(self.next_step, spec.consume_step) - self.bound
        self.put(group)
        return spec

    def put(self, group: Group) -> None:
        name = group.spec.group_id
        self.groups[name] = group
        if group.is_training and not is_later_turn(name):
            self.roots[name] = group

    def open_group(self, cursor: int, prompt: Prompt, retry: int = 0) -> GroupSpec:
        """Opens a group for training with prompt number `cursor`. The expected step is a queueing estimate that assumes that
        groups finish in the order offered. A fleet nearly does that; otherwise it is off by about one batch, and the admission
        rule still refuses stale tokens."""
        step = self.next_step + self.in_flight_groups // self.groups_per_step
        name = group_id_of(cursor, retry, is_driven=self.config.agent.is_on)
        spec = GroupSpec(name, prompt[0], self.config.learner.rollouts_per_prompt, prompt[1], step)
        return self.open(spec, cursor, retry)

    def open_question(self, number: int, prompt: Prompt, retry: int, version: Version, samples: int) -> GroupSpec:
        name = group_id_of(number, retry, version, is_driven=self.config.agent.is_on)
        spec = GroupSpec(name, prompt[0], samples, prompt[1], int(version), Work.EVALUATE, version)
        return self.open(spec, number, retry)

    def move_up(self) -> list[GroupSpec]:
        """Moves groups up when groups before them were closed; returns the specs that are due earlier, to be offered again.
        Without this, a group could wait for ever for a version that is newer than its new position requires: the version comes
        only with a step, and the step needs the group."""
        moved: list[GroupSpec] = []
        families: dict[GroupId, list[Group]] = {root: [] for root in self.roots}
        for name, group in self.groups.items():
            if (members := families.get(root_of(name))) is not None:
                members.append(group)
        order = sorted(
            families.values(),
            key=lambda members: (not all(m.is_sampled for m in members), members[0].spec.consume_step),
        )
        for position, members in enumerate(order):
            step = self.next_step + position // self.groups_per_step
            for group in members:
                if step < group.spec.consume_step:  # of sampled ones too: their next turns are opened for the same step
                    group.spec = replace(group.spec, consume_step=step)
                    moved += [] if group.is_sampled else [group.spec]
        return moved

    def open_turn(self, before: TurnOf, inserted: tuple[int, ...]) -> GroupSpec | None:
        """Opens the turn after `before`, with the environment's tokens `inserted` appended; None if the group is gone."""
        asked, root = self.groups.get(before.group_id), self.groups.get(before.root)
        if asked is None or root is None:
            return None
        rollout = asked.rollouts[before.index if before.turn == 0 else 0]
        prompt = asked.spec.prompt_token_ids + rollout.token_ids + inserted
        return self._open_member(root, before.next, prompt, root.spec.sampling, root.spec.sampling)

    def open_call(
        self, root: GroupId, chain: int | None, prompt: tuple[int, ...], sampling: SamplingParams,
        temperature: float | None = None,
    ) -> GroupSpec | None:  # fmt: skip
        """Opens an agent's next call, after the last call of `chain`, which must have ended; `chain` None starts a chain.
        Length and stops come from `sampling`; temperature, top-p and top-k from the problem, but an evaluation may choose
        `temperature`. Returns None if the episode's group is gone. The gateway has checked the prompt: one token or more, all
        the model's."""
        group = self.groups.get(root)
        if group is None or not is_driven_root(root):
            return None
        of_problem = group.spec.sampling
        if temperature is not None and not group.is_training:
            of_problem = replace(of_problem, temperature=temperature)  # may be refused: then no chain was added
        chain = group.add_chain() if chain is None else chain
        return self._open_member(
            group, TurnOf(root, chain, len(self.turns(root, chain)) + 1), prompt, sampling, of_problem
        )

    def _open_member(
        self, root: Group, at: TurnOf, prompt: tuple[int, ...], sampling: SamplingParams, of_problem: SamplingParams
    ) -> GroupSpec:
        """Opens a group of one rollout. A worker cannot choose its seed: it follows from the problem's."""
        sampling = replace(
            sampling, seed=turn_seed(of_problem.seed, at.index, at.turn), temperature=of_problem.temperature,
            top_p=of_problem.top_p, top_k=of_problem.top_k,
        )  # fmt: skip
        spec = replace(root.spec, group_id=at.group_id, prompt_token_ids=prompt, rollout_count=1, sampling=sampling)
        return self.open(spec, root.cursor, root.retry)

    # ---- receiving

    def receive(self, segment: Rollout, attempt: int, sender: PeerId = NOBODY) -> SegmentVerdict:
        """Takes a segment from the lease's `attempt`. The caller must make the rollout durable before it answers ADMITTED."""
        group = self.groups.get(segment.group_id)
        if group is None:
            was_trained = self.ledger.is_trained(root_of(segment.group_id)) and segment.is_finished
            self.counts.duplicate += was_trained
            return self._answer(segment, Verdict.DUPLICATE if was_trained else Verdict.CLOSED, "the group is not open")
        if attempt < group.lease_attempt:
            text = f"attempt {attempt} was superseded by attempt {group.lease_attempt}"
            return self._answer(segment, Verdict.CLOSED, text)
        exact = group.spec.exact_version
        published = [known for known in self.published if known >= group.min_version] if exact is None else [exact]
        problem = problem_of_segment(segment, group.spec, self.vocabulary_size, published)
        if problem is not None:
            newest = max((span.version for span in segment.version_spans), default=Version(0))
            is_undone = newest > self.published[-1] and self.next_step < self.resumed_at + STEPS_REMEMBERED
            return self.refuse(segment, problem, NOBODY if is_undone else sender)
        group.lease_attempt = attempt
        if segment.routing:
            segment = replace(segment, routing=segment.routing.of_rows(len(segment.token_ids), self.row_bytes))
        held = group.rollouts[segment.index]
        if held.is_finished:
            self.counts.duplicate += segment.is_finished and group.is_training
            return self._answer(segment, Verdict.DUPLICATE)
        if segment.offset > len(held.token_ids):
            return self._answer(segment, Verdict.RESEND)
        return self._grow(segment, group, held, sender)

    def _answer(self, segment: Rollout, verdict: Verdict, text: str = "") -> SegmentVerdict:
        group, index = self.groups.get(segment.group_id), segment.index
        held = group.rollouts[index : index + 1] if group is not None and index >= 0 else []
        return SegmentVerdict(segment.group_id, index, verdict, sum(len(each.token_ids) for each in held), text)

    def refuse(self, segment: Rollout, problem: str, impossible_of: PeerId = NOBODY) -> SegmentVerdict:
        """`impossible_of`: the sender, if no honest worker sends such a segment."""
        self.workers.on_impossible(impossible_of, problem)
        self.counts.refused += self.groups[segment.group_id].is_training
        return self._answer(segment, Verdict.REFUSED, f"rollout {segment.index} of group {segment.group_id}: {problem}")

    def take_over(self, group_id: GroupId, attempt: int) -> list[Rollout] | None:
        """The held rollouts, for the worker that continues as `attempt`; None if closed or taken over by a later attempt."""
        group = self.groups.get(group_id)
        if group is None or attempt < group.lease_attempt:
            return None
        group.lease_attempt = attempt
        return list(group.rollouts)

    def _grow(self, segment: Rollout, group: Group, held: Rollout, sender: PeerId) -> SegmentVerdict:
        senders, held_tokens = group.senders.get(segment.index, ()), len(held.token_ids)
        grown = extended(held, segment)
        if grown is None:  # a worker that lost its state may restart the rollout from its first token
            if segment.offset != 0:
                return self.refuse(segment, "its tokens differ from those held of the same positions")
            senders, held_tokens = (), 0
            grown = extended(empty_rollout(segment.group_id, segment.index), segment)
            assert grown is not None, "a segment at offset 0 always fits an empty rollout"
        problem = problem_of_end(grown, held_tokens, group.spec)
        if problem is not None:
            return self.refuse(segment, problem, sender)
        if group.is_training and not self._is_fresh(grown):
            self.close_family(root_of(segment.group_id), "stale")
            text = (
                f"its oldest token is of version {grown.oldest_version}; step {self.next_step} takes "
                f"{self.next_step - self.bound} or newer"
            )
            return self._answer(segment, Verdict.STALE, text)
        senders = extended_senders(senders, sender, len(grown.token_ids) - held_tokens)
        # A worker's versions grow, and S + 2 are there at most; each change costs the audit a forward pass of its own.
        if len(grown.version_spans) > 2 * (self.bound + 2) * max(1, len(senders)):
            return self.refuse(segment, f"expected versions that grow, got {len(grown.version_spans)} changes", sender)
        group.rollouts[segment.index], group.senders[segment.index] = grown, senders
        if len(grown.token_ids) > held_tokens:
            self.workers.on_tokens(sender, segment.group_id, segment.index)
        if not grown.is_finished:
            return self._answer(segment, Verdict.HELD)
        self.workers.on_admission(group.senders[segment.index], sender)
        self.counts.admitted += group.is_training
        return self._answer(segment, Verdict.ADMITTED)

    # ---- rewards

    def reward(self, group_id: GroupId, index: int, reward: float | None) -> None:
        """Records the reward of a finished rollout; None if scoring failed."""
        group = self.groups[group_id]
        group.rewards[index] = reward
        self.counts.dropped_reward_failed += reward is None and group.is_training
        self._judge_ready(group)

    def end_episode(
        self, root: GroupId, chains: Mapping[int, int], reward: float | None, *, is_final: bool
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Records the end of an agent's episode (see `RolloutPool.end_episode`); drops the calls after those that count. Returns
        the chains that count, and the others."""
        group = self.groups[root]
        for chain, count in chains.items():
            for group_id in self.family(root, chain)[count if is_final else 0 :]:
                del self.groups[group_id]
                self.closures.append(Closure(group_id, "unused"))
        counted = tuple(chain for chain, count in chains.items() if count and is_final)
        lost = tuple(chain for chain in chains if chain not in counted)
        group.end_seat(counted, lost, reward, is_final=is_final)
        self.counts.dropped_reward_failed += is_final and reward is None and group.is_training
        self._judge_ready(group)
        return counted, lost

    def _judge_ready(self, group: Group) -> None:
        """Drops a group with complete rewards if all scoring failed, or if the rewards are equal and may be replaced. Rewards that
        differ by rounding noise alone count as equal."""
        if not group.is_ready:
            return
        known = [value for value in group.rewards.values() if value is not None]
        if not known:
            self.close_family(group.spec.group_id, "reward failed")
        elif (
            group.is_training
            and self.config.learner.drop_equal_groups
            and max(known) - min(known) <= 1e-6
            and self.drops_for_step < DROPPED_MAX_RATIO * self.groups_per_step
        ):
            self.counts.dropped_equal_rewards += len(known)
            self.drops_for_step += 1
            self.close_family(group.spec.group_id, "no contrast")

    # ---- drawing

    @property
    def is_batch_ready(self) -> bool:
        """Asked after every call of the pool, so it counts instead of sorting."""
        return sum(group.is_ready for group in self.roots.values()) >= self.groups_per_step

    def draw_batch(self) -> Batch | None:
        """Draws the next batch; None if there are too few complete groups. Its groups are closed and entered in the ledger."""
        self.drop_stale()
        ready = [root for root, group in self.roots.items() if group.is_ready]
        # Those that would go stale first; then in the order of their offers.
        ready.sort(key=lambda root: min(self.groups[name].oldest_version for name in self.family(root)))
        if len(ready) < self.groups_per_step:
            return None
        return self._consume(ready[: self.groups_per_step])

    def draw_recorded(self, group_ids: Sequence[GroupId], rewards: Sequence[Sequence[float | None]]) -> Batch:
        """Draws the batch that the journal recorded: the same groups, in the same order, with the same rewards."""
        for group_id, values in zip(group_ids, rewards, strict=True):
            self.groups[group_id].rewards = dict(enumerate(values))
        return self._consume(group_ids)

    def _consume(self, chosen: Iterable[GroupId]) -> Batch:
        step = self.next_step
        trained: list[TrainGroup] = []
        for name in chosen:
            group = self.train_group(self.groups[name])
            self.ledger.record(name, step, [span for rollout in group.rollouts for span in rollout.version_spans])
            trained.append(group)
            self.counts.trained += len(group.rollouts)
            self.counts.trained_tokens += sum(len(rollout.token_ids) for rollout in group.rollouts)
            self.close_family(name, "complete")
        self.next_step = Step(step + 1)
        self.drops_for_step = 0
        self.ledger.forget_before(Step(self.next_step - STEPS_REMEMBERED))
        return Batch(step, tuple(trained))

    def train_group(self, group: Group) -> TrainGroup:
        """Joins the turns of a complete group's rollouts. Rollouts whose reward failed are left out. No senders are named, so that
        no audit blames them, where an agent's calls had several temperatures."""
        rewards = {i: value for i in range(len(group.rollouts)) if (value := group.rewards.get(i)) is not None}
        turns = {i: self.turns(group.spec.group_id, i) for i in rewards}
        opening, spec, is_alike = None, group.spec, True
        if is_driven(spec.group_id):
            opening = common_beginning([each[0][0].spec.prompt_token_ids for each in turns.values()])
            # In an evaluation an agent may choose the temperatures of its calls. An audit knows one: the group's.
            temperatures = {asked.spec.sampling.temperature for each in turns.values() for asked, _ in each}
            is_alike = len(temperatures) == 1
            sampling = replace(spec.sampling, temperature=temperatures.pop())
            spec = replace(spec, prompt_token_ids=opening, rollout_count=len(group.rollouts), sampling=sampling)
        whole = [joined(each, i, opening) for i, each in turns.items()]
        return TrainGroup(
            spec, group.cursor, tuple(rollout for rollout, _, _ in whole), tuple(rewards.values()),
            tuple(insertions for _, insertions, _ in whole) if any(insertions for _, insertions, _ in whole) else (),
            tuple(senders if is_alike else () for _, _, senders in whole),
        )  # fmt: skip

    # ---- versions and closing

    def publish(self, version: Version) -> None:
        assert version > self.published[-1], f"version {version} after {self.published[-1]}"
        floor = self.next_step - self.bound - STEPS_REMEMBERED
        self.published = [known for known in (*self.published, version) if known >= floor]

    def _is_fresh(self, rollout: Rollout) -> bool:
        oldest = rollout.oldest_version
        return oldest is None or is_admissible(self.next_step, oldest, self.bound)

    def drop_stale(self) -> None:
        stale = [group for group in self.training if not all(map(self._is_fresh, group.rollouts))]
        self._close_roots(stale, "stale")

    def drop_sent_by(self, peer_id: PeerId) -> None:
        """Closes every group with a token that this worker reported; their prompts get another try."""
        self._close_roots([group for group in self.groups.values() if group.is_sent_by(peer_id)], "quarantined")

    def draw_again(self, is_current: Callable[[GroupSpec], bool]) -> None:
        """After a restart, closes problems whose agents had not finished, for they are gone, and all that the run would draw
        otherwise now; both are drawn again."""
        self._close_roots([g for g in self.roots.values() if g.seats_open or not is_current(g.spec)], "restarted")

    def drop_evaluation(self) -> None:
        for group_id in [group.spec.group_id for group in self.evaluation]:
            del self.groups[group_id]
            self.closures.append(Closure(group_id, "evaluation over"))

    def _close_roots(self, members: Iterable[Group], reason: str) -> None:
        for root in dict.fromkeys(root_of(member.spec.group_id) for member in members):
            self.close_family(root, reason)

    def close_family(self, root: GroupId, reason: str) -> None:
        group = self.groups[root]
        if group.is_training:
            self.counts.dropped_stale += group.begun_rollouts if reason == "stale" else 0
            self.counts.dropped_quarantined += group.begun_rollouts if reason == "quarantined" else 0
        is_retried = reason in ("stale", "quarantined") and group.retry < RETRIES_MAX[group.spec.work]
        again = (group.cursor, group.retry + 1) if is_retried or reason == "restarted" else None
        for group_id in self.family(root):
            del self.groups[group_id]
            self.closures.append(Closure(group_id, reason, again if group_id == root else None))
        self.roots.pop(root, None)

    def take_closures(self) -> list[Closure]:
        closures, self.closures = self.closures, []
        return closures


# ---- what no honest worker sends, whatever its engine's numerical noise


def problem_of_segment(
    segment: Rollout, spec: GroupSpec, vocabulary_size: int, published: Collection[Version]
) -> str | None:
    """Checks a segment by itself, before it is appended to the held tokens. Returns what was expected and what came."""
    if not 0 <= segment.index < spec.rollout_count:
        return f"expected an index of 0 to {spec.rollout_count - 1}, got {segment.index}"
    if any(not 0 <= token < vocabulary_size for token in segment.token_ids):
        return f"expected token ids of 0 to {vocabulary_size - 1}, got {max(segment.token_ids)}"
    unknown = [span.version for span in segment.version_spans if span.version not in published]
    if unknown:
        known = f"{min(published)} to {max(published)}" if published else "that are still to come"
        return f"expected published versions {known}, got {unknown[0]}"
    if segment.is_finished and segment.offset == 0 and not segment.token_ids:
        return "expected at least one token in a finished rollout, got none"
    if spec.sampling.temperature != 1.0:
        return None
    # At temperature 1, a token's two numbers are equal without a filter, and a filter can only make a sampled token more likely.
    for at, (logprob, raw) in enumerate(zip(segment.logprobs, segment.raw_logprobs, strict=True)):
        if raw > logprob + RELATION_NATS or (not spec.sampling.is_filtered and raw < logprob - RELATION_NATS):
            return (
                f"expected the raw log-probability of token {segment.offset + at} to be "
                f"{'at most' if spec.sampling.is_filtered else ''} that of sampling at temperature 1, {logprob:.6g}, got {raw:.6g}"
            )
    return None


def problem_of_end(grown: Rollout, held_tokens: int, spec: GroupSpec) -> str | None:
    """Checks a rollout that a segment has extended beyond the `held_tokens` held before: it must end where the sampling
    parameters require, and nowhere else."""
    sampling, count = spec.sampling, len(grown.token_ids)
    if count > sampling.max_new_tokens:
        return f"expected at most {sampling.max_new_tokens} tokens, got {count}"
    stops = set(sampling.stop_token_ids)
    early = [token for token in grown.token_ids[max(0, held_tokens - 1) : -1] if token in stops]
    if early:
        return f"expected it to end with its first stop token, got {early[0]} before its last token"
    at_string = sampling.string_stop(grown.token_ids, max(0, held_tokens - 1))
    if at_string is not None and at_string < count - 1:
        return f"expected it to end with its first stop string, got {count - 1 - at_string} tokens behind it"
    is_at_stop = grown.token_ids[-1:] and (
        grown.token_ids[-1] in stops or sampling.string_stop(grown.token_ids, count - 1) is not None
    )
    match grown.finish_reason:
        case FinishReason.STOP if (stops or sampling.stop_strings) and not is_at_stop:
            return f"expected a stop token at its end, one of {sampling.stop_token_ids}, got {grown.token_ids[-1]}"
        case FinishReason.LENGTH if count < sampling.max_new_tokens:
            return f"expected {sampling.max_new_tokens} tokens where it ends for its length, got {count}"
        case _:
            return None
