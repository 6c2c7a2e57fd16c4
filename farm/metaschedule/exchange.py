"""Export and import of records as files: MetaSchedule's two, which any TVM script reads, and one with the rest.

A folder holds records of one board type at one operating point, since MetaSchedule's database looks up functions only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import math
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tvm

from device_agent.protocol import Outcome, ProtocolError, Status
from farm.artifacts.artifact_folder import new_file, new_folder
from farm.errors import InternalError, UsageError
from farm.measure.answers import require_possible
from farm.processes import confined
from farm.search import traces, tvm_env
from farm.search.tvm_env import ms
from farm.store import expressions
from farm.store.imports import RecordBundle
from farm.values import Record, Trial, Workload

# Clocks of two farms may differ by a wrong time zone.
_CLOCK_SLACK_S = 86_400.0
# There was no farm before 2017.
_EARLIEST_S = 1.5e9
_MOST_TEXT, _MOST_TRACE = 1_000, 4 << 20
_MOST_NESTED, _MOST_ITEMS = 8, 10_000
_MOST_FLOP = 1e18
# No call is shorter than some cycles, no trial longer than hours, no device faster.
_SHORTEST_S, _LONGEST_S, _MOST_FLOP_PER_S = 1e-8, 1e5, 1e16
_BOARD_TYPE = re.compile(r"([a-z0-9][a-z0-9.-]*)?")  # none: a workload of any
_KINDS: dict[str, Any] = {
    "str": str,
    "bool": bool,
    "int": int,
    "float": (int, float),
    "float | None": (int, float, type(None)),
    "str | None": (str, type(None)),
    "Mapping[str, Any]": dict,
    "Mapping[str, Any] | None": (dict, type(None)),
}
FORMAT = "tvm-farm records/1"
# A hundred thousand records with the longest traces are smaller; reading takes five times as much memory.
_MOST_BYTES = 512 << 20
_LIMITS = confined.ConfinedLimits(memory_bytes=6 << 30, timeout_s=900.0)
# TVM writes this flag as a number, and then reads another function.
_FLAG = re.compile(r'(\["Annotate",\["b\d+",)1(\],\["meta_schedule\.layout_rewrite_preproc"\])')


def require_bundle(bundle: RecordBundle) -> None:
    """Raise ValueError, TypeError, LookupError or ProtocolError for values that no farm writes."""
    latest = time.time() + _CLOCK_SLACK_S
    known = set()
    for workload in bundle.workloads:
        require_workload(workload)
        known.add(workload.hash)
    for record in bundle.records:
        _require_record(record, latest)
    for trial, at in bundle.trials:
        require_trial(trial)
        _require(_EARLIEST_S <= at <= latest, "a trial's date is invalid")
    measured: list[Record | Trial] = [*bundle.records, *(trial for trial, _ in bundle.trials)]
    for each in measured:
        _require(each.workload in known, f"the workload {each.workload} is missing")
    _require(isinstance(bundle.store, str) and 0 < len(bundle.store) <= _MOST_TEXT, "it names no store")
    _require_plain({str(number): name for number, name in bundle.models.items()}, "a model's name")


def require_workload(value: Workload) -> None:
    """Raise ValueError for a workload with invalid values."""
    _require_fields(value)
    _require(0 <= value.flop <= _MOST_FLOP, "a workload's FLOP are invalid")
    _require_plain({"arguments": value.arguments, "target": value.target}, "a workload")


def require_trial(value: Trial) -> None:
    """Raise ValueError or ProtocolError for a trial with invalid values."""
    _require_fields(value)
    _require(0 <= value.campaign < 2**53 and 0 <= value.attempt < 2**31, "a trial's number is invalid")
    for seconds in (value.build_s, value.held_s):
        _require(seconds is None or 0 <= seconds < expressions.LONGEST_S, "a trial's time is invalid")
    require_possible(value.outcome)
    _require_time(value.median_s)


def _require_time(median_s: float | None) -> None:
    _require(median_s is None or _SHORTEST_S <= median_s <= _LONGEST_S, "no call takes such a time")


def _require_record(value: Record, latest: float) -> None:
    _require_fields(value)
    _require_time(value.median_s)
    _require(0 <= value.flop <= _MOST_FLOP_PER_S * value.median_s, "a record's FLOP are invalid")
    for error in (value.max_abs_error, value.max_rel_error):
        _require(0 <= error < math.inf, "a record's error is invalid")
    _require(_EARLIEST_S <= value.verified_at <= latest, "a record's date is invalid")
    if value.evidence is not None:
        _require_plain(value.evidence, "a record's evidence")
        _require_evidence(value.evidence)
    if value.origin is not None:
        _require_plain(value.origin, "a record's origin")
        _require(all(isinstance(value.origin.get(key), str) for key in ("store", "source", "by")), "a record's origin")
        _require(0 <= value.origin.get("at", 0.0) <= latest, "a record's origin has an invalid date")


def _require_evidence(evidence: Mapping[str, Any]) -> None:
    """Check the parts that reports read (`farm.selection.decision`)."""
    boards, rivals = evidence.get("boards", {}), evidence.get("rivals", [])
    fine = (
        isinstance(boards, dict)
        and all(isinstance(each, dict) and _is_number(each.get("median_s")) for each in boards.values())
        and isinstance(rivals, list)
        and all(isinstance(each, dict) and _is_number(each.get("ratio")) for each in rivals)
        and all(each.get(end) is None or _is_number(each.get(end)) for each in rivals for end in ("low", "high"))
        and all(isinstance(evidence.get(key, []), list) for key in ("settled", "contradictions", "failed"))
        and isinstance(evidence.get("decided", ""), str)
    )
    _require(fine, "a record's evidence is invalid")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _require_fields(value: Record | Trial | Workload) -> None:
    for field in dataclasses.fields(value):
        given, kind = getattr(value, field.name), _KINDS.get(str(field.type))
        if kind is not None:
            wrong_bool = isinstance(given, bool) and kind is not bool
            _require(isinstance(given, kind) and not wrong_bool, f"{field.name} is a {type(given).__name__}")
        if isinstance(given, str) and field.name != "module_json":
            most = _MOST_TRACE if field.name == "trace_json" else _MOST_TEXT
            _require(len(given) <= most, f"{field.name} is too long")
            # Two names never look alike.
            _require(given.isascii() and given.isprintable(), f"{field.name} has characters beyond printable ASCII")
        if field.name == "board_type":
            _require(_BOARD_TYPE.fullmatch(given) is not None, f"{given!r} is no board type's name")


def _require_plain(value: Any, what: str, depth: int = 0) -> None:
    """Raise ValueError for JSON that is nested too deep, too large, or has a number that is not finite."""
    _require(depth <= _MOST_NESTED, f"{what} is nested too deep")
    if isinstance(value, dict | list | tuple):
        _require(len(value) <= _MOST_ITEMS, f"{what} is too large")
        for each in [*value, *value.values()] if isinstance(value, dict) else value:
            _require_plain(each, what, depth + 1)
    elif isinstance(value, str):
        _require(len(value) <= _MOST_TEXT, f"{what} has a text that is too long")
    elif isinstance(value, float):
        _require(math.isfinite(value), f"{what} has a number that is not finite")
    elif isinstance(value, int):
        _require(abs(value) < 2**63, f"{what} has a number that is too large")


def _require(fine: bool, problem: str) -> None:
    if not fine:
        raise ValueError(problem)


WORKLOADS, TUNING_RECORDS, OURS = "database_workload.json", "database_tuning_record.json", "farm_records.json"


def write_folder(bundle: RecordBundle, folder: Path) -> int:
    """Write a bundle into a new folder atomically; return the number of records in MetaSchedule's files.

    Loads TVM's compiler. Raises UsageError where the folder exists or cannot be made, the records are of several board
    types or points, or a workload does not match its hash; InternalError where a trace does not fit its workload.
    """
    places = sorted({(each.board_type, each.operating_point, each.simulated) for each in bundle.records})
    if len(places) > 1:
        named = "; ".join(f"{kind} at {point}{' (simulated)' if model else ''}" for kind, point, model in places)
        raise UsageError(
            f"these records are of several board types or operating points: {named}",
            "MetaSchedule's files hold one: choose with --board-type, --operating-point and --simulated.",
        )
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UsageError(f"{folder} exists already", "Name a new folder.")
    if not folder.absolute().parent.is_dir():
        raise UsageError(f"there is no folder {folder.absolute().parent}")
    require_sound(bundle, "the store")
    with new_folder(folder) as part:
        written = _write_database(bundle, part)
        (part / OURS).write_text(json.dumps(to_document(bundle), indent=1, allow_nan=False))
    return written


def write_file(bundle: RecordBundle, path: Path) -> int:
    """Write a bundle of any board types as compressed JSON, atomically; return the number of records.

    Raises UsageError where the file exists or cannot be written.
    """
    if path.exists():
        raise UsageError(f"{path} exists already", "Name a new file.")
    require_sound(bundle, "the store")
    data = gzip.compress(json.dumps(to_document(bundle), allow_nan=False).encode(), mtime=0)
    try:
        with new_file(path) as partial:
            partial.write_bytes(data)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
    return len(bundle.records)


def read_file(path: Path, *, is_ours: bool = False) -> RecordBundle:
    """Read what `write_file` wrote, or a folder's `farm_records.json`. Raises UsageError."""
    with blamed(path), path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        data = (gzip.GzipFile(fileobj=file) if packed else file).read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise ValueError("it is too large")
        with contextlib.suppress(ValueError, RecursionError):
            entry = json.loads(data.partition(b"\n")[0])
            if isinstance(entry, dict) and ({"input", "config"} <= entry.keys() or {"i", "r"} <= entry.keys()):
                raise LookupError("it is a log of AutoTVM or AutoScheduler, which this TVM no longer has; tune again")
            if isinstance(entry, list):
                raise TypeError("it is one of MetaSchedule's two files; give their folder to `farm record import`")
        bundle = parse(json.loads(data.decode(), object_pairs_hook=_to_object))
    require_sound(bundle, str(path), is_ours=is_ours)
    return bundle


