"""Dask: a dataframe of one column, made from chunks of the files, sorted by value, written partition by partition."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from sort_driver import parse_arguments, print_report, rename_partitions, startup_seconds

CHUNK_BYTES = 64_000_000


def main() -> None:
    """Sort the input into the output directory."""
    arguments = parse_arguments()
    dask: Any = import_module("dask")
    dataframes: Any = import_module("dask.dataframe")
    pandas: Any = import_module("pandas")
    arrow: Any = import_module("pyarrow")
    dask.config.set(scheduler="threads", num_workers=arguments.workers, temporary_directory=str(arguments.temp))
    startup = startup_seconds()

    def read(place: tuple[str, int]) -> Any:
        path, at = place
        with Path(path).open("rb") as file:
            file.seek(at)
            lines = file.read(CHUNK_BYTES).decode("ascii").split("\n")[:-1]
        return pandas.DataFrame({"line": pandas.array(lines, dtype=pandas.ArrowDtype(arrow.string()))})

    def write(frame: Any, partition_info: dict[str, int] | None = None) -> Any:
        if partition_info is not None and len(frame):
            target = arguments.temp / f"part-{partition_info['number']:05}"
            target.write_text("\n".join(frame["line"]) + "\n", encoding="ascii", newline="")
        return frame.iloc[:0]

    chunks = [(path, at) for path in arguments.files for at in range(0, Path(path).stat().st_size, CHUNK_BYTES)]
    meta = pandas.DataFrame({"line": pandas.array([], dtype=pandas.ArrowDtype(arrow.string()))})
    frame = dataframes.from_map(read, chunks, meta=meta).sort_values("line")
    frame.map_partitions(write, meta=meta).compute()
    rename_partitions(sorted(arguments.temp.glob("part-*")), arguments.output)
    print_report(f"{arguments.workers} threads, chunks of {CHUNK_BYTES // 1_000_000} MB, arrow strings", startup)


if __name__ == "__main__":
    main()
