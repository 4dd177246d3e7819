"""A sort from Python: generate records, sort them with two worker processes, validate the output, show the phases."""

import tempfile
from pathlib import Path

from interlock.sort.data.generate import Recipe, generate
from interlock.sort.data.records import open_source
from interlock.sort.data.validate import validate
from interlock.sort.engines.local import run_local


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        source, output = Path(place, "in"), Path(place, "out")
        generate(source, Recipe(50_000, seed=7), files=3)
        report = run_local(open_source([source]), output, workers=2)
        for name, seconds in report.phases.items():
            print(f"{name:10} {seconds:.2f} s")
        found = validate([output], [source])
        print(
            f"{found.records} records in {len(found.partitions)} partitions: {'valid' if found.is_valid else 'wrong'}"
        )


if __name__ == "__main__":
    main()
