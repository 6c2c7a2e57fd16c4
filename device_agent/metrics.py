"""`device-agent metrics`: export a board's sensors to Prometheus, on loopback only, read at each scrape.

A separate process, because the agent's listener forks and must stay single-threaded. It only reads kernel files and
needs no agent.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from device_agent import processes
from device_agent.errors import AgentError, SensorError
from device_agent.protocol.hardware import Fan
from device_agent.session.board import Board
from device_agent.sysfs import list_names, read_int, read_text

HOST = "127.0.0.1"
_PREFIX = "device_agent_"
_MAX_PWM = 255
# The kernel's number for a listening socket (include/net/tcp_states.h).
_LISTEN = "0A"
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

Family = GaugeMetricFamily | CounterMetricFamily

_log = logging.getLogger(__name__)


class PortBusyError(AgentError):
    """Another program listens on the port."""


class BoardMetrics(Collector):
    """Read the board on every scrape, one scrape at a time. Unreadable values are absent, never zero."""

    def __init__(self, board: Board, agent_port: int, fan: Fan | None = None) -> None:
        """`agent_port` is the agent's port; `fan` the board type's fan files."""
        self._board, self._agent_port = board, agent_port
        self._fan = fan or Fan()
        self._lock = threading.Lock()

    def describe(self) -> Iterable[Family]:
        """Return nothing: the registry would otherwise read the board to learn metric names."""
        return ()

    def collect(self) -> Iterator[Family]:
        with self._lock:
            began = time.monotonic()
            families = [*self._identity(), *self._sensors(), *self._clocks(), *self._power(), *self._fans()]
            took_s = time.monotonic() - began
        yield from families
        yield _gauge("read_duration_seconds", "How long reading all of this took.", {(): took_s})

    def _identity(self) -> Iterator[Family]:
        board = self._board
        who = (board.name, board.board_type, board.version, "true" if board.tree.simulated else "false")
        yield _gauge(
            "info",
            "Always 1; which board this is. Values of a simulated one come from a model.",
            {who: 1},
            # Not `board` and `board_type`: the scraper labels its targets with those.
            "name",
            "type",
            "version",
            "simulated",
        )
        yield _gauge("up", "Whether an agent listens on its port.", {(): _is_listening(self._agent_port)})

    def _sensors(self) -> Iterator[Family]:
        tree, evidence = self._board.tree, self._board.evidence.read()
        yield _gauge("temperature_celsius", "By thermal zone.", _labelled(evidence.temperature_c), "zone")
        yield _gauge(
            "cooling_state",
            "How far a cooling device slows the board down; 0 is not at all. The kernel's steps.",
            _labelled(evidence.cooling),
            "device",
        )
        yield _gauge(
            "alarm",
            "Over-current alarms: a flag, or how many there were since boot.",
            _labelled(evidence.alarms),
            "source",
        )
        if evidence.load_1min is not None:
            yield _gauge("load1", "Load average over one minute.", {(): evidence.load_1min})
        if evidence.busy_s is not None:
            busy = CounterMetricFamily(f"{_PREFIX}cpu_busy_seconds_total", "CPU time used since boot, over all cores.")
            busy.add_metric((), evidence.busy_s)
            yield busy
        memory = read_text(tree, "/proc/meminfo") or ""
        for key, name, text in (
            ("MemTotal", "memory_total_bytes", "Memory that Linux may use."),
            ("MemAvailable", "memory_available_bytes", "Memory that a program could still get."),
        ):
            if found := re.search(rf"^{key}:\s+(\d+) kB", memory, re.MULTILINE):
                yield _gauge(name, text, {(): int(found.group(1)) * 1024})
        uptime = (read_text(tree, "/proc/uptime") or "").split()
        if uptime:
            yield _gauge("uptime_seconds", "Since the board's last boot.", {(): float(uptime[0])})

    def _clocks(self) -> Iterator[Family]:
        clocks = self._board.read_clocks()
        domains = [*clocks.clusters, *filter(None, (clocks.gpu, clocks.memory))]
        now = {one.name: float(one.current_hz) for one in domains if one.current_hz is not None}
        limit = {one.name: float(one.max_hz) for one in domains if one.max_hz is not None}
        yield _gauge("clock_hertz", "Clocks now: CPU clusters, gpu, memory.", _labelled(now), "domain")
        yield _gauge("clock_limit_hertz", "The highest that each clock may reach now.", _labelled(limit), "domain")
        gpu = self._board.platform.gpu
        if gpu is not None and (load := gpu.read_load()) is not None:
            yield _gauge("gpu_load_ratio", "Share of time that the GPU was busy lately, by its driver.", {(): load})
        yield _gauge(
            "cores_online", "CPU cores that are online.", {(): sum(len(one.online) for one in clocks.clusters)}
        )
        yield _gauge("clocks_held", "Whether a client holds the clocks.", {(): bool(clocks.holder)})
        yield _gauge("clocks_unsafe", "Whether clocks could not be restored.", {(): bool(clocks.unsafe)})

    def _power(self) -> Iterator[Family]:
        self._board.look_again()
        power_w: dict[str, float] = {}
        for rail in self._board.power.rails:
            with contextlib.suppress(SensorError):
                if (value := self._board.power.read(rail)) is not None:
                    power_w[rail] = value
        yield _gauge("power_watts", "By rail. Rails may contain each other.", _labelled(power_w), "rail")

    def _fans(self) -> Iterator[Family]:
        tree = self._board.tree
        duty = {("fan",): read_int(tree, self._fan.pwm)} if self._fan.pwm else {}
        rpm = {("fan",): read_int(tree, self._fan.rpm)} if self._fan.rpm else {}
        for chip in list_names(tree, "/sys/class/hwmon"):
            folder = f"/sys/class/hwmon/{chip}"
            name = read_text(tree, f"{folder}/name") or chip
            for file in list_names(tree, folder, "pwm[0-9]"):
                duty[f"{name}.{file}",] = read_int(tree, f"{folder}/{file}")
            for file in list_names(tree, folder, "fan[0-9]_input"):
                rpm[f"{name}.{file.removesuffix('_input')}",] = read_int(tree, f"{folder}/{file}")
        yield _gauge(
            "fan_duty_ratio",
            "What a fan is set to, 0 to 1.",
            {labels: value / _MAX_PWM for labels, value in duty.items() if value is not None},
            "fan",
        )
        yield _gauge(
            "fan_speed_hertz",
            "Revolutions per second.",
            {labels: value / 60 for labels, value in rpm.items() if value is not None},
            "fan",
        )


def run(chosen: argparse.Namespace, board: Board) -> int:
    """Serve until SIGTERM, SIGINT or SIGHUP. Raises PortBusyError."""
    if chosen.exit_with_parent:
        processes.die_with_parent(os.getppid())
    registry = CollectorRegistry(auto_describe=False)
    registry.register(BoardMetrics(board, chosen.agent_port, board.facts.fan if board.facts else None))
    # Before any thread starts, so that only this thread takes the signal.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        server, _ = start_http_server(chosen.port, HOST, registry)
    except OSError as error:
        raise PortBusyError(f"{HOST}:{chosen.port}: {error.strerror}; give another --port") from error
    _log.info("metrics of %s on http://%s:%d/metrics", board.key, HOST, server.server_address[1])
    try:
        signal.sigwait(_SIGNALS)
    finally:
        server.shutdown()
        server.server_close()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    return 0


def _gauge(name: str, text: str, values: Mapping[tuple[str, ...], float], *labels: str) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"{_PREFIX}{name}", text, labels=labels)
    for found, value in values.items():
        family.add_metric(found, float(value))
    return family


def _labelled(values: Mapping[str, float]) -> dict[tuple[str, ...], float]:
    return {(name,): value for name, value in values.items()}


def _is_listening(port: int) -> bool:
    """Whether a process listens on a TCP port of this machine; opens no connection."""
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(path).read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == _LISTEN and int(words[1].rpartition(":")[2], 16) == port:
                    return True
    return False
