"""How fast a virtual board is: code runs on the host, and its time is stretched by the board's clocks and cores.

Host time for the same work is known; the board takes `slowdown` times as long at its highest clocks, a share of which
goes with the core clock and the rest with the memory clock. What ran in parallel is spread over the board's cores.
"""

from __future__ import annotations

import json
import random
import time
from typing import Any

from device_agent.sysfs import Tree
from device_agent.virtual.tree import CLOCKS, LOAD, PACE

# What a kernel draws from the memory's bandwidth, per busy share of the board's cores.
_TRAFFIC = 0.5
# A load that changed by less is not told to the board again.
_SAME_LOAD = 0.05
# The board's time is slept in blocks of at least this: a sleep after each run of a millisecond or less would cool the
# host's caches and let its clocks fall, and the next run would be slower for it.
_BLOCK_S = 0.02
# A host that is busy with something else may take longer than the board would: what follows sleeps less then, up to so
# much, so that a window holds as many calls as the board's time has.
_CREDIT_S = 0.5


class Pace:
    """The pace of one worker on `cluster` ("": all open to the scheduler), which uses `host_cores` cores of the host.

    Every method raises OSError when the simulator is gone.
    """

    def __init__(self, tree: Tree, cluster: str, host_cores: int) -> None:
        self._tree = tree
        self._cluster = cluster
        self._host_cores = max(1, host_cores)
        self._facts: dict[str, Any] | None = None
        self._told = -1.0
        self._owed_s = 0.0
        self._clocks: tuple[float, int] | None = None
        self._clocks_s = 0.0

    def begin(self) -> float:
        """The board starts to compute: as much as the host's cores say, until a measurement knows better."""
        timing_s = float(self._read_facts()["timing_s"])
        cores = self._read_clocks()[1]
        self._tell(float(cores if self._host_cores > 1 else 1), cores)
        return timing_s

    def end(self) -> None:
        """The board is idle again, once all of its time has passed."""
        self.settle()
        self._told = -1.0
        self._tree.write(LOAD, "{}")

    def board_seconds(self, host_s: float, cpu_s: float) -> float:
        """How long the board takes for what took the host `host_s` with `cpu_s` of CPU time, at its clocks now."""
        facts = self._read_facts()
        stretch, cores = self._read_clocks()
        alone_s, shared_s = split_work(host_s, cpu_s, self._host_cores)
        work_s = alone_s + shared_s
        base_s = alone_s + shared_s / cores
        if self._told >= 0 and base_s > 0:
            self._tell(work_s / base_s, cores)
        noise = 1 + float(facts["noise"]) * self._dice.gauss(0, 1)
        return base_s * stretch * max(0.5, noise)

    def sleep_out(self, board_s: float, host_s: float) -> None:
        """Owe what the board takes longer than the host did; slept in blocks. Whoever has a deadline kills us in it."""
        self._owed_s = max(self._owed_s + board_s - host_s, -_CREDIT_S)
        if self._owed_s >= _BLOCK_S:
            self.settle()

    def settle(self) -> None:
        """Sleep what is owed; what the host sleeps too long counts for the next block."""
        if self._owed_s <= 0:
            return
        begun = time.monotonic()
        time.sleep(self._owed_s)
        self._owed_s -= time.monotonic() - begun

    def _tell(self, busy: float, cores: int) -> None:
        if abs(busy - self._told) > _SAME_LOAD * max(busy, self._told):
            self._told = busy
            load = {"cluster": self._cluster, "cores": busy, "memory": min(1.0, _TRAFFIC * busy / cores)}
            self._tree.write(LOAD, json.dumps(load))
            self._clocks = None  # the governor follows the load

    def _read_facts(self) -> dict[str, Any]:
        if self._facts is None:
            facts = self._facts = json.loads(self._tree.read(PACE))
            self._dice = random.Random(f"{facts['seed']} {facts['draw']}")
        return self._facts

    def _read_clocks(self) -> tuple[float, int]:
        """(board time over host time for one core, cores online) now; the slowest of the clusters in use counts."""
        # Asking the simulator costs more than a short run: once per block will do, throttling takes longer than that.
        if self._clocks is None or time.monotonic() - self._clocks_s >= _BLOCK_S:
            self._clocks, self._clocks_s = self._fetch_clocks(), time.monotonic()
        return self._clocks

    def _fetch_clocks(self) -> tuple[float, int]:
        facts = self._read_facts()
        now = json.loads(self._tree.read(CLOCKS))
        chosen = [
            name
            for name, cluster in facts["clusters"].items()
            if now["clusters"][name]["online"]
            and (name == self._cluster or (not self._cluster and not cluster["isolated"]))
        ]
        # A cluster whose cores are all offline runs nothing: what is placed there ends up on the others.
        chosen = chosen or [name for name in facts["clusters"] if now["clusters"][name]["online"]]
        core_share = facts["core_share"]
        memory_s = 1.0
        if facts["memory_reference_hz"]:
            memory_s = facts["memory_reference_hz"] / now["memory_hz"]
        stretches = [
            facts["clusters"][name]["slowdown"]
            * (
                core_share * facts["clusters"][name]["reference_hz"] / now["clusters"][name]["hz"]
                + (1 - core_share) * memory_s
            )
            for name in chosen
        ]
        return max(stretches), sum(now["clusters"][name]["online"] for name in chosen)


def split_work(host_s: float, cpu_s: float, host_cores: int) -> tuple[float, float]:
    """CPU seconds (on one core, on all of them) of work that took `host_s` with `cpu_s` of CPU time on `host_cores`.

    CPU time below the wall time was spent waiting, mostly for other processes of the host: that is not the board's.
    CPU time beyond what its cores could have given in that time was not the call's.
    """
    cpu_s = min(cpu_s, host_s * host_cores)
    if host_cores == 1 or cpu_s <= host_s:
        return max(cpu_s, 1e-9), 0.0
    shared_s = min((cpu_s - host_s) * host_cores / (host_cores - 1), cpu_s)
    return cpu_s - shared_s, shared_s
