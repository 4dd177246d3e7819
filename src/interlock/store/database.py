"""Where the database is, how to connect to it, and how its refusals become Python errors.

Invariant: the SQLSTATEs of the guards never reach a caller as driver errors; no message shows a password.
"""

from __future__ import annotations

import json
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import DictRow, dict_row
from psycopg.types.json import Jsonb

from interlock.errors import (
    FenceError,
    IllegalTransition,
    ImmutableRecordError,
    StoreError,
    UnfinishedWorkError,
)
from interlock.store.embedded import EmbeddedServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping

    from interlock.config import Config
    from interlock.store.statements import Statement

Connection = psycopg.AsyncConnection[DictRow]

_REFUSALS: Mapping[str, type[StoreError]] = {
    "IL004": ImmutableRecordError,
    "IL005": FenceError,
    "IL006": UnfinishedWorkError,
}


@contextmanager
def database_url(config: Config, note: Callable[[str], None] | None = None) -> Iterator[str]:
    """Give the URL of the configured server, or run the embedded one for as long as the context lasts."""
    if config.database_url is not None:
        yield config.database_url
        return
    with EmbeddedServer(config.data_dir, note=note) as server:
        yield server.url()


@asynccontextmanager
async def connect(url: str) -> AsyncIterator[Connection]:
    """Open one connection that commits each statement unless told otherwise."""
    try:
        connection = await psycopg.AsyncConnection.connect(
            url, autocommit=True, row_factory=dict_row, fallback_application_name="interlock", connect_timeout=10
        )
    except psycopg.Error as error:
        raise StoreError(f"cannot connect to {_described(url)}: {str(error).strip()}") from None
    async with connection:
        yield connection


async def run(connection: Connection, statement: Statement, parameters: Mapping[str, Any]) -> list[DictRow]:
    """Run one named statement and give its rows."""
    with translated():
        return await (await connection.execute(statement.sql, parameters)).fetchall()


def as_json(value: Any) -> Jsonb | None:
    """Wrap a value for a jsonb column; None stays null."""
    return None if value is None else Jsonb(value)


@contextmanager
def translated() -> Iterator[None]:
    """Turn what the guards refuse into the errors that the engine's callers know."""
    try:
        yield
    except psycopg.Error as error:
        refusal = _refusal(error)
        if refusal is None:
            raise
        raise refusal from error


def _refusal(error: psycopg.Error) -> StoreError | None:
    message, code = error.diag.message_primary or str(error), error.sqlstate or ""
    if code in _REFUSALS:
        return _REFUSALS[code](message)
    if code not in ("IL001", "IL002", "IL003"):
        return None
    detail = json.loads(error.diag.message_detail or "{}")
    return IllegalTransition(
        message,
        machine=detail["machine"],
        row=detail["row"],
        from_state=detail["from"],
        to_state=detail["to"],
        allowed=detail["allowed"],
        sqlstate=code,
    )


def _described(url: str) -> str:
    """Name a server without its secrets."""
    try:
        parts = conninfo_to_dict(url)
    except psycopg.Error:
        return "the database"
    host, port = parts.get("host", "the local server"), parts.get("port")
    return f"{parts.get('dbname', 'the database')} at {host}{f':{port}' if port else ''}"
