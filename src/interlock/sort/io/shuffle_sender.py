"""The sending side of the shuffle: sends the slices of this worker's runs to the others, and again after a restart.

Invariant: a worker counts as served when its current incarnation acknowledged every slice of every run.
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
from interlock.sort.io.direct_io import io_buffer
from interlock.sort.io.memory import MemoryReleased
from interlock.sort.memory_plan import MAX_STREAMS
from interlock.sort.rpc import CALL_BACKOFF, RETRYABLE_CODES, WORKER, Chunk, Peer, Unreachable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from interlock.sort.data.plan import Member, Plan, Roster
    from interlock.sort.io.buffers import RowStore
    from interlock.sort.io.runs import Run
    from interlock.sort.security import Security

STREAM_TIMEOUT_S = 60.0  # beside the time that the data takes at the minimum rate
MIN_BYTES_PER_S = 1 << 20  # a slower connection counts as broken
STREAMS_PER_WORKER = 2  # one is read from the disk while the other is sent
CHUNK_BYTES = 1 << 20  # of a message: larger ones are no faster, and every stream holds several
SINGLE_STREAM_WORKERS = 8  # from this many workers on, one stream to each is enough


class ShuffleSender:
    """Sends to all other workers at once, with one thread for each, so that an unreachable worker delays no other."""

    def __init__(
        self,
        plan: Plan,
        worker: int,
        runs: Sequence[Run],
        record_length: int,
        timeout: float,
        security: Security,
        changed: threading.Condition,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._plan = plan
        self._worker = worker
        self._runs = runs
        self._length = record_length
        self._rows_per_chunk = max(1, CHUNK_BYTES // record_length)
        self._stream_slots = threading.Semaphore(MAX_STREAMS)
        self._timeout = timeout
        self._security = security
        self._on_failure = on_failure
        self._members: dict[int, Member] = {}
        self._served: dict[int, int] = {}  # incarnation that was served, by worker
        self._changed = changed
        self._stopping = False
        self._threads: list[threading.Thread] = []
        self._calls: dict[tuple[int, int], Any] = {}
        self.roster_version = 0
        self.sent = 0

    def start(self, roster: Roster) -> None:
        """Start to send."""
        self.update(roster)
        for member in roster.members:
            if member.index != self._worker:
                thread = threading.Thread(
                    target=self._serve, args=(member.index,), name=f"interlock-sort-to-{member.index}", daemon=True
                )
                self._threads.append(thread)
                thread.start()

    def update(self, roster: Roster) -> None:
        """Take the current addresses and incarnations of the other workers from a newer roster."""
        with self._changed:
            if roster.version > self.roster_version:
                self.roster_version = roster.version
                self._members = {member.index: member for member in roster.members}
                self._changed.notify_all()

    def is_done(self) -> bool:
        """Return whether every other worker has been served."""
        with self._changed:
            return all(self._is_served(index) for index in self._members if index != self._worker)

    def progress(self) -> float:
        """Return the share of all bytes for other workers that was acknowledged."""
        total = sum(self._size(index, run) for index in self._members if index != self._worker for run in self._runs)
        return min(1.0, self.sent / total) if total else 1.0

    def stop(self) -> None:
        """Cancel the calls in progress and wait for the threads; safe to call twice."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            calls = list(self._calls.values())
        for call in calls:
            call.cancel()
        for thread in self._threads:
            thread.join()

    def _size(self, index: int, run: Run) -> int:
        """Return the number of bytes of a run for another worker."""
        low, high = self._plan.extent(run.cuts, index)
        return (high - low) * self._length

    def _is_served(self, index: int) -> bool:
        member = self._members[index]
        return member.completed or self._served.get(index) == member.incarnation

    def _serve(self, index: int) -> None:
        """Send everything to one worker, and again to each later incarnation of it."""
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._stopping or not self._is_served(index))
                    if self._stopping:
                        return
                self._send_runs(index)
        except BaseException as error:  # noqa: BLE001 - any failure in this thread must reach the master
            if not self._stopping:
                self._on_failure(error)

    def _send_runs(self, index: int) -> None:
        """Send all runs to the current incarnation of a worker."""
        with self._changed:
            member = self._members[index]
        peer = Peer(WORKER, member.address, f"worker {index}", self._security)
        try:
            streams_per_worker = STREAMS_PER_WORKER if len(self._members) < SINGLE_STREAM_WORKERS else 1
            with ThreadPoolExecutor(streams_per_worker) as streams:
                try:
                    if not all(streams.map(lambda run: self._send_run(peer, member, run), self._runs)):
                        return
                finally:
                    streams.shutdown(wait=True, cancel_futures=True)
        finally:
            peer.close()
        with self._changed:
            self._served[index] = member.incarnation
            self._changed.notify_all()

    def _send_run(self, peer: Peer, member: Member, run: Run) -> bool:
        """Send the slices of one run until they are acknowledged; False if the worker was restarted meanwhile."""
        deadline = time.monotonic() + self._timeout
        failures = 0
        while True:
            with self._stream_slots:
                refusal = self._try_send_run(peer, member.index, run)
            if refusal is None:
                run.release(member.index)
                with self._changed:
                    self.sent += self._size(member.index, run)
                return True
            failures += 1
            with self._changed:
                self._changed.wait_for(
                    lambda: self._stopping or self._is_outdated(member), CALL_BACKOFF.delay(failures)
                )
                if self._stopping or self._is_outdated(member):
                    return False
            if time.monotonic() > deadline:
                raise Unreachable(
                    f"worker {member.index} ({member.address}) accepted no data for {self._timeout:g} s: {refusal}"
                )

    def _is_outdated(self, member: Member) -> bool:
        current = self._members[member.index]
        return current.incarnation != member.incarnation or current.completed

    def _try_send_run(self, peer: Peer, index: int, run: Run) -> str | None:
        """Send the slices of one run once; return None if they were accepted, else the reason."""
        failures: list[Exception] = []
        try:
            rows = run.rows_for(index)
            with self._changed:
                if self._stopping:
                    return "it was stopped"
                timeout = STREAM_TIMEOUT_S + self._size(index, run) / MIN_BYTES_PER_S
                call = peer.start_call("ShuffleData", self._chunks(index, run, rows, failures), timeout)
                self._calls[index, run.block] = call
            answer = call.result()
        except grpc.FutureCancelledError:
            return "it was stopped"
        except grpc.RpcError as error:
            if failures:
                raise failures[0] from error
            if error.code() not in RETRYABLE_CODES:
                raise SortError(
                    f"worker {index} ({peer.address}) refused data: {error.code().name}: {error.details()}"
                ) from error
            return f"{error.code().name}: {error.details()}"
        if failures:
            raise failures[0]
        return None if answer.success else str(answer.message)

    def _chunks(self, index: int, run: Run, rows: RowStore, failures: list[Exception]) -> Iterator[Chunk]:
        """Yield the slices of one run for another worker, in chunks; end early, with the failure, if one is not read.

        An exception would only be printed by gRPC.
        """
        try:
            with ExitStack() as stack:
                buffer = functools.cache(lambda: stack.enter_context(io_buffer()))  # rows in memory may not need one
                for partition in self._plan.owned(index):
                    yield from self._slice_chunks(run, rows, partition, buffer)
        except MemoryReleased:
            return  # the receiver has these slices already, and the call has ended
        except (OSError, SortError) as error:
            failures.append(error)

    def _slice_chunks(
        self, run: Run, rows: RowStore, partition: int, buffer: Callable[[], NDArray[np.uint8]]
    ) -> Iterator[Chunk]:
        edges = self._plan.edges(run.cuts, partition)
        counts = np.diff(edges).tolist()
        first, last = edges[0], edges[-1]
        for low in range(first, last, self._rows_per_chunk) if first < last else (first,):
            data = rows.view(low, min(self._rows_per_chunk, last - low), buffer)
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
            yield Chunk(head, data)
