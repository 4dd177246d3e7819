"""Spark: text files, ordered by value, written as text."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from sort_driver import parse_arguments, print_report, rename_partitions, startup_seconds


def main() -> None:
    """Sort the input into the output directory."""
    arguments = parse_arguments()
    spark_sql: Any = import_module("pyspark.sql")
    session = (
        spark_sql.SparkSession.builder.master(f"local[{arguments.workers}]")
        .config("spark.driver.memory", f"{arguments.memory // 1_000_000}m")
        .config("spark.local.dir", str(arguments.temp))
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", str(8 * arguments.workers))
        .config("spark.sql.adaptive.enabled", "false")
        .config("spark.log.level", "ERROR")
        .getOrCreate()
    )
    startup = startup_seconds()
    written = arguments.temp / "written"
    lines = session.read.option("lineSep", "\n").text(str(arguments.source))
    lines.orderBy("value").write.option("lineSep", "\n").text(str(written))
    session.stop()
    rename_partitions([path for path in sorted(written.glob("part-*")) if path.stat().st_size], arguments.output)
    print_report(f"local[{arguments.workers}], driver memory as given, {8 * arguments.workers} partitions", startup)


if __name__ == "__main__":
    main()
