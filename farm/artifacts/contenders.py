"""Build the programs of a model's end-to-end A/B test: from all records, from predictions, and from some records.

They are compiled in a child process; `farm.campaign.verify` times them and chooses.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from farm.artifacts import compile, make
from farm.artifacts.checking import find_tolerance_factor
from farm.artifacts.given_model import GivenModel, find_same_model
from farm.artifacts.manifest import ModelFacts
from farm.inventory.board_types import BoardType
from farm.models.inputs import InputSpec
from farm.search import workloads as search_workloads

# From records, from predictions, untuned TVM, and the same model in another engine.
RECORDED, PREDICTED, UNTUNED, ONNXRUNTIME = "recorded", "predicted", "untuned", "onnxruntime"
# Default alternatives of a comparison.
RIVALS = (UNTUNED, ONNXRUNTIME)
# Candidates to leave out by workload, by the name of a mix. A planner of mixes, from a model's parts and the time to
# compile one (s).
Mixes = Mapping[str, Mapping[str, str]]
Plan = Callable[[Sequence["RecordPart"], float], Mixes]
_Programs = dict[tuple[str, ...], Any]


@dataclasses.dataclass(frozen=True)
class ContenderOrder:
    """A model for boards of a type (with its graph pipeline) at an operating point; `config` is TVM's target."""

    model: ModelFacts
    board_type: BoardType
    point: str
    simulated: bool
    config: Mapping[str, Any]
    candidates: make.Candidates = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class RecordPart:
    """A function of the model; `candidate` is its record's, or None.

    `seconds` is the total of its calls per inference, by its record. `differs`: the prediction gives other code.
    `function` is TVM's name for it in the model.
    """

    workload: str
    name: str
    candidate: str | None
    seconds: float
    differs: bool
    function: str = ""


@dataclasses.dataclass(frozen=True)
class Contender:
    """A program and the tolerance factor of its outputs (`find_tolerance_factor`)."""

    program: bytes = dataclasses.field(repr=False)
    factor: float = 1.0


@dataclasses.dataclass(frozen=True)
class BuiltContenders:
    """Contenders by name, the model's parts, the records that each mix leaves out, and the time to compile one (s)."""

    contenders: Mapping[str, Contender]
    parts: tuple[RecordPart, ...]
    inputs: tuple[InputSpec, ...]
    mixes: Mixes
    seconds: float = 0.0


def build(order: ContenderOrder, rivals: Sequence[str], plan: Plan) -> BuiltContenders:
    """Build the recorded and predicted programs, the planned mixes, and the `rivals`. Loads TVM's compiler.

    Raises UsageError, PermanentError.
    """
    opened = _open_model(order)
    recorded = _compile(order, opened, {})
    predicted = _compile(order, opened, None)
    contenders = {RECORDED: _to_contender(opened, recorded), PREDICTED: _to_contender(opened, predicted)}
    codes = {each.workload.hash: each.code for each in predicted.served}
    parts = tuple(
        RecordPart(
            each.workload.hash,
            each.workload.name,
            each.choice.record.candidate if each.choice else None,
            each.workload.weight * (each.latency_s or 0.0),
            each.choice is not None and each.code != codes.get(each.workload.hash),
            each.workload.function,
        )
        for each in recorded.served
    )
    mixes = plan(parts, predicted.seconds)
    contenders |= build_mixes(order, mixes)
    if UNTUNED in rivals:
        contenders[UNTUNED] = _to_contender(opened, _compile(order, opened, None, compile.UNTUNED_PIPELINE))
    if ONNXRUNTIME in rivals:
        contenders[ONNXRUNTIME] = Contender(opened.source.onnx_bytes)
    return BuiltContenders(contenders, parts, opened.inputs, mixes, predicted.seconds)


def build_mixes(order: ContenderOrder, mixes: Mixes) -> dict[str, Contender]:
    """Build the model without some records. Raises as `build` does."""
    opened = _open_model(order)
    return {name: _to_contender(opened, _compile(order, opened, refused)) for name, refused in mixes.items()}


def _open_model(order: ContenderOrder) -> GivenModel:
    return find_same_model(order.model, None, "the campaign tuned")


def _compile(
    order: ContenderOrder, opened: GivenModel, refused: Mapping[str, str] | None, pipeline: str | None = None
) -> compile.Compiled:
    """Compile from the records except the refused ones; None: from no record."""
    kind = order.board_type
    prepared, known = _prepare(order, opened, pipeline or kind.pipeline)
    return compile.compile_prepared(
        prepared,
        order.config,
        [] if refused is None else make.make_book(kind, order.point, order.candidates, refused),
        make.find_triple(kind, make.find_target(kind, order.simulated)),
        known,
    )


# The last prepared model by what it was prepared for, and its programs by their code: contenders differ in those only.
_latest: tuple[tuple[Any, ...], search_workloads.Prepared, _Programs] | None = None


def _prepare(order: ContenderOrder, opened: GivenModel, pipeline: str) -> tuple[search_workloads.Prepared, _Programs]:
    global _latest
    key = (order.model, json.dumps(order.config, sort_keys=True), pipeline, order.simulated)
    if _latest is None or _latest[0] != key:
        shapes = {spec.name: spec.static_shape for spec in opened.inputs}
        _latest = key, search_workloads.prepare_model(opened.source.load(), shapes, order.config, pipeline), {}
    return _latest[1:]


def _to_contender(opened: GivenModel, compiled: compile.Compiled) -> Contender:
    algorithms = [each.algorithm for each in compiled.served]
    # Every engine rounds the accumulators of an 8-bit model.
    algorithms += ["8 bits"] if opened.source.is_quantised else []
    return Contender(compiled.library, find_tolerance_factor(algorithms))
