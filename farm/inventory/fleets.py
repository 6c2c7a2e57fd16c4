"""Fleet files: the boards and their transports, in groups with inherited variables.

`fleet_document.py` validates the keys; this module makes one `FleetBoard` per board. `fleet_plan.py` compares them with
the store.
"""

from __future__ import annotations

import dataclasses
import pathlib
import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from device_agent.protocol import NAME_RULE, is_name
from farm.errors import UsageError
from farm.inventory import documents, fleet_document
from farm.inventory import fleet_addresses as addresses
from farm.inventory.board_types import BoardType, load_board_types, require_board_type
from farm.inventory.documents import Place
from farm.inventory.fleet_document import Group, Variables
from farm.inventory.power_commands import PowerCommands
from farm.values import Direct, Ssh, Transport, Virtual

SSH_PORT = 22
AGENT_PORT = 9090
TRACKER_PORT = 9190

T = TypeVar("T")
_ONLY_FOR = {
    "address": ("ssh",),
    "port": ("ssh", "direct"),
    "user": ("ssh",),
    "key_file": ("ssh",),
    "host_key": ("ssh",),
    "agent_port": ("ssh",),
    "tracker_port": ("ssh",),
    "seed": ("virtual",),
    "faults": ("virtual",),
    "time": ("virtual",),
    "meter": ("ssh", "virtual"),
}
_ASKS = {"transport": "ssh, direct or virtual", "type": "a board type"}


@dataclasses.dataclass(frozen=True)
class FleetBoard:
    """One board of a fleet file."""

    name: str
    board_type: str
    transport: Transport
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    power: PowerCommands | None = None

    @property
    def where(self) -> str:
        """Its transport in a few words."""
        match self.transport:
            case Virtual(seed, faults, live, _):
                return ", ".join((f"virtual, seed {seed}", *["live"] * live, *(f"fault {fault}" for fault in faults)))
            case Direct(on_demand=True):
                return "this machine, while a command uses it"
            case Direct(port):
                return "direct" if port is None else f"direct, port {port}"
            case Ssh(host, user, port):
                return f"ssh {user}{'@' if user else ''}{addresses.join(host, port)}"


@dataclasses.dataclass(frozen=True)
class Fleet:
    """Every board of a file, in order. Names are distinct, and so are addresses with ports."""

    path: pathlib.Path
    boards: tuple[FleetBoard, ...]


def read_fleet(path: pathlib.Path, types: Mapping[str, BoardType] | None = None) -> Fleet:
    """Read and check a fleet file; `types` are the known board types (default: all).

    Relative paths of key files and power commands start at the file's folder. Raises UsageError naming lines and keys.
    """
    types = load_board_types() if types is None else types
    document = documents.read_located(path, fleet_document.Group)
    reading = _Reading(path.absolute().parent, types)
    reading.read_group(document, {}, ())
    reading.require_distinct()
    if reading.faults:
        raise documents.to_error(path, reading.faults)
    if not reading.boards:
        raise UsageError(f"{path} describes no board", "Put one under `hosts:` of a group.")
    return Fleet(path, tuple(board for board, _ in reading.boards))


@dataclasses.dataclass(frozen=True)
class _Given:
    """A variable's value, and its place in the file."""

    value: Any
    place: Place


class _FaultError(Exception):
    def __init__(self, place: Place, message: str) -> None:
        super().__init__(message)
        self.place = place


