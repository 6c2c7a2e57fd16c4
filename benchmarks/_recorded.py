"""Programs on the emulated board, recorded by blocks and by what caches lack, for prices of cores.

The recorder is `recorder.c`. Raises UnavailableError for what is missing.
"""

from __future__ import annotations

import dataclasses
import json
import struct
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import _emulated
import _machine
import counter
import root

from farm.errors import UnavailableError
from farm.virtual.emulated.estimate import LINE_BYTES, Block, merge
from farm.virtual.emulated.isa import Decoder
from farm.virtual.emulated.pipeline import Pipeline

_SOURCE = Path(__file__).with_name("recorder.c")
_INCLUDED = _machine.ROOT / "device_agent" / "emulated" / "caches.inc"
_TIMEOUT_S = 3600.0


@dataclasses.dataclass(frozen=True)
class Stretch:
    """A part of a run: executions of each block, and each pair of caches' L1d and L2 misses in lines."""

    counts: Mapping[int, int]
    missed: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Recording:
    """A run: its blocks by number, and its stretches in order."""

    blocks: Mapping[int, Block]
    stretches: Sequence[Stretch]

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


def record(job: _emulated.Job, wheels: Path, caches: Sequence[Sequence[int]], cpu: str) -> Recording:
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
        return read(out.read_bytes(), len(caches))


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
