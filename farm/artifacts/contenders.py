"""The programs that a model's final is between: one model compiled from its records, by prediction, and in between.

Compiled in a process of its own. Which of them is taken is decided by whoever times them (`farm.campaign.verify`).
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from farm.artifacts import compile, make
from farm.artifacts.brought import Brought, bring_same
from farm.artifacts.checking import find_tolerance_factor
from farm.artifacts.manifest import ModelFacts
from farm.inventory.board_types import BoardType
from farm.models.inputs import InputSpec
from farm.search import gpus
from farm.search.graph import pipeline as prepared

# As recorded, as predicted, as TVM comes, and the same model by another engine.
RECORDED, PREDICTED, UNTUNED, ONNXRUNTIME = "recorded", "predicted", "untuned", "onnxruntime"
# What a model is compared with where nobody asks what else could run it.
RIVALS = (UNTUNED, ONNXRUNTIME)


@dataclasses.dataclass(frozen=True)
class ContenderOrder:
    """A model for boards of a type, which has its graph pipeline, at an operating point. `config` is TVM's target."""

    model: ModelFacts
    board_type: BoardType
    point: str
    simulated: bool
    config: Mapping[str, Any]
    candidates: make.Candidates = dataclasses.field(repr=False)


# Candidates that are left out, by workload, by the name of a mix; and what plans them, from a model's parts and how
# long one takes to compile (s).
Mixes = Mapping[str, Mapping[str, str]]
Plan = Callable[[Sequence["RecordPart"], float], Mixes]


@dataclasses.dataclass(frozen=True)
class RecordPart:
    """A function of the model: `candidate` is its record's, None where none serves it.

    `seconds` are all its calls' in one inference, by its record; `differs`: the prediction is other code; `function` is
    what TVM calls it in the model.
    """

    workload: str
    name: str
    candidate: str | None
    seconds: float
    differs: bool
    function: str = ""


@dataclasses.dataclass(frozen=True)
class Contender:
    """A program, and how far its outputs may be from a reference's (`find_tolerance_factor`)."""

    program: bytes = dataclasses.field(repr=False)
    factor: float = 1.0


@dataclasses.dataclass(frozen=True)
class BuiltContenders:
    """Contenders by name, what the model is made of, which records each of the mixes leaves out, and how long one
    takes to compile (s).
    """

    contenders: Mapping[str, Contender]
    parts: tuple[RecordPart, ...]
    inputs: tuple[InputSpec, ...]
    mixes: Mixes
    seconds: float = 0.0


def build(order: ContenderOrder, rivals: Sequence[str], plan: Plan) -> BuiltContenders:
    """As recorded, as predicted, the mixes planned, and the `rivals`. Loads TVM's compiler.

    Raises UsageError, PermanentError.
    """
    brought = _bring(order)
    recorded = _compile(order, brought, {})
    began = time.monotonic()
    predicted = _compile(order, brought, None)
    seconds = time.monotonic() - began
    contenders = {RECORDED: _to_contender(brought, recorded), PREDICTED: _to_contender(brought, predicted)}
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
    mixes = plan(parts, seconds)
    contenders |= build_mixes(order, mixes)
    if UNTUNED in rivals:
        contenders[UNTUNED] = _to_contender(brought, _compile(order, brought, None, compile.UNTUNED_PIPELINE))
    if ONNXRUNTIME in rivals:
        contenders[ONNXRUNTIME] = Contender(brought.source.onnx_bytes)
    return BuiltContenders(contenders, parts, brought.inputs, mixes, seconds)


def build_mixes(order: ContenderOrder, mixes: Mixes) -> dict[str, Contender]:
    """The model without some records. Raises as `build` does."""
    brought = _bring(order)
    return {name: _to_contender(brought, _compile(order, brought, refused)) for name, refused in mixes.items()}


def _bring(order: ContenderOrder) -> Brought:
    return bring_same(order.model, None, "the campaign tuned")


def _compile(
    order: ContenderOrder, brought: Brought, refused: Mapping[str, str] | None, pipeline: str | None = None
) -> compile.Compiled:
    """From the records but those that are left out; None: from none at all."""
    kind = order.board_type
    return compile.compile_prepared(
        _prepare(order, brought, pipeline or kind.pipeline),
        order.config,
        [] if refused is None else make.make_book(kind, order.point, order.candidates, refused),
        make.find_triple(kind, make.find_target(kind, order.simulated)),
    )


# What was prepared last, by model, target and pipeline: the contenders of a model differ in their schedules alone.
_latest: tuple[tuple[ModelFacts, str, str], prepared.Prepared] | None = None


def _prepare(order: ContenderOrder, brought: Brought, pipeline: str) -> prepared.Prepared:
    global _latest
    key = (order.model, json.dumps(order.config, sort_keys=True), pipeline)
    if _latest is None or _latest[0] != key:
        shapes = {spec.name: spec.static_shape for spec in brought.inputs}
        _latest = key, prepared.prepare_model(brought.source.load(), shapes, order.config, pipeline)
    return _latest[1]


def _to_contender(brought: Brought, compiled: compile.Compiled) -> Contender:
    algorithms = [make.find_algorithm(each.workload.name) for each in compiled.served]
    # Sums of a model in 8 bits are rounded to steps whoever computes them.
    algorithms += ["8 bits"] if brought.source.is_quantised else []
    return Contender(compiled.library, find_tolerance_factor(algorithms))


def device_of(order: ContenderOrder) -> str:
    """What runs it, as the agent calls it."""
    return gpus.device_of(order.config)
