"""Measure a CPU sweep on one virtual board by the installed command: wall time, and the share not spent measuring.

    python benchmarks/sweep_cost.py [--short] [--board-type jetson-nano] [--window 5]

`--short` sweeps four clocks. The services are up before the command begins, as with `farm up`. One JSON document on
stdout. Measuring is timing, idle baseline and window; the rest is pinning, loading, storing, deciding, and waiting for
the sensor.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

import _machine

FARM = pathlib.Path(sys.executable).with_name("farm")
SHORT = "403.2,710.4,1036.8,1479"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="four clocks instead of all")
    parser.add_argument("--model", default="tiny-cnn")
    parser.add_argument("--board-type", default="jetson-nano")
    parser.add_argument("--window", type=float, default=5.0, help="seconds")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="farm-bench-") as folder:
        environment = os.environ | {"FARM_HOME": f"{folder}/home"}
        run(environment, "board", "add", "b", "--virtual", options.board_type)
        began = time.monotonic()
        run(environment, "up", "--wait", "180s", output=False)
        starting_s, began = time.monotonic() - began, time.monotonic()
        command = ["sweep", "run", options.model, "--board", "b", "--exhaustive", "--json"]
        # One thread, and work of milliseconds: a virtual board's time is its host's.
        command += ["--window", f"{options.window:g}s", "--cores", "0", "--batch", "32"]
        command += ["--cpu-freqs", SHORT if options.short else "all"]
        try:
            document = json.loads(run(environment, *command))
            seconds = time.monotonic() - began
        finally:
            run(environment, "down", "--force", output=False)
    figures = {"seconds_starting_services": starting_s} | summarise(document, seconds)
    print(json.dumps(_machine.describe() | {"load_average": os.getloadavg()} | figures, indent=2))
    return 0


def run(environment: dict[str, str], *words: str, output: bool = True) -> str:
    """Run `farm` and return what it prints, if it is to print; a voided sweep prints its document, too."""
    done = subprocess.run([str(FARM), *words], env=environment, stdout=subprocess.PIPE, text=True, timeout=900)
    if done.returncode not in (0, 1) or (output and not done.stdout):
        raise SystemExit(f"farm {' '.join(words)} failed: {done.returncode}")
    return done.stdout


def summarise(document: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The figures."""
    cost = document["cost"]
    visits = sum(row["visits"] for series in document["series"] for row in series["rows"])
    return {
        "state": document["state"],
        "points": document["grid"]["measured"],
        "visits": visits,
        "window_s": document["environment"]["window_s"],
        "seconds_command": seconds,
        "seconds_sweeping": document["seconds"],
        "seconds_measuring": cost["measuring_s"],
        "sensors": document["environment"]["sensors"],
        "seconds_pinning": cost["pinning_s"],
        "not_measuring_share_of_sweeping": 1 - cost["measuring_s"] / document["seconds"],
    }


if __name__ == "__main__":
    sys.exit(main())
