"""The doctor's hops of an SSH connection to a board, each tested on a connection of its own.

`doctor_agent` has the hops after the connection.
"""

from __future__ import annotations

import contextlib
import socket
import time

from device_agent.protocol import load_json
from farm.connectivity import host_keys
from farm.connectivity.board_logs import AGENT_UNIT, HELPER_UNIT, PREFIXES, plan_log_command, plan_unit_test
from farm.connectivity.host_keys import KnownHosts, load_user_keys
from farm.connectivity.ssh import SshConnection
from farm.connectivity.ssh_handshake import SshAddress, fetch_host_key
from farm.errors import DeadlineError, PermanentError, TransientError, UsageError
from farm.services.checks import Doubt, Work
from farm.values import Ssh

# For the hop `tcp`.
_TCP_TIMEOUT_S = 10.0
# For a short command on the board.
_EXEC_TIMEOUT_S = 15.0
# TLS certificates and logs depend on the clock; nothing of the farm's does.
_CLOCK_TOLERANCE_S = 60.0
# A candidate's library and a model with its inputs, as in `device-agent doctor`.
_NEEDED_BYTES = 1 << 30
_KIB = 1024

_MACHINE = (
    "echo architecture $(uname -m); echo libc $(getconf GNU_LIBC_VERSION 2>/dev/null || echo unknown); "
    'echo now $(date +%s); echo free $(df -Pk "${TMPDIR:-/tmp}" | tail -n 1); echo uptime $(cat /proc/uptime)'
)
_SERVICES = (
    f"if {plan_unit_test()}; then echo systemd $(systemctl is-active {AGENT_UNIT} {HELPER_UNIT}); else "
    f"for prefix in {' '.join(f'{chr(34)}{prefix}{chr(34)}' for prefix in PREFIXES)}; do "
    'if [ -x "$prefix/bin/tvm-farm-board" ]; then echo supervisor $("$prefix/bin/tvm-farm-board" status); exit 0; fi; '
    "done; echo none; fi"
)


