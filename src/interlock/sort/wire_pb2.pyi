from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Ack(_message.Message):
    __slots__ = ("success", "message", "state", "failed", "invalid", "unknown")
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    INVALID_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    success: bool
    message: str
    state: str
    failed: bool
    invalid: bool
    unknown: bool
    def __init__(self, success: _Optional[bool] = ..., message: _Optional[str] = ..., state: _Optional[str] = ..., failed: _Optional[bool] = ..., invalid: _Optional[bool] = ..., unknown: _Optional[bool] = ...) -> None: ...

class Registration(_message.Message):
    __slots__ = ("protocol", "identity", "incarnation", "address", "index", "records", "record_length", "key_length", "block_records", "window_records", "free_output", "free_temp", "room", "output_disk", "temp_disk", "epoch", "state", "lines")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    RECORD_LENGTH_FIELD_NUMBER: _ClassVar[int]
    KEY_LENGTH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_RECORDS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_RECORDS_FIELD_NUMBER: _ClassVar[int]
    FREE_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    FREE_TEMP_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_DISK_FIELD_NUMBER: _ClassVar[int]
    TEMP_DISK_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    identity: str
    incarnation: int
    address: str
    index: int
    records: int
    record_length: int
    key_length: int
    block_records: int
    window_records: int
    free_output: int
    free_temp: int
    room: int
    output_disk: str
    temp_disk: str
    epoch: int
    state: str
    lines: str
    def __init__(self, protocol: _Optional[int] = ..., identity: _Optional[str] = ..., incarnation: _Optional[int] = ..., address: _Optional[str] = ..., index: _Optional[int] = ..., records: _Optional[int] = ..., record_length: _Optional[int] = ..., key_length: _Optional[int] = ..., block_records: _Optional[int] = ..., window_records: _Optional[int] = ..., free_output: _Optional[int] = ..., free_temp: _Optional[int] = ..., room: _Optional[int] = ..., output_disk: _Optional[str] = ..., temp_disk: _Optional[str] = ..., epoch: _Optional[int] = ..., state: _Optional[str] = ..., lines: _Optional[str] = ...) -> None: ...

class Registered(_message.Message):
    __slots__ = ("protocol", "success", "message", "epoch", "index", "workers", "partitions", "starts", "finished")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    success: bool
    message: str
    epoch: int
    index: int
    workers: int
    partitions: int
    starts: int
    finished: bool
    def __init__(self, protocol: _Optional[int] = ..., success: _Optional[bool] = ..., message: _Optional[str] = ..., epoch: _Optional[int] = ..., index: _Optional[int] = ..., workers: _Optional[int] = ..., partitions: _Optional[int] = ..., starts: _Optional[int] = ..., finished: _Optional[bool] = ...) -> None: ...

class Sample(_message.Message):
    __slots__ = ("epoch", "worker", "incarnation", "records", "keys", "positions")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    worker: int
    incarnation: int
    records: int
    keys: bytes
    positions: bytes
    def __init__(self, epoch: _Optional[int] = ..., worker: _Optional[int] = ..., incarnation: _Optional[int] = ..., records: _Optional[int] = ..., keys: _Optional[bytes] = ..., positions: _Optional[bytes] = ...) -> None: ...

class PhaseComplete(_message.Message):
    __slots__ = ("epoch", "worker", "incarnation", "state", "success", "message")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    worker: int
    incarnation: int
    state: str
    success: bool
    message: str
    def __init__(self, epoch: _Optional[int] = ..., worker: _Optional[int] = ..., incarnation: _Optional[int] = ..., state: _Optional[str] = ..., success: _Optional[bool] = ..., message: _Optional[str] = ...) -> None: ...

class Transition(_message.Message):
    __slots__ = ("from_state", "to_state", "event", "reason", "timestamp", "elapsed")
    FROM_STATE_FIELD_NUMBER: _ClassVar[int]
    TO_STATE_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_FIELD_NUMBER: _ClassVar[int]
    from_state: str
    to_state: str
    event: str
    reason: str
    timestamp: float
    elapsed: float
    def __init__(self, from_state: _Optional[str] = ..., to_state: _Optional[str] = ..., event: _Optional[str] = ..., reason: _Optional[str] = ..., timestamp: _Optional[float] = ..., elapsed: _Optional[float] = ...) -> None: ...

class PartitionFile(_message.Message):
    __slots__ = ("number", "path", "records", "size")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    number: int
    path: str
    records: int
    size: int
    def __init__(self, number: _Optional[int] = ..., path: _Optional[str] = ..., records: _Optional[int] = ..., size: _Optional[int] = ...) -> None: ...