def _to_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"an object has a key twice: {', '.join(key for key, _ in pairs)[:100]}")
    return found


def to_document(bundle: RecordBundle) -> dict[str, Any]:
    """Return a bundle as a JSON document."""
    return {
        "format": FORMAT,
        "store": bundle.store,
        "models": {str(number): model for number, model in bundle.models.items()},
        "workloads": [each.to_row() for each in bundle.workloads],
        "records": [dataclasses.asdict(each) for each in bundle.records],
        "trials": [
            {field.name: getattr(trial, field.name) for field in dataclasses.fields(Trial)}
            | {"outcome": trial.outcome.to_dict(), "recorded_at": at}
            for trial, at in bundle.trials
        ],
    }


def read_folder(folder: Path) -> RecordBundle | None:
    """Read the bundle in a folder; None where it has only MetaSchedule's files. Raises UsageError."""
    if folder.is_file() or (folder / OURS).is_file():
        return read_file(folder if folder.is_file() else folder / OURS)
    if missing := [name for name in (WORKLOADS, TUNING_RECORDS) if not (folder / name).is_file()]:
        lacks = f"{folder} holds no records: it lacks {' and '.join(missing)}"
        raise UsageError(
            lacks if folder.is_dir() else f"there is no {folder}",
            f"Give a folder with {WORKLOADS} and {TUNING_RECORDS}, or another farm.db.",
        )
    return None


