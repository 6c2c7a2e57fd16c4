"""`farm record`: the best verified code of each workload, and its export to other farms and import from them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from farm import backup, emulation
from farm.cli import options, output, tables
from farm.errors import UsageError
from farm.inventory import board_types
from farm.metaschedule import exchange, pull
from farm.processes import machine
from farm.processes.jobs import compile_in_subprocess
from farm.report import campaign_rows, record_document
from farm.search.codegen import lowering
from farm.settings import StoreLocation, parse_store
from farm.store import Store, database, imports
from farm.store.records import RecordCriteria
from farm.units import format_minute
from farm.values import DEFAULT_POINT, Record, Workload

BoardType = Annotated[str, typer.Option("--board-type", metavar="TYPE", help="Board type.")]
Point = Annotated[str, typer.Option("--operating-point", metavar="POINT", help="Operating point.")]
_ALL: dict[str, Any] = {
    "workload": Annotated[str, typer.Option(metavar="TEXT", help="Hash, its first digits, or a part of the name.")],
    "board_type": BoardType,
    "operating_point": Point,
    "since": Annotated[str, typer.Option(metavar="WHEN", help="Verified at or after a date, or within 7d.")],
    "until": Annotated[str, typer.Option(metavar="WHEN", help="Verified before a date, or before 7d ago.")],
    "imported": Annotated[bool, typer.Option("--imported", help="Records from another farm or file.")],
    "simulated": Annotated[bool, typer.Option("--simulated", help="Records of virtual boards instead of real ones.")],
}
# For commands that act on records: what one chooses by.
_FEW = ("workload", "board_type", "simulated")
# The forms of a record's code: of any, of a CPU record, of a GPU record.
_FORMS = ("tir", "llvm", "asm", "cuda", "ptx")
# The note on a virtual board's record whose code is not the board's.
_NATIVE = (
    "code of a simulating machine, timed on that machine (versions 0.1 and 0.2): it says nothing of the board and "
    "serves none of its own code"
)
_Which = Annotated[
    str, typer.Argument(metavar="WORKLOAD", help="Workload: its hash, the first digits of it, or its name.")
]


def _filtered(*names: str) -> Any:
    """Give a command the options by these fields of a filter."""
    return options.spread("wanted", record_document.Filters, {name: _ALL[name] for name in names})


@output.command
@_filtered(*_FEW)
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


app = typer.Typer(help="Records: the best verified trial of each workload.", no_args_is_help=True)
app.command("export")(export)
app.command("import")(import_)


@app.command("list")
@output.command
@_filtered(*_FEW, "operating_point", "since", "imported")
def list_records(wanted: record_document.Filters) -> output.Document:
    """List the records in the store."""
    with options.open_store() as store:
        records = wanted.fetch(store)
        codes = record_document.name_codes(store, records)
        others = "" if records else wanted.explain_none(store)
    yield [record_document.to_document(each, codes) for each in records]
    empty = "no records that were asked for" if wanted.chooses else "no records yet; `farm tune MODEL` makes some"
    _print_records(records, codes, empty)
    if others:
        output.stderr.print(others)


@app.command("show")
@output.command
def show_record(
    workload: _Which,
    board_type: BoardType = "",
    operating_point: Point = "",
    simulated: Annotated[bool, typer.Option("--simulated", help="Only records of virtual boards.")] = False,
    top: Annotated[
        int, typer.Option("--top", metavar="N", help="Show the N fastest candidates instead, verified or not.")
    ] = 0,
    code: Annotated[
        str, typer.Option("--code", metavar="|".join(_FORMS), help="Print the code of one record in this form instead.")
    ] = "",
) -> output.Document:
    """Show all records of a workload, its fastest candidates or the code of one record.

    Records say where they hold, how they were verified and where they are from.
    """
    if top:
        yield from _show_best(workload, board_type, operating_point, top, simulated)
        return
    if code and code not in _FORMS:
        raise UsageError(f"--code {code!r} is unknown", f"Known: {', '.join(_FORMS)}.")
    kind = board_types.require_board_type(board_type).name if board_type else None
    wanted = RecordCriteria(board_type=kind, operating_point=operating_point or None, simulated=simulated or None)
    with options.open_store() as store:
        key, name = record_document.require_workload(store, workload, wanted)
        about = store.workloads.fetch_by_hash([key])[key]
        records = store.records.fetch(**wanted | RecordCriteria(workloads=[key]))
        codes = record_document.name_codes(store, records)
    if code:
        yield from _print_code(about, records, code)
        return
    yield record_document.make_document(about, records, codes)
    shapes = ", ".join(f"{'x'.join(map(str, shape)) or 'scalar'} {dtype}" for shape, dtype in about.arguments)
    told = (f"workload {key}", name, f"arguments: {shapes}", f"pipeline: {about.pipeline}")
    target = {name: ",".join(map(str, each)) if isinstance(each, list) else each for name, each in about.target.items()}
    output.say(*told, "target: " + " ".join(f"{name}={each}" for name, each in target.items()))
    _print_records(records, codes, "no record; --top 5 shows what was measured")
    for each in records:
        where = f"{each.board_type} at {each.operating_point}"
        output.say(f"{where}: {record_document.describe_evidence(each.evidence)}")
        if codes.get(each.workload) == emulation.NATIVE and each.simulated:
            output.say(f"{where}: {_NATIVE}")
        if each.simulated and (each.evidence or {}).get("energy_j") is not None:
            output.say(f"{where}: simulated, {board_types.describe_watts(each.board_type)}")
        if each.origin:
            output.say(f"{where}: {_tell_origin(each)}")


def _print_code(workload: Workload, records: list[Record], form: str) -> output.Document:
    record = record_document.require_one(workload.name, records)
    job = functools.partial(lowering.print_code, workload.module_json, record.trace_json, workload.target, form)
    code = compile_in_subprocess(job, workload.name)
    about: dict[str, Any] = {"workload": workload.hash, "name": workload.name, "board_type": record.board_type}
    about |= {"operating_point": record.operating_point, "simulated": record.simulated}
    yield about | {"candidate": record.candidate, "form": form, "code": code}
    output.to_stream(sys.stdout, code.encode().rstrip() + b"\n")


def _show_best(workload: str, board_type: str, operating_point: str, top: int, simulated: bool) -> output.Document:
    """Show a workload's fastest candidates, verified or not, at each place where it was measured."""
    if not 1 <= top <= 1000:
        raise UsageError(f"--top must be between 1 and 1000, not {top}")
    kind = board_types.require_board_type(board_type).name if board_type else None
    wanted = RecordCriteria(board_type=kind, operating_point=operating_point or None, simulated=simulated)
    with options.open_store() as store:
        key, name = record_document.require_workload(store, workload, wanted)
        places = [
            (each, point)
            for each, point in store.records.fetch_operating_points(key, simulated=simulated)
            if kind in (None, each) and operating_point in ("", point)
        ]
        others = 0 if places else len(store.records.fetch_operating_points(key, simulated=not simulated))
        records = store.records.fetch(workloads=[key], simulated=simulated)
        verified = {(each.board_type, each.operating_point, each.candidate) for each in records}
        flop = store.workloads.fetch_by_hash([key])[key].flop
        rows: list[dict[str, Any]] = [
            {"board_type": each, "operating_point": point, "rank": rank, "gflops": flop / row.median_s / 1e9}
            | row._asdict()
            | {"record": (each, point, row.candidate) in verified}
            for each, point in places
            for rank, row in enumerate(
                store.records.fetch_best_trials(key, each, point, simulated=simulated, limit=top), 1
            )
        ]
    yield {"workload": key, "name": name, "simulated": simulated, "candidates": rows}
    output.say(f"{key} {name}" + (" (simulated)" if simulated else ""))
    tables.print_table(
        ("Board type", "Clocks", "Rank", "Candidate", "GFLOPS", "Latency (us)", "Board", "Measured", "Record"),
        [
            (
                row["board_type"],
                _show_point(row["operating_point"]),
                row["rank"],
                row["candidate"],
                f"{row['gflops']:.2f}",
                f"{row['median_s'] * 1e6:,.1f}",
                row["board"],
                format_minute(row["recorded_at"]),
                "yes" if row["record"] else "",
            )
            for row in rows
        ],
        left=(0, 1, 3, 6, 7, 8),
        spare=("Measured", "GFLOPS", "Board"),
        empty="nothing was measured there; `farm tune MODEL` does",
    )
    _say_flop([name] if rows else [])
    if others:
        output.stderr.print(record_document.point_to_others("trials", simulated))