class SshHops:
    """The connection to one board, from the key file to the services on it. `close` closes what `login` opens."""

    def __init__(self, name: str, transport: Ssh, address: SshAddress, known_hosts: KnownHosts) -> None:
        self._name, self._transport, self._address, self._known_hosts = name, transport, address, known_hosts
        self.connection: SshConnection | None = None

    def plan(self) -> list[tuple[str, Work]]:
        """List the hops in order; each needs those before it."""
        return [
            ("ssh key", self._key),
            ("tcp", self._tcp),
            ("host key", self._host_key),
            ("ssh login", self._login),
            ("machine", self._machine),
            ("forwarding", self._forwarding),
            ("services", self._services),
        ]

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def read_log_tail(self) -> str:
        """Return the end of the agent's log on one line, empty where it is unreadable."""
        with contextlib.suppress(TransientError, PermanentError, UsageError):
            said = self._run(plan_log_command(5))
            return " | ".join(line for line in said.splitlines() if line and not line.startswith("==>"))
        return ""

    def _key(self) -> str:
        address = self._address
        keys = load_user_keys((address.key_file, *address.more_keys), address.agent, address.only_these_keys)
        return "; ".join(f"{each.name}, {host_keys.fingerprint(each.key.asbytes())}" for each in keys)

    def _tcp(self) -> str:
        # Behind other hosts, TCP reaches the first of them only; the login tests the rest of the route.
        first = self._address.jumps[0] if self._address.jumps else self._address
        host, port = first.endpoint or first.host, first.port
        began = time.monotonic()
        try:
            with socket.create_connection((host, port), timeout=_TCP_TIMEOUT_S) as sock:
                peer = sock.getpeername()[0]
        except TimeoutError:
            raise DeadlineError(
                f"{first} did not answer within {_TCP_TIMEOUT_S:g} s",
                "Is it switched on, and on this network? A firewall that drops looks the same.",
            ) from None
        except ConnectionRefusedError:
            raise TransientError(
                f"{first} refuses connections",
                "The machine is up and no SSH server listens there: check the port, and sshd on the board.",
            ) from None
        except OSError as error:
            raise TransientError(
                f"{first} cannot be reached: {error.strerror or error}", "Check the address and the network."
            ) from error
        return f"{first}{'' if peer == host else f' ({peer})'} in {(time.monotonic() - began) * 1e3:.0f} ms"

    def _host_key(self) -> str:
        pins = [self._address.host_key] if self._address.host_key else []
        where = "the registration" if pins else str(self._known_hosts.path)
        pins = pins or [key.fingerprint for key in self._known_hosts.find(self._address.host, self._address.port)]
        if not pins:
            key = fetch_host_key(self._address, known_hosts=self._known_hosts)
            raise PermanentError(
                f"its host key is not confirmed: {key.fingerprint} ({key.kind})",
                f"Compare it with what the board itself prints, then: farm board trust {self._name}",
            )
        key = fetch_host_key(self._address, wanted=pins, known_hosts=self._known_hosts)
        return f"{key.fingerprint} ({key.kind}), as in {where}"

    def _login(self) -> str:
        self.connection = SshConnection.connect(self._address, self._known_hosts)
        return f"as {self._address.user}, {self.connection.peer_name}"

    def _machine(self) -> str | Doubt:
        before = time.time()
        said = self._run(_MACHINE)
        local = (before + time.time()) / 2
        facts = dict(line.partition(" ")[::2] for line in said.splitlines())
        doubts, advice = [], []
        try:
            offset_s = int(facts["now"]) - local
            free_bytes = int(facts["free"].split()[3]) * _KIB
            up_h = float(facts["uptime"].split()[0]) / 3600
        except (KeyError, ValueError, IndexError):
            return Doubt(f"its answer cannot be read: {' '.join(said.split())[:120]}", "Is it a Linux board?")
        if abs(offset_s) > _CLOCK_TOLERANCE_S:
            doubts.append(f"its wall clock is {_format_span(abs(offset_s))} {'ahead' if offset_s > 0 else 'behind'}")
            advice.append("Nothing of the farm depends on its wall clock; logs and certificates do: set up NTP.")
        if free_bytes < _NEEDED_BYTES:
            doubts.append(f"only {free_bytes >> 20} MiB are free for temporary files")
            advice.append("Free 1 GiB.")
        summary = f"{facts.get('architecture', '?')}, {facts.get('libc', '?')}, up for {up_h:.1f} h"
        if doubts:
            return Doubt(f"{summary}; {'; '.join(doubts)}", " ".join(advice))
        return f"{summary}, wall clock within {max(1.0, abs(offset_s)):.0f} s, {free_bytes / 2**30:.1f} GiB free"

    def _forwarding(self) -> str | Doubt:
        assert self.connection is not None
        port = self._transport.agent_port
        # The port has no listener: only sshd's own answer counts.
        self.connection.listen(0, lambda channel: channel.close())
        try:
            self.connection.open_to(port).close()
        except TransientError:
            return Doubt(
                f"sshd forwards, and nothing listens on port {port} of the board",
                "The agent does not run, or on another port. `farm board provision` installs it.",
            )
        return f"to port {port} of the board and back"

    def _services(self) -> str | Doubt:
        kind, _, rest = self._run(_SERVICES).strip().partition(" ")
        logs = f"See: farm board logs {self._name}"
        if kind == "systemd":
            states = dict(zip((AGENT_UNIT, HELPER_UNIT), rest.split(), strict=False))
            summary = ", ".join(f"{unit} {state}" for unit, state in states.items())
            if states.get(AGENT_UNIT) != "active":
                raise PermanentError(f"{summary}: {self.read_log_tail()}", logs)
            return summary if states.get(HELPER_UNIT) == "active" else Doubt(summary, logs)
        if kind == "supervisor":
            services: dict[str, bool] = {}
            with contextlib.suppress(ValueError, AttributeError, LookupError, TypeError):  # no answer of a supervisor
                for name, facts in load_json(rest)["services"].items():
                    services[name] = bool(facts.get("pid") if isinstance(facts, dict) else facts)
            if not services.get("agent"):
                raise PermanentError(f"the agent does not run: {self.read_log_tail()}", logs)
            return "supervised: " + ", ".join(f"{name} {'up' if up else 'down'}" for name, up in services.items())
        return Doubt(
            "no installation in the usual places; the agent may have been started by hand",
            f"farm board provision {self._name}",
        )

    def _run(self, command: str) -> str:
        """Return a command's output, at any exit code: one of its parts may be missing."""
        assert self.connection is not None
        return self.connection.exec(command, _EXEC_TIMEOUT_S).out.decode(errors="replace")


def _format_span(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
