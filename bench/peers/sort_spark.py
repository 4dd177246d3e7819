"""Spark: text files, ordered by value, written as text."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from sorting import given, number, started, tell


def main() -> None:
    """Sort."""
    asked = given()
    spark_sql: Any = import_module("pyspark.sql")
    session = (
        spark_sql.SparkSession.builder.master(f"local[{asked.workers}]")
        .config("spark.driver.memory", f"{asked.memory // 1_000_000}m")
        .config("spark.local.dir", str(asked.temp))
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", str(8 * asked.workers))
        .config("spark.sql.adaptive.enabled", "false")
        .config("spark.log.level", "ERROR")
        .getOrCreate()
    )
    startup = started()
    written = asked.temp / "written"
    lines = session.read.option("lineSep", "\n").text(str(asked.source))
    lines.orderBy("value").write.option("lineSep", "\n").text(str(written))
    session.stop()
    number([path for path in sorted(written.glob("part-*")) if path.stat().st_size], asked.output)
    tell(f"local[{asked.workers}], driver memory as given, {8 * asked.workers} partitions", startup)


if __name__ == "__main__":
    main()
