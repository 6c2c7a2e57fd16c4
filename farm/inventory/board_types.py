"""Board types: what boards of one kind share. Read from `inventory/board_types/*.yaml` and from a folder of the user's.

What a particular board really has is asked from its agent, not looked up here.
"""

from __future__ import annotations

import difflib
import os
import pathlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pydantic

from farm.errors import UsageError
from farm.inventory import documents, paths

# Names a folder with more board types, one YAML file each.
EXTRA_FOLDER_VARIABLE = "FARM_BOARD_TYPES"
HOST = "host"

Name = Annotated[str, pydantic.Field(pattern=r"^[a-z0-9][a-z0-9.-]*$", max_length=63)]
Feature = Annotated[str, pydantic.Field(pattern=r"^[+-][a-z0-9.-]+$")]


class Target(documents.StrictModel):
    """TVM's compile target for a board type that is not this machine."""

    kind: Literal["llvm"]
    mtriple: str = pydantic.Field(min_length=1)
    mcpu: str = pydantic.Field(min_length=1)
    mattr: tuple[Feature, ...] = ()
    # Without it MetaSchedule cannot parallelise.
    num_cores: int = pydantic.Field(alias="num-cores", ge=1, le=1024)

    def to_tvm(self) -> dict[str, Any]:
        """The dict that `tvm.target.Target` takes."""
        return self.model_dump(by_alias=True, mode="json", exclude_defaults=True)


class Cluster(documents.StrictModel):
    """Cores that share a clock. `cpus` are Linux CPU numbers; `isolated` ones run only what is sent there."""

    name: Name
    core: str
    cpus: tuple[Annotated[int, pydantic.Field(ge=0)], ...] = pydantic.Field(min_length=1)
    isolated: bool = False


class BoardType(documents.StrictModel):
    """What boards of one kind share.

    `target` and `link_triple` are None where the file says `host`: detect this machine. `memory_bytes` is None and
    `clusters` is empty where boards of the type differ. `pipeline` names the graph pipeline.
    """

    name: Name
    title: str = pydantic.Field(min_length=1)
    target: Target | None
    # Zig's form, with the oldest glibc a board of this type may have.
    link_triple: Annotated[str, pydantic.Field(pattern=r"^[a-z0-9_]+-linux-[a-z]+(\.\d+)*$")] | None
    host_is_board: bool = False
    memory_bytes: int | None = pydantic.Field(default=None, gt=0)
    clusters: tuple[Cluster, ...] = ()
    pipeline: str = "graph/1"

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
        if len(cpus) != len(set(cpus)):
            raise ValueError("clusters: a CPU is in two clusters, or twice in one")
        usable = sum(len(cluster.cpus) for cluster in self.clusters if not cluster.isolated)
        if self.target and self.clusters and self.target.num_cores > usable:
            raise ValueError(f"target.num-cores is {self.target.num_cores}, but clusters have {usable} usable CPUs")
        return self

    @property
    def cores(self) -> int | None:
        """All cores of a board, isolated ones included; None where only the board knows."""
        return sum(len(cluster.cpus) for cluster in self.clusters) or None


def load_board_types(extra_folder: pathlib.Path | None = None) -> dict[str, BoardType]:
    """Every known board type by name: the farm's own, and those of `extra_folder` (default: FARM_BOARD_TYPES).

    Raises UsageError where a file is wrong, is not named after its type, or takes a name of the farm's own: records
    would no longer say which of the two they were measured for.
    """
    types = _read_folder(paths.require_inventory_folder() / "board_types")
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
    return types


def require_board_type(name: str, types: Mapping[str, BoardType] | None = None) -> BoardType:
    """The board type called `name`. Raises UsageError with the nearest name and all known ones."""
    types = load_board_types() if types is None else types
    if name in types:
        return types[name]
    near = difflib.get_close_matches(name.lower().replace("_", "-"), types, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]}? " if near else ""
    raise UsageError(f"unknown board type {name!r}", f"{hint}Known: {', '.join(types)}.")


def _read_folder(folder: pathlib.Path) -> dict[str, BoardType]:
    types = {}
    for path in sorted(folder.glob("*.yaml")):
        board_type = documents.read_document(path, BoardType)
        if board_type.name != path.stem:
            raise UsageError(f"{path}: name is {board_type.name!r}; it must be the file's, {path.stem!r}")
        types[board_type.name] = board_type
    return types
