"""The last plan of each campaign, kept under FARM_HOME: what a run compares the models with that it finds."""

from __future__ import annotations

import json
import os
import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from farm import folders
from farm.campaign.plan_models import ModelVariant
from farm.errors import UsageError

FOLDER = "plans"


def keep_plan(home: pathlib.Path, document: Mapping[str, Any]) -> pathlib.Path:
    """Keep a plan (`plan.to_document`) in place of its campaign's last one, whole or not at all. Raises OSError."""
    path = _path(home, str(document["name"]))
    folders.make_private(path.parent)
    number, name = tempfile.mkstemp(dir=path.parent, prefix=".plan-")
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=2)
        pathlib.Path(name).replace(path)
    except BaseException:
        pathlib.Path(name).unlink(missing_ok=True)
        raise
    return path


def find_plan(home: pathlib.Path, name: str) -> Mapping[str, Any] | None:
    """The last plan of the campaign called `name`. Raises UsageError where its file is not one of ours."""
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


def require_unchanged(plan: Mapping[str, Any], models: Sequence[ModelVariant]) -> None:
    """Refuse models whose bytes are not those that were planned. Raises UsageError naming each that differs.

    A model that the plan does not have is another campaign's business: the plan is then of another file.
    """
    planned = {each["name"]: each["sha256"] for each in plan["models"]}
    changed = [each for each in models if planned.get(each.name, each.source.sha256) != each.source.sha256]
    if changed:
        told = "; ".join(
            f"{each.name} ({each.source.origin}) was {planned[each.name][:12]} and is {each.source.sha256[:12]}"
            for each in changed
        )
        raise UsageError(
            f"models have changed since the campaign {plan['name']} was planned: {told}",
            "Trials of the old and the new would count as one campaign's. Plan it again if that is meant.",
        )


def _path(home: pathlib.Path, name: str) -> pathlib.Path:
    return home / FOLDER / f"{name}.json"
