"""The embedded PostgreSQL server: acquire, release, start, stop and status.

All processes of one user and one data directory share one server. It runs while at least one of them holds a shared
lock on `users.lock`, which the kernel releases when a process dies. A process that starts or stops it holds
`start.lock`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Self

import platformdirs
import psycopg

from interlock.errors import EmbeddedServerError
from interlock.postgres.embedded import keeper
from interlock.postgres.embedded.cluster import DATABASE, Cluster
from interlock.postgres.embedded.failures import failed_program, translated_os_errors
from interlock.postgres.embedded.install import find_install, own_account, server_account

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


START_TIMEOUT_S = 60.0
MAX_LAUNCHES = 5


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """The state of an embedded server."""

    running: bool
    data_dir: Path
    version: str | None  # of the running server, or else the major version of the cluster on disk
    pid: int | None
    pinned: bool
    url: str | None


def default_data_dir() -> Path:
    """Return the default data directory; for root not in its home, which the server's user cannot reach."""
    if sys.platform != "win32" and os.geteuid() == 0:
        return Path("/var/lib/interlock/embedded")
    return Path(platformdirs.user_data_dir("interlock")) / "embedded"


def _resolved(data_dir: Path) -> Path:
    try:
        return data_dir.expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:  # no such home, a cycle of links, a zero byte
        raise EmbeddedServerError(f"{str(data_dir)!r} cannot be a data directory: {error}") from error


