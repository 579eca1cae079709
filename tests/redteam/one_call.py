"""An agent of one call, for runs of which only the gateway's port matters."""

from __future__ import annotations

import json
import urllib.request

from echo2.gateway.harness import Episode


def play(episode: Episode) -> float:
    """Paid for digits."""
    body = json.dumps({"messages": episode.problem["messages"]}).encode()
    head = {"authorization": f"Bearer {episode.api_key}", "content-type": "application/json"}
    request = urllib.request.Request(f"{episode.base_url}/chat/completions", body, head)
    with urllib.request.urlopen(request, timeout=120) as answer:
        said = json.load(answer)["choices"][0]["message"]["content"]
    return sum(letter.isdigit() for letter in said) / max(1, len(said))
