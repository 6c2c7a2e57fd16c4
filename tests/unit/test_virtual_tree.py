"""A virtual board's files: permissions, hot-plug, nvpmodel, memory locks, load, faults."""

from __future__ import annotations

import errno
import json

import pytest

from farm.virtual.board import VirtualBoard
from farm.virtual.faults import parse_fault
from farm.virtual.tree import FAULT, LOAD, TIME, VirtualTree
from tests.unit.virtual_boards import SIMULATED, Clock, board_types, make_board, make_tree

_CPUS = "/sys/devices/system/cpu"
_NANO_RAIL = "/sys/bus/i2c/devices/6-0040/iio:device0/in_power0_input"
_EMC = "/sys/kernel/debug/bpmp/debug/clk/emc"


def list_files(tree: VirtualTree, folder: str = "/sys") -> list[str]:
    found = []
    for name in tree.names(folder):
        path = f"{folder}/{name}"
        try:
            tree.names(path)
        except NotADirectoryError:
            found.append(path)
            continue
        if name != "device":
            found += list_files(tree, path)
    return found


def refuses(tree: VirtualTree, path: str, text: str) -> int | None:
    """The error number of a write; None where it is taken."""
    try:
        tree.write(path, text)
    except OSError as error:
        return error.errno
    return None


@pytest.mark.parametrize("name", SIMULATED)
def test_root_can_read_everything_a_user_not(name: str) -> None:
    """Root's only errors are zones without power; a user may write nothing but the load, and let time pass."""
    board, _ = make_board(name)
    root, user = VirtualTree(board), VirtualTree(board, privileged=False)
    unpowered = set(board.parameters.thermal.unpowered)
    for path in list_files(root):
        if path.endswith("/temp") and root.read(path.replace("/temp", "/type")) in unpowered:
            with pytest.raises(BlockingIOError):
                root.read(path)
        else:
            root.read(path)
        if path not in (LOAD, TIME) and not path.startswith("/sys/kernel/debug"):
            assert refuses(user, path, "0") == errno.EACCES
    assert refuses(user, LOAD, "{}") is None


def test_users_see_no_debugfs_and_no_rail_names() -> None:
    """The memory clock and R32's rail names are root's."""
    board, _ = make_board()
    user = VirtualTree(board, privileged=False)
    assert user.names("/sys/kernel") == ["debug", "nvpmodel_emc_cap"]
    assert not user.exists("/sys/kernel/debug/tegra_bwmgr/emc_rate")
    for path in ("/sys/kernel/debug/tegra_bwmgr/emc_rate", "/sys/bus/i2c/devices/6-0040/iio:device0/rail_name_0"):
        with pytest.raises(PermissionError):
            user.read(path)
    assert user.read(_NANO_RAIL).isdecimal()


def test_hot_plug_takes_cpufreq_along() -> None:
    """An offline core has no cpufreq folder, and a policy without a core is gone."""
    tree = make_tree("jetson-tx2")
    assert tree.read(f"{_CPUS}/online") == "0,3-5"
    assert tree.read(f"{_CPUS}/isolated") == "1-2"
    assert tree.names(f"{_CPUS}/cpufreq") == ["policy0"]
    assert not tree.exists(f"{_CPUS}/cpu1/cpufreq")
    tree.write(f"{_CPUS}/cpu2/online", "1")
    assert tree.names(f"{_CPUS}/cpufreq") == ["policy0", "policy1"]
    assert tree.read(f"{_CPUS}/cpufreq/policy1/related_cpus") == "1 2"
    assert tree.read(f"{_CPUS}/cpufreq/policy1/affected_cpus") == "2"
    assert tree.read(f"{_CPUS}/cpu2/cpufreq/scaling_max_freq") == "2035200"
    assert not tree.exists(f"{_CPUS}/cpu1/cpufreq")


def test_the_first_core_stays() -> None:
    """It has no file to switch it off with."""
    assert refuses(make_tree(), f"{_CPUS}/cpu0/online", "0") == errno.ENOENT


