"""CPU files of a virtual board: hot-plug, cpufreq per core and policy, topology."""

from __future__ import annotations

import errno
from collections.abc import Callable

from device_agent.protocol.texts import format_cpus
from device_agent.virtual.board import VirtualBoard
from device_agent.virtual.clocks import CpuCluster, refuse
from device_agent.virtual.files import Files, parse_number
from device_agent.virtual.noise import Noise

_CPUS = "/sys/devices/system/cpu"
# The TX2's driver counts cycles for some 20 us; an idle core has counted none now and then.
_JITTER = 0.01
_IDLE_ZERO = 0.2


def add_cpu_files(board: VirtualBoard, files: Files, noise: Noise) -> None:
    """Everything below /sys/devices/system/cpu as it is with the cores that are online now."""
    everything = format_cpus(board.cpus)
    files.fixed(f"{_CPUS}/possible", everything)
    files.fixed(f"{_CPUS}/present", everything)
    isolated = tuple(cpu for cluster in board.clusters.values() if cluster.isolated for cpu in cluster.cpus)
    files.fixed(f"{_CPUS}/isolated", format_cpus(isolated))
    files.add(f"{_CPUS}/online", lambda: format_cpus(tuple(board.online)))
    offline = tuple(cpu for cpu in board.cpus if cpu not in board.online)
    files.fixed(f"{_CPUS}/offline", format_cpus(offline))
    for index, cluster in enumerate(board.clusters.values()):
        for cpu in cluster.cpus:
            files.fixed(f"{_CPUS}/cpu{cpu}/topology/physical_package_id", str(index))
            files.fixed(f"{_CPUS}/cpu{cpu}/topology/core_siblings_list", format_cpus(cluster.cpus))
            if cpu != board.cpus[0]:  # the boot core has no such file
                files.add(f"{_CPUS}/cpu{cpu}/online", _read_online(board, cpu), _write_online(board, cpu))
        online = board.online_in(cluster)
        if online:
            policy = f"{_CPUS}/cpufreq/policy{cluster.cpus[0]}"
            _add_policy(board, files, cluster, policy, noise)
            for cpu in online:
                files.link(f"{_CPUS}/cpu{cpu}/cpufreq", policy)


def _read_online(board: VirtualBoard, cpu: int) -> Callable[[], str]:
    return lambda: str(int(cpu in board.online))


def _write_online(board: VirtualBoard, cpu: int) -> Callable[[str], None]:
    def write(text: str) -> None:
        if text not in ("0", "1"):
            raise refuse(errno.EINVAL)
        if (text == "1") != (cpu in board.online):
            board.set_online(cpu, text == "1")

    return write


def _add_policy(board: VirtualBoard, files: Files, cluster: CpuCluster, policy: str, noise: Noise) -> None:
    clock = cluster.clock
    files.fixed(f"{policy}/related_cpus", format_blanks(cluster.cpus))
    files.fixed(f"{policy}/affected_cpus", format_blanks(board.online_in(cluster)))
    files.fixed(f"{policy}/cpuinfo_min_freq", str(clock.table[0] // 1000))
    files.fixed(f"{policy}/cpuinfo_max_freq", str(clock.table[-1] // 1000))
    files.fixed(f"{policy}/cpuinfo_transition_latency", "300000")
    files.fixed(f"{policy}/scaling_driver", "tegra_cpufreq" if board.parameters.release else "cpufreq-dt")
    files.fixed(f"{policy}/scaling_available_frequencies", format_blanks([hz // 1000 for hz in clock.table]))
    files.fixed(f"{policy}/scaling_available_governors", " ".join(clock.governors))
    files.add(f"{policy}/scaling_min_freq", lambda: str(clock.min_hz // 1000), lambda t: clock.set_min(_hz(t)))
    files.add(f"{policy}/scaling_max_freq", lambda: str(clock.max_hz // 1000), lambda t: clock.set_max(_hz(t)))
    files.add(f"{policy}/scaling_governor", lambda: clock.governor, clock.set_governor)

    def read_now(hz: Callable[[], int] = lambda: cluster.hz) -> str:
        khz = hz() // 1000
        if not cluster.measured_clock:
            return str(khz)
        if not cluster.busy and noise.share("idle", cluster.name) < _IDLE_ZERO:
            return "0"
        return str(round(khz * (1 + _JITTER * (2 * noise.share("jitter", cluster.name) - 1))))

    files.add(f"{policy}/scaling_cur_freq", read_now)
    files.add(f"{policy}/cpuinfo_cur_freq", lambda: read_now(lambda: cluster.true_hz), private=True)

    def read_speed() -> str:
        return str(clock.speed_hz // 1000) if clock.governor == "userspace" else "<unsupported>"

    def write_speed(text: str) -> None:
        if clock.governor != "userspace":
            raise refuse(errno.EINVAL)
        clock.speed_hz = _hz(text)

    files.add(f"{policy}/scaling_setspeed", read_speed, write_speed)


def _hz(text: str) -> int:
    return parse_number(text) * 1000


def format_blanks(numbers: tuple[int, ...] | list[int]) -> str:
    """Numbers as the kernel lists them in most files."""
    return " ".join(map(str, numbers))
