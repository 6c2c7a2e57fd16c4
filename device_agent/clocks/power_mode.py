"""nvpmodel's power modes, read from the board's configuration. Setting one needs `ClockAccess`.

Syntax: LineageOS/android_device_nvidia_quill and _galen, nvpmodel/*.conf.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping

from device_agent.protocol import EVERY_CLUSTER
from device_agent.protocol.hardware import PowerMode
from device_agent.sysfs import Tree, list_names, read_int, read_text

_CONFIGURATION = "/etc/nvpmodel.conf"
_FOLDER = "/etc/nvpmodel"
# The second may be missing from a user's PATH.
_TOOLS = ("nvpmodel", "/usr/sbin/nvpmodel")
_STANZA = re.compile(r"<\s*(PARAM|POWER_MODEL)\s+([^>]*?)\s*>")
_CPU = re.compile(r"/cpu(\d+)/")
# Configurations write this for "the hardware's own limit".
_UNLIMITED = 0x7FFFFFFF


@dataclasses.dataclass(frozen=True)
class Mode:
    """One power mode. Missing limits are the hardware's; `cpu_max_hz` is by CPU number.

    `gating` maps files of power-gated GPU units to their masks; changing one takes a reboot.
    """

    id: int
    name: str
    online: Mapping[int, bool] = dataclasses.field(default_factory=dict)
    cpu_max_hz: Mapping[int, int] = dataclasses.field(default_factory=dict)
    gpu_max_hz: int | None = None
    memory_max_hz: int | None = None
    gating: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def plan_online(self, online: Iterable[int], present: Iterable[int]) -> tuple[int, ...]:
        """Cores online after the mode is set; a configuration may name cores that this board lacks."""
        on = {cpu for cpu, is_on in self.online.items() if is_on}
        off = {cpu for cpu, is_on in self.online.items() if not is_on}
        return tuple(sorted(((set(online) | on) - off) & set(present)))


class PowerModes:
    """The modes of a board, read through nvpmodel."""

    def __init__(self, tree: Tree, modes: Iterable[Mode]) -> None:
        self._tree = tree
        self.modes = tuple(modes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(mode.name for mode in self.modes)

    def find(self, name: str) -> Mode | None:
        """The mode of this name, case ignored."""
        return next((mode for mode in self.modes if mode.name.lower() == name.lower()), None)

    def read_current(self) -> Mode | None:
        """The mode that nvpmodel reports; None if it does not report one."""
        text = _ask(self._tree) or ""
        if found := re.search(r"NV Power Mode:\s*(\S+)\s*(\d+)?", text):
            if found.group(2):
                return next((mode for mode in self.modes if mode.id == int(found.group(2))), None)
            return self.find(found.group(1))
        return None

    def needs_reboot(self, mode: Mode) -> bool | None:
        """Whether the mode gates other GPU units than now; None if the board does not say."""
        if all(other.gating == mode.gating for other in self.modes):
            return False
        masks = {path: read_int(self._tree, path) for path in mode.gating if path.startswith("/")}
        if masks and all(mask is not None for mask in masks.values()):
            return any(masks[path] != mask for path, mask in mode.gating.items() if path in masks)
        current = self.read_current()
        return None if current is None else current.gating != mode.gating


def find_power_modes(
    tree: Tree, defaults: Iterable[PowerMode] = (), clusters: Mapping[str, tuple[int, ...]] | None = None
) -> PowerModes | None:
    """The modes in the board's configuration, or its type's if that is unreadable and nvpmodel answers.

    `clusters` maps the type's clusters to CPUs. None: the board has no nvpmodel.
    """
    names = list_names(tree, _FOLDER, "*.conf")
    # Images for several boards hold several configurations; only nvpmodel knows which applies.
    candidates = [_CONFIGURATION, *(f"{_FOLDER}/{name}" for name in names if len(names) == 1)]
    for path in candidates:
        if modes := parse_configuration(read_text(tree, path) or ""):
            return PowerModes(tree, modes)
    known = [convert(mode, clusters or {}) for mode in defaults]
    return PowerModes(tree, known) if known and _ask(tree) is not None else None


def parse_configuration(text: str) -> tuple[Mode, ...]:
    """Parse nvpmodel's configuration; empty for any other text."""
    paths: dict[tuple[str, str], str] = {}
    modes: list[Mode] = []
    kind, section = "", {}
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        if stanza := _STANZA.match(line.strip()):
            kind, section = stanza.group(1), dict(re.findall(r"(\w+)=(\S+)", stanza.group(2)))
            if kind == "POWER_MODEL" and section.get("ID", "").isdecimal() and "NAME" in section:
                modes.append(Mode(int(section["ID"]), section["NAME"], {}, {}, None, None, {}))
        elif line.lstrip().startswith("<"):
            kind = ""
        elif kind == "PARAM" and len(words) == 2:
            paths[section.get("NAME", ""), words[0]] = words[1]
        elif kind == "POWER_MODEL" and len(words) == 3 and modes:
            modes[-1] = _add(modes[-1], words[0], words[1], words[2], paths)
    return tuple(modes)


def _add(mode: Mode, group: str, parameter: str, text: str, paths: Mapping[tuple[str, str], str]) -> Mode:
    """Add one line of a stanza to the mode."""
    try:
        value = int(text, 0)
    except ValueError:
        return mode
    path = paths.get((group, parameter), "")
    cpu = _CPU.search(path)
    limited = parameter == "MAX_FREQ" and 0 < value < _UNLIMITED
    if parameter.endswith("_PG_MASK"):
        return dataclasses.replace(mode, gating={**mode.gating, path or f"{group}.{parameter}": value})
    if group == "CPU_ONLINE" and (cpu or parameter.removeprefix("CORE_").isdecimal()):
        number = int(cpu.group(1) if cpu else parameter.removeprefix("CORE_"))
        return dataclasses.replace(mode, online={**mode.online, number: value != 0})
    if limited and cpu:
        return dataclasses.replace(mode, cpu_max_hz={**mode.cpu_max_hz, int(cpu.group(1)): value * 1000})
    if limited and group == "GPU":
        return dataclasses.replace(mode, gpu_max_hz=value)
    if parameter == "MAX_FREQ" and value > 0 and group == "EMC":
        return dataclasses.replace(mode, memory_max_hz=value)
    return mode


def convert(mode: PowerMode, clusters: Mapping[str, tuple[int, ...]]) -> Mode:
    """Express a board type's mode as the board's own configuration would."""
    everything = sorted(cpu for cpus in clusters.values() for cpu in cpus)
    caps = {name: mode.cpu_max_hz.get(name, mode.cpu_max_hz.get(EVERY_CLUSTER)) for name in clusters}
    return Mode(
        mode.id,
        mode.name,
        {} if mode.cores_online is None else {cpu: cpu in mode.cores_online for cpu in everything},
        {clusters[name][0]: int(cap) for name, cap in caps.items() if cap is not None},
        mode.gpu_max_hz,
        mode.memory_max_hz,
        {"power_gating": mode.power_gating},
    )


def _ask(tree: Tree) -> str | None:
    for tool in _TOOLS:
        try:
            return tree.run([tool, "-q"])
        except FileNotFoundError:
            continue
        except OSError:
            return None
    return None
