"""Every power driver, over files as its kernel shows them: the same facts about rails, totals and faults."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from device_agent.board_types import BoardType, load_board_types
from device_agent.clocks.access import AccessStatus
from device_agent.errors import HelperUnavailableError, SensorError
from device_agent.power import calibrate, energy, sampler, sensors
from device_agent.power.sensors import PowerSensors, find_sensors
from device_agent.protocol import PowerWindow
from device_agent.sysfs import FileTree
from farm.virtual.board import TOTAL, VirtualBoard
from farm.virtual.clocks import Load
from farm.virtual.tree import FAULT, VirtualTree
from tests.clocks import Clock

_DEVICES = "sys/bus/i2c/devices"
_TYPES = load_board_types()
_PERIOD_S = 0.1
_SIMULATED = sorted(name for name, board_type in _TYPES.items() if board_type.simulation)


class RootOnly(FileTree):
    """Names of rails and counters of energy are root's alone."""

    def read(self, path: str) -> str:
        if "rail_name" in path or path.endswith("energy_uj"):
            raise PermissionError(13, "Permission denied", path)
        return super().read(path)


@dataclasses.dataclass
class Case:
    """A board's files in a folder. `set_power` writes a rail's value; `paths` are the files of one value of it."""

    root: Path
    board_type: BoardType
    driver: str
    rails: tuple[str, ...]
    total: tuple[str, ...]
    scope: str
    clock: Clock
    paths: Callable[[str], list[Path]]
    set_power: Callable[[str, float], None]

    def find(self) -> PowerSensors:
        return find_sensors(FileTree(self.root), self.board_type, clock=self.clock)

    def watch(self, sensors: PowerSensors, seconds: float = 2.0, wave_w: float = 0.4) -> PowerWindow | None:
        """Sample while every rail changes every 0.1 s, by `wave_w` up and down."""
        start_s, refresh = self.clock(), -1
        before = self.clock.passing

        def passing(now_s: float) -> None:
            nonlocal refresh
            before(now_s)
            if wave_w and int(now_s / _PERIOD_S) != refresh:
                refresh = int(now_s / _PERIOD_S)
                for rail in self.rails:
                    self.set_power(rail, 3.0 + wave_w * (refresh % 2))

        self.clock.passing = passing
        trace = sampler.collect(sensors, seconds, 100.0, self.clock, self.clock.sleep)
        self.clock.passing = before
        return energy.integrate(trace, start_s, start_s + seconds, sensors)


def write(path: Path, text: str) -> None:
    if path.parent.is_dir():
        path.write_text(f"{text}\n")


def make_iio(root: Path, clock: Clock, device: str = "6-0040") -> Case:
    """A Nano on R32; the third name is one that nothing is connected to on other boards."""
    folder = root / _DEVICES / device / "iio:device0"
    folder.mkdir(parents=True)
    write(folder.parent / "name", "ina3221x")
    rails = ("POM_5V_IN", "POM_5V_GPU", "POM_5V_CPU")

    def paths(rail: str) -> list[Path]:
        return [folder / f"in_power{rails.index(rail)}_input"]

    def set_power(rail: str, power_w: float) -> None:
        if paths(rail)[0].exists():
            write(paths(rail)[0], str(round(power_w * 1000)))

    for index, rail in enumerate(rails):
        write(folder / f"rail_name_{index}", rail)
        write(folder / f"in_voltage{index}_input", "5096")
        write(folder / f"in_current{index}_input", "600")
        write(folder / f"warn_current_limit_{index}", "32760 ma")
        write(paths(rail)[0], "3000")
    return Case(root, _TYPES["jetson-nano"], "ina3221-iio", rails, ("POM_5V_IN",), "board", clock, paths, set_power)


