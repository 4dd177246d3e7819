"""docs/api.md is executable: its curl commands give the responses that it shows."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from api_support import ADMIN_TOKEN, HERE, api_at
from interlock.lifecycle import JOB
from interlock.supervisor.http.problems import CODES
from jobs_support import app_at, orchestrator_at

if TYPE_CHECKING:
    import httpx

pytestmark = pytest.mark.flow

GUIDE = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
VALUES = re.compile(r'"(\w+)": ("[^"…]*"|true|false|null|\d+|\[\])')


def examples() -> list[tuple[str, str]]:
    """Yield each curl command of the guide with its documented answer."""
    found = []
    for block in re.findall(r"```console\n(.+?)```", GUIDE, re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, answer = part.partition("\n")
            if command.startswith("curl "):
                found.append((command, answer))
    return found


async def typed(client: httpx.AsyncClient, command: str, known: dict[str, str]) -> httpx.Response:
    """Send what curl would send."""
    for name, value in known.items():
        command = command.replace(f"${name}", value)
    words = iter(shlex.split(command)[1:])
    method, address, body, headers = "", "", None, {}
    for word in words:
        if word == "-X":
            method = next(words)
        elif word == "-d":
            body = next(words)
        elif word == "-H":
            name, _, value = next(words).partition(": ")
            headers[name] = value
        elif word != "-s":
            address = word
    return await client.request(method or ("GET" if body is None else "POST"), address, content=body, headers=headers)


def promised(text: str) -> dict[str, Any]:
    """Read the members of an answer that the guide tells, as far as it tells them."""
    return {name: json.loads(value) for name, value in VALUES.findall(text)}


async def until_ended(client: httpx.AsyncClient, job: str) -> None:
    async with asyncio.timeout(30):
        while (await client.get(f"/api/jobs/{job}")).json()["status"] not in JOB.final:
            await asyncio.sleep(0.02)


async def test_the_curl_commands_of_the_guide_give_the_printed_responses(url: str) -> None:
    known = {"API": HERE, "TOKEN": ADMIN_TOKEN}
    app = app_at(url)

    @app.task
    async def add(a: int, b: int) -> int:
        return a + b

    async with api_at(url, app=app) as client, orchestrator_at(url):
        assert len(examples()) > 20
        for command, answer in examples():
            given = await typed(client, command, known)
            assert given.status_code < 500
            said = given.json()
            for name, value in promised(answer).items():
                if name in said:
                    assert said[name] == value, command
                else:
                    assert f'"{name}": {json.dumps(value)}'.replace(" ", "") in given.text.replace(" ", ""), command
            made = re.search(r"/api/(worker|job|task)s -d", command)
            if made:
                known.setdefault(made[1].upper(), said["id"])
            if command.startswith("curl -s $API/api/jobs/$JOB/cancel"):
                await until_ended(client, known["JOB"])  # the next command retries it


def test_the_guide_names_every_code_under_its_status() -> None:
    for code, (status, _) in CODES.items():
        (line,) = [line for line in GUIDE.splitlines() if line.startswith(f"| {status} |")]
        assert f"`{code}`" in line
