"""The files of an embedded server: its directories, its database cluster and its configuration.

Files that another user than the server's writes for it lie outside the server's own directories, so that root never
follows a link planted there. A database cluster appears under its name only when it is complete.
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
from interlock.postgres.embedded.failures import ALTERNATIVES, disk_full
from interlock.postgres.embedded.install import (
    Account,
    major_version,
    own_account,
    reachable_install,
    require_path_characters,
    require_traversable,
    server_account,
    size_of_copy,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

ROLE = "interlock"
DATABASE = "interlock"
NEW_CLUSTER_BYTES = 100 * 2**20
MAX_LOG_BYTES = 10 * 2**20

_DEFAULTS = {
    "max_connections": "200",
    "shared_buffers": "128MB",
    "log_checkpoints": "off",
    "log_line_prefix": "%m [%p] ",
}
_LOCALE = ("--encoding=UTF8", "--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8")
_INITDB = (*_LOCALE, "--auth=peer", "--no-sync")  # synced once, when the cluster is complete


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
        """Return a libpq URL; with the port, because PGPORT would change the name of the socket."""
        host = quote(str(self.socket_dir), safe="")
        return f"postgresql://{ROLE}@/{quote(database, safe='')}?host={host}&port={keeper.PORT}"

    def version(self) -> str | None:
        """Return the major version of the cluster on disk, or None if there is none."""
        try:
            return (self.pgdata / "PG_VERSION").read_text(encoding="ascii", errors="replace").strip()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def is_marked_ready(self) -> bool:
        """Tell whether the server has written to postmaster.pid that it accepts connections."""
        try:
            lines = (self.pgdata / "postmaster.pid").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return False
        return lines[7:8] != [] and lines[7].strip() == "ready"

    def make_directory(self) -> None:
        """Make the data directory; private, unless the server's user has to traverse it."""
        account = server_account()
        require_path_characters(self.data_dir, str.isprintable)  # the configuration file has to name it
        missing = [path for path in (self.data_dir, *self.data_dir.parents) if not path.exists()]
        nearest = missing[-1].parent if missing else self.data_dir
        if not nearest.is_dir():
            raise EmbeddedServerError(
                f"{self.data_dir} cannot be a data directory, because {nearest} is not a directory: {ALTERNATIVES}."
            )
        require_traversable(account, nearest)
        mode = 0o711 if account.is_other else 0o700
        for path in reversed(missing):
            _make_directory(path, mode)
        self._require_ownership(account)

    def _require_ownership(self, account: Account) -> None:
        found = self.data_dir.stat()
        if account.is_other and (found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
            raise EmbeddedServerError(
                f"{self.data_dir} can be changed by other users than root, so root does not keep its server there: "
                f"{ALTERNATIVES}."
            )

    def prepare(self, lock: int) -> list[str]:
        """Prepare the start of a server of which no process is alive; return the command that runs it.

        `lock` is start.lock, held by the caller.
        """
        account = server_account()
        self._require_disk_space(account)
        install = reachable_install(account, self.data_dir)
        self._require_version(major_version(install))
        if self.version() is None:
            self._report_progress(f"Setting up PostgreSQL {major_version(install)} in {self.data_dir} (only once)")
            self._create_cluster(account, install, lock)
        self._report_progress(f"Starting PostgreSQL in {self.data_dir}")
        _make_private(self.socket_dir, account)
        self._remove_leftovers()
        self._write_configuration(own_account())
        if self.log.exists() and self.log.stat().st_size > MAX_LOG_BYTES:
            os.truncate(self.log, 0)
        # On the command line, so that no file and no ALTER SYSTEM overrides who may connect.
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
            raise EmbeddedServerError(f"{self.pgdata} holds files, but no PostgreSQL databases: {ALTERNATIVES}.")
        if theirs is not None and theirs != str(ours):
            shown = theirs if theirs.isdecimal() else "an unknown release"
            raise EmbeddedServerError(
                f"{self.pgdata} was made by PostgreSQL {shown}, and the embedded server is PostgreSQL {ours}, which "
                f"cannot read it. Dump it with PostgreSQL {shown} and load the dump into a new directory, or start "
                f"with an empty one: {ALTERNATIVES}."
            )

    def _require_disk_space(self, account: Account) -> None:
        needed = size_of_copy(account, self.data_dir) + (NEW_CLUSTER_BYTES if self.version() is None else 0)
        free = shutil.disk_usage(self.data_dir).free
        if free < needed:
            raise disk_full(
                self.data_dir, f"{free // 2**20} MB are left, and a new PostgreSQL needs {needed // 2**20} MB"
            )

    def _create_cluster(self, account: Account, install: Path, lock: int) -> None:
        new = self.pgdata.with_name(f"{keeper.PGDATA}.new")
        if new.exists():
            shutil.rmtree(new)  # left by a process that was killed during initdb
        _make_private(new, account)
        try:
            where = ["-D", str(new)]
            initdb, postgres = install / "bin" / "initdb", install / "bin" / "postgres"
            account.run(self.data_dir, lock, initdb, *where, f"--username={ROLE}", *_INITDB)
            single = ["--single", *where, "-c", "fsync=off", "-c", "exit_on_error=on", "template1"]
            account.run(self.data_dir, lock, postgres, *single, text=f"CREATE DATABASE {DATABASE};\n")
            if self._settings.get("fsync") != "off":
                account.run(self.data_dir, lock, initdb, *where, "--sync-only")
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)  # frees the space on a full disk
            raise
        new.rename(self.pgdata)
        _fsync(self.data_dir)

    def _remove_leftovers(self) -> None:
        # server.lock is free: the files are stale, even if another process has their process id by now.
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


def _make_directory(directory: Path, mode: int) -> None:
    # Renamed once its mode is right, whatever the umask: another process may use it at the same moment.
    new = directory.with_name(f"{directory.name}.{os.getpid()}.new")
    new.mkdir()
    new.chmod(mode)
    try:
        new.rename(directory)
    except OSError:
        new.rmdir()
        if not directory.is_dir():
            raise


def _make_private(directory: Path, account: Account) -> None:
    """Make a directory private to the account; one that exists must belong to the account or to this user."""
    directory.mkdir(mode=0o700, exist_ok=True)
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(opened).st_uid not in {account.uid, os.geteuid()}:
            raise EmbeddedServerError(
                f"{directory}, which the embedded PostgreSQL needs for itself, belongs to another user: "
                f"remove it, or {ALTERNATIVES}."
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


def _fsync(directory: Path) -> None:
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
