"""`farm backup`, `farm restore`, `farm db check`, `farm db upgrade`: keep the store safe. Pruning: `store_prune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from farm import backup as farm_backup
from farm import settings as farm_settings
from farm.cli import options, output, store_prune
from farm.errors import PermanentError, UsageError

app = typer.Typer(help="Check, upgrade and prune the store.", no_args_is_help=True)
app.command("prune")(store_prune.prune)


@output.command
def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to write the copy to.")],
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it exists.")] = False,
) -> None:
    """Copy the farm's store into FILE, whole and consistent, while services and campaigns go on."""
    farm_backup.back_up(_require_file(farm_settings.load(), "pg_dump --format=custom --file=FILE"), file, force)
    output.tell(f"the store is copied to {file}")


@output.command
def restore(file: Annotated[Path, typer.Argument(metavar="FILE", help="A file that `farm backup` wrote.")]) -> None:
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
            removed = store.remove_workloads(list(impostors))
    elif impostors:
        problems = [f"workload {key} ({about})" for key, about in impostors.items()]
    error = None
    if problems:
        error = PermanentError(
            f"the store has {len(problems)} problem{'s' if len(problems) > 1 else ''}",
            "`farm db check --remove` removes these workloads with their records and trials."
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


@app.command("upgrade")
@output.command
def upgrade() -> output.Document:
    """Upgrade the store to this version. Everything on every host that uses it must have ended."""
    location = farm_settings.load().store_location
    before = farm_backup.upgrade(location)
    after = farm_backup.SCHEMA
    yield {"store": str(location), "before": before, "after": after}
    if before == after:
        output.stderr.print(f"the store has schema {after} already")
    else:
        output.stderr.print(f"the store has schema {after} now; it had {before or 'none'}")


def _require_file(settings: farm_settings.Settings, tool: str) -> Path:
    """Return the folder of a store that is a file. Raises UsageError for PostgreSQL, naming its own tool."""
    if isinstance(location := settings.store_location, str):
        raise UsageError(
            f"the store is a PostgreSQL database ({location}), which has tools of its own for this",
            f"{tool} {location}",
        )
    return settings.home_path
