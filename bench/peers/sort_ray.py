"""Ray Data: blocks of lines, sorted, each block written by the task that has it."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any

from sorting import given, number, started, tell

PIECE = 64_000_000


def main() -> None:
    """Sort."""
    os.environ["RAY_DATA_DISABLE_PROGRESS_BARS"] = "1"
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    asked = given()
    ray: Any = import_module("ray")
    data: Any = import_module("ray.data")
    arrow: Any = import_module("pyarrow")
    ray.init(
        num_cpus=asked.workers,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        object_store_memory=asked.memory // 2,
        object_spilling_directory=str(asked.temp),
    )
    data.DataContext.get_current().enable_progress_bars = False
    startup = started()
    temp = str(asked.temp)

    def read(batch: dict[str, Any]) -> Any:
        with Path(str(batch["path"][0])).open("rb") as file:
            file.seek(int(batch["at"][0]))
            lines = file.read(PIECE).decode("ascii").split("\n")[:-1]
        return arrow.table({"line": arrow.array(lines)})

    def write(batch: Any) -> Any:
        lines = batch["line"].to_pylist()
        if lines:
            target = Path(temp) / f"part-{lines[0][:20].encode().hex()}"
            target.write_text("\n".join(lines) + "\n", encoding="ascii", newline="")
        return arrow.table({"lines": [len(lines)]})

    pieces = [{"path": path, "at": at} for path in asked.files for at in range(0, Path(path).stat().st_size, PIECE)]
    blocks = data.from_items(pieces, override_num_blocks=len(pieces)).map_batches(read, batch_size=1)
    blocks.sort("line").map_batches(write, batch_size=None, batch_format="pyarrow").materialize()
    ray.shutdown()
    number(sorted(asked.temp.glob("part-*")), asked.output)
    tell(f"{asked.workers} processors, object store of half the memory, pieces of {PIECE // 1_000_000} MB", startup)


if __name__ == "__main__":
    main()
