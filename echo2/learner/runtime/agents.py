"""The learner's side of the gateway: hands problems to agents, leases their calls, takes in their episodes' rewards.

Guarantees: a call is leased like any other group, under the run's sampling, the staleness rule and seeds that the client cannot
choose; training uses only what workers reported. Leaves to others: clients and their requests (gateway), admission and batches
(batcher).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from echo2.base.errors import EchoError
from echo2.base.ids import GroupId
from echo2.base.rollout import FinishReason, GroupSpec, Rollout, Work
from echo2.gateway import events as e
from echo2.gateway.limits import GatewayLimits
from echo2.gateway.runtime.app import GatewayApp
from echo2.gateway.runtime.desk import GatewayDesk
from echo2.gateway.runtime.harness import Harnesses, make_harness
from echo2.gateway.runtime.reading import ChatReading
from echo2.gateway.runtime.server import GatewayPort
from echo2.gateway.sessions import Sessions
from echo2.learner import batcher_events as b
from echo2.learner.episodes import turn_of
from echo2.learner.group import Draw
from echo2.learner.runtime.examination import Examination
from echo2.learner.runtime.intake import IntakeOutcome
from echo2.learner.runtime.options import AgentOptions
from echo2.learner.runtime.prompts import Prompts
from echo2.learner.runtime.world import PromptWorld
from echo2.outside import here, monotonic
from echo2.outside.guard import Refusals
from echo2.tasks.task import TaskInstance
from echo2.trust.runtime.tls import read_secret, write_secret

KEY_FILE = "gateway.key"
_log = logging.getLogger("echo2.learner")
Tell = Callable[[b.Event], IntakeOutcome]


class Agents:
    """Runs the gateway of a learner whose prompts come from agents. `tell`: passes an event to the intake. `failed`: ends the run
    with an error."""

    def __init__(
        self,
        options: AgentOptions,
        folder: Path,
        prompts: Prompts,
        examination: Examination,
        tell: Tell,
        failed: Callable[[BaseException], None],
    ) -> None:
        self._options, self._prompts, self._tell, self._failed = options, prompts, tell, failed
        self._examination = examination
        self._refusals = Refusals(_log)
        # By group: the instance's index and its world; None: the run's own.
        self._problems: dict[str, tuple[int, PromptWorld | None]] = {}
        limits = GatewayLimits(
            prompts.context_tokens, prompts.sampling.max_new_tokens, prompts.vocabulary_size,
            prompts.stop_strings.longest_bytes, idle_s=options.idle_s, episode_s=options.episode_s,
            restarts_max=options.restarts_max, harnesses_max=options.at_once,
        )  # fmt: skip
        harness = make_harness(options.harness, options.at_once)
        reading = ChatReading(prompts.chat)
        sessions = Sessions(limits, reading, lambda: here().rng.randbytes(24).hex(), harness is not None)
        self.desk = GatewayDesk(sessions, self, monotonic)
        self._port = GatewayPort(options.listen, options.tls_certificate, options.tls_key)
        self.url = f"{self._port.url}/v1"
        if harness is not None:
            self.desk.harnesses = Harnesses(harness, self.url, options.episode_s, self.desk.tell)
        self.key_file = folder / KEY_FILE
        if not self.key_file.exists():
            write_secret(self.key_file, here().rng.randbytes(32).hex().encode())
        key = read_secret(self.key_file).decode().strip()
        self._app = GatewayApp(self.desk, options.model_name, key, reading.token_text)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        begin = asyncio.get_running_loop().create_task
        self._tasks = [begin(self._port.run(self._app.application())), begin(self.desk.run())]
        for task in self._tasks:
            task.add_done_callback(self._ended)

    async def close(self) -> None:
        await self.desk.close()
        if self._tasks:
            self._tasks[1].cancel()
        await self._port.stop(self._tasks[0] if self._tasks else None)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._failed(error)

    def numbers(self) -> Mapping[str, float]:
        """Counters for the metrics, since the start."""
        sessions, counts = self.desk.sessions, self.desk.sessions.counts
        return {
            "agents/open": len(sessions.sessions),
            "agents/calls": counts.calls,
            "agents/branches": counts.branches,
            "agents/restarted": counts.restarted,
            "agents/dropped": counts.dropped,
            "agents/kept_share": counts.kept_tokens / max(1, counts.prompt_tokens),
        }

    # ---- from the intake

    def drive(self, spec: GroupSpec, draw: Draw) -> None:
        """Lets agents begin with this problem."""
        prompts, is_exam = self._prompts, spec.work is Work.EVALUATE
        world: PromptWorld | None = None
        if is_exam:
            instance, world = self._examination.problem(draw.cursor)
        else:
            instance = prompts.world.instance(prompts.split.train_index(draw.cursor))
        self._problems[spec.group_id] = instance.index, world
        told = _told(instance)
        if world is None and prompts.is_mixed:
            told["task"] = prompts.world.name_of(instance.index)
        if is_exam:
            told["evaluation"] = self._examination.name_of(draw.cursor)
        self.desk.tell(e.ProblemOpened(spec.group_id, spec.rollout_count, told, is_exam))

    def sampled(self, rollout: Rollout) -> None:
        versions = tuple(int(span.version) for span in rollout.version_spans for _ in range(span.count))
        is_cut = rollout.finish_reason is FinishReason.LENGTH
        self.desk.tell(e.CallTokens(rollout.group_id, rollout.token_ids, rollout.logprobs, versions, is_cut))

    def grown(self, rollout: Rollout) -> None:
        self.desk.tell(e.CallGrew(rollout.group_id, rollout.token_ids))

    def closed(self, group_ids: Sequence[GroupId], reason: str) -> None:
        for group_id in group_ids:
            if self._problems.pop(group_id, None) is not None:
                self.desk.tell(e.ProblemClosed(group_id, reason))

    # ---- as the gateway's fleet

    def ask(self, asked: e.Ask) -> tuple[str, int] | None:
        run = self._prompts.sampling
        texts = tuple(dict.fromkeys((*(text.decode() for text in run.stop_strings), *asked.stops)))
        try:
            piece_ids, pieces = self._prompts.stop_strings.pieces_of(texts)
        except EchoError:
            piece_ids, pieces, texts = run.stop_piece_ids, run.stop_pieces, tuple(t.decode() for t in run.stop_strings)
        sampling = replace(
            run, max_new_tokens=asked.max_tokens, stop_strings=tuple(text.encode() for text in texts),
            stop_piece_ids=piece_ids, stop_pieces=pieces,
        )  # fmt: skip
        event = b.CallAsked(GroupId(asked.root), asked.chain, asked.prompt_token_ids, sampling, asked.temperature)
        try:
            group_id = self._tell(event).call_group
        except EchoError as error:
            self._refusals.warn("a call of group %s is refused: %s", asked.root, error)
            return None
        return None if group_id is None else (group_id, turn_of(group_id, 0).index)

    def ended(self, ended: e.EndEpisode) -> None:
        self._tell(b.EpisodeEnded(GroupId(ended.root), ended.chains, ended.reward, ended.is_final, ended.parts))

    async def score(self, root: str, token_ids: tuple[int, ...]) -> e.EpisodeRewarded | str:
        found = self._problems.get(root)
        if found is None:
            return "its group is closed"
        index, world = found
        answer = await self._prompts.answer_instance(index, [token_ids], 0, world=world)
        if answer.scored is None:
            return "expected a task that scores one completion, got an environment"
        if answer.scored.reward is None:
            return answer.scored.message
        return e.EpisodeRewarded("", answer.scored.reward.value, answer.scored.reward.parts)


def _told(instance: TaskInstance) -> dict[str, object]:
    """A problem as JSON."""
    prompt = instance.prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [
        {"role": message.role, "content": message.content} for message in prompt
    ]  # fmt: skip
    return {
        "index": instance.index, "messages": messages, "answer": instance.answer, "metadata": dict(instance.metadata)
    }  # fmt: skip
