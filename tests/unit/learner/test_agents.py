"""Agents with the stock OpenAI client train through the daemon, token for token."""

import asyncio
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from echo2.base.errors import DiskFull, MalformedMessage, TaskError
from echo2.base.ids import GroupId, Version
from echo2.base.rollout import GroupSpec, Verdict, Work
from echo2.learner.rollouts.agents import Agents
from echo2.learner.rollouts.evaluation import QuestionSet
from echo2.learner.rollouts.groups import Batch, Group, Insertion, SentTokens, evaluated_version, joined
from echo2.learner.rollouts.workers import FailureStreak
from echo2.learner.training.team import batch_from_bytes, batch_to_bytes
from echo2.wire.bounds import check
from tests.patience import WAIT_S
from tests.unit.learner import agent_players as players
from tests.unit.learner.fleet import RandomWorker, Run, options_for, rows_of
from tests.unit.learner.made import groups_config, new_trainer, rollout_of
from tests.unit.learner.stage import ALICE, GREEDY, SAMPLING, STOP, Stage, piece

ROOT = Path(__file__).resolve().parents[3]
PLAYER = "tests.unit.learner.agent_players:"


def agents(folder: Path, model: Path, player: str, **changes: Any) -> Run:
    for seen in (players.SEEN, players.EPISODES, players.CLIENTS, players.NOTES):
        seen.clear()
    given: dict[str, Any] = {
        "learner": {"steps": 1}, "task": {"eval_prompts": 0}, "turns_max": 4, "agent": {"harness": PLAYER + player},
    }  # fmt: skip
    return Run(options_for(folder, model, **{**given, **changes}))


def played(run: Run, worker_count: int = 2) -> tuple[Any, list[Batch]]:
    """Plays the run to its end; returns its summary and every batch as the trainer takes it."""
    batches: list[Batch] = []

    async def watch() -> None:
        while run.daemon.learner is None:
            await asyncio.sleep(0.001)
        team = run.learner.loop.p.team
        original = team.step
        team.step = lambda batch, *told: (batches.append(batch), original(batch, *told))[1]  # type: ignore[method-assign]

    async def play() -> Any:
        watcher = asyncio.get_running_loop().create_task(watch())
        try:
            return await run.finish(worker_count)
        finally:
            watcher.cancel()
            for client in players.CLIENTS.values():
                await client.close()

    return asyncio.run(play()), batches


def sampled_by_clients() -> dict[tuple[int, ...], tuple[float, ...]]:
    """What clients read: prompt and completion of each call, with the numbers of the completion."""
    found = {}
    for answers in players.SEEN.values():
        for answer in answers:
            choice = answer["choices"][0]
            numbers = tuple(one["logprob"] for one in choice["logprobs"]["content"])
            found[tuple(answer["prompt_token_ids"]) + tuple(choice["token_ids"])] = numbers
    return found


