"""Names that are part of addresses: one rule for Python, the settings, the command line, REST and SQL."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

import psycopg
import pytest

from api_support import api_at
from factories import enqueue_by_sql
from interlock import Interlock
from interlock.config import Config
from interlock.errors import ConfigError, DefinitionError, InputError
from interlock.model.options import check_options
from interlock.store.access import TokenScope, create_token
from interlock.store.limits import Limit, put_limits
from interlock.worker.settings import WorkerSettings

if TYPE_CHECKING:
    from interlock.postgres.connection import Connection

REFUSED = ("n/s", "rack/7", "a\nb", "a\x7fb", ".", "..", "x" * 201)
# each can be addressed when it is percent-encoded
ACCEPTED = ("a b", "50%", "what?", "a#b", "mail:*", "a\\b", "é", "a;b=c", "%2F", "x" * 200)
RULE = "without slashes and control characters"


async def test_a_name_that_cannot_be_addressed_is_refused_everywhere(url: str, database: Connection) -> None:
    app = Interlock(url)
    async with api_at(url, app=app) as client:
        for name in REFUSED:
            with pytest.raises(ValueError, match=RULE):
                check_options({"namespace": name})
            with pytest.raises(ValueError, match=RULE):
                WorkerSettings(namespaces=(name,))
            for setting in ("namespaces", "worker_name"):
                with pytest.raises(ConfigError, match=RULE):
                    Config.load({setting: name})
            with pytest.raises(psycopg.errors.InvalidParameterValue, match=RULE):
                await enqueue_by_sql(database, type="x", namespace=name)
            with pytest.raises(DefinitionError, match=RULE):
                app.schedule(name, workflow="x", every=60)
            with pytest.raises(InputError, match=RULE):
                await app.pause(name)
            for path, body in (
                ("/api/tasks", {"type": "x", "namespace": name}),
                ("/api/workers", {"namespaces": [name]}),
            ):
                answer = await client.post(path, json=body)
                assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request"), path
        put = await client.put("/api/schedules/x%2Fy", json={"type": "x", "every": 60})
        assert (put.status_code, put.json()["code"]) == (422, "invalid_input")
        assert RULE in put.json()["detail"]


async def test_a_name_that_ends_addresses_may_have_slashes_and_nothing_that_is_removed(
    url: str, database: Connection
) -> None:
    async with api_at(url) as client:
        for name in (".", "..", "a\nb", "a\x7fb"):
            with pytest.raises(ConfigError, match="control characters, and is not"):
                Limit(name, max_running=1)
            with pytest.raises(InputError, match="printable characters, and not"):
                await create_token(database, name, TokenScope.READ, actor="ada")
            answer = await client.post("/api/tokens", json={"name": name})
            assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request"), name
        for name in ("...", "../x", "a/..", "/a", "a/", "a//b", "x/restore", "%2e%2e", *ACCEPTED):
            place = quote(name, safe="")
            assert (await client.post("/api/tokens", json={"name": name[:100]})).status_code == 201
            assert (await client.delete(f"/api/tokens/{quote(name[:100], safe='')}")).json()["name"] == name[:100]
            limit = await client.put(f"/api/limits/{place}", json={"max_running": 1})
            assert limit.json()["key"] == name, limit.text
            assert (await client.get(f"/api/explain/limit/{place}")).json()["id"] == name
            assert (await client.delete(f"/api/limits/{place}")).json()["name"] == name


async def test_a_limit_with_a_slash_is_explained(url: str, database: Connection) -> None:
    await put_limits(database, [Limit("a/b", max_running=1)])
    async with api_at(url) as client:
        answer = await client.get("/api/explain/limit/a%2Fb")
    assert (answer.status_code, answer.json()["id"]) == (200, "a/b"), answer.text


async def test_every_other_name_is_addressed_percent_encoded(url: str) -> None:
    async with api_at(url) as client:
        for name in ACCEPTED:
            assert check_options({"namespace": name}) == {"namespace": name}
            task = (await client.post("/api/tasks", json={"type": "x", "namespace": name})).json()
            path = f"/api/namespaces/{quote(name, safe='')}"
            paused = await client.post(f"{path}/pause")
            assert paused.json() == {"name": name, "paused": True, "tasks": 1}
            listed = (await client.get("/api/tasks", params={"namespace": name, "state": "waiting"})).json()["items"]
            assert [each["id"] for each in listed] == [task["id"]]
            assert (await client.post(f"{path}/resume")).json()["name"] == name
