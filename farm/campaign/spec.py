"""The format of a campaign file, key by key. `plan_models` and `plan_boards` match it with models and boards.

Times are seconds, frequencies Hz; people write times as `6h` or `100ms`.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import pydantic

from device_agent.protocol import EVERY_CLUSTER, NAME_RULE, is_name
from device_agent.protocol.hardware import Hertz, Name, Text
from farm.errors import UsageError
from farm.inventory import documents
from farm.inventory.board_types import find_repeated
from farm.inventory.documents import Place, StrictModel
from farm.inventory.fleet_document import Label, LabelName
from farm.models import trained, zoo
from farm.points.requests import parse_cores
from farm.search.tuners import TUNERS
from farm.units import DURATION_EXAMPLES, parse_duration_s, parse_energy_j, parse_period_s

DEFAULT = "default"
ALL_OPS = "all"
XGB = "xgb"
if TYPE_CHECKING:
    Tuner: TypeAlias = str
else:
    Tuner = Literal[tuple(TUNERS)]
Count = Annotated[int, pydantic.Field(strict=True, ge=1)]
Joules = Annotated[
    float, pydantic.BeforeValidator(lambda value: parse_energy_j(str(value)), json_schema_input_type=Text)
]
# One more doubles a campaign's part of its owner's share: ten are a thousandfold.
Priority = Annotated[int, pydantic.Field(strict=True, ge=-10, le=10)]
Batch = Annotated[int, pydantic.Field(strict=True, ge=1, le=4096)]
Core = Annotated[int, pydantic.Field(strict=True, ge=0)]


def _seconds(value: Any, parse: Callable[[str], float] = parse_duration_s) -> Any:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError("a duration is needed here, such as 100ms, 90s or 6h")  # noqa: TRY004 - pydantic takes ValueError
    try:
        return parse(str(value))
    except ValueError as error:
        why = f"{error}" if "no unit" in str(error) else "it must be a duration above 0"
        raise ValueError(f"{why}; examples: 100ms, {DURATION_EXAMPLES}") from None


def _one_or_more(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else (value,)


def _some(kind: Any) -> Any:
    """Take one of a kind where several may be."""
    several: Any = tuple
    return pydantic.BeforeValidator(_one_or_more, json_schema_input_type=kind | several[kind, ...])


def _cores(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return parse_cores(value)
        except UsageError as error:
            raise ValueError("it names no CPUs; write [0, 1], or '0-3' in quotes") from error
    if not isinstance(value, list | tuple):
        # `cores: 4` could mean four of them as well as the one called 4.
        raise ValueError("CPU numbers are needed here: [0, 1], or '0-3' in quotes")  # noqa: TRY004 - pydantic takes ValueError
    return value


def _per_cluster(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        return {EVERY_CLUSTER: value}
    if not isinstance(value, dict):
        raise ValueError("whole Hz are needed here, such as 1428000000, or {cluster: Hz}")  # noqa: TRY004
    return value


def _not_empty(items: tuple[Any, ...]) -> tuple[Any, ...]:
    # Not `min_length`, which counts what is left once wrong items are taken out.
    if not items:
        raise ValueError("at least one is needed here")
    return items


def _name(value: str) -> str:
    if not is_name(value):
        raise ValueError(f"it must be {NAME_RULE}")
    return value


# Numbers without a unit are refused, with an own message: the schema has texts alone.
Seconds = Annotated[float, pydantic.BeforeValidator(_seconds, json_schema_input_type=Text)]
Period = Annotated[
    float, pydantic.BeforeValidator(lambda value: _seconds(value, parse_period_s), json_schema_input_type=Text)
]
CampaignName = Annotated[str, pydantic.Field(strict=True), pydantic.AfterValidator(_name)]


class ModelSpec(StrictModel):
    """One model: from the zoo or a file, for one or more batch sizes. `name` is its name here; default: the zoo's name
    or the file's. Relative paths start at the campaign file's folder. `lengths` is a range of an open dimension, such
    as `tokens=1..512@32,128,512`; its sizes are tuned.
    """

    zoo: str | None = None
    path: Text | None = None
    name: Text | None = None
    shape: dict[str, tuple[Count, ...]] = pydantic.Field(default_factory=dict)
    batch: Annotated[tuple[Batch, ...], _some(Batch)] = ()
    lengths: Text | None = None

    @pydantic.model_validator(mode="before")
    @classmethod
    def _text_is_zoo_or_file(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        return {"path": value} if value.endswith((".onnx", ".tflite")) or "/" in value else {"zoo": value}

    @pydantic.model_validator(mode="after")
    def _agrees_with_itself(self) -> ModelSpec:
        if (self.zoo is None) == (self.path is None):
            raise ValueError("a model is a name from the zoo, or has one of zoo and path")
        if self.zoo is not None and self.zoo not in zoo.ZOO and self.zoo not in trained.TRAINED:
            raise ValueError(f"no zoo model is called {self.zoo!r}; there are {', '.join(zoo.ZOO)}")
        if (twice := find_repeated(self.batch)) is not None:
            raise ValueError(f"the batch {twice} is given twice")
        for name, shape in self.shape.items():
            if self.batch and shape and shape[0] != 1 and shape[0] not in self.batch:
                raise ValueError(f"the shape of {name} begins with {shape[0]}, which is not among the batches")
        return self

    @property
    def called(self) -> str:
        """The model's name in this campaign."""
        return self.name or self.zoo or pathlib.PurePath(self.path or "").stem

    @property
    def variants(self) -> tuple[tuple[str, int | None], ...]:
        """Return name and batch of each variant; None: the batch that the model has."""
        if len(self.batch) < 2:
            return ((self.called, self.batch[0] if self.batch else None),)
        return tuple((f"{self.called} batch {batch}", batch) for batch in self.batch)


