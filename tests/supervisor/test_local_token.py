"""The local token: a file that only its owner reads, made once, and made again when it is lost or revoked."""

from __future__ import annotations

import asyncio
import os
import re
import stat
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from api_support import supervisor_at
from cli_support import Shell
from interlock.config import Config
from interlock.errors import ConfigError
from interlock.postgres.connection import connect
from interlock.store.access import authenticate_token, list_tokens, revoke_token
from interlock.supervisor.local_token import ensure_local_token, local_token_name, token_file
from processes import data_dir

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock.postgres.connection import Connection

NOBODY = 65534


@pytest.fixture
def config(url: str, tmp_path: Path) -> Config:
    return Config(database_url=url, data_dir=tmp_path / "data")


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.store
async def test_only_the_owner_can_read_the_file_whatever_the_umask(config: Config, database: Connection) -> None:
    before = os.umask(0)
    try:
        token = await ensure_local_token(database, config, actor="ada")
    finally:
        os.umask(before)
    assert token.path.read_text(encoding="ascii") == f"{token.secret}\n"
    assert {path.name: mode_of(path) for path in token.path.parent.iterdir()} == {
        "api-token": 0o600,
        "api-token.lock": 0o600,
    }
    assert mode_of(token.path.parent) & 0o066 == 0
    assert (await authenticate_token(database, token.secret)) is not None
    (row,) = await list_tokens(database)
    assert (row.name, row.scope, row.namespaces, row.created_by) == (token.name, "admin", None, "ada")
    assert await ensure_local_token(database, config, actor="ada") == token


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user; the modes are checked above")
@pytest.mark.store
async def test_another_user_of_the_machine_cannot_read_it(config: Config, database: Connection, tmp_path: Path) -> None:
    token = await ensure_local_token(database, config, actor="ada")
    for path in (tmp_path, *tmp_path.parents):
        if path.is_relative_to("/tmp") and path != Path("/tmp"):  # noqa: S108 - the directories of pytest
            path.chmod(0o755)
    look = await asyncio.create_subprocess_exec(
        *("/bin/cat", str(token.path)), user=NOBODY, group=NOBODY, stderr=subprocess.PIPE
    )
    _, error = await look.communicate()
    assert (look.returncode, b"Permission denied" in error) == (1, True)


@pytest.mark.store
async def test_concurrent_first_starts_make_one_token(config: Config, url: str, database: Connection) -> None:
    async def start() -> str:
        async with connect(url) as connection:
            return (await ensure_local_token(connection, config, actor="ada")).secret

    secrets = await asyncio.gather(*(start() for _ in range(8)))
    assert len(set(secrets)) == 1
    assert len(await list_tokens(database, revoked=True)) == 1


@pytest.mark.store
async def test_it_is_made_again_when_the_file_or_the_row_is_gone(
    config: Config, database: Connection, make_database: Callable[[str], str], template: str
) -> None:
    first = await ensure_local_token(database, config, actor="ada")
    first.path.unlink()
    second = await ensure_local_token(database, config, actor="ada")
    assert second.secret != first.secret
    assert await authenticate_token(database, first.secret) is None, "its file may have been stolen"
    await revoke_token(database, second.name, actor="ada")
    third = await ensure_local_token(database, config, actor="ada")
    assert third.secret != second.secret, "a revoked secret does not come back"
    assert await authenticate_token(database, second.secret) is None
    await database.execute(b"delete from interlock.tokens")  # a restored dump
    assert (await ensure_local_token(database, config, actor="ada")).secret == third.secret
    assert await authenticate_token(database, third.secret) is not None
    other = make_database(template)
    async with connect(other) as connection:
        again = await ensure_local_token(connection, Config(database_url=other, data_dir=config.data_dir), actor="ada")
        assert again.secret == third.secret
        assert await authenticate_token(connection, third.secret) is not None


