"""Remote commands to running processes over NOTIFY, and their answers.

Invariant: a command is a hint like every notification. The answer tells the sender that it arrived; a command for
another process, or one that cannot be parsed, changes nothing. Commands carry no authority: every role that may connect
can send one, so no command may touch data, run code or open a file.
"""

from __future__ import annotations

import secrets
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from interlock.errors import InputError
from interlock.postgres.connection import connect
from interlock.postgres.notifier import ANSWERS_CHANNEL, BROADCAST, listen, receive
from interlock.postgres.query import run
from interlock.store.workers import WORKERS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from interlock.postgres.connection import Connection

MAX_PAYLOAD_BYTES = 7_900  # PostgreSQL refuses payloads of 8000 bytes
ANSWER_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Subscribe:
    """Orchestration side: claim tasks of this namespace too."""

    namespace: str


@dataclass(frozen=True, slots=True)
class Unsubscribe:
    """Orchestration side: claim no more tasks of this namespace; running ones continue."""

    namespace: str


@dataclass(frozen=True, slots=True)
class EventStatus:
    """Handler side: report the counters of the event system between the process and its handlers."""


@dataclass(frozen=True, slots=True)
class Status:
    """System: report the state of the process."""


@dataclass(frozen=True, slots=True)
class Refresh:
    """System: drop cached database state and look for work."""


@dataclass(frozen=True, slots=True)
class Enable:
    """System: claim new tasks, or none until enabled again."""

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
_FIELDS: Mapping[type[Command], Mapping[str, type]] = {
    Subscribe: {"namespace": str},
    Unsubscribe: {"namespace": str},
    Enable: {"enabled": bool},
}
_NAMES = {kind: name for name, kind in COMMANDS.items()}


class Request(NamedTuple):
    """A received command and the token of its answer; None when no answer is expected."""

    command: Command
    token: str | None


def encode_command(command: Command, to: str, token: str | None = None) -> str:
    """Encode a command as a NOTIFY payload."""
    document = {"to": to, "command": _NAMES[type(command)], **asdict(command)}
    return orjson.dumps(document if token is None else {**document, "token": token}).decode()


def parse_command(payload: str, me: str) -> Request | None:
    """Parse a payload; None when it is no command or addresses another process, InputError when it is invalid."""
    if not payload.startswith("{"):
        return None
    try:
        document = dict(orjson.loads(payload))
    except (orjson.JSONDecodeError, TypeError, ValueError):
        raise InputError(f"a command must be a JSON object, not {payload!r}") from None
    if document.pop("to", None) not in {me, BROADCAST}:
        return None
    token, name = document.pop("token", None), document.pop("command", None)
    kind = COMMANDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise InputError(f"unknown command {name!r}; known are {', '.join(COMMANDS)}")
    return Request(_build_command(str(name), kind, document), None if token is None else str(token))


def _build_command(name: str, kind: type[Command], given: Mapping[str, Any]) -> Command:
    fields = _FIELDS.get(kind, {})
    is_valid = given.keys() == fields.keys() and all(
        isinstance(given[field], type_) and given[field] != "" for field, type_ in fields.items()
    )
    if not is_valid:
        needs = ", ".join(f"{field} ({type_.__name__})" for field, type_ in fields.items()) or "nothing"
        raise InputError(f"the command {name} takes {needs}; it was given {', '.join(map(repr, given)) or 'nothing'}")
    return kind(**given)


async def send_command(connection: Connection, command: Command, to: str = BROADCAST, token: str | None = None) -> None:
    """Send a command to one process, or to all, without waiting for an answer."""
    await run(connection, WORKERS["notify_control"], {"payload": encode_command(command, to, token)})


async def send_answer(connection: Connection, token: str, me: str, answer: Mapping[str, Any]) -> None:
    """Answer a command; an answer that exceeds the payload limit is replaced by an error."""
    payload = orjson.dumps({"token": token, "from": me, "answer": answer}, default=str)
    if len(payload) > MAX_PAYLOAD_BYTES:
        payload = orjson.dumps({"token": token, "from": me, "answer": {"error": "the answer is too long to be sent"}})
    await run(connection, WORKERS["notify_answer"], {"payload": payload.decode()})


async def call_processes(
    url: str, command: Command, to: str, *, seconds: float = ANSWER_TIMEOUT_S
) -> dict[str, dict[str, Any]]:
    """Send a command and collect the answers by process; one addressed to a single process ends with its answer.

    It listens over a connection of its own: answers are sent once, so the LISTEN must be committed before the command
    is sent, and the shared notifier, which the CLI does not run, listens at some later time.
    """
    token = secrets.token_hex(8)
    answers: dict[str, dict[str, Any]] = {}

    def collect(_: str, payload: str) -> bool:
        document = orjson.loads(payload)
        if document["token"] == token:
            answers[document["from"]] = document["answer"]
        return bool(answers) and to != BROADCAST

    async with connect(url) as connection:
        await listen(connection, (ANSWERS_CHANNEL,))
        await send_command(connection, command, to, token)
        await receive(connection, seconds, collect)
    return answers