class BoardsSpec(StrictModel):
    """Which boards may be used: those of `types` that carry all `labels`.

    `simulated`: only virtual boards, or only real ones; unset: real ones where there are any.
    """

    types: Annotated[tuple[Name, ...], _some(Name), pydantic.AfterValidator(_not_empty)]
    labels: dict[LabelName, Label] = pydantic.Field(default_factory=dict)
    simulated: pydantic.StrictBool | None = None

    @pydantic.field_validator("types")
    @classmethod
    def _each_once(cls, types: tuple[str, ...]) -> tuple[str, ...]:
        if twice := find_repeated(types):
            raise ValueError(f"the type {twice} is named twice")
        return types


class PointSpec(StrictModel):
    """Clocks to set on a board; `default` (nothing) leaves them alone. `cpu_freq_hz`: Hz by cluster, `*` for all."""

    power_mode: Annotated[str, pydantic.Field(strict=True, min_length=1)] | None = None
    cpu_freq_hz: Annotated[
        dict[str, Hertz], pydantic.BeforeValidator(_per_cluster, json_schema_input_type=Hertz | dict[str, Hertz])
    ] = pydantic.Field(default_factory=dict)
    cores: (
        Annotated[
            tuple[Core, ...],
            pydantic.BeforeValidator(_cores, json_schema_input_type=str | tuple[Core, ...]),
            pydantic.AfterValidator(_not_empty),
        ]
        | None
    ) = None
    gpu_freq_hz: Hertz | None = None
    memory_freq_hz: Hertz | None = None

    @pydantic.model_validator(mode="before")
    @classmethod
    def _default_is_nothing(cls, value: Any) -> Any:
        if isinstance(value, str) and value != DEFAULT:
            raise ValueError(f"a point is `{DEFAULT}` or clocks; a power mode is written {{power_mode: {value}}}")
        if value is None:
            raise ValueError(f"a point without clocks is written `{DEFAULT}`")
        return {} if value == DEFAULT else value

    @property
    def is_default(self) -> bool:
        """Whether clocks are left alone."""
        return not (
            self.power_mode or self.cpu_freq_hz or self.cores is not None or self.gpu_freq_hz or self.memory_freq_hz
        )


class BudgetSpec(StrictModel):
    """When a campaign ends: at the limit that is reached first. `per_workload`: trials of one workload at one point of
    one board type. `board_hours` counts the time that boards are held, for verification too, which takes place even
    where none is left. `joules`, such as 20kJ, counts the energy of boards while trials hold them.
    """

    model_config = pydantic.ConfigDict(json_schema_extra={"minProperties": 1})

    trials: Count | None = None
    wall_clock: Seconds | None = None
    board_hours: Annotated[float, pydantic.Field(strict=True, gt=0, allow_inf_nan=False)] | None = None
    per_workload: Count | None = None
    joules: Joules | None = None

    @pydantic.model_validator(mode="after")
    def _has_a_limit(self) -> BudgetSpec:
        if all(value is None for _, value in self):
            raise ValueError(f"a budget needs a limit: {', '.join(type(self).model_fields)}")
        return self


