"""`FarmDatabase`: MetaSchedule's database over the farm's store, so that what one script found serves the next.

Queries are answered from memory by TVM's own database; the store is read when a workload is first met, and written as
results come. The farm's verified records are another thing: see `farm record`.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
from collections.abc import Mapping
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
from farm.search.target import host_target, make_target
from farm.store import Store
from farm.values import DEFAULT_POINT, Trial

# Workloads of scripts went through whatever the script did to its model.
SCRIPT_PIPELINE = "script"
# Whoever asks wants the best few; replaying a trace takes some 10 ms.
MAX_RECALLED = 128
# What MetaSchedule commits for a candidate without a time is 1e10 s.
_NO_TIME_S = 1e9

# What `relax.transform.AnnotateTIROpPattern` writes into a function.
_NOTE = "op_pattern"

_log = logging.getLogger(__name__)

load_for_script()
import tvm  # noqa: E402
import tvm.s_tir.meta_schedule as ms  # noqa: E402
import tvm_ffi  # noqa: E402
from tvm.s_tir.analysis import estimate_tir_flops  # noqa: E402


@as_tvm_object
class FarmDatabase(ms.database.PyDatabase):
    """Tuning records of one board type at one operating point; give it to `tune_*` and `compile_*` as `database=`.

    `url` is a path, `sqlite:///…` or `postgresql://…` (default: the farm's store). `board_type` is by default that of
    the script's `FarmRunner`. Only what a `FarmRunner` measured is written: of anything else nobody could say which
    board it is from. `pipeline` says what was done to the model before: `graph/1` finds what `farm tune` measured,
    where a script's modules are like its own.
    """

    def __init__(
        self,
        url: str | Path | None = None,
        *,
        board_type: str | None = None,
        point: str = DEFAULT_POINT,
        pipeline: str = SCRIPT_PIPELINE,
    ) -> None:
        """Open the store. Raises UsageError for what is no store's URL or an unknown board type, UnavailableError."""
        super().__init__()
        self._pid = os.getpid()
        self._location = find_store(url)
        if board_type is not None:
            require_board_type(board_type)
        self._board_type, self._point, self._pipeline = board_type, point, pipeline
        self._store = Store(self._location)
        self._memory = ms.database.MemoryDatabase()
        self._met: set[str] = set()
        # By target, as JSON: the campaign that holds what this script measures for it.
        self._campaigns: dict[str, int] = {}
        self._targets: list[dict[str, Any]] | None = None
        self._strangers = 0
        atexit.register(self.close)

    @property
    def target(self) -> Any:
        """What code for the board type is compiled for, as `farm tune` does. Raises UsageError, UnavailableError.

        Of several that are in the store, that of the boards there are now.
        """
        if self._targets is None:
            self._targets = self._fetch_targets()
        if not self._targets:
            raise UsageError(f"nothing was tuned for {self._require_type()} and none of its boards is known")
        return make_target(self._targets[-1])

    def has_workload(self, mod: Any) -> bool:
        """Whether the store, or this script so far, has anything about a workload."""
        bare = _without_notes(mod)
        if not self._memory.has_workload(bare) and self._find_known(mod):
            self.commit_workload(mod)
        return bool(self._memory.has_workload(bare))

    def commit_workload(self, mod: Any) -> Any:
        """MetaSchedule's handle of a workload; brings in what is known of it. Raises UsageError, UnavailableError."""
        entry = self._memory.commit_workload(_without_notes(mod))
        for key, config in self._plan_keys(mod):
            if key not in self._met:
                self._met.add(key)
                self._recall(key, config, entry)
        return entry

    def commit_tuning_record(self, record: Any) -> None:
        """Keep a result; in the store as well where a `FarmRunner` measured it. A candidate without a time is not."""
        self._memory.commit_tuning_record(record)
        samples = [float(sample) for sample in record.run_secs or ()]
        if not samples or max(samples) >= _NO_TIME_S:
            return
        measured = recent.find(samples)
        if measured is None:
            self._strangers += 1
            if self._strangers == 1:
                _log.warning(
                    "results that no FarmRunner measured are kept for this script alone, not in %s", self._location
                )
            return
        if measured.board_type != self._require_type():
            raise UsageError(
                f"this database is for {self._require_type()}, but results come from a {measured.board_type}",
                "Make a FarmDatabase for each type.",
            )
        config = to_plain_target(record.target)
        item = record.as_measure_candidate()
        key = workloads.workload_hash(record.workload.mod, config, self._pipeline)
        campaign = self._require_campaign(config)
        self._store.save_workloads(campaign, [describe(record.workload.mod, key, config, self._pipeline)])
        self._store.add_trial(
            Trial(
                campaign=campaign,
                workload=key,
                candidate=hash_candidate(item.sch.mod),
                operating_point=self._point,
                attempt=1,
                outcome=measured.outcome,
                trace_json=traces.dump(item, record.workload, record.target),
                held_s=measured.board_s,
                board_type=measured.board_type,
            )
        )

    def get_top_k(self, workload: Any, top_k: int) -> list[Any]:
        """The fastest records of a workload, the best first."""
        return list(self._memory.get_top_k(workload, top_k))

    def get_all_tuning_records(self) -> list[Any]:
        """The records of all workloads that this script has met."""
        return list(self._memory.get_all_tuning_records())

    def __len__(self) -> int:
        """How many those are."""
        return len(self._memory)

    def close(self) -> None:
        """Note how the script ended and let go of the store. Safe to call twice."""
        if os.getpid() != self._pid:  # a forked copy of the script ends, not the script
            return
        atexit.unregister(self.close)
        campaigns, self._campaigns = self._campaigns, {}
        for campaign in campaigns.values():
            self._store.finish_campaign(campaign, _how_we_end())
        self._store.close()

    def _require_type(self) -> str:
        found = self._board_type or recent.board_type
        if not found:
            raise UsageError(
                "a FarmDatabase without a FarmRunner does not know whose records are meant",
                "Say FarmDatabase(board_type=…).",
            )
        return found

    def _plan_keys(self, mod: Any) -> list[tuple[str, dict[str, Any]]]:
        """The names under which the store may know a workload, with the target of each: MetaSchedule tells us none."""
        if self._targets is None:
            self._targets = self._fetch_targets()
        # With the fusion's notes too: `farm tune` keeps those of a pipeline that is done after the fusion.
        forms = [mod, *([bare] if (bare := _without_notes(mod)) is not mod else [])]
        return [
            (workloads.workload_hash(form, config, self._pipeline), config)
            for form in forms
            for config in self._targets
        ]

    def _find_known(self, mod: Any) -> bool:
        return any(self._fetch_known(key) for key, _ in self._plan_keys(mod))

    def _fetch_known(self, key: str) -> list[dict[str, Any]]:
        return self._store.fetch_known_candidates(key, self._require_type(), self._point, self._is_simulated())

    def _fetch_targets(self) -> list[dict[str, Any]]:
        """The board type's own target, and those that scripts have tuned for on it."""
        board_type = self._require_type()
        found = [
            dict(campaign["settings"]["target"])
            for campaign in self._store.fetch_campaigns()
            if campaign["board_type"] == board_type and (campaign["settings"] or {}).get("target")
        ]
        rows = self._store.fetch_boards()
        known = next((row for row in rows if row["board_type"] == board_type and row["description"]), None)
        kind = require_board_type(board_type)
        if known is not None and kind.target is not None:
            plan = plan_target(kind, known["description"], 0)
            found.append(host_target(plan.cores) if plan.config is None else dict(plan.config))
        return list({json.dumps(config, sort_keys=True): config for config in found}.values())

    def _is_simulated(self) -> bool:
        """Whether boards of the type are models: their records and those of real ones never mix."""
        rows = self._store.fetch_boards()
        if not any(row["board_type"] == self._require_type() for row in rows):
            return False
        [first, *_] = plan_pool(rows, self._require_type(), None)
        return bool(next(row["simulated"] for row in rows if row["name"] == first))

    def _recall(self, key: str, config: Mapping[str, Any], entry: Any) -> None:
        """Bring the best that the store knows under a name into memory."""
        good = [row for row in self._fetch_known(key) if row["median_s"] is not None]
        target = make_target(config)
        for row in sorted(good, key=lambda row: float(row["median_s"]))[:MAX_RECALLED]:
            try:
                item = traces.restore(row["trace_json"], entry, target)
            except InternalError as error:  # an old record that TVM takes no more must not stop a script
                _log.warning("candidate %s is left out: %s", row["candidate"], error)
                continue
            self._memory.commit_tuning_record(traces.as_record(item, entry, target, float(row["median_s"])))

    def _require_campaign(self, config: Mapping[str, Any]) -> int:
        key = json.dumps(config, sort_keys=True)
        if key not in self._campaigns:
            script = Path(sys.argv[0]).name or "python"
            about = {"target": dict(config), "process": process_identity(), "by": name_user()}
            self._campaigns[key] = self._store.start_campaign("script", script, "", self._require_type(), 0, about)
        return self._campaigns[key]


def find_store(url: str | Path | None) -> farm_settings.StoreLocation:
    """The store that a database URL or a path names. Raises UsageError."""
    return farm_settings.load().store_location if url is None else farm_settings.parse_store(str(url))


def _without_notes(mod: Any) -> Any:
    """The workload without the fusion's note on what kind of operator it is, which says nothing about its code.

    `compile_relax` fuses a module that was fused before tuning once more, and then finds none of its functions again
    (seen in TVM 0.27): all of them have the note by then, and are other functions to TVM's own databases.
    """
    notes = [name for name, function in mod.functions_items() if _NOTE in (function.attrs or {})]
    if not notes:
        return mod
    return tvm.IRModule(
        {name: function.without_attr(_NOTE) for name, function in mod.functions_items()}, attrs=mod.attrs
    )


def describe(mod: Any, key: str, config: Mapping[str, Any], pipeline: str) -> dict[str, Any]:
    """A workload as the store keeps it."""
    arguments = workloads.list_arguments(mod)
    workload = workloads.Workload(
        hash=key,
        name=workloads.readable_name(_name_function(mod), [shape for shape, _ in arguments], "OIHW"),
        flop=float(estimate_tir_flops(mod)),
        weight=1,
        arguments=arguments,
        module_json=workloads.canonical_json(mod),
        target=dict(config),
        pipeline=pipeline,
    )
    return workload.to_row()


def hash_candidate(module: Any) -> str:
    """A candidate's name: 16 hexadecimal digits over its scheduled function, as the farm's own search makes it."""
    return f"{int(tvm_ffi.structural_hash(module)) & (2**64 - 1):016x}"


def _name_function(mod: Any) -> str:
    """What the function does, from the names of its blocks: a database is not told what a task is called."""
    schedule = tvm.s_tir.Schedule(mod)
    try:
        blocks = schedule.get_child_blocks(schedule.get_sblock("root"))
    except (RuntimeError, ValueError):  # one without a root block
        return "main"
    called = dict.fromkeys(str(schedule.get(block).name_hint) for block in blocks)
    return "_".join(list(called)[:4]) or "main"


def _how_we_end() -> str:
    """The state of our campaigns when the script ends: Python keeps the error that it died of."""
    error = getattr(sys, "last_type", None)
    if error is None:
        return "finished"
    return "interrupted" if issubclass(error, KeyboardInterrupt) else "failed"
