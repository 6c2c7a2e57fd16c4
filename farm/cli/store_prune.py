"""`farm db prune`: delete trials of finished campaigns that no record needs."""

from __future__ import annotations

import dataclasses
import time
from typing import Annotated, Any

import typer

from farm import backup as store_backup
from farm import settings as farm_settings
from farm.cli import options, output, tables
from farm.errors import UsageError
from farm.processes import machine
from farm.report import record_document
from farm.store import pruning
from farm.units import format_bytes


@output.command
def prune(
    until: Annotated[
        str, typer.Option("--until", metavar="TIME", help="Campaigns that ended before this: a date, or 90d.")
    ] = "",
    campaign: Annotated[
        list[str] | None, typer.Option("--campaign", metavar="NAME", help="A campaign's name or number; repeatable.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be deleted, and delete nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Delete it.")] = False,
    shrink: Annotated[
        bool, typer.Option("--shrink", help="Give free room back to the disk; nothing of the farm may be running.")
    ] = False,
) -> output.Document:
    """Delete trials of campaigns that are over. What records rest on stays, and so does what winners were measured in.

    Services and campaigns may go on meanwhile; after an interruption the same command goes on.
    """
    if not until and not campaign and not shrink:
        raise UsageError("which trials?", "Choose with --until 90d or --campaign NAME.")
    if dry_run and yes:
        raise UsageError("--dry-run deletes nothing, --yes does", "Leave one of both out.")
    settings = farm_settings.load()
    if shrink and isinstance(settings.store_location, str):
        raise UsageError(
            f"the store is a PostgreSQL database ({settings.store_location}), which uses free room by itself",
            "VACUUM FULL trials, as its owner and while no farm uses it, gives it back to the disk.",
        )
    gone = 0
    with options.open_store(settings) as store:
        plan = store.plan_pruning(record_document.to_time("--until", until) if until else None, campaign or ())
        plan = plan if until or campaign else pruning.PruningPlan((), 0)
        if plan.trials and not yes and not dry_run:
            raise UsageError(
                f"{plan.trials:,} trials of {len(plan.campaigns)} campaigns would be deleted for good",
                "--dry-run shows which; --yes deletes them. `farm backup FILE` keeps a copy.",
            )
        for each in plan.campaigns if yes else ():
            for some in store.forget_trials(each.campaign, machine.name_user()):
                gone += some
                output.note(f"{gone:,} of {plan.trials:,} trials are deleted")
    if shrink and not dry_run:
        store_backup.shrink(settings.home_path)
    with options.open_store(settings) as store:
        size, free = store.fetch_room()
    yield _to_document(plan, gone) | {"store_bytes": size, "free_bytes": free}
    _print(plan, dry_run)
    left = "" if not free else f", of which {format_bytes(free)} are free for what comes: --shrink gives them back"
    output.stderr.print(f"the store takes {format_bytes(size)}{left}", markup=False, soft_wrap=True)


def _to_document(plan: pruning.PruningPlan, gone: int) -> dict[str, Any]:
    campaigns = [dataclasses.asdict(each) for each in plan.campaigns]
    return {"trials": plan.trials, "bytes": plan.bytes, "deleted": gone, "campaigns": campaigns}


def _print(plan: pruning.PruningPlan, dry_run: bool) -> None:
    tables.print_table(
        ("Campaign", "Ended", "Trials", "Kept"),
        [
            (each.name, time.strftime("%Y-%m-%d", time.localtime(each.finished_at)), f"{each.trials:,}", each.kept)
            for each in plan.campaigns
        ],
        left=(0, 1),
        empty="nothing to delete",
    )
    if plan.trials:
        verb = "would be deleted" if dry_run else "are deleted"
        output.stderr.print(f"{plan.trials:,} trials {verb}, about {format_bytes(plan.bytes)}", markup=False)
