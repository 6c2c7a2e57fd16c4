"""Child processes of a virtual board's agent: its simulator, its clock helper and its emulator."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from device_agent.protocol.hardware import Cluster
from device_agent.rig import Rig
from farm.virtual.client import SCHEME
from farm.virtual.emulated import pipeline
from farm.virtual.emulated.runs import Emulator


class VirtualRig(Rig):
    """See `Rig`."""

    helper, agent = "farm.virtual.clock_helper", "farm.virtual"

    def start_simulator(self, board_type: str, seed: int, faults: Sequence[str], live: bool = False) -> str:
        """Start a virtual board; return the `--root` that names it. `live` runs it in real time.

        Raises HelperUnavailableError.
        """
        path = str(self.folder / "board.sock")
        command = ["-m", "farm.virtual.server", board_type, "--seed", str(seed), "--socket", path]
        for fault in faults:
            command += ["--fault", fault]
        if live:
            command.append("--live")
        self.start([*command, "--exit-with-parent"], lambda: Path(path).exists() and Path(path + ".root").exists())
        return f"{SCHEME}:{path}"

    def start_helper(self, root: str) -> str:
        """See `Rig`. The helper acts as root: it uses the privileged socket."""
        return super().start_helper(root + ".root" if root.startswith(f"{SCHEME}:") else root)

    def start_emulator(self, folder: Path, clusters: Sequence[Cluster], kept: Path | None = None) -> Emulator | None:
        """Start the aarch64 emulator for these clusters; None if a core cannot be emulated. `kept` caches outputs.

        Raises HelperUnavailableError.
        """
        cores = {each.name: core for each in clusters if (core := pipeline.load_core(each.core)) is not None}
        kinds = {each.core for each in clusters if not each.isolated}
        if len(cores) != len(clusters) or len(kinds) != 1:
            return None
        path = self.folder / "emulator.sock"
        command = ["-m", "farm.virtual.emulated", "--socket", str(path), "--natives", str(folder)]
        self.start([*command, "--exit-with-parent"], path.exists)
        core = next(cores[each.name] for each in clusters if not each.isolated)
        return Emulator(path, core, cores, kept=kept and kept / folder.name)
