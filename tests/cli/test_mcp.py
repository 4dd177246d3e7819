"""`interlock mcp`: the real command, called by the client of the official SDK over standard input and output."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from mcp import Client, StdioServerParameters

from cli_support import environment
from factories import enqueue, task_row
from interlock.cli.mcp_tools import MAX_ANSWER_BYTES, bounded_json
from interlock.store.tasks import read_task_history
from processes import clean_environment

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from cli_support import Shell
    from interlock import Interlock
    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.flow

READ_TOOLS = {"status", "explain", "history", "doctor", "find"}


class Agent:
    """A connected client whose calls return the JSON of the answer."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def tools(self) -> dict[str, Any]:
        return {tool.name: tool for tool in (await self._client.list_tools()).tools}

    async def call(self, tool: str, **arguments: Any) -> Any:
        answer = await self._client.call_tool(tool, arguments)
        assert not answer.is_error, answer
        (content,) = answer.content
        return json.loads(content.text)  # type: ignore[union-attr]

    async def refused(self, tool: str, **arguments: Any) -> str:
        answer = await self._client.call_tool(tool, arguments)
        assert answer.is_error, answer
        return str(answer.content[0].text)  # type: ignore[union-attr]


@asynccontextmanager
async def agent(url: str, *flags: str) -> AsyncIterator[Agent]:
    """Start the command as an agent does, and connect to it."""
    server = StdioServerParameters(
        command=sys.executable, args=["-m", "interlock", "mcp", *flags], env=clean_environment(url)
    )
    async with asyncio.timeout(100), Client(server) as client:
        yield Agent(client)


async def test_an_agent_sees_what_happens_and_changes_nothing(url: str, database: Connection, jobs: Interlock) -> None:
    task = await enqueue(database, "mail", {"to": "a"}, tags=("urgent",))
    await enqueue(database, "other", namespace="fulfillment")
    job = await jobs.submit("gates")
    async with agent(url) as used:
        tools = await used.tools()
        assert set(tools) == READ_TOOLS
        assert all(tool.annotations.read_only_hint for tool in tools.values())
        assert tools["find"].input_schema["properties"]["what"]["enum"] == ["tasks", "jobs", "inbox"]
        overview = await used.call("status")
        assert overview["namespaces"]["default"]["tasks"]["pending"] == 1
        shown = await used.call("status", id=str(task))
        assert (shown["kind"], shown["state"], shown["type"]) == ("task", "pending", "mail")
        shown = await used.call("status", id=str(job.id))
        assert shown["kind"] == "job"
        assert {step["step"] for step in shown["steps"]} == {"paid", "boss", "ship"}
        why = await used.call("explain", id=str(task))
        assert why["state"] == "pending"
        assert why["facts"]
        moves = await used.call("history", id=str(task))
        assert [move["event"] for move in moves["moves"]] == ["create"]
        assert (await used.call("history", id=str(job.id)))["kind"] == "job"
        found = await used.call("find", what="tasks", states=["pending"], tag="urgent", created_after="1h")
        assert [each["id"] for each in found["tasks"]] == [str(task)]
        found = await used.call("find", what="jobs", name="gates", limit=1)
        assert ([each["id"] for each in found["jobs"]], found["more"]) == ([str(job.id)], True)
        assert (await used.call("doctor"))["severity"] != "error"
        # mistakes are answered, and the server goes on
        assert "there is no task or job" in await used.refused("status", id="00000000-0000-7000-8000-000000000000")
        assert "id must be a UUID, got 'nonsense'" in await used.refused("history", id="nonsense", kind="task")
        assert "no condition worker" in await used.refused("find", what="jobs", worker="w")
        assert "states must be a list of waiting" in await used.refused("find", what="tasks", states=["lost"])
        assert "such as 2h" in await used.refused("explain", id=str(task), at="yesterday")
        assert "cancel" in await used.refused("cancel", id=str(task))
        # a misspelled condition does not find everything
        assert "state\n  Extra inputs are not permitted" in await used.refused("find", what="tasks", state="error")
        assert tools["find"].input_schema["additionalProperties"] is False
        # hostile values come back as short messages
        for text in ("\0", "a\0b", "'; drop table interlock.tasks; --", "", "%s%(x)s", "x" * 1_000_000, "{" * 1_000):
            for tool in ("status", "explain", "history"):
                assert len(await used.refused(tool, id=text)) < 3_000
            assert len(await used.refused("explain", id=text, kind="worker")) < 3_000
            assert len(await used.refused("find", what="tasks", created_after=text)) < 3_000
        for limit in (0, -1, 10**30):
            assert "limit" in await used.refused("find", what="tasks", limit=limit)
    assert (await task_row(database, task))["state"] == "pending"


