"""A sweep's values as plain JSON and back: what the store keeps of grid, goal and measurements.

What a whole sweep looks like for people and programs is in `document.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from device_agent.protocol import OperatingPoint
from farm.points.values import DomainSetting, Estimate, Goal, Grid, GridPoint, Merge, Objective, PointMeasurement
from farm.programs.metrics import Limit, read_metric
from farm.store.sweeps import StoredVisit
from farm.types import documents

_ESTIMATES = ("latency", "power", "energy", "energy_above_idle", "idle_power")


def summarise(sweep: documents.StoredSweep) -> documents.Sweep:
    """A sweep in a list."""
    request = sweep.request
    names = documents.Sweep.model_fields.keys() & documents.StoredSweep.model_fields
    return documents.Sweep(
        sweep=sweep.id,
        series=[f"{variant} x{size}" for size in request["batches"] for variant in request["variants"]],
        points=len(sweep.grid["points"]),
        **{name: getattr(sweep, name) for name in names},
    )


def grid_to_dict(grid: Grid) -> dict[str, Any]:
    """All points, and what was merged."""
    return {
        "points": [
            {
                "key": point.key,
                "point": point.point.to_dict(),
                "domains": [dataclasses.asdict(domain) for domain in point.domains],
                "variant": point.variant,
            }
            for point in grid.points
        ],
        "merged": [{**dataclasses.asdict(merge), "dropped": list(merge.dropped)} for merge in grid.merged],
    }


def grid_from_dict(document: Mapping[str, Any]) -> Grid:
    """The inverse of `grid_to_dict`."""
    points = tuple(
        GridPoint(
            str(each["key"]),
            OperatingPoint.from_dict(each["point"]),
            tuple(DomainSetting(**domain) for domain in each["domains"]),
            str(each["variant"]),
        )
        for each in document["points"]
    )
    return Grid(
        points, tuple(Merge(each["kept"], tuple(each["dropped"]), each["reason"]) for each in document["merged"])
    )


def goal_to_dict(goal: Goal) -> dict[str, Any]:
    """What the user asked of the pick."""
    return {**dataclasses.asdict(goal), "objective": str(goal.objective)}


def goal_from_dict(document: Mapping[str, Any]) -> Goal:
    """The inverse of `goal_to_dict`."""
    limits = tuple(Limit(**each) for each in document.get("limits", ()))
    terms = {"objective": Objective(document["objective"]), "metric": read_metric(document), "limits": limits}
    return Goal(**{**document, **terms})


def estimate_to_dict(estimate: Estimate | None) -> dict[str, float] | None:
    """Value and interval, null where there is none."""
    return None if estimate is None else dataclasses.asdict(estimate)


def measurement_to_dict(measurement: PointMeasurement) -> dict[str, Any]:
    """One visit; null where the board has no sensor."""
    return dataclasses.asdict(measurement)


def measurement_from_dict(document: Mapping[str, Any]) -> PointMeasurement:
    """The inverse of `measurement_to_dict`."""
    estimates = {name: Estimate(**document[name]) for name in _ESTIMATES if document.get(name) is not None}
    return PointMeasurement(**{**document, **estimates})


def read_visits(rows: Iterable[StoredVisit]) -> dict[tuple[str, int], list[PointMeasurement]]:
    """The visits of each series (variant, batch) that measured something, from `store.sweeps.fetch_points`.

    In the order of their times, and at one time of their boards: who wrote first says nothing.
    """
    visits: dict[tuple[str, int], list[PointMeasurement]] = {}
    for row in rows:
        series = visits.setdefault((row.variant, row.batch), [])
        if row.measurement["latency"] is not None:
            series.append(measurement_from_dict(row.measurement))
    return {series: sorted(found, key=lambda visit: (visit.at_s, visit.board)) for series, found in visits.items()}
