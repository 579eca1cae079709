"""What an operator asks of a run's coordinator: `echo2 status`, `echo2 link`, and `echo2 ctl`, the page's buttons from a terminal.

Guarantees: enrols once per identity folder and coordinator, and keeps each certificate; every call has a timeout; the coordinator
checks, logs and saves each change before it answers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any, Self, TypeVar

import grpc
import grpc.aio
from google.protobuf import json_format
from rich.console import Console

from echo2.base import errors
from echo2.base.errors import ConfigError, EchoError, MalformedMessage, Unreachable
from echo2.base.ids import RunId
from echo2.base.units import counted
from echo2.cli.options import link_text
from echo2.cli.processes import held_by_hand, holders_of
from echo2.trust.enrolment import enrol, find_coordinator
from echo2.trust.identity import JoinLink, Role
from echo2.trust.ports import SERVICES
from echo2.trust.tls import error_of, load_credentials, load_or_create_identity, open_channel, save_credentials
from echo2.wire.bounds import check
from echo2.wire.gen.echo2.v1 import coordinator_pb2, coordinator_pb2_grpc

CALL_TIMEOUT_S = 10.0  # the coordinator answers from memory
ACT_TIMEOUT_S = 30.0  # an action may ask a provider
_Answer = TypeVar("_Answer")


class OperatorClient:
    """Use as `async with OperatorClient.at(link, folder) as operator`. `origin`: the coordinator, for errors."""

    def __init__(self, stub: coordinator_pb2_grpc.OperatorStub, origin: str) -> None:
        self._stub, self._origin = stub, origin

    @classmethod
    @asynccontextmanager
    async def at(cls, text: str, folder: Path) -> AsyncIterator[Self]:
        link, identity = JoinLink.parse(text), load_or_create_identity(folder)
        kept = folder / link.peer_id
        credentials = load_credentials(kept, identity)
        if credentials is None:
            credentials = await enrol(link, identity, Role.OPERATOR)
            save_credentials(kept, credentials)
        else:
            await find_coordinator(link, None, credentials, lambda new: save_credentials(kept, new))
        origin = f"coordinator {link.peer_id} at {link.address}"
        limit = ("grpc.max_receive_message_length", SERVICES.reply_bytes)  # the state of a large fleet
        async with open_channel(
            credentials.coordinator_address, credentials.coordinator_peer_id, credentials, [limit]
        ) as channel:
            yield cls(coordinator_pb2_grpc.OperatorStub(channel), origin)

    async def status(self) -> coordinator_pb2.RunStatus:
        return await self._answer(self._stub.GetStatus(coordinator_pb2.GetStatusRequest(), timeout=CALL_TIMEOUT_S))

    async def act(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """Carries out one of the operator's actions, as the page does, and returns its answer."""
        request = coordinator_pb2.ActRequest(name=name, body_json=json.dumps(body).encode())
        reply = await self._answer(self._stub.Act(request, timeout=ACT_TIMEOUT_S))
        check(reply, "the coordinator's answer")
        try:
            value = json.loads(reply.answer_json)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise MalformedMessage("the coordinator's answer: expected a JSON object, got something else")
        return value

    async def _answer(self, call: Awaitable[_Answer]) -> _Answer:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            name, _, text = (error.details() or "").partition(": ")
            kind = getattr(errors, name, None)
            # What the coordinator says of the request.
            if text and isinstance(kind, type) and issubclass(kind, EchoError):
                raise (ConfigError if kind is MalformedMessage else kind)(text) from None
            raise error_of(error, self._origin) from None


OPERATOR_FOLDER = Path("~/.config/echo2/operator")  # one identity for all runs of a user


def answered(run: str, ask: Callable[[OperatorClient], Awaitable[_Answer]]) -> _Answer:
    """`run`: its folder, an operator's link, or @FILE with one."""
    link = Path(run) / "links" / "operator.link"
    if not link.is_file() and not run.startswith(("@", "echo2:")):
        raise ConfigError(
            f"{run}: expected a run's folder (RUNS/NAME) with links/operator.link, an operator's link or @FILE with one, found "
            f"{'a folder without' if Path(run).is_dir() else 'no such folder'}"
        )
    text = link_text(f"@{link}" if link.is_file() else run)

    async def asked() -> _Answer:
        async with OperatorClient.at(text, OPERATOR_FOLDER.expanduser()) as operator:
            return await ask(operator)

    try:
        return asyncio.run(asked())
    except Unreachable as error:
        raise Unreachable(f"{error}; a coordinator that was ended is started again with the same command") from None


def _trained(folder: Path) -> str:
    """What a run at rest has reached, by the learner's files in it; empty without any."""
    from echo2.cli.live import ScreenState

    state = ScreenState("")
    state.read(folder)
    if not state.rewards:
        return ""
    held_out = f", held-out reward {state.evaluations[-1][1]:.2f}" if state.evaluations else ""
    return f"{counted(len(state.rewards), 'step')} trained, reward {state.rewards[-1]:.2f}{held_out}; "


