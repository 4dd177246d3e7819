"""Commands to running processes, as they travel over NOTIFY: grouped by the side of a process that they concern.

Invariant: a command is a hint like every notification: whoever sends one hears by the answer whether it arrived, and
what nobody addressed to a process, or it cannot read, changes nothing in it. It carries no authority: every role that
may connect can send one, so none may touch data, run code or open a file.
"""

from __future__ import annotations

import secrets
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from interlock.errors import InputError
from interlock.postgres.connection import connect
from interlock.postgres.notifier import listen, receive
from interlock.postgres.query import run
from interlock.store.workers import WORKERS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from interlock.postgres.connection import Connection

ALL_PROCESSES = "*"
LONGEST = 7_900  # bytes; PostgreSQL refuses payloads of 8000


@dataclass(frozen=True, slots=True)
class Subscribe:
    """Orchestration side: take tasks of this namespace too."""

    namespace: str


@dataclass(frozen=True, slots=True)
class Unsubscribe:
    """Orchestration side: take no more tasks of this namespace; those that run go on."""

    namespace: str


@dataclass(frozen=True, slots=True)
class EventStatus:
    """Handler side: what went through the event system between the process and its handlers."""


@dataclass(frozen=True, slots=True)
class Status:
    """System: how the process is."""


@dataclass(frozen=True, slots=True)
class Refresh:
    """System: look again at everything that is kept in memory of the database, and for work."""


@dataclass(frozen=True, slots=True)
class Enable:
    """System: take on new work, or none until told otherwise."""

    enabled: bool


OrchestrationCommand = Subscribe | Unsubscribe
HandlerCommand = EventStatus
SystemCommand = Status | Refresh | Enable
Command = OrchestrationCommand | HandlerCommand | SystemCommand

COMMANDS: Mapping[str, type[Command]] = {
    "subscribe": Subscribe,
    "unsubscribe": Unsubscribe,
    "event_status": EventStatus,
    "status": Status,
    "refresh": Refresh,
    "enable": Enable,
}
_WANTED: Mapping[type[Command], Mapping[str, type]] = {
    Subscribe: {"namespace": str},
    Unsubscribe: {"namespace": str},
    Enable: {"enabled": bool},
}
_NAMES = {kind: name for name, kind in COMMANDS.items()}


class Request(NamedTuple):
    """A command that reached a process, and the token under which its answer is waited for."""

    command: Command
    token: str | None


def encode_command(command: Command, to: str, token: str | None = None) -> str:
    """Write a command as it travels."""
    said = {"to": to, "command": _NAMES[type(command)], **asdict(command)}
    return orjson.dumps(said if token is None else {**said, "token": token}).decode()


def parse_command(payload: str, me: str) -> Request | None:
    """Read a command; None when it is something else, or for somebody else. InputError when it makes no sense."""
    if not payload.startswith("{"):
        return None
    try:
        said = dict(orjson.loads(payload))
    except (orjson.JSONDecodeError, TypeError, ValueError):
        raise InputError(f"a command must be a JSON object, not {payload!r}") from None
    if said.pop("to", None) not in {me, ALL_PROCESSES}:
        return None
    token, name = said.pop("token", None), said.pop("command", None)
    kind = COMMANDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise InputError(f"unknown command {name!r}; known are {', '.join(COMMANDS)}")
    return Request(_made(str(name), kind, said), None if token is None else str(token))


def _made(name: str, kind: type[Command], given: Mapping[str, Any]) -> Command:
    wanted = _WANTED.get(kind, {})
    fits = given.keys() == wanted.keys() and all(_fits(given[field], type_) for field, type_ in wanted.items())
    if not fits:
        needs = ", ".join(f"{field} ({type_.__name__})" for field, type_ in wanted.items()) or "nothing"
        raise InputError(f"the command {name} takes {needs}; it was given {', '.join(map(repr, given)) or 'nothing'}")
    return kind(**given)


def _fits(value: Any, type_: type) -> bool:
    return isinstance(value, type_) and value != ""


async def send_command(
    connection: Connection, command: Command, to: str = ALL_PROCESSES, token: str | None = None
) -> None:
    """Send a command to one process, or to all."""
    await run(connection, WORKERS["notify_control"], {"payload": encode_command(command, to, token)})


async def send_answer(connection: Connection, token: str, me: str, answer: Mapping[str, Any]) -> None:
    """Answer a command; an answer that is too long says so instead."""
    payload = orjson.dumps({"token": token, "from": me, "answer": answer}, default=str)
    if len(payload) > LONGEST:
        payload = orjson.dumps({"token": token, "from": me, "answer": {"error": "the answer is too long to be sent"}})
    await run(connection, WORKERS["notify_answer"], {"payload": payload.decode()})


async def ask(url: str, command: Command, to: str, *, seconds: float = 5.0) -> dict[str, dict[str, Any]]:
    """Send a command and gather the answers by process; the first one ends the wait, unless everybody was asked."""
    token = secrets.token_hex(8)
    answers: dict[str, dict[str, Any]] = {}

    def heard(_: str, payload: str) -> bool:
        said = orjson.loads(payload)
        if said["token"] == token:
            answers[said["from"]] = said["answer"]
        return bool(answers) and to != ALL_PROCESSES

    async with connect(url) as connection:
        await listen(connection, ("interlock_answers",))
        await send_command(connection, command, to, token)
        await receive(connection, seconds, heard)
    return answers
