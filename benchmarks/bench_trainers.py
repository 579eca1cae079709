"""Trainers and clients of other projects on a fleet over an emulated wide-area network: make bench-trainers.

Coordinator, learner and client are at home; three workers of three regions are reached over links of 20 to 60 Mbit/s and 40 to
140 ms (`wan.lab`: a network namespace each, all packets delayed, queued and lost by rate). Each show runs a program of another
project in a process of its own while a worker is killed and, later, started again:

    trl         TRL's GRPOTrainer on door 1 (examples/trl_door.py)
    verifiers   an environment of verifiers with its train client on door 1 (examples/verifiers_door.py)
    tinker      Tinker's SDK under recipes of tinker-cookbook as they are, on door 2: supervised (chat_sl), by reinforcement
                (math_rl), and on-policy distillation; each begins from what the one before has saved

A proxy between client and gateway writes down what each asks and is answered. Afterwards every sampled token that was trained on is
scored again by a plain model with the weights of its version. Needs root and the libraries: a folder of packages for each show, as
`--packages tinker=/opt/tinker` (searched before this interpreter's own), or installed here; a show without its library is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import AutoModelForCausalLM

from benchmarks.wan.lab import Lab, LabHost, lab, missing
from echo2.cli.demo.model import ModelRecipe, make_model
from echo2.learner.options import LearnerLimits
from echo2.learner.publishing.checkpoint import CheckpointStore
from tests.e2e.cluster import Cluster, environment_of, made_models, small_run
from tests.fork_server import ROOT

RESULTS = Path(__file__).parent / "results" / "trainers.json"
MBIT = 125_000.0
HOSTS = (
    LabHost("home", 40 * MBIT, 100 * MBIT, "home"), LabHost("berlin", 20 * MBIT, 60 * MBIT, "eu", 0.001),
    LabHost("oregon", 20 * MBIT, 40 * MBIT, "us", 0.001), LabHost("mumbai", 20 * MBIT, 40 * MBIT, "in", 0.001),
)  # fmt: skip
RTT_S = {
    ("eu", "home"): 0.04, ("home", "us"): 0.09, ("home", "in"): 0.14, ("eu", "us"): 0.1, ("eu", "in"): 0.12, ("in", "us"): 0.2,
    **{(region, region): 0.02 for region in ("home", "eu", "us", "in")},
}  # fmt: skip
SHOW_S = 1500.0  # a show takes minutes; on a busy machine several times as long
RISE = 0.05  # of the mean reward: more than its noise over three steps
NATS_MAX = 1e-4  # float32 on both sides, other kernels and shapes
LIBRARIES = {"trl": "trl", "verifiers": "verifiers.v1", "tinker": "tinker_cookbook"}


# ---- what a client asks, written down


def proxy(port: int, target: str, log: Path) -> None:
    """Passes requests on and writes down each with its answer, a line of JSON."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    client = httpx.AsyncClient(timeout=None, trust_env=False)
    dropped = {"host", "content-length", "connection", "accept-encoding", "transfer-encoding"}

    async def forward(request: Request) -> Response:
        body = await request.body()
        headers = {name: value for name, value in request.headers.items() if name not in dropped}
        url = Path(target).read_text().strip() + request.url.path
        try:
            answer = await client.request(request.method, url, content=body, headers=headers)
        except httpx.HTTPError:
            return Response(status_code=503)
        told = {name: value for name, value in answer.headers.items() if name not in dropped | {"date", "server"}}
        line = {
            "path": request.url.path, "asked": base64.b64encode(body).decode(), "status": answer.status_code,
            "versions": told.get("x-echo2-versions"), "said": base64.b64encode(answer.content).decode(),
        }  # fmt: skip
        with log.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return Response(answer.content, answer.status_code, told)

    app = Starlette(routes=[Route("/{rest:path}", forward, methods=["GET", "POST", "PUT", "DELETE"])])
    asyncio.run(uvicorn.Server(uvicorn.Config(app, port=port, log_level="error")).serve())


def exchanges(log: Path) -> Iterator[tuple[str, bytes, bytes, str]]:
    """Path, request, answer and versions of each call that was answered 200."""
    for line in log.read_text().splitlines() if log.exists() else ():
        told = json.loads(line)
        if told["status"] == 200:
            yield told["path"], base64.b64decode(told["asked"]), base64.b64decode(told["said"]), told["versions"] or ""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One completion: `versions` that may have sampled each token, oldest and newest."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[tuple[int, int], ...]


