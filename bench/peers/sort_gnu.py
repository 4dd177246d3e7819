"""GNU sort: lines by their bytes, in as many threads as there are workers."""

from __future__ import annotations

import shutil
import subprocess

from sorting import given, started, tell


def main() -> None:
    """Sort."""
    asked = given()
    options = [f"--parallel={asked.workers}", f"--buffer-size={asked.memory}b", f"--temporary-directory={asked.temp}"]
    startup = started()
    command = [str(shutil.which("sort")), *options, f"--output={asked.output / 'partition.0'}", *asked.files]
    subprocess.run(command, check=True)  # noqa: S603 - sort, with paths of the benchmark
    tell("LC_ALL=C, " + " ".join(options[:2]), startup)


if __name__ == "__main__":
    main()
