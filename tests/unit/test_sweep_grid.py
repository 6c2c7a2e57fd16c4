"""Grids of operating points: what is asked for, what a board lacks, what it makes equal."""

from __future__ import annotations

import dataclasses

import pytest

from device_agent.protocol import EVERY_CLUSTER, Clocks, DomainClocks, OperatingPoint, format_cpus
from farm.errors import UsageError
from farm.inventory.board_types import require_board_type
from farm.points.grid import Coupling, GridRequest, find_reboot_modes, format_point, leave_out, merge_reached, plan_grid
from farm.points.requests import parse_core_sets, parse_freqs, parse_point
from farm.sweep.plan.order import SweepOrder, plan_order

MHZ = 1_000_000
TX2 = Clocks(
    clusters=(
        DomainClocks("a57", available_hz=(345 * MHZ, 960 * MHZ, 2035 * MHZ), cpus=(0, 3, 4, 5), online=(0, 3, 4, 5)),
        DomainClocks("denver", available_hz=(345 * MHZ, 2035 * MHZ), cpus=(1, 2), online=(1, 2), isolated=True),
    ),
    gpu=DomainClocks("gpu", available_hz=(114 * MHZ, 1300 * MHZ)),
    memory=DomainClocks("memory", available_hz=(408 * MHZ, 800 * MHZ, 1866 * MHZ)),
    power_modes=("MAXN", "MAXQ"),
)
ALL: tuple[int, ...] = ()
FLOORS = {"a57": ((450 * MHZ, 408 * MHZ), (1400 * MHZ, 1866 * MHZ))}
XAVIER = Clocks(
    clusters=(DomainClocks("carmel", available_hz=(1190 * MHZ, 1267 * MHZ, 2265 * MHZ), cpus=(0, 1), online=(0, 1)),),
    power_mode="MAXN",
    power_modes=("MAXN", "10W", "15W"),
)


def test_clusters_move_together_where_they_are_alike() -> None:
    """A board whose clocks cannot be set is still swept: at one point. All CPU clocks of a TX2 are every pair, since
    nothing is scheduled on Denver by itself. The kernel spreads work over clusters that are alike, so that one clock
    for all is what is asked for.
    """
    grid = plan_grid(Clocks(), GridRequest())
    assert [(point.key, point.point) for point in grid.points] == [("default", OperatingPoint())]
    grid = plan_grid(TX2, GridRequest({EVERY_CLUSTER: ALL}))
    assert len(grid) == 3 * 2
    assert len({point.key for point in grid.points}) == len(grid)
    alike = tuple(DomainClocks(f"carmel-{i}", available_hz=(1, 2, 3), cpus=(2 * i, 2 * i + 1)) for i in range(3))
    grid = plan_grid(Clocks(clusters=alike), GridRequest({EVERY_CLUSTER: ALL}))
    assert [set(point.point.cpu_freq_hz.values()) for point in grid.points] == [{1}, {2}, {3}]
    apart = plan_grid(Clocks(clusters=alike), GridRequest({"carmel-0": ALL, EVERY_CLUSTER: (1,)}))
    assert len(apart) == 3


@pytest.mark.parametrize(
    ("request_", "says", "hint"),
    [
        (GridRequest({"a57": (961 * MHZ,)}), "a57 of this board has no 961 MHz", "345, 960, 2035 MHz"),
        (GridRequest(gpu_freqs_hz=(1,)), "the GPU of this board has no", "114, 1300 MHz"),
        (GridRequest({"a72": ALL}), "no CPU cluster a72", "a57, denver"),
        (GridRequest(power_modes=("15W",)), "no power mode 15W", "MAXN, MAXQ"),
        (GridRequest(cores=((0, 7),)), "no CPU 7", "0-5"),
        (GridRequest(cores=((3, 4),)), "CPU 0 cannot be taken offline", ""),
    ],
)
def test_what_the_board_lacks_is_refused_with_what_it_has(request_: GridRequest, says: str, hint: str) -> None:
    """Nothing is rounded to the nearest frequency behind the user's back."""
    with pytest.raises(UsageError, match=says) as caught:
        plan_grid(TX2, request_)
    assert hint in (caught.value.hint or "")


def test_what_makes_no_grid_is_refused() -> None:
    """A board without clocks that can be held says so before anything is measured. Tens of thousands of points are a
    mistake, said before the board is touched. A power mode without its word is no point; the error shows how points
    are written.
    """
    for request in (GridRequest({EVERY_CLUSTER: ALL}), GridRequest(gpu_freqs_hz=ALL), GridRequest(power_modes=())):
        with pytest.raises(UsageError):
            plan_grid(Clocks(), request)
    blind = Clocks(memory=DomainClocks("memory"))
    with pytest.raises(UsageError, match="does not say which frequencies"):
        plan_grid(blind, GridRequest(memory_freqs_hz=ALL))
    table = tuple(range(1, 200))
    wide = Clocks(gpu=DomainClocks("gpu", available_hz=table), memory=DomainClocks("memory", available_hz=table))
    with pytest.raises(UsageError, match="39601 operating points"):
        plan_grid(wide, GridRequest(gpu_freqs_hz=ALL, memory_freqs_hz=ALL))
    with pytest.raises(UsageError, match="'MAXN' is not NAME=VALUE"):
        parse_point("MAXN")