def sampled_by_tokens(log: Path) -> list[Sampled]:
    """What door 1 answered: the trainers of the shows train on all of it."""
    found = []
    for path, asked, said, _ in exchanges(log):
        if path == "/inference/v1/generate":
            prompt = tuple(json.loads(asked)["token_ids"])
            for choice in json.loads(said)["choices"]:
                logprobs = tuple(entry["logprob"] for entry in choice["logprobs"]["content"])
                versions = tuple((version, version) for version in choice["versions"])
                found.append(Sampled(prompt, tuple(choice["token_ids"]), logprobs, versions))
    return found


def trained_by_tinker(log: Path) -> tuple[list[Sampled], dict[str, int]]:
    """What door 2 trained on and had sampled; how many trained tokens were sampled by nothing, how many answers were given, and how
    many of those by exactly the version of the sampler that was asked."""
    import numpy as np
    from tinker.proto import tinker_public_pb2 as proto

    asked_by_id: dict[str, tuple[tuple[int, ...], int]] = {}
    sampled: dict[tuple[int, ...], list[Sampled]] = {}
    trained, counts = [], {"sampled_by_nothing": 0, "answers": 0, "answers_exact": 0}
    for path, asked, said, versions in exchanges(log):
        if path.endswith("/asample"):
            told = json.loads(asked)
            sampler = told.get("sampling_session_id") or told.get("model_path") or "base@0"
            prompt = tuple(token for chunk in told["prompt"]["chunks"] for token in chunk["tokens"])
            asked_by_id[json.loads(said)["request_id"]] = prompt, int(sampler.rpartition("@")[2])
        elif path.endswith("/retrieve_future") and json.loads(asked)["request_id"] in asked_by_id and versions:
            (prompt, version), (oldest, newest) = (
                asked_by_id[json.loads(asked)["request_id"]],
                map(int, versions.split("-")),
            )
            counts["answers"] += 1
            counts["answers_exact"] += oldest == newest == version
            for one in proto.SampleResponse.FromString(said).sequences:
                tokens = tuple(np.frombuffer(one.tokens, np.int32).tolist())
                logprobs = tuple(np.frombuffer(one.logprobs, np.float32).tolist())
                found = Sampled(prompt, tokens, logprobs, ((oldest, newest),) * len(tokens))
                sampled.setdefault(prompt + tokens, []).append(found)
        elif path.endswith("/forward_backward"):
            for datum in proto.ForwardBackwardRequest.FromString(asked).data:
                if "logprobs" not in datum.loss_fn_inputs:
                    continue
                ids = np.frombuffer(b"".join(c.encoded_text.tokens for c in datum.model_input), np.int32)
                targets = np.frombuffer(datum.loss_fn_inputs["target_tokens"].dense, np.int64)
                held = np.frombuffer(datum.loss_fn_inputs["logprobs"].dense, np.float32)
                whole = (int(ids[0]), *targets.tolist())
                match = [
                    one for one in sampled.get(whole, []) if held[-len(one.tokens) :].tolist() == list(one.logprobs)
                ]
                trained += match[:1]
                counts["sampled_by_nothing"] += 0 if match else int((held != 0).sum())
    return trained, counts


# ---- scored again


def rescored(samples: list[Sampled], model_of: Callable[[int], Any]) -> dict[str, Any]:
    """Compares the log-probability of each token with that of a plain model with the weights of its version."""
    versions = {version for one in samples for pair in one.versions for version in range(pair[0], pair[1] + 1)}
    off = [torch.full((len(one.tokens),), torch.inf) for one in samples]
    for version in sorted(versions):
        model = model_of(version)
        for place, one in enumerate(samples):
            is_of_it = torch.tensor([low <= version <= high for low, high in one.versions])
            if not is_of_it.any():
                continue
            ids = torch.tensor([one.prompt + one.tokens])
            with torch.no_grad():
                logits = model(ids).logits[0, len(one.prompt) - 1 : -1].float()
            wanted = torch.log_softmax(logits, -1)[range(len(one.tokens)), list(one.tokens)]
            apart = (wanted - torch.tensor(one.logprobs)).abs()
            off[place] = torch.where(is_of_it, torch.minimum(off[place], apart), off[place])
    every = torch.cat(off) if off else torch.zeros(0)
    return {
        "tokens": len(every), "right": int((every <= NATS_MAX).sum()), "versions": len(versions),
        "furthest_nats": float(every.max()) if len(every) else 0.0,
    }  # fmt: skip


# ---- the run


