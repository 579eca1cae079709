"""One attacker in a process of its own, so that what it costs itself is not taken for what it costs the fleet.

    python -m tests.redteam.attacking RUN_FOLDER NAME

It says `ready`, waits for a number of seconds on a line, attacks for so long, and says how many messages it sent; then again.
"""

import asyncio
import sys
from pathlib import Path

import tests.redteam.attackers
import tests.redteam.floods
from tests.redteam.scene import ATTACKERS, scene_of

assert tests.redteam.attackers and tests.redteam.floods  # they register


async def serve(folder: Path, name: str) -> None:
    scene = await scene_of(folder)
    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(await ATTACKERS[name](scene, asyncio.get_running_loop().time() + float(line)), flush=True)


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), sys.argv[2]))
