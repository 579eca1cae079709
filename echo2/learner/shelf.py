"""The groups that the batcher holds, from the offer to the batch: which tokens are admitted, which groups are trained next.

Guarantees: no batch has a token over the staleness bound (one rule, checked on arrival and again when a batch is drawn);
a group enters at most one batch (ledger); a batch is R/n complete groups, those that would go stale first. A group whose
tokens can no longer be trained on is closed and counted, and its prompt is offered again under another id, a limited number of
times. Leaves to others: reporting this (batcher; once the run has begun, no other code changes a shelf).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from echo2.base.ids import GroupId, PeerId, Step, Version
from echo2.base.noise import turn_seed
from echo2.base.rollout import (
    FinishReason,
    GroupSpec,
    Rollout,
    RolloutSegment,
    SamplingParams,
    SegmentVerdict,
    Verdict,
)
from echo2.learner.batch import Batch, TrainGroup
from echo2.learner.deliveries import Deliveries
from echo2.learner.episodes import (
    NOBODY,
    Turn,
    TurnOf,
    check_prompt,
    common_beginning,
    extended_senders,
    is_later_turn,
    joined,
    root_of,
    turn_of,
)
from echo2.learner.group import Draw, Group, add_chain, end_seat, group_id_of, is_driven, is_driven_root, opened_group
from echo2.learner.plausible import problem_of_end, problem_of_segment
from echo2.learner.segment import empty_rollout, extended
from echo2.learner.selection import DynamicSampling, GroupVerdict, PruningRule
from echo2.learner.untruths import Untruths
from echo2.staleness.ledger import Ledger
from echo2.staleness.rule import is_admissible

LEDGER_STEPS_KEPT = 256
"""For how many steps the ledger remembers a trained group's id. A late copy of its rollouts is answered DUPLICATE in that
time and CLOSED afterwards. It cannot be trained on again either way, because the group is not open."""


@dataclass(frozen=True, slots=True)
class ShelfConfig:
    """S (`staleness_bound`), R (`rollouts_per_step`), n (`rollouts_per_group`) and the rules for groups."""

    staleness_bound: int
    rollouts_per_step: int
    rollouts_per_group: int
    vocabulary_size: int
    retries_max: int = 2  # how often a prompt is offered again after its group went stale or was quarantined
    drops_equal_rewards: bool = False  # replaces groups with equal rewards (no gradient), within a bound
    pruning: PruningRule | None = None  # gives up on hopeless rollouts while they are sampled
    is_driven: bool = False  # prompts come from agents, call by call

    @property
    def groups_per_step(self) -> int:
        return self.rollouts_per_step // self.rollouts_per_group

    @property
    def dynamic_sampling(self) -> DynamicSampling:
        """Drops at most twice the groups of a step; if switched off, drops none."""
        return DynamicSampling(self.groups_per_step, 2.0 if self.drops_equal_rewards else 0.0)


@dataclass(frozen=True, slots=True)
class Closure:
    """A closed group. `retry`: the draw that replaces it, if its prompt gets another try."""

    group_id: GroupId
    reason: str  # complete | stale | quarantined | no contrast | reward failed | unused | restarted
    retry: Draw | None = None


@dataclass(slots=True)
class Counts:
    """Rollouts by outcome, counted since the run began."""

    admitted: int = 0
    duplicate: int = 0
    refused: int = 0
    dropped_stale: int = 0
    dropped_quarantined: int = 0
    dropped_equal_rewards: int = 0
    dropped_reward_failed: int = 0
    pruned: int = 0
    trained: int = 0
    trained_tokens: int = 0


@dataclass(slots=True)
class Shelf:
    """The open groups. `next_step`: the step of the next batch to be drawn. `published`: versions that workers may name."""

    config: ShelfConfig
    ledger: Ledger
    next_step: Step = field(default_factory=lambda: Step(0))
    published: list[Version] = field(default_factory=lambda: [Version(0)])
    groups: dict[GroupId, Group] = field(default_factory=dict)
    closures: list[Closure] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    drops_for_step: int = 0
    untruths: Untruths = field(default_factory=Untruths)
    deliveries: Deliveries = field(default_factory=Deliveries)

    # ---- offering

    def open_group(self, draw: Draw, consume_step: int) -> GroupSpec:
        """Opens a draw's group. The same draw always gives the same id, prompt and seed."""
        group_id = group_id_of(draw.cursor, draw.retry, is_driven=self.config.is_driven)
        assert group_id not in self.groups, f"group {group_id} is open already"
        sampling = draw.sampling
        spec = GroupSpec(group_id, draw.prompt_token_ids, self.config.rollouts_per_group, sampling, consume_step)
        self.open(spec, draw)
        return spec

    def open(self, spec: GroupSpec, draw: Draw) -> None:
        """Opens the group of a given spec."""
        self.groups[spec.group_id] = opened_group(spec, draw)

    def move_up(self) -> list[GroupSpec]:
        """Moves groups up when groups before them were closed; returns the specs that are due earlier, to be offered again.

        Without this, a group could wait for ever for a version that is newer than its new place requires: the version comes
        only with a step, and the step needs the group.
        """
        moved: list[GroupSpec] = []
        families = [self._members(group_id) for group_id in self.groups if not is_later_turn(group_id)]
        families.sort(key=lambda members: (not all(m.is_sampled for m in members), members[0].spec.consume_step))
        for place, members in enumerate(families):
            step = self.next_step + place // self.config.groups_per_step
            for group in members:
                if step < group.spec.consume_step and not group.is_sampled:
                    group.spec = replace(group.spec, consume_step=step)
                    moved.append(group.spec)
        return moved

    def open_turn(self, before: TurnOf, said: tuple[int, ...]) -> GroupSpec | None:
        """Opens the turn after `before`, with the environment's tokens `said` appended; None if the group is gone."""
        asked = self.groups.get(before.group_id)
        root = self.groups.get(before.root)
        if asked is None or root is None:
            return None
        rollout = asked.rollouts[before.index if before.turn == 0 else 0]
        following = replace(before, turn=before.turn + 1)
        seed = turn_seed(root.spec.sampling.seed, before.index, following.turn)
        sampling = replace(root.spec.sampling, seed=seed)
        prompt = asked.spec.prompt_token_ids + rollout.token_ids + said
        spec = replace(
            root.spec, group_id=following.group_id, prompt_token_ids=prompt, rollout_count=1, sampling=sampling
        )
        self.open(spec, replace(root.draw, prompt_token_ids=prompt, sampling=sampling))
        return spec

    # ---- agents

    def open_call(
        self,
        root: GroupId,
        chain: int | None,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        temperature: float | None = None,
    ) -> GroupSpec | None:
        """Opens an agent's next call, after the last call of `chain`, which must have ended; `chain` None starts a chain. Length
        and stops come from `sampling`; temperature, top-p and top-k from the problem, unless `temperature` is given.

        Returns None if the episode's group is gone. Raises `MalformedMessage` if the model lacks a token of the prompt.
        """
        check_prompt(root, prompt, self.config.vocabulary_size)
        group = self.groups.get(root)
        if group is None or not is_driven_root(root):
            return None
        chain = add_chain(group) if chain is None else chain
        depth = len(self.turns(root, chain)) + 1
        own = group.spec.sampling if temperature is None else replace(group.spec.sampling, temperature=temperature)
        seed = turn_seed(own.seed, chain, depth)
        spec = replace(
            group.spec,
            group_id=TurnOf(root, chain, depth).group_id,
            prompt_token_ids=prompt,
            rollout_count=1,
            sampling=replace(sampling, seed=seed, temperature=own.temperature, top_p=own.top_p, top_k=own.top_k),
        )
        self.open(spec, replace(group.draw, prompt_token_ids=prompt, sampling=spec.sampling))
        return spec

    def end_episode(self, root: GroupId, chains: Mapping[int, int], reward: float | None, *, is_final: bool) -> None:
        """Carries out `EpisodeEnded`; drops the calls after those that count."""
        group = self.groups.get(root)
        if group is None:
            return
        for chain, kept in chains.items():
            for group_id in self.family(root, chain)[kept if is_final else 0 :]:
                del self.groups[group_id]
                self.closures.append(Closure(group_id, "unused"))
        counted = [chain for chain, kept in chains.items() if kept and is_final]
        end_seat(group, [chain for chain in chains if chain not in counted], None, is_final=False)
        end_seat(group, counted, reward, is_final=is_final)
        self.counts.dropped_reward_failed += is_final and reward is None
        self._judge_ready(group)

    def drop_unfinished_episodes(self) -> None:
        """After a restart, closes problems whose agents had not finished, to be drawn again: the agents are gone."""
        for group_id, group in list(self.groups.items()):
            if is_driven_root(group_id) and group.seats_open:
                self._drop(group, "restarted")

    def turns(self, root: GroupId, index: int) -> list[Turn]:
        """The turns of one rollout so far, including the one being sampled."""
        found: list[Turn] = []
        at = TurnOf(root, index, 1 if is_driven(root) else 0)
        while (group := self.groups.get(at.group_id)) is not None:
            place = index if at.turn == 0 else 0
            senders = group.senders.get(place, ())
            found.append(Turn(group.spec.prompt_token_ids, group.rollouts[place], senders))
            at = replace(at, turn=at.turn + 1)
        return found

    def incomplete_specs(self) -> list[GroupSpec]:
        """Groups that still need a worker, oldest first."""
        return [group.spec for group in self.groups.values() if not group.is_sampled]

    def held_tokens(self, group_id: GroupId) -> int:
        """Number of the group's tokens that have arrived."""
        return sum(len(rollout.token_ids) for rollout in self.groups[group_id].rollouts)

    @property
    def in_flight_groups(self) -> int:
        """Groups offered or buffered. Groups drawn into a batch do not count, nor do the groups of later turns."""
        return sum(not is_later_turn(group_id) for group_id in self.groups)

    @property
    def open_rollouts(self) -> int:
        return sum(not rollout.is_finished for group in self.groups.values() for rollout in group.rollouts)

    @property
    def buffered_rollouts(self) -> int:
        """Rollouts whose turns so far are all finished."""
        turns = (1 if is_later_turn(group_id) else 0 for group_id, g in self.groups.items() if not g.is_sampled)
        firsts = (group for group_id, group in self.groups.items() if not is_later_turn(group_id))
        return sum(rollout.is_finished for group in firsts for rollout in group.rollouts) - sum(turns)

    # ---- receiving

    def receive(self, segment: RolloutSegment, attempt: int, sender: PeerId = NOBODY) -> SegmentVerdict:
        """Takes a segment from the lease's `attempt`. The caller must make the rollout durable before it answers ADMITTED."""
        group = self.groups.get(segment.group_id)
        if group is None:
            return self._verdict_on_closed(segment)
        if attempt < group.lease_attempt:
            text = f"attempt {attempt} was superseded by attempt {group.lease_attempt}"
            return SegmentVerdict(segment.group_id, segment.index, Verdict.CLOSED, 0, text)
        problem = problem_of_segment(segment, group.spec, self.config.vocabulary_size, self.published)
        if problem is not None:
            self.untruths.told(sender, problem)
            return self._refused(segment, problem, group)
        group.lease_attempt = attempt
        held = group.rollouts[segment.index]
        if held.is_finished:
            self.counts.duplicate += segment.is_final
            return self._answer(segment, Verdict.DUPLICATE, group)
        if segment.offset > len(held.token_ids):
            return self._answer(segment, Verdict.RESEND, group)
        return self._grow(segment, group, held, sender)

    def held_rollouts(self, group_id: GroupId, attempt: int) -> list[Rollout] | None:
        """The held rollouts, for the worker that continues as `attempt`; None if closed or taken over by a later attempt."""
        group = self.groups.get(group_id)
        if group is None or attempt < group.lease_attempt:
            return None
        group.lease_attempt = attempt
        return list(group.rollouts)

    def _grow(self, segment: RolloutSegment, group: Group, held: Rollout, sender: PeerId) -> SegmentVerdict:
        senders, held_tokens = group.senders.get(segment.index, ()), len(held.token_ids)
        grown = extended(held, segment)
        if grown is None:  # a worker that lost its state may restart the rollout from its first token
            if segment.offset != 0:
                return self._refused(segment, "its tokens differ from those held of the same positions", group)
            senders, held_tokens = (), 0
            grown = extended(empty_rollout(segment.group_id, segment.index), segment)
            assert grown is not None, "a segment at offset 0 always fits an empty rollout"
        problem = problem_of_end(grown, held_tokens, group.spec)
        if problem is not None:
            self.untruths.told(sender, problem)
            return self._refused(segment, problem, group)
        if not self._is_fresh(grown, self.next_step):
            self._drop(group, "stale")
            return SegmentVerdict(segment.group_id, segment.index, Verdict.STALE, 0, self._stale_text(grown))
        if not grown.is_finished and self._is_hopeless(grown, group):
            grown = replace(grown, finish_reason=FinishReason.LENGTH)
            group.pruned += 1
            self.counts.pruned += 1
        group.rollouts[segment.index] = grown
        group.senders[segment.index] = extended_senders(senders, sender, len(grown.token_ids) - held_tokens)
        if len(grown.token_ids) > held_tokens:
            self.deliveries.heard(sender, segment.group_id, segment.index)
        if not grown.is_finished:
            return self._answer(segment, Verdict.HELD, group)
        self.deliveries.admitted(group.senders[segment.index])
        self.counts.admitted += 1
        self.untruths.admitted(sender)
        return self._answer(segment, Verdict.ADMITTED, group)

    def _is_hopeless(self, rollout: Rollout, group: Group) -> bool:
        """Whether to give up on a rollout in progress. It is then admitted as it is, which tells its worker to stop."""
        rule = self.config.pruning
        if rule is None or not rule.may_prune(len(group.rollouts), group.pruned):
            return False
        numbers = group.spec.sampling.trained_logprobs(rollout.logprobs, rollout.raw_logprobs)
        return rule.reason(rollout.token_ids, numbers) is not None

    def _verdict_on_closed(self, segment: RolloutSegment) -> SegmentVerdict:
        was_trained = self.ledger.is_trained(root_of(segment.group_id)) and segment.is_final
        self.counts.duplicate += was_trained
        verdict = Verdict.DUPLICATE if was_trained else Verdict.CLOSED
        return SegmentVerdict(segment.group_id, segment.index, verdict, 0, "the group is not open")

    def _refused(self, segment: RolloutSegment, problem: str, group: Group) -> SegmentVerdict:
        self.counts.refused += 1
        index = segment.index
        held = len(group.rollouts[index].token_ids) if 0 <= index < len(group.rollouts) else 0
        text = f"rollout {index} of group {segment.group_id}: {problem}"
        return SegmentVerdict(segment.group_id, index, Verdict.REFUSED, held, text)

    def _answer(self, segment: RolloutSegment, verdict: Verdict, group: Group) -> SegmentVerdict:
        held = len(group.rollouts[segment.index].token_ids)
        return SegmentVerdict(segment.group_id, segment.index, verdict, held)

    # ---- rewards

    def reward(self, group_id: GroupId, index: int, reward: float | None) -> None:
        """Records the reward of a finished rollout; None if scoring failed. Ignored if the group is gone."""
        group = self.groups.get(group_id)
        if group is None or not group.rollouts[index].is_finished:
            return
        group.rewards[index] = reward
        group.scored.add(index)
        self.counts.dropped_reward_failed += reward is None
        self._judge_ready(group)

    def _judge_ready(self, group: Group) -> None:
        """Drops a group with complete rewards if all scoring failed, or if the rewards are equal and may be replaced."""
        if not group.is_ready:
            return
        known = [value for value in group.rewards.values() if value is not None]
        if not known:
            self._drop(group, "reward failed")
        elif self.config.dynamic_sampling.verdict(known, self.drops_for_step) is GroupVerdict.DROP:
            self.counts.dropped_equal_rewards += len(known)
            self.drops_for_step += 1
            self._drop(group, "no contrast")

    # ---- drawing

    @property
    def is_batch_ready(self) -> bool:
        """Called after every event, so it counts instead of sorting."""
        return sum(group.is_ready for group in self.groups.values()) >= self.config.groups_per_step

    def draw_batch(self) -> Batch | None:
        """Draws the next batch; None if there are too few complete groups. Its groups are closed and entered in the ledger."""
        self.drop_stale()
        ready = self._ready()[: self.config.groups_per_step]
        if len(ready) < self.config.groups_per_step:
            return None
        return self._consume(ready)

    def draw_recorded(self, group_ids: Sequence[GroupId], rewards: Sequence[Sequence[float | None]]) -> Batch:
        """Draws the batch that the journal recorded: the same groups, in the same order, with the same rewards."""
        for group_id, values in zip(group_ids, rewards, strict=True):
            group = self.groups[group_id]
            group.rewards = dict(enumerate(values))
            group.scored = set(range(len(values)))
        return self._consume([self.groups[group_id] for group_id in group_ids])

    def _consume(self, chosen: Iterable[Group]) -> Batch:
        step = self.next_step
        trained: list[TrainGroup] = []
        for group in chosen:
            made = self.train_group(group)
            spans = [span for rollout in made.rollouts for span in rollout.version_spans]
            self.ledger.record(group.spec.group_id, step, spans)
            trained.append(made)
            self.counts.trained += len(made.rollouts)
            self.counts.trained_tokens += sum(len(rollout.token_ids) for rollout in made.rollouts)
            for group_id in self.family(group.spec.group_id):
                del self.groups[group_id]
                self.closures.append(Closure(group_id, "complete"))
        self.next_step = Step(step + 1)
        self.drops_for_step = 0
        self.ledger.forget_before(Step(self.next_step - LEDGER_STEPS_KEPT))
        return Batch(step, tuple(trained))

    def train_group(self, group: Group) -> TrainGroup:
        """Joins the turns of a complete group's rollouts, for training. Rollouts whose reward failed are left out."""
        kept = [i for i in range(len(group.rollouts)) if group.rewards.get(i) is not None]
        rewards = tuple(value for i in kept if (value := group.rewards[i]) is not None)
        turns = {i: self.turns(group.spec.group_id, i) for i in kept}
        opening, spec = None, group.spec
        if is_driven(spec.group_id):
            opening = common_beginning([turns[i][0].prompt_token_ids for i in kept])
            spec = replace(spec, prompt_token_ids=opening, rollout_count=len(group.rollouts))
        whole = [joined(turns[i], i, opening) for i in kept]
        has_turns = any(one.insertions for one in whole)
        return TrainGroup(
            spec,
            group.draw.cursor,
            tuple(one.rollout for one in whole),
            rewards,
            tuple(one.insertions for one in whole) if has_turns else (),
            tuple(one.senders for one in whole),
        )

    def family(self, root: GroupId, index: int | None = None) -> list[GroupId]:
        """The ids of a group and its rollouts' later turns; with `index`, only that rollout's later turns."""
        found = [root] if index is None else []
        for place in range(len(self.groups[root].rollouts)) if index is None else (index,):
            at = TurnOf(root, place, 1)
            while at.group_id in self.groups:
                found.append(at.group_id)
                at = replace(at, turn=at.turn + 1)
        return found

    def _members(self, root: GroupId) -> list[Group]:
        return [self.groups[group_id] for group_id in self.family(root)]

    def _ready(self) -> list[Group]:
        """Complete, scored groups: those that will go stale first, then in the order of their offers."""
        ready = [group for group in self.groups.values() if group.is_ready]
        return sorted(ready, key=self._oldest_version)

    def _oldest_version(self, group: Group) -> Version:
        return min(member.oldest_version for member in self._members(group.spec.group_id))

    # ---- staleness

    def drop_stale(self) -> None:
        """Closes every group with a token that is too old for the next step."""
        for group_id, group in list(self.groups.items()):
            if group_id in self.groups and not all(
                self._is_fresh(rollout, self.next_step) for rollout in group.rollouts
            ):
                self._drop(group, "stale")

    def drop_sent_by(self, peer_id: PeerId) -> None:
        """Closes every group with a token that this worker reported; their prompts get another try."""
        for group_id, group in list(self.groups.items()):
            if group_id in self.groups and any(
                sent.peer_id == peer_id for senders in group.senders.values() for sent in senders
            ):
                self._drop(group, "quarantined")

    def publish(self, version: Version) -> None:
        """From now on workers may name `version`."""
        assert version > self.published[-1], f"version {version} after {self.published[-1]}"
        self.published.append(version)
        # Versions are remembered for 256 steps past the bound, so that late tokens are refused as stale, not as false.
        floor = self.next_step - self.config.staleness_bound - 256
        self.published = [known for known in self.published if known >= floor]

    def _is_fresh(self, rollout: Rollout, step: Step) -> bool:
        oldest = rollout.oldest_version
        return oldest is None or is_admissible(step, oldest, self.config.staleness_bound)

    def _stale_text(self, rollout: Rollout) -> str:
        return (
            f"its oldest token is of version {rollout.oldest_version}; step {self.next_step} takes "
            f"{self.next_step - self.config.staleness_bound} or newer"
        )

    def _drop(self, member: Group, reason: str) -> None:
        """Closes a group with all turns of its rollouts. `member`: the group, or the group of any of its turns."""
        group = self.groups[turn_of(member.spec.group_id, 0).root]
        retry = None
        if reason == "stale":
            self.counts.dropped_stale += group.begun_rollouts
        if reason == "quarantined":
            self.counts.dropped_quarantined += group.begun_rollouts
        is_retried = reason in ("stale", "quarantined") and group.draw.retry < self.config.retries_max
        if is_retried or reason == "restarted":
            retry = group.draw.again()
        for group_id in self.family(group.spec.group_id):
            del self.groups[group_id]
            self.closures.append(Closure(group_id, reason, retry if group_id == group.spec.group_id else None))

    def take_closures(self) -> list[Closure]:
        """Returns the groups closed since the last call."""
        taken, self.closures = self.closures, []
        return taken