class Completion(_message.Message):
    __slots__ = ("epoch", "worker", "incarnation", "partitions", "history", "phases", "peak_memory", "records", "reused")
    class PhasesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    PEAK_MEMORY_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    REUSED_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    worker: int
    incarnation: int
    partitions: _containers.RepeatedCompositeFieldContainer[PartitionFile]
    history: _containers.RepeatedCompositeFieldContainer[Transition]
    phases: _containers.ScalarMap[str, float]
    peak_memory: int
    records: int
    reused: int
    def __init__(self, epoch: _Optional[int] = ..., worker: _Optional[int] = ..., incarnation: _Optional[int] = ..., partitions: _Optional[_Iterable[_Union[PartitionFile, _Mapping]]] = ..., history: _Optional[_Iterable[_Union[Transition, _Mapping]]] = ..., phases: _Optional[_Mapping[str, float]] = ..., peak_memory: _Optional[int] = ..., records: _Optional[int] = ..., reused: _Optional[int] = ...) -> None: ...

class CompletionAck(_message.Message):
    __slots__ = ("success", "message", "finished", "failed")
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    success: bool
    message: str
    finished: bool
    failed: bool
    def __init__(self, success: _Optional[bool] = ..., message: _Optional[str] = ..., finished: _Optional[bool] = ..., failed: _Optional[bool] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("index", "address", "incarnation", "records", "block_records", "completed")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_RECORDS_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    index: int
    address: str
    incarnation: int
    records: int
    block_records: int
    completed: bool
    def __init__(self, index: _Optional[int] = ..., address: _Optional[str] = ..., incarnation: _Optional[int] = ..., records: _Optional[int] = ..., block_records: _Optional[int] = ..., completed: _Optional[bool] = ...) -> None: ...

class Roster(_message.Message):
    __slots__ = ("version", "members")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    version: int
    members: _containers.RepeatedCompositeFieldContainer[Member]
    def __init__(self, version: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ...) -> None: ...

class PartitionConfig(_message.Message):
    __slots__ = ("epoch", "partitions", "windows", "keys", "positions", "roster")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    partitions: int
    windows: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    positions: _containers.RepeatedScalarFieldContainer[int]
    roster: Roster
    def __init__(self, epoch: _Optional[int] = ..., partitions: _Optional[int] = ..., windows: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ..., positions: _Optional[_Iterable[int]] = ..., roster: _Optional[_Union[Roster, _Mapping]] = ...) -> None: ...

class ShuffleStart(_message.Message):
    __slots__ = ("epoch", "roster")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    roster: Roster
    def __init__(self, epoch: _Optional[int] = ..., roster: _Optional[_Union[Roster, _Mapping]] = ...) -> None: ...

class MergeStart(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class ShuffleDataChunk(_message.Message):
    __slots__ = ("epoch", "worker", "block", "partition", "offset", "size", "counts", "checksum", "data")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    worker: int
    block: int
    partition: int
    offset: int
    size: int
    counts: _containers.RepeatedScalarFieldContainer[int]
    checksum: int
    data: bytes
    def __init__(self, epoch: _Optional[int] = ..., worker: _Optional[int] = ..., block: _Optional[int] = ..., partition: _Optional[int] = ..., offset: _Optional[int] = ..., size: _Optional[int] = ..., counts: _Optional[_Iterable[int]] = ..., checksum: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class ShuffleAck(_message.Message):
    __slots__ = ("success", "message", "state")
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    success: bool
    message: str
    state: str
    def __init__(self, success: _Optional[bool] = ..., message: _Optional[str] = ..., state: _Optional[str] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("epoch", "abort")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    abort: str
    def __init__(self, epoch: _Optional[int] = ..., abort: _Optional[str] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("current_phase", "progress_percentage", "message", "state", "bytes_done", "roster_version", "incarnation", "epoch")
    class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        INITIALIZING: _ClassVar[WorkerStatus.Phase]
        SAMPLING: _ClassVar[WorkerStatus.Phase]
        SORTING: _ClassVar[WorkerStatus.Phase]
        SHUFFLING: _ClassVar[WorkerStatus.Phase]
        MERGING: _ClassVar[WorkerStatus.Phase]
        COMPLETED: _ClassVar[WorkerStatus.Phase]
        FAILED: _ClassVar[WorkerStatus.Phase]
    INITIALIZING: WorkerStatus.Phase
    SAMPLING: WorkerStatus.Phase
    SORTING: WorkerStatus.Phase
    SHUFFLING: WorkerStatus.Phase
    MERGING: WorkerStatus.Phase
    COMPLETED: WorkerStatus.Phase
    FAILED: WorkerStatus.Phase
    CURRENT_PHASE_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_PERCENTAGE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    BYTES_DONE_FIELD_NUMBER: _ClassVar[int]
    ROSTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    current_phase: WorkerStatus.Phase
    progress_percentage: float
    message: str
    state: str
    bytes_done: int
    roster_version: int
    incarnation: int
    epoch: int
    def __init__(self, current_phase: _Optional[_Union[WorkerStatus.Phase, str]] = ..., progress_percentage: _Optional[float] = ..., message: _Optional[str] = ..., state: _Optional[str] = ..., bytes_done: _Optional[int] = ..., roster_version: _Optional[int] = ..., incarnation: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...