@pytest.mark.parametrize("text", ["", "fast", "-5", "1e6"])
def test_clock_files_refuse_what_is_no_number(text: str) -> None:
    """EINVAL, as from the kernel."""
    tree = make_tree()
    assert refuses(tree, f"{_CPUS}/cpufreq/policy0/scaling_max_freq", text) == errno.EINVAL
    assert refuses(tree, "/sys/class/devfreq/57000000.gpu/max_freq", text) == errno.EINVAL
    assert refuses(tree, f"{_CPUS}/cpu1/online", text) == errno.EINVAL


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("jetson-nano", "/sys/devices/57000000.gpu/devfreq/57000000.gpu"),
        ("jetson-tx2", "/sys/devices/17000000.gp10b/devfreq/17000000.gp10b"),
        ("jetson-xavier-nx", "/sys/devices/17000000.gv11b/devfreq/17000000.gv11b"),
        ("jetson-orin-nano-8gb", "/sys/devices/platform/bus@0/17000000.gpu/devfreq/17000000.gpu"),
    ],
)
def test_the_gpu_is_found_by_class_and_name(name: str, path: str) -> None:
    """/sys/class/devfreq leads to it, and its device says what it is."""
    tree = make_tree(name)
    (device,) = tree.names("/sys/class/devfreq")
    assert tree.read(f"/sys/class/devfreq/{device}/device/of_node/name") == device.partition(".")[2]
    top = str(tree.board.gpu.clock.table[-1]) if tree.board.gpu else ""
    tree.write(f"{path}/max_freq", top)
    tree.write(f"/sys/class/devfreq/{device}/min_freq", top)
    assert tree.read(f"{path}/cur_freq") == top


def test_a_user_of_the_gpu_switch_sees_power_come_and_go() -> None:
    """An idle GPU draws nothing while rail-gated, and something once that is off."""
    tree = make_tree()
    assert tree.board.exact_power_w("POM_5V_GPU") == 0
    tree.write("/sys/devices/gpu.0/railgate_enable", "0")
    assert tree.board.exact_power_w("POM_5V_GPU") > 0.05
    tree.write("/sys/devices/gpu.0/railgate_enable", "1")
    tree.write("/sys/devices/gpu.0/power/control", "on")
    assert tree.board.exact_power_w("POM_5V_GPU") > 0.05


def test_bpmp_holds_a_rate_only_while_locked_and_drops_unknown_ones() -> None:
    """Cap, lock, rate, state: in that order it holds; a rate that firmware lacks is taken and ignored."""
    tree = make_tree("jetson-tx2")
    tree.write(f"{_EMC}/rate", "1866000000")
    assert tree.read(f"{_EMC}/rate") != "1866000000"
    for name, value in (("mrq_rate_locked", "1"), ("rate", "1866000000"), ("state", "1")):
        tree.write(f"{_EMC}/{name}", value)
    assert tree.read(f"{_EMC}/rate") == "1600000000"  # the mode's cap
    tree.write("/sys/kernel/nvpmodel_emc_cap/emc_iso_cap", "0")
    assert tree.read(f"{_EMC}/rate") == "1866000000"
    tree.write(f"{_EMC}/rate", "1500000000")
    assert tree.read(f"{_EMC}/rate") == "1866000000"
    tree.write(f"{_EMC}/mrq_rate_locked", "0")
    assert int(tree.read(f"{_EMC}/rate")) < 1_866_000_000
    assert tree.read("/sys/kernel/debug/bpmp/debug/emc/possible_rates").split()[-1] == "1866000"


def test_a_nanos_override_holds_a_rate_while_its_state_is_on() -> None:
    """clk_update_rate alone changes nothing; clk_state 0 lets the CPU's floor rule again."""
    tree = make_tree()
    folder = "/sys/kernel/debug/clk/override.emc"
    tree.write(f"{folder}/clk_update_rate", "800000000")
    assert tree.read("/sys/kernel/debug/tegra_bwmgr/emc_rate") == "204000000"
    tree.write(f"{folder}/clk_state", "1")
    assert tree.read("/sys/kernel/debug/tegra_bwmgr/emc_rate") == "800000000"
    tree.write(f"{folder}/clk_state", "0")
    assert tree.read("/sys/kernel/debug/tegra_bwmgr/emc_rate") == "204000000"


def test_nvpmodel_applies_a_mode_and_rounds_its_caps_up() -> None:
    """MAXQ on a TX2: Denver off, 1.2 GHz becomes 1267.2 MHz, and the GPU's cap the next step up."""
    tree = make_tree("jetson-tx2")
    assert tree.run(["nvpmodel", "-q"]).splitlines() == ["NV Power Mode: MAXP_CORE_ARM", "3"]
    tree.run(["nvpmodel", "-m", "1"])
    assert tree.read(f"{_CPUS}/online") == "0,3-5"
    assert tree.read(f"{_CPUS}/cpu0/cpufreq/scaling_max_freq") == "1267200"
    assert tree.read("/sys/class/devfreq/17000000.gp10b/max_freq") == "854250000"
    assert tree.read("/sys/kernel/nvpmodel_emc_cap/emc_iso_cap") == "1331200000"
    assert "ID=4 NAME=MAXP_CORE_DENVER" in tree.run(["nvpmodel", "-p", "--verbose"])


