"""Holding a point over a handful of files: order of writes, what is read back, and how each failure ends."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from device_agent.board_types import BoardType
from device_agent.clocks.access import AccessStatus
from device_agent.clocks.controller import Controller
from device_agent.clocks.platform import Platform
from device_agent.errors import AgentError, BusyError, ClockError, HelperUnavailableError, RefusedError, UnsafeError
from device_agent.protocol import EVERY_CLUSTER, OperatingPoint, PinStatus
from device_agent.protocol.hardware import Cluster, Memory
from device_agent.sysfs import FileTree

_CPUS = "/sys/devices/system/cpu"
_POLICY = f"{_CPUS}/cpufreq/policy0"
_DEBUG = "/sys/kernel/debug"
_CAP = "/sys/kernel/nvpmodel_emc_cap/emc_iso_cap"
_GPU = "/sys/class/devfreq/57000000.gpu"
_LOW, _MID, _HIGH = 1_000_000_000, 1_500_000_000, 2_000_000_000


class Kernel(FileTree):
    """A folder of kernel files. `drivers` do what the kernel does when a file is written."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.drivers: dict[str, Callable[[str], None]] = {}
        self.hidden: tuple[str, ...] = ()  # root's alone

    def put(self, path: str, text: object) -> None:
        file = Path(self._at(path))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def read(self, path: str) -> str:
        if path.startswith(self.hidden or "-"):
            raise PermissionError(13, "Permission denied", path)
        return super().read(path)

    def write(self, path: str, text: str) -> None:
        if driver := self.drivers.get(path):
            driver(text)
        else:
            super().write(path, text)


