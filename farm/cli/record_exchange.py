"""`farm record export` and `import`: records that leave the farm, and those of others."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from farm import backup
from farm.cli import options, output
from farm.errors import UsageError
from farm.inventory import board_types
from farm.metaschedule import exchange, pull
from farm.processes import machine
from farm.report import record_document
from farm.settings import StoreLocation, parse_store
from farm.store import Store, database, imports
from farm.values import DEFAULT_POINT

Workload = Annotated[
    str, typer.Option("--workload", metavar="TEXT", help="Hash, its first digits, or a part of the name.")
]
BoardType = Annotated[str, typer.Option("--board-type", metavar="TYPE", help="Board type.")]
Point = Annotated[str, typer.Option("--operating-point", metavar="POINT", help="Operating point.")]
Since = Annotated[str, typer.Option("--since", metavar="WHEN", help="Verified at or after a date, or within 7d.")]
Until = Annotated[str, typer.Option("--until", metavar="WHEN", help="Verified before a date, or before 7d ago.")]
Simulated = Annotated[bool, typer.Option("--simulated", help="Records of virtual boards instead of real ones.")]
Imported = Annotated[bool, typer.Option("--imported", help="Records from another farm or file.")]

_ALL: dict[str, Any] = {
    "workload": Workload, "board_type": BoardType, "operating_point": Point,
    "since": Since, "until": Until, "imported": Imported, "simulated": Simulated,
}  # fmt: skip


filtered = options.spread(
    "wanted", record_document.Filters, {name: each for name, each in _ALL.items() if name != "until"}
)
# For commands that act on records: what one chooses by.
_FEW = ("workload", "board_type", "simulated")
chosen = options.spread("wanted", record_document.Filters, {name: _ALL[name] for name in _FEW})
_PRUNED = (*_FEW, "until", "imported")
pruned = options.spread("wanted", record_document.Filters, {name: _ALL[name] for name in _PRUNED})


@output.command
@chosen
def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR|FILE.json.gz", help="Folder or file to write.")],
    wanted: record_document.Filters,
) -> output.Document:
    """Write records as a MetaSchedule database. Any TVM script applies it, and another farm imports it.

    A file holds records of any board types and points, for other farms alone.
    """
    with options.open_store() as store:
        records = wanted.fetch(store)
        if not records:
            hint = wanted.explain_none(store) or "`farm record list` shows those that there are"
            raise UsageError("there are no such records", f"{hint}.")
        bundle = store.imports.fetch_bundle(records)
    written = (exchange.write_file if folder.name.endswith(".json.gz") else exchange.write_folder)(bundle, folder)
    yield {"folder": str(folder), "records": written, "trials": len(bundle.trials)}
    output.tell(f"{written} records and {len(bundle.trials)} trials of their candidates are in {folder}")


@output.command
def import_(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="What `farm record export` or MetaSchedule wrote, here or at a URL (`#sha256=…` is checked); another "
            "farm's farm.db or postgresql://… URL; zoo: records that come with the farm, of virtual boards.",
        ),
    ],
    board_type: BoardType = "",
    simulated: Annotated[bool, typer.Option("--simulated", help="Take them as results of virtual boards.")] = False,
) -> output.Document:
    """Take in records from elsewhere. Those that were verified here stay; the next campaign tries theirs.

    Candidates of MetaSchedule's own files count as unverified trials; they need --board-type.
    """
    folder = Path(source)
    if ("://" in source and not source.startswith(("http://", "https://"))) or folder.suffix == ".db":
        yield from _merge(source, board_type, simulated)
    elif folder.is_dir() and exchange.read_folder(folder) is None:
        yield from _import_trials(folder, board_type, simulated)
    elif board_type:
        raise UsageError("these records say themselves which board type they are for", "Leave out --board-type.")
    else:
        bundle, name = pull.read_source(source)
        with options.open_store() as store:
            taken = store.imports.take_in(bundle, name, machine.name_user())
            store.events.add("records_imported", "records", f"{taken.records} records of {name}", machine.name_user())
        yield from _tell(taken)


def _import_trials(folder: Path, board_type: str, simulated: bool) -> output.Document:
    """Take in MetaSchedule's own two files, which do not say where they were measured."""
    if not board_type:
        raise UsageError("MetaSchedule's files do not say where they were measured", "Say --board-type TYPE.")
    kind = board_types.require_board_type(board_type).name
    workloads, trials = exchange.read_database(folder, kind, DEFAULT_POINT, simulated=simulated, pipeline="script")
    with options.open_store() as store:
        about = {"origin": {"source": str(folder.absolute()), "by": machine.name_user()}}
        number = store.campaigns.start("farm record import", folder.name, "", kind, 0, about)
        store.workloads.save(number, workloads)
        count = store.trials.add_several([dataclasses.replace(each, campaign=number) for each in trials])
        store.campaigns.finish(number, "imported")
    yield from _tell(imports.Taken(workloads=len(workloads), trials=count))
    output.stderr.print("they are not verified here: a search starts from them and makes records")


def _merge(other: str, board_type: str, simulated: bool) -> output.Document:
    """Take in the records of another farm's store."""
    place = parse_store(other)
    if isinstance(place, Path) and not place.is_file():
        raise UsageError(f"there is no store {place}", "Give another farm's farm.db.")
    with _reading(place) as theirs, options.open_store() as store:
        if theirs.imports.fetch_identity() == store.imports.fetch_identity():
            raise UsageError(f"{other} is this farm's own store, or a copy of it")
        wanted = record_document.Filters(board_type=board_type, simulated=simulated)
        with exchange.blamed(other):
            bundle = theirs.imports.fetch_bundle(wanted.fetch(theirs, simulated=True if simulated else None))
        exchange.require_sound(bundle, other, is_ours=False)
        taken = store.imports.take_in(bundle, other, machine.name_user())
        store.events.add("records_merged", "records", f"{taken.records} records of another farm", machine.name_user())
    yield from _tell(taken)


@contextlib.contextmanager
def _reading(place: StoreLocation) -> Iterator[Store]:
    """Open another farm's store to read. Raises UsageError where there is none."""
    if isinstance(place, Path):
        with backup.reading_other(place) as store:
            yield store
        return
    if not database.has_store(place):
        raise UsageError(f"{place} holds no store of a farm", "Give another farm's FARM_STORE.")
    with Store(place) as store:
        yield store


def _tell(taken: imports.Taken) -> output.Document:
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
