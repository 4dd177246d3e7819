"""Dask: a dataframe of one column, made from pieces of the files, sorted by value, written partition by partition."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from sorting import given, number, started, tell

PIECE = 64_000_000
LINE = 100


def main() -> None:
    """Sort."""
    asked = given()
    dask: Any = import_module("dask")
    dataframes: Any = import_module("dask.dataframe")
    pandas: Any = import_module("pandas")
    arrow: Any = import_module("pyarrow")
    dask.config.set(scheduler="threads", num_workers=asked.workers, temporary_directory=str(asked.temp))
    startup = started()

    def read(place: tuple[str, int]) -> Any:
        path, at = place
        with Path(path).open("rb") as file:
            file.seek(at)
            lines = file.read(PIECE).decode("ascii").split("\n")[:-1]
        return pandas.DataFrame({"line": pandas.array(lines, dtype=pandas.ArrowDtype(arrow.string()))})

    def write(frame: Any, partition_info: dict[str, int] | None = None) -> Any:
        if partition_info is not None and len(frame):
            target = asked.temp / f"part-{partition_info['number']:05}"
            target.write_text("\n".join(frame["line"]) + "\n", encoding="ascii", newline="")
        return frame.iloc[:0]

    pieces = [(path, at) for path in asked.files for at in range(0, Path(path).stat().st_size, PIECE)]
    meta = pandas.DataFrame({"line": pandas.array([], dtype=pandas.ArrowDtype(arrow.string()))})
    frame = dataframes.from_map(read, pieces, meta=meta).sort_values("line")
    frame.map_partitions(write, meta=meta).compute()
    number(sorted(asked.temp.glob("part-*")), asked.output)
    tell(f"{asked.workers} threads, pieces of {PIECE // 1_000_000} MB, arrow strings", startup)


if __name__ == "__main__":
    main()
