"""What quickstart does after tuning: compile from the records there are, and doubt what does not add up."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import pytest

from farm.artifacts.compile import UNTUNED_PIPELINE, compile_model
from farm.inventory.board_types import require_board_type
from farm.models.inputs import read_inputs
from farm.models.source import ModelSource, resolve_model
from farm.quickstart import document
from farm.quickstart import run as quickstart
from farm.search import tvm_env, workloads
from farm.search.graph import importer, pipelines
from farm.values import DEFAULT_POINT, Record, Workload
from tests.integration.one_search import OneSearch

PIPELINE = require_board_type("local").pipeline


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    """The target of this machine."""
    return tvm_env.host_target(len(os.sched_getaffinity(0)))


@pytest.fixture(scope="module")
def source() -> ModelSource:
    """A model of some dense layers."""
    return resolve_model("mlp")


@pytest.fixture(scope="module")
def found(source: ModelSource, config: dict[str, Any]) -> list[Workload]:
    """Its workloads."""
    target = tvm_env.make_target(config)
    module = importer.import_onnx(source.load(), shapes(source))
    module, used = pipelines.prepare(module, target, pipelines.require_pipeline(PIPELINE))
    return workloads.extract(module, target, config, used.name)


@pytest.fixture(scope="module")
def records(found: list[Workload], config: dict[str, Any]) -> list[Record]:
    """A record for each workload, from the first candidate that the search proposes; 1 ms each."""
    return [record(workload, OneSearch(workload).propose(1)[0].trace_json) for workload in found]


def record(workload: Workload, trace_json: str) -> Record:
    """A record of a workload."""
    return Record(
        workload.hash, workload.name, "local", DEFAULT_POINT, PIPELINE, "c" * 16, 0.001, workload.flop, 0.0, 0.0, False,
        trace_json,
    )  # fmt: skip


def shapes(source: ModelSource) -> dict[str, tuple[int, ...]]:
    """The shapes of the model's inputs."""
    return {spec.name: spec.static_shape for spec in read_inputs(source.load())}


def compile_with(source: ModelSource, config: dict[str, Any], records: Sequence[Record]) -> Any:
    """Compile the model from these records."""
    return compile_model(source.load(), shapes(source), config, PIPELINE, records, None)


def test_every_record_is_applied(source: ModelSource, config: dict[str, Any], records: list[Record]) -> None:
    """With a record for each workload every function comes from one, by TVM's own marks in the compiled module."""
    compiled = compile_with(source, config, records)
    assert (compiled.applied, compiled.workloads, compiled.pipeline) == (len(records), len(records), PIPELINE)
    assert compiled.library.startswith(b"\x7fELF")


def test_a_record_that_does_not_fit_is_left_out(
    source: ModelSource, config: dict[str, Any], records: list[Record]
) -> None:
    """A record whose trace is of another function, or no trace, costs its own function only, and is counted."""
    broken = dataclasses.replace(records[0], trace_json='[[], [1.0], {"kind": "llvm"}, []]')
    compiled = compile_with(source, config, [broken, *records[1:]])
    assert compiled.applied == len(records) - 1


def test_without_records_nothing_is_applied(source: ModelSource, config: dict[str, Any]) -> None:
    """The untuned model is compiled from no record."""
    compiled = compile_model(source.load(), shapes(source), config, UNTUNED_PIPELINE, [], None)
    assert compiled.applied == 0
    assert compiled.pipeline == UNTUNED_PIPELINE


def test_what_is_too_slow_to_be_swept_is_named() -> None:
    """The compiled model is swept where untuned code takes too long here; the commands for the rest can be typed."""
    final: dict[str, Any] = {
        "taken": "predicted",
        "variants": {"untuned": {"median": 0.7}, "predicted": {"median": 0.1}},
    }
    assert quickstart.find_slow(final) == {"untuned": "untuned code takes 0.7 s a run on this machine"}
    del final["variants"]["untuned"]
    assert quickstart.find_slow(final) == {"untuned": "untuned code does not run"}
    final["variants"] = {"untuned": {"median": 0.5}, "predicted": {"median": 0.1}}
    assert quickstart.find_slow(final) == {}
    added, swept = quickstart.list_commands(resolve_model("mlp"), ["x=1,64"])
    assert added == "farm board add quickstart-nano --virtual jetson-nano"
    assert swept.startswith("farm sweep run mlp --board quickstart-nano --variants untuned,compiled")
    assert swept.endswith("--shape x=1,64")


def test_where_schedules_are_from_is_said_of_what_is_compiled(
    source: ModelSource, config: dict[str, Any], records: list[Record]
) -> None:
    """A record that is the predicted code counts as predicted; of what is compiled by prediction none counts."""
    compiled = compile_with(source, config, records)
    final = {"taken": "recorded", "differing": 2, "left_out": ["a"]}
    assert document._say_sources(final, compiled).startswith(f"1 of {len(records)} functions scheduled by records")
    said = document._say_sources(final | {"taken": "predicted", "left_out": ["a", "b"]}, compiled)
    assert said == "every function scheduled as predicted"


def test_what_does_not_add_up_is_said(
    source: ModelSource, config: dict[str, Any], found: list[Workload], records: list[Record]
) -> None:
    """Notes tell of records that do not apply, of functions without one, and of a model slower than its parts."""
    compiled = compile_with(source, config, records)
    expected = sum(0.001 * workload.weight for workload in found)
    quick, slow = ({"median": factor * expected} for factor in (1.4, 1.6))

    assert document._doubts(quick, compiled, found, records) == []
    [note] = document._doubts(slow, compiled, found, records)
    assert "1.6 times as long" in note
    [note] = document._doubts(slow, dataclasses.replace(compiled, applied=len(records) - 1), found, records[:-1])
    assert f"1 of {len(records)} functions have no record" in note
    assert "prediction" in note
    notes = document._doubts(quick, dataclasses.replace(compiled, applied=0), found, records)
    assert notes == [f"{len(records)} of {len(records)} records could not be applied to the model"]
    assert document._doubts(quick, dataclasses.replace(compiled, applied=0), found, records, len(records)) == []