def test_nvpmodel_overwrites_what_was_pinned() -> None:
    """Limits set before a mode change are gone after it."""
    tree = make_tree()
    tree.write(f"{_CPUS}/cpufreq/policy0/scaling_max_freq", "921600")
    tree.run(["nvpmodel", "-m", "0"])
    assert tree.read(f"{_CPUS}/cpufreq/policy0/scaling_max_freq") == "1479000"


def test_a_mode_with_other_power_gating_asks_and_changes_nothing() -> None:
    """The 10 W mode of an AGX Xavier switches units off, which needs a reboot."""
    tree = make_tree("jetson-agx-xavier")
    before = tree.run(["nvpmodel", "-q"]), tree.read(f"{_CPUS}/online")
    with pytest.raises(OSError, match="REBOOT") as caught:
        tree.run(["nvpmodel", "-m", "1"])
    assert caught.value.errno == 255
    assert (tree.run(["nvpmodel", "-q"]), tree.read(f"{_CPUS}/online")) == before
    assert "TPC_POWER_GATING TPC_PG_MASK 5" in tree.read("/etc/nvpmodel.conf")


def test_nvpmodel_is_roots_and_knows_its_modes() -> None:
    """Everybody may ask; only root may change; other numbers and tools are errors."""
    board, _ = make_board()
    user = VirtualTree(board, privileged=False)
    assert "MAXN" in user.run(["nvpmodel", "-q"])
    with pytest.raises(PermissionError):
        user.run(["nvpmodel", "-m", "1"])
    with pytest.raises(OSError, match="invalid power mode"):
        VirtualTree(board).run(["nvpmodel", "-m", "9"])
    with pytest.raises(FileNotFoundError):
        user.run(["jetson_clocks"])


def test_the_measured_clock_of_a_tx2_jitters_and_reads_0_when_idle() -> None:
    """Within one per cent while busy; now and then nothing at all while idle."""
    tree = make_tree("jetson-tx2")
    idle = {tree.read(f"{_CPUS}/cpu0/cpufreq/scaling_cur_freq") for _ in range(100)}
    assert "0" in idle
    tree.write(LOAD, json.dumps({"cluster": "a57", "cores": 4}))
    busy = [int(tree.read(f"{_CPUS}/cpu0/cpufreq/scaling_cur_freq")) for _ in range(100)]
    assert len(set(busy)) > 10
    assert all(abs(khz / 2_035_200 - 1) <= 0.0101 for khz in busy)


@pytest.mark.parametrize(
    "text",
    ["[]", "{", '{"cluster": "x"}', '{"cores": -1}', '{"cores": "1"}', '{"speed": 1}', '{"cores": 1, "ttl_s": 0}'],
)
def test_a_load_that_makes_no_sense_is_refused(text: str) -> None:
    """EINVAL with the reason; an empty one is idle."""
    board, _ = make_board()
    tree = VirtualTree(board, privileged=False)
    if text == "[]":
        tree.write(LOAD, text)
        assert board.clusters["a57"].busy == 0
    else:
        assert refuses(tree, LOAD, text) == errno.EINVAL


def test_a_load_is_its_writers_and_ends_with_it() -> None:
    """Two users add up; a user that hangs up takes its load along."""
    board, _ = make_board()
    one, two = VirtualTree(board), VirtualTree(board, privileged=False)
    one.write(LOAD, '{"cluster": "a57", "cores": 1}')
    two.write(LOAD, '{"cluster": "a57", "cores": 2}')
    assert board.clusters["a57"].busy == 3
    two.close()
    assert board.clusters["a57"].busy == 1


def make_faulty(fault: str, name: str = "jetson-nano") -> tuple[VirtualTree, Clock]:
    board, clock = make_board(name)
    tree = VirtualTree(board)
    tree.write(FAULT, fault)
    clock.wait(1)
    return tree, clock


def test_a_fault_of_one_rail_leaves_other_chips_alone() -> None:
    """On a TX2 the module's chip fails, the GPU's goes on."""
    tree, _ = make_faulty("sensor_error:VDD_IN", "jetson-tx2")
    assert tree.read("/sys/bus/i2c/devices/0-0040/iio:device0/in_power0_input").isdecimal()
    with pytest.raises(OSError, match="Input/output"):
        tree.read("/sys/bus/i2c/devices/0-0041/iio:device1/in_power0_input")


