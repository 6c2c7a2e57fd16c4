"""`FarmDatabase`: MetaSchedule's database on the farm's store, so that scripts share results.

TVM's own in-memory database answers queries; the store is read when a workload is first seen and written on each
result. Verified records are separate: see `farm record`.

`read_files` reads MetaSchedule's two files, possibly malicious, as workloads and trials; `exchange` confines it.
"""

from __future__ import annotations

import atexit
import base64
import json
import logging
import os
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from farm import settings as farm_settings
from farm.crew.choice import plan_pool, plan_target
from farm.errors import InternalError, UsageError
from farm.inventory.board_types import require_board_type
from farm.metaschedule.runner import recent
from farm.metaschedule.tvm_objects import as_tvm_object, load_for_script, to_plain_target
from farm.processes.machine import name_user, process_identity
from farm.search import traces, workloads
from farm.search.tvm_env import host_target, make_target
from farm.store import Store
from farm.store.campaign_rows import KnownCandidate
from farm.values import DEFAULT_POINT, Trial, Workload

# The pipeline of scripts' workloads: what the script did to its model is unknown.
SCRIPT_PIPELINE = "script"
# Callers need the best few; replaying a trace takes some 10 ms.
MAX_RECALLED = 128
# MetaSchedule commits 1e10 s for a candidate without a time.
_NO_TIME_S = 1e9

# The attribute that `relax.transform.AnnotateTIROpPattern` writes.
_NOTE = "op_pattern"

_log = logging.getLogger(__name__)

load_for_script()
import tvm  # noqa: E402
import tvm.s_tir.meta_schedule as ms  # noqa: E402
from tvm.s_tir.analysis import estimate_tir_flops  # noqa: E402

# MetaSchedule writes a module's length before its text, and its reader trusts it.
_LENGTH_BYTES = 8


