"""Who may take part in a sort: tokens, TLS, the version of the protocol, and addresses that others can reach."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from certificates import make_certificates
from interlock.errors import SortError, SortInputError
from interlock.sort import wire_pb2 as wire
from interlock.sort.data.validate import validate
from interlock.sort.master.master import Master, run_master
from interlock.sort.rpc import MASTER, METHODS, PROTOCOL_VERSION, WORKER, Peer, Server
from interlock.sort.security import Security, read_token, write_token
from interlock.sort.settings import Settings
from interlock.sort.worker.worker import Worker, run_worker
from processes import eventually
from sort_cli import first_line, make_input, members, sort, started
from sort_cluster import output_bytes, random_rows, sorted_bytes, write_source

if TYPE_CHECKING:
    from interlock.sort.settings import Report

pytestmark = pytest.mark.flow

OURS, OTHERS = Security("the-token-of-this-sort"), Security("another-long-token")
ROWS = random_rows(7, 2_000)
EVERY_ADDRESS = "0.0.0.0"  # noqa: S104 - only with a token


@pytest.mark.parametrize("caller", [Security(), OTHERS], ids=["no token", "another token"])
def test_every_call_without_the_token_is_refused(tmp_path: Path, caller: Security) -> None:
    master = Master(1, Settings(), None, "127.0.0.1", 0, threading.Event(), OURS)
    master.server.start()
    for name in ("out", "temp"):
        (tmp_path / name).mkdir()
    source = write_source(tmp_path / "in", ROWS)
    worker = Worker("127.0.0.1:1", source, tmp_path / "out", Settings(), tmp_path / "temp", 0, "127.0.0.1", OURS)
    worker.server.start()
    try:
        for service, address in ((MASTER, master.server.address), (WORKER, worker.address)):
            peer = Peer(service, address, "the peer", caller)
            for name, method in METHODS[service].items():
                with pytest.raises(grpc.RpcError) as raised:
                    peer.call_once(name, iter([method.request()]) if method.is_stream else method.request())
                assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED, name
                details = raised.value.details() or ""
                assert "the call has no token, or not the one of this sort" in details
                assert OURS.token not in details
            peer.close()
        peer = Peer(WORKER, worker.address, "the worker", caller)
        with pytest.raises(grpc.RpcError):
            peer.call_once("GetStatus", wire.StatusRequest(epoch=0, abort="ended by a stranger"))
        worker.check()
        assert master.workers == {}
        peer.close()
        trusted = Peer(WORKER, worker.address, "the worker", OURS)
        assert trusted.call_once("GetStatus", wire.StatusRequest()).state == "Initializing"
        trusted.close()
    finally:
        master.close()
        worker.server.stop()
        worker.runner.close()


def test_a_token_is_long_and_its_file_belongs_to_one_user(tmp_path: Path) -> None:
    with pytest.raises(SortInputError, match="at least 16 ASCII characters"):
        Security("short")
    path = write_token(tmp_path, OURS.token)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_token(path) == OURS.token
    assert Security.load(path, environment={}) == OURS
    assert Security.load(environment={"INTERLOCK_SORT_TOKEN": f"{OURS.token}\n"}) == OURS
    assert OURS.token not in repr(OURS)
    path.chmod(0o640)
    with pytest.raises(SortInputError, match=r"can be read by others than its owner: chmod 600 "):
        read_token(path)
    with pytest.raises(SortInputError, match="the token cannot be read from"):
        read_token(tmp_path / "none")
    path.chmod(0o600)
    path.write_text("\n")
    with pytest.raises(SortInputError, match="is empty"):
        read_token(path)


@pytest.mark.parametrize("host", [EVERY_ADDRESS, "::", "10.1.2.3"])
def test_a_public_address_needs_a_token(tmp_path: Path, host: str) -> None:
    done = sort("master", 2, "--host", host)
    assert done.returncode == 2
    assert f"{host} can be reached from other machines, and this sort has no token: give one with" in done.stderr
    make_input(tmp_path / "in", 100)
    arguments = ("worker", "127.0.0.1:1", "-I", tmp_path / "in", "-O", tmp_path / "out", "--host", host)
    done = sort(*arguments)
    assert done.returncode == 2
    assert "this sort has no token" in done.stderr
    assert not (tmp_path / "out").exists()
    with pytest.raises(SortInputError, match="has no token"):
        Server(MASTER, None, host)


def test_master_and_workers_share_a_token_from_a_file_or_the_environment(tmp_path: Path) -> None:
    make_input(tmp_path / "in", 2_000)
    token = write_token(tmp_path, OURS.token)
    with started("master", 1, "--host", EVERY_ADDRESS, "--quiet", "--token-file", token) as master:
        address = f"127.0.0.1:{first_line(master).rpartition(':')[2]}"
        arguments = ("worker", address, "-I", tmp_path / "in", "-O", tmp_path / "out", "--quiet")
        stranger = sort(*arguments, "--lost", 20)
        assert stranger.returncode == 1
        assert "was refused: UNAUTHENTICATED: the call has no token, or not the one of this sort" in stranger.stderr
        assert OURS.token not in stranger.stderr
        with started(*arguments, environment={"INTERLOCK_SORT_TOKEN": OURS.token}) as worker:
            _, errors = worker.communicate(timeout=60)
            assert worker.returncode == 0, errors
        _, errors = master.communicate(timeout=60)
        assert master.returncode == 0, errors
    assert validate([tmp_path / "out"], [tmp_path / "in"]).problems == []


def test_the_token_of_a_local_sort_is_in_no_argument_and_no_file(tmp_path: Path) -> None:
    make_input(tmp_path / "in", 300_000)
    with started("run", tmp_path / "in", "-O", tmp_path / "out", "-w", 2) as process:
        state = tmp_path / "out" / ".interlock-sort" / "worker-1" / "state.json"
        eventually(state.exists)
        listed = [Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0") for pid in members(process.pid)]
        found = [path.name for path in (tmp_path / "out" / ".interlock-sort").rglob("*") if path.is_file()]
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert len(listed) == 3
    assert {line.rpartition(b"\0-w\x00")[2] for line in listed} == {b"2"}, "nothing but what the user wrote"
    assert "token" not in found


def test_another_version_of_the_protocol_is_refused_on_both_sides(tmp_path: Path) -> None:
    master = Master(1, Settings(), None, "127.0.0.1", 0, threading.Event())
    master.server.start()
    peer = Peer(MASTER, master.server.address, "the master")
    answer = peer.call_once("RegisterWorker", wire.Registration(identity="old", state="Initializing"))
    assert not answer.success
    assert f"it speaks version 0 of the protocol and this master version {PROTOCOL_VERSION}: install" in answer.message
    assert master.workers == {}
    peer.close()
    master.close()

    class OldMaster:
        def RegisterWorker(self, *_: Any) -> wire.Registered:  # noqa: N802 - RPC
            return wire.Registered(success=True, epoch=1, workers=1, partitions=1, starts=1)

        def _nothing(self, *_: Any) -> wire.Ack:
            return wire.Ack()

        SendSample = NotifyPhaseComplete = ReportCompletion = _nothing

    old = Server(MASTER, OldMaster(), "127.0.0.1")
    old.start()
    with pytest.raises(SortError, match="speaks version 0 of the protocol and this worker version"):
        run_worker(old.address, write_source(tmp_path / "in", ROWS), tmp_path / "out")
    old.stop()


class RefusingMaster:
    """Answers every call with a refusal."""

    def RegisterWorker(self, *_: Any) -> wire.Registered:  # noqa: N802 - RPC
        return wire.Registered(message="refused")

    def _refuse(self, *_: Any) -> wire.Ack:
        return wire.Ack()

    SendSample = NotifyPhaseComplete = ReportCompletion = _refuse


def test_a_sort_with_mutual_tls(tmp_path: Path) -> None:
    place, strangers = tmp_path / "tls", tmp_path / "strangers"
    place.mkdir()
    strangers.mkdir()
    make_certificates(place, "master", "worker")
    make_certificates(strangers, "worker")
    source = write_source(tmp_path / "in", ROWS)
    settings = Settings(block_records=500, window_records=300, lost_after_s=20.0, register_timeout_s=20.0)

    def security(directory: Path, name: str) -> Security:
        return Security(OURS.token, directory / f"{name}.pem", directory / f"{name}.key", directory / "ca.pem")

    address: Future[str] = Future()
    with ThreadPoolExecutor(3) as pool:
        running: Future[Report] = pool.submit(
            run_master, 2, settings=settings, on_listening=address.set_result, security=security(place, "master")
        )
        for other in (OURS, security(strangers, "worker")):
            peer = Peer(MASTER, address.result(20), "the master", other)
            with pytest.raises(grpc.RpcError) as raised:
                peer.call_once("RegisterWorker", wire.Registration(), timeout=5.0)
            assert raised.value.code() in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}
            peer.close()
        workers = [
            pool.submit(
                run_worker, address.result(20), source.share(index, 2), tmp_path / f"out-{index}", settings=settings,
                index=index, security=security(place, "worker"),
            )
            for index in range(2)
        ]  # fmt: skip
        assert running.result(60).records == len(ROWS)
        for worker in workers:
            worker.result(60)
    assert output_bytes(tmp_path / "out-0", tmp_path / "out-1") == sorted_bytes(ROWS)


def test_servers_are_verified_by_the_authorities_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_certificates(tmp_path, "node")
    security = Security(OURS.token, tmp_path / "node.pem", tmp_path / "node.key")
    server = Server(MASTER, RefusingMaster(), "127.0.0.1", security=security)
    server.start()

    def call() -> object:
        peer = Peer(MASTER, server.address, "the master", security)
        try:
            return peer.call_once("RegisterWorker", wire.Registration(), timeout=10.0)
        finally:
            peer.close()

    try:
        with pytest.raises(grpc.RpcError) as raised:
            call()
        assert raised.value.code() in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
        assert call() == wire.Registered(message="refused")
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none"))
        monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path / "authorities"))
        (tmp_path / "authorities").mkdir()
        (tmp_path / "authorities" / "0a1b2c3d.0").symlink_to(tmp_path / "ca.pem")
        assert call() == wire.Registered(message="refused")
    finally:
        server.stop()


def test_tls_is_refused_where_all_processes_are_on_one_machine(tmp_path: Path) -> None:
    make_certificates(tmp_path, "node")
    write_source(tmp_path / "in", ROWS)
    tls = ("--tls-cert", tmp_path / "node.pem", "--tls-key", tmp_path / "node.key")
    for options, option in ((tls, "--tls-cert"), (("--ray-address", "auto"), "--ray-address")):
        done = sort("run", tmp_path / "in", "-O", tmp_path / "out", *options)
        assert done.returncode == 2
        assert f"{option} is for --engine ray: the processes of --engine local are on this machine" in done.stderr
    assert not (tmp_path / "out").exists()


def test_wrong_tls_options_are_refused_by_name(tmp_path: Path) -> None:
    cases = {
        "a certificate and its key belong together": ("--tls-cert", tmp_path / "a"),
        "--tls-ca needs --tls-cert and --tls-key": ("--tls-ca", tmp_path / "a"),
        f"{tmp_path / 'a'} cannot be read: No such file": ("--tls-cert", tmp_path / "a", "--tls-key", tmp_path / "b"),
    }
    for words, options in cases.items():
        done = sort("master", 1, *options)
        assert done.returncode == 2, done.stderr
        assert words in done.stderr
    (tmp_path / "a").write_text("no certificate")
    (tmp_path / "b").write_text("no key")
    done = sort("master", 1, "--tls-cert", tmp_path / "a", "--tls-key", tmp_path / "b")
    assert done.returncode == 2
    assert "is not a certificate and its key" in done.stderr
    assert "Traceback" not in done.stderr