def make_hwmon(root: Path, clock: Clock, device: str = "1-0040") -> Case:
    """An Orin NX on R35, whose chip also has the sum of the shunts, and a channel that is not connected."""
    folder = root / _DEVICES / device / "hwmon" / "hwmon4"
    folder.mkdir(parents=True)
    write(folder.parents[1] / "name", "ina3221")
    rails = ("VDD_IN", "VDD_CPU_GPU_CV")

    def paths(rail: str) -> list[Path]:
        return [folder / f"curr{rails.index(rail) + 1}_input", folder / f"in{rails.index(rail) + 1}_input"]

    def set_power(rail: str, power_w: float) -> None:
        if all(path.exists() for path in paths(rail)):
            write(paths(rail)[0], str(round(power_w / 5 * 1000)))

    for index, label in enumerate([*rails, "NC"], 1):
        write(folder / f"in{index}_label", label)
        write(folder / f"in{index}_input", "5000")
        write(folder / f"curr{index}_input", "600")
    write(folder / "in7_label", "sum of shunt voltages")
    write(folder / "in7_input", "123")
    write(folder / "update_interval", "100")
    return Case(
        root, _TYPES["jetson-orin-nx-16gb"], "ina3221-hwmon", rails, ("VDD_IN",), "module", clock, paths, set_power
    )


def make_rapl(root: Path, clock: Clock) -> Case:
    folder = root / "sys/class/powercap"
    domains = {"package-0": folder / "intel-rapl:0", "core": folder / "intel-rapl:0:0", "psys": folder / "intel-rapl:1"}
    power: dict[str, float] = {}
    counts = dict.fromkeys(domains, 260_000_000_000.0)
    counted_s = clock()
    for name, domain in domains.items():
        domain.mkdir(parents=True)
        write(domain / "name", name)
        write(domain / "max_energy_range_uj", "262143328850")
        write(domain / "energy_uj", "260000000000")
        power[name] = 3.0

    def passing(now_s: float) -> None:
        nonlocal counted_s
        for name, domain in domains.items():
            counts[name] = (counts[name] + power[name] * (now_s - counted_s) * 1e6) % 262_143_328_850
            if (domain / "energy_uj").exists() and (domain / "energy_uj").read_text().strip().isdecimal():
                write(domain / "energy_uj", str(int(counts[name])))
        counted_s = now_s

    clock.passing = passing
    return Case(
        root,
        _TYPES["local"],
        "rapl",
        tuple(domains),
        ("package-0",),
        "processor",
        clock,
        lambda rail: [domains[rail] / "energy_uj"],
        power.__setitem__,
    )


@pytest.fixture(params=[make_iio, make_hwmon, make_rapl], ids=["ina3221-iio", "ina3221-hwmon", "rapl"])
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    """One driver's board."""
    made: Case = request.param(tmp_path, Clock(500.0))
    return made


def test_rails_and_total_are_the_board_types(case: Case) -> None:
    """Connected rails, named as the board names them, nothing doubtful; the driver is said. Which rails sum to what;
    never rails that are part of another.
    """
    sensors = case.find()
    assert set(sensors.rails) == set(case.rails)
    assert {info.driver for info in sensors.infos} == {case.driver}
    assert {info.note for info in sensors.infos} == {""}
    assert sensors.total_rails == case.total
    assert sensors.total_scope == case.scope


def test_values_are_watts(case: Case) -> None:
    """In any file format, 3 W on average give 3 W, and 2 s of them 6 J."""
    window = case.watch(case.find())
    assert window.total.power_w == pytest.approx(3.2, rel=0.03)
    assert window.total.energy_j == pytest.approx(6.4, rel=0.03)
    assert window.total.energy_ci_j[0] <= 6.4 <= window.total.energy_ci_j[1]
    assert window.enough
    assert window.note == ""


@pytest.mark.parametrize(
    ("interval_ms", "samples", "period_s"), [(7, 64, 0.448), (422, 64, 0.422), (7, 1, 0.007), (7, None, 0.007)]
)
def test_averaging_that_the_interval_leaves_out_is_counted(
    tmp_path: Path, interval_ms: int, samples: int | None, period_s: float
) -> None:
    """Kernel 6.1 says 7 ms of a sensor that averages 64 times, others 422 ms: until it is seen, the longer counts."""
    case = make_hwmon(tmp_path, Clock(500.0))
    folder = case.paths("VDD_IN")[0].parent
    write(folder / "update_interval", str(interval_ms))
    if samples is not None:
        write(folder / "samples", str(samples))
    assert case.find().rail("VDD_IN").longest_period_s() == pytest.approx(period_s)


