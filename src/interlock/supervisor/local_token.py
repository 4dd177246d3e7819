"""The local token: lets the user who runs a supervisor call its API, and no other user of the machine.

Invariant: the secret stands in a file that only its owner can read; the database has its hash. A secret that was
revoked stays refused: a new one takes its place. Any number of processes can start at once; they share one secret.
"""

from __future__ import annotations

import asyncio
import fcntl
import getpass
import hashlib
import os
import re
import socket
import stat
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from interlock.errors import ConfigError
from interlock.postgres.connection import transaction
from interlock.postgres.embedded.server import default_data_dir
from interlock.store.access import (
    MAX_TOKEN_NAME_LENGTH,
    TokenScope,
    create_sign_in_code,
    create_token,
    find_token,
    new_token_secret,
    revoke_token,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from datetime import datetime
    from pathlib import Path

    from interlock.config import Config
    from interlock.postgres.connection import Connection

TOKEN_FILE = "api-token"  # noqa: S105 - a name, in the data directory
LOCK_FILE = "api-token.lock"
SIGN_IN_PATH = "/ui/enter"
_SECRET = re.compile(r"il_[A-Za-z0-9_-]{43}")
_OTHERS_READ = stat.S_IRWXG | stat.S_IRWXO
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_REMEDY = "remove it and a new one is made, or set data_dir to a directory of your own"


@dataclass(frozen=True, slots=True)
class LocalToken:
    """The token of a data directory: its name in the database, its secret, and the file that holds it."""

    name: str
    secret: str
    path: Path


def token_file(config: Config) -> Path:
    """Return the path of the file that holds the local token."""
    return (config.data_dir or default_data_dir()).expanduser().absolute() / TOKEN_FILE


def local_token_name(config: Config) -> str:
    """Return the name under which a database knows the local token.

    An embedded database belongs to one user and one data directory. Another server may be used from several hosts, by
    several users and with several data directories, each with a token of its own.
    """
    if config.database_url is None:
        return "local"
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # an account without a name
        user = str(os.geteuid())
    name = f"local-{user}@{socket.gethostname()}"
    if config.data_dir is not None:
        name += "-" + hashlib.sha256(os.fsencode(token_file(config))).hexdigest()[:8]
    return "".join(letter for letter in name if letter.isprintable())[-MAX_TOKEN_NAME_LENGTH:]


async def ensure_local_token(
    connection: Connection, config: Config, *, actor: str, now: datetime | None = None
) -> LocalToken:
    """Return the local token; make it if its file is missing, or if the database does not accept it."""
    path = token_file(config)
    try:
        async with _locked(path.parent):
            secret = _read_secret(path)
            known = None if secret is None else await find_token(connection, secret, now=now)
            if secret is not None and known is not None and known[1]:
                return LocalToken(known[0], secret, path)
            if secret is None or known is not None:  # a revoked secret does not come back
                secret = new_token_secret()
                _write_private(path, secret)
            name = local_token_name(config)
            async with transaction(connection):
                await revoke_token(connection, name, actor=actor, now=now)  # its secret is not in the file any more
                await create_token(connection, name, TokenScope.ADMIN, actor=actor, secret=secret, now=now)
            return LocalToken(name, secret, path)
    except OSError as error:
        raise ConfigError(
            f"the local token cannot be kept in {path}: {error.strerror or error}; set data_dir to a directory of your "
            "own, or serve a loopback address with --no-token"
        ) from None


async def sign_in_url(connection: Connection, address: str, name: str, *, now: datetime | None = None) -> str:
    """Return a link to the API at an address that signs a browser in once, within two minutes, as a token.

    The code is in the fragment, which browsers send to no server.
    """
    return f"{address.rstrip('/')}{SIGN_IN_PATH}#code={await create_sign_in_code(connection, name, now=now)}"


def write_sign_in_page(config: Config, link: str) -> Path:
    """Write a page that leads to a link, for `--open`: other users can read the arguments of a browser's process."""
    path = token_file(config).with_name("sign-in.html")
    _make_directory(path.parent)
    _write_private(path, f'<!doctype html><meta http-equiv="refresh" content="0; url={link}">')
    return path


@asynccontextmanager
async def _locked(directory: Path) -> AsyncIterator[None]:
    """Hold the lock of the token file, so that processes that start at once make one token."""
    opened = await asyncio.to_thread(_take_lock, directory)
    try:
        yield
    finally:
        os.close(opened)


def _take_lock(directory: Path) -> int:
    _make_directory(directory)
    opened = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        _require_private(opened, directory / LOCK_FILE)
        fcntl.flock(opened, fcntl.LOCK_EX)
    except BaseException:
        os.close(opened)
        raise
    return opened


def _make_directory(directory: Path) -> None:
    """Make the data directory, for this user alone; one that other users can change is refused."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)
        if os.geteuid() == 0:
            path.chmod(0o711)  # the embedded server of root runs as another user, who has to pass
    found = directory.stat()
    if found.st_uid not in {os.geteuid(), 0} or found.st_mode & _OTHERS_WRITE:
        raise ConfigError(
            f"other users can change {directory}, so the local token is not kept there: "
            f"run `chmod go-w {directory}`, or set data_dir to a directory of your own"
        )


def _read_secret(path: Path) -> str | None:
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with os.fdopen(opened, encoding="ascii", errors="replace") as file:
        _require_private(opened, path)
        secret = file.read(100).strip()
    if not _SECRET.fullmatch(secret):
        raise ConfigError(f"{path} does not hold a token: {_REMEDY}")
    return secret


def _require_private(opened: int, path: Path) -> None:
    found = os.fstat(opened)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        raise ConfigError(f"{path} is not a file of this user: {_REMEDY}")
    if found.st_mode & _OTHERS_READ:
        raise ConfigError(f"other users can read {path}: {_REMEDY}")


def _write_private(path: Path, text: str) -> None:
    """Write a file that only this user can read; readers see the old content or the new one."""
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)
    opened = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(opened, "w", encoding="ascii") as file:
        os.fchmod(opened, 0o600)  # whatever the umask
        file.write(f"{text}\n")
        file.flush()
        os.fsync(opened)
    new.replace(path)
