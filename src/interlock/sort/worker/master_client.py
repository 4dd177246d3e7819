"""The worker's client of the master: its calls, and the meaning of the answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from interlock.errors import InterlockError, SortError
from interlock.sort import wire_pb2 as wire
from interlock.sort.rpc import MASTER, PROTOCOL_VERSION, Peer, Unreachable
from interlock.sort.worker.phases import disk_id, free_space

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from interlock.lifecycle import SortWorkerState
    from interlock.sort.settings import WorkerReport
    from interlock.sort.worker.worker import Worker

FAILURE_REPORT_TIMEOUT_S = 5.0


class UnknownToMaster(SortError):  # noqa: N818 - a named outcome
    """The master does not know this worker: it is another master, or one that lost its state."""


class MasterClient:
    """Calls the master on behalf of one worker."""

    def __init__(self, address: str, worker: Worker) -> None:
        self.address = address
        self._peer = Peer(MASTER, address, "the master", worker.security)
        self._worker = worker

    def register(self, timeout: float) -> Any:
        """Register for the sort, or again after a restart; return the answer."""
        worker, runner = self._worker, self._worker.runner
        lines = runner.source.format.lines
        message = wire.Registration(
            protocol=PROTOCOL_VERSION,
            identity=worker.journal.checkpoint["identity"],
            incarnation=worker.incarnation,
            address=worker.address,
            index=worker.wanted_index if worker.wanted_index is not None else -1,
            records=runner.source.records,
            record_length=runner.source.format.record_length,
            key_length=runner.source.format.key_length,
            block_records=runner.block_records,
            window_records=runner.window_records,
            free_output=free_space(runner.output),
            free_temp=free_space(runner.work_dir),
            output_disk=disk_id(runner.output),
            temp_disk=disk_id(runner.work_dir),
            room=runner.row_memory,
            epoch=worker.journal.checkpoint["epoch"],
            state=str(worker.machine.state),
            lines="" if lines is None else orjson.dumps(lines.json()).decode(),
        )
        answer = self._call("RegisterWorker", message, timeout)
        if answer.protocol != PROTOCOL_VERSION:
            raise SortError(
                f"the master at {self.address} speaks version {answer.protocol} of the protocol and this worker "
                f"version {PROTOCOL_VERSION}: install the same version of Interlock for both"
            )
        return answer

    def send_sample(self, sample: wire.Sample) -> None:
        """Send this worker's sample."""
        self._notify("SendSample", sample)

    def notify_state(self, state: SortWorkerState) -> None:
        """Send the state that this worker has reached: the end of a phase, or a heartbeat.

        Its current state may be a later one, of which the master knows because it sent the signal.
        """
        self._notify("NotifyPhaseComplete", self._phase_complete(state, success=True, message=""))

    def report_completion(self, report: WorkerReport) -> bool:
        """Report completion; return whether all workers have completed."""
        worker = self._worker
        message = wire.Completion(
            epoch=worker.epoch,
            worker=worker.index,
            incarnation=worker.incarnation,
            partitions=[
                wire.PartitionFile(number=one.number, path=one.path, records=one.records, size=one.size)
                for one in report.partitions
            ],
            history=[wire.Transition(**one._asdict()) for one in report.history],
            phases=report.phases,
            peak_memory=report.peak_memory,
            records=report.records,
            reused=report.reused,
        )
        answer = self._call("ReportCompletion", message, worker.settings.lost_after_s)
        if answer.failed:
            raise SortError(answer.message)
        if not answer.success:
            raise SortError(f"the master at {self.address} refused ReportCompletion: {answer.message}")
        return bool(answer.finished)

    def report_failure(self, error: BaseException) -> None:
        """Tell the master why this worker failed, if it can be reached."""
        text = str(error) if isinstance(error, InterlockError) else f"{type(error).__name__}: {error}"
        message = self._phase_complete(self._worker.machine.state, success=False, message=text)
        try:
            self._peer.call_once("NotifyPhaseComplete", message, FAILURE_REPORT_TIMEOUT_S)
        except Exception:  # noqa: BLE001 - the first error is the one that counts
            return

    def close(self) -> None:
        """Close the connection."""
        self._peer.close()

    def _call(self, method: str, message: Message, timeout: float) -> Any:
        try:
            return self._peer.call(method, message, timeout, self._worker.stopping)
        except Unreachable:
            self._worker.check()  # a failure of this worker, which ended the retries, is the error to report
            raise

    def _notify(self, method: str, message: wire.Sample | wire.PhaseComplete) -> None:
        answer = self._call(method, message, self._worker.settings.lost_after_s)
        if answer.failed:
            raise SortError(answer.message)
        if answer.unknown:
            raise UnknownToMaster(f"the master at {self.address} does not know this worker: {answer.message}")
        if not answer.success:
            raise SortError(f"the master at {self.address} refused {method}: {answer.message}")

    def _phase_complete(self, state: SortWorkerState, *, success: bool, message: str) -> wire.PhaseComplete:
        worker = self._worker
        return wire.PhaseComplete(
            epoch=worker.epoch,
            worker=max(worker.index, 0),
            incarnation=worker.incarnation,
            state=str(state),
            success=success,
            message=message,
        )