def test_sensors_are_measured(case: Case) -> None:
    """The update period as it is; what the kernel's tables say does not matter."""
    before = case.clock.passing

    def passing(now_s: float) -> None:
        before(now_s)
        for rail in case.rails:
            case.set_power(rail, 3.0 + 0.2 * (int(now_s / _PERIOD_S) * 7 % 5))

    case.clock.passing = passing
    sensors = case.find()
    infos = calibrate.measure_sensors(sensors, 2.0, case.clock, case.clock.sleep)
    assert infos == sensors.infos
    # A counter is read out as power over the 10 ms before.
    period_s = pytest.approx(0.011, abs=0.002) if case.driver == "rapl" else pytest.approx(_PERIOD_S, rel=0.03)
    assert [info.update_period_s for info in infos] == [period_s] * len(infos)
    if case.driver != "rapl":
        assert [info.step_w for info in infos] == [pytest.approx(0.2, abs=0.01)] * len(infos)


def test_a_sensor_that_does_not_change_has_no_period(case: Case) -> None:
    """Null instead of a guess."""
    if case.driver == "rapl":
        for rail in case.rails:
            case.set_power(rail, 0.0)
    infos = calibrate.measure_sensors(case.find(), 0.5, case.clock, case.clock.sleep)
    assert [(info.update_period_s, info.step_w) for info in infos] == [(None, None)] * len(infos)


def test_a_sensor_whose_every_read_fails_is_left_out(case: Case) -> None:
    """There is no energy then, and its note says why; what is left has values."""
    sensors, [rail, *_] = case.find(), case.total
    case.paths(rail)[0].write_text("garbage")
    [info] = (each for each in calibrate.measure_sensors(sensors, 0.5, case.clock, case.clock.sleep) if each.note)
    assert (info.rail, info.note.startswith("no energy: "), sensors.total_rails) == (rail, True, ())
    assert set(sensors.rails) == set(case.rails) - {rail}
    assert rail in sensors.note


@pytest.mark.parametrize("text", ["", "garbage", "0x12", "nan", "1e99", "99999999999", "-5000", "12 34"])
def test_values_that_cannot_be_are_bad_reads(case: Case, text: str) -> None:
    """Counted, never used, and never zero."""
    sensors = case.find()
    rail = case.total[0]
    if case.driver == "rapl":  # a power needs two counts
        sensors.read(rail)
        case.clock.sleep(0.05)
        sensors.read(rail)
        case.clock.sleep(0.05)
        if text == "99999999999":
            text = "261000000000"
        if text == "-5000":
            case.paths(rail)[0].parent.joinpath("max_energy_range_uj").write_text("0")
            sensors = case.find()
            sensors.read(rail)
            case.clock.sleep(0.05)
    case.paths(rail)[0].write_text(text)
    with pytest.raises(SensorError, match=rail):
        sensors.read(rail)
    window = case.watch(sensors, wave_w=0.0)
    if case.driver == "rapl" and text in ("261000000000", "-5000"):
        return  # from there on it counts again
    assert window.total is None
    assert window.total_scope == ""
    assert not window.enough
    assert rail not in {power.rail for power in window.rails}
    assert rail in window.note


def test_an_error_now_and_then_is_passed_over(case: Case) -> None:
    """A read that fails is counted and the rest is used."""

    class Flaky(FileTree):
        def read(self, path: str) -> str:
            if watching and path.rpartition("/")[2].startswith(("in", "curr", "energy")) and case.clock() % 0.05 < 0.01:
                raise OSError(5, "Input/output error", path)
            return super().read(path)

    watching = False
    sensors = find_sensors(Flaky(case.root), case.board_type, clock=case.clock)
    watching = True
    window = case.watch(sensors)
    assert window.total.bad_reads > 10
    assert window.total.reads > 100
    assert window.total.power_w == pytest.approx(3.2, rel=0.05)


