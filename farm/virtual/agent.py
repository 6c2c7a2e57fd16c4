"""The agent of a virtual board: `device-agent` with a simulator, an emulator and options of their own; its children.

`python -m farm.virtual serve --virtual TYPE` has all commands and options of `device-agent`.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from pathlib import Path

from device_agent import agent, options
from device_agent.board_types import load_board_types
from device_agent.protocol import ProtocolError
from device_agent.protocol.hardware import Cluster
from device_agent.rig import Rig
from device_agent.session.board import Board
from device_agent.sysfs import open_tree
from farm.virtual.client import SCHEME, SimulatedTree
from farm.virtual.emulated import pipeline
from farm.virtual.emulated.runs import Emulator
from farm.virtual.simulation import SimulatedHardware


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code, as `device_agent.agent.main`."""
    return agent.run(argv, options.make_parser(_common_options(), _serve_options()), assemble, VirtualRig)


def _common_options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--virtual", type=options.parse_name, metavar="TYPE", help="simulate a board of this type")
    parser.add_argument("--seed", type=int, default=0, help="which of the virtual boards of its type (default: 0)")
    parser.add_argument(
        "--fault", action="append", default=[], metavar="KIND[:ARG][@SECONDS]", help="harm the virtual board"
    )
    parser.add_argument(
        "--time",
        choices=("lapsed", "live"),
        default="lapsed",
        help="whether the board's time passes as fast as it can be computed, or as this machine's (default: lapsed)",
    )
    parser.add_argument(
        "--work-folder",
        type=Path,
        metavar="DIR",
        help="where to keep what each program costs, so that later runs take it from there (default: only as long as "
        "this process runs)",
    )
    return parser


def _serve_options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(
        "--emulator-folder",
        type=Path,
        metavar="DIR",
        help="folder of the emulator's own parts: with it, boards of aarch64 types run aarch64 code, with latencies "
        "estimated by a model of their core",
    )
    return parser


def assemble(chosen: argparse.Namespace, stack: contextlib.ExitStack) -> Board:
    """Assemble the virtual board that the options describe; `stack` ends its processes."""
    types = load_board_types()
    if not chosen.virtual:  # a simulator that another process runs
        tree = open_tree(chosen.root)
        if not isinstance(tree, SimulatedTree):
            raise ProtocolError("which virtual board? give --virtual TYPE")
        return agent.make_board(chosen, stack, tree, chosen.clock_helper, SimulatedHardware(tree, chosen.work_folder))
    if chosen.virtual not in types or not types[chosen.virtual].simulation:
        known = ", ".join(name for name, facts in types.items() if facts.simulation)
        raise ProtocolError(f"no virtual board of type {chosen.virtual!r}; there are: {known}")
    if chosen.meter and chosen.time != "live":
        raise ProtocolError("a meter's time is this machine's: a virtual board needs --time live beside --meter")
    beside = stack.enter_context(VirtualRig())
    chosen.root = beside.start_simulator(chosen.virtual, chosen.seed, chosen.fault, chosen.time == "live")
    chosen.board_type = chosen.board_type or chosen.virtual
    socket_path = chosen.clock_helper or beside.start_helper(chosen.root)
    work_folder = chosen.work_folder or beside.folder / "work"
    emulator = None
    if folder := getattr(chosen, "emulator_folder", None):
        emulator = beside.start_emulator(folder, types[chosen.virtual].clusters, work_folder / "outputs")
    tree = open_tree(chosen.root)
    simulation = SimulatedHardware(tree, work_folder, emulator)
    return agent.make_board(chosen, stack, tree, socket_path, simulation, types)


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
