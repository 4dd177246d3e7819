"""Ray Data: blocks of lines, sorted, each block written by the task that has it."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any

from sort_driver import parse_arguments, print_report, rename_partitions, startup_seconds

CHUNK_BYTES = 64_000_000


def main() -> None:
    """Sort the input into the output directory."""
    os.environ["RAY_DATA_DISABLE_PROGRESS_BARS"] = "1"
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    arguments = parse_arguments()
    ray: Any = import_module("ray")
    data: Any = import_module("ray.data")
    arrow: Any = import_module("pyarrow")
    ray.init(
        num_cpus=arguments.workers,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        object_store_memory=arguments.memory // 2,
        object_spilling_directory=str(arguments.temp),
    )
    data.DataContext.get_current().enable_progress_bars = False
    startup = startup_seconds()
    temp = str(arguments.temp)

    def read(batch: dict[str, Any]) -> Any:
        with Path(str(batch["path"][0])).open("rb") as file:
            file.seek(int(batch["at"][0]))
            lines = file.read(CHUNK_BYTES).decode("ascii").split("\n")[:-1]
        return arrow.table({"line": arrow.array(lines)})

    def write(batch: Any) -> Any:
        lines = batch["line"].to_pylist()
        if lines:
            target = Path(temp) / f"part-{lines[0][:20].encode().hex()}"
            target.write_text("\n".join(lines) + "\n", encoding="ascii", newline="")
        return arrow.table({"lines": [len(lines)]})

    chunks = [
        {"path": path, "at": at} for path in arguments.files for at in range(0, Path(path).stat().st_size, CHUNK_BYTES)
    ]
    blocks = data.from_items(chunks, override_num_blocks=len(chunks)).map_batches(read, batch_size=1)
    blocks.sort("line").map_batches(write, batch_size=None, batch_format="pyarrow").materialize()
    ray.shutdown()
    rename_partitions(sorted(arguments.temp.glob("part-*")), arguments.output)
    print_report(
        f"{arguments.workers} processors, object store of half the memory, chunks of {CHUNK_BYTES // 1_000_000} MB",
        startup,
    )


if __name__ == "__main__":
    main()
