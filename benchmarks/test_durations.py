"""Summarise where the time of the last `make test-all` (or `make test`) went, from the `build/durations.json` it wrote.

Prints the files, tests, fixtures and programs that took most; `--save` keeps them.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import _machine

PATH = pathlib.Path(__file__).resolve().parents[1] / "build" / "durations.json"


def sum_by(rows: Iterable[Mapping[str, Any]], key: str, took: str = "wall_s") -> list[dict[str, Any]]:
    """Sum the figures of rows that have the same `key`; the largest of `took` is first."""
    sums: dict[str, dict[str, Any]] = {}
    for row in rows:
        of_key = sums.setdefault(row[key], {key: row[key]})
        for name, value in row.items():
            if isinstance(value, (int, float)):
                of_key[name] = round(of_key.get(name, 0) + value, 1)
            else:
                of_key[name] = value
    return sorted(sums.values(), key=lambda row: -row[took])


def summarise(runs: Mapping[str, Mapping[str, Any]], most: int) -> dict[str, Any]:
    """Return the figures of all runs together; of each list the `most` largest."""
    lists = {key: [row for run in runs.values() for row in run[key]] for key in ("tests", "fixtures", "programs")}
    tests = [{**row, "test": row["test"].removeprefix("tests/")} for row in lists["tests"]]
    of_files = ({**row, "file": row["test"].partition("::")[0], "tests": 1} for row in tests)
    files = [{key: value for key, value in row.items() if key != "test"} for row in sum_by(of_files, "file")]
    summed = ("tests", "wall_s", "processor_s", "processes", "ray_starts", "links")
    return {
        "run_s": {name or "all": run["wall_s"] for name, run in runs.items()},
        "total": {key: round(sum(row[key] for row in files), 1) for key in summed},
        "files": files[:most],
        "tests": sum_by(tests, "test")[:most],
        "fixtures": sum_by(lists["fixtures"], "fixture")[:most],
        "programs": sum_by(lists["programs"], "program", "processor_s")[:most],
    }


def main() -> None:
    """Print the summary."""
    parser = _machine.parser(__doc__)
    parser.add_argument("--most", type=int, default=12, help="rows of each list (default: 12)")
    options = parser.parse_args()
    with _machine.only_json() as emit:
        if not PATH.exists():
            raise SystemExit(f"error: there is no {PATH}; `make test-all` writes it")
        emit("test_durations", vars(options), summarise(json.loads(PATH.read_text(encoding="utf-8")), options.most))


if __name__ == "__main__":
    main()
