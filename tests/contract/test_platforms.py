"""Every board type over its simulated kernel files: found, shown, held at every kind of point, and given back.

The transaction is the clock helper's own, in this process; the agent's side reads as an unprivileged user.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

from device_agent.board_types import BoardType, detect, load_board_types
from device_agent.clocks.controller import Controller
from device_agent.clocks.platform import Platform
from device_agent.clocks.transaction import LocalAccess
from device_agent.errors import BadPointError, ClockError
from device_agent.protocol import Clocks, DomainClocks, OperatingPoint, PinReport, PinStatus
from device_agent.sysfs import FileTree
from farm.virtual.board import VirtualBoard
from farm.virtual.clocks import Load
from farm.virtual.tree import FAULT, VirtualTree

_TYPES = load_board_types()
_SIMULATED = {name: known for name, known in _TYPES.items() if known.simulation}
# Boards of no known type: the same files, without a table.
_UNKNOWN = ("jetson-tx2", "raspberry-pi-4")
_PIN_S = 0.150


@dataclasses.dataclass
class Case:
    """A simulated board, the agent's side of it and the helper's."""

    board: VirtualBoard
    user: VirtualTree
    root: VirtualTree
    access: LocalAccess
    known: BoardType | None
    controller: Controller

    def pin(self, point: OperatingPoint, deadline_s: float = 2.0) -> PinReport:
        return self.controller.pin(point, deadline_s)

    def show(self) -> Clocks:
        return self.controller.show()

    def inject(self, fault: str) -> None:
        self.root.write(FAULT, fault)

    def limits(self) -> object:
        gpu, memory = self.board.gpu, self.board.memory
        return (
            sorted(self.board.online),
            [(c.clock.min_hz, c.clock.max_hz, c.clock.governor) for c in self.board.clusters.values()],
            gpu and (gpu.clock.min_hz, gpu.clock.max_hz, gpu.clock.governor, gpu.railgate, gpu.power_control),
            memory and (memory.locked, memory.cap_hz),
            self.board.power_mode and self.board.power_mode.name,
        )


def make_case(name: str, folder: Path, known: bool = True) -> Case:
    board = VirtualBoard(_SIMULATED[name], seed=3)
    root, user = VirtualTree(board), VirtualTree(board, privileged=False)
    access = LocalAccess(root, folder / "state")
    found = detect(user, _TYPES if known else {})
    platform = Platform.discover(user, found, access)
    return Case(board, user, root, access, found, Controller(platform, access, "test"))


@pytest.fixture(params=[*_SIMULATED, *(f"{name} unknown" for name in _UNKNOWN)])
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    name, _, unknown = request.param.partition(" ")
    return make_case(name, tmp_path, not unknown)


@pytest.fixture
def tx2(tmp_path: Path) -> Case:
    return make_case("jetson-tx2", tmp_path)


@pytest.fixture
def nano(tmp_path: Path) -> Case:
    return make_case("jetson-nano", tmp_path)


def pick(clocks: Clocks, choose: Callable[[tuple[int, ...]], int]) -> OperatingPoint:
    return OperatingPoint(
        cpu_freq_hz={domain.name: choose(domain.available_hz) for domain in clocks.clusters if domain.online},
        gpu_freq_hz=choose(clocks.gpu.available_hz) if clocks.gpu else None,
        memory_freq_hz=choose(clocks.memory.available_hz) if clocks.memory and clocks.memory.available_hz else None,
    )


@pytest.mark.parametrize("name", _SIMULATED)
def test_every_board_is_recognised(name: str, tmp_path: Path) -> None:
    """By its device tree, as the type it was made from, with nothing about it unexpected."""
    case = make_case(name, tmp_path)
    assert case.known is _TYPES[name]
    assert case.controller.platform.notes == case.controller.platform.lacks


def test_what_is_shown_is_what_the_board_has(case: Case) -> None:
    """Clusters with their cores, tables and limits; the GPU's and the memory's clock; modes; what is lacking."""
    clocks = case.show()
    by_cpus = {domain.cpus: domain for domain in clocks.clusters}
    for cluster in case.board.clusters.values():
        domain = by_cpus[cluster.cpus]
        assert domain.isolated == cluster.isolated
        assert domain.online == case.board.online_in(cluster)
        assert not case.known or domain.name == cluster.name
        if domain.online:
            assert domain.available_hz == cluster.clock.table
            assert (domain.min_hz, domain.max_hz) == (cluster.clock.min_hz, cluster.clock.max_hz)
            assert domain.governor == cluster.clock.governor
        else:
            assert (domain.min_hz, domain.max_hz, domain.current_hz, domain.available_hz) == (None, None, None, ())
    assert (clocks.gpu is not None) == (case.board.gpu is not None)
    assert (clocks.memory is not None) == (case.board.memory is not None)
    if clocks.gpu and case.board.gpu:
        assert clocks.gpu.available_hz == case.board.gpu.clock.table
    if clocks.memory:
        assert clocks.memory.current_hz == case.board.memory_hz
    assert clocks.power_modes == tuple(mode.name for mode in case.board.board_type.power_modes)
    assert clocks.power_mode == (case.board.power_mode.name if case.board.power_mode else None)
    assert (clocks.holder, clocks.unsafe) == ("", "")
    lacks = case.controller.platform.lacks
    assert any("GPU" in text for text in lacks) == (clocks.gpu is None)
    assert any("known type" in text for text in lacks) == (case.known is None)


@pytest.mark.parametrize("choose", [min, max, lambda table: table[len(table) // 2]], ids=["lowest", "highest", "mid"])
def test_every_clock_is_held_and_given_back(case: Case, choose: Callable[[tuple[int, ...]], int]) -> None:
    """The model's clocks are where the report says, under any load, until release; then all is as before."""
    before = case.limits()
    point = pick(case.show(), choose)
    report = case.pin(point)
    assert (report.status, report.message, report.reached) == (PinStatus.OK, "", point)
    assert report.clocks.holder.startswith("test")
    for load in (Load(), Load(cores=4.0, memory=1.0, gpu=1.0)):
        case.board.set_load("a user", load)
        for cluster in case.controller.platform.clusters:
            if cluster.name in point.cpu_freq_hz:
                model = case.board.cluster_of(cluster.cpus[0])
                assert model.hz == point.cpu_freq_hz[cluster.name]
        if case.board.gpu:
            assert case.board.gpu.hz == point.gpu_freq_hz
        if case.board.memory:
            assert case.board.memory_hz == point.memory_freq_hz
    assert case.controller.check() == ()
    report = case.controller.unpin()
    assert report.status is PinStatus.OK
    assert case.limits() == before
    assert case.show().holder == ""


