"""How much memory the processes of a sort need: what is fixed, what depends on the input, and the least that works.

The figures were measured in a control group, as the largest amount that was in use at any time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from interlock.errors import SortInputError

if TYPE_CHECKING:
    from interlock.sort.settings import Settings

MEBIBYTE = 1 << 20
THREADS = 3  # of a worker: more than the two cores that it uses, since some wait for the disk while others sort
PROCESS_BYTES = 40 * MEBIBYTE  # interpreter, libraries, stacks and heap of a worker
MASTER_BYTES = 56 * MEBIBYTE  # the same of the command, which is the master too
IO_BUFFERS_BYTES = 2 * THREADS * 4 * MEBIBYTE  # each thread and its second one have an I/O buffer
MAX_STREAMS = 8  # to other workers at a time
STREAM_BYTES = 3 * MEBIBYTE  # on average: a huge page to read into, and messages of a mebibyte, sent and received
SAMPLE_COPIES = 4  # of all samples, while the master sorts them
INDEX_BYTES_PER_ROW = 40  # to sort a row, beside the row itself
EDGE_BYTES = 36  # of a number in the list of window edges that each run and each slice has
BUFFERS_SHARE = 0.4  # of the memory that is not fixed; the rest holds window edges and rows between the phases
EDGES_SHARE = 0.4


def fixed_bytes(workers: int | None) -> int:
    """Return what a worker needs before it has any rows; for so many workers, or an unknown number of them."""
    streams = MAX_STREAMS if workers is None else min(2 * (workers - 1), MAX_STREAMS)
    return PROCESS_BYTES + IO_BUFFERS_BYTES + streams * STREAM_BYTES


def max_buffer_records(
    memory: int, workers: int | None, record_length: int, index_bytes: float = INDEX_BYTES_PER_ROW
) -> int:
    """Return how many records each of a worker's buffers, one for every thread, may hold."""
    available = int((memory - fixed_bytes(workers)) * BUFFERS_SHARE)
    return max(1, int(available / (THREADS * (record_length + index_bytes))))


def edges_bytes(workers: int | None, records: int, buffer_records: int) -> int:
    """Return what a worker's window edges need: every run has all windows, and every slice those of its partition."""
    blocks = records / buffer_records
    return int(EDGE_BYTES * blocks * blocks * (2 * (workers or MAX_STREAMS) - 1))


def least_worker_memory(
    workers: int | None, records: int, record_length: int, index_bytes: float = INDEX_BYTES_PER_ROW
) -> int:
    """Return the least memory with which a worker can sort so many records."""
    low, high = fixed_bytes(workers) // MEBIBYTE, 1 << 30
    while high - low > 1:
        middle = (low + high) // 2
        if _is_enough(middle * MEBIBYTE, workers, records, record_length, index_bytes):
            high = middle
        else:
            low = middle
    return high * MEBIBYTE


def check_worker_memory(
    settings: Settings, records: int, record_length: int, index_bytes: float = INDEX_BYTES_PER_ROW
) -> None:
    """Refuse a worker whose memory is too little for its input."""
    least = least_worker_memory(settings.workers, records, record_length, index_bytes)
    if settings.memory < least:
        raise SortInputError(
            f"{settings.memory:,} bytes of memory are too few: this worker needs {format_megabytes(least)}"
        )


def divide_memory(
    settings: Settings,
    workers: int,
    records: int,
    record_length: int,
    sample_bytes: int,
    index_bytes: float = INDEX_BYTES_PER_ROW,
) -> int:
    """Return the memory of each of several workers that share it with their master; raise if it is too little."""
    if workers < 1:
        raise SortInputError(f"the number of workers must be at least 1, got {workers}")
    master = MASTER_BYTES + SAMPLE_COPIES * sample_bytes
    least = least_worker_memory(workers, -(-records // workers), record_length, index_bytes)
    share = (settings.memory - master) // workers
    if share < least:
        raise SortInputError(
            f"{settings.memory:,} bytes of memory are too few for {workers} workers and this input: they need "
            f"{format_megabytes(master + workers * least)}"
            f"{_describe_fewer(settings, workers, records, record_length, index_bytes)}"
        )
    return share


def format_megabytes(size: int) -> str:
    """Format a number of bytes as --memory accepts it, rounded up."""
    return f"{-(-size // 1_000_000)}MB"


def _describe_fewer(settings: Settings, workers: int, records: int, record_length: int, index_bytes: float) -> str:
    """Describe with how many workers the memory would do."""
    for fewer in range(min(workers - 1, settings.memory // fixed_bytes(1)), 0, -1):
        least = least_worker_memory(fewer, -(-records // fewer), record_length, index_bytes)
        if MASTER_BYTES + fewer * least <= settings.memory:
            return f"; it would be enough for --workers {fewer}"
    return ""


def _is_enough(memory: int, workers: int | None, records: int, record_length: int, index_bytes: float) -> bool:
    available = memory - fixed_bytes(workers)
    buffer_records = min(max_buffer_records(memory, workers, record_length, index_bytes), max(records, 1))
    buffers = THREADS * buffer_records * (record_length + index_bytes)
    is_smallest = buffer_records * record_length >= min(MEBIBYTE, records * record_length)
    edges = edges_bytes(workers, records, buffer_records)
    return is_smallest and buffers <= available and edges <= available * EDGES_SHARE