@dataclass
class Stage:
    """A run at home and its workers abroad. `log`: what the clients asked; `kills`: what was killed while a client trained."""

    folder: Path
    cluster: Cluster
    lab: Lab
    model: Path
    packages: str
    log: Path
    port: int
    kills: list[str] = field(default_factory=list)

    @property
    def learner(self) -> Path:
        return self.cluster.run_folder / "learner"

    def at_home(self, *words: str) -> list[str]:
        return self.lab.command(0, *words)

    @property
    def environment(self) -> dict[str, str]:
        key = (self.learner / "gateway.key").read_text().strip()
        path = os.pathsep.join(filter(None, (self.packages, str(ROOT))))
        return {
            **environment_of(self.folder), "PYTHONPATH": path, "TINKER_BASE_URL": f"http://127.0.0.1:{self.port}",
            "TINKER_API_KEY": f"tml-{key}", "TINKER_TELEMETRY": "0", "NO_PROXY": "*",
        }  # fmt: skip

    def answers(self) -> int:
        """Completions that the clients have been given."""
        wanted = ("/inference/v1/generate", "/retrieve_future")
        text = self.log.read_text() if self.log.exists() else ""
        return sum(json.loads(line)["path"].endswith(wanted) for line in text[: text.rfind("\n") + 1].splitlines())

    def client(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                self.at_home(sys.executable, *words), env=self.environment, cwd=self.folder, stdout=log, stderr=log
            )

    def played(self, name: str, *words: str, until: Callable[[], bool], victim: str) -> float:
        """Runs a client; kills `victim` once `until` holds and starts it again ten answers later. Returns its seconds."""
        began, process, at = time.monotonic(), self.client(name, *words), -1
        while process.poll() is None:
            if time.monotonic() - began > SHOW_S:
                process.kill()
                raise TimeoutError(f"{name}: expected an end within {SHOW_S:.0f} s")
            if at < 0 and until():
                self.cluster.kill(victim)
                self.kills.append(victim)
                at = self.answers()
            elif at >= 0 and self.cluster.processes[victim].poll() is not None and self.answers() >= at + 10:
                self.cluster.start(victim)
            time.sleep(0.2)
        if self.cluster.processes[victim].poll() is not None and at >= 0:
            self.cluster.start(victim)
        if process.returncode != 0:
            raise RuntimeError(f"{name}: {(self.folder / f'{name}.log').read_text()[-3000:]}")
        return time.monotonic() - began


@contextmanager
def staged(
    folder: Path, model: Path, packages: str, extra: str, *serve: str, prompt_tokens: int = 100
) -> Iterator[Stage]:
    with lab(HOSTS, RTT_S) as hosts:
        config = small_run(folder, model).replace("[model]", '[model]\nweights_dtype = "float32"')
        config = config.replace("[coordinator]", f'[coordinator]\nhost = "{hosts.address(0)}"')
        config = config.replace("max_new_tokens = 7", f"max_new_tokens = 12\nmax_prompt_tokens = {prompt_tokens}")
        with Cluster(folder, config + extra, workers=3) as cluster:
            cluster.commands["learner"][1:2] = serve
            path = f"PYTHONPATH={os.pathsep.join((str(ROOT), packages))}"
            cluster.placed = lambda name, argv: hosts.command(
                int(name[1:]) + 1 if name[0] == "w" else 0, "env", path, *argv
            )
            stage = Stage(folder, cluster, hosts, model, packages, folder / "asked.jsonl", 8440)
            cluster.start_all()
            cluster.wait_until((stage.learner / "gateway.url").exists, "the gateway")
            target = str(stage.learner / "gateway.url")
            words = ("-m", "benchmarks.bench_trainers", "--proxy", str(stage.port), target, str(stage.log))
            between = subprocess.Popen(stage.at_home(sys.executable, *words), cwd=ROOT)
            try:
                yield stage
            finally:
                between.kill()
                between.wait()


def door_folder(stage: Stage) -> Path:
    """What the examples read of a learner, with the proxy's address."""
    door = stage.folder / "door"
    door.mkdir(exist_ok=True)
    (door / "gateway.url").write_text(f"http://127.0.0.1:{stage.port}\n")
    (door / "gateway.key").write_text((stage.learner / "gateway.key").read_text())
    return door


def folders_of(weights: Path, base: Path) -> Callable[[int], Any]:
    return lambda version: AutoModelForCausalLM.from_pretrained(
        weights / f"step-{version}" if version else base, dtype=torch.float32
    ).eval()


# ---- the shows