def capture(tree: VirtualTree, path: str, folder: Path, depth: int = 10) -> None:
    """Copy kernel files that can be read; links become folders, as deep as is needed."""
    try:
        names = tree.names(path)
    except OSError:
        with contextlib.suppress(OSError):
            text = tree.read(path)
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.write_text(f"{text}\n")
        return
    for name in names if depth else ():
        capture(tree, f"{path}/{name}", folder / name, depth - 1)


def test_a_captured_tree_shows_the_same(case: Case, tmp_path: Path) -> None:
    """Files copied from a board are looked at like the board itself; only its tools do not run."""
    root = tmp_path / "captured"
    for path in ("/sys/devices/system/cpu", "/sys/class/devfreq", "/sys/kernel", "/proc/device-tree", "/etc"):
        capture(case.root, path, root / path[1:], depth=6)
    tree = FileTree(root)
    platform = Platform.discover(tree, detect(tree, _TYPES if case.known else {}))
    captured, clocks = Controller.read(platform), Controller.read(case.controller.platform)

    def settled(domain: DomainClocks) -> DomainClocks:
        return dataclasses.replace(domain, current_hz=None)  # a measurement jitters

    assert list(map(settled, captured.clusters)) == list(map(settled, clocks.clusters))
    assert (captured.gpu, captured.memory) == (clocks.gpu, clocks.memory)
    assert (captured.power_modes, captured.power_mode) == (clocks.power_modes, None)
    assert captured.notes == clocks.notes