@pytest.mark.store
async def test_data_directories_have_tokens_of_their_own_in_one_database(
    config: Config, url: str, database: Connection, tmp_path: Path
) -> None:
    one = await ensure_local_token(database, config, actor="ada")
    two = await ensure_local_token(database, Config(database_url=url, data_dir=tmp_path / "other"), actor="ada")
    assert one.name != two.name
    for token in (one, two):
        assert await authenticate_token(database, token.secret) is not None
    assert local_token_name(Config()) == "local", "the embedded database has one data directory"


@pytest.mark.store
async def test_a_file_that_others_can_read_or_replace_is_refused(
    config: Config, database: Connection, tmp_path: Path
) -> None:
    path = (await ensure_local_token(database, config, actor="ada")).path

    async def refused(message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            await ensure_local_token(database, config, actor="ada")

    path.chmod(0o640)
    await refused("other users can read .*api-token: remove it")
    path.chmod(0o600)
    path.parent.chmod(0o770)
    await refused("other users can change .*chmod go-w")
    path.parent.chmod(0o700)
    path.write_text("hello", encoding="ascii")
    await refused("does not hold a token")
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    await refused("the local token cannot be kept in .*api-token")
    nowhere = Config(database_url=config.database_url, data_dir=Path("/dev/null/x"))
    with pytest.raises(ConfigError, match=r"set data_dir to a directory of your own, or .*--no-token"):
        await ensure_local_token(database, nowhere, actor="ada")


@pytest.mark.flow
def test_a_supervisor_prints_a_link_that_signs_in_once_and_needs_a_token(url: str) -> None:
    with supervisor_at(url) as (process, address, said):
        assert httpx.get(f"{address}/api/tasks").status_code == 401
        token = said.headers
        assert httpx.get(f"{address}/api/tasks", headers=token).status_code == 200
        link = said.sign_in_url()
        place, _, code = link.partition("#code=")
        assert place == f"{address}/ui/enter"
        shell = Shell(url)
        printed = shell.answer("dashboard", "--url", address)
        with httpx.Client(base_url=address) as browser:
            for each in (code, printed.partition("#code=")[2]):
                assert browser.post("/ui/session", json={"code": each}).json()["scope"] == "admin"
            assert browser.post("/ui/session", json={"code": code}).status_code == 401
            assert browser.get("/ui/session").status_code == 200
        process.terminate()
        process.wait(60)
        everything = said.all()
    assert token["Authorization"].removeprefix("Bearer ") not in everything
    assert re.search(r"the API is at \S+, described at \S+/docs\n", everything)


@pytest.mark.flow
def test_no_token_is_a_choice_that_is_named(url: str) -> None:
    with supervisor_at(url, "--no-token") as (process, address, said):
        assert httpx.get(f"{address}/api/tasks").status_code == 200
        process.terminate()
        process.wait(60)
        assert "every user of this machine is admin, because no token is needed" in said.all()
    assert Shell(url).rows("select 1 from interlock.tokens") == []


@pytest.mark.flow
def test_the_command_line_prints_the_local_token_its_path_and_links(url: str) -> None:
    shell = Shell(url)
    secret = shell.answer("token", "local")
    path = Path(shell.answer("token", "local", "--path"))
    assert (path, path.read_text(encoding="ascii").strip()) == (token_file(Config(data_dir=Path(data_dir()))), secret)
    assert shell.answer("dashboard").startswith("http://127.0.0.1:8321/ui/enter#code=")
    unknown = shell.run("dashboard", "--token-name", "nobody")
    assert (unknown.returncode, "there is no token 'nobody' in use" in unknown.stderr) == (2, True)
    where = shell.run("dashboard", INTERLOCK_SUPERVISOR_HOST="0.0.0.0")  # noqa: S104 - it is no address of a link
    assert (where.returncode, "which address do browsers use?" in where.stderr) == (2, True)
    shell.answer("token", "create", "mailer", "--scope", "operate", "--namespace", "mail", "--namespace", "billing")
    assert "billing, mail" in shell.answer("token", "list")
    assert secret not in shell.answer("token", "list", "--json")
