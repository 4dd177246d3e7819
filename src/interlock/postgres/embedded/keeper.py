"""Keeps one embedded PostgreSQL server: starts it, and stops it once its last user has left.

A server is alive exactly while `server.lock` is held: its processes inherit the lock, and the kernel frees it with the
last of them. So nothing is decided by a process id, which may be somebody else's by now. Standard library only: it runs
as a detached script that outlives the process that started it.
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

START_LOCK = "start.lock"  # held by whoever starts or stops the server; always taken before the others
USERS_LOCK = "users.lock"  # held shared by every process that uses the server
SERVER_LOCK = "server.lock"  # held by the server's processes, and by nobody else
KEEPER_LOCK = "keeper.lock"  # held by the keeper
PINNED = "pinned"
LOG = "server.log"
PGDATA = "pgdata"
PORT = 5432

POLL = 0.02
PATIENCE = 20.0
ENVIRONMENT = {"LANG": "C", "LC_ALL": "C", "PATH": "/usr/bin:/bin"}

_LONGEST_SOCKET_PATH = 103  # the smallest limit of the systems we run on, that of macOS


def open_lock(path: Path) -> int:
    """Open a lock file, made when it is missing; programs started later do not inherit it."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def take_shared(lock: int) -> None:
    """Wait until nobody holds the lock exclusively, and share it."""
    fcntl.flock(lock, fcntl.LOCK_SH)


def try_exclusive(lock: int) -> bool:
    """Take the lock for ourselves, unless somebody holds it."""
    return _try(lock, fcntl.LOCK_EX)


def unlock(lock: int) -> None:
    """Give the lock up, also in copies of it that a fork may have made."""
    fcntl.flock(lock, fcntl.LOCK_UN)


def is_held(path: Path) -> bool:
    """Tell whether somebody holds the lock exclusively."""
    lock = open_lock(path)
    try:
        # Shared, so that two who ask at once do not take each other for the owner.
        return not _try(lock, fcntl.LOCK_SH)
    finally:
        os.close(lock)


def postmaster_pid(data_dir: Path) -> int | None:
    """Return the process id of the server, if the one that the server noted is still a server of this directory."""
    try:
        noted = (data_dir / PGDATA / "postmaster.pid").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    first = noted.partition("\n")[0].strip()
    return int(first) if first.isdecimal() and _is_server(int(first), data_dir / PGDATA) else None


def socket_dir(data_dir: Path) -> Path:
    """Tell where the server's socket is: in the data directory, unless no client could name it there."""
    near = data_dir / "run"
    # libpq takes a comma for the end of one host and the beginning of the next.
    if len(os.fsencode(near / f".s.PGSQL.{PORT}")) <= _LONGEST_SOCKET_PATH and "," not in str(near):
        return near
    digest = hashlib.sha256(os.fsencode(data_dir)).hexdigest()[:12]
    # Not the user's TMPDIR: processes with different ones have to meet. Starters refuse what somebody else put there.
    return Path("/tmp") / f"interlock-{os.geteuid()}-{digest}"  # noqa: S108 - ownership is checked before it is used


def forget_socket_dir(data_dir: Path) -> None:
    """Leave nothing of a server that has gone outside its data directory."""
    place = socket_dir(data_dir)
    if place.parent != data_dir:
        with suppress(OSError):  # it is gone, or a killed server's socket is in it, for the next start to remove
            place.rmdir()


def stop_server(data_dir: Path, timeout: float) -> bool:
    """Shut the server down, in a hurry once patience ends; False when it is still there after the timeout."""
    began = time.monotonic()
    sent = None
    while is_held(data_dir / SERVER_LOCK):
        waited = time.monotonic() - began
        if waited > timeout:
            return False
        wanted = signal.SIGINT if waited < min(PATIENCE, timeout * 2 / 3) else signal.SIGQUIT
        # A server that has only just been started has not noted its process id yet: ask again.
        pid = postmaster_pid(data_dir)
        if pid is not None and sent is not wanted:
            with suppress(ProcessLookupError):
                os.kill(pid, wanted)
            sent = wanted
        time.sleep(POLL)
    return True


def await_keeper(data_dir: Path) -> None:
    """Wait until the keeper of a server that has gone has gone too, and with it the last hand on the directory."""
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
    """Ask where there is no /proc, and a command line is one text."""
    ps = ["/bin/ps", "-ww", "-o", "command=", "-p", str(pid)]
    said = subprocess.run(ps, capture_output=True, check=False).stdout  # noqa: S603 - a fixed program
    return f"/postgres -D {pgdata} -c " in os.fsdecode(said)


def _start(data_dir: Path, account: str, command: list[str]) -> subprocess.Popen[bytes]:
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
        os.close(lock)  # from here on the server alone holds it


def _stop_after_last_user(data_dir: Path) -> None:
    users = open_lock(data_dir / USERS_LOCK)
    start = open_lock(data_dir / START_LOCK)
    while True:
        fcntl.flock(users, fcntl.LOCK_EX)  # sleeps in the kernel until the last user has left or died
        # Starters hold start.lock while they join the users; to wait for it with users.lock in hand would deadlock.
        unlock(users)
        fcntl.flock(start, fcntl.LOCK_EX)
        if try_exclusive(users):
            break
        unlock(start)
    if (data_dir / PINNED).exists():
        # Only an explicit stop ends a pinned server, so there is nothing left to watch for.
        os.close(users)
        os.close(start)
        return
    # Both locks stay held until this process ends with the server: whoever comes now waits, then starts afresh.
    stop_server(data_dir, timeout=math.inf)


def _keep(data_dir: Path, account: str, command: list[str], start: int, ready: int) -> None:
    lock = open_lock(data_dir / KEEPER_LOCK)
    fcntl.flock(lock, fcntl.LOCK_EX)  # the keeper of the server before this one may still be leaving
    server = _start(data_dir, account, command) if command else None
    os.write(ready, b"1")
    os.close(ready)
    os.close(start)
    threading.Thread(target=_stop_after_last_user, args=(data_dir,), daemon=True).start()
    if server is not None:
        server.wait()
    # The server's other processes may outlive a killed postmaster for a moment.
    alive = open_lock(data_dir / SERVER_LOCK)
    take_shared(alive)
    forget_socket_dir(data_dir)  # while keeper.lock is held: whoever starts the next server waits for it


def main() -> int:
    """Run as `keeper.py DATA_DIR UID:GID LOCK [POSTGRES ARGUMENT...]`; without a command, keep the server that runs.

    LOCK is the starter's own start.lock, handed down so that it is held until the server holds its lock, even if the
    starter is killed at once.
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
    _keep(data_dir, account, command, start, ready)
    return 0


if __name__ == "__main__":
    sys.exit(main())
