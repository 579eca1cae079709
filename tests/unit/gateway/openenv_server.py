"""A server of OpenEnv 0.3's messages, in a process of its own: guess a digit. By the library's own server where it is installed.

python -m tests.unit.gateway.openenv_server PORT [json] [own]
"""

from __future__ import annotations

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


def own_application(schema: dict[str, Any]) -> Starlette:
    async def told(_: Request) -> JSONResponse:
        return JSONResponse({"action": schema, "observation": {}, "state": {}})

    async def session(socket: WebSocket) -> None:
        await socket.accept()
        game = Game()
        try:
            while True:
                asked = json.loads(await socket.receive_text())
                try:
                    text, reward, is_done = (
                        game.reset(asked["data"]["seed"])
                        if asked["type"] == "reset"
                        else game.step(asked["data"]["guess"])
                    )
                except (KeyError, ValueError) as error:
                    answer = {"type": "error", "data": {"message": str(error), "code": "EXECUTION_ERROR"}}
                else:
                    observation = {"text": text, "hint": None}
                    answer = {
                        "type": "observation",
                        "data": {"observation": observation, "reward": reward, "done": is_done},
                    }
                await socket.send_text(json.dumps(answer))
        except WebSocketDisconnect:
            pass

    return Starlette(routes=[Route("/schema", told), WebSocketRoute("/ws", session)])


def library_application(takes_json: bool) -> Any:
    from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

    class Guess(Action):
        guess: str

    class SureGuess(Action):
        guess: int
        sure: bool = False

    class Told(Observation):
        text: str = ""
        hint: str | None = None

    class Digits(Environment):  # type: ignore[misc]
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            self.game, self.state_now = Game(), State()

        def reset(self, seed: int = 0, **_: Any) -> Told:
            text, reward, is_done = self.game.reset(seed)
            return Told(text=text, reward=reward, done=is_done)

        def step(self, action: Any, **_: Any) -> Told:
            text, reward, is_done = self.game.step(action.guess)
            return Told(text=text, reward=reward, done=is_done)

        @property
        def state(self) -> State:
            return self.state_now

    return create_fastapi_app(Digits, SureGuess if takes_json else Guess, Told, max_concurrent_envs=8)


if __name__ == "__main__":
    takes_json, is_own = "json" in sys.argv[2:], "own" in sys.argv[2:]
    made = own_application(NUMBER if takes_json else TEXT) if is_own else library_application(takes_json)
    uvicorn.run(made, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", ws="auto")
