"""Tune models of the zoo on virtual boards of every type that can be emulated; write the records we ship.

`make zoo-records` runs it: an hour on two cores. The figures are estimates and the same on every machine.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

from farm import emulation
from farm.inventory.board_types import load_board_types
from farm.metaschedule.pull import SHIPPED_FILE

ROOT = pathlib.Path(__file__).parents[2]
MODELS = ("squeezenet1.1",)


def main() -> int:
    """Run one campaign in a home of its own and export its records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS), help="models of the zoo to tune")
    parser.add_argument("--trials", type=int, default=720, help="trials of the whole campaign")
    parser.add_argument("--types", help="board types; default: all that can be emulated")
    parser.add_argument("--records", type=pathlib.Path, default=ROOT / "inventory" / SHIPPED_FILE)
    chosen = parser.parse_args()
    known = sorted(name for name, each in load_board_types().items() if emulation.runs_own_code(each))
    types = chosen.types.split(",") if chosen.types else known
    program = str(pathlib.Path(sys.executable).with_name("farm"))
    with tempfile.TemporaryDirectory(prefix="farm-zoo-") as folder:
        environment = os.environ | {"FARM_HOME": f"{folder}/home"}

        def farm(*words: str) -> None:
            subprocess.run([program, *words], env=environment, check=True)

        for name in types:
            farm("board", "add", f"v-{name}", "--virtual", name)
        path = pathlib.Path(folder) / "zoo.yaml"
        boards = f"{{ types: [{', '.join(types)}], simulated: true }}"
        budget = f"{{ trials: {chosen.trials} }}"
        path.write_text(f"name: zoo\nmodels: [{chosen.models}]\nboards: {boards}\nbudget: {budget}\n")
        farm("campaign", "run", str(path))
        made = pathlib.Path(folder) / SHIPPED_FILE
        farm("record", "export", str(made), "--simulated")
        shutil.copyfile(made, chosen.records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