@as_tvm_object
class FarmDatabase(ms.database.PyDatabase):
    """Tuning records of one board type at one operating point; pass it to `tune_*` and `compile_*` as `database=`.

    `url` is a path, `sqlite:///…` or `postgresql://…` (default: the farm's store). `board_type` is by default that of
    the script's `FarmRunner`. Only results of a `FarmRunner` are written, since the board of others is unknown.
    `pipeline` names what was done to the model: `graph/2` finds results of `farm tune` where modules are equal.
    """

    def __init__(
        self,
        url: str | Path | None = None,
        *,
        board_type: str | None = None,
        point: str = DEFAULT_POINT,
        pipeline: str = SCRIPT_PIPELINE,
    ) -> None:
        """Open the store. Raises UsageError for an invalid URL or board type, UnavailableError."""
        super().__init__()
        self._pid = os.getpid()
        self._location = find_store(url)
        if board_type is not None:
            require_board_type(board_type)
        self._board_type, self._point, self._pipeline = board_type, point, pipeline
        self._store = Store(self._location)
        self._memory = ms.database.MemoryDatabase()
        self._met: set[str] = set()
        # Campaigns that hold this script's results, by target as JSON.
        self._campaigns: dict[str, int] = {}
        self._targets: list[dict[str, Any]] | None = None
        self._foreign = 0
        atexit.register(self.close)

    @property
    def target(self) -> Any:
        """The target of the board type, as for `farm tune`: of several in the store, that of the boards present.

        Raises UsageError, UnavailableError.
        """
        if self._targets is None:
            self._targets = self._fetch_targets()
        if not self._targets:
            raise UsageError(f"nothing was tuned for {self._require_type()} and none of its boards is registered")
        return make_target(self._targets[-1])

    def has_workload(self, mod: Any) -> bool:
        """Say whether the store or this script has records of a workload."""
        bare = _without_notes(mod)
        if not self._memory.has_workload(bare) and any(self._fetch_known(key) for key, _ in self._plan_keys(mod)):
            self.commit_workload(mod)
        return bool(self._memory.has_workload(bare))

    def commit_workload(self, mod: Any) -> Any:
        """Return MetaSchedule's handle of a workload and load its records. Raises UsageError, UnavailableError."""
        entry = self._memory.commit_workload(_without_notes(mod))
        for key, config in self._plan_keys(mod):
            if key not in self._met:
                self._met.add(key)
                self._recall(key, config, entry)
        return entry

    def commit_tuning_record(self, record: Any) -> None:
        """Keep a result, and store it where a `FarmRunner` measured it; failed candidates are not stored."""
        self._memory.commit_tuning_record(record)
        samples = [float(sample) for sample in record.run_secs or ()]
        if not samples or max(samples) >= _NO_TIME_S:
            return
        measured = recent.find(samples)
        if measured is None:
            self._foreign += 1
            if self._foreign == 1:
                _log.warning(
                    "results that no FarmRunner measured are kept for this script only, not in %s", self._location
                )
            return
        if measured.board_type != self._require_type():
            raise UsageError(
                f"this database is for {self._require_type()}, but a {measured.board_type} measured the results",
                "Make a FarmDatabase for each type.",
            )
        config = to_plain_target(record.target)
        item = record.as_measure_candidate()
        key = workloads.workload_hash(record.workload.mod, config, self._pipeline)
        campaign = self._require_campaign(config)
        self._store.workloads.save(campaign, [describe(record.workload.mod, key, config, self._pipeline)])
        self._store.trials.add(
            Trial(
                campaign=campaign,
                workload=key,
                candidate=workloads.hash_structure(item.sch.mod),
                operating_point=self._point,
                attempt=1,
                outcome=measured.outcome,
                trace_json=traces.dump(item, record.workload, record.target),
                held_s=measured.board_s,
                board_type=measured.board_type,
            )
        )

    def get_top_k(self, workload: Any, top_k: int) -> list[Any]:
        """Return the fastest records of a workload, the best first."""
        return list(self._memory.get_top_k(workload, top_k))

    def get_all_tuning_records(self) -> list[Any]:
        """Return the records of all workloads of this script."""
        return list(self._memory.get_all_tuning_records())

    def __len__(self) -> int:
        """Return their number."""
        return len(self._memory)

    def close(self) -> None:
        """Record how the script ended and close the store. Safe to call twice."""
        if os.getpid() != self._pid:  # a fork of the script ends, not the script
            return
        atexit.unregister(self.close)
        campaigns, self._campaigns = self._campaigns, {}
        for campaign in campaigns.values():
            self._store.campaigns.finish(campaign, _how_we_end())
        self._store.close()

    def _require_type(self) -> str:
        found = self._board_type or recent.board_type
        if not found:
            raise UsageError(
                "a FarmDatabase without a FarmRunner needs a board type", "Pass FarmDatabase(board_type=…)."
            )
        return found

    def _plan_keys(self, mod: Any) -> list[tuple[str, dict[str, Any]]]:
        """List the keys of a workload in the store with their targets, since MetaSchedule names no target."""
        if self._targets is None:
            self._targets = self._fetch_targets()
        # Also with the fusion's notes, which pipelines of `farm tune` that end after the fusion keep.
        forms = [mod, *([bare] if (bare := _without_notes(mod)) is not mod else [])]
        return [
            (workloads.workload_hash(form, config, self._pipeline), config)
            for form in forms
            for config in self._targets
        ]

    def _fetch_known(self, key: str) -> list[KnownCandidate]:
        return self._store.trials.fetch_known_candidates(key, self._require_type(), self._point, self._is_simulated())

    def _fetch_targets(self) -> list[dict[str, Any]]:
        """Return the board type's own target and those that scripts tuned for."""
        board_type = self._require_type()
        found = [
            dict(target)
            for campaign in self._store.campaigns.fetch_searches()
            if campaign.board_type == board_type and (target := (campaign.settings or {}).get("target"))
        ]
        rows = self._store.boards.fetch()
        known = next((row for row in rows if row.board_type == board_type and row.description), None)
        kind = require_board_type(board_type)
        if known is not None and kind.target is not None:
            plan = plan_target(kind, known.description, 0)
            found.append(host_target(plan.cores) if plan.config is None else dict(plan.config))
        return list({json.dumps(config, sort_keys=True): config for config in found}.values())

    def _is_simulated(self) -> bool:
        """Say whether boards of the type are simulated; their records never mix with real ones."""
        rows = self._store.boards.fetch()
        if not any(row.board_type == self._require_type() for row in rows):
            return False
        [first, *_] = plan_pool(rows, self._require_type(), None)
        return bool(next(row.simulated for row in rows if row.name == first))

    def _recall(self, key: str, config: Mapping[str, Any], entry: Any) -> None:
        """Load the best stored candidates of a key into memory."""
        good = [(each.median_s, each) for each in self._fetch_known(key) if each.median_s is not None]
        target = make_target(config)
        for median_s, known in sorted(good)[:MAX_RECALLED]:
            try:
                item = traces.restore(known.trace_json, entry, target)
            except InternalError as error:  # an old record that TVM refuses must not stop a script
                _log.warning("candidate %s is left out: %s", known.candidate, error)
                continue
            self._memory.commit_tuning_record(traces.as_record(item, entry, target, median_s))

    def _require_campaign(self, config: Mapping[str, Any]) -> int:
        key = json.dumps(config, sort_keys=True)
        if key not in self._campaigns:
            script = Path(sys.argv[0]).name or "python"
            about = {"target": dict(config), "process": process_identity(), "by": name_user()}
            self._campaigns[key] = self._store.campaigns.start("script", script, "", self._require_type(), 0, about)
        return self._campaigns[key]


