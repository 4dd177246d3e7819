"""The sort beside others: the same records, from files to files, on the same disk, each output validated.

Run: `./dev bench sort`. Paired rounds: each runs Interlock and then every peer, with the input out of the page cache
and the output synced to disk, start-up counted. Only the ratios inside one run mean anything; see README.md.
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

from interlock.cli.sort import read_size
from interlock.sort.data.generate import Distribution, Recipe, generate
from interlock.sort.data.records import RecordFormat
from interlock.sort.data.validate import validate
from interlock.sort.io.direct_io import AT_ONCE, DirectReader, DirectWriter, room
from machine import described
from report import asked

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

HERE = Path(__file__).parent / "peers"
PATIENCE = 3_600.0
LOOK = 0.2
SETTLED = 4.0  # seconds; memory goes back to a host two seconds after it was freed
FILES = 8
GIGA = 1_000_000_000
GROWTH = (1, 2, 4, 8)
CREWS = (1, 2, 4)


@dataclass(frozen=True, slots=True)
class Sorter:
    """One program that takes part. `target` is how many times faster Interlock wants to be, by size in gigabytes."""

    name: str
    distribution: str | None
    target: dict[int, float] = field(default_factory=dict)

    @property
    def version(self) -> str | None:
        """The installed version, if it is installed."""
        if self.distribution is None:
            tool = shutil.which("sort")
            if tool is None:
                return None
            told = subprocess.run([tool, "--version"], capture_output=True, text=True, check=False)  # noqa: S603 - sort
            return told.stdout.split("\n")[0].split()[-1] if "GNU" in told.stdout else None
        try:
            return version(self.distribution)
        except PackageNotFoundError:
            return None

    def command(self, source: Path, output: Path, temp: Path, memory: int, workers: int) -> list[str]:
        """Spell out how it is started."""
        if self.name == "interlock":
            options = ["--workers", str(workers), "--memory", str(memory), "--temp", str(temp), "--quiet", "--json"]
            return [sys.executable, "-m", "interlock", "sort", "run", str(source), "--output", str(output), *options]
        script = HERE / f"sort_{self.name}.py"
        return [sys.executable, str(script), str(source), str(output), str(temp), str(memory), str(workers)]


SORTERS = {
    sorter.name: sorter
    for sorter in (
        Sorter("interlock", "interlock"),
        Sorter("gnu", None, {1: 3.0, 4: 6.0}),
        Sorter("duckdb", "duckdb", {1: 2.0, 4: 3.5}),
        Sorter("polars", "polars", {1: 2.0, 4: 3.5}),
        Sorter("dask", "dask", {1: 8.0}),
        Sorter("spark", "pyspark", {1: 8.0}),
        Sorter("ray", "ray", {1: 8.0}),
    )
}
OURS = SORTERS["interlock"]


@dataclass(slots=True)
class Sample:
    """One run of one program: seconds from its start until its output is on the disk, processor time and memory."""

    name: str
    size: int
    memory: int
    workers: int
    seconds: float
    processor: float
    peak: int
    told: dict[str, object]
    problem: str | None = None


class Watch:
    """Looks at the memory of a process and all its descendants while it runs.

    To add up what each has of shared pages takes the system 25 ms a gigabyte, so that is asked for only when the
    sum that counts such pages for everybody, which costs nothing, is larger than ever before.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self.peak = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        largest = 0
        while not self._ended.wait(LOOK):
            members = list(family(self._pid))
            whole = sum(resident_size(pid) for pid in members)
            if whole > largest:
                largest = whole
                self.peak = max(self.peak, sum(proportional_size(pid) for pid in members))


def family(pid: int) -> Iterator[int]:
    """List a process and its descendants."""
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found = children.read_text().split()
        except OSError:
            continue
        for child in found:
            yield from family(int(child))


def resident_size(pid: int) -> int:
    """Give the memory of a process, with all of what it shares."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, IndexError):
        return 0


def proportional_size(pid: int) -> int:
    """Give the memory of a process, with its part of what it shares."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


