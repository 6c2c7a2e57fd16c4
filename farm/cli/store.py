"""`farm store`: back the store up, restore it, check and prune it."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Annotated

import typer

from farm import backup as farm_backup
from farm import settings as farm_settings
from farm.cli import options, output, tables
from farm.errors import PermanentError, UsageError
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
    yes: Annotated[bool, typer.Option("--yes", help="Delete it; without it, only show what would be deleted.")] = False,
    shrink: Annotated[
        bool, typer.Option("--shrink", help="Give free room back to the disk; nothing of the farm may be running.")
    ] = False,
) -> output.Document:
    """Delete trials of campaigns that are over. What records rest on stays, and so does what winners were measured in.

    Services and campaigns may go on meanwhile; after an interruption the same command goes on.
    """
    if not until and not campaign and not shrink:
        raise UsageError("which trials?", "Choose with --until 90d or --campaign NAME.")
    settings = farm_settings.load()
    if shrink and isinstance(settings.store_location, str):
        raise UsageError(
            f"the store is a PostgreSQL database ({settings.store_location}), which uses free room by itself",
            "VACUUM FULL trials, as its owner and while no farm uses it, gives it back to the disk.",
        )
    gone = 0
    with options.open_store(settings) as store:
        plan = store.pruning.plan(record_document.to_time("--until", until) if until else None, campaign or ())
        plan = plan if until or campaign else pruning.PruningPlan((), 0)
        for each in plan.campaigns if yes else ():
            for some in store.pruning.forget_trials(each.campaign, machine.name_user()):
                gone += some
                output.note(f"{gone:,} of {plan.trials:,} trials are deleted")
    if shrink and (yes or not plan.trials):
        farm_backup.shrink(settings.home_path)
    with options.open_store(settings) as store:
        size, free = store.pruning.fetch_room()
    campaigns = [dataclasses.asdict(each) for each in plan.campaigns]
    yield {
        "trials": plan.trials, "bytes": plan.bytes, "deleted": gone, "campaigns": campaigns, "store_bytes": size,
        "free_bytes": free,
    }  # fmt: skip
    _print(plan, deleted=yes)
    left = "" if not free else f", of which {format_bytes(free)} are free for what comes: --shrink gives them back"
    output.stderr.print(f"the store takes {format_bytes(size)}{left}", markup=False, soft_wrap=True)


def _print(plan: pruning.PruningPlan, *, deleted: bool) -> None:
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
        verb = "are deleted" if deleted else "would be deleted; --yes deletes them"
        output.stderr.print(f"{plan.trials:,} trials {verb}, about {format_bytes(plan.bytes)}", markup=False)


app = typer.Typer(help="The store: back it up, restore, check and prune it.", no_args_is_help=True)
app.command("prune")(prune)


@app.command("backup")
@output.command
def backup(file: Annotated[Path, typer.Argument(metavar="FILE", help="File to write the copy to.")]) -> None:
    """Copy the farm's store into FILE, whole and consistent, while services and campaigns go on."""
    farm_backup.back_up(_require_file(farm_settings.load(), "pg_dump --format=custom --file=FILE"), file)
    output.tell(f"the store is copied to {file}")


@app.command("restore")
@output.command
def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file that `farm store backup` wrote.")],
) -> None:
    """Make FILE the farm's store. What is there now is kept beside it; nothing of the farm may be running."""
    home = _require_file(farm_settings.load(), "pg_restore --clean --if-exists FILE --dbname")
    farm_backup.put_back(home, file)
    kept = f"; the one before it is {home / farm_backup.REPLACED_FILE}"
    there = kept if (home / farm_backup.REPLACED_FILE).exists() else ""
    output.tell(f"the store is as {file} has it{there}")


@app.command("check")
@output.command
def check(
    remove: Annotated[
        bool, typer.Option("--remove", help="Remove workloads that are not what they say, with records and trials.")
    ] = False,
) -> output.Document:
    """Check the store for damage. Pages, indexes, tables, values that no farm writes, workloads under wrong hashes.

    Exit code 1 where there is any.
    """
    settings = farm_settings.load()
    problems = farm_backup.check_any(settings)
    impostors = {} if problems else farm_backup.find_mismatched(settings, _tell_progress)
    removed = 0
    if remove and impostors:
        with options.open_store(settings) as store:
            removed = store.workloads.remove(list(impostors))
    elif impostors:
        problems = [f"workload {key} ({about})" for key, about in impostors.items()]
    error = None
    if problems:
        error = PermanentError(
            f"the store has {len(problems)} problem{'s' if len(problems) > 1 else ''}",
            "`farm store check --remove` removes these workloads with their records and trials."
            if impostors
            else "Put a backup in its place; docs/howto/run-the-farm.md says how.",
        )
    about = {"removed_workloads": sorted(impostors) if remove else [], "removed_trials": removed}
    yield output.Failed({"store": str(settings.store_location), "problems": problems} | about, error)
    if remove and impostors:
        output.stderr.print(f"removed {len(impostors)} workloads with their records and {removed} trials")
    output.say(*problems)
    if not problems:
        output.stderr.print("the store is whole")


def _tell_progress(done: int, of: int) -> None:
    if of > done:
        output.note(f"{done:,} of {of:,} workloads looked at")


def _require_file(settings: farm_settings.Settings, tool: str) -> Path:
    """Return the folder of a store that is a file. Raises UsageError for PostgreSQL, naming its own tool."""
    if isinstance(location := settings.store_location, str):
        raise UsageError(
            f"the store is a PostgreSQL database ({location}), which has tools of its own for this",
            f"{tool} {location}",
        )
    return settings.home_path
