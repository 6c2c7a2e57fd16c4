"""A campaign as ordered: all that the engine needs of it, as stored.

It is made from a plan once (`submit`) and never changes, but for the budget, which is kept beside it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from device_agent.protocol import OperatingPoint
from farm.campaign.plan_estimate import CHECK_S, estimate_final_s, leave_time
from farm.campaign.scheduler.values import Budget
from farm.crew.choice import has_labels
from farm.selection.rounds import LEAST_ROUNDS


@dataclasses.dataclass(frozen=True)
class WorkloadOrder:
    """A tunable function. `weight`: calls in one inference of each of `models`, in sum; `calls`: of each.

    `predicted_s`: estimated time of a call (s) at default clocks; None where no family has an estimate.
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
    """The work on boards of one type: `target` is TVM's, as a dict; a candidate runs on `threads`.

    `points` are operating points by their text in trials and records. `is_host`: the board is the machine that searches
    and builds.
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
    """How a candidate is timed, in seconds. `verify_top` of a workload's best are verified.

    Without `repeat_alone` a candidate without a rival, not even a baseline, is checked only: its trial counts.
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
    """A planned model: `plan.to_document` of it, and shapes as the file gives them."""

    name: str
    origin: str
    sha256: str
    batch: int | None
    shapes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Order:
    """A whole campaign. `labels` are required of its boards; `priority` is against its owner's other campaigns.

    `boards` are the only ones to use, by name; empty: all that fit. `rivals` are what its models are timed beside at
    the end. `compile_to` is the folder for the finished campaign's artifacts; None: none are wanted. `process` is the
    command that watches it (`process_identity`): where that is killed, the campaign is paused; None: it goes on.
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
    process: Mapping[str, Any] | None = None

    def may_use(self, board: str, labels: Mapping[str, str]) -> bool:
        """Whether a board of one of its types may be used, by its name and labels."""
        return has_labels(labels, self.labels) and (not self.boards or board in self.boards)

    def to_document(self) -> dict[str, Any]:
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


# Board time of a trial besides its samples, until trials say better.
_HELD_S = 0.5


def list_final_s(order: Order) -> Iterator[float]:
    """List how long the final of each model takes on each board type at each operating point."""
    for of_type in order.types:
        for model in order.models:
            if count := count_functions(of_type, model.name):
                yield from [estimate_final_s(count)] * len(of_type.points)


def find_final_s(order: Order, model: str, board_type: str) -> float:
    """Estimate the final of a model on a board type at one operating point."""
    of_type = next(each for each in order.types if each.board_type == board_type)
    return estimate_final_s(count_functions(of_type, model))


def count_functions(of_type: TypeOrder, model: str) -> int:
    """Count the tuned functions of a model on a board type."""
    return sum(model in each.models for each in of_type.workloads)


def count_tasks(order: Order) -> int:
    """Count an order's workloads on each board type at each operating point."""
    return sum(len(of_type.workloads) * len(of_type.points) for of_type in order.types)


def leave_search_s(order: Order, wall_clock_s: float | None) -> float | None:
    """Return the search's part of an order's wall clock."""
    tasks, measure = count_tasks(order), order.measure
    held_s = measure.repeat * measure.min_repeat_s + _HELD_S
    # A finalist and the baseline.
    least_s = tasks * 2 * LEAST_ROUNDS * held_s
    return leave_time(wall_clock_s, tasks * CHECK_S + sum(list_final_s(order)), least_s)