def parse(document: Any) -> RecordBundle:
    """Read the bundle of a document. Raises ValueError, LookupError, TypeError or ProtocolError for an invalid one."""
    if document["format"] != FORMAT:
        raise ValueError(f"its format is {document['format']!r}, and this version reads {FORMAT!r}")
    workloads = tuple(map(Workload.from_row, document["workloads"]))
    records = tuple(Record(**each) for each in document["records"])
    trials = tuple(_to_trial(dict(each)) for each in document["trials"])
    models = {int(key): str(name) for key, name in document["models"].items()}
    return RecordBundle(document["store"], records, trials, workloads, models)


def read_database(
    folder: Path, board_type: str, point: str, *, simulated: bool, pipeline: str
) -> tuple[list[Workload], list[Trial]]:
    """Read MetaSchedule's two files as workloads and trials without a campaign, in a confined process.

    This farm has not verified them, so they become trials that warm-start a search, not records. Raises UsageError.
    """
    given = {"pipeline": pipeline}
    for name, key in ((WORKLOADS, "workloads"), (TUNING_RECORDS, "tuning_records")):
        with blamed(folder / name):
            if (folder / name).stat().st_size > _MOST_BYTES:
                raise ValueError("it is too large")
            given[key] = (folder / name).read_text(encoding="utf-8")
    what = f"{folder} holds no records that can be read"
    answer = confined.call(f"{__package__}.database:read_files", json.dumps(given).encode(), what, _LIMITS)
    with blamed(folder / TUNING_RECORDS):
        document = json.loads(answer)
        workloads = [Workload.from_row(each) for each in document["workloads"]]
        for each in workloads:
            require_workload(each)
        trials = []
        for each in document["trials"]:
            outcome = Outcome(Status.OK, latency_s=tuple(map(float, each["samples"])), simulated=simulated)
            trial = Trial(
                *(0, each["workload"], each["candidate"], point, 1, outcome, each["trace_json"]), board_type=board_type
            )
            require_trial(trial)
            trials.append(trial)
    return workloads, trials