def test_a_sensor_that_vanishes_leaves_what_was_read(case: Case) -> None:
    """The rail's part of the window is reported with a note; no total is made up from it."""
    sensors = case.find()
    gone_s = case.clock() + 1.0
    before = case.clock.passing

    def passing(now_s: float) -> None:
        before(now_s)
        if now_s > gone_s:
            for path in case.paths(case.total[0]):
                path.unlink(missing_ok=True)

    case.clock.passing = passing
    window = case.watch(sensors)
    rail = next(power for power in window.rails if power.rail == case.total[0])
    assert rail.power_w == pytest.approx(3.2, rel=0.05)
    assert rail.energy_j == pytest.approx(3.2, rel=0.05)
    assert rail.bad_reads > 50
    assert window.total is None
    assert not window.enough
    assert re.search(rf"{case.total[0]}: answered for (0.99|1.0\d) of 2.00 s only", window.note)
    assert "No such file" in window.note


def test_a_stale_sensor_is_told(case: Case) -> None:
    """A value that never changes is not taken for a measurement."""
    if case.driver == "rapl":
        case.clock.passing = lambda now_s: None
    sensors = case.find()
    window = case.watch(sensors, wave_w=0.0)
    assert not window.enough
    expected = "no value in this window" if case.driver == "rapl" else "never changed: constant, or stale"
    assert expected in window.note
    if case.driver != "rapl":
        assert window.total.updates == 1
        assert window.total.energy_ci_j[1] > 1.4 * window.total.energy_j


def test_without_a_total_rail_there_is_no_total(case: Case) -> None:
    """Rails are still read; the total is null, never the sum of what happens to be there."""
    for path in case.paths(case.total[0]):
        path.unlink()
    sensors = case.find()
    assert set(sensors.rails) == set(case.rails) - set(case.total)
    assert sensors.total_rails == ()
    assert sensors.total_scope == ""
    window = case.watch(sensors)
    assert window.total is None
    assert "no total" in window.note


@pytest.mark.parametrize("name", sorted(_TYPES))
def test_no_sensor_is_null(tmp_path: Path, name: str) -> None:
    """A board without a sensor has no rails, no total and no window."""
    clock = Clock(500.0)
    (tmp_path / "sys").mkdir()
    sensors = find_sensors(FileTree(tmp_path), _TYPES[name], clock=clock)
    assert (sensors.rails, sensors.infos, sensors.total_rails, sensors.total_scope) == ((), (), (), "")
    assert calibrate.measure_sensors(sensors, 2.0, clock, clock.sleep) == ()
    trace = sampler.collect(sensors, 1.0, 100.0, clock, clock.sleep)
    assert energy.integrate(trace, 500.0, 501.0, sensors) is None
    assert trace.updates(500.0) == {}


def test_an_unreadable_counter_is_no_sensor(tmp_path: Path) -> None:
    """RAPL that only root may read is not there."""
    make_rapl(tmp_path, Clock(500.0))
    assert find_sensors(RootOnly(tmp_path), _TYPES["local"]).rails == ()


class Helper:
    def __init__(self, tree: FileTree, answers: bool = True) -> None:
        self._tree, self._answers = tree, answers

    def read(self, path: str) -> str:
        if not self._answers:
            raise HelperUnavailableError("no clock helper at this socket")
        return self._tree.read(path)

    def status(self) -> AccessStatus:
        return AccessStatus()

    def begin(self, holder: str) -> None: ...

    def write(self, path: str, text: str) -> None: ...

    def set_power_mode(self, mode_id: int) -> str:
        return ""

    def restore(self) -> tuple[str, ...]:
        return ()

    def close(self) -> None: ...


@pytest.mark.parametrize("device", ["6-0040", "7-0040"])
@pytest.mark.parametrize("helper", ["none", "silent"])
def test_unreadable_names_come_from_the_place_and_say_so(tmp_path: Path, device: str, helper: str) -> None:
    """Channel order by the chip's address, with any bus number."""
    case = make_iio(tmp_path, Clock(500.0), device)
    access = Helper(FileTree(tmp_path), answers=False) if helper == "silent" else None
    sensors = find_sensors(RootOnly(tmp_path), case.board_type, access)
    assert sensors.rails == case.rails
    assert sensors.total_rails == case.total
    assert all("named by its place" in info.note for info in sensors.infos)