def still_rented(folder: Path) -> str:
    """What the coordinator of a run at rest has rented and not given back, by the state that it left here."""
    from echo2.coordinator.store import SqlStore

    file, rented = folder.resolve() / "coordinator" / "state.sqlite", list[float]()
    with suppress(EchoError):  # its coordinator says what is wrong with its state
        if file.is_file():
            with closing(SqlStore(f"sqlite:///{file}", RunId(folder.resolve().name))) as store:
                rented = [machine.usd_per_hour for machine in store.load().machines if machine.is_open]
    return f"still rented: {counted(len(rented), 'machine')} at {sum(rented):.2f} USD/h; " if rented else ""


def show_status(args: argparse.Namespace, _: Sequence[str]) -> int:
    from echo2.cli.live import ScreenState, draw  # which asks by OperatorClient itself
    from echo2.cli.report import SUMMARY, is_reported, read_report, write_report

    folder = Path(args.run)
    is_at_rest = (folder / "run.lock").is_file() and not (holders_of(folder) or dict(held_by_hand(folder)))
    rented = still_rented(folder) if is_at_rest else ""
    if is_reported(folder) and "learner" not in holders_of(folder):  # which may be about to make more steps
        print((folder / SUMMARY).read_text() if args.json else read_report(folder).text)
        if rented and not args.json:
            print(f"PROBLEM: {rented}the same `echo2 run` gives them back")
        return 0
    if is_at_rest:
        text = f"no process of the run is at work; {_trained(folder)}{rented}the same `echo2 run` goes on"
        raise Unreachable(f"{folder}: {text}")
    status = answered(args.run, OperatorClient.status)
    if args.json:
        print(json_format.MessageToJson(status, preserving_proto_field_name=True))
    elif status.finished and (folder / "learner" / "metrics.jsonl").is_file():
        print(write_report(folder, status).text)
    else:
        state = ScreenState(title=f"run {status.run_id}", status=status)
        state.read(folder)
        Console().print(draw(state))
    return 0


def make_link(args: argparse.Namespace, _: Sequence[str]) -> int:
    """`echo2 link`: prints a new join link, which cannot be shown again; returns the exit code."""
    body = {"role": args.role, "lifetime_s": args.lifetime, "use_limit": args.uses, "label": args.label}
    print(answered(args.run, lambda operator: operator.act("tokens", body))["join_link"])
    return 0


# Short names of what `set` changes most.
SETTINGS = {"budget": "usd_budget", "cap": "usd_per_hour_cap", "S": "staleness_bound"}
WORKER_STATES = {"drain": "draining", "ban": "banned", "quarantine": "quarantined"}
"""Words of the command for states; active, standby and automatic stand for themselves."""
WORDS = (
    "advice | set budget=USD cap=USD/H S=STEPS price.OFFER=USD/H | pause [REASON] | resume | stop [REASON] | "
    "worker NAME drain|standby|active|automatic|quarantine|ban [REASON] | do ACTION JSON"
)
"""What follows the run's folder, as usage says it."""


def control(args: argparse.Namespace, _: Sequence[str]) -> int:
    name, body = request_of(args.words)
    answer = answered(args.run, lambda operator: operator.act(name, body))
    if name == "run/advice":
        print("\n".join(advice_lines(answer)))
    else:
        print(json.dumps(answer, indent=2) if answer else "done")
    return 0


def request_of(words: list[str]) -> tuple[str, dict[str, Any]]:
    match words:
        case ["advice"]:
            return "run/advice", {}
        case ["set", *changes] if changes:
            return "run/settings", _settings(changes)
        case ["pause" | "stop" as what, *reason]:
            return f"run/{what}", {"reason": " ".join(reason)}
        case ["resume"]:
            return "run/resume", {}
        case ["worker", whom, state, *reason]:
            activation = WORKER_STATES.get(state, state)
            return "workers/state", {"peer_id": whom, "activation": activation, "reason": " ".join(reason)}
        case ["do", action, text]:
            try:
                return action, json.loads(text)
            except ValueError as error:
                raise ConfigError(f"echo2 ctl: {action}: expected JSON, got: {error}") from None
    raise ConfigError(f"echo2 ctl: expected one of: {WORDS}; got {' '.join(words)!r}")


def _settings(changes: list[str]) -> dict[str, Any]:
    body: dict[str, Any] = {}
    for change in changes:
        name, _, text = change.partition("=")
        try:
            value = None if text == "none" and name in ("budget", "cap") else float(text)
        except ValueError:
            raise ConfigError(f"echo2 ctl: {change!r}: expected NAME=NUMBER; budget and cap also take none") from None
        if name.startswith("price."):
            body.setdefault("prices", {})[name.removeprefix("price.")] = value
        elif name in SETTINGS:
            body[SETTINGS[name]] = value
        else:
            raise ConfigError(f"echo2 ctl: {name!r}: expected {', '.join(SETTINGS)} or price.OFFER")
    return body


def advice_lines(advice: dict[str, Any]) -> list[str]:
    """Formats the advice: what to do, in order, then the state of the run."""
    end = advice["hours_left"]
    lines = [f"{number}. {step['text']}" for number, step in enumerate(advice["steps"], 1)]
    lines.append(f"limits   {advice['limits']}")
    ends = f"ends in {end:.1f} h" if end else "its end is not known"
    share = (
        f"{advice['utilisation']:.0%} of the time{'' if advice['is_measured'] else ', as predicted'}"
        if advice["utilisation"]
        else "for too short to say how much of the time"
    )
    lines.append(f"trains   {share}; {ends}")
    return [*lines, *(f"assumed  {assumption}" for assumption in advice["assumed"])]