def test_the_links_of_a_real_kernel_lead_to_files_that_may_be_written(tmp_path: Path) -> None:
    """GPU and cores are reached through links, as on a board; the helper's rules know where those lead."""
    devices, cpus = tmp_path / "sys/devices", tmp_path / "sys/devices/system/cpu"
    files = {
        cpus / "present": "0",
        cpus / "online": "0",
        cpus / "cpufreq/policy0/related_cpus": "0",
        cpus / "cpufreq/policy0/scaling_available_frequencies": "102000 1479000",
        cpus / "cpufreq/policy0/cpuinfo_min_freq": "102000",
        cpus / "cpufreq/policy0/cpuinfo_max_freq": "1479000",
        cpus / "cpufreq/policy0/scaling_min_freq": "102000",
        cpus / "cpufreq/policy0/scaling_max_freq": "1479000",
        cpus / "cpufreq/policy0/scaling_cur_freq": "1479000",
        devices / "57000000.gpu/railgate_enable": "1",
        devices / "57000000.gpu/devfreq/57000000.gpu/available_frequencies": "76800000 921600000",
        devices / "57000000.gpu/devfreq/57000000.gpu/min_freq": "76800000",
        devices / "57000000.gpu/devfreq/57000000.gpu/max_freq": "921600000",
        devices / "57000000.gpu/devfreq/57000000.gpu/cur_freq": "921600000",
    }
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (cpus / "cpu0").mkdir()
    (cpus / "cpu0/cpufreq").symlink_to("../cpufreq/policy0")
    (devices / "57000000.gpu/devfreq/57000000.gpu/device").symlink_to("../../../57000000.gpu")
    (tmp_path / "sys/class/devfreq").mkdir(parents=True)
    (tmp_path / "sys/class/devfreq/57000000.gpu").symlink_to("../../devices/57000000.gpu/devfreq/57000000.gpu")
    tree = FileTree(tmp_path)
    access = LocalAccess(tree, tmp_path / "state")
    controller = Controller(Platform.discover(tree, _TYPES["jetson-nano"], access), access)
    point = OperatingPoint(cpu_freq_hz={"a57": 1_479_000_000}, gpu_freq_hz=921_600_000)
    report = controller.pin(point)
    assert (report.status, report.message, report.reached) == (PinStatus.OK, "", point)
    assert (devices / "57000000.gpu/railgate_enable").read_text() == "0"
    assert controller.unpin().status is PinStatus.OK
    assert {path: path.read_text() for path in files} == files


def test_cores_go_offline_and_come_back(case: Case) -> None:
    """With the whole of a cluster if need be; what was offline before is offline again."""
    before = case.limits()
    assert case.pin(OperatingPoint(cores_online=case.board.cpus)).reached == OperatingPoint(
        cores_online=case.board.cpus
    )
    assert case.pin(OperatingPoint(cores_online=(0,))).status is PinStatus.OK
    assert case.board.online == {0}
    assert [domain.name for domain in case.show().clusters if domain.online] == [
        case.controller.platform.clusters[0].name
    ]
    assert case.controller.unpin().status is PinStatus.OK
    assert case.limits() == before


def test_every_power_mode_is_set_or_refused_for_its_reboot(case: Case) -> None:
    """Cores and limits are the model's for that mode; the first mode is back afterwards."""
    before = case.limits()
    gating = case.board.power_mode.power_gating if case.board.power_mode else 0
    for mode in case.board.board_type.power_modes:
        report = case.pin(OperatingPoint(power_mode=mode.name))
        if mode.power_gating != gating:
            assert report.status is PinStatus.REFUSED
            assert "reboot" in report.message
            continue
        assert (report.status, report.reached) == (PinStatus.OK, OperatingPoint(power_mode=mode.name))
        assert case.show().power_mode == mode.name
        assert mode.cores_online is None or case.board.online == set(mode.cores_online)
        assert case.controller.check() == ()
    assert case.controller.unpin().status is PinStatus.OK
    assert case.limits() == before