def test_names_are_read_by_the_helper(tmp_path: Path) -> None:
    """With privileged access, nothing is guessed."""
    case = make_iio(tmp_path, Clock(500.0))
    (tmp_path / _DEVICES / "6-0040/iio:device0/rail_name_1").write_text("POM_OTHER\n")
    sensors = find_sensors(RootOnly(tmp_path), case.board_type, Helper(FileTree(tmp_path)))
    assert sensors.rails == ("POM_5V_IN", "POM_OTHER", "POM_5V_CPU")
    assert {info.note for info in sensors.infos} == {""}


def test_an_unknown_board_with_unreadable_names_has_no_total(tmp_path: Path) -> None:
    """Its rails are called by chip and channel."""
    make_iio(tmp_path, Clock(500.0))
    sensors = find_sensors(RootOnly(tmp_path), None)
    assert sensors.rails == ("ina3221-6-0040-0", "ina3221-6-0040-1", "ina3221-6-0040-2")
    assert sensors.total_rails == ()


def test_a_carriers_sensor_makes_the_total_the_boards(tmp_path: Path) -> None:
    """A TX2 alone has the module's total; with the developer kit's sensor at 0x42, on any bus, the board's."""

    def add(device: str, index: int, rails: tuple[str, ...]) -> None:
        folder = tmp_path / _DEVICES / device / f"iio:device{index}"
        folder.mkdir(parents=True)
        write(folder.parent / "name", "ina3221x")
        for channel, rail in enumerate(rails):
            write(folder / f"rail_name_{channel}", rail)
            write(folder / f"in_power{channel}_input", "1000")

    add("0-0040", 0, ("VDD_SYS_GPU", "VDD_SYS_SOC", "VDD_4V0_WIFI"))
    add("0-0041", 1, ("VDD_IN", "VDD_SYS_CPU", "VDD_SYS_DDR"))
    module = find_sensors(FileTree(tmp_path), _TYPES["jetson-tx2"])
    assert (module.total_rails, module.total_scope) == (("VDD_IN",), "module")
    add("2-0042", 2, ("VDD_MUX", "VDD_5V0_IO_SYS", "VDD_3V3_SYS"))
    for tree in (FileTree(tmp_path), RootOnly(tmp_path)):
        board = find_sensors(tree, _TYPES["jetson-tx2"])
        assert (board.total_rails, board.total_scope) == (("VDD_IN", "VDD_MUX"), "board")
        assert len(board.rails) == 9


def test_equal_names_are_told_apart(tmp_path: Path) -> None:
    """Two chips with a rail of the same name keep both."""
    make_iio(tmp_path, Clock(500.0))
    make_iio(tmp_path, Clock(500.0), "7-0041")
    assert "POM_5V_IN.7-0041" in find_sensors(FileTree(tmp_path), None).rails


def test_a_chip_without_driver_has_no_rails(tmp_path: Path) -> None:
    """A device that nothing is bound to is passed over, and so are other devices."""
    for device, name in (("6-0040", "ina3221x"), ("6-0041", "lm75")):
        (tmp_path / _DEVICES / device).mkdir(parents=True)
        write(tmp_path / _DEVICES / device / "name", name)
    assert sensors.find_ina3221_rails(FileTree(tmp_path), _TYPES["jetson-nano"]) == []


def make_virtual(name: str, privileged: bool = True) -> tuple[VirtualTree, PowerSensors, Clock]:
    """A virtual board whose load goes up and down; its sensors are those of an agent with these rights."""
    clock = Clock(500.0)
    board = VirtualBoard(_TYPES[name], 3, clock)
    cluster = next(iter(board.clusters))
    refresh = -1

    def passing(now_s: float) -> None:
        nonlocal refresh
        if int(now_s / 0.5) != refresh:
            refresh = int(now_s / 0.5)
            board.set_load("test", Load(cluster=cluster, cores=3.0 * (refresh % 2), memory=0.5))

    clock.passing = passing
    tree = VirtualTree(board)
    sensors = find_sensors(tree if privileged else VirtualTree(board, privileged=False), _TYPES[name], clock=clock)
    clock.sleep(3.0)
    return tree, sensors, clock


