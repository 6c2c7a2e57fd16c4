"""What programs for a board cost in the model of its core: counted here, for whoever holds the real one to compare.

`python -m device_agent.emulated.pricing ORDER`: ORDER is a JSON file, each answer a line of JSON. What was counted has
no constant in it that is fitted to boards (`device_agent/protocol/core_time.py`), so that they can be fitted to it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from device_agent import processes
from device_agent.board_types import load_board_types
from device_agent.emulated.client import EmulatorError, ProgramError
from device_agent.emulated.runs import Emulator, Execution
from device_agent.engines import read_arrays
from device_agent.errors import AgentError
from device_agent.plan import OverrunError
from device_agent.protocol import Engine, Limits, RunSpec, split_waits
from device_agent.rig import Rig
from device_agent.timing import LoadError


def main() -> None:
    """Count the order's jobs one after the other; one that cannot be counted is answered with why."""
    parser = argparse.ArgumentParser(prog="device_agent.emulated.pricing", description=__doc__.split("\n", 1)[0])
    parser.add_argument("order", type=Path)
    processes.die_with_parent(os.getppid())
    order = json.loads(parser.parse_args().order.read_text())
    clusters = load_board_types()[order["board_type"]].clusters
    with Rig() as rig:
        emulator = rig.start_emulator(Path(order["natives"]), clusters)
        for job in order["jobs"]:
            print(json.dumps(_answer(emulator, job)), flush=True)


def _answer(emulator: Emulator | None, job: Mapping[str, Any]) -> dict[str, Any]:
    if emulator is None:
        return {"message": "the pipes of its cores are not known"}
    try:
        return count(emulator, job)
    except (AgentError, EmulatorError, ProgramError, OverrunError, LoadError, OSError, MemoryError) as error:
        return {"message": str(error)}


def count(emulator: Emulator, job: Mapping[str, Any]) -> dict[str, Any]:
    """The segments of one job, as `CountedSegment` has them. Raises what running does."""
    limits = Limits(memory_bytes=int(job["memory_bytes"]), threads=int(job["threads"]))
    spec = RunSpec(Engine(job["engine"]), entry=job["entry"], limits=limits)
    arrays = read_arrays(Path(job["inputs"]).read_bytes())
    on_threads = dataclasses.replace(emulator, tasks=limits.threads, kept=None)
    ran = Execution(on_threads, spec, Path(job["program"]).read_bytes(), arrays).look()
    core = emulator.core
    counted = split_waits(ran.segments, ran.waits, core["wait_cycles"], core["crowding"])
    return {"core": core["name"], "segments": [dataclasses.astuple(each) for each in counted]}


if __name__ == "__main__":
    main()
