"""Run another engine's aarch64 code for a virtual board, in QEMU with a recorder, and estimate its cost.

The recorder, `recorder.c`, counts basic blocks and cache misses; `device_agent/emulated/` has the model of the core.
One thread is recorded. Several threads are taken to share each stretch evenly.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import device_agent
from device_agent import processes
from device_agent.emulated.estimate import Block, merge
from device_agent.emulated.isa import Decoder
from device_agent.emulated.pipeline import Pipeline
from device_agent.protocol import Engine, RunSpec, Segment
from device_agent.session.plan import LoadError

if TYPE_CHECKING:
    from device_agent.emulated.runs import Emulator

# QEMU with plug-ins, and what `farm/emulation.py` puts into a folder: the recorder, an aarch64 root, and wheels.
QEMU, RECORDER, ROOT, WHEELS = "qemu-aarch64", "recorder.so", "root", "wheels"
# By architecture; what a core lacks is an undefined instruction, as on the board.
_PROCESSORS = {"armv8": "cortex-a57", "armv8.2": "cortex-a76"}
_MOST_SAID = 300


@dataclasses.dataclass(frozen=True)
class Stretch:
    """A part of a run: executions of each block, and each pair of caches' L1d and L2 misses in lines."""

    counts: Mapping[int, int]
    missed: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Recording:
    """A run: its blocks by number, its stretches in order, its outputs."""

    blocks: Mapping[int, Block]
    stretches: Sequence[Stretch]
    outputs: Sequence[Any] = ()

    @property
    def instructions(self) -> int:
        """Executed instructions."""
        return sum(len(self.blocks[at].code) // 4 * n for each in self.stretches for at, n in each.counts.items())

    def summarise(self, pair: int, core: Mapping[str, Any]) -> list[tuple[float, int, int]]:
        """Return each stretch's cycles in the core's pipes, L1d misses and L2 misses in lines."""
        pipeline, decoder = Pipeline(core["pipeline"]), Decoder()
        total: dict[int, int] = {}
        for each in self.stretches:
            for number, count in each.counts.items():
                total[number] = total.get(number, 0) + count
        # Merged blocks count their cycles where the first one is executed.
        placed = sorted(total, key=lambda number: (self.blocks[number].address, number))
        by_address = {self.blocks[number].address: number for number in placed}
        merged = merge(dataclasses.replace(self.blocks[number], times=(total[number],)) for number in placed)
        cycles = {by_address[each.address]: pipeline.count_cycles(decoder.read(each.code)) for each in merged}
        return [
            (sum(count * cycles.get(number, 0.0) for number, count in each.counts.items()), *each.missed[pair])
            for each in self.stretches
        ]


def record(
    folder: Path, engine: Engine, program: Path, inputs: bytes, caches: Sequence[Sequence[int]], processor: str
) -> Recording:
    """Run an engine's program once on a processor of QEMU's; `caches` are bytes and ways of L1d and L2.

    `folder` holds the recorder, the root and the wheels. Raises LoadError with the last line of a failed run.
    """
    with tempfile.TemporaryDirectory(prefix="recorded-", dir=program.parent) as name:
        order, control, out, given, outputs = (
            Path(name) / each for each in ("order.json", "control", "out", "inputs.npz", "outputs.npz")
        )
        control.write_bytes(bytes(4096))
        given.write_bytes(inputs)
        document = {"engine": engine, "program": program, "inputs": given}
        order.write_text(json.dumps({**document, "control": control, "outputs": outputs}, default=str))
        sizes = ":".join(str(number) for pair in caches for number in pair)
        plugin = f"file={folder / RECORDER},control={control},out={out},caches={sizes}"
        root = (folder / ROOT).resolve()
        python = next((root / "usr" / "bin").glob("python3.*"), None)
        if python is None or shutil.which(QEMU) is None:
            raise LoadError(f"{engine} cannot be emulated here: {QEMU} or its root is not installed")
        command = [QEMU, "-plugin", plugin, "-L", str(root), str(python)]
        command += [str(Path(__file__).with_name("recorded_child.py")), str(order)]
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("LD_", "PYTHON"))}
        # Waiting threads spin, and spinning would be counted.
        single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        chosen = {"QEMU_CPU": processor, "PYTHONNOUSERSITE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        chosen["PYTHONPATH"] = os.pathsep.join((str(Path(device_agent.__file__).parents[1]), str(folder / WHEELS)))
        parent = os.getpid()
        done = subprocess.run(
            command,
            env={**kept, **single, **chosen},
            capture_output=True,
            preexec_fn=lambda: processes.die_with_parent(parent),
        )
        if done.returncode:
            said = (done.stderr or done.stdout).decode(errors="replace").strip().rsplit("\n", 1)[-1]
            said = said.rpartition("LoadError: ")[2][:_MOST_SAID]
            raise LoadError(f"{engine} ended with {done.returncode} in the emulator: {said}")
        with np.load(outputs, allow_pickle=False) as archive:
            arrays = [archive[each] for each in archive.files]
        return dataclasses.replace(read(out.read_bytes(), len(caches)), outputs=arrays)


def read(data: bytes, pairs: int) -> Recording:
    """Read what `recorder.c` wrote about so many pairs of caches."""
    blocks, stretches = {}, []
    at = 0
    while at < len(data):
        kind, first = struct.unpack_from("<2Q", data, at)
        at += 16
        if kind == 1:
            address, size = struct.unpack_from("<2Q", data, at)
            blocks[first] = Block(address, data[at + 16 : at + 16 + size], ())
            at += 16 + size
        else:
            numbers = struct.unpack_from(f"<{2 * (first + pairs)}Q", data, at)
            at += 8 * len(numbers)
            counts = dict(zip(numbers[: 2 * first : 2], numbers[1 : 2 * first : 2], strict=True))
            rest = numbers[2 * first :]
            stretches.append(Stretch(counts, tuple(zip(rest[::2], rest[1::2], strict=True))))
    return Recording(blocks, stretches)


class Execution:
    """Another engine's program on given arrays, recorded while it loads unless its recording is cached."""

    def __init__(
        self, folder: Path | None, emulator: Emulator, spec: RunSpec, program: Path, arrays: Mapping[str, Any]
    ) -> None:
        """Raises LoadError."""
        if folder is None or not (folder / RECORDER).exists():
            raise LoadError(f"{spec.engine} is not emulated on this board")
        self._core, self._tasks, core = emulator.core, emulator.tasks, emulator.core
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)
        wheels = (folder / WHEELS).resolve().name
        digest = hashlib.sha256(f"{spec.engine} {wheels} {sorted(core.items())}".encode())
        for data in (program.read_bytes(), buffer.getvalue(), (folder / RECORDER).read_bytes()):
            digest.update(hashlib.sha256(data).digest())
        path = emulator.kept / f"{digest.hexdigest()}.npz" if emulator.kept else None
        if path is not None and path.exists():
            with np.load(path, allow_pickle=False) as archive:
                self._stretches, *self._outputs = (archive[name] for name in archive.files)
            return
        processor = _PROCESSORS[core["architecture"]]
        found = record(folder, spec.engine, program, buffer.getvalue(), [core["caches"]], processor)
        self._stretches, self._outputs = np.array(found.summarise(0, core), float), list(found.outputs)
        if path is not None:
            with contextlib.suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                part = path.with_suffix(f".{os.getpid()}.npz")
                np.savez(part, self._stretches, *self._outputs)
                part.replace(path)

    def run(self) -> list[Any]:
        """Return the outputs."""
        return self._outputs

    def count(self) -> Sequence[Segment]:
        """Return the cost: each stretch is a parallel region that the threads share evenly."""
        stall_cycles = self._core["wait_cycles"] * (1 + self._core["crowding"] * (self._tasks - 1))
        found = []
        for cycles, first, second in self._stretches.tolist():
            total = cycles + first * stall_cycles
            found.append((total / self._tasks, round(second / self._tasks), total, int(second)))
        return found
