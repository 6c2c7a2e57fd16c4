"""Choose one measured operating point of a sweep to set on boards; write it with its evidence as JSON, as a POSIX shell
script, or as a stanza of a Jetson's nvpmodel.conf.

Names and order in the stanza: LineageOS/android_device_nvidia_quill (T186), _galen (T194), _concord (T234),
nvpmodel/*.conf; T210: public copies of nvpmodel_t210_jetson-nano.conf. nvpmodel writes only what a stanza names.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from device_agent.protocol import EVERY_CLUSTER, OperatingPoint, StrEnum, format_hz
from device_agent.protocol.hardware import Cluster, PowerMode
from farm import units
from farm.errors import UsageError
from farm.inventory.board_types import BoardType
from farm.programs.metrics import read_metric
from farm.sweep import rows as sweep_rows
from farm.units import WATT, joule_scale

_TEMPLATE = pathlib.Path(__file__).with_name("point.sh")
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


class ExportForm(StrEnum):
    """The form of an exported operating point."""

    NVPMODEL = "nvpmodel"  # a stanza for the board's nvpmodel.conf
    JSON = "json"
    SH = "sh"  # a script that sets it and restores the earlier state


@dataclasses.dataclass(frozen=True)
class Chosen:
    """One measured row of a sweep's document, and its point."""

    document: Mapping[str, Any]
    series: Mapping[str, Any]
    row: Mapping[str, Any]

    @property
    def point(self) -> OperatingPoint:
        return OperatingPoint.from_dict(self.row["point"])

    @property
    def is_pick(self) -> bool:
        return bool(self.series["pick"]) and self.series["pick"]["key"] == self.row["key"]


def choose_point(document: Mapping[str, Any], series: Mapping[str, Any], key: str | None = None) -> Chosen:
    """Return the recommended point, or the point `key`, of a series.

    Raises UsageError where there is none, and for a point that was predicted or whose measurement is invalid: it has no
    evidence.
    """
    if key is None:
        if not series["pick"]:
            why = series["no_pick"] or "none was chosen"
            raise UsageError(f"sweep {document['sweep']} has no pick: {why}", "Name a point with --key.")
        key = str(series["pick"]["key"])
    row = sweep_rows.find_row(series, key)
    if row is None:
        examples = ", ".join(repr(each["key"]) for each in series["rows"][:3])
        raise UsageError(
            f"sweep {document['sweep']} has no operating point {key!r}",
            f"It has {len(series['rows'])}, such as {examples}; see `farm sweep show {document['sweep']}`.",
        )
    if row["throttled"] or row["invalid"]:
        why = row["invalid"] or "the board throttled"
        raise UsageError(f"{key}: what was measured there does not count: {why}", "Choose another point.")
    if not row["measured"]:
        raise UsageError(
            f"{key} was only predicted, not measured",
            f"Measure it first: `farm sweep pick {document['sweep']} --measure` or a sweep with --exhaustive.",
        )
    return Chosen(document, series, row)


def require_something_to_set(chosen: Chosen) -> OperatingPoint:
    """Return the point, if it differs from the board's default. Raises UsageError."""
    if chosen.point.is_empty:
        raise UsageError("this point leaves the clocks as the board has them: there is nothing to set")
    return chosen.point


def export_json(chosen: Chosen, board_type: BoardType) -> str:
    """Return the point with its evidence; `operating_point` has the form of agents and `device-agent clocks pin`."""
    row, document = chosen.row, chosen.document
    evidence = {
        name: row[name]
        for name in (
            "latency_s", "latency_p95_s", "power_w", "rail_power_w", "energy_j", "energy_above_idle_j", "temperature_c",
            "visits", "idle_power_w", "wall_power_w", "period", "metrics",
        )
    }  # fmt: skip
    content = {
        "operating_point": chosen.point.to_dict(),
        "key": row["key"],
        "board_type": board_type.name,
        "model": document["model"],
        "variant": chosen.series["variant"],
        "batch": chosen.series["batch"],
        "sweep": document["sweep"],
        "simulated": document["board"]["simulated"],
        "watts": document["board"]["watts"],
        "clocks": row["domains"],
        "is_pick": chosen.is_pick,
        "certainty": chosen.series["pick"]["certainty"] if chosen.is_pick else None,
        "goal": document["goal"],
        "evidence": evidence,
    }
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


def write_comments(chosen: Chosen) -> list[str]:
    """Return the evidence as lines of ASCII: boards' tools and editors may know nothing else."""
    row, document, series = chosen.row, chosen.document, chosen.series
    board = document["board"]
    day = time.strftime("%Y-%m-%d", time.localtime(document["started_at"]))
    lines = [
        f"Operating point {row['key']}",
        f"for {document['model']} ({sweep_rows.name_series(series, document)}) on {sweep_rows.name_boards(document)}.",
    ]
    if board["simulated"]:
        lines.append(f"SIMULATED ({board['watts']}): found on a model of the board. Nothing was measured on hardware.")
    lines.append(f"Evidence: sweep {document['sweep']} of {day}, {', '.join(board['names'])}; 95 % intervals:")
    metric = read_metric(document["goal"])
    seconds = metric.scale([row["latency_s"]["value"]])
    lines.append("  " + _quantity(metric.name, row["latency_s"], seconds))
    if row["latency_p95_s"] is not None:
        lines.append(f"  95th percentile of the {metric.name} {seconds.text(row['latency_p95_s'])}")
    if row["power_w"]:
        lines.append("  " + _quantity("power", row["power_w"], WATT))
    if row["energy_j"]:
        joules = joule_scale([row["energy_j"]["value"]])
        lines.append("  " + _quantity(f"energy per {metric.per}", row["energy_j"], joules))
    else:
        lines.append("  power and energy are not known: the board has no sensor")
    if row["wall_power_w"]:
        lines.append("  " + _quantity("power at the wall", row["wall_power_w"], WATT))
    if period := row["period"]:
        lines.append("  " + _quantity("mean power of the period", period["mean_power_w"], WATT))
    if chosen.is_pick:
        against = series["pick"]["against_fastest"]
        costs = f"{against['latency']:.3g} times the {'time' if metric.counted else metric.name}"
        costs += "" if against["energy"] is None else f" and {against['energy']:.3g} times the energy"
        lines.append(f"It is the sweep's pick for {sweep_rows.describe_goal(document['goal'])}:")
        lines.append(f"  {costs} of the fastest point measured; certain to")
        lines.append(f"  {units.format_share(series['pick']['certainty'])}.")
    if free := [d for d in row["domains"] if not d["held"] and d["units"] and d["freq_hz"]]:
        told = ", ".join(f"{d['name']} (up to {format_hz(d['freq_hz'])})" for d in free)
        lines.append(f"Left to the board, here as then: {told}.")
    return [_plain(line) for line in lines]


def _quantity(name: str, estimate: Mapping[str, float], scale: units.Scale) -> str:
    value, interval = scale.interval(estimate)
    return f"{name} {value} {scale.unit} ({interval.replace(' – ', ' to ')})"


def _plain(text: str) -> str:
    """Convert to one line of ASCII: names of models come from users, and a line break would end the comment."""
    known = text.replace("µ", "u").replace("–", "-")
    return "".join(c if c.isascii() and c.isprintable() else "?" for c in known)


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


# By `ExportForm`: what writes the text for a board of a type. Each raises UsageError for what the form cannot say.
WRITERS: Mapping[str, Callable[[Chosen, BoardType], str]] = {
    "sh": export_script,
    "nvpmodel": export_nvpmodel,
    "json": export_json,
}