class Access:
    """`ClockAccess` over a kernel's files that remembers what was written and whether it was restored."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.writes: list[tuple[str, str]] = []
        self.begun: list[str] = []
        self.restored = 0
        self.fail_begin: AgentError | None = None
        self.fail_restore: AgentError | None = None

    def status(self) -> AccessStatus:
        return AccessStatus(self.begun[-1] if len(self.begun) > self.restored else "")

    def begin(self, holder: str) -> None:
        if self.fail_begin:
            raise self.fail_begin
        if len(self.begun) == self.restored:
            self.begun.append(holder)

    def read(self, path: str) -> str:
        return FileTree.read(self.kernel, path)

    def write(self, path: str, text: str) -> None:
        self.writes.append((path, text))
        self.kernel.write(path, text)

    def set_power_mode(self, mode_id: int) -> str:
        raise RefusedError(f"no mode {mode_id}")

    def restore(self) -> tuple[str, ...]:
        if self.fail_restore:
            raise self.fail_restore
        self.restored = len(self.begun)
        return ("put back",)

    def clear_unsafe(self, force: bool = False) -> tuple[str, ...]:
        return ()

    def close(self) -> None:
        self.restored = len(self.begun)


@dataclasses.dataclass
class Board:
    kernel: Kernel
    access: Access
    controller: Controller

    @property
    def written(self) -> list[str]:
        return [f"{path.rpartition('/')[2]}={text}" for path, text in self.access.writes]


def add_policy(kernel: Kernel, number: int, cpus: str, table: str = "1000000 1500000 2000000") -> None:
    """A cpufreq policy whose clock follows its lower limit, and whose limits may not cross."""
    folder = f"{_CPUS}/cpufreq/policy{number}"
    lowest, highest = table.split()[0], table.split()[-1]
    kernel.put(f"{folder}/related_cpus", cpus)
    kernel.put(f"{folder}/scaling_available_frequencies", table)
    kernel.put(f"{folder}/cpuinfo_min_freq", lowest)
    kernel.put(f"{folder}/cpuinfo_max_freq", highest)
    kernel.put(f"{folder}/scaling_min_freq", lowest)
    kernel.put(f"{folder}/scaling_max_freq", highest)
    kernel.put(f"{folder}/scaling_cur_freq", lowest)

    def set_min(text: str) -> None:
        if int(text) > int(kernel.read(f"{folder}/scaling_max_freq")):
            raise OSError(22, "Invalid argument")
        kernel.put(f"{folder}/scaling_min_freq", text)
        kernel.put(f"{folder}/scaling_cur_freq", text)

    def set_max(text: str) -> None:
        if int(text) < int(kernel.read(f"{folder}/scaling_min_freq")):
            raise OSError(22, "Invalid argument")
        kernel.put(f"{folder}/scaling_max_freq", text)

    kernel.drivers[f"{folder}/scaling_min_freq"] = set_min
    kernel.drivers[f"{folder}/scaling_max_freq"] = set_max


def add_memory(kernel: Kernel, driver: str, high_hz: int = 1_600_000_000) -> None:
    """The memory clock's files; firmware takes what its table has and drops the rest."""
    table = (204_000_000, 800_000_000, 1_600_000_000)
    folder = f"{_DEBUG}/clk/override.emc" if driver == "override" else f"{_DEBUG}/bpmp/debug/clk/emc"
    rate, lock = ("clk_update_rate", "clk_state") if driver == "override" else ("rate", "mrq_rate_locked")
    limits = f"{_DEBUG}/tegra_bwmgr/emc_{{}}_rate" if driver == "override" else f"{folder}/{{}}_rate"
    now = f"{_DEBUG}/tegra_bwmgr/emc_rate" if driver == "override" else f"{folder}/rate"
    kernel.put(limits.format("min"), table[0])
    kernel.put(limits.format("max"), high_hz)
    kernel.put(now, table[0])
    kernel.put(f"{folder}/{rate}", table[0])
    kernel.put(f"{folder}/{lock}", 0)
    kernel.put(f"{folder}/state", 0)
    if driver == "bpmp":
        kernel.put(f"{_DEBUG}/bpmp/debug/emc/possible_rates", " ".join(str(hz // 1000) for hz in table))

    def set_rate(text: str) -> None:
        if int(text) in table:
            kernel.put(now, min(int(text), high_hz))

    kernel.drivers[f"{folder}/{rate}"] = set_rate
    kernel.put(_CAP, 800_000_000)


def add_gpu(root: Path) -> None:
    """A GPU's devfreq folder, its power saved when idle."""
    kernel = Kernel(root)
    kernel.put(f"{_GPU}/available_frequencies", f"{_LOW} {_HIGH}")
    kernel.put(f"{_GPU}/device/railgate_enable", 1)


def make_board(root: Path, memory: Memory | None = None, floors: tuple[tuple[int, int], ...] = ()) -> Board:
    kernel = Kernel(root)
    kernel.put(f"{_CPUS}/present", "0-3")
    kernel.put(f"{_CPUS}/online", "0-3")
    for cpu in (1, 2, 3):
        kernel.put(f"{_CPUS}/cpu{cpu}/online", 1)

        def switch(text: str, cpu: int = cpu) -> None:
            online = {int(c) for c in kernel.read(f"{_CPUS}/online").replace("0-3", "0,1,2,3").split(",")}
            online = online | {cpu} if text == "1" else online - {cpu}
            kernel.put(f"{_CPUS}/online", ",".join(map(str, sorted(online))))

        kernel.drivers[f"{_CPUS}/cpu{cpu}/online"] = switch
    add_policy(kernel, 0, "0 1")
    add_policy(kernel, 2, "2 3")
    if memory:
        add_memory(kernel, memory.driver)
    known = BoardType(
        "acme",
        clusters=(Cluster("little", "a", (0, 1), memory_floor_hz=floors), Cluster("big", "b", (2, 3))),
        memory=memory,
    )
    access = Access(kernel)
    return Board(kernel, access, Controller(Platform.discover(kernel, known, access), access, "test"))


def test_points_add_up_until_they_are_let_go(tmp_path: Path) -> None:
    """What a second pin does not name stays; `*` goes before what was held by name."""
    board = make_board(tmp_path)
    board.controller.pin(OperatingPoint(cpu_freq_hz={"little": _LOW}))
    report = board.controller.pin(OperatingPoint(cpu_freq_hz={"big": _HIGH}))
    assert report.reached == OperatingPoint(cpu_freq_hz={"little": _LOW, "big": _HIGH})
    report = board.controller.pin(OperatingPoint(cpu_freq_hz={EVERY_CLUSTER: _MID}))
    assert report.reached == OperatingPoint(cpu_freq_hz={"little": _MID, "big": _MID})
    report = board.controller.pin(OperatingPoint(cores_online=(0, 1)))
    assert report.reached == OperatingPoint(cores_online=(0, 1), cpu_freq_hz={"little": _MID})
    report = board.controller.unpin()
    assert (report.status, report.reached, report.notes) == (PinStatus.OK, None, ("put back",))
    assert board.controller.unpin().message == "nothing was held"


@pytest.mark.parametrize(
    ("point", "message"),
    [
        (
            OperatingPoint(cpu_freq_hz={"little": 1_200_000_000}),
            "little has no 1200 MHz; nearest: 1000 MHz and 1500 MHz; it has 1000, 1500, 2000 MHz",
        ),
        (OperatingPoint(cpu_freq_hz={"little": 3_000_000_000}), "nearest: 2000 MHz; it has"),
        (OperatingPoint(cpu_freq_hz={"little": _LOW, "mid": _LOW}), "no cluster 'mid' here; there are little, big"),
        (OperatingPoint(cores_online=(0, 1), cpu_freq_hz={"big": _LOW}), "bring CPUs 2, 3 online"),
        (OperatingPoint(cores_online=(1, 2)), "CPU 0 cannot be taken offline"),
        (OperatingPoint(cores_online=(0, 7)), "no CPU 7 here; there are CPUs 0, 1, 2, 3"),
        (OperatingPoint(gpu_freq_hz=_LOW), "no GPU clock"),
        (OperatingPoint(memory_freq_hz=_LOW), "no memory clock"),
        (OperatingPoint(power_mode="MAXN"), "no power modes"),
    ],
)
def test_a_point_that_the_board_lacks_is_refused_before_the_first_write(
    tmp_path: Path, point: OperatingPoint, message: str
) -> None:
    """The message names what there is; what was held before still is."""
    board = make_board(tmp_path)
    report = board.controller.pin(point)
    assert (report.status, report.reached) == (PinStatus.REFUSED, None)
    assert message in report.message
    assert not board.access.begun
    held = board.controller.pin(OperatingPoint(cpu_freq_hz={"little": _HIGH})).reached
    board.access.writes.clear()
    report = board.controller.pin(point)
    assert (report.status, report.reached, board.written) == (PinStatus.REFUSED, held, [])
    assert board.access.restored == 0


def test_what_a_driver_rounds_is_reached_and_noted(tmp_path: Path) -> None:
    """Limits that agree on another value than asked for are the point reached."""
    board = make_board(tmp_path)
    for file in ("scaling_min_freq", "scaling_max_freq"):
        board.kernel.drivers[f"{_POLICY}/{file}"] = lambda text, file=file: board.kernel.put(  # type: ignore[misc]
            f"{_POLICY}/{file}", 1_512_000
        )
    board.kernel.put(f"{_POLICY}/scaling_cur_freq", 1_500_000)
    report = board.controller.pin(OperatingPoint(cpu_freq_hz={"little": _MID}))
    assert report.reached == OperatingPoint(cpu_freq_hz={"little": 1_512_000_000})
    assert report.notes == ("little: asked for 1500 MHz, the driver holds 1512 MHz",)
    assert board.controller.check() == ()


@pytest.mark.parametrize(
    ("now", "notes"),
    [
        ("1520000", ()),  # a measurement jitters
        ("0", ("little: its clock reads 0 while idle; its limits were verified",)),
        ("<unknown>", ("little: its clock cannot be read; its limits were verified",)),
    ],
)
def test_a_clock_that_is_hard_to_read_is_no_failure(tmp_path: Path, now: str, notes: tuple[str, ...]) -> None:
    """Within two percent is the same; where there is nothing to read the limits must do."""
    board = make_board(tmp_path)
    folder = f"{_CPUS}/cpufreq/policy0"
    board.kernel.drivers[f"{folder}/scaling_min_freq"] = lambda text: (
        board.kernel.put(f"{folder}/scaling_min_freq", text),
        board.kernel.put(f"{folder}/scaling_cur_freq", now),
    )[0]
    report = board.controller.pin(OperatingPoint(cpu_freq_hz={"little": _MID}), deadline_s=1.0)
    assert (report.status, report.notes) == (PinStatus.OK, notes)


def test_the_hardwares_own_word_is_asked_for(tmp_path: Path) -> None:
    """Firmware that clamps a clock tells cpufreq nothing: only a file of root's does, and the pin fails by its word."""
    board = make_board(tmp_path)
    true = f"{_POLICY}/cpuinfo_cur_freq"
    board.kernel.put(true, _MID // 1000)
    report = board.controller.pin(OperatingPoint(cpu_freq_hz={"little": _HIGH, "big": _HIGH}))
    assert report.status is PinStatus.FAILED
    assert "little is set to 2000 MHz, and its hardware runs at 1500 MHz (cpuinfo_cur_freq)" in report.message
    assert "big" not in report.message
    assert board.access.restored == 1
    for harmless in (_HIGH // 1000, 1_990_000, 0, "<unknown>"):
        board.kernel.put(true, harmless)
        assert board.controller.pin(OperatingPoint(cpu_freq_hz={"little": _HIGH})).status is PinStatus.OK


def test_limits_that_firmware_or_a_range_decides(tmp_path: Path) -> None:
    """Limits are verified; the clock itself is the hardware's own there. A limit that the kernel drops without an error
    is found by reading it back.
    """
    board = make_board(tmp_path)
    (tmp_path / _POLICY[1:] / "scaling_available_frequencies").unlink()
    board.controller = Controller(Platform.discover(board.kernel, None, board.access), board.access)
    report = board.controller.pin(OperatingPoint(cpu_freq_hz={"policy0": 1_234_000_000}))
    assert report.reached == OperatingPoint(cpu_freq_hz={"policy0": 1_234_000_000})
    report = board.controller.pin(OperatingPoint(cpu_freq_hz={"policy0": 3_000_000_000}))
    assert "from 1000 MHz to 2000 MHz" in report.message
    board = make_board(tmp_path)
    board.kernel.drivers[f"{_POLICY}/scaling_min_freq"] = lambda text: None
    report = board.controller.pin(OperatingPoint(cpu_freq_hz={"little": _HIGH}))
    assert report.message.startswith("little does not hold 2000 MHz: its limits are 1000 MHz and 2000 MHz")


@pytest.mark.parametrize("error", [OSError(16, "Device or resource busy"), RefusedError("not on the list")])
def test_a_write_that_is_refused_fails_by_name(tmp_path: Path, error: Exception) -> None:
    """Whether the kernel or the clock helper refuses: the message says what, and everything is restored."""
    board = make_board(tmp_path)

    def refuse(text: str) -> None:
        raise error

    board.kernel.drivers[f"{_POLICY}/scaling_max_freq"] = refuse
    report = board.controller.pin(OperatingPoint(cpu_freq_hz={"big": _HIGH, "little": _HIGH}))
    assert report.status is PinStatus.FAILED
    assert (f"{_POLICY}/scaling_max_freq does not take 2000000: Device" in report.message) == isinstance(error, OSError)
    assert board.access.restored == 1


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (BusyError("session 7 holds the clocks"), PinStatus.BUSY),
        (UnsafeError("cpu3 did not come back"), PinStatus.UNSAFE),
        (HelperUnavailableError("no socket"), PinStatus.UNAVAILABLE),
        (ClockError("disk full"), PinStatus.FAILED),
    ],
)
def test_why_a_transaction_does_not_begin_or_end_is_said(tmp_path: Path, error: AgentError, status: PinStatus) -> None:
    """Nothing is written when it does not begin; when it does not end, that is the answer."""
    board = make_board(tmp_path)
    board.access.fail_begin = error
    report = board.controller.pin(OperatingPoint(cpu_freq_hz={"little": _HIGH}))
    assert (report.status, report.message, board.written) == (status, str(error), [])
    board.access.fail_begin = None
    board.controller.pin(OperatingPoint(cpu_freq_hz={"little": _HIGH}))
    board.access.fail_restore = error
    report = board.controller.unpin()
    assert (report.status, report.message) == (status, str(error))
    board.kernel.drivers[f"{_POLICY}/scaling_min_freq"] = lambda text: None
    report = board.controller.pin(OperatingPoint(cpu_freq_hz={"little": _LOW}))
    assert report.status is status
    assert report.message.endswith(f"and the clocks could not be restored: {error}")


def test_a_point_that_others_moved_is_put_back(tmp_path: Path) -> None:
    """The check says what had moved; where it cannot be put back it raises."""
    board = make_board(tmp_path)
    board.controller.pin(OperatingPoint(cores_online=(0, 1, 2), cpu_freq_hz={"little": _HIGH}))
    assert board.controller.check() == ()
    board.kernel.put(f"{_POLICY}/scaling_min_freq", 1_000_000)
    board.kernel.write(f"{_CPUS}/cpu2/online", "0")
    assert board.controller.check() == (
        "CPUs 0, 1 are online instead of CPUs 0, 1, 2; it was put back",
        "the limits of little are not 2000 MHz any more; it was put back",
    )
    assert board.controller.check() == ()
    board.kernel.put(f"{_POLICY}/scaling_min_freq", 1_000_000)
    board.kernel.drivers[f"{_POLICY}/scaling_min_freq"] = lambda text: None
    with pytest.raises(ClockError, match=r"limits of little .* could not be put back"):
        board.controller.check()


@pytest.mark.parametrize(
    ("driver", "expected"),
    [
        ("override", ["emc_iso_cap=1600000000", "clk_update_rate=1600000000", "clk_state=1"]),
        ("bpmp", ["emc_iso_cap=1600000000", "mrq_rate_locked=1", "rate=1600000000", "state=1"]),
    ],
)
def test_the_memory_clock_is_held_as_its_driver_wants_it(tmp_path: Path, driver: str, expected: list[str]) -> None:
    """The cap goes up first; on T210 the rate goes before the lock, on later chips the lock before the rate."""
    board = make_board(tmp_path, Memory(driver, (68_000_000, 204_000_000, 800_000_000, 1_600_000_000)))
    report = board.controller.pin(OperatingPoint(memory_freq_hz=1_600_000_000))
    assert board.written == expected
    assert report.reached == OperatingPoint(memory_freq_hz=1_600_000_000)
    assert report.notes == ("raised the memory clock's cap from 800 MHz",)
    assert report.clocks.memory.governor == "locked"
    assert report.clocks.memory.available_hz == (204_000_000, 800_000_000, 1_600_000_000)


def test_root_only_memory_files_are_read_through_the_helper(tmp_path: Path) -> None:
    """An unprivileged agent sees the memory clock as root does, or says that it is unreadable."""
    board = make_board(tmp_path, Memory("bpmp"))
    board.kernel.hidden = (_DEBUG,)
    known = BoardType("acme", memory=Memory("bpmp", (204_000_000,)))
    platform = Platform.discover(board.kernel, known, board.access)
    assert platform.memory.read_hz() == 204_000_000
    alone = Platform.discover(board.kernel, known, None)
    assert alone.memory.read_hz() is None
    assert "the memory clock is root's to read (debugfs), and no clock helper reads it" in alone.lacks


def test_a_memory_rate_that_firmware_drops_is_found_by_reading_it_back(tmp_path: Path) -> None:
    """The type's table has it, the board says nothing, the clock does not move."""
    board = make_board(tmp_path, Memory("override", (204_000_000, 408_000_000, 1_600_000_000)))
    report = board.controller.pin(OperatingPoint(memory_freq_hz=408_000_000), deadline_s=0.1)
    assert report.status is PinStatus.FAILED
    assert "memory stays at 204 MHz instead of 408 MHz" in report.message
    assert board.access.restored == 1


def test_a_capped_memory_clock_is_the_point_reached(tmp_path: Path) -> None:
    """Firmware that holds it at its own highest clock is believed, and noted."""
    board = make_board(tmp_path, Memory("bpmp"))
    add_memory(board.kernel, "bpmp", high_hz=800_000_000)
    report = board.controller.pin(OperatingPoint(memory_freq_hz=1_600_000_000), deadline_s=1.0)
    assert report.reached == OperatingPoint(memory_freq_hz=800_000_000)
    assert "the board caps the memory clock at 800 MHz" in report.notes
    assert board.controller.check() == ()


def test_a_memory_clock_raised_by_the_cpu_is_the_point_reached(tmp_path: Path) -> None:
    """The floor that goes with the CPU's clock is known from the board type."""
    board = make_board(tmp_path, Memory("bpmp"), floors=((_LOW, 204_000_000), (_HIGH, 800_000_000)))
    board.kernel.drivers[f"{_DEBUG}/bpmp/debug/clk/emc/rate"] = lambda text: board.kernel.put(
        f"{_DEBUG}/bpmp/debug/clk/emc/rate", 800_000_000
    )
    point = OperatingPoint(cpu_freq_hz={"little": _HIGH}, memory_freq_hz=204_000_000)
    report = board.controller.pin(point, deadline_s=1.0)
    assert report.reached == dataclasses.replace(point, memory_freq_hz=800_000_000)
    assert report.notes == ("the CPU's clock raises the memory clock to 800 MHz",)


def test_nothing_that_is_shown_raises(tmp_path: Path) -> None:
    """A helper that does not answer is a note."""
    board = make_board(tmp_path)

    def status() -> AccessStatus:
        raise HelperUnavailableError("no socket")

    board.access.status = status  # type: ignore[method-assign]
    assert "clock helper: no socket" in board.controller.show().notes


@pytest.mark.parametrize("ends", [None, ValueError("the work")])
def test_a_gpu_keeps_its_power_while_its_code_is_timed(tmp_path: Path, ends: Exception | None) -> None:
    """Its first kernel would pay for power coming back. Then all is as it was, at any end of the work."""
    add_gpu(tmp_path)
    board = make_board(tmp_path)
    with contextlib.suppress(ValueError), board.controller.gpu_powered():
        assert board.kernel.read(f"{_GPU}/device/railgate_enable").strip() == "0"
        assert board.access.status().holder
        if ends:
            raise ends
    assert board.kernel.read(f"{_GPU}/device/railgate_enable").strip() == "1"
    assert (len(board.access.begun), board.access.restored) == (1, 1)


def test_a_gpu_stays_as_it_is_where_somebody_holds_the_clocks(tmp_path: Path) -> None:
    """The work goes on; within a point that is held, nothing but the GPU's power changes and comes back."""
    add_gpu(tmp_path)
    board = make_board(tmp_path)
    board.access.fail_begin = BusyError("another")
    with board.controller.gpu_powered():
        assert board.access.writes == []
    board.access.fail_begin = None
    assert board.controller.pin(OperatingPoint(cpu_freq_hz={EVERY_CLUSTER: _MID})).status is PinStatus.OK
    board.access.writes.clear()
    with board.controller.gpu_powered():
        pass
    file = f"{_GPU}/device/railgate_enable"
    assert board.access.writes == [(file, "0"), (file, "1")]
    assert board.controller.held is not None


def test_a_gpus_load_is_a_share(tmp_path: Path) -> None:
    """Its driver counts in thousandths; one that does not say is not idle."""
    add_gpu(tmp_path)
    board = make_board(tmp_path)
    gpu = board.controller.platform.gpu
    assert gpu.read_load() is None
    board.kernel.put(f"{_GPU}/device/load", 250)
    assert gpu.read_load() == 0.25
