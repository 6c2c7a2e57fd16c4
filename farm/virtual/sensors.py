"""The INA3221 model: averages of a virtual board's rails over its update period, in steps of its converters.

Its files are in `files_machine.py`. Steps: TI INA3221 data sheet (40 uV shunt, 8 mV bus).
"""

from __future__ import annotations

import math
import zlib

from device_agent.protocol.hardware import PowerChip
from farm.virtual.board import VirtualBoard
from farm.virtual.parameters import Rail

_MASK = (1 << 64) - 1

SHUNT_STEP_V = 40e-6
BUS_STEP_V = 8e-3
CHANNELS = 3
# A triggered conversion of three channels takes 140 us per quantity.
_TRIGGERED_S = 6 * 140e-6
SAMPLES = (1, 4, 16, 64, 128, 256, 512, 1024)


class Noise:
    """Random numbers that depend on the seed, the purpose, and the count of calls."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._asked: dict[tuple[str, str], int] = {}

    def begin_anew(self) -> None:
        """Restart the sequence."""
        self._asked.clear()

    def share(self, purpose: str, name: str) -> float:
        """The next number in [0, 1) for this purpose."""
        key = (purpose, name)
        count = self._asked[key] = self._asked.get(key, 0) + 1
        return uniform(self._seed, zlib.crc32(f"{purpose} {name}".encode()), count)


def uniform(*numbers: int) -> float:
    """A number in [0, 1) determined by `numbers` (splitmix64, Steele, Lea, Flood 2014)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state / (1 << 64)


def gaussian(*numbers: int) -> float:
    """A standard normal number determined by `numbers` (Box and Muller)."""
    radius = math.sqrt(-2 * math.log(1 - uniform(*numbers, 1)))
    return radius * math.cos(2 * math.pi * uniform(*numbers, 2))


class Chip:
    """One INA3221 with up to three rails; `rails` holds None for an unconnected channel."""

    def __init__(self, board: VirtualBoard, chip: PowerChip, address: str) -> None:
        models = {rail.name: rail for rail in board.parameters.rails}
        self.address = address
        self.rails: tuple[Rail | None, ...] = tuple(models.get(name) for name in chip.rails)
        self.shunt_ohm = chip.shunt_ohm
        self.samples = board.parameters.sensor.samples
        self.conversion_s = board.parameters.sensor.conversion_s
        self.triggered = False
        self.stale_since_s: float | None = None
        self._board = board
        self._key = zlib.crc32(address.encode())
        self.phase = uniform(board.seed, self._key)
        self._values: dict[int, tuple[tuple[int, float, bool], tuple[int, int]]] = {}
        self._triggers = 0

    @property
    def update_period_s(self) -> float:
        """Both quantities of every channel, `samples` times."""
        return self.samples * 2 * self.conversion_s * CHANNELS

    def begin_anew(self) -> None:
        """Follow a restart of the board's clock; a frozen value becomes the first one."""
        self._values.clear()
        self._triggers = 0
        if self.stale_since_s is not None:
            self.stale_since_s = self._board.moment_s()

    def shunt_of(self, rail: Rail) -> float:
        """The shunt in ohm."""
        return self.shunt_ohm or rail.shunt_ohm

    def read(self, channel: int) -> tuple[int, int]:
        """The newest value in steps of (bus voltage, shunt voltage). Raises LookupError for an unconnected channel."""
        rail = self.rails[channel]
        if rail is None:
            raise LookupError(channel)
        now_s = self._board.moment_s()
        if self.stale_since_s is not None and now_s >= self.stale_since_s:
            now_s = self.stale_since_s
        elif not self.triggered:
            period_s = self.update_period_s
            self._board.holds_until((math.floor(now_s / period_s - self.phase) + 1 + self.phase) * period_s)
        else:
            self._board.holds_until(now_s)
        if self.triggered:
            self._triggers += 1
            return self._convert(rail, now_s - _TRIGGERED_S, now_s, self._triggers)
        period_s = self.update_period_s
        index = math.floor(now_s / period_s - self.phase)
        key = (index, period_s, self.triggered)
        cached = self._values.get(channel)
        if cached is None or cached[0] != key:
            end_s = (index + self.phase) * period_s
            cached = self._values[channel] = (key, self._convert(rail, end_s - period_s, end_s, index))
        return cached[1]

    def _convert(self, rail: Rail, start_s: float, end_s: float, index: int) -> tuple[int, int]:
        history = self._board.history
        start_s = max(start_s, history.start_s)
        end_s = min(end_s, self._board.advance())
        if end_s > start_s:
            power_w = self._board.exact_energy_j(rail.name, start_s, end_s) / (end_s - start_s)
        else:
            power_w = self._board.exact_power_w(rail.name, max(end_s, history.start_s))
        sensor = self._board.parameters.sensor
        volt = rail.volt - sensor.supply_ohm * power_w / rail.volt
        ampere = self._board.individual.sensor_gain * power_w / volt
        wobble = sensor.noise_lsb * gaussian(self._board.seed, self._key, zlib.crc32(rail.name.encode()), index)
        shunt_steps = round(ampere * self.shunt_of(rail) / SHUNT_STEP_V + wobble)
        return round(volt / BUS_STEP_V), max(0, shunt_steps)
