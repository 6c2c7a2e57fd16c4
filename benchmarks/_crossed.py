"""Search with another core's file, and count the trials until the search makes up for it.

The caller gives each candidate's latency: an emulated board's estimate, or the prediction by the right core's file.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import _machine
import numpy as np

from farm import settings
from farm.search import tvm_env
from farm.search.cores import core_of
from farm.search.families import rule
from farm.search.tuners.campaign_search import CampaignSearch
from farm.search.tuners.correction import Correction, Lesson, Plans
from farm.search.tuners.schedule_space import FamilySketch
from farm.search.tuners.tasks import Candidate, SearchTask, derive_traits
from farm.values import Workload

WITHIN = 1.05
# As a campaign asks for them: one of each workload, then the rest of a warm-up, then as many again, then batches.
ROUNDS = (1, 3, 4, 8, 8)


@dataclasses.dataclass(frozen=True)
class Space:
    """A function's plans as the wrong file predicts them, and the seconds that each takes by the right one."""

    name: str
    plans: Plans
    seconds: np.ndarray


def read_space(workload: Workload, wrong: str, right: str, most: int = 2048) -> Space | None:
    """Both cores by what LLVM calls them; None where no family plans the function."""
    tvm = tvm_env.load()
    unit, real = (core_of({**workload.target, "mcpu": mcpu}) for mcpu in (wrong, right))
    outlook = rule.read_outlook(tvm.ir.load_json(workload.module_json), unit)
    if outlook is None:
        return None
    found = [outlook.family.predict(outlook.facts, plan, real) for _, plan in outlook.plans()[:most]]
    seconds = np.array([each.seconds if each else np.inf for each in found])
    return Space(workload.name, FamilySketch(outlook).list_plans(most), seconds)


def search_spaces(spaces: Sequence[Space], *, together: bool) -> list[int | None]:
    """Trials of each function until within 5 % of its best; all learn from each other, or each from itself alone."""
    rows: list[list[int]] = [[] for _ in spaces]
    for count in ROUNDS:
        for at, space in enumerate(spaces):
            known = [at, *(other for other in range(len(spaces)) if together and other != at)]
            lessons = [
                Lesson(str(other), spaces[other].plans, tuple(took), tuple(np.log2(spaces[other].seconds[took])))
                for other in known
                if (took := [row for row in rows[other] if np.isfinite(spaces[other].seconds[row])])
            ]
            # The first is the best predicted, as in a campaign.
            order = Correction(lessons, str(at), space.plans).order(rows[at])
            rows[at] += itertools.islice(order, count) if rows[at] else range(count)
    return [
        _machine.trials_until(list(space.seconds[took]), WITHIN * float(space.seconds.min()))
        for space, took in zip(spaces, rows, strict=True)
    ]


def search_campaign(
    workloads: Sequence[Workload], mcpu: str, price: Callable[[Workload, Candidate], float]
) -> list[list[float]]:
    """The campaign's own search of all workloads as for `mcpu`; the prices of each one's trials, in order."""
    base = settings.load()
    search = CampaignSearch("xgb", None, 0, base.population, base.generations, 1)
    for workload in workloads:
        as_wrong = dataclasses.replace(workload, target={**workload.target, "mcpu": mcpu})
        search.open(workload.hash, SearchTask(as_wrong, "board", "default", derive_traits(as_wrong.target)))
    prices: dict[str, list[float]] = {workload.hash: [] for workload in workloads}
    for count in ROUNDS:
        for workload in workloads:
            candidates, _ = search.propose(workload.hash, count)
            results = [(each.hash, price(workload, each)) for each in candidates]
            search.observe(workload.hash, list(results))
            prices[workload.hash] += [seconds for _, seconds in results]
    return [prices[workload.hash] for workload in workloads]


def summarise(trials: Sequence[int | None]) -> Mapping[str, Any]:
    """Of functions: the trials that each needed; one that never came there counts as one more than there were."""
    most = sum(ROUNDS) + 1
    counted = [each or most for each in trials]
    return {
        "functions": len(counted),
        "median": statistics.median(counted),
        "worst": max(counted),
        "never": sum(each is None for each in trials),
    }
