"""Writes 3,000 conversations for warm_start.toml: digits, and the digits sorted.

python examples/conversations.py > runs/digits.jsonl
"""

import json
import random

rng = random.Random(0)
for _ in range(3000):
    digits = f"{rng.randrange(100_000):05}"
    print(json.dumps({"prompt": f"{digits}>", "completion": "".join(sorted(digits))}))
