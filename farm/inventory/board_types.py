"""Board types: what boards of one kind share. Read from `inventory/board_types/*.yaml` and a folder of the user's.

The agent's protocol declares the hardware sections, since boards read them too; their consistency is checked here. The
agent reports what a particular board has.
"""

from __future__ import annotations

import difflib
import functools
import os
import pathlib
from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import Annotated, Any, Literal, TypeVar

import pydantic

from device_agent.protocol.hardware import Cluster, Detect, Fan, Gpu, Memory, Name, Power, PowerMode, Thermal
from farm.errors import UsageError
from farm.inventory import documents

Item = TypeVar("Item", bound=Hashable)
# The link target in Zig's form.
LinkTriple = Annotated[str, pydantic.Field(pattern=r"^[a-z0-9_]+-linux-[a-z]+(\.\d+)*$")]

# Names a folder with more board types, one YAML file each.
EXTRA_FOLDER_VARIABLE = "FARM_BOARD_TYPES"
HOST = "host"
Feature = Annotated[str, pydantic.Field(pattern=r"^[+-][a-z0-9.-]+$")]


def find_repeated(items: Iterable[Item]) -> Item | None:
    """The first item that occurs a second time."""
    seen = set()
    for item in items:
        if item in seen:
            return item
        seen.add(item)
    return None


def _totals_are_rails(power: Power) -> Power:
    rails = [rail for chip in power.chips for rail in chip.rails if rail]
    if twice := find_repeated(rails):
        raise ValueError(f"the rail {twice} is connected twice")
    if twice := find_repeated(chip.address for chip in power.chips):
        raise ValueError(f"two chips have the address {twice}")
    if twice := find_repeated(power.total + power.board_total):
        raise ValueError(f"{twice} would be added to the total twice")
    if missing := [rail for rail in power.total + power.board_total if rail not in rails]:
        raise ValueError(f"no chip has the total's rail {missing[0]}; rails: {', '.join(rails) or 'none'}")
    fitted = {rail for chip in power.chips if chip.fitted for rail in chip.rails}
    if missing := [rail for rail in power.total if rail not in fitted]:
        raise ValueError(f"the total's rail {missing[0]} is on a chip that is not fitted everywhere")
    if bool(power.total) != bool(power.total_scope):
        raise ValueError("total and total_scope must both be given, or neither: a sum means nothing without scope")
    return power


def _ignored_exist(thermal: Thermal) -> Thermal:
    if twice := find_repeated(thermal.zones):
        raise ValueError(f"the zone {twice} is listed twice")
    if missing := [zone for zone in thermal.ignore if zone not in thermal.zones]:
        raise ValueError(f"ignore names {missing[0]}, which is not among the zones")
    return thermal


CheckedPower = Annotated[Power, pydantic.AfterValidator(_totals_are_rails)]
CheckedThermal = Annotated[Thermal, pydantic.AfterValidator(_ignored_exist)]


class Target(documents.StrictModel):
    """TVM's compile target for a board type that is not this machine."""

    kind: Literal["llvm"]
    mtriple: str = pydantic.Field(min_length=1)
    mcpu: str = pydantic.Field(min_length=1)
    mattr: tuple[Feature, ...] = ()
    # MetaSchedule cannot parallelise without it.
    num_cores: int = pydantic.Field(alias="num-cores", ge=1, le=1024)

    def to_tvm(self) -> dict[str, Any]:
        """The dict for `tvm.target.Target`."""
        return self.model_dump(by_alias=True, mode="json", exclude_defaults=True)


