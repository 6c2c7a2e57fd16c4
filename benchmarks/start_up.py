"""Time the command line: version, list of commands, boards of a store.

Each command is a fresh process, in turns. Wall and CPU time are reported, since wall time includes other load. Default
budget: about half a minute.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import _machine

FARM = Path(sys.executable).with_name("farm")
COMMANDS = ("--version", "--help", "board list", "campaign list")
_BOARDS = 8


def main() -> None:
    parser = _machine.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="how often each is started (default: 10)")
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    with _machine.only_json() as emit, _machine.scratch() as folder:
        emit("start_up", {"rounds": rounds, "boards": _BOARDS}, measure(rounds, folder))


def measure(rounds: int, folder: Path) -> dict[str, Any]:
    environment = os.environ | {"FARM_HOME": str(folder / "home")}
    added = ["board", "add", "nano", "--virtual", "jetson-nano", "--count", str(_BOARDS)]
    subprocess.run([str(FARM), *added], env=environment, check=True, capture_output=True, timeout=60)
    wall_s: dict[str, list[float]] = {each: [] for each in COMMANDS}
    cpu_s: dict[str, list[float]] = {each: [] for each in COMMANDS}
    quiet = _machine.wait_until_quiet(rounds == 1)
    for _ in range(rounds):
        for command in COMMANDS:
            before, began = _processor_s(), time.perf_counter()
            subprocess.run([str(FARM), *command.split()], env=environment, check=True, capture_output=True, timeout=60)
            wall_s[command].append(time.perf_counter() - began)
            cpu_s[command].append(_processor_s() - before)
    return {
        "machine_quiet": quiet,
        "commands": [
            {
                "command": f"farm {each}",
                "wall_s": _machine.spread(wall_s[each], digits=3),
                "cpu_s": _machine.round_to(statistics.median(cpu_s[each]), 3),
            }
            for each in COMMANDS
        ],
    }


def _processor_s() -> float:
    """Of all processes that were started and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
