"""What a campaign's objective asks of finalists: energy in windows that last until the interval is narrow, and the
share of a deadline that a workload's candidates have.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from device_agent.protocol import Energy, EnergySpec
from farm.campaign.plan_estimate import WINDOW_S
from farm.campaign.verify.journal import VerificationJournal
from farm.campaign.verify.programs import RecordKey
from farm.crew import visits
from farm.points.values import Objective
from farm.types.campaigns import Order, TypeOrder

# Half of the 95 % interval that is aimed at, relative to the energy.
PRECISION = 0.02
# Values of the slowest sensor: in the first window, and the most in later ones.
_UPDATES, _MOST_UPDATES = 20, 2000


def find_half_width(energy: Energy) -> float:
    """Return half of the energy's interval relative to it; infinite without one."""
    if energy.per_call_j is None or energy.per_call_ci_j is None or energy.per_call_j <= 0:
        return math.inf
    low_j, high_j = energy.per_call_ci_j
    return (high_j - low_j) / 2 / energy.per_call_j


def read_energy_j(energy: Energy | None, by: Objective) -> float | None:
    """Return J a call, for a period J above idle: at one operating point that decides; None where there is none."""
    if energy is None or by is not Objective.PERIOD:
        return energy.per_call_j if energy else None
    return energy.above_idle_j if (energy.above_idle_j or 0.0) > 0 else None


def find_idle_s(by: Objective) -> float:
    """Return how long idle power is measured before a window; 0 where it does not count."""
    return visits.LEAST_IDLE_S if by is Objective.PERIOD else 0.0


def plan_window(seen: Sequence[Energy], by: Objective = Objective.ENERGY) -> EnergySpec:
    """Plan a candidate's next window from its earlier ones: as long as its interval needs, by the square root of the
    number of values, within the limit.
    """
    updates = _UPDATES
    if seen and (width := find_half_width(seen[-1])) < math.inf and seen[-1].busy.total is not None:
        updates = round(seen[-1].busy.total.updates * max(1.0, width / PRECISION) ** 2)
    return EnergySpec(min_updates=min(max(updates, _UPDATES), _MOST_UPDATES), limit_s=WINDOW_S, idle_s=find_idle_s(by))


def describe_energy(seen: Sequence[Energy]) -> dict[str, Any]:
    """Describe a record's energy: the median of its windows, and their median interval, in J a call."""
    known = [each for each in seen if each.per_call_j is not None and each.per_call_ci_j is not None]
    if not known:
        return {"energy_j": None, "energy_ci_j": None, "energy_note": "no energy was measured"}
    width = min(map(find_half_width, known))
    low_j, high_j = (statistics.median((each.per_call_ci_j or (0.0, 0.0))[side] for each in known) for side in (0, 1))
    note = ""
    if width > PRECISION:
        note = f"the interval is +-{width:.1%}: {WINDOW_S:g} s of sampling do not reach {PRECISION:.0%}"
    return {
        "energy_j": statistics.median(each.per_call_j or 0.0 for each in known),
        "energy_ci_j": [low_j, high_j],
        "energy_note": note,
    }


def fetch_slack(order: Order, of_type: TypeOrder, point: str, journal: VerificationJournal) -> float:
    """Return how many times its fastest candidate's latency a candidate may take, by the campaign's deadline of a
    model: infinite without a deadline, below 1 where it cannot be met, which is an event.
    """
    if order.deadline_s is None:
        return math.inf
    fastest_s = {}
    for each in of_type.workloads:
        known = journal.fetch_known(RecordKey(of_type.board_type, each.hash, point))
        fastest_s[each.hash] = min((one.median_s for one in known if one.median_s is not None), default=0.0)
    slack = find_slack(of_type, [each.name for each in order.models], fastest_s, order.deadline_s)
    if slack < 1:
        said = f"at {point} the fastest candidates together take {1 / slack:.2f} times the deadline"
        journal.note("deadline_missed", f"{order.name} on {of_type.board_type}", said)
    return slack


def find_slack(of_type: TypeOrder, models: Sequence[str], fastest_s: Mapping[str, float], deadline_s: float) -> float:
    """Return how many times its fastest candidate's latency a workload may take: the deadline over the sum of the
    fastest, for the model with the least room. Below 1: the deadline cannot be met.
    """
    sums = []
    for model in models:
        mine = [each for each in of_type.workloads if model in each.models and each.hash in fastest_s]
        calls = [dict(zip(each.models, each.calls, strict=False)).get(model, each.weight) for each in mine]
        sums.append(math.fsum(count * fastest_s[each.hash] for count, each in zip(calls, mine, strict=True)))
    return deadline_s / max(sums) if any(sums) else math.inf