class EmbeddedServer:
    """One process's access to the server of a data directory; `settings` apply if this process starts it."""

    def __init__(
        self,
        data_dir: Path | None = None,
        *,
        settings: Mapping[str, str] | None = None,
        report_progress: Callable[[str], None] | None = None,
    ) -> None:
        # Resolved, so that all paths of one directory lead to one socket.
        self.data_dir = _resolved(data_dir or default_data_dir())
        self._cluster = Cluster(self.data_dir, settings or {}, report_progress or (lambda _: None))
        self._users_lock: int | None = None

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def url(self, database: str = DATABASE) -> str:
        """Return the URL of a database of this server, whether it runs or not."""
        return self._cluster.url(database)

    @staticmethod
    def psql_path() -> Path:
        """Return the psql that comes with the server."""
        return find_install() / "bin" / "psql"

    def acquire(self) -> str:
        """Become a user of the server and start it if it does not run. Call it again after a crash to restart it."""
        with translated_os_errors(self.data_dir):
            if self._users_lock is None or not self._is_alive():
                self._join(pin=False)
        return self.url()

    def release(self) -> None:
        """Stop using the server; its keeper stops it after the last user. Safe twice and before acquire."""
        if self._users_lock is not None:
            os.close(self._users_lock)
            self._users_lock = None

    def hand_over(self, program: Path, *arguments: str) -> NoReturn:
        """Replace this process by another program, which uses the server until it ends."""
        if self._users_lock is not None:
            os.set_inheritable(self._users_lock, True)  # noqa: FBT003 - positional in the standard library
        os.execv(program, [str(program), *arguments])  # noqa: S606 - the caller's program, without a shell

    def start(self) -> str:
        """Become a user, and keep the server running after its last user has left, until stop."""
        with translated_os_errors(self.data_dir):
            self._join(pin=True)
        return self.url()

    def stop(self, timeout: float = 30) -> bool:
        """Shut the server down even if it is used, and wait until it has ended; False if it did not run."""
        own_account()
        self.release()
        with translated_os_errors(self.data_dir):
            return self.data_dir.is_dir() and self._stop(timeout)

    def status(self) -> ServerStatus:
        """Return the state of the server, without starting or changing it."""
        own_account()
        with translated_os_errors(self.data_dir):
            running = (self.data_dir / keeper.SERVER_LOCK).exists() and self._is_alive()
            return ServerStatus(
                running=running,
                data_dir=self.data_dir,
                version=(self._running_version() if running else None) or self._cluster.version(),
                pid=keeper.postmaster_pid(self.data_dir) if running else None,
                pinned=(self.data_dir / keeper.PINNED).exists(),
                url=self.url() if running else None,
            )

    def _stop(self, timeout: float) -> bool:
        with self._start_lock(timeout):
            (self.data_dir / keeper.PINNED).unlink(missing_ok=True)
            if not self._is_alive():
                return False
            if not keeper.stop_server(self.data_dir, timeout):
                raise EmbeddedServerError(
                    f"The embedded PostgreSQL in {self.data_dir} has not stopped after {timeout:g} seconds; "
                    f"see {self._cluster.log}."
                )
            keeper.wait_for_keeper(self.data_dir)
            keeper.remove_socket_dir(self.data_dir)  # the keeper has removed it, unless it was killed
        return True

    def _is_alive(self) -> bool:
        return keeper.is_held(self.data_dir / keeper.SERVER_LOCK)

    def _accepts_connections(self) -> bool:
        # The pid file first: connecting to a server that is starting writes errors to its log.
        ping = psycopg.pq.PGconn.ping
        return self._cluster.is_marked_ready() and ping(self.url().encode()) == psycopg.pq.Ping.OK

    def _running_version(self) -> str | None:
        try:
            with psycopg.connect(self.url("template1"), connect_timeout=5) as connection:
                return connection.info.parameter_status("server_version")
        except psycopg.OperationalError:
            return None

    @contextmanager
    def _start_lock(self, timeout: float) -> Iterator[int]:
        """Hold start.lock, so that no other process starts or stops the server."""
        lock = keeper.open_lock(self.data_dir / keeper.START_LOCK)
        try:
            deadline = time.monotonic() + timeout
            while not keeper.try_exclusive(lock):
                if time.monotonic() > deadline:
                    raise EmbeddedServerError(
                        f"Another process has been starting or stopping the embedded PostgreSQL in {self.data_dir} "
                        f"for {timeout:g} seconds; see {self._cluster.log}."
                    )
                time.sleep(keeper.POLL_INTERVAL_S)
            try:
                yield lock
            finally:
                keeper.unlock(lock)
        finally:
            os.close(lock)

    def _join(self, *, pin: bool) -> None:
        self._cluster.make_directory()
        with self._start_lock(START_TIMEOUT_S) as lock:
            is_new_user = self._users_lock is None
            if self._users_lock is None:
                self._users_lock = keeper.open_lock(self.data_dir / keeper.USERS_LOCK)
            try:
                keeper.take_shared(self._users_lock)
                self._ensure_running(lock)
                if pin:
                    (self.data_dir / keeper.PINNED).touch(mode=0o600)
            except BaseException:
                if is_new_user:
                    self.release()
                raise

    def _ensure_running(self, lock: int) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        launches = 0
        log_before: int | None = None
        while time.monotonic() < deadline:
            alive, kept = self._is_alive(), keeper.is_held(self.data_dir / keeper.KEEPER_LOCK)
            if not alive and not kept:
                log_before = self._launch(lock, log_before, exhausted=launches == MAX_LAUNCHES)
                launches += 1
            elif not kept:
                self._run_keeper(lock)  # the keeper died: a new one adopts the server
            elif alive and self._accepts_connections():
                return
            else:
                # The server is starting or shutting down, or the last processes of a killed one, or its keeper, are
                # ending.
                time.sleep(keeper.POLL_INTERVAL_S)
        raise EmbeddedServerError(
            f"The embedded PostgreSQL in {self.data_dir} has not accepted connections for {START_TIMEOUT_S:g} seconds; "
            f"see {self._cluster.log}."
        )

    def _launch(self, lock: int, log_before: int | None, *, exhausted: bool) -> int:
        """Start the server, or raise if the last launch logged a reason to fail; return the size of the log before."""
        logged = "" if log_before is None else self._log_since(log_before)
        # Without a reason in the log it was killed, and is launched again.
        if exhausted or "FATAL:" in logged or "PANIC:" in logged:
            raise failed_program(self.data_dir, "PostgreSQL", logged)
        command = self._cluster.prepare(lock)
        begins_at = self._log_size()
        self._run_keeper(lock, *command)
        return begins_at

    def _run_keeper(self, lock: int, *command: str) -> None:
        account = server_account()
        log_before = self._log_size()
        # -I -S: without site-packages it starts faster, and no installed package can break it.
        python = [sys.executable, "-I", "-S", keeper.__file__]
        arguments = [str(self.data_dir), f"{account.uid}:{account.gid}", str(lock)]
        try:
            done = subprocess.run(  # noqa: S603 - this interpreter and our own script
                [*python, *arguments, *command],
                pass_fds=(lock,),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                start_new_session=True,
                check=False,
                cwd="/",
                timeout=START_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired as error:
            raise EmbeddedServerError(f"The keeper of {self.data_dir} hangs; see {self._cluster.log}.") from error
        if done.returncode != 0:
            raise failed_program(self.data_dir, "The server's keeper", done.stderr + self._log_since(log_before))

    def _log_size(self) -> int:
        return self._cluster.log.stat().st_size if self._cluster.log.exists() else 0

    def _log_since(self, offset: int) -> str:
        try:
            with self._cluster.log.open("rb") as log:
                log.seek(offset)
                return log.read().decode(errors="replace")
        except FileNotFoundError:
            return ""
