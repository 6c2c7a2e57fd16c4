"""A family's schedules of one function, as a search draws, changes, describes and reads them back.

MetaSchedule's own sketches are `farm.search.tuners.schedule_space`'s.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from farm.search.families import rule
from farm.search.families.family import Plan, Prediction
from farm.search.tuners.correction import Floats, Plans
from farm.search.tuners.decisions import Decision, Knob, ScheduleChoice

# What of a prediction a cost model sees: the whole, then these of its terms where a family has them.
_TERMS = ("compute", "far", "pad", "balance", "steps")
FEATURE_COUNT = 1 + len(_TERMS)
NO_PREDICTION = (0.0,) * FEATURE_COUNT
# Terms that add up, whose shares trials may correct, and those that are factors. Knobs that span a tile.
_ADDED, _FACTORS = ("compute", "transforms", "far", "pad"), ("balance", "steps")
_TILE = ("vectors", "pixels", "rows")
# A choice, and a share of the whole, in octaves of an option: what makes as much of a difference.
_CHOICE, _SHARE = 1.5, 3.0


class FamilySketch:
    """One knob a decision, the index of its option."""

    def __init__(self, outlook: rule.Outlook) -> None:
        """Of a function that a family reads."""
        self._outlook = outlook
        self._names = list(outlook.options)
        self.knobs: tuple[Knob, ...] = tuple(ScheduleChoice(len(options)) for options in outlook.options.values())

    @functools.cached_property
    def ranked(self) -> list[tuple[Decision, ...]]:
        """Decisions of all plans that make sense, the best predicted first."""
        return [self._index(plan) for _, plan in self._plans]

    @functools.cached_property
    def _plans(self) -> list[tuple[Prediction, Plan]]:
        return self._outlook.plans()

    def list_plans(self, most: int) -> Plans:
        """The first of `ranked` as what trials correct."""
        plans = self._plans[:most]
        columns = dict(self._list_facets(plans))
        log_s = np.log2([max(1e-12, prediction.seconds) for prediction, _ in plans])
        return Plans(self._outlook.family.name, tuple(columns), np.array(list(columns.values())).T, log_s)

    def _list_facets(self, plans: Sequence[tuple[Prediction, Plan]]) -> Iterator[tuple[str, Floats]]:
        """By name what plans are made of: octaves of options, 1 for a choice that is taken, shares of terms."""
        for name, options in self._outlook.options.items():
            taken = np.array([plan[name] for _, plan in plans], float)
            if min(options) > 0:
                yield name, np.log2(taken)
            else:
                for option in options:
                    yield f"{name}={option}", (taken == option) * _CHOICE
        if sizes := [name for name in _TILE if name in self._outlook.options]:
            yield "tile", np.log2([math.prod(plan[name] for name in sizes) for _, plan in plans])
        cycles = {name: np.array([p.terms.get(name, 0.0) for p, _ in plans]) for name in _ADDED}
        total = np.maximum(sum(cycles.values()), 1.0)
        for name, each in cycles.items():
            yield f"share of {name}", _SHARE * each / total
        for name in _FACTORS:
            yield f"cycles of {name}", np.log2([max(1e-3, p.terms.get(name, 1.0)) for p, _ in plans])

    def apply(self, schedule: Any, decisions: tuple[Decision, ...], seed: int) -> tuple[Decision, ...]:
        """Schedule the function; what is open is drawn. Returns the decisions taken.

        Raises ValueError for a plan that makes no sense, else what TVM raises.
        """
        if None in decisions:
            rng = random.Random(seed)
            fitting = [each for each in self.ranked if _agree(each, decisions)]
            if not fitting:
                raise ValueError("no plan has these options")
            decisions = rng.choice(fitting)
        plan = self._plan(decisions)
        if self._outlook.predict(plan) is None:
            raise ValueError(f"a plan that makes no sense: {dict(plan)}")
        self._outlook.apply(schedule, plan)
        return decisions

    def read(self, mark: tuple[str, Plan] | None) -> tuple[Decision, ...] | None:
        """The decisions of a marked trace, each the option nearest to the one it names; None for other families'."""
        if mark is None or mark[0] != self._outlook.family.name or set(mark[1]) != set(self._names):
            return None
        return self._index(mark[1])

    def describe(self, decisions: tuple[Decision, ...]) -> tuple[float, ...]:
        """The prediction as features: logarithms to base 2."""
        prediction = self._outlook.predict(self._plan(decisions))
        return NO_PREDICTION if prediction is None else _to_features(prediction)

    def _plan(self, decisions: tuple[Decision, ...]) -> Plan:
        options = self._outlook.options.values()
        return {
            name: each[decision]
            for name, each, decision in zip(self._names, options, decisions, strict=True)
            if isinstance(decision, int)
        }

    def _index(self, plan: Plan) -> tuple[Decision, ...]:
        return tuple(
            min(range(len(options)), key=lambda index: abs(options[index] - plan[name]))
            for name, options in self._outlook.options.items()
        )


def _agree(found: tuple[Decision, ...], wanted: tuple[Decision, ...]) -> bool:
    return all(theirs is None or mine == theirs for mine, theirs in zip(found, wanted, strict=True))


def _to_features(prediction: Prediction) -> tuple[float, ...]:
    values = (prediction.seconds * 1e9, *(prediction.terms.get(term, 0.0) for term in _TERMS))
    return tuple(math.log2(1.0 + max(0.0, value)) for value in values)