def test_points_that_come_to_the_same_are_merged() -> None:
    """With Denver offline its clock does not matter: those points are one, which does not ask for it. What a board
    reaches when it is held counts, not what was planned.
    """
    grid = plan_grid(TX2, GridRequest({EVERY_CLUSTER: ALL}, cores=((0, 3, 4, 5),)))
    assert len(grid) == 3
    assert all(set(point.point.cpu_freq_hz) == {"a57"} for point in grid.points)
    assert {len(merge.dropped) for merge in grid.merged} == {1}
    assert "all cores of denver are offline" in grid.merged[0].reason
    grid = plan_grid(TX2, GridRequest(memory_freqs_hz=(408 * MHZ, 1866 * MHZ)))
    low, high = (point.key for point in grid.points)
    merged = merge_reached(grid, low, OperatingPoint(memory_freq_hz=1866 * MHZ))
    assert [point.key for point in merged.points] == [high]
    assert merged.merged[-1].dropped == (low,)
    assert merge_reached(grid, low, OperatingPoint(memory_freq_hz=408 * MHZ)) is grid


def test_a_memory_floor_leaves_pinned_memory_clocks_to_the_board() -> None:
    """Whether the CPU's clock drags a pinned memory clock along shows only there, so all points stay."""
    request = GridRequest({"a57": (960 * MHZ, 2035 * MHZ)}, memory_freqs_hz=ALL)
    assert len(plan_grid(TX2, request, Coupling(FLOORS))) == 6


def test_power_modes_that_leave_nothing_open_are_merged() -> None:
    """Modes cap what is not held; where all is held, or caps round to the same clock, they are one."""
    tx2 = require_board_type("jetson-tx2")
    coupling = Coupling.of(tx2)
    held = GridRequest(
        {EVERY_CLUSTER: (345 * MHZ,)}, ((0, 3, 4, 5),), (114 * MHZ,), (408 * MHZ,), power_modes=("MAXN", "MAXQ")
    )
    assert len(plan_grid(TX2, held, coupling)) == 1
    free = plan_grid(TX2, GridRequest(power_modes=("MAXN", "MAXQ")), coupling)
    assert len(free) == 2
    caps = {d.name: d.freq_hz for d in free.points[1].domains}
    assert (caps["a57"], caps["gpu"]) == (2035 * MHZ, 1300 * MHZ)  # 1200 and 850 MHz, each rounded up
    assert not any(domain.held for domain in free.points[1].domains if domain.units)


def test_frequencies_and_cores_are_read_as_people_write_them() -> None:
    """Units, lists, ranges over what the board has, and `all`. Sets are divided by a slash; what is written back is the
    same.
    """
    table = (307_200_000, 921_600_000, 1_428_000_000)
    assert parse_freqs("all", table) == table
    assert parse_freqs("921.6, 1.428GHz", table) == table[1:]
    assert parse_freqs("300..1000MHz", table) == table[:2]
    for text in ("fast", "0", "", "1..2"):
        with pytest.raises(UsageError):
            parse_freqs(text, table)
    assert parse_core_sets("0-3/0,3-5") == ((0, 1, 2, 3), (0, 3, 4, 5))
    assert format_cpus((0, 3, 4, 5)) == "0,3-5"
    with pytest.raises(UsageError):
        parse_core_sets("3-0")


def test_power_modes_that_take_a_reboot_are_left_out_or_refused() -> None:
    """All modes means all that can be had now; the one left out is named with the command that sets it. With the
    command to run first; once that mode is set it is swept, and the others take a reboot.
    """
    coupling = Coupling.of(require_board_type("jetson-agx-xavier"))
    assert find_reboot_modes(XAVIER, coupling) == ("10W",)
    grid, notes = plan_order(SweepOrder("m", power_modes="all"), XAVIER, coupling)
    assert {point.point.power_mode for point in grid.points} == {"MAXN", "15W"}
    assert "sudo nvpmodel -m 1" in notes[-1]
    coupling = Coupling.of(require_board_type("jetson-agx-xavier"))
    request = GridRequest(power_modes=("10W",))
    with pytest.raises(UsageError, match="sudo nvpmodel -m 1"):
        plan_grid(XAVIER, request, coupling)
    there = dataclasses.replace(XAVIER, power_mode="10W")
    assert len(plan_grid(there, request, coupling)) == 1
    assert find_reboot_modes(there, coupling) == ("MAXN", "15W")


def test_what_a_board_refuses_after_all_is_left_out_with_its_power_mode() -> None:
    """The other modes' points stay; the last one left is never taken away."""
    grid = plan_grid(XAVIER, GridRequest(power_modes=("MAXN", "15W")))
    refused = next(point for point in grid.points if point.point.power_mode == "15W")
    left = leave_out(grid, refused.key)
    assert {point.point.power_mode for point in left.points} == {"MAXN"}
    assert leave_out(left, left.points[0].key) is left


@pytest.mark.parametrize(
    "point",
    [
        OperatingPoint(),
        OperatingPoint(power_mode="MAXN"),
        OperatingPoint(None, (0, 3, 4), {"a57": 921_600_000, "denver": 345_600_000}, 114_750_000, 1_331_200_000),
    ],
)
def test_a_point_is_read_as_it_is_written(point: OperatingPoint) -> None:
    """What records are called by their operating point is taken back as one."""
    assert parse_point(format_point(point)) == point