@app.command("prune")
@output.command
@_filtered(*_FEW, "until", "imported")
def prune(
    wanted: record_document.Filters,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show which, and remove nothing.")] = False,
) -> output.Document:
    """Forget records; their trials stay, and a search begins from those. Something must say which."""
    if not wanted.chooses:
        raise UsageError("which records?", "Choose with --until 90d, --imported, --board-type TYPE or the like.")
    with options.open_store() as store:
        records = wanted.fetch(store)
        codes = record_document.name_codes(store, records)
        others = "" if records else wanted.explain_none(store)
        gone = 0 if dry_run else store.records.remove(records)
        if gone:
            store.events.add("records_removed", "records", f"{gone} records", machine.name_user())
    yield {"forgotten": gone, "records": [record_document.to_document(each, codes) for each in records]}
    _print_records(records, codes, "no records that were asked for")
    output.stderr.print(f"{len(records)} records would be forgotten" if dry_run else f"{gone} records are forgotten")
    if others:
        output.stderr.print(others)


def _name_place(record: Record, codes: Mapping[str, str]) -> str:
    place = record.board_type + (" GPU" if record.device == "gpu" else "")
    if not record.simulated:
        return place
    return f"{place} (simulated{', native' if codes.get(record.workload) == emulation.NATIVE else ''})"


