"""A harness of one's own, in a process of its own: it asks the gateway for episodes, plays them, and posts rewards.

With a learner whose run file says `[agent]` and `listen = "127.0.0.1:8430"` (and no harness):

    python examples/outside_harness.py http://127.0.0.1:8430 runs/NAME/learner/gateway.key

On another machine: https, a copy of the key, and SSL_CERT_FILE naming the certificate in `agent.tls`, if no authority that the
machine trusts has signed it. A third argument is a command that plays each episode, as `agent.harness` would run it.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI

AT_ONCE = 8


def played(client: OpenAI, problem: dict[str, Any]) -> float:
    """One episode: the share of digits that stand where they belong, after one question back."""
    messages: list[Any] = list(problem["messages"])
    said = ""
    for _ in range(2):
        reply = client.chat.completions.create(model="policy", messages=messages, max_tokens=8)
        said = "".join((reply.choices[0].message.content or "").split())
        messages += [reply.choices[0].message.model_dump(include={"role", "content"}), problem["messages"][-1]]
    wanted = problem["answer"]
    return sum(one == other for one, other in zip(said, wanted, strict=False)) / max(len(said), len(wanted))


def played_by(command: str, address: str, episode: dict[str, Any]) -> float:
    """One episode by a program of its own, whose last line of output is the reward."""
    told = {
        "OPENAI_BASE_URL": f"{address}/v1", "OPENAI_API_KEY": episode["key"], "ECHO2_PROBLEM": json.dumps(episode["problem"])
    }  # fmt: skip
    done = subprocess.run(shlex.split(command), env=os.environ | told, stdout=subprocess.PIPE, check=True, text=True)
    return float(done.stdout.strip().splitlines()[-1])


def play_until_the_run_ends(address: str, key: str, command: str = "") -> int:
    """How many episodes were played."""
    count = 0
    with httpx.Client(base_url=address, headers={"authorization": f"Bearer {key}"}, timeout=600) as gateway:
        stock = OpenAI(base_url=f"{address}/v1", api_key=key)
        while True:
            try:
                seat = gateway.post("/v1/sessions", json={})
                if seat.status_code == 429:
                    time.sleep(float(seat.headers["retry-after"]))
                    continue
                if seat.status_code == 401:
                    sys.exit(f"{address}: expected the key in learner/gateway.key of the run that is there now")
                episode = seat.raise_for_status().json()
                mine = stock.with_options(api_key=episode["key"])
                reward = played_by(command, address, episode) if command else played(mine, episode["problem"])
                gateway.post(f"/v1/sessions/{episode['id']}/reward", json={"reward": reward})
                count += 1
            except httpx.TransportError as error:
                if not count:
                    print(f"{address}: expected the run's gateway, got {error}", file=sys.stderr)
                return count  # the learner has ended
            except Exception as error:  # noqa: BLE001 - an episode that broke is begun anew by the learner
                print(f"an episode broke: {error}", file=sys.stderr)


def main() -> None:
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    address, key_file, command = [*sys.argv[1:], ""][:3]
    key = Path(key_file).read_text().strip()
    with ThreadPoolExecutor(AT_ONCE) as threads:
        counts = threads.map(lambda _: play_until_the_run_ends(address, key, command), range(AT_ONCE))
        print(f"played {sum(counts)} episodes")


if __name__ == "__main__":
    main()
