"""DuckDB: the lines as one column, or as three, ordered, copied to one file."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from sort_driver import parse_arguments, print_report, startup_seconds

READ = """read_csv($files, columns = {'line': 'VARCHAR'}, auto_detect = false, header = false, delim = '\x01',
    quote = '', escape = '', new_line = '\\r\\n', strict_mode = false)"""

READ_COLUMNS = """read_csv($files, columns = {'a': 'VARCHAR', 'b': 'VARCHAR', 'c': 'VARCHAR'}, auto_detect = false,
    header = false, delim = ',', quote = '', escape = '', new_line = '\\n')"""


def main() -> None:
    """Sort the input into the output directory."""
    arguments = parse_arguments()
    duckdb: Any = import_module("duckdb")
    database = duckdb.connect()
    database.execute(f"set threads = {arguments.workers}")
    database.execute(f"set memory_limit = '{arguments.memory // 1_000_000}MB'")
    database.execute(f"set temp_directory = '{arguments.temp}'")
    database.execute("set preserve_insertion_order = false")
    startup = startup_seconds()
    files = "[" + ", ".join(f"'{path}'" for path in arguments.files) + "]"
    target = arguments.output / "partition.0"
    if arguments.has_lines:
        database.execute(
            f"copy (select a, b, c from {READ_COLUMNS.replace('$files', files)} order by b, a, c) "  # noqa: S608 - ours
            f"to '{target}' (format csv, header false, quote '', escape '', delimiter ',')"
        )
        print_report(f"threads {arguments.workers}, memory_limit", startup)
        return
    database.execute(
        f"copy (select line from {READ.replace('$files', files)} order by line) to '{target}' "  # noqa: S608 - ours
        "(format csv, header false, quote '', escape '', delimiter '\x01', new_line '\\r\\n')"
    )
    print_report(f"threads {arguments.workers}, memory_limit", startup)


if __name__ == "__main__":
    main()
