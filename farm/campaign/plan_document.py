"""A campaign's plan as a document: printed, and kept for the run."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from farm import folders
from farm.campaign.plan import CampaignPlan, PlannedType
from farm.errors import UsageError

FOLDER = "plans"


def to_document(plan: CampaignPlan) -> dict[str, Any]:
    """Return the plan as plain data. `sha256` of each model is compared by a later run."""
    estimated = plan.estimate
    return {
        "name": plan.spec.name,
        "models": [
            {
                "name": model.name,
                "origin": model.source.origin,
                "sha256": model.source.sha256,
                "batch": model.batch,
                "inputs": [
                    {"name": each.name, "shape": list(each.static_shape), "dtype": each.dtype} for each in model.inputs
                ],
            }
            for model in plan.models
        ],
        "types": [_type_document(each) for each in plan.types],
        "budget": plan.spec.budget.model_dump(mode="json"),
        "estimate": {
            "trials": plan.trials,
            "winner_measurements": plan.winners,
            "board_hours": plan.board_hours,
            "seconds": estimated.eta_s,
            "ends_at": estimated.limit,
            "boards_seconds": estimated.boards_s,
            "winners_seconds": estimated.winners_s,
            "finals_seconds": estimated.finals_s,
            "host_seconds": estimated.host_s,
            "host_as_board_seconds": estimated.alone_s,
            "host_cores": plan.host_cores,
        },
    }


def _type_document(planned: PlannedType) -> dict[str, Any]:
    boards, costs = planned.boards, planned.costs
    return {
        "type": boards.board_type.name,
        "simulated": boards.simulated,
        "pipelines": list(planned.pipelines),
        "boards": {
            "all": list(boards.pool),
            "good": sorted(boards.good),
            "idle": sorted(boards.idle),
            "usable": sorted(boards.usable),
        },
        "extracted_workloads": planned.extracted,
        "workloads": [each.model_dump(mode="json") for each in planned.workloads],
        "operating_points": list(planned.points),
        "lacking": dict(boards.lacking),
        "too_big": dict(boards.too_big),
        "cost": {
            "held_s": planned.held_s,
            "held_from": "assumed" if costs.held_s is None else f"{costs.trials} trials",
            "build_s": planned.build_s,
            "build_from": "assumed" if costs.build_s is None else f"{costs.trials} trials",
            "search_s": planned.search_s,
        },
        "notes": list(boards.notes),
    }


def keep_plan(home: pathlib.Path, document: Mapping[str, Any]) -> pathlib.Path:
    """Save a plan (`plan.to_document`) in place of its campaign's last one, atomically. Raises OSError."""
    path = _path(home, str(document["name"]))
    folders.make_private(path.parent)
    folders.write_private(path, json.dumps(document, indent=2))
    return path


def find_plan(home: pathlib.Path, name: str) -> Mapping[str, Any] | None:
    """Return the last plan of the campaign called `name`. Raises UsageError where the file is invalid."""
    path = _path(home, name)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(document["models"], list) and all("sha256" in each for each in document["models"]):
            return dict(document)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        pass
    raise UsageError(f"{path} is no plan", "Remove it, and plan the campaign again.")


def _path(home: pathlib.Path, name: str) -> pathlib.Path:
    return home / FOLDER / f"{name}.json"
