"""Sends what this worker's runs hold for the others, and sends it again to one that was started again.

Invariant: a worker has been served when it acknowledged every slice of every run in its present incarnation.
"""

from __future__ import annotations

import functools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import xxhash

from interlock.errors import SortError
from interlock.sort import wire_pb2 as wire
from interlock.sort.io.direct_io import AT_ONCE, room
from interlock.sort.io.memory import GivenBack
from interlock.sort.rpc import FIRST_PAUSE, LONGEST_PAUSE, RETRIED, WORKER, Peer, Piece, Unreachable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from interlock.sort.data.plan import Member, Plan, Roster
    from interlock.sort.io.buffers import Rowstore
    from interlock.sort.io.runs import Run

STREAM_TIMEOUT = 60.0
SLOWEST = 1 << 20  # bytes per second: a connection that is slower is as good as broken
STREAMS = 2  # to one worker at a time: one is read from the disk while the other is sent
CROWD = 8  # workers from which on there are streams enough


class Sender:
    """One thread per other worker, so that all of them are served at once and one that is away holds up no other."""

    def __init__(
        self,
        plan: Plan,
        worker: int,
        runs: Sequence[Run],
        record_length: int,
        patience: float,
        changed: threading.Condition,
        failed: Callable[[BaseException], None],
    ) -> None:
        self._plan = plan
        self._worker = worker
        self._runs = runs
        self._length = record_length
        self._rows_at_once = AT_ONCE // record_length
        self._patience = patience
        self._failed = failed
        self._members: dict[int, Member] = {}
        self._served: dict[int, int] = {}
        self._changed = changed
        self._stopping = False
        self._threads: list[threading.Thread] = []
        self._calls: dict[tuple[int, int], Any] = {}
        self.version = 0
        self.sent = 0

    def start(self, roster: Roster) -> None:
        """Begin to send."""
        self.update(roster)
        for member in roster.members:
            if member.index != self._worker:
                thread = threading.Thread(
                    target=self._serve, args=(member.index,), name=f"interlock-sort-to-{member.index}", daemon=True
                )
                self._threads.append(thread)
                thread.start()

    def update(self, roster: Roster) -> None:
        """Learn where the others are now."""
        with self._changed:
            if roster.version > self.version:
                self.version = roster.version
                self._members = {member.index: member for member in roster.members}
                self._changed.notify_all()

    def is_done(self) -> bool:
        """Tell whether every other worker has been served."""
        with self._changed:
            return all(self._is_served(index) for index in self._members if index != self._worker)

    def progress(self) -> float:
        """Give the share of bytes that were acknowledged, of all that go to others."""
        total = sum(self._size(index, run) for index in self._members if index != self._worker for run in self._runs)
        return min(1.0, self.sent / total) if total else 1.0

    def stop(self) -> None:
        """Send no more; safe to call twice."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            calls = list(self._calls.values())
        for call in calls:
            call.cancel()
        for thread in self._threads:
            thread.join()

    def _size(self, index: int, run: Run) -> int:
        """Count the bytes that a run holds for another worker."""
        low, high = self._plan.extent(run.cuts, index)
        return (high - low) * self._length

    def _is_served(self, index: int) -> bool:
        member = self._members[index]
        return member.completed or self._served.get(index) == member.incarnation

    def _serve(self, index: int) -> None:
        """Send everything to one worker, and wait for it to be started again."""
        try:
            while self._next(index):
                self._send_all(index)
        except BaseException as error:  # noqa: BLE001 - whatever happens in this thread must reach the master
            if not self._stopping:
                self._failed(error)

    def _next(self, index: int) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or not self._is_served(index))
            return not self._stopping

    def _send_all(self, index: int) -> None:
        """Send all runs to a worker's present incarnation, wherever it is reached by the time."""
        with self._changed:
            member = self._members[index]
        peer = Peer(WORKER, member.address, f"worker {index}")
        try:
            with ThreadPoolExecutor(STREAMS if len(self._members) < CROWD else 1) as streams:
                try:
                    if not all(streams.map(lambda run: self._persist(peer, member, run), self._runs)):
                        return
                finally:
                    streams.shutdown(wait=True, cancel_futures=True)
        finally:
            peer.close()
        with self._changed:
            self._served[index] = member.incarnation
            self._changed.notify_all()

    def _persist(self, peer: Peer, member: Member, run: Run) -> bool:
        """Send one run's slices until they are acknowledged; False when the worker has another incarnation by then."""
        until = time.monotonic() + self._patience
        pause = FIRST_PAUSE
        while True:
            answer = self._attempt(peer, member.index, run)
            if answer is None:
                run.let_go(member.index)
                with self._changed:
                    self.sent += self._size(member.index, run)
                return True
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or self._moved(member), pause)
                if self._stopping or self._moved(member):
                    return False
            if time.monotonic() > until:
                raise Unreachable(
                    f"worker {member.index} ({member.address}) took no data for {self._patience:g} s: {answer}"
                )
            pause = min(pause * 2, LONGEST_PAUSE)

    def _moved(self, member: Member) -> bool:
        return self._members[member.index].incarnation != member.incarnation or self._members[member.index].completed

    def _attempt(self, peer: Peer, index: int, run: Run) -> str | None:
        """Send one run's slices once; give None when they were taken, else why they were not."""
        try:
            rows = run.rows_for(index)
            with self._changed:
                if self._stopping:
                    return "it was stopped"
                timeout = STREAM_TIMEOUT + self._size(index, run) / SLOWEST
                call = peer.start("ShuffleData", self._pieces(index, run, rows), timeout)
                self._calls[index, run.block] = call
            answer = call.result()
        except grpc.FutureCancelledError:
            return "it was stopped"
        except grpc.RpcError as error:
            if error.code() not in RETRIED:
                raise SortError(
                    f"worker {index} ({peer.address}) refused data: {error.code().name}: {error.details()}"
                ) from error
            return f"{error.code().name}: {error.details()}"
        return None if answer.success else str(answer.message)

    def _pieces(self, index: int, run: Run, rows: Rowstore) -> Iterator[Piece]:
        try:
            with ExitStack() as stack:
                lent = functools.cache(lambda: stack.enter_context(room()))  # rows in memory may do without
                for partition in self._plan.owned(index):
                    yield from self._slice(run, rows, partition, lent)
        except GivenBack:
            return  # the other worker said that it has them, and the call has ended

    def _slice(
        self, run: Run, rows: Rowstore, partition: int, lent: Callable[[], NDArray[np.uint8]]
    ) -> Iterator[Piece]:
        edges = self._plan.edges(run.cuts, partition)
        counts = np.diff(edges).tolist()
        first, last = edges[0], edges[-1]
        for low in range(first, last, self._rows_at_once) if first < last else (first,):
            data = rows.view(low, min(self._rows_at_once, last - low), lent)
            head = wire.ShuffleDataChunk(
                epoch=self._plan.epoch,
                worker=self._worker,
                block=run.block,
                partition=partition,
                offset=(low - first) * self._length,
                size=(last - first) * self._length,
                counts=counts if low == first else (),
                checksum=xxhash.xxh3_64_intdigest(data),
            )
            yield Piece(head, data)