def watch_virtual(tree: VirtualTree, sensors: PowerSensors, clock: Clock, fault: str = "") -> PowerWindow:
    """Look for 4 s; the fault comes when half of that has passed."""
    if fault:
        tree.write(FAULT, f"{fault}@2")
    start_s = clock()
    trace = sampler.collect(sensors, 4.0, 50.0, clock, clock.sleep)
    window = energy.integrate(trace, start_s, start_s + 4.0, sensors)
    assert window is not None
    return window


@pytest.mark.parametrize("privileged", [True, False], ids=["root", "user"])
@pytest.mark.parametrize("name", _SIMULATED)
def test_virtual_boards_have_their_rails(name: str, privileged: bool) -> None:
    """Every simulated type: rails and total as the type says, with and without the right to read names."""
    known = _TYPES[name].power
    tree, sensors, clock = make_virtual(name, privileged)
    carrier = tree.board.parameters.optional_sensors
    fitted = {rail for chip in known.chips if chip.fitted or carrier for rail in chip.rails if rail}
    assert set(sensors.rails) == fitted
    assert sensors.total_rails == known.total + (known.board_total if carrier else ())
    assert sensors.total_scope == ("board" if carrier and known.board_total else known.total_scope)
    by_place = not privileged and any(info.driver == "ina3221-iio" for info in sensors.infos)
    assert {bool(info.note) for info in sensors.infos} == ({by_place} if fitted else set())
    if fitted:
        window = watch_virtual(tree, sensors, clock)
        truth_j = tree.board.exact_energy_j(TOTAL, window.started_s, window.started_s + 4.0)
        assert window.total.energy_ci_j[0] <= truth_j <= window.total.energy_ci_j[1]


@pytest.mark.parametrize("fault", ["sensor_vanish", "sensor_garbage", "sensor_error", "sensor_stale", "sensor_zero"])
@pytest.mark.parametrize("name", ["jetson-nano", "jetson-tx2", "jetson-orin-nano-8gb"])
def test_a_virtual_sensor_that_fails_is_told(name: str, fault: str) -> None:
    """The part before the fault is reported, with what happened; a total is never made up, nor a value zero."""
    tree, sensors, clock = make_virtual(name)
    calibrate.measure_sensors(sensors, 1.0, clock, clock.sleep)
    window = watch_virtual(tree, sensors, clock, fault)
    assert window.rails
    assert all(power.power_w > 0 or power.power_ci_w[1] > 0 for power in window.rails)
    if fault == "sensor_stale":  # within this window it was alive; the next one shows it
        window = watch_virtual(tree, sensors, clock)
        assert "never changed: constant, or stale" in window.note
    elif fault in ("sensor_garbage", "sensor_zero"):  # of rails that may be at 0 W some of it could be true
        assert {power.rail for power in window.rails if power.bad_reads > 30} >= set(sensors.total_rails[:1])
        assert "reads were bad" in window.note or "answered for" in window.note
    else:
        assert window.total is None
        assert "answered for" in window.note
        assert all(power.bad_reads > 30 for power in window.rails)
    assert not window.enough


def test_a_rail_that_is_never_off_is_dead_at_zero() -> None:
    """Of an AGX Xavier's rails GPU and CV may be at 0 W; without the CPU's there is no total, at once or at a start."""
    tree, sensors, clock = make_virtual("jetson-agx-xavier")
    tree.write(FAULT, "sensor_zero:GPU")  # and CPU and SOC, which its chip converts too
    window = watch_virtual(tree, sensors, clock)
    assert "; CPU: 0 W throughout, while the board runs" in f"; {window.note}"
    assert (window.total, "GPU: 0 W" in window.note) == (None, False)
    calibrate.measure_sensors(sensors, 1.0, clock, clock.sleep)
    assert (sensors.total_rails, sensors.note) == ((), "no energy: CPU, SOC cannot be read")
