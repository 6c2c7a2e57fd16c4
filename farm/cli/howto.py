"""Which how-to an error belongs to: that of the part of the farm that raised it."""

from __future__ import annotations

from collections.abc import Mapping

FOLDER = "docs/howto"
# The longest name that begins a module's counts. What serves everything (store, settings, units) says nothing of what
# the user was about: then whoever called it does.
PAGES: Mapping[str, str] = {
    "farm.artifacts": "deploy-a-model",
    "farm.campaign": "run-a-campaign",
    "farm.campaign.engine.ray_nodes": "build-on-many-machines",
    "farm.campaign.plan": "plan-a-campaign",
    "farm.campaign.spec": "plan-a-campaign",
    "farm.cli.board": "describe-a-fleet",
    "farm.cli.board_certify": "certify-a-board",
    "farm.cli.board_power": "switch-power",
    "farm.cli.board_remote": "reach-boards",
    "farm.cli.board_trust": "reach-boards",
    "farm.cli.board_types": "add-a-board",
    "farm.cli.bundle": "provision-boards",
    "farm.cli.campaign": "run-a-campaign",
    "farm.cli.fleet": "describe-a-fleet",
    "farm.cli.gate": "gate-a-model",
    "farm.cli.logs": "watch-the-farm",
    "farm.cli.model": "bring-a-model",
    "farm.cli.model_artifacts": "deploy-a-model",
    "farm.cli.model_board": "deploy-a-model",
    "farm.cli.notices": "watch-the-farm",
    "farm.cli.provision": "provision-boards",
    "farm.cli.queue": "run-the-farm",
    "farm.cli.record": "keep-records",
    "farm.cli.services": "run-the-farm",
    "farm.cli.store": "run-the-farm",
    "farm.cli.sweep": "sweep-clocks",
    "farm.cli.tune": "bring-a-model",
    "farm.cli.web": "use-the-web-page",
    "farm.connectivity": "reach-boards",
    "farm.connectivity.services": "run-the-farm",
    "farm.crew": "run-the-farm",
    "farm.crew.power": "switch-power",
    "farm.gate": "gate-a-model",
    "farm.inventory.board_types": "add-a-board",
    "farm.inventory.core_types": "add-a-board",
    "farm.inventory.fleet": "describe-a-fleet",
    "farm.inventory.power_commands": "switch-power",
    "farm.measure": "run-the-farm",
    "farm.metaschedule": "use-with-metaschedule",
    "farm.models": "bring-a-model",
    "farm.points": "clocks-and-power",
    "farm.provision": "provision-boards",
    "farm.report.record_choice": "keep-records",
    "farm.search.graph": "bring-a-model",
    "farm.services": "run-the-farm",
    "farm.services.board_certify": "certify-a-board",
    "farm.services.notices": "watch-the-farm",
    "farm.store.database": "run-the-farm",
    "farm.store.merging": "keep-records",
    "farm.store.postgresql": "share-a-store",
    "farm.sweep": "sweep-clocks",
    "farm.web": "use-the-web-page",
}


def find_page(error: BaseException) -> str:
    """The path of the how-to for an error that was raised; empty where there is none, or its text names a page."""
    if "docs/" in str(error):
        return ""
    modules, step = [], error.__traceback__
    while step is not None:
        modules.append(str(step.tb_frame.f_globals.get("__name__", "")))
        step = step.tb_next
    for module in reversed(modules):
        if prefixes := [each for each in PAGES if module.startswith(each)]:
            return f"{FOLDER}/{PAGES[max(prefixes, key=len)]}.md"
    return ""
