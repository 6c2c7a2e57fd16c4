"""Waiting until a board is fit to be measured: cool enough, idle enough, within a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable

from device_agent.evidence import Sensors
from device_agent.protocol import StartConditions

# Load is CPU time between two looks; the kernel counts it in ticks of 10 ms.
_LOOK_S = 0.25


def wait(
    conditions: StartConditions,
    sensors: Sensors,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> str:
    """Wait until every condition holds; return "", or at the deadline which one does not.

    A board without thermal zones, or without /proc/stat, cannot promise the condition: that is an answer at once.
    """
    deadline = clock() + conditions.deadline_s
    looked, busy_s = clock(), sensors.read_busy_s()
    while True:
        problem = ""
        if conditions.max_temperature_c is not None:
            zones = sensors.read_temperatures()
            if not zones:
                return "start condition max_temperature_c: this board has no thermal zone that can be read"
            hottest = max(zones, key=lambda zone: zones[zone])
            if zones[hottest] > conditions.max_temperature_c:
                problem = f"{hottest} is at {zones[hottest]:g} C, above {conditions.max_temperature_c:g} C"
        if conditions.max_load is not None and not problem:
            if busy_s is None:
                return "start condition max_load: this board does not say how busy it is"
            sleep(_LOOK_S)
            now, busy_now_s = clock(), sensors.read_busy_s()
            load = ((busy_now_s or 0.0) - busy_s) / max(now - looked, 1e-6)
            looked, busy_s = now, busy_now_s
            if load > conditions.max_load:
                problem = f"other processes use {load:.2f} cores, more than {conditions.max_load:g}"
        if not problem:
            return ""
        if clock() >= deadline:
            return f"start condition not met within {conditions.deadline_s:g} s: {problem}"
        if "cores" not in problem:
            sleep(_LOOK_S)
