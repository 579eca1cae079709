"""`echo-worker` whose tokens are honest draws with honest numbers, but not those of its leases: it draws by seeds of its own, as
one does that samples several completions and hands in the one that it likes."""

from __future__ import annotations

import sys

from echo2.base.rng import derived_seed
from echo2.cli.worker import main
from echo2.worker import assignments


def own_seed(group_seed: int, index: int) -> int:
    return derived_seed(group_seed, "mine", index)


if __name__ == "__main__":
    assignments.rollout_seed = own_seed
    sys.exit(main())
