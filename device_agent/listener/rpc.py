"""The listening loop: speak TVM's RPC server handshake and fork one session process per client.

One thread, no TVM calls of its own. A client's work runs in the session process (`session.py`), whose death ends only
that client. Registration with the tracker is in `tracker.py`. While a session runs, other clients wait; a fence is
answered at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from device_agent import processes
from device_agent.listener.tracker import Greeting, TrackerLink
from device_agent.protocol import (
    FENCE_PREFIX,
    ClaimStatus,
    LeaseClaim,
    parse_fence_key,
)
from device_agent.session.fencing import FILE_NAME, Claimant, ClaimLine, Fences

# A session ends when its client closes; one inside a function does not notice, and is killed after this.
_GONE_GRACE_S = 0.2
# How often the parent is polled if the kernel cannot signal its death.
_PARENT_CHECK_S = 0.5
# Clients accepted while another is served, so that fences among them are seen; more wait in the kernel's queue.
# A tracker sends no clients meanwhile.
_MAX_WAITING = 64
_log = logging.getLogger(__name__)


class AllPortsBusyError(OSError):
    """No port of the range can be bound."""


def open_listener(host: str, first_port: int, last_port: int) -> socket.socket:
    """Listen on the first free port of the range. Raises AllPortsBusyError, or OSError for an invalid host."""
    family, kind, protocol, _, _ = socket.getaddrinfo(host, first_port, type=socket.SOCK_STREAM)[0]
    for port in range(first_port, last_port + 1):
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(16)
        except OSError as error:
            listener.close()
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            continue
        listener.setblocking(False)
        return listener
    raise AllPortsBusyError(f"every port from {first_port} to {last_port} of {host} is in use")


@dataclasses.dataclass
class _Session:
    """The client that holds the board, and its process."""

    pid: int
    sock: socket.socket
    peer: str
    folder: Path
    started: float
    expires: float | None  # monotonic; from the client's -timeout= option
    timeout_s: float
    line: ClaimLine
    gone_at: float | None = None

    @property
    def holder(self) -> str:
        """Describe the client."""
        lasted_s = time.monotonic() - self.started
        if (claim := self.line.claim) is None:
            return f"a client that is not the farm ({self.peer}), for {lasted_s:.0f} s"
        return f"{claim.owner or self.peer} for {claim.purpose or 'an unnamed purpose'} (lease {claim.token})"


class Listener:
    """Serves one client at a time until SIGTERM, SIGINT or the parent's death.

    `serve` runs in a forked process with the client's socket, an empty work folder and the session's claimant.
    `on_ready` is called once, when clients can connect (with a tracker: once registered). `state_dir` keeps the latest
    leases; None: for this process's lifetime.
    """

    def __init__(
        self,
        listener: socket.socket,
        key: str,
        tracker: TrackerLink | None,
        serve: Callable[[socket.socket, Path, Claimant], None],
        on_ready: Callable[[], None],
        parent: int | None = None,
        on_timeout: Callable[[socket.socket, str], None] | None = None,
        before_session: Callable[[], None] = lambda: None,
        state_dir: Path | None = None,
    ) -> None:
        self._listener = listener
        self._key = key
        self._tracker = tracker
        self._serve = serve
        self._on_ready: Callable[[], None] | None = on_ready
        self._on_timeout, self._before_session = on_timeout, before_session
        self._parent = parent
        self._fences = Fences(None if state_dir is None else state_dir / FILE_NAME)
        self._greetings: list[Greeting] = []
        self._waiting: list[Greeting] = []
        self._session: _Session | None = None
        self._stopping = ""
        self._sessions_served = 0

    def run(self) -> None:
        """Serve until stopped; leave no process, folder or registration behind."""
        processes.become_subreaper()
        with contextlib.ExitStack() as stack:
            wakeup_read, wakeup_write = socket.socketpair()
            stack.callback(wakeup_read.close)
            stack.callback(wakeup_write.close)
            wakeup_read.setblocking(False)
            wakeup_write.setblocking(False)
            signal.set_wakeup_fd(wakeup_write.fileno(), warn_on_full_buffer=False)
            stack.callback(signal.set_wakeup_fd, -1)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, self._on_stop_signal)
            signal.signal(signal.SIGCHLD, lambda *_: None)
            self._folder = stack.enter_context(processes.work_folder())
            stack.callback(self._end_everything)
            if self._tracker is not None:
                self._tracker.offer(time.monotonic())
            while not self._stopping:
                self._step(wakeup_read)
            _log.info("stopping: %s", self._stopping)

    def _on_stop_signal(self, number: int, _frame: object) -> None:
        self._stopping = signal.Signals(number).name

    def _step(self, wakeup: socket.socket) -> None:
        now = time.monotonic()
        due = self._do_what_is_due(now)
        poll = select.poll()
        poll.register(wakeup, select.POLLIN)
        tracked = self._tracker.watched() if self._tracker else None
        if tracked is not None:
            poll.register(*tracked)
        if len(self._waiting) < _MAX_WAITING:
            poll.register(self._listener, select.POLLIN)
        for greeting in self._greetings:
            poll.register(greeting.sock, select.POLLIN)
        for greeting in self._waiting:
            poll.register(greeting.sock, select.POLLRDHUP)  # hang-ups only: a later session reads the bytes
        if self._session is not None:
            if not self._session.line.is_closed:
                poll.register(self._session.line.sock, select.POLLIN)
            if self._session.gone_at is None:
                poll.register(self._session.sock, select.POLLRDHUP)
        timeout_ms = None if due is None else max(0.0, (due - now) * 1000)
        ready = dict(poll.poll(timeout_ms))
        now = time.monotonic()
        if wakeup.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                wakeup.recv(4096)
        if tracked is not None and self._tracker is not None and tracked[0] in ready:
            self._tracker.handle(ready[tracked[0]], now)
        if self._session is not None:
            self._look_at_session(self._session, ready, now)
        for greeting in [g for g in self._waiting if g.sock.fileno() in ready]:
            self._drop(greeting, "it left before its turn")
        for greeting in [g for g in self._greetings if g.sock.fileno() in ready]:
            self._continue_greeting(greeting, now)
        if self._listener.fileno() in ready:
            self._accept(now)

    def _look_at_session(self, session: _Session, ready: Mapping[int, int], now: float) -> None:
        if session.line.sock.fileno() in ready:
            session.line.answer(self._fences)
        if session.gone_at is None and session.sock.fileno() in ready:
            session.gone_at = now

    def _do_what_is_due(self, now: float) -> float | None:
        """Handle deadlines and dead children; return the next deadline, None without one."""
        due: list[float] = []
        if self._parent is not None:
            if os.getppid() != self._parent:
                self._stopping = "the parent process is gone"
            due.append(now + _PARENT_CHECK_S)
        if self._session is not None:
            due += self._watch_session(self._session, now)
        if self._session is None and self._waiting:
            self._admit(self._waiting[0], now)
            due.append(now)  # look again at once: a new session has a deadline of its own
        if self._tracker is not None:
            due.append(self._tracker.tick(now))
        for greeting in [g for g in self._greetings if now >= g.deadline]:
            self._drop(greeting, "it said nothing")
        due += [greeting.deadline for greeting in self._greetings]
        if self._on_ready is not None and (self._tracker is None or self._tracker.registered):
            self._on_ready()
            self._on_ready = None
        return 0.0 if self._stopping else min(due, default=None)

    def _accept(self, now: float) -> None:
        greeting = Greeting.accept(self._listener, now)
        if greeting is not None:
            self._greetings.append(greeting)
            self._continue_greeting(greeting, now)

    def _continue_greeting(self, greeting: Greeting, now: float) -> None:
        try:
            key = greeting.read()
        except (OSError, ValueError) as error:
            self._drop(greeting, str(error))
            return
        if key is None:
            return
        if key.startswith(FENCE_PREFIX):
            self._answer_fence(greeting, key)
        elif self._session is not None or self._waiting:  # first come, first served
            self._greetings.remove(greeting)
            self._waiting.append(greeting)
        else:
            self._admit(greeting, now)

    def _admit(self, greeting: Greeting, now: float) -> None:
        """Start the session of a client with the right key."""
        try:
            wanted, *options = (greeting.key or "").split() or [""]
            timeout_s = sum(float(o.removeprefix("-timeout=")) for o in options if o.startswith("-timeout="))
            expected = self._tracker.match_key if self._tracker else self._key
            if wanted != f"client:{expected}":
                greeting.refuse()
                raise ValueError("its match key is not the current one")
            greeting.accept_with(f"server:{self._key}")
            self._start_session(greeting, timeout_s, now)
        except (OSError, ValueError) as error:
            self._drop(greeting, str(error))

    def _answer_fence(self, greeting: Greeting, key: str) -> None:
        """Record a lease as the latest of its store, and end the session of an earlier one."""
        try:
            claim = parse_fence_key(key)
        except ValueError as error:
            greeting.refuse()
            self._drop(greeting, str(error))
            return
        report = self._fences.raise_to(claim)
        if report.status is not ClaimStatus.REFUSED and self._evict(claim):
            report = dataclasses.replace(report, status=ClaimStatus.EVICTED)
        if self._session is not None:
            report = dataclasses.replace(report, holder=self._session.holder)
        with contextlib.suppress(OSError):
            greeting.accept_with(report.to_json())
        self._drop(greeting, f"a fence of lease {claim.token}: {report.status}", logging.DEBUG)

    def _evict(self, claim: LeaseClaim) -> bool:
        """End a session with an earlier lease of the same store; one without a claim stays."""
        session = self._session
        if session is None:
            return False
        # A claim that the session sent before it was stopped counts.
        session.line.answer(self._fences)
        held = session.line.claim
        if held is None or held.store != claim.store or held.token >= claim.token:
            return False
        self._end_session(session, f"killed: its lease {held.token} is over, {claim.owner} has lease {claim.token}")
        return True

    def _drop(self, greeting: Greeting, reason: str, level: int = logging.INFO) -> None:
        _log.log(level, "refused %s: %s" if level == logging.INFO else "%s: %s", greeting.peer, reason)
        greeting.sock.close()
        for known in (self._greetings, self._waiting):
            if greeting in known:
                known.remove(greeting)

    def _start_session(self, greeting: Greeting, timeout_s: float, now: float) -> None:
        """Fork a session. Raises OSError when the board lacks processes, memory or disk space."""
        self._before_session()
        self._sessions_served += 1
        folder = self._folder / f"session-{self._sessions_served}"
        folder.mkdir(parents=True)
        sock = greeting.sock
        sock.setblocking(True)
        line, theirs = ClaimLine.open()
        others = [other.sock for other in (*self._greetings, *self._waiting) if other is not greeting]

        def body() -> None:
            os.chdir(folder)
            for inherited in (self._listener, line.sock, *others):
                inherited.close()
            if self._tracker is not None:
                self._tracker.close()
            self._serve(sock, folder, Claimant(theirs))

        try:
            pid = processes.fork(body)
        except OSError:
            line.close()
            raise
        finally:
            theirs.close()
        expires = now + timeout_s if timeout_s > 0 else None
        self._session = _Session(pid, sock, greeting.peer, folder, now, expires, timeout_s, line)
        _log.info("session %d for %s started, pid %d", self._sessions_served, greeting.peer, pid)
        for known in (self._greetings, self._waiting):
            if greeting in known:
                known.remove(greeting)
        if self._tracker is not None:
            self._tracker.withdraw()

    def _watch_session(self, session: _Session, now: float) -> list[float]:
        if processes.has_ended(session.pid):
            self._end_session(session, "its process ended")
            return []
        if session.gone_at is not None and now >= session.gone_at + _GONE_GRACE_S:
            self._end_session(session, "killed: its client is gone")
            return []
        if session.expires is not None and now >= session.expires:
            processes.kill_group(session.pid)
            if self._on_timeout is not None:
                self._on_timeout(session.sock, f"the session's {session.timeout_s:g} s are over (session_timeout)")
            self._end_session(session, f"killed: its {session.timeout_s:g} s are over")
            return []
        dues = [session.expires, None if session.gone_at is None else session.gone_at + _GONE_GRACE_S]
        return [due for due in dues if due is not None]

    def _end_session(self, session: _Session, how: str) -> None:
        """Kill the rest of a session, remove its folder, offer the board again."""
        processes.kill_group(session.pid)
        status = processes.reap(session.pid, time.monotonic() + processes.KILL_TIMEOUT_S)
        if not processes.kill_children():
            _log.error("session %d left a process that does not die: %s", session.pid, processes.find_children())
        end = "does not die" if status is None else processes.describe_end(status)
        session.sock.close()
        session.line.close()
        processes.remove_folder(session.folder)
        self._session = None
        lasted_s = time.monotonic() - session.started
        _log.info("session of %s ended after %.1f s: %s (%s)", session.peer, lasted_s, how, end)
        if self._tracker is not None and not self._stopping:
            self._tracker.offer(time.monotonic())

    def _end_everything(self) -> None:
        self._stopping = self._stopping or "an error"
        self._listener.close()
        if self._tracker is not None:
            self._tracker.close()
        for greeting in (*self._greetings, *self._waiting):
            greeting.sock.close()
        if self._session is not None:
            self._end_session(self._session, "killed: the agent stops")
