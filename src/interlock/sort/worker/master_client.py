"""The master as a worker sees it: what the worker tells it, in what words, and what its answers mean."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from interlock.errors import InterlockError, SortError
from interlock.sort import wire_pb2 as wire
from interlock.sort.rpc import MASTER, Peer, Unreachable
from interlock.sort.worker.phases import disk_of, free_space

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from interlock.sort.settings import WorkerReport
    from interlock.sort.worker.worker import Worker

FAREWELL = 5.0


class Forgotten(SortError):  # noqa: N818 - a named outcome
    """The master does not know this worker: it is another master, or one that lost its memory."""


class MasterPeer:
    """Speaks for one worker."""

    def __init__(self, address: str, worker: Worker) -> None:
        self.address = address
        self._peer = Peer(MASTER, address, "the master")
        self._worker = worker

    def register(self, patience: float) -> Any:
        """Ask for a place in the sort."""
        worker, workshop = self._worker, self._worker.workshop
        message = wire.Registration(
            identity=worker.journal.kept["identity"],
            incarnation=worker.incarnation,
            address=worker.address,
            index=worker.wanted if worker.wanted is not None else -1,
            records=workshop.source.records,
            record_length=workshop.source.format.record_length,
            key_length=workshop.source.format.key_length,
            block_records=workshop.block_records,
            window_records=workshop.window_records,
            free_output=free_space(workshop.output),
            free_temp=free_space(workshop.temp),
            output_disk=disk_of(workshop.output),
            temp_disk=disk_of(workshop.temp),
            room=workshop.room,
            epoch=worker.journal.kept["epoch"],
            state=str(worker.machine.state),
        )
        return self._call("RegisterWorker", message, patience)

    def send_sample(self, sample: wire.Sample) -> None:
        """Send this worker's sample."""
        self._tell("SendSample", sample)

    def notify(self) -> None:
        """Tell where this worker is, so that the master knows that a phase is complete."""
        self._tell("NotifyPhaseComplete", self._phase_complete(success=True, message=""))

    def report(self, report: WorkerReport) -> bool:
        """Report completion; tell whether all have completed."""
        worker = self._worker
        message = wire.Completion(
            epoch=worker.epoch,
            worker=worker.index,
            incarnation=worker.incarnation,
            partitions=[
                wire.PartitionFile(number=one.number, path=one.path, records=one.records, size=one.size)
                for one in report.partitions
            ],
            history=[wire.Transition(**move._asdict()) for move in report.history],
            phases=report.phases,
            peak_memory=report.peak_memory,
            records=report.records,
            reused=report.reused,
        )
        answer = self._call("ReportCompletion", message, worker.settings.lost)
        if answer.failed or not answer.success:
            raise SortError(answer.message)
        return bool(answer.finished)

    def report_failure(self, error: BaseException) -> None:
        """Let the master know, if it can be reached, why this worker failed."""
        text = str(error) if isinstance(error, InterlockError) else f"{type(error).__name__}: {error}"
        try:
            self._peer.once("NotifyPhaseComplete", self._phase_complete(success=False, message=text), FAREWELL)
        except Exception:  # noqa: BLE001 - the first error is the one that counts
            return

    def close(self) -> None:
        """Close the connection."""
        self._peer.close()

    def _call(self, method: str, message: Message, patience: float) -> Any:
        try:
            return self._peer.call(method, message, patience, self._worker.stopping)
        except Unreachable:
            self._worker.check()  # who has failed does not wait for an answer: that there was none is no news
            raise

    def _tell(self, method: str, message: wire.Sample | wire.PhaseComplete) -> None:
        answer = self._call(method, message, self._worker.settings.lost)
        if answer.failed:
            raise SortError(answer.message)
        if not answer.success:
            raise Forgotten(f"the master at {self.address} does not know this worker: {answer.message}")

    def _phase_complete(self, *, success: bool, message: str) -> wire.PhaseComplete:
        worker = self._worker
        return wire.PhaseComplete(
            epoch=worker.epoch,
            worker=max(worker.index, 0),
            incarnation=worker.incarnation,
            state=str(worker.machine.state),
            success=success,
            message=message,
        )
