"""What fetching a large artifact from many peers costs the session core: bytes a second and core, and the longest call.

`python -m benchmarks.bench_pull` writes results/pull.json.
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.broadcast_model.pull_load import PullCost, Puller, PullLoad

RESULTS = Path(__file__).parent / "results" / "pull.json"
CHUNKS_MAX = 20_000
LOADS = {
    "1,000 chunks of 64 KiB": PullLoad(1000),
    "165,000 chunks of 64 KiB": PullLoad(165_000),
    "165,000 chunks of 64 KiB, 15 of 16 kept": PullLoad(165_000, kept_share=0.9375),
    "10,500 chunks of 1 MiB": PullLoad(10_500, 1 << 20),
}


def measured(load: PullLoad) -> PullCost:
    puller = Puller(load)
    puller.begin()
    puller.fetch(CHUNKS_MAX)
    puller.leave()
    return puller.cost


def main() -> None:
    rows: list[dict[str, object]] = []
    print(
        f"{'30 peers hold 7 of 8':<42}{'us/chunk':>10}{'MB/s a core':>13}{'target':>8}{'longest call, ms':>18}{'target':>8}"
    )
    for name, load in LOADS.items():
        cost = measured(load)
        rate, longest = cost.bytes_per_s / 1e6, cost.longest_s * 1e3
        print(f"{name:<42}{cost.chunk_s * 1e6:>10.0f}{rate:>13.0f}{200:>8}{longest:>18.1f}{50:>8}")
        rows += [
            {"name": f"{name}, rate", "value": round(rate), "unit": "MB/s", "target": 200, "better": "higher"},
            {
                "name": f"{name}, longest call",
                "value": round(longest, 1),
                "unit": "ms",
                "target": 50,
                "better": "lower",
            },
        ]
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
