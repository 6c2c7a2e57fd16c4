"""Make the artifacts that a finished campaign was ordered with.

Each one is noted in the campaign's progress, so that a killed command can be continued.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from farm.artifacts import checking, make
from farm.artifacts.artifact_folder import list_artifacts
from farm.artifacts.given_model import find_same_model
from farm.artifacts.manifest import ModelFacts
from farm.artifacts.on_board import hold_board
from farm.artifacts.package import WHEEL, explain_name, write_package
from farm.inventory.board_types import require_board_type
from farm.settings import Settings
from farm.store import Store
from farm.types.campaigns import FleetCampaign
from farm.types.states import CampaignState

# For a board to verify on: the campaign's own are free by then, others may hold one for a while.
_WAIT_S = 300.0


def make_artifacts(
    document: Mapping[str, Any],
    out: Path,
    settings: Settings,
    store: Store,
    say: Callable[[str], None],
    done: Collection[str] = (),
) -> Iterator[dict[str, Any]]:
    """Compile, verify and pack all artifacts but those in `done`, by name; `document` is the campaign's.

    Yields of each name, board type and folder, whether it `matches` the model or the reason, and the path of its
    package, None where it does not. Raises what the steps raise.
    """
    for wanted in list_artifacts(document):
        if wanted.name in done:
            continue
        kind = require_board_type(wanted.board_type).model_copy(update={"pipeline": wanted.pipeline})
        say(f"{wanted.name}: compiling")
        about = {key: wanted.model[key] for key in ("name", "sha256", "origin", "batch")}
        model = ModelFacts(**about, shapes=tuple(wanted.model.get("shapes", ())))
        opened = find_same_model(model, None, "the campaign tuned")
        order = make.CompileOrder(opened, kind, wanted.point, wanted.simulated)
        artifact = make.make_artifact(order, out / wanted.name, settings, store, say)
        cases = checking.make_cases(opened, artifact.manifest, ())
        say(f"{wanted.name}: verifying on a board of type {kind.name}")
        with hold_board(settings, store, (kind, None), _WAIT_S, f"verify {wanted.name}", say, is_timed=False) as board:
            verdict = checking.verify_artifact(artifact, board, opened.source, cases)
        package = write_package(artifact, WHEEL, out, None) if verdict.matches else None
        if package and (why := explain_name(artifact.manifest.name).partition(";")[0]):
            say(f"{wanted.name}: {why}")
        found: dict[str, Any] = {"name": wanted.name, "board_type": kind.name, "folder": str(artifact.folder)}
        found |= {"matches": verdict.matches, "reason": verdict.reason}
        yield found | {"package": None if package is None else str(package)}


def list_made(campaign: FleetCampaign) -> list[dict[str, Any]]:
    """Return what was made in the folder that the artifacts go to now (`make_artifacts`)."""
    folder = campaign.order.compile_to
    known = (campaign.progress or {}).get("artifacts", ())
    return [dict(each) for each in known if folder is not None and Path(each["folder"]).parent == Path(folder)]


def is_pending(campaign: FleetCampaign, document: Mapping[str, Any]) -> bool:
    """Whether artifacts of a campaign are still to be made; `document` is the campaign's."""
    if campaign.order.compile_to is None or campaign.state is not CampaignState.FINISHED:
        return False
    return bool({each.name for each in list_artifacts(document)} - _list_done(campaign))


def make_ordered(
    settings: Settings, store: Store, name: str, document: Mapping[str, Any], say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Make what is missing; return all that was made. Raises what `make_artifacts` does."""
    campaign = store.campaigns.require(name)
    folder = campaign.order.compile_to
    if folder is None:
        return []

    for made in make_artifacts(document, Path(folder), settings, store, say, _list_done(campaign)):
        now = store.campaigns.require(name)
        others = [each for each in (now.progress or {}).get("artifacts", ()) if each["folder"] != made["folder"]]
        store.campaigns.save_progress(now.id, {**(now.progress or {}), "artifacts": [*others, made]})
    return list_made(store.campaigns.require(name))


def _list_done(campaign: FleetCampaign) -> set[str]:
    """Return the artifacts that exist. Wrong ones are made again."""
    made = list_made(campaign)
    return {each["name"] for each in made if each["matches"] and each["package"] and Path(each["package"]).is_file()}
