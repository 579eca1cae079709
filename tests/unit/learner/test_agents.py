"""Agents with the stock OpenAI client train through the daemon, token for token."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from echo2.base.errors import TaskError
from echo2.gateway.harness import Episode, make_harness
from echo2.learner.rollouts.groups import Batch
from tests.unit.learner import agent_players as players
from tests.unit.learner.fleet import RandomWorker, Run, evaluations_of, go, options_for, rows_of

pytest.importorskip("openai")
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
        team.step = lambda batch, due: (batches.append(batch), original(batch, due))[1]  # type: ignore[method-assign]

    async def play() -> Any:
        watcher = asyncio.get_running_loop().create_task(watch())
        try:
            return await run.finish(worker_count)
        finally:
            watcher.cancel()
            for client in players.CLIENTS.values():
                await client.close()

    return go(play()), batches


def sampled_by_clients() -> dict[tuple[int, ...], tuple[float, ...]]:
    """What clients read: prompt and completion of each call, with the numbers of the completion."""
    found = {}
    for answers in players.SEEN.values():
        for answer in answers:
            choice = answer["choices"][0]
            numbers = tuple(one["logprob"] for one in choice["logprobs"]["content"])
            found[tuple(answer["prompt_token_ids"]) + tuple(choice["token_ids"])] = numbers
    return found


def test_every_trained_id_and_number_is_what_the_stock_client_was_told(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_what_a_broken_harness_or_client_does_costs_its_episode_alone_and_is_never_worth_nothing(
    model_path: Path, tmp_path: Path
) -> None:
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
def test_a_harness_elsewhere_plays_by_a_command_over_tls_and_says_whom_it_does_not_trust(
    model_path: Path, tmp_path: Path
) -> None:
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
        tmp_path / "run",
        model_path,
        "",
        agent={"listen": "0.0.0.0:0", "tls": str(pem)},
        task=task,
        learner={"steps": 1},
    )

    async def both() -> Any:
        async def outside(**trust: str) -> str:
            while run.daemon.learner is None or run.daemon.learner.agents is None:
                await asyncio.sleep(0.01)
            found = run.daemon.learner.agents
            address = f"https://127.0.0.1:{found.url.removesuffix('/v1').rpartition(':')[2]}"
            program = [ROOT / "examples" / "outside_harness.py", address, found.key_file, f"{sys.executable} {agent}"]
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *map(str, program),
                env=os.environ | trust,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            return (await process.communicate())[0].decode()

        async def one_by_one() -> tuple[str, str]:
            return await outside(), await outside(SSL_CERT_FILE=str(pem))

        return await asyncio.gather(run.finish(), one_by_one())

    summary, (stranger, played) = go(both())
    assert "CERTIFICATE_VERIFY_FAILED" in stranger and "played 0 episodes" in stranger
    assert summary.is_finished and summary.trained_rollouts == 8 and "played 0" not in played, played


def test_the_same_agents_play_held_out_problems_of_each_task_and_none_of_them_is_trained_on(
    model_path: Path, tmp_path: Path
) -> None:
    mixture = {
        "share": {"task": "tests.unit.learner.worlds:DigitShare", "eval_prompts": 2},
        "digits": {"task": "sort_digits", "args": {"digit_count": 3}, "eval_prompts": 1},
    }
    task = {"name": "sort_digits", "mixture": mixture, "eval_every_steps": 1, "eval_samples": 2}
    run = agents(tmp_path / "run", model_path, "notes_its_problem", task=task, learner={"steps": 2})
    summary, batches = played(run, worker_count=3)
    assert summary.is_finished and summary.trained_rollouts == 16
    rows = evaluations_of(tmp_path / "run")
    assert rows[0]["step"] == 0 and rows[-1]["step"] == 2 and [*summary.evaluations] == [row["step"] for row in rows]
    assert all(row["eval/rollouts"] == 6 and row["eval/lost_episodes"] == 0 for row in rows)
    assert all({"eval/share/reward", "eval/digits/reward", "eval/share/pass@2"} <= row.keys() for row in rows)
    held_out = {one["index"] for one in players.NOTES if "evaluation" in one}
    trained = {one["index"] for one in players.NOTES if "evaluation" not in one}
    assert len(held_out) == 3 and not held_out & trained
    assert {one["task"] for one in players.NOTES} == {"share", "digits"}
    assert all(group.spec.group_id.startswith("a") for batch in batches for group in batch.groups)
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert {one["set"] for one in samples} == {"share", "digits"}


def test_a_harness_whose_every_episode_is_lost_ends_the_run_with_the_cause(model_path: Path, tmp_path: Path) -> None:
    with pytest.raises(
        TaskError, match=r"always_breaks: .*64 episodes failed .*OSError: no tool.*PermissionError: locked"
    ):
        played(agents(tmp_path / "run", model_path, "always_breaks"))


def test_behind_a_proxy_a_program_s_client_reaches_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "intern.example")
    monkeypatch.delenv("no_proxy", raising=False)
    program = f"{sys.executable} -c \"import os, urllib.request; print(int(urllib.request.proxy_bypass('127.0.0.1')))\""
    harness = make_harness(program, 1)
    assert harness is not None
    assert asyncio.run(harness.play(Episode("http://127.0.0.1:1234/v1", "key", {}))) == 1.0