def test_clients_see_what_is_trained_on(model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a proxy, too, and though a worker dies in the middle again and again."""
    whole, died = RandomWorker.segments, []

    def torn(self: RandomWorker, spec: Any, version: Any) -> Any:
        """Every fifth lease of the first worker ends with what it reported first; its group waits for another."""
        made = whole(self, spec, version)
        if self is run.workers[0] and len(made) > 1 and len(self.verdicts) % 5 == 4:
            died.append(spec.group_id)
            self.coordinator.waiting.put_nowait(spec)
            return made[:1]
        return made

    monkeypatch.setattr(RandomWorker, "segments", torn)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "intern.example")
    monkeypatch.delenv("NO_PROXY", raising=False)
    run = agents(tmp_path / "run", model_path, "three_turns", learner={"steps": 2})
    summary, batches = played(run, worker_count=3)
    assert summary.is_finished and summary.trained_rollouts == 2 * 8 and summary.over_stale_tokens == 0 and died
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == "intern.example,127.0.0.1"
    known = sampled_by_clients()
    for group in (group for batch in batches for group in batch.groups):
        for place, rollout in enumerate(group.rollouts):
            text, sampled_at = group.text_of(place)
            whole_text, turns = (*group.spec.prompt_token_ids, *text), group.insertions[place]
            assert len(turns) == players.TURNS, "one chain of three calls"
            ends = [*(turn.position for turn in turns[1:]), len(rollout.token_ids)]
            begin = 0
            for end in ends:
                stop = sampled_at[end - 1] + len(group.spec.prompt_token_ids) + 1
                assert known[whole_text[:stop]] == pytest.approx(rollout.logprobs[begin:end], abs=1e-6)
                begin = end
    last = rows_of(tmp_path / "run")[-1]
    assert last["agents/calls"] >= 2 * 8 * players.TURNS and last["agents/branches"] == 0
    assert last["agents/kept_share"] > 0.3 and last["agents/restarted"] == last["agents/dropped"] == 0


def test_a_broken_harness_or_client_costs_its_episode_alone(model_path: Path, tmp_path: Path) -> None:
    """Episodes break, pay no number, and ask with token ids that the model lacks; those go to no worker."""
    summary, batches = played(agents(tmp_path / "run", model_path, "misbehaves_at_first", learner={"steps": 2}))
    assert summary.is_finished and summary.trained_rollouts == 16
    groups = [group for batch in batches for group in batch.groups]
    assert all(rollout.token_ids for group in groups for rollout in group.rollouts)
    rewards = [reward for group in groups for reward in group.rewards]
    assert len(rewards) == 16 and all(0.0 <= reward <= 1.0 for reward in rewards)
    refusals = [note for note in players.NOTES if isinstance(note, str)]
    assert len(refusals) >= 3 * 16 and all("expected token ids below" in text for text in refusals)
    last = rows_of(tmp_path / "run")[-1]
    assert last["agents/restarted"] >= 4 and last["agents/dropped"] == 0 and last["rewards/failed"] == 0


def test_the_task_scores_what_the_harness_does_not(model_path: Path, tmp_path: Path) -> None:
    summary, batches = played(agents(tmp_path / "run", model_path, "leaves_it_to_the_task"))
    assert summary.is_finished
    rewards = [reward for group in batches[0].groups for reward in group.rewards]
    last = [answers[-1]["choices"][0]["message"]["content"] for answers in players.SEEN.values() if len(answers) == 3]
    shares = {sum(c.isdigit() for c in text) / max(1, len(text)) for text in ("".join(one.split()) for one in last)}
    assert len(rewards) == 8 and {round(reward, 6) for reward in rewards} <= {round(share, 6) for share in shares}


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate")
async def test_a_harness_elsewhere_plays_over_tls_it_trusts(model_path: Path, tmp_path: Path) -> None:
    pem, agent = tmp_path / "gateway.pem", tmp_path / "agent.py"
    made = f"openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=echo2 -addext subjectAltName=IP:127.0.0.1 -keyout {pem} -out {pem}"
    subprocess.run(made.split(), check=True, capture_output=True)
    agent.write_text(
        "import json, os, urllib.request as web\nurl, key = os.environ['OPENAI_BASE_URL'], os.environ['OPENAI_API_KEY']\n"
        "body = {'model': 'policy', 'messages': json.loads(os.environ['ECHO2_PROBLEM'])['messages'], 'max_tokens': 8}\n"
        "told = {'content-type': 'application/json', 'authorization': f'Bearer {key}'}\n"
        "asked = web.Request(f'{url}/chat/completions', json.dumps(body).encode(), told)\n"
        "print(len(json.load(web.urlopen(asked))['choices'][0]['message']['content']) / 100)\n"
    )
    task = {"name": "sort_digits", "args": {"digit_count": 3}, "eval_prompts": 0}
    run = agents(
        tmp_path / "run", model_path, "", agent={"listen": "0.0.0.0:0", "tls": str(pem)}, task=task,
        learner={"steps": 1},
    )  # fmt: skip

    async def outside(**trust: str) -> str:
        while run.daemon.learner is None or run.daemon.learner.agents is None:
            await asyncio.sleep(0.01)
        found = run.daemon.learner.agents
        address = f"https://127.0.0.1:{found.url.removesuffix('/v1').rpartition(':')[2]}"
        program = [ROOT / "examples" / "outside_harness.py", address, found.key_file, f"{sys.executable} {agent}"]
        process = await asyncio.create_subprocess_exec(
            sys.executable, *map(str, program), env=os.environ | trust, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        return (await process.communicate())[0].decode()

    async def one_by_one() -> tuple[str, str]:
        refused = await outside()
        async with asyncio.timeout(WAIT_S):
            while "no program plays an episode at https://" not in run.learner.waits_for[0]:
                await asyncio.sleep(0.01)
        return refused, await outside(SSL_CERT_FILE=str(pem))

    summary, (stranger, played) = await asyncio.gather(run.finish(), one_by_one())
    assert "CERTIFICATE_VERIFY_FAILED" in stranger and "played 0 episodes" in stranger
    assert summary.is_finished and summary.trained_rollouts == 8 and "played 0" not in played, played


def test_agents_play_held_out_problems_that_are_not_trained_on(model_path: Path, tmp_path: Path) -> None:
    mixture = {
        "share": {"task": "tests.unit.learner.worlds:DigitShare", "eval_prompts": 2},
        "digits": {"task": "sort_digits", "args": {"digit_count": 3}, "eval_prompts": 1},
    }
    task = {"name": "sort_digits", "mixture": mixture, "eval_every_steps": 1, "eval_samples": 2}
    run = agents(tmp_path / "run", model_path, "notes_its_problem", task=task, learner={"steps": 2})
    summary, batches = played(run, worker_count=3)
    assert summary.is_finished and summary.trained_rollouts == 16
    rows = rows_of(tmp_path / "run", "evaluations")
    assert rows[0]["step"] == 0 and rows[-1]["step"] == 2 and [*summary.evaluations] == [row["step"] for row in rows]
    assert all(row["eval/rollouts"] == 6 and row["eval/lost_episodes"] == 0 for row in rows)
    assert all({"eval/share/reward", "eval/digits/reward", "eval/share/pass@2"} <= row.keys() for row in rows)
    held_out = {one["index"] for one in players.NOTES if "evaluation" in one}
    trained = {one["index"] for one in players.NOTES if "evaluation" not in one}
    assert len(held_out) == 3 and not held_out & trained
    assert {one["task"] for one in players.NOTES} == {"share", "digits"}
    assert all(group.spec.group_id.startswith("a") for batch in batches for group in batch.groups)
    samples = rows_of(tmp_path / "run", "samples")
    assert {one["set"] for one in samples} == {"share", "digits"}


def test_a_harness_whose_every_episode_is_lost_ends_the_run_with_the_cause(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, reports, end_episode = agents(tmp_path / "run", model_path, "always_breaks"), [], Agents.end_episode

    def ended(self: Agents, *arguments: Any, **named: Any) -> None:
        end_episode(self, *arguments, **named)
        reports.append(run.learner.report())

    monkeypatch.setattr(Agents, "end_episode", ended)
    with pytest.raises(TaskError, match=r"(?s)always_breaks: .*64 episodes failed .*OSError.*PermissionError: locked"):
        played(run)
    for report in reports:
        check(report, "a learner whose agents' errors have lines")
    assert any("episodes failed one after another" in report.waits_for for report in reports)


def test_an_episode_lost_for_want_of_workers_is_no_failure_of_the_harness() -> None:
    found: Any = SimpleNamespace(failures=FailureStreak("episodes", 1), _section=SimpleNamespace(harness="agent:play"))
    found._pool = SimpleNamespace(end_episode=lambda *_, **__: None)
    for is_starved in (True, False):
        Agents.end_episode(found, "a1", {}, "APITimeoutError", is_final=False, is_starved=is_starved)
        assert found.failures.count == 1 - is_starved


PROBLEM = GroupId("a00000000")
RUN = replace(SAMPLING, temperature=1.0, top_p=0.9, seed=7)
SETS = (QuestionSet("held_out", 2, 1), QuestionSet("hard", 1, 3))


def new_stage(sets: tuple[QuestionSet, ...] = ()) -> Stage:
    return Stage(groups_config(2, 2, is_driven=True), sets, vocabulary_size=100)


def call(
    stage: Stage, root: GroupId, chain: int | None, prompt: tuple[int, ...], temperature: float | None = None
) -> GroupId:
    group_id = stage.tell(stage.pool.open_call, root, chain, prompt, RUN, temperature)
    assert stage.offered[group_id].prompt_token_ids == prompt
    return GroupId(group_id)


def sample(stage: Stage, group_id: GroupId, *tokens: int, version: int = 0) -> None:
    assert stage.report(piece(group_id, 0, tokens, version=version), attempt=1) == [Verdict.ADMITTED]
    assert stage.sampled[-1].token_ids == tokens and not stage.prompts.due, "the agent or its task gives the reward"


def end(stage: Stage, root: GroupId, chains: dict[int, int], reward: float | None, *, is_final: bool = True) -> None:
    parts = {"steps": 2.0} if reward is not None else {}
    stage.tell(stage.pool.end_episode, root, chains, reward, parts, is_final=is_final)


def play(stage: Stage, root: GroupId, version: int = 0, calls: int = 2) -> int:
    """The calls of one episode, one behind the other; returns its chain."""
    chain: int | None = None
    prompt = (5, 6)
    for _ in range(calls):
        group_id = call(stage, root, chain, prompt)
        chain = int(group_id.split(".")[1])
        sample(stage, group_id, 9, STOP, version=version)
        prompt = (*prompt, 9, STOP, 7)
    assert chain is not None
    return chain


def played_stage() -> Stage:
    """Two seats: the first with two turns and a branch, the second lost once and then whole."""
    stage = new_stage()
    sample(stage, call(stage, PROBLEM, None, (5, 6, 7)), 10, 11, 1)
    sample(stage, call(stage, PROBLEM, 0, (5, 6, 7, 10, 11, 1, 8)), 12, 1)
    sample(stage, call(stage, PROBLEM, None, (5, 6, 9)), 13, 1)
    sample(stage, call(stage, PROBLEM, None, (5, 6, 4)), 20, 1)
    end(stage, PROBLEM, {2: 1}, None, is_final=False)
    sample(stage, call(stage, PROBLEM, None, (5, 6, 4)), 21, 1)
    abandoned = call(stage, PROBLEM, 3, (5, 6, 4, 21, 1, 30))
    end(stage, PROBLEM, {0: 2, 1: 1}, 1.0)
    assert stage.next_batch() is None
    end(stage, PROBLEM, {3: 1}, 0.0)
    assert (abandoned, "unused") in stage.closed
    return stage


def batch_of(stage: Stage) -> Batch:
    batch = stage.next_batch()
    assert batch is not None
    return batch


def test_calls_become_chains_that_are_trained_on_token_for_token() -> None:
    (group,) = batch_of(played_stage()).groups
    assert group.spec.prompt_token_ids == (5, 6), "what all chains begin with"
    assert [r.index for r in group.rollouts] == [0, 1, 3] and group.rewards == (1.0, 1.0, 0.0)
    assert [r.token_ids for r in group.rollouts] == [(10, 11, 1, 12, 1), (13, 1), (21, 1)]
    texts = [group.text_of(index) for index in range(3)]
    assert texts[0] == ([7, 10, 11, 1, 8, 12, 1], [1, 2, 3, 5, 6])
    assert texts[1] == ([9, 13, 1], [1, 2]) and texts[2] == ([4, 21, 1], [1, 2])
    assert all(r.group_id == PROBLEM for r in group.rollouts) and group.senders[0][0].peer_id == ALICE


def test_a_call_that_goes_on_is_told_as_it_grows_and_one_whose_prompt_all_share_marks_where_its_turn_begins() -> None:
    stage = new_stage()
    group_id = call(stage, PROBLEM, None, (5, 6))
    for offset, tokens in ((0, (10,)), (1, (11, 12)), (3, (1,))):
        stage.report(piece(group_id, 0, tokens, offset))
    assert stage.grown == [(10,), (10, 11, 12)]
    assert [rollout.token_ids for rollout in stage.sampled] == [(10, 11, 12, 1)]
    calls = []
    for turn, prompt, tokens in ((1, (5, 6), (10, 1)), (2, (5, 6, 10, 1), (11, 1))):
        name = GroupId(f"{PROBLEM}.2.{turn}")
        group = Group(GroupSpec(name, prompt, 1, SAMPLING, 0), 0, senders={0: (SentTokens(ALICE, 2),)})
        calls.append((group, rollout_of(tokens, name=name, spans=[(turn, 2)])))
    whole, insertions, senders = joined(calls, 2, (5, 6))
    assert (whole.group_id, whole.index, whole.token_ids, whole.versions) == (PROBLEM, 2, (10, 1, 11, 1), (1, 1, 2, 2))
    assert insertions == (Insertion(0, ()), Insertion(2, ())) and senders == (SentTokens(ALICE, 2),) * 2


def test_a_journal_gives_the_same_batch_again_and_unfinished_episodes_are_drawn_again() -> None:
    stage = played_stage()
    stage.start()  # whole episodes wait with their rewards
    before, _ = stage.restored()
    batch = batch_of(stage)
    (group,) = batch.groups
    assert before.draw_batch() == batch and stage.restored()[0].next_step == 1
    assert batch_from_bytes(batch_to_bytes(batch)).groups[0].insertions == group.insertions
    for is_lost in (True, False):  # or another episode has its seat
        stage = played_stage()
        *_, last = (pair for pair in stage.journal.records if pair[1].HasField("scored"))
        last[1].scored.is_restarted = True
        if is_lost:
            stage.journal.records.remove(last)
        stage.start()
        assert PROBLEM not in stage.pool.groups.groups and f"{PROBLEM}r1" in stage.driven


def test_chains_without_a_common_beginning_train(model_path: Path) -> None:
    stage = new_stage()
    for number in range(2):
        sample(stage, call(stage, PROBLEM, None, (5 + number, 6, 7)), 10 + number, 11, 1)
        end(stage, PROBLEM, {number: 1}, float(number))
    batch = batch_of(stage)
    assert batch.groups[0].spec.prompt_token_ids == ()
    trainer = new_trainer(model_path)
    whole = torch.tensor([[6, 6, 7, 11, 11, 1]])
    with torch.no_grad():
        logits = trainer.model.hf_model(input_ids=whole).logits[0].log_softmax(-1)
    expected = torch.stack([logits[at - 1, whole[0, at]] for at in (3, 4, 5)])
    assert torch.allclose(trainer.logprobs(batch.groups)[1], expected, atol=1e-4)
    assert trainer.step(batch).sampled_tokens == 6


@pytest.mark.parametrize("what", ["a call", "the end of an episode", "the next problem"])
def test_what_fails_in_the_pool_ends_the_run_whatever_an_agent_makes_of_it(what: str) -> None:
    """A call that is refused, or an episode that is lost, would hide it, and the run would wait for a batch for ever."""
    stage = new_stage()
    group_id = call(stage, PROBLEM, None, (5, 6))
    sample(stage, group_id, 9, STOP)
    stage.journal.is_full = what != "the next problem"
    stage.drive = lambda spec, cursor: dict[int, None]()[cursor]  # type: ignore[method-assign]
    with pytest.raises(DiskFull if stage.journal.is_full else KeyError):
        if what == "a call":
            stage.tell(stage.pool.open_call, PROBLEM, None, (5, 6), RUN, None)
        elif what == "the end of an episode":
            end(stage, PROBLEM, {0: 1}, 1.0)
        else:
            stage.tell(stage.pool.on_plan, 100)
    assert isinstance(stage.failures[0], DiskFull if stage.journal.is_full else KeyError)


# ---- evaluations: held-out problems played_stage by the same agents, of one version, lost episodes left out


def evaluated() -> Stage:
    stage = new_stage(SETS)
    stage.tell(stage.pool.evaluate, Version(0), False)
    return stage


def problems(stage: Stage) -> list[GroupId]:
    return [name for name in stage.driven if evaluated_version(name) is not None]


def test_an_audit_judges_held_out_calls_by_the_temperature_that_their_agent_chose() -> None:
    """By the group's, greedy, it would find an honest worker's tokens to be no draw of the model."""
    stage = evaluated()
    one, two, _ = problems(stage)
    with pytest.raises(MalformedMessage, match="temperature: expected 0, or"):
        call(stage, one, None, (5, 6), 1e-9)  # which leaves its problem as it was
    for root, temperatures in ((one, (0.7, 0.7)), (two, (0.7, None))):
        prompt: tuple[int, ...] = (5, 6)
        chain: int | None = None
        for temperature in temperatures:
            group_id = call(stage, root, chain, prompt, temperature)
            chain = int(group_id.split(".")[1])
            sample(stage, group_id, 9, STOP)
            prompt = (*prompt, 9, STOP, 7)
        assert chain is not None
        end(stage, root, {chain: 2}, 1.0)
    alike, mixed = stage.answered
    assert alike.spec.sampling.temperature == 0.7 and {sent.peer_id for sent in alike.senders[0]} == {ALICE}
    assert mixed.senders == ((),), "nobody is judged by a temperature that was not his"


def test_held_out_problems_are_played_by_one_version_and_none_is_trained_on() -> None:
    stage = evaluated()
    one, two, hard = problems(stage)
    assert [stage.driven[name].rollout_count for name in (one, two, hard)] == [1, 1, 3]
    group_id = call(stage, one, None, (5, 6), 0.7)
    leased, run = stage.offered[group_id], stage.offered[call(stage, PROBLEM, None, (5, 6), 0.7)].sampling
    assert (leased.work, leased.exact_version) == (Work.EVALUATE, Version(0)), "workers at that very version alone"
    assert (leased.sampling.temperature, leased.sampling.top_p) == (0.7, GREEDY.top_p), "the agent may choose the first"
    assert leased.sampling.max_new_tokens == RUN.max_new_tokens and leased.sampling.seed != RUN.seed
    assert run.temperature == SAMPLING.temperature, "in training not even that"
    assert stage.offered[call(stage, two, None, (5, 6))].sampling.temperature == 0.0, "else as evaluations sample"
    stage.tell(stage.pool.on_published, Version(1))
    assert stage.report(piece(group_id, 0, [9, STOP], version=1)) == [Verdict.REFUSED]
    sample(stage, group_id, 9, STOP)
    end(stage, one, {0: 1}, 1.0)
    end(stage, two, {0: 0, play(stage, two): 2}, 0.0)
    for reward in (1.0, 0.0, 1.0):
        end(stage, hard, {play(stage, hard): 2}, reward)
    (row,) = stage.evaluations.rows
    assert row["eval/held_out/reward"] == 0.5 and row["eval/hard/reward"] == pytest.approx(2 / 3)
    assert row["eval/rollouts"] == 5 and row["eval/lost_episodes"] == 0 and row["eval/hard/steps"] == 2.0
    assert not problems(stage) and stage.pool.groups.ledger.histogram() == {} and stage.pool.groups.counts.admitted == 0


def test_a_lost_episode_is_left_out_and_not_worth_nothing_and_two_chains_of_one_count_once() -> None:
    stage = evaluated()
    one, two, hard = problems(stage)
    end(stage, one, {play(stage, one): 2}, None, is_final=False)  # broke, and is begun anew
    end(stage, one, {play(stage, one): 2, play(stage, one): 2}, 1.0)
    end(stage, two, {play(stage, two): 2}, None)  # lost for good
    for reward in (1.0, None, 0.0):
        end(stage, hard, {play(stage, hard): 2}, reward)
    (row,) = stage.evaluations.rows
    assert (row["eval/held_out/reward"], row["eval/hard/reward"], row["eval/hard/pass@2"]) == (1.0, 0.5, 1.0)
    assert row["eval/lost_episodes"] == 2
    stage = evaluated()
    for root in problems(stage):
        for _ in range(stage.driven[root].rollout_count):
            end(stage, root, {}, None)
    assert not stage.evaluations.rows and stage.evaluations.reasons == [""], "all are lost: it is given up"


def test_agents_play_again_after_a_restart_under_other_names() -> None:
    """A worker that still samples for an episode of before cannot add to one of now."""
    stage = evaluated()
    before = problems(stage)
    end(stage, before[0], {play(stage, before[0]): 2}, 1.0)
    open_call = play(stage, before[1], calls=1)
    for _ in range(2):
        stage.start()
    assert len(problems(stage)) == 3 and not set(problems(stage)) & set(before)
    assert stage.report(piece(f"{before[1]}.{open_call}.1", 0, [9, STOP])) == [Verdict.CLOSED]
    for root in problems(stage):
        for _ in range(stage.driven[root].rollout_count):
            end(stage, root, {play(stage, root): 2}, 0.5)
    assert stage.evaluations.rewards == {0: 0.5}


def test_what_a_barred_worker_sampled_is_played_again() -> None:
    stage = evaluated()
    before = problems(stage)
    end(stage, before[0], {play(stage, before[0]): 2}, 1.0)
    play(stage, before[1])
    stage.tell(stage.pool.accuse, ALICE, "planted", is_certain=True)
    assert len(problems(stage)) == 3 and len(set(problems(stage)) - set(before)) == 2
