"""Clocks of virtual boards: the effect of limits, governors, hot-plug, caps and locks."""

from __future__ import annotations

import pytest

from farm.virtual.clocks import LimitedClock, Load, MemoryClock
from tests.unit.virtual_boards import SIMULATED, board_types, make_board

TABLE = (100, 200, 300, 400)


def make_clock(strict: bool = True, rounds: bool = True, governor: str = "schedutil") -> LimitedClock:
    return LimitedClock(TABLE, ("schedutil", "performance", "powersave", "userspace"), governor, strict, rounds)


def test_kernels_differ_in_limits_that_cross() -> None:
    """Raising the lower limit above the upper one, or the upper below the lower, is EINVAL and changes nothing. The
    upper limit wins for as long as they cross, and the lower one comes back.
    """
    clock = make_clock()
    clock.set_max(200)
    with pytest.raises(OSError, match="Invalid"):
        clock.set_min(300)
    clock.set_min(200)
    with pytest.raises(OSError, match="Invalid"):
        clock.set_max(100)
    assert (clock.min_hz, clock.max_hz) == (200, 200)
    clock = make_clock(strict=False)
    clock.set_min(300)
    clock.set_max(200)
    assert (clock.min_hz, clock.max_hz) == (200, 200)
    clock.set_max(400)
    assert (clock.min_hz, clock.max_hz) == (300, 400)


def test_limits_beyond_or_between_entries() -> None:
    """A cap of 250 lets 300 run on Tegra, and 200 elsewhere. 0 and the largest number mean the table's ends. Within the
    limits, under any load. The clamp shows in the clock alone.
    """
    tegra, other = make_clock(governor="performance"), make_clock(rounds=False, governor="performance")
    for clock in (tegra, other):
        clock.set_max(250)
    assert (tegra.max_hz, tegra.decide(0.0, 400)) == (300, 300)
    assert (other.max_hz, other.decide(0.0, 400)) == (250, 200)
    clock = make_clock()
    clock.set_min(0)
    clock.set_max(2**32)
    assert (clock.min_hz, clock.max_hz) == (100, 400)
    clock = make_clock()
    clock.set_governor("userspace")
    clock.speed_hz = 200
    assert clock.decide(1.0, 400) == 200
    with pytest.raises(OSError, match="Invalid"):
        clock.set_governor("warp")
    clock = make_clock(governor="performance")
    assert clock.decide(1.0, 250) == 200
    assert clock.max_hz == 400


@pytest.mark.parametrize(
    ("governor", "utilisation", "expected"),
    [
        ("schedutil", 0.0, 100),
        ("schedutil", 0.5, 300),
        ("schedutil", 1.0, 400),
        ("performance", 0.0, 400),
        ("powersave", 1.0, 100),
    ],
)
def test_governors_follow_load_between_the_limits(governor: str, utilisation: float, expected: int) -> None:
    """Each governor decides as its name says."""
    assert make_clock(governor=governor).decide(utilisation, 400) == expected


def test_a_locked_memory_clock_holds_its_rate_up_to_the_cap() -> None:
    """The cap comes first, and a rate that is not in the table is dropped."""
    memory = MemoryClock(TABLE)
    memory.locked = True
    memory.set_rate(300)
    memory.set_rate(333)
    assert memory.decide(floor_hz=400, traffic=1.0) == 300
    memory.cap_hz = 200
    assert memory.decide(0, 0.0) == 200


@pytest.mark.parametrize(
    "name", [name for name in SIMULATED if any(c.memory_floor_hz for c in board_types()[name].clusters)]
)
def test_the_cpu_clock_drags_the_memory_floor(name: str) -> None:
    """At the highest CPU clock an unlocked memory is as fast as the board type's table says, at the lowest not."""
    board, _ = make_board(name)
    assert board.memory
    lowest_hz = board.memory_hz
    with board.change():
        board.memory.cap_hz = 0
        for cluster in board.clusters.values():
            cluster.clock.set_min(cluster.clock.max_hz)
    wanted_hz = max(cluster.floors[-1][1] for cluster in board.clusters.values())
    assert board.memory_hz >= wanted_hz > lowest_hz


