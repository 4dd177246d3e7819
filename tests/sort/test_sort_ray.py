"""The engine `ray`: actors that Ray restarts, and the same output. Runs if Ray is installed."""

from __future__ import annotations

import gzip
import json
import logging
import os
import signal
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest

from certificates import make_certificates
from interlock.errors import SortError
from interlock.sort.data.records import open_source
from interlock.sort.data.validate import validate
from interlock.sort.rpc import NO_SECURITY
from interlock.sort.security import Security, write_token
from interlock.sort.settings import Settings
from processes import eventually
from sort_cli import COMMAND, ENVIRONMENT, make_input, names, sort, started, unpacked_bytes

ray = pytest.importorskip("ray", reason="needs the extra `ray`")
actors_of_ray = pytest.importorskip("interlock.sort.engines.ray")
pytestmark = pytest.mark.flow


def actors() -> list[int]:
    """List the processes that are sort actors."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
        except OSError:
            continue
        if command.startswith(b"ray::SortActor.run"):
            found.append(int(path.parent.name))
    return found


def test_a_killed_actor_is_restarted(tmp_path: Path) -> None:
    make_input(tmp_path / "in", 100_000)
    with started("run", tmp_path / "in", "-O", tmp_path / "out", "-w", 3, "--engine", "ray", "--history") as process:
        victim = eventually(actors, within=90)[0]
        eventually((tmp_path / "out" / ".interlock-sort" / "worker-0").exists, within=90)
        os.kill(victim, signal.SIGKILL)
        output, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    assert "State history" in output
    assert names(tmp_path / "out") == ["partition.0", "partition.1", "partition.2"]
    assert validate([tmp_path / "out"], [tmp_path / "in"]).problems == []


def test_actors_end_with_their_command_and_the_same_command_resumes(tmp_path: Path) -> None:
    make_input(tmp_path / "in", 1_000_000)
    arguments = ("run", tmp_path / "in", "-O", tmp_path / "out", "-w", 2, "--engine", "ray", "--memory", "256MB")
    process = subprocess.Popen([*COMMAND, *map(str, arguments)], stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    with process:
        assert process.stderr is not None
        while "Sorting" not in (line := process.stderr.readline()):
            assert line, "it ended before it was killed"
        cluster = actors()
        assert len(cluster) == 2
        process.kill()
    eventually(lambda: not set(actors()) & set(cluster), within=30)
    done = sort(*arguments)
    assert done.returncode == 0, done.stderr
    assert "resuming the sort of" in done.stderr
    assert validate([tmp_path / "out"], [tmp_path / "in"]).problems == []


def test_lines_are_sorted_and_packed(tmp_path: Path) -> None:
    lines = [b"%d,%d\n" % (number * 7919 % 5000, number % 17) for number in range(5000)]
    (tmp_path / "in.gz").write_bytes(gzip.compress(b"".join(lines)))
    order = ("-t", ",", "-k", "2,2nr", "-k", "1,1n")
    options = ("-w", 2, "--engine", "ray", "--compress", "zstd", *order)
    done = sort("run", tmp_path / "in.gz", "-O", tmp_path / "out", *options)
    assert done.returncode == 0, done.stderr
    assert names(tmp_path / "out") == ["partition.0.zst", "partition.1.zst"]
    lines.sort(key=lambda line: (-int(line.split(b",")[1]), int(line.split(b",")[0])))
    assert unpacked_bytes(tmp_path / "out", tmp_path / "copies") == b"".join(lines)


def test_a_sort_with_tls_between_the_actors(tmp_path: Path) -> None:
    make_certificates(tmp_path, "node")
    make_input(tmp_path / "in", 1_000)
    tls = ("--tls-cert", tmp_path / "node.pem", "--tls-key", tmp_path / "node.key", "--tls-ca", tmp_path / "ca.pem")
    arguments = ("run", tmp_path / "in", "-O", tmp_path / "out", "-w", 2, "--engine", "ray")
    done = sort(*arguments, *tls)
    assert done.returncode == 0, done.stderr
    assert validate([tmp_path / "out"], [tmp_path / "in"]).problems == []
    (tmp_path / "node.key").write_text("no key")
    refused = sort(*arguments, "--overwrite", *tls)
    assert refused.returncode == 2
    assert "is not a certificate and its key" in refused.stderr


def test_ray_address_of_the_environment_is_ignored(tmp_path: Path) -> None:
    make_input(tmp_path / "in", 1_000)
    arguments = ("run", tmp_path / "in", "-O", tmp_path / "out", "-w", 1, "--engine", "ray")
    with started(*arguments, "--json", environment={"RAY_ADDRESS": "127.0.0.1:1"}) as process:
        output, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    assert json.loads(output)["records"] == 1_000, "standard output has the report and nothing that Ray prints"


def test_an_input_error_fails_the_sort_and_names_file_and_byte(tmp_path: Path) -> None:
    make_input(tmp_path / "in", 3_000, files=1, is_ascii=True)
    with (tmp_path / "in" / "part-00000").open("r+b") as file:
        file.seek(120_000)
        file.write(b"y" * 100)
    done = sort("run", tmp_path / "in", "-O", tmp_path / "out", "-w", 2, "--engine", "ray")
    assert done.returncode in {1, 2}
    assert "part-00000, byte 120,000: this line of 100 bytes does not end in CR LF" in done.stderr
    assert "Traceback" not in done.stderr
    assert names(tmp_path / "out") == []


def test_a_missing_cluster_is_a_clear_error(tmp_path: Path) -> None:
    make_input(tmp_path / "in", 100)
    address = ("--engine", "ray", "--ray-address", "127.0.0.1:1")
    done = sort("run", tmp_path / "in", "-O", tmp_path / "out", *address)
    assert done.returncode == 2
    assert "there is no Ray cluster at 127.0.0.1:1" in done.stderr


def test_actors_that_cannot_be_placed_count_as_missing_workers(tmp_path: Path) -> None:
    source = open_source([make_input(tmp_path / "in", 100)])
    ray.init(num_cpus=0, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    settings = Settings(register_timeout_s=2.0)
    try:
        with pytest.raises(SortError, match=r"phase Registering did not end within 2 s: 0 of 2 workers registered"):
            actors_of_ray.run_on_ray(
                None,
                NO_SECURITY,
                source,
                tmp_path / "out",
                workers=2,
                settings=settings,
                work_dir=None,
                on_progress=lambda _: None,
            )
    finally:
        ray.shutdown()


def test_the_error_of_a_worker_has_no_traceback(tmp_path: Path) -> None:
    source = open_source([make_input(tmp_path / "in", 100)])
    settings = {**asdict(Settings(register_timeout_s=0.2)), "work_dir": str(tmp_path / "temp")}
    (tmp_path / "temp").mkdir()
    write_token(tmp_path / "temp", Security.generate().token)
    said = actors_of_ray.SortActor().run("127.0.0.1:1", 0, source.json(), str(tmp_path / "out"), settings, [None] * 3)
    assert not said["input"]
    assert said["message"].startswith("RegisterWorker at the master (127.0.0.1:1): no answer within 0.2 s")
