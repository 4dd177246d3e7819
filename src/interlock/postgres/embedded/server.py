"""The embedded PostgreSQL server, as a process that uses it sees it.

All processes of one user and one data directory share one server. It runs while at least one of them holds its share of
`users.lock`, which the kernel takes back from a process that dies; whoever starts or stops it holds `start.lock`.
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
from interlock.postgres.embedded.install import explained, failed_program, find_install, own_account, server_account

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


# SECTION store/embedded_failure
# Says what went wrong with the embedded server, and what to do about it.
#
# Every failure of the operating system or of PostgreSQL leaves here as one EmbeddedServerError that names the
# directory.


START_TIMEOUT = 60.0
LAUNCHES = 5


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """What can be told about an embedded server from outside."""

    running: bool
    data_dir: Path
    version: str | None  # of the running server, or else the major version of the databases on disk
    pid: int | None
    pinned: bool
    url: str | None


def default_data_dir() -> Path:
    """Return where the server lives unless told otherwise; not in root's home, which is private to root."""
    if sys.platform != "win32" and os.geteuid() == 0:
        return Path("/var/lib/interlock/embedded")
    return Path(platformdirs.user_data_dir("interlock")) / "embedded"


def _resolved(data_dir: Path) -> Path:
    try:
        return data_dir.expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:  # no such home, links in a circle, a zero byte
        raise EmbeddedServerError(f"{str(data_dir)!r} cannot be a data directory: {error}") from error


class EmbeddedServer:
    """One process's access to the server of a data directory; settings count for the process that starts it."""

    def __init__(
        self,
        data_dir: Path | None = None,
        *,
        settings: Mapping[str, str] | None = None,
        report_progress: Callable[[str], None] | None = None,
    ) -> None:
        # Resolved, so that all who mean the same directory also find the same socket.
        self.data_dir = _resolved(data_dir or default_data_dir())
        self._cluster = Cluster(self.data_dir, settings or {}, report_progress or (lambda _: None))
        self._share: int | None = None

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
        """Join the users of the server and start it if it does not run; again after a crash, to start it anew."""
        with explained(self.data_dir):
            if self._share is None or not self._is_alive():
                self._enter(pin=False)
        return self.url()

    def release(self) -> None:
        """Leave; the keeper stops the server if nobody else uses it. Safe twice, and before acquire."""
        if self._share is not None:
            os.close(self._share)
            self._share = None

    def hand_over(self, program: Path, *arguments: str) -> NoReturn:
        """Become another program, which from now on has our share of the server, until it ends."""
        if self._share is not None:
            os.set_inheritable(self._share, True)  # noqa: FBT003 - its signature
        os.execv(program, [str(program), *arguments])  # noqa: S606 - a program of the caller's, no shell

    def start(self) -> str:
        """Join, and keep the server running after its last user has left, until stop."""
        with explained(self.data_dir):
            self._enter(pin=True)
        return self.url()

    def stop(self, timeout: float = 30) -> bool:
        """Shut the server down, whoever uses it, and wait until it is gone; False if it did not run."""
        own_account()
        self.release()
        with explained(self.data_dir):
            return self.data_dir.is_dir() and self._stop(timeout)

    def status(self) -> ServerStatus:
        """Tell what is known of the server, without starting or changing it."""
        own_account()
        with explained(self.data_dir):
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
        with self._starting(timeout):
            (self.data_dir / keeper.PINNED).unlink(missing_ok=True)
            if not self._is_alive():
                return False
            if not keeper.stop_server(self.data_dir, timeout):
                raise EmbeddedServerError(
                    f"The embedded PostgreSQL in {self.data_dir} has not stopped after {timeout:g} seconds; "
                    f"see {self._cluster.log}."
                )
            keeper.await_keeper(self.data_dir)
            keeper.forget_socket_dir(self.data_dir)  # the keeper has done it, unless it was killed
        return True

    def _is_alive(self) -> bool:
        return keeper.is_held(self.data_dir / keeper.SERVER_LOCK)

    def _accepts_connections(self) -> bool:
        # The note comes first: to knock at a server that is starting fills its log.
        ping = psycopg.pq.PGconn.ping
        return self._cluster.says_ready() and ping(self.url().encode()) == psycopg.pq.Ping.OK

    def _running_version(self) -> str | None:
        try:
            with psycopg.connect(self.url("template1"), connect_timeout=5) as connection:
                return connection.info.parameter_status("server_version")
        except psycopg.OperationalError:
            return None

    @contextmanager
    def _starting(self, timeout: float) -> Iterator[int]:
        """Be the only one who starts or stops the server."""
        lock = keeper.open_lock(self.data_dir / keeper.START_LOCK)
        try:
            deadline = time.monotonic() + timeout
            while not keeper.try_exclusive(lock):
                if time.monotonic() > deadline:
                    raise EmbeddedServerError(
                        f"Another process has been starting or stopping the embedded PostgreSQL in {self.data_dir} "
                        f"for {timeout:g} seconds; see {self._cluster.log}."
                    )
                time.sleep(keeper.POLL)
            try:
                yield lock
            finally:
                keeper.unlock(lock)
        finally:
            os.close(lock)

    def _enter(self, *, pin: bool) -> None:
        self._cluster.make_directory()
        with self._starting(START_TIMEOUT) as lock:
            joined = self._share is None
            if self._share is None:
                self._share = keeper.open_lock(self.data_dir / keeper.USERS_LOCK)
            try:
                keeper.take_shared(self._share)
                self._ensure_running(lock)
                if pin:
                    (self.data_dir / keeper.PINNED).touch(mode=0o600)
            except BaseException:
                if joined:
                    self.release()
                raise

    def _ensure_running(self, lock: int) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        launches = 0
        log_before: int | None = None
        while time.monotonic() < deadline:
            alive, kept = self._is_alive(), keeper.is_held(self.data_dir / keeper.KEEPER_LOCK)
            if not alive and not kept:
                log_before = self._launch(lock, log_before, exhausted=launches == LAUNCHES)
                launches += 1
            elif not kept:
                self._run_keeper(lock)  # the server has lost its keeper; this one adopts it
            elif alive and self._accepts_connections():
                return
            else:
                # It is starting or shutting down, or the last processes of one that was killed are finishing, or its
                # keeper is, which tidies up after it.
                time.sleep(keeper.POLL)
        raise EmbeddedServerError(
            f"The embedded PostgreSQL in {self.data_dir} has not accepted connections for {START_TIMEOUT:g} seconds; "
            f"see {self._cluster.log}."
        )

    def _launch(self, lock: int, log_before: int | None, *, exhausted: bool) -> int:
        """Start the server, unless the launch before has failed for a reason; give where in the log this one begins."""
        said = "" if log_before is None else self._log_since(log_before)
        # One that gave no reason was killed, and deserves another try.
        if exhausted or "FATAL:" in said or "PANIC:" in said:
            raise failed_program(self.data_dir, "PostgreSQL", said)
        command = self._cluster.prepare(lock)
        begins_at = self._log_size()
        self._run_keeper(lock, *command)
        return begins_at

    def _run_keeper(self, lock: int, *command: str) -> None:
        account = server_account()
        log_before = self._log_size()
        # Isolated and without site-packages: it starts faster, and nothing of ours can break it.
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
                timeout=START_TIMEOUT,
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