def test_a_clock_between_two_entries_is_refused(case: Case) -> None:
    """For every clock, with the nearest ones and all the others; nothing is written."""
    before, clocks = case.limits(), case.show()
    online = [domain for domain in clocks.clusters if domain.online]
    points = [OperatingPoint(cpu_freq_hz={domain.name: domain.available_hz[0] + 1000}) for domain in online]
    if clocks.gpu:
        points.append(OperatingPoint(gpu_freq_hz=clocks.gpu.available_hz[0] + 1000))
    if clocks.memory and clocks.memory.available_hz:
        points.append(OperatingPoint(memory_freq_hz=clocks.memory.available_hz[0] + 1000))
    for point in points:
        report = case.pin(point)
        assert report.status is PinStatus.REFUSED
        assert "nearest: " in report.message
        assert " and " in report.message
        assert "it has " in report.message
    assert case.limits() == before
    assert case.show().holder == ""


def test_holding_and_verifying_is_fast(case: Case) -> None:
    """All clocks at once, with the snapshot on disk, on a virtual board."""
    took = []
    for _ in range(5):
        took.append(case.pin(pick(case.show(), max)).took_s)
        case.controller.unpin()
    assert statistics.median(took) < _PIN_S


def list_domains(case: Case) -> list[str]:
    """Names of the model's clocks that can be held now."""
    names = [cluster.name for cluster in case.board.clusters.values() if case.board.online_in(cluster)]
    return names + ["gpu"] * bool(case.board.gpu) + ["memory"] * bool(case.board.memory)


def test_a_stuck_clock_fails_and_everything_is_restored(case: Case) -> None:
    """Whichever clock it is: limits close, the clock stays, the report names both."""
    before = case.limits()
    for domain in list_domains(case):
        case.inject(f"clock_stuck:{domain}")
        report = case.pin(pick(case.show(), max), deadline_s=0.06)
        if not _is_held_high(case, domain):
            assert report.status is PinStatus.FAILED
            assert " stays at " in report.message
            assert report.reached is None
        case.controller.unpin()
        assert case.limits() == before
        case.inject("clear")


def _is_held_high(case: Case, domain: str) -> bool:
    """Return whether a clock is at its maximum, where a test for a stuck clock says nothing."""
    board = case.board
    if domain == "memory":
        return board.memory is not None and board.memory_hz == board.memory.table[-1]
    return domain != "gpu" and board.clusters[domain].hz == board.clusters[domain].clock.table[-1]


@pytest.mark.parametrize("file", ["scaling_max_freq", "scaling_min_freq", "devfreq/*/max_freq", "clk/*emc*/*"])
def test_a_refused_write_fails_and_everything_is_restored(case: Case, file: str) -> None:
    """The report names the file; what was written before it is put back. A board without the file does not mind."""
    before, point = case.limits(), pick(case.show(), max)
    case.inject(f"write_refused:*{file}")
    report = case.pin(point)
    if ("devfreq" in file and not case.board.gpu) or ("emc" in file and not case.board.memory):
        assert report.status is PinStatus.OK, report.message
        return
    assert report.status is PinStatus.FAILED, report.message
    assert " does not take " in report.message
    assert case.limits() == before


def test_a_file_that_vanishes_is_a_clock_that_cannot_be_read(case: Case) -> None:
    """Showing goes on without it; holding that clock fails, and what was written is put back."""
    before, point = case.limits(), pick(case.show(), max)
    case.inject("file_vanish:scaling_min_freq")
    shown = case.show()
    assert all(domain.min_hz is None for domain in shown.clusters)
    assert any(domain.max_hz is not None for domain in shown.clusters)
    report = case.pin(point)
    assert report.status is PinStatus.FAILED
    case.inject("clear")
    assert case.limits() == before


