"""Benchmark of the sort against peers: the same records, from files to files, on the same disk, each output validated.

Run: `./dev bench sort`, or `./dev bench sort --lines` for lines of 20 to 200 bytes with a key column. Each paired round
runs Interlock and then every peer, with the input out of the page cache and the output synced to disk; start-up is
included. Only ratios within one run are comparable; see README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
import xxhash

from interlock.sort.data.generate import Recipe, generate
from interlock.sort.data.line_order import parse_line_order
from interlock.sort.data.records import RecordFormat
from interlock.sort.data.validate import validate
from interlock.sort.io.direct_io import MAX_IO_BYTES, DirectReader, DirectWriter, io_buffer
from interlock.sort.settings import parse_size
from machine import described
from report import asked

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

PEERS = Path(__file__).parent / "peers"
RUN_TIMEOUT_S = 3_600.0
MEMORY_INTERVAL_S = 0.2  # between two measurements of the memory
SETTLE_S = 4.0  # before each run: a virtual machine returns freed memory to its host after two seconds
INPUT_FILES = 8
GIGA = 1_000_000_000
GROWTH_FACTORS = (1, 2, 4, 8)
WORKER_COUNTS = (1, 2, 4)
SEPARATOR, KEY = ",", "2,2"  # of lines
LINES_AT_ONCE = 100_000
DIGEST_BYTES = 16 << 20  # read at once


@dataclass(frozen=True, slots=True)
class Sorter:
    """One program to compare. `target` is how many times faster Interlock should be, by size in gigabytes.

    `lines_target` is the same for lines with a key column; a program without any does not sort them.
    """

    name: str
    distribution: str | None
    target: dict[int, float] = field(default_factory=dict)
    lines_target: dict[int, float] = field(default_factory=dict)

    @property
    def version(self) -> str | None:
        """The installed version; None if it is not installed."""
        if self.distribution is None:
            tool = shutil.which("sort")
            if tool is None:
                return None
            shown = subprocess.run([tool, "--version"], capture_output=True, text=True, check=False)  # noqa: S603 - sort
            return shown.stdout.split("\n")[0].split()[-1] if "GNU" in shown.stdout else None
        try:
            return version(self.distribution)
        except PackageNotFoundError:
            return None

    def command(
        self, source: Path, output: Path, temp: Path, memory: int, workers: int | None, *, has_lines: bool, engine: str
    ) -> list[str]:
        """Return the command line of one run. Without `workers`: the default, and all processors for a peer."""
        if self.name == "interlock":
            options = ["--memory", str(memory), "--temp", str(temp), "--quiet", "--json"]
            options += [] if engine == "local" else ["--engine", engine]
            options += [] if workers is None else ["--workers", str(workers)]
            options += ["--field-separator", SEPARATOR, "--key", KEY] if has_lines else []
            program = [sys.executable, "-m", "interlock.cli.sort.main"]  # interlock-sort
            return [*program, "run", str(source), "--output", str(output), *options]
        script = PEERS / f"sort_{self.name}.py"
        kind = "lines" if has_lines else "records"
        threads = workers or os.cpu_count() or 1
        return [sys.executable, str(script), str(source), str(output), str(temp), str(memory), str(threads), kind]


SORTERS = {
    sorter.name: sorter
    for sorter in (
        Sorter("interlock", "interlock"),
        Sorter("gnu", None, {1: 4.0, 4: 6.5}, {1: 2.0}),
        Sorter("duckdb", "duckdb", {1: 2.2, 4: 3.5}, {1: 1.2}),
        Sorter("polars", "polars", {1: 2.2, 4: 3.5}, {1: 1.2}),
        Sorter("dask", "dask", {1: 8.0}),
        Sorter("spark", "pyspark", {1: 8.0}),
        Sorter("ray", "ray", {1: 8.0}),
    )
}
OURS = SORTERS["interlock"]


@dataclass(slots=True)
class Sample:
    """One run of one program: seconds from start until its output is on the disk, processor seconds, peak memory."""

    name: str
    size: int
    memory: int
    workers: int | None
    seconds: float
    processor: float
    peak: int
    report: dict[str, object]
    problem: str | None = None


class MemoryWatch:
    """Measures the peak memory of a process and all its descendants while it runs.

    The proportional set size, which divides shared pages, takes the kernel 25 ms per gigabyte. It is read only when the
    sum of the resident set sizes, which costs nothing, has a new maximum.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._measure, daemon=True)
        self.peak = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _measure(self) -> None:
        largest = 0
        while not self._ended.wait(MEMORY_INTERVAL_S):
            members = list(process_tree(self._pid))
            whole = sum(resident_size(pid) for pid in members)
            if whole > largest:
                largest = whole
                self.peak = max(self.peak, sum(proportional_size(pid) for pid in members))