def require_sound(bundle: RecordBundle, source: str, *, is_ours: bool = True) -> None:
    """Raise UsageError where a bundle has invalid values, workloads that do not match their hash, or harmful traces.

    Of another farm also where a trace makes another function than its candidate's hash names. Records of a mismatched
    workload would be kept as those of another. `source` names the bundle's origin.
    """
    with blamed(source):
        require_bundle(bundle)
    measured: list[Record | Trial] = [*bundle.records, *(trial for trial, _ in bundle.trials)]
    for each in measured:
        try:
            traces.require_objects(json.loads(each.trace_json))
        except (ValueError, RecursionError) as error:
            raise UsageError(
                f"{source}: the trace of candidate {each.candidate} of workload {each.workload} cannot be read: {error}"
            ) from error
    candidates = () if is_ours else ((each.workload, each.candidate, each.trace_json) for each in measured)
    if wrong := traces.find_mismatched(bundle.workloads, candidates):
        names = {each.hash: each.name for each in bundle.workloads}
        (first, reason), *more = wrong.items()
        others = f" (and {len(more)} more)" if more else ""
        raise UsageError(
            f"{source}: the workload {first} ({names[first]}) is invalid: {reason}{others}",
            "Nothing was imported. At the source, `farm store check` names the wrong rows.",
        )


def _write_database(bundle: RecordBundle, folder: Path) -> int:
    database = ms.database.JSONDatabase(
        path_workload=str(folder / WORKLOADS), path_tuning_record=str(folder / TUNING_RECORDS)
    )
    about = {each.hash: each for each in bundle.workloads}
    for record in bundle.records:
        workload = about[record.workload]
        entry, target = (
            database.commit_workload(tvm.ir.load_json(workload.module_json)),
            tvm_env.make_target(workload.target),
        )
        item = traces.restore(record.trace_json, entry, target)
        database.commit_tuning_record(traces.as_record(item, entry, target, record.median_s))
    path = folder / TUNING_RECORDS
    path.write_text(_FLAG.sub(r"\1true\2", path.read_text()))
    return len(database)


def _to_trial(value: dict[str, Any]) -> tuple[Trial, float]:
    at = value.pop("recorded_at")
    return Trial(**value | {"outcome": Outcome.from_dict(value["outcome"])}), float(at)


@contextlib.contextmanager
def blamed(source: Path | str) -> Iterator[None]:
    """Raise UsageError that names `source` where its data cannot be read."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError, ProtocolError, OSError) as error:
        text = (str(error).strip() or type(error).__name__).splitlines()[-1]
        raise UsageError(f"{source} holds no records that can be read: {text[:300]}") from error
    except InternalError as error:
        raise UsageError(f"{source} holds records that fit no function: {error.message[:300]}") from error