def test_a_board_that_hangs_fails_at_once(case: Case) -> None:
    """Nothing waits for each of its files in vain; once it answers again, it is as it was."""
    before, point = case.limits(), pick(case.show(), max)
    case.inject("hang")
    report = case.pin(point)
    assert (report.status, report.message) == (PinStatus.FAILED, "the board does not answer")
    with pytest.raises(ClockError, match="does not answer"):
        case.controller.check(point)
    assert "the board does not answer" in case.show().notes
    case.inject("clear")
    assert case.limits() == before


def test_a_board_that_reboots_is_held_no_more(case: Case) -> None:
    """The check sees that limits are gone, puts them back, and says so."""
    point = pick(case.show(), min)
    assert case.pin(point).status is PinStatus.OK
    case.inject("reboot")
    notes = case.controller.check()
    assert all(note.endswith("it was put back") for note in notes[:1])
    assert notes
    assert case.controller.check() == ()


def test_denver_is_held_only_when_one_of_its_cores_is_online(tx2: Case) -> None:
    """Refused with the cores to bring online; with one of them the policy is back, and so is its clock."""
    report = tx2.pin(OperatingPoint(cpu_freq_hz={"denver": 2_035_200_000}))
    assert report.status is PinStatus.REFUSED
    assert "bring CPUs 1, 2 online (cores_online)" in report.message
    with pytest.raises(BadPointError, match="denver is offline"):
        tx2.controller.platform.affinity("denver")
    point = OperatingPoint(cores_online=(0, 2, 3, 4, 5), cpu_freq_hz={"denver": 345_600_000, "a57": 2_035_200_000})
    assert tx2.pin(point).reached == point
    assert (tx2.board.clusters["denver"].hz, tx2.board.clusters["a57"].hz) == (345_600_000, 2_035_200_000)
    assert tx2.controller.platform.affinity("denver") == (2,)
    assert tx2.controller.platform.affinity() == (0, 3, 4, 5)
    point = OperatingPoint(power_mode="MAXP_CORE_DENVER", cpu_freq_hz={"denver": 1_113_600_000})
    assert tx2.pin(point).reached == point
    assert tx2.controller.unpin().status is PinStatus.OK
    assert tx2.board.online == {0, 3, 4, 5}


def test_a_mode_and_a_point_on_top_of_it(tx2: Case) -> None:
    """Limits of the mode that fall between two entries are rounded up and noted; the point goes before them."""
    report = tx2.pin(OperatingPoint(power_mode="maxq", gpu_freq_hz=1_300_500_000))
    assert report.reached == OperatingPoint(power_mode="MAXQ", gpu_freq_hz=1_300_500_000)
    assert "power mode MAXQ limits a57 to 1200 MHz; the driver has made it 1267.2 MHz" in report.notes
    report = tx2.pin(OperatingPoint(cpu_freq_hz={"a57": 345_600_000}))
    assert report.reached == OperatingPoint("MAXQ", None, {"a57": 345_600_000}, 1_300_500_000)
    report = tx2.pin(OperatingPoint(power_mode="MAXN"))
    assert report.reached == OperatingPoint(power_mode="MAXN")
    assert tx2.board.clusters["a57"].clock.min_hz < tx2.board.clusters["a57"].clock.max_hz


class Silent(VirtualTree):
    def run(self, command: list[str]) -> str:
        raise PermissionError(1, "Operation not permitted", command[0])


def test_a_mode_that_nobody_may_ask_for_is_set_all_the_same(tx2: Case) -> None:
    """The helper sets it; that nvpmodel does not confirm it is a note."""
    user = Silent(tx2.board, privileged=False)
    platform = Platform.discover(user, tx2.known, tx2.access)
    controller = Controller(platform, tx2.access)
    assert controller.show().power_mode is None
    report = controller.pin(OperatingPoint(power_mode="MAXN"))
    assert report.reached == OperatingPoint(power_mode="MAXN")
    assert "power mode MAXN: nvpmodel does not tell this user which mode is set" in report.notes
    assert len(tx2.board.online) == 6
    assert controller.check() == ()