def test_unplugging_a_cluster_takes_its_floor_away() -> None:
    """An offline Denver cluster at its highest clock no longer holds the memory up."""
    board, _ = make_board("jetson-tx2")
    assert board.memory
    with board.change():
        for cpu in (1, 2):
            board.set_online(cpu, True)
    with board.change():
        board.memory.cap_hz = 0
        board.clusters["denver"].clock.set_min(2_035_200_000)
    assert board.memory_hz == 1_866_000_000
    with board.change():
        for cpu in (1, 2):
            board.set_online(cpu, False)
    assert board.memory_hz < 1_866_000_000


def test_limits_after_hot_plug_depend_on_the_kernel() -> None:
    """Linux 4.9 sets a policy up anew when its first core comes back; 5.10 keeps what was asked for."""
    for name, cluster_name, kept in (("jetson-tx2", "denver", False), ("jetson-orin-nano-8gb", "a78-1", True)):
        board, _ = make_board(name)
        cluster = board.clusters[cluster_name]
        cap_hz = cluster.clock.table[3]
        for online in (True, False, True):
            if not online:
                with board.change():
                    cluster.clock.set_max(cap_hz)
            with board.change():
                for cpu in cluster.cpus:
                    board.set_online(cpu, online)
        assert (cluster.clock.max_hz == cap_hz) == kept


def test_load_without_a_cluster_spares_isolated_cores() -> None:
    """The scheduler puts nothing on the TX2's Denver cores; a load placed there runs there."""
    board, _ = make_board("jetson-tx2")
    with board.change():
        board.apply_power_mode(board.board_type.power_modes[0])
    board.set_load("client", Load(cores=6))
    assert board.clusters["a57"].busy == 4
    assert board.clusters["denver"].busy == 0
    board.set_load("client", Load(cluster="denver", cores=6))
    assert board.clusters["a57"].busy == 0
    assert board.clusters["denver"].busy == 2


@pytest.mark.parametrize("name", SIMULATED)
def test_every_board_follows_load_up_and_down(name: str) -> None:
    """All cores busy: the highest clock that the mode allows. Idle: the lowest."""
    board, _ = make_board(name)
    board.set_load("client", Load(cores=len(board.cpus), memory=1.0, gpu=1.0))
    for cluster in board.clusters.values():
        if not cluster.isolated and board.online_in(cluster):
            assert cluster.hz == cluster.clock.max_hz
    board.set_load("client", None)
    assert {cluster.hz == cluster.clock.table[0] for cluster in board.clusters.values()} == {True}


def test_a_load_ends_at_its_time() -> None:
    """A load whose writer vanished does not stay for ever."""
    board, clock = make_board()
    board.set_load("client", Load(cores=4, expires_s=clock() + 5))
    clock.wait(4.9)
    board.advance()
    assert board.clusters["a57"].busy == 4
    clock.wait(0.2)
    board.advance()
    assert board.clusters["a57"].busy == 0
    assert board.busy_core_s == pytest.approx(20)


def test_a_change_of_clocks_takes_its_time() -> None:
    """An Orin Nano's files show a new clock at once; cores, GPU and memory run at it after 1, 5 and 8 ms."""
    board, clock = make_board("jetson-orin-nano-8gb")
    clock.wait(1.0)
    before = (board.advance(), dict(board.acting_hz))[1]
    with board.change():
        for each in (*board.clusters.values(), board.gpu):
            each.clock.set_governor("performance")
        board.memory.locked, board.memory.rate_hz = True, board.memory.table[-1]
    after = {**{c.name: c.hz for c in board.clusters.values()}, "gpu": board.gpu.hz, "memory": board.memory_hz}
    changed = [name for name in after if after[name] != before[name]]
    assert {"gpu", "memory"} < set(changed)
    for passed_s, reached in ((0.0, ()), (0.002, board.clusters), (0.004, ("gpu",)), (0.003, ("memory",))):
        clock.wait(passed_s)
        board.advance()
        before |= {name: after[name] for name in reached}
        assert board.acting_hz == before
