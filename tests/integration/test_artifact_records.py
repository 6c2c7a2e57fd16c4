"""Records applied where they fit, though they were made on another board type with cores of the same kind."""

from __future__ import annotations

import dataclasses
from typing import Any

from farm.artifacts import make
from farm.artifacts.compile import Compiled, compile_model
from farm.artifacts.given_model import open_model
from farm.inventory.board_types import require_board_type
from farm.search import traces, tvm_env
from farm.search.workloads import prepare_model
from farm.selection.decision import RecordFit
from farm.values import Record

tvm = tvm_env.load()

# Six cores and eight of one kind: their workloads have different names, and one schedule serves both.
NX, AGX = "jetson-xavier-nx", "jetson-agx-xavier"


def make_record(board_type: str, point: str) -> Record:
    """A record of the heaviest workload of `tiny-cnn` on a board type: the schedule by prediction, as if measured."""
    import tvm.s_tir.meta_schedule as ms

    kind, opened = require_board_type(board_type), open_model("tiny-cnn")
    shapes = {spec.name: spec.static_shape for spec in opened.inputs}
    prepared = prepare_model(opened.source.load(), shapes, kind.target.to_tvm(), kind.pipeline)
    workload = prepared.workloads[0]
    entry = ms.database.MemoryDatabase().commit_workload(tvm.ir.load_json(workload.module_json))
    found = traces.find_default(workload, entry, prepared.target)
    assert found is not None
    return Record(
        workload=workload.hash,
        workload_name=workload.name,
        board_type=board_type,
        operating_point=point,
        pipeline=workload.pipeline,
        candidate="c",
        median_s=1e-5,
        flop=workload.flop,
        max_abs_error=0.0,
        max_rel_error=0.0,
        simulated=False,
        trace_json=traces.dump(found.candidate, entry, prepared.target),
    )


def compile_for(board_type: str, records: list[Record]) -> Compiled:
    order = make.CompileOrder(open_model("tiny-cnn"), require_board_type(board_type))
    shapes = {spec.name: spec.static_shape for spec in order.opened.inputs}
    target: Any = make.to_config(make.find_target(order.board_type, False))
    kind = order.board_type
    candidates = make.Candidates(tuple(records), tuple(make.list_relatives(kind, False)))
    book = make.make_book(kind, order.operating_point, candidates)
    return compile_model(order.opened.source.load(), shapes, target, kind.pipeline, book, kind.link_triple)


def test_a_record_of_the_same_cores_serves_another_board_type() -> None:
    """An AGX Xavier's imported record schedules a Xavier NX's workload, and the artifact says so; a Nano's does not."""
    theirs = dataclasses.replace(make_record(AGX, "mode=MAXN"), origin={"store": "s", "source": "f", "by": "b"})
    nano = dataclasses.replace(theirs, board_type="jetson-nano")
    compiled = compile_for(NX, [theirs, nano])
    assert compiled.applied == 1
    (served,) = [each for each in compiled.served if each.choice]
    assert (served.choice.fit, served.choice.record.board_type) == (RecordFit.OTHER_TYPE, AGX)
    assert served.workload.hash != theirs.workload
    described = make._describe_workload(served, 1.0).record
    assert described.imported
    assert compiled.by_rule == compiled.workloads - 1
    assert compiled.activations_bytes > 0
    assert compiled.outputs == (((1, 10), "float32"),)
