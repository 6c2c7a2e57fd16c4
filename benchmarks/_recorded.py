"""Programs on the emulated board, recorded by blocks and by what caches lack, for prices of cores.

The recorder is `device_agent/virtual/recorder.c`. Raises UnavailableError for what is missing.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import _emulated
import _machine
import counter
import root

from device_agent.emulated.estimate import LINE_BYTES
from device_agent.virtual import recorded
from farm.errors import UnavailableError

_SOURCE = Path(recorded.__file__).with_name("recorder.c")
_INCLUDED = _machine.ROOT / "device_agent" / "emulated" / "caches.inc"
_TIMEOUT_S = 3600.0


def record(job: _emulated.Job, wheels: Path, caches: Sequence[Sequence[int]], cpu: str) -> recorded.Recording:
    """Run a program once on a core that QEMU knows, following caches: (bytes, ways) of the first and the last one."""
    board = _emulated.require_board()
    with tempfile.TemporaryDirectory(prefix="farm-bench-recorded-") as name:
        order, control, out = (Path(name) / each for each in ("order.json", "control", "out"))
        control.write_bytes(bytes(4096))
        paths = [Path(counter.__file__).parent, Path(__file__).parent, _machine.ROOT, wheels]
        document = {"paths": paths, "control": control, "jobs": [dataclasses.asdict(job)]}
        order.write_text(json.dumps(document, default=str))
        try:
            plugin = counter.require_plugin(_SOURCE, [_INCLUDED])
        except root.BuildError as error:
            raise UnavailableError(str(error)) from error
        sizes = ":".join(str(number) for pair in caches for number in pair)
        python = board / "usr" / "bin" / f"python{root.PYTHON_VERSION}"
        command = [root.COUNTING_QEMU, "-plugin", f"file={plugin},control={control},out={out},caches={sizes}"]
        command += ["-L", str(board), str(python), str(Path(__file__).with_name("_emulated_child.py")), str(order)]
        environment = counter.make_environment(control) | {"QEMU_CPU": cpu}
        try:
            done = subprocess.run(command, env=environment, capture_output=True, timeout=_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise UnavailableError(f"the emulated board did not end within {_TIMEOUT_S:.0f} s") from error
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip()[-1000:]
            raise UnavailableError(f"the emulated board ended with {done.returncode}: {said}")
        return recorded.read(out.read_bytes(), len(caches))


def price(
    stretches: Sequence[tuple[float, int, int]],
    core: Mapping[str, Any],
    hz: float,
    threads: int,
    memory_bytes_per_s: float,
) -> float:
    """Seconds on `threads` cores that share each stretch evenly, as `estimate.py` does, regions left out."""
    wait_cycles = core["wait_cycles"] * (1 + core["crowding"] * (threads - 1))
    bytes_per_s = min(core["core_bytes_per_s"] * threads, memory_bytes_per_s)
    return sum(
        max((cycles + first * wait_cycles) / hz / threads, lines * LINE_BYTES / bytes_per_s)
        for cycles, first, lines in stretches
    )
