"""Run another engine in QEMU: `python recorded_child.py ORDER.json`, started by `recorded.py`.

One run fills the caches, the next is recorded and its outputs are kept.
"""

from __future__ import annotations

import json
import mmap
import sys
from pathlib import Path

import numpy as np

from device_agent.protocol import Engine, Limits, RunSpec
from device_agent.worker import rivals

# States of the recorder's control file (`recorder.c`).
_OFF, _FOLLOWING, _COUNTING = 0, 1, 2


def main() -> None:
    """Carry out the order: `engine`, `program`, `inputs` (npz), `control` and `outputs` (npz)."""
    order = json.loads(Path(sys.argv[1]).read_text())
    spec = RunSpec(Engine(order["engine"]), limits=Limits(threads=1))
    with np.load(order["inputs"]) as archive:
        arrays = dict(archive)
    run, collect = rivals.LOADERS[spec.engine](spec, Path(order["program"]), arrays)
    with Path(order["control"]).open("r+b") as file, mmap.mmap(file.fileno(), mmap.PAGESIZE) as control:
        for state in (_FOLLOWING, _COUNTING):
            control[0] = state
            outputs = run()
            control[0] = _OFF
    np.savez(order["outputs"], *collect(outputs))


if __name__ == "__main__":
    main()
