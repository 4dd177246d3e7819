"""Runs master and workers of a sort as real processes, restarts those that die, and collects their reports."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from interlock.sort.data.records import Extent, RecordFormat, Source

if TYPE_CHECKING:
    from numpy.typing import NDArray

PROGRAM = Path(__file__).parent / "sort_process.py"
TIMEOUT_S = 60.0
SMALL: dict[str, Any] = {"block_records": 500, "window_records": 400, "lost_after_s": 20.0, "register_timeout_s": 20.0}


def random_rows(seed: int, count: int, letters: int = 256, length: int = 100) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, letters, (count, length), dtype=np.uint8)


def write_source(path: Path, rows: NDArray[np.uint8], key_length: int = 10) -> Source:
    path.write_bytes(rows.tobytes())
    return Source(RecordFormat(rows.shape[1], key_length), (Extent(str(path), 0, len(rows)),))


def write_source_again(path: Path, length: int = 100, key_length: int = 10) -> Source:
    """Return the source of an existing file."""
    return Source(RecordFormat(length, key_length), (Extent(str(path), 0, path.stat().st_size // length),))


def sorted_bytes(rows: NDArray[np.uint8], key_length: int = 10) -> bytes:
    records = [rows[at].tobytes() for at in range(len(rows))]
    records.sort(key=lambda record: record[:key_length])
    return b"".join(records)


def output_bytes(*places: Path) -> bytes:
    paths = {int(path.name.split(".")[1]): path for place in places for path in place.glob("partition.*")}
    return b"".join(paths[number].read_bytes() for number in sorted(paths))


class SortCluster:
    """One master and its workers as processes."""

    def __init__(
        self, place: Path, source: Source, workers: int = 2, *, forgetful: bool = False, **settings: Any
    ) -> None:
        self._forgetful = forgetful
        self.place = place
        self.workers = workers
        self.deaths: list[str] = []
        self.output = place / "out"
        self._settings = {**SMALL, **settings}
        self._source = source
        self._processes: list[subprocess.Popen[str]] = []
        self._threads: list[threading.Thread] = []
        self.results: dict[str, tuple[int, str, str]] = {}
        self._ending = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ending = True
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for thread in self._threads:
            thread.join()

    def start_master(self, die_at: tuple[str, ...] = (), **changes: Any) -> None:
        address_file = self.place / "address"
        address_file.unlink(missing_ok=True)
        self._run("master", die_at, role="master", workers=self.workers, address_file=str(address_file), **changes)
        until = time.monotonic() + TIMEOUT_S
        while not address_file.exists():
            assert time.monotonic() < until, self.results
            time.sleep(0.01)
        self.address = address_file.read_text()

    def start_worker(self, index: int, die_at: tuple[str, ...] = (), **changes: Any) -> None:
        self._run(
            f"worker-{index}",
            die_at,
            **{
                "role": "worker",
                "master": self.address,
                "source": self._source.share(index, self.workers).json(),
                "output": str(self.output),
                "index": index,
                **changes,
            },
        )

    def kill_local(self, state: str) -> None:
        """Start a local sort that is killed when its master reaches a state."""
        self._run_local((state,), self._source, forever=True)
        self.ended("local")
        assert self.results["local"][0] == -signal.SIGKILL, self.results

    def restart_local(self, source: Source, **changes: Any) -> dict[str, Any]:
        """Run a local sort of this place again, with other settings; return its report."""
        self._run_local((), source, settings={**self._settings, **changes})
        return self.wait("local")

    def wait(self, name: str) -> dict[str, Any]:
        """Wait for a process to end; return its report."""
        thread = next(thread for thread in reversed(self._threads) if thread.name == name)
        thread.join(TIMEOUT_S)
        assert not thread.is_alive(), f"{name} still runs"
        code, text, errors = self.results[name]
        assert code == 0, errors
        found: dict[str, Any] = json.loads(text.splitlines()[-1])  # warnings may stand before it
        return found

    def ended(self, name: str) -> None:
        """Wait for a process to end in any way."""
        thread = next(thread for thread in reversed(self._threads) if thread.name == name)
        thread.join(TIMEOUT_S)
        assert not thread.is_alive(), f"{name} still runs"

    def failure(self, name: str) -> str:
        """Wait for a process that fails; return its message."""
        thread = next(thread for thread in reversed(self._threads) if thread.name == name)
        thread.join(TIMEOUT_S)
        assert not thread.is_alive(), f"{name} still runs"
        code, _, errors = self.results[name]
        assert code == 1, (code, errors)
        assert "Traceback" not in errors
        return errors

    def _run_local(self, die_at: tuple[str, ...], source: Source, **changes: Any) -> None:
        instructions = {"source": source.json(), "output": str(self.output), "workers": self.workers, **changes}
        self._run("local", die_at, role="local", **instructions)

    def _run(self, name: str, die_at: tuple[str, ...], **instructions: Any) -> None:
        work_dir = self.place / "temp" / name
        marks = self.place / "marks" / name
        marks.mkdir(parents=True, exist_ok=True)
        instructions = {
            "temp": str(work_dir),
            "marks": str(marks),
            "die_at": die_at,
            "settings": self._settings,
            **instructions,
        }
        thread = threading.Thread(target=self._supervise, args=(name, instructions), name=name)
        self._threads.append(thread)
        thread.start()

    def _supervise(self, name: str, instructions: dict[str, Any]) -> None:
        while True:
            process = subprocess.Popen(
                [sys.executable, str(PROGRAM), json.dumps(instructions)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            self._processes.append(process)
            text, errors = process.communicate()
            if process.returncode != -signal.SIGKILL or self._ending or instructions.get("forever"):
                self.results[name] = (process.returncode, text, errors)
                return
            self.deaths.append(name)
            if self._forgetful and name == "master":
                Path(instructions["temp"], "state.json").unlink()
                instructions = {**instructions, "port": int(self.address.rsplit(":", 1)[1])}
