"""An operating point as a POSIX shell script that sets it on a board and restores the earlier state.

It does what `device_agent.clocks` does, in the same order, for boards without an agent. `point.sh` has the fixed parts;
here are those that depend on the point.
"""

from __future__ import annotations

import pathlib
import shlex
from collections.abc import Iterable, Iterator

from device_agent.protocol import EVERY_CLUSTER
from farm.errors import UsageError
from farm.inventory.board_types import BoardType
from farm.sweep.export.chosen import Chosen, require_something_to_set, write_comments

_TEMPLATE = pathlib.Path(__file__).with_name("point.sh")
_COMMENTS, _SETTINGS, _NAME = "#@comments@", "#@settings@", "@name@"


def export_script(chosen: Chosen, board_type: BoardType) -> str:
    """Return the script's text. Raises UsageError for a point that sets nothing or is unknown to the type."""
    require_something_to_set(chosen)
    comments = "\n".join(f"# {line}".rstrip() for line in write_comments(chosen))
    settings = "\n".join(f"    {line}" for line in _settings(chosen, board_type))
    text = _TEMPLATE.read_text(encoding="utf-8")
    name = f"tvm-farm-sweep-{chosen.document['sweep']}"
    return text.replace(_COMMENTS, comments).replace(_SETTINGS, settings).replace(_NAME, name)


def _settings(chosen: Chosen, board_type: BoardType) -> Iterator[str]:
    point = chosen.point
    held = _held_clusters(chosen, board_type)
    if point.power_mode is not None:
        touched = [f"keep_cpus {_words(cpus)}" for cpus, _ in held]
        yield from touched
        if point.gpu_freq_hz:
            yield f"keep_gpu {_words(board_type.gpu.devices if board_type.gpu else ())}".rstrip()
        yield f"power_mode {_find_mode_id(board_type, point.power_mode)}"
    if point.cores_online is not None:
        wanted = sorted(point.cores_online)
        everything = sorted(cpu for cluster in board_type.clusters for cpu in cluster.cpus)
        yield f"cores_on {_words(wanted)}"
        if off := [cpu for cpu in everything if cpu not in wanted]:
            yield f"cores_off {_words(reversed(off))}"
    if point.memory_freq_hz:
        yield f"hold_memory {point.memory_freq_hz}"
    for cpus, hz in held:
        yield f"hold_cpus {hz // 1000} {_words(cpus)}"
    if point.gpu_freq_hz:
        devices = board_type.gpu.devices if board_type.gpu else ()
        yield f"hold_gpu {point.gpu_freq_hz} {_words(devices)}".rstrip()


def _held_clusters(chosen: Chosen, board_type: BoardType) -> list[tuple[list[int], int]]:
    """Return CPUs that share a clock, with their pinned clock."""
    wanted, clusters = chosen.point.cpu_freq_hz, {cluster.name: cluster.cpus for cluster in board_type.clusters}
    if missing := sorted(wanted.keys() - clusters.keys() - {EVERY_CLUSTER}):
        raise UsageError(
            f"which CPUs belong to {missing[0]} is not known of the board type {board_type.name}",
            "Use --as json; agents know their clusters.",
        )
    online = chosen.point.cores_online
    found = []
    for name, cpus in clusters.items():
        hz = wanted.get(name, wanted.get(EVERY_CLUSTER))
        usable = [cpu for cpu in cpus if online is None or cpu in online]
        if hz and usable:
            found.append((usable, int(hz)))
    return found


def _find_mode_id(board_type: BoardType, name: str) -> int:
    for mode in board_type.power_modes:
        if mode.name.lower() == name.lower():
            return mode.id
    raise UsageError(f"the ID of the power mode {name} is not known of the board type {board_type.name}")


def _words(values: Iterable[object]) -> str:
    return " ".join(shlex.quote(str(value)) for value in values)
