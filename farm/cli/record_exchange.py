"""`farm record export`, `import`, `merge`: records as MetaSchedule's files, and those of other farms."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from farm import backup
from farm.cli import options, output
from farm.cli import record_filters as filters
from farm.errors import UsageError
from farm.inventory.board_types import require_board_type
from farm.metaschedule import exchange
from farm.processes.machine import name_user
from farm.report.record_choice import Filters
from farm.settings import StoreLocation, parse_store
from farm.store import Store
from farm.store.database import has_store
from farm.store.merging import Taken
from farm.values import DEFAULT_POINT


def register(app: typer.Typer) -> None:
    """Add the commands to `farm record`."""
    app.command("export")(export)
    app.command("import")(import_)
    app.command("merge")(merge)


@output.command
@filters.filtered
def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to create.")],
    wanted: Filters,
) -> output.Document:
    """Write records as a MetaSchedule database. Any TVM script applies it, and another farm imports it."""
    with options.open_store() as store:
        records = wanted.fetch(store)
        if not records:
            hint = wanted.explain_none(store) or "`farm record list` shows those that there are"
            raise UsageError("there are no such records", f"{hint}.")
        bundle = store.fetch_bundle(records)
    written = exchange.write_folder(bundle, folder)
    yield {"folder": str(folder), "records": written, "trials": len(bundle.trials)}
    output.tell(f"{written} records and {len(bundle.trials)} trials of their candidates are in {folder}")


@output.command
def import_(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder that `farm record export` or MetaSchedule wrote.")
    ],
    board_type: filters.BoardType = "",
    operating_point: filters.Point = DEFAULT_POINT,
    pipeline: Annotated[
        str,
        typer.Option(
            "--pipeline", metavar="NAME", help="Graph pipeline that the modules of MetaSchedule's files went through."
        ),
    ] = "script",
    simulated: Annotated[bool, typer.Option("--simulated", help="Take them as results of virtual boards.")] = False,
) -> output.Document:
    """Import records of another farm. Or candidates of MetaSchedule's files, which count as unverified trials."""
    bundle = exchange.read_folder(folder)
    if bundle is not None:
        if board_type:
            raise UsageError("these records say themselves which board type they are for", "Leave out --board-type.")
        with options.open_store() as store:
            taken = store.take_in(bundle, str(folder.absolute()), name_user())
            said = f"{taken.records} records of {folder.absolute()}"
            store.add_event("records_imported", "records", said, name_user())
        yield from _tell(taken)
        return
    if not board_type:
        raise UsageError("MetaSchedule's files do not say where they were measured", "Say --board-type TYPE.")
    kind = require_board_type(board_type).name
    workloads, trials = exchange.read_database(folder, kind, operating_point, simulated=simulated, pipeline=pipeline)
    with options.open_store() as store:
        about = {"origin": {"source": str(folder.absolute()), "by": name_user()}}
        number = store.start_campaign("farm record import", folder.name, "", kind, 0, about)
        store.save_workloads(number, [dict(each) | {"weight": 1} for each in workloads])
        count = store.add_trials([dataclasses.replace(each, campaign=number) for each in trials])
        store.finish_campaign(number, "imported")
    yield from _tell(Taken(workloads=len(workloads), trials=count))
    output.stderr.print("nobody verified them here: a search begins from them, and makes records")


@output.command
def merge(
    other: Annotated[str, typer.Argument(metavar="STORE", help="Another farm's farm.db, or its postgresql://… URL.")],
    board_type: filters.BoardType = "",
    simulated: filters.Simulated = False,
) -> output.Document:
    """Take in all records of another farm. Records that were verified here stay; theirs are tried."""
    place = parse_store(other)
    if isinstance(place, Path) and not place.is_file():
        raise UsageError(f"there is no store {place}", "Give another farm's farm.db.")
    with _reading(place) as theirs, options.open_store() as store:
        if theirs.fetch_identity() == store.fetch_identity():
            raise UsageError(f"{other} is this farm's own store, or a copy of it")
        wanted = Filters(board_type=board_type, simulated=simulated)
        with exchange.blamed(other):
            bundle = theirs.fetch_bundle(wanted.fetch(theirs, simulated=True if simulated else None))
        exchange.require_sound(bundle, other)
        taken = store.take_in(bundle, other, name_user())
        store.add_event("records_merged", "records", f"{taken.records} records of another farm", name_user())
    yield from _tell(taken)


@contextlib.contextmanager
def _reading(place: StoreLocation) -> Iterator[Store]:
    """Another farm's store, in which nothing is changed. Raises UsageError where there is none."""
    if isinstance(place, Path):
        with backup.reading_other(place) as store:
            yield store
        return
    if not has_store(place):
        raise UsageError(f"{place} holds no store of a farm", "Give another farm's FARM_STORE.")
    with Store(place) as store:
        yield store


def _tell(taken: Taken) -> output.Document:
    yield dataclasses.asdict(taken)
    lines = [f"{taken.records} records, {taken.trials} trials and {taken.workloads} workloads are new"]
    if taken.theirs_won:
        lines.append(f"{taken.theirs_won} of the records replace imported ones: they are better verified")
    if taken.ours_stayed:
        lines.append(f"{taken.ours_stayed} records met ours, which stay; the next campaign tries their candidates")
    if taken.refused:
        lines.append(f"{taken.refused} records are refused: their candidates computed wrong results here")
    for line in lines:
        output.tell(line)
