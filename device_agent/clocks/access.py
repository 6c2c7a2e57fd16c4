"""How clock files are written: the interface between what decides (`controller`) and what may (`client`, `helper`).

A transaction begins with a snapshot of every clock file on disk, and ends with that snapshot restored.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol


@dataclasses.dataclass(frozen=True)
class AccessStatus:
    """Who holds the clocks ("": nobody) and why they cannot be trusted ("": they can)."""

    holder: str = ""
    unsafe: str = ""


class ClockAccess(Protocol):
    """A way to read and write clock files with the rights of root. One transaction at a time.

    Every method has a deadline and raises HelperUnavailableError when no answer comes.
    """

    def status(self) -> AccessStatus:
        """Ask without holding anything."""
        ...

    def begin(self, holder: str) -> None:
        """Become the one holder: snapshot every clock file to disk. Heartbeats go on until `restore`.

        Raises BusyError when somebody else holds the clocks, UnsafeError when they cannot be trusted, ClockError when
        the snapshot cannot be written (disk full): nothing has been changed then.
        """
        ...

    def read(self, path: str) -> str:
        """A clock file that only root may read. Raises OSError as the kernel does, RefusedError off the list."""
        ...

    def write(self, path: str, text: str) -> None:
        """Write one value within the transaction. Raises OSError as the kernel does, RefusedError off the list."""
        ...

    def set_power_mode(self, mode_id: int) -> str:
        """Run `nvpmodel -m` within the transaction; never lets it reboot. Raises OSError, RefusedError."""
        ...

    def restore(self) -> tuple[str, ...]:
        """End the transaction: put every file back as the snapshot has it. Returns notes.

        Raises UnsafeError when a file does not go back; the board then stays unsafe.
        """
        ...

    def clear_unsafe(self, force: bool = False) -> tuple[str, ...]:
        """For an operator: try again to put back what did not go back, and trust the clocks again. Returns notes.

        `force` takes the clocks from whoever holds them, and clears even what still does not go back. Raises
        UnsafeError when something does not go back, BusyError when somebody holds the clocks.
        """
        ...

    def close(self) -> None:
        """Let go; a transaction still open is restored by the helper."""
        ...
