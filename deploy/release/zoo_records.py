"""Tune models of the zoo on virtual boards of every type that can be emulated; write the records we ship.

`make zoo-records` runs it: an hour on two cores. The figures are estimates and the same on every machine.
"""

from __future__ import annotations

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
MODELS, TRIALS = "squeezenet1.1", 720


def main() -> None:
    """Run one campaign in a home of its own and export its records."""
    types = sorted(name for name, each in load_board_types().items() if emulation.runs_own_code(each))
    program = str(pathlib.Path(sys.executable).with_name("farm"))
    with tempfile.TemporaryDirectory(prefix="farm-zoo-") as folder:
        environment = os.environ | {"FARM_HOME": f"{folder}/home"}

        def farm(*words: str) -> None:
            subprocess.run([program, *words], env=environment, check=True)

        for name in types:
            farm("board", "add", f"v-{name}", "--virtual", name)
        path = pathlib.Path(folder) / "zoo.yaml"
        boards = f"{{ types: [{', '.join(types)}], simulated: true }}"
        path.write_text(f"name: zoo\nmodels: [{MODELS}]\nboards: {boards}\nbudget: {{ trials: {TRIALS} }}\n")
        farm("campaign", "run", str(path))
        made = pathlib.Path(folder) / SHIPPED_FILE
        farm("record", "export", str(made), "--simulated")
        shutil.copyfile(made, ROOT / "inventory" / SHIPPED_FILE)


if __name__ == "__main__":
    main()
