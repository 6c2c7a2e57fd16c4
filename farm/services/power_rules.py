"""When a board's power is cycled, and when that is given up: pure rules over its row, its probes and its way.

Counting what was tried is `farm.crew.health`'s business, doing it `powering`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from device_agent.protocol import StrEnum
from farm.crew.health import HealthLimits
from farm.services.probe_plan import ProbePast
from farm.values import Health

# Probes that failed in a row: one may be a hiccup.
FAILED_PROBES = 2
# Out of reach for so long, with nobody's refusal in the way: longer than a reboot of a Jetson takes.
LOST_S = 180.0


class PowerOrder(StrEnum):
    """What is to be done about a board."""

    CYCLE = "cycle"
    GIVE_UP = "give_up"


_LIMITS = HealthLimits()


def plan_power(
    row: Mapping[str, Any], past: ProbePast | None, lost_s: float | None, boot_s: float, limits: HealthLimits = _LIMITS
) -> PowerOrder | None:
    """What to do about a board whose power can be cycled; None for nothing.

    `row` is one of `Store.fetch_boards`. `lost_s`: for how long it has been out of reach, None where it is within; in
    what an operator took out of service, or holds, nothing is switched.
    """
    if row["lease"] is not None or (row["quarantine"] or {}).get("held"):
        return None
    if row["health"] not in (Health.GOOD, Health.SUSPECT, Health.QUARANTINED) or not row["seen_at"]:
        return None
    if lost_s is None:
        hangs = past is not None and not past.passed and not past.skipped and past.tries >= FAILED_PROBES
    else:
        hangs = lost_s >= LOST_S
    if not hangs or min(row["power_cycled_s"], default=boot_s) < boot_s:
        return None
    if len(row["power_cycled_s"]) < limits.cycles:
        return PowerOrder.CYCLE
    return None if row["health"] == Health.QUARANTINED else PowerOrder.GIVE_UP


def is_network_down(lost: int, kept: int) -> bool:
    """Whether so many boards are out of reach at once that they are not what is wrong."""
    return lost > 1 and lost > kept / 2
