"""A campaign as it was ordered: everything that the engine needs of it, as it lies in the store.

It is made from a plan once (`submit`) and never changes, but for the budget, which is kept beside it. Nothing here
starts anything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from device_agent.protocol import OperatingPoint
from farm.campaign.after_trials import CHECK_S, estimate_final_s, leave_time
from farm.campaign.scheduler.values import Budget
from farm.crew.choice import has_labels
from farm.selection.rounds import LEAST_ROUNDS


@dataclasses.dataclass(frozen=True)
class WorkloadOrder:
    """A tunable function. `weight`: calls in one inference of each of `models`, taken together; `calls`: of each.

    `predicted_s`: what a call takes by prediction alone (s), without clocks set; None where no family knows it.
    """

    hash: str
    name: str
    kind: str
    flop: float
    weight: float
    models: tuple[str, ...]
    calls: tuple[int, ...] = ()
    predicted_s: float | None = None


@dataclasses.dataclass(frozen=True)
class TypeOrder:
    """What is done on boards of one type: `target` is TVM's, in dict form; `threads` run a candidate there.

    `points` are operating points by their text in trials and records. `is_host`: boards of this type are the machine
    that searches and builds.
    """

    board_type: str
    simulated: bool
    target: Mapping[str, Any]
    threads: int
    pipeline: str
    points: Mapping[str, OperatingPoint]
    workloads: tuple[WorkloadOrder, ...]
    is_host: bool = False


@dataclasses.dataclass(frozen=True)
class SearchOrder:
    """How candidates are found; see `farm.campaign.spec.SearchSpec`."""

    tuner: str
    loss: str | None
    early_stopping: int | None
    warm_start: bool
    seed: int
    early_stopping_all: int | None = None
    exact: bool = False


@dataclasses.dataclass(frozen=True)
class MeasureOrder:
    """How a candidate is timed; times in seconds. So many (`verify_top`) of a workload's best are measured again.

    Without `repeat_alone` one that has no rival, not even what was tried first, is checked only: its trial is believed.
    """

    number: int
    repeat: int
    min_repeat_s: float
    timeout_s: float
    memory_bytes: int
    verify_top: int
    repeat_alone: bool = True


@dataclasses.dataclass(frozen=True)
class ModelOrder:
    """A model that was planned: what `plan.to_document` says of it, and shapes as the file gives them."""

    name: str
    origin: str
    sha256: str
    batch: int | None
    shapes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Order:
    """A whole campaign. `labels` are those that its boards must have, `priority` is against its owner's others.

    `boards` are the only ones to be used, by name; empty: all that fit. `rivals` are what its models are timed beside
    at the end. `compile_to` is the folder that artifacts of all of it go to once it is finished; None: none are wanted.
    """

    name: str
    owner: str
    models: tuple[ModelOrder, ...]
    types: tuple[TypeOrder, ...]
    budget: Budget
    search: SearchOrder
    measure: MeasureOrder
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    priority: int = 0
    boards: tuple[str, ...] = ()
    rivals: tuple[str, ...] = ()
    compile_to: str | None = None

    def may_use(self, board: str, labels: Mapping[str, str]) -> bool:
        """Whether a board of one of its types may be used, by its name and labels."""
        return has_labels(labels, self.labels) and (not self.boards or board in self.boards)

    def to_document(self) -> dict[str, Any]:
        """Plain data, for the store."""
        document = dataclasses.asdict(self)
        for each, of_type in zip(document["types"], self.types, strict=True):
            each["points"] = {key: point.to_dict() for key, point in of_type.points.items()}
        return document

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Order:
        """The inverse of `to_document`, whether or not it went through JSON."""
        values = dict(document)
        values["models"] = tuple(
            ModelOrder(**{**each, "shapes": tuple(each.get("shapes", ()))}) for each in values["models"]
        )
        values["types"] = tuple(_read_type(each) for each in values["types"])
        values["budget"] = Budget(**values["budget"])
        values["search"] = SearchOrder(**values["search"])
        values["measure"] = MeasureOrder(**values["measure"])
        values["boards"] = tuple(values.get("boards", ()))
        values["rivals"] = tuple(values.get("rivals", ()))
        return cls(**values)


def _read_type(document: Mapping[str, Any]) -> TypeOrder:
    values = dict(document)
    values["points"] = {key: OperatingPoint.from_dict(each) for key, each in values["points"].items()}
    values["workloads"] = tuple(
        WorkloadOrder(**{**each, "models": tuple(each["models"]), "calls": tuple(each.get("calls", ()))})
        for each in values["workloads"]
    )
    return TypeOrder(**values)


# What a trial holds a board for besides its samples, until trials say better.
_HELD_S = 0.5


def list_final_s(order: Order) -> Iterator[float]:
    """How long the final of each model takes on each board type at each operating point."""
    for of_type in order.types:
        for model in order.models:
            if count := count_functions(of_type, model.name):
                yield from [estimate_final_s(count)] * len(of_type.points)


def find_final_s(order: Order, model: str, board_type: str) -> float:
    """How long the final of a model takes on a board type at one operating point."""
    of_type = next(each for each in order.types if each.board_type == board_type)
    return estimate_final_s(count_functions(of_type, model))


def count_functions(of_type: TypeOrder, model: str) -> int:
    """The tuned functions of a model on a board type."""
    return sum(model in each.models for each in of_type.workloads)


def count_tasks(order: Order) -> int:
    """The workloads of an order, counted on each board type at each operating point."""
    return sum(len(of_type.workloads) * len(of_type.points) for of_type in order.types)


def leave_search_s(order: Order, wall_clock_s: float | None) -> float | None:
    """The part of an order's wall clock that is the search's."""
    tasks, measure = count_tasks(order), order.measure
    held_s = measure.repeat * measure.min_repeat_s + _HELD_S
    # The winner and what was tried first.
    least_s = tasks * 2 * LEAST_ROUNDS * held_s
    return leave_time(wall_clock_s, tasks * CHECK_S + sum(list_final_s(order)), least_s)
