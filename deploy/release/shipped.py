"""Make what `inventory/` ships of runs: `shipped.py zoo` tunes models, `shipped.py emulations` runs quickstart.

`make zoo-records`: an hour on two cores; figures are estimates and the same on every machine. `make kept-emulations`,
after changes of the emulator or of code generation: what a newcomer's first command would emulate.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile

from farm import emulation
from farm.inventory.board_types import load_board_types
from farm.inventory.documents import require_inventory_folder
from farm.metaschedule.pull import SHIPPED_FILE

FARM = str(pathlib.Path(sys.executable).with_name("farm"))
MODELS, TRIALS = "squeezenet1.1", 720
_TIME = (2026, 1, 1, 0, 0, 0)


def keep_emulations(folder: pathlib.Path) -> None:
    """Keep what the emulator finds in quickstart; without the old file, so that everything is emulated."""
    path = require_inventory_folder() / emulation.KEPT
    path.unlink(missing_ok=True)
    command = [FARM, "quickstart", "--trials", "8", "--out", str(folder)]
    subprocess.run(command, env=os.environ | {"FARM_HOME": str(folder / "home")}, check=True, timeout=900)
    work = emulation.find_work_folder(folder / "home")
    files = sorted(each for each in work.rglob("*") if each.is_file())
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for each in files:
            archive.writestr(zipfile.ZipInfo(str(each.relative_to(work)), _TIME), each.read_bytes())
        archive.comment = emulation.find_version().encode()
    print(f"{path}: {len(files)} files, {path.stat().st_size} bytes")


def tune_zoo(folder: pathlib.Path) -> None:
    """Run one campaign on virtual boards of every type that can be emulated, and export its records."""
    types = sorted(name for name, each in load_board_types().items() if emulation.runs_own_code(each))

    def farm(*words: str) -> None:
        subprocess.run([FARM, *words], env=os.environ | {"FARM_HOME": str(folder / "home")}, check=True)

    for name in types:
        farm("board", "add", f"v-{name}", "--virtual", name)
    path, made = folder / "zoo.yaml", folder / SHIPPED_FILE
    boards = f"{{ types: [{', '.join(types)}], simulated: true }}"
    path.write_text(f"name: zoo\nmodels: [{MODELS}]\nboards: {boards}\nbudget: {{ trials: {TRIALS} }}\n")
    farm("campaign", "run", str(path))
    farm("record", "export", str(made), "--simulated")
    shutil.copyfile(made, require_inventory_folder() / SHIPPED_FILE)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="farm-kept-", dir="/tmp") as name:
        {"zoo": tune_zoo, "emulations": keep_emulations}[sys.argv[1]](pathlib.Path(name))
