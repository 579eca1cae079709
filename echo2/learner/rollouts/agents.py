"""The learner's side of the gateway: hands problems to agents, leases their calls, takes in their episodes' rewards.

Guarantees: a call is leased like any other group, under the run's sampling, the staleness rule and seeds that the client cannot
choose; training uses only what workers reported.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from echo2.base.errors import EchoError, TaskError
from echo2.base.ids import GroupId
from echo2.base.rollout import GroupSpec, Work
from echo2.config.run import RunConfig
from echo2.gateway.app import GatewayApp, GatewayPort
from echo2.gateway.episodes import Episodes, GatewayLimits, Scored
from echo2.gateway.harness import make_harness
from echo2.learner.rollouts.groups import turn_of
from echo2.learner.rollouts.pool import RolloutPool
from echo2.learner.rollouts.prompts import PromptWorld
from echo2.learner.rollouts.workers import FailureStreak
from echo2.outside import here, monotonic
from echo2.outside.guard import Refusals, Tasks
from echo2.trust.tls import read_secret, write_secret

KEY_FILE = "gateway.key"
EPISODES_AT_ONCE = 64  # episodes that echo2 plays, each in a thread of its own
_log = logging.getLogger("echo2.learner")


class Agents:
    """Runs the gateway of a learner whose prompts come from agents; plays the pool's groups. `fail`: ends the run with an error."""

    def __init__(
        self, config: RunConfig, folder: Path, pool: RolloutPool, fail: Callable[[BaseException], None]
    ) -> None:
        self._section, self._pool, self._fail = config.agent, pool, fail
        self._prompts = prompts = pool.prompts
        self.failures = FailureStreak("episodes", config.learner.rollouts_per_step)
        self._refusals = Refusals(_log)
        # By group: the instance's index and its world; None: the run's own.
        self._problems: dict[str, tuple[int, PromptWorld | None]] = {}
        limits = GatewayLimits(
            prompts.context_tokens, prompts.sampling.max_new_tokens, prompts.vocabulary_size,
            prompts.stop_strings.longest_bytes, idle_s=config.agent.episode_timeout / 6,
            episode_s=config.agent.episode_timeout, harnesses_max=EPISODES_AT_ONCE,
        )  # fmt: skip
        harness = make_harness(config.agent.harness)
        self._port = GatewayPort(config.agent.listen, config.agent.tls)
        self.url = f"{self._port.url}/v1"
        self.episodes = Episodes(
            limits, prompts.chat, self, monotonic, lambda: here().rng.randbytes(24).hex(), harness, self.url
        )
        self.key_file = folder / KEY_FILE
        self._app = GatewayApp(self.episodes, config.run.name, gateway_key(folder), prompts.stop_strings.bytes_of)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        begin = Tasks(self._fail).start
        self._tasks = [begin(self._port.run(self._app.application())), begin(self.episodes.run())]

    async def close(self) -> None:
        await self.episodes.close()
        if self._tasks:
            self._tasks[1].cancel()
        await self._port.stop(self._tasks[0] if self._tasks else None)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def lacks(self) -> str:
        """What keeps episodes from being played; empty: nothing."""
        if not self._section.harness and not self.episodes.sessions:
            return f"no program plays an episode at {self.url}"
        return self.failures.text

    def numbers(self) -> Mapping[str, float]:
        counts = self.episodes.counts
        return {
            "agents/open": len(self.episodes.sessions),
            "agents/calls": counts.calls,
            "agents/branches": counts.branches,
            "agents/restarted": counts.restarted,
            "agents/dropped": counts.dropped,
            "agents/timed_out": counts.timed_out,
            "agents/kept_share": counts.kept_tokens / max(1, counts.prompt_tokens),
        }

    # ---- for the pool

    def drive(self, spec: GroupSpec, cursor: int) -> None:
        prompts, is_evaluation = self._prompts, spec.work is Work.EVALUATE
        world: PromptWorld | None = None
        if is_evaluation:
            instance, world = self._pool.evaluations.problem(cursor)
        else:
            instance = prompts.instance(prompts.split.train_index(cursor))
        self._problems[spec.group_id] = instance.index, world
        prompt = instance.prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [
            {"role": message.role, "content": message.content} for message in prompt
        ]  # fmt: skip
        description: dict[str, object] = {
            "index": instance.index, "messages": messages, "answer": instance.answer,
            "metadata": dict(instance.metadata),
        }  # fmt: skip
        if world is None and prompts.is_mixed:
            description["task"] = prompts.name_of(instance.index)
        if is_evaluation:
            description["evaluation"] = self._pool.evaluations.at(cursor)[0].name
        self.episodes.open_problem(spec.group_id, spec.rollout_count, description, is_evaluation=is_evaluation)

    def on_closed(self, group_ids: Sequence[GroupId], reason: str) -> None:
        for group_id in group_ids:
            if self._problems.pop(group_id, None) is not None:
                self.episodes.close_problem(group_id, reason)

    # ---- as the gateway's fleet

    def lease(
        self, root: str, chain: int | None, prompt: tuple[int, ...], max_tokens: int, stops: tuple[str, ...],
        temperature: float | None,
    ) -> tuple[str, int] | None:  # fmt: skip
        run = self._prompts.sampling
        texts = tuple(dict.fromkeys((*(text.decode() for text in run.stop_strings), *stops)))
        try:
            piece_ids, pieces = self._prompts.stop_strings.pieces_of(texts)
        except EchoError as error:
            self._refusals.warn("a call's own stop strings end its text, but not its sampling: %s", error)
            piece_ids, pieces, texts = run.stop_piece_ids, run.stop_pieces, tuple(t.decode() for t in run.stop_strings)
        sampling = replace(
            run, max_new_tokens=max_tokens, stop_strings=tuple(text.encode() for text in texts),
            stop_piece_ids=piece_ids, stop_pieces=pieces,
        )  # fmt: skip
        group_id = self._pool.open_call(GroupId(root), chain, prompt, sampling, temperature)
        return None if group_id is None else (group_id, turn_of(group_id, 0).index)

    def end_episode(
        self, root: str, chains: Mapping[int, int], outcome: Scored | str, *, is_final: bool, is_starved: bool = False
    ) -> None:
        reward, parts = (None, {}) if isinstance(outcome, str) else outcome
        if not isinstance(outcome, str):
            self.failures.on_success()
        elif self._section.harness and not is_starved and (too_many := self.failures.on_failure(outcome)):
            self._fail(TaskError(f"agent.harness {self._section.harness}: {too_many}"))
        self._pool.end_episode(GroupId(root), chains, reward, parts, is_final=is_final)

    async def score(self, root: str, token_ids: tuple[int, ...]) -> Scored | str:
        problem = self._problems.get(root)
        if problem is None:
            return "its group is closed"
        index, world = problem
        scored = await self._prompts.answer_instance(index, [token_ids], 0, world=world)
        if scored.reply:
            return "expected a task that scores one completion, got an environment"
        if scored.reward is None:
            return scored.message
        return scored.reward.value, scored.reward.parts


def gateway_key(folder: Path) -> str:
    """The gateway's key in the run's folder, made once."""
    file = folder / KEY_FILE
    if not file.exists():
        write_secret(file, here().rng.randbytes(32).hex().encode())
    return read_secret(file).decode().strip()
