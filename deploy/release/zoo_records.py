"""Tune models of the zoo on virtual boards of every type that can be emulated, and write the records that we ship.

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
MODELS = ("squeezenet1.1", "mobilenet_v2")


def main() -> int:
    """Run one campaign in a home of its own, and export its records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS), help="models of the zoo")
    parser.add_argument("--trials", type=int, default=1500, help="trials of the whole campaign")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "inventory" / SHIPPED_FILE)
    chosen = parser.parse_args()
    types = sorted(name for name, each in load_board_types().items() if emulation.runs_own_code(each))
    farm = [str(pathlib.Path(sys.executable).with_name("farm"))]
    with tempfile.TemporaryDirectory(prefix="farm-zoo-") as folder:
        environment = os.environ | {"FARM_HOME": f"{folder}/home"}
        for name in types:
            subprocess.run([*farm, "board", "add", f"v-{name}", "--virtual", name], env=environment, check=True)
        path = pathlib.Path(folder) / "zoo.yaml"
        boards = f"{{ types: [{', '.join(types)}], simulated: true }}"
        path.write_text(
            f"name: zoo\nmodels: [{chosen.models}]\nboards: {boards}\nbudget: {{ trials: {chosen.trials} }}\n"
        )
        subprocess.run([*farm, "campaign", "run", str(path)], env=environment, check=True)
        made = pathlib.Path(folder) / SHIPPED_FILE
        subprocess.run([*farm, "record", "export", str(made), "--simulated"], env=environment, check=True)
        shutil.copyfile(made, chosen.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