class BoardType(documents.StrictModel):
    """What boards of one kind share.

    `target` and `link_triple` are None for `host` in the file: detect this machine. `memory_bytes` is None and
    `clusters` empty if boards of the type differ; a missing section means unknown. `releases` are L4T lines, oldest
    first. `simulation` holds the parameters of virtual boards, which the agent checks. `pipeline` names the graph
    pipeline.
    """

    name: Name
    title: str = pydantic.Field(min_length=1)
    target: Target | None
    # In Zig's form, with the oldest glibc of boards of this type.
    link_triple: LinkTriple | None
    host_is_board: bool = False
    detect: Detect = Detect()
    soc: str = ""
    releases: tuple[Annotated[str, pydantic.Field(pattern=r"^R\d+$")], ...] = ()
    memory_bytes: int | None = pydantic.Field(default=None, strict=True, gt=0)
    clusters: tuple[Cluster, ...] = ()
    gpu: Gpu | None = None
    memory: Memory | None = None
    power: CheckedPower = Power()
    thermal: CheckedThermal = Thermal()
    power_modes: tuple[PowerMode, ...] = ()
    default_power_mode: Annotated[int, pydantic.Field(strict=True)] | None = None
    fan: Fan = Fan()
    simulation: dict[str, Any] = pydantic.Field(default_factory=dict)
    pipeline: str = "graph/2"

    @pydantic.field_validator("target", "link_triple", mode="before")
    @classmethod
    def _host_means_detect(cls, value: Any) -> Any:
        if value is None:
            raise ValueError(f"must be set; write `{HOST}` to detect this machine")
        if isinstance(value, str) and value == HOST:
            return None
        return value

    @pydantic.model_validator(mode="after")
    def _agrees_with_itself(self) -> BoardType:
        if (self.target is None) != (self.link_triple is None):
            raise ValueError(f"target and link_triple must both be `{HOST}`, or neither")
        cpus = [cpu for cluster in self.clusters for cpu in cluster.cpus]
        if find_repeated(cpus) is not None:
            raise ValueError("clusters: a CPU is in two clusters, or twice in one")
        if twice := find_repeated(cluster.name for cluster in self.clusters):
            raise ValueError(f"clusters: two are called {twice}")
        usable = sum(len(cluster.cpus) for cluster in self.clusters if not cluster.isolated)
        if self.target and self.clusters and self.target.num_cores > usable:
            raise ValueError(f"target.num-cores is {self.target.num_cores}, but clusters have {usable} usable CPUs")
        for cluster in self.clusters:
            if cluster.zone and cluster.zone not in self.thermal.zones:
                raise ValueError(f"clusters: the zone of {cluster.name}, {cluster.zone}, is not among thermal.zones")
            if cluster.memory_floor_hz and self.memory and self.memory.freqs_hz:
                floor, top = cluster.memory_floor_hz[-1][1], self.memory.freqs_hz[-1]
                if floor > top:
                    raise ValueError(f"clusters: {cluster.name} asks for a memory clock of {floor}, above all: {top}")
        self._check_power_modes(set(cpus))
        return self

    def _check_power_modes(self, cpus: set[int]) -> None:
        ids = [mode.id for mode in self.power_modes]
        names = [mode.name for mode in self.power_modes]
        if (twice := find_repeated([*ids, *names])) is not None:
            raise ValueError(f"power_modes: two are called {twice}")
        if self.default_power_mode is not None and self.default_power_mode not in ids:
            raise ValueError(f"default_power_mode is {self.default_power_mode}, which no power mode has as its id")
        clusters = {cluster.name for cluster in self.clusters}
        for mode in self.power_modes:
            if absent := sorted(set(mode.cores_online or ()) - cpus):
                raise ValueError(f"power_modes: {mode.name} puts CPU {absent[0]} online, which no cluster has")
            if unknown := sorted(mode.clusters - clusters):
                raise ValueError(f"power_modes: {mode.name} limits the cluster {unknown[0]}, which is not there")

    @property
    def cores(self) -> int | None:
        """All cores of a board, isolated ones included; None if unknown."""
        return sum(len(cluster.cpus) for cluster in self.clusters) or None


def load_board_types(extra_folder: pathlib.Path | None = None) -> dict[str, BoardType]:
    """Every known board type by name: the farm's own, and those of `extra_folder` (default: FARM_BOARD_TYPES).

    Raises UsageError for a wrong file, a file not named after its type, or a name of the farm's own types, which would
    make records ambiguous.
    """
    types = _read_folder(documents.require_inventory_folder() / "board_types")
    if extra_folder is None and (setting := os.environ.get(EXTRA_FOLDER_VARIABLE)):
        extra_folder = pathlib.Path(setting).expanduser()
        if not extra_folder.is_dir():
            raise UsageError(f"{EXTRA_FOLDER_VARIABLE} names {setting!r}, which is not a folder")
    if extra_folder:
        extra = _read_folder(extra_folder)
        if taken := sorted(types.keys() & extra.keys()):
            raise UsageError(
                f"{extra_folder / taken[0]}.yaml takes the name of the farm's own board type {taken[0]!r}",
                "Give it another name.",
            )
        types |= extra
    # No two types may detect the same board.
    owners: dict[str, str] = {}
    for board_type in types.values():
        for mark in (*board_type.detect.compatible, *board_type.detect.models):
            if (owner := owners.setdefault(mark, board_type.name)) != board_type.name:
                raise UsageError(f"the board types {owner} and {board_type.name} both detect {mark!r}")
    return types


def require_board_type(name: str, types: Mapping[str, BoardType] | None = None) -> BoardType:
    """The board type called `name`. Raises UsageError with the nearest name and all known ones."""
    types = load_board_types() if types is None else types
    if name in types:
        return types[name]
    near = difflib.get_close_matches(name.lower().replace("_", "-"), types, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]}? " if near else ""
    raise UsageError(f"unknown board type {name!r}", f"{hint}Known: {', '.join(types)}.")


def describe_watts(name: str, rails: Collection[str] = ()) -> str:
    """How well a virtual board's power is known: "watts fitted, 3%" (the worst rail's median error), "watts assumed".

    `rails` are those of the total by default.
    """
    board_type = load_board_types().get(name)
    described = board_type.simulation.get("rails", ()) if board_type else ()
    errors = {rail["name"]: rail.get("error") for rail in described}
    found = [errors.get(rail) for rail in rails or (board_type.power.total if board_type else ())]
    known = [error for error in found if error is not None]
    return f"watts fitted, {max(known):.0%}" if known and len(known) == len(found) else "watts assumed"


def _read_folder(folder: pathlib.Path) -> dict[str, BoardType]:
    types = {}
    for path in sorted(folder.glob("*.yaml")):
        board_type = _parse_type(documents.read_text(path), path)
        types[board_type.name] = board_type
    return types


@functools.lru_cache(maxsize=64)
def _parse_type(text: str, path: pathlib.Path) -> BoardType:
    """Parse a type, cached: checking their dozen files takes 20 ms, and they are frozen."""
    board_type = documents.parse_document(text, BoardType, path)
    if board_type.name != path.stem:
        raise UsageError(f"{path}: name is {board_type.name!r}; it must be the file's, {path.stem!r}")
    return board_type