def find_store(url: str | Path | None) -> farm_settings.StoreLocation:
    """Return the store of a database URL or path. Raises UsageError."""
    return farm_settings.load().store_location if url is None else farm_settings.parse_store(str(url))


def _without_notes(mod: Any) -> Any:
    """Remove the fusion's note on the kind of operator, which does not affect code.

    `compile_relax` fuses a tuned module again (seen in TVM 0.27). All functions then have the note, and TVM's own
    databases no longer find them.
    """
    notes = [name for name, function in mod.functions_items() if _NOTE in (function.attrs or {})]
    if not notes:
        return mod
    return tvm.IRModule(
        {name: function.without_attr(_NOTE) for name, function in mod.functions_items()}, attrs=mod.attrs
    )


def describe(mod: Any, key: str, config: Mapping[str, Any], pipeline: str) -> Workload:
    """Return a script's function as a workload."""
    arguments = workloads.list_arguments(mod)
    return Workload(
        hash=key,
        name=workloads.readable_name(_name_function(mod), [shape for shape, _ in arguments], "OIHW"),
        flop=float(estimate_tir_flops(mod)),
        weight=1,
        arguments=arguments,
        module_json=workloads.canonical_json(mod),
        target=dict(config),
        pipeline=pipeline,
    )


def _name_function(mod: Any) -> str:
    """Name a function by its blocks, since a database gets no task name."""
    schedule = tvm.s_tir.Schedule(mod)
    try:
        blocks = schedule.get_child_blocks(schedule.get_sblock("root"))
    except (RuntimeError, ValueError):  # one without a root block
        return "main"
    called = dict.fromkeys(str(schedule.get(block).name_hint) for block in blocks)
    return "_".join(list(called)[:4]) or "main"


def _how_we_end() -> str:
    """Return the state of our campaigns at the script's end; Python keeps the error that ended it."""
    error = getattr(sys, "last_type", None)
    if error is None:
        return "finished"
    return "interrupted" if issubclass(error, KeyboardInterrupt) else "failed"


_WORKLOADS, _TUNING_RECORDS = Path("database_workload.json"), Path("database_tuning_record.json")


def read_files(payload: bytes) -> bytes:
    """Return workloads as rows and trials without a campaign, as JSON; works in the current folder.

    Traces keep the decisions only, as the farm's own do. Loads TVM's compiler. Raises UsageError.
    """
    given = json.loads(payload)
    lines = given["workloads"].splitlines(), given["tuning_records"].splitlines()
    for number, line in enumerate(lines[0], 1):
        _require(_WORKLOADS, number, line, _check_workload)
    for number, line in enumerate(lines[1], 1):
        _require(_TUNING_RECORDS, number, line, traces.require_objects)
    _WORKLOADS.write_text(given["workloads"])
    _TUNING_RECORDS.write_text(given["tuning_records"])
    workloads, trials = _read(given["pipeline"])
    return json.dumps({"workloads": [each.to_row() for each in workloads], "trials": trials}, allow_nan=False).encode()


def _require(path: Path, number: int, line: str, check: Callable[[Any], None]) -> None:
    try:
        check(json.loads(line))
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise UsageError(f"{path} line {number}: {str(error)[:200]}") from error


def _check_workload(entry: Any) -> None:
    data = base64.b64decode(entry[1], validate=True)
    if int.from_bytes(data[:_LENGTH_BYTES], "little") != len(data) - _LENGTH_BYTES:
        raise ValueError("its module has another length than stated")
    traces.require_graph(data[_LENGTH_BYTES:].decode())


def _read(pipeline: str) -> tuple[list[Workload], list[dict[str, Any]]]:
    found: dict[str, Workload] = {}
    trials: dict[tuple[str, str], dict[str, Any]] = {}
    known = ms.database.JSONDatabase(path_workload=str(_WORKLOADS), path_tuning_record=str(_TUNING_RECORDS))
    for record in known.get_all_tuning_records():
        samples = [float(each) for each in record.run_secs or ()]
        if not samples or not all(0 < each < 1e9 for each in samples):
            continue
        module, config = record.workload.mod, to_plain_target(record.target)
        key = workloads.workload_hash(module, config, pipeline)
        if key not in found:
            found[key] = describe(module, key, config, pipeline)
        target = make_target(config)
        text = traces.dump(record.as_measure_candidate(), record.workload, target)
        # Hash what the farm restores from this text, where post-processors run again.
        candidate = workloads.hash_structure(traces.restore(text, record.workload, target).sch.mod)
        best = trials.get((key, candidate))
        if best is None or statistics.median(samples) < statistics.median(best["samples"]):
            trials[key, candidate] = {"workload": key, "candidate": candidate, "samples": samples, "trace_json": text}
    return list(found.values()), list(trials.values())
