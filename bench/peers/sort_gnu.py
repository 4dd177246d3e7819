"""GNU sort: lines by their bytes, in as many threads as there are workers."""

from __future__ import annotations

import shutil
import subprocess

from sort_driver import parse_arguments, print_report, startup_seconds


def main() -> None:
    """Sort the input into the output directory."""
    arguments = parse_arguments()
    options = [f"--parallel={arguments.workers}", f"--buffer-size={arguments.memory}b"]
    if arguments.has_lines:
        options += ["--field-separator=,", "--key=2,2"]
    startup = startup_seconds()
    command = [
        str(shutil.which("sort")),
        *options,
        f"--temporary-directory={arguments.temp}",
        f"--output={arguments.output / 'partition.0'}",
        *arguments.files,
    ]
    subprocess.run(command, check=True)  # noqa: S603 - sort, with paths of the benchmark
    print_report("LC_ALL=C, " + " ".join(options), startup)


if __name__ == "__main__":
    main()
