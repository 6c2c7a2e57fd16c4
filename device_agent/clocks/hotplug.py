"""Cores online and offline. What becomes of their clocks is `cpufreq`'s business."""

from __future__ import annotations

from collections.abc import Collection

from device_agent.clocks.access import ClockAccess
from device_agent.clocks.bounds import write
from device_agent.clocks.cpufreq import CPUS
from device_agent.errors import ClockError
from device_agent.protocol import texts
from device_agent.sysfs import Tree, list_names, read_text

# The boot core: many kernels cannot let it go, and no point needs it to.
BOOT_CPU = 0


class Hotplug:
    """The cores of a board. Everything is read anew: whoever is root may change it."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self.cpus = self._find_cpus()

    def read_online(self) -> tuple[int, ...]:
        """Cores online now; all of them where the kernel does not say."""
        return self._read_list("online") or self.cpus

    def require_answer(self) -> None:
        """Raise ClockError for a board that has hung: each of its files would be waited for in vain."""
        try:
            self._tree.read(f"{CPUS}/online")
        except TimeoutError as error:
            raise ClockError("the board does not answer") from error
        except OSError:
            pass  # not every kernel says which cores are online

    def can_switch(self, cpu: int) -> bool:
        """Whether the core can be taken offline and online."""
        return cpu != BOOT_CPU and read_text(self._tree, f"{CPUS}/cpu{cpu}/online") is not None

    def set_online(self, access: ClockAccess, wanted: Collection[int]) -> None:
        """Bring exactly these cores online. Raises ClockError where the kernel refuses; the caller reads back."""
        online = self.read_online()
        for cpu in sorted(set(wanted) - set(online)):
            write(access, f"{CPUS}/cpu{cpu}/online", "1")
        for cpu in sorted(set(online) - set(wanted), reverse=True):
            write(access, f"{CPUS}/cpu{cpu}/online", "0")

    def _find_cpus(self) -> tuple[int, ...]:
        names = [name.removeprefix("cpu") for name in list_names(self._tree, CPUS, "cpu[0-9]*")]
        folders = tuple(int(name) for name in names if name.isdecimal())
        return self._read_list("present") or folders

    def _read_list(self, file: str) -> tuple[int, ...]:
        try:
            return texts.parse_cpus(read_text(self._tree, f"{CPUS}/{file}") or "")
        except ValueError:
            return ()


def format_cpus(cpus: Collection[int]) -> str:
    """CPU numbers for people, e.g. `CPUs 1, 2`."""
    return ("CPU " if len(cpus) == 1 else "CPUs ") + (", ".join(map(str, sorted(cpus))) or "none")
