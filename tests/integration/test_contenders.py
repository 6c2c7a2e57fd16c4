"""The programs of a model's final, compiled for real: what differs from the prediction, and what mixes leave out."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import pytest
import tvm.runtime
from tvm.runtime.vm import VirtualMachine

from device_agent.protocol import RunDetails
from device_agent.worker import engines
from device_agent.worker.timing import load_module
from farm.artifacts import contenders, make
from farm.artifacts.compile import compile_prepared
from farm.artifacts.contenders import PREDICTED, RECORDED, ContenderOrder
from farm.artifacts.given_model import open_model
from farm.artifacts.timing import Timed
from farm.campaign.verify import final_rules
from farm.campaign.verify.final_rules import list_layer_rounds
from farm.inventory.board_types import require_board_type
from farm.models.inputs import make_inputs
from farm.search import tvm_env
from farm.search.workloads import Prepared, prepare_model
from farm.selection.decision import Records
from farm.sweep.run.programs import SweepRecipe
from farm.types.states import ModelDecision
from farm.values import DEFAULT_POINT, Record, name_workloads
from tests.integration.one_search import OneSearch

KIND = require_board_type("local")


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    opened = open_model("mlp")
    shapes = {spec.name: spec.static_shape for spec in opened.inputs}
    return prepare_model(opened.source.load(), shapes, config(), KIND.pipeline)


def config() -> dict[str, Any]:
    return dict(tvm_env.host_target(len(os.sched_getaffinity(0))))


def make_records(prepared: Prepared, taken: Mapping[int, int]) -> tuple[Record, ...]:
    """Records of the workloads numbered so, each of that number of what a search proposes: 0 is what is predicted."""
    found = []
    for number, proposed in taken.items():
        workload = prepared.workloads[number]
        candidate = OneSearch(workload).propose(proposed + 1)[proposed]
        found.append(
            Record(
                workload.hash,
                workload.name,
                "local",
                DEFAULT_POINT,
                KIND.pipeline,
                candidate.hash,
                1e-5,
                workload.flop,
                0.0,
                0.0,
                False,
                candidate.trace_json,
            )
        )
    return tuple(found)


def test_contenders_differ_where_their_records_are_other_code(prepared: Prepared, tmp_path: pathlib.Path) -> None:
    """A record that is what was predicted anyway takes no part; of the others each mix leaves one out."""
    records = make_records(prepared, {0: 5, 1: 5, 2: 0})
    order = ContenderOrder(open_model("mlp").about, KIND, DEFAULT_POINT, False, config(), make.Candidates(records))
    built = contenders.build(order, contenders.RIVALS, final_rules.plan_mixes)
    assert [part.differs for part in built.parts] == [True, True, False]
    assert [part.candidate for part in built.parts] == [record.candidate for record in records]
    assert sorted(built.mixes.values(), key=str) == sorted(
        ({record.workload: record.candidate} for record in records[:2]), key=str
    )
    names = {RECORDED, PREDICTED, *built.mixes, *contenders.RIVALS}
    assert set(built.contenders) == names
    assert len({each.program for each in built.contenders.values()}) == len(names)
    # What is watched in the whole model is found by its name.
    path = tmp_path / "model.so"
    path.write_bytes(built.contenders[RECORDED].program)
    machine = VirtualMachine(load_module(path), tvm.runtime.cpu())
    arrays = [tvm.runtime.tensor(array) for array in make_inputs(built.inputs, 0).values()]
    layers = engines.to_layers(engines.profile(machine, lambda: machine["main"](*arrays)), 1.0, 1.0)
    timed = Timed(details={key: [RunDetails(1.0, None, layers)] for key in (RECORDED, PREDICTED)})
    assert list_layer_rounds(timed).keys() == {part.function for part in built.parts}
    both = {workload: candidate for refused in built.mixes.values() for workload, candidate in refused.items()}
    joined = contenders.build_mixes(order, {"joined": both})["joined"]
    assert joined.program == built.contenders[PREDICTED].program


def test_compiling_leaves_what_was_prepared_as_it_was(prepared: Prepared) -> None:
    """So one preparation serves all contenders of a model."""
    first, second = (compile_prepared(prepared, config(), (), None).library for _ in range(2))
    assert first == second


def test_a_sweep_leaves_out_the_records_that_lost_in_the_model(prepared: Prepared) -> None:
    """What is swept is what is compiled: here all records lost, so it is what is predicted."""
    first, *others = make_records(prepared, {0: 5, 1: 5})
    records = [dataclasses.replace(first, origin={"store": "s", "source": "f", "by": "b"}), *others]
    source, refused = open_model("mlp").source, {record.workload: record.candidate for record in records}
    name = name_workloads(workload.hash for workload in prepared.workloads)
    decision = ModelDecision(source.sha256, name, "local", DEFAULT_POINT, False, refused)
    found = make.Candidates(tuple(records))
    recipe = SweepRecipe(source, (), KIND, make.find_target(KIND, False), False, found)
    decided = dataclasses.replace(recipe, candidates=dataclasses.replace(found, decisions=(decision,)))
    [recorded], [lost] = (each.compile_all(("tuned",), (1,)) for each in (recipe, decided))
    assert "2 of 3 functions from records" in recorded.about
    assert "0 of 3 functions from records" in lost.about
    assert recorded.note == "1 of 2 records used are imported: no board of this farm has verified them"
    assert not lost.note
    assert recorded.library != lost.library


def test_what_was_left_out_is_not_missing(prepared: Prepared) -> None:
    """Who asks for nothing but records is not told to tune what has been tuned."""
    records = make_records(prepared, {0: 5})
    book = Records(records, refused={record.workload: record.candidate for record in records})
    compiled = compile_prepared(prepared, config(), book, None)
    assert compiled.applied == 0
    assert make.find_missing(compiled.served) == [workload.name for workload in prepared.workloads[1:]]