def _print_records(records: list[Record], codes: Mapping[str, str], empty: str) -> None:
    heads = (
        "Name", "Board type", "Clocks", "Latency (us)", "Energy (mJ)", "Chosen by", "GFLOPS", "Max rel. error",
        "Verified", "From", "Workload",
    )  # fmt: skip
    tables.print_table(
        heads,
        [
            (
                r.workload_name,
                _name_place(r, codes),
                _show_point(r.operating_point),
                f"{r.median_s * 1e6:,.1f}",
                f"{r.energy_j * 1e3:,.4g}" if r.energy_j is not None else None,
                r.objective,
                f"{r.flop / r.median_s / 1e9:.2f}" if r.flop else None,
                f"{r.max_rel_error:.1e}",
                format_minute(r.verified_at),
                r.origin["store"][:8] if r.origin else "here",
                r.workload,
            )
            for r in records
        ],
        left=(0, 1, 2, 5, 8, 9, 10),
        empty=empty,
        spare=("Max rel. error", "GFLOPS", "Verified", "From", "Workload"),
    )
    _say_flop([each.workload_name for each in records])


def _say_flop(names: list[str]) -> None:
    if note := campaign_rows.note_flop(names):
        output.stderr.print(note, soft_wrap=True, markup=False)


def _show_point(point: str) -> str:
    return "default" if point == DEFAULT_POINT else point


def _tell_origin(record: Record) -> str:
    origin = record.origin or {}
    return (
        f"from the store {origin.get('store', '?')}, taken in from {origin.get('source', '?')}"
        f" by {origin.get('by', '?')} at {format_minute(float(origin.get('at') or 0.0))}"
    )
