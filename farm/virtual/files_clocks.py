"""Clock files of a virtual board: cpufreq, devfreq, the memory drivers `override` and `bpmp`, and their caps."""

from __future__ import annotations

import errno
from collections.abc import Callable

from device_agent.protocol.texts import format_cpus
from farm.virtual.board import VirtualBoard
from farm.virtual.clocks import CpuCluster, Gpu, MemoryClock, refuse
from farm.virtual.files import Files, parse_number
from farm.virtual.sensors import Noise

_CPUS = "/sys/devices/system/cpu"
# The TX2's driver counts cycles for some 20 us; an idle core sometimes counts none.
_JITTER = 0.01
_IDLE_ZERO = 0.2

_DEBUG = "/sys/kernel/debug"
# The GPU's folder and the memory's cap by release.
_GPU_PARENT = {"R36": "/sys/devices/platform/bus@0"}
MEMORY_CAP = {"R36": "/sys/kernel/nvpmodel_clk_cap/emc"}
DEFAULT_MEMORY_CAP = "/sys/kernel/nvpmodel_emc_cap/emc_iso_cap"


def add_cpu_files(board: VirtualBoard, files: Files, noise: Noise) -> None:
    """Add everything below /sys/devices/system/cpu for the cores now online."""
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
    """Format numbers as the kernel does in most files."""
    return " ".join(map(str, numbers))


def add_gpu_files(board: VirtualBoard, files: Files) -> None:
    """Add the GPU's device and devfreq folders and their aliases."""
    gpu = board.gpu
    if gpu is None or board.board_type.gpu is None:
        return
    release = board.parameters.release
    name = board.gpu_device
    device = f"{board.parameters.gpu_path or _GPU_PARENT.get(release, '/sys/devices')}/{name}"
    folder = f"{device}/devfreq/{name}"
    files.link(f"/sys/class/devfreq/{name}", folder)
    files.link(f"{folder}/device", device)
    if release != "R36":
        files.link("/sys/devices/gpu.0", device)
        files.link(f"/sys/devices/platform/{name}", device)
    files.fixed(f"{device}/of_node/name", name.partition(".")[2])
    clock = gpu.clock
    files.fixed(f"{folder}/available_frequencies", " ".join(map(str, clock.table)))
    files.fixed(f"{folder}/available_governors", " ".join(clock.governors))
    files.add(f"{folder}/governor", lambda: clock.governor, clock.set_governor)
    files.add(f"{folder}/min_freq", lambda: str(clock.min_hz), lambda text: clock.set_min(parse_number(text)))
    files.add(f"{folder}/max_freq", lambda: str(clock.max_hz), lambda text: clock.set_max(parse_number(text)))
    files.add(f"{folder}/cur_freq", lambda: str(gpu.hz))
    files.add(f"{folder}/target_freq", lambda: str(gpu.hz))
    files.fixed(f"{folder}/polling_interval", "25")
    files.fixed(f"{folder}/trans_stat", "From : To")
    if release in ("R28", "R32"):
        files.add(
            f"{folder}/userspace/set_freq",
            lambda: str(clock.speed_hz),
            lambda text: setattr(clock, "speed_hz", parse_number(text)),
        )
    # A gated GPU shows its last load; this model's did nothing.
    files.add(f"{device}/load", lambda: str(round(1000 * gpu.busy)))
    files.add(
        f"{device}/railgate_enable",
        lambda: str(int(gpu.railgate)),
        lambda text: setattr(gpu, "railgate", bool(parse_number(text))),
    )
    files.add(f"{device}/power/control", lambda: gpu.power_control, _write_power_control(gpu))
    files.add(f"{device}/power/runtime_status", lambda: "suspended" if gpu.gated else "active")
    files.fixed(f"{device}/enable_3d_scaling", "1")
    masks = {mode.power_gating for mode in board.board_type.power_modes}
    if masks - {0} or board.board_type.soc in ("t194", "t234"):
        mask = "fbp_pg_mask" if board.board_type.soc == "t234" else "tpc_pg_mask"
        files.add(f"{device}/{mask}", lambda: str(board.power_mode.power_gating if board.power_mode else 0))


def _write_power_control(gpu: Gpu) -> Callable[[str], None]:
    def write(text: str) -> None:
        if text not in ("on", "auto"):
            raise refuse(errno.EINVAL)
        gpu.power_control = text

    return write


def add_memory_files(board: VirtualBoard, files: Files) -> None:
    """Add the memory clock's files of the board's driver, and nvpmodel's cap."""
    memory = board.memory
    if memory is None or board.board_type.memory is None:
        return
    cap = MEMORY_CAP.get(board.parameters.release, DEFAULT_MEMORY_CAP)
    files.add(cap, lambda: str(memory.cap_hz), lambda text: setattr(memory, "cap_hz", parse_number(text)))
    files.add(f"{_DEBUG}/clk/emc/clk_rate", lambda: str(board.memory_hz), private=True)
    if board.board_type.memory.driver == "override":
        _add_override(board, files, memory)
    else:
        _add_bpmp(board, files, memory)


def _add_override(board: VirtualBoard, files: Files, memory: MemoryClock) -> None:
    folder, manager = f"{_DEBUG}/clk/override.emc", f"{_DEBUG}/tegra_bwmgr"
    files.add(f"{folder}/clk_rate", lambda: str(memory.rate_hz), private=True)
    files.add(
        f"{folder}/clk_update_rate",
        lambda: str(memory.rate_hz),
        lambda text: memory.set_rate(parse_number(text)),
        private=True,
    )
    files.add(f"{folder}/clk_state", lambda: str(int(memory.locked)), _write_lock(memory), private=True)
    files.add(f"{manager}/emc_rate", lambda: str(board.memory_hz), private=True)
    files.add(f"{manager}/emc_min_rate", lambda: str(memory.table[0]), private=True)
    files.add(f"{manager}/emc_max_rate", lambda: str(memory.highest_hz), private=True)


def _add_bpmp(board: VirtualBoard, files: Files, memory: MemoryClock) -> None:
    folder = f"{_DEBUG}/bpmp/debug/clk/emc"

    def set_rate(text: str) -> None:
        hz = parse_number(text)
        if memory.locked:  # else the kernel's next request undoes it
            memory.set_rate(hz)

    files.add(f"{folder}/mrq_rate_locked", lambda: str(int(memory.locked)), _write_lock(memory, board), private=True)
    files.add(f"{folder}/rate", lambda: str(board.memory_hz), set_rate, private=True)
    files.add(
        f"{folder}/state",
        lambda: str(int(memory.enabled)),
        lambda text: setattr(memory, "enabled", bool(parse_number(text))),
        private=True,
    )
    files.add(f"{folder}/min_rate", lambda: str(memory.table[0]), private=True)
    files.add(f"{folder}/max_rate", lambda: str(memory.highest_hz), private=True)
    rates = " ".join(str(hz // 1000) for hz in memory.table)
    files.add(f"{_DEBUG}/bpmp/debug/emc/possible_rates", lambda: rates, private=True)


def _write_lock(memory: MemoryClock, held: VirtualBoard | None = None) -> Callable[[str], None]:
    """Lock at `held`'s present clock; without it, at the rate set before."""

    def write(text: str) -> None:
        locked = bool(parse_number(text))
        if locked and not memory.locked and held is not None:
            memory.rate_hz = held.memory_hz
        memory.locked = locked

    return write