def show_trl(folder: Path, packages: str) -> dict[str, Any]:
    model = made_models() / "digits"
    make_model(model, ModelRecipe())
    with staged(folder, model, packages, "[staleness]\nbound = 1\n", "serve", prompt_tokens=40) as stage:
        door = door_folder(stage)
        words = (str(ROOT / "examples/trl_door.py"), str(model), str(door))
        seconds = stage.played("trl", *words, until=lambda: stage.answers() >= 60, victim="w0")
    rewards = [float(text) for text in re.findall(r"'reward': '?([0-9.]+)", (folder / "trl.log").read_text())]
    return outcome(stage, seconds, rewards, rescored(sampled_by_tokens(stage.log), folders_of(door / "trl", model)))


def show_verifiers(folder: Path, packages: str) -> dict[str, Any]:
    model = chat_model()
    with staged(folder, model, packages, "[staleness]\nbound = 1\n", "serve") as stage:
        door = door_folder(stage)
        words = (str(ROOT / "examples/verifiers_door.py"), str(model), str(door))
        seconds = stage.played("verifiers", *words, until=lambda: stage.answers() >= 100, victim="w1")
    rewards = [float(text) for text in re.findall(r"reward ([0-9.]+)", (folder / "verifiers.log").read_text())]
    return outcome(stage, seconds, rewards, rescored(sampled_by_tokens(stage.log), folders_of(door / "weights", model)))


def show_tinker(folder: Path, packages: str) -> dict[str, Any]:
    model, draw = chat_model(), random.Random(0)
    numbers = [(draw.randint(0, 100), draw.randint(0, 100)) for _ in range(2048)]
    with (folder / "sums.jsonl").open("w") as file:
        for x, y in numbers:
            chat = [
                ("user", "What is 4 + 5?"),
                ("assistant", "9"),
                ("user", f"What is {x} + {y}?"),
                ("assistant", str(x + y)),
            ]
            file.write(json.dumps({"messages": [{"role": who, "content": text} for who, text in chat]}) + "\n")
    data = folder / "zwhe99" / "DeepMath-103K"  # which the distillation reads from a hub, or else from here
    data.mkdir(parents=True)
    (data / "train.jsonl").write_text(
        "".join(json.dumps({"question": f"What is {x} + {y}?"}) + "\n" for x, y in numbers[:48])
    )
    recipes, found, seconds = "tinker_cookbook.recipes", {}, 0.0
    common = (f"model_name={model}", "renderer_name=role_colon", "behavior_if_log_dir_exists=resume", "eval_every=0")
    with staged(folder, model, packages, "[staleness]\nbound = 2\n", "serve", "--trains") as stage:
        with kept(stage) as versions:

            def recipe(name: str, log: str, victim: str, answers: int, *words: str) -> None:
                nonlocal seconds
                at, told = stage.answers(), ("-m", f"{recipes}.{name}", *common, f"log_path={folder / log}", *words)
                seconds += stage.played(log, *told, until=lambda: stage.answers() >= at + answers, victim=victim)

            recipe(
                "chat_sl.train", "supervised", "w0", 20, f"dataset={folder / 'sums.jsonl'}", "batch_size=64", "max_length=256",
                "learning_rate=5e-3", "lr_schedule=constant", "max_steps=14", "save_every=7",
            )  # fmt: skip
            begun = f"load_checkpoint_path={saved(folder / 'supervised', 'state_path')}"
            # From a model that mostly does not end its answers as the recipe asks, which costs it a tenth.
            reinforce = (
                "env=arithmetic", "group_size=8", "groups_per_batch=12", "learning_rate=7e-4", "max_tokens=12", "max_steps=20",
                "loss_fn=importance_sampling", "save_every=5", begun,
            )  # fmt: skip
            recipe("math_rl.train", "reinforced", "w1", 120, *reinforce)
            teacher = f"teacher_checkpoint={saved(folder / 'reinforced', 'sampler_path')}"
            recipe(
                "distillation.on_policy_distillation", "distilled", "w2", 30, "dataset=deepmath", f"teacher_model={model}",
                teacher, "group_size=4", "groups_per_batch=12", "learning_rate=5e-4", "max_tokens=5", "save_every=4", begun,
            )  # fmt: skip
        trained, counts = trained_by_tinker(stage.log)
        result = {**rescored(trained, versions), **counts}
    found = outcome(stage, seconds, column(folder / "reinforced", "env/all/reward/total"), result)
    found["supervised nats"] = ends(column(folder / "supervised", "train_mean_nll"))
    found["teacher_kl"] = ends(column(folder / "distilled", "teacher_kl"))
    return found


def saved(log: Path, kind: str) -> str:
    """The path of the last state or sampler that a recipe has saved."""
    lines = [json.loads(line) for line in (log / "checkpoints.jsonl").read_text().splitlines()]
    return str(next(line[kind] for line in reversed(lines) if line.get(kind)))


