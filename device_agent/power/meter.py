"""An external power meter as a rail: a program of the user's that prints lines `SECONDS WATTS`.

Its power at a read is the mean of the lines since the last read. Reads never wait.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import select
import shlex
import subprocess
import time
from collections.abc import Callable

from device_agent import processes
from device_agent.errors import SensorError
from device_agent.power.rail import check_power
from device_agent.power.sensors import PowerSensors
from device_agent.protocol import PowerWindow

NAME = "meter"
_SCOPE = "external meter"
# A meter without a line for so long has stopped; its first line may take longer: it opens its device.
_SILENCE_S, _FIRST_S = 2.0, 5.0
# Longest line, and what is read at once.
_LINE_BYTES, _READ_BYTES = 200, 1 << 16
_END_S = 1.0


class MeterRail:
    """The rail of a meter. Its program runs from `open` until `close`, or the end of this process."""

    name = chip = NAME
    driver = "command"

    def __init__(self, command: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`command` is split as a shell does; no shell runs it. Raises SensorError for an invalid one."""
        try:
            self._words = shlex.split(command)
        except ValueError as error:
            raise SensorError(f"the meter's command cannot be read: {error}") from error
        if not self._words:
            raise SensorError("the meter's command is empty")
        self.note = f"prints of {self._words[0]}"
        self._clock = clock
        self._program: subprocess.Popen[bytes] | None = None
        self._problem, self._is_lost = "", False
        self._rest, self._told_s, self._heard_s = b"", -math.inf, self._clock()
        self._power_w: float | None = None

    def open(self) -> None:
        """Start the program where it does not run, and wait for its first line; a first failure is final."""
        if self._is_lost or (self._program is not None and self._program.poll() is None):
            return
        self.close()
        try:
            self._program = subprocess.Popen(
                self._words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                preexec_fn=functools.partial(processes.die_with_parent, os.getpid()),
                start_new_session=True,
            )
        except OSError as error:
            self._lose(f"the meter {self._words[0]} cannot be started: {error.strerror or error}")
            return
        processes.SPARED.add(self._program.pid)
        os.set_blocking(self._pipe, False)
        if not select.select([self._pipe], [], [], _FIRST_S)[0]:
            self._lose(f"the meter has printed nothing for {_FIRST_S:g} s")

    def _lose(self, problem: str) -> None:
        self.close()
        self._problem, self._is_lost = problem, True

    def start(self) -> None:
        """Drop what it printed before. Never waits; the program runs since `open`."""
        if self._is_lost:
            return
        self._problem, self._heard_s = "", self._clock()
        with contextlib.suppress(SensorError):
            self.read()

    @property
    def _pipe(self) -> int:
        if self._program is None or self._program.stdout is None:
            raise SensorError("the meter does not run")
        return self._program.stdout.fileno()

    def read(self) -> float | None:
        """The mean in W of the lines since the last read, or the last value. Raises SensorError."""
        if self._problem:
            raise SensorError(self._problem)
        now_s, is_ended, text = self._clock(), False, self._rest
        while len(text) < _READ_BYTES:
            try:
                part = os.read(self._pipe, _READ_BYTES)
            except BlockingIOError:
                break
            if not part:
                is_ended = True
                break
            text += part
        *lines, self._rest = text.split(b"\n")
        values = [self._parse(line) for line in lines if line.strip()]
        if len(self._rest) > _LINE_BYTES:
            self._fail("the meter prints no line of `SECONDS WATTS`")
        if values:
            self._heard_s = now_s
            self._power_w = math.fsum(values) / len(values)
        elif is_ended:
            self._fail("the meter's program has ended")
        elif now_s - self._heard_s > _SILENCE_S:
            self._fail(f"the meter has printed nothing for {now_s - self._heard_s:.1f} s")
        return self._power_w

    def _parse(self, line: bytes) -> float:
        words = line.split()
        try:
            told_s, power_w = map(float, words)
            check_power(power_w, "the meter")
        except SensorError as error:
            self._fail(str(error))
        except ValueError:
            self._fail(f"the meter printed {line[:40].decode(errors='replace')!r}, not `SECONDS WATTS`")
        if not self._told_s < told_s < math.inf:
            self._fail(f"the meter's time went from {self._told_s:g} to {told_s:g} s")
        self._told_s = told_s
        return power_w

    def _fail(self, problem: str) -> None:
        self._problem, self._power_w = problem, None
        raise SensorError(problem)

    def read_current_a(self) -> float | None:
        return None

    def resolution_w(self) -> float | None:
        return None

    def longest_period_s(self) -> float:
        return _SILENCE_S

    def close(self) -> None:
        """End the program: asked first, killed after a second."""
        program, self._program = self._program, None
        self._rest, self._told_s = b"", -math.inf
        if program is None:
            return
        program.terminate()
        try:
            program.wait(_END_S)
        except subprocess.TimeoutExpired:
            processes.kill_group(program.pid)
            program.wait()
        processes.SPARED.discard(program.pid)
        if program.stdout is not None:
            program.stdout.close()


def add_meter(sensors: PowerSensors, rail: MeterRail) -> PowerSensors:
    """Return the sensors with a meter beside them; it is the total where they have none."""
    rails = [*map(sensors.rail, sensors.rails), rail]
    if not sensors.total_rails:
        return PowerSensors(rails, (NAME,), _SCOPE)
    return PowerSensors(rails, sensors.total_rails, sensors.total_scope, sensors.note, sensors.inputs)


def compare_meter(window: PowerWindow) -> tuple[float, float, float] | None:
    """Return the meter's power over the rails' total in a window, with the interval that both intervals allow; None
    without both.
    """
    mine = next((rail for rail in window.rails if rail.rail == NAME), None)
    total = window.total
    if mine is None or total is None or total.rail == NAME or total.power_ci_w[0] <= 0:
        return None
    (low_w, high_w), (least_w, most_w) = mine.power_ci_w, total.power_ci_w
    return mine.power_w / total.power_w, low_w / most_w, high_w / least_w