class Arena:
    """The disk that all sort on: inputs by size, and a place for outputs."""

    def __init__(self, place: Path) -> None:
        self._place = place

    def source(self, size: int) -> Path:
        """Make the input of this size, once."""
        source = self._place / f"in-{size}"
        if not source.exists():
            recipe = Recipe(size // 100, 1, Distribution.UNIFORM, RecordFormat(ascii=True))
            generate(source, recipe, files=FILES, threads=os.cpu_count() or 1)
            for path in source.iterdir():
                sync(path)
        return source

    def run(self, sorter: Sorter, size: int, memory: int, workers: int) -> Sample:
        """Let one program sort, and check what it made."""
        source, output, temp = self.source(size), self._place / "out", self._place / "temp"
        for place in (output, temp):
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
        chill(source.iterdir())
        settle()
        command = sorter.command(source, output, temp, memory, workers)
        used, began = processor_time(), time.monotonic()
        with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as complained:
            process = subprocess.Popen(command, stdout=said, stderr=complained, env=environment())  # noqa: S603 - ours
            with Watch(process.pid) as watch:
                code = process.wait(PATIENCE)
            used = processor_time() - used
            for path in output.iterdir():
                sync(path)
            synced = time.monotonic()
            said.seek(0)
            complained.seek(0)
            answer, complaint = said.read(), complained.read()
        told = json.loads(answer) if code == 0 and answer else {}
        problem = wrong(source, output) if code == 0 else complaint.decode(errors="replace")[-2000:]
        sample = Sample(sorter.name, size, memory, workers, synced - began, used, watch.peak, told, problem)
        shutil.rmtree(output)
        return sample

    def limit(self, size: int) -> float:
        """Time one sequential read and one write of the data, one after the other, in the fastest way there is."""
        source, copy = self.source(size), self._place / "copy"
        copy.mkdir(exist_ok=True)
        chill(source.iterdir())
        settle()
        began = time.monotonic()
        for path in sorted(source.iterdir()):
            copy_past_the_cache(path, copy / path.name)
        took = time.monotonic() - began
        shutil.rmtree(copy)
        return took


def copy_past_the_cache(path: Path, copy: Path) -> None:
    """Copy a file as fast as one thread can, and see that the copy is on the disk."""
    size = path.stat().st_size
    source, target = DirectReader(path), DirectWriter(copy, size)
    try:
        with room() as lent:
            for offset in range(0, size, AT_ONCE):
                target.write(source.view(lent, offset, min(AT_ONCE, size - offset)), offset)
        target.sync()
    finally:
        source.close()
        target.close()


def processor_time() -> float:
    """Give the processor time of all children so far, those of theirs that they waited for included."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def environment() -> dict[str, str]:
    """Give the environment of all programs: our own source, compiled once like what is installed, and plain bytes."""
    ours = str(Path(__file__).parents[1] / "src")
    given = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return given | {"LC_ALL": "C", "PYTHONPATH": ours, "PYTHONWARNINGS": "ignore"}


def sync(path: Path) -> None:
    """See that a file is on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def chill(paths: Iterable[Path]) -> None:
    """Put files out of the page cache."""
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def settle() -> None:
    """Leave nothing of what ran before for the next to pay: writes under way, and memory that goes back to a host."""
    os.sync()
    time.sleep(SETTLED)


def wrong(source: Path, output: Path) -> str | None:
    """Tell what is wrong with an output, if something is."""
    found = validate([output], [source])
    return None if found.is_valid else "; ".join(found.problems[:3])


def compare(arena: Arena, peers: list[Sorter], options: argparse.Namespace, samples: list[Sample]) -> None:
    """Run all in paired rounds; print times, ratios and the distance to the limit."""
    size, memory = options.size, options.memory
    print(f"\n{size / GIGA:g} GB, memory {memory / GIGA:g} GB, {options.workers} workers, {options.rounds} rounds")
    limits: list[float] = []
    rounds: dict[str, list[Sample]] = {sorter.name: [] for sorter in (OURS, *peers)}
    for _ in range(options.rounds):
        limits.append(arena.limit(size))
        for sorter in (OURS, *peers):
            sample = arena.run(sorter, size, memory, options.workers)
            rounds[sorter.name].append(sample)
            samples.append(sample)
            note = f"  {sorter.name}: {sample.seconds:.2f} s, {sample.peak / GIGA:.2f} GB"
            print(note + (f", FAILED: {sample.problem}" if sample.problem else ""), file=sys.stderr, flush=True)
    print("| program | seconds | of them start-up | processor seconds | peak memory GB | times Interlock | target |")
    print("| ------- | ------: | ---------------: | ----------------: | -------------: | --------------: | -----: |")
    print(f"| one read and one write | {statistics.median(limits):.2f} | | | | | |")
    for sorter in (OURS, *peers):
        print(row(sorter, rounds[sorter.name], rounds[OURS.name], size))


def row(sorter: Sorter, own: list[Sample], ours: list[Sample], size: int) -> str:
    """Write the line of one program."""
    name = f"{sorter.name} {sorter.version}"
    if any(sample.problem for sample in own):
        problem = next(sample.problem for sample in own if sample.problem)
        return f"| {name} | failed: {problem.strip().splitlines()[-1]} ||||||"
    ratio = statistics.median(one.seconds / other.seconds for one, other in zip(own, ours, strict=True))
    seconds = statistics.median(sample.seconds for sample in own)
    peak = max(sample.peak for sample in own)
    startup = [float(str(sample.told["startup"])) for sample in own if "startup" in sample.told]
    started = f"{statistics.median(startup):.2f}" if startup else ""
    target = sorter.target.get(round(size / GIGA))
    wanted = "" if target is None else f"≥ {target:g}"
    used = statistics.median(sample.processor for sample in own)
    return f"| {name} | {seconds:.2f} | {started} | {used:.2f} | {peak / GIGA:.2f} | {ratio:.2f} | {wanted} |"


def growth(arena: Arena, options: argparse.Namespace, samples: list[Sample]) -> None:
    """Show that the cost grows with the size, and no faster."""
    print(
        "\n| size GB | seconds | seconds a GB | peak memory GB |\n| ------: | ------: | -----------: | -------------: |"
    )
    for factor in GROWTH:
        taken = [arena.run(OURS, factor * options.size, options.memory, options.workers) for _ in range(options.rounds)]
        samples += taken
        print(grown(f"{factor * options.size / GIGA:g}", factor * options.size, taken))


def crews(arena: Arena, options: argparse.Namespace, samples: list[Sample]) -> None:
    """Show what more workers bring."""
    print(
        "\n| workers | seconds | seconds a GB | peak memory GB |\n| ------: | ------: | -----------: | -------------: |"
    )
    for workers in CREWS:
        taken = [arena.run(OURS, options.size, options.memory, workers) for _ in range(options.rounds)]
        samples += taken
        print(grown(str(workers), options.size, taken))


def grown(name: str, size: int, taken: list[Sample]) -> str:
    """Write a line about runs of our own."""
    problem = next((sample.problem for sample in taken if sample.problem), None)
    if problem is not None:
        return f"| {name} | failed: {problem.strip().splitlines()[-1]} |||"
    seconds = statistics.median(sample.seconds for sample in taken)
    peak = max(sample.peak for sample in taken)
    return f"| {name} | {seconds:.2f} | {seconds / size * GIGA:.2f} | {peak / GIGA:.2f} |"


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    peers = [name for name in SORTERS if name != OURS.name]
    parser.add_argument("--size", type=lambda text: read_size("--size", text), default=GIGA, help="default 1GB")
    parser.add_argument("--memory", type=lambda text: read_size("--memory", text), default=2 * GIGA, help="default 2GB")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=["field", "growth", "workers"])
    parser.add_argument("--peers", default=",".join(peers), help=f"of {', '.join(peers)}")
    parser.add_argument("--place", type=Path, help="the directory to work in; a temporary one unless given")
    parser.add_argument("--json", type=Path, help="write every sample there")
    return parser.parse_args()


def main() -> None:
    """Print the tables."""
    options = read_options()
    wanted = asked(options.peers, SORTERS)
    peers = [peer for peer in wanted if peer.version is not None]
    for peer in wanted:
        if peer.version is None:
            print(f"{peer.name} is not installed, and left out: pip install 'interlock[bench]'")
    samples: list[Sample] = []
    with tempfile.TemporaryDirectory(dir=options.place) as place:
        arena = Arena(Path(place))
        print(f"{described()}; input out of the page cache, output synced, start-up counted")
        if options.only in (None, "field"):
            compare(arena, peers, options, samples)
        if options.only in (None, "workers"):
            crews(arena, options, samples)
        if options.only in (None, "growth"):
            growth(arena, options, samples)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(sample) for sample in samples], indent=1))


if __name__ == "__main__":
    main()
