"""An environment of verifiers (0.4) trains a model on a fleet that `echo2 serve` serves: its train client asks for the tokens.

With workers joined to `echo2 serve run.toml`, in an environment with `verifiers`, `httpx` and `torch`:

    python examples/verifiers_door.py MODEL runs/NAME/learner

MODEL has a chat template. Tokens are at most S versions old; the ratio to their log-probabilities corrects for it.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import httpx
import torch
import verifiers.v1 as vf
from openai import AsyncOpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.envs.single_agent.env import SingleAgentEnv, SingleAgentEnvConfig
from verifiers.v1.harness import Harness
from verifiers.v1.runtimes import ProgramResult
from verifiers.v1.types import SamplingConfig
from verifiers.v1.utils.loaders import load_taskset, taskset_config_type

STEPS, PROMPTS, GROUP, NEW_TOKENS, LR = 20, 4, 8, 12, 2e-3


class DigitTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def digits(self, trace: Any) -> float:
        """The share of the answer that is digits."""
        said = trace.last_reply
        return sum(letter.isdigit() for letter in said) / max(1, len(said))


class Digits(vf.Taskset[DigitTask, vf.TasksetConfig]):
    def load(self) -> Any:
        for number in range(PROMPTS):
            yield DigitTask(vf.TaskData(prompt=f"Count from {number}."), self.config.task)


class Asking(Harness[HarnessConfig]):
    """One question, asked in this process. The harnesses of the library start a program for each."""

    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp: Any, data: Any, tools: Any = None
    ) -> ProgramResult:
        messages: Any = [{"role": "user", "content": data.prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            await client.chat.completions.create(model=ctx.model, messages=messages)
        return ProgramResult(0, "", "")


__all__ = ["Asking", "Digits"]


def loss_of(model: Any, branches: list[tuple[Any, float]]) -> torch.Tensor:
    """Policy gradient, with the ratio to what workers sampled by."""
    total = torch.zeros(())
    for branch, advantage in branches:
        ids, mask = torch.tensor([branch.token_ids]), torch.tensor(branch.sampled_mask)[1:]
        logprobs = torch.log_softmax(model(ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])[:, 0]
        ratio = torch.exp(logprobs - torch.tensor(branch.logprobs)[1:])
        total = total - (ratio * advantage)[mask].sum() / (NEW_TOKENS * len(branches))
    return total


async def main(path: str, learner: Path) -> None:
    url, key = ((learner / name).read_text().strip() for name in ("gateway.url", "gateway.key"))
    os.environ["ECHO2_KEY"] = key
    model, weights = AutoModelForCausalLM.from_pretrained(path, dtype="float32"), (learner / "weights").resolve()
    tokenizer, adam = AutoTokenizer.from_pretrained(path), torch.optim.Adam(model.parameters(), LR)
    taskset = taskset_config_type("verifiers_door").model_validate({"id": "verifiers_door"})
    agent = {"harness": {"id": "verifiers_door"}, "runtime": {"type": "subprocess"}}
    env = SingleAgentEnv(SingleAgentEnvConfig(taskset=taskset, agent=agent))
    client = TrainClientConfig(base_url=f"{url}/v1", api_key_var="ECHO2_KEY", renderer_model_name=path)
    context = ModelContext("policy", client, SamplingConfig(temperature=1.0, max_tokens=NEW_TOKENS))
    tasks = [task for task in load_taskset(taskset) for _ in range(GROUP)]
    async with env.serving(), httpx.AsyncClient(timeout=600, headers={"authorization": f"Bearer {key}"}) as http:
        for step in range(1, STEPS + 1):
            episodes = await asyncio.gather(*(env.run_episode(task, context) for task in tasks))
            for episode in episodes:
                assert episode.ok, [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            rewards = torch.tensor([episode.traces[0].reward for episode in episodes])
            advantages = (rewards.view(-1, GROUP) - rewards.view(-1, GROUP).mean(1, keepdim=True)).flatten()
            branches = [episode.traces[0].branches[0] for episode in episodes]
            adam.zero_grad()
            loss_of(model, list(zip(branches, advantages.tolist(), strict=True))).backward()
            adam.step()
            folder = weights / f"step-{step}"
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            body = {"version": step, "folder": str(folder), "is_last": step == STEPS}
            (await http.post(f"{url}/v1/versions", json=body)).raise_for_status()
            print(f"step {step}: reward {rewards.mean():.3f}", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