def test_a_mode_takes_the_place_of_what_was_held(nano: Case) -> None:
    """Also of what nvpmodel itself would leave: the memory clock's lock, the GPU's power."""
    before = nano.limits()
    nano.pin(OperatingPoint(cpu_freq_hz={"a57": 102_000_000}, gpu_freq_hz=76_800_000, memory_freq_hz=1_600_000_000))
    report = nano.pin(OperatingPoint(power_mode="5W"))
    assert report.reached == OperatingPoint(power_mode="5W")
    assert nano.board.gpu.gated
    assert not nano.board.memory.locked
    nano.controller.unpin()
    assert nano.limits() == before


def test_somebody_elses_power_mode_is_taken_back(tx2: Case) -> None:
    """The check notices nvpmodel, sets the mode that was held and every clock on top of it."""
    point = OperatingPoint(power_mode="MAXQ", cpu_freq_hz={"a57": 806_400_000})
    tx2.pin(point)
    tx2.root.run(["nvpmodel", "-m", "0"])
    assert "another process has set another power mode; it was put back" in tx2.controller.check()
    assert tx2.show().power_mode == "MAXQ"
    assert tx2.board.clusters["a57"].hz == 806_400_000
    assert tx2.controller.check() == ()


def test_a_mode_that_needs_a_reboot_is_left_to_an_operator(tmp_path: Path) -> None:
    """Refused; if a reboot was allowed the message says how, for the agent never reboots a board."""
    xavier = make_case("jetson-agx-xavier", tmp_path)
    report = xavier.pin(OperatingPoint(power_mode="10W"))
    assert report.status is PinStatus.REFUSED
    assert report.message.endswith("takes a reboot; refused")
    report = xavier.pin(OperatingPoint(power_mode="10W", allow_reboot=True))
    assert report.status is PinStatus.REFUSED
    assert "sudo nvpmodel -m 1" in report.message
    assert xavier.board.boots == 1


def test_a_memory_clock_that_is_not_held_follows_the_cpu(nano: Case) -> None:
    """A note says so; held, it stays, at any CPU clock."""
    report = nano.pin(OperatingPoint(cpu_freq_hz={"a57": 1_479_000_000}))
    assert any(note.startswith("the memory clock went from 204 MHz to 1600 MHz") for note in report.notes)
    point = OperatingPoint(cpu_freq_hz={"a57": 1_479_000_000}, memory_freq_hz=204_000_000)
    report = nano.pin(OperatingPoint(memory_freq_hz=204_000_000))
    assert (report.reached, report.notes) == (point, ())
    assert nano.board.memory_hz == 204_000_000


def test_a_memory_cap_is_raised_and_put_back(tx2: Case) -> None:
    """The mode's cap would hold the clock down; afterwards it does again."""
    assert tx2.board.memory is not None
    tx2.pin(OperatingPoint(power_mode="MAXQ"))
    report = tx2.pin(OperatingPoint(memory_freq_hz=1_866_000_000))
    assert report.notes == ("raised the memory clock's cap from 1331.2 MHz",)
    assert tx2.board.memory_hz == 1_866_000_000
    tx2.controller.unpin()
    assert tx2.board.memory.cap_hz == 1_600_000_000


def test_clocks_that_jetson_clocks_holds_are_noted(nano: Case) -> None:
    """Letting go would restore that state, not a free one; shown, and in the report of the first pin."""
    root = nano.root
    root.write("/sys/devices/system/cpu/cpufreq/policy0/scaling_min_freq", "1479000")
    root.write("/sys/class/devfreq/57000000.gpu/min_freq", "921600000")
    assert any("jetson_clocks" in note for note in nano.show().notes)
    report = nano.pin(OperatingPoint(cpu_freq_hz={"a57": 1_036_800_000}))
    assert any("jetson_clocks" in note for note in report.notes)
    assert not any("jetson_clocks" in note for note in nano.show().notes)