def process_tree(pid: int) -> Iterator[int]:
    """Yield a process and its descendants."""
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found = children.read_text().split()
        except OSError:
            continue
        for child in found:
            yield from process_tree(int(child))


def resident_size(pid: int) -> int:
    """Return the resident set size of a process."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, IndexError):
        return 0


def proportional_size(pid: int) -> int:
    """Return the proportional set size of a process."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


class Workspace:
    """The directory in which all programs sort: inputs by size, and outputs.

    An output that is the same, byte for byte, as a valid one is valid.
    """

    def __init__(self, directory: Path, *, has_lines: bool, engine: str) -> None:
        self._directory = directory
        self._has_lines = has_lines
        self._engine = engine  # of Interlock
        self._valid: set[tuple[int, str]] = set()  # input sizes and digests of outputs

    def source(self, size: int) -> Path:
        """Generate the input of this size, once."""
        source = self._directory / f"in-{size}"
        if not source.exists() and self._has_lines:
            source.mkdir()
            for number in range(INPUT_FILES):
                path = source / f"part-{number:05}"
                write_lines(path, size // INPUT_FILES, number)
                sync(path)
        elif not source.exists():
            recipe = Recipe(size // 100, 1, RecordFormat(ascii=True))
            generate(source, recipe, files=INPUT_FILES, threads=os.cpu_count() or 1)
            for path in source.iterdir():
                sync(path)
        return source

    def run(self, sorter: Sorter, size: int, memory: int, workers: int | None) -> Sample:
        """Run one program and validate its output."""
        source, output, temp = self.source(size), self._directory / "out", self._directory / "temp"
        for directory in (output, temp):
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()
        evict(source.iterdir())
        settle()
        command = sorter.command(source, output, temp, memory, workers, has_lines=self._has_lines, engine=self._engine)
        used, began = processor_time(), time.monotonic()
        with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
            process = subprocess.Popen(command, stdout=stdout, stderr=stderr, env=environment())  # noqa: S603 - ours
            with MemoryWatch(process.pid) as watch:
                code = process.wait(RUN_TIMEOUT_S)
            used = processor_time() - used
            for path in output.iterdir():
                sync(path)
            synced = time.monotonic()
            stdout.seek(0)
            stderr.seek(0)
            answer, errors = stdout.read(), stderr.read()
        report = json.loads(answer) if code == 0 and answer else {}
        problem = self._find_problem(source, output, size) if code == 0 else errors.decode(errors="replace")[-2000:]
        sample = Sample(sorter.name, size, memory, workers, synced - began, used, watch.peak, report, problem)
        shutil.rmtree(output)
        return sample

    def _find_problem(self, source: Path, output: Path, size: int) -> str | None:
        """Validate an output; return its first problems, or None."""
        whole = (size, digest(output))
        if whole in self._valid:
            return None
        order = parse_line_order([KEY], separator=SEPARATOR) if self._has_lines else None
        result = validate([output], [source], lines=order)
        if result.is_valid:
            self._valid.add(whole)
            return None
        return "; ".join(result.problems[:3])

    def limit(self, size: int) -> float:
        """Time one sequential read and one write of the data with direct I/O: the lower bound of a sort."""
        source, copy = self.source(size), self._directory / "copy"
        copy.mkdir(exist_ok=True)
        evict(source.iterdir())
        settle()
        began = time.monotonic()
        for path in sorted(source.iterdir()):
            copy_directly(path, copy / path.name)
        took = time.monotonic() - began
        shutil.rmtree(copy)
        return took


def copy_directly(path: Path, copy: Path) -> None:
    """Copy a file with direct I/O and sync the copy."""
    size = path.stat().st_size
    source, target = DirectReader(path), DirectWriter(copy, size)
    try:
        with io_buffer() as buffer:
            for offset in range(0, size, MAX_IO_BYTES):
                target.write(source.view(buffer, offset, min(MAX_IO_BYTES, size - offset)), offset)
        target.sync()
    finally:
        source.close()
        target.close()


def processor_time() -> float:
    """Return the processor time of all children that were waited for, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def environment() -> dict[str, str]:
    """Return the environment of all programs: our source, compiled to bytecode as if installed, and the C locale."""
    ours = str(Path(__file__).parents[1] / "src")
    given = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return given | {"LC_ALL": "C", "PYTHONPATH": ours, "PYTHONWARNINGS": "ignore"}


def sync(path: Path) -> None:
    """Sync a file to the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def evict(paths: Iterable[Path]) -> None:
    """Evict files from the page cache."""
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def settle() -> None:
    """Wait until the costs of the previous run are over: writeback, and memory that returns to the host."""
    os.sync()
    time.sleep(SETTLE_S)


def write_lines(path: Path, size: int, seed: int) -> None:
    """Write lines of 20 to 200 bytes: an id of 6 letters, a key of 10 letters and digits, a text."""
    source = np.random.default_rng(seed)
    symbols = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz0123456789", dtype=np.uint8)
    left = size
    with path.open("wb") as file:
        while left > 0:
            lengths = source.integers(20, 201, LINES_AT_ONCE)
            ends = np.cumsum(lengths)
            text = symbols[source.integers(0, len(symbols), int(ends[-1]))]
            begins = ends - lengths
            text[begins + 6] = text[begins + 17] = ord(SEPARATOR)
            text[ends - 1] = ord("\n")
            kept = int(np.searchsorted(ends, left)) + 1
            file.write(text[: ends[min(kept, len(ends)) - 1]].tobytes())
            left -= int(ends[min(kept, len(ends)) - 1])


def digest(output: Path) -> str:
    """Return a hash of the partitions one behind the other, in order."""
    whole = xxhash.xxh3_128()
    for path in sorted(output.iterdir(), key=lambda path: int(path.suffix.removeprefix("."))):
        with path.open("rb") as file:
            while piece := file.read(DIGEST_BYTES):
                whole.update(piece)
    return whole.hexdigest()


def compare(workspace: Workspace, peers: list[Sorter], options: argparse.Namespace, samples: list[Sample]) -> None:
    """Run all programs in paired rounds; print times, ratios and the lower bound."""
    size, memory = options.size, options.memory
    kind = "lines with a key column, " if options.lines else ""
    workers = options.workers or "the default of"
    print(f"\n{kind}{size / GIGA:g} GB, memory {memory / GIGA:g} GB, {workers} workers, {options.rounds} rounds")
    limits: list[float] = []
    rounds: dict[str, list[Sample]] = {sorter.name: [] for sorter in (OURS, *peers)}
    for _ in range(options.rounds):
        limits.append(workspace.limit(size))
        for sorter in (OURS, *peers):
            sample = workspace.run(sorter, size, memory, options.workers)
            rounds[sorter.name].append(sample)
            samples.append(sample)
            note = f"  {sorter.name}: {sample.seconds:.2f} s, {sample.peak / GIGA:.2f} GB"
            print(note + (f", FAILED: {sample.problem}" if sample.problem else ""), file=sys.stderr, flush=True)
    print("| program | seconds | of them start-up | processor seconds | peak memory GB | times Interlock | target |")
    print("| ------- | ------: | ---------------: | ----------------: | -------------: | --------------: | -----: |")
    print(f"| one read and one write | {statistics.median(limits):.2f} | | | | | |")
    for sorter in (OURS, *peers):
        target = (sorter.lines_target if options.lines else sorter.target).get(round(size / GIGA))
        print(format_row(sorter, rounds[sorter.name], rounds[OURS.name], target))


def format_row(sorter: Sorter, own: list[Sample], ours: list[Sample], target: float | None) -> str:
    """Format the table row of one program."""
    name = f"{sorter.name} {sorter.version}"
    if any(sample.problem for sample in own):
        problem = next(sample.problem for sample in own if sample.problem)
        return f"| {name} | failed: {problem.strip().splitlines()[-1]} ||||||"
    ratio = statistics.median(one.seconds / other.seconds for one, other in zip(own, ours, strict=True))
    seconds = statistics.median(sample.seconds for sample in own)
    peak = max(sample.peak for sample in own)
    startup = [float(str(sample.report["startup"])) for sample in own if "startup" in sample.report]
    started = f"{statistics.median(startup):.2f}" if startup else ""
    wanted = "" if target is None else f"≥ {target:g}"
    used = statistics.median(sample.processor for sample in own)
    return f"| {name} | {seconds:.2f} | {started} | {used:.2f} | {peak / GIGA:.2f} | {ratio:.2f} | {wanted} |"


def growth(workspace: Workspace, options: argparse.Namespace, samples: list[Sample]) -> None:
    """Measure how the time grows with the size."""
    print(
        "\n| size GB | seconds | seconds a GB | peak memory GB |\n| ------: | ------: | -----------: | -------------: |"
    )
    for factor in GROWTH_FACTORS:
        taken = [
            workspace.run(OURS, factor * options.size, options.memory, options.workers) for _ in range(options.rounds)
        ]
        samples += taken
        print(format_own_row(f"{factor * options.size / GIGA:g}", factor * options.size, taken))


def scaling(workspace: Workspace, options: argparse.Namespace, samples: list[Sample]) -> None:
    """Measure how the time changes with the number of workers."""
    print(
        "\n| workers | seconds | seconds a GB | peak memory GB |\n| ------: | ------: | -----------: | -------------: |"
    )
    for workers in WORKER_COUNTS:
        taken = [workspace.run(OURS, options.size, options.memory, workers) for _ in range(options.rounds)]
        samples += taken
        print(format_own_row(str(workers), options.size, taken))


def format_own_row(name: str, size: int, taken: list[Sample]) -> str:
    """Format the table row of several runs of Interlock."""
    problem = next((sample.problem for sample in taken if sample.problem), None)
    if problem is not None:
        return f"| {name} | failed: {problem.strip().splitlines()[-1]} |||"
    seconds = statistics.median(sample.seconds for sample in taken)
    peak = max(sample.peak for sample in taken)
    return f"| {name} | {seconds:.2f} | {seconds / size * GIGA:.2f} | {peak / GIGA:.2f} |"


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    peers = [name for name in SORTERS if name != OURS.name]
    parser.add_argument("--size", type=lambda text: parse_size("--size", text), default=GIGA, help="default 1GB")
    parser.add_argument(
        "--memory", type=lambda text: parse_size("--memory", text), default=2 * GIGA, help="default 2GB"
    )
    parser.add_argument("--workers", type=int, help="of Interlock, and threads of a peer; by default as each chooses")
    parser.add_argument("--engine", choices=["local", "ray"], default="local", help="of Interlock; default local")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=["field", "growth", "workers"])
    parser.add_argument("--lines", action="store_true", help="lines of 20 to 200 bytes with a key column")
    parser.add_argument("--peers", default=",".join(peers), help=f"of {', '.join(peers)}")
    parser.add_argument("--place", type=Path, help="directory to work in; a temporary one unless given")
    parser.add_argument("--json", type=Path, help="write every sample to this file")
    return parser.parse_args()


def main() -> None:
    """Run the benchmark and print its tables."""
    options = parse_options()
    wanted = asked(options.peers, SORTERS)
    peers = [peer for peer in wanted if peer.version is not None and (peer.lines_target or not options.lines)]
    for peer in wanted:
        if peer.version is None:
            print(f"{peer.name} is not installed and is skipped: pip install 'interlock[bench]'")
    samples: list[Sample] = []
    with tempfile.TemporaryDirectory(dir=options.place) as directory:
        workspace = Workspace(Path(directory), has_lines=options.lines, engine=options.engine)
        print(f"{described()}; input out of the page cache, output synced, start-up counted")
        if options.only in (None, "field"):
            compare(workspace, peers, options, samples)
        if options.only in (None, "workers"):
            scaling(workspace, options, samples)
        if options.only in (None, "growth"):
            growth(workspace, options, samples)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(sample) for sample in samples], indent=1))


if __name__ == "__main__":
    main()
