"""TVM's JSON from elsewhere: what of it is not handed to TVM."""

from __future__ import annotations

import json
from typing import Any

import pytest

from farm.search import traces

NOTHING = {"type": "None"}


def graph(*nodes: Any, root: Any = None) -> str:
    return json.dumps({"root_index": len(nodes) - 1 if root is None else root, "nodes": nodes})


def array(*references: int) -> dict[str, Any]:
    return {"type": "ffi.Array", "data": list(references)}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (graph(NOTHING, array(0, 1)), "node 1 contains node 1"),
        (graph(NOTHING, array(0, 2), array(1)), "node 1 contains node 2"),
        (graph(NOTHING, {"type": "tirx.For", "data": {"body": 7}}), "node 1 contains node 7"),
        (graph(NOTHING, array(-1)), "node 1 contains node -1"),
        (graph(NOTHING, *(array(number) for number in range(2500))), "more than 2,000 levels deep"),
        (graph(NOTHING, root=3), "no TVM object"),
        (graph({"data": []}), "node 0 has no type"),
        ("[]", "no TVM object"),
        ("{", "Expecting"),
        ('{"root":0,"nodes":[{"type_key":""}],"attrs":{"tvm_version":"0.13.0"}}', "TVM 0.13.0 wrote it"),
        (graph({"type": "tir.Var", "data": {}}), "TVM of old wrote it"),
    ],
)
def test_what_would_crash_tvm_is_refused(text: str, problem: str) -> None:
    """Circles, references to nothing, functions so deep that reading them ends the process, and objects of old."""
    with pytest.raises(ValueError, match=problem):
        traces.require_graph(text)


def test_an_ordinary_graph_is_fine() -> None:
    """Numbers of some fields are no references, and leaves hold what they like."""
    buffer = {"type": "tirx.BufferType", "data": {"shape": 0, "data_alignment": 64, "offset_factor": 9}}
    traces.require_graph(graph({"type": "int", "data": 99}, buffer, array(0, 1, 1)))


def test_objects_within_a_trace_are_looked_at() -> None:
    """An index map is JSON within JSON; other texts are texts."""
    traces.require_objects([["Split", ["l1", "None"], [0.5, None, True], {"x": "block {0}"}]])
    with pytest.raises(ValueError, match="node 1 contains node 1"):
        traces.require_objects([["TransformLayout", [graph(NOTHING, array(1))]]])
    nested: Any = "x"
    for _ in range(200):
        nested = [nested]
    with pytest.raises(ValueError, match="too deep"):
        traces.require_objects(nested)