class SearchSpec(StrictModel):
    """How candidates are found. `early_stopping`: trials of a workload without a gain after which it is left;
    `early_stopping_all`: trials of all workloads together without any gain after which the campaign ends.

    `ops` are the operator kinds to tune, as `farm model show` names them; empty: all. `exact` leaves out algorithms
    with larger rounding errors than the model's own.
    """

    tuner: Tuner = "xgb"
    loss: Literal["reg", "rank", "rank-binary"] | None = None
    early_stopping: Count | None = None
    early_stopping_all: Count | None = None
    ops: Annotated[tuple[Text, ...], _some(Text)] = ()
    warm_start: pydantic.StrictBool = True
    exact: pydantic.StrictBool = False
    seed: Annotated[int, pydantic.Field(strict=True, ge=0, lt=1 << 31)] | None = None

    @pydantic.field_validator("ops")
    @classmethod
    def _all_is_no_choice(cls, ops: tuple[str, ...]) -> tuple[str, ...]:
        return () if ops == (ALL_OPS,) else ops

    @pydantic.model_validator(mode="after")
    def _agrees_with_itself(self) -> SearchSpec:
        if self.loss is not None and self.tuner != XGB:
            raise ValueError(f"loss has no meaning for the tuner {self.tuner}; only {XGB} has a cost model that learns")
        if ALL_OPS in self.ops:
            raise ValueError(f"ops are `{ALL_OPS}` or operators, not both")
        return self


class MeasureOptions(StrictModel):
    """How a candidate is measured; defaults are the farm's settings (`FARM_MEASURE_…`).

    `verify_top`: how many of the best candidates of a workload are measured again at the end.
    """

    number: Count | None = None
    repeat: Count | None = None
    min_repeat: Seconds | None = None
    timeout: Seconds | None = None
    verify_top: Count = 3


# The short forms in a file, for its schema: a zoo's name or a path, `default`.
_OneModel = Text | ModelSpec
_OnePoint = Literal["default"] | PointSpec


class CampaignSpec(StrictModel):
    """A campaign: models x boards x operating points within a budget. `priority` is against its owner's others.

    `device`: code for the boards' processors, or for their GPUs. `weights`: as they are, or in 16 bits where that is
    faster (bf16), wherever possible (bf16-all), with the arithmetic (fp16). `objective` decides between finalists: the
    least latency, energy, energy times latency (edp), or mean power of a period. `deadline`, with energy or a period:
    the longest time of an inference. `period`, with its objective: the time between two, such as 33ms or 30fps.
    """

    name: CampaignName
    models: Annotated[tuple[ModelSpec, ...], _some(_OneModel), pydantic.AfterValidator(_not_empty)]
    boards: BoardsSpec
    device: Literal["cpu", "gpu"] = "cpu"
    weights: Literal["float32", "bf16", "bf16-all", "fp16"] = "float32"
    operating_points: Annotated[tuple[PointSpec, ...], _some(_OnePoint), pydantic.AfterValidator(_not_empty)] = (
        PointSpec(),
    )
    objective: Literal["latency", "energy", "edp", "period"] = "latency"
    deadline: Seconds | None = None
    period: Period | None = None
    budget: BudgetSpec
    search: SearchSpec = SearchSpec()
    measure: MeasureOptions = MeasureOptions()
    priority: Priority = 0

    @pydantic.model_validator(mode="after")
    def _has_a_use_of_its_deadline(self) -> CampaignSpec:
        if self.deadline is not None and self.objective not in ("energy", "period"):
            raise ValueError("a deadline goes with `objective: energy` alone, or with a period")
        if (self.period is None) == (self.objective == "period"):
            raise ValueError("`objective: period` and `period: 33ms` go together")
        if self.period is not None and (self.deadline or 0.0) > self.period:
            raise ValueError("the deadline is longer than the period: the next inference would have to wait")
        return self

    @property
    def latest_s(self) -> float | None:
        """The longest time of an inference: the deadline, or the period."""
        return self.period if self.deadline is None else self.deadline


@dataclasses.dataclass(frozen=True)
class CampaignFile:
    """A campaign and its file's path, for messages and relative paths.

    A campaign without a file has the name for messages as a path in the current folder.
    """

    path: pathlib.Path
    spec: CampaignSpec


def read_campaign(path: pathlib.Path) -> CampaignFile:
    """Read a campaign file and check it by itself. Raises UsageError naming lines and keys of all errors."""
    return _check(path, documents.read_located(path, CampaignSpec))


def check_campaign(document: Mapping[str, Any], called: str) -> CampaignFile:
    """Check a document without a file, called `called` in messages. Raises UsageError."""
    return _check(pathlib.Path(called), documents.check_document(document, CampaignSpec, called))


def _check(path: pathlib.Path, spec: CampaignSpec) -> CampaignFile:
    if faults := list(_find_repeated(spec)):
        raise documents.to_error(path, faults)
    return CampaignFile(path, spec)


def _find_repeated(spec: CampaignSpec) -> Iterator[tuple[Place, str]]:
    names: dict[str, int] = {}
    for index, model in enumerate(spec.models):
        for name, _ in model.variants:
            if names.setdefault(name, index) != index:
                yield ("models", index), f"two models are called {name}; give one of them a `name` of its own"
    points: dict[str, int] = {}
    for index, point in enumerate(spec.operating_points):
        if points.setdefault(point.model_dump_json(), index) != index:
            yield ("operating_points", index), "this operating point is listed twice"
