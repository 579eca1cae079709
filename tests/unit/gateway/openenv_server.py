"""A server of OpenEnv 0.3's messages, in a process of its own: guess a digit.

python -m tests.unit.gateway.openenv_server PORT [json]
"""

import json
import sys
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

TEXT = {"properties": {"guess": {"type": "string"}, "metadata": {"type": "object"}}, "required": ["guess"]}
NUMBER = {"properties": {"guess": {"type": "integer"}, "sure": {"type": "boolean"}}, "required": ["guess"]}


class Game:
    """The digit is the seed's last one. A wrong guess costs a tenth."""

    def __init__(self) -> None:
        self.digit = -1

    def reset(self, seed: int) -> tuple[str, float | None, bool]:
        self.digit = seed % 10
        return "Guess a digit.", None, False

    def step(self, guess: str | int) -> tuple[str, float | None, bool]:
        if not str(guess).strip().isdigit():
            raise ValueError(f"not a digit: {guess}")
        said = int(guess)
        return ("right", 1.0, True) if said == self.digit else ("less" if said > self.digit else "more", -0.1, False)


def application(schema: dict[str, Any]) -> Starlette:
    async def told(_: Request) -> JSONResponse:
        return JSONResponse({"action": schema, "observation": {}, "state": {}})

    async def session(socket: WebSocket) -> None:
        await socket.accept()
        game = Game()
        try:
            while True:
                asked = json.loads(await socket.receive_text())
                data, is_reset = asked["data"], asked["type"] == "reset"
                try:
                    text, reward, is_done = game.reset(data["seed"]) if is_reset else game.step(data["guess"])
                except (KeyError, ValueError) as error:
                    answer = {"type": "error", "data": {"message": str(error), "code": "EXECUTION_ERROR"}}
                else:
                    told = {"observation": {"text": text, "hint": None}, "reward": reward, "done": is_done}
                    answer = {"type": "observation", "data": told}
                await socket.send_text(json.dumps(answer))
        except WebSocketDisconnect:
            pass

    return Starlette(routes=[Route("/schema", told), WebSocketRoute("/ws", session)])


if __name__ == "__main__":
    served = application(NUMBER if "json" in sys.argv[2:] else TEXT)
    uvicorn.run(served, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", ws="auto")
