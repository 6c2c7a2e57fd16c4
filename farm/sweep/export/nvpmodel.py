"""An operating point as a file for a board: a stanza of a Jetson's nvpmodel.conf, or a POSIX shell script.

Names and order: LineageOS/android_device_nvidia_quill (T186), _galen (T194), _concord (T234), nvpmodel/*.conf; T210:
public copies of nvpmodel_t210_jetson-nano.conf. nvpmodel writes only what a stanza names.
"""

from __future__ import annotations

import pathlib
import shlex
from collections.abc import Iterable, Iterator
from typing import Any

from device_agent.protocol import EVERY_CLUSTER
from device_agent.protocol.hardware import Cluster, PowerMode
from farm.errors import UsageError
from farm.inventory.board_types import BoardType
from farm.sweep.export.chosen import Chosen, require_something_to_set, write_comments

_TEMPLATE = pathlib.Path(__file__).with_name("point.sh")
_COMMENTS, _SETTINGS, _NAME = "#@comments@", "#@settings@", "@name@"


def export_script(chosen: Chosen, board_type: BoardType) -> str:
    """Return the script's text. Raises UsageError for a point that sets nothing or is unknown to the type."""
    require_something_to_set(chosen)
    comments = "\n".join(f"# {line}".rstrip() for line in write_comments(chosen))
    settings = "\n".join(f"    {line}" for line in _list_settings(chosen, board_type))
    text = _TEMPLATE.read_text(encoding="utf-8")
    name = f"tvm-farm-sweep-{chosen.document['sweep']}"
    return text.replace(_COMMENTS, comments).replace(_SETTINGS, settings).replace(_NAME, name)


def _list_settings(chosen: Chosen, board_type: BoardType) -> Iterator[str]:
    point = chosen.point
    held = _held_clusters(chosen, board_type)
    devices = _words(board_type.gpu.devices if board_type.gpu else ())
    if point.power_mode is not None:
        yield from (f"keep_cpus {_words(cpus)}" for cpus, _ in held)
        if point.gpu_freq_hz:
            yield f"keep_gpu {devices}".rstrip()
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
        yield f"hold_gpu {point.gpu_freq_hz} {devices}".rstrip()


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


# The file's names of a cluster's clock; numbered where all clusters are alike. Carmel counts as Denver.
_CPU_NAMES = {
    "cortex-a57": "CPU_A57",
    "denver2": "CPU_DENVER",
    "carmel": "CPU_DENVER_{}",
    "cortex-a78ae": "CPU_A78_{}",
}
# Lowest clock that the stock modes allow, in kHz; elsewhere 0.
_LOWEST_KHZ = {"t194": 1_190_400, "t234": 729_600}
# T186's file leaves its boot core out.
_WITHOUT_CORE_0 = ("t186",)
_NO_LIMIT = -1


def export_nvpmodel(chosen: Chosen, board_type: BoardType) -> str:
    """Return the stanza, with its evidence as comments, and the first ID that stock files leave free.

    Raises UsageError for what nvpmodel cannot express, saying why.
    """
    point = require_something_to_set(chosen)
    if not board_type.power_modes:
        raise UsageError(
            f"boards of type {board_type.name} have no nvpmodel, so it has no modes to add one to",
            "Use --as sh or --as json.",
        )
    number = max(mode.id for mode in board_type.power_modes) + 1
    base = _find_mode(board_type, point.power_mode)
    name = f"FARM_SWEEP_{chosen.document['sweep']}"
    comments = [
        *write_comments(chosen),
        "",
        f"Append this to /etc/nvpmodel.conf (keep a copy), then: sudo nvpmodel -m {number}",
        f"Take another ID if the file has {number} already.",
        f"Written in the words of L4T {' and '.join(board_type.releases)}.",
        *_caveats(chosen, board_type, base),
    ]
    lines = [f"# {line}".rstrip() for line in comments]
    lines += [f"< POWER_MODEL ID={number} NAME={name} >", *_settings(chosen, board_type, base)]
    return "\n".join(lines) + "\n"