def column(log: Path, name: str) -> list[float]:
    lines = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


def ends(values: list[float]) -> list[float]:
    return [round(sum(part) / max(1, len(part)), 3) for part in (values[:3], values[-3:])]


def outcome(stage: Stage, seconds: float, rewards: list[float], scored: Mapping[str, Any]) -> dict[str, Any]:
    return {"seconds": round(seconds), "rewards": ends(rewards), "steps": len(rewards), "killed": stage.kills, **scored}


@contextmanager
def kept(stage: Stage) -> Iterator[Callable[[int], Any]]:
    """Keeps every checkpoint that the learner writes, and gives a plain model with the weights of a version."""
    import shutil
    import threading

    source, target, over = stage.learner / "checkpoints", stage.folder / "kept", threading.Event()

    def copy() -> None:
        for folder in source.glob("step-*"):
            if not (target / folder.name).exists():
                try:
                    shutil.copytree(folder, target / folder.name, copy_function=os.link)
                except OSError:  # it was removed meanwhile
                    shutil.rmtree(target / folder.name, ignore_errors=True)

    def watch() -> None:
        while not over.wait(0.1):
            copy()

    def model_of(version: int) -> Any:
        model = AutoModelForCausalLM.from_pretrained(stage.model, dtype=torch.float32).eval()
        if version:
            held = CheckpointStore(target, LearnerLimits()).load(version, None)  # type: ignore[arg-type]
            model.load_state_dict(dict(held.published), strict=False)
        return model

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield model_of
    finally:
        over.set()
        thread.join()


def chat_model() -> Path:
    """A small Qwen3 with random weights that reads characters and has a chat template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    folder = made_models() / "chat"
    if (folder / "config.json").exists():
        return folder
    words = ["<pad>", "<eos>", "\n", *map(chr, range(32, 127))]
    core = Tokenizer(models.WordLevel({text: number for number, text in enumerate(words)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token if m.role == 'assistant' else '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(words), hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, head_dim=32,
        intermediate_size=384, max_position_embeddings=256, pad_token_id=0, eos_token_id=1, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


SHOWS: dict[str, Callable[[Path, str], dict[str, Any]]] = {
    "trl": show_trl, "verifiers": show_verifiers, "tinker": show_tinker
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(SHOWS))
    parser.add_argument("--packages", action="append", default=[], metavar="SHOW=FOLDER")
    parser.add_argument("--folder", type=Path, help="kept afterwards; else a temporary one")
    parser.add_argument("--proxy", nargs=3, help=argparse.SUPPRESS)
    own = parser.parse_args()
    if own.proxy:
        proxy(int(own.proxy[0]), own.proxy[1], Path(own.proxy[2]))
        return 0
    if lacking := missing():
        print(f"needs {lacking}")
        return 1
    packages = dict(pair.split("=", 1) for pair in own.packages)
    shows = json.loads(RESULTS.read_text())["shows"] if RESULTS.exists() else {}
    is_right = True
    for name in [own.only] if own.only else SHOWS:
        path = packages.get(name, "")
        probe = [sys.executable, "-c", f"import {LIBRARIES[name]}"]
        if subprocess.run(probe, env={**os.environ, "PYTHONPATH": path}, capture_output=True, check=False).returncode:
            print(f"{name}: left out, {LIBRARIES[name]} is not installed")
            continue
        with tempfile.TemporaryDirectory() as temporary:
            folder = (own.folder or Path(temporary)) / name
            folder.mkdir(parents=True)
            sys.path.append(path)
            show = shows[name] = SHOWS[name](folder, path)
        print(f"{name}: {json.dumps(show)}", flush=True)
        write(shows)
        is_right = is_right and all(row["value"] >= row["target"] for row in rows_of(name, show))
    return 0 if is_right else 1


def rows_of(name: str, show: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every trained token scores as it was sampled, and the reward rises."""
    trained, (first, last) = show["tokens"] + show.get("sampled_by_nothing", 0), show["rewards"]
    share, more = 100 * show["right"] / max(1, trained), round(first + RISE, 3)
    return [
        {"name": f"{name}: {what}", "value": value, "unit": unit, "target": target, "better": "higher"}
        for what, value, unit, target in (
            ("trained tokens that score as sampled", share, "%", 100.0), ("reward, first steps to last", last, "", more)
        )
    ]  # fmt: skip


def write(shows: Mapping[str, Mapping[str, Any]]) -> None:
    rows = [row for name, show in shows.items() for row in rows_of(name, show)]
    RESULTS.write_text(json.dumps({"shows": shows, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