def test_throttling_shows_in_clock_and_cooling_device_and_ends() -> None:
    """The clock drops under its limit, a cooling device is active, both for as long as was asked for."""
    tree, clock = make_faulty("throttle:5")
    tree.write(f"{_CPUS}/cpufreq/policy0/scaling_min_freq", "1479000")
    assert int(tree.read(f"{_CPUS}/cpufreq/policy0/scaling_cur_freq")) < 740_000
    assert tree.read(f"{_CPUS}/cpufreq/policy0/scaling_max_freq") == "1479000"
    assert tree.read("/sys/class/thermal/cooling_device0/cur_state") == "1"
    clock.wait(5)
    assert tree.read(f"{_CPUS}/cpufreq/policy0/scaling_cur_freq") == "1479000"
    assert tree.read("/sys/class/thermal/cooling_device0/cur_state") == "0"


def test_an_over_current_is_counted() -> None:
    """By an alarm and a counter where the release has them, in the kernel's log where not."""
    tree, _ = make_faulty("overcurrent:10", "jetson-orin-nano-8gb")
    (hwmon,) = tree.names("/sys/bus/i2c/devices/1-0040/hwmon")
    assert tree.read(f"/sys/class/hwmon/{hwmon}/curr1_max_alarm") == "1"
    assert tree.read("/sys/class/hwmon/hwmon0/oc1_event_cnt") == "1"
    tree, _ = make_faulty("overcurrent")
    assert "OC ALARM" in tree.read("/dev/kmsg")


def test_a_reboot_brings_the_boards_defaults_back() -> None:
    """Clocks, load and locks are as it boots, the boot is another one, and time since then starts anew."""
    board, clock = make_board("jetson-tx2")
    tree = VirtualTree(board)
    boot_id = tree.read("/proc/sys/kernel/random/boot_id")
    tree.run(["nvpmodel", "-m", "1"])
    tree.write(f"{_EMC}/mrq_rate_locked", "1")
    tree.write(LOAD, '{"cores": 4}')
    clock.wait(100)
    tree.write(FAULT, "reboot@5")
    clock.wait(4)
    assert tree.read("/proc/sys/kernel/random/boot_id") == boot_id
    clock.wait(3)
    assert tree.read("/proc/sys/kernel/random/boot_id") != boot_id
    assert tree.run(["nvpmodel", "-q"]).splitlines()[1] == "3"
    assert tree.read(f"{_EMC}/mrq_rate_locked") == "0"
    assert board.clusters["a57"].busy == 0
    assert float(tree.read("/proc/uptime").split()[0]) == pytest.approx(2)


def test_a_board_that_hangs_answers_root_only_to_end_it() -> None:
    """Every call times out until the fault is cleared."""
    tree, _ = make_faulty("hang")
    with pytest.raises(TimeoutError):
        tree.read("/proc/uptime")
    with pytest.raises(TimeoutError):
        tree.exists("/proc/uptime")
    tree.write(FAULT, "clear")
    assert tree.exists("/proc/uptime")


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("hang", ("hang", "", 0.0)),
        ("throttle:5@2.5", ("throttle", "5", 2.5)),
        ("slow:1.3@60", ("slow", "1.3", 60.0)),
        ("write_refused:/sys/devices/platform/bus@0/x", ("write_refused", "/sys/devices/platform/bus@0/x", 0.0)),
        ("file_vanish:iio:device0/in@3", ("file_vanish", "iio:device0/in", 3.0)),
    ],
)
def test_faults_are_read(text: str, parsed: tuple[str, str, float]) -> None:
    """KIND[:ARG][@SECONDS], colons and at signs in a path left alone."""
    assert parse_fault(text) == parsed


@pytest.mark.parametrize(
    "text",
    ["", "melt", "hang:1", "write_refused", "slow_read:x", "throttle:-1", "hang@-1", "hang@inf", "slow:0", "slow:x"],
)
def test_faults_that_make_no_sense_are_refused(text: str) -> None:
    """ValueError from the parser, EINVAL from the file."""
    with pytest.raises(ValueError):
        parse_fault(text)
    assert refuses(make_tree(), FAULT, text) == errno.EINVAL


def test_boards_of_other_types_cannot_be_simulated() -> None:
    """A type without a `simulation` section says so."""
    with pytest.raises(ValueError, match="no `simulation` section"):
        VirtualBoard(board_types()["local"])
