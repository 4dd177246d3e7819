"""The keeper of one embedded server: a detached process that starts PostgreSQL and stops it after its last user.

A server is alive exactly while `server.lock` is held: its processes inherit the lock, and the kernel releases it with
the last of them. Process ids decide nothing, because they are reused. Standard library only: this file runs as a script
without site-packages and outlives the process that started it.
"""

from __future__ import annotations

import hashlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

if sys.platform != "win32":
    import fcntl

START_LOCK = "start.lock"  # held while a process starts or stops the server; always taken before the others
USERS_LOCK = "users.lock"  # held shared by every process that uses the server
SERVER_LOCK = "server.lock"  # held by the server's processes only
KEEPER_LOCK = "keeper.lock"  # held by the keeper
PINNED = "pinned"
LOG = "server.log"
PGDATA = "pgdata"
PORT = 5432

POLL_INTERVAL_S = 0.02
FAST_SHUTDOWN_S = 20.0  # after which an immediate shutdown (SIGQUIT) follows the fast one (SIGINT)
ENVIRONMENT = {"LANG": "C", "LC_ALL": "C", "PATH": "/usr/bin:/bin"}

_MAX_SOCKET_PATH_BYTES = 103  # the limit of macOS, the smallest of the supported systems


def open_lock(path: Path) -> int:
    """Open a lock file and create it if it is missing; child processes do not inherit it."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def take_shared(lock: int) -> None:
    """Take the lock in shared mode; wait while another process holds it exclusively."""
    fcntl.flock(lock, fcntl.LOCK_SH)


def try_exclusive(lock: int) -> bool:
    """Take the lock exclusively if no other process holds it; tell whether that worked."""
    return _try(lock, fcntl.LOCK_EX)


def unlock(lock: int) -> None:
    """Release the lock, also for copies of the descriptor in forked processes."""
    fcntl.flock(lock, fcntl.LOCK_UN)


def is_held(path: Path) -> bool:
    """Tell whether a process holds the lock exclusively."""
    lock = open_lock(path)
    try:
        # In shared mode, so that two processes that test at once do not see each other as the holder.
        return not _try(lock, fcntl.LOCK_SH)
    finally:
        os.close(lock)


def postmaster_pid(data_dir: Path) -> int | None:
    """Return the process id in postmaster.pid, if it still is a server of this directory."""
    try:
        content = (data_dir / PGDATA / "postmaster.pid").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    first = content.partition("\n")[0].strip()
    return int(first) if first.isdecimal() and _is_server(int(first), data_dir / PGDATA) else None


def socket_dir(data_dir: Path) -> Path:
    """Return the directory of the socket: in the data directory, unless no client could name it there."""
    near = data_dir / "run"
    # libpq reads a comma as the separator of two hosts.
    if len(os.fsencode(near / f".s.PGSQL.{PORT}")) <= _MAX_SOCKET_PATH_BYTES and "," not in str(near):
        return near
    digest = hashlib.sha256(os.fsencode(data_dir)).hexdigest()[:12]
    # Not the user's TMPDIR: processes with different ones share the server. A start refuses other users' directories.
    return Path("/tmp") / f"interlock-{os.geteuid()}-{digest}"  # noqa: S108 - ownership is checked before it is used


def remove_socket_dir(data_dir: Path) -> None:
    """Remove the socket directory of a stopped server if it is outside the data directory."""
    place = socket_dir(data_dir)
    if place.parent != data_dir:
        with suppress(
            OSError
        ):  # already removed, or it holds the socket of a killed server, which the next start removes
            place.rmdir()


def stop_server(data_dir: Path, timeout: float) -> bool:
    """Send a fast shutdown, and an immediate one later; False if the server still runs after the timeout."""
    began = time.monotonic()
    sent = None
    while is_held(data_dir / SERVER_LOCK):
        waited = time.monotonic() - began
        if waited > timeout:
            return False
        wanted = signal.SIGINT if waited < min(FAST_SHUTDOWN_S, timeout * 2 / 3) else signal.SIGQUIT
        # A server that has just been started may not have written its process id yet: read it again.
        pid = postmaster_pid(data_dir)
        if pid is not None and sent is not wanted:
            with suppress(ProcessLookupError):
                os.kill(pid, wanted)
            sent = wanted
        time.sleep(POLL_INTERVAL_S)
    return True


def wait_for_keeper(data_dir: Path) -> None:
    """Wait until the keeper of a stopped server has ended, the last process that uses the directory."""
    lock = open_lock(data_dir / KEEPER_LOCK)
    take_shared(lock)
    os.close(lock)


def _try(lock: int, operation: int) -> bool:
    try:
        fcntl.flock(lock, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_server(pid: int, pgdata: Path) -> bool:
    try:
        arguments = os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).split("\0")
    except OSError:
        return not Path("/proc/self").exists() and _looks_like_server(pid, pgdata)
    return arguments[0].endswith("/postgres") and arguments[1:3] == ["-D", str(pgdata)]


def _looks_like_server(pid: int, pgdata: Path) -> bool:
    """Check by ps, for systems without /proc; its command line is one string."""
    ps = ["/bin/ps", "-ww", "-o", "command=", "-p", str(pid)]
    output = subprocess.run(ps, capture_output=True, check=False).stdout  # noqa: S603 - a fixed program
    return f"/postgres -D {pgdata} -c " in os.fsdecode(output)


def _start_server(data_dir: Path, account: str, command: list[str]) -> subprocess.Popen[bytes]:
    lock = open_lock(data_dir / SERVER_LOCK)
    fcntl.flock(lock, fcntl.LOCK_EX)
    uid, gid = (int(part) for part in account.split(":"))
    other = uid != os.geteuid()
    try:
        return subprocess.Popen(  # noqa: S603 - the command is built by the starter, of paths only
            command,
            pass_fds=(lock,),
            stdin=subprocess.DEVNULL,
            cwd="/",
            env=ENVIRONMENT,
            user=uid if other else None,
            group=gid if other else None,
            extra_groups=[] if other else None,
        )
    finally:
        os.close(lock)  # from here on only the server holds it


def _stop_after_last_user(data_dir: Path) -> None:
    users = open_lock(data_dir / USERS_LOCK)
    start = open_lock(data_dir / START_LOCK)
    while True:
        fcntl.flock(users, fcntl.LOCK_EX)  # blocks until the last user has released it or died
        # A starting process takes users.lock while it holds start.lock: taking them in the other order would deadlock.
        unlock(users)
        fcntl.flock(start, fcntl.LOCK_EX)
        if try_exclusive(users):
            break
        unlock(start)
    if (data_dir / PINNED).exists():
        # Only an explicit stop ends a pinned server.
        os.close(users)
        os.close(start)
        return
    # Both locks stay held until this process ends with the server: new users wait and then start another server.
    stop_server(data_dir, timeout=math.inf)


def _keep_server(data_dir: Path, account: str, command: list[str], start: int, ready: int) -> None:
    lock = open_lock(data_dir / KEEPER_LOCK)
    fcntl.flock(lock, fcntl.LOCK_EX)  # the previous server's keeper may still be ending
    server = _start_server(data_dir, account, command) if command else None
    os.write(ready, b"1")
    os.close(ready)
    os.close(start)
    threading.Thread(target=_stop_after_last_user, args=(data_dir,), daemon=True).start()
    if server is not None:
        server.wait()
    # The other processes of a killed postmaster may outlive it for a moment.
    alive = open_lock(data_dir / SERVER_LOCK)
    take_shared(alive)
    remove_socket_dir(data_dir)  # while keeper.lock is held: the next start waits for it


def main() -> int:
    """Run as `keeper.py DATA_DIR UID:GID LOCK [POSTGRES ARGUMENT...]`; without a command, adopt the running server.

    LOCK is the inherited descriptor of start.lock, so that it is held until the server holds its own lock, even if the
    starting process is killed at once.
    """
    data_dir, account, start, command = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:]
    started, ready = os.pipe()
    if os.fork():
        os.close(ready)
        return 0 if os.read(started, 1) else 1
    os.close(started)
    os.setsid()
    os.chdir("/")
    nothing = os.open(os.devnull, os.O_RDONLY)
    log = os.open(data_dir / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    for target, source in enumerate((nothing, log, log)):
        os.dup2(source, target)
    _keep_server(data_dir, account, command, start, ready)
    return 0


if __name__ == "__main__":
    sys.exit(main())