async def test_an_agent_with_the_scope_operate_acts_under_its_own_name(
    url: str, database: Connection, jobs: Interlock
) -> None:
    task = await enqueue(database, "mail")
    job = await jobs.submit("gates")
    async with agent(url, "--scope", "operate") as used:
        tools = await used.tools()
        assert set(tools) == READ_TOOLS | {"cancel", "requeue", "approve"}
        assert tools["cancel"].annotations.destructive_hint
        assert await used.call("cancel", id=str(task), reason="by mistake") == {
            "kind": "task",
            "id": str(task),
            "outcome": "canceled",
        }
        assert (await used.call("requeue", id=str(task), reason="after all"))["outcome"] == "requeued"
        assert (await used.call("requeue", id=str(task)))["outcome"] == "not requeued: it is pending"
        assert f"`interlock jobs retry {job.id}`" in await used.refused("requeue", id=str(job.id))
        answer = await used.call("approve", job=str(job.id), step="boss", approved=True, comment="fine")
        assert answer["outcome"] == "sent"
        assert "takes the id of the job" in await used.refused("approve", job=str(task), step="boss", approved=True)
        assert (await used.call("cancel", id=str(job.id)))["outcome"] == "canceled"
    records = await read_task_history(database, task)
    assert [(record.event, record.reason) for record in records[1:]] == [
        ("cancel", "by mistake"),
        ("requeue", "after all"),
    ]
    assert {record.actor.partition(":")[0] for record in records[1:]} == {"mcp"}
    (signal,) = await jobs.job(job.id).signals()
    assert signal.payload["by"].startswith("mcp")


async def test_an_agent_can_be_limited_to_namespaces(url: str, database: Connection) -> None:
    own = await enqueue(database, "mail", namespace="fulfillment")
    other = await enqueue(database, "mail")
    async with agent(url, "--scope", "operate", "--namespace", "fulfillment") as used:
        overview = await used.call("status")
        assert set(overview["namespaces"]) == {"fulfillment"}
        assert [task["id"] for task in (await used.call("find", what="tasks"))["tasks"]] == [str(own)]
        assert (await used.call("explain", id=str(own)))["id"] == str(own)
        for tool in ("status", "explain", "history", "cancel", "requeue"):
            assert "in another namespace" in await used.refused(tool, id=str(other))
        assert "limited to" in await used.refused("doctor")
        assert "limited to the namespaces fulfillment" in await used.refused("explain", id="default", kind="namespace")
        assert "the kind must be one of" in await used.refused("history", id="some-worker")
    assert (await task_row(database, other))["state"] == "pending"


def test_answers_are_bounded() -> None:
    text = bounded_json({"tasks": [{"input": "x" * 5_000, "error": {"message": "y" * 300}} for _ in range(500)]})
    assert len(text.encode()) <= MAX_ANSWER_BYTES
    document = json.loads(text)
    assert "cut_to_fit" in document
    assert "elements left out" in document["tasks"][-1]
    nested: Any = "z" * 100
    for _ in range(40):
        nested = [nested] * 3 if len(json.dumps(nested)) < 3_000_000 else [nested]
    assert len(bounded_json(nested).encode()) <= MAX_ANSWER_BYTES
    assert json.loads(bounded_json({"small": (1, {2})})) == {"small": [1, [2]]}


def test_help_teaches_how_to_register_it(shell: Shell) -> None:
    shown = " ".join(shell.answer("mcp", "--help").replace("│", " ").split())
    assert '"mcpServers": {"interlock": {"command": "interlock"' in shown
    assert "interlock[mcp]" in shown


@pytest.mark.cold
def test_without_the_extra_the_error_names_it(url: str) -> None:
    code = (
        "import runpy, sys; sys.modules['mcp'] = None; sys.argv = ['interlock', 'mcp']; "
        "runpy.run_module('interlock', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(url), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.strip().endswith("`interlock mcp` needs the extra `mcp`: pip install 'interlock[mcp]'")
