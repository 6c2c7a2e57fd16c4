"""Run `farm quickstart` in a home of its own and keep what the emulator found in `inventory/kept_emulations.zip`.

`make kept-emulations` runs it, after changes of the emulator or of code generation. Others' emulations are not kept:
the file is for the first command of a newcomer.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile

from farm import emulation
from farm.inventory.documents import require_inventory_folder

_TIME = (2026, 1, 1, 0, 0, 0)


def main() -> None:
    """Make the file anew; without the old one, so that everything is emulated."""
    path = require_inventory_folder() / emulation.KEPT
    path.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="farm-kept-", dir="/tmp") as folder:
        home = pathlib.Path(folder) / "home"
        command = [str(pathlib.Path(sys.executable).with_name("farm")), "quickstart", "--trials", "8", "--out", folder]
        subprocess.run(command, env=os.environ | {"FARM_HOME": str(home)}, check=True, timeout=900)
        work = emulation.find_work_folder(home)
        files = sorted(each for each in work.rglob("*") if each.is_file())
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for each in files:
                archive.writestr(zipfile.ZipInfo(str(each.relative_to(work)), _TIME), each.read_bytes())
            archive.comment = emulation.find_version().encode()
    print(f"{path}: {len(files)} files, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
