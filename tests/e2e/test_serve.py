"""A fleet served to a trainer of another project: weights by a command, tokens by HTTP, through kills of worker and server."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from echo2.cli.main import main
from tests.e2e.cluster import Cluster, small_run
from tests.patience import WAIT_S

PROMPTS = [[5 + number, 6, 7, 8] for number in range(6)]


class Trainer:
    """What an outside trainer does. `told`: every choice that it was given, with its prompt."""

    def __init__(self, cluster: Cluster) -> None:
        self.folder = cluster.run_folder / "learner"
        self.told: list[tuple[list[int], dict[str, Any]]] = []

    def client(self) -> httpx.Client:
        url, key = ((self.folder / name).read_text().strip() for name in ("gateway.url", "gateway.key"))
        return httpx.Client(
            base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=WAIT_S, trust_env=False
        )  # fmt: skip

    def ask(self, **named: Any) -> list[dict[str, Any]]:
        """All prompts at once, two completions each."""

        def one(prompt: list[int]) -> list[dict[str, Any]]:
            params = {"n": 2, "logprobs": 1, "temperature": 0.8}
            answer = client.post(
                "/inference/v1/generate", json={"token_ids": prompt, "sampling_params": params, **named}
            )
            assert answer.status_code == 200, answer.text
            choices: list[dict[str, Any]] = answer.json()["choices"]
            self.told += [(prompt, choice) for choice in choices]
            return choices

        with self.client() as client, ThreadPoolExecutor(len(PROMPTS)) as threads:
            return [choice for choices in threads.map(one, PROMPTS) for choice in choices]

    def is_up(self) -> bool:
        try:
            with self.client() as client:
                return client.get("/v1/versions").status_code == 200
        except (OSError, httpx.HTTPError):
            return False


def changed(base: Path, folder: Path) -> None:
    """Another model of the same shape."""
    import torch
    from transformers import AutoModelForCausalLM

    model, random = AutoModelForCausalLM.from_pretrained(base), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=random))
    model.save_pretrained(folder)


def test_an_outside_trainer_gets_tokens_of_the_versions_it_names(tmp_path: Path, base_model: Path) -> None:
    config = small_run(tmp_path, base_model).replace("[model]", '[model]\nweights_dtype = "float32"')
    config += "[staleness]\nbound = 1\n"
    with Cluster(tmp_path, config) as cluster:
        cluster.commands["learner"][1] = "serve"
        trainer = Trainer(cluster)
        cluster.start_all()
        cluster.wait_until(trainer.is_up, "the gateway")
        assert {version for choice in trainer.ask() for version in choice["versions"]} == {0}

        changed(base_model, tmp_path / "first")
        typed = ["echo2", "publish", str(tmp_path / "first"), "--run", str(cluster.run_folder), "--version"]
        assert main([*typed[1:], "3"]) == 0 and main([*typed[1:], "3"]) != 0
        cluster.kill("w0")
        assert {version for choice in trainer.ask(min_version=3) for version in choice["versions"]} == {3}
        assert {version for choice in trainer.ask(exact_version=3) for version in choice["versions"]} == {3}

        cluster.kill("learner")
        cluster.start("learner")
        cluster.wait_until(trainer.is_up, "the gateway again")
        assert {version for choice in trainer.ask() for version in choice["versions"]} == {3}, "that stays"
        assert main([*typed[1:], "4", "--last"]) == 0
        assert cluster.wait("learner") == 0 and cluster.wait("w1") == 0, cluster.log("learner")[-2000:]
    assert_sampled(trainer.told, {0: base_model, 3: tmp_path / "first"})
    assert (cluster.run_folder / "learner" / "model" / "model.safetensors").exists()


def assert_sampled(told: list[tuple[list[int], dict[str, Any]]], models: dict[int, Path]) -> None:
    """Every token has the log-probability that its version gives it, at the temperature that was asked for."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded = {v: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for v, path in models.items()}
    assert len(told) == 4 * 2 * len(PROMPTS)
    for prompt, choice in told:
        token_ids, (version,) = choice["token_ids"], set(choice["versions"])
        assert len(choice["versions"]) == len(token_ids)
        with torch.no_grad():
            scores = loaded[version](torch.tensor([prompt + token_ids])).logits[0, len(prompt) - 1 : -1]
        wanted = torch.log_softmax(scores / 0.8, -1)[range(len(token_ids)), token_ids]
        got = torch.tensor([entry["logprob"] for entry in choice["logprobs"]["content"]])
        assert torch.allclose(got, wanted, atol=1e-4), (got, wanted)
