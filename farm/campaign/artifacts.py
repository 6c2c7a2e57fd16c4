"""The artifacts that a campaign was ordered with: what is still to be made once it is finished, and making it.

What was made is kept with the campaign's progress, one by one, so that whoever comes after a killed command goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farm.artifacts import of_campaign
from farm.artifacts.listed import list_artifacts
from farm.settings import Settings
from farm.store import Store
from farm.values import CampaignState, FleetCampaign

if TYPE_CHECKING:
    from farm.artifacts.of_campaign import MadeArtifact

# The campaign's own boards are free again by then; others may have one for a while.
_WAIT_S = 300.0


def find_folder(campaign: FleetCampaign) -> str | None:
    """Where a campaign's artifacts go; None where none were ordered."""
    folder = campaign.order.get("compile_to")
    return None if folder is None else str(folder)


def list_made(campaign: FleetCampaign) -> list[dict[str, Any]]:
    """What was made of a campaign in the folder that it is to go to now, as `Made.to_dict` has it."""
    folder = find_folder(campaign)
    known = (campaign.progress or {}).get("artifacts", ())
    return [dict(each) for each in known if folder is not None and Path(each["folder"]).parent == Path(folder)]


def is_pending(campaign: FleetCampaign, document: Mapping[str, Any]) -> bool:
    """Whether artifacts of a campaign are still to be made; `document` is the campaign's."""
    if find_folder(campaign) is None or campaign.state is not CampaignState.FINISHED:
        return False
    return bool({each.name for each in list_artifacts(document)} - _list_done(campaign))


def make_ordered(
    settings: Settings, store: Store, name: str, document: Mapping[str, Any], say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Make what is missing; returns all that was made. Raises what `make_artifacts` does."""
    campaign = store.fetch_fleet_campaign(name)
    folder = find_folder(campaign)
    if folder is None:
        return []

    def keep(made: MadeArtifact) -> None:
        now = store.fetch_fleet_campaign(name)
        others = [each for each in (now.progress or {}).get("artifacts", ()) if each["folder"] != str(made.folder)]
        store.save_progress(now.id, {**(now.progress or {}), "artifacts": [*others, made.to_dict()]})

    done = _list_done(campaign)
    of_campaign.make_artifacts(document, Path(folder), settings, store, _WAIT_S, say, keep, done)
    return list_made(store.fetch_fleet_campaign(name))


def _list_done(campaign: FleetCampaign) -> set[str]:
    """What was made and lies where it was put. What was wrong is made again."""
    made = list_made(campaign)
    return {each["name"] for each in made if each["matches"] and each["package"] and Path(each["package"]).is_file()}
