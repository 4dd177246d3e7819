"""Remote commands to running processes: groups, parsing and answers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from interlock.errors import InputError
from interlock.store.remote_commands import (
    COMMANDS,
    Enable,
    EventStatus,
    Refresh,
    Status,
    Subscribe,
    Unsubscribe,
    call_processes,
    encode_command,
    parse_command,
    send_answer,
    send_command,
)
from interlock.worker.registration import RemoteCommands
from notifier_support import notifier_at, record
from worker_support import until

if TYPE_CHECKING:
    from interlock.postgres.connection import Connection
    from interlock.store.remote_commands import Command

EVERY: list[Command] = [
    Subscribe("mail"),
    Unsubscribe("mail"),
    EventStatus(),
    Status(),
    Refresh(),
    Enable(enabled=False),
]


class Worker:
    """All three sides of a worker, which write down what reaches them."""

    def __init__(self) -> None:
        self.namespaces = ["default"]
        self.seen: list[str] = []

    def subscribe(self, namespace: str) -> list[str]:
        self.seen.append("subscribe")
        self.namespaces.append(namespace)
        return self.namespaces

    def unsubscribe(self, namespace: str) -> list[str]:
        self.seen.append("unsubscribe")
        if self.namespaces == [namespace]:
            raise InputError("a worker needs at least one namespace")
        self.namespaces.remove(namespace)
        return self.namespaces

    def event_status(self) -> dict[str, Any]:
        self.seen.append("event_status")
        return {"dispatched": 3}

    def status(self) -> dict[str, Any]:
        self.seen.append("status")
        return {"state": "running"}

    def refresh(self) -> None:
        self.seen.append("refresh")

    def enable(self, enabled: bool) -> None:  # noqa: FBT001 - the one word of the command
        self.seen.append(f"enable {enabled}")


def controlled() -> tuple[Worker, RemoteCommands]:
    worker = Worker()
    return worker, RemoteCommands("w1", worker)


@pytest.mark.unit
@pytest.mark.parametrize("command", EVERY, ids=lambda command: type(command).__name__)
def test_commands_survive_a_round_trip(command: Command) -> None:
    assert len(EVERY) == len(COMMANDS)
    request = parse_command(encode_command(command, "w1", "t"), "w1")
    assert request is not None
    assert request == (command, "t")
    assert parse_command(encode_command(command, "*"), "anybody") == (command, None)
    assert parse_command(encode_command(command, "w1"), "w2") is None


@pytest.mark.unit
@pytest.mark.parametrize("payload", ["", "*", "w1", "17"])
def test_other_payloads_are_ignored(payload: str) -> None:
    assert parse_command(payload, "w1") is None


@pytest.mark.unit
@pytest.mark.parametrize(
    ("payload", "told"),
    [
        ("{", "must be a JSON object"),
        ('{"to": "w1"}', "unknown command None; known are subscribe"),
        ('{"to": "w1", "command": "dance"}', "unknown command 'dance'"),
        ('{"to": "w1", "command": ["status"]}', "unknown command"),
        ('{"to": "w1", "command": "subscribe"}', r"takes namespace \(str\)"),
        ('{"to": "w1", "command": "subscribe", "namespace": ""}', r"takes namespace \(str\)"),
        ('{"to": "w1", "command": "enable", "enabled": 1}', r"takes enabled \(bool\)"),
        ('{"to": "w1", "command": "status", "loud": true}', "takes nothing; it was given 'loud'"),
    ],
)
def test_an_invalid_command_is_refused_with_a_hint(payload: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        parse_command(payload, "w1")
    worker, control = controlled()
    assert control.handle(payload) is None
    assert worker.seen == []


@pytest.mark.unit
def test_each_command_group_reaches_its_own_side() -> None:
    worker, control = controlled()
    answers = [control.handle(encode_command(command, "w1", "t")) for command in EVERY]
    assert worker.seen == ["subscribe", "unsubscribe", "event_status", "status", "refresh", "enable False"]
    documents = [answer.document for answer in answers if answer is not None]
    assert documents[2:] == [{"dispatched": 3}, {"state": "running"}, {"refreshed": True}, {"enabled": False}]
    refused = control.handle(encode_command(Unsubscribe("default"), "w1", "t"))
    assert refused == ("t", {"error": "a worker needs at least one namespace"})


@pytest.mark.store
async def test_commands_and_answers_travel_by_notification(url: str, database: Connection) -> None:
    _, control = controlled()
    waiting: set[asyncio.Task[None]] = set()

    def on_control(payload: str) -> None:
        answer = control.handle(payload)
        if answer is not None and answer.token is not None:
            waiting.add(asyncio.create_task(send_answer(database, answer.token, "w1", answer.document)))

    async with notifier_at(url) as notifier:
        notifier.subscribe({"interlock_control": on_control})
        await until(lambda: notifier.is_listening)
        assert await call_processes(url, Status(), "w1") == {"w1": {"state": "running"}}
        assert await call_processes(url, Subscribe("mail"), "w1") == {"w1": {"namespaces": ["default", "mail"]}}
        assert await call_processes(url, Status(), "w2", seconds=0.1) == {}
        assert await call_processes(url, Status(), "*", seconds=2) == {"w1": {"state": "running"}}


@pytest.mark.store
async def test_an_answer_over_the_size_limit_is_replaced_by_an_error(url: str, database: Connection) -> None:
    async with notifier_at(url) as notifier:
        answers, _ = record(notifier, "interlock_answers")
        await until(lambda: notifier.is_listening)
        await send_answer(database, "t", "w1", {"text": "x" * 9000})
        await send_command(database, Refresh())
        await until(lambda: len(answers) > 1)
        assert "too long" in answers[1]
