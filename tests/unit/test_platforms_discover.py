"""What is found of a board's clocks in its files, when its type is unknown, wrong, or only partly right."""

from __future__ import annotations

from pathlib import Path

import pytest

from device_agent.board_types import BoardType, load_board_types
from device_agent.clocks.controller import Controller, find_lock
from device_agent.clocks.platform import Platform
from device_agent.errors import BadPointError
from device_agent.protocol import Clocks, DomainClocks
from device_agent.protocol.hardware import Cluster, Gpu
from device_agent.sysfs import FileTree

_CPUS = "sys/devices/system/cpu"


def write(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n")


def add_policy(root: Path, name: str, cpus: str, table: str = "1000000 2000000") -> None:
    folder = f"{_CPUS}/cpufreq/{name}"
    lowest, highest = table.split()[0], table.split()[-1]
    write(root, f"{folder}/related_cpus", cpus)
    write(root, f"{folder}/scaling_available_frequencies", table)
    write(root, f"{folder}/scaling_min_freq", lowest)
    write(root, f"{folder}/scaling_max_freq", highest)
    write(root, f"{folder}/scaling_cur_freq", lowest)
    write(root, f"{folder}/scaling_governor", "schedutil")


def add_cpus(root: Path, present: str, online: str, isolated: str = "") -> None:
    write(root, f"{_CPUS}/present", present)
    write(root, f"{_CPUS}/online", online)
    write(root, f"{_CPUS}/isolated", isolated)


def test_an_unknown_board_has_a_cluster_for_each_policy(tmp_path: Path) -> None:
    """Clusters are named by their policy, cores that show no clock come last, and what is lacking is said."""
    add_cpus(tmp_path, "0-5", "0,3-5", isolated="1-2")
    add_policy(tmp_path, "policy0", "0 3 4 5")
    platform = Platform.discover(FileTree(tmp_path), None)
    assert [(c.name, c.cpus, c.isolated) for c in platform.clusters] == [
        ("policy0", (0, 3, 4, 5), False),
        ("cpu1", (1, 2), True),
    ]
    assert platform.name == "generic-linux"
    assert platform.lacks == (
        "a board of no known type (generic-linux): there is no device tree",
        "no GPU clock (devfreq)",
        "no memory clock that can be set",
        "no power modes (nvpmodel)",
    )
    assert "CPUs 1, 2 show no clock now; what they have is seen when they are online" in platform.notes


def test_a_policy_that_comes_back_is_found_under_any_name(tmp_path: Path) -> None:
    """Denver's policy appears with the first of its cores that is online, under any name of the kernel's."""
    add_cpus(tmp_path, "0-5", "0,3-5")
    add_policy(tmp_path, "policy0", "0 3 4 5")
    platform = Platform.discover(FileTree(tmp_path), load_board_types()["jetson-tx2"])
    denver = platform.find_cluster("denver")
    assert Controller.read(platform).clusters[1] == DomainClocks("denver", cpus=(1, 2), isolated=True)
    add_cpus(tmp_path, "0-5", "0,2-5")
    add_policy(tmp_path, "policy2", "1 2", "345600 2035200")
    found = denver.read((0, 2, 3, 4, 5))
    assert (found.online, found.max_hz, found.available_hz) == ((2,), 2_035_200_000, (345_600_000, 2_035_200_000))


def test_a_core_folder_without_policies_is_enough(tmp_path: Path) -> None:
    """A captured tree may hold cpuN/cpufreq only."""
    add_cpus(tmp_path, "0-1", "0-1")
    for cpu in (0, 1):
        write(tmp_path, f"{_CPUS}/cpu{cpu}/cpufreq/related_cpus", "0 1")
        write(tmp_path, f"{_CPUS}/cpu{cpu}/cpufreq/scaling_cur_freq", "1500000")
    platform = Platform.discover(FileTree(tmp_path), None)
    assert [(c.name, c.cpus) for c in platform.clusters] == [("policy0", (0, 1))]
    assert Controller.read(platform).clusters[0].current_hz == 1_500_000_000


def test_without_cpufreq_there_is_one_cluster_without_clocks(tmp_path: Path) -> None:
    """A virtual machine has cores all the same."""
    add_cpus(tmp_path, "0-3", "0-3", isolated="3")
    platform = Platform.discover(FileTree(tmp_path), None)
    assert [(c.name, c.cpus) for c in platform.clusters] == [("cpu", (0, 1, 2, 3))]
    assert Controller.read(platform).clusters[0].available_hz == ()
    assert "no cpufreq: CPU clocks can neither be read nor held" in platform.lacks
    assert platform.affinity() == (0, 1, 2)


def test_an_empty_tree_is_a_board_without_anything(tmp_path: Path) -> None:
    """Nothing is guessed and nothing raises."""
    platform = Platform.discover(FileTree(tmp_path), load_board_types()["jetson-nano"])
    assert (platform.clusters, platform.gpu, platform.memory, platform.power_modes) == ((), None, None, None)
    assert Controller.read(platform).clusters == ()


def make_type(clusters: tuple[Cluster, ...], gpu: Gpu | None = None) -> BoardType:
    return BoardType("acme", clusters=clusters, gpu=gpu)


def test_the_board_counts_where_its_type_is_wrong(tmp_path: Path) -> None:
    """Policies that cross the type's clusters, missing cores and other tables are noted; the board's own are used."""
    add_cpus(tmp_path, "0-5", "0-5")
    add_policy(tmp_path, "policy0", "0 1")
    add_policy(tmp_path, "policy2", "2 3 4 5")
    clusters = (
        Cluster("little", "a", (0, 1), freqs_hz=(1_000_000_000, 1_500_000_000)),
        Cluster("mid", "b", (2, 3)),
        Cluster("big", "b", (4, 5)),
        Cluster("gone", "b", (6, 7)),
    )
    platform = Platform.discover(FileTree(tmp_path), make_type(clusters))
    assert [(c.name, c.cpus) for c in platform.clusters] == [("little", (0, 1)), ("policy2", (2, 3, 4, 5))]
    assert Controller.read(platform).clusters[0].available_hz == (1_000_000_000, 2_000_000_000)
    assert [note for note in platform.notes if note not in platform.lacks] == [
        "policy2 does not fit cluster mid of acme; policies count",
        "policy2 does not fit cluster big of acme; policies count",
        "cluster gone of acme has CPUs 6, 7, which this board lacks",
        "little offers 1000, 2000 MHz; acme is known with 1000, 1500 MHz",
    ]


def test_a_cluster_may_have_several_policies(tmp_path: Path) -> None:
    """A type may call cores one cluster that the kernel sets pair by pair."""
    add_cpus(tmp_path, "0-3", "0-3")
    add_policy(tmp_path, "policy0", "0 1")
    add_policy(tmp_path, "policy2", "2 3")
    platform = Platform.discover(FileTree(tmp_path), make_type((Cluster("all", "a", (0, 1, 2, 3)),)))
    assert [c.name for c in platform.clusters] == ["all"]
    assert [clock.folder.rpartition("/")[2] for clock in platform.clusters[0].clocks((0, 1, 3))] == [
        "policy0",
        "policy2",
    ]


@pytest.mark.parametrize(
    ("name", "node", "devices", "found"),
    [
        ("17000000.gp10b", None, (), True),
        ("57000000.gpu", None, (), True),
        ("devfreq0", "ga10b", (), True),
        ("devfreq0", "gm20b", (), True),
        ("acme-gpu", None, ("acme-gpu",), True),
        ("15340000.vic", "vic", (), False),
        ("bwmgr", None, (), False),
    ],
)
def test_the_gpu_is_found_by_name(
    tmp_path: Path, name: str, node: str | None, devices: tuple[str, ...], *, found: bool
) -> None:
    """By its own name, its device-tree node's, or the type's; other devfreq devices are left alone."""
    write(tmp_path, f"sys/class/devfreq/{name}/available_frequencies", "2 1")
    if node:
        write(tmp_path, f"sys/class/devfreq/{name}/device/of_node/name", node)
    platform = Platform.discover(FileTree(tmp_path), make_type((), Gpu("sm", devices)))
    assert (platform.gpu.read_table_hz() if platform.gpu else None) == ((1, 2) if found else None)


def test_other_tables_of_a_type_are_no_surprise(tmp_path: Path) -> None:
    """A GPU table that another release is known to have is not noted."""
    write(tmp_path, "sys/class/devfreq/57000000.gpu/available_frequencies", "1000000 3000000")
    known = Gpu("sm", (), freqs_hz=(1_000_000, 2_000_000), other_freqs_hz=((1_000_000, 3_000_000),))
    assert not any("offers" in note for note in Platform.discover(FileTree(tmp_path), make_type((), known)).notes)


def test_affinity_is_by_cluster_and_leaves_isolated_cores_out(tmp_path: Path) -> None:
    """A named cluster's cores that are online; of no name, all that the scheduler uses."""
    add_cpus(tmp_path, "0-5", "0-1,3-5", isolated="1-2")
    add_policy(tmp_path, "policy0", "0 3 4 5")
    add_policy(tmp_path, "policy1", "1 2")
    platform = Platform.discover(FileTree(tmp_path), load_board_types()["jetson-tx2"])
    assert platform.affinity() == (0, 3, 4, 5)
    assert platform.affinity("denver") == (1,)
    with pytest.raises(BadPointError, match="there are a57, denver"):
        platform.affinity("a72")
    add_cpus(tmp_path, "0-5", "0,3-5")
    with pytest.raises(BadPointError, match="bring CPUs 1, 2 online"):
        platform.affinity("denver")


def test_clocks_that_somebody_else_holds_are_noticed() -> None:
    """Closed limits everywhere mean jetson_clocks; one open clock, or the memory below its highest, do not."""
    held = DomainClocks("cpu", 2, 2, 2, available_hz=(1, 2), cpus=(0,), online=(0,))
    free = DomainClocks("gpu", 1, 2, 1, available_hz=(1, 2))
    offline = DomainClocks("denver", cpus=(1,))
    assert "jetson_clocks" in find_lock(Clocks((held, offline)))
    assert "jetson_clocks" in find_lock(Clocks((held,), memory=DomainClocks("memory", 1, 2, 2)))
    assert not find_lock(Clocks((held,), gpu=free))
    assert not find_lock(Clocks((held,), memory=DomainClocks("memory", 1, 2, 1)))
    assert not find_lock(Clocks((offline,)))
