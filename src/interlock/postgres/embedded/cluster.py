"""Lays out on disk what an embedded server needs: its directories, its databases and its configuration.

Everything written for the server by another user than its own lies outside the directories that belong to the server,
so that root never follows a link planted there; and a database cluster appears under its name only when it is complete.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from typing import TYPE_CHECKING
from urllib.parse import quote

from interlock.errors import EmbeddedServerError
from interlock.postgres.embedded import keeper
from interlock.postgres.embedded.install import (
    WAY_OUT,
    Account,
    disk_full,
    major_version,
    own_account,
    reachable_install,
    require_name,
    require_passage,
    server_account,
    size_of_copy,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

ROLE = "interlock"
DATABASE = "interlock"
ROOM_FOR_A_NEW_CLUSTER = 100 * 2**20
LONGEST_LOG = 10 * 2**20

_DEFAULTS = {
    "max_connections": "200",
    "shared_buffers": "128MB",
    "log_checkpoints": "off",
    "log_line_prefix": "%m [%p] ",
}
_LOCALE = ("--encoding=UTF8", "--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8")
_INITDB = (*_LOCALE, "--auth=peer", "--no-sync")  # what is written goes to disk once, when it is complete


class Cluster:
    """The files of one embedded server."""

    def __init__(self, data_dir: Path, settings: Mapping[str, str], report_progress: Callable[[str], None]) -> None:
        self.data_dir = data_dir
        self.pgdata = data_dir / keeper.PGDATA
        self.log = data_dir / keeper.LOG
        self.socket_dir = keeper.socket_dir(data_dir)
        self._settings = dict(settings)
        self._report_progress = report_progress

    def url(self, database: str) -> str:
        """Return a libpq URL; with the port, because PGPORT would move the socket elsewhere."""
        host = quote(str(self.socket_dir), safe="")
        return f"postgresql://{ROLE}@/{quote(database, safe='')}?host={host}&port={keeper.PORT}"

    def version(self) -> str | None:
        """Return the major version of the databases on disk, if there are any."""
        try:
            return (self.pgdata / "PG_VERSION").read_text(encoding="ascii", errors="replace").strip()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def says_ready(self) -> bool:
        """Tell whether the server has noted that it accepts connections."""
        try:
            noted = (self.pgdata / "postmaster.pid").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return False
        return noted[7:8] != [] and noted[7].strip() == "ready"

    def make_directory(self) -> None:
        """Make the data directory, private unless another user has to walk through it."""
        account = server_account()
        require_name(self.data_dir, str.isprintable)  # its configuration file could not name it
        missing = [path for path in (self.data_dir, *self.data_dir.parents) if not path.exists()]
        nearest = missing[-1].parent if missing else self.data_dir
        if not nearest.is_dir():
            raise EmbeddedServerError(
                f"{self.data_dir} cannot be a data directory, because {nearest} is not a directory: {WAY_OUT}."
            )
        require_passage(account, nearest)
        mode = 0o711 if account.is_other else 0o700
        for path in reversed(missing):
            _make(path, mode)
        self._require_own(account)

    def _require_own(self, account: Account) -> None:
        found = self.data_dir.stat()
        if account.is_other and (found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
            raise EmbeddedServerError(
                f"{self.data_dir} can be changed by other users than root, so root does not keep its server there: "
                f"{WAY_OUT}."
            )

    def prepare(self, lock: int) -> list[str]:
        """Make everything ready for a server of which no process is alive, and return the command that runs it.

        The lock is start.lock, held by the caller.
        """
        account = server_account()
        self._require_room(account)
        install = reachable_install(account, self.data_dir)
        self._require_version(major_version(install))
        if self.version() is None:
            self._report_progress(f"Setting up PostgreSQL {major_version(install)} in {self.data_dir} (only once)")
            self._create(account, install, lock)
        self._report_progress(f"Starting PostgreSQL in {self.data_dir}")
        _claim(self.socket_dir, account)
        self._forget_dead_server()
        self._write_configuration(own_account())
        if self.log.exists() and self.log.stat().st_size > LONGEST_LOG:
            os.truncate(self.log, 0)
        # On the command line these outrank every file and ALTER SYSTEM: who may connect is not a matter of taste.
        fixed = {
            "config_file": str(self.data_dir / "interlock.conf"),
            "hba_file": str(self.data_dir / "pg_hba.conf"),
            "ident_file": str(self.data_dir / "pg_ident.conf"),
            "listen_addresses": "",
            "port": str(keeper.PORT),
            "unix_socket_directories": '"' + str(self.socket_dir).replace('"', '""') + '"',
            "unix_socket_permissions": "0700",
        }
        options = [part for name, value in fixed.items() for part in ("-c", f"{name}={value}")]
        return [str(install / "bin" / "postgres"), "-D", str(self.pgdata), *options]

    def _require_version(self, ours: int) -> None:
        theirs = self.version()
        if theirs is None and self.pgdata.exists() and any(self.pgdata.iterdir()):
            raise EmbeddedServerError(f"{self.pgdata} holds files, but no PostgreSQL databases: {WAY_OUT}.")
        if theirs is not None and theirs != str(ours):
            shown = theirs if theirs.isdecimal() else "an unknown release"
            raise EmbeddedServerError(
                f"{self.pgdata} was made by PostgreSQL {shown}, and the embedded server is PostgreSQL {ours}, which "
                f"cannot read it. Dump it with PostgreSQL {shown} and load the dump into a new directory, or start "
                f"with an empty one: {WAY_OUT}."
            )

    def _require_room(self, account: Account) -> None:
        needed = size_of_copy(account, self.data_dir) + (ROOM_FOR_A_NEW_CLUSTER if self.version() is None else 0)
        free = shutil.disk_usage(self.data_dir).free
        if free < needed:
            raise disk_full(
                self.data_dir, f"{free // 2**20} MB are left, and a new PostgreSQL needs {needed // 2**20} MB"
            )

    def _create(self, account: Account, install: Path, lock: int) -> None:
        new = self.pgdata.with_name(f"{keeper.PGDATA}.new")
        if new.exists():
            shutil.rmtree(new)  # of a process that was killed while it set up
        _claim(new, account)
        try:
            where = ["-D", str(new)]
            initdb, postgres = install / "bin" / "initdb", install / "bin" / "postgres"
            account.run(self.data_dir, lock, initdb, *where, f"--username={ROLE}", *_INITDB)
            single = ["--single", *where, "-c", "fsync=off", "-c", "exit_on_error=on", "template1"]
            account.run(self.data_dir, lock, postgres, *single, text=f"CREATE DATABASE {DATABASE};\n")
            if self._settings.get("fsync") != "off":
                account.run(self.data_dir, lock, initdb, *where, "--sync-only")
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)  # above all on a full disk
            raise
        new.rename(self.pgdata)
        _sync(self.data_dir)

    def _forget_dead_server(self) -> None:
        # server.lock is free, so these belong to nobody, even if their process id is somebody's again.
        socket = self.socket_dir / f".s.PGSQL.{keeper.PORT}"
        for leftover in (self.pgdata / "postmaster.pid", socket, socket.with_name(f"{socket.name}.lock")):
            leftover.unlink(missing_ok=True)

    def _write_configuration(self, user: Account) -> None:
        lines = [f"include_if_exists = {_quoted(str(self.pgdata / 'postgresql.conf'))}"]
        for name, value in {**_DEFAULTS, **self._settings}.items():
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.]*", name):
                raise EmbeddedServerError(f"{name!r} is not the name of a PostgreSQL setting.")
            lines.append(f"{name} = {_quoted(value)}")
        self._write("interlock.conf", "\n".join(lines))
        self._write("pg_hba.conf", "local all all peer map=interlock")
        name = user.name.replace('"', '""')
        self._write("pg_ident.conf", f'interlock "{name}" all')

    def _write(self, name: str, text: str) -> None:
        new = self.data_dir / f"{name}.new"
        new.write_text(f"# Written by Interlock at every start of the server.\n{text}\n", encoding="utf-8")
        new.chmod(0o644)
        new.rename(self.data_dir / name)


def _make(directory: Path, mode: int) -> None:
    # Named only when its mode is right, whatever the umask: another process may come at the same moment.
    new = directory.with_name(f"{directory.name}.{os.getpid()}.new")
    new.mkdir()
    new.chmod(mode)
    try:
        new.rename(directory)
    except OSError:
        new.rmdir()
        if not directory.is_dir():
            raise


def _claim(directory: Path, account: Account) -> None:
    """Make a private directory of the account's; one that is there already must be the account's or ours."""
    directory.mkdir(mode=0o700, exist_ok=True)
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(opened).st_uid not in {account.uid, os.geteuid()}:
            raise EmbeddedServerError(
                f"{directory}, which the embedded PostgreSQL needs for itself, belongs to another user: "
                f"remove it, or {WAY_OUT}."
            )
        if account.is_other:
            os.fchown(opened, account.uid, account.gid)
        os.fchmod(opened, 0o700)
    finally:
        os.close(opened)


def _quoted(value: str) -> str:
    if not value.isprintable():
        raise EmbeddedServerError(f"{value!r} cannot be the value of a PostgreSQL setting.")
    return "'" + value.replace("\\", "\\\\").replace("'", "''") + "'"


def _sync(directory: Path) -> None:
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