def _settings(chosen: Chosen, board_type: BoardType, base: PowerMode | None) -> Iterator[str]:
    domains = {domain["name"]: domain for domain in chosen.row["domains"]}
    online = _plan_online(chosen, board_type, base)
    for cpu in sorted(cpu for cluster in board_type.clusters for cpu in cluster.cpus):
        if cpu or board_type.soc not in _WITHOUT_CORE_0:
            yield f"CPU_ONLINE CORE_{cpu} {int(cpu in online)}"
    if base and len({mode.power_gating for mode in board_type.power_modes}) > 1:
        yield f"TPC_POWER_GATING TPC_PG_MASK {base.power_gating}"
    for index, cluster in enumerate(board_type.clusters):
        if not online.isdisjoint(cluster.cpus):
            yield from _cluster_settings(cluster, index, domains, board_type, base)
    if board_type.gpu:
        yield "GPU_POWER_CONTROL_ENABLE GPU_PWR_CNTL_EN on"
        held_hz = chosen.point.gpu_freq_hz
        cap_hz = base.gpu_max_hz if base else None
        yield f"GPU MIN_FREQ {held_hz or 0}"
        yield f"GPU MAX_FREQ {held_hz or cap_hz or _NO_LIMIT}"
        yield "GPU_POWER_CONTROL_DISABLE GPU_PWR_CNTL_DIS auto"
    if board_type.memory:
        cap_hz = chosen.point.memory_freq_hz or (base.memory_max_hz if base else None)
        yield f"EMC MAX_FREQ {cap_hz or 0}"


def _cluster_settings(
    cluster: Cluster, index: int, domains: dict[str, Any], board_type: BoardType, base: PowerMode | None
) -> Iterator[str]:
    name = _require_name(cluster, board_type).format(index)
    domain = domains.get(cluster.name)
    if domain and domain["held"]:
        khz = domain["freq_hz"] // 1000
        yield f"{name} MIN_FREQ {khz}"
        yield f"{name} MAX_FREQ {khz}"
        return
    cap_hz = (base.cpu_max_hz.get(cluster.name, base.cpu_max_hz.get(EVERY_CLUSTER)) if base else None) or None
    yield f"{name} MIN_FREQ {_LOWEST_KHZ.get(board_type.soc, 0)}"
    yield f"{name} MAX_FREQ {int(cap_hz) // 1000 if cap_hz else _NO_LIMIT}"


def _plan_online(chosen: Chosen, board_type: BoardType, base: PowerMode | None) -> frozenset[int]:
    """Return the CPUs that were online; where only their number is known, the first of each cluster."""
    if chosen.point.cores_online is not None:
        return frozenset(chosen.point.cores_online)
    if base and base.cores_online is not None:
        return frozenset(base.cores_online)
    units = {domain["name"]: domain["units"] for domain in chosen.row["domains"]}
    return frozenset(
        cpu for cluster in board_type.clusters for cpu in cluster.cpus[: units.get(cluster.name, len(cluster.cpus))]
    )


def _caveats(chosen: Chosen, board_type: BoardType, base: PowerMode | None) -> Iterator[str]:
    """List what a stanza cannot express."""
    if chosen.point.memory_freq_hz:
        yield "nvpmodel caps the memory clock and cannot hold it: with little traffic it may be lower than it was when"
        yield "this was measured. The script that `--as sh` writes holds it."
    if board_type.soc in ("t194", "t234"):
        copied = base.name if base else "that boards started in"
        yield "Not named, so left as the mode before left them: masks of parts without power (TPC_PG_MASK, FBP_PG_MASK)"
        yield f"and clocks of DLA, PVA and video. To boot into this mode, copy those lines from the mode {copied}."


def _find_mode(board_type: BoardType, name: str | None) -> PowerMode | None:
    if name is None:
        return None
    for mode in board_type.power_modes:
        if mode.name.lower() == name.lower():
            return mode
    raise UsageError(
        f"what the power mode {name} limits is not known of the board type {board_type.name}",
        "Use --as sh: it sets the mode by asking nvpmodel.",
    )


def _require_name(cluster: Cluster, board_type: BoardType) -> str:
    if cluster.core not in _CPU_NAMES:
        known = ", ".join(_CPU_NAMES)
        raise UsageError(
            f"what nvpmodel calls the clock of {cluster.name} ({cluster.core}) of {board_type.name} is not known",
            f"Known are {known}. Use --as sh or --as json.",
        )
    return _CPU_NAMES[cluster.core]
