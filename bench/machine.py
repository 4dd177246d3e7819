"""Benchmark of one transition of a state machine, against two well-known libraries with the same two states.

Run: `./dev bench machine`; the libraries come with the `bench` extra. It needs no database.
"""

from __future__ import annotations

import importlib
import os
import platform
import sys
import timeit
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlock.machine import Machine, StateMachine
from interlock.telemetry import TaskTelemetry, TaskTypeSeries, configure_logging

if TYPE_CHECKING:
    from collections.abc import Callable

REPEATS = 7
RUN_S = 0.2
TARGETS_US = {"Machine.next": 1.0, "… and metrics, JSON log": 20.0}


class Light(StrEnum):
    """The two states."""

    RED = "red"
    GREEN = "green"


class Lever(StrEnum):
    """The only event; it leads from each state to the other."""

    PULL = "pull"


SIGNAL = Machine(
    "signal",
    Light,
    Lever,
    ((Light.RED, Lever.PULL, Light.GREEN), (Light.GREEN, Lever.PULL, Light.RED)),
    initial=[Light.RED],
    final=[],
)


def bare() -> Callable[[], object]:
    """Look up the next state."""
    return lambda: SIGNAL.next(Light.RED, Lever.PULL)


def with_history() -> Callable[[], object]:
    """Transition a machine that keeps its history."""
    machine = StateMachine(SIGNAL)
    return lambda: machine.transition(Lever.PULL)


def with_telemetry() -> Callable[[], object]:
    """Transition a machine that also counts, times and logs every transition."""
    machine = StateMachine(SIGNAL, observer=TaskTelemetry("task-1", TaskTypeSeries("bench")))
    return lambda: machine.transition(Lever.PULL)


def transitions() -> Callable[[], object]:
    """Transition a machine of the library `transitions`."""
    library: Any = importlib.import_module("transitions")

    class Signal:
        pull: Callable[[], object]

    signal = Signal()
    library.Machine(
        signal,
        states=["red", "green"],
        initial="red",
        transitions=[["pull", "red", "green"], ["pull", "green", "red"]],
    )
    return signal.pull


def python_statemachine() -> Callable[[], object]:
    """Transition a machine of the library `python-statemachine`."""
    library: Any = importlib.import_module("statemachine")
    red, green = library.State(initial=True), library.State()
    body = {"red": red, "green": green, "pull": red.to(green) | green.to(red)}
    signal: Any = type("Signal", (library.StateMachine,), body)()
    # Its events are strings, which timeit would take for source code, so the call is wrapped.
    return lambda: signal.pull()  # noqa: PLW0108 - every contender is called through a lambda


def cost(move: Callable[[], object]) -> float:
    """Return the microseconds of one transition: the best of several runs, each long enough for the clock."""
    timer = timeit.Timer(move)
    number, took = timer.autorange()
    number = max(1, int(number * RUN_S / took))
    return min(timer.repeat(REPEATS, number)) / number * 1e6


def described() -> str:
    """Describe the processor, its cores and the interpreter."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    return f"{cpu}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"


def processor_time(pid: int) -> float:
    """Return the processor time of a process in seconds; 0 without /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Print the table."""
    rows: dict[str, Callable[[], Callable[[], object]]] = {
        "Machine.next": bare,
        "StateMachine.transition, history": with_history,
        "… and metrics, JSON log": with_telemetry,
        "transitions": transitions,
        "python-statemachine": python_statemachine,
    }
    print(described())
    print(f"\n| one transition | µs | times Machine.next | target µs |\n| {'-' * 32} | ------: | ------: | ------: |")
    first = 0.0
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        configure_logging("info", "json", nowhere)
        for name, make in rows.items():
            try:
                took = cost(make())
            except ModuleNotFoundError as error:
                print(f"| {name:32} | {error.name} is not installed: pip install 'interlock[bench]' |||")
                continue
            first = first or took
            target = f"< {TARGETS_US[name]:.0f}" if name in TARGETS_US else ""
            print(f"| {name:32} | {took:7.2f} | {took / first:7.1f} | {target:>7} |")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