class _Reading:
    """The conversion of a fleet file from groups to boards; collects all mistakes."""

    def __init__(self, folder: pathlib.Path, types: Mapping[str, BoardType]) -> None:
        self._folder = folder
        self._types = types
        self.boards: list[tuple[FleetBoard, Place]] = []
        self.faults: list[tuple[Place, str]] = []

    def read_group(self, group: Group, inherited: dict[str, _Given], place: Place) -> None:
        given = _override(inherited, group.vars, (*place, "vars"))
        for pattern, host in (group.hosts or {}).items():
            where = (*place, "hosts", pattern)
            try:
                self.boards += [
                    (board, where) for board in self._read_hosts(pattern, _override(given, host, where), where)
                ]
            except _FaultError as fault:
                self.faults.append((fault.place, str(fault)))
        for name, inner in (group.groups or {}).items():
            self.read_group(inner or Group(), given, (*place, "groups", name))

    def _read_hosts(self, pattern: str, given: dict[str, _Given], place: Place) -> Iterator[FleetBoard]:
        names = _expand(pattern, place)
        kind = _take(given, "transport", pattern, place)
        if "count" in given:
            count = given["count"]
            if kind != "virtual":
                raise _FaultError(count.place, f"{pattern}: count multiplies virtual boards; write a range of names")
            if len(names) * count.value > fleet_document.MAX_EXPANDED:
                raise _FaultError(count.place, f"{pattern}: more than {fleet_document.MAX_EXPANDED} boards")
            names = [each for name in names for each in fleet_document.number(name, count.value)]
        for name in names:
            if not is_name(name):
                raise _FaultError(place, f"{name!r} cannot be a board's name: {NAME_RULE}")
        board_type = self._read_type(_take(given, "type", pattern, place), kind, given["type"].place)
        for variable, said in given.items():
            if variable in _ONLY_FOR and kind not in _ONLY_FOR[variable] and said.place[: len(place)] == place:
                raise _FaultError(said.place, f"{pattern}: {variable} means nothing for a board that is {kind}")
        labels = dict(given["labels"].value) if "labels" in given else {}
        power = given["power"].value.place(self._folder) if "power" in given else None
        for name, transport in zip(names, self._read_transports(kind, names, pattern, given, place), strict=True):
            yield FleetBoard(name, board_type.name, transport, labels, power)

    def _read_type(self, name: str, kind: str, place: Place) -> BoardType:
        try:
            board_type = require_board_type(name, self._types)
        except UsageError as error:
            raise _FaultError(place, f"{error.message}. {error.hint}") from error
        if kind == "virtual" and not board_type.simulation:
            raise _FaultError(place, f"boards of the type {name} cannot be virtual: its file has no simulation section")
        if kind != "direct" and board_type.host_is_board:
            raise _FaultError(place, f"the type {name} is this machine itself, which only `direct` reaches")
        return board_type

    def _read_transports(
        self, kind: str, names: list[str], pattern: str, given: dict[str, _Given], place: Place
    ) -> Iterator[Transport]:
        meter = shlex.join(given["meter"].value) if "meter" in given else ""
        if kind == "virtual":
            first = given["seed"].value if "seed" in given else 0
            faults = tuple(given["faults"].value) if "faults" in given else ()
            live = "time" in given and given["time"].value == "live"
            if meter and not live:
                raise _FaultError(given["meter"].place, f"{pattern}: a virtual board with a meter needs `time: live`")
            yield from (Virtual(first + index, faults, live, meter) for index in range(len(names)))
            return
        ports = [
            None if port is None else _parse(addresses.parse_port, port, given.get("port"), place)
            for port in _spread(given, "port", names, [None] * len(names))
        ]
        if kind == "direct":
            yield from map(Direct, ports)
            return
        for address, port in zip(_spread(given, "address", names, names), ports, strict=True):
            yield Ssh(
                host=_parse(addresses.parse_address, address, given.get("address"), place),
                user=given["user"].value if "user" in given else "",
                port=port or SSH_PORT,
                identity_file=self._key_path(given["key_file"].value) if "key_file" in given else "",
                host_key=given["host_key"].value if "host_key" in given else "",
                agent_port=given["agent_port"].value if "agent_port" in given else AGENT_PORT,
                tracker_port=given["tracker_port"].value if "tracker_port" in given else TRACKER_PORT,
                meter=meter,
            )

    def _key_path(self, text: str) -> str:
        # `~` stays: each user of the farm has a home and a key there.
        return text if text.startswith("~") else str(self._folder / text)

    def require_distinct(self) -> None:
        """Record duplicate names and duplicate addresses with ports."""
        names: set[str] = set()
        reached: dict[tuple[str, int], str] = {}
        told: set[Place] = set()
        for board, place in self.boards:
            if board.name in names and place not in told:
                told.add(place)
                self.faults.append((place, f"a board called {board.name} is already described"))
            names.add(board.name)
            end = addresses.find_end(board.transport)
            if end is None:
                continue
            if (other := reached.setdefault(end, board.name)) != board.name and place not in told:
                told.add(place)
                self.faults.append((place, f"{board.name} is at {addresses.join(*end)}, and so is {other}"))


def _override(outer: Mapping[str, _Given], inner: Variables | None, place: Place) -> dict[str, _Given]:
    """The variables in force inside: inner ones win, labels one by one, and null removes."""
    given = dict(outer)
    for variable in sorted(inner.model_fields_set) if inner else ():
        value = getattr(inner, variable)
        if value is None:
            given.pop(variable, None)
            continue
        if variable == "labels" and variable in given:
            value = given[variable].value | value
        given[variable] = _Given(value, (*place, variable))
    return given


def _take(given: Mapping[str, _Given], variable: str, pattern: str, place: Place) -> Any:
    if variable not in given:
        raise _FaultError(place, f"{pattern} has no {variable}, nor has a group around it ({_ASKS[variable]})")
    return given[variable].value


def _expand(pattern: str, place: Place) -> list[str]:
    try:
        return fleet_document.expand(pattern)
    except ValueError as error:
        raise _FaultError(place, str(error)) from error


def _parse(parse: Callable[[str], T], text: str, said: _Given | None, place: Place) -> T:
    try:
        return parse(text)
    except ValueError as error:
        raise _FaultError(said.place if said else place, str(error)) from error


def _spread(given: Mapping[str, _Given], variable: str, names: list[str], default: list[Any]) -> list[Any]:
    """The variable's value for each board: one for all, or a range with one each."""
    if variable not in given:
        return default
    said = given[variable]
    values = _expand(said.value, said.place)
    if len(values) == 1:
        return values * len(names)
    if len(values) != len(names):
        raise _FaultError(
            said.place, f"{variable} {said.value!r} stands for {len(values)}, but the boards are {len(names)}"
        )
    return values
